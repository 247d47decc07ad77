//! Fencing: `lease_guard` checks, and until its transaction ends nobody else is granted the lease. Case C53.

use super::{
    Said, acquire, acquire_sql, check, guard, guard_sql, is_free, owners, release, renew, renew_fails, shown, take,
    take_when_free, until_queued, waiters,
};
use crate::pg_test::support::{Server, Session, let_pass, unique};

/// Takes a lease for a moment and guards a transaction with it, which is left open when the lease has expired.
fn guarded_and_expired(a: &mut Session, name: &str) -> i64 {
    let token = take(a, name, "400 ms", "");
    a.run("begin");
    guard(a, name, token);
    let_pass(410);
    token
}

#[test]
fn the_next_grant_waits_for_the_guarded_transaction() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let mut b = server.session("guard b");
    for end in ["commit", "rollback"] {
        let mut a = server.session("guard a");
        let k = unique("guard");
        let token = guarded_and_expired(&mut a, &k);
        // Expired it is, and yet nobody gets it.
        assert!(!check(&mut b, &k, token));
        assert_eq!(owners(&mut b, &k), [""; 0]);
        acquire(&mut b, &k, "1 hour", "").refused_for_reasons_unknown();
        acquire(&mut b, &k, "1 hour", ", '60 ms'").refused();
        assert_eq!(b.maybe(&format!("call lease_acquire_wait('{k}', '1 hour', '60 ms')")), None);
        assert!(!b.flag(&format!("select lease_request('{k}')")));
        let waiting = b.background(&acquire_sql(&k, "1 hour", ", '1 minute'"));
        until_queued(&mut watch, &k, 1);
        assert!(!waiting.finished());
        a.run(end);
        let (session, rows) = waiting.end();
        b = session;
        let next = Said::from_rows(&rows.expect("no error")).granted();
        assert!(next > token, "{end}");
        a.fails(&guard_sql(&k, token)).is("55006");
    }
}

#[test]
fn the_callers_end_of_the_session_ends_it_too() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let mut b = server.session("guard b");
    for how in ["drop", "terminate"] {
        let mut a = server.session("guard a");
        let k = unique("guard");
        guarded_and_expired(&mut a, &k);
        acquire(&mut b, &k, "1 hour", "").refused();
        if how == "drop" {
            drop(a);
        } else {
            watch.run(&format!("select pg_terminate_backend({})", a.pid));
        }
        take_when_free(&mut b, &k);
    }
}

#[test]
fn rollback_to_the_savepoint_drops_the_guard_and_release_keeps_it() {
    let server = Server::shared();
    let mut a = server.session("guard a");
    let mut b = server.session("guard b");
    for (begin, end, guarded) in [
        ("begin; savepoint s", "rollback to s", false),
        ("begin; savepoint s", "release s", true),
        ("begin; savepoint r; savepoint s", "release s; rollback to r", false),
        ("begin; savepoint s; savepoint t", "rollback to t", false),
    ] {
        let k = unique("guard");
        let token = take(&mut a, &k, "400 ms", "");
        a.run(begin);
        guard(&mut a, &k, token);
        a.run(end);
        let_pass(410);
        assert_eq!(acquire(&mut b, &k, "1 hour", "").token.is_none(), guarded, "{begin}; guard; {end}");
        a.run("commit");
        if guarded {
            take(&mut b, &k, "1 hour", "");
        }
    }
    // One guard of two is undone.
    let k = unique("guard");
    let token = take(&mut a, &k, "400 ms", "");
    a.run("begin");
    guard(&mut a, &k, token);
    a.run("savepoint s");
    guard(&mut a, &k, token);
    a.run("rollback to s");
    let_pass(410);
    acquire(&mut b, &k, "1 hour", "").refused();
    a.run("commit");
    take(&mut b, &k, "1 hour", "");
}

#[test]
fn a_caught_exception_drops_the_guard() {
    let server = Server::shared();
    let mut a = server.session("guard a");
    let mut b = server.session("guard b");
    let k = unique("guard");
    let token = take(&mut a, &k, "400 ms", "");
    a.run(&format!(
        "begin; do $$ begin perform lease_guard('{k}', {token}); raise 'no'; exception when others then null; end $$"
    ));
    let_pass(410);
    take(&mut b, &k, "1 hour", "");
    a.run("commit");
}

