//! Trees of names: case C21, conflicts as on a tree of files, and what gives a tree back. Case C20 over them.

use super::support::holding::{SCOPES, holds, holds_nothing, start};
use super::support::{Cluster, Random, Server, Session, let_pass, literal, unique};
use crate::rules::mode::Mode;
use crate::rules::tree::file_tree::{Claim, Kind};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

#[test]
fn a_path_is_held_in_its_mode_and_what_is_above_it_in_an_intent_mode() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for (prefix, kind) in SCOPES {
        for (mode, intent) in [
            ("exclusive", "intent exclusive"),
            ("intent exclusive", "intent exclusive"),
            ("share intent exclusive", "intent exclusive"),
            ("share", "intent share"),
            ("intent share", "intent share"),
        ] {
            let k = unique("tree");
            let mut a = server.session("a");
            a.run("begin");
            assert!(a.flag(&format!("select {prefix}_lock_tree('{k}/b/c', mode => '{mode}')")));
            assert_eq!(
                holds(&mut watch, a.pid),
                [
                    format!("{k} {kind} {intent} 1"),
                    format!("{k}/b {kind} {intent} 1"),
                    format!("{k}/b/c {kind} {mode} 1")
                ]
            );
            for (path, mode) in [("", intent), ("/b", intent), ("/b/c", mode)] {
                assert_eq!(a.int(&format!("select named_lock_held('{k}{path}')")), 1);
                assert_eq!(a.int(&format!("select named_lock_held('{k}{path}', '{mode}')")), 1);
            }
            if kind == "session" {
                assert_eq!(a.int(&format!("select named_unlock_tree('{k}/b/c')")), 0);
            } else {
                a.fails(&format!("select named_unlock_tree('{k}/b/c')")).is("55000").hint_has("end of the transaction");
            }
            a.run("rollback");
            holds_nothing(&mut watch, a.pid, prefix);
        }
    }
}

#[test]
fn a_path_of_one_part_is_a_name() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let k = unique("root");
    let mut a = server.session("a");
    assert!(a.flag(&format!("select named_lock_tree('{k}')")));
    assert_eq!(holds(&mut watch, a.pid), [format!("{k} session exclusive 1")]);
    assert!(!watch.flag(&format!("select named_lock('{k}', '0')")));
    assert_eq!(a.int(&format!("select named_unlock_tree('{k}')")), 0);
}

#[test]
fn bad_paths_are_refused() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let mut a = server.session("a");
    for (path, code, part) in [
        ("null".to_owned(), "22004", "path must not be null"),
        ("''".to_owned(), "22023", "empty"),
        ("'/'".to_owned(), "22023", "empty part"),
        ("'/a'".to_owned(), "22023", "path \"/a\" has an empty part"),
        ("'a/'".to_owned(), "22023", "empty part"),
        ("'a//b'".to_owned(), "22023", "empty part"),
        ("rtrim(repeat('a/', 33), '/')".to_owned(), "22023", "33"),
        ("repeat('a', 1025)".to_owned(), "22001", "1025"),
        (format!("'a/{}'", "b".repeat(1023)), "22001", "1025"),
    ] {
        for function in ["named_lock_tree", "named_xact_lock_tree", "named_unlock_tree"] {
            a.fails(&format!("select {function}({path})")).is(code).message_has(part);
        }
        holds_nothing(&mut watch, a.pid, &path);
    }
    for (prefix, _) in SCOPES {
        a.fails(&format!("select {prefix}_lock_tree('a', mode => null)")).is("22004").message_has("mode");
        a.fails(&format!("select {prefix}_lock_tree('a', '-1 s')")).is("22023");
    }
    // The longest.
    let path = format!("rtrim(repeat('{}/', 32), '/')", "x".repeat(31));
    assert!(a.flag(&format!("select named_lock_tree({path})")));
    assert_eq!(watch.locks_of(a.pid), 32);
    assert_eq!(a.int(&format!("select named_unlock_tree({path})")), 0);
    holds_nothing(&mut watch, a.pid, "the longest");
}

// Case C21 ------------------------------------------------------------------------------------------------------------

const MODES: [&str; 5] = ["exclusive", "share", "intent share", "intent exclusive", "share intent exclusive"];

#[test]
fn c21_siblings_never_interact() {
    let server = Server::shared();
    for (one_prefix, _) in SCOPES {
        for (two_prefix, _) in SCOPES {
            let app = unique("c21");
            let mut a = server.session("a");
            let mut b = server.session("b");
            a.run("begin");
            b.run("begin");
            for one in MODES {
                for two in MODES {
                    let below = ["", "/x", "/x/y"];
                    for deep in below {
                        assert!(a.flag(&format!("select {one_prefix}_lock_tree('{app}/a{deep}', '0', '{one}')")));
                        assert!(
                            b.flag(&format!("select {two_prefix}_lock_tree('{app}/b{deep}', '0', '{two}')")),
                            "{one} beside {two}"
                        );
                    }
                }
            }
            a.run("rollback; select named_unlock_all()");
            b.run("rollback; select named_unlock_all()");
        }
    }
}

