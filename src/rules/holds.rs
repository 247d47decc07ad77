//! What one session holds: how often, in which mode, by the session or by which (sub)transaction.
//!
//! The lock manager counts holds too, but shows the counts to nobody. This ledger follows the calls made through this
//! extension; whoever keeps it compares it with the lock manager where locks may have been released behind its back.

use super::key::{BuildTagHasher, Tag};
use super::mode::Mode;
use std::collections::HashMap;

/// Who gives a hold back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// The session, by an unlock call or at its end.
    Session,
    /// The same, by the call that unlocks the tree whose path this is.
    Leaf,
    /// The same, by the call that unlocks a tree whose path goes through this.
    Ancestor,
    /// The (sub)transaction with this number, at its end.
    Transaction(u32),
}

/// Who gives a hold back, without saying which transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Scope {
    /// The session.
    Session = 0,
    /// A transaction.
    Transaction = 1,
}

impl Owner {
    /// Which kind of owner this is.
    pub fn scope(self) -> Scope {
        match self {
            Owner::Session | Owner::Leaf | Owner::Ancestor => Scope::Session,
            Owner::Transaction(_) => Scope::Transaction,
        }
    }

    /// The owners of a session's holds.
    const OF_SESSION: [Owner; 3] = [Owner::Session, Owner::Leaf, Owner::Ancestor];

    /// Where a session's owner stands among them.
    fn of_session(self) -> Option<usize> {
        match self {
            Owner::Session => Some(0),
            Owner::Leaf => Some(1),
            Owner::Ancestor => Some(2),
            Owner::Transaction(_) => None,
        }
    }
}

/// A limit on a session hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    /// Its length in microseconds.
    pub micros: i64,
    /// When it is overrun, in microseconds of the server's clock.
    pub expires_at: i64,
}

/// Holds of one lock in one mode by one owner, taken without another mode in between.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// In which mode.
    pub mode: Mode,
    /// By whom.
    pub owner: Owner,
    /// How many.
    pub count: u64,
    /// The earliest limit on them.
    pub limit: Option<Limit>,
}

/// Identifies a client's statement within its session: when it began, and where it stands in its query string.
pub type StatementId = (i64, i32);

/// All of a session's holds of one lock.
#[derive(Debug, Default)]
pub struct Hold {
    tag: Option<Tag>,
    name: Vec<u8>,
    runs: Vec<Run>,
    statement: StatementId,
    taken_by_statement: TakenBySession,
}

/// How many holds, by owner and mode.
type TakenBySession = [[u32; Mode::ALL.len()]; Owner::OF_SESSION.len()];

impl Hold {
    /// The lock.
    pub fn tag(&self) -> Tag {
        self.tag.expect("a hold in the ledger has a tag")
    }

    /// Whether the place is free: the lock is not held any more.
    pub fn is_closed(&self) -> bool {
        self.tag.is_none()
    }

    /// The name it was taken by; empty for a native lock.
    pub fn name(&self) -> &[u8] {
        &self.name
    }

    /// The holds, the last taken last.
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// The hold, where there is only one.
    pub fn only(&self) -> Option<Run> {
        match self.runs[..] {
            [run] if run.count == 1 => Some(run),
            _ => None,
        }
    }

    /// How many holds there are in that mode (None: in any) with that scope.
    pub fn count(&self, mode: Option<Mode>, scope: Scope) -> u64 {
        self.runs
            .iter()
            .filter(|run| run.owner.scope() == scope && mode.is_none_or(|mode| mode == run.mode))
            .map(|run| run.count)
            .sum()
    }

    /// The same by that owner.
    pub fn count_by(&self, mode: Option<Mode>, owner: Owner) -> u64 {
        self.runs
            .iter()
            .filter(|run| run.owner == owner && mode.is_none_or(|mode| mode == run.mode))
            .map(|run| run.count)
            .sum()
    }

    /// The last holds with that scope.
    pub fn last_run(&self, scope: Scope) -> Option<Run> {
        self.runs.iter().rev().find(|run| run.owner.scope() == scope).copied()
    }

