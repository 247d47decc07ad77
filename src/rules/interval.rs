//! Timeouts, hold limits and times to live, out of SQL intervals.

use super::error::Error;

const MICROS_PER_MILLI: i128 = 1_000;
const MICROS_PER_DAY: i128 = 86_400_000_000;
const DAYS_PER_MONTH: i128 = 30;

/// The longest timeout: 24 days.
const MAX_TIMEOUT_MICROS: i128 = 24 * MICROS_PER_DAY;
/// The shortest hold limit and time to live: 100 ms.
const MIN_LIMIT_MICROS: i128 = 100 * MICROS_PER_MILLI;
/// The longest hold limit and time to live: 10 years of 365 days.
const MAX_LIMIT_MICROS: i128 = 3650 * MICROS_PER_DAY;

/// A SQL interval's parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interval {
    /// Whole months, of 30 days here, as PostgreSQL compares intervals.
    pub months: i32,
    /// Whole days, of 24 hours here.
    pub days: i32,
    /// Microseconds.
    pub micros: i64,
}

impl Interval {
    /// `interval 'infinity'`, which PostgreSQL has since 17.
    pub const INFINITY: Self = Self { months: i32::MAX, days: i32::MAX, micros: i64::MAX };

    fn total_micros(self) -> i128 {
        (i128::from(self.months) * DAYS_PER_MONTH + i128::from(self.days)) * MICROS_PER_DAY + i128::from(self.micros)
    }
}

/// How long a call may wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// As the server would: `lock_timeout` applies.
    Server,
    /// Not at all: one try.
    Try,
    /// So many milliseconds, at least 1; `lock_timeout` does not apply.
    Millis(i32),
    /// The same, and the call has asked for more than the domain's rule allows.
    Capped(i32),
    /// For ever; `lock_timeout` does not apply.
    Forever,
    /// So many milliseconds, by the domain's rule where the call gives no timeout: an error when they have passed.
    Limited(i32),
}

impl Wait {
    /// Whether the call fails when the wait has run out, as one of the server's would.
    pub fn fails(self) -> bool {
        matches!(self, Wait::Server | Wait::Limited(_))
    }

    /// After how many milliseconds it ends by itself, 0 if never; `lock_timeout` is the server's, in milliseconds. A try does
    /// not wait.
    pub fn millis(self, lock_timeout: i32) -> i32 {
        match self {
            Wait::Server => lock_timeout,
            Wait::Millis(millis) | Wait::Capped(millis) => millis,
            Wait::Limited(millis) => millis.max(1),
            Wait::Try | Wait::Forever => 0,
        }
    }

    /// Out of the argument `timeout`: NULL is [`Wait::Server`], 0 is [`Wait::Try`], milliseconds are rounded up.
    ///
    /// # Errors
    /// [`Error::Timeout`] for a negative one, or one over 24 days.
    pub fn from_timeout(timeout: Option<Interval>) -> Result<Self, Error> {
        let Some(timeout) = timeout else { return Ok(Wait::Server) };
        if timeout == Interval::INFINITY {
            return Ok(Wait::Forever);
        }
        match timeout.total_micros() {
            0 => Ok(Wait::Try),
            micros if (1..=MAX_TIMEOUT_MICROS).contains(&micros) => {
                let millis = (micros + MICROS_PER_MILLI - 1) / MICROS_PER_MILLI;
                Ok(Wait::Millis(millis as i32)) // 24 days fit
            }
            _ => Err(Error::Timeout),
        }
    }
}

/// Microseconds out of the argument `hold_limit`; None for NULL and for infinity.
///
/// # Errors
/// [`Error::HoldLimit`] under 100 ms or over 10 years.
pub fn hold_limit_micros(limit: Option<Interval>) -> Result<Option<i64>, Error> {
    match limit {
        None | Some(Interval::INFINITY) => Ok(None),
        Some(limit) => limit_micros(limit, MIN_LIMIT_MICROS).map(Some).ok_or(Error::HoldLimit),
    }
}

/// Microseconds out of the argument `ttl`.
///
/// # Errors
/// [`Error::Ttl`] under 100 ms or over 10 years.
pub fn ttl_micros(ttl: Interval) -> Result<i64, Error> {
    limit_micros(ttl, MIN_LIMIT_MICROS).ok_or(Error::Ttl)
}