#[test]
fn c21_a_lock_on_the_whole_shuts_out_both() {
    let server = Server::shared();
    let app = unique("c21");
    let mut a = server.session("a");
    let mut b = server.session("b");
    for lock_app in [
        format!("named_lock_tree('{app}', '0')"),
        format!("named_lock('{app}', '0')"),
        format!("named_lock_all(array['{app}'], '0')"),
    ] {
        assert!(a.flag(&format!("select {lock_app}")));
        for child in ["a", "b", "a/x"] {
            for mode in MODES {
                for (prefix, _) in SCOPES {
                    let call = format!("select {prefix}_lock_tree('{app}/{child}', '0', '{mode}')");
                    assert!(!b.flag(&call), "{lock_app}: {call}");
                }
            }
        }
        a.run("select named_unlock_all()");
        // And the other way round.
        for mode in MODES {
            assert!(b.flag(&format!("select named_lock_tree('{app}/a/x', '0', '{mode}')")));
            assert!(!a.flag(&format!("select {lock_app}")), "{mode} below");
            assert_eq!(b.int(&format!("select named_unlock_tree('{app}/a/x')")), 0);
        }
    }
    // In share mode readers below go on, and writers do not.
    for lock_app in
        [format!("named_lock_tree('{app}', mode => 'share')"), format!("named_lock('{app}', mode => 'share')")]
    {
        a.run(&format!("select {lock_app}"));
        for (mode, free) in [
            ("share", true),
            ("intent share", true),
            ("exclusive", false),
            ("intent exclusive", false),
            ("share intent exclusive", false),
        ] {
            assert_eq!(b.flag(&format!("select named_lock_tree('{app}/a', '0', '{mode}')")), free, "{mode}");
            b.run("select named_unlock_all()");
        }
        a.run("select named_unlock_all()");
    }
    // Names that only begin alike are others.
    a.run(&format!("select named_lock_tree('{app}')"));
    assert!(b.flag(&format!("select named_lock_tree('{app}2/a', '0') and named_lock_tree('x{app}/a', '0')")));
}

/// All modes, at all positions to each other, against the tree of files.
#[test]
fn c21_conflicts_are_those_of_a_tree_of_files() {
    let server = Server::shared();
    let mut a = server.session("a");
    let mut b = server.session("b");
    let app = unique("c21");
    let positions = ["", "/x", "/y", "/x/1", "/x/2", "/x/1/deep"];
    let mut conflicts = 0;
    for one_path in positions {
        for one_mode in MODES {
            for one_kind in [Kind::Tree, Kind::Plain] {
                let one = claim(&app, one_path, one_mode, one_kind);
                assert!(a.flag(&format!("select {}", call(&one, "named"))));
                let mut calls = Vec::new();
                let mut expected = Vec::new();
                for two_path in positions {
                    for two_mode in MODES {
                        for two_kind in [Kind::Tree, Kind::Plain] {
                            let two = claim(&app, two_path, two_mode, two_kind);
                            calls.push(call(&two, "named_xact"));
                            expected.push(if one.conflicts_with(&two) { "f" } else { "t" });
                        }
                    }
                }
                conflicts += expected.iter().filter(|answer| **answer == "f").count();
                // Each in a transaction of its own; what one session holds is in none of its own calls' way.
                let mut answers = Vec::new();
                for call in &calls {
                    answers.push(b.text(&format!("select {call}")));
                }
                for ((call, answer), expected) in calls.iter().zip(&answers).zip(expected) {
                    assert_eq!(answer, expected, "{one:?} and {call}");
                }
                a.run("select named_unlock_all()");
            }
        }
    }
    assert!(conflicts > 100, "{conflicts}");
}

fn claim(app: &str, path: &str, mode: &str, kind: Kind) -> Claim {
    Claim { path: format!("{app}{path}"), mode: Mode::from_label(mode).expect("a mode"), kind }
}

fn call(claim: &Claim, prefix: &str) -> String {
    let function = if claim.kind == Kind::Tree { "lock_tree" } else { "lock" };
    format!("{prefix}_{function}({}, '0', '{}')", literal(&claim.path), claim.mode)
}

#[test]
fn c20_trees_of_two_databases() {
    let server = Server::shared();
    let second = server.new_database("c20_trees", "UTF8");
    let mut one = server.session("one");
    let mut two = second.session("two");
    let k = unique("c20");
    for (prefix, _) in SCOPES {
        one.run("begin");
        two.run("begin");
        assert!(one.flag(&format!("select {prefix}_lock_tree('{k}/a', '0')")));
        assert!(two.flag(&format!("select {prefix}_lock_tree('{k}/a', '0') and {prefix}_lock_tree('{k}', '0')")));
        one.run("rollback; select named_unlock_all()");
        two.run("rollback; select named_unlock_all()");
    }
}

// All or none ---------------------------------------------------------------------------------------------------------

