//! Fencing tokens: `epoch << 42 | counter`, each higher than any before it.
//!
//! A sequence alone goes back when its server does: a promoted standby has not heard of the last ones, two standbys
//! promoted from one backup draw the same. So the epoch rises with the server's timeline, and the counter is kept from
//! falling far behind the clock.
//!
//! A draw from the sequence reserves [`RESERVED`] tokens at once, which are handed out from a [`Stock`].

const COUNTER_BITS: u32 = 42;
const MAX_COUNTER: i64 = (1 << COUNTER_BITS) - 1;
const MAX_EPOCH: i64 = i64::MAX >> COUNTER_BITS;

/// 2025-01-01 UTC in microseconds of the server's clock, which counts from 2000-01-01.
const COUNTER_START: i64 = 9_132 * 86_400 * 1_000_000;
/// The counter may be so many milliseconds behind the clock, so that it need not be raised for each grant.
const MAX_LAG: i64 = 60_000;

/// So many tokens, from the value drawn on, go with one draw: the increment of the sequence.
pub const RESERVED: i64 = 64;

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
///
/// In a new epoch the counter is the clock, also where the old one was ahead of it: two servers made of one backup take the
/// same step at different times.
pub fn raised(token: i64, stored: i64, current: i64, wall: i64) -> i64 {
    let (epochs, floor) = if stored == current { (0, counter(token)) } else { ((current - stored).max(1), 0) };
    let epoch = epoch(token).saturating_add(epochs);
    if epoch > MAX_EPOCH {
        return i64::MAX; // the next draw fails, and none comes twice
    }
    epoch << COUNTER_BITS | counter_at(wall).max(floor)
}

/// Tokens that were drawn and wait to be handed out, in the order of their numbers. All zero: none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Stock {
    /// Where the sequence stood after the last draw.
    drawn: i64,
    /// The next token, and the one behind the last of its draw.
    next: i64,
    end: i64,
    /// The first of the draw after that; 0 if there is none.
    following: i64,
}

impl Stock {
    /// Hands out a token, and tells whether it is time for another draw; None where one has to be made first. `sequence` is
    /// where the sequence stands: somebody else may have moved it, and then nothing in stock is good any more.
    pub fn take(&mut self, sequence: i64, wall: i64) -> Option<(i64, bool)> {
        if self.next == self.end && self.following != 0 {
            (self.next, self.end) = (self.following, self.following.saturating_add(RESERVED));
            self.following = 0;
        }
        let token = self.next;
        if token == self.end || self.drawn != sequence || self.lags(wall) {
            return None;
        }
        self.next += 1;
        Some((token, self.following == 0 && self.end - self.next == RESERVED / 2))
    }

    /// Whether the next token is too far behind the clock. The next draw need not be.
    pub fn lags(&self, wall: i64) -> bool {
        self.next != self.end && lags(self.next, wall)
    }

    /// The least that a draw may give: no token of it may be lower than one that was in stock.
    pub fn floor(&self) -> i64 {
        if self.following == 0 { self.end } else { self.following.saturating_add(RESERVED) }
    }

    /// Notes a draw. Its tokens are not in stock before they are [added](Self::add).
    pub fn note(&mut self, drawn: i64) {
        self.drawn = drawn;
    }

    /// Adds the tokens of a draw. Where there are enough, or others higher than these, they are never handed out.
    pub fn add(&mut self, drawn: i64) {
        if self.following != 0 || drawn < self.end {
            return;
        }
        if self.next == self.end {
            (self.next, self.end) = (drawn, drawn.saturating_add(RESERVED));
        } else {
            self.following = drawn;
        }
    }

    /// Forgets the tokens, unless the sequence stands where the last draw left it.
    pub fn check(&mut self, sequence: i64) {
        if self.drawn != sequence {
            self.clear();
        }
    }

