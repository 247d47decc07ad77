//! Sets of names: all or none (case C26), and those that are free (case C25), with case C20 over both.

use super::support::holding::{SCOPES, holds, holds_nothing, start};
use super::support::{
    Cluster, Random, Running, Server, Session, SqlError, let_pass, literal, unique, unique_ident, until,
};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const MODES: [&str; 5] = ["exclusive", "share", "intent share", "intent exclusive", "share intent exclusive"];

/// Names as an SQL array.
fn array<S: AsRef<str>>(names: &[S]) -> String {
    let names: Vec<String> = names.iter().map(|name| literal(name.as_ref())).collect();
    format!("array[{}]::text[]", names.join(", "))
}

/// Names that no other test uses, in the order of the alphabet.
fn names(stem: &str, count: usize) -> Vec<String> {
    let stem = unique(stem);
    (0..count).map(|number| format!("{stem}.{number:05}")).collect()
}

// All or none ---------------------------------------------------------------------------------------------------------

#[test]
fn all_are_held_or_none() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for (prefix, kind) in SCOPES {
        for mode in MODES {
            let n = names("all", 4);
            let mut a = server.session("a");
            let mut b = server.session("b");
            a.run("begin");
            let some = array(&[&n[1], &n[0], &n[1]]);
            assert!(a.flag(&format!("select {prefix}_lock_all({some}, mode => '{mode}')")));
            let held = [format!("{} {kind} {mode} 1", n[0]), format!("{} {kind} {mode} 1", n[1])];
            assert_eq!(holds(&mut watch, a.pid), held, "duplicates are one");

            b.run("begin");
            for timeout in ["0", "50 ms"] {
                let others = array(&[&n[3], &n[2], &n[1]]);
                let begun = Instant::now();
                assert!(!b.flag(&format!("select {prefix}_lock_all({others}, '{timeout}')")));
                assert!(timeout == "0" || begun.elapsed() >= Duration::from_millis(50));
                holds_nothing(&mut watch, b.pid, prefix);
            }
            // The transaction is alive, and what was free is so.
            let free = array(&[&n[3], &n[2]]);
            assert!(b.flag(&format!("select {prefix}_lock_all({free}, '0')")));
            assert_eq!(watch.locks_of(b.pid), 2);
            b.run("commit");
            a.run("commit");
            let left = if kind == "session" { 2 } else { 0 };
            assert_eq!((watch.locks_of(a.pid), watch.locks_of(b.pid)), (left, left));
            for session in [&mut a, &mut b] {
                assert_eq!(session.int("select named_unlock_all()"), left);
            }
        }
    }
}

#[test]
fn an_empty_set_is_held() {
    let mut a = Server::shared().session("a");
    for (prefix, _) in SCOPES {
        assert!(a.flag(&format!("select {prefix}_lock_all(array[]::text[])")));
        assert!(a.flag(&format!("select {prefix}_lock_all('{{}}', '0')")));
        assert_eq!(a.column(&format!("select {prefix}_lock_any('{{}}')")), [""; 0]);
    }
}

#[test]
fn what_was_held_before_stays_with_its_counts() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let n = names("before", 4);
    let mut other = server.session("other");
    other.run(&format!("select named_lock('{}')", n[3]));
    let mut a = server.session("a");
    a.run(&format!("select named_lock('{0}'), named_lock('{0}'), named_lock('{1}', mode => 'share')", n[0], n[1]));
    a.run(&format!("begin; select named_xact_lock('{}'), named_xact_lock('{}')", n[0], n[2]));
    let before = holds(&mut watch, a.pid);
    assert_eq!(before.len(), 4);
    for (prefix, _) in SCOPES {
        for mode in MODES {
            let set = array(&n);
            assert!(!a.flag(&format!("select {prefix}_lock_all({set}, '0', '{mode}')")), "{prefix} {mode}");
            assert_eq!(holds(&mut watch, a.pid), before, "{prefix} {mode}");
            assert!(!a.flag(&format!("select {prefix}_lock_all({set}, '1 ms', '{mode}')")), "{prefix} {mode}");
            assert_eq!(holds(&mut watch, a.pid), before, "{prefix} {mode}");
        }
    }
    // And one more of each when it is had.
    assert!(a.flag(&format!("select named_lock_all({})", array(&n[..3]))));
    assert_eq!(a.int(&format!("select named_lock_held('{}', 'exclusive')", n[0])), 4);
    assert_eq!(a.int(&format!("select named_lock_held('{}')", n[1])), 2);
    assert!(a.flag(&format!("select named_xact_lock_all({}, mode => 'share')", array(&n[..3]))));
    assert_eq!(a.int(&format!("select named_lock_held('{}')", n[0])), 5);
    a.run("commit");
    assert_eq!(
        holds(&mut watch, a.pid),
        [
            format!("{} session exclusive 3", n[0]),
            format!("{} session exclusive 1", n[1]),
            format!("{} session share 1", n[1]),
            format!("{} session exclusive 1", n[2]),
        ]
    );
    assert_eq!(a.int(&format!("select named_unlock('{}')", n[2])), 0);
    assert_eq!(a.int("select named_unlock_all()"), 5);
}

#[test]
fn a_set_of_the_session_is_given_back_one_by_one_or_all_at_once() {
    let server = Server::shared();
    let n = names("unlock", 3);
    let mut a = server.session("a");
    assert!(a.flag(&format!("select named_lock_all({})", array(&n))));
    assert_eq!(a.int(&format!("select named_unlock('{}')", n[1])), 0);
    assert!(a.flag(&format!("select named_lock_all({})", array(&n))));
    assert_eq!(a.int("select named_unlock_all()"), 5);
    // After DISCARD ALL.
    assert!(a.flag(&format!("select named_lock_all({})", array(&n))));
    a.run("discard all");
    assert_eq!(a.int("select named_unlock_all()"), 0);
    assert!(a.flag(&format!("select named_lock_all({})", array(&n))));
    assert_eq!(a.int(&format!("select named_lock_held('{}')", n[0])), 1);
}

#[test]
fn savepoints_and_caught_exceptions() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let n = names("savepoint", 3);
    let mut a = server.session("a");
    a.run(&format!("begin; select named_xact_lock_all({}); savepoint s", array(&n[..1])));
    a.run(&format!("select named_xact_lock_all({0}), named_xact_lock_any({0})", array(&n)));
    assert_eq!(watch.locks_of(a.pid), 3);
    a.run("rollback to s");
    assert_eq!(holds(&mut watch, a.pid), [format!("{} transaction exclusive 1", n[0])]);
    a.run(&format!(
        "do $$ begin perform named_xact_lock_all({}); raise 'x'; exception when others then null; end $$",
        array(&n)
    ));
    assert_eq!(holds(&mut watch, a.pid), [format!("{} transaction exclusive 1", n[0])]);
    a.run(&format!("select named_xact_lock_all({}); release s", array(&n)));
    assert_eq!(watch.locks_of(a.pid), 3);
    a.run("rollback");
    holds_nothing(&mut watch, a.pid, "rollback");
}