#[test]
fn held_or_an_error_and_then_the_transaction_has_failed() {
    let server = Server::shared();
    let mut a = server.session("guard a");
    let mut b = server.session("guard b");
    let k = unique("guard");
    let token = take(&mut a, &k, "200 ms", "");
    a.run(&format!(
        "create temp table written (i int); begin; insert into written values (1); {}",
        guard_sql(&k, token)
    ));
    a.run("commit");
    let_pass(210);
    for (code, taken) in [("55000", false), ("55006", true)] {
        if taken {
            take(&mut b, &k, "1 hour", "");
        }
        a.run("begin; insert into written values (2)");
        a.fails(&guard_sql(&k, token)).is(code).message_has(&k);
        a.fails("insert into written values (3)").is("25P02");
        a.run("commit");
        assert_eq!(a.int("select count(*) from written"), 1);
        // In one statement with the writes, too.
        a.fails(&format!("with g as materialized ({}) insert into written select 4 from g", guard_sql(&k, token)))
            .is(code);
        assert_eq!(a.int("select count(*) from written"), 1);
    }
}

/// The holder works on while others queue for the lease.
#[test]
fn c53_a_queued_acquirer_does_not_shut_out_the_holder() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let mut a = server.session("c53 a");
    a.run("set statement_timeout = '20 s'");
    for permits in [1, 2] {
        let k = unique("c53");
        let more = format!(", permits => {permits}");
        let tokens: Vec<i64> = (0..permits).map(|_| take(&mut a, &k, "1 hour", &more)).collect();
        let waiting: Vec<_> = (1..=2)
            .map(|count| {
                let sql = match count {
                    1 => acquire_sql(&k, "1 hour", &format!(", '1 minute'{more}")),
                    _ => format!("call lease_acquire_wait('{k}', '1 hour', '1 minute', permits => {permits})"),
                };
                let waiting = server.session("c53 waiter").background(&sql);
                until_queued(&mut watch, &k, count);
                waiting
            })
            .collect();
        for token in &tokens {
            assert_eq!(renew(&mut a, &k, *token, "").waiters, 2);
            guard(&mut a, &k, *token);
            a.run("begin; savepoint s");
            guard(&mut a, &k, *token);
            assert_eq!(renew(&mut a, &k, *token, "").waiters, 2);
            a.run("rollback to s");
            guard(&mut a, &k, *token);
            a.run("commit");
            assert!(check(&mut a, &k, *token));
        }
        assert_eq!(waiters(&mut watch, &k), 2);
        // A long guarded transaction delays only the next grant.
        a.run("begin");
        guard(&mut a, &k, tokens[0]);
        assert!(a.flag(&format!("select lease_check('{k}', {})", tokens[0])));
        a.run("commit");
        for token in &tokens {
            assert!(release(&mut a, &k, *token));
        }
        let mut waiting = waiting.into_iter();
        let (mut first, rows) = waiting.next().expect("the first").end();
        let token = Said::from_rows(&rows.expect("no error")).granted();
        assert!(check(&mut first, &k, token));
        if permits == 1 {
            assert_eq!(waiters(&mut watch, &k), 1);
            assert!(release(&mut first, &k, token));
        }
        let (_, rows) = waiting.next().expect("the second").end();
        assert!(rows.expect("no error")[0].get(0).is_some());
        assert_eq!(waiters(&mut watch, &k), 0);
    }
}

#[test]
fn released_in_the_guarded_transaction() {
    let server = Server::shared();
    let mut a = server.session("guard a");
    let mut b = server.session("guard b");
    let k = unique("guard");
    let token = take(&mut a, &k, "1 hour", "");
    a.run("begin");
    guard(&mut a, &k, token);
    assert!(release(&mut a, &k, token));
    acquire(&mut b, &k, "1 hour", "").refused();
    a.run("commit");
    take(&mut b, &k, "1 hour", "");
}

