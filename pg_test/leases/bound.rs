//! Leases bound to a session: they end with it, whichever way it ends. Cases C42 and C52.

use super::{
    Said, acquire, acquire_sql, check, guard_sql, is_free, owners, release, renew, renew_fails, shown, take,
    take_when_free, until_queued,
};
use crate::pg_test::support::{Server, Session, let_pass, signal, unique, until};
use std::time::{Duration, Instant};

const BOUND: &str = ", bound => true";

/// That a lease has ended, as everybody sees it.
#[track_caller]
fn has_ended(watch: &mut Session, name: &str, token: i64) {
    assert!(!check(watch, name, token));
    assert_eq!(owners(watch, name), [""; 0]);
    assert_eq!(shown(watch, name), [""; 0]);
    renew_fails(watch, name, token).is("55000").message_has(name);
    watch.fails(&guard_sql(name, token)).is("55000").message_has(name);
    assert!(!release(watch, name, token));
    assert!(!watch.flag(&format!("select lease_request('{name}')")));
    assert!(is_free(watch, name));
}

#[test]
fn c42_when_the_session_ends_a_bound_lease_is_free_and_an_unbound_one_goes_on() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for how in
        ["close", "pg_terminate_backend", "SIGTERM", "idle-session timeout", "in a transaction", "while it waits"]
    {
        let mut a = server.session("c42 a");
        let (bound, unbound, other) = (unique("c42 bound"), unique("c42 unbound"), unique("c42 other"));
        let bound_token = take(&mut a, &bound, "1 hour", BOUND);
        let unbound_token = take(&mut a, &unbound, "1 hour", "");
        assert!(check(&mut watch, &bound, bound_token));
        acquire(&mut watch, &bound, "1 hour", "").refused_by("c42 a", 3600.0);
        let pid = a.pid;
        let begun = Instant::now();
        match how {
            "close" => drop(a),
            "pg_terminate_backend" => _ = watch.run(&format!("select pg_terminate_backend({pid})")),
            "SIGTERM" => signal(pid, "TERM"),
            "idle-session timeout" => _ = a.run("set idle_session_timeout = '200 ms'"),
            "in a transaction" => {
                a.run(&format!("begin; select lease_renew('{bound}', {bound_token}); select txid_current()"));
                watch.run(&format!("select pg_terminate_backend({pid})"));
            }
            _ => {
                let token = take(&mut watch, &other, "1 hour", "");
                let waiting = a.background(&acquire_sql(&other, "1 hour", ", '1 minute', bound => true"));
                until_queued(&mut watch, &other, 1);
                watch.run(&format!("select pg_terminate_backend({pid})"));
                waiting.end().1.expect_err("its session has ended").is_end_of_session();
                assert!(check(&mut watch, &other, token));
            }
        }
        take_when_free(&mut watch, &bound);
        assert!(begun.elapsed() < Duration::from_secs(30), "{how}: long before its time");
        renew_fails(&mut watch, &bound, bound_token).is("55006");
        assert!(check(&mut watch, &unbound, unbound_token), "{how}");
        acquire(&mut watch, &unbound, "1 hour", "").refused_by("c42 a", 3600.0);
        renew(&mut watch, &unbound, unbound_token, "");
        assert!(release(&mut watch, &unbound, unbound_token), "{how}");
    }
}

#[test]
fn c42_it_has_ended_in_all_that_is_asked_of_it() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for how in ["close", "discard all", "select pg_advisory_unlock_all()"] {
        let mut a = server.session("c42 a");
        let names: Vec<String> = (0..20).map(|_| unique("c42")).collect();
        let tokens: Vec<i64> = names.iter().map(|name| take(&mut a, name, "1 hour", BOUND)).collect();
        if how == "close" {
            let pid = a.pid;
            drop(a);
            watch.until_gone(pid);
        } else {
            a.run(how);
            for (name, token) in names.iter().zip(&tokens).take(3) {
                has_ended(&mut a, name, *token);
            }
        }
        for (name, token) in names.iter().zip(&tokens) {
            until(how, || !check(&mut watch, name, *token));
            has_ended(&mut watch, name, *token);
        }
    }
}