#[test]
fn whatever_ends_the_wait_leaves_nothing() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for (prefix, _) in SCOPES {
        // In the way at the root, in the middle, and at the path itself.
        for (at, held) in [("", 1), ("/b", 2), ("/b/c", 3)] {
            let k = unique("tree");
            let mut holder = server.session("the one in the way");
            holder.run(&format!("select named_lock('{k}{at}')"));
            let lock = |timeout: &str| format!("select {prefix}_lock_tree('{k}/b/c', {timeout})");
            let mut b = server.session("b");
            assert!(!b.flag(&lock("'0'")));
            holds_nothing(&mut watch, b.pid, "try");
            let begun = Instant::now();
            assert!(!b.flag(&lock("'60 ms'")));
            assert!(begun.elapsed() >= Duration::from_millis(60));
            holds_nothing(&mut watch, b.pid, "timeout");
            b.run("set lock_timeout = '60ms'");
            b.fails(&lock("null"))
                .is("55P03")
                .message_has(&format!("named lock \"{k}{at}\""))
                .detail_has("the one in the way");
            holds_nothing(&mut watch, b.pid, "lock_timeout");
            b.run("set lock_timeout = 0; set statement_timeout = '100ms'");
            b.fails(&lock("null")).is("57014");
            b.run("set statement_timeout = 0");
            holds_nothing(&mut watch, b.pid, "statement_timeout");
            let waiting = start(b, &lock("'1 hour'"), &mut watch);
            assert_eq!(watch.locks_of(waiting.pid), held);
            watch.run(&format!("select pg_cancel_backend({})", waiting.pid));
            let (b, result) = waiting.end();
            result.expect_err("cancelled").is("57014").context_has(&format!("named lock \"{k}{at}\""));
            holds_nothing(&mut watch, b.pid, "cancel");
            let waiting = start(b, &lock("null"), &mut watch);
            watch.run(&format!("select pg_terminate_backend({})", waiting.pid));
            let (b, result) = waiting.end();
            result.expect_err("terminated").is_end_of_session();
            watch.until_gone(b.pid);
            holds_nothing(&mut watch, b.pid, "terminate");
            // And it is had when the way is free.
            let waiting = start(server.session("b"), &lock("'1 hour'"), &mut watch);
            holder.run("select named_unlock_all()");
            assert_eq!(waiting.end().1.expect("no error")[0].get(0), Some("t"));
        }
    }
}

#[test]
fn one_deadline_over_the_whole_path() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let k = unique("tree");
    let mut root = server.session("root");
    let mut leaf = server.session("leaf");
    root.run(&format!("select named_lock('{k}')"));
    leaf.run(&format!("select named_lock('{k}/b')"));
    let begun = Instant::now();
    let waiting = start(server.session("b"), &format!("select named_lock_tree('{k}/b', '3 s')"), &mut watch);
    let_pass(2_000);
    root.run("select named_unlock_all()");
    let (b, result) = waiting.end();
    assert_eq!(result.expect("no error")[0].get(0), Some("f"));
    assert!(begun.elapsed() >= Duration::from_secs(3), "too early: {:?}", begun.elapsed());
    assert!(begun.elapsed() < Duration::from_millis(4_800), "a deadline for each? {:?}", begun.elapsed());
    holds_nothing(&mut watch, b.pid, "the deadline");
}

#[test]
fn two_trees_in_each_others_way_are_a_deadlock() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for (prefix, _) in SCOPES {
        let k = unique("tree");
        let mut a = server.session("a");
        let mut b = server.session("b");
        a.run(&format!("begin; select {prefix}_lock_tree('{k}/a')"));
        b.run(&format!("begin; select {prefix}_lock_tree('{k}/b')"));
        // A wants the whole, which B's tree is in the way of; then B wants it too.
        let waiting = start(a, &format!("set deadlock_timeout = '1h'; select {prefix}_lock_tree('{k}')"), &mut watch);
        b.run("set deadlock_timeout = '50ms'");
        b.fails(&format!("select {prefix}_lock_tree('{k}/a/x')"))
            .is("40P01")
            .context_has(&format!("named lock \"{k}/a\""));
        b.run("rollback");
        if prefix == "named" {
            assert_eq!(holds(&mut watch, b.pid).len(), 2, "what it had before");
            assert_eq!(b.int(&format!("select named_unlock_tree('{k}/b')")), 0);
        }
        holds_nothing(&mut watch, b.pid, prefix);
        let (mut a, result) = waiting.end();
        assert_eq!(result.expect("the survivor goes on")[0].get(0), Some("t"));
        a.run("rollback");
    }
}

