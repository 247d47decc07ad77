//! Grants are transactional, tokens are not; every call sees the newest committed state whatever the isolation level.
//! Case C31, and leases in savepoints, PL/pgSQL, triggers, procedures, cursors and prepared transactions.

use super::{
    Said, acquire, acquire_sql, check, guard, guard_sql, is_free, left_to, owners, release, renew, renew_fails,
    renew_sql, shown, stored, take, take_when_free, until_queued,
};
use crate::pg_test::support::{Reply, Server, Session, Wire, let_pass, unique, unique_ident, until};
use std::time::{Duration, Instant};

/// Waits until a session sleeps until another's transaction has ended.
#[track_caller]
fn until_waiting_for_a_row(watch: &mut Session, pid: i32) {
    until(&format!("process {pid} waits for a row"), || {
        watch.flag(&format!(
            "select exists (select from pg_locks where pid = {pid} and not granted and locktype in ('transactionid', 'tuple'))"
        ))
    });
}

#[test]
fn c31_a_token_is_used_up_by_whatever_undoes_its_grant() {
    let server = Server::shared();
    let mut a = server.session("c31 a");
    let mut b = server.session("c31 b");
    let mut last = 0;
    let undoing: [(&str, &str); 6] = [
        ("begin", "rollback"),
        ("begin; savepoint s", "rollback to s; commit"),
        ("begin; savepoint s; savepoint t", "release t; rollback to s; rollback"),
        ("begin", "select 1/0"),
        (
            "begin; create temp table once (i int unique deferrable initially deferred); insert into once values (1), (1)",
            "commit",
        ),
        ("begin", "select lease_break('$k'); commit"),
    ];
    for (begin, end) in undoing {
        for bound in [false, true] {
            let k = unique("c31");
            a.run(begin);
            let token = take(&mut a, &k, "1 hour", &format!(", bound => {bound}"));
            assert!(token > last, "{begin}; {end}");
            let _ = a.query(&end.replace("$k", &k));
            a.run("rollback");
            assert!(!check(&mut a, &k, token), "{begin}; {end}");
            // The next one, of this name or another, of this session or another.
            let next = take(&mut b, &k, "1 hour", "");
            assert!(next > token, "{begin}; {end}");
            let other = take(&mut a, &unique("c31"), "1 hour", "");
            assert!(other > next);
            assert!(release(&mut b, &k, next));
            last = take(&mut b, &k, "1 hour", "");
            assert!(last > other, "a deleted row takes no token along");
        }
    }
}

#[test]
fn c31_tokens_rise_within_a_transaction_that_is_undone_in_parts() {
    let server = Server::shared();
    let mut a = server.session("c31 a");
    let k = unique("c31");
    a.run("begin");
    let mut last = 0;
    for _ in 0..5 {
        a.run("savepoint s");
        let token = take(&mut a, &k, "1 hour", "");
        assert!(token > last);
        last = token;
        a.run("rollback to s");
        assert!(!check(&mut a, &k, token));
    }
    let token = take(&mut a, &k, "1 hour", "");
    assert!(token > last);
    assert!(release(&mut a, &k, token));
    let token = take(&mut a, &k, "1 hour", "");
    assert!(token > last);
    a.run("commit");
    assert!(check(&mut a, &k, token));
}

#[test]
fn others_see_a_grant_at_its_commit() {
    let server = Server::shared();
    let mut a = server.session("tx a");
    let mut b = server.session("tx b");
    for (end, committed) in [("commit", true), ("rollback", false)] {
        let k = unique("tx");
        a.run("begin");
        let token = take(&mut a, &k, "1 hour", ", owner => 'me'");
        // Its own transaction sees it.
        assert!(check(&mut a, &k, token));
        assert_eq!(owners(&mut a, &k), ["me"]);
        acquire(&mut a, &k, "1 hour", "").refused();
        renew(&mut a, &k, token, "");
        // Nobody else does, and yet nobody else gets it.
        assert!(!check(&mut b, &k, token));
        assert_eq!(owners(&mut b, &k), [""; 0]);
        assert_eq!(shown(&mut b, &k), [""; 0], "uncommitted grants are in no view");
        renew_fails(&mut b, &k, token).is("55000");
        b.fails(&guard_sql(&k, token)).is("55000");
        assert!(!release(&mut b, &k, token));
        acquire(&mut b, &k, "1 hour", "").refused_for_reasons_unknown();
        acquire(&mut b, &k, "1 hour", ", '50 ms'").refused_for_reasons_unknown();
        a.run(end);
        assert_eq!(check(&mut b, &k, token), committed);
        assert_eq!(is_free(&mut b, &k), !committed);
    }
}

#[test]
fn who_meets_an_uncommitted_grant_waits_no_longer_than_its_timeout() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for (end, committed) in [("commit", true), ("rollback", false)] {
        let mut a = server.session("tx a");
        let mut b = server.session("tx b");
        let k = unique("tx");
        a.run("begin");
        let token = take(&mut a, &k, "1 hour", ", owner => 'me'");
        let begun = Instant::now();
        acquire(&mut b, &k, "1 hour", ", '400 ms'").refused();
        assert!(begun.elapsed() >= Duration::from_millis(400));
        assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
        assert_eq!(b.maybe(&format!("call lease_acquire_wait('{k}', '1 hour', '50 ms')")), None);
        b.run("set lock_timeout = '100 ms'");
        b.fails(&acquire_sql(&k, "1 hour", ", null")).is("55P03");
        b.run("set lock_timeout = 0; set statement_timeout = '100 ms'");
        b.fails(&acquire_sql(&k, "1 hour", ", '10 s'")).is("57014");
        b.run("set statement_timeout = 0");
        let waiting = b.background(&acquire_sql(&k, "1 hour", ", '3 s'"));
        until_queued(&mut watch, &k, 1);
        a.run(end);
        let (mut b, rows) = waiting.end();
        let said = Said::from_rows(&rows.expect("no error"));
        if committed {
            said.refused_by("me", 3600.0);
            assert!(check(&mut b, &k, token));
        } else {
            assert!(said.granted() > token);
        }
    }
}

