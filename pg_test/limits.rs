//! Case C43 over the forms that take several locks in one call, and over every form when the server has no memory for locks
//! left: all or nothing, with an error that says what to raise, and others go on.

use super::support::surface::FUNCTIONS;
use super::support::{Cluster, Server, Session, unique};

/// What a session holds by the lock manager, and by the view.
fn held(watch: &mut Session, pid: i32) -> (i64, Vec<String>) {
    let names = format!(
        "select concat_ws(' ', kind, name, mode, holds) from _lock_holders() where pid = {pid} order by kind, name, mode"
    );
    (watch.locks_of(pid), watch.column(&names))
}

#[test]
fn c43_a_set_of_a_hundred_thousand_names_takes_nothing() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let names = "(select array_agg('n' || i) from generate_series(1, 100000) as i)";
    for call in [
        "named_lock_all($names)",
        "named_lock_all($names, '0')",
        "named_lock_all($names, '1 s', 'share')",
        "named_xact_lock_all($names)",
        "named_xact_lock_all($names, '0', 'share')",
        "count(*) from named_lock_any($names, 100000)",
        "count(*) from named_lock_any($names, 100000, 'share')",
        "count(*) from named_xact_lock_any($names, 100000)",
    ] {
        let mut a = server.session("c43");
        let keep = unique("c43 keep");
        a.run(&format!("select named_lock('{keep}')"));
        let statement = format!("select {}", call.replace("$names", names));
        for begin in ["select 1", "begin", "begin; savepoint s"] {
            a.run(begin);
            let error = a.fails(&statement);
            assert!(["53400", "54000", "22023"].contains(&error.code.as_str()), "{call}: {error:#?}");
            assert!(!error.detail.is_empty() || !error.hint.is_empty(), "{call}: it says what to do: {error:#?}");
            assert_eq!(held(&mut watch, a.pid), (1, vec![format!("session {keep} exclusive 1")]), "{call}");
            a.run("rollback");
        }
        assert_eq!(a.int("select named_unlock_all()"), 1, "{call}");
        assert!(a.flag("select named_lock_all(array['one', 'two'])"));
    }
}

/// Up to the limit and no further, whatever was held before.
#[test]
fn c43_every_form_keeps_to_the_limit() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for (what, fits, passes) in [
        (
            "a set",
            "named_lock_all(array['$k a', '$k b', '$k c'])",
            "named_lock_all(array['$k a', '$k b', '$k c', '$k d'])",
        ),
        (
            "a set of the transaction",
            "named_xact_lock_all(array['$k a', '$k b', '$k c'])",
            "named_xact_lock_all(array['$k a', '$k b', '$k c', '$k d'])",
        ),
        // Twice the same name, or one that is held, is no further lock.
        (
            "a set with names twice",
            "named_lock_all(array['$k a', '$k b', '$k b', '$k 1', '$k c'])",
            "named_lock_all(array['$k a', '$k b', '$k b', '$k 1', '$k c', '$k d'])",
        ),
        (
            "any of a set",
            "count(*) from named_lock_any(array['$k a', '$k b', '$k c'], 3)",
            "count(*) from named_lock_any(array['$k a', '$k b', '$k c', '$k d'], 4)",
        ),
        (
            "any of a set, of the transaction",
            "count(*) from named_xact_lock_any(array['$k a', '$k b', '$k c'], 3)",
            "count(*) from named_xact_lock_any(array['$k a', '$k b', '$k c', '$k d'], 4)",
        ),
        ("a tree", "named_lock_tree('$k/b/c')", "named_lock_tree('$k/b/c/d')"),
        ("a tree of the transaction", "named_xact_lock_tree('$k/b/c')", "named_xact_lock_tree('$k/b/c/d')"),
        (
            "semaphores",
            "named_semaphore('$k a', 2), named_semaphore('$k a', 2), named_semaphore('$k b', 2)",
            "named_semaphore('$k a', 4), named_semaphore('$k a', 4), named_semaphore('$k a', 4), named_semaphore('$k b', 4)",
        ),
        (
            "some of each",
            "named_lock('$k a'), named_lock_all(array['$k b']), named_semaphore('$k c', 1)",
            "named_lock('$k a'), named_lock_all(array['$k b']), named_semaphore('$k c', 1), named_lock_tree('$k d')",
        ),
    ] {
        let mut a = server.session("c43");
        let k = unique("c43");
        a.run("set named_locks.max_locks_per_session = 10");
        a.run(&format!("select named_lock('{k} ' || i) from generate_series(1, 7) as i"));
        let before = held(&mut watch, a.pid);
        for begin in ["select 1", "begin"] {
            a.run(begin);
            a.fails(&format!("select {}", passes.replace("$k", &k))).is("53400").detail_has("max_locks_per_session");
            assert_eq!(held(&mut watch, a.pid), before, "{what}: what passes the limit takes nothing");
            a.run("rollback");
        }
        a.run(&format!("begin; select {}", fits.replace("$k", &k)));
        assert_eq!(held(&mut watch, a.pid).1.len(), 10, "{what}");
        a.fails(&format!("select named_lock('{k} one more')")).is("53400");
        a.run("rollback; select named_unlock_all()");
        assert_eq!(held(&mut watch, a.pid), (0, vec![]), "{what}");
    }
}

