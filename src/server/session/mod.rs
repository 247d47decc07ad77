//! One session's locks: what the SQL functions do, on the lock manager, the ledger and the registry together.
//!
//! The order of things in [`acquire`] is the heart of it: check, enter in the ledger and publish, ask the lock manager,
//! and then settle or withdraw. No borrow of the state is held while the lock manager may wait.
//!
//! What a free lock goes through is inlined, here and in what is called from here: a lock and back are less than a thousand
//! instructions beside the lock manager's, and each call in between would add twenty.

pub mod semaphores;
pub mod sets;
pub mod trees;

use crate::rules::error::{Error, Waited};
use crate::rules::holds::{Ledger, Limit, Owner, Place, Run, Scope, StatementId};
use crate::rules::interval::Wait;
use crate::rules::key::{LastName, Space, Tag};
use crate::rules::lease::Bound;
use crate::rules::mode::Mode;
use crate::rules::name::{Name, display};
use crate::rules::token::Stock;
use crate::server::callbacks;
use crate::server::ffi;
use crate::server::hold_limit;
use crate::server::lock_manager::{self, Outcome};
use crate::server::lock_table;
use crate::server::process_local::ProcessLocal;
use crate::server::registry::{Published, QueueWait, Registry, Wanted};
use crate::server::report::{self, Problem};
use crate::server::settings::{self, SessionLocks};
use crate::server::statistics;
use crate::server::who;
use pgrx::pg_sys;
use std::cell::{OnceCell, RefCell, RefMut};
use std::collections::{BTreeSet, HashSet};
use std::ops::{Deref, DerefMut};
use xxhash_rust::xxh3::xxh3_64_with_seed;

static LAST_NAME: ProcessLocal<RefCell<LastName>> = ProcessLocal::ref_cell(LastName::new());

/// A lock that a call is about.
#[derive(Clone, Copy, Debug)]
pub struct Lock<'a> {
    tag: Tag,
    name: &'a [u8],
    domain: &'a [u8],
}

impl<'a> Lock<'a> {
    /// The lock of a name in this database, or in the whole cluster.
    #[inline(always)]
    pub fn named(name: Name<'a>, cluster_wide: bool) -> Self {
        let database = if cluster_wide { 0 } else { ffi::my_database() };
        let (tag, domain) = LAST_NAME.borrow_mut().tag_and_domain(name, database);
        Self { tag, name: name.bytes(), domain }
    }

    /// The native lock of a bigint key.
    pub fn bigint(key: i64) -> Lock<'static> {
        Lock { tag: Tag::of_bigint(key, ffi::my_database()), name: &[], domain: &[] }
    }

    /// The native lock of a pair of integer keys.
    pub fn pair(key1: i32, key2: i32) -> Lock<'static> {
        Lock { tag: Tag::of_pair(key1, key2, ffi::my_database()), name: &[], domain: &[] }
    }

    /// Where it stands in the lock manager.
    pub fn tag(&self) -> Tag {
        self.tag
    }

    /// The domain of its name.
    pub fn domain(&self) -> &'a [u8] {
        self.domain
    }

    /// Counts a grant of it, unless it is native: that has no name.
    #[inline(always)]
    fn count_grant(&self) {
        if !self.name.is_empty() {
            statistics::granted(self.domain);
        }
    }

    /// Counts a wait for it that begins now. A try is none, though some go through the queue.
    fn count_wait(&self, wait: Wait) -> Option<statistics::Wait> {
        (wait != Wait::Try && !self.name.is_empty()).then(|| statistics::Wait::begin(self.domain))
    }

    /// What errors call it.
    pub fn describe(&self) -> String {
        describe(self.tag, self.name)
    }
}

/// What errors call a lock.
pub fn describe(tag: Tag, name: &[u8]) -> String {
    match (tag.space(), tag.database) {
        (Space::Native, _) => format!("advisory lock ({})", tag.native_key()),
        (Space::Slot, _) => format!("slot {} of semaphore \"{}\"", tag.slot_number(), display(name)),
        _ if tag.is_semaphore() => format!("semaphore \"{}\"", display(name)),
        (_, 0) => format!("cluster-wide named lock \"{}\"", display(name)),
        (_, _) => format!("named lock \"{}\"", display(name)),
    }
}

/// How a lock is asked for.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// In which mode.
    pub mode: Mode,
    /// For the session or the transaction.
    pub scope: Scope,
    /// How long to wait.
    pub wait: Wait,
    /// The limit on a session hold, in microseconds.
    pub hold_limit: Option<i64>,
}

/// What this session holds, and where it tells others of it.
#[derive(Debug)]
pub(in crate::server) struct Session {
    ledger: Ledger,
    registry: Option<Registry>,
    is_started: bool,
    /// The sentinel was taken, and not given back by us.
    has_sentinel: bool,
    /// How many sentinels have gone behind our back: each is another one.
    lost_sentinels: u64,
    leases: Leases,
    /// The queues of the semaphores of which this session has, or had, slots.
    semaphores: BTreeSet<Tag>,
    /// The process ends; it may have a transaction to abort before.
    is_ending: bool,
    /// Where aborting subtransactions had holds.
    struck: Vec<Place>,
}

