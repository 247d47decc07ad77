//! Leases. Arguments in the order of `sql/leases.sql`.

use super::arguments::{permits, required};
use crate::rules::error::Error;
use crate::rules::interval::{Wait, keep_for_micros, ttl_micros};
use crate::rules::name::{MAX_NAME_BYTES, Name};
use crate::server::arguments::{Arguments, Jsonb, Row, ServerText, interval, timestamp};
use crate::server::lease::{Answer, Lease, Request};
use crate::server::lock_manager::lock_timeout;
use crate::server::report::{Problem, answer};
use crate::server::snapshot;
use crate::server::tables::Tables;
use pgrx::datum::{Interval, TimestampWithTimeZone};
use pgrx::prelude::*;

/// The lease that a call's first argument names.
fn lease<'a>(fcinfo: pg_sys::FunctionCallInfo) -> Result<Lease<'a>, Problem> {
    let name = Name::new(required("name", Arguments::of(fcinfo).text(0))?)?;
    Ok(Lease::named(Tables::beside(fcinfo)?, name))
}

/// The same, where the caller may lock it by the rule for its domain.
fn lockable_lease<'a>(fcinfo: pg_sys::FunctionCallInfo) -> Result<Lease<'a>, Problem> {
    let lease = lease(fcinfo)?;
    lease.rule()?;
    Ok(lease)
}

/// `(name, token, …)`
fn lease_and_token<'a>(fcinfo: pg_sys::FunctionCallInfo) -> Result<(Lease<'a>, i64), Problem> {
    Ok((lease(fcinfo)?, required("token", Arguments::of(fcinfo).bigint(1))?))
}

/// A text that is kept beside each grant: no longer than a name.
fn short_text<'a>(argument: &'static str, text: Option<&'a [u8]>) -> Result<Option<&'a [u8]>, Error> {
    match text {
        Some(text) if text.len() > MAX_NAME_BYTES => Err(Error::TextTooLong { argument, bytes: text.len() }),
        text => Ok(text),
    }
}

/// `(name, ttl, timeout, owner, payload, permits, bound)`, by the rule for the name's domain. `lock_timeout`: the one that
/// a call without a timeout is under, in milliseconds, 0 for none.
fn request<'a>(fcinfo: pg_sys::FunctionCallInfo, lease: &Lease<'_>, lock_timeout: i32) -> Result<Request<'a>, Problem> {
    let args = Arguments::of(fcinfo);
    let mut request = Request {
        ttl: ttl_micros(required("ttl", args.interval(1))?)?,
        wait: Wait::from_timeout(args.interval(2))?,
        owner: short_text("owner", args.server_text(3))?,
        payload: args.jsonb(4),
        permits: permits(args.integer(5))?,
        bound: required("bound", args.boolean(6))?,
    };
    if let Some(rule) = lease.rule()? {
        rule.check_lease("ttl", request.ttl, || lease.describe())?;
        request.wait = rule.cap(request.wait, lock_timeout);
    }
    Ok(request)
}

/// Fails where the rule for a lease's domain forbids to keep it from others for so long, if it is asked for.
fn check_max_hold(lease: &Lease<'_>, what: &'static str, micros: Option<i64>) -> Result<(), Problem> {
    if let Some(micros) = micros
        && let Some(rule) = lease.limits()?
    {
        rule.check_lease(what, micros, || lease.describe())?;
    }
    Ok(())
}

#[pg_extern(sql = false)]
fn lease_acquire(fcinfo: pg_sys::FunctionCallInfo) -> Row {
    let answered = lease(fcinfo).and_then(|lease| lease.acquire(request(fcinfo, &lease, lock_timeout())?));
    let values = match answer(answered) {
        Answer::Granted(grant, owner) => [
            true.into_datum(),
            grant.token.into_datum(),
            interval(grant.term.ttl).into_datum(),
            timestamp(grant.term.expires.wall).into_datum(),
            ServerText::from_bytes(owner).into_datum(),
            None,
        ],
        Answer::Refused(refusal) => [
            false.into_datum(),
            None,
            refusal.until.and_then(|(remaining, _)| interval(remaining).into_datum()),
            refusal.until.and_then(|(_, expires_at)| timestamp(expires_at).into_datum()),
            refusal.owner.and_then(|owner| ServerText::from_bytes(owner).into_datum()),
            interval(refusal.retry_after).into_datum(),
        ],
    };
    Row::new(fcinfo, values)
}

