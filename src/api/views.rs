//! The rows behind the views.

use crate::rules::mode::Mode;
use crate::server::arguments::{Jsonb, OidOrZero, ServerText, interval, timestamp};
use crate::server::databases::{DatabaseName, DatabaseNames};
use crate::server::ffi;
use crate::server::report::answer;
use crate::server::tables::Tables;
use crate::server::who;
use pgrx::datum::{Inet, Interval, TimestampWithTimeZone};
use pgrx::prelude::*;

#[pg_extern(sql = false)]
#[allow(clippy::type_complexity)]
fn lock_holders(
    fcinfo: pg_sys::FunctionCallInfo,
) -> TableIterator<
    'static,
    (
        name!(kind, Option<&'static str>),
        name!(domain, Option<ServerText>),
        name!(name, Option<ServerText>),
        name!(mode, Option<&'static str>),
        name!(holds, Option<i32>),
        name!(pid, Option<i32>),
        name!(usesysid, Option<pg_sys::Oid>),
        name!(application_name, Option<ServerText>),
        name!(client_addr, Option<Inet>),
        name!(state, Option<&'static str>),
        name!(acquired_at, Option<TimestampWithTimeZone>),
        name!(hold_limit, Option<Interval>),
        name!(expires_at, Option<TimestampWithTimeZone>),
        name!(remaining, Option<Interval>),
        name!(token, Option<i64>),
        name!(owner, Option<ServerText>),
        name!(payload, Option<Jsonb>),
        name!(waiters, i32),
        name!(database, Option<DatabaseName>),
        name!(prepared, Option<pg_sys::TransactionId>),
        name!(classid, OidOrZero),
        name!(objid, OidOrZero),
        name!(objsubid, i16),
    ),
> {
    let holders = answer(Tables::beside(fcinfo).and_then(|tables| who::all_holders(&tables)));
    let mut databases = DatabaseNames::default();
    TableIterator::new(holders.into_iter().map(move |holder| {
        let activity = holder.activity;
        let lease = holder.lease;
        let state = match &lease {
            Some(lease) => Some(if lease.grant.kept { "kept" } else { "held" }),
            None if holder.pid.is_none() => Some("prepared"),
            None => activity.as_ref().and_then(|activity| activity.state),
        };
        let role = match &lease {
            Some(lease) => Some(lease.grant.role.into()),
            None => activity.as_ref().map(|activity| activity.role),
        };
        let expires_at = match &lease {
            Some(lease) => Some(lease.grant.term.expires.wall),
            None => holder.limit.map(|(_, expires_at)| expires_at),
        };
        let remaining = match &lease {
            Some(lease) => Some(lease.remaining),
            None => expires_at.map(|expires_at| expires_at - ffi::now()),
        };
        let (token, owner, payload) =
            lease.map_or((None, None, None), |lease| (lease.token, lease.owner, lease.payload));
        (
            holder.kind,
            who::domain(holder.name.as_ref()),
            holder.name.map(|name| ServerText::from_name(&name)),
            holder.mode.map(Mode::label),
            holder.holds,
            holder.pid,
            role,
            activity.as_ref().and_then(|activity| activity.application_name.clone()),
            activity.and_then(|activity| activity.client_addr).map(|addr| Inet(addr.to_string())),
            state,
            holder.acquired_at.map(timestamp),
            holder.limit.map(|(micros, _)| interval(micros)),
            expires_at.map(timestamp),
            remaining.map(interval),
            token,
            owner.map(ServerText::from_bytes),
            payload.map(Jsonb),
            holder.waiters,
            databases.name(holder.tag.database),
            holder.prepared.map(pg_sys::TransactionId::from),
            OidOrZero(holder.tag.high),
            OidOrZero(holder.tag.low),
            holder.tag.class as i16,
        )
    }))
}

#[pg_extern(sql = false)]
#[allow(clippy::type_complexity)]
fn lock_waiters(
    fcinfo: pg_sys::FunctionCallInfo,
) -> TableIterator<
    'static,
    (
        name!(kind, Option<&'static str>),
        name!(domain, Option<ServerText>),
        name!(name, Option<ServerText>),
        name!(mode, Option<&'static str>),
        name!(pid, i32),
        name!(usesysid, Option<pg_sys::Oid>),
        name!(application_name, Option<ServerText>),
        name!(wait_started, Option<TimestampWithTimeZone>),
        name!(deadline, Option<TimestampWithTimeZone>),
        name!(queue_position, Option<i32>),
        name!(blocked_by, Vec<i32>),
    ),
> {
    let waiters = answer(Tables::beside(fcinfo).and_then(|tables| who::all_waiters(&tables)));
    TableIterator::new(waiters.into_iter().map(|waiter| {
        (
            waiter.kind,
            who::domain(waiter.name.as_ref()),
            waiter.name.map(|name| ServerText::from_name(&name)),
            waiter.mode.map(Mode::label),
            waiter.pid,
            waiter.activity.as_ref().map(|activity| activity.role),
            waiter.activity.and_then(|activity| activity.application_name),
            waiter.wait_started.map(timestamp),
            waiter.deadline.map(timestamp),
            waiter.queue_position,
            waiter.blocked_by,
        )
    }))
}

#[pg_extern(sql = false)]
fn lock_graph(fcinfo: pg_sys::FunctionCallInfo) -> ServerText {
    ServerText::from_utf8(&answer(Tables::beside(fcinfo).and_then(|tables| who::graph(&tables))))
}