#[test]
fn one_deadline_over_all() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for (prefix, _) in SCOPES {
        let n = names("deadline", 3);
        let mut holders: Vec<Session> = n
            .iter()
            .map(|name| {
                let mut holder = server.session("holder");
                holder.run(&format!("select named_lock('{name}')"));
                holder
            })
            .collect();
        let begun = Instant::now();
        let sql = format!("begin; select {prefix}_lock_all({}, '3 s')", array(&n));
        let waiting = start(server.session("b"), &sql, &mut watch);
        // Two seconds for the one that it waits for first, whichever that is: not three more for the next.
        let_pass(2_000);
        let_go_of_the_first(&mut holders, &mut watch, waiting.pid);
        let (b, result) = waiting.end();
        assert_eq!(result.expect("no error")[0].get(0), Some("f"));
        assert!(begun.elapsed() >= Duration::from_secs(3), "too early: {:?}", begun.elapsed());
        assert!(begun.elapsed() < Duration::from_millis(4_800), "a deadline for each? {:?}", begun.elapsed());
        holds_nothing(&mut watch, b.pid, prefix);
    }
}

/// Ends the session that a waiting one waits for.
fn let_go_of_the_first(holders: &mut Vec<Session>, watch: &mut Session, pid: i32) {
    let blocker = watch.int(&format!("select unnest(pg_blocking_pids({pid}))"));
    let position = holders.iter().position(|holder| i64::from(holder.pid) == blocker).expect("one of them");
    holders.remove(position).run("select named_unlock_all()");
}

#[test]
fn it_waits_for_each_in_turn() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for (prefix, kind) in SCOPES {
        for timeout in ["null", "'1 hour'"] {
            let n = names("turn", 5);
            let mut holders: Vec<Session> = n
                .iter()
                .skip(1)
                .map(|name| {
                    let mut holder = server.session("holder");
                    holder.run(&format!("select named_lock('{name}')"));
                    holder
                })
                .collect();
            let sql = format!("begin; select {prefix}_lock_all({}, {timeout})", array(&n));
            let waiting = start(server.session("b"), &sql, &mut watch);
            while !holders.is_empty() {
                let waiter = format!(
                    "select concat_ws(' ', kind, mode, queue_position) from lock_waiters where pid = {}",
                    waiting.pid
                );
                assert_eq!(watch.column(&waiter), [format!("{kind} exclusive 1")]);
                let_go_of_the_first(&mut holders, &mut watch, waiting.pid);
                if !holders.is_empty() {
                    let others: Vec<String> = holders.iter().map(|holder| holder.pid.to_string()).collect();
                    until("it waits for the next", || {
                        watch.flag(&format!("select pg_blocking_pids({}) && array[{}]", waiting.pid, others.join(", ")))
                    });
                }
            }
            let (mut b, result) = waiting.end();
            assert_eq!(result.expect("no error")[0].get(0), Some("t"));
            assert_eq!(watch.locks_of(b.pid), 5);
            b.run("rollback");
            assert_eq!(watch.locks_of(b.pid), if kind == "session" { 5 } else { 0 });
        }
    }
}

#[test]
fn a_wait_as_the_servers_raises_as_the_servers() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let n = names("limit", 3);
    let mut holder = server.session("the one in the way");
    holder.run(&format!("select named_lock('{}')", n[1]));
    for (prefix, _) in SCOPES {
        let mut b = server.session("b");
        b.run("set lock_timeout = '60ms'");
        let begun = Instant::now();
        b.fails(&format!("select {prefix}_lock_all({})", array(&n)))
            .is("55P03")
            .message_has(&format!("named lock \"{}\"", n[1]))
            .message_has("lock_timeout (60 ms)")
            .detail_has(&format!("process {}", holder.pid))
            .detail_has("the one in the way");
        assert!(begun.elapsed() >= Duration::from_millis(60));
        holds_nothing(&mut watch, b.pid, prefix);
        // A timeout of its own wins over it, both ways.
        b.run("set lock_timeout = '1ms'");
        let begun = Instant::now();
        assert!(!b.flag(&format!("select {prefix}_lock_all({}, '80 ms')", array(&n))));
        assert!(begun.elapsed() >= Duration::from_millis(80));
        assert_eq!(b.text("show lock_timeout"), "1ms");
    }
}

#[test]
fn whatever_ends_it_half_way_leaves_nothing() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for (prefix, _) in SCOPES {
        for timeout in ["null", "'1 hour'"] {
            let n = names("half", 7);
            let mut holder = server.session("holder");
            // Whichever is the last in their order.
            let last = watch.text(&format!(
                "select name from unnest({}) as name, named_lock_key(name) as k order by k.classid desc, k.objid desc limit 1",
                array(&n)
            ));
            holder.run(&format!("select named_lock('{last}')"));
            let other = n.iter().find(|name| **name != last).expect("six others").clone();
            let all = format!("select {prefix}_lock_all({}, {timeout})", array(&n));

            let half_way =
                |watch: &mut Session, pid: i32| assert_eq!(watch.locks_of(pid), 7, "six held, one waited for");
            let waiting = start(server.session("b"), &all, &mut watch);
            half_way(&mut watch, waiting.pid);
            watch.run(&format!("select pg_cancel_backend({})", waiting.pid));
            let (mut b, result) = waiting.end();
            result.expect_err("cancelled").is("57014");
            holds_nothing(&mut watch, b.pid, "cancel");

            // In a block the transaction fails, and what was taken before stays to its end.
            b.run(&format!("begin; select named_xact_lock('{other}'); savepoint s"));
            let waiting = start(b, &all, &mut watch);
            watch.run(&format!("select pg_cancel_backend({})", waiting.pid));
            let (mut b, result) = waiting.end();
            result.expect_err("cancelled").is("57014");
            assert_eq!(watch.locks_of(b.pid), 1, "cancel in a block");
            b.run("rollback to s");
            assert_eq!(watch.locks_of(b.pid), 1, "cancel in a block");
            b.run("commit");
            holds_nothing(&mut watch, b.pid, "commit");

            b.run("set statement_timeout = '200ms'");
            b.fails(&all).is("57014").message_has("statement timeout");
            b.run("set statement_timeout = 0");
            holds_nothing(&mut watch, b.pid, "statement_timeout");

            let waiting = start(b, &all, &mut watch);
            half_way(&mut watch, waiting.pid);
            watch.run(&format!("select pg_terminate_backend({})", waiting.pid));
            let (b, result) = waiting.end();
            result.expect_err("terminated").is_end_of_session();
            watch.until_gone(b.pid);
            holds_nothing(&mut watch, b.pid, "terminate");

            // A deadlock: the holder waits for one that is held before.
            let mut b = server.session("b");
            b.run(&format!("select named_lock('{other}')"));
            let blocked = format!("set deadlock_timeout = '1h'; select named_lock('{other}')");
            let blocked = start(holder, &blocked, &mut watch);
            b.run("set deadlock_timeout = '50ms'");
            b.fails(&all).is("40P01").context_has(&last);
            assert_eq!(holds(&mut watch, b.pid), [format!("{other} session exclusive 1")]);
            b.run("select named_unlock_all()");
            let (_, result) = blocked.end();
            result.expect("the other goes on");
        }
    }
}