#[test]
fn limits_rights_and_settings() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let k = unique("limits");
    for (prefix, _) in SCOPES {
        let mut a = server.session("a");
        a.run("set named_locks.max_locks_per_session = 3; begin; savepoint s");
        assert!(a.flag(&format!("select {prefix}_lock_tree('{k}/b')")));
        assert!(a.flag(&format!("select {prefix}_lock_tree('{k}/c')")));
        a.fails(&format!("select {prefix}_lock_tree('{k}/c/d')")).is("53400").message_has("/c/d");
        a.run("rollback to s; commit; select named_unlock_all()");
        // It takes nothing, and lets go of what the statement took, trees too.
        a.run(&format!("select named_lock('{k}')"));
        a.fails(&format!("select named_lock_tree('{k}/b'), named_lock_tree('{k}/b'), {prefix}_lock_tree('{k}/c/d')"))
            .is("53400");
        assert_eq!(holds(&mut watch, a.pid), [format!("{k} session exclusive 1")]);
        a.run("select named_unlock_all(); set named_locks.session_locks = off");
        if prefix == "named" {
            a.fails(&format!("select named_lock_tree('{k}/b')")).is("0A000").message_has("/b");
        } else {
            assert!(a.flag(&format!("select named_xact_lock_tree('{k}/b')")));
        }
    }

    let database = server.new_database("tree_domains", "UTF8");
    let mut admin = database.session("admin");
    let [team, stranger] = ["tree_team", "tree_stranger"].map(|role| database.new_role(role));
    admin.run(&format!("select lock_domain_set('shop', '{team}')"));
    let mut session = database.session_as(&stranger, "stranger");
    for (prefix, _) in SCOPES {
        session.fails(&format!("select {prefix}_lock_tree('shop:eu/42')")).is("42501").message_has("domain \"shop\"");
        // The names above have domains of their own, here that of names without a colon.
        assert!(session.flag(&format!("select {prefix}_lock_tree('shop/x:y/z')")));
    }
    session.run("select named_unlock_all()");
    admin.run(&format!("select lock_domain_set('', '{team}')"));
    session.fails("select named_lock_tree('shop/x:y/z')").is("42501").message_has("domain \"\"");
    holds_nothing(&mut admin, session.pid, "denied");
    admin.run("select lock_domain_drop('')");
    admin.run("select lock_domain_set('shop', max_wait => '200 ms', max_hold => '1 hour')");
    let mut holder = database.session("the holder");
    holder.run("select named_lock('shop:eu/42/x')");
    assert!(!session.flag("select named_lock_tree('shop:eu/42/x', '1 min')"));
    session.fails("select named_lock_tree('shop:eu/42/x')").is("55P03").message_has("max_wait of its domain (200 ms)");
    session.run("select named_lock_tree('shop:eu/7')");
    let limits = format!(
        "select concat_ws(' ', name, hold_limit, remaining <= hold_limit) from lock_holders where pid = {} order by 1",
        session.pid
    );
    assert_eq!(admin.column(&limits), ["shop:eu 01:00:00 t", "shop:eu/7 01:00:00 t"]);
    // Each name's limit by itself.
    session.run("select named_lock_extend('shop:eu/7', '1 min')");
    assert_eq!(admin.column(&limits), ["shop:eu 01:00:00 t", "shop:eu/7 00:01:00 t"]);
    // A new mode keeps it.
    assert!(session.flag("select named_lock_convert('shop:eu/7', 'share')"));
    assert_eq!(admin.column(&limits), ["shop:eu 01:00:00 t", "shop:eu/7 00:01:00 t"]);
    let left =
        format!("select max(remaining) < '1 min' from lock_holders where pid = {} and name = 'shop:eu/7'", session.pid);
    assert!(admin.flag(&left));
    session.run("select named_lock_extend('shop:eu/7', '200 ms')");
    admin.until_gone(session.pid);

    let primary = Cluster::new(&[]);
    let standby = primary.standby(&[]);
    primary.until_replayed_by(&standby);
    let mut a = standby.session("a");
    for (prefix, _) in SCOPES {
        a.fails(&format!("select {prefix}_lock_tree('a/b')")).is("25006").message_has("a/b");
    }
    a.fails("select named_unlock_tree('a/b')").is("55000");
    a.run("set named_locks.allow_on_standby = on");
    assert!(a.flag("select named_lock_tree('a/b')"));
    assert_eq!(a.int("select named_unlock_tree('a/b')"), 0);
}

// Giving back ---------------------------------------------------------------------------------------------------------

#[test]
fn unlocking_undoes_exactly_one() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let k = unique("undo");
    let mut a = server.session("a");
    // Mixed modes of one path: the last first, with its own intents.
    for mode in ["share", "exclusive", "exclusive", "intent share", "share intent exclusive"] {
        assert!(a.flag(&format!("select named_lock_tree('{k}/b', mode => '{mode}')")));
    }
    let pid = a.pid;
    let state = |watch: &mut Session| holds(watch, pid).join(", ").replace(&k, "k").replace(" session", "");
    assert_eq!(
        state(&mut watch),
        "k intent exclusive 3, k intent share 2, k/b exclusive 2, k/b intent share 1, k/b share 1, k/b share intent exclusive 1"
    );
    let unlock = format!("select named_unlock_tree('{k}/b')");
    for (remaining, expected) in [
        (4, "k intent exclusive 2, k intent share 2, k/b exclusive 2, k/b intent share 1, k/b share 1"),
        (3, "k intent exclusive 2, k intent share 1, k/b exclusive 2, k/b share 1"),
        (2, "k intent exclusive 1, k intent share 1, k/b exclusive 1, k/b share 1"),
        (1, "k intent share 1, k/b share 1"),
        (0, ""),
    ] {
        assert_eq!(a.int(&unlock), remaining);
        assert_eq!(state(&mut watch), expected);
    }
    a.fails(&unlock).is("55000").message_has(&format!("tree \"{k}/b\" is not held")).detail_has("Nobody holds it");
}

