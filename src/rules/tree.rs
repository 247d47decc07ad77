//! Trees of names: which names the lock of a path takes, and in which modes.
//!
//! The path's own name is locked in the mode asked for, and each name above it in an intent mode, which says that something
//! below is locked: so a lock on `tenant` meets those on `tenant/42`, and they do not meet those on `tenant/43`.

use super::error::Error;
use super::mode::Mode;
use super::name::{Name, display};

/// The most parts of a path.
pub const MAX_PARTS: usize = 32;
const SEPARATOR: u8 = b'/';

/// A path: a name of 1 to [`MAX_PARTS`] parts with `/` between them, none empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Path<'a>(Name<'a>);

impl<'a> Path<'a> {
    /// Checks a path.
    ///
    /// # Errors
    /// Those of [`Name::new`]; [`Error::EmptyPart`], [`Error::TooManyParts`].
    pub fn new(bytes: &'a [u8]) -> Result<Self, Error> {
        let name = Name::new(bytes)?;
        let mut count = 0;
        for part in bytes.split(|&byte| byte == SEPARATOR) {
            if part.is_empty() {
                return Err(Error::EmptyPart { path: display(bytes) });
            }
            count += 1;
        }
        if count > MAX_PARTS { Err(Error::TooManyParts { parts: count }) } else { Ok(Self(name)) }
    }

    /// The whole path as a name.
    pub fn name(self) -> Name<'a> {
        self.0
    }

    /// The paths above it, from the root.
    pub fn ancestors(self) -> impl DoubleEndedIterator<Item = Name<'a>> {
        let bytes = self.0.bytes();
        (0..bytes.len())
            .filter(|&at| bytes[at] == SEPARATOR)
            .map(|end| Name::new(&bytes[..end]).expect("no part is empty, and none as long as the whole"))
    }
}

/// The mode in which the names above a path are locked that is locked in that one.
pub fn intent(mode: Mode) -> Mode {
    match mode {
        Mode::Exclusive | Mode::IntentExclusive | Mode::ShareIntentExclusive => Mode::IntentExclusive,
        Mode::Share | Mode::IntentShare => Mode::IntentShare,
    }
}

/// What the locks are to mean, said in another way: a tree of files, where each session reads and writes some.
///
/// A lock on a path is a claim on files at or under it. `exclusive` writes all of them, `share` reads all. An intent reads,
/// or writes, a file of the session's own there, whose name nobody else has. Locks conflict if one session writes a
/// file that the other reads or writes.
#[cfg(test)]
pub mod file_tree {
    use super::*;

    /// What a lock on a path is.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Kind {
        /// By a tree's call.
        Tree,
        /// By name, without telling the names above.
        Plain,
    }

    /// A lock on a path.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct Claim {
        /// On what.
        pub path: String,
        /// In which mode.
        pub mode: Mode,
        /// How.
        pub kind: Kind,
    }

    impl Claim {
        fn reads_all(&self) -> bool {
            matches!(self.mode, Mode::Share | Mode::ShareIntentExclusive)
        }

        fn writes_all(&self) -> bool {
            self.mode == Mode::Exclusive
        }

        /// The file of its own that it touches, and whether it writes it.
        fn own_file(&self, session: usize) -> Option<(String, bool)> {
            let writes = match self.mode {
                Mode::IntentShare => false,
                Mode::IntentExclusive | Mode::ShareIntentExclusive => true,
                Mode::Exclusive | Mode::Share => return None,
            };
            Some((format!("{}/own file of {session}", self.path), writes))
        }

        /// How it touches a file: not at all, reading (false) or writing (true).
        fn touches(&self, file: &str, session: usize) -> Option<bool> {
            let is_under = file == self.path || file.strip_prefix(&self.path).is_some_and(|rest| rest.starts_with('/'));
            let by_all = if self.writes_all() { Some(true) } else { self.reads_all().then_some(false) };
            let by_own = self.own_file(session).filter(|own| own.0 == file).map(|own| own.1);
            by_all.filter(|_| is_under).max(by_own)
        }

        fn is_above(&self, other: &Claim) -> bool {
            other.path.strip_prefix(&self.path).is_some_and(|rest| rest.starts_with('/'))
        }

        /// Whether two sessions cannot have these locks at once.
        pub fn conflicts_with(&self, other: &Claim) -> bool {
            // Who locks by name alone has told nobody above.
            if self.is_above(other) && other.kind == Kind::Plain || other.is_above(self) && self.kind == Kind::Plain {
                return false;
            }
            let (one, two) = (1, 2);
            let mut files = vec![self.path.clone(), other.path.clone()];
            files.extend(self.own_file(one).map(|own| own.0));
            files.extend(other.own_file(two).map(|own| own.0));
            files.iter().any(|file| match (self.touches(file, one), other.touches(file, two)) {
                (Some(writes), Some(other_writes)) => writes || other_writes,
                _ => false,
            })
        }

        /// The locks that it consists of, as names and modes.
        pub fn locks(&self) -> Vec<(String, Mode)> {
            let mut locks = vec![(self.path.clone(), self.mode)];
            if self.kind == Kind::Tree {
                let above = |mode| match mode {
                    Mode::Share | Mode::IntentShare => Mode::IntentShare,
                    _ => Mode::IntentExclusive,
                };
                for (end, _) in self.path.match_indices('/') {
                    locks.push((self.path[..end].to_owned(), above(self.mode)));
                }
            }
            locks
        }
    }
}