#[test]
fn a_grant_undone_to_a_savepoint_is_free_for_others_at_once() {
    let server = Server::shared();
    let mut a = server.session("tx a");
    let mut b = server.session("tx b");
    let k = unique("tx");
    a.run("begin; savepoint s");
    let token = take(&mut a, &k, "1 hour", "");
    a.run("rollback to s");
    let new = take(&mut b, &k, "1 hour", "");
    assert!(new > token);
    // The transaction goes on, and sees who has it now.
    acquire(&mut a, &k, "1 hour", "").refused_by("tx b", 3600.0);
    a.run("commit");
    assert!(check(&mut a, &k, new));
    // A released savepoint keeps it.
    let k = unique("tx");
    a.run("begin; savepoint s");
    let token = take(&mut a, &k, "1 hour", "");
    a.run("release s");
    acquire(&mut b, &k, "1 hour", "").refused_for_reasons_unknown();
    a.run("commit");
    assert!(check(&mut b, &k, token));
}

#[test]
fn a_renewal_is_transactional() {
    let server = Server::shared();
    let mut a = server.session("tx a");
    let mut b = server.session("tx b");
    let k = unique("tx");
    let token = take(&mut a, &k, "1 hour", ", payload => '1'");
    let shown = format!("select concat_ws(' ', expires_at, payload) from lease_holder('{k}')");
    let before = b.text(&shown);
    for (begin, end) in [("begin", "rollback"), ("begin; savepoint s", "rollback to s; commit")] {
        a.run(begin);
        renew(&mut a, &k, token, ", '2 hours', '2'");
        assert_ne!(a.text(&shown), before, "its own transaction sees it");
        assert_eq!(b.text(&shown), before, "others don't");
        a.run(end);
        assert_eq!(a.text(&shown), before, "{end}");
        assert_eq!(b.text(&shown), before, "{end}");
    }
    assert_eq!(renew(&mut a, &k, token, "").remaining, 3600.0, "the TTL of before");
}

/// Two renewals at once: the one comes after the other, and neither fails.
#[test]
fn renewals_of_two_sessions_at_once() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for isolation in ["read committed", "repeatable read"] {
        for end in ["commit", "rollback"] {
            let mut a = server.session("tx a");
            let mut b = server.session("tx b");
            let k = unique("tx");
            let token = take(&mut a, &k, "1 hour", "");
            a.run(&format!("begin isolation level {isolation}; select 1"));
            renew(&mut a, &k, token, ", '2 hours'");
            b.run(&format!("begin isolation level {isolation}; select 1"));
            let waiting = b.background(&renew_sql(&k, token, ", '3 hours'"));
            let_pass(100);
            a.run(end);
            let (mut b, rows) = waiting.end();
            assert_eq!(rows.expect("no error")[0].get(0), Some("10800.000000"), "{isolation}, {end}");
            b.run("commit");
            assert!(watch.flag(&format!("select remaining > '2 hours 50 minutes' from lease_holder('{k}')")));
            assert_eq!(stored(&mut watch, &k).len(), 1);
        }
    }
}

/// What a session does to a lease that another's open transaction has changed comes before that change or after it.
#[test]
fn changes_of_two_sessions_at_once() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    // Each with whether the lease is held with the token after it.
    let changes = [
        ("select waiters::text from lease_renew('$k', $t, '2 hours')", true),
        ("select lease_request('$k', 'please ' || pg_backend_pid())", true),
        ("select lease_release('$k', $t)", false),
        ("select lease_release('$k', $t, '1 hour')", false),
        ("select lease_break('$k')", false),
    ];
    for permits in [1, 2] {
        for (first, held_after_first) in changes {
            for (second, held_after_second) in changes {
                for (begin, end, committed) in [
                    ("begin", "commit", true),
                    ("begin", "rollback", false),
                    ("begin; savepoint s", "rollback to s", false),
                    ("begin isolation level repeatable read", "rollback", false),
                ] {
                    let mut a = server.session("tx a");
                    let b = server.session("tx b");
                    let k = unique("tx");
                    let token = take(&mut watch, &k, "1 hour", &format!(", permits => {permits}"));
                    let of = |sql: &str| sql.replace("$k", &k).replace("$t", &token.to_string());
                    let what = format!("{begin}; {first}; {end} beside {second}, {permits} permits");
                    a.run(&format!("{begin}; {}", of(first)));
                    let waiting = b.background(&of(second));
                    let_pass(5);
                    a.run(end);
                    let (mut b, result) = waiting.end();
                    a.run("commit");
                    let held_before = !committed || held_after_first;
                    match result {
                        Ok(rows) => {
                            let value = rows[0].get(0).expect("a value");
                            let is_done = ["t", "1"].contains(&value) || second.contains("lease_renew");
                            assert!(is_done || !held_before, "{what}: {value}");
                        }
                        Err(error) => {
                            assert!(second.contains("lease_renew") && !held_before, "{what}: {error:#?}");
                            error.is("55000");
                        }
                    }
                    assert_eq!(check(&mut b, &k, token), held_before && held_after_second, "{what}");
                    // A break leaves nothing of it, kept or not, whichever came first.
                    let is_broken = second.contains("break") || (committed && first.contains("break"));
                    if is_broken && (second.contains("break") || !second.contains("'1 hour'")) {
                        assert!(is_free(&mut watch, &k), "{what}");
                    }
                    b.run(&format!("select lease_break('{k}')"));
                    assert!(is_free(&mut watch, &k), "{what}");
                }
            }
        }
    }
}

#[test]
fn a_change_that_waits_for_another_can_be_ended() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for call in ["lease_renew('$k', $t)", "lease_release('$k', $t)", "lease_release('$k', $t, '1 hour')"] {
        let mut a = server.session("tx a");
        let mut b = server.session("tx b");
        let k = unique("tx");
        let token = take(&mut a, &k, "1 hour", "");
        let call = format!("select {}", call.replace("$k", &k).replace("$t", &token.to_string()));
        a.run("begin");
        renew(&mut a, &k, token, ", '2 hours'");
        b.run("set lock_timeout = '100 ms'");
        b.fails(&call).is("55P03");
        b.run("set lock_timeout = 0; set statement_timeout = '100 ms'");
        b.fails(&call).is("57014");
        b.run("set statement_timeout = 0");
        let waiting = b.background(&call);
        until_waiting_for_a_row(&mut watch, waiting.pid);
        watch.run(&format!("select pg_cancel_backend({})", waiting.pid));
        let (mut b, result) = waiting.end();
        result.expect_err("cancelled").is("57014");
        a.run("commit");
        assert!(check(&mut b, &k, token), "{call}");
        b.run(&call);
    }
}