/// The last argument, INOUT in SQL, only makes the row that the procedure returns.
#[pg_extern(sql = false)]
fn lease_acquire_wait(fcinfo: pg_sys::FunctionCallInfo) -> Row {
    let answered = lease(fcinfo).and_then(|lease| {
        // Without a timeout it waits for ever, whatever lock_timeout is.
        let mut request = request(fcinfo, &lease, 0)?;
        if request.wait == Wait::Server {
            request.wait = Wait::Forever;
        }
        snapshot::without_snapshot(fcinfo, || lease.describe(), || lease.acquire(request))
    });
    let token = match answer(answered) {
        Answer::Granted(grant, _) => Some(grant.token),
        Answer::Refused(_) => None,
    };
    Row::new(fcinfo, [token.into_datum()])
}

/// `(name, token, ttl, payload)`
#[pg_extern(sql = false)]
fn lease_renew(fcinfo: pg_sys::FunctionCallInfo) -> Row {
    let args = Arguments::of(fcinfo);
    let renewed = lease_and_token(fcinfo).and_then(|(lease, token)| {
        let ttl = args.interval(2).map(ttl_micros).transpose()?;
        check_max_hold(&lease, "ttl", ttl)?;
        lease.renew(token, ttl, args.jsonb(3))
    });
    let renewal = answer(renewed);
    let values = [
        interval(renewal.term.ttl).into_datum(),
        timestamp(renewal.term.expires.wall).into_datum(),
        renewal.requested.and_then(|reason| ServerText::from_bytes(reason).into_datum()),
        renewal.waiters.into_datum(),
    ];
    Row::new(fcinfo, values)
}

/// `(name, token, keep_for)`
#[pg_extern(sql = false)]
fn lease_release(fcinfo: pg_sys::FunctionCallInfo) -> bool {
    let keep_for = Arguments::of(fcinfo).interval(2);
    answer(lease_and_token(fcinfo).and_then(|(lease, token)| {
        let keep_for = keep_for_micros(keep_for)?;
        check_max_hold(&lease, "keep_for", keep_for)?;
        lease.release(token, keep_for)
    }))
}

#[pg_extern(sql = false)]
fn lease_check(fcinfo: pg_sys::FunctionCallInfo) -> bool {
    answer(lease_and_token(fcinfo).and_then(|(lease, token)| lease.check(token)))
}

#[pg_extern(sql = false)]
fn lease_guard(fcinfo: pg_sys::FunctionCallInfo) {
    answer(lease_and_token(fcinfo).and_then(|(lease, token)| lease.guard(token)));
}

/// `(name, reason)`
#[pg_extern(sql = false)]
fn lease_request(fcinfo: pg_sys::FunctionCallInfo) -> bool {
    let reason = Arguments::of(fcinfo).server_text(1);
    answer(lockable_lease(fcinfo).and_then(|lease| lease.request(short_text("reason", reason)?.unwrap_or_default())))
}

#[pg_extern(sql = false)]
fn lease_break(fcinfo: pg_sys::FunctionCallInfo) -> i32 {
    answer(lockable_lease(fcinfo).and_then(|lease| lease.break_all())) as i32
}

#[pg_extern(sql = false)]
#[allow(clippy::type_complexity)]
fn lease_holder(
    fcinfo: pg_sys::FunctionCallInfo,
) -> TableIterator<
    'static,
    (
        name!(owner, Option<ServerText>),
        name!(payload, Option<Jsonb>),
        name!(acquired_at, TimestampWithTimeZone),
        name!(remaining, Interval),
        name!(expires_at, TimestampWithTimeZone),
        name!(permits, i32),
    ),
> {
    let (may_lock, (rows, now)) = answer(lease(fcinfo).and_then(|lease| Ok((lease.may_lock()?, lease.holders()?))));
    let holders = rows.into_iter().map(|mut row| {
        let term = row.grant.term;
        (
            may_lock.then(|| ServerText::from_bytes(std::mem::take(&mut row.owner))),
            row.payload.take().filter(|_| may_lock).map(Jsonb),
            timestamp(term.acquired.wall),
            interval(term.remaining(now)),
            timestamp(term.expires.wall),
            row.grant.permits.into(),
        )
    });
    // Now: rows do not outlive the call.
    TableIterator::new(holders.collect::<Vec<_>>())
}