#[test]
fn nested_paths_and_plain_holds_are_apart() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let k = unique("nested");
    let mut a = server.session("a");
    let pid = a.pid;
    let state = |watch: &mut Session| holds(watch, pid).join(", ").replace(&k, "k").replace(" session", "");
    a.run(&format!("select named_lock_tree('{k}/b/c'), named_lock('{k}/b', mode => 'share')"));
    a.run(&format!("select named_lock_tree('{k}/b', mode => 'share'), named_lock('{k}', mode => 'intent exclusive')"));
    let all = "k intent exclusive 2, k intent share 1, k/b intent exclusive 1, k/b share 2, k/b/c exclusive 1";
    assert_eq!(state(&mut watch), all);

    // A plain unlock gives back plain holds only.
    assert_eq!(a.int(&format!("select named_unlock('{k}')")), 0);
    a.fails(&format!("select named_unlock('{k}')")).is("55000").message_has("trees").hint_has("named_unlock_tree");
    a.fails(&format!("select named_unlock('{k}', 'intent share')")).is("55000").hint_has("named_unlock_tree");
    a.fails(&format!("select named_unlock('{k}', all_holds => true)")).is("55000").hint_has("named_unlock_tree");
    a.fails(&format!("select named_unlock('{k}/b/c')")).is("55000").hint_has("named_unlock_tree");
    assert_eq!(a.int(&format!("select named_unlock('{k}/b', all_holds => true)")), 0);
    assert_eq!(
        state(&mut watch),
        "k intent exclusive 1, k intent share 1, k/b intent exclusive 1, k/b share 1, k/b/c exclusive 1"
    );
    // A tree's unlock gives back its own: k/b as a path, and not where k/b/c goes through it.
    assert_eq!(a.int(&format!("select named_unlock_tree('{k}/b')")), 0);
    assert_eq!(state(&mut watch), "k intent exclusive 1, k/b intent exclusive 1, k/b/c exclusive 1");
    for path in ["", "/b"] {
        a.fails(&format!("select named_unlock_tree('{k}{path}')"))
            .is("55000")
            .message_has(&format!("tree \"{k}{path}\" is not held"))
            .detail_has(&format!("process {pid}"))
            .detail_has("This session holds");
    }
    assert_eq!(state(&mut watch), "k intent exclusive 1, k/b intent exclusive 1, k/b/c exclusive 1");
    // A plain hold is no tree.
    a.run(&format!("select named_lock('{k}/p')"));
    a.fails(&format!("select named_unlock_tree('{k}/p')")).is("55000").message_has("tree");
    // Another session's.
    watch.fails(&format!("select named_unlock_tree('{k}/b/c')")).is("55000").detail_has(&format!("process {pid}"));
    assert_eq!(a.int(&format!("select named_unlock('{k}/p')")), 0);
    assert_eq!(a.int(&format!("select named_unlock_tree('{k}/b/c')")), 0);
    holds_nothing(&mut watch, pid, "the end");
}

#[test]
fn trees_of_session_and_transaction() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let k = unique("both");
    let mut a = server.session("a");
    a.run(&format!("begin; select named_xact_lock_tree('{k}/b'), named_lock_tree('{k}/b'), named_lock_tree('{k}/b')"));
    assert_eq!(holds(&mut watch, a.pid).len(), 4);
    assert_eq!(a.int(&format!("select named_unlock_tree('{k}/b')")), 1);
    a.run("savepoint s");
    a.run(&format!("select named_xact_lock_tree('{k}/b/c')"));
    assert_eq!(a.int(&format!("select named_lock_held('{k}')")), 3);
    a.run("rollback to s");
    assert_eq!(a.int(&format!("select named_lock_held('{k}')")), 2);
    a.run("commit");
    assert_eq!(
        holds(&mut watch, a.pid),
        [format!("{k} session intent exclusive 1"), format!("{k}/b session exclusive 1")]
    );
    // pg_advisory_unlock_all() within a transaction that holds the same.
    a.run(&format!("begin; select named_xact_lock_tree('{k}/b'); select pg_advisory_unlock_all()"));
    assert_eq!(
        holds(&mut watch, a.pid),
        [format!("{k} transaction intent exclusive 1"), format!("{k}/b transaction exclusive 1")]
    );
    a.run("savepoint s");
    a.fails(&format!("select named_unlock_tree('{k}/b')")).is("55000").message_has("by this transaction");
    a.run("rollback to s; commit");
    holds_nothing(&mut watch, a.pid, "commit");
}

