//! Holding: renewals, the release, the check and the guard.

use super::table::{Change, Row};
use super::{Lease, State, lazy_release};
use crate::rules::error::Error;
use crate::rules::holds::Scope;
use crate::rules::interval::Wait;
use crate::rules::key::Tag;
use crate::rules::lease::Term;
use crate::rules::mode::Mode;
use crate::server::arguments::Varlena;
use crate::server::lock_manager::{self, Outcome};
use crate::server::report::Problem;
use crate::server::session::{self, Touch};
use crate::server::{clock, who};
use std::time::{Duration, Instant};

/// A renewal that has taken so long has waited for another transaction.
const LATE: Duration = Duration::from_millis(100);
/// After so long a guard looks again whether its lease is held.
const A_MOMENT: Wait = Wait::Millis(100);

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

impl Lease<'_> {
    /// Prolongs the lease from now on.
    ///
    /// # Errors
    /// [`Error::LeaseTaken`], [`Error::LeaseEnded`], [`Error::NotYourLease`], the server's.
    pub fn renew(&self, token: i64, ttl: Option<i64>, payload: Option<Varlena>) -> Result<Renewal, Problem> {
        self.check_may_write("renew")?;
        let renewed = |row: &Row, now| {
            let term = row.grant.term.renewed(now, ttl.unwrap_or(row.grant.term.ttl));
            (term, Some(Change { term: Some(term), payload, ..Change::default() }))
        };
        loop {
            let start = Instant::now();
            let Some((row, state)) = self.held(token)? else { return Err(self.lost(token)) };
            self.check_owner(&row, "renew")?;
            let (mut term, change) = renewed(&row, state.now);
            if !self.write(&row, change)? {
                continue;
            }
            self.check_in_time(&row)?;
            if start.elapsed() > LATE {
                // It has waited for another transaction: once more, from now on. The row is ours until this one ends.
                let State { now, live, ended, .. } = self.state(false)?;
                if let Some(row) = live.iter().chain(&ended).find(|row| row.grant.token == token) {
                    let (later, change) = renewed(row, now);
                    self.write(row, change)?;
                    term = later;
                }
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
            let is_written = match kept {
                Some(_) => self.write(&row, kept)?,
                None => lazy_release::note(|| self.write(&row, None))?,
            };
            if !is_written {
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
        if !self.may_lock()? {
            // What was taken before the rule may be guarded; anybody else is not to be in the way of those who may lock it.
            self.guarded(token)?;
        }
        // Even one that fails may be in the way of a try, for a moment.
        session::touch_lease(self.key, Touch::Prolong);
        self.share(token, self.tag(), Mode::IntentShare)?;
        let row = self.guarded(token)?;
        if row.grant.permits > 1 {
            self.share(token, self.permit_tag(row.grant.slot), Mode::Share)?;
            self.guarded(token)?;
        }
        session::touch_lease(self.key, Touch::Grant);
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
        let start = Instant::now();
        let lock_timeout = Duration::from_millis(lock_manager::lock_timeout() as u64);
        while lock_manager::try_acquire(tag, mode, Scope::Transaction)? == Outcome::NotAvailable {
            if self.held(token)?.is_none() {
                return Err(self.lost(token));
            }
            let description = self.describe();
            if lock_manager::wait(tag, mode, Scope::Transaction, A_MOMENT, &description)? == Outcome::Granted {
                return Ok(());
            }
            if !lock_timeout.is_zero() && start.elapsed() >= lock_timeout {
                return Err(self.not_obtained(Wait::Server));
            }
        }
        Ok(())
    }
}
