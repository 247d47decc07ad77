//! SQL's own advisory locks, with a timeout. Arguments in the order of `sql/native_locks.sql`.

use super::arguments::{native_request, required};
use crate::rules::holds::Scope;
use crate::server::arguments::Arguments;
use crate::server::report::{Problem, answer};
use crate::server::session::{self, Lock, Request};
use pgrx::prelude::*;

/// How a call gives the key.
#[derive(Clone, Copy)]
enum Key {
    /// `key bigint`
    Bigint,
    /// `key1 integer, key2 integer`
    Pair,
}

/// The key, then `timeout, mode` and, for the session forms, `hold_limit`.
fn lock(args: Arguments<'_>, key: Key, scope: Scope) -> Result<(Lock<'static>, Request), Problem> {
    let (lock, keys) = match key {
        Key::Bigint => (Lock::bigint(required("key", args.bigint(0))?), 1),
        Key::Pair => (Lock::pair(required("key1", args.integer(0))?, required("key2", args.integer(1))?), 2),
    };
    let hold_limit = match scope {
        Scope::Session => args.interval(keys + 2),
        Scope::Transaction => None,
    };
    Ok((lock, native_request(scope, args.interval(keys), args.mode(keys + 1)?, hold_limit)?))
}

fn acquire(fcinfo: pg_sys::FunctionCallInfo, key: Key, scope: Scope) -> bool {
    answer(lock(Arguments::of(fcinfo), key, scope).and_then(|(lock, request)| session::acquire(&lock, request)))
}

fn acquire_strict(fcinfo: pg_sys::FunctionCallInfo, key: Key, scope: Scope) {
    answer(lock(Arguments::of(fcinfo), key, scope).and_then(|(lock, request)| session::acquire_strict(&lock, request)));
}

#[pg_extern(sql = false)]
fn advisory_lock(fcinfo: pg_sys::FunctionCallInfo) -> bool {
    acquire(fcinfo, Key::Bigint, Scope::Session)
}

#[pg_extern(sql = false)]
fn advisory_lock_strict(fcinfo: pg_sys::FunctionCallInfo) {
    acquire_strict(fcinfo, Key::Bigint, Scope::Session);
}

#[pg_extern(sql = false)]
fn advisory_xact_lock(fcinfo: pg_sys::FunctionCallInfo) -> bool {
    acquire(fcinfo, Key::Bigint, Scope::Transaction)
}

#[pg_extern(sql = false)]
fn advisory_xact_lock_strict(fcinfo: pg_sys::FunctionCallInfo) {
    acquire_strict(fcinfo, Key::Bigint, Scope::Transaction);
}

#[pg_extern(sql = false)]
fn advisory_lock2(fcinfo: pg_sys::FunctionCallInfo) -> bool {
    acquire(fcinfo, Key::Pair, Scope::Session)
}

#[pg_extern(sql = false)]
fn advisory_lock2_strict(fcinfo: pg_sys::FunctionCallInfo) {
    acquire_strict(fcinfo, Key::Pair, Scope::Session);
}

#[pg_extern(sql = false)]
fn advisory_xact_lock2(fcinfo: pg_sys::FunctionCallInfo) -> bool {
    acquire(fcinfo, Key::Pair, Scope::Transaction)
}

#[pg_extern(sql = false)]
fn advisory_xact_lock2_strict(fcinfo: pg_sys::FunctionCallInfo) {
    acquire_strict(fcinfo, Key::Pair, Scope::Transaction);
}
