//! Acquiring: a try, the queue, the grant.

use super::table::{self, NewRow, Others, Row, See, Written};
use super::{Lease, State, current_role, fencing, has_run_out, is_live};
use crate::rules::error::Error;
use crate::rules::holds::Scope;
use crate::rules::interval::Wait;
use crate::rules::key::Tag;
use crate::rules::lease::{self, Grant, Term};
use crate::rules::mode::Mode;
use crate::rules::name::{display, domain_of};
use crate::server::arguments::Varlena;
use crate::server::deadline::Deadline;
use crate::server::lock_manager::{self, Outcome};
use crate::server::queue::{self, Queue};
use crate::server::report::Problem;
use crate::server::session::{self, Touch};
use crate::server::snapshot::RowsKept;
use crate::server::{activity, clock, statistics, who};

/// When to try again where nobody can say when the lease is free: 100 ms.
const RETRY_AFTER: i64 = 100_000;
/// With every fourth grant entries of the index are looked at, to delete rows that have ended and to mark the entries of
/// deleted ones: four for each that a grant adds.
const SWEEP_EVERY: i64 = 4;
/// So many each time.
const SWEPT_ENTRIES: usize = 16;

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

impl Lease<'_> {
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
        if request.wait == Wait::Try || matches!(first_try, Answer::Granted(..)) {
            return Ok(first_try);
        }
        match self.wait(&claim)? {
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
        if self.keeps_others_waiting() {
            return self.try_free_permits(claim, Some(free));
        }
        // Beside other tries; not beside the first in the queue, nor ahead of those who wait.
        let answer = queue::pass(self.queue_tag(), || self.try_free_permits(claim, Some(free)).map(Some))?;
        Ok(answer.unwrap_or(Answer::Refused(Refusal::unknown())))
    }

    /// Queues, and as the first in the queue sleeps until the lease is free.
    fn wait(&self, claim: &Claim<'_>) -> Result<Answer, Problem> {
        let queue = Queue {
            tag: self.queue_tag(),
            name: self.name.bytes(),
            description: self.describe(),
            is_passed: self.keeps_others_waiting(),
        };
        let granted = queue::wait(&queue, Deadline::of(claim.request.wait), || {
            let _rows_kept = RowsKept::new()?;
            Ok(match self.try_free_permits(claim, None)? {
                Answer::Refused(refusal) => Err(refusal.until.map_or(queue::LOOK_AGAIN, |(remaining, _)| remaining)),
                granted => Ok(granted),
            })
        })?;
        match granted {
            Some(granted) => Ok(granted),
            // The holder may be another by now.
            None => Ok(Answer::Refused(self.refusal(&self.state(false)?))),
        }
    }

    /// Whether this transaction guards, has been granted or has ended the lease: others cannot have it before its end, and so
    /// it need not queue behind them, who would wait for it.
    fn keeps_others_waiting(&self) -> bool {
        session::has_touched_lease(self.key)
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
                let rows = table::read(&self.tables, self.key, None, See::Uncommitted, false)?;
                let is_unfinished = |row: &Row| row.is_uncommitted || row.is_being_updated;
                let mut grants =
                    rows.iter().filter(|row| row.for_token.is_none() && !broken.contains(&row.grant.token));
                if grants.any(|row| is_unfinished(row) && is_in_the_way(row)) {
                    return Ok(None); // perhaps prolonged
                }
            }
            let rows = table::read(&self.tables, self.key, None, See::Committed, false)?;
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
            let before = state.ended.iter().filter(|row| row.grant.slot == slot).max_by_key(|row| row.grant.token);
            let is_takeover = before.map_or(Ok(false), |row| state.has_expired(row))?;
            statistics::lease_granted(self.name.domain(), is_takeover);
            self.clear_away(&state, state.ended.iter().filter(|row| is_in_the_way(row)))?;
            self.sweep(grant.token)?;
            return Ok(Some(Answer::Granted(grant, claim.owner.clone())));
        }
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
        table::insert(&self.tables, &row)?;
        Ok(grant)
    }

    /// Deletes rows of grants that have ended, and the orders about them, as far as nobody else is at them.
    fn clear_away<'r>(&self, state: &State, ended: impl Iterator<Item = &'r Row>) -> Result<(), Problem> {
        for row in ended {
            if table::delete(&self.tables, row, Others::Skip)? == Written::Done {
                if state.has_expired(row)? {
                    statistics::lease_expired(domain_of(&row.name));
                }
                self.clear_orders(row.grant.token, &state.orders)?;
            }
        }
        Ok(())
    }

    /// Now and then deletes what has ended among a few rows of any leases, others with each token.
    fn sweep(&self, token: i64) -> Result<(), Problem> {
        if token % SWEEP_EVERY != 0 {
            return Ok(());
        }
        let now = clock::now();
        let has_ended = |row: &Row| {
            let Some(token) = row.for_token else { return Ok(!is_live(&row.grant, now)?) };
            // What the first look misses because it is being moved, the second sees.
            for see in [See::Uncommitted, See::Committed] {
                if !table::read(&self.tables, row.key, Some(token), see, false)?.is_empty() {
                    return Ok(false);
                }
            }
            Ok(true)
        };
        for row in table::sweep(&self.tables, token, SWEPT_ENTRIES, has_ended)? {
            if row.for_token.is_none() && has_run_out(&row.grant, now)? {
                // Perhaps it has been broken before that: only orders can tell.
                let orders = table::read(&self.tables, row.key, None, See::Committed, false)?;
                if !orders.iter().any(|order| order.breaks(row.grant.token)) {
                    statistics::lease_expired(domain_of(&row.name));
                }
            }
        }
        Ok(())
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