#[test]
fn a_grant_that_comes_with_the_timeout_is_the_truth() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for (prefix, _) in SCOPES {
        for timeout in ["'300 ms'", "null"] {
            let n = names("race", 3);
            let mut holder = server.session("holder");
            holder.run(&format!("select named_lock('{}')", n[2]));
            let mut b = server.session("b");
            b.run("set lock_timeout = '300ms'; begin");
            let waiting = b.background(&format!("select {prefix}_lock_all({}, {timeout})", array(&n)));
            let stopped = watch.stop_waiting(waiting.pid);
            let_pass(400);
            holder.run("select named_unlock_all()");
            stopped.go_on();
            let (mut b, result) = waiting.end();
            let held = match &result {
                Ok(rows) => rows[0].get(0) == Some("t"),
                Err(error) => {
                    error.is("55P03");
                    false
                }
            };
            assert_eq!(watch.locks_of(b.pid), if held { 3 } else { 0 }, "{prefix} {timeout}: {result:?}");
            b.run("rollback");
        }
    }
}

#[test]
fn bad_sets_are_refused_and_nothing_is_held() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let mut a = server.session("a");
    let good = unique("bad");
    for (prefix, _) in SCOPES {
        for (arguments, code, part) in [
            ("null".to_owned(), "22004", "names must not be null"),
            (format!("array['{good}', null]"), "22004", "an element of names must not be null"),
            ("array[null]::text[]".to_owned(), "22004", "an element of names"),
            (format!("array['{good}', '']"), "22023", "empty"),
            (format!("array['{good}', repeat('x', 1025)]"), "22001", "1025"),
            (format!("array['{good}'], mode => null"), "22004", "mode"),
        ] {
            for function in ["lock_all", "lock_any"] {
                a.fails(&format!("select {prefix}_{function}({arguments})")).is(code).message_has(part);
                holds_nothing(&mut watch, a.pid, &arguments);
            }
        }
        for timeout in ["-1 ms", "25 days"] {
            a.fails(&format!("select {prefix}_lock_all(array['{good}'], '{timeout}')")).is("22023");
        }
        for max_locks in [0, -1, i32::MIN] {
            a.fails(&format!("select {prefix}_lock_any(array['{good}'], {max_locks})"))
                .is("22023")
                .message_has("max_locks");
        }
        a.fails(&format!("select {prefix}_lock_any(array['{good}'], null)")).is("22004").message_has("max_locks");
        a.fails(&format!("select {prefix}_lock_any('{{}}', 0)")).is("22023");
        a.fails(&format!("select {prefix}_lock_all(array(select 'n' || i from generate_series(1, 10001) as i))"))
            .is("54000")
            .message_has("10000");
        a.fails(&format!("select {prefix}_lock_any(array(select 'n' from generate_series(1, 1000001)))"))
            .is("54000")
            .message_has("1000000");
        holds_nothing(&mut watch, a.pid, "too many");
    }
}

#[test]
fn arrays_of_any_shape() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let mut a = server.session("a");
    let n = names("shape", 4);
    for (array, count) in [
        (format!("array[array['{}', '{}'], array['{}', '{}']]", n[0], n[1], n[2], n[3]), 4),
        (format!("'[5:6]={{{},{}}}'::text[]", n[0], n[1]), 2),
        (format!("array(select name from unnest({}) as name)", array(&n)), 4),
        (format!("string_to_array('{}', ',')", n.join(",")), 4),
        (format!("(select array_agg(name) from unnest({}) as name)", array(&n)), 4),
        (format!("array_fill('{}'::text, array[3, 3])", n[0]), 1),
        // Longer than what an array has room for without being compressed.
        (format!("array_fill('{}'::text, array[1000]) || '{}'::text", n[0], n[1]), 2),
    ] {
        assert!(a.flag(&format!("select named_lock_all({array})")), "{array}");
        assert_eq!(watch.locks_of(a.pid), count, "{array}");
        assert_eq!(a.int("select named_unlock_all()"), count, "{array}");
        assert_eq!(a.column(&format!("select named_lock_any({array}, 10)")).len() as i64, count, "{array}");
        assert_eq!(a.int("select named_unlock_all()"), count, "{array}");
    }
    // Out of a table, compressed and not, and in PL/pgSQL's own form.
    let table = unique_ident("shape");
    a.run(&format!(
        "create table {table} as select array_agg('{0}.' || repeat('x', 500) || i % 3) as names \
           from generate_series(1, 300) as i",
        n[0]
    ));
    assert_eq!(a.column(&format!("select name from {table}, named_lock_any(names, 10) as name")).len(), 3);
    assert!(a.flag(&format!("select named_lock_all(names) from {table}")));
    assert_eq!(a.int("select named_unlock_all()"), 6);
    a.run(&format!(
        "do $$ declare names text[] := '{{}}'; begin \
           for i in 1..5 loop names := names || ('{}' || i); end loop; \
           names[2] := 'other{}'; \
           if not named_lock_all(names) then raise 'no'; end if; end $$; drop table {table}",
        n[0], n[0]
    ));
    assert_eq!(a.int(&format!("select named_unlock('other{}')", n[0])), 0);
    assert_eq!(a.int("select named_unlock_all()"), 4);
}

#[test]
fn names_in_other_encodings_come_back_as_given() {
    let database = Server::shared().new_database("sets_latin1", "LATIN1");
    let mut a = database.session("a");
    let mut b = database.session("b");
    let k = unique("é");
    assert_eq!(a.column(&format!("select named_lock_any(array['{k}', 'x'], 2)")), [k.clone(), "x".into()]);
    assert!(!b.flag(&format!("select named_lock('{k}', '0')")));
    assert!(!b.flag(&format!("select named_lock_all(array['{k}'], '0')")));
    assert_eq!(a.int(&format!("select named_unlock('{k}')")), 0);
}

/// Two names with one key.
const CLASH: (&str, &str) = ("order-36325", "M0plytOy");