/// What this session has to do with leases, by their keys.
#[derive(Debug)]
struct Leases {
    /// Acquired to end with the session. While there are any, the sentinel stays.
    bound: BTreeSet<u64>,
    /// Their waiters may go on when this transaction ends, or a part of it is rolled back.
    touched: BTreeSet<u64>,
    /// Their waiters may go on if this is rolled back.
    prolonged: BTreeSet<u64>,
    /// The subtransactions that have changed rows of leases.
    changed_in: BTreeSet<u32>,
}

impl Leases {
    const fn new() -> Self {
        Self {
            bound: BTreeSet::new(),
            touched: BTreeSet::new(),
            prolonged: BTreeSet::new(),
            changed_in: BTreeSet::new(),
        }
    }

    /// The transaction has ended.
    fn forget_transaction(&mut self) {
        if !self.are_untouched() {
            self.touched.clear();
            self.prolonged.clear();
            self.changed_in.clear();
        }
    }

    /// Whether this transaction has had to do with none.
    fn are_untouched(&self) -> bool {
        self.touched.is_empty() && self.prolonged.is_empty() && self.changed_in.is_empty()
    }
}

static SESSION: ProcessLocal<RefCell<Session>> = ProcessLocal::ref_cell(Session::new());

/// As long as it lives, interrupts are not looked at.
struct InterruptsHeldOff(u32);

impl InterruptsHeldOff {
    fn new() -> Self {
        // SAFETY: a plain global.
        unsafe {
            let count = pg_sys::InterruptHoldoffCount;
            pg_sys::InterruptHoldoffCount = count + 1;
            Self(count)
        }
    }
}

impl Drop for InterruptsHeldOff {
    fn drop(&mut self) {
        // SAFETY: a plain global, to what it was.
        unsafe { pg_sys::InterruptHoldoffCount = self.0 };
    }
}

/// The session's state, in hand: meanwhile nobody must wait for a lock, nor raise an error of the server's.
struct InHand {
    session: RefMut<'static, Session>,
    /// A warning sent meanwhile must not end in a cancel, which would never give the borrow back.
    _held_off: InterruptsHeldOff,
}

impl Deref for InHand {
    type Target = Session;
    fn deref(&self) -> &Session {
        &self.session
    }
}

impl DerefMut for InHand {
    fn deref_mut(&mut self) -> &mut Session {
        &mut self.session
    }
}

#[inline(always)]
fn in_hand() -> InHand {
    InHand { session: SESSION.borrow_mut(), _held_off: InterruptsHeldOff::new() }
}

/// Works on the session's state, as long as it is [in hand](InHand).
#[inline(always)]
fn with_session<R>(work: impl FnOnce(&mut Session) -> R) -> R {
    work(&mut in_hand())
}

/// The same out of one of the server's callbacks. Without effect where a call of ours is at work: it sees to the rest.
pub(in crate::server) fn in_callback(work: impl FnOnce(&mut Session)) {
    if SESSION.try_borrow_mut().is_ok() {
        with_session(work);
    }
}

/// Whether there is nothing to do when locks have been released; also where a call of ours is at work.
pub(in crate::server) fn is_at_rest() -> bool {
    SESSION.try_borrow().map_or(true, |session| session.is_at_rest())
}

/// Which lock was held for too long, if the session ends for that. For the error that ends it.
pub(in crate::server) fn overrun() -> Option<Error> {
    SESSION.try_borrow_mut().ok()?.overrun()
}

/// Takes a lock; whether it is held now.
///
/// # Errors
/// A rule's, the server's; [`Error::NotObtained`] when the server's `lock_timeout` ended the wait.
#[inline(always)]
pub fn acquire(lock: &Lock<'_>, request: Request) -> Result<bool, Problem> {
    check_may_lock(request.scope, || lock.describe())?;
    let owner = owner(request.scope);
    if request.hold_limit.is_some() {
        hold_limit::prepare()?;
    }
    let statement = current_statement();
    let place = in_hand().enter(lock, request.mode, owner, Some(statement), ffi::now())?;
    let outcome = take(lock, &request, place);
    match outcome {
        Ok(Outcome::Granted) => {
            if request.hold_limit.is_some() {
                with_session(|session| session.limit(place, request.mode, owner, request.hold_limit));
            }
            lock.count_grant();
        }
        Ok(Outcome::NotAvailable) | Err(_) => with_session(|session| session.withdraw(place, request.mode, owner)),
    }
    answer(lock, &request, outcome?)
}

/// Who gives a lock back that is taken now.
pub fn owner(scope: Scope) -> Owner {
    match scope {
        Scope::Session => Owner::Session,
        Scope::Transaction => Owner::Transaction(owning_subtransaction()),
    }
}

/// What a call says of how it came out: a wait as the server would fails as the server would.
fn answer(lock: &Lock<'_>, request: &Request, outcome: Outcome) -> Result<bool, Problem> {
    match outcome {
        Outcome::Granted => Ok(true),
        Outcome::NotAvailable if request.wait.fails() => Err(not_obtained(lock, request).into()),
        Outcome::NotAvailable => Ok(false),
    }
}

/// Takes a lock, or fails with [`Error::NotObtained`].
///
/// # Errors
/// As [`acquire`].
pub fn acquire_strict(lock: &Lock<'_>, request: Request) -> Result<(), Problem> {
    if acquire(lock, request)? { Ok(()) } else { Err(not_obtained(lock, &request).into()) }
}

