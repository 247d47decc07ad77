//! Leases: what the SQL functions do, on rows, tags and the clock together.
//!
//! *Tags.* A grant is made in this order: first in the queue, the tags taken, the rows read, a token drawn, the row
//! inserted. A guard takes the tags too, in weaker modes, and then reads the newest row and the clock. So either the guarded
//! transaction ends before the next grant is made, or it finds its lease gone.
//!
//! *Renewals* take no tag. One succeeds only if the lease has not ended when its row is written. So a grant that first
//! looks at the clock, then for unfinished changes, then at the newest rows, sees every renewal of a lease that it takes
//! for ended.

use super::arguments::{self, Varlena};
use super::clock;
use super::domains;
use super::encoding;
use super::ffi;
use super::latch;
use super::lease_table::{self, Change, NewRow, Others, Row, See, Written};
use super::lock_manager::{self, Outcome};
use super::report::Problem;
use super::session::{self, Touch};
use super::snapshot::{self, RowsKept};
use super::tables::Tables;
use super::{activity, fencing, who};
use crate::rules::domain::Rule;
use crate::rules::error::{Error, LeaseHolder, Waited};
use crate::rules::holds::Scope;
use crate::rules::interval::Wait;
use crate::rules::key::{Tag, lease_key};
use crate::rules::lease::{self, Grant, Now, Term};
use crate::rules::mode::Mode;
use crate::rules::name::{Name, display};
use crate::rules::payload;
use pgrx::pg_sys;
use std::time::{Duration, Instant};

/// When to try again where nobody can say when the lease is free: 100 ms.
const RETRY_AFTER: i64 = 100_000;
/// The first in the queue looks after so many microseconds although nobody has waked it: 1 s.
const LOOK_AGAIN: i64 = 1_000_000;
/// A renewal that has taken so long has waited for another transaction.
const LATE: Duration = Duration::from_millis(100);
/// So many entries of the index are looked at with each grant, for rows that have ended.
const SWEPT_ENTRIES: usize = 8;

/// A lease that a call is about.
#[derive(Clone, Copy, Debug)]
pub struct Lease<'a> {
    tables: Tables,
    name: Name<'a>,
    key: u64,
}

/// How a lease is asked for.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// Its time to live, in microseconds.
    pub ttl: i64,
    /// How long to wait.
    pub wait: Wait,
    /// Who asks, in the database's encoding; None for the default.
    pub owner: Option<&'a [u8]>,
    /// What others are to know.
    pub payload: Option<Varlena>,
    /// How many grants there may be at once.
    pub permits: u16,
    /// Whether it ends with the session.
    pub bound: bool,
}

/// What a try came to.
#[derive(Debug)]
pub enum Answer {
    /// It is ours: the grant, and the owner in the database's encoding.
    Granted(Grant, Vec<u8>),
    /// It is not.
    Refused(Refusal),
}

/// Why not, and when to try again.
#[derive(Debug)]
pub struct Refusal {
    /// The grant that ends first, where that is what is in the way: what is left of it, and when it ends.
    pub until: Option<(i64, i64)>,
    /// Who has it, in the database's encoding; None where nobody does, or nobody can say.
    pub owner: Option<Vec<u8>>,
    /// In how many microseconds it is worth trying again.
    pub retry_after: i64,
}

impl Refusal {
    /// Others wait, or a transaction under way is at it.
    const fn unknown() -> Self {
        Self { until: None, owner: None, retry_after: RETRY_AFTER }
    }

    /// The grant that ends first is in the way.
    fn of(state: &State) -> Self {
        let remaining = |row: &&Row| row.grant.term.remaining(state.now);
        let Some(row) = state.live.iter().min_by_key(remaining) else { return Self::unknown() };
        let remaining = remaining(&row).max(0);
        Self {
            until: Some((remaining, row.grant.term.expires.wall)),
            owner: (!row.grant.kept).then(|| row.owner.clone()),
            retry_after: remaining,
        }
    }
}

