//! What the tests are made of: servers, sessions, the lock forms, and waiting for a state.
//!
//! ```ignore
//! let server = Server::shared();                       // pgrx's test server, started at first use
//! let mut a = server.session("holder");                // a real client; a.pid is its backend
//! let mut b = server.session("waiter");
//! let mut watch = server.session("watch");             // sees, never waits
//! let k = unique("c12");                               // a name that no other test uses
//!
//! assert!(a.flag(&format!("select named_lock('{k}')")));            // also .int() .text() .maybe() .run() .query()
//! let waiting = b.background(&format!("select named_lock('{k}', '10 s')"));
//! watch.until_waiting(waiting.pid);                                 // never sleep
//! a.run(&format!("select named_unlock('{k}')"));
//! let (mut b, answer) = waiting.end();                              // Result<Rows, SqlError>
//!
//! let error = b.fails("select named_lock('')");                     // panics if it succeeds
//! error.is("22023").message_has("empty");                           // also .detail_has() .hint_has() .context_has()
//! until("the row is gone", || watch.int("select count(*) from lock_holders where …") == 0);
//! ```
//!
//! - **The forms.** [`Form::all`] gives each way to lock (session, transaction, strict, CALL, cluster-wide, native keys),
//!   [`Lock`] its SQL, and [`answer`] what a call said, so that a rule can be tested for all forms in one loop.
//! - **[`Cluster`]** is a server of one test: `Cluster::new(&["max_connections = 30"])`, then everything a [`Server`] can,
//!   and `.stop()`, `.stop_immediate()`, `.start()`, `.restart()`, `.standby()`, `.promote()`, `.log()`. It is stopped and
//!   removed when dropped, also by a panic. The extension is created in its database `postgres`. `.backup()` gives a
//!   [`Backup`], of which any number of servers can be made.
//! - **[`lease_queue`]** takes leases, waits for them and for semaphores, and tells who stands where.
//! - **[`holding`]** tells what a session holds, for calls that take several locks.
//! - **[`Pooler`]** is a PgBouncer before a server.
//! - **[`surface`]** lists every function and relation of the extension, with what they do and a call of each.
//! - **[`Random`]** gives numbers that come again with the same seed.
//! - **[`Wire`]** is a client that sends protocol messages by hand, for pipelines.
//! - **[`stop_process`]** stops a backend (SIGSTOP) until the guard is dropped; [`signal`] sends any signal. Both as the
//!   user who runs the servers, who is `--runas`'s when the tests run as root.
#![allow(dead_code, unused_imports, reason = "a tool box for the tests of every theme")]

mod cluster;
mod forms;
pub mod holding;
pub mod lease_queue;
mod machine;
mod pooler;
mod random;
mod session;
pub mod surface;
mod wire;

pub use cluster::{AS_FAR_AS_THE_DISK, Backup, Cluster};
pub use forms::{Answer, Form, Lock, Scope, Target, answer, literal};
pub use machine::{Dir, Stopped, as_server_user, program, run, signal, stop_process};
pub use pooler::Pooler;
pub use random::Random;
pub use session::{Rows, Running, Server, Session, SqlError};
pub use wire::{Reply, Wire};

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// How long a state that must come is waited for. Long, so that a busy machine fails no test.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Waits until `condition` holds; panics when it never does.
#[track_caller]
pub fn until(what: &str, condition: impl FnMut() -> bool) {
    assert!(within(PATIENCE, condition), "this never came: {what}");
}

/// Whether `condition` came to hold within `limit`.
pub fn within(limit: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let start = Instant::now();
    loop {
        if condition() {
            return true;
        }
        if start.elapsed() > limit {
            return false;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Lets time itself pass: for a limit that has to run out, not for a state that has to come.
pub fn let_pass(milliseconds: u64) {
    std::thread::sleep(Duration::from_millis(milliseconds));
}

/// A name that no other call of this gives: `c12-7`. Good as a lock's name, and, with `-` made `_`, as an identifier.
pub fn unique(stem: &str) -> String {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    format!("{stem}-{}", COUNT.fetch_add(1, Ordering::Relaxed))
}

/// The same as an SQL identifier.
pub fn unique_ident(stem: &str) -> String {
    unique(stem).replace('-', "_").to_lowercase()
}