/// Gives back one session hold, or all, in that mode or (None) whichever was taken last; how many remain in any mode.
/// Those of trees are no part of this.
///
/// # Errors
/// [`Error::NotHeld`], [`Error::HeldByTransaction`], [`Error::HeldByTree`].
pub fn release(lock: &Lock<'_>, mode: Option<Mode>, all: bool) -> Result<u64, Problem> {
    check_not_parallel()?;
    let released = with_session(|session| {
        let place = session.find(lock)?;
        if let Some(Run { mode: held, owner: Owner::Session, .. }) = session.ledger.hold(place).only()
            && mode.is_none_or(|mode| mode == held)
        {
            return session.release_only(place, held).then_some(0);
        }
        let released = match mode {
            None if all => {
                Mode::ALL.into_iter().map(|mode| session.release(place, mode, Owner::Session, u64::MAX)).sum()
            }
            _ => {
                let mode = mode.or(session.ledger.hold(place).last_mode(Owner::Session))?;
                session.release(place, mode, Owner::Session, if all { u64::MAX } else { 1 })
            }
        };
        let remaining = session.ledger.hold(place).count_by(None, Owner::Session);
        session.settle();
        (released > 0).then_some(remaining)
    });
    released.ok_or_else(|| not_held(lock, mode).into())
}

/// Gives back every session hold of a named lock and every slot of a semaphore; how many there were.
///
/// # Errors
/// [`Error::ParallelWorker`].
pub fn release_all() -> Result<u64, Problem> {
    check_not_parallel()?;
    Ok(with_session(|session| {
        session.check_sentinel();
        let mut released = 0;
        for place in session.ledger.places() {
            if matches!(session.ledger.hold(place).tag().space(), Space::Named | Space::Slot) {
                while let Some(run) = session.ledger.hold(place).last_run(Scope::Session) {
                    released += session.release(place, run.mode, run.owner, run.count);
                }
            }
        }
        session.settle();
        released
    }))
}

/// How many holds this session has, in that mode or (None) any, by itself and its transaction.
///
/// # Errors
/// [`Error::ParallelWorker`].
pub fn holds(lock: &Lock<'_>, mode: Option<Mode>) -> Result<u64, Problem> {
    check_not_parallel()?;
    Ok(with_session(|session| {
        let Some(place) = session.find_held(lock) else { return 0 };
        let hold = session.ledger.hold(place);
        hold.count(mode, Scope::Session) + hold.count(mode, Scope::Transaction)
    }))
}

/// Changes the mode of the session's one hold of a lock, in one step: whether it has the new mode now.
///
/// # Errors
/// [`Error::NotHeld`], [`Error::HeldByTransaction`], [`Error::HeldByTree`], [`Error::NotOneHold`], and as [`acquire`].
pub fn convert(lock: &Lock<'_>, mode: Mode, wait: Wait) -> Result<bool, Problem> {
    check_may_lock(Scope::Session, || lock.describe())?;
    let (place, old, statement) = one_hold(lock, Owner::Session)?;
    if old.mode == mode {
        return Ok(true);
    }
    let request = Request { mode, scope: Scope::Session, wait, hold_limit: None };
    with_session(|session| session.add(place, mode, Owner::Session, old.limit, statement, ffi::now()))?;
    let outcome = take(lock, &request, place);
    with_session(|session| match outcome {
        Ok(Outcome::Granted) => {
            session.release(place, old.mode, Owner::Session, 1);
            session.settle();
        }
        Ok(Outcome::NotAvailable) | Err(_) => session.withdraw(place, mode, Owner::Session),
    });
    answer(lock, &request, outcome?)
}

/// The session's one hold of a lock, which has to be that owner's: where it stands, and the statement to which one in its
/// place belongs.
fn one_hold(lock: &Lock<'_>, owner: Owner) -> Result<(Place, Run, Option<StatementId>), Problem> {
    let found = with_session(|session| {
        let place = session.find_held(lock)?;
        let hold = session.ledger.hold(place);
        let run = hold.last_run(Scope::Session)?;
        // A conversion takes nothing: the hold is of this statement if it was before.
        let statement = Some(current_statement()).filter(|&statement| {
            hold.taken_by(statement).any(|(owner, mode, _)| (owner, mode) == (run.owner, run.mode))
        });
        Some((place, run, statement, hold.count(None, Scope::Session), hold.count_by(None, Owner::Ancestor)))
    });
    match found {
        None => Err(not_held(lock, None).into()),
        Some((_, _, _, count, of_trees)) if count == of_trees => {
            Err(Error::HeldByTree { lock: lock.describe() }.into())
        }
        Some((place, run, statement, 1, _)) if run.owner == owner => Ok((place, run, statement)),
        Some((_, _, _, count, _)) => Err(Error::NotOneHold { lock: lock.describe(), holds: count }.into()),
    }
}

/// Gives the session's holds of a lock a new limit from now on, or none; when it is reached, in microseconds of the
/// server's clock.
///
/// # Errors
/// [`Error::NotHeld`], [`Error::HeldByTransaction`].
pub fn extend(lock: &Lock<'_>, hold_limit: Option<i64>) -> Result<Option<i64>, Problem> {
    check_not_parallel()?;
    if hold_limit.is_some() {
        hold_limit::prepare()?;
    }
    let limit = limit_from_now(hold_limit);
    let is_held = with_session(|session| {
        let place = session.find_held(lock)?;
        (session.ledger.hold(place).count(None, Scope::Session) > 0).then(|| {
            session.ledger.set_limit(place, limit);
            session.publish(place, None);
            session.settle();
        })
    });
    match is_held {
        Some(()) => Ok(limit.map(|limit| limit.expires_at)),
        None => Err(not_held(lock, None).into()),
    }
}