#[test]
fn c42_who_waits_for_it_gets_it_when_the_session_ends() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for how in ["close", "discard all", "select pg_advisory_unlock_all()"] {
        for call in [false, true] {
            let mut a = server.session("c42 a");
            let k = unique("c42");
            take(&mut a, &k, "1 hour", BOUND);
            let sql = match call {
                true => format!("call lease_acquire_wait('{k}', '1 hour', '50 s')"),
                false => acquire_sql(&k, "1 hour", ", '50 s'"),
            };
            let waiting = server.session("c42 b").background(&sql);
            until_queued(&mut watch, &k, 1);
            if how == "close" {
                drop(a);
                waiting.end().1.expect("no error")[0].get(0).expect("granted");
            } else {
                a.run(how);
                waiting.end().1.expect("no error")[0].get(0).expect("granted");
            }
            assert_eq!(owners(&mut watch, &k), ["c42 b"], "{how}");
        }
    }
}

/// What has ended stays ended, whatever the same session takes after that.
#[test]
fn what_discard_all_has_ended_comes_back_by_nothing() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for end in ["discard all", "select pg_advisory_unlock_all()"] {
        for next in [
            "select lease_acquire('$k next', '1 hour', bound => true)",
            "select lease_acquire('$k', '1 hour', bound => true)",
            "call lease_acquire_wait('$k next', '1 hour', bound => true)",
            "select named_lock('$k')",
            "select named_lock('$k', hold_limit => '1 hour'), named_lock('$k', mode => 'share')",
            "begin; select lease_acquire('$k next', '1 hour', bound => true); commit",
        ] {
            let mut a = server.session("bound a");
            let k = unique("bound");
            a.run(&format!("select named_lock('{k} before')"));
            let token = take(&mut a, &k, "1 hour", BOUND);
            let second = take(&mut a, &format!("{k} second"), "1 hour", BOUND);
            a.run(end);
            a.run(&next.replace("$k", &k));
            for _ in 0..2 {
                assert!(!check(&mut watch, &k, token), "{end}; {next}");
                assert!(!check(&mut a, &k, token), "{end}; {next}");
                has_ended(&mut watch, &format!("{k} second"), second);
                // Once more, with the same session.
                a.run(&format!("select lease_acquire('{k} third', '1 hour', bound => true)"));
            }
            if next.contains("'$k next'") {
                assert_eq!(owners(&mut watch, &format!("{k} next")), ["bound a"], "the new one is held");
            }
            if next.contains("lease_acquire('$k',") {
                assert_eq!(owners(&mut watch, &k), ["bound a"], "the new one is held");
            }
        }
    }
}

#[test]
fn c52_pg_advisory_unlock_all_beside_a_transaction_lock() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let mut a = server.session("c52 a");
    let k = unique("c52");
    let token = take(&mut a, &k, "1 hour", BOUND);
    a.run(&format!("begin; select named_lock('{k}'), named_xact_lock('{k}')"));
    a.run("select pg_advisory_unlock_all()");
    assert_eq!(
        watch.column(&format!("select kind from lock_holders where name = '{k}'")),
        ["transaction"],
        "the session's row is gone, and the lease"
    );
    assert!(!check(&mut a, &k, token));
    assert!(!check(&mut watch, &k, token));
    a.run("commit");
    has_ended(&mut watch, &k, token);
}

/// The lease ends even before its grant is committed.
#[test]
fn c52_pg_advisory_unlock_all_in_the_transaction_that_was_granted_it() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let mut a = server.session("c52 a");
    let k = unique("c52");
    a.run("begin");
    let token = take(&mut a, &k, "1 hour", BOUND);
    a.run("select pg_advisory_unlock_all()");
    a.run("commit");
    has_ended(&mut watch, &k, token);
    // And one that is granted after it, in the same transaction, is held.
    a.run("begin");
    let first = take(&mut a, &k, "1 hour", BOUND);
    a.run("select pg_advisory_unlock_all()");
    let second = take(&mut a, &format!("{k} 2"), "1 hour", BOUND);
    a.run("commit");
    has_ended(&mut watch, &k, first);
    assert!(check(&mut watch, &format!("{k} 2"), second));
}

