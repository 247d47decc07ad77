//! Leases: what the SQL functions do, on rows, tags and the clock together.
//!
//! A grant is made in this order: first in the queue, the permit's tag taken exclusively, the newest rows read, the clock
//! read, a token drawn, the row inserted. A guard takes the tag in share mode, then reads the row, then the clock. So
//! either the guarded transaction ends before the next grant is made, or it finds its lease gone.

use super::arguments::Varlena;
use super::clock;
use super::ffi;
use super::latch;
use super::lease_table::{self, Change, NewRow, Row, See, Written};
use super::lock_manager::{self, Outcome};
use super::report::Problem;
use super::session::{self, Touch};
use super::snapshot;
use super::tables::Tables;
use super::{activity, fencing, who};
use crate::rules::error::{Error, LeaseHolder, Waited};
use crate::rules::holds::Scope;
use crate::rules::interval::Wait;
use crate::rules::key::{Tag, lease_key};
use crate::rules::lease::{self, Grant, Now, Term};
use crate::rules::mode::Mode;
use crate::rules::name::{Name, display};
use pgrx::pg_sys;
use std::time::{Duration, Instant};

/// When to try again where nobody can say when the lease is free: 100 ms.
const RETRY_AFTER: i64 = 100_000;
/// The first in the queue looks after so many microseconds although nobody has waked it: 1 s.
const LOOK_AGAIN: i64 = 1_000_000;
/// So many entries of the index behind the lease's own are looked at when it is granted.
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
    /// Who has it; None where nobody does, or nobody can say.
    pub holder: Option<LeaseHolder>,
    /// The same in the database's encoding.
    pub owner: Option<Vec<u8>>,
    /// In how many microseconds it is worth trying again.
    pub retry_after: i64,
}

impl Refusal {
    /// Others wait, or a transaction under way is at it.
    const fn unknown() -> Self {
        Self { until: None, holder: None, owner: None, retry_after: RETRY_AFTER }
    }