/// The registry's contents, so far as they are wanted.
pub fn published(wanted: Wanted<'_>) -> Vec<Published> {
    with_session(|session| {
        session.start();
        session.registry.as_ref().map(|registry| registry.read(wanted)).unwrap_or_default()
    })
}

/// Whether it is known at once that those who hold a lock or wait for it mean that name.
pub fn is_witnessed(tag: Tag, name: &[u8]) -> bool {
    with_session(|session| session.registry.as_ref().is_some_and(|registry| registry.is_witnessed(tag, name)))
}

/// The processes that publish each lock they hold or wait for.
pub fn complete_processes() -> HashSet<i32> {
    with_session(|session| session.registry.as_ref().map(Registry::complete_processes).unwrap_or_default())
}

/// Sees to it that this session has looked for the shared memory in which things are counted.
pub fn start() {
    with_session(Session::start);
}

/// Who waits for leases and semaphores, for the views.
pub fn queue_waits() -> Vec<QueueWait> {
    with_session(|session| {
        session.start();
        session.registry.as_ref().map(Registry::read_queue_waits).unwrap_or_default()
    })
}

/// Works on the fencing tokens in stock of a sequence of this database; None where there is no memory for them.
pub fn with_tokens<R>(sequence: pg_sys::Oid, work: impl FnOnce(&mut Stock) -> R) -> Option<R> {
    with_session(|session| {
        session.start();
        session.registry.as_ref().and_then(|registry| registry.with_tokens(ffi::my_database(), sequence.into(), work))
    })
}

/// What this transaction does to a lease, so far as those who wait for it are concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Touch {
    /// Grants or ends it, or keeps the next grant waiting: they may go on when the transaction ends.
    Grant,
    /// Prolongs it: they may go on if that is rolled back.
    Prolong,
}

/// Notes that this transaction has to do with a lease.
pub fn touch_lease(key: u64, touch: Touch) {
    with_session(|session| {
        session.start();
        match touch {
            Touch::Grant => session.leases.touched.insert(key),
            Touch::Prolong => session.leases.prolonged.insert(key),
        };
    });
}

/// Whether this transaction has granted, ended or guarded a lease.
pub fn has_touched_lease(key: u64) -> bool {
    with_session(|session| session.leases.touched.contains(&key))
}

/// Notes that this (sub)transaction changes a row of a lease: it cannot be prepared.
pub fn change_lease(key: u64, touch: Touch) {
    touch_lease(key, touch);
    // SAFETY: a question about this process's state.
    let subtransaction = unsafe { ffi::GetCurrentSubTransactionId() };
    with_session(|session| session.leases.changed_in.insert(subtransaction));
}

/// What a lease is bound to that is to end with this session.
///
/// # Errors
/// The server's.
pub fn bind_lease(key: u64) -> Result<Bound, Problem> {
    with_session(|session| {
        session.start();
        session.check_sentinel();
        session.take_sentinel()?;
        session.leases.bound.insert(key);
        // SAFETY: a plain global.
        Ok(Bound { pid: unsafe { pg_sys::MyProcPid }, session: session.sentinel_number() })
    })
}

/// Whether the session that a lease is bound to is still there.
///
/// # Errors
/// The server's.
pub fn is_bound_session_there(bound: Bound) -> Result<bool, Problem> {
    let sentinel = Tag::sentinel(bound.pid, bound.session, ffi::my_database());
    // SAFETY: a plain global; and a question about this process's state, which raises no error.
    let (is_mine, in_recovery) = unsafe { (bound.pid == pg_sys::MyProcPid, ffi::RecoveryInProgress()) };
    if in_recovery {
        return Ok(true); // it is a session of the primary, of which nothing is known here
    }
    if is_mine {
        return Ok(lock_manager::held(sentinel, Mode::Exclusive));
    }
    match lock_manager::try_acquire(sentinel, Mode::Share, Scope::Transaction)? {
        Outcome::NotAvailable => Ok(true),
        Outcome::Granted => {
            lock_manager::release(sentinel, Mode::Share, Scope::Transaction);
            Ok(false)
        }
    }
}

/// Tells others that this session waits in a queue, until [`end_queue_wait`].
pub fn begin_queue_wait(queue: Tag, name: &[u8], deadline: Option<i64>) {
    with_session(|session| {
        session.start();
        if let Some(registry) = &session.registry {
            registry.begin_queue_wait(queue, name, ffi::now(), deadline);
        }
    });
}

/// Tells others that it is the first in the queue.
pub fn lead_queue_wait() {
    with_session(|session| session.registry.as_ref().map(Registry::lead_queue_wait));
}

/// Tells others that the wait is over.
pub fn end_queue_wait() {
    with_session(|session| session.registry.as_ref().map(Registry::end_queue_wait));
}

/// Asks the lock manager for a lock that the ledger has already entered.
#[inline(always)]
fn take(lock: &Lock<'_>, request: &Request, place: Place) -> Result<Outcome, Problem> {
    match lock_manager::try_acquire(lock.tag, request.mode, request.scope)? {
        Outcome::Granted => Ok(Outcome::Granted),
        Outcome::NotAvailable => wait_for(lock, request, place),
    }
}

