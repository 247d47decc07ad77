//! Names of locks and the domains they belong to.

use super::error::Error;

/// The longest name, in bytes of UTF-8.
pub const MAX_NAME_BYTES: usize = 1024;
/// The most different names of a call that takes all of them.
pub const MAX_SET: usize = 10_000;
/// The longest array of names.
pub const MAX_NAMES: usize = 1_000_000;

/// A valid name of a lock: 1 to [`MAX_NAME_BYTES`] bytes, compared byte for byte.
///
/// The bytes are UTF-8, but for databases in SQL_ASCII, where they are whatever the client sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Name<'a>(&'a [u8]);

impl<'a> Name<'a> {
    /// Checks a name.
    ///
    /// # Errors
    /// [`Error::EmptyName`], [`Error::NameTooLong`]: a name is never cut to fit.
    pub fn new(bytes: &'a [u8]) -> Result<Self, Error> {
        match bytes.len() {
            0 => Err(Error::EmptyName),
            1..=MAX_NAME_BYTES => Ok(Self(bytes)),
            bytes => Err(Error::NameTooLong { bytes }),
        }
    }

    /// The whole name.
    pub fn bytes(self) -> &'a [u8] {
        self.0
    }

    /// What stands before the first `:`; empty where there is none.
    pub fn domain(self) -> &'a [u8] {
        domain_of(self.0)
    }
}

/// The domain of a name given as bytes: what stands before the first `:`, empty where there is none.
pub fn domain_of(name: &[u8]) -> &[u8] {
    // Domains are short: a search made for long texts would take longer to begin.
    name.iter().position(|&byte| byte == b':').map_or(&[], |colon| &name[..colon])
}

/// A name as text that can be shown in any database: bytes that are not UTF-8 as `\xNN`.
pub fn display(name: &[u8]) -> String {
    let mut text = String::with_capacity(name.len());
    for chunk in name.utf8_chunks() {
        text.push_str(chunk.valid());
        for byte in chunk.invalid() {
            text.push_str(&format!("\\x{byte:02X}"));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_domain_ends_at_the_first_colon() {
        for (name, domain) in
            [("nightly", ""), ("report:daily", "report"), (":x", ""), ("a:b:c", "a"), ("a:", "a"), ("é:1", "é")]
        {
            assert_eq!(Name::new(name.as_bytes()).unwrap().domain(), domain.as_bytes(), "{name}");
        }
    }

    #[test]
    fn names_have_1_to_1024_bytes() {
        assert!(matches!(Name::new(b""), Err(Error::EmptyName)));
        assert!(Name::new(&[b'a'; 1024]).is_ok());
        assert!(matches!(Name::new(&[b'a'; 1025]), Err(Error::NameTooLong { bytes: 1025 })));
    }

    #[test]
    fn odd_bytes_are_shown_escaped() {
        assert_eq!(display(b"caf\xe9"), "caf\\xE9");
        assert_eq!(display("café".as_bytes()), "café");
    }

    proptest! {
        #[test]
        fn a_domain_is_a_prefix_without_a_colon(bytes in prop::collection::vec(any::<u8>(), 1..1025)) {
            let name = Name::new(&bytes).unwrap();
            prop_assert!(bytes.starts_with(name.domain()));
            prop_assert!(!name.domain().contains(&b':'));
            prop_assert_eq!(name.bytes(), &bytes[..]);
        }
    }
}
