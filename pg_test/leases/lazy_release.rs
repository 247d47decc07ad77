//! A transaction in which nothing is done but releasing does not wait for the disk.

use crate::pg_test::support::{Cluster, Session, until};

/// What no session flushes is lost in a crash: the WAL writer and others stay out of the way. `fsync = off`, as the
/// operating system doesn't crash.
const LAZY: &[&str] = &[
    "wal_writer_delay = '10s'",
    "bgwriter_lru_maxpages = 0",
    "autovacuum = off",
    // Else the background writer's notes for standbys wake the WAL writer.
    "wal_level = minimal",
    "max_wal_senders = 0",
];
/// A look at a table may write WAL too, when it cleans up a page: then the commit waits for the disk all the same.
const TRIES: usize = 5;

#[track_caller]
fn acquire(session: &mut Session, name: &str) -> i64 {
    session.int(&format!("select token from lease_acquire('{name}', '1 h')"))
}

/// Whether a crash brings `a` back after the statements, in which A and B stand for the tokens of the leases `a` and `b`.
fn is_undone(cluster: &Cluster, statements: &str) -> bool {
    let mut session = cluster.session("releases");
    session.run("create table if not exists written (number int)");
    let tokens = ["a", "b"].map(|name| acquire(&mut session, name));
    let statements = ["A", "B"]
        .iter()
        .zip(tokens)
        .fold(statements.to_owned(), |all, (letter, token)| all.replace(letter, &token.to_string()));
    for statement in statements.split("; ") {
        session.run(statement);
    }
    assert!(!session.flag(&format!("select lease_check('a', {})", tokens[0])), "{statements}");
    cluster.stop_immediate();
    cluster.start();
    let mut session = cluster.session("after the crash");
    let is_undone = session.flag(&format!("select lease_check('a', {})", tokens[0]));
    session.run("select lease_break(name) from unnest('{a,b}'::text[]) as name");
    is_undone
}

#[test]
fn a_release_alone_may_be_undone_by_a_crash() {
    let cluster = Cluster::new(LAZY);
    for statements in [
        "select lease_release('a', A)",
        "begin; select lease_release('a', A); commit",
        "begin isolation level serializable; select lease_release('a', A); commit",
        "begin; select lease_release('b', B); select lease_release('a', A); select count(*) from written; commit",
        "begin; savepoint s; select lease_release('a', A); release s; commit",
        "insert into written values (1); select lease_release('a', A)",
    ] {
        assert!((0..TRIES).any(|_| is_undone(&cluster, statements)), "{statements}");
    }
}

#[test]
fn whatever_else_a_transaction_does_makes_its_release_last() {
    let cluster = Cluster::new(LAZY);
    for statements in [
        "begin; insert into written values (1); select lease_release('a', A); commit",
        "begin; select lease_release('a', A); insert into written values (1); commit",
        "with w as (insert into written values (1) returning 1) select lease_release('a', A) from w",
        "begin; savepoint s; insert into written values (1); rollback to s; select lease_release('a', A); commit",
        "begin; select lease_release('a', A); savepoint s; insert into written values (1); rollback to s; commit",
        "begin; select lease_release('a', A); select lease_renew('b', B); commit",
        "begin; select lease_release('a', A); select lease_release('b', B, '1 h'); commit",
        "begin; select lease_acquire('c', '1 h'); select lease_release('a', A); commit",
        "begin; select lease_release('a', A); select token from lease_acquire('a', '1 h'); commit",
        // Not for the release alone, but for those that are to last.
        "select lease_release('a', A, '1 h')",
        "select lease_break('a')",
        "select lease_release('a', A); insert into written values (1)",
        "select lease_release('a', A); select lease_renew('b', B)",
        "select lease_release('a', A); select token from lease_acquire('a', '1 h')",
    ] {
        assert!(!is_undone(&cluster, statements), "{statements}");
    }
}

/// The lease of before is there again, token and all, until its time to live is over; the next token is higher.
#[test]
fn what_is_undone_ends_by_its_time_to_live() {
    let cluster = Cluster::new(LAZY);
    let crash = || {
        let mut session = cluster.session("a");
        let token = session.int("select token from lease_acquire('a', '20 s')");
        let expires_at = session.text("select expires_at from lease_holder('a')");
        session.run(&format!("select lease_release('a', {token})"));
        cluster.stop_immediate();
        cluster.start();
        (token, expires_at)
    };
    let is_undone =
        |&(token, _): &(i64, String)| cluster.session("b").flag(&format!("select lease_check('a', {token})"));
    let (token, expires_at) = (0..TRIES).map(|_| crash()).find(is_undone).expect("it is undone");
    let mut session = cluster.session("b");
    assert_eq!(session.text("select expires_at from lease_holder('a')"), expires_at);
    session.run(&format!("select lease_guard('a', {token})"));
    let next = session.int("select token from lease_acquire('a', '1 h', '1 min')");
    assert!(next > token);
    assert!(session.flag(&format!("select clock_timestamp() >= '{expires_at}'")));
}

#[test]
fn the_setting_is_as_before() {
    let cluster = Cluster::new(LAZY);
    let mut session = cluster.session("a");
    for value in ["on", "remote_write", "local", "off"] {
        session.run(&format!("set synchronous_commit = {value}"));
        for transaction in
            ["RELEASE", "begin; RELEASE; commit", "begin; set local synchronous_commit = on; RELEASE; commit"]
        {
            let token = acquire(&mut session, "a");
            for statement in transaction.split("; ") {
                session.run(&statement.replace("RELEASE", &format!("select lease_release('a', {token})")));
            }
            assert_eq!(session.text("show synchronous_commit"), value, "{transaction}");
        }
    }
}

/// A standby that is gone holds up a grant, not a release.
#[test]
fn a_release_waits_for_no_standby() {
    let cluster = Cluster::new(&[]);
    let mut watch = cluster.session("watch");
    watch.run("alter system set synchronous_standby_names = 'nobody'");
    watch.run("select pg_reload_conf()");
    until("it is set", || watch.text("show synchronous_standby_names") == "nobody");
    let mut session = cluster.session("a");
    session.run("set synchronous_commit = local");
    let token = acquire(&mut session, "a");
    session.run("set synchronous_commit = on");
    session.run(&format!("select lease_release('a', {token})"));
    let pid = session.pid;
    let grant = session.background("select token from lease_acquire('a', '1 h')");
    until("the grant waits for the standby", || {
        watch.flag(&format!(
            "select coalesce(bool_or(wait_event = 'SyncRep'), false) from pg_stat_activity where pid = {pid}"
        ))
    });
    watch.run(&format!("select pg_cancel_backend({pid})"));
    grant.end().1.expect("it is committed here all the same");
}
