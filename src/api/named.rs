//! Named locks. Arguments in the order of `sql/named_locks.sql`.

use super::arguments::{by_rule, by_rules, named, request, required};
use crate::rules::holds::Scope;
use crate::rules::mode::Mode;
use crate::server::arguments::{Arguments, Row, timestamp};
use crate::server::report::{Problem, answer};
use crate::server::session::{self, Lock, Request, trees};
use crate::server::snapshot;
use pgrx::datum::TimestampWithTimeZone;
use pgrx::prelude::*;

/// `(name, timeout, mode, hold_limit, cluster_wide)`
#[inline(always)]
fn session_lock<'a>(fcinfo: pg_sys::FunctionCallInfo) -> Result<(Lock<'a>, Request), Problem> {
    let args = Arguments::of(fcinfo);
    // The last one first: that there are so many is looked at once.
    let cluster_wide = args.boolean(4);
    let lock = named(args.text(0), cluster_wide)?;
    let request = request(Scope::Session, args.interval(1), args.mode(2)?, args.interval(3))?;
    Ok((lock, by_rule(fcinfo, &lock, request)?))
}

/// `(name, timeout, mode, cluster_wide)`
#[inline(always)]
fn transaction_lock<'a>(fcinfo: pg_sys::FunctionCallInfo) -> Result<(Lock<'a>, Request), Problem> {
    let args = Arguments::of(fcinfo);
    let cluster_wide = args.boolean(3);
    let lock = named(args.text(0), cluster_wide)?;
    let request = request(Scope::Transaction, args.interval(1), args.mode(2)?, None)?;
    Ok((lock, by_rule(fcinfo, &lock, request)?))
}

#[pg_extern(sql = false)]
fn named_lock(fcinfo: pg_sys::FunctionCallInfo) -> bool {
    answer(session_lock(fcinfo).and_then(|(lock, request)| session::acquire(&lock, request)))
}

#[pg_extern(sql = false)]
fn named_lock_strict(fcinfo: pg_sys::FunctionCallInfo) {
    answer(session_lock(fcinfo).and_then(|(lock, request)| session::acquire_strict(&lock, request)));
}

#[pg_extern(sql = false)]
fn named_xact_lock(fcinfo: pg_sys::FunctionCallInfo) -> bool {
    answer(transaction_lock(fcinfo).and_then(|(lock, request)| session::acquire(&lock, request)))
}

#[pg_extern(sql = false)]
fn named_xact_lock_strict(fcinfo: pg_sys::FunctionCallInfo) {
    answer(transaction_lock(fcinfo).and_then(|(lock, request)| session::acquire_strict(&lock, request)));
}

/// The last argument, INOUT in SQL, only makes the row that the procedure returns.
#[pg_extern(sql = false)]
fn named_lock_wait(fcinfo: pg_sys::FunctionCallInfo) -> Row {
    let acquired = answer(session_lock(fcinfo).and_then(|(lock, request)| {
        snapshot::without_snapshot(fcinfo, || lock.describe(), || session::acquire(&lock, request))
    }));
    Row::new(fcinfo, [acquired.into_datum()])
}

/// `(name, mode, all_holds, cluster_wide)`
#[pg_extern(sql = false)]
fn named_unlock(fcinfo: pg_sys::FunctionCallInfo) -> i32 {
    let args = Arguments::of(fcinfo);
    let cluster_wide = args.boolean(3);
    let remaining = named(args.text(0), cluster_wide).and_then(|lock| {
        let all_holds = required("all_holds", args.boolean(2))?;
        session::release(&lock, args.mode(1)?, all_holds)
    });
    count(answer(remaining))
}

#[pg_extern(sql = false)]
fn named_unlock_all() -> i32 {
    count(answer(session::release_all()))
}

/// `(name, mode, cluster_wide)`
#[pg_extern(sql = false)]
fn named_lock_held(fcinfo: pg_sys::FunctionCallInfo) -> i32 {
    let args = Arguments::of(fcinfo);
    count(answer(named(args.text(0), args.boolean(2)).and_then(|lock| session::holds(&lock, args.mode(1)?))))
}

/// `(name, mode, timeout, cluster_wide)`
#[pg_extern(sql = false)]
fn named_lock_convert(fcinfo: pg_sys::FunctionCallInfo) -> bool {
    let args = Arguments::of(fcinfo);
    answer(named(args.text(0), args.boolean(3)).and_then(|lock| {
        let request = request(Scope::Session, args.interval(2), args.mode(1)?, None)?;
        let request = by_rule(fcinfo, &lock, request)?;
        match trees::parts_to_convert(&lock, request.mode) {
            Some(mut parts) => {
                let wait = by_rules(fcinfo, &mut parts, request.wait)?;
                trees::convert(&parts, wait)
            }
            None => session::convert(&lock, request.mode, request.wait),
        }
    }))
}

/// `(name, hold_limit, cluster_wide)`
#[pg_extern(sql = false)]
fn named_lock_extend(fcinfo: pg_sys::FunctionCallInfo) -> Option<TimestampWithTimeZone> {
    let args = Arguments::of(fcinfo);
    let expires_at = named(args.text(0), args.boolean(2)).and_then(|lock| {
        let request = request(Scope::Session, None, Some(Mode::Exclusive), args.interval(1))?;
        session::extend(&lock, by_rule(fcinfo, &lock, request)?.hold_limit)
    });
    answer(expires_at).map(timestamp)
}

/// `(name, cluster_wide)`
#[pg_extern(sql = false)]
fn named_lock_key(fcinfo: pg_sys::FunctionCallInfo) -> Row {
    let args = Arguments::of(fcinfo);
    let tag = answer(named(args.text(0), args.boolean(1))).tag();
    let values = [tag.database.into(), tag.high.into(), tag.low.into(), (tag.class as i16).into()];
    Row::new(fcinfo, values.map(Some))
}

/// A count of holds as SQL's integer.
fn count(holds: u64) -> i32 {
    i32::try_from(holds).unwrap_or(i32::MAX)
}
