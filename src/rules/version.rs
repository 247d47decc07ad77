//! Versions: the library's, and those of the scripts that made the extension's objects.

use std::cmp::Ordering;

/// This library's.
pub const LIBRARY: &str = env!("CARGO_PKG_VERSION");

/// How a version stands to another; None where one is no version.
pub fn compare(version: &str, other: &str) -> Option<Ordering> {
    Some(numbers(version)?.cmp(&numbers(other)?))
}

/// Major, minor and patch. What stands behind them, as in `1.2.0-beta.1`, does not count.
fn numbers(version: &str) -> Option<[u32; 3]> {
    let end = version.find(|character: char| !character.is_ascii_digit() && character != '.').unwrap_or(version.len());
    let mut numbers = [0; 3];
    for (number, part) in numbers.iter_mut().zip(version[..end].split('.')) {
        *number = part.parse().ok()?;
    }
    Some(numbers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_count_as_numbers() {
        assert_eq!(numbers("1.10.3"), Some([1, 10, 3]));
        assert!(numbers("1.10.0") > numbers("1.9.9"));
        assert_eq!(numbers("1.2"), Some([1, 2, 0]));
        assert_eq!(numbers("1.2.0-beta.1"), Some([1, 2, 0]));
        assert_eq!(numbers("1.2.0.test"), Some([1, 2, 0]));
        for other in ["", "unknown", "1..2", "-1.0.0", "1.99999999999.0"] {
            assert_eq!(numbers(other), None, "{other}");
        }
    }

    #[test]
    fn versions_compare() {
        assert_eq!(compare(LIBRARY, LIBRARY), Some(Ordering::Equal));
        assert_eq!(compare("0.0.1", LIBRARY), Some(Ordering::Less));
        assert_eq!(compare("99.0.0", LIBRARY), Some(Ordering::Greater));
        assert_eq!(compare("unknown", LIBRARY), None);
        assert_eq!(compare(LIBRARY, "unknown"), None);
    }
}
