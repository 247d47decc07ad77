//! What is counted by domain, and what of it waits for a commit.

use std::collections::BTreeMap;
use std::ops::AddAssign;

/// At most so many domains are counted each for itself, in the whole server.
pub const MAX_DOMAINS: u32 = 1_024;
/// What comes after those is shown as this domain, of no database.
pub const OTHER: &str = "(other)";

/// What has happened in a domain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Locks granted.
    pub grants: u64,
    /// Calls that had to wait.
    pub waits: u64,
    /// Waits that their time limit ended.
    pub timeouts: u64,
    /// Waits that a deadlock ended.
    pub deadlocks: u64,
    /// How long all waits were together, in microseconds.
    pub wait_micros: u64,
    /// How long the longest was, in microseconds.
    pub max_wait_micros: u64,
    /// Grants of leases, and what they found.
    pub leases: LeaseCounts,
}

/// What has happened to leases.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LeaseCounts {
    /// Grants.
    pub granted: u64,
    /// Grants of a permit that had expired, where nobody had released it.
    pub taken_over: u64,
    /// Grants cleared away that had expired, where nobody had released them.
    pub expired: u64,
}

impl AddAssign for LeaseCounts {
    fn add_assign(&mut self, more: Self) {
        self.granted += more.granted;
        self.taken_over += more.taken_over;
        self.expired += more.expired;
    }
}

/// How a wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// With a grant.
    Granted,
    /// By its time limit.
    TimedOut,
    /// By an error: a deadlock was found.
    Deadlock,
    /// By another error, or with the session.
    BrokenOff,
}

/// What a transaction has done to leases: it counts when, and if, that is committed.
#[derive(Debug)]
pub struct Pending(BTreeMap<u32, ByDomain>);

type ByDomain = BTreeMap<Vec<u8>, LeaseCounts>;

impl Pending {
    /// Nothing.
    pub const fn new() -> Self {
        Self(BTreeMap::new())
    }

    /// Whether there is nothing.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds what a subtransaction has done.
    pub fn add(&mut self, subtransaction: u32, domain: &[u8], counts: LeaseCounts) {
        add(self.0.entry(subtransaction).or_default(), domain, counts);
    }

    /// A subtransaction has been committed, and is a part of its parent now.
    pub fn commit_subtransaction(&mut self, subtransaction: u32, parent: u32) {
        if let Some(done) = self.0.remove(&subtransaction) {
            let parent = self.0.entry(parent).or_default();
            done.into_iter().for_each(|(domain, counts)| add(parent, &domain, counts));
        }
    }

    /// A subtransaction has been rolled back.
    pub fn abort_subtransaction(&mut self, subtransaction: u32) {
        self.0.remove(&subtransaction);
    }

    /// The transaction has ended: what it has done, by domain. None of it is left here.
    pub fn end_transaction(&mut self) -> impl Iterator<Item = (Vec<u8>, LeaseCounts)> + use<> {
        std::mem::take(&mut self.0).into_values().flatten()
    }
}

fn add(to: &mut ByDomain, domain: &[u8], counts: LeaseCounts) {
    match to.get_mut(domain) {
        Some(sum) => *sum += counts,
        None => {
            to.insert(domain.to_vec(), counts);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn granted(granted: u64) -> LeaseCounts {
        LeaseCounts { granted, ..LeaseCounts::default() }
    }

    fn end(pending: &mut Pending) -> Vec<(Vec<u8>, LeaseCounts)> {
        let counts = pending.end_transaction().collect();
        assert_eq!(pending.end_transaction().count(), 0);
        counts
    }

    #[test]
    fn what_is_rolled_back_does_not_count() {
        let mut pending = Pending::new();
        pending.add(1, b"a", granted(1));
        pending.add(2, b"a", granted(10));
        pending.add(3, b"a", granted(100));
        pending.add(3, b"b", LeaseCounts { taken_over: 1, expired: 2, granted: 3 });
        pending.commit_subtransaction(3, 2);
        pending.abort_subtransaction(2);
        pending.add(4, b"b", granted(1000));
        pending.commit_subtransaction(4, 1);
        assert_eq!(end(&mut pending), [(b"a".to_vec(), granted(1)), (b"b".to_vec(), granted(1000))]);
    }

    #[test]
    fn a_subtransaction_that_did_nothing_leaves_nothing() {
        let mut pending = Pending::new();
        pending.commit_subtransaction(5, 4);
        pending.abort_subtransaction(4);
        assert_eq!(end(&mut pending), []);
    }

    proptest! {
        /// Subtransactions are nested: each ends before the one in which it began.
        #[test]
        fn sums_are_those_of_what_was_committed(steps in prop::collection::vec((0..4u8, 0..3u8), 0..200)) {
            let mut pending = Pending::new();
            // What each open (sub)transaction has done, the top one first.
            let mut open = vec![(1u32, [0u64; 3])];
            let mut last = 1;
            for (step, domain) in steps {
                let depth = open.len();
                match step {
                    0 => {
                        last += 1;
                        open.push((last, [0; 3]));
                    }
                    1 if depth > 1 => {
                        let (subtransaction, done) = open.pop().unwrap();
                        let (parent, sums) = open.last_mut().unwrap();
                        sums.iter_mut().zip(done).for_each(|(sum, done)| *sum += done);
                        pending.commit_subtransaction(subtransaction, *parent);
                    }
                    2 if depth > 1 => pending.abort_subtransaction(open.pop().unwrap().0),
                    _ => {
                        let (subtransaction, sums) = open.last_mut().unwrap();
                        sums[usize::from(domain)] += 1;
                        pending.add(*subtransaction, &[domain], granted(1));
                    }
                }
            }
            while open.len() > 1 {
                let (subtransaction, done) = open.pop().unwrap();
                let (parent, sums) = open.last_mut().unwrap();
                sums.iter_mut().zip(done).for_each(|(sum, done)| *sum += done);
                pending.commit_subtransaction(subtransaction, *parent);
            }
            let mut sums = [0; 3];
            for (domain, counts) in end(&mut pending) {
                sums[usize::from(domain[0])] += counts.granted;
            }
            prop_assert_eq!(sums, open[0].1);
        }
    }
}