/// The token may be used anywhere: by another session, and by several at once.
#[test]
fn guards_of_several_sessions_share() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let mut a = server.session("guard a");
    let mut b = server.session("guard b");
    let mut c = server.session("guard c");
    let k = unique("guard");
    let token = take(&mut a, &k, "1 hour", "");
    for session in [&mut a, &mut b] {
        session.run("begin; set local statement_timeout = '20 s'");
        guard(session, &k, token);
    }
    // Released by a third one, which waits for neither.
    c.run("set statement_timeout = '20 s'");
    assert!(release(&mut c, &k, token));
    acquire(&mut c, &k, "1 hour", "").refused_for_reasons_unknown();
    let waiting = c.background(&acquire_sql(&k, "1 hour", ", '1 minute'"));
    until_queued(&mut watch, &k, 1);
    a.run("commit");
    assert!(!waiting.finished());
    assert_eq!(waiters(&mut watch, &k), 1, "the other one is still under way");
    // A guard is for who holds the lease: B's own is of no use any more.
    b.fails(&guard_sql(&k, token)).is("55000");
    b.run("rollback");
    let (mut c, rows) = waiting.end();
    Said::from_rows(&rows.expect("no error")).granted();
    assert_eq!(owners(&mut c, &k), ["guard c"]);
}

#[test]
fn guards_of_several_leases_in_one_transaction() {
    let server = Server::shared();
    let mut a = server.session("guard a");
    let mut b = server.session("guard b");
    let names: Vec<String> = (0..10).map(|_| unique("guard")).collect();
    let tokens: Vec<i64> = names.iter().map(|name| take(&mut a, name, "1 hour", "")).collect();
    a.run("begin");
    for (name, token) in names.iter().zip(&tokens).take(5) {
        guard(&mut a, name, *token);
    }
    for (index, (name, token)) in names.iter().zip(&tokens).enumerate() {
        assert!(release(&mut b, name, *token));
        assert_eq!(is_free(&mut b, name), index >= 5, "{index}");
    }
    a.run("commit");
    assert!(names.iter().all(|name| is_free(&mut b, name)));
}

#[test]
fn a_guard_outside_a_block_ends_with_its_statement() {
    let server = Server::shared();
    let mut a = server.session("guard a");
    let mut b = server.session("guard b");
    let k = unique("guard");
    let token = take(&mut a, &k, "1 hour", "");
    guard(&mut a, &k, token);
    assert_eq!(b.locks_of(a.pid), 0);
    assert!(release(&mut a, &k, token));
    take(&mut b, &k, "1 hour", "");
}

#[test]
fn a_guard_of_what_this_transaction_was_granted() {
    let server = Server::shared();
    let mut a = server.session("guard a");
    let mut b = server.session("guard b");
    let k = unique("guard");
    a.run("begin");
    let token = take(&mut a, &k, "1 hour", "");
    guard(&mut a, &k, token);
    renew(&mut a, &k, token, "");
    // Given back and taken again: the guard of one's own is in nobody's way but others'.
    assert!(release(&mut a, &k, token));
    a.run("savepoint s");
    a.fails(&guard_sql(&k, token)).is("55000");
    a.run("rollback to s");
    let again = take(&mut a, &k, "1 hour", "");
    assert!(again > token);
    guard(&mut a, &k, again);
    acquire(&mut b, &k, "1 hour", "").refused_for_reasons_unknown();
    a.run("commit");
    assert!(check(&mut b, &k, again));
    acquire(&mut b, &k, "1 hour", "").refused_by("guard a", 3600.0);
}

/// A break works at once, guarded or not; the next grant waits.
#[test]
fn broken_under_a_guarded_transaction() {
    let server = Server::shared();
    let mut a = server.session("guard a");
    let mut b = server.session("guard b");
    b.run("set statement_timeout = '20 s'");
    let k = unique("guard");
    let token = take(&mut a, &k, "1 hour", "");
    a.run("create temp table written (i int); begin");
    guard(&mut a, &k, token);
    assert_eq!(b.int(&format!("select lease_break('{k}')")), 1);
    assert!(!check(&mut b, &k, token));
    assert_eq!(shown(&mut b, &k), [""; 0]);
    acquire(&mut b, &k, "1 hour", "").refused_for_reasons_unknown();
    // What it writes goes with what it has checked.
    a.run("insert into written values (1)");
    a.run("savepoint s");
    renew_fails(&mut a, &k, token).is("55000");
    a.run("rollback to s; commit");
    assert_eq!(a.int("select count(*) from written"), 1);
    take(&mut b, &k, "1 hour", "");
}

