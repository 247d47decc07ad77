//! Named locks.

use super::arguments::{lock, request, required, wait};
use crate::rules::holds::Scope;
use crate::rules::interval::hold_limit_micros;
use crate::server::arguments::{IntervalArgument, ModeArgument, Row, Utf8, timestamp};
use crate::server::report::answer;
use crate::server::session;
use crate::server::snapshot;
use pgrx::datum::TimestampWithTimeZone;
use pgrx::prelude::*;

#[pg_extern(sql = false)]
fn named_lock(
    name: Option<Utf8<'_>>,
    timeout: Option<IntervalArgument>,
    mode: Option<ModeArgument>,
    hold_limit: Option<IntervalArgument>,
    cluster_wide: Option<bool>,
) -> bool {
    answer((|| session::acquire(&lock(name, cluster_wide)?, request(Scope::Session, timeout, mode, hold_limit)?))())
}

#[pg_extern(sql = false)]
fn named_lock_strict(
    name: Option<Utf8<'_>>,
    timeout: Option<IntervalArgument>,
    mode: Option<ModeArgument>,
    hold_limit: Option<IntervalArgument>,
    cluster_wide: Option<bool>,
) {
    answer((|| {
        session::acquire_strict(&lock(name, cluster_wide)?, request(Scope::Session, timeout, mode, hold_limit)?)
    })());
}

#[pg_extern(sql = false)]
fn named_xact_lock(
    name: Option<Utf8<'_>>,
    timeout: Option<IntervalArgument>,
    mode: Option<ModeArgument>,
    cluster_wide: Option<bool>,
) -> bool {
    answer((|| session::acquire(&lock(name, cluster_wide)?, request(Scope::Transaction, timeout, mode, None)?))())
}

#[pg_extern(sql = false)]
fn named_xact_lock_strict(
    name: Option<Utf8<'_>>,
    timeout: Option<IntervalArgument>,
    mode: Option<ModeArgument>,
    cluster_wide: Option<bool>,
) {
    answer(
        (|| session::acquire_strict(&lock(name, cluster_wide)?, request(Scope::Transaction, timeout, mode, None)?))(),
    );
}

/// The last argument, INOUT in SQL, only makes the row that the procedure returns.
#[pg_extern(sql = false)]
fn named_lock_wait(
    name: Option<Utf8<'_>>,
    timeout: Option<IntervalArgument>,
    mode: Option<ModeArgument>,
    hold_limit: Option<IntervalArgument>,
    cluster_wide: Option<bool>,
    _acquired: Option<bool>,
    fcinfo: pg_sys::FunctionCallInfo,
) -> Row {
    let acquired = answer((|| {
        let lock = lock(name, cluster_wide)?;
        let request = request(Scope::Session, timeout, mode, hold_limit)?;
        snapshot::without_snapshot(fcinfo, &lock.describe(), || session::acquire(&lock, request))
    })());
    Row::new(fcinfo, [acquired.into()])
}

#[pg_extern(sql = false)]
fn named_unlock(
    name: Option<Utf8<'_>>,
    mode: Option<ModeArgument>,
    all_holds: Option<bool>,
    cluster_wide: Option<bool>,
) -> i32 {
    let remaining = answer((|| {
        let lock = lock(name, cluster_wide)?;
        session::release(&lock, mode.map(|mode| mode.0), required("all_holds", all_holds)?)
    })());
    remaining as i32
}

#[pg_extern(sql = false)]
fn named_unlock_all() -> i32 {
    answer(session::release_all()) as i32
}

#[pg_extern(sql = false)]
fn named_lock_held(name: Option<Utf8<'_>>, mode: Option<ModeArgument>, cluster_wide: Option<bool>) -> i32 {
    answer((|| Ok(session::holds(&lock(name, cluster_wide)?, mode.map(|mode| mode.0))))()) as i32
}

#[pg_extern(sql = false)]
fn named_lock_convert(
    name: Option<Utf8<'_>>,
    mode: Option<ModeArgument>,
    timeout: Option<IntervalArgument>,
    cluster_wide: Option<bool>,
) -> bool {
    answer((|| session::convert(&lock(name, cluster_wide)?, required("mode", mode)?.0, wait(timeout)?))())
}

#[pg_extern(sql = false)]
fn named_lock_extend(
    name: Option<Utf8<'_>>,
    hold_limit: Option<IntervalArgument>,
    cluster_wide: Option<bool>,
) -> Option<TimestampWithTimeZone> {
    let expires_at = answer((|| {
        let limit = hold_limit_micros(hold_limit.map(|limit| limit.0))?;
        session::extend(&lock(name, cluster_wide)?, limit)
    })());
    expires_at.map(timestamp)
}

#[pg_extern(sql = false)]
fn named_lock_key(name: Option<Utf8<'_>>, cluster_wide: Option<bool>, fcinfo: pg_sys::FunctionCallInfo) -> Row {
    let tag = answer((|| Ok(lock(name, cluster_wide)?.tag()))());
    Row::new(fcinfo, [tag.database.into(), tag.high.into(), tag.low.into(), (tag.class as i16).into()])
}
