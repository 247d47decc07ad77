//! Leases and waiting through each mode, `session_locks` behind a transaction pool, and what can be done about what is
//! stranded.

use super::matrix::{MATRIX, Outcome};
use super::{Mode, could_take};
use crate::pg_test::support::surface::{Does, For};
use crate::pg_test::support::{Pooler, Server, Session, unique, until};

/// Acquired by one client, renewed, guarded and released by others, and the late one writes nothing.
#[test]
fn a_lease_goes_from_client_to_client() {
    for mode in Mode::ALL {
        let server = Server::shared().new_database("poolers", "UTF8");
        let mut watch = server.session("watch");
        watch.run("create table written (token bigint)");
        // As many as there are clients at a time: in session mode each has one.
        let pooler = mode.pooler(&server, 3);
        let name = unique("lease");
        let mut first = pooler.session("first");
        let token = first.int(&format!("select token from lease_acquire('{name}', '1 hour')"));
        drop(first);
        let mut second = pooler.session("second");
        second.run(&format!("select * from lease_renew('{name}', {token}, '2 hours')"));
        assert!(second.flag(&format!("select lease_check('{name}', {token})")));

        // The guard and the writes are one: here as one string of statements, which no mode refuses.
        let write = |token: i64| format!("select lease_guard('{name}', {token}); insert into written values ({token})");
        watch.run("select pg_advisory_lock(6)");
        let guarded = format!("{}; select pg_advisory_xact_lock(6)", write(token));
        let guarded = pooler.session("guarded").background(&guarded);
        until("the guarded transaction waits", || {
            watch.flag(
                "select exists (select from pg_locks where locktype = 'advisory' and objid = 6 and not granted \
                    and database = (select oid from pg_database where datname = current_database()))",
            )
        });
        assert_eq!(second.int(&format!("select lease_break('{name}')")), 1);
        let take = format!("select token from lease_acquire('{name}', '1 hour'");
        assert_eq!(second.maybe(&format!("{take})")), None, "{mode:?}: as long as the guard's transaction");
        watch.run("select pg_advisory_unlock(6)");
        guarded.end().1.expect("it was held at the guard");
        let next = second.int(&format!("{take}, '60 s')"));
        assert!(next > token, "{mode:?}");

        let mut late = pooler.session("late");
        late.fails(&write(token)).is("55006");
        late.run(&write(next));
        assert_eq!(watch.column("select token from written order by 1"), [token, next].map(|token| token.to_string()));
        assert!(!late.flag(&format!("select lease_release('{name}', {token})")));
        assert!(late.flag(&format!("select lease_release('{name}', {next})")));
        assert!(!second.flag(&format!("select lease_check('{name}', {next})")));
    }
}

/// The ways to wait: with a timeout put in for TIMEOUT, and what has to be given back for them.
const WAITS: [&str; 7] = [
    "select named_lock('NAME', TIMEOUT)",
    "call named_lock_wait('NAME', TIMEOUT)",
    "select named_xact_lock('NAME', TIMEOUT)",
    "select named_lock_tree('NAME/below', TIMEOUT)",
    "select named_semaphore('NAME', 1, TIMEOUT)",
    "select token from lease_acquire('NAME', '1 hour', TIMEOUT)",
    "call lease_acquire_wait('NAME', '1 hour', TIMEOUT)",
];

/// Holds the name in every way.
fn hold(session: &mut Session, name: &str) -> i64 {
    session.run(&format!("select named_lock('{name}'), named_semaphore('{name}', 1)"));
    session.int(&format!("select token from lease_acquire('{name}', '1 hour')"))
}

fn let_go(session: &mut Session, name: &str, token: i64) {
    session.run(&format!("select named_unlock_all(), lease_release('{name}', {token})"));
}

#[test]
fn every_wait_in_every_mode() {
    for mode in Mode::ALL {
        let server = Server::shared().new_database("poolers", "UTF8");
        let mut watch = server.session("watch");
        let mut holder = server.session("holder");
        let pooler = mode.pooler(&server, 1);
        let mut client = pooler.session("client");
        for wait in WAITS {
            let name = unique("wait");
            let token = hold(&mut holder, &name);
            let statement = |timeout: &str| wait.replace("NAME", &name).replace("TIMEOUT", timeout);

            // The timeout passes, and nothing stays with the connection.
            let answer = client.maybe(&statement("'50 ms'"));
            assert!(matches!(answer.as_deref(), None | Some("f")), "{mode:?}: {wait}: {answer:?}");
            assert_eq!(client.text("show lock_timeout"), "0");
            assert_eq!(watch.locks_of(client.pid), 0);

            // It is waited for, and it comes.
            let waiting = client.background(&statement("null"));
            until("the client waits", || {
                watch.int(&format!("select count(*) from lock_waiters where pid = {}", waiting.pid)) == 1
            });
            if wait.starts_with("call ") {
                watch.holds_no_snapshot(waiting.pid, wait);
            }
            let_go(&mut holder, &name, token);
            let (session, answer) = waiting.end();
            client = session;
            let rows = answer.expect("no error");
            assert!(rows[0].get(0).is_some_and(|answer| answer != "f"), "{mode:?}: {wait}");
            client.run("discard all");
        }
    }
}

