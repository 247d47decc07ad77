//! Trees of named locks. Arguments in the order of `sql/trees.sql`.

use super::arguments::{by_rules, path, required};
use crate::rules::holds::Scope;
use crate::rules::interval::Wait;
use crate::server::arguments::Arguments;
use crate::server::report::{Problem, answer};
use crate::server::session::trees;
use pgrx::prelude::*;

/// `(path, timeout, mode)`
fn lock(fcinfo: pg_sys::FunctionCallInfo, scope: Scope) -> Result<bool, Problem> {
    let args = Arguments::of(fcinfo);
    let wait = Wait::from_timeout(args.interval(1))?;
    let mut parts = trees::parts(path(args.text(0))?, required("mode", args.mode(2)?)?, scope);
    let wait = by_rules(fcinfo, &mut parts, wait)?;
    trees::acquire(&parts, scope, wait)
}

#[pg_extern(sql = false)]
fn named_lock_tree(fcinfo: pg_sys::FunctionCallInfo) -> bool {
    answer(lock(fcinfo, Scope::Session))
}

#[pg_extern(sql = false)]
fn named_xact_lock_tree(fcinfo: pg_sys::FunctionCallInfo) -> bool {
    answer(lock(fcinfo, Scope::Transaction))
}

/// `(path)`
#[pg_extern(sql = false)]
fn named_unlock_tree(fcinfo: pg_sys::FunctionCallInfo) -> i32 {
    let remaining = answer(path(Arguments::of(fcinfo).text(0)).and_then(trees::release));
    i32::try_from(remaining).unwrap_or(i32::MAX)
}