/// What a renewal says.
#[derive(Debug)]
pub struct Renewal {
    /// How long the lease lasts from now on.
    pub term: Term,
    /// The reason for which somebody asked for it, in the database's encoding.
    pub requested: Option<Vec<u8>>,
    /// How many sessions wait for it.
    pub waiters: i32,
}

impl<'a> Lease<'a> {
    /// The lease of a name in this database.
    pub fn named(tables: Tables, name: Name<'a>) -> Self {
        Self { tables, name, key: lease_key(name) }
    }

    /// The rule for its domain, if there is one.
    ///
    /// # Errors
    /// [`Error::DomainDenied`] where the caller may not lock it; the server's.
    pub fn rule(&self) -> Result<Option<Rule>, Problem> {
        domains::rule(|| Ok(self.tables), self.name.domain(), || self.describe())
    }

    /// The same, whoever asks.
    ///
    /// # Errors
    /// The server's.
    pub fn limits(&self) -> Result<Option<Rule>, Problem> {
        domains::find(|| Ok(self.tables), self.name.domain())
    }

    /// Whether the caller may lock it, and so know who has it.
    ///
    /// # Errors
    /// The server's.
    pub fn may_lock(&self) -> Result<bool, Problem> {
        Ok(self.limits()?.is_none_or(|rule| domains::may_use(&rule)))
    }

    /// What errors call it.
    pub fn describe(&self) -> String {
        format!("lease \"{}\"", display(self.name.bytes()))
    }

    fn tag(&self) -> Tag {
        Tag::lease(self.key, ffi::my_database())
    }

    fn permit_tag(&self, slot: u16) -> Tag {
        Tag::permit(self.key, slot, ffi::my_database())
    }

    fn queue_tag(&self) -> Tag {
        Tag::queue(self.key, ffi::my_database())
    }

    /// The newest rows, and what they mean now.
    fn state(&self, payloads: bool) -> Result<State, Problem> {
        let rows = lease_table::read(&self.tables, self.key, None, See::Committed, payloads)?;
        State::of(rows, clock::now())
    }

    /// The grant with that token, if it is held.
    fn held(&self, token: i64) -> Result<Option<(Row, State)>, Problem> {
        let mut state = self.state(false)?;
        let is_it = |row: &Row| row.grant.token == token && self.is_held(row);
        Ok(state.live.iter().position(is_it).map(|position| (state.live.swap_remove(position), state)))
    }

    /// Fails where a lease of another name with the same key is in use, or this one with another number of permits.
    fn check_rows(&self, live: &[Row], permits: u16) -> Result<(), Problem> {
        for row in live {
            if row.name != self.name.bytes() {
                let other = row.is_of_caller().then(|| display(&row.name));
                return Err(Error::KeyClash { lock: self.describe(), other }.into());
            }
            if row.grant.permits != permits {
                let permits_there = row.grant.permits;
                let lease = self.describe();
                return Err(Error::PermitsDiffer { lease, permits: permits_there, asked: permits }.into());
            }
        }
        Ok(())
    }

    /// Why the lease is not held with a token any more.
    fn lost(&self, token: i64) -> Problem {
        self.why_lost(token).map_or_else(|problem| problem, Problem::from)
    }

    fn why_lost(&self, token: i64) -> Result<Error, Problem> {
        let state = self.state(true)?;
        let lease = self.describe();
        let holders: Vec<&Row> = state.live.iter().filter(|row| self.is_held(row)).collect();
        if let Some(row) = holders.first()
            && holders.len() >= usize::from(row.grant.permits)
        {
            return Ok(Error::LeaseTaken { lease, token, holder: self.holder(row, state.now)? });
        }
        let row = state.ended.iter().find(|row| row.grant.token == token && !row.grant.kept);
        let expired_for = row.map(|row| -row.grant.term.remaining(state.now)).filter(|&micros| micros >= 0);
        Ok(Error::LeaseEnded { lease, token, expired_for })
    }

    /// Why a call that has to have the lease, or fails, does not have it.
    fn not_obtained(&self, wait: Wait) -> Problem {
        self.why_not_obtained(wait).map_or_else(|problem| problem, Problem::from)
    }

