//! Rules for a domain of names.

use super::error::Error;
use super::interval::Wait;

/// What holds for the names in one domain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rule {
    /// The OID of the role whose members alone may use it.
    pub role: Option<u32>,
    /// The longest wait, in milliseconds.
    pub max_wait: Option<i32>,
    /// The longest hold, in microseconds.
    pub max_hold: Option<i64>,
}

impl Rule {
    /// How long a call may wait that asks to wait so; `lock_timeout` is the server's, in milliseconds, 0 for none.
    pub fn cap(&self, wait: Wait, lock_timeout: i32) -> Wait {
        let Some(max_wait) = self.max_wait else { return wait };
        match wait {
            Wait::Server if (1..=max_wait).contains(&lock_timeout) => Wait::Server,
            Wait::Server => Wait::Limited(max_wait),
            Wait::Limited(millis) => Wait::Limited(millis.min(max_wait)),
            Wait::Millis(millis) | Wait::Capped(millis) if millis <= max_wait => wait,
            Wait::Millis(_) | Wait::Capped(_) | Wait::Forever if max_wait > 0 => Wait::Capped(max_wait),
            _ => Wait::Try,
        }
    }

    /// The limit on a session hold that asks for that one.
    ///
    /// # Errors
    /// [`Error::OverMaxHold`].
    pub fn hold_limit(&self, asked: Option<i64>, lock: impl FnOnce() -> String) -> Result<Option<i64>, Error> {
        match (asked, self.max_hold) {
            (Some(asked), Some(max_hold)) if asked > max_hold => {
                Err(Error::OverMaxHold { lock: lock(), what: "hold_limit", max_hold })
            }
            (asked, max_hold) => Ok(asked.or(max_hold)),
        }
    }

    /// Fails where a lease may not be kept from others for so long; `what`: the argument that asks for it.
    ///
    /// # Errors
    /// [`Error::OverMaxHold`].
    pub fn check_lease(&self, what: &'static str, micros: i64, lease: impl FnOnce() -> String) -> Result<(), Error> {
        match self.max_hold {
            Some(max_hold) if micros > max_hold => Err(Error::OverMaxHold { lock: lease(), what, max_hold }),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_are_capped() {
        let rule = Rule { max_wait: Some(500), ..Rule::default() };
        for (asked, lock_timeout, allowed) in [
            (Wait::Try, 0, Wait::Try),
            (Wait::Millis(500), 0, Wait::Millis(500)),
            (Wait::Millis(501), 100, Wait::Capped(500)),
            (Wait::Forever, 100, Wait::Capped(500)),
            (Wait::Server, 0, Wait::Limited(500)),
            (Wait::Server, 501, Wait::Limited(500)),
            (Wait::Server, 500, Wait::Server),
        ] {
            assert_eq!(rule.cap(asked, lock_timeout), allowed, "{asked:?}");
            assert_eq!(Rule::default().cap(asked, lock_timeout), asked);
        }
        // By the rules for several domains: the shortest.
        let longer = Rule { max_wait: Some(600), ..Rule::default() };
        for asked in [Wait::Server, Wait::Forever, Wait::Millis(700), Wait::Try] {
            assert_eq!(rule.cap(longer.cap(asked, 0), 0), rule.cap(asked, 0), "{asked:?}");
            assert_eq!(longer.cap(rule.cap(asked, 0), 0), rule.cap(asked, 0), "{asked:?}");
        }
        let no_wait = Rule { max_wait: Some(0), ..Rule::default() };
        assert_eq!(no_wait.cap(Wait::Millis(1), 0), Wait::Try);
        assert_eq!(no_wait.cap(Wait::Forever, 0), Wait::Try);
        assert_eq!(no_wait.cap(Wait::Server, 0), Wait::Limited(0));
    }

    #[test]
    fn holds_are_limited() {
        let rule = Rule { max_hold: Some(1_000_000), ..Rule::default() };
        let name = || "named lock \"a:b\"".to_owned();
        assert_eq!(rule.hold_limit(None, name).unwrap(), Some(1_000_000));
        assert_eq!(rule.hold_limit(Some(500_000), name).unwrap(), Some(500_000));
        assert!(matches!(rule.hold_limit(Some(1_000_001), name), Err(Error::OverMaxHold { .. })));
        assert_eq!(Rule::default().hold_limit(None, name).unwrap(), None);
        assert!(rule.check_lease("ttl", 1_000_000, name).is_ok());
        assert!(matches!(rule.check_lease("ttl", 1_000_001, name), Err(Error::OverMaxHold { .. })));
    }
}