    fn by(row: &Row, now: Now) -> Self {
        let remaining = row.grant.term.remaining(now).max(0);
        let is_held = !row.grant.kept;
        Self {
            until: Some((remaining, row.grant.term.expires.wall)),
            holder: is_held.then(|| for_error(row, remaining)),
            owner: is_held.then(|| row.owner.clone()),
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

    /// The domain of its name.
    pub fn domain(&self) -> &'a [u8] {
        self.name.domain()
    }

    /// What errors call it.
    pub fn describe(&self) -> String {
        format!("lease \"{}\"", display(self.name.bytes()))
    }

    fn grant_tag(&self, slot: u16) -> Tag {
        Tag::grant(self.key, slot, ffi::my_database())
    }

    fn queue_tag(&self) -> Tag {
        Tag::queue(self.key, ffi::my_database())
    }

    /// The newest rows, ended ones too.
    fn rows(&self, token: Option<i64>, payloads: bool) -> Result<Vec<Row>, Problem> {
        lease_table::read(&self.tables, self.key, token, See::Committed, payloads)
    }

    /// The newest rows that keep others out, held and kept ones, and what time it is.
    fn live_rows(&self, payloads: bool) -> Result<(Vec<Row>, Now), Problem> {
        let rows = self.rows(None, payloads)?;
        let now = clock::now();
        Ok((live(rows, now)?, now))
    }

    /// The row of a token if the lease is held with it, and what time it is.
    fn held_row(&self, token: i64) -> Result<Option<(Row, Now)>, Problem> {
        let row = self.rows(Some(token), false)?.into_iter().find(|row| row.name == self.name.bytes());
        let now = clock::now();
        Ok(match row {
            Some(row) if !row.grant.kept && is_live(&row.grant, now)? => Some((row, now)),
            _ => None,
        })
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
        let (rows, now) = match self.live_rows(false) {
            Ok(live) => live,
            Err(problem) => return problem,
        };
        let lease = self.describe();
        let others: Vec<&Row> = rows.iter().filter(|row| row.name == self.name.bytes()).collect();
        let taken = others.iter().find(|row| !row.grant.kept);
        match taken {
            Some(row) if others.len() >= usize::from(row.grant.permits) => {
                Error::LeaseTaken { lease, token, holder: for_error(row, row.grant.term.remaining(now)) }.into()
            }
            _ => {
                let ended = self.rows(Some(token), false).ok().and_then(|rows| {
                    let expired_for = -rows.first().filter(|row| !row.grant.kept)?.grant.term.remaining(now);
                    (expired_for >= 0).then_some(expired_for)
                });
                Error::LeaseEnded { lease, token, expired_for: ended }.into()
            }
        }
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
        let first_try = self.try_acquire(&request, false)?;
        let wait = match request.wait {
            Wait::Try => return Ok(first_try),
            wait => wait,
        };
        let Answer::Refused(refusal) = first_try else { return Ok(first_try) };
        let deadline = Deadline::of(wait);
        session::begin_lease_wait(self.key, self.name.bytes(), deadline.at());
        let answer = self.wait_in_queue(&request, deadline, refusal);
        session::end_lease_wait();
        match answer? {
            Answer::Refused(refusal) if wait.fails() => {
                let wait = Waited::of(wait, lock_manager::lock_timeout());
                Err(Error::LeaseNotObtained { lease: self.describe(), wait, holder: refusal.holder }.into())
            }
            answer => Ok(answer),
        }
    }

    /// Queues, and as the first in the queue sleeps until the lease is free.
    fn wait_in_queue(&self, request: &Request<'_>, deadline: Deadline, refusal: Refusal) -> Result<Answer, Problem> {
        let queue = self.queue_tag();
        let Some(wait) = deadline.left() else { return Ok(Answer::Refused(refusal)) };
        let description = self.describe();
        snapshot::give_up_catalog_snapshot();
        if lock_manager::wait(queue, Mode::Exclusive, Scope::Transaction, wait, &description)? == Outcome::NotAvailable
        {
            // The holder may be another by now.
            let (rows, now) = self.live_rows(false)?;
            return Ok(Answer::Refused(self.refusal(&rows, now)));
        }
        session::lead_lease_wait();
        let answer = loop {
            let refusal = match self.try_acquire(request, true)? {
                Answer::Refused(refusal) => refusal,
                granted => break granted,
            };
            let Some(left) = deadline.micros_left() else { break Answer::Refused(refusal) };
            let expiry = refusal.until.map_or(LOOK_AGAIN, |(remaining, _)| remaining);
            snapshot::give_up_catalog_snapshot();
            latch::sleep(left.min(expiry).min(LOOK_AGAIN))?;
        };
        lock_manager::release(queue, Mode::Exclusive, Scope::Transaction);
        Ok(answer)
    }

    fn refusal(&self, live: &[Row], now: Now) -> Refusal {
        let first = live.iter().min_by_key(|row| row.grant.term.remaining(now));
        first.map_or_else(Refusal::unknown, |row| Refusal::by(row, now))
    }

    /// One try. It writes nothing, not even a transaction id, unless the lease is granted.
    fn try_acquire(&self, request: &Request<'_>, is_head: bool) -> Result<Answer, Problem> {
        let (rows, now) = self.live_rows(false)?;
        self.check_rows(&rows, request.permits)?;
        let free = lease::free_slots(request.permits, rows.iter().map(|row| row.grant.slot));
        if free.is_empty() {
            return Ok(Answer::Refused(self.refusal(&rows, now)));
        }
        if is_head {
            return self.try_permits(request, &free);
        }
        let queue = self.queue_tag();
        if lock_manager::try_acquire(queue, Mode::Exclusive, Scope::Transaction)? == Outcome::NotAvailable {
            return Ok(Answer::Refused(Refusal::unknown()));
        }
        let answer = self.try_permits(request, &free)?;
        lock_manager::release(queue, Mode::Exclusive, Scope::Transaction);
        Ok(answer)
    }

    /// As the first in the queue: takes the first permit whose tag is free.
    fn try_permits(&self, request: &Request<'_>, free: &[u16]) -> Result<Answer, Problem> {
        for &slot in free {
            let tag = self.grant_tag(slot);
            if lock_manager::try_acquire(tag, Mode::Exclusive, Scope::Transaction)? == Outcome::NotAvailable {
                continue; // guarded, or being granted, by a transaction under way
            }
            if self.clear_permit(request, slot)? {
                return self.grant(request, slot);
            }
            lock_manager::release(tag, Mode::Exclusive, Scope::Transaction);
        }
        Ok(Answer::Refused(Refusal::unknown()))
    }

    /// With the permit's tag: whether it is free. Rows of it that have ended are deleted.
    fn clear_permit(&self, request: &Request<'_>, slot: u16) -> Result<bool, Problem> {
        'again: loop {
            // Uncommitted rows first: what is committed in between is among the committed ones.
            if self.is_being_taken(request, slot)? {
                return Ok(false);
            }
            let rows = self.rows(None, false)?;
            let now = clock::now();
            let mut ended = Vec::new();
            let mut alive = Vec::new();
            for row in rows {
                if is_live(&row.grant, now)? { alive.push(row) } else { ended.push(row) }
            }
            self.check_rows(&alive, request.permits)?;
            if alive.iter().any(|row| row.grant.slot == slot) {
                return Ok(false);
            }
            for row in ended.iter().filter(|row| row.grant.slot == slot || row.grant.permits != request.permits) {
                match lease_table::delete(&self.tables, row)? {
                    Written::Done => {}
                    Written::Changed => continue 'again,
                    // Deleted by another, which is as good; or renewed by one who looked at the clock before it ended.
                    Written::Busy if self.is_being_taken(request, slot)? => return Ok(false),
                    Written::Busy => {}
                }
            }
            return Ok(true);
        }
    }

