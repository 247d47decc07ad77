//! Leases: what the SQL functions do, on rows, tags and the clock together.
//!
//! *Tags.* A grant is made in this order: first in the queue, the tags taken, the rows read, a token drawn, the row
//! inserted. A guard takes the tags too, in weaker modes, and then reads the newest row and the clock. So either the guarded
//! transaction ends before the next grant is made, or it finds its lease gone.
//!
//! *Renewals* take no tag. One succeeds only if the lease has not ended when its row is written. So a grant that first
//! looks at the clock, then for unfinished changes, then at the newest rows, sees every renewal of a lease that it takes
//! for ended.

mod acquire;
mod fencing;
mod hold;
pub mod lazy_release;
mod orders;
mod table;

pub use acquire::{Answer, Request};
pub use table::{Row, See, read, read_all};

use super::arguments;
use super::clock;
use super::domains;
use super::encoding;
use super::ffi;
use super::lock_manager;
use super::report::Problem;
use super::session::{self, Touch};
use super::tables::Tables;
use super::who;
use crate::rules::domain::Rule;
use crate::rules::error::{Error, LeaseHolder, Waited};
use crate::rules::interval::Wait;
use crate::rules::key::{Tag, key_of};
use crate::rules::lease::{Grant, Now};
use crate::rules::name::{Name, display};
use crate::rules::payload;
use pgrx::pg_sys;
use table::{Change, Others, Written};

/// A lease that a call is about.
#[derive(Clone, Copy, Debug)]
pub struct Lease<'a> {
    tables: Tables,
    name: Name<'a>,
    key: u64,
}

impl<'a> Lease<'a> {
    /// The lease of a name in this database.
    pub fn named(tables: Tables, name: Name<'a>) -> Self {
        Self { tables, name, key: key_of(name) }
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
        Tag::lease_queue(self.key, ffi::my_database())
    }

    /// The newest rows, and what they mean now.
    fn state(&self, payloads: bool) -> Result<State, Problem> {
        let rows = table::read(&self.tables, self.key, None, See::Committed, payloads)?;
        State::of(rows, clock::now())
    }

    /// The grant with that token, if it is held.
    fn held(&self, token: i64) -> Result<Option<(Row, State)>, Problem> {
        let mut state = self.state(false)?;
        let is_it = |row: &Row| row.grant.token == token && self.is_held(row);
        Ok(state.live.iter().position(is_it).map(|position| (state.live.swap_remove(position), state)))
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

    /// Whether a live row is one of somebody who holds this lease.
    fn is_held(&self, row: &Row) -> bool {
        !row.grant.kept && row.name == self.name.bytes()
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

    /// Changes a row, or (None) deletes it; false if it has to be read again. Waits for a transaction that has an unfinished
    /// change of it: what time it is may be another thing then.
    fn write(&self, row: &Row, change: Option<Change>) -> Result<bool, Problem> {
        let is_prolonged = change.is_some_and(|change| change.prolongs(&row.grant.term));
        session::change_lease(self.key, if is_prolonged { Touch::Prolong } else { Touch::Grant });
        let written = match change {
            Some(change) => table::update(&self.tables, row, change)?,
            None => table::delete(&self.tables, row, Others::Wait)?,
        };
        Ok(written == Written::Done)
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
            let is_broken = orders.iter().any(|order| order.breaks(row.grant.token));
            if !is_broken && is_live(&row.grant, now)? { live.push(row) } else { ended.push(row) }
        }
        Ok(Self { now, live, ended, orders })
    }

    /// The tokens of grants that an order has ended, whatever their rows say.
    fn broken(&self) -> impl Iterator<Item = i64> {
        self.orders.iter().filter(|order| order.is_break()).filter_map(|order| order.for_token)
    }

    /// Whether a grant has ended by its time alone: nobody has released or broken it.
    fn has_expired(&self, row: &Row) -> Result<bool, Problem> {
        Ok(!self.orders.iter().any(|order| order.breaks(row.grant.token)) && has_run_out(&row.grant, self.now)?)
    }
}

fn is_live(grant: &Grant, now: Now) -> Result<bool, Problem> {
    Ok(grant.term.remaining(now) > 0
        && match grant.bound {
            Some(bound) if !grant.kept => session::is_bound_session_there(bound)?,
            _ => true,
        })
}

/// Whether a grant's time is over, and was not made so by its holder or the end of the holder's session.
fn has_run_out(grant: &Grant, now: Now) -> Result<bool, Problem> {
    Ok(!grant.kept
        && grant.term.remaining(now) <= 0
        && grant.bound.map_or(Ok(true), session::is_bound_session_there)?)
}

fn current_role() -> u32 {
    // SAFETY: a question about this process's state.
    unsafe { pg_sys::GetUserId() }.to_u32()
}