/// An administrator waits for no holder, whatever that one has open: "works at once".
#[test]
fn requests_and_breaks_do_not_wait_for_the_holder() {
    let server = Server::shared();
    let mut b = server.session("tx b");
    b.run("set statement_timeout = '20 s'");
    for permits in [1, 2] {
        for work in [
            "select lease_renew('$k', $t, '2 hours', '{\"a\": 1}')",
            "select lease_guard('$k', $t), lease_renew('$k', $t)",
            "select lease_release('$k', $t)",
            "select lease_release('$k', $t, '1 hour')",
        ] {
            for end in ["commit", "rollback"] {
                let mut a = server.session("tx a");
                let k = unique("tx");
                let token = take(&mut a, &k, "1 hour", &format!(", permits => {permits}"));
                let what = format!("{work}; {end}, {permits} permits");
                a.run(&format!("begin; {}", work.replace("$k", &k).replace("$t", &token.to_string())));
                assert!(b.flag(&format!("select lease_request('{k}', 'please')")), "{what}");
                a.run(end);
                let held = end == "rollback" || !work.contains("release");
                assert_eq!(check(&mut b, &k, token), held, "{what}");
                if held {
                    assert_eq!(renew(&mut a, &k, token, "").requested.as_deref(), Some("please"), "{what}");
                    a.run(&format!("begin; {}", work.replace("$k", &k).replace("$t", &token.to_string())));
                    assert_eq!(b.int(&format!("select lease_break('{k}')")), 1, "{what}");
                    assert!(!check(&mut b, &k, token), "{what}");
                    assert_eq!(shown(&mut b, &k), [""; 0], "{what}");
                    // The next grant waits for guarded transactions under way.
                    if work.contains("guard") {
                        acquire(&mut b, &k, "1 hour", "").refused();
                    }
                    a.run(end);
                    assert!(!check(&mut b, &k, token), "{what}");
                    renew_fails(&mut a, &k, token).is("55000");
                    assert!(!release(&mut a, &k, token), "{what}");
                }
                if held || !work.contains("'1 hour'") {
                    assert_eq!(shown(&mut b, &k), [""; 0], "{what}");
                    let next = take(&mut b, &k, "1 hour", "");
                    assert_eq!(renew(&mut b, &k, next, "").requested, None, "{what}: asked for nothing");
                }
            }
        }
    }
}

#[test]
fn a_deadlock_over_two_leases_is_found() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let mut a = server.session("tx a");
    let mut b = server.session("tx b");
    let (one, two) = (unique("tx"), unique("tx"));
    let token_one = take(&mut a, &one, "1 hour", "");
    let token_two = take(&mut b, &two, "1 hour", "");
    a.run("set deadlock_timeout = '1 h'; begin");
    b.run("set deadlock_timeout = '100 ms'; begin");
    renew(&mut a, &one, token_one, "");
    renew(&mut b, &two, token_two, "");
    let waiting = a.background(&renew_sql(&two, token_two, ""));
    until_waiting_for_a_row(&mut watch, waiting.pid);
    renew_fails(&mut b, &one, token_one).is("40P01");
    b.run("rollback");
    let (mut a, result) = waiting.end();
    result.expect("the survivor goes on");
    a.run("commit");
    assert!(check(&mut b, &one, token_one) && check(&mut b, &two, token_two));
}

/// A renewal that isn't committed when the old time runs out: never do two hold it.
#[test]
fn a_takeover_beside_an_uncommitted_renewal() {
    let server = Server::shared();
    let mut b = server.session("tx b");
    b.run("set statement_timeout = '30 s'");
    for timeout in ["0", "60 ms"] {
        for end in ["commit", "rollback"] {
            let mut a = server.session("tx a");
            let k = unique("tx");
            let token = take(&mut a, &k, "300 ms", "");
            a.run("begin");
            renew(&mut a, &k, token, ", '1 hour'");
            let_pass(310);
            let said = acquire(&mut b, &k, "1 hour", &format!(", '{timeout}'"));
            let renewed = a.query(end).is_ok() && end == "commit";
            let holds = check(&mut a, &k, token);
            assert!(!(holds && said.token.is_some()), "both hold it");
            assert!(!renewed || holds || said.token.is_some(), "a renewal that was committed is lost to nobody");
            if end == "rollback" && said.token.is_none() {
                take(&mut b, &k, "1 hour", "");
            }
        }
    }
}

/// The same for a release and a break that aren't committed.
#[test]
fn a_try_beside_an_uncommitted_release() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for work in ["lease_release('$k', $t)", "lease_release('$k', $t, '1 us')", "lease_break('$k')"] {
        for (end, free) in [("commit", true), ("rollback", false)] {
            let mut a = server.session("tx a");
            let mut b = server.session("tx b");
            let k = unique("tx");
            let token = take(&mut a, &k, "1 hour", "");
            a.run(&format!("begin; select {}", work.replace("$k", &k).replace("$t", &token.to_string())));
            acquire(&mut b, &k, "1 hour", "").refused();
            assert!(check(&mut b, &k, token), "held until the commit");
            let waiting =
                b.background(&acquire_sql(&k, "1 hour", &format!(", '{}'", if free { "50 s" } else { "1 s" })));
            until_queued(&mut watch, &k, 1);
            a.run(end);
            let (mut b, rows) = waiting.end();
            let said = Said::from_rows(&rows.expect("no error"));
            assert_eq!(said.token.is_some(), free, "{work}; {end}: {said:?}");
            assert_eq!(check(&mut b, &k, token), !free, "{work}; {end}");
        }
    }
}