#[test]
fn named_locks_given_back_leave_it_and_it_leaves_them() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let mut a = server.session("bound a");
    let k = unique("bound");
    a.run(&format!("select named_lock('{k}')"));
    let token = take(&mut a, &k, "1 hour", BOUND);
    assert_eq!(a.int(&format!("select named_unlock('{k}')")), 0);
    assert!(check(&mut watch, &k, token), "named_unlock");
    a.run(&format!("select named_lock('{k}'), named_lock('{k} 2')"));
    assert_eq!(a.int("select named_unlock_all()"), 2);
    assert!(check(&mut watch, &k, token), "named_unlock_all");
    assert_eq!(a.int("select named_unlock_all()"), 0);
    assert!(check(&mut watch, &k, token), "named_unlock_all with nothing to unlock");
    a.run(&format!("begin; select named_lock('{k}'), named_xact_lock('{k} x'); rollback; discard plans; reset all"));
    assert!(check(&mut watch, &k, token));
    a.query("select 1/0").expect_err("an error");
    a.run("select named_unlock_all()");
    assert!(check(&mut watch, &k, token), "an error elsewhere");

    // The other way round.
    a.run(&format!("select named_lock('{k}')"));
    assert!(release(&mut a, &k, token));
    assert_eq!(a.int(&format!("select named_lock_held('{k}')")), 1);
    assert!(!watch.flag(&format!("select named_lock('{k}', '0')")));
    let token = take(&mut a, &k, "200 ms", BOUND);
    let_pass(210);
    assert!(!check(&mut a, &k, token));
    assert_eq!(a.int(&format!("select named_lock_held('{k}')")), 1);
    let token = take(&mut a, &k, "1 hour", BOUND);
    assert_eq!(a.int(&format!("select named_unlock('{k}')")), 0);
    assert!(check(&mut watch, &k, token));
}

#[test]
fn it_ends_at_its_ttl_all_the_same() {
    let server = Server::shared();
    let mut a = server.session("bound a");
    let mut b = server.session("bound b");
    let k = unique("bound");
    let begun = Instant::now();
    let token = take(&mut a, &k, "400 ms", BOUND);
    let new = take_when_free(&mut b, &k);
    assert!(begun.elapsed() >= Duration::from_millis(400));
    renew_fails(&mut a, &k, token).is("55006");
    // The session that had it once is of no account any more.
    a.run("discard all");
    let pid = a.pid;
    drop(a);
    b.until_gone(pid);
    assert!(check(&mut b, &k, new));
}

#[test]
fn it_stays_bound_to_who_took_it_whoever_renews() {
    let server = Server::shared();
    let mut a = server.session("bound a");
    let mut b = server.session("bound b");
    let k = unique("bound");
    let token = take(&mut a, &k, "1 hour", BOUND);
    renew(&mut b, &k, token, ", '2 hours', '{}'");
    b.run(&format!("begin; {}; commit", guard_sql(&k, token)));
    let pid = a.pid;
    assert_eq!(
        b.text(&format!("select concat_ws(' ', pid, application_name, state) from lock_holders where name = '{k}'")),
        format!("{pid} bound a held")
    );
    b.run("discard all");
    assert!(check(&mut b, &k, token), "another session's DISCARD ALL");
    drop(a);
    until("it is free", || !check(&mut b, &k, token));
    has_ended(&mut b, &k, token);
    // And released by another.
    let mut a = server.session("bound a");
    let token = take(&mut a, &k, "1 hour", BOUND);
    assert!(release(&mut b, &k, token));
    let new = take(&mut b, &k, "1 hour", "");
    a.run("discard all");
    assert!(check(&mut b, &k, new));
}

#[test]
fn undone_it_leaves_nothing() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let mut a = server.session("bound a");
    let k = unique("bound");
    for (begin, end) in [
        ("begin", "rollback"),
        ("begin; savepoint s", "rollback to s; commit"),
        ("begin; savepoint s", "release s; rollback"),
    ] {
        a.run(begin);
        let token = take(&mut a, &k, "1 hour", BOUND);
        assert!(check(&mut a, &k, token));
        assert!(!check(&mut watch, &k, token));
        a.run(end);
        assert!(!check(&mut a, &k, token), "{begin}; {end}");
        assert!(is_free(&mut watch, &k));
    }
    // A bound one of before stays.
    let token = take(&mut a, &k, "1 hour", BOUND);
    a.run("begin");
    take(&mut a, &format!("{k} undone"), "1 hour", BOUND);
    a.run("rollback");
    assert!(check(&mut watch, &k, token));
    // And one that is refused leaves nothing either.
    acquire(&mut watch, &k, "1 hour", BOUND).refused();
    acquire(&mut watch, &k, "1 hour", ", '50 ms', bound => true").refused();
    assert_eq!(watch.locks_of(watch.pid), 0);
}

