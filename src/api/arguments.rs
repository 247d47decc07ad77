//! What the SQL functions' arguments mean.

use crate::rules::error::Error;
use crate::rules::holds::Scope;
use crate::rules::interval::{Wait, hold_limit_micros};
use crate::rules::mode::Mode;
use crate::rules::name::Name;
use crate::server::arguments::{IntervalArgument, ModeArgument, Utf8};
use crate::server::session::{Lock, Request};

/// The value of an argument that must not be NULL.
pub fn required<T>(argument: &'static str, value: Option<T>) -> Result<T, Error> {
    value.ok_or(Error::Null { argument })
}

/// A named lock.
pub fn lock<'a>(name: Option<Utf8<'a>>, cluster_wide: Option<bool>) -> Result<Lock<'a>, Error> {
    let name = Name::new(required("name", name)?.0)?;
    Ok(Lock::named(name, required("cluster_wide", cluster_wide)?))
}

/// How a lock is asked for.
pub fn request(
    scope: Scope,
    timeout: Option<IntervalArgument>,
    mode: Option<ModeArgument>,
    hold_limit: Option<IntervalArgument>,
) -> Result<Request, Error> {
    Ok(Request {
        mode: required("mode", mode)?.0,
        scope,
        wait: wait(timeout)?,
        hold_limit: hold_limit_micros(hold_limit.map(|limit| limit.0))?,
    })
}

/// How long to wait.
pub fn wait(timeout: Option<IntervalArgument>) -> Result<Wait, Error> {
    Wait::from_timeout(timeout.map(|timeout| timeout.0))
}

/// How a native lock is asked for: SQL's own functions know two modes.
pub fn native_request(
    scope: Scope,
    timeout: Option<IntervalArgument>,
    mode: Option<ModeArgument>,
    hold_limit: Option<IntervalArgument>,
) -> Result<Request, Error> {
    let request = request(scope, timeout, mode, hold_limit)?;
    match request.mode {
        Mode::Exclusive | Mode::Share => Ok(request),
        mode => Err(Error::ModeNotNative { mode }),
    }
}
