//! Leases: rows that outlive the connection, with a time to live and a fencing token.
//!
//! What each function answers, and to whom; what transactions, sessions, poolers and the extension's own end do to a
//! lease. Here are the calls that all of these files make.

mod acquire;
mod bad_input;
mod bound;
mod extension;
mod guard;
mod lazy_release;
mod model;
mod payload;
mod permits;
mod pools;
mod races;
mod release;
mod renew;
mod request_break;
mod rights;
mod size;
mod time_to_live;
mod transactions;
mod views;
mod waiting;

use super::support::{Rows, Session, SqlError, literal, until};

/// What `lease_acquire` answered. Intervals are in seconds.
#[derive(Clone, Debug, PartialEq)]
struct Said {
    /// None when it was refused.
    token: Option<i64>,
    remaining: Option<f64>,
    expires_at: Option<String>,
    holder: Option<String>,
    retry_after: Option<f64>,
}

impl Said {
    /// Out of the one row of [`acquire_sql`]. What holds for every answer is checked here.
    #[track_caller]
    fn from_rows(rows: &Rows) -> Said {
        assert_eq!(rows.len(), 1, "one row is due");
        let row = &rows[0];
        let seconds = |column| row.get(column).map(|text: &str| text.parse::<f64>().expect("seconds"));
        let said = Said {
            token: row.get("token").map(|text| text.parse().expect("a token")),
            remaining: seconds("remaining"),
            expires_at: row.get("expires_at").map(str::to_owned),
            holder: row.get("holder").map(str::to_owned),
            retry_after: seconds("retry_after"),
        };
        assert_eq!(row.get("acquired"), Some(if said.token.is_some() { "t" } else { "f" }), "{said:?}");
        assert_eq!(said.remaining.is_some(), said.expires_at.is_some(), "{said:?}");
        if let Some(token) = said.token {
            assert!(token > 0, "{said:?}");
            assert!(said.remaining.is_some() && said.holder.is_some() && said.retry_after.is_none(), "{said:?}");
        } else {
            let retry_after = said.retry_after.expect("a refused try says when to come again");
            assert!(retry_after > 0.0, "{said:?}");
            assert!(said.remaining.is_none_or(|remaining| remaining > 0.0), "{said:?}");
        }
        said
    }

    /// The token of a grant; panics when it was refused.
    #[track_caller]
    fn granted(&self) -> i64 {
        self.token.unwrap_or_else(|| panic!("it should have been granted: {self:?}"))
    }

    /// Panics when it was granted.
    #[track_caller]
    fn refused(&self) -> &Said {
        assert_eq!(self.token, None, "it should have been refused: {self:?}");
        self
    }

    /// That it was refused, and that who has it isn't known: 100 ms is then the advice.
    #[track_caller]
    fn refused_for_reasons_unknown(&self) {
        self.refused();
        assert_eq!((self.remaining, self.holder.as_deref(), self.retry_after), (None, None, Some(0.1)), "{self:?}");
    }

    /// That it was refused because of that owner, who has it for at most so many seconds more.
    #[track_caller]
    fn refused_by(&self, owner: &str, at_most: f64) {
        self.refused();
        assert_eq!(self.holder.as_deref(), Some(owner), "{self:?}");
        assert!(self.remaining.is_some_and(|remaining| remaining <= at_most), "{self:?}");
        assert_eq!(self.retry_after, self.remaining, "{self:?}");
    }
}

/// A call of `lease_acquire`; `more` are further arguments (`", owner => 'me'"`).
fn acquire_sql(name: &str, ttl: &str, more: &str) -> String {
    format!(
        "select acquired, token, extract(epoch from remaining) as remaining, expires_at, holder, \
                extract(epoch from retry_after) as retry_after \
           from lease_acquire({}, '{ttl}'{more})",
        literal(name)
    )
}

/// Tries to take a lease, and says how that went.
#[track_caller]
fn acquire(session: &mut Session, name: &str, ttl: &str, more: &str) -> Said {
    Said::from_rows(&session.run(&acquire_sql(name, ttl, more)))
}

/// Takes a lease that must be free; the token.
#[track_caller]
fn take(session: &mut Session, name: &str, ttl: &str, more: &str) -> i64 {
    acquire(session, name, ttl, more).granted()
}

