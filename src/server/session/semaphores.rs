//! Semaphores: at most N slots of a name taken at once; who waits for one is served in order of arrival.
//!
//! A slot is a session lock on a tag of its own, in the ledger and the registry like a named lock. Beside its n-th slot of
//! a semaphore a session holds the [count](Tag::slot_count) n, in a mode that shuts nobody out. How many sessions hold a
//! count can be asked without taking anything: added up, they are the slots taken, whatever their numbers.
//!
//! *Never more than N.* A caller of N gets one of the slots 1 to N, each of which one session has at a time: callers of N
//! never have more than N. Callers of more may have slots above N. So a caller takes its slot, then its count, *then* adds
//! up; over N, it gives both back. A session that has n slots throughout has the counts 1 to n throughout, so the sum has
//! every slot that was taken before this caller's and is still. Whoever takes one after it adds up after it, and counts
//! this one. A release gives back the slot, then the count: until it returns, the slot may still be counted.
//!
//! *In order.* Tries pass the [queue] beside each other; who waits is alone at its head, and no try gets ahead of it.

use super::{
    Lock, Request, Session, check_may_lock, check_not_parallel, current_statement, hold_limit, lock_manager, not_held,
    who, with_session,
};
use crate::rules::error::{Error, Waited};
use crate::rules::holds::{Owner, Scope};
use crate::rules::interval::Wait;
use crate::rules::key::{MAX_PERMITS, Space, Tag, key_of};
use crate::rules::mode::Mode;
use crate::rules::name::{Name, display};
use crate::server::deadline::Deadline;
use crate::server::ffi;
use crate::server::lock_manager::Outcome;
use crate::server::queue::{self, LOOK_AGAIN, Queue};
use crate::server::report::Problem;

/// Two tries that ask for fewer slots than others have taken can be in each other's way: so often they try again.
const MAX_ROUNDS: u32 = 10;

impl<'a> Lock<'a> {
    /// The semaphore of a name in this database.
    pub fn semaphore(name: Name<'a>) -> Self {
        Self { tag: Tag::semaphore_queue(key_of(name), ffi::my_database()), name: name.bytes(), domain: name.domain() }
    }

    fn slot(&self, number: u16) -> Self {
        Self { tag: Tag::slot(self.tag.key(), number, self.tag.database), ..*self }
    }
}

/// Takes a slot of a semaphore if fewer than `permits` are taken; its number, from 1 to `permits`, or None when the time
/// is up.
///
/// # Errors
/// A rule's, the server's; [`Error::NotObtained`] when the server's `lock_timeout` ended the wait.
pub fn acquire(semaphore: &Lock<'_>, permits: u16, request: Request) -> Result<Option<u16>, Problem> {
    check_may_lock(Scope::Session, || semaphore.describe())?;
    if request.hold_limit.is_some() {
        hold_limit::prepare()?;
    }
    with_session(|session| session.prepare_for_slot(semaphore))?;
    let tried = queue::pass(semaphore.tag, || take(semaphore, permits, request))?;
    if tried.is_some() {
        semaphore.count_grant();
        return Ok(tried);
    }
    who::check_name(semaphore.tag, semaphore.name)?;
    if request.wait == Wait::Try {
        return Ok(None);
    }
    let queue = Queue { tag: semaphore.tag, name: semaphore.name, description: semaphore.describe(), is_passed: false };
    let waited =
        queue::wait(&queue, Deadline::of(request.wait), || Ok(take(semaphore, permits, request)?.ok_or(LOOK_AGAIN)))?;
    match waited {
        None if request.wait.fails() => Err(not_obtained(semaphore, request.wait).into()),
        None => Ok(None),
        slot => {
            semaphore.count_grant();
            Ok(slot)
        }
    }
}

/// Gives a slot back.
///
/// # Errors
/// [`Error::NotHeld`].
pub fn release(semaphore: &Lock<'_>, number: u16) -> Result<(), Problem> {
    check_not_parallel()?;
    let slot = semaphore.slot(number);
    let is_released = with_session(|session| {
        let place = session.find_held(&slot);
        let is_released = place.is_some_and(|place| session.release(place, Mode::Exclusive, Owner::Session, 1) > 0);
        session.settle();
        is_released
    });
    if is_released { Ok(()) } else { Err(not_held(&slot, None).into()) }
}

/// Takes the first slot that is free, for a caller who passes the queue or is its head; None where none is.
fn take(semaphore: &Lock<'_>, permits: u16, request: Request) -> Result<Option<u16>, Problem> {
    let permitted = u32::from(permits);
    for _ in 0..MAX_ROUNDS {
        if taken(semaphore.tag) >= permitted {
            return Ok(None);
        }
        let mut slots = (1..=permits).map(|number| semaphore.slot(number));
        let free = loop {
            let Some(slot) = slots.next() else { return Ok(None) };
            // Of this session's own ones the lock manager would give another hold.
            if lock_manager::requests(slot.tag) == 0 && with_session(|session| session.take_slot(&slot, request))? {
                break slot;
            }
        };
        if taken(semaphore.tag) <= permitted {
            return Ok(Some(free.tag.slot_number()));
        }
        with_session(|session| session.give_back_slot(&free));
    }
    Ok(None)
}