/// Snapshots that are older than what has happened to the lease.
#[test]
fn all_calls_see_the_newest_committed_state() {
    let server = Server::shared();
    let mut b = server.session("tx b");
    for isolation in ["read committed", "repeatable read"] {
        let mut a = server.session("tx a");
        let (k, free) = (unique("tx"), unique("tx"));
        let gone = take(&mut b, &k, "1 hour", ", owner => 'gone'");
        a.run("create temp table old (i int)");
        a.run(&format!("begin isolation level {isolation}; select * from old"));
        assert!(release(&mut b, &k, gone));
        let token = take(&mut b, &k, "1 hour", ", owner => 'new', payload => '{\"n\": 1}'");
        renew(&mut b, &k, token, ", payload => '{\"n\": 2}'");

        assert!(check(&mut a, &k, token), "{isolation}");
        assert!(!check(&mut a, &k, gone), "{isolation}");
        assert_eq!(owners(&mut a, &k), ["new"], "{isolation}");
        assert_eq!(a.text(&format!("select payload from lease_holder('{k}')")), "{\"n\": 2}", "{isolation}");
        assert_eq!(shown(&mut a, &k), ["held new"], "{isolation}");
        acquire(&mut a, &k, "1 hour", "").refused_by("new", 3600.0);
        a.run("savepoint s");
        renew_fails(&mut a, &k, gone).is("55006");
        a.run("rollback to s");
        a.fails(&guard_sql(&k, gone)).is("55006");
        a.run("rollback to s");
        assert!(!release(&mut a, &k, gone));

        // A lease that was renewed and asked for since is guarded, renewed and released without 40001.
        assert!(b.flag(&format!("select lease_request('{k}', 'please')")));
        guard(&mut a, &k, token);
        let renewed = renew(&mut a, &k, token, ", payload => '{\"n\": 3}'");
        assert_eq!(renewed.requested.as_deref(), Some("please"), "{isolation}");
        a.run(&format!("select lease_request('{k}', 'from within')"));
        assert!(release(&mut a, &k, token));
        // One that was taken and given back since is free.
        let token_of_b = take(&mut b, &free, "1 hour", "");
        assert!(release(&mut b, &free, token_of_b));
        let token_of_a = take(&mut a, &free, "1 hour", "");
        assert!(token_of_a > token_of_b);
        a.run("commit");
        assert!(check(&mut b, &free, token_of_a));
        assert!(is_free(&mut b, &k));
    }
}

#[test]
fn an_old_snapshot_and_breaks_and_waits() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let mut a = server.session("tx a");
    let mut b = server.session("tx b");
    let k = unique("tx");
    a.run("create temp table old (i int)");
    a.run("begin isolation level repeatable read; select * from old");
    let token = take(&mut b, &k, "1 hour", "");
    renew(&mut b, &k, token, "");
    assert_eq!(a.int(&format!("select lease_break('{k}')")), 1);
    a.run("commit");
    assert!(!check(&mut b, &k, token));
    // It waits in such a transaction, and takes what was given back meanwhile.
    let token = take(&mut b, &k, "1 hour", "");
    a.run("begin isolation level repeatable read; select * from old");
    let waiting = a.background(&acquire_sql(&k, "1 hour", ", '1 minute'"));
    until_queued(&mut watch, &k, 1);
    renew(&mut b, &k, token, "");
    assert!(release(&mut b, &k, token));
    let (mut a, rows) = waiting.end();
    let token = Said::from_rows(&rows.expect("no error")).granted();
    a.run("commit");
    assert!(check(&mut b, &k, token));
}

/// SERIALIZABLE may raise 40001, and is never wrong.
#[test]
fn serializable_tells_the_truth_or_fails() {
    let server = Server::shared();
    let mut a = server.session("tx a");
    let mut b = server.session("tx b");
    // Alone, it works.
    let k = unique("tx");
    a.run("begin isolation level serializable; select 1");
    let token = take(&mut a, &k, "1 hour", "");
    renew(&mut a, &k, token, "");
    guard(&mut a, &k, token);
    acquire(&mut a, &k, "1 hour", "").refused();
    a.run("commit");
    assert!(check(&mut b, &k, token));
    a.run("begin isolation level serializable");
    assert!(release(&mut a, &k, token));
    a.run("commit");
    assert!(is_free(&mut b, &k));
    // After another has changed it.
    for call in ["acquire", "renew", "guard", "release"] {
        let k = unique("tx");
        let token = take(&mut b, &k, "1 hour", "");
        a.run("begin isolation level serializable; select count(*) from pg_class where relname = 'none'");
        renew(&mut b, &k, token, ", '2 hours'");
        let sql = match call {
            "acquire" => acquire_sql(&k, "1 hour", ""),
            "renew" => renew_sql(&k, token, ""),
            "guard" => guard_sql(&k, token),
            _ => format!("select lease_release('{k}', {token})"),
        };
        let done = a.query(&sql).and_then(|rows| a.query("commit").map(|_| rows));
        match done {
            Ok(rows) if call == "acquire" => _ = Said::from_rows(&rows).refused(),
            Ok(_) => assert_eq!(check(&mut b, &k, token), call != "release"),
            Err(error) => {
                error.is("40001");
                a.run("rollback");
                assert!(check(&mut b, &k, token));
            }
        }
    }
}

#[test]
fn a_read_only_transaction_is_for_looking() {
    let server = Server::shared();
    let mut a = server.session("tx a");
    let k = unique("tx");
    let token = take(&mut a, &k, "1 hour", "");
    for begin in
        ["begin read only", "begin; set transaction read only", "begin isolation level repeatable read read only"]
    {
        for call in [
            acquire_sql(&k, "1 hour", ""),
            acquire_sql(&unique("tx"), "1 hour", ", null"),
            acquire_sql(&unique("tx"), "1 hour", ", bound => true"),
            renew_sql(&k, token, ""),
            format!("select lease_release('{k}', {token})"),
            format!("select lease_release('{k}', {token}, '1 hour')"),
            format!("select lease_request('{k}')"),
            format!("select lease_break('{k}')"),
        ] {
            a.run(begin);
            a.fails(&call).is("25006");
            a.run("rollback");
            assert_eq!(a.locks_of(a.pid), 0, "{call}");
        }
        a.run(begin);
        assert!(check(&mut a, &k, token));
        assert_eq!(owners(&mut a, &k), ["tx a"]);
        assert_eq!(shown(&mut a, &k), ["held tx a"]);
        a.run("commit");
    }
    a.run("set default_transaction_read_only = on");
    a.fails(&format!("call lease_acquire_wait('{}', '1 hour')", unique("tx"))).is("25006");
    a.fails(&acquire_sql(&unique("tx"), "1 hour", "")).is("25006");
    a.run("set default_transaction_read_only = off");
    assert!(check(&mut a, &k, token));
}