/// The same for a lock that was not free just now.
fn wait_for(lock: &Lock<'_>, request: &Request, place: Place) -> Result<Outcome, Problem> {
    let &Request { mode, scope, wait, .. } = request;
    who::check_name(lock.tag, lock.name)?;
    // A session that already holds the lock in another mode may go ahead of its queue, which only a wait lets it do.
    let holds_other_mode = Mode::ALL.into_iter().any(|other| lock_manager::held(lock.tag, other));
    if wait == Wait::Try && !holds_other_mode {
        return Ok(Outcome::NotAvailable);
    }
    with_session(|session| session.begin_wait(place, request));
    let counted = lock.count_wait(wait);
    let outcome = lock_manager::wait(lock.tag, mode, scope, wait, &lock.describe()).map_err(Problem::from);
    if let Some(counted) = counted {
        counted.end(outcome.as_ref().map(|&outcome| outcome == Outcome::Granted));
    }
    let outcome = outcome?;
    if outcome == Outcome::Granted {
        with_session(|session| session.end_wait(place, request));
    }
    Ok(outcome)
}

impl Session {
    const fn new() -> Self {
        Self {
            ledger: Ledger::new(),
            registry: None,
            is_started: false,
            has_sentinel: false,
            lost_sentinels: 0,
            leases: Leases::new(),
            semaphores: BTreeSet::new(),
            is_ending: false,
            struck: Vec::new(),
        }
    }

    /// What has to be done once in a session.
    #[inline]
    fn start(&mut self) {
        if !self.is_started {
            self.start_now();
        }
    }

    #[cold]
    fn start_now(&mut self) {
        self.is_started = true;
        callbacks::register();
        self.registry = Registry::join();
    }

    /// Enters a hold that is about to be asked for.
    #[inline(always)]
    fn enter(
        &mut self,
        lock: &Lock<'_>,
        mode: Mode,
        owner: Owner,
        statement: Option<StatementId>,
        now: i64,
    ) -> Result<Place, Problem> {
        self.start();
        self.check_sentinel();
        if let Some(place) = self.ledger.find(lock.tag) {
            self.reconcile(place);
            let hold = self.ledger.hold(place);
            if !hold.is_closed() {
                if hold.name() != lock.name {
                    return Err(Error::KeyClash { lock: lock.describe(), other: Some(display(hold.name())) }.into());
                }
                self.add(place, mode, owner, None, statement, now)?;
                return Ok(place);
            }
        }
        if !self.has_room() {
            return Err(self.refuse(lock.describe()));
        }
        let place = self.ledger.open(lock.tag, lock.name, mode, owner, statement);
        if let Some(registry) = &mut self.registry {
            registry.open(place, lock.tag, lock.name, mode, owner.scope(), now);
        }
        Ok(place)
    }

    /// Enters one more hold at a place in use. Where that makes the lock held both ways, the sentinel is taken first.
    fn add(
        &mut self,
        place: Place,
        mode: Mode,
        owner: Owner,
        limit: Option<Limit>,
        statement: Option<StatementId>,
        now: i64,
    ) -> Result<(), Problem> {
        self.ledger.add(place, mode, owner, limit, statement);
        if self.ledger.hold(place).is_held_both_ways()
            && let Err(error) = self.take_sentinel()
        {
            self.ledger.remove(place, mode, owner);
            return Err(error);
        }
        self.publish_at(place, None, now);
        Ok(())
    }

    fn take_sentinel(&mut self) -> Result<(), Problem> {
        while !self.has_sentinel {
            match lock_manager::try_acquire(self.sentinel(), Mode::Exclusive, Scope::Session)? {
                Outcome::Granted => self.has_sentinel = true,
                Outcome::NotAvailable => self.lost_sentinels += 1, // somebody looks for a lost one: take another
            }
        }
        Ok(())
    }

    fn sentinel(&self) -> Tag {
        // SAFETY: a plain global.
        Tag::sentinel(unsafe { pg_sys::MyProcPid }, self.sentinel_number(), ffi::my_database())
    }

    /// Tells this session's sentinel from those it has lost, and from those of other sessions of the same process number.
    fn sentinel_number(&self) -> u32 {
        // SAFETY: a plain global.
        let started = unsafe { pg_sys::MyStartTimestamp };
        xxh3_64_with_seed(&started.to_ne_bytes(), self.lost_sentinels) as u32
    }

    /// Whether one more lock keeps within the session's limit.
    fn has_room(&mut self) -> bool {
        let limit = settings::max_locks_per_session();
        self.ledger.len() < limit || {
            self.reconcile_all();
            self.ledger.len() < limit
        }
    }

    /// The error of a call that would pass the session's limit. What the statement has taken is released.
    fn refuse(&mut self, lock: String) -> Problem {
        let statement = current_statement();
        for place in self.ledger.places() {
            for (owner, mode, count) in self.ledger.hold(place).taken_by(statement).collect::<Vec<_>>() {
                self.release(place, mode, owner, count);
            }
        }
        self.settle();
        Error::TooManyLocks { lock, limit: settings::max_locks_per_session() }.into()
    }

    /// Puts the limit that was asked for on the hold just granted.
    fn limit(&mut self, place: Place, mode: Mode, owner: Owner, hold_limit: Option<i64>) {
        if let Some(limit) = limit_from_now(hold_limit) {
            self.ledger.limit_last(place, mode, owner, limit);
            self.publish(place, None);
        }
        self.settle();
    }