/// Microseconds out of the argument `keep_for`; None for NULL.
///
/// # Errors
/// [`Error::KeepFor`] for a negative one, or one over 10 years.
pub fn keep_for_micros(keep_for: Option<Interval>) -> Result<Option<i64>, Error> {
    keep_for.map(|keep_for| limit_micros(keep_for, 0).ok_or(Error::KeepFor)).transpose()
}

fn limit_micros(limit: Interval, least: i128) -> Option<i64> {
    i64::try_from(limit.total_micros()).ok().filter(|&micros| (least..=MAX_LIMIT_MICROS).contains(&micros.into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const fn interval(months: i32, days: i32, micros: i64) -> Interval {
        Interval { months, days, micros }
    }

    #[test]
    fn timeouts() {
        let day = 86_400_000_000;
        for (timeout, wait) in [
            (None, Wait::Server),
            (Some(interval(0, 0, 0)), Wait::Try),
            (Some(interval(0, 1, -day)), Wait::Try),
            (Some(interval(0, 0, 1)), Wait::Millis(1)),
            (Some(interval(0, 0, 1_000)), Wait::Millis(1)),
            (Some(interval(0, 0, 1_001)), Wait::Millis(2)),
            (Some(interval(0, 24, 0)), Wait::Millis(2_073_600_000)),
            (Some(interval(1, -6, 0)), Wait::Millis(2_073_600_000)),
            (Some(Interval::INFINITY), Wait::Forever),
        ] {
            assert_eq!(Wait::from_timeout(timeout).unwrap(), wait, "{timeout:?}");
        }
        for timeout in [
            interval(0, 0, -1),
            interval(0, 24, 1),
            interval(1, 0, 0),
            interval(i32::MAX, i32::MAX, i64::MAX - 1),
            interval(i32::MIN, i32::MIN, i64::MIN),
        ] {
            assert!(matches!(Wait::from_timeout(Some(timeout)), Err(Error::Timeout)), "{timeout:?}");
        }
    }

    #[test]
    fn hold_limits() {
        assert_eq!(hold_limit_micros(None).unwrap(), None);
        assert_eq!(hold_limit_micros(Some(Interval::INFINITY)).unwrap(), None);
        assert_eq!(hold_limit_micros(Some(interval(0, 0, 100_000))).unwrap(), Some(100_000));
        assert_eq!(hold_limit_micros(Some(interval(0, 3650, 0))).unwrap(), Some(3650 * 86_400_000_000));
        for limit in [interval(0, 0, 99_999), interval(0, 0, 0), interval(0, 0, -1), interval(0, 3650, 1)] {
            assert!(matches!(hold_limit_micros(Some(limit)), Err(Error::HoldLimit)), "{limit:?}");
        }
    }

    #[test]
    fn times_to_live() {
        assert_eq!(ttl_micros(interval(0, 0, 100_000)).unwrap(), 100_000);
        assert_eq!(ttl_micros(interval(0, 3650, 0)).unwrap(), 3650 * 86_400_000_000);
        for ttl in [interval(0, 0, 99_999), interval(0, 0, 0), interval(0, 0, -1), Interval::INFINITY] {
            assert!(matches!(ttl_micros(ttl), Err(Error::Ttl)), "{ttl:?}");
        }
        assert_eq!(keep_for_micros(None).unwrap(), None);
        assert_eq!(keep_for_micros(Some(interval(0, 0, 0))).unwrap(), Some(0));
        for keep_for in [interval(0, 0, -1), interval(0, 3650, 1), Interval::INFINITY] {
            assert!(matches!(keep_for_micros(Some(keep_for)), Err(Error::KeepFor)), "{keep_for:?}");
        }
    }

    proptest! {
        #[test]
        fn a_timeout_is_never_rounded_down(micros in 1..=MAX_TIMEOUT_MICROS as i64) {
            let Wait::Millis(millis) = Wait::from_timeout(Some(interval(0, 0, micros))).unwrap() else {
                panic!("not a bounded wait");
            };
            let excess = i64::from(millis) * 1_000 - micros;
            prop_assert!((0..1_000).contains(&excess));
        }
    }
}