#[test]
fn prepare_transaction_is_refused_after_what_was_written() {
    let server = Server::shared();
    let mut a = server.session("tx a");
    let mut b = server.session("tx b");
    for call in [
        "lease_acquire('$k', '1 hour')",
        "lease_acquire('$k', '1 hour', bound => true)",
        "lease_renew('$held', $t)",
        "lease_release('$held', $t)",
        "lease_release('$held', $t, '1 hour')",
        "lease_request('$held')",
        "lease_break('$held')",
    ] {
        for savepoint in [false, true] {
            let (k, held, gid) = (unique("tx"), unique("tx"), unique("gid"));
            let token = take(&mut a, &held, "1 hour", "");
            let call = call.replace("$k", &k).replace("$held", &held).replace("$t", &token.to_string());
            a.run("begin");
            a.run(if savepoint { "savepoint s" } else { "" });
            a.run(&format!("select {call}"));
            a.run(if savepoint { "release s" } else { "" });
            a.fails(&format!("prepare transaction '{gid}'")).is("0A000");
            a.run("rollback");
            // As after any error: nothing is done, nothing is held.
            assert!(check(&mut b, &held, token), "{call}");
            assert!(is_free(&mut b, &k), "{call}");
            assert_eq!(b.int(&format!("select count(*) from pg_prepared_xacts where gid = '{gid}'")), 0);
            assert_eq!(left_to(&mut b, a.pid), 0, "{call}");
            // The session is as good as before.
            a.run(&format!("begin; select 1; prepare transaction '{gid}'"));
            a.run(&format!("commit prepared '{gid}'"));
        }
    }
}

#[test]
fn prepare_transaction_is_fine_after_a_look_or_a_refusal() {
    let server = Server::shared();
    let mut a = server.session("tx a");
    let (k, gid) = (unique("tx"), unique("gid"));
    let token = take(&mut a, &k, "1 hour", "");
    a.run("begin");
    acquire(&mut a, &k, "1 hour", "").refused();
    assert!(check(&mut a, &k, token));
    assert_eq!(owners(&mut a, &k), ["tx a"]);
    assert_eq!(shown(&mut a, &k), ["held tx a"]);
    assert!(!release(&mut a, &k, token - 1));
    a.run(&format!("prepare transaction '{gid}'"));
    a.run(&format!("rollback prepared '{gid}'"));
    assert!(release(&mut a, &k, token));
}

/// The guard goes with the prepared transaction, and shuts out the next grant until that has ended.
#[test]
fn a_guard_survives_prepare_transaction() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for end in ["commit prepared", "rollback prepared"] {
        let mut a = server.session("tx a");
        let (k, gid) = (unique("tx"), unique("gid"));
        let token = take(&mut a, &k, "1 hour", "");
        a.run("begin");
        guard(&mut a, &k, token);
        a.run(&format!("prepare transaction '{gid}'"));
        // The session itself may be gone, and the lease released.
        assert!(release(&mut a, &k, token));
        acquire(&mut a, &k, "1 hour", "").refused_for_reasons_unknown();
        let pid = a.pid;
        drop(a);
        watch.until_gone(pid);
        let mut b = server.session("tx b");
        acquire(&mut b, &k, "1 hour", "").refused();
        acquire(&mut b, &k, "1 hour", ", '50 ms'").refused();
        let waiting = b.background(&acquire_sql(&k, "1 hour", ", '50 s'"));
        until_queued(&mut watch, &k, 1);
        assert!(!waiting.finished());
        watch.run(&format!("{end} '{gid}'"));
        let (mut b, rows) = waiting.end();
        let token = Said::from_rows(&rows.expect("no error")).granted();
        assert!(check(&mut b, &k, token), "{end}");
        assert_eq!(shown(&mut watch, &k), ["held tx b"]);
    }
}

#[test]
fn a_caught_exception_undoes_what_its_block_did() {
    let server = Server::shared();
    let mut a = server.session("tx a");
    let mut b = server.session("tx b");
    let (k, held) = (unique("tx"), unique("tx"));
    let token = take(&mut a, &held, "1 hour", "");
    let function = unique_ident("lease_block");
    a.run(&format!(
        "create function {function}(sql text) returns text language plpgsql as $$ \
         begin execute sql; raise 'undo'; \
         exception when raise_exception then return 'undone'; when others then return sqlstate; end $$"
    ));
    for (sql, state) in [
        (format!("select lease_acquire('{k}', '1 hour')"), "undone"),
        (format!("select lease_acquire('{k}', '1 hour', bound => true)"), "undone"),
        (format!("select lease_renew('{held}', {token}, '2 hours')"), "undone"),
        (format!("select lease_release('{held}', {token})"), "undone"),
        (format!("select lease_break('{held}')"), "undone"),
        (format!("select lease_request('{held}', 'x')"), "undone"),
        (format!("select lease_renew('{held}', 1)"), "55006"),
        (format!("select lease_guard('{k}', 1)"), "55000"),
        (format!("select lease_acquire('{k}', '1 us')"), "22023"),
        (format!("select lease_acquire('{held}', '1 hour', permits => 7)"), "22023"),
        (format!("call lease_acquire_wait('{k}', '1 hour')"), "25001"),
    ] {
        for begin in ["", "begin"] {
            a.run(begin);
            let literal = sql.replace('\'', "''");
            assert_eq!(a.text(&format!("select {function}('{literal}')")), state, "{sql}");
            // The transaction goes on, and others can go on, too.
            assert!(is_free(&mut b, &k), "{sql}");
            assert!(check(&mut b, &held, token), "{sql}");
            let renewed = renew(&mut a, &held, token, "");
            assert_eq!((renewed.remaining, renewed.requested), (3600.0, None), "{sql}");
            a.run(if begin.is_empty() { "" } else { "commit" });
            assert_eq!(left_to(&mut b, a.pid), 0, "{sql}");
        }
    }
}

#[test]
fn a_thousand_caught_exceptions_leave_nothing() {
    let server = Server::shared();
    let mut a = server.session("tx a");
    let mut b = server.session("tx b");
    let k = unique("tx");
    a.run(&format!(
        "begin; do $$ begin \
           for i in 1..1000 loop \
             begin \
               perform lease_acquire('{k} ' || i % 7, '1 hour', bound => i % 2 = 0); raise 'undo'; \
             exception when raise_exception then null; \
             end; \
           end loop; \
         end $$"
    ));
    for i in 0..7 {
        assert!(is_free(&mut b, &format!("{k} {i}")));
    }
    let token = take(&mut a, &format!("{k} 1"), "1 hour", "");
    a.run("commit");
    assert!(check(&mut b, &format!("{k} 1"), token));
    assert_eq!(a.int(&format!("select count(*) from lock_holders where name like '{k} %'")), 1);
}