    fn why_not_obtained(&self, wait: Wait) -> Result<Error, Problem> {
        let (rows, now) = self.holders()?;
        Ok(Error::LeaseNotObtained {
            lease: self.describe(),
            wait: Waited::of(wait, lock_manager::lock_timeout()),
            holder: rows.first().map(|row| self.holder(row, now)).transpose()?,
        })
    }

    /// Whether a live row is one of somebody who holds this lease.
    fn is_held(&self, row: &Row) -> bool {
        !row.grant.kept && row.name == self.name.bytes()
    }

    /// Who holds it, for an error.
    fn holder(&self, row: &Row, now: Now) -> Result<LeaseHolder, Problem> {
        let may_know = self.may_lock()?;
        let facts = |payload: &[u8]| payload::facts(&arguments::json_text(payload));
        Ok(LeaseHolder {
            owner: may_know.then(|| String::from_utf8_lossy(encoding::to_utf8(&row.owner)).into_owned()),
            about: row.payload.as_deref().filter(|_| may_know).and_then(facts),
            since: who::time_text(row.grant.term.acquired.wall),
            remaining: row.grant.term.remaining(now).max(0),
        })
    }

    /// Fails where leases cannot be changed.
    fn check_may_write(&self, what: &'static str) -> Result<(), Problem> {
        session::check_not_parallel()?;
        self.check_not_in_recovery(what)?;
        // SAFETY: a plain global.
        if unsafe { pg_sys::XactReadOnly } {
            return Err(Error::LeaseReadOnly { lease: self.describe(), what }.into());
        }
        Ok(())
    }

    fn check_not_in_recovery(&self, what: &'static str) -> Result<(), Problem> {
        // SAFETY: a question about this process's state, which raises no error.
        if unsafe { ffi::RecoveryInProgress() } {
            return Err(Error::LeaseInRecovery { lease: self.describe(), what }.into());
        }
        Ok(())
    }

    fn check_owner(&self, row: &Row, what: &'static str) -> Result<(), Problem> {
        if row.is_of_caller() { Ok(()) } else { Err(Error::NotYourLease { lease: self.describe(), what }.into()) }
    }

    /// Takes the lease, or says who has it.
    ///
    /// # Errors
    /// A rule's, the server's; [`Error::LeaseNotObtained`] when the server's `lock_timeout` ended the wait.
    pub fn acquire(&self, request: Request<'_>) -> Result<Answer, Problem> {
        self.check_may_write("acquire")?;
        if request.bound {
            session::check_session_locks(|| format!("bound {}", self.describe()))?;
        }
        let claim = Claim {
            owner: request.owner.map_or_else(activity::application_or_role, <[u8]>::to_vec),
            role: current_role(),
            request,
        };
        let first_try = self.try_acquire(&claim)?;
        let Answer::Refused(refusal) = first_try else { return Ok(first_try) };
        if request.wait == Wait::Try {
            return Ok(Answer::Refused(refusal));
        }
        match self.wait(&claim, refusal)? {
            Answer::Refused(_) if request.wait.fails() => Err(self.not_obtained(request.wait)),
            answer => Ok(answer),
        }
    }

    /// One try. It writes nothing, not even a transaction id, unless the lease is granted.
    fn try_acquire(&self, claim: &Claim<'_>) -> Result<Answer, Problem> {
        let _rows_kept = RowsKept::new()?;
        let free = match self.look(claim)? {
            Ok(free) => free,
            Err(refusal) => return Ok(Answer::Refused(refusal)),
        };
        // Beside other tries; not beside the first in the queue, nor ahead of those who wait.
        let queue = self.queue_tag();
        if lock_manager::try_acquire(queue, Mode::Share, Scope::Transaction)? == Outcome::NotAvailable {
            return Ok(Answer::Refused(Refusal::unknown()));
        }
        let answer = self.try_free_permits(claim, Some(free))?;
        lock_manager::release(queue, Mode::Share, Scope::Transaction);
        Ok(answer)
    }