#[test]
fn what_gives_all_back() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let k = unique("all");
    let mut a = server.session("a");
    let take = format!(
        "select named_lock_tree('{k}/b/c'), named_lock_tree('{k}/b', mode => 'intent exclusive'), named_lock('{k}')"
    );
    a.run(&take);
    let shown = format!("select sum(holds) from lock_holders where pid = {}", a.pid);
    assert_eq!(watch.int(&shown), 6);
    assert_eq!(a.int("select named_unlock_all()"), 6, "each hold as lock_holders shows it");
    holds_nothing(&mut watch, a.pid, "named_unlock_all()");
    for behind_our_back in ["discard all", "select pg_advisory_unlock_all()"] {
        a.run(&take);
        a.run(behind_our_back);
        holds_nothing(&mut watch, a.pid, behind_our_back);
        a.fails(&format!("select named_unlock_tree('{k}/b/c')"))
            .is("55000")
            .detail_has("This session holds no session lock");
        a.fails(&format!("select named_unlock_tree('{k}/b')")).is("55000");
        assert_eq!(a.int(&format!("select named_lock_held('{k}') + named_lock_held('{k}/b')")), 0);
        assert_eq!(a.int("select named_unlock_all()"), 0);
        // Taken again, each counts once.
        a.run(&take);
        a.run(behind_our_back);
        a.run(&format!("select named_lock_tree('{k}/b', mode => 'share')"));
        assert_eq!(holds(&mut watch, a.pid), [format!("{k} session intent share 1"), format!("{k}/b session share 1")]);
        a.fails(&format!("select named_unlock_tree('{k}/b/c')")).is("55000");
        assert_eq!(a.int(&format!("select named_unlock_tree('{k}/b')")), 0);
        holds_nothing(&mut watch, a.pid, behind_our_back);
    }
}

#[test]
fn a_prepared_tree() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let k = unique("prepared");
    let mut a = server.session("a");
    a.run(&format!("begin; select named_xact_lock_tree('{k}/b'); prepare transaction '{k}'"));
    assert_eq!(
        watch.column(&format!(
            "select concat_ws(' ', name, kind, mode) from lock_holders where gid = '{k}' order by name"
        )),
        [format!("{k} transaction intent exclusive"), format!("{k}/b transaction exclusive")]
    );
    assert!(!a.flag(&format!("select named_lock_tree('{k}/b', '0')")));
    assert!(a.flag(&format!("select named_lock_tree('{k}/c', '0')")));
    a.run(&format!("rollback prepared '{k}'"));
    assert!(a.flag(&format!("select named_lock_tree('{k}', '0')")));
}

// Conversion ----------------------------------------------------------------------------------------------------------

#[test]
fn converting_a_path_converts_its_tree() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let k = unique("convert");
    let mut a = server.session("a");
    let pid = a.pid;
    for from in MODES {
        for to in MODES {
            let intent = |mode: &str| {
                if ["share", "intent share"].contains(&mode) { "intent share" } else { "intent exclusive" }
            };
            let shown = |mode: &str| {
                [
                    format!("{k} session {} 1", intent(mode)),
                    format!("{k}/b session {} 1", intent(mode)),
                    format!("{k}/b/c session {mode} 1"),
                ]
            };
            a.run(&format!("select named_lock_tree('{k}/b/c', mode => '{from}')"));
            assert!(a.flag(&format!("select named_lock_convert('{k}/b/c', '{to}')")), "{from} to {to}");
            assert_eq!(holds(&mut watch, pid), shown(to), "{from} to {to}");
            assert_eq!(watch.locks_of(pid), 3, "{from} to {to}");
            assert_eq!(a.int(&format!("select named_unlock_tree('{k}/b/c')")), 0);
            holds_nothing(&mut watch, pid, "unlocked");
        }
    }
    // Not had: the old one stands. In the way are a reader of the path, or one of the root.
    let mut b = server.session("b");
    for in_the_way in [format!("named_lock('{k}/b/c', mode => 'share')"), format!("named_lock('{k}', mode => 'share')")]
    {
        a.run(&format!("select named_lock_tree('{k}/b/c', mode => 'share')"));
        let before = holds(&mut watch, pid);
        b.run(&format!("select {in_the_way}"));
        for timeout in ["0", "50 ms"] {
            assert!(!a.flag(&format!("select named_lock_convert('{k}/b/c', 'exclusive', '{timeout}')")));
            assert_eq!(holds(&mut watch, pid), before);
        }
        a.run("set lock_timeout = '50ms'");
        a.fails(&format!("select named_lock_convert('{k}/b/c', 'exclusive')"))
            .is("55P03")
            .detail_has(&format!("process {}", b.pid));
        assert_eq!(holds(&mut watch, pid), before);
        a.run("set lock_timeout = 0");
        let waiting = start(a, &format!("select named_lock_convert('{k}/b/c', 'exclusive')"), &mut watch);
        watch.run(&format!("select pg_cancel_backend({pid})"));
        let (session, result) = waiting.end();
        a = session;
        result.expect_err("cancelled").is("57014");
        assert_eq!(holds(&mut watch, pid), before);
        let waiting = start(a, &format!("select named_lock_convert('{k}/b/c', 'exclusive', '1 min')"), &mut watch);
        b.run("select named_unlock_all()");
        let (session, result) = waiting.end();
        a = session;
        assert_eq!(result.expect("no error")[0].get(0), Some("t"));
        assert_eq!(a.int(&format!("select named_unlock_tree('{k}/b/c')")), 0);
        holds_nothing(&mut watch, pid, "converted");
    }
}