    /// The mode of the hold by that owner that was taken last.
    pub fn last_mode(&self, owner: Owner) -> Option<Mode> {
        self.runs.iter().rev().find(|run| run.owner == owner).map(|run| run.mode)
    }

    /// The limit on the hold in that mode by that owner that was taken last.
    pub fn last_limit(&self, mode: Mode, owner: Owner) -> Option<Limit> {
        self.runs.iter().rev().find(|run| run.owner == owner && run.mode == mode)?.limit
    }

    /// Whether some mode is held both by the session and by a transaction: the one case in which the lock manager's
    /// "held" does not tell whether the session's part still stands.
    pub fn is_held_both_ways(&self) -> bool {
        Mode::ALL
            .into_iter()
            .any(|mode| self.count(Some(mode), Scope::Session) > 0 && self.count(Some(mode), Scope::Transaction) > 0)
    }

    /// The earliest limit on any of the holds.
    pub fn earliest_limit(&self) -> Option<Limit> {
        self.runs.iter().filter_map(|run| run.limit).min_by_key(|limit| limit.expires_at)
    }

    /// The session holds that a statement has taken and not given back.
    pub fn taken_by(&self, statement: StatementId) -> impl Iterator<Item = (Owner, Mode, u64)> {
        let counts = if self.statement == statement { self.taken_by_statement } else { Default::default() };
        let counts = Owner::OF_SESSION.into_iter().zip(counts);
        counts
            .flat_map(|(owner, counts)| Mode::ALL.map(|mode| (owner, mode, counts[mode as usize].into())))
            .filter(|of| of.2 > 0)
    }

    /// The first hold of a lock.
    #[inline(always)]
    fn open(&mut self, tag: Tag, name: &[u8], mode: Mode, owner: Owner, statement: Option<StatementId>) {
        self.tag = Some(tag);
        self.name.clear();
        self.name.extend_from_slice(name);
        self.statement = statement.unwrap_or_default();
        self.taken_by_statement = Default::default();
        if let Some(number) = owner.of_session() {
            self.taken_by_statement[number][mode as usize] = 1;
        }
        self.runs.push(Run { mode, owner, count: 1, limit: None });
    }

    fn add(&mut self, mode: Mode, owner: Owner, limit: Option<Limit>, statement: Option<StatementId>) {
        if let (Some(number), Some(statement)) = (owner.of_session(), statement) {
            if self.statement != statement {
                self.statement = statement;
                self.taken_by_statement = Default::default();
            }
            let taken = &mut self.taken_by_statement[number][mode as usize];
            *taken = taken.saturating_add(1);
        }
        // A session's holds are given back from the last; a transaction's, and those of the ancestors of trees, have no
        // order among them.
        let mut runs = self.runs.iter_mut().rev();
        let run = match owner {
            Owner::Session | Owner::Leaf => runs.find(|run| run.owner == owner).filter(|run| run.mode == mode),
            Owner::Ancestor | Owner::Transaction(_) => runs.find(|run| run.owner == owner && run.mode == mode),
        };
        match run {
            Some(run) if run.limit == limit => run.count += 1,
            _ => self.runs.push(Run { mode, owner, count: 1, limit }),
        }
    }

    fn remove_last(&mut self, mode: Mode, owner: Owner) -> bool {
        let Some(position) = self.runs.iter().rposition(|run| run.owner == owner && run.mode == mode) else {
            return false;
        };
        self.runs[position].count -= 1;
        if self.runs[position].count == 0 {
            self.runs.remove(position);
        }
        if let Some(number) = owner.of_session() {
            let taken = &mut self.taken_by_statement[number][mode as usize];
            *taken = taken.saturating_sub(1);
        }
        true
    }
}

/// Where a [`Hold`] stands in the [`Ledger`]. Numbers are small and used again.
pub type Place = u32;