    /// Queues, and as the first in the queue sleeps until the lease is free.
    fn wait(&self, claim: &Claim<'_>, refusal: Refusal) -> Result<Answer, Problem> {
        let deadline = Deadline::of(claim.request.wait);
        let Some(wait) = deadline.left() else { return Ok(Answer::Refused(refusal)) };
        let waiting = Waiting::begin(self, deadline);
        let queue = self.queue_tag();
        let description = self.describe();
        snapshot::give_up_catalog_snapshot();
        if lock_manager::wait(queue, Mode::Exclusive, Scope::Transaction, wait, &description)? == Outcome::NotAvailable
        {
            // The holder may be another by now.
            return Ok(Answer::Refused(self.refusal(&self.state(false)?)));
        }
        waiting.lead();
        let answer = loop {
            let rows_kept = RowsKept::new()?;
            let refusal = match self.try_free_permits(claim, None)? {
                Answer::Refused(refusal) => refusal,
                granted => break granted,
            };
            drop(rows_kept);
            let Some(left) = deadline.micros_left() else { break Answer::Refused(refusal) };
            let expiry = refusal.until.map_or(LOOK_AGAIN, |(remaining, _)| remaining);
            snapshot::give_up_catalog_snapshot();
            latch::sleep(left.min(expiry).min(LOOK_AGAIN))?;
        };
        lock_manager::release(queue, Mode::Exclusive, Scope::Transaction);
        Ok(answer)
    }

    /// The permits that nobody has, or who has them.
    fn look(&self, claim: &Claim<'_>) -> Result<Result<Free, Refusal>, Problem> {
        let state = self.state(false)?;
        let permits = claim.request.permits;
        self.check_rows(&state.live, permits)?;
        let slots = lease::free_slots(permits, state.live.iter().map(|row| row.grant.slot));
        let is_first = state.live.is_empty();
        Ok(if slots.is_empty() { Err(self.refusal(&state)) } else { Ok(Free { slots, is_first }) })
    }

    /// With the queue: takes a permit that is free, as the caller has just seen or is to be looked for.
    fn try_free_permits(&self, claim: &Claim<'_>, mut free: Option<Free>) -> Result<Answer, Problem> {
        loop {
            let Free { slots, is_first } = match free.take().map_or_else(|| self.look(claim), |free| Ok(Ok(free)))? {
                Ok(free) => free,
                Err(refusal) => return Ok(Answer::Refused(refusal)),
            };
            if let Some(granted) = self.try_permits(claim, &slots, is_first)? {
                return Ok(granted);
            }
            // What was looked at may have ended meanwhile.
            match self.look(claim)? {
                Ok(now) if now.is_first && !is_first => free = Some(now),
                _ => return Ok(Answer::Refused(Refusal::unknown())),
            }
        }
    }

    /// The grant that ends first is in the way; where others wait for that already, it is worth trying again soon.
    fn refusal(&self, state: &State) -> Refusal {
        let refusal = Refusal::of(state);
        let has_queue = who::lease_waiters(self.key) > 0;
        Refusal { retry_after: if has_queue { RETRY_AFTER } else { refusal.retry_after }, ..refusal }
    }

    /// Takes the first permit that is free. `is_first`: nobody has one.
    fn try_permits(&self, claim: &Claim<'_>, free: &[u16], is_first: bool) -> Result<Option<Answer>, Problem> {
        let mode = if is_first { Mode::Exclusive } else { Mode::IntentExclusive };
        with_tag(self.tag(), mode, || {
            for &slot in free {
                let granted = if claim.request.permits == 1 {
                    self.try_permit(claim, slot, is_first)?
                } else {
                    with_tag(self.permit_tag(slot), Mode::Exclusive, || self.try_permit(claim, slot, is_first))?
                };
                if granted.is_some() {
                    return Ok(granted);
                }
            }
            Ok(None)
        })
    }

