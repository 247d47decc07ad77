//! Rules for domains. Arguments in the order of `sql/domains.sql`.

use super::arguments::required;
use crate::server::arguments::Arguments;
use crate::server::domains;
use crate::server::report::answer;
use pgrx::prelude::*;

/// `(domain, role, max_wait, max_hold)`
#[pg_extern(sql = false)]
fn lock_domain_set(fcinfo: pg_sys::FunctionCallInfo) {
    let domain = required("domain", Arguments::of(fcinfo).text(0));
    answer(domain.and_then(|domain| domains::set(fcinfo, domain)));
}

#[pg_extern(sql = false)]
fn lock_domain_drop(fcinfo: pg_sys::FunctionCallInfo) -> bool {
    let domain = required("domain", Arguments::of(fcinfo).text(0));
    answer(domain.and_then(|_| domains::drop_rule(fcinfo)))
}

/// A trigger: its answer, a null pointer that is not NULL, is not looked at.
#[pg_extern(sql = false)]
fn lock_domain_changed(fcinfo: pg_sys::FunctionCallInfo) -> i64 {
    answer(domains::changed(fcinfo));
    0
}