    /// Strikes out a hold that was asked for and not granted.
    fn withdraw(&mut self, place: Place, mode: Mode, owner: Owner) {
        self.ledger.remove(place, mode, owner);
        self.after_change(place);
        self.settle();
    }

    /// Gives back up to `count` session holds in a mode by an owner; how many there were.
    fn release(&mut self, place: Place, mode: Mode, owner: Owner, count: u64) -> u64 {
        let hold = self.ledger.hold(place);
        if hold.runs().is_empty() {
            return 0; // closed with the last hold of another mode
        }
        let tag = hold.tag();
        let count = count.min(hold.count_by(Some(mode), owner));
        let mut released = 0;
        while released < count && lock_manager::release(tag, mode, Scope::Session) {
            self.ledger.remove(place, mode, owner);
            released += 1;
        }
        if let Some(semaphore) = tag.semaphore()
            && released > 0
        {
            self.slot_released(semaphore);
        }
        if released < count {
            self.ledger.forget(place, mode, Scope::Session); // released behind our back
        }
        if count > 0 {
            self.after_change(place);
        }
        released
    }

    /// Gives back the only hold of a lock, which is a session hold and no slot of a semaphore; whether it was held.
    #[inline(always)]
    fn release_only(&mut self, place: Place, mode: Mode) -> bool {
        let tag = self.ledger.hold(place).tag();
        debug_assert!(tag.semaphore().is_none());
        let was_held = lock_manager::release(tag, mode, Scope::Session);
        self.ledger.close(place);
        if let Some(registry) = &mut self.registry {
            registry.clear(place);
        }
        self.settle();
        was_held
    }

    /// The place of a lock that this session holds by that name, as far as the ledger knows.
    #[inline(always)]
    fn find(&mut self, lock: &Lock<'_>) -> Option<Place> {
        self.check_sentinel();
        self.ledger.find(lock.tag).filter(|&place| self.ledger.hold(place).name() == lock.name)
    }

    /// The same, compared with the lock manager.
    fn find_held(&mut self, lock: &Lock<'_>) -> Option<Place> {
        let place = self.find(lock)?;
        self.reconcile(place);
        (!self.ledger.hold(place).is_closed()).then_some(place)
    }

    /// Without the sentinel there are no session holds. To be asked before a call enters new ones.
    #[inline]
    fn check_sentinel(&mut self) {
        if self.has_sentinel && !lock_manager::held(self.sentinel(), Mode::Exclusive) {
            self.forget_session_holds();
        }
    }

    #[cold]
    fn forget_session_holds(&mut self) {
        self.has_sentinel = false;
        self.lost_sentinels += 1;
        self.end_bound_leases();
        for place in self.ledger.places() {
            for mode in Mode::ALL {
                self.ledger.forget(place, mode, Scope::Session);
            }
            self.after_change(place);
        }
    }

    /// Compares a place with the lock manager: `DISCARD ALL`, `pg_advisory_unlock_all()` and, for native locks,
    /// `pg_advisory_unlock()` release session holds without telling us.
    fn reconcile(&mut self, place: Place) {
        loop {
            let hold = self.ledger.hold(place);
            let Some(lost) = hold.runs().iter().map(|run| run.mode).find(|&mode| !lock_manager::held(hold.tag(), mode))
            else {
                return;
            };
            self.ledger.forget(place, lost, Scope::Session);
            self.ledger.forget(place, lost, Scope::Transaction);
            self.after_change(place);
        }
    }

    fn reconcile_all(&mut self) {
        self.check_sentinel();
        for place in self.ledger.places() {
            self.reconcile(place);
        }
    }

    /// Brings the registry up to date with a place whose holds have become fewer.
    fn after_change(&mut self, place: Place) {
        if self.ledger.close_if_empty(place) {
            if let Some(registry) = &mut self.registry {
                registry.clear(place);
            }
        } else {
            self.publish(place, None);
        }
    }

    fn publish(&mut self, place: Place, waits_as: Option<Scope>) {
        self.publish_at(place, waits_as, ffi::now());
    }

    fn publish_at(&mut self, place: Place, waits_as: Option<Scope>, now: i64) {
        if let Some(registry) = &mut self.registry {
            registry.publish(place, self.ledger.hold(place), waits_as, now);
        }
    }

    fn begin_wait(&mut self, place: Place, request: &Request) {
        let millis = request.wait.millis(lock_manager::lock_timeout());
        if let Some(registry) = &mut self.registry {
            registry.set_deadline((millis > 0).then(|| ffi::now() + i64::from(millis) * 1_000));
        }
        self.publish(place, Some(request.scope));
        self.bear_witness(place, request.mode);
    }

    fn end_wait(&mut self, place: Place, &Request { mode, scope, .. }: &Request) {
        if let Some(registry) = &mut self.registry {
            registry.granted(place, scope, self.ledger.hold(place).count(None, scope), ffi::now());
        }
        self.bear_witness(place, mode);
    }

    /// Native locks have no names to compare.
    fn bear_witness(&mut self, place: Place, mode: Mode) {
        if mode == Mode::Exclusive
            && !self.ledger.hold(place).name().is_empty()
            && let Some(registry) = &mut self.registry
        {
            registry.bear_witness(place);
        }
    }

    /// Keeps timer, sentinel and memory as the holds want them. No place is valid after it.
    #[inline]
    fn settle(&mut self) {
        if !self.is_settled() {
            self.settle_now();
        }
    }

