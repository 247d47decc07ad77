//! SQL's own advisory locks, with a timeout.

use super::arguments::{native_request, required};
use crate::rules::error::Error;
use crate::rules::holds::Scope;
use crate::server::arguments::{IntervalArgument, ModeArgument};
use crate::server::report::answer;
use crate::server::session::{self, Lock};
use pgrx::prelude::*;

fn bigint(key: Option<i64>) -> Result<Lock<'static>, Error> {
    Ok(Lock::bigint(required("key", key)?))
}

fn pair(key1: Option<i32>, key2: Option<i32>) -> Result<Lock<'static>, Error> {
    Ok(Lock::pair(required("key1", key1)?, required("key2", key2)?))
}

#[pg_extern(sql = false)]
fn advisory_lock(
    key: Option<i64>,
    timeout: Option<IntervalArgument>,
    mode: Option<ModeArgument>,
    hold_limit: Option<IntervalArgument>,
) -> bool {
    answer((|| session::acquire(&bigint(key)?, native_request(Scope::Session, timeout, mode, hold_limit)?))())
}

#[pg_extern(sql = false)]
fn advisory_lock_strict(
    key: Option<i64>,
    timeout: Option<IntervalArgument>,
    mode: Option<ModeArgument>,
    hold_limit: Option<IntervalArgument>,
) {
    answer((|| session::acquire_strict(&bigint(key)?, native_request(Scope::Session, timeout, mode, hold_limit)?))());
}

#[pg_extern(sql = false)]
fn advisory_xact_lock(key: Option<i64>, timeout: Option<IntervalArgument>, mode: Option<ModeArgument>) -> bool {
    answer((|| session::acquire(&bigint(key)?, native_request(Scope::Transaction, timeout, mode, None)?))())
}

#[pg_extern(sql = false)]
fn advisory_xact_lock_strict(key: Option<i64>, timeout: Option<IntervalArgument>, mode: Option<ModeArgument>) {
    answer((|| session::acquire_strict(&bigint(key)?, native_request(Scope::Transaction, timeout, mode, None)?))());
}

#[pg_extern(sql = false)]
fn advisory_lock2(
    key1: Option<i32>,
    key2: Option<i32>,
    timeout: Option<IntervalArgument>,
    mode: Option<ModeArgument>,
    hold_limit: Option<IntervalArgument>,
) -> bool {
    answer((|| session::acquire(&pair(key1, key2)?, native_request(Scope::Session, timeout, mode, hold_limit)?))())
}

#[pg_extern(sql = false)]
fn advisory_lock2_strict(
    key1: Option<i32>,
    key2: Option<i32>,
    timeout: Option<IntervalArgument>,
    mode: Option<ModeArgument>,
    hold_limit: Option<IntervalArgument>,
) {
    answer((|| {
        session::acquire_strict(&pair(key1, key2)?, native_request(Scope::Session, timeout, mode, hold_limit)?)
    })());
}

#[pg_extern(sql = false)]
fn advisory_xact_lock2(
    key1: Option<i32>,
    key2: Option<i32>,
    timeout: Option<IntervalArgument>,
    mode: Option<ModeArgument>,
) -> bool {
    answer((|| session::acquire(&pair(key1, key2)?, native_request(Scope::Transaction, timeout, mode, None)?))())
}

#[pg_extern(sql = false)]
fn advisory_xact_lock2_strict(
    key1: Option<i32>,
    key2: Option<i32>,
    timeout: Option<IntervalArgument>,
    mode: Option<ModeArgument>,
) {
    answer((|| session::acquire_strict(&pair(key1, key2)?, native_request(Scope::Transaction, timeout, mode, None)?))());
}