#[test]
fn names_with_one_key_are_refused() {
    let (one, two) = CLASH;
    let database = Server::shared().new_database("sets_clash", "UTF8");
    let mut watch = database.session("watch");
    let mut a = database.session("a");
    let mut b = database.session("b");
    for (prefix, _) in SCOPES {
        for timeout in ["null", "'0'", "'1 s'"] {
            let within = format!("select {prefix}_lock_all(array['x', '{one}', '{two}', '{one}'], {timeout})");
            a.fails(&within).is("54000").detail_has("The other name is");
            holds_nothing(&mut watch, a.pid, "within the set");
            b.run(&format!("select named_lock('{two}')"));
            a.fails(&format!("select {prefix}_lock_all(array['x', '{one}', 'y'], {timeout})")).is("54000");
            holds_nothing(&mut watch, a.pid, "another session's");
            b.run("select named_unlock_all()");
        }
        a.run(&format!("select named_lock('{two}')"));
        for call in [format!("_lock_all(array['x', '{one}'])"), format!("_lock_any(array['x', '{one}'], 3)")] {
            a.fails(&format!("select {prefix}{call}")).is("54000").detail_has(two);
            assert_eq!(watch.locks_of(a.pid), 1, "our own");
        }
        a.run("select named_unlock_all()");
        // What another has the key of is not free; of two in the array, the first that is taken.
        b.run(&format!("select named_lock('{two}')"));
        a.run("begin");
        assert_eq!(a.column(&format!("select {prefix}_lock_any(array['{one}', 'x'], 3)")), ["x"]);
        b.run("select named_unlock_all()");
        a.fails(&format!("select {prefix}_lock_any(array['{one}', '{two}'], 3)")).is("54000");
        a.run("rollback; select named_unlock_all()");
        holds_nothing(&mut watch, a.pid, "at the end");
    }
}

#[test]
fn rules_of_domains() {
    let database = Server::shared().new_database("sets_domains", "UTF8");
    let mut admin = database.session("admin");
    let [team, stranger] = ["sets_team", "sets_stranger"].map(|role| database.new_role(role));
    admin.run(&format!("select lock_domain_set('jobs', '{team}')"));
    let mut session = database.session_as(&stranger, "stranger");
    let mut member = database.session_as(&team, "member");
    for (prefix, _) in SCOPES {
        for function in ["lock_all", "lock_any"] {
            let call = format!("select {prefix}_{function}(array['a', 'jobs:b', 'c', 'jobs:d'])");
            session.fails(&call).is("42501").message_has("domain \"jobs\"").message_has("jobs:");
            holds_nothing(&mut admin, session.pid, &call);
            member.run(&call);
            member.run("select named_unlock_all()");
        }
        assert!(session.flag(&format!("select {prefix}_lock_all(array['a', 'job:b'])")));
        session.run("select named_unlock_all()");
    }
    admin.run("select lock_domain_drop('jobs')");

    // The shortest wait of all counts.
    admin.run("select lock_domain_set('long', max_wait => '1 hour'), lock_domain_set('short', max_wait => '300 ms')");
    let mut holder = database.session("the holder");
    holder.run("select named_lock('free:x')");
    for (prefix, _) in SCOPES {
        let set = "array['long:a', 'short:b', 'free:x', 'long:c']";
        let begun = Instant::now();
        assert!(!session.flag(&format!("select {prefix}_lock_all({set}, '60 s')")));
        session
            .fails(&format!("select {prefix}_lock_all({set})"))
            .is("55P03")
            .message_has("free:x")
            .message_has("max_wait of its domain (300 ms)")
            .detail_has(&format!("process {}", holder.pid));
        assert!(begun.elapsed() >= Duration::from_millis(600));
        assert!(begun.elapsed() < Duration::from_secs(50));
        holds_nothing(&mut admin, session.pid, prefix);
    }

    // Each session hold gets the limit of its domain.
    admin.run("select lock_domain_set('long', max_hold => '1 hour'), lock_domain_set('short', max_hold => '1 min')");
    assert!(session.flag("select named_lock_all(array['short:a', 'long:b', 'free:c', 'short:d'])"));
    assert_eq!(session.column("select named_lock_any(array['long:e', 'short:f', 'free:x', 'free:g'], 9)").len(), 3);
    assert_eq!(
        admin.column(&format!(
            "select name || coalesce(' ' || hold_limit, '') || coalesce(' ' || (remaining <= hold_limit), '') \
               from lock_holders where pid = {} order by 1",
            session.pid
        )),
        [
            "free:c",
            "free:g",
            "long:b 01:00:00 true",
            "long:e 01:00:00 true",
            "short:a 00:01:00 true",
            "short:d 00:01:00 true",
            "short:f 00:01:00 true"
        ]
    );
    assert_eq!(session.int("select named_unlock_all()"), 7);
    session.run("begin; select named_xact_lock_all(array['short:a', 'long:b'])");
    assert_eq!(admin.int(&format!("select count(hold_limit) from lock_holders where pid = {}", session.pid)), 0);
    session.run("commit");
    admin.run("select lock_domain_set('short', max_hold => '300 ms')");
    session.run("select named_lock_all(array['short:a', 'long:b'])");
    admin.until_gone(session.pid);
    // While it waits for the rest, too: a hold is a hold.
    let mut session = database.session_as(&stranger, "stranger");
    session.run("select named_lock_all(array['free:c'])");
    let name = admin.text(
        "select 'short:' || i from generate_series(1, 100) as i, named_lock_key('short:' || i) as s, \
                named_lock_key('free:x') as x where (s.classid, s.objid) < (x.classid, x.objid) limit 1",
    );
    session.fails(&format!("select named_lock_all(array['free:x', '{name}'])")).is_end_of_session();
}

#[test]
fn a_set_that_passes_the_sessions_limit_takes_nothing() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for (prefix, kind) in SCOPES {
        let n = names("c43", 12);
        let mut a = server.session("a");
        a.run("set named_locks.max_locks_per_session = 10");
        a.run(&format!("select named_lock_all({})", array(&n[..4])));
        a.run("begin; savepoint s");
        a.fails(&format!("select {prefix}_lock_all({})", array(&n[2..12])))
            .is("53400")
            .message_has("10 named locks")
            .detail_has("max_locks_per_session is 10");
        a.run("rollback to s");
        assert_eq!(watch.locks_of(a.pid), 4);
        // Those held already are no others; just as many as there is room for are fine.
        assert!(a.flag(&format!("select {prefix}_lock_all({})", array(&n[..10]))));
        assert_eq!(holds(&mut watch, a.pid).len(), if kind == "session" { 10 } else { 14 });
        a.run("rollback; select named_unlock_all()");

        // What the same statement took before goes too, what earlier ones took stays.
        a.run(&format!("select named_lock('{}')", n[0]));
        a.fails(&format!(
            "select named_lock('{}'), named_lock('{}'), {prefix}_lock_all({}), {prefix}_lock_all({})",
            n[0],
            n[1],
            array(&n[2..7]),
            array(&n[7..12])
        ))
        .is("53400");
        assert_eq!(holds(&mut watch, a.pid), [format!("{} session exclusive 1", n[0])]);

        // Any: the call that would pass it fails, though it is the last name.
        a.run("begin; savepoint s");
        assert_eq!(a.column(&format!("select {prefix}_lock_any({}, 9)", array(&n))).len(), 9);
        a.run("rollback to s");
        a.run("select named_unlock_all(); commit");
        a.run(&format!("select named_lock('{}')", n[0]));
        a.fails(&format!("select named_lock('{}'), {prefix}_lock_any({}, 100)", n[0], array(&n))).is("53400");
        assert_eq!(holds(&mut watch, a.pid), [format!("{} session exclusive 1", n[0])]);
        // What is lost behind our back makes room.
        a.run("discard all");
        a.run("set named_locks.max_locks_per_session = 10");
        a.run(&format!("select named_lock_all({}); select pg_advisory_unlock_all()", array(&n[..10])));
        assert!(a.flag(&format!("select {prefix}_lock_all({})", array(&n[2..12]))));
        a.run("select pg_advisory_unlock_all()");
        assert_eq!(a.column(&format!("select {prefix}_lock_any({}, 10)", array(&n[2..12]))).len(), 10);
    }
}

