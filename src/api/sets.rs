//! Sets of named locks. Arguments in the order of `sql/sets.sql`.

use super::arguments::{by_rules, required, set};
use crate::rules::error::Error;
use crate::rules::holds::Scope;
use crate::rules::interval::Wait;
use crate::server::arguments::{Arguments, ServerText};
use crate::server::report::{Problem, answer};
use crate::server::session::sets;
use pgrx::prelude::*;

/// `(names, timeout, mode)`
fn all(fcinfo: pg_sys::FunctionCallInfo, scope: Scope) -> Result<bool, Problem> {
    let args = Arguments::of(fcinfo);
    let wait = Wait::from_timeout(args.interval(1))?;
    let mut parts = sets::in_order(set(args.texts(0), scope, args.mode(2)?)?)?;
    let wait = by_rules(fcinfo, &mut parts, wait)?;
    sets::acquire_all(&parts, scope, wait, || sets::describe(&parts))
}

/// `(names, max_locks, mode)`
fn any(fcinfo: pg_sys::FunctionCallInfo, scope: Scope) -> Result<Vec<ServerText>, Problem> {
    let args = Arguments::of(fcinfo);
    let max_locks = required("max_locks", args.integer(1))?;
    let max_locks = usize::try_from(max_locks).ok().filter(|&max_locks| max_locks > 0).ok_or(Error::MaxLocks)?;
    let names = args.texts(0);
    let mut parts = set(names, scope, args.mode(2)?)?;
    by_rules(fcinfo, &mut parts, Wait::Try)?;
    let names = required("names", names)?;
    let taken = sets::acquire_any(&parts, scope, max_locks)?;
    Ok(taken
        .into_iter()
        .filter_map(|number| Some(ServerText::from_bytes(names.server_text(number)?.to_vec())))
        .collect())
}

#[pg_extern(sql = false)]
fn named_lock_all(fcinfo: pg_sys::FunctionCallInfo) -> bool {
    answer(all(fcinfo, Scope::Session))
}

#[pg_extern(sql = false)]
fn named_xact_lock_all(fcinfo: pg_sys::FunctionCallInfo) -> bool {
    answer(all(fcinfo, Scope::Transaction))
}

#[pg_extern(sql = false)]
fn named_lock_any(fcinfo: pg_sys::FunctionCallInfo) -> SetOfIterator<'static, ServerText> {
    // All of it now: no row fetched, more or less, changes what is locked.
    SetOfIterator::new(answer(any(fcinfo, Scope::Session)))
}

#[pg_extern(sql = false)]
fn named_xact_lock_any(fcinfo: pg_sys::FunctionCallInfo) -> SetOfIterator<'static, ServerText> {
    SetOfIterator::new(answer(any(fcinfo, Scope::Transaction)))
}