    /// Whether a transaction under way takes or prolongs the permit, or takes the lease with another number of permits.
    fn is_being_taken(&self, request: &Request<'_>, slot: u16) -> Result<bool, Problem> {
        let rows = lease_table::read(&self.tables, self.key, None, See::Uncommitted, false)?;
        Ok(rows.iter().any(|row| {
            (row.is_uncommitted || row.is_being_updated)
                && (row.grant.slot == slot || row.grant.permits != request.permits)
        }))
    }

    fn grant(&self, request: &Request<'_>, slot: u16) -> Result<Answer, Problem> {
        let bound = if request.bound { Some(session::bind_lease(self.key)?) } else { None };
        let owner = request.owner.map_or_else(activity::application_or_role, <[u8]>::to_vec);
        session::change_lease(self.key, Touch::Grant);
        let token = fencing::draw(&self.tables)?;
        let grant = Grant {
            token,
            slot,
            permits: request.permits,
            // SAFETY: a question about this process's state.
            role: unsafe { pg_sys::GetUserId() }.to_u32(),
            bound,
            kept: false,
            term: Term::starting(clock::now(), request.ttl),
        };
        let row = NewRow { key: self.key, grant, name: self.name.bytes(), owner: &owner, payload: request.payload };
        lease_table::insert(&self.tables, &row)?;
        let now = clock::now();
        lease_table::sweep(&self.tables, self.key, SWEPT_ENTRIES, |grant| grant.term.remaining(now) <= 0)?;
        Ok(Answer::Granted(grant, owner))
    }

    /// Prolongs the lease from now on.
    ///
    /// # Errors
    /// [`Error::LeaseTaken`], [`Error::LeaseEnded`], [`Error::NotYourLease`], the server's.
    pub fn renew(&self, token: i64, ttl: Option<i64>, payload: Option<Varlena>) -> Result<Renewal, Problem> {
        self.check_may_write("renew")?;
        loop {
            let Some((row, now)) = self.held_row(token)? else { return Err(self.lost(token)) };
            self.check_owner(&row, "renew")?;
            let term = row.grant.term.renewed(now, ttl.unwrap_or(row.grant.term.ttl));
            let change = Change { term: Some(term), payload, ..Change::default() };
            if self.write(&row, Some(change))? {
                return Ok(Renewal { term, requested: row.requested.clone(), waiters: who::lease_waiters(self.key) });
            }
        }
    }

    /// Ends the lease; false if it was not held any more. `keep_for`: others are kept out until so long after the grant.
    ///
    /// # Errors
    /// [`Error::NotYourLease`], the server's.
    pub fn release(&self, token: i64, keep_for: Option<i64>) -> Result<bool, Problem> {
        self.check_may_write("release")?;
        loop {
            let Some((row, now)) = self.held_row(token)? else { return Ok(false) };
            self.check_owner(&row, "release")?;
            let kept = keep_for
                .map(|keep_for| row.grant.term.kept(now, keep_for))
                .filter(|term| term.remaining(now) > 0)
                .map(|term| Change { term: Some(term), kept: true, ..Change::default() });
            if self.write(&row, kept)? {
                return Ok(true);
            }
        }
    }

    /// Whether it is held with that token.
    ///
    /// # Errors
    /// The server's.
    pub fn check(&self, token: i64) -> Result<bool, Problem> {
        session::check_not_parallel()?;
        Ok(self.held_row(token)?.is_some())
    }