#[test]
fn one_permit_of_several() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let mut a = server.session("bound a");
    let mut b = server.session("bound b");
    let k = unique("bound");
    let of_a = take(&mut a, &k, "1 hour", ", permits => 3, bound => true");
    let of_b = take(&mut b, &k, "1 hour", ", permits => 3, bound => true");
    let unbound = take(&mut a, &k, "1 hour", ", permits => 3");
    acquire(&mut watch, &k, "1 hour", ", permits => 3").refused();
    a.run("discard all");
    assert_eq!([of_a, of_b, unbound].map(|token| check(&mut watch, &k, token)), [false, true, true]);
    take(&mut watch, &k, "1 hour", ", permits => 3");
    acquire(&mut watch, &k, "1 hour", ", permits => 3").refused();
    // Where all that was live has ended with its session, another number may come.
    let k = unique("bound");
    take(&mut a, &k, "1 hour", ", permits => 3, bound => true");
    watch.fails(&acquire_sql(&k, "1 hour", ", permits => 2")).is("22023");
    a.run("discard all");
    take(&mut watch, &k, "1 hour", ", permits => 2");
}

/// Kept after its release, it keeps others out though its session is gone: nobody holds it any more.
#[test]
fn kept_it_stays_kept_when_the_session_ends() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let mut a = server.session("bound a");
    let k = unique("bound");
    let token = take(&mut a, &k, "1 hour", BOUND);
    assert!(a.flag(&format!("select lease_release('{k}', {token}, '1 hour')")));
    let pid = a.pid;
    drop(a);
    watch.until_gone(pid);
    acquire(&mut watch, &k, "1 hour", "").refused();
    assert_eq!(watch.column(&format!("select state from lock_holders where name = '{k}'")), ["kept"]);
}

/// Leases are not among the locks that a session may have so many of.
#[test]
fn the_limit_of_locks_per_session_is_not_for_leases() {
    let server = Server::shared();
    let mut a = server.session("bound a");
    a.run("select count(*) from lock_holders; set named_locks.max_locks_per_session = 2");
    let k = unique("bound");
    for bound in [false, true] {
        assert_eq!(
            a.int(&format!(
                "select count(*) filter (where acquired) from generate_series(1, 40) as i, \
                        lease_acquire('{k} {bound} ' || i, '1 hour', bound => {bound})"
            )),
            40
        );
    }
    assert!(a.flag(&format!("select named_lock('{k} 1') and named_lock('{k} 2')")));
    a.fails(&format!("select named_lock('{k} 3')")).is("53400");
    let waiting = take(&mut a, &k, "1 hour", BOUND);
    assert!(check(&mut a, &k, waiting));
}

/// A bound lease that was waited for is bound to the session that waited.
#[test]
fn waited_for_it_is_bound_too() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for call in [false, true] {
        let k = unique("bound");
        let mut a = server.session("bound a");
        let token = take(&mut a, &k, "1 hour", "");
        let sql = match call {
            true => format!("call lease_acquire_wait('{k}', '1 hour', '1 minute', bound => true)"),
            false => acquire_sql(&k, "1 hour", ", '1 minute', bound => true"),
        };
        let waiting = server.session("bound b").background(&sql);
        until_queued(&mut watch, &k, 1);
        assert!(release(&mut a, &k, token));
        let (b, rows) = waiting.end();
        let rows = rows.expect("no error");
        let token = match call {
            true => rows[0].get(0).expect("a token").parse().expect("a number"),
            false => Said::from_rows(&rows).granted(),
        };
        assert!(check(&mut a, &k, token));
        assert_eq!(a.int(&format!("select pid from lock_holders where name = '{k}'")), i64::from(b.pid));
        drop(b);
        until("it has ended", || !check(&mut a, &k, token));
    }
}