    /// Whether [`settle`](Self::settle) would change nothing.
    fn is_settled(&self) -> bool {
        !self.has_sentinel && !self.ledger.has_limits() && !self.ledger.has_idle_memory() && !hold_limit::is_set()
    }

    #[inline(never)]
    fn settle_now(&mut self) {
        if self.ledger.has_limits() || hold_limit::is_set() {
            hold_limit::set(self.ledger.earliest_limit().map(|(_, limit)| limit));
        }
        if self.has_sentinel
            && self.leases.bound.is_empty()
            && !self.ledger.places().iter().any(|&place| self.ledger.hold(place).is_held_both_ways())
        {
            self.release_sentinel();
        }
        if self.ledger.trim()
            && let Some(registry) = &mut self.registry
        {
            registry.trim();
        }
    }

    fn release_sentinel(&mut self) {
        self.has_sentinel = false;
        if lock_manager::held(self.sentinel(), Mode::Exclusive) {
            lock_manager::release(self.sentinel(), Mode::Exclusive, Scope::Session);
        }
    }

    /// The sentinel is gone, and with it the leases bound to this session: others need not wait for them.
    fn end_bound_leases(&mut self) {
        for key in std::mem::take(&mut self.leases.bound) {
            self.wake_for_lease(key);
        }
    }

    /// Waiters may go on after the transaction, or a part of it that is rolled back.
    fn wake_touched(&self, is_commit: bool, is_top_level: bool) {
        if is_top_level || !is_commit {
            let prolonged = self.leases.prolonged.iter().filter(|_| !is_commit);
            self.leases.touched.iter().chain(prolonged).for_each(|&key| self.wake_for_lease(key));
        }
    }

    fn wake_for_lease(&self, key: u64) {
        self.wake(Tag::lease_queue(key, ffi::my_database()));
    }

    /// Wakes the first in a queue.
    fn wake(&self, queue: Tag) {
        if let Some(registry) = &self.registry {
            registry.wake(queue);
        }
    }

    /// A subtransaction has committed.
    pub(in crate::server) fn on_subcommit(&mut self, subtransaction: u32, parent: u32) {
        self.ledger.commit_subtransaction(subtransaction, parent);
        if self.leases.changed_in.remove(&subtransaction) {
            self.leases.changed_in.insert(parent);
        }
    }

    /// A subtransaction is aborting: the lock manager still has its locks, so they are published until it has not.
    pub(in crate::server) fn on_subabort(&mut self, subtransaction: u32) {
        self.struck.extend(self.ledger.abort_subtransaction(subtransaction));
        self.leases.changed_in.remove(&subtransaction);
    }

    /// Whether [`on_locks_released`](Self::on_locks_released) would change nothing. Asked at the end of each statement, so
    /// what is asked for here costs little.
    fn is_at_rest(&self) -> bool {
        self.is_settled()
            && !self.ledger.has_transactional()
            && self.struck.is_empty()
            && self.leases.are_untouched()
            && self.semaphores.is_empty()
            && !self.is_ending
    }

    /// Transactions' holds at a place have ended.
    fn after_end(&mut self, place: Place) {
        if !self.ledger.hold(place).is_closed() {
            self.after_change(place);
        }
    }

    /// Some resource owner has given up its locks; at the end of the transaction, all of them.
    pub(in crate::server) fn on_locks_released(&mut self, is_commit: bool, is_top_level: bool) {
        self.wake_touched(is_commit, is_top_level);
        if is_top_level {
            self.leases.forget_transaction();
            if self.is_ending {
                return self.leave();
            }
            while let Some(place) = self.ledger.end_transaction() {
                self.after_end(place);
            }
        }
        for place in std::mem::take(&mut self.struck) {
            self.after_end(place);
        }
        // DISCARD ALL or an unlock function of the server's may have been what the statement did.
        self.check_sentinel();
        self.check_semaphores();
        while self.ledger.has_limits()
            && let Some((place, limit)) = self.ledger.earliest_limit()
        {
            self.reconcile(place);
            if self.ledger.earliest_limit() == Some((place, limit)) {
                break;
            }
        }
        self.settle();
    }

    /// The transaction is about to be prepared: its locks will go to nobody's session.
    pub(in crate::server) fn on_prepare(&mut self) -> Result<(), Problem> {
        if !self.leases.changed_in.is_empty() {
            return Err(Error::PreparedLease.into());
        }
        if let Some(registry) = &self.registry {
            let places = self.ledger.places();
            let held = OnceCell::new();
            registry.keep_prepared(places.iter().map(|&place| self.ledger.hold(place)), |transaction, tag| {
                held.get_or_init(lock_table::held_by_transactions).contains(&(transaction, tag))
            });
        }
        Ok(())
    }

    /// Which lock was held for too long, if the session ends for that.
    fn overrun(&mut self) -> Option<Error> {
        let (place, limit) = self.ledger.earliest_limit().filter(|_| hold_limit::overran())?;
        let hold = self.ledger.hold(place);
        let lock = describe(hold.tag(), hold.name());
        Some(Error::HoldLimitOverrun { lock, millis: limit.micros / 1_000 })
    }

    /// The process ends.
    pub(in crate::server) fn on_exit(&mut self) {
        if let Some(overrun) = self.overrun() {
            report::log(&format!("session ended: {overrun}"));
        }
        hold_limit::set(None);
        // The server would release these only after this, when nobody can be waked any more.
        self.release_slots();
        self.ledger = Ledger::default();
        self.release_sentinel();
        self.end_bound_leases();
        self.is_ending = true;
        // SAFETY: a question about this process's state.
        if !unsafe { ffi::IsTransactionState() } {
            self.leave();
        }
    }