    /// With the permit's tags: takes it if it is free.
    fn try_permit(&self, claim: &Claim<'_>, slot: u16, is_first: bool) -> Result<Option<Answer>, Problem> {
        let is_in_the_way = |row: &Row| is_first || row.grant.slot == slot;
        let mut look_for_unfinished = false;
        let mut broken = Vec::new();
        loop {
            let now = clock::now();
            if look_for_unfinished {
                let rows = lease_table::read(&self.tables, self.key, None, See::Uncommitted, false)?;
                let is_unfinished = |row: &Row| row.is_uncommitted || row.is_being_updated;
                let mut grants =
                    rows.iter().filter(|row| row.for_token.is_none() && !broken.contains(&row.grant.token));
                if grants.any(|row| is_unfinished(row) && is_in_the_way(row)) {
                    return Ok(None); // perhaps prolonged
                }
            }
            let rows = lease_table::read(&self.tables, self.key, None, See::Committed, false)?;
            let state = State::of(rows, now)?;
            self.check_rows(&state.live, claim.request.permits)?;
            if state.live.iter().any(is_in_the_way) || state.live.is_empty() != is_first {
                return Ok(None);
            }
            if !look_for_unfinished && state.ended.iter().any(is_in_the_way) {
                look_for_unfinished = true;
                broken = state.broken().collect();
                continue;
            }
            let grant = self.grant(claim, slot)?;
            self.clear_away(state.ended.iter().filter(|row| is_in_the_way(row)), &state.orders)?;
            self.sweep(grant.token)?;
            return Ok(Some(Answer::Granted(grant, claim.owner.clone())));
        }
    }

    fn grant(&self, claim: &Claim<'_>, slot: u16) -> Result<Grant, Problem> {
        let request = &claim.request;
        let bound = if request.bound { Some(session::bind_lease(self.key)?) } else { None };
        session::change_lease(self.key, Touch::Grant);
        let token = fencing::draw(&self.tables)?;
        let term = Term::starting(clock::now(), request.ttl);
        let grant = Grant { token, slot, permits: request.permits, role: claim.role, bound, kept: false, term };
        let (name, owner) = (self.name.bytes(), &claim.owner);
        let (for_token, requested) = (None, None);
        let row = NewRow { key: self.key, grant, for_token, name, owner, requested, payload: request.payload };
        lease_table::insert(&self.tables, &row)?;
        Ok(grant)
    }

