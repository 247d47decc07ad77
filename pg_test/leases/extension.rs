//! Case C46: leases held, bound, guarded and waited for while the extension is updated, dropped and created again.

use super::{
    acquire, acquire_sql, check, guard, is_free, owners, release, renew, renew_fails, shown, take, until_queued,
};
use crate::pg_test::support::{Server, let_pass, unique, until};
use std::path::PathBuf;

/// An update script to a version that there isn't; removed when dropped.
struct Update {
    script: PathBuf,
    version: String,
}

impl Update {
    fn new(server: &Server, sql: &str) -> Update {
        let share = server.session("share").text("select setting from pg_config where name = 'SHAREDIR'");
        let version = format!("{}.test", env!("CARGO_PKG_VERSION"));
        let script = PathBuf::from(share).join("extension").join(format!(
            "{}--{}--{version}.sql",
            env!("CARGO_PKG_NAME"),
            env!("CARGO_PKG_VERSION")
        ));
        std::fs::write(&script, sql).unwrap_or_else(|error| panic!("{}: {error}", script.display()));
        Update { script, version }
    }
}

impl Drop for Update {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.script);
    }
}

#[test]
fn c46_alter_extension_update_with_leases_held() {
    let server = Server::shared();
    let database = server.new_database("c46_lease", "UTF8");
    let update = Update::new(
        server,
        "create function @extschema@.lease_of_tomorrow() returns int language sql as 'select 1'; \
         create or replace function @extschema@.lease_check(name text, token bigint) returns boolean \
             volatile parallel unsafe cost 1000 language c as 'MODULE_PATHNAME', 'lease_check_wrapper';",
    );
    let mut admin = database.session("c46 admin");
    let mut a = database.session("c46 a");
    let mut b = database.session("c46 b");
    let token = take(&mut a, "k", "1 hour", ", payload => '{\"a\": 1}'");
    let bound = take(&mut a, "bound", "1 hour", ", bound => true");
    let guarded = take(&mut b, "guarded", "1 hour", "");
    let waiting = database.session("c46 waiter").background(&acquire_sql("k", "1 hour", ", '1 minute'"));
    until_queued(&mut admin, "k", 1);
    b.run("begin");
    guard(&mut b, "guarded", guarded);
    let before = admin.column("select l::text from _lease as l order by token");
    admin.run("set statement_timeout = '30 s'");
    admin.run(&format!("alter extension named_locks update to '{}'", update.version));
    assert_eq!(admin.text("select extversion from pg_extension where extname = 'named_locks'"), update.version);
    assert_eq!(admin.int("select lease_of_tomorrow()"), 1);
    // They stay held, as they were.
    assert_eq!(admin.column("select l::text from _lease as l order by token"), before);
    for session in [&mut a, &mut admin] {
        assert!(check(session, "k", token));
        assert!(check(session, "bound", bound));
        assert!(check(session, "guarded", guarded));
        assert_eq!(renew(session, "k", token, "").waiters, 1);
    }
    assert!(release(&mut admin, "guarded", guarded));
    acquire(&mut admin, "guarded", "1 hour", "").refused_for_reasons_unknown();
    b.run("commit");
    assert!(take(&mut admin, "guarded", "1 hour", "") > guarded);
    assert!(release(&mut admin, "k", token));
    waiting.end().1.expect("granted");
    assert_eq!(owners(&mut admin, "k"), ["c46 waiter"]);
    a.run("discard all");
    assert!(is_free(&mut admin, "bound"));
}