#[test]
fn ten_thousand_names() {
    let cluster = Cluster::new(&["max_locks_per_transaction = 300", "named_locks.max_locks_per_session = 20000"]);
    let mut watch = cluster.session("watch");
    let mut a = cluster.session("a");
    let mut b = cluster.session("b");
    let many = |from: i32, to: i32| format!("array(select 'n' || i from generate_series({from}, {to}) as i)");
    for (prefix, _) in SCOPES {
        a.run("begin");
        assert!(a.flag(&format!("select {prefix}_lock_all({0} || {0})", many(1, 10_000))));
        assert_eq!(watch.locks_of(a.pid), 10_000);
        assert_eq!(watch.int("select count(distinct name) from lock_holders"), 10_000);
        assert!(!b.flag(&format!("select {prefix}_lock_all({}, '0')", many(10_000, 19_999))));
        assert!(!b.flag(&format!("select {prefix}_lock_all({}, '100 ms')", many(9_999, 19_998))));
        holds_nothing(&mut watch, b.pid, prefix);
        a.run("rollback; select named_unlock_all()");
        holds_nothing(&mut watch, a.pid, prefix);
        a.fails(&format!("select {prefix}_lock_all({})", many(1, 10_001))).is("54000");
        // Any has room for more names than it can lock.
        a.run("begin");
        assert_eq!(a.column(&format!("select {prefix}_lock_any({}, 100000)", many(1, 15_000))).len(), 15_000);
        assert_eq!(b.column(&format!("select {prefix}_lock_any({}, 3)", many(1, 15_001))), ["n15001"]);
        a.run("rollback; select named_unlock_all()");
        b.run("select named_unlock_all()");
        holds_nothing(&mut watch, a.pid, prefix);
    }
}

#[test]
fn the_servers_lock_memory_runs_out_in_a_set() {
    let cluster = Cluster::new(&[
        "max_connections = 10",
        "max_locks_per_transaction = 10",
        "named_locks.max_locks_per_session = 20000",
    ]);
    let mut watch = cluster.session("watch");
    let mut a = cluster.session("a");
    let mut b = cluster.session("b");
    b.run("select named_lock('b')");
    for (prefix, _) in SCOPES {
        a.run("begin; savepoint s");
        a.run("select named_lock('before')");
        for call in [
            "lock_all(array(select 'n' || i from generate_series(1, 10000) as i))",
            "lock_any(array(select 'n' || i from generate_series(1, 10000) as i), 10000)",
        ] {
            a.fails(&format!("select {prefix}_{call}")).is("53200").hint_has("max_locks_per_transaction");
            assert_eq!(watch.locks_of(a.pid), 1, "{call}");
            a.run("rollback to s");
        }
        a.run("commit; select named_unlock_all()");
        assert_eq!(b.int("select named_lock_held('b')"), 1);
        b.run("create table t (i int primary key); drop table t");
    }
}

#[test]
fn c20_sets_of_two_databases() {
    let server = Server::shared();
    let second = server.new_database("c20_sets", "UTF8");
    let mut one = server.session("one");
    let mut two = second.session("two");
    let n = names("c20", 3);
    for (prefix, _) in SCOPES {
        one.run("begin");
        two.run("begin");
        for session in [&mut one, &mut two] {
            assert!(session.flag(&format!("select {prefix}_lock_all({}, '0')", array(&n[..2]))));
            assert_eq!(session.column(&format!("select {prefix}_lock_any({}, 9)", array(&n))), [n[2].as_str()]);
        }
        let mut watch = second.session("watch");
        let shown = "select distinct database from lock_holders where pid = ";
        assert_eq!(watch.column(&format!("{shown}{}", one.pid)), [server.dbname.as_str()]);
        assert_eq!(watch.column(&format!("{shown}{}", two.pid)), [second.dbname.as_str()]);
        one.run("rollback; select named_unlock_all()");
        two.run("rollback; select named_unlock_all()");
    }
}

#[test]
fn c26_two_orders_never_deadlock() {
    const ROUNDS: usize = 10_000;
    let server = Server::shared();
    let n = names("c26", 2);
    let over = Instant::now() + Duration::from_secs(240);
    let clients: Vec<_> = [[&n[0], &n[1]], [&n[1], &n[0]]]
        .into_iter()
        .enumerate()
        .map(|(number, order)| {
            let session = server.session("c26");
            let set = array(&order);
            session.spawn(move |session| {
                session.run("set deadlock_timeout = '10ms'");
                for round in 0..ROUNDS / 2 {
                    if Instant::now() > over {
                        panic!("too slow: {round} rounds");
                    }
                    if (round + number) % 2 == 0 {
                        assert_eq!(
                            session.run(&format!("select named_lock_all({set}, '1 min')"))[0].get(0),
                            Some("t"),
                            "all or an error"
                        );
                        assert_eq!(session.int("select named_unlock_all()"), 2);
                    } else {
                        assert!(session.flag(&format!("select named_xact_lock_all({set})")));
                    }
                    // All or none, where it may not wait.
                    let held = session.flag(&format!("select named_lock_all({set}, '{}')", round % 2));
                    assert_eq!(session.int("select named_unlock_all()"), if held { 2 } else { 0 });
                }
            })
        })
        .collect();
    for client in clients {
        // Longer than the patience of Running::end().
        until_finished(&client, Duration::from_secs(240));
        client.end();
    }
}