#[cfg(test)]
mod tests {
    use super::file_tree::{Claim, Kind};
    use super::*;
    use proptest::prelude::*;

    fn path(text: &str) -> Result<Path<'_>, Error> {
        Path::new(text.as_bytes())
    }

    fn above(text: &str) -> Vec<String> {
        path(text).unwrap().ancestors().map(|name| display(name.bytes())).collect()
    }

    #[test]
    fn paths_have_names_above_them() {
        assert_eq!(above("a/b/c"), ["a", "a/b"]);
        assert_eq!(above("shop:eu/42"), ["shop:eu"]);
        assert!(above("a").is_empty());
        assert_eq!(path("a/b").unwrap().name().bytes(), b"a/b");
    }

    #[test]
    fn no_part_is_empty() {
        for text in ["/", "/a", "a/", "a//b", "//", "a/b/"] {
            assert!(matches!(path(text), Err(Error::EmptyPart { .. })), "{text}");
        }
        assert!(matches!(path(""), Err(Error::EmptyName)));
        assert!(matches!(path(&"a/".repeat(600)), Err(Error::NameTooLong { .. })));
    }

    #[test]
    fn paths_have_at_most_32_parts() {
        assert_eq!(above(&["x"; 32].join("/")).len(), 31);
        assert!(matches!(path(&["x"; 33].join("/")), Err(Error::TooManyParts { parts: 33 })));
    }

    /// All modes at all positions to each other: the names' locks do what the tree of files says.
    #[test]
    fn locks_conflict_as_the_files_do() {
        let paths = ["a", "b", "ab", "a/x", "a/y", "a/x/1", "a/x/2", "a/xx", "b/x"];
        let claims = || {
            paths.into_iter().flat_map(|path| {
                Mode::ALL.into_iter().flat_map(move |mode| {
                    [Kind::Tree, Kind::Plain].map(|kind| Claim { path: path.to_owned(), mode, kind })
                })
            })
        };
        let locks = |claim: &Claim| -> Vec<(String, Mode)> {
            let path = Path::new(claim.path.as_bytes()).unwrap();
            let own = (claim.path.clone(), claim.mode);
            let above = path.ancestors().map(|name| (display(name.bytes()), intent(claim.mode)));
            above.filter(|_| claim.kind == Kind::Tree).chain([own]).collect()
        };
        for one in claims() {
            for two in claims() {
                let conflict = locks(&one)
                    .iter()
                    .any(|mine| locks(&two).iter().any(|other| mine.0 == other.0 && mine.1.conflicts_with(other.1)));
                assert_eq!(conflict, one.conflicts_with(&two), "{one:?} and {two:?}");
            }
        }
    }

    proptest! {
        #[test]
        fn a_path_is_its_parts(parts in prop::collection::vec("[a-z:é ]{1,6}", 1..=MAX_PARTS)) {
            let text = parts.join("/");
            let path = path(&text).unwrap();
            prop_assert_eq!(path.ancestors().count(), parts.len() - 1);
            for (number, above) in path.ancestors().enumerate() {
                prop_assert_eq!(display(above.bytes()), parts[..=number].join("/"));
            }
        }
    }
}