/// Whether a lease could be had now; the session takes it in a transaction that is rolled back.
#[track_caller]
fn is_free(session: &mut Session, name: &str) -> bool {
    session.run("begin");
    let said = acquire(session, name, "1 hour", "");
    session.run("rollback");
    said.token.is_some()
}

/// Waits until a lease can be had, and takes it, for an hour.
#[track_caller]
fn take_when_free(session: &mut Session, name: &str) -> i64 {
    let mut token = None;
    until("the lease is free", || {
        token = acquire(session, name, "1 hour", "").token;
        token.is_some()
    });
    token.expect("a token")
}

#[track_caller]
fn check(session: &mut Session, name: &str, token: i64) -> bool {
    session.flag(&format!("select lease_check({}, {token})", literal(name)))
}

#[track_caller]
fn release(session: &mut Session, name: &str, token: i64) -> bool {
    session.flag(&format!("select lease_release({}, {token})", literal(name)))
}

#[track_caller]
fn guard(session: &mut Session, name: &str, token: i64) {
    session.run(&guard_sql(name, token));
}

fn guard_sql(name: &str, token: i64) -> String {
    format!("select lease_guard({}, {token})", literal(name))
}

/// What `lease_renew` answered. Intervals are in seconds.
#[derive(Clone, Debug, PartialEq)]
struct Renewed {
    remaining: f64,
    expires_at: String,
    requested: Option<String>,
    waiters: i64,
}

fn renew_sql(name: &str, token: i64, more: &str) -> String {
    format!(
        "select extract(epoch from remaining), expires_at, release_requested, waiters \
           from lease_renew({}, {token}{more})",
        literal(name)
    )
}

#[track_caller]
fn renew(session: &mut Session, name: &str, token: i64, more: &str) -> Renewed {
    let rows = session.run(&renew_sql(name, token, more));
    assert_eq!(rows.len(), 1, "one row is due");
    let get = |column| rows[0].get(column).expect("not null");
    Renewed {
        remaining: get(0).parse().expect("seconds"),
        expires_at: get(1).to_owned(),
        requested: rows[0].get(2).map(str::to_owned),
        waiters: get(3).parse().expect("a count"),
    }
}

/// The error of a renewal that has to fail.
#[track_caller]
fn renew_fails(session: &mut Session, name: &str, token: i64) -> SqlError {
    session.fails(&renew_sql(name, token, ""))
}

/// The owners that `lease_holder` shows, by name.
#[track_caller]
fn owners(session: &mut Session, name: &str) -> Vec<String> {
    session.column(&format!("select owner from lease_holder({}) order by owner", literal(name)))
}

/// What `lock_holders` shows of a lease: state and owner of each row.
#[track_caller]
fn shown(session: &mut Session, name: &str) -> Vec<String> {
    session.column(&format!(
        "select concat_ws(' ', state, owner) from lock_holders where kind = 'lease' and name = {} order by token",
        literal(name)
    ))
}

/// All that is stored of a lease's grants, with the versions of their rows. Orders to holders are left out: whoever is
/// granted any lease clears away those of leases that have ended.
#[track_caller]
fn stored(watch: &mut Session, name: &str) -> Vec<String> {
    watch.column(&format!(
        "select concat_ws(' ', l.xmin, l.xmax, l.ctid, l::text) from _lease as l where l.name = {} and l.token > 0 order by l.token",
        literal(name)
    ))
}

/// How many locks a session is left with, ours and native ones, but for the sentinel by which others know that it lives.
#[track_caller]
fn left_to(watch: &mut Session, pid: i32) -> i64 {
    watch.int(&format!(
        "select count(*) from pg_locks where locktype = 'advisory' and pid = {pid} \
            and not (objsubid >= 16384 and (objsubid >> 11) & 7 = 1)"
    ))
}

/// How many wait for a lease.
#[track_caller]
fn waiters(watch: &mut Session, name: &str) -> i64 {
    watch.int(&format!("select count(*) from lock_waiters where kind = 'lease' and name = {}", literal(name)))
}

/// Waits until so many wait for a lease.
#[track_caller]
fn until_queued(watch: &mut Session, name: &str, count: i64) {
    until(&format!("{count} wait for {name}"), || waiters(watch, name) == count);
}