    /// Deletes rows of grants that have ended, and the orders about them, as far as nobody else is at them.
    fn clear_away<'r>(&self, ended: impl Iterator<Item = &'r Row>, orders: &[Row]) -> Result<(), Problem> {
        for row in ended {
            if lease_table::delete(&self.tables, row, Others::Skip)? == Written::Done {
                self.clear_orders(row.grant.token, orders)?;
            }
        }
        Ok(())
    }

    fn clear_orders(&self, token: i64, orders: &[Row]) -> Result<(), Problem> {
        for order in orders.iter().filter(|order| order.for_token == Some(token)) {
            lease_table::delete(&self.tables, order, Others::Skip)?;
        }
        Ok(())
    }

    /// Deletes what has ended among a few rows of any leases, others with each token.
    fn sweep(&self, token: i64) -> Result<(), Problem> {
        let now = clock::now();
        lease_table::sweep(&self.tables, token, SWEPT_ENTRIES, |row| {
            let Some(token) = row.for_token else { return Ok(!is_live(&row.grant, now)?) };
            let granted = lease_table::read(&self.tables, row.key, Some(token), See::Uncommitted, false)?;
            Ok(granted.is_empty())
        })
    }

    /// Prolongs the lease from now on.
    ///
    /// # Errors
    /// [`Error::LeaseTaken`], [`Error::LeaseEnded`], [`Error::NotYourLease`], the server's.
    pub fn renew(&self, token: i64, ttl: Option<i64>, payload: Option<Varlena>) -> Result<Renewal, Problem> {
        self.check_may_write("renew")?;
        let mut is_late = false;
        loop {
            let start = Instant::now();
            let Some((row, state)) = self.held(token)? else { return Err(self.lost(token)) };
            self.check_owner(&row, "renew")?;
            let term = row.grant.term.renewed(state.now, ttl.unwrap_or(row.grant.term.ttl));
            let change = Change { term: Some(term), payload, ..Change::default() };
            if !self.write(&row, Some(change))? {
                continue;
            }
            self.check_in_time(&row)?;
            if start.elapsed() > LATE && !is_late {
                is_late = true; // it has waited for another transaction: once more, from now on
                continue;
            }
            let requests = state.orders.iter().filter(|order| order.for_token == Some(token) && !order.is_break());
            let newest = requests.max_by_key(|request| request.grant.token.unsigned_abs());
            let requested = newest.and_then(|request| request.requested.clone());
            return Ok(Renewal { term, requested, waiters: who::lease_waiters(self.key) });
        }
    }

    /// Ends the lease; false if it was not held any more. `keep_for`: others are kept out until so long after the grant.
    ///
    /// # Errors
    /// [`Error::NotYourLease`], the server's.
    pub fn release(&self, token: i64, keep_for: Option<i64>) -> Result<bool, Problem> {
        self.check_may_write("release")?;
        loop {
            let Some((row, state)) = self.held(token)? else { return Ok(false) };
            self.check_owner(&row, "release")?;
            let kept = keep_for
                .map(|keep_for| row.grant.term.kept(state.now, keep_for))
                .filter(|term| term.remaining(state.now) > 0)
                .map(|term| Change { term: Some(term), kept: true, ..Change::default() });
            if !self.write(&row, kept)? {
                continue;
            }
            if kept.is_some() {
                self.check_in_time(&row)?;
            }
            return Ok(row.grant.term.remaining(clock::now()) > 0);
        }
    }

    /// After a row has been written that keeps others out for longer: fails if the lease had ended before, because a grant
    /// may have been made that did not see this.
    fn check_in_time(&self, before: &Row) -> Result<(), Problem> {
        let remaining = before.grant.term.remaining(clock::now());
        if remaining > 0 {
            return Ok(());
        }
        let (lease, token) = (self.describe(), before.grant.token);
        Err(Error::LeaseEnded { lease, token, expired_for: Some(-remaining) }.into())
    }

    /// Whether it is held with that token.
    ///
    /// # Errors
    /// The server's.
    pub fn check(&self, token: i64) -> Result<bool, Problem> {
        session::check_not_parallel()?;
        Ok(self.held(token)?.is_some())
    }

    /// Fails unless it is held with that token, and keeps the next grant waiting until this transaction ends.
    ///
    /// # Errors
    /// [`Error::LeaseTaken`], [`Error::LeaseEnded`], [`Error::NotYourLease`], the server's.
    pub fn guard(&self, token: i64) -> Result<(), Problem> {
        session::check_not_parallel()?;
        self.check_not_in_recovery("guard")?;
        session::touch_lease(self.key, Touch::Grant);
        self.share(token, self.tag(), Mode::IntentShare)?;
        let row = self.guarded(token)?;
        if row.grant.permits > 1 {
            self.share(token, self.permit_tag(row.grant.slot), Mode::Share)?;
            self.guarded(token)?;
        }
        Ok(())
    }

    /// The row of a grant that the caller may guard by.
    fn guarded(&self, token: i64) -> Result<Row, Problem> {
        let Some((row, _)) = self.held(token)? else { return Err(self.lost(token)) };
        self.check_owner(&row, "guard")?;
        Ok(row)
    }

    /// Takes a tag for a guard. Where somebody is being granted the lease, it is lost; where somebody only looks whether it
    /// is free, the tag is free in a moment.
    fn share(&self, token: i64, tag: Tag, mode: Mode) -> Result<(), Problem> {
        if lock_manager::try_acquire(tag, mode, Scope::Transaction)? == Outcome::Granted {
            return Ok(());
        }
        if self.held(token)?.is_none() {
            return Err(self.lost(token));
        }
        match lock_manager::wait(tag, mode, Scope::Transaction, Wait::Server, &self.describe())? {
            Outcome::Granted => Ok(()),
            Outcome::NotAvailable => Err(self.not_obtained(Wait::Server)),
        }
    }

    /// Asks all holders to hand over; false if there is none. `reason` in the database's encoding.
    ///
    /// # Errors
    /// The server's.
    pub fn request(&self, reason: &[u8]) -> Result<bool, Problem> {
        self.check_may_write("request")?;
        let state = self.state(false)?;
        let mut is_held = false;
        for row in state.live.iter().filter(|row| self.is_held(row)) {
            self.order(row, Some(reason), &state.orders)?;
            is_held = true;
        }
        Ok(is_held)
    }

    /// Ends all grants, kept ones too; how many.
    ///
    /// # Errors
    /// [`Error::NotYourLease`], the server's.
    pub fn break_all(&self) -> Result<u64, Problem> {
        self.check_may_write("break")?;
        let may_break_any = activity::may_act_as(pg_sys::ROLE_PG_SIGNAL_BACKEND.into());
        let mut ended = 0;
        loop {
            let state = self.state(false)?;
            let mut is_done = true;
            for row in state.live.iter().filter(|row| row.name == self.name.bytes()) {
                if !may_break_any {
                    self.check_owner(row, "break")?;
                }
                session::change_lease(self.key, Touch::Grant);
                match lease_table::delete(&self.tables, row, Others::Skip)? {
                    Written::Done => self.clear_orders(row.grant.token, &state.orders)?,
                    Written::Changed => {
                        is_done = false;
                        continue;
                    }
                    // The holder has an unfinished renewal, say: it is not waited for.
                    Written::Busy => self.order(row, None, &state.orders)?,
                }
                ended += 1;
            }
            if is_done {
                return Ok(ended);
            }
        }
    }

    /// Asks the holder of a grant to hand over for a reason, or (None) ends the grant. Waits for nobody: each order is a row of
    /// its own, and takes the place of those before it.
    fn order(&self, row: &Row, reason: Option<&[u8]>, orders: &[Row]) -> Result<(), Problem> {
        let is_break = reason.is_none();
        session::change_lease(self.key, if is_break { Touch::Grant } else { Touch::Prolong });
        let token = -fencing::draw(&self.tables)?;
        let grant = Grant { token, role: current_role(), bound: None, kept: is_break, ..row.grant };
        let (name, owner) = (self.name.bytes(), activity::application_or_role());
        let for_token = Some(row.grant.token);
        let order = NewRow { key: self.key, grant, for_token, name, owner: &owner, requested: reason, payload: None };
        lease_table::insert(&self.tables, &order)?;
        let before = orders.iter().filter(|order| order.for_token == for_token && (is_break || !order.is_break()));
        for order in before {
            lease_table::delete(&self.tables, order, Others::Skip)?;
        }
        Ok(())
    }

    /// The rows of those who hold it.
    ///
    /// # Errors
    /// The server's.
    pub fn holders(&self) -> Result<(Vec<Row>, Now), Problem> {
        session::check_not_parallel()?;
        let mut state = self.state(true)?;
        state.live.retain(|row| self.is_held(row));
        Ok((state.live, state.now))
    }

    /// Changes a row, or (None) deletes it; false if it has to be read again. Waits for a transaction that has an unfinished
    /// change of it: what time it is may be another thing then.
    fn write(&self, row: &Row, change: Option<Change>) -> Result<bool, Problem> {
        let is_prolonged = change.is_some_and(|change| change.prolongs(&row.grant.term));
        session::change_lease(self.key, if is_prolonged { Touch::Prolong } else { Touch::Grant });
        let written = match change {
            Some(change) => lease_table::update(&self.tables, row, change)?,
            None => lease_table::delete(&self.tables, row, Others::Wait)?,
        };
        Ok(written == Written::Done)
    }
}