/// All holds of a session.
#[derive(Debug, Default)]
pub struct Ledger {
    holds: Vec<Hold>,
    free: Vec<Place>,
    /// The place opened last, as long as it is in use: nearly always the one that is asked for next, and the next to be
    /// closed.
    last: Option<Place>,
    /// All other places in use.
    others: HashMap<Tag, Place, BuildTagHasher>,
    /// Which (sub)transactions have taken which locks.
    transactional: Vec<(u32, Place)>,
    /// Some hold may have a limit.
    has_limits: bool,
}

impl Ledger {
    /// An empty one.
    pub const fn new() -> Self {
        Self {
            holds: Vec::new(),
            free: Vec::new(),
            last: None,
            others: HashMap::with_hasher(BuildTagHasher::new()),
            transactional: Vec::new(),
            has_limits: false,
        }
    }

    /// Whether some hold may have a limit.
    pub fn has_limits(&self) -> bool {
        self.has_limits
    }

    /// Whether some lock may be held by a transaction.
    pub fn has_transactional(&self) -> bool {
        !self.transactional.is_empty()
    }

    /// How many different locks are held.
    pub fn len(&self) -> usize {
        self.others.len() + usize::from(self.last.is_some())
    }

    /// Makes room for so many more locks.
    pub fn reserve(&mut self, more: usize) {
        self.holds.reserve(more.saturating_sub(self.free.len()));
        self.others.reserve(more);
    }

    /// The place of a lock, if it is held.
    #[inline(always)]
    pub fn find(&self, tag: Tag) -> Option<Place> {
        self.last.filter(|&last| self.hold(last).tag == Some(tag)).or_else(|| self.others.get(&tag).copied())
    }

    /// The holds at a place.
    pub fn hold(&self, place: Place) -> &Hold {
        &self.holds[place as usize]
    }

    /// The places in use.
    pub fn places(&self) -> Vec<Place> {
        self.in_use().collect()
    }

    fn in_use(&self) -> impl Iterator<Item = Place> {
        self.others.values().copied().chain(self.last)
    }

    /// Enters the first hold of a lock, taken by that statement, at a place for it.
    #[inline(always)]
    pub fn open(&mut self, tag: Tag, name: &[u8], mode: Mode, owner: Owner, statement: Option<StatementId>) -> Place {
        let place = self.free.pop().unwrap_or_else(|| {
            self.holds.push(Hold::default());
            (self.holds.len() - 1) as Place
        });
        if let Some(other) = self.last.replace(place) {
            self.others.insert(self.holds[other as usize].tag(), other);
        }
        if let Owner::Transaction(subtransaction) = owner {
            self.transactional.push((subtransaction, place));
        }
        self.holds[place as usize].open(tag, name, mode, owner, statement);
        place
    }

    /// Enters one more hold, taken by that statement.
    pub fn add(
        &mut self,
        place: Place,
        mode: Mode,
        owner: Owner,
        limit: Option<Limit>,
        statement: Option<StatementId>,
    ) {
        self.has_limits |= limit.is_some();
        let hold = &mut self.holds[place as usize];
        if let Owner::Transaction(subtransaction) = owner
            && !hold.runs.iter().any(|run| run.owner == owner)
        {
            self.transactional.push((subtransaction, place));
        }
        hold.add(mode, owner, limit, statement);
    }

    /// Strikes out the last hold in that mode by that owner; whether there was one.
    pub fn remove(&mut self, place: Place, mode: Mode, owner: Owner) -> bool {
        let hold = &mut self.holds[place as usize];
        let removed = hold.remove_last(mode, owner);
        if let Owner::Transaction(subtransaction) = owner
            && removed
            && !hold.runs.iter().any(|run| run.owner == owner)
        {
            // Nearly always the last one: a lock asked for and not granted.
            let position = self.transactional.iter().rposition(|&taken| taken == (subtransaction, place));
            position.map(|position| self.transactional.remove(position));
        }
        removed
    }

    /// Strikes out holds in that mode with that scope, all of them.
    pub fn forget(&mut self, place: Place, mode: Mode, scope: Scope) {
        self.holds[place as usize].runs.retain(|run| run.mode != mode || run.owner.scope() != scope);
    }