/// A guard of the one permit is in no way of the others'.
#[test]
fn a_guard_is_for_its_own_permit() {
    let server = Server::shared();
    let mut a = server.session("guard a");
    let mut b = server.session("guard b");
    let k = unique("guard");
    let tokens: Vec<i64> = (0..2).map(|_| take(&mut a, &k, "1 hour", ", permits => 2")).collect();
    for (guarded, other) in [(tokens[0], tokens[1]), (tokens[1], tokens[0])] {
        a.run("begin");
        guard(&mut a, &k, guarded);
        b.run("begin");
        assert!(release(&mut b, &k, other));
        take(&mut b, &k, "1 hour", ", permits => 2");
        b.run("rollback");
        // Its own permit is not to be had.
        b.run("begin");
        assert!(release(&mut b, &k, guarded));
        acquire(&mut b, &k, "1 hour", ", permits => 2").refused();
        b.run("rollback");
        a.run("commit");
    }
    for token in tokens {
        assert!(check(&mut b, &k, token));
    }
}

/// Deadlocks of guards with row locks are the server's to find.
#[test]
fn a_guard_never_waits() {
    let server = Server::shared();
    let mut a = server.session("guard a");
    let mut b = server.session("guard b");
    b.run("set statement_timeout = '20 s'");
    let k = unique("guard");
    let token = take(&mut a, &k, "1 hour", "");
    // Whatever a transaction under way has done to the lease, the guard is answered: newest committed state.
    for work in [
        format!("select lease_renew('{k}', {token})"),
        format!("select lease_request('{k}', 'please')"),
        format!("select lease_release('{k}', {token})"),
        format!("select lease_break('{k}')"),
    ] {
        a.run(&format!("begin; {work}"));
        guard(&mut b, &k, token);
        a.run("rollback");
        assert!(check(&mut a, &k, token), "{work}");
    }
}

/// Another permit's grant that isn't committed is in no way of this permit's guard.
#[test]
fn a_guard_beside_an_uncommitted_grant_of_another_permit() {
    let server = Server::shared();
    let mut a = server.session("guard a");
    let mut b = server.session("guard b");
    b.run("set statement_timeout = '20 s'");
    for given_back in [0, 1] {
        let k = unique("guard");
        let tokens: Vec<i64> = (0..2).map(|_| take(&mut b, &k, "1 hour", ", permits => 2")).collect();
        assert!(release(&mut b, &k, tokens[given_back]));
        a.run("begin");
        take(&mut a, &k, "1 hour", ", permits => 2");
        b.run("begin");
        guard(&mut b, &k, tokens[1 - given_back]);
        b.run("commit");
        a.run("rollback");
    }
}

/// Whoever comes with another number of permits, once all have ended, waits for the guards of all of them.
#[test]
fn a_guard_of_any_permit_keeps_out_a_grant_of_another_number() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for (number, guarded, other) in [(2, 1, 1), (2, 0, 1), (3, 2, 1), (3, 2, 2), (5, 4, 1)] {
        let mut a = server.session("guard a");
        let mut b = server.session("guard b");
        let k = unique("guard");
        let tokens: Vec<i64> =
            (0..number).map(|_| take(&mut b, &k, "1 hour", &format!(", permits => {number}"))).collect();
        a.run("begin");
        guard(&mut a, &k, tokens[guarded]);
        assert_eq!(b.int(&format!("select lease_break('{k}')")), number);
        let more = format!(", permits => {other}");
        acquire(&mut b, &k, "1 hour", &more).refused();
        let waiting = b.background(&acquire_sql(&k, "1 hour", &format!("{more}, timeout => '1 minute'")));
        until_queued(&mut watch, &k, 1);
        assert!(!waiting.finished(), "{number}, {guarded}, {other}");
        a.run("commit");
        let (_, rows) = waiting.end();
        Said::from_rows(&rows.expect("no error")).granted();
    }
}

/// It is the transaction's, not the session's.
#[test]
fn pg_advisory_unlock_all_leaves_it() {
    let server = Server::shared();
    let mut a = server.session("guard a");
    let mut b = server.session("guard b");
    let k = unique("guard");
    let token = take(&mut a, &k, "1 hour", "");
    a.run("begin");
    guard(&mut a, &k, token);
    a.run("select pg_advisory_unlock_all(), named_unlock_all()");
    assert!(release(&mut b, &k, token));
    acquire(&mut b, &k, "1 hour", "").refused();
    a.run("commit");
    take(&mut b, &k, "1 hour", "");
}
