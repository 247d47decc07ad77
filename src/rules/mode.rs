//! Lock modes and which of them exclude each other.

use std::fmt;

/// How a lock is held: the lock manager's modes that make sense for names, with its own conflict table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Mode {
    /// Alone. The lock manager's Exclusive.
    Exclusive,
    /// Together with other readers. Share.
    Share,
    /// Something below is held in share mode. RowShare.
    IntentShare,
    /// Something below is held in exclusive mode. RowExclusive.
    IntentExclusive,
    /// This in share mode, and something below in exclusive mode. ShareRowExclusive.
    ShareIntentExclusive,
}

impl Mode {
    /// Every mode, in the order of their numbers here and of the SQL type's labels.
    pub const ALL: [Mode; 5] =
        [Mode::Exclusive, Mode::Share, Mode::IntentShare, Mode::IntentExclusive, Mode::ShareIntentExclusive];

    /// The label of the SQL type `named_lock_mode`.
    pub fn label(self) -> &'static str {
        match self {
            Mode::Exclusive => "exclusive",
            Mode::Share => "share",
            Mode::IntentShare => "intent share",
            Mode::IntentExclusive => "intent exclusive",
            Mode::ShareIntentExclusive => "share intent exclusive",
        }
    }

    /// The mode with that label of the SQL type.
    pub fn from_label(label: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|mode| mode.label() == label)
    }

    /// The lock manager's number of the mode (PostgreSQL's `lockdefs.h`).
    pub fn lockmode(self) -> i32 {
        match self {
            Mode::IntentShare => 2,
            Mode::IntentExclusive => 3,
            Mode::Share => 5,
            Mode::ShareIntentExclusive => 6,
            Mode::Exclusive => 7,
        }
    }

    /// The mode with that number in the lock manager.
    pub fn from_lockmode(lockmode: i32) -> Option<Self> {
        Self::ALL.into_iter().find(|mode| mode.lockmode() == lockmode)
    }

    /// Whether two sessions cannot hold the same lock in these modes at once.
    pub fn conflicts_with(self, other: Mode) -> bool {
        use Mode::{Exclusive, IntentShare, Share};
        match (self, other) {
            (Exclusive, _) | (_, Exclusive) => true,
            (IntentShare, _) | (_, IntentShare) | (Share, Share) => false,
            (Share, _) | (_, Share) => true,
            // Left are intent exclusive, which gets on with itself, and share intent exclusive, which does not.
            (one, two) => one == Mode::ShareIntentExclusive || two == Mode::ShareIntentExclusive,
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.label())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conflicts_are_those_of_the_lock_manager() {
        // Rows and columns in the order of ALL; from the table of lock modes in PostgreSQL's manual.
        const X: bool = true;
        const O: bool = false;
        let table = [
            [X, X, X, X, X], // exclusive
            [X, O, O, X, X], // share
            [X, O, O, O, O], // intent share
            [X, X, O, O, X], // intent exclusive
            [X, X, O, X, X], // share intent exclusive
        ];
        for (one, row) in Mode::ALL.into_iter().zip(table) {
            for (two, conflict) in Mode::ALL.into_iter().zip(row) {
                assert_eq!(one.conflicts_with(two), conflict, "{one} and {two}");
            }
        }
    }

    #[test]
    fn labels_and_numbers_lead_back() {
        for (number, mode) in Mode::ALL.into_iter().enumerate() {
            assert_eq!(mode as usize, number);
            assert_eq!(Mode::from_label(mode.label()), Some(mode));
            assert_eq!(Mode::from_lockmode(mode.lockmode()), Some(mode));
        }
        assert_eq!(Mode::from_label("Exclusive"), None);
        assert_eq!(Mode::from_lockmode(8), None);
    }
}
