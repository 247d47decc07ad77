//! What is counted by domain. Columns in the order of `sql/statistics.sql`.

use crate::rules::statistics::OTHER;
use crate::server::activity;
use crate::server::arguments::{ServerText, interval, timestamp};
use crate::server::databases::{DatabaseName, DatabaseNames};
use crate::server::session;
use crate::server::statistics;
use pgrx::datum::{Interval, TimestampWithTimeZone};
use pgrx::prelude::*;

#[pg_extern(sql = false)]
#[allow(clippy::type_complexity)]
fn lock_stats() -> TableIterator<
    'static,
    (
        name!(domain, Option<ServerText>),
        name!(database, Option<DatabaseName>),
        name!(grants, i64),
        name!(waits, i64),
        name!(timeouts, i64),
        name!(deadlocks, i64),
        name!(wait_time, Interval),
        name!(max_wait, Interval),
        name!(leases_granted, i64),
        name!(leases_taken_over, i64),
        name!(leases_expired, i64),
        name!(stats_reset, TimestampWithTimeZone),
    ),
> {
    session::start();
    let (rows, since) = statistics::read();
    let may_see_all = activity::may_see_all();
    let mut databases = DatabaseNames::default();
    TableIterator::new(rows.into_iter().map(move |row| {
        let (database, domain) = match &row.domain {
            Some((database, domain)) => {
                let is_visible = may_see_all || domain.is_empty();
                (databases.name(*database), is_visible.then(|| ServerText::from_name(domain)))
            }
            None => (None, Some(ServerText::from_utf8(OTHER))),
        };
        let counts = row.counts;
        (
            domain,
            database,
            counts.grants as i64,
            counts.waits as i64,
            counts.timeouts as i64,
            counts.deadlocks as i64,
            interval(counts.wait_micros as i64),
            interval(counts.max_wait_micros as i64),
            counts.leases.granted as i64,
            counts.leases.taken_over as i64,
            counts.leases.expired as i64,
            timestamp(since),
        )
    }))
}

#[pg_extern(sql = false)]
fn lock_stats_reset() {
    session::start();
    statistics::reset();
}
