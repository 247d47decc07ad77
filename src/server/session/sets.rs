//! Several named locks in one call: all or none, or those that are free.
//!
//! Locks that are free are taken in one go, with the session's state in hand. It is put down only to wait.

use super::{Lock, Outcome, Request, Session, answer, check_may_lock, current_statement, wait_for, with_session};
use crate::rules::error::Error;
use crate::rules::holds::{Limit, Owner, Place, Scope, StatementId};
use crate::rules::interval::Wait;
use crate::rules::mode::Mode;
use crate::rules::name::{MAX_SET, display};
use crate::server::deadline::Deadline;
use crate::server::ffi;
use crate::server::hold_limit;
use crate::server::lock_manager;
use crate::server::report::Problem;
use crate::server::settings;

/// One of several locks that a call takes.
#[derive(Clone, Copy, Debug)]
pub struct Part<'a> {
    /// The lock.
    pub lock: Lock<'a>,
    /// In which mode.
    pub mode: Mode,
    /// For whom.
    pub owner: Owner,
    /// The limit on a session hold, in microseconds.
    pub hold_limit: Option<i64>,
}

impl Part<'_> {
    fn request(&self, wait: Wait) -> Request {
        Request { mode: self.mode, scope: self.owner.scope(), wait, hold_limit: self.hold_limit }
    }
}

/// What a call has taken: which of its parts, and where they stand.
type Taken = Vec<(usize, Place)>;

/// So many names are tried before interrupts are looked at.
const BATCH: usize = 1_000;

