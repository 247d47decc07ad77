//! Several locks in one call: the two ways to hold them, what a session holds, and that it holds nothing.

use super::{Rows, Running, Session, SqlError};

/// A call that waits.
pub type Waiting = Running<Result<Rows, SqlError>>;

/// The two ways to hold: the prefix of the functions' names, and the kind that the view shows.
pub const SCOPES: [(&str, &str); 2] = [("named", "session"), ("named_xact", "transaction")];

/// What a session holds, as `name kind mode holds`.
pub fn holds(watch: &mut Session, pid: i32) -> Vec<String> {
    watch.column(&format!(
        "select concat_ws(' ', name, kind, mode, holds) from lock_holders where pid = {pid} order by name, kind, mode::text"
    ))
}

/// That a session holds nothing and waits for nothing, by the lock manager and by the view.
#[track_caller]
pub fn holds_nothing(watch: &mut Session, pid: i32, what: &str) {
    assert_eq!(watch.locks_of(pid), 0, "{what}");
    assert_eq!(holds(watch, pid), [""; 0], "{what}");
}

/// Starts a call and returns when it waits.
#[track_caller]
pub fn start(session: Session, sql: &str, watch: &mut Session) -> Waiting {
    let waiting = session.background(sql);
    watch.until_waiting(waiting.pid);
    waiting
}