    /// Forgets the tokens, but for the floor: those of an earlier timeline or sequence, behind the clock, or after
    /// somebody has moved the sequence.
    pub fn clear(&mut self) {
        self.end = self.floor();
        (self.next, self.following) = (self.end, 0);
    }
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
        // Recovery goes ahead of what was drawn, and so may the counter of the clock.
        let ahead = last + 32 * RESERVED;
        let [first_sibling, second_sibling] = [1, 2].map(|seconds| raised(ahead, 1, 2, NOW + seconds * SECOND));
        assert!(first_sibling > ahead && second_sibling >= first_sibling + 1_000);
    }

    #[test]
    fn the_end_is_an_error_not_a_beginning() {
        assert_eq!(raised(i64::MAX - 1, 1, 2, NOW), i64::MAX);
        assert_eq!(raised(5, 0, i64::MAX, NOW), i64::MAX);
    }

    const FIRST: i64 = (1 << COUNTER_BITS) + 700 * 86_400_000;

    #[test]
    fn one_draw_serves_many_grants() {
        let mut stock = Stock::default();
        assert_eq!(stock.take(0, NOW), None);
        stock.note(FIRST);
        assert_eq!(stock.take(FIRST, NOW), None, "not before it is safe");
        stock.add(FIRST);
        let mut times_low = 0;
        for token in FIRST..FIRST + RESERVED {
            let (taken, is_low) = stock.take(FIRST, NOW).unwrap();
            assert_eq!(taken, token);
            times_low += i64::from(is_low);
        }
        assert_eq!((times_low, stock.take(FIRST, NOW)), (1, None));
        assert_eq!(stock.floor(), FIRST + RESERVED);
    }

    #[test]
    fn the_next_draw_is_made_in_time() {
        let mut stock = Stock::default();
        stock.note(FIRST);
        stock.add(FIRST);
        let next = FIRST + RESERVED;
        while !stock.take(FIRST, NOW).unwrap().1 {}
        stock.note(next);
        assert_eq!(stock.take(next, NOW).unwrap().0, FIRST + RESERVED / 2, "those left are good meanwhile");
        stock.add(next);
        stock.add(next + RESERVED); // another's, not needed
        assert_eq!(stock.floor(), next + RESERVED);
        let rest: Vec<i64> = std::iter::from_fn(|| stock.take(next, NOW)).map(|(token, _)| token).collect();
        assert_eq!((rest[0], *rest.last().unwrap()), (FIRST + RESERVED / 2 + 1, next + RESERVED - 1));
    }

    #[test]
    fn a_sequence_that_was_moved_or_a_clock_that_went_ahead_ends_the_stock() {
        let mut stock = Stock::default();
        stock.note(FIRST);
        stock.add(FIRST);
        assert!(stock.take(FIRST + 1, NOW).is_none() && stock.take(FIRST - 1, NOW).is_none());
        assert!(stock.take(FIRST, NOW + 61 * SECOND).is_none() && stock.lags(NOW + 61 * SECOND));
        assert!(stock.take(FIRST, NOW + 59 * SECOND).is_some());
        stock.clear();
        assert!(stock.take(FIRST, NOW).is_none() && !stock.lags(NOW + 61 * SECOND));
    }

    proptest! {
        /// Draws are noted in the order of their values, and added in any order, or never.
        #[test]
        fn tokens_rise_and_were_drawn(
            steps in prop::collection::vec((0..40u8, any::<prop::sample::Index>()), 1..2_000),
        ) {
            let (mut stock, mut sequence, mut highest) = (Stock::default(), FIRST - RESERVED, 0);
            let (mut unsafe_yet, mut safe) = (Vec::new(), Vec::new());
            for (step, index) in steps {
                match step {
                    0 => sequence += 1_000, // by hand
                    1 => sequence -= 1_000,
                    2..=5 => {
                        stock.check(sequence);
                        sequence = (sequence + RESERVED).max(stock.floor());
                        stock.note(sequence);
                        unsafe_yet.push(sequence);
                    }
                    6..=10 if !unsafe_yet.is_empty() => {
                        let drawn = unsafe_yet.remove(index.index(unsafe_yet.len()));
                        stock.add(drawn);
                        safe.push(drawn);
                    }
                    _ => {
                        if let Some((token, _)) = stock.take(sequence, NOW) {
                            prop_assert!(token > highest);
                            prop_assert!(safe.iter().any(|drawn| (*drawn..drawn + RESERVED).contains(&token)));
                            highest = token;
                        }
                    }
                }
            }
        }

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
