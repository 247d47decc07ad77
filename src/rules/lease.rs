//! What a lease is: for how long a grant lasts, and whether there is room for another.
//!
//! All times are in microseconds.

/// What time it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Now {
    /// By the server's wall clock, since 2000-01-01 UTC.
    pub wall: i64,
    /// Which boot of the machine the next is counted from; 0 where that is not known.
    pub boot: i64,
    /// How long the machine has been up, time asleep included.
    pub uptime: i64,
}

/// A point in time by both clocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moment {
    /// By the wall clock.
    pub wall: i64,
    /// Since the boot.
    pub uptime: i64,
}

/// How long a grant lasts.
///
/// While the machine stays up, elapsed time alone counts: the wall clock may be set to anything. On another machine, or
/// after a boot, only the wall clock is left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Term {
    /// The boot that the moments are counted from; 0 where it was not known.
    pub boot: i64,
    /// When the lease was granted.
    pub acquired: Moment,
    /// When it ends.
    pub expires: Moment,
    /// The time to live, from the grant or the last renewal.
    pub ttl: i64,
}

impl Term {
    /// From now on.
    pub fn starting(now: Now, ttl: i64) -> Self {
        let acquired = Moment { wall: now.wall, uptime: now.uptime };
        Self { boot: now.boot, acquired, expires: acquired.plus(ttl), ttl }
    }

    /// Prolonged from now on.
    pub fn renewed(self, now: Now, ttl: i64) -> Self {
        Self { acquired: self.acquired_as_of(now), ..Self::starting(now, ttl) }
    }

    /// To end so long after the grant.
    pub fn kept(self, now: Now, keep_for: i64) -> Self {
        let acquired = self.acquired_as_of(now);
        Self { boot: now.boot, acquired, expires: acquired.plus(keep_for), ttl: keep_for }
    }

    /// What is left; 0 or less: it has expired.
    pub fn remaining(&self, now: Now) -> i64 {
        if self.boot != 0 && self.boot == now.boot {
            self.expires.uptime.saturating_sub(now.uptime)
        } else {
            self.expires.wall.saturating_sub(now.wall).min(self.ttl)
        }
    }

    /// When it was granted, counted from the boot of now.
    fn acquired_as_of(&self, now: Now) -> Moment {
        let elapsed = if self.boot != 0 && self.boot == now.boot {
            now.uptime - self.acquired.uptime
        } else {
            now.wall.saturating_sub(self.acquired.wall).max(0)
        };
        Moment { wall: self.acquired.wall, uptime: now.uptime.saturating_sub(elapsed) }
    }
}

impl Moment {
    fn plus(self, micros: i64) -> Self {
        Self { wall: self.wall.saturating_add(micros), uptime: self.uptime.saturating_add(micros) }
    }
}

/// The session that a bound lease ends with: its process, and a number that tells it from others of that process number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bound {
    /// The process.
    pub pid: i32,
    /// Which of its sessions.
    pub session: u32,
}

/// One grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    /// The fencing token.
    pub token: i64,
    /// Which of the permits it has, from 0.
    pub slot: u16,
    /// How many grants the lease may have at once.
    pub permits: u16,
    /// The OID of the role that acquired it.
    pub role: u32,
    /// What session it ends with, if any.
    pub bound: Option<Bound>,
    /// Released, and kept from others until the term ends.
    pub kept: bool,
    /// How long it lasts.
    pub term: Term,
}

/// The permits that none of the live grants has.
pub fn free_slots(permits: u16, live: impl Iterator<Item = u16>) -> Vec<u16> {
    let mut taken = vec![false; permits.into()];
    for slot in live {
        if let Some(taken) = taken.get_mut(usize::from(slot)) {
            *taken = true;
        }
    }
    (0..permits).filter(|&slot| !taken[usize::from(slot)]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SECOND: i64 = 1_000_000;
    const HOUR: i64 = 3_600 * SECOND;
    const START: Now = Now { wall: 800_000 * HOUR, boot: 7, uptime: 50 * SECOND };

    fn later(micros: i64) -> Now {
        Now { wall: START.wall + micros, uptime: START.uptime + micros, ..START }
    }

    #[test]
    fn a_step_of_the_wall_clock_changes_nothing() {
        let term = Term::starting(START, 10 * SECOND);
        for step in [-HOUR, 0, HOUR] {
            let now = Now { wall: START.wall + step, ..later(4 * SECOND) };
            assert_eq!(term.remaining(now), 6 * SECOND);
            assert_eq!(term.renewed(now, 20 * SECOND).remaining(now), 20 * SECOND);
            assert_eq!(term.kept(now, 5 * SECOND).remaining(now), SECOND);
        }
    }

    #[test]
    fn after_a_boot_the_wall_clock_counts_and_never_adds() {
        let term = Term::starting(START, 10 * SECOND);
        let booted = |step| Now { wall: START.wall + step, boot: 8, uptime: 3 * SECOND };
        assert_eq!(term.remaining(booted(4 * SECOND)), 6 * SECOND);
        assert_eq!(term.remaining(booted(-HOUR)), 10 * SECOND);
        assert!(term.remaining(booted(HOUR)) < 0);
        assert_eq!(term.kept(booted(4 * SECOND), 5 * SECOND).remaining(booted(4 * SECOND)), SECOND);
        let renewed = term.renewed(booted(4 * SECOND), 10 * SECOND);
        assert_eq!((renewed.boot, renewed.acquired.wall), (8, START.wall));
        assert_eq!(renewed.remaining(Now { wall: 0, ..booted(0) }), 10 * SECOND);
    }

    #[test]
    fn without_a_boot_to_count_from_the_wall_clock_counts() {
        let unknown = Now { boot: 0, uptime: 0, ..START };
        let term = Term::starting(unknown, 10 * SECOND);
        assert_eq!(term.remaining(Now { wall: START.wall + 4 * SECOND, ..unknown }), 6 * SECOND);
    }

    #[test]
    fn free_permits() {
        assert_eq!(free_slots(1, [].into_iter()), [0]);
        assert!(free_slots(1, [0].into_iter()).is_empty());
        assert_eq!(free_slots(4, [2, 0, 9].into_iter()), [1, 3]);
    }

    proptest! {
        #[test]
        fn time_only_runs_out(ttl in 1..10 * HOUR, a in 0..10 * HOUR, b in 0..10 * HOUR) {
            let term = Term::starting(START, ttl);
            let (first, second) = (a.min(b), a.max(b));
            prop_assert!(term.remaining(later(first)) >= term.remaining(later(second)));
            prop_assert_eq!(term.remaining(later(ttl)), 0);
        }
    }
}