/// How many slots of a semaphore are taken.
fn taken(semaphore: Tag) -> u32 {
    (1..=MAX_PERMITS).map(|n| lock_manager::requests(count(semaphore, n))).take_while(|&sessions| sessions > 0).sum()
}

/// What a session holds that has at least so many slots.
fn count(semaphore: Tag, at_least: u16) -> Tag {
    Tag::slot_count(semaphore.key(), at_least, semaphore.database)
}

/// How many slots this session has.
fn own(semaphore: Tag) -> u16 {
    let is_held = |&n: &u16| lock_manager::held(count(semaphore, n), Mode::Share);
    (1..=MAX_PERMITS).take_while(is_held).last().unwrap_or(0)
}

fn not_obtained(semaphore: &Lock<'_>, wait: Wait) -> Error {
    Error::NotObtained {
        lock: format!("a slot of {}", semaphore.describe()),
        wait: Waited::of(wait, lock_manager::lock_timeout()),
        holders: who::holders(semaphore.tag),
    }
}

impl Session {
    /// Before a slot is asked for: fails where one more lock would pass the session's limit, or where it has slots of
    /// another semaphore with the same key.
    fn prepare_for_slot(&mut self, semaphore: &Lock<'_>) -> Result<(), Problem> {
        self.start();
        self.check_sentinel();
        self.check_semaphores();
        if own(semaphore.tag) > 0 {
            let places = self.ledger.places().into_iter();
            let mut slots = places.map(|place| self.ledger.hold(place)).filter(|hold| semaphore.tag.covers(hold.tag()));
            if let Some(other) = slots.find(|hold| hold.name() != semaphore.name) {
                let other = Some(display(other.name()));
                return Err(Error::KeyClash { lock: semaphore.describe(), other }.into());
            }
        }
        if self.has_room() { Ok(()) } else { Err(self.refuse(semaphore.describe())) }
    }

    /// Takes a slot and counts it, if nobody has it.
    fn take_slot(&mut self, slot: &Lock<'_>, request: Request) -> Result<bool, Problem> {
        let Some(semaphore) = slot.tag.semaphore() else { return Ok(false) };
        let place = self.enter(slot, request.mode, Owner::Session, Some(current_statement()), ffi::now())?;
        match lock_and_count(slot.tag, semaphore) {
            Ok(Outcome::Granted) => {
                self.semaphores.insert(semaphore);
                if request.hold_limit.is_some() {
                    self.limit(place, request.mode, Owner::Session, request.hold_limit);
                }
                Ok(true)
            }
            refused => {
                self.withdraw(place, request.mode, Owner::Session);
                refused.map(|_| false)
            }
        }
    }

    fn give_back_slot(&mut self, slot: &Lock<'_>) {
        if let Some(place) = self.find(slot) {
            self.release(place, Mode::Exclusive, Owner::Session, 1);
        }
        self.settle();
    }

    /// Counts a slot no longer that this session has released, and tells the first in the queue.
    pub(super) fn slot_released(&self, semaphore: Tag) {
        let last = own(semaphore);
        if last > 0 {
            lock_manager::release(count(semaphore, last), Mode::Share, Scope::Session);
        }
        self.wake(semaphore);
    }

    /// Where slots have been released behind our back, all that the session had were, and others may take them.
    #[inline]
    pub(super) fn check_semaphores(&mut self) {
        if !self.semaphores.is_empty() {
            self.forget_lost_slots();
        }
    }

    #[cold]
    fn forget_lost_slots(&mut self) {
        let lost: Vec<Tag> = self.semaphores.iter().copied().filter(|&semaphore| own(semaphore) == 0).collect();
        for semaphore in lost {
            self.semaphores.remove(&semaphore);
            for place in self.ledger.places() {
                if semaphore.covers(self.ledger.hold(place).tag()) {
                    self.reconcile(place);
                }
            }
            self.wake(semaphore);
        }
    }

    /// Gives back every slot, at the end of the session.
    pub(super) fn release_slots(&mut self) {
        for place in self.ledger.places() {
            if self.ledger.hold(place).tag().space() == Space::Slot {
                self.release(place, Mode::Exclusive, Owner::Session, 1);
            }
        }
    }
}

/// Takes the lock of a slot, and then the next count; both or neither.
fn lock_and_count(slot: Tag, semaphore: Tag) -> Result<Outcome, Problem> {
    let outcome = lock_manager::try_acquire(slot, Mode::Exclusive, Scope::Session)?;
    if outcome == Outcome::Granted {
        let counted = lock_manager::try_acquire(count(semaphore, own(semaphore) + 1), Mode::Share, Scope::Session);
        if let Err(error) = counted {
            lock_manager::release(slot, Mode::Exclusive, Scope::Session);
            return Err(error.into());
        }
    }
    Ok(outcome)
}