/// The server's own lock table is full, but for room for two locks: every form that takes something fails with the server's error
/// and holds nothing more, others keep what they have, and go on when there is room again.
#[test]
fn c43_every_form_when_the_servers_lock_memory_is_full() {
    let cluster = Cluster::new(&["max_locks_per_transaction = 10", "max_connections = 20", "autovacuum = off"]);
    let mut watch = cluster.session("watch");
    watch.run("select count(*) from pg_locks; select count(*) from lock_holders");
    let mut b = cluster.session("b");
    b.run("select named_lock('b'), named_semaphore('b sem', 2), named_lock_tree('b tree/leaf')");
    let of_b = held(&mut watch, b.pid);
    let many = "(select array_agg('set ' || i) from generate_series(1, 100) as i)";
    let calls: Vec<(String, String)> = FUNCTIONS
        .iter()
        .filter(|function| function.does.acquires())
        .map(|function| {
            let call = function.call.replace("NAME", "a/b/c/d/e/f");
            (function.signature.to_owned(), call)
        })
        .chain(
            [
                "select named_lock_all($many)",
                "select named_xact_lock_all($many, '0', 'share')",
                "select count(*) from named_lock_any($many, 100)",
                "select count(*) from named_xact_lock_any($many, 100)",
                "select named_lock_tree('t/1/2/3/4/5/6/7/8/9')",
                "select named_xact_lock_tree('t/1/2/3/4/5/6/7/8/9', '0', 'share')",
            ]
            .map(|call| (call.to_owned(), call.replace("$many", many))),
        )
        .collect();
    let mut filler = cluster.session("filler");
    filler.run("set named_locks.max_locks_per_session = 400000");
    // One's first lease, of all that has to be looked up for it.
    let mut a = cluster.session("a");
    for (_, call) in &calls {
        a.run(call);
        a.run("select named_unlock_all(), pg_advisory_unlock_all(), lease_break('a/b/c/d/e/f')");
    }
    for (what, call) in &calls {
        let takes_many = call.contains("array_agg") || call.contains("/9");
        // To the last one; then there is room for none, or for two.
        filler.fails("select named_lock('n' || i) from generate_series(1, 400000) as i").is("53200");
        if takes_many {
            filler.run("select named_unlock('n' || i) from generate_series(1, 2) as i");
        }
        let before = held(&mut watch, a.pid);
        let error = a.fails(call);
        assert!(error.code == "53200", "{what}: {error:#?}");
        error.hint_has("max_locks_per_transaction");
        assert_eq!(held(&mut watch, a.pid), before, "{what}: nothing is held");
        assert_eq!(held(&mut watch, b.pid), of_b, "{what}: others have what they had");
        if !call.starts_with("call ") {
            a.run("begin; savepoint s");
            a.fails(call).is("53200");
            a.run("rollback to s");
            assert_eq!(held(&mut watch, a.pid), before, "{what}: nothing is held");
            a.run("rollback");
        }
        assert_eq!(b.int("select named_lock_held('b')"), 1, "{what}");
        filler.run("select named_unlock_all()");
        b.run("create table still_works (i int primary key); drop table still_works");
        a.run(call);
        a.run("select named_unlock_all(), pg_advisory_unlock_all(), lease_break('a/b/c/d/e/f')");
        assert_eq!(held(&mut watch, a.pid).0, 0, "{what}");
    }
    b.run("select named_semaphore_release('b sem', 1), named_unlock_tree('b tree/leaf'), named_unlock('b')");
    assert_eq!(held(&mut watch, b.pid), (0, vec![]));
}
