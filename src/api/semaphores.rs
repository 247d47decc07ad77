//! Semaphores. Arguments in the order of `sql/semaphores.sql`.

use super::arguments::{by_rule, permits, request, required, slot};
use crate::rules::holds::Scope;
use crate::rules::mode::Mode;
use crate::rules::name::Name;
use crate::server::arguments::Arguments;
use crate::server::report::{Problem, answer};
use crate::server::session::{Lock, semaphores};
use pgrx::prelude::*;

/// The semaphore that a call's first argument names.
fn semaphore(args: Arguments<'_>) -> Result<Lock<'_>, Problem> {
    Ok(Lock::semaphore(Name::new(required("name", args.text(0))?)?))
}

/// `(name, permits, timeout, hold_limit)`
#[pg_extern(sql = false)]
fn named_semaphore(fcinfo: pg_sys::FunctionCallInfo) -> Option<i32> {
    let args = Arguments::of(fcinfo);
    let taken = semaphore(args).and_then(|semaphore| {
        let permits = permits(args.integer(1))?;
        let request = request(Scope::Session, args.interval(2), Some(Mode::Exclusive), args.interval(3))?;
        semaphores::acquire(&semaphore, permits, by_rule(fcinfo, &semaphore, request)?)
    });
    answer(taken).map(i32::from)
}

/// `(name, slot)`
#[pg_extern(sql = false)]
fn named_semaphore_release(fcinfo: pg_sys::FunctionCallInfo) {
    let args = Arguments::of(fcinfo);
    answer(semaphore(args).and_then(|semaphore| semaphores::release(&semaphore, slot(args.integer(1))?)));
}