#[test]
fn in_triggers() {
    let server = Server::shared();
    let mut a = server.session("tx a");
    let mut b = server.session("tx b");
    let table = unique_ident("lease_jobs");
    let k = unique("tx");
    a.run(&format!(
        "create table {table} (job text primary key, token bigint); \
         create function {table}_in() returns trigger language plpgsql as $$ \
         begin new.token := (select token from lease_acquire(new.job, '1 hour', owner => 'trigger')); return new; end $$; \
         create function {table}_out() returns trigger language plpgsql as $$ \
         begin perform lease_guard(old.job, old.token), lease_release(old.job, old.token); return old; end $$; \
         create trigger a before insert on {table} for each row execute function {table}_in(); \
         create constraint trigger b after delete on {table} deferrable initially deferred \
             for each row execute function {table}_out()"
    ));
    a.run(&format!("insert into {table} select '{k} ' || i from generate_series(1, 10) as i"));
    assert_eq!(a.int(&format!("select count(*) from {table} where lease_check(job, token)")), 10);
    assert_eq!(owners(&mut b, &format!("{k} 3")), ["trigger"]);
    // With the row that isn't written, the lease isn't granted.
    a.fails(&format!("insert into {table} values ('{k} 11'), ('{k} 12'), ('{k} 1')")).is("23505");
    assert!(is_free(&mut b, &format!("{k} 11")));
    a.run(&format!("insert into {table} values ('{k} 13'), ('{k} 1') on conflict do nothing"));
    assert!(!is_free(&mut b, &format!("{k} 13")));
    // At the commit, in a deferred trigger.
    a.run(&format!("begin; delete from {table} where job in ('{k} 1', '{k} 2')"));
    assert!(!is_free(&mut b, &format!("{k} 1")));
    a.run("commit");
    assert!(is_free(&mut b, &format!("{k} 1")));
    // A lost token makes the commit fail.
    b.run(&format!("select lease_break('{k} 4')"));
    a.run(&format!("begin; delete from {table} where job = '{k} 4'"));
    a.fails("commit").is("55000");
    assert_eq!(a.int(&format!("select count(*) from {table} where job = '{k} 4'")), 1);
}

#[test]
fn in_a_function_that_is_marked_stable() {
    let server = Server::shared();
    let mut a = server.session("tx a");
    let mut b = server.session("tx b");
    let function = unique_ident("lease_stable");
    for (index, language) in ["sql", "plpgsql"].into_iter().enumerate() {
        for volatility in ["stable", "immutable"] {
            let function = format!("{function}_{index}_{volatility}");
            let (body, end) = match language {
                "sql" => ("select token from lease_acquire(k, '1 hour', owner => 'stable')", ""),
                _ => ("begin return (select token from lease_acquire(k, '1 hour', owner => 'stable'))", "; end"),
            };
            a.run(&format!(
                "create function {function}(k text) returns bigint {volatility} language {language} as $$ {body}{end} $$"
            ));
            let k = unique("tx");
            // An error, or the truth; never a token that isn't good for anything.
            match a.query(&format!("select {function}('{k}')")) {
                Ok(rows) => {
                    let token = rows[0].get(0).expect("a token").parse().expect("a number");
                    assert!(check(&mut b, &k, token), "{language} {volatility}");
                    assert_eq!(owners(&mut b, &k), ["stable"]);
                    assert_eq!(a.maybe(&format!("select {function}('{k}')")), None, "the second is refused");
                }
                Err(error) => {
                    assert!(["25006", "25000", "0A000"].contains(&error.code.as_str()), "{error:#?}");
                    assert!(is_free(&mut b, &k), "{language} {volatility}");
                }
            }
        }
    }
    // What such a function sees is the newest state, too.
    let k = unique("tx");
    let see = format!("{function}_see");
    a.run(&format!(
        "create function {see}(k text, t bigint) returns boolean stable language plpgsql \
             as $$ begin return lease_check(k, t); end $$"
    ));
    let token = take(&mut a, &k, "1 hour", "");
    a.run("begin isolation level repeatable read; select 1");
    assert!(a.flag(&format!("select {see}('{k}', {token})")));
    assert!(release(&mut b, &k, token));
    assert!(!a.flag(&format!("select {see}('{k}', {token})")));
    a.run("commit");
}

/// Calls of one statement see what the calls before them did.
#[test]
fn several_calls_in_one_statement() {
    let server = Server::shared();
    let mut a = server.session("tx a");
    let mut b = server.session("tx b");
    let k = unique("tx");
    let rows = a.run(&format!(
        "select t.token, lease_check('{k}', t.token), (lease_renew('{k}', t.token)).remaining, \
                lease_request('{k}', 'x'), (lease_renew('{k}', t.token)).release_requested, \
                lease_release('{k}', t.token), lease_check('{k}', t.token), \
                (select acquired from lease_acquire('{k}' || left(t.token::text, 0), '1 hour'))  \
           from lease_acquire('{k}', '1 hour') as t"
    ));
    let row: Vec<_> = (1..8).map(|column| rows[0].get(column)).collect();
    assert_eq!(
        row,
        [Some("t"), Some("01:00:00"), Some("t"), Some("x"), Some("t"), Some("f"), Some("t")],
        "each sees what came before it"
    );
    assert_eq!(owners(&mut b, &k), ["tx a"]);
    // Given back all at once.
    let stem = unique("tx");
    assert_eq!(
        a.int(&format!(
            "with t as materialized (select i, token from generate_series(1, 50) as i, lease_acquire('{stem} ' || i, '1 hour')) \
             select count(*) from t where lease_check('{stem} ' || i, token) and lease_release('{stem} ' || i, token) \
                and not lease_check('{stem} ' || i, token)"
        )),
        50
    );
    assert_eq!(b.int(&format!("select count(*) from lock_holders where name like '{stem} %'")), 0);
}

