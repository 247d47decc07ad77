//! A client whose socket closes without a word: what becomes of what it held or waited for, seen by others.

use super::{Mode, could_take};
use crate::pg_test::support::{Pooler, Reply, Server, Session, Wire, unique, until};

/// Something to be held: as an expression that takes it, and a try by another session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Thing {
    take: &'static str,
    rival: &'static str,
}

const SESSION_LOCK: Thing = Thing { take: "named_lock('NAME')", rival: "select named_lock('NAME', '0')" };
const TRANSACTION_LOCK: Thing = Thing { take: "named_xact_lock('NAME')", ..SESSION_LOCK };
const TREE: Thing = Thing { take: "named_lock_tree('NAME')", ..SESSION_LOCK };
const SLOT: Thing = Thing { take: "named_semaphore('NAME', 1)", rival: "select named_semaphore('NAME', 1, '0')" };
const LEASE: Thing = Thing {
    take: "(lease_acquire('NAME', '1 hour')).acquired",
    rival: "select acquired from lease_acquire('NAME', '1 hour')",
};
const BOUND_LEASE: Thing = Thing { take: "(lease_acquire('NAME', '1 hour', bound => true)).acquired", ..LEASE };

/// A pooler with one server connection before a database of this test, a session past it that sees, and one that tries.
struct Stage {
    server: Server,
    one: Pooler,
    watch: Session,
    rival: Session,
    /// How many clients went without a word.
    killed: usize,
}

impl Stage {
    fn new(mode: Mode) -> Stage {
        Stage::with_roles(mode, Server::shared().new_database("poolers", "UTF8"), &[])
    }

    fn with_roles(mode: Mode, server: Server, roles: &[&str]) -> Stage {
        Stage {
            one: Pooler::new(&server, mode.name(), 1, roles),
            watch: server.session("watch"),
            rival: server.session("rival"),
            killed: 0,
            server,
        }
    }

    fn is_free(&mut self, thing: Thing, name: &str) -> bool {
        could_take(&mut self.rival, &thing.rival.replace("NAME", name))
    }

    /// Closes a client's socket, and returns when the pooler knows.
    fn kill(&mut self, client: Wire) {
        drop(client);
        self.killed += 1;
        self.one.until_noticed(self.killed);
    }

    /// The server process behind a client.
    fn process_of(client: &mut Wire) -> i32 {
        match &client.query("select pg_backend_pid()").replies()[..] {
            [Reply::Row(row), ..] => row[0].as_deref().and_then(|pid| pid.parse().ok()).expect("a process id"),
            replies => panic!("{replies:?}"),
        }
    }
}

#[test]
fn killed_between_its_statements() {
    for mode in Mode::ALL {
        let mut stage = Stage::new(mode);
        // With the next client the pooler's one connection is in other hands.
        for (thing, is_free) in [
            (SESSION_LOCK, mode == Mode::Session),
            (TREE, mode == Mode::Session),
            (SLOT, mode == Mode::Session),
            (BOUND_LEASE, mode == Mode::Session),
            (TRANSACTION_LOCK, true),
            (LEASE, false),
        ] {
            let name = unique("killed");
            let mut client = Wire::open(&stage.one);
            let replies = client.query(&format!("select {}", thing.take.replace("NAME", &name))).replies();
            assert_eq!(replies.last(), Some(&Reply::Ready('I')), "{replies:?}");
            let pid = Stage::process_of(&mut client);
            stage.kill(client);
            let mut next = stage.one.session("next client");
            assert_eq!(next.pid, pid);
            assert_eq!(stage.is_free(thing, &name), is_free, "{mode:?}: {thing:?}");
            next.run("discard all");
        }
    }
}

/// The pooler closes the server's connection, too: all that its session held is free, what others had left there as well.
#[test]
fn killed_in_a_transaction_block() {
    for mode in [Mode::Session, Mode::Transaction] {
        let mut stage = Stage::new(mode);
        for thing in [SESSION_LOCK, TREE, SLOT, BOUND_LEASE, TRANSACTION_LOCK, LEASE] {
            let (name, before) = (unique("killed"), unique("killed"));
            if mode == Mode::Transaction {
                stage.one.session("before").run(&format!("select named_lock('{before}')"));
                assert!(!stage.is_free(SESSION_LOCK, &before));
            }
            let mut client = Wire::open(&stage.one);
            client.query("begin").replies();
            let replies = client.query(&format!("select {}", thing.take.replace("NAME", &name))).replies();
            assert_eq!(replies.last(), Some(&Reply::Ready('T')), "{replies:?}");
            let pid = Stage::process_of(&mut client);
            assert!(!stage.is_free(thing, &name), "{mode:?}: {thing:?}");
            stage.kill(client);
            stage.watch.until_gone(pid);
            assert!(stage.is_free(thing, &name), "{mode:?}: {thing:?}");
            assert!(stage.is_free(SESSION_LOCK, &before));
        }
    }
}