/// Who waits keeps a server connection. With no other left, the holder's release waits for the waiter, and the waiter for the
/// release: until it gives up.
#[test]
fn waiters_can_fill_the_pool() {
    for mode in [Mode::Transaction, Mode::Statement] {
        for wait in
            ["select token from lease_acquire('NAME', '1 hour', '1 hour')", "call lease_acquire_wait('NAME', '1 hour')"]
        {
            let server = Server::shared();
            let mut watch = server.session("watch");
            let pooler = mode.pooler(server, 1);
            let name = unique("full");
            let mut holder = pooler.session("holder");
            let token = holder.int(&format!("select token from lease_acquire('{name}', '1 hour')"));
            let waiting = pooler.session("waiter").background(&wait.replace("NAME", &name));
            until("it waits", || watch.int(&format!("select count(*) from lock_waiters where name = '{name}'")) == 1);
            let released = holder.background(&format!("select lease_release('{name}', {token})"));
            until("the release waits for a connection", || pooler.waiting_clients() == 1);
            assert!(!waiting.finished() && !released.finished(), "{mode:?}: {wait}");
            watch.run(&format!("select pg_cancel_backend(pid) from lock_waiters where name = '{name}'"));
            waiting.end().1.expect_err("it was not granted").is("57014");
            let (_, answer) = released.end();
            assert_eq!(answer.expect("no error")[0].get(0), Some("t"));
        }
    }
}

/// What the table calls stranded is what `session_locks = off` refuses, and `named_lock_convert`, which has nothing to
/// convert then. All else goes on.
#[test]
fn c06_session_locks_off_refuses_what_would_be_stranded() {
    let server = Server::shared().new_database("poolers", "UTF8");
    let role = server.new_role("c06");
    let mut watch = server.session("watch");
    watch.run(&format!("alter role {role} set named_locks.session_locks = off"));
    let pooler = Pooler::new(&server, "transaction", 1, &[&role]);
    let mut client = pooler.session_as(&role, "c06");
    let mut refused = 0;
    for row in &MATRIX {
        for function in row.of_surface().filter(|function| function.is_for == For::Everyone) {
            let name = unique("c06");
            let call = match row.transaction {
                // What comes before these is refused.
                Outcome::SameTransaction => function.call.replace("NAME", &name).replace("VALUE", "1"),
                _ => row.change(&function.prepared(&mut client, &name)),
            };
            let answer = client.query(&call);
            if row.transaction == Outcome::Stranded || function.does == Does::Convert {
                let error = answer.expect_err("a session lock is refused");
                error.is("0A000").hint_has("named_xact_lock").hint_has("lease");
                refused += 1;
            } else if let Err(error) = answer {
                assert_eq!(row.transaction, Outcome::SameTransaction, "{call}: {error:#?}");
                error.is("55000");
            }
            assert_eq!(watch.locks_of(client.pid), 0, "{call}");
        }
    }
    assert!(refused > 10, "the table has them");
}

/// A role's settings are read when a connection is made: those that the pooler has already go on as before.
#[test]
fn c06_session_locks_off_is_for_connections_made_after_it() {
    let server = Server::shared();
    let role = server.new_role("c06");
    let pooler = Pooler::new(server, "transaction", 1, &[&role]);
    let mut client = pooler.session_as(&role, "c06");
    let lock = format!("select named_lock('{}', '0')", unique("c06"));
    server.session("admin").run(&format!("alter role {role} set named_locks.session_locks = off"));
    assert!(client.flag(&lock), "the connection is older");
    pooler.console("reconnect");
    client.fails(&lock).is("0A000");
}

/// Its owner is the connection: the next client there takes it again, gives it back, and never knows.
#[test]
fn c02_a_stranded_lock_shuts_out_nobody_on_its_connection() {
    for mode in [Mode::Transaction, Mode::Statement] {
        let server = Server::shared();
        let mut rival = server.session("rival");
        let pooler = mode.pooler(server, 1);
        let name = unique("c02");
        let take = format!("select named_lock('{name}', '0')");
        let [mut one, mut two] = ["one", "two"].map(|client| pooler.session(client));
        assert!(one.flag(&take));
        assert!(two.flag(&take), "{mode:?}: the same session of the server's");
        assert!(!could_take(&mut rival, &take));
        assert_eq!(rival.int(&format!("select holds from lock_holders where name = '{name}'")), 2);
        assert_eq!(two.int(&format!("select named_unlock('{name}', all_holds => true)")), 0);
        assert!(could_take(&mut rival, &take), "{mode:?}: and the first client doesn't know");
    }
}

/// In a session pool without `server_reset_query` locks are stranded as in a transaction pool.
#[test]
fn c02_a_session_pool_without_a_reset_query_strands_too() {
    let server = Server::shared();
    let mut rival = server.session("rival");
    for (settings, is_free) in
        [("", true), ("server_reset_query =", false), ("server_reset_query = select pg_advisory_unlock_all()", true)]
    {
        let pooler = Pooler::with_settings(server, "session", 1, &[], settings);
        let name = unique("c02");
        let take = format!("select named_lock('{name}', '0')");
        let mut client = pooler.session("client");
        assert!(client.flag(&take));
        let pid = client.pid;
        drop(client);
        assert_eq!(pooler.session("next client").pid, pid);
        assert_eq!(could_take(&mut rival, &take), is_free, "{settings:?}");
    }
}

/// A limit on the hold ends the connection, whoever has it, and with that the lock.
#[test]
fn c49_a_stranded_lock_ends_with_its_hold_limit() {
    for mode in [Mode::Transaction, Mode::Statement] {
        let server = Server::shared();
        let mut watch = server.session("watch");
        let mut rival = server.session("rival");
        let pooler = mode.pooler(server, 1);
        for take in ["named_lock('NAME', '0', hold_limit => '2 s')", "named_semaphore('NAME', 1, '0', '2 s')"] {
            let name = unique("c49");
            let take = format!("select {take}").replace("NAME", &name);
            let client = &mut pooler.session("client");
            client.run(&take);
            watch.until_gone(client.pid);
            assert!(could_take(&mut rival, &take), "{mode:?}: {take}");
            // The pooler opens another one, once it has noticed.
            until("the pooler works again", || Session::open(pooler.config("next client")).is_ok());
        }
    }
}