#[test]
fn in_a_procedure_that_commits() {
    let server = Server::shared();
    let mut a = server.session("tx a");
    let mut b = server.session("tx b");
    let procedure = unique_ident("lease_batches");
    let k = unique("tx");
    a.run(&format!(
        "create table {procedure}_seen (step text, ok boolean); \
         create procedure {procedure}(k text) language plpgsql as $$ \
         declare t bigint; u bigint; \
         begin \
           select token into t from lease_acquire(k, '1 hour'); \
           rollback; \
           insert into {procedure}_seen values ('undone', not lease_check(k, t)); \
           select token into u from lease_acquire(k, '1 hour', bound => true); \
           commit; \
           for i in 1..3 loop \
             perform lease_guard(k, u), lease_renew(k, u); \
             insert into {procedure}_seen values ('batch ' || i, lease_check(k, u)); \
             commit; \
           end loop; \
           insert into {procedure}_seen values ('higher', u > t), ('released', lease_release(k, u)); \
           rollback; \
         end $$"
    ));
    a.run(&format!("call {procedure}('{k}')"));
    assert_eq!(
        a.column(&format!("select concat_ws(' ', step, ok) from {procedure}_seen")),
        ["undone t", "batch 1 t", "batch 2 t", "batch 3 t"]
    );
    assert_eq!(owners(&mut b, &k), ["tx a"], "the release was undone");
    a.run("discard all");
    assert!(is_free(&mut b, &k));
    // The call form may be called by a procedure, and may not when the transaction has written.
    a.run(&format!(
        "create procedure {procedure}_2(k text) language plpgsql as $$ \
         declare t bigint; \
         begin \
           call lease_acquire_wait(k, '1 hour', token => t); \
           if not lease_check(k, t) then raise 'lost'; end if; \
           commit; \
           call lease_acquire_wait(k, '1 hour', '10 ms', token => t); \
           if t is not null then raise 'twice'; end if; \
         end $$"
    ));
    a.run(&format!("call {procedure}_2('{k}')"));
    assert_eq!(owners(&mut b, &k), ["tx a"]);
}

#[test]
fn by_cursors_and_the_extended_protocol() {
    let server = Server::shared();
    let mut a = server.session("tx a");
    let mut b = server.session("tx b");
    let k = unique("tx");
    a.run(&format!(
        "begin; declare c cursor for select token from generate_series(1, 10) as i, lease_acquire('{k} ' || i, '1 hour'); \
         savepoint s"
    ));
    let first = a.int("fetch 1 from c");
    assert!(check(&mut a, &format!("{k} 1"), first));
    a.run("close c; commit");
    assert_eq!(b.int(&format!("select count(*) from lock_holders where name like '{k} %'")), 1);

    // A statement whose rows are fetched in parts.
    let mut wire = Wire::open(server);
    let stem = unique("tx");
    let sql = format!("select acquired from generate_series(1, 10) as i, lease_acquire('{stem} ' || i, '1 hour')");
    let replies = wire.portal("p", &sql).execute("p", 3).execute("p", 3).sync().replies();
    assert_eq!(replies.iter().filter(|reply| **reply == Reply::Row(vec![Some("t".into())])).count(), 6);
    assert_eq!(b.int(&format!("select count(*) from lock_holders where name like '{stem} %'")), 6);
    // A pipeline is one transaction: an error undoes the grants before it.
    let stem = unique("tx");
    let replies = wire
        .statement(&format!("select acquired from lease_acquire('{stem}', '1 hour')"))
        .statement("select 1/0")
        .sync()
        .replies();
    assert!(replies.contains(&Reply::Error("22012".into())), "{replies:?}");
    assert!(is_free(&mut b, &stem));
    let replies = wire
        .statement(&format!("select acquired from lease_acquire('{stem}', '1 hour')"))
        .statement(&format!("select acquired from lease_acquire('{stem}', '1 hour')"))
        .sync()
        .replies();
    assert!(replies.contains(&Reply::Row(vec![Some("t".into())])), "{replies:?}");
    assert!(replies.contains(&Reply::Row(vec![Some("f".into())])), "{replies:?}");
    assert_eq!(owners(&mut b, &stem), ["wire"]);
}

/// With parameters, as drivers send them.
#[test]
fn by_prepared_statements() {
    let server = Server::shared();
    let mut a = server.session("tx a");
    let k = unique("tx");
    let row = a
        .client
        .query_one(
            "select acquired, token, holder from lease_acquire($1, $2::text::interval, owner => $3)",
            &[&k, &"1 hour", &"me"],
        )
        .expect("a row");
    assert!(row.get::<_, bool>(0));
    let token: i64 = row.get(1);
    assert_eq!(row.get::<_, &str>(2), "me");
    for _ in 0..10 {
        let row = a.client.query_one("select lease_check($1, $2), waiters from lease_renew($1, $2)", &[&k, &token]);
        let row = row.expect("a row");
        assert_eq!((row.get::<_, bool>(0), row.get::<_, i32>(1)), (true, 0));
    }
    a.client.query_one("select lease_guard($1, $2)", &[&k, &token]).expect("guarded");
    let row = a.client.query_one("select lease_release($1, $2, null)", &[&k, &token]).expect("a row");
    assert!(row.get::<_, bool>(0));
    let row =
        a.client.query_one("select acquired, token from lease_acquire($1, '1 hour', null)", &[&k]).expect("a row");
    let again: Option<i64> = row.get(1);
    assert!(again.is_some_and(|again| again > token));
    assert_eq!(a.client.query("select owner from lease_holder($1)", &[&k]).expect("rows").len(), 1);
    let row = a.client.query_one("call lease_acquire_wait($1, '1 hour', '20 ms')", &[&k]).expect("a row");
    assert_eq!(row.get::<_, Option<i64>>(0), None);
}

#[test]
fn a_failed_commit_undoes_the_grant() {
    let server = Server::shared();
    let mut a = server.session("tx a");
    let mut b = server.session("tx b");
    let k = unique("tx");
    a.run("create temp table once (i int unique deferrable initially deferred)");
    a.run("begin; insert into once values (1), (1)");
    let token = take(&mut a, &k, "1 hour", ", bound => true");
    a.fails("commit").is("23505");
    assert!(!check(&mut b, &k, token));
    take_when_free(&mut b, &k);
}