#[track_caller]
fn until_finished<T>(running: &Running<T>, limit: Duration) {
    let begun = Instant::now();
    while !running.finished() {
        assert!(begun.elapsed() < limit, "process {} never came to its end", running.pid);
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn c26_all_or_none_on_timeout() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let n = names("c26", 2);
    for (one, two) in [(0, 1), (1, 0)] {
        let mut a = server.session("a");
        a.run(&format!("select named_lock('{}')", n[one]));
        for (prefix, _) in SCOPES {
            for order in [[&n[0], &n[1]], [&n[1], &n[0]]] {
                let mut b = server.session("b");
                b.run("begin");
                assert!(!b.flag(&format!("select {prefix}_lock_all({}, '20 ms')", array(&order))));
                holds_nothing(&mut watch, b.pid, prefix);
                assert!(watch.flag(&format!("select named_lock('{}', '0')", n[two])));
                watch.run("select named_unlock_all()");
            }
        }
    }
}

#[test]
fn a_set_queues_with_single_waiters() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let n = names("queue", 2);
    let mut a = server.session("a");
    a.run(&format!("select named_lock('{}')", n[0]));
    // A single waiter, then a set, then a single one: served in this order.
    let single = |name: &str| format!("select named_lock('{name}', '1 min'); select clock_timestamp()");
    let first = start(server.session("first"), &single(&n[0]), &mut watch);
    let set = start(server.session("set"), &format!("select named_lock_all({}, '1 min')", array(&n)), &mut watch);
    let last = start(server.session("last"), &single(&n[0]), &mut watch);
    let positions = format!("select pid from lock_waiters where name = '{}' order by queue_position", n[0]);
    assert_eq!(watch.column(&positions), [first.pid, set.pid, last.pid].map(|pid| pid.to_string()));
    // Tries do not overtake them.
    let mut try_it = server.session("try");
    assert!(!try_it.flag(&format!("select named_lock_all({}, '0', 'share')", array(&n))));
    assert_eq!(try_it.column(&format!("select named_lock_any(array['{}'])", n[0])), [""; 0]);
    a.run("select named_unlock_all()");
    let (mut first, result) = first.end();
    result.expect("no error");
    assert!(!set.finished() && !last.finished());
    first.run("select named_unlock_all()");
    let (mut set, result) = set.end();
    assert_eq!(result.expect("no error")[0].get(0), Some("t"));
    assert!(!last.finished());
    assert_eq!(watch.locks_of(set.pid), 2);
    set.run("select named_unlock_all()");
    last.end().1.expect("no error");
}

#[test]
fn who_holds_one_in_share_mode_upgrades_by_a_set() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let n = names("upgrade", 2);
    let mut a = server.session("a");
    let mut b = server.session("b");
    a.run(&format!("select named_lock_all({}, mode => 'share')", array(&n)));
    b.run(&format!("select named_lock('{}', mode => 'share')", n[0]));
    assert!(!a.flag(&format!("select named_lock_all({}, '0')", array(&n))));
    assert!(!a.flag(&format!("select named_lock_all({}, '30 ms')", array(&n))));
    assert_eq!(watch.locks_of(a.pid), 2);
    b.run("select named_unlock_all()");
    // Ahead of those who queue, as the one who holds part of it.
    let waiting = start(b, &format!("select named_lock('{}', '1 min')", n[0]), &mut watch);
    assert!(a.flag(&format!("select named_lock_all({}, '0')", array(&n))));
    assert_eq!(a.int("select named_unlock_all()"), 4);
    waiting.end().1.expect("no error");
}

#[test]
fn where_session_locks_are_off_or_this_is_a_standby() {
    let server = Server::shared();
    let mut a = server.session("a");
    let n = names("off", 2);
    let session_calls = [format!("named_lock_all({})", array(&n)), format!("named_lock_any({}, 2)", array(&n))];
    let transaction_calls =
        [format!("named_xact_lock_all({})", array(&n)), format!("named_xact_lock_any({}, 2)", array(&n))];
    a.run("set named_locks.session_locks = off");
    for call in &session_calls {
        a.fails(&format!("select {call}")).is("0A000").message_has("2 named locks").hint_has("named_xact_lock");
    }
    for call in &transaction_calls {
        a.run(&format!("select {call}"));
    }
    a.run("set named_locks.session_locks = warn");
    for call in &session_calls {
        a.notices();
        a.run(&format!("select {call}; select named_unlock_all()"));
        assert_eq!(a.notices().iter().filter(|notice| notice.code == "01000").count(), 1, "{call}");
    }

    let primary = Cluster::new(&[]);
    let standby = primary.standby(&[]);
    primary.until_replayed_by(&standby);
    let mut a = standby.session("a");
    for call in session_calls.iter().chain(&transaction_calls) {
        a.fails(&format!("select {call}")).is("25006").hint_has("allow_on_standby");
    }
    a.run("set named_locks.allow_on_standby = on");
    for call in session_calls.iter().chain(&transaction_calls) {
        a.run(&format!("select {call}"));
    }
}

#[test]
fn in_a_parallel_worker() {
    let database = Server::shared().new_database("sets_parallel", "UTF8");
    let mut a = database.session("a");
    a.run(
        "create table many as select i from generate_series(1, 20000) as i; analyze many; \
         set parallel_setup_cost = 0; set parallel_tuple_cost = 0; set min_parallel_table_scan_size = 0; \
         set parallel_leader_participation = off; set max_parallel_workers_per_gather = 2",
    );
    for (number, call) in [
        "named_lock_all(array['x'])",
        "named_xact_lock_all(array['x'], '0')",
        "exists (select named_lock_any(array['x']))",
        "exists (select named_xact_lock_any(array['x']))",
        "named_lock_tree('x/y')",
        "named_xact_lock_tree('x/y')",
        "named_unlock_tree('x/y') is null",
    ]
    .into_iter()
    .enumerate()
    {
        a.run(&format!(
            "create function wrapper{number}() returns boolean parallel safe volatile language plpgsql cost 1000 as \
             $$ begin return {call}; end $$"
        ));
        let count = format!("select count(*) from many where wrapper{number}()");
        assert!(a.column(&format!("explain {count}")).join("\n").contains("Gather"));
        a.fails(&count).is("25000").message_has("parallel");
    }
}

// Any that are free ---------------------------------------------------------------------------------------------------

#[test]
fn any_takes_what_is_free_in_the_arrays_order() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for (prefix, kind) in SCOPES {
        let n = names("any", 6);
        let mut other = server.session("other");
        other.run(&format!("select named_lock('{}'), named_lock('{}', mode => 'share')", n[4], n[2]));
        let mut a = server.session("a");
        a.run("begin");
        let backwards: Vec<&String> = n.iter().rev().collect();
        let set = array(&backwards);
        assert_eq!(a.column(&format!("select {prefix}_lock_any({set})")), [n[5].as_str()]);
        assert_eq!(holds(&mut watch, a.pid), [format!("{} {kind} exclusive 1", n[5])]);
        // Held already: passed over. Not free: passed over. In share mode it would be.
        assert_eq!(a.column(&format!("select {prefix}_lock_any({set}, 2)")), [n[3].as_str(), n[1].as_str()]);
        assert_eq!(a.column(&format!("select {prefix}_lock_any({set}, 9, 'share')")), [n[2].as_str(), n[0].as_str()]);
        assert_eq!(a.column(&format!("select {prefix}_lock_any({set}, 9)")), [""; 0]);
        assert_eq!(watch.locks_of(a.pid), 5);
        // A name given twice is locked once, and free ones behind it are still looked at.
        let mut b = server.session("b");
        let twice = [format!("{}x", n[0]), format!("{}x", n[0]), format!("{}y", n[0])];
        b.run("begin");
        assert_eq!(
            b.column(&format!("select {prefix}_lock_any({}, 2)", array(&twice))),
            [twice[0].as_str(), twice[2].as_str()]
        );
        assert_eq!(watch.locks_of(b.pid), 2);
        b.run("rollback");
        a.run("rollback");
        assert_eq!(watch.locks_of(a.pid), if kind == "session" { 5 } else { 0 });
    }
}