    /// Changes the limits of all session holds at a place.
    pub fn set_limit(&mut self, place: Place, limit: Option<Limit>) {
        self.has_limits |= limit.is_some();
        for run in &mut self.holds[place as usize].runs {
            if run.owner.scope() == Scope::Session {
                run.limit = limit;
            }
        }
    }

    /// Puts a limit on the hold in that mode by that owner that was taken last.
    pub fn limit_last(&mut self, place: Place, mode: Mode, owner: Owner, limit: Limit) {
        self.has_limits = true;
        let runs = &mut self.holds[place as usize].runs;
        let Some(position) = runs.iter().rposition(|run| run.owner == owner && run.mode == mode) else {
            return;
        };
        if runs[position].count > 1 {
            runs[position].count -= 1;
            runs.insert(position + 1, Run { mode, owner, count: 1, limit: Some(limit) });
        } else {
            runs[position].limit = Some(limit);
        }
    }

    /// The earliest limit of all, and where.
    pub fn earliest_limit(&mut self) -> Option<(Place, Limit)> {
        if !self.has_limits {
            return None;
        }
        let earliest = self
            .in_use()
            .filter_map(|place| Some((place, self.hold(place).earliest_limit()?)))
            .min_by_key(|(_, limit)| limit.expires_at);
        self.has_limits = earliest.is_some();
        earliest
    }

    /// A subtransaction has committed: its holds are its parent's.
    pub fn commit_subtransaction(&mut self, subtransaction: u32, parent: u32) {
        for place in self.take_transactional(subtransaction) {
            let hold = &mut self.holds[place as usize];
            let (moved, kept) = hold.runs.iter().partition(|run| run.owner == Owner::Transaction(subtransaction));
            let moved: Vec<Run> = moved;
            hold.runs = kept;
            if !moved.is_empty() && !hold.runs.iter().any(|run| run.owner == Owner::Transaction(parent)) {
                self.transactional.push((parent, place));
            }
            for run in moved {
                let owner = Owner::Transaction(parent);
                match hold.runs.iter_mut().find(|other| other.owner == owner && other.mode == run.mode) {
                    Some(other) => other.count += run.count,
                    None => hold.runs.push(Run { owner, ..run }),
                }
            }
        }
    }

    /// A subtransaction has ended without committing: strikes out its holds and returns the places it had them in.
    pub fn abort_subtransaction(&mut self, subtransaction: u32) -> Vec<Place> {
        let places = self.take_transactional(subtransaction);
        for &place in &places {
            self.holds[place as usize].runs.retain(|run| run.owner != Owner::Transaction(subtransaction));
        }
        places
    }

    /// The transaction has ended: strikes out its holds of one more lock and returns their place, which may be closed
    /// already; None when there are none left.
    pub fn end_transaction(&mut self) -> Option<Place> {
        let (_, place) = self.transactional.pop()?;
        self.holds[place as usize].runs.retain(|run| run.owner.scope() == Scope::Session);
        Some(place)
    }

    /// Closes a place that has no holds left; whether it is closed now.
    pub fn close_if_empty(&mut self, place: Place) -> bool {
        let hold = self.hold(place);
        if !hold.is_closed() && hold.runs.is_empty() {
            self.close(place);
        }
        self.hold(place).is_closed()
    }

    /// Closes a place in use, with what holds it may have.
    #[inline(always)]
    pub fn close(&mut self, place: Place) {
        let hold = &mut self.holds[place as usize];
        let tag = hold.tag();
        hold.tag = None;
        hold.runs.clear();
        if self.last == Some(place) {
            self.last = None;
        } else {
            self.others.remove(&tag);
        }
        self.free.push(place);
    }

    /// Gives back the memory that the names of many locks took, once nothing is held; whether there was any to give.
    /// No place is valid after it.
    pub fn trim(&mut self) -> bool {
        let has_idle_memory = self.has_idle_memory();
        if has_idle_memory {
            *self = Self::default();
        }
        has_idle_memory
    }

    /// Whether there is memory to give back.
    pub fn has_idle_memory(&self) -> bool {
        self.holds.len() > IDLE_PLACES && self.len() == 0
    }