/// Nothing of a lease is in the way of the server's own work on the table.
#[test]
fn vacuum_and_the_like() {
    let database = Server::shared().new_database("lease_vacuum", "UTF8");
    let mut a = database.session("tx a");
    let token = take(&mut a, "k", "1 hour", ", payload => '{\"a\": 1}'");
    for _ in 0..100 {
        renew(&mut a, "k", token, "");
    }
    for work in [
        "vacuum _lease",
        "vacuum full _lease",
        "reindex table _lease",
        "analyze _lease",
        "cluster _lease using _lease_pkey",
    ] {
        a.run(work);
        assert!(check(&mut a, "k", token), "{work}");
        renew(&mut a, "k", token, "");
        acquire(&mut a, "k", "1 hour", "").refused_by("tx a", 3600.0);
        assert_eq!(a.text("select payload from lease_holder('k')"), "{\"a\": 1}");
        let other = take(&mut a, work, "1 hour", "");
        assert!(release(&mut a, work, other));
    }
    assert!(release(&mut a, "k", token));
}

/// What runs at the very end of a transaction is of the transaction.
#[test]
fn by_a_cursor_with_hold_and_in_deferred_triggers() {
    let server = Server::shared();
    let mut a = server.session("tx a");
    let mut b = server.session("tx b");
    let k = unique("tx");
    // Such a cursor's query runs to its end when the transaction commits.
    a.run(&format!(
        "begin; declare c cursor with hold for \
           select token from generate_series(1, 3) as i, lease_acquire('{k} ' || i, '1 hour', bound => i = 2); commit"
    ));
    for i in 1..=3 {
        assert!(!is_free(&mut b, &format!("{k} {i}")), "{i}");
    }
    let tokens = a.column("fetch all from c");
    for (index, token) in tokens.iter().enumerate() {
        assert!(check(&mut b, &format!("{k} {}", index + 1), token.parse().expect("a token")));
    }
    a.run("close c");
    // A deferred trigger that writes keeps its transaction from being prepared; one that guards does not.
    let (table, gid) = (unique_ident("lease_deferred"), unique("gid"));
    let guarded = take(&mut b, &format!("{k} guarded"), "1 hour", "");
    a.run(&format!(
        "create table {table} (sql text); \
         create function {table}_run() returns trigger language plpgsql as $$ begin execute new.sql; return null; end $$; \
         create constraint trigger t after insert on {table} deferrable initially deferred \
             for each row execute function {table}_run()"
    ));
    for call in [
        format!("select lease_acquire(''{k} deferred'', ''1 hour'')"),
        format!("select lease_release(''{k} 1'', {})", tokens[0]),
        format!("select lease_renew(''{k} 3'', {})", tokens[2]),
    ] {
        a.run(&format!("begin; insert into {table} values ('{call}')"));
        a.fails(&format!("prepare transaction '{gid}'")).is("0A000");
        assert_eq!(a.int(&format!("select count(*) from {table}")), 0);
        assert!(is_free(&mut b, &format!("{k} deferred")));
        assert!(!is_free(&mut b, &format!("{k} 1")));
    }
    a.run(&format!(
        "begin; insert into {table} values ('select lease_guard(''{k} guarded'', {guarded})'); prepare transaction '{gid}'"
    ));
    assert!(release(&mut b, &format!("{k} guarded"), guarded));
    acquire(&mut b, &format!("{k} guarded"), "1 hour", "").refused();
    a.run(&format!("commit prepared '{gid}'"));
    take(&mut b, &format!("{k} guarded"), "1 hour", "");
}

/// A session with a bound lease prepares a transaction that is guarded by it.
#[test]
fn prepare_transaction_in_a_session_with_a_bound_lease() {
    let server = Server::shared();
    let mut a = server.session("tx a");
    let mut b = server.session("tx b");
    let (k, gid) = (unique("tx"), unique("gid"));
    let token = take(&mut a, &k, "1 hour", ", bound => true");
    a.run("begin");
    assert!(check(&mut a, &k, token));
    guard(&mut a, &k, token);
    acquire(&mut a, &k, "1 hour", "").refused();
    a.run(&format!("prepare transaction '{gid}'"));
    assert!(check(&mut b, &k, token), "the lease is the session's, not the transaction's");
    a.run("discard all");
    assert!(!check(&mut b, &k, token));
    acquire(&mut b, &k, "1 hour", "").refused_for_reasons_unknown();
    b.run(&format!("rollback prepared '{gid}'"));
    take(&mut b, &k, "1 hour", "");
}

/// An error later in the same statement undoes what its calls did.
#[test]
fn an_error_in_the_same_statement() {
    let server = Server::shared();
    let mut a = server.session("tx a");
    let mut b = server.session("tx b");
    let (k, held) = (unique("tx"), unique("tx"));
    let token = take(&mut b, &held, "1 hour", "");
    for bound in [false, true] {
        a.fails(&format!("select lease_acquire('{k}', '1 hour', bound => {bound}), 1 / (random() * 0)::int"))
            .is("22012");
        assert!(is_free(&mut b, &k));
    }
    a.fails(&format!("select lease_acquire('{k} ' || i, '1 hour'), 1 / (5 - i) from generate_series(1, 10) as i"))
        .is("22012");
    assert_eq!(b.int(&format!("select count(*) from lock_holders where name like '{k} %'")), 0);
    for call in ["lease_release('$k', $t)", "lease_renew('$k', $t, '2 hours')", "lease_break('$k')"] {
        let call = call.replace("$k", &held).replace("$t", &token.to_string());
        a.fails(&format!("select {call}, 1 / (random() * 0)::int")).is("22012");
        assert!(check(&mut b, &held, token), "{call}");
        assert_eq!(renew(&mut b, &held, token, "").remaining, 3600.0);
    }
    assert_eq!(left_to(&mut b, a.pid), 0);
}

#[test]
fn in_many_nested_savepoints() {
    let server = Server::shared();
    let mut a = server.session("tx a");
    let mut b = server.session("tx b");
    for (end, held) in
        [("rollback to s150; commit", 149), ("commit", 300), ("rollback to s1; commit", 0), ("rollback", 0)]
    {
        let k = unique("tx");
        a.run("begin");
        for level in 1..=300 {
            a.run(&format!(
                "savepoint s{level}; select lease_acquire('{k} {level}', '1 hour', bound => {})",
                level % 2 == 0
            ));
        }
        assert_eq!(a.int(&format!("select count(*) from lock_holders where name like '{k} %'")), 300);
        a.run(end);
        assert_eq!(b.int(&format!("select count(*) from lock_holders where name like '{k} %'")), held, "{end}");
        assert!(is_free(&mut b, &format!("{k} 0")));
        assert_eq!(is_free(&mut b, &format!("{k} 149")), held < 149);
        assert_eq!(is_free(&mut b, &format!("{k} 150")), held < 150);
    }
}