/// A request, and whose it is: that of the role that made the call, whatever becomes of it during the wait.
struct Claim<'a> {
    request: Request<'a>,
    /// In the database's encoding.
    owner: Vec<u8>,
    role: u32,
}

/// The permits of a lease that nobody has.
struct Free {
    slots: Vec<u16>,
    /// Nobody has any.
    is_first: bool,
}

/// As long as it lives, others are told that this session waits for a lease.
struct Waiting;

impl Waiting {
    fn begin(lease: &Lease<'_>, deadline: Deadline) -> Self {
        session::begin_lease_wait(lease.key, lease.name.bytes(), deadline.at());
        Self
    }

    /// As the first in the queue.
    fn lead(&self) {
        session::lead_lease_wait();
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        session::end_lease_wait();
    }
}

/// The rows of a lease at some time.
struct State {
    now: Now,
    /// The grants that keep others out: held and kept ones.
    live: Vec<Row>,
    /// The grants that do not any more.
    ended: Vec<Row>,
    /// What holders have been told.
    orders: Vec<Row>,
}

impl State {
    fn of(rows: Vec<Row>, now: Now) -> Result<Self, Problem> {
        let (orders, grants): (Vec<Row>, Vec<Row>) = rows.into_iter().partition(|row| row.for_token.is_some());
        let (mut live, mut ended) = (Vec::with_capacity(grants.len()), Vec::new());
        for row in grants {
            let token = Some(row.grant.token);
            let is_broken = orders.iter().any(|order| order.is_break() && order.for_token == token);
            if !is_broken && is_live(&row.grant, now)? { live.push(row) } else { ended.push(row) }
        }
        Ok(Self { now, live, ended, orders })
    }

