//! Leases and semaphores in tests of several sessions: taking one, waiting for one in some way, and who stands in the
//! queue.

use super::{Rows, Running, Session, SqlError, until};
use std::time::{Duration, Instant};

/// A waiter's answer and when it came.
pub type Answered = (Result<Rows, SqlError>, Instant);

/// Starts a statement that waits, and returns when it stands at that place of the queue.
#[track_caller]
pub fn start(session: Session, statement: &str, watch: &mut Session, place: i64) -> Running<Answered> {
    let waiting = begin_waiting(session, statement);
    until_queued(watch, waiting.pid, place);
    waiting
}

/// The same without looking whether it waits.
pub fn begin_waiting(session: Session, statement: &str) -> Running<Answered> {
    let statement = statement.to_owned();
    session.spawn(move |session| (session.query(&statement), Instant::now()))
}

/// The same for a statement whose time may be up before it is seen: a busy machine may not look for a while.
#[track_caller]
pub fn start_limited(session: Session, statement: &str, watch: &mut Session, place: i64) -> Running<Answered> {
    let waiting = begin_waiting(session, statement);
    until("it waits, or its time is up", || waiting.finished() || position(watch, waiting.pid) == place);
    waiting
}

/// The ways to wait for a lease. The first column that each gives is the token, NULL when the timeout passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// The function, without a limit of its own.
    Function,
    /// The procedure.
    Call,
}

impl Way {
    pub const ALL: [Way; 2] = [Way::Function, Way::Call];

    /// The statement. `timeout` None: no limit; `more`: further arguments, as `, permits => 3`.
    pub fn take(self, name: &str, ttl: &str, timeout: Option<&str>, more: &str) -> String {
        let timeout = timeout.map_or("null".to_owned(), |timeout| format!("'{timeout}'"));
        match self {
            Way::Function => format!("select token from lease_acquire('{name}', '{ttl}', {timeout}{more})"),
            Way::Call => format!("call lease_acquire_wait('{name}', '{ttl}', {timeout}{more})"),
        }
    }

    /// One that waits without a limit for an hour's lease.
    pub fn wait(self, name: &str) -> String {
        self.take(name, "1 hour", None, "")
    }
}

/// Takes a free lease and gives its token.
#[track_caller]
pub fn take(session: &mut Session, name: &str, ttl: &str) -> i64 {
    take_with(session, name, ttl, "")
}

/// The same with further arguments, as `, permits => 3`.
#[track_caller]
pub fn take_with(session: &mut Session, name: &str, ttl: &str, more: &str) -> i64 {
    session.int(&format!("select token from lease_acquire('{name}', '{ttl}', '0'{more})"))
}

/// One try; whether it was granted.
#[track_caller]
pub fn try_take(session: &mut Session, name: &str) -> bool {
    session.flag(&format!("select acquired from lease_acquire('{name}', '1 hour')"))
}

/// Gives a lease back, which has to be held.
#[track_caller]
pub fn give_back(session: &mut Session, name: &str, token: i64) {
    assert!(session.flag(&format!("select lease_release('{name}', {token})")), "{name} {token} was not held any more");
}

/// Where a session stands in a lease's or a semaphore's queue, from 1; 0: nowhere.
#[track_caller]
pub fn position(watch: &mut Session, pid: i32) -> i64 {
    watch.int(&format!(
        "select coalesce((select queue_position from lock_waiters where kind in ('lease', 'semaphore') and pid = {pid}), 0)"
    ))
}

/// Waits until a session stands at that place of a lease's or a semaphore's queue, and sleeps there: the first on its
/// latch, the others in the lock manager's queue.
#[track_caller]
pub fn until_queued(watch: &mut Session, pid: i32, place: i64) {
    let sleep = if place == 1 { "Extension" } else { "Lock" };
    until(&format!("process {pid} is number {place} in the queue"), || {
        position(watch, pid) == place
            && watch.flag(&format!(
                "select exists (select from pg_stat_activity where pid = {pid} and wait_event_type = '{sleep}')"
            ))
    });
}

/// That nothing of a session is in the lock manager or in the queue.
#[track_caller]
pub fn left_no_trace(watch: &mut Session, pid: i32, what: &str) {
    assert_eq!(
        watch.column(&format!(
            "select concat_ws(' ', mode, granted, classid, objid, objsubid) from pg_locks \
              where locktype = 'advisory' and pid = {pid}"
        )),
        [""; 0],
        "{what}: locks of process {pid}"
    );
    assert_eq!(watch.column(&format!("select name from lock_waiters where pid = {pid}")), [""; 0], "{what}");
}

/// The middle one of some durations.
pub fn median(mut durations: Vec<Duration>) -> Duration {
    durations.sort();
    durations[durations.len() / 2]
}
