//! What the SQL functions' arguments mean.

use crate::rules::domain::Rule;
use crate::rules::error::Error;
use crate::rules::holds::Scope;
use crate::rules::interval::{Interval, Wait, hold_limit_micros};
use crate::rules::key::MAX_PERMITS;
use crate::rules::mode::Mode;
use crate::rules::name::{MAX_NAMES, Name};
use crate::rules::tree::Path;
use crate::server::arguments::Texts;
use crate::server::domains;
use crate::server::lock_manager::lock_timeout;
use crate::server::report::Problem;
use crate::server::session::sets::Part;
use crate::server::session::{self, Lock, Request};
use crate::server::tables::Tables;
use pgrx::pg_sys;

/// The value of an argument that must not be NULL.
pub fn required<T>(argument: &'static str, value: Option<T>) -> Result<T, Problem> {
    value.ok_or_else(|| Error::Null { argument }.into())
}

/// How many grants a lease may have at once, or slots a semaphore.
pub fn permits(permits: Option<i32>) -> Result<u16, Problem> {
    one_to_max(required("permits", permits)?).ok_or_else(|| Error::Permits.into())
}

/// The number of a semaphore's slot.
pub fn slot(slot: Option<i32>) -> Result<u16, Problem> {
    one_to_max(required("slot", slot)?).ok_or_else(|| Error::Slot.into())
}

fn one_to_max(number: i32) -> Option<u16> {
    u16::try_from(number).ok().filter(|number| (1..=MAX_PERMITS).contains(number))
}

/// A named lock.
#[inline(always)]
pub fn named<'a>(name: Option<&'a [u8]>, cluster_wide: Option<bool>) -> Result<Lock<'a>, Problem> {
    let name = Name::new(required("name", name)?)?;
    Ok(Lock::named(name, required("cluster_wide", cluster_wide)?))
}

/// The locks of a set of names, in the array's order.
pub fn set<'a>(names: Option<Texts<'a>>, scope: Scope, mode: Option<Mode>) -> Result<Vec<Part<'a>>, Problem> {
    let names = required("names", names)?;
    let mode = required("mode", mode)?;
    if names.len() > MAX_NAMES {
        return Err(Error::TooManyNames { most: MAX_NAMES }.into());
    }
    let owner = session::owner(scope);
    let mut parts = Vec::with_capacity(names.len());
    for name in names.iter() {
        let name = Name::new(required("an element of names", name)?)?;
        parts.push(Part { lock: Lock::named(name, false), mode, owner, hold_limit: None });
    }
    Ok(parts)
}

/// A tree's path.
pub fn path<'a>(path: Option<&'a [u8]>) -> Result<Path<'a>, Problem> {
    Ok(Path::new(required("path", path)?)?)
}

/// How long a call may wait for several named locks by the rules for their domains; session holds get their limits.
pub fn by_rules(fcinfo: pg_sys::FunctionCallInfo, parts: &mut [Part<'_>], mut wait: Wait) -> Result<Wait, Problem> {
    if domains::there_are_none()? {
        return Ok(wait);
    }
    let mut last = None;
    for part in parts {
        let lock = part.lock;
        let rule = match last {
            Some((domain, rule)) if domain == lock.domain() => rule,
            _ => domains::rule(|| Tables::beside(fcinfo), lock.domain(), || lock.describe())?,
        };
        last = Some((lock.domain(), rule));
        if let Some(rule) = rule {
            (wait, part.hold_limit) = limits(&rule, &lock, part.owner.scope(), wait, part.hold_limit)?;
        }
    }
    Ok(wait)
}

/// How a named lock may be asked for by the rule for its domain.
#[inline(always)]
pub fn by_rule(fcinfo: pg_sys::FunctionCallInfo, lock: &Lock<'_>, request: Request) -> Result<Request, Problem> {
    let Some(rule) = domains::rule(|| Tables::beside(fcinfo), lock.domain(), || lock.describe())? else {
        return Ok(request);
    };
    let (wait, hold_limit) = limits(&rule, lock, request.scope, request.wait, request.hold_limit)?;
    Ok(Request { wait, hold_limit, ..request })
}

/// How long a call may wait by a rule, and for how long a session hold may last.
fn limits(
    rule: &Rule,
    lock: &Lock<'_>,
    scope: Scope,
    wait: Wait,
    hold_limit: Option<i64>,
) -> Result<(Wait, Option<i64>), Problem> {
    let hold_limit = match scope {
        Scope::Session => rule.hold_limit(hold_limit, || lock.describe())?,
        Scope::Transaction => None,
    };
    Ok((rule.cap(wait, lock_timeout()), hold_limit))
}

/// How a lock is asked for.
#[inline(always)]
pub fn request(
    scope: Scope,
    timeout: Option<Interval>,
    mode: Option<Mode>,
    hold_limit: Option<Interval>,
) -> Result<Request, Problem> {
    Ok(Request {
        mode: required("mode", mode)?,
        scope,
        wait: Wait::from_timeout(timeout)?,
        hold_limit: hold_limit_micros(hold_limit)?,
    })
}

/// How a native lock is asked for: SQL's own functions know two modes.
pub fn native_request(
    scope: Scope,
    timeout: Option<Interval>,
    mode: Option<Mode>,
    hold_limit: Option<Interval>,
) -> Result<Request, Problem> {
    let request = request(scope, timeout, mode, hold_limit)?;
    match request.mode {
        Mode::Exclusive | Mode::Share => Ok(request),
        mode => Err(Error::ModeNotNative { mode }.into()),
    }
}
