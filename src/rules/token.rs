//! Fencing tokens: `epoch << 42 | counter`, each higher than any before it.
//!
//! A sequence alone goes back when its server does: a promoted standby has not heard of the last ones, two standbys
//! promoted from one backup draw the same. So the epoch rises with the server's timeline, and the counter is kept from
//! falling far behind the clock.

const COUNTER_BITS: u32 = 42;
const MAX_COUNTER: i64 = (1 << COUNTER_BITS) - 1;
const MAX_EPOCH: i64 = i64::MAX >> COUNTER_BITS;

/// 2025-01-01 UTC in microseconds of the server's clock, which counts from 2000-01-01.
const COUNTER_START: i64 = 9_132 * 86_400 * 1_000_000;
/// The counter may be so many milliseconds behind the clock, so that it need not be raised for each grant.
const MAX_LAG: i64 = 60_000;

/// The part that counts histories of the database.
pub fn epoch(token: i64) -> i64 {
    token >> COUNTER_BITS
}

/// The part that counts grants.
pub fn counter(token: i64) -> i64 {
    token & MAX_COUNTER
}

/// The counter that a time stands for, in milliseconds since 2025; `wall` in microseconds of the server's clock.
fn counter_at(wall: i64) -> i64 {
    (wall.saturating_sub(COUNTER_START) / 1_000).clamp(0, MAX_COUNTER)
}

/// Whether the sequence has to be raised before a token is handed out, if it was last on the same timeline: another
/// server with the same history, or this database before a restore, may have handed it out.
pub fn lags(token: i64, wall: i64) -> bool {
    counter(token) + MAX_LAG < counter_at(wall)
}

/// To what the sequence is raised from `token`, which was just drawn. `stored` is the timeline on which tokens were last
/// drawn (0: on none), `current` the server's.
pub fn raised(token: i64, stored: i64, current: i64, wall: i64) -> i64 {
    let epochs = if stored == current { 0 } else { (current - stored).max(1) };
    let epoch = epoch(token).saturating_add(epochs);
    if epoch > MAX_EPOCH {
        return i64::MAX; // the next draw fails, and none comes twice
    }
    epoch << COUNTER_BITS | counter(token).max(counter_at(wall))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SECOND: i64 = 1_000_000;
    const NOW: i64 = COUNTER_START + 700 * 86_400 * SECOND;

    #[test]
    fn the_first_token_takes_epoch_and_time() {
        let first = raised(1, 0, 1, NOW);
        assert_eq!((epoch(first), counter(first)), (1, 700 * 86_400_000));
        assert!(!lags(first, NOW) && !lags(first, NOW + 60 * SECOND));
        assert!(lags(first, NOW + 61 * SECOND));
    }

    #[test]
    fn another_timeline_is_another_epoch() {
        let last = raised(1, 0, 3, NOW);
        assert_eq!(epoch(last), 3);
        // Promoted, also with a clock that is behind; and back on timeline 1 after pg_upgrade.
        assert_eq!(epoch(raised(last, 3, 4, NOW - 3_600 * SECOND)), 4);
        assert!(raised(last, 3, 4, 0) > last);
        assert_eq!(epoch(raised(last, 3, 1, NOW)), 4);
    }

    #[test]
    fn siblings_are_told_apart_by_the_clock() {
        let last = raised(1, 0, 1, NOW);
        let first_sibling = raised(last, 1, 2, NOW + 10 * SECOND);
        let second_sibling = raised(last, 1, 2, NOW + 20 * SECOND);
        assert!(second_sibling > first_sibling + 1_000);
    }

    #[test]
    fn the_end_is_an_error_not_a_beginning() {
        assert_eq!(raised(i64::MAX - 1, 1, 2, NOW), i64::MAX);
        assert_eq!(raised(5, 0, i64::MAX, NOW), i64::MAX);
    }

    proptest! {
        #[test]
        fn raising_never_goes_back(token in 1..i64::MAX, stored in 0..1_000i64, current in 1..1_000i64, wall: i64) {
            prop_assert!(raised(token, stored, current, wall) >= token);
            if stored != current {
                prop_assert!(raised(token, stored, current, wall) > token);
            }
        }

        #[test]
        fn what_was_raised_does_not_lag(token in 1..i64::MAX, wall: i64) {
            prop_assert!(!lags(raised(token, 1, 1, wall), wall));
        }
    }
}