#[test]
fn c46_drop_extension_with_leases_held_and_create_it_again() {
    let server = Server::shared();
    let database = server.new_database("c46_lease", "UTF8");
    let mut admin = database.session("c46 admin");
    let mut a = database.session("c46 a");
    let mut b = database.session("c46 b");
    let token = take(&mut a, "k", "1 hour", "");
    let bound = take(&mut a, "bound", "1 hour", ", bound => true");
    let of_b = take(&mut b, "of b", "1 hour", ", permits => 2, payload => '{\"a\": 1}'");
    a.run("select named_lock('beside it')");
    let mut last = of_b;
    for schema in ["public", "elsewhere"] {
        admin.run("drop extension named_locks cascade");
        for session in [&mut a, &mut b] {
            session.fails(&format!("select lease_check('k', {token})")).is("42883");
        }
        admin.run(&format!(
            "create schema if not exists {schema}; create extension named_locks schema {schema}; \
             set search_path = {schema}, public"
        ));
        for session in [&mut a, &mut b] {
            session.run(&format!("set search_path = {schema}, public"));
            // With their table the leases are gone, and nothing comes back by their tokens.
            for (name, token) in [("k", token), ("bound", bound), ("of b", of_b)] {
                assert!(!check(session, name, token), "in {schema}: {name}");
                renew_fails(session, name, token).is("55000");
                assert!(!release(session, name, token));
                assert_eq!(owners(session, name), [""; 0]);
                assert_eq!(shown(session, name), [""; 0]);
            }
        }
        // The next tokens are higher than any before, although the sequence is a new one.
        for session in [&mut b, &mut a] {
            for bound in [false, true] {
                let new = take(session, "again", "1 hour", &format!(", bound => {bound}"));
                assert!(new > last, "in {schema}: {new} after {last}");
                last = new;
                renew(session, "again", new, "");
                session.run("begin");
                guard(session, "again", new);
                session.run("commit");
                assert!(check(&mut admin, "again", new));
                assert!(release(session, "again", new));
            }
        }
        let locks = format!("select name from lock_holders where kind <> 'lease' and pid in ({}, {})", a.pid, b.pid);
        assert_eq!(admin.column(&locks), ["beside it"]);
        // Bound anew, it ends with its session's locks, and the old one doesn't come back.
        let new = take(&mut a, "bound", "1 hour", ", bound => true");
        assert!(!check(&mut b, "bound", bound) && check(&mut b, "bound", new));
        a.run("select named_unlock_all()");
        assert!(check(&mut b, "bound", new));
        a.run("select named_lock('beside it')");
        assert!(release(&mut a, "bound", new));
    }
    admin.run("drop extension named_locks");
    let pids = [a.pid, b.pid];
    drop((a, b));
    for pid in pids {
        admin.until_gone(pid);
        assert_eq!(admin.locks_of(pid), 0);
    }
}

/// A guard, an open grant and a queue are under way: the drop waits for them or they fail, and all comes to an end.
#[test]
fn c46_drop_extension_under_open_transactions_and_waiters() {
    let server = Server::shared();
    let database = server.new_database("c46_lease", "UTF8");
    let mut watch = server.session("watch");
    for rounds in 0..2 {
        let mut a = database.session("c46 a");
        let mut b = database.session("c46 b");
        let token = take(&mut a, "k", "1 hour", "");
        a.run("begin");
        guard(&mut a, "k", token);
        b.run("begin");
        take(&mut b, "open", "1 hour", ", bound => true");
        let waiting: Vec<_> = [
            acquire_sql("k", "1 hour", ", '3 s'"),
            acquire_sql("open", "1 hour", ", '3 s'"),
            "call lease_acquire_wait('k', '1 hour', '3 s')".to_owned(),
        ]
        .iter()
        .map(|sql| database.session("c46 waiter").background(sql))
        .collect();
        let mut admin = database.session("c46 admin");
        until("they wait", || admin.int("select count(*) from lock_waiters where kind = 'lease'") == 3);
        let dropping = admin.background("drop extension named_locks cascade");
        let_pass(300);
        if rounds == 0 {
            a.run("commit");
            b.run("commit");
        } else {
            drop((a, b));
        }
        dropping.end().1.expect("dropped");
        for waiting in waiting {
            let (mut session, _) = waiting.end();
            // Whatever they were told, the session is as good as before.
            assert_eq!(session.int("select 1"), 1);
            assert_eq!(
                watch.column(&format!(
                    "select mode || ' ' || objsubid || ' ' || granted from pg_locks where pid = {} and locktype = 'advisory'",
                    session.pid
                )),
                [""; 0]
            );
        }
        let mut admin = database.session("c46 admin");
        admin.run("create extension named_locks");
        for name in ["k", "open"] {
            take(&mut admin, name, "1 hour", "");
            admin.run(&format!("select lease_break('{name}')"));
        }
        assert_eq!(admin.int("select count(*) from lock_waiters where kind = 'lease' and name in ('k', 'open')"), 0);
    }
}