#[test]
fn what_cannot_be_converted() {
    let server = Server::shared();
    let k = unique("convert");
    let mut a = server.session("a");
    a.run(&format!("select named_lock_tree('{k}/b')"));
    a.fails(&format!("select named_lock_convert('{k}', 'share')"))
        .is("55000")
        .message_has("trees")
        .hint_has("by the path");
    a.run(&format!("select named_lock_tree('{k}/b')"));
    a.fails(&format!("select named_lock_convert('{k}/b', 'share')")).is("55000").message_has("2 times");
    a.run(&format!("select named_unlock_tree('{k}/b'), named_lock('{k}/b')"));
    a.fails(&format!("select named_lock_convert('{k}/b', 'share')")).is("55000").message_has("2 times");
    a.run(&format!("select named_unlock('{k}/b'), named_lock('{k}', mode => 'intent share')"));
    a.fails(&format!("select named_lock_convert('{k}', 'share')")).is("55000").message_has("2 times");
    a.run(&format!("select named_unlock('{k}')"));
    assert!(a.flag(&format!("select named_lock_convert('{k}/b', 'share')")));
    a.fails(&format!("select named_lock_convert('{k}/x', 'share')")).is("55000");
    // One that goes through it, and one of itself.
    a.run(&format!("select named_lock_tree('{k}/b/c', mode => 'share')"));
    a.fails(&format!("select named_lock_convert('{k}/b', 'exclusive')")).is("55000").message_has("2 times");
    a.run(&format!("select named_unlock_tree('{k}/b/c')"));
    // A hold of the transaction's is none of it.
    a.run(&format!("begin; select named_xact_lock_tree('{k}/b')"));
    assert!(a.flag(&format!("select named_lock_convert('{k}/b', 'exclusive')")));
    a.run("commit");
    assert_eq!(a.int(&format!("select named_unlock_tree('{k}/b')")), 0);
}

// Random schedules ----------------------------------------------------------------------------------------------------

/// One hold in the model.
#[derive(Clone, Debug)]
struct Hold {
    claim: Claim,
    /// None: the session's; else the depth of the savepoint that it belongs to.
    level: Option<usize>,
}

/// A session and what it should hold, in the order taken.
struct Client {
    session: Session,
    holds: Vec<Hold>,
    /// 0 outside of a block, 1 in one, more in savepoints.
    depth: usize,
}

impl Client {
    /// What lock_holders has to show: name, kind, mode and holds.
    fn shown(&self) -> Vec<String> {
        let mut counts: BTreeMap<(String, &str, String), u32> = BTreeMap::new();
        for hold in &self.holds {
            let kind = if hold.level.is_none() { "session" } else { "transaction" };
            for (name, mode) in hold.claim.locks() {
                *counts.entry((name, kind, mode.to_string())).or_default() += 1;
            }
        }
        let rows = counts.into_iter().map(|((name, kind, mode), count)| format!("{name} {kind} {mode} {count}"));
        let mut rows: Vec<String> = rows.collect();
        rows.sort_unstable();
        rows
    }

    fn of_session(&self) -> impl Iterator<Item = (usize, &Claim)> {
        self.holds
            .iter()
            .enumerate()
            .filter(|(_, hold)| hold.level.is_none())
            .map(|(number, hold)| (number, &hold.claim))
    }

    /// The session's holds that a name has part in.
    fn of_name(&self, name: &str) -> usize {
        self.of_session().map(|(_, claim)| claim.locks().iter().filter(|lock| lock.0 == name).count()).sum()
    }
}

/// Random schedules of three sessions over a small tree, against the tree of files.
///
/// `NAMED_LOCKS_SEED=n` runs a certain one again, `NAMED_LOCKS_SECONDS=n` runs for longer.
#[test]
fn c21_model() {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let seed = number("NAMED_LOCKS_SEED").unwrap_or(21);
    let end = Instant::now() + Duration::from_secs(number("NAMED_LOCKS_SECONDS").unwrap_or(10));
    let mut random = Random(seed);
    let server = Server::shared();
    let mut watch = server.session("watch");
    let app = unique("model");
    let paths: Vec<String> =
        ["", "/a", "/b", "/a/x", "/a/y", "/a/x/1"].iter().map(|path| format!("{app}{path}")).collect();
    let mut clients: Vec<Client> =
        (0..3).map(|_| Client { session: server.session("model"), holds: Vec::new(), depth: 0 }).collect();
    let mut steps: BTreeMap<&str, u64> = BTreeMap::new();
    let mut step = 0;
    while Instant::now() < end || step < 500 {
        step += 1;
        let who = random.index(clients.len());
        let what = play(&mut clients, who, &mut random, &paths, step);
        *steps.entry(what).or_default() += 1;
        let client = &clients[who];
        let mut shown = holds(&mut watch, client.session.pid);
        shown.sort_unstable();
        assert_eq!(shown, client.shown(), "seed {seed}, step {step}: after {what}");
    }
    println!("{steps:?}");
    for what in [
        "lock",
        "refused",
        "unlock tree",
        "unlock",
        "convert",
        "not converted",
        "rollback to",
        "release",
        "commit",
        "unlock all",
        "discard",
    ] {
        assert!(steps.get(what).is_some_and(|&count| count > 0), "{what} never happened: {steps:?}");
    }
}