#[test]
fn any_passes_over_what_the_session_holds_in_whatever_way() {
    let server = Server::shared();
    let n = names("held", 5);
    let mut a = server.session("a");
    a.run(&format!(
        "begin; select named_lock('{0}', mode => 'share'), named_xact_lock('{1}', mode => 'intent share'), \
         named_lock_tree('{2}/x'), named_xact_lock_tree('{3}')",
        n[0], n[1], n[2], n[3]
    ));
    for (prefix, _) in SCOPES {
        let mut set = n.clone();
        set.insert(0, format!("{}/x", n[2]));
        a.run("savepoint s");
        assert_eq!(a.column(&format!("select {prefix}_lock_any({}, 9)", array(&set))), [n[4].as_str()]);
        a.run(&format!("select named_unlock_all() where '{prefix}' = 'never'"));
        if prefix == "named" {
            assert_eq!(a.int(&format!("select named_unlock('{}')", n[4])), 0);
        } else {
            a.run("rollback to s");
        }
    }
}

#[test]
fn any_never_overtakes_a_waiter() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let n = names("fair", 2);
    let mut a = server.session("a");
    a.run(&format!("select named_lock('{}', mode => 'share')", n[0]));
    let waiting = start(server.session("waiter"), &format!("select named_lock('{}', '1 min')", n[0]), &mut watch);
    // In share mode it would get on with the holder, and the waiter would wait for ever.
    for (prefix, _) in SCOPES {
        let mut b = server.session("b");
        b.run("begin");
        assert_eq!(b.column(&format!("select {prefix}_lock_any({}, 9, 'share')", array(&n))), [n[1].as_str()]);
        b.run("rollback");
    }
    a.run("select named_unlock_all()");
    waiting.end().1.expect("no error");
}

#[test]
fn c25_any_locks_exactly_what_it_returns_with_any_plan() {
    let database = Server::shared().new_database("c25", "UTF8");
    let mut watch = database.session("watch");
    let mut other = database.session("other");
    watch.run(
        "create table jobs (id int primary key, name text not null, ready boolean not null, filler text); \
         insert into jobs select i, 'job' || i, i % 5 <> 0, repeat('x', 100) from generate_series(1, 50) as i; \
         create index on jobs (ready, id); create index on jobs (name); analyze jobs",
    );
    other.run("select named_lock('job1'), named_lock('job3')");
    let names = "array(select name from jobs where ready order by id)";
    for setting in [
        "",
        "set enable_seqscan = off; set enable_bitmapscan = off",
        "set enable_indexscan = off; set enable_bitmapscan = off; set enable_sort = off",
        "set enable_hashjoin = off; set enable_mergejoin = off",
        "set enable_nestloop = off; set enable_mergejoin = off",
        "set enable_nestloop = off; set enable_hashjoin = off",
        "set enable_material = off; set jit = on; set jit_above_cost = 0",
    ] {
        for (prefix, _) in SCOPES {
            for (query, count) in [
                (format!("select {prefix}_lock_any({names})"), 1),
                (format!("select * from {prefix}_lock_any({names})"), 1),
                (format!("select * from {prefix}_lock_any({names}, 7)"), 7),
                (format!("select name from {prefix}_lock_any({names}) as name order by name limit 1"), 1),
                (format!("select j.name from jobs as j where j.name in (select {prefix}_lock_any({names}))"), 1),
                (
                    format!(
                        "select j.name from jobs as j join {prefix}_lock_any({names}, 3) as l on l = j.name \
                          where j.ready order by j.id desc"
                    ),
                    3,
                ),
                (
                    format!(
                        "with l as materialized (select {prefix}_lock_any({names}, 4) as name) \
                         select j.name from jobs as j, l where j.name = l.name and j.ready order by j.id limit 4"
                    ),
                    4,
                ),
                (format!("select name from jobs where name = any (array(select {prefix}_lock_any({names}, 2)))"), 2),
                (
                    format!(
                        "select distinct l from generate_series(1, 3) as i, lateral {prefix}_lock_any({names}, 1 + 0 * i) as l"
                    ),
                    3,
                ),
            ] {
                let mut a = database.session("c25");
                a.run(&format!("{setting}; begin"));
                let mut returned = a.column(&query);
                assert_eq!(returned.len(), count, "{setting}\n{query}");
                let locked =
                    watch.column(&format!("select name from lock_holders where pid = {} order by name", a.pid));
                returned.sort_unstable();
                assert_eq!(locked, returned, "{setting}\n{query}");
                assert!(!returned.iter().any(|name| ["job1", "job3", "job5"].contains(&name.as_str())), "{query}");
                a.run("rollback; select named_unlock_all()");
            }
        }
    }
    // It locks all it returns, whatever LIMIT is around it.
    let mut a = database.session("c25");
    assert_eq!(a.column(&format!("select named_lock_any({names}, 5) limit 1")).len(), 1);
    assert_eq!(watch.locks_of(a.pid), 5);
    a.run("select named_unlock_all()");
    assert_eq!(a.column(&format!("select * from named_lock_any({names}, 5) limit 2")).len(), 2);
    assert_eq!(watch.locks_of(a.pid), 5);
    // A cursor that is closed early.
    a.run(&format!("select named_unlock_all(); begin; declare c cursor for select named_lock_any({names}, 6); fetch 2 from c; close c"));
    assert_eq!(watch.locks_of(a.pid), 6);
    a.run("commit");
    assert_eq!(a.int("select named_unlock_all()"), 6);
}

#[test]
fn any_gives_all_back_when_it_fails() {
    let database = Server::shared().new_database("any_fails", "UTF8");
    let mut watch = database.session("watch");
    let (one, two) = CLASH;
    for (prefix, _) in SCOPES {
        let mut a = database.session("a");
        a.run("begin; select named_xact_lock('before'); savepoint s");
        a.fails(&format!("select {prefix}_lock_any(array['x', 'y', '{one}', 'z', '{two}'], 9)")).is("54000");
        assert_eq!(watch.locks_of(a.pid), 1);
        a.run("rollback to s");
        assert_eq!(watch.locks_of(a.pid), 1);
    }
}

/// Workers claim jobs by name: each is done exactly once.
fn each_job_is_done_once(by_transaction: bool) {
    const JOBS: i64 = 200;
    let server = Server::shared();
    let mut watch = server.session("watch");
    let table = unique_ident("jobs");
    watch.run(&format!(
        "create table {table} (id int primary key, name text not null, done_by int[] not null default '{{}}'); \
         insert into {table} select i, '{table}:' || i from generate_series(1, {JOBS}) as i"
    ));
    let workers: Vec<_> = (0..8)
        .map(|_| {
            let table = table.clone();
            server.session("worker").spawn(move |session| {
                let next = format!("array(select name from {table} where done_by = '{{}}' order by id limit 20)");
                let prefix = if by_transaction { "named_xact" } else { "named" };
                let mut done = 0;
                let mut idle = 0;
                while idle < 3 {
                    session.run("begin");
                    let claimed = session.column(&format!("select {prefix}_lock_any({next})"));
                    for name in &claimed {
                        // The names were read before they were locked: only now is it known that nobody has done it.
                        let sql = format!("select count(*) from {table} where name = '{name}' and done_by = '{{}}'");
                        if session.int(&sql) == 1 {
                            session.run(&format!(
                                "update {table} set done_by = done_by || pg_backend_pid() where name = '{name}'"
                            ));
                            done += 1;
                        }
                    }
                    session.run("commit");
                    if !by_transaction {
                        assert_eq!(session.int("select named_unlock_all()"), claimed.len() as i64);
                    }
                    let left = session.int(&format!("select count(*) from {table} where done_by = '{{}}'"));
                    idle = if left == 0 { idle + 1 } else { 0 };
                }
                done
            })
        })
        .collect();
    let done: Vec<i64> = workers.into_iter().map(|worker| worker.end().1).collect();
    assert_eq!(done.iter().sum::<i64>(), JOBS, "{done:?}");
    assert_eq!(watch.int(&format!("select count(*) from {table} where cardinality(done_by) = 1")), JOBS);
    watch.run(&format!("drop table {table}"));
}

