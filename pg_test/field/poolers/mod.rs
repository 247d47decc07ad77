//! PgBouncer in its three modes. What each function does there is a table, shown in the documentation and tested cell by cell
//! ([`matrix`]); what becomes of what a client held that is gone ([`killed`]); leases, waiting and the setting
//! `session_locks` ([`at_work`]). What poolers do to a session, without a pooler: `pools.rs`.

mod at_work;
mod killed;
mod matrix;

use crate::pg_test::support::holding::Waiting;
use crate::pg_test::support::{Pooler, Server, Session, unique, until};

/// For how long a client of PgBouncer has a server connection for itself: its `pool_mode`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    /// Until it disconnects. `DISCARD ALL` follows: PgBouncer's own `server_reset_query`.
    Session,
    Transaction,
    /// Transaction blocks are refused.
    Statement,
}

impl Mode {
    const ALL: [Mode; 3] = [Mode::Session, Mode::Transaction, Mode::Statement];

    /// The setting's value.
    fn name(self) -> &'static str {
        match self {
            Mode::Session => "session",
            Mode::Transaction => "transaction",
            Mode::Statement => "statement",
        }
    }

    /// A pooler of this mode with so many server connections.
    fn pooler(self, server: &Server, size: u32) -> Pooler {
        Pooler::new(server, self.name(), size, &[])
    }
}

/// Whether somebody with a connection of their own could lock this now, by a statement whose first value is NULL or false
/// where not, or 55P03. Nothing of it stays.
#[track_caller]
fn could_take(rival: &mut Session, statement: &str) -> bool {
    rival.run("begin");
    let could = match rival.query(statement) {
        Ok(rows) => rows.first().and_then(|row| row.get(0)).is_some_and(|answer| answer != "f"),
        Err(error) => {
            error.is("55P03");
            false
        }
    };
    rival.run("rollback");
    rival.run("discard all");
    could
}

/// A client whose statement keeps one of a pooler's server connections busy, so that all others run elsewhere.
struct Pin {
    /// The server process.
    pid: i32,
    client: Waiting,
}

impl Pin {
    /// Keeps that one busy, of the two that the pooler has.
    fn on(pooler: &Pooler, pid: i32, watch: &mut Session) -> Pin {
        let pin = Pin::on_any(pooler, watch);
        if pin.pid == pid {
            return pin;
        }
        let other = Pin::on_any(pooler, watch);
        pin.end(watch);
        assert_eq!(other.pid, pid, "the pooler has two connections");
        other
    }

    fn on_any(pooler: &Pooler, watch: &mut Session) -> Pin {
        let sleep = format!("select pg_sleep(3600) /* {} */", unique("pin"));
        let client = pooler.session("pin").background(&sleep);
        let asleep = format!(
            "select coalesce((select pid from pg_stat_activity where state = 'active' and query = '{sleep}'), 0)"
        );
        let mut pid = 0;
        until("the pin sleeps", || {
            pid = watch.int(&asleep) as i32;
            pid != 0
        });
        Pin { pid, client }
    }

    /// Lets the connection go. What its session holds stays.
    fn end(self, watch: &mut Session) {
        watch.run(&format!("select pg_cancel_backend({})", self.pid));
        self.client.end().1.expect_err("it was cancelled").is("57014");
    }
}