    /// Fails unless it is held with that token, and keeps the next grant waiting until this transaction ends.
    ///
    /// # Errors
    /// [`Error::LeaseTaken`], [`Error::LeaseEnded`], [`Error::NotYourLease`], the server's.
    pub fn guard(&self, token: i64) -> Result<(), Problem> {
        session::check_not_parallel()?;
        self.check_not_in_recovery("guard")?;
        session::touch_lease(self.key, Touch::Grant);
        let mut slot = 0; // that of most leases
        loop {
            let tag = self.grant_tag(slot);
            if lock_manager::try_acquire(tag, Mode::Share, Scope::Transaction)? == Outcome::NotAvailable {
                // Somebody is being granted it, or looks whether it is free.
                if self.held_row(token)?.is_none() {
                    return Err(self.lost(token));
                }
                let description = self.describe();
                let outcome = lock_manager::wait(tag, Mode::Share, Scope::Transaction, Wait::Server, &description)?;
                if outcome == Outcome::NotAvailable {
                    let wait = Waited::of(Wait::Server, lock_manager::lock_timeout());
                    return Err(Error::LeaseNotObtained { lease: description, wait, holder: None }.into());
                }
            }
            let Some((row, _)) = self.held_row(token)? else { return Err(self.lost(token)) };
            self.check_owner(&row, "guard")?;
            if row.grant.slot == slot {
                return Ok(());
            }
            lock_manager::release(tag, Mode::Share, Scope::Transaction);
            slot = row.grant.slot;
        }
    }

    /// Asks all holders to hand over; false if there is none. `reason` in the database's encoding.
    ///
    /// # Errors
    /// The server's.
    pub fn request(&self, reason: &[u8]) -> Result<bool, Problem> {
        self.check_may_write("request")?;
        let change = Change { requested: Some(reason), ..Change::default() };
        'again: loop {
            let (rows, _) = self.live_rows(false)?;
            let mut is_held = false;
            for row in rows.iter().filter(|row| !row.grant.kept && row.name == self.name.bytes()) {
                is_held = true;
                if row.requested.as_deref() != Some(reason) && !self.write(row, Some(change))? {
                    continue 'again;
                }
            }
            return Ok(is_held);
        }
    }

    /// Ends all grants, kept ones too; how many.
    ///
    /// # Errors
    /// [`Error::NotYourLease`], the server's.
    pub fn break_all(&self) -> Result<u64, Problem> {
        self.check_may_write("break")?;
        let may_break_any = activity::may_act_as(pg_sys::ROLE_PG_SIGNAL_BACKEND.into());
        let mut ended = 0;
        'again: loop {
            let (rows, _) = self.live_rows(false)?;
            for row in rows.iter().filter(|row| row.name == self.name.bytes()) {
                if !may_break_any {
                    self.check_owner(row, "break")?;
                }
                if !self.write(row, None)? {
                    continue 'again;
                }
                ended += 1;
            }
            return Ok(ended);
        }
    }

    /// The rows of those who hold it.
    ///
    /// # Errors
    /// The server's.
    pub fn holders(&self) -> Result<(Vec<Row>, Now), Problem> {
        session::check_not_parallel()?;
        let (mut rows, now) = self.live_rows(true)?;
        rows.retain(|row| !row.grant.kept && row.name == self.name.bytes());
        Ok((rows, now))
    }

    /// Changes a row, or (None) deletes it; false if it has to be read again: what time it is, and whose the lease is, may
    /// be another thing after a wait for other transactions.
    fn write(&self, row: &Row, change: Option<Change<'_>>) -> Result<bool, Problem> {
        let is_prolonged = change.is_some_and(|change| change.prolongs(&row.grant.term));
        session::change_lease(self.key, if is_prolonged { Touch::Prolong } else { Touch::Grant });
        let written = match change {
            Some(change) => lease_table::update(&self.tables, row, change)?,
            None => lease_table::delete(&self.tables, row)?,
        };
        if written == Written::Busy {
            lease_table::wait_for_others(&self.tables, row)?;
        }
        Ok(written == Written::Done)
    }
}

/// Those of the rows that keep others out.
fn live(rows: Vec<Row>, now: Now) -> Result<Vec<Row>, Problem> {
    let mut live = Vec::with_capacity(rows.len());
    for row in rows {
        if is_live(&row.grant, now)? {
            live.push(row);
        }
    }
    Ok(live)
}

fn is_live(grant: &Grant, now: Now) -> Result<bool, Problem> {
    Ok(grant.term.remaining(now) > 0
        && match grant.bound {
            Some(bound) if !grant.kept => session::is_bound_session_there(bound)?,
            _ => true,
        })
}

fn for_error(row: &Row, remaining: i64) -> LeaseHolder {
    LeaseHolder {
        owner: String::from_utf8_lossy(&row.owner).into_owned(),
        since: who::time_text(row.grant.term.acquired.wall),
        remaining,
    }
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