    /// The tokens of grants that an order has ended, whatever their rows say.
    fn broken(&self) -> impl Iterator<Item = i64> {
        self.orders.iter().filter(|order| order.is_break()).filter_map(|order| order.for_token)
    }
}

fn is_live(grant: &Grant, now: Now) -> Result<bool, Problem> {
    Ok(grant.term.remaining(now) > 0
        && match grant.bound {
            Some(bound) if !grant.kept => session::is_bound_session_there(bound)?,
            _ => true,
        })
}

/// Works with a tag if it is free; the tag is kept to the end of the transaction only if that comes to something.
fn with_tag<R>(tag: Tag, mode: Mode, work: impl FnOnce() -> Result<Option<R>, Problem>) -> Result<Option<R>, Problem> {
    if lock_manager::try_acquire(tag, mode, Scope::Transaction)? == Outcome::NotAvailable {
        return Ok(None); // guarded, or being granted, by a transaction under way
    }
    let result = work()?;
    if result.is_none() {
        lock_manager::release(tag, mode, Scope::Transaction);
    }
    Ok(result)
}

fn current_role() -> u32 {
    // SAFETY: a question about this process's state.
    unsafe { pg_sys::GetUserId() }.to_u32()
}

/// When a wait ends by itself.
#[derive(Clone, Copy, Debug)]
struct Deadline(Option<Instant>);

impl Deadline {
    fn of(wait: Wait) -> Self {
        let millis = match wait {
            Wait::Server => lock_manager::lock_timeout(),
            Wait::Millis(millis) => millis,
            Wait::Limited(millis) => millis.max(1),
            Wait::Try | Wait::Forever => 0,
        };
        Self((millis > 0).then(|| Instant::now() + Duration::from_millis(millis as u64)))
    }

    /// In microseconds; None when it has passed.
    fn micros_left(self) -> Option<i64> {
        let Some(deadline) = self.0 else { return Some(i64::MAX) };
        let left = deadline.saturating_duration_since(Instant::now()).as_micros() as i64;
        (left > 0).then_some(left)
    }

    /// What is left as a wait for a lock.
    fn left(self) -> Option<Wait> {
        let left = self.micros_left()?;
        Some(if self.0.is_none() { Wait::Forever } else { Wait::Millis((left as u64).div_ceil(1_000) as i32) })
    }

    /// By the server's clock, in microseconds.
    fn at(self) -> Option<i64> {
        self.0.and_then(|_| Some(ffi::now() + self.micros_left()?))
    }
}