    /// Takes what a subtransaction has locked off the list. A cursor may have added to it for an outer one since.
    fn take_transactional(&mut self, subtransaction: u32) -> Vec<Place> {
        let own = self.transactional.extract_if(.., |&mut (owner, _)| owner == subtransaction);
        own.map(|(_, place)| place).collect()
    }
}

/// So many places are kept while nothing is held.
pub const IDLE_PLACES: usize = 32;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const NOW: Option<StatementId> = Some((1, 0));

    fn tag(key: i64) -> Tag {
        Tag::of_bigint(key, 5)
    }

    fn take(ledger: &mut Ledger, key: i64, mode: Mode, owner: Owner) -> Place {
        match ledger.find(tag(key)) {
            Some(place) => {
                ledger.add(place, mode, owner, None, NOW);
                place
            }
            None => ledger.open(tag(key), b"name", mode, owner, NOW),
        }
    }

    #[test]
    fn the_last_session_hold_is_given_back_first() {
        let mut ledger = Ledger::default();
        let place = take(&mut ledger, 1, Mode::Share, Owner::Session);
        take(&mut ledger, 1, Mode::Exclusive, Owner::Session);
        take(&mut ledger, 1, Mode::Share, Owner::Transaction(1));
        assert_eq!(ledger.hold(place).last_mode(Owner::Session), Some(Mode::Exclusive));
        assert!(ledger.remove(place, Mode::Exclusive, Owner::Session));
        assert_eq!(ledger.hold(place).last_mode(Owner::Session), Some(Mode::Share));
        assert!(ledger.hold(place).is_held_both_ways());
        assert!(!ledger.remove(place, Mode::Exclusive, Owner::Session));
    }

    #[test]
    fn subtransactions_pass_their_holds_on_or_lose_them() {
        let mut ledger = Ledger::default();
        let one = take(&mut ledger, 1, Mode::Exclusive, Owner::Transaction(1));
        take(&mut ledger, 1, Mode::Exclusive, Owner::Transaction(2));
        let two = take(&mut ledger, 2, Mode::Share, Owner::Transaction(2));
        take(&mut ledger, 3, Mode::Share, Owner::Transaction(3));
        ledger.commit_subtransaction(3, 2);
        assert_eq!(ledger.abort_subtransaction(2).len(), 3);
        assert_eq!(ledger.hold(one).count(None, Scope::Transaction), 1);
        assert_eq!(ledger.hold(two).count(None, Scope::Transaction), 0);
        assert!(ledger.close_if_empty(two));
        assert_eq!((ledger.end_transaction(), ledger.end_transaction()), (Some(one), None));
    }

    #[test]
    fn a_statement_knows_what_it_took() {
        let mut ledger = Ledger::default();
        let place = take(&mut ledger, 1, Mode::Share, Owner::Session);
        ledger.add(place, Mode::Share, Owner::Session, None, Some((2, 0)));
        ledger.add(place, Mode::Share, Owner::Session, None, Some((2, 0)));
        ledger.remove(place, Mode::Share, Owner::Session);
        ledger.add(place, Mode::Share, Owner::Leaf, None, Some((2, 0)));
        ledger.add(place, Mode::Share, Owner::Transaction(1), None, Some((2, 0)));
        assert_eq!(
            ledger.hold(place).taken_by((2, 0)).collect::<Vec<_>>(),
            vec![(Owner::Session, Mode::Share, 1), (Owner::Leaf, Mode::Share, 1)]
        );
        assert_eq!(ledger.hold(place).taken_by((2, 9)).count(), 0);
    }

    #[test]
    fn a_place_forgets_what_was_taken_there() {
        let mut ledger = Ledger::default();
        let place = take(&mut ledger, 1, Mode::Share, Owner::Session);
        ledger.forget(place, Mode::Share, Scope::Session);
        assert!(ledger.close_if_empty(place));
        assert_eq!(take(&mut ledger, 2, Mode::Exclusive, Owner::Session), place);
        let taken: Vec<_> = ledger.hold(place).taken_by(NOW.unwrap()).collect();
        assert_eq!(taken, vec![(Owner::Session, Mode::Exclusive, 1)]);
    }

    #[test]
    fn each_owner_gives_back_its_own() {
        let mut ledger = Ledger::default();
        let place = take(&mut ledger, 1, Mode::Share, Owner::Session);
        take(&mut ledger, 1, Mode::Exclusive, Owner::Leaf);
        take(&mut ledger, 1, Mode::IntentShare, Owner::Ancestor);
        take(&mut ledger, 1, Mode::IntentExclusive, Owner::Ancestor);
        take(&mut ledger, 1, Mode::IntentShare, Owner::Ancestor);
        let hold = ledger.hold(place);
        assert_eq!((hold.runs().len(), hold.count(None, Scope::Session)), (4, 5));
        assert_eq!(hold.last_mode(Owner::Session), Some(Mode::Share));
        assert_eq!(hold.last_mode(Owner::Leaf), Some(Mode::Exclusive));
        assert_eq!(hold.count_by(Some(Mode::IntentShare), Owner::Ancestor), 2);
        assert!(!ledger.remove(place, Mode::Exclusive, Owner::Session));
        assert!(!ledger.remove(place, Mode::Exclusive, Owner::Ancestor));
        let limit = Limit { micros: 1, expires_at: 2 };
        ledger.limit_last(place, Mode::IntentShare, Owner::Ancestor, limit);
        assert_eq!(ledger.hold(place).last_limit(Mode::IntentShare, Owner::Ancestor), Some(limit));
        assert!(ledger.remove(place, Mode::IntentShare, Owner::Ancestor));
        assert_eq!(ledger.hold(place).last_limit(Mode::IntentShare, Owner::Ancestor), None);
        ledger.set_limit(place, Some(limit));
        assert!(ledger.hold(place).runs().iter().all(|run| run.limit == Some(limit)));
        assert!(ledger.end_transaction().is_none());
        assert_eq!(ledger.hold(place).count(None, Scope::Session), 4);
    }

    #[test]
    fn a_sessions_owners_are_counted_each_in_its_place() {
        assert_eq!(Owner::OF_SESSION.map(Owner::of_session), [Some(0), Some(1), Some(2)]);
        assert_eq!(Owner::Transaction(1).of_session(), None);
    }

    #[test]
    fn memory_is_given_back_with_the_last_hold() {
        let mut ledger = Ledger::default();
        for key in 0..10_000 {
            take(&mut ledger, key, Mode::Exclusive, Owner::Session);
        }
        for key in 0..10_000 {
            let place = ledger.find(tag(key)).unwrap();
            ledger.remove(place, Mode::Exclusive, Owner::Session);
            assert!(ledger.close_if_empty(place));
        }
        assert!(ledger.trim());
        assert_eq!((ledger.len(), ledger.holds.capacity(), ledger.others.capacity()), (0, 0, 0));
    }

    #[derive(Clone, Debug)]
    enum Step {
        Take(i64, usize, usize),
        Unlock(i64, usize),
        Close(i64),
        Savepoint,
        Release,
        Rollback,
        Commit,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => (0..4i64, 0..5usize, 0..6usize).prop_map(|(key, mode, owner)| Step::Take(key, mode, owner)),
            2 => (0..4i64, 0..3usize).prop_map(|(key, owner)| Step::Unlock(key, owner)),
            1 => (0..4i64).prop_map(Step::Close),
            2 => Just(Step::Savepoint),
            1 => Just(Step::Release),
            1 => Just(Step::Rollback),
            1 => Just(Step::Commit),
        ]
    }

    proptest! {
        /// Against a plain list of holds, each with its owner.
        #[test]
        fn the_ledger_counts_like_a_list(steps in prop::collection::vec(step(), 0..200)) {
            let mut ledger = Ledger::default();
            let mut list: Vec<(i64, Mode, Owner)> = Vec::new();
            let mut open = vec![1u32];
            let mut next = 2;
            for step in steps {
                match step {
                    Step::Take(key, mode, owner) => {
                        // One in three through a cursor of the outermost transaction.
                        let taker = if key == 0 { open[0] } else { *open.last().unwrap() };
                        let owner = Owner::OF_SESSION.get(owner).copied().unwrap_or(Owner::Transaction(taker));
                        take(&mut ledger, key, Mode::ALL[mode], owner);
                        list.push((key, Mode::ALL[mode], owner));
                    }
                    Step::Unlock(key, owner) => {
                        let owner = Owner::OF_SESSION[owner];
                        let place = ledger.find(tag(key));
                        let mode = place.and_then(|place| ledger.hold(place).last_mode(owner));
                        // An ancestor's holds are given back by their mode: their order does not matter.
                        let last = list.iter().rposition(|&(other, held, by)| {
                            other == key && by == owner && (owner != Owner::Ancestor || Some(held) == mode)
                        });
                        prop_assert_eq!(last.map(|last| list[last].1), mode);
                        if let (Some(last), Some(place), Some(mode)) = (last, place, mode) {
                            list.remove(last);
                            prop_assert!(ledger.remove(place, mode, owner));
                            ledger.close_if_empty(place);
                        }
                    }
                    // As where the only hold of a lock is given back.
                    Step::Close(key) => {
                        let place = ledger.find(tag(key));
                        let only = place.and_then(|place| ledger.hold(place).only());
                        if let (Some(place), Some(Run { owner: Owner::Session, .. })) = (place, only) {
                            ledger.close(place);
                            list.retain(|hold| hold.0 != key);
                        }
                    }
                    Step::Savepoint => {
                        open.push(next);
                        next += 1;
                    }
                    Step::Release if open.len() > 1 => {
                        let own = open.pop().unwrap();
                        let parent = *open.last().unwrap();
                        ledger.commit_subtransaction(own, parent);
                        for hold in &mut list {
                            if hold.2 == Owner::Transaction(own) {
                                hold.2 = Owner::Transaction(parent);
                            }
                        }
                    }
                    Step::Rollback if open.len() > 1 => {
                        let own = open.pop().unwrap();
                        for place in ledger.abort_subtransaction(own) {
                            ledger.close_if_empty(place);
                        }
                        list.retain(|hold| hold.2 != Owner::Transaction(own));
                    }
                    Step::Commit => {
                        while let Some(place) = ledger.end_transaction() {
                            ledger.close_if_empty(place);
                        }
                        list.retain(|hold| hold.2.scope() == Scope::Session);
                        open = vec![next];
                        next += 1;
                    }
                    Step::Release | Step::Rollback => {}
                }
                let mut held: Vec<i64> = list.iter().map(|hold| hold.0).collect();
                held.sort_unstable();
                held.dedup();
                let mut places: Vec<Place> = held.iter().filter_map(|&key| ledger.find(tag(key))).collect();
                prop_assert_eq!(places.len(), held.len());
                places.sort_unstable();
                let mut in_use = ledger.places();
                in_use.sort_unstable();
                prop_assert_eq!(in_use, places);
                prop_assert_eq!(ledger.len(), held.len());
                for key in 0..4 {
                    let mut holds = list.iter().filter(|hold| hold.0 == key).map(|&(_, mode, owner)| (mode, owner));
                    let only = holds.next().filter(|_| holds.next().is_none());
                    let counted = ledger.find(tag(key)).and_then(|place| ledger.hold(place).only());
                    prop_assert_eq!(counted.map(|run| (run.mode, run.owner)), only);
                    for mode in Mode::ALL {
                        for scope in [Scope::Session, Scope::Transaction] {
                            let expected = list
                                .iter()
                                .filter(|hold| (hold.0, hold.1, hold.2.scope()) == (key, mode, scope))
                                .count() as u64;
                            let counted = ledger.find(tag(key)).map_or(0, |place| ledger.hold(place).count(Some(mode), scope));
                            prop_assert_eq!(counted, expected);
                        }
                    }
                }
            }
        }
    }
}