/// The server goes on with the statement, as it would for a client of its own, and only then notices.
#[test]
fn killed_within_a_statement() {
    for mode in Mode::ALL {
        let mut stage = Stage::new(mode);
        for (thing, is_free) in [
            (SESSION_LOCK, true),
            (TREE, true),
            (SLOT, true),
            (BOUND_LEASE, true),
            (TRANSACTION_LOCK, true),
            // It is committed with the statement, to nobody.
            (LEASE, false),
        ] {
            let name = unique("killed");
            stage.watch.run("select pg_advisory_lock(5)");
            let mut client = Wire::open(&stage.one);
            client.query(&format!("select {}, pg_advisory_xact_lock(5)", thing.take.replace("NAME", &name))).send();
            let pid = until_waiting_for_5(&mut stage.watch);
            stage.kill(client);
            assert!(!stage.is_free(thing, &name), "{mode:?}: {thing:?}");
            stage.watch.run("select pg_advisory_unlock(5)");
            stage.watch.until_gone(pid);
            assert_eq!(stage.is_free(thing, &name), is_free, "{mode:?}: {thing:?}");
        }
    }
}

/// The process that waits for the native lock 5 in this database.
fn until_waiting_for_5(watch: &mut Session) -> i32 {
    let mut pid = 0;
    until("the statement waits", || {
        pid = watch.int(
            "select coalesce(max(pid), 0) from pg_locks \
              where locktype = 'advisory' and objid = 5 and not granted \
                and database = (select oid from pg_database where datname = current_database())",
        );
        pid != 0
    });
    pid as i32
}

/// In every mode: not before its time, and then to the next who waits.
#[test]
fn a_lease_of_a_killed_client_ends_by_its_time_to_live() {
    for mode in Mode::ALL {
        let mut stage = Stage::new(mode);
        let name = unique("killed");
        let mut client = Wire::open(&stage.one);
        let replies = client.query(&format!("select expires_at from lease_acquire('{name}', '2 s')")).replies();
        let [Reply::Row(row), ..] = &replies[..] else { panic!("{replies:?}") };
        let expires_at = row[0].clone().expect("it is free");
        stage.kill(client);
        let mut next = stage.one.session("next client");
        assert!(next.flag(&format!("select acquired from lease_acquire('{name}', '1 hour', '60 s')")), "{mode:?}");
        assert!(next.flag(&format!("select clock_timestamp() >= '{expires_at}'")), "{mode:?}");
    }
}

/// The ways to wait, with what a session of the server's own does to have others wait.
const WAITS: [(&str, Thing); 5] = [
    ("select named_lock('NAME')", SESSION_LOCK),
    ("call named_lock_wait('NAME')", SESSION_LOCK),
    ("select named_semaphore('NAME', 1)", SLOT),
    ("select token from lease_acquire('NAME', '1 hour', null)", LEASE),
    ("call lease_acquire_wait('NAME', '1 hour')", LEASE),
];

/// Has a client wait through the pooler and kills it there; gives its server process, and the one who holds.
fn kill_waiter(stage: &mut Stage, role: &str, wait: &str, thing: Thing, name: &str) -> (i32, Session) {
    let mut holder = stage.server.session("holder");
    holder.run(&format!("select {}", thing.take.replace("NAME", name)));
    let mut client = Wire::open_as(&stage.one, role);
    client.query(&wait.replace("NAME", name)).send();
    until("the client waits", || stage.watch.int(&waiters(name)) == 1);
    let pid = stage.watch.int(&format!("select pid from lock_waiters where name = '{name}'")) as i32;
    stage.kill(client);
    (pid, holder)
}

fn waiters(name: &str) -> String {
    format!("select count(*) from lock_waiters where name = '{name}'")
}

#[test]
fn a_waiter_that_is_killed_waits_on_and_gets_it() {
    for mode in Mode::ALL {
        let mut stage = Stage::new(mode);
        let owner = stage.one.user.clone();
        for (wait, thing) in WAITS {
            let name = unique("killed");
            let (pid, mut holder) = kill_waiter(&mut stage, &owner, wait, thing, &name);
            assert_eq!(stage.watch.int(&waiters(&name)), 1, "{mode:?}: {wait}");
            holder.run(&format!("select named_unlock_all(), lease_break('{name}')"));
            stage.watch.until_gone(pid);
            // A lock went with the server's connection; a lease is nobody's, until its time to live is over.
            assert_eq!(stage.is_free(thing, &name), thing != LEASE, "{mode:?}: {wait}");
        }
    }
}

#[test]
fn a_waiter_that_is_killed_leaves_the_queue_with_client_connection_check_interval() {
    for mode in Mode::ALL {
        let server = Server::shared().new_database("poolers", "UTF8");
        let role = server.new_role("killed");
        let mut stage = Stage::with_roles(mode, server, &[&role]);
        stage.watch.run(&format!("alter role {role} set client_connection_check_interval = '100 ms'"));
        for (wait, thing) in WAITS {
            let name = unique("killed");
            let (pid, holder) = kill_waiter(&mut stage, &role, wait, thing, &name);
            stage.watch.until_gone(pid);
            assert_eq!(stage.watch.int(&waiters(&name)), 0, "{mode:?}: {wait}");
            assert!(!stage.is_free(thing, &name), "{mode:?}: {wait}: the holder has it");
            drop(holder);
        }
    }
}