/// Puts the locks of a set in the order in which every session takes them, each once.
///
/// # Errors
/// [`Error::KeyClash`] where two different names have one key; [`Error::TooManyNames`].
pub fn in_order(mut parts: Vec<Part<'_>>) -> Result<Vec<Part<'_>>, Error> {
    parts.sort_unstable_by_key(|part| part.lock.tag);
    let clash =
        parts.windows(2).find(|pair| pair[0].lock.tag == pair[1].lock.tag && pair[0].lock.name != pair[1].lock.name);
    if let Some(pair) = clash {
        return Err(Error::KeyClash { lock: pair[0].lock.describe(), other: Some(display(pair[1].lock.name)) });
    }
    parts.dedup_by_key(|part| part.lock.tag);
    if parts.len() > MAX_SET { Err(Error::TooManyNames { most: MAX_SET }) } else { Ok(parts) }
}

/// Takes all of the locks, in their order, or none; whether they are held now. `describe` is what errors call them.
///
/// # Errors
/// As [`acquire`](super::acquire).
pub fn acquire_all(
    parts: &[Part<'_>],
    scope: Scope,
    wait: Wait,
    describe: impl Fn() -> String,
) -> Result<bool, Problem> {
    check_may_lock(scope, &describe)?;
    prepare_limits(parts)?;
    with_session(|session| session.make_room(parts, describe))?;
    match take_all(parts, wait, Some(current_statement()))? {
        None => {
            parts.iter().for_each(|part| part.lock.count_grant());
            Ok(true)
        }
        Some(part) => answer(&part.lock, &part.request(wait), Outcome::NotAvailable),
    }
}

/// Takes those of the locks that are free, in their order and without waiting, up to `max_locks`; which. Passes over what
/// this session holds already.
///
/// # Errors
/// A rule's, the server's; nothing is taken then.
pub fn acquire_any(parts: &[Part<'_>], scope: Scope, max_locks: usize) -> Result<Vec<usize>, Problem> {
    check_may_lock(scope, || describe(parts))?;
    prepare_limits(parts)?;
    let statement = current_statement();
    let mut taken = Taken::new();
    for first in (0..parts.len()).step_by(BATCH) {
        let tried = lock_manager::check_interrupts().map_err(Problem::from).and_then(|()| {
            let batch = first..parts.len().min(first + BATCH);
            with_session(|session| session.take_free(parts, batch, max_locks, statement, &mut taken))
        });
        if let Err(problem) = tried {
            with_session(|session| session.give_back(parts, &taken));
            return Err(problem);
        }
        if taken.len() == max_locks {
            break;
        }
    }
    Ok(taken.into_iter().map(|(number, _)| number).inspect(|&number| parts[number].lock.count_grant()).collect())
}

/// What errors call a set.
pub fn describe(parts: &[Part<'_>]) -> String {
    match parts {
        [part] => part.lock.describe(),
        _ => format!("{} named locks", parts.len()),
    }
}

fn prepare_limits(parts: &[Part<'_>]) -> Result<(), Error> {
    if parts.iter().any(|part| part.hold_limit.is_some()) { hold_limit::prepare() } else { Ok(()) }
}

/// Takes all of the locks, in their order, or none: then, which one could not be had.
pub(super) fn take_all<'p, 'a>(
    parts: &'p [Part<'a>],
    wait: Wait,
    statement: Option<StatementId>,
) -> Result<Option<&'p Part<'a>>, Problem> {
    let mut taken = Taken::with_capacity(parts.len());
    let missing = take_in_turn(parts, wait, statement, &mut taken);
    if !matches!(missing, Ok(None)) {
        with_session(|session| session.give_back(parts, &taken));
    }
    missing
}

fn take_in_turn<'p, 'a>(
    parts: &'p [Part<'a>],
    wait: Wait,
    statement: Option<StatementId>,
    taken: &mut Taken,
) -> Result<Option<&'p Part<'a>>, Problem> {
    let deadline = Deadline::of(wait);
    while let Some(place) = with_session(|session| session.take_while_free(parts, statement, taken))? {
        let part = &parts[taken.len()];
        let left = match wait {
            Wait::Try => Wait::Try,
            _ => deadline.left().unwrap_or(Wait::Try),
        };
        let outcome = wait_for(&part.lock, &part.request(left), place);
        with_session(|session| match outcome {
            Ok(Outcome::Granted) => {
                taken.push((taken.len(), place));
                session.limit_taken(parts, &taken[taken.len() - 1..]);
            }
            Ok(Outcome::NotAvailable) | Err(_) => session.withdraw(place, part.mode, part.owner),
        });
        if outcome? == Outcome::NotAvailable {
            return Ok(Some(part));
        }
    }
    Ok(None)
}

impl Session {
    /// Fails where these locks would pass the session's limit.
    fn make_room(&mut self, parts: &[Part<'_>], describe: impl Fn() -> String) -> Result<(), Problem> {
        let limit = settings::max_locks_per_session();
        self.start();
        if self.ledger.len() + parts.len() <= limit {
            self.ledger.reserve(parts.len());
            return Ok(());
        }
        self.reconcile_all();
        let more = parts.iter().filter(|part| self.ledger.find(part.lock.tag).is_none()).count();
        if self.ledger.len() + more <= limit { Ok(()) } else { Err(self.refuse(describe())) }
    }

    /// Goes on taking the locks in turn as long as they are free. The place of the one that is not, entered and not held.
    fn take_while_free(
        &mut self,
        parts: &[Part<'_>],
        statement: Option<StatementId>,
        taken: &mut Taken,
    ) -> Result<Option<Place>, Problem> {
        let (first, now) = (taken.len(), ffi::now());
        let mut waits_at = None;
        while let (Some(part), None) = (parts.get(taken.len()), waits_at) {
            let place = self.enter(&part.lock, part.mode, part.owner, statement, now)?;
            match self.attempt(part, place)? {
                Outcome::Granted => taken.push((taken.len(), place)),
                Outcome::NotAvailable => waits_at = Some(place),
            }
        }
        self.limit_taken(parts, &taken[first..]);
        Ok(waits_at)
    }

    /// Takes those of the locks in `batch` that are free and not held yet, until there are `max_locks`.
    fn take_free(
        &mut self,
        parts: &[Part<'_>],
        batch: std::ops::Range<usize>,
        max_locks: usize,
        statement: StatementId,
        taken: &mut Taken,
    ) -> Result<(), Problem> {
        let (first, now) = (taken.len(), ffi::now());
        self.start();
        self.check_sentinel();
        for number in batch {
            if taken.len() == max_locks {
                break;
            }
            let part = &parts[number];
            if self.is_held(&part.lock)? {
                continue;
            }
            if !self.has_room() {
                self.give_back(parts, taken);
                taken.clear();
                return Err(self.refuse(part.lock.describe()));
            }
            let place = self.enter(&part.lock, part.mode, part.owner, Some(statement), now)?;
            match self.attempt(part, place)? {
                Outcome::Granted => taken.push((number, place)),
                Outcome::NotAvailable => self.strike_out(part, place),
            }
        }
        self.limit_taken(parts, &taken[first..]);
        Ok(())
    }

    /// Whether this session holds a lock in any way.
    fn is_held(&mut self, lock: &Lock<'_>) -> Result<bool, Error> {
        let Some(place) = self.ledger.find(lock.tag) else { return Ok(false) };
        self.reconcile(place);
        let hold = self.ledger.hold(place);
        if hold.is_closed() {
            return Ok(false);
        }
        if hold.name() != lock.name {
            return Err(Error::KeyClash { lock: lock.describe(), other: Some(display(hold.name())) });
        }
        Ok(true)
    }

    /// Takes a lock that is entered if it is free; after an error it is entered no more.
    fn attempt(&mut self, part: &Part<'_>, place: Place) -> Result<Outcome, Problem> {
        let outcome = lock_manager::try_acquire(part.lock.tag, part.mode, part.owner.scope());
        if outcome.is_err() {
            self.strike_out(part, place);
        }
        Ok(outcome?)
    }

    fn strike_out(&mut self, part: &Part<'_>, place: Place) {
        self.ledger.remove(place, part.mode, part.owner);
        self.after_change(place);
    }

    /// Puts the limits that were asked for on holds just granted.
    fn limit_taken(&mut self, parts: &[Part<'_>], taken: &[(usize, Place)]) {
        let limited =
            taken.iter().filter_map(|&(number, place)| Some((&parts[number], place, parts[number].hold_limit?)));
        let mut now = None;
        for (part, place, micros) in limited {
            let now = *now.get_or_insert_with(ffi::now);
            self.ledger.limit_last(place, part.mode, part.owner, Limit { micros, expires_at: now + micros });
            self.publish_at(place, None, now);
        }
        if now.is_some() {
            self.settle();
        }
    }

    /// Gives back what a call has taken, the last first.
    fn give_back(&mut self, parts: &[Part<'_>], taken: &[(usize, Place)]) {
        for &(number, place) in taken.iter().rev() {
            let part = &parts[number];
            lock_manager::release(part.lock.tag, part.mode, part.owner.scope());
            self.strike_out(part, place);
        }
        self.settle();
    }
}