#[test]
fn c46_drop_extension_by_the_holder_itself_and_undone() {
    let server = Server::shared();
    let database = server.new_database("c46_lease", "UTF8");
    let mut a = database.session("c46 a");
    let token = take(&mut a, "k", "1 hour", "");
    let bound = take(&mut a, "bound", "1 hour", ", bound => true");
    a.run("begin; drop extension named_locks; rollback");
    assert!(check(&mut a, "k", token));
    assert!(check(&mut a, "bound", bound));
    renew(&mut a, "k", token, "");
    // In the transaction of a grant, and of a guard.
    a.run("begin");
    let open = take(&mut a, "open", "1 hour", ", bound => true");
    guard(&mut a, "k", token);
    a.run("drop extension named_locks; rollback");
    assert!(check(&mut a, "k", token));
    assert!(!check(&mut a, "open", open));
    // Gone and come again within one transaction.
    a.run("begin; savepoint s");
    let open = take(&mut a, "open", "1 hour", "");
    a.run("release s; drop extension named_locks; create extension named_locks");
    assert!(!check(&mut a, "open", open));
    assert!(!check(&mut a, "k", token));
    let new = take(&mut a, "k", "1 hour", ", bound => true");
    assert!(new > open, "{new} after {open}");
    a.run("commit");
    assert!(check(&mut a, "k", new));
    let mut b = database.session("c46 b");
    assert!(check(&mut b, "k", new));
    assert!(!check(&mut b, "bound", bound));
    assert_eq!(owners(&mut b, "k"), ["c46 a"]);
    a.run("discard all");
    assert!(is_free(&mut b, "k"));
}

/// Another database's extension is another's business.
#[test]
fn c46_other_databases_are_not_touched() {
    let server = Server::shared();
    let one = server.new_database("c46_lease", "UTF8");
    let two = server.new_database("c46_lease", "UTF8");
    let mut a = one.session("c46 a");
    let mut b = two.session("c46 b");
    let k = unique("c46");
    let token = take(&mut a, &k, "1 hour", ", bound => true");
    take(&mut b, &k, "1 hour", ", bound => true");
    b.run("drop extension named_locks");
    assert!(check(&mut a, &k, token));
    assert!(!is_free(&mut a, &k));
    drop(b);
    server.session("c46 admin").run(&format!("drop database {} with (force)", two.dbname));
    assert!(check(&mut a, &k, token));
}

/// Its schema may get another name, and its tables another place on disk.
#[test]
fn c46_the_schema_is_renamed() {
    let server = Server::shared();
    let database = server.new_database("c46_lease", "UTF8");
    let mut admin = database.session("c46 admin");
    admin.run("drop extension named_locks; create schema one; create extension named_locks schema one");
    let mut a = database.session("c46 a");
    a.run("set search_path = one, two, three");
    let token = take(&mut a, "k", "1 hour", "");
    for (from, to) in [("one", "two"), ("two", "three")] {
        admin.run(&format!("alter schema {from} rename to {to}; set search_path = {to}"));
        for session in [&mut a, &mut admin] {
            assert!(check(session, "k", token), "{to}");
            renew(session, "k", token, "");
            acquire(session, "k", "1 hour", "").refused_by("c46 a", 3600.0);
            let other = take(session, "other", "1 hour", "");
            assert!(other > token);
            assert!(release(session, "other", other));
        }
        // Another schema of the old name, with things of the same names, is none of ours.
        admin.run(&format!(
            "create schema {from}; create table {from}._lease (i int); create sequence {from}._lease_token; \
             create sequence {from}._lease_timeline"
        ));
        renew(&mut a, "k", token, "");
        take(&mut a, &format!("in {to}"), "1 hour", "");
        assert_eq!(admin.int(&format!("select count(*) from {from}._lease")), 0);
        admin.run(&format!("drop schema {from} cascade"));
    }
    for work in ["vacuum full _lease", "reindex table _lease", "cluster _lease using _lease_pkey"] {
        admin.run(work);
        assert!(check(&mut a, "k", token), "{work}");
    }
    assert!(release(&mut a, "k", token));
}