    fn leave(&mut self) {
        if let Some(registry) = self.registry.take() {
            registry.leave();
        }
    }
}

#[inline(always)]
fn check_may_lock(scope: Scope, describe: impl Fn() -> String) -> Result<(), Problem> {
    check_not_parallel()?;
    // SAFETY: asks for this process's state, and raises no error.
    if unsafe { ffi::RecoveryInProgress() } && !settings::allow_on_standby() {
        return Err(Error::InRecovery { lock: describe() }.into());
    }
    match scope {
        Scope::Session => check_session_locks(describe),
        Scope::Transaction => Ok(()),
    }
}

/// Fails or warns where session locks are not welcome.
///
/// # Errors
/// [`Error::SessionLocksOff`].
#[inline(always)]
pub fn check_session_locks(describe: impl FnOnce() -> String) -> Result<(), Problem> {
    match settings::session_locks() {
        SessionLocks::On => Ok(()),
        SessionLocks::Off => Err(Error::SessionLocksOff { lock: describe() }.into()),
        SessionLocks::Warn => {
            report::warn(&Error::SessionLocksWarn { lock: describe() });
            Ok(())
        }
    }
}

/// Fails in a parallel worker.
///
/// # Errors
/// [`Error::ParallelWorker`].
pub fn check_not_parallel() -> Result<(), Problem> {
    // SAFETY: a plain global.
    if unsafe { pg_sys::ParallelWorkerNumber } >= 0 { Err(Error::ParallelWorker.into()) } else { Ok(()) }
}

fn not_obtained(lock: &Lock<'_>, request: &Request) -> Error {
    Error::NotObtained {
        lock: lock.describe(),
        wait: Waited::of(request.wait, lock_manager::lock_timeout()),
        holders: who::holders_against(lock.tag, request.mode),
    }
}

/// Why a lock cannot be given back: whoever holds it, it is not the session by its plain holds.
fn not_held(lock: &Lock<'_>, mode: Option<Mode>) -> Error {
    let (by_transaction, by_tree) = with_session(|session| {
        let Some(place) = session.find_held(lock) else { return (false, false) };
        let hold = session.ledger.hold(place);
        let by_session = hold.count(None, Scope::Session) > 0;
        let by_tree = [Owner::Leaf, Owner::Ancestor].into_iter().any(|owner| hold.count_by(mode, owner) > 0);
        (!by_session && hold.count(mode, Scope::Transaction) > 0, by_tree)
    });
    if by_transaction {
        return Error::HeldByTransaction { lock: lock.describe() };
    }
    if by_tree {
        return Error::HeldByTree { lock: lock.describe() };
    }
    held_by_others(lock, mode, lock.describe())
}

/// The error of a call that would give back what this session does not hold.
fn held_by_others(lock: &Lock<'_>, mode: Option<Mode>, description: String) -> Error {
    let own = with_session(|session| {
        session.reconcile_all();
        session
            .ledger
            .places()
            .into_iter()
            .map(|place| session.ledger.hold(place))
            .filter_map(|hold| {
                let modes = Mode::ALL.into_iter().filter(|&mode| hold.count(Some(mode), Scope::Session) > 0);
                let modes: Vec<&str> = modes.map(Mode::label).collect();
                (!modes.is_empty()).then(|| format!("{} ({})", describe(hold.tag(), hold.name()), modes.join(", ")))
            })
            .collect()
    });
    Error::NotHeld { lock: description, mode, holders: who::holders(lock.tag), own }
}

fn limit_from_now(micros: Option<i64>) -> Option<Limit> {
    micros.map(|micros| Limit { micros, expires_at: ffi::now() + micros })
}

/// The (sub)transaction that a transaction lock taken now belongs to: the current one, but for a cursor's query, whose
/// locks are those of the one in which it was opened.
fn owning_subtransaction() -> u32 {
    // SAFETY: plain globals, and a question about this process's state.
    unsafe {
        let portal = pg_sys::ActivePortal;
        if !portal.is_null() && (*portal).resowner == pg_sys::CurrentResourceOwner {
            (*portal).createSubid
        } else {
            ffi::GetCurrentSubTransactionId()
        }
    }
}

/// The statement that the client has sent: when its portal was made, and where in its query string it stands.
fn current_statement() -> StatementId {
    // SAFETY: portals that are running, or null; their statements are planned ones.
    unsafe {
        let mut portal = pg_sys::ActivePortal;
        if !portal.is_null() && *(*portal).name != 0 {
            // A cursor within a function, as a rule: the client's own statement runs in the portal without a name. If none
            // runs there, the client has named its portal.
            let unnamed = ffi::GetPortalByName(c"".as_ptr());
            if !unnamed.is_null() && (*unnamed).status == pg_sys::PortalStatus::PORTAL_ACTIVE {
                portal = unnamed;
            }
        }
        if portal.is_null() || (*portal).stmts.is_null() {
            return (ffi::GetCurrentStatementStartTimestamp(), 0);
        }
        let statement = (*(*(*portal).stmts).elements).ptr_value.cast::<pg_sys::PlannedStmt>();
        ((*portal).creation_time, (*statement).stmt_location)
    }
}