#[test]
fn c25_eight_workers_claim_jobs_by_transaction_locks() {
    each_job_is_done_once(true);
}

#[test]
fn c25_eight_workers_claim_jobs_by_session_locks() {
    each_job_is_done_once(false);
}

/// A view never shows a lock of a set without its name.
#[test]
fn names_are_shown_from_the_first_moment() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let n = names("shown", 30);
    let over = Arc::new(AtomicBool::new(false));
    let (set, stop) = (array(&n), over.clone());
    let a = server.session("a");
    let pid = a.pid;
    let running = a.spawn(move |session| {
        while !stop.load(Ordering::Relaxed) {
            session.run(&format!("select named_lock_any({set}, 30); select named_unlock_all()"));
            session.run(&format!("select named_xact_lock_all({set})"));
        }
    });
    for _ in 0..300 {
        assert_eq!(
            watch.int(&format!(
                "select count(*) from lock_holders where pid = {pid} and (name is null or kind is null)"
            )),
            0
        );
    }
    over.store(true, Ordering::Relaxed);
    running.end();
}

// Under stress --------------------------------------------------------------------------------------------------------

/// Eight sessions take random sets while a killer ends them: no two hold a name at once, and nothing is left.
#[test]
fn sets_under_kills() {
    const SESSIONS: usize = 8;
    const NAMES: usize = 20;
    let seconds = std::env::var("NAMED_LOCKS_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(8);
    let server = Server::shared();
    let mut watch = server.session("watch");
    let n = Arc::new(names("stress", NAMES));
    // The witness: whoever has a name locks its row, without waiting. A killed session's row is free before its name is.
    let table = unique_ident("stress");
    watch.run(&format!(
        "create unlogged table {table} (number int primary key, grants bigint not null default 0); \
         insert into {table} select i, 0 from generate_series(0, {NAMES} - 1) as i"
    ));
    let over = Arc::new(AtomicBool::new(false));
    let grants = Arc::new(AtomicU64::new(0));
    let workers: Vec<_> = (0..SESSIONS)
        .map(|number| {
            let (n, table, over, grants) = (n.clone(), table.clone(), over.clone(), grants.clone());
            std::thread::spawn(move || {
                let mut random = Random(26 + number as u64);
                let mut session = open(server, &table);
                let mut killed = 0;
                while !over.load(Ordering::Relaxed) {
                    match work(&mut session, &mut random, &n, &table) {
                        Ok(held) => grants.fetch_add(held, Ordering::Relaxed),
                        Err(error) => {
                            error.is_end_of_session();
                            session = open(server, &table);
                            killed += 1;
                            0
                        }
                    };
                }
                killed
            })
        })
        .collect();
    let mut random = Random(99);
    let end = Instant::now() + Duration::from_secs(seconds);
    while Instant::now() < end {
        let_pass(random.below(40));
        watch.run(&format!(
            "select pg_terminate_backend(pid) from pg_stat_activity where application_name = '{table} worker' \
              order by md5(pid::text || '{}') limit 1",
            random.next()
        ));
    }
    over.store(true, Ordering::Relaxed);
    let killed: u64 = workers.into_iter().map(|worker| worker.join().expect("no two at once")).sum();
    let grants = grants.load(Ordering::Relaxed);
    assert!(killed > 10 && grants > 100, "{killed} killed, {grants} grants");
    until("nothing is held", || {
        watch.int(&format!("select count(*) from lock_holders where name like '{}%'", n[0].replace(".00000", ""))) == 0
    });
    // The last answer of a killed session may be lost; no grant is counted twice.
    assert!(watch.int(&format!("select sum(grants) from {table}")) >= grants as i64);
    watch.run(&format!("drop table {table}"));
}

/// A worker's session. The killer may come before it is open.
fn open(server: &Server, table: &str) -> Session {
    loop {
        match Session::open(server.config(&format!("{table} worker"))) {
            Ok(session) => return session,
            Err(error) => _ = error.is_end_of_session(),
        }
    }
}

/// Takes a random set in a random form, marks its names, and gives them back; how many names were held.
fn work(session: &mut Session, random: &mut Random, n: &[String], table: &str) -> Result<u64, SqlError> {
    let mut set = BTreeSet::new();
    while set.len() < 5 {
        set.insert(random.index(n.len()));
    }
    let mut order: Vec<usize> = set.into_iter().collect();
    for at in (1..order.len()).rev() {
        order.swap(at, random.index(at + 1));
    }
    let chosen: Vec<&String> = order.iter().map(|&number| &n[number]).collect();
    let by_transaction = random.one_in(2);
    let prefix = if by_transaction { "named_xact" } else { "named" };
    let timeout = random.pick(&["0", "2 ms", "20 ms", "1 min"]);
    session.query("begin")?;
    let is_any = random.one_in(3);
    let call = if is_any {
        format!("select {prefix}_lock_any({}, 3)", array(&chosen))
    } else {
        format!("select {prefix}_lock_all({}, '{timeout}')", array(&chosen))
    };
    let rows = session.query(&call)?;
    let held: Vec<usize> = if is_any {
        rows.iter()
            .map(|row| n.iter().position(|name| Some(name.as_str()) == row.get(0)).expect("one of ours"))
            .collect()
    } else if rows[0].get(0) == Some("t") {
        order
    } else {
        Vec::new()
    };
    // A row of each name's, locked as long as the name is or shorter: never found locked by another.
    for &number in &held {
        let count = session.query(&format!("select grants from {table} where number = {number} for update nowait"))?;
        let count: i64 = count[0].get(0).and_then(|count| count.parse().ok()).expect("a number");
        session.query(&format!("update {table} set grants = {count} + 1 where number = {number}"))?;
    }
    session.query("commit")?;
    if !by_transaction {
        for &number in &held {
            session.query(&format!("select from {table} where number = {number} for update nowait"))?;
        }
        let rows = session.query("select named_unlock_all()")?;
        assert_eq!(rows[0].get(0), Some(held.len().to_string().as_str()));
    }
    Ok(held.len() as u64)
}