/// One step of a client; what it was.
fn play(clients: &mut [Client], who: usize, random: &mut Random, paths: &[String], step: u64) -> &'static str {
    let others: Vec<Claim> = clients
        .iter()
        .enumerate()
        .filter(|(number, _)| *number != who)
        .flat_map(|(_, client)| client.holds.iter().map(|hold| hold.claim.clone()))
        .collect();
    let is_free = |claim: &Claim| !others.iter().any(|other| other.conflicts_with(claim));
    let client = &mut clients[who];
    let timeout = random.pick(&["0", "0", "1 ms"]);
    match random.index(100) {
        0..45 => {
            let kind = if random.one_in(3) { Kind::Plain } else { Kind::Tree };
            let claim = Claim { path: paths[random.index(paths.len())].clone(), mode: random.pick(&Mode::ALL), kind };
            let by_transaction = client.depth > 0 && random.one_in(2);
            let prefix = if by_transaction { "named_xact" } else { "named" };
            let function = if kind == Kind::Tree { "lock_tree" } else { "lock" };
            let sql = format!("select {prefix}_{function}('{}', '{timeout}', '{}')", claim.path, claim.mode);
            let held = client.session.flag(&sql);
            assert_eq!(held, is_free(&claim), "step {step}: {sql}\nothers: {others:#?}");
            if held {
                client.holds.push(Hold { claim, level: by_transaction.then_some(client.depth) });
            }
            if held { "lock" } else { "refused" }
        }
        45..62 => {
            let path = &paths[random.index(paths.len())];
            let of_path: Vec<usize> = client
                .of_session()
                .filter(|(_, claim)| claim.kind == Kind::Tree && claim.path == *path)
                .map(|(number, _)| number)
                .collect();
            let sql = format!("select named_unlock_tree('{path}')");
            match of_path.last() {
                Some(&last) => {
                    assert_eq!(client.session.int(&sql), of_path.len() as i64 - 1, "step {step}: {sql}");
                    client.holds.remove(last);
                    "unlock tree"
                }
                None if client.depth == 0 => {
                    client.session.fails(&sql).is("55000");
                    "no tree"
                }
                None => "nothing",
            }
        }
        62..70 => {
            let path = &paths[random.index(paths.len())];
            let plain: Vec<usize> = client
                .of_session()
                .filter(|(_, claim)| claim.kind == Kind::Plain && claim.path == *path)
                .map(|(number, _)| number)
                .collect();
            let sql = format!("select named_unlock('{path}')");
            match plain.last() {
                Some(&last) => {
                    assert_eq!(client.session.int(&sql), plain.len() as i64 - 1, "step {step}: {sql}");
                    client.holds.remove(last);
                    "unlock"
                }
                None if client.depth == 0 => {
                    client.session.fails(&sql).is("55000");
                    "not held"
                }
                None => "nothing",
            }
        }
        70..80 => {
            let path = paths[random.index(paths.len())].clone();
            let mode = random.pick(&Mode::ALL);
            let sql = format!("select named_lock_convert('{path}', '{mode}', '{timeout}')");
            let own: Vec<usize> =
                client.of_session().filter(|(_, claim)| claim.path == path).map(|(number, _)| number).collect();
            if let ([only], 1) = (own.as_slice(), client.of_name(&path)) {
                let claim = Claim { mode, ..client.holds[*only].claim.clone() };
                // The same mode is no change; else it is free if nobody else is in its way.
                let expected = client.holds[*only].claim.mode == mode || is_free(&claim);
                let converted = client.session.flag(&sql);
                assert_eq!(converted, expected, "step {step}: {sql}\nothers: {others:#?}");
                if converted {
                    client.holds[*only].claim = claim;
                }
                if converted { "convert" } else { "not converted" }
            } else if client.depth == 0 {
                client.session.fails(&sql).is("55000");
                "no conversion"
            } else {
                "nothing"
            }
        }
        80..86 => {
            client.session.run(&if client.depth == 0 {
                "begin".to_owned()
            } else {
                format!("savepoint s{}", client.depth)
            });
            client.depth += 1;
            "begin"
        }
        86..90 if client.depth > 1 => {
            client.session.run(&format!("rollback to s{}", client.depth - 1));
            client.holds.retain(|hold| hold.level != Some(client.depth));
            "rollback to"
        }
        90..93 if client.depth > 1 => {
            client.session.run(&format!("release s{}", client.depth - 1));
            client.depth -= 1;
            for hold in &mut client.holds {
                if hold.level == Some(client.depth + 1) {
                    hold.level = Some(client.depth);
                }
            }
            "release"
        }
        86..96 if client.depth > 0 => {
            client.session.run(if random.one_in(2) { "commit" } else { "rollback" });
            client.holds.retain(|hold| hold.level.is_none());
            client.depth = 0;
            "commit"
        }
        96..98 => {
            let due: usize = client.of_session().map(|(_, claim)| claim.locks().len()).sum();
            assert_eq!(client.session.int("select named_unlock_all()"), due as i64, "step {step}");
            client.holds.retain(|hold| hold.level.is_some());
            "unlock all"
        }
        98 => {
            client.session.run(if client.depth == 0 { "discard all" } else { "select pg_advisory_unlock_all()" });
            client.holds.retain(|hold| hold.level.is_some());
            "discard"
        }
        _ => "nothing",
    }
}
