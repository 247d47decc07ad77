//! Leases behind poolers, and what other libraries do in the same session. Cases C01, C04 and C06.

use super::{
    Said, acquire, acquire_sql, check, guard, is_free, owners, release, renew, renew_fails, take, until_queued,
};
use crate::pg_test::support::{Pooler, Server, unique};

#[test]
fn c01_acquired_on_one_backend_renewed_and_released_on_another() {
    let server = Server::shared();
    let mut p1 = server.session("c01 p1");
    let mut p2 = server.session("c01 p2");
    let mut p3 = server.session("c01 p3");
    for (discard, permits) in [("", 1), ("discard all", 1), ("", 2)] {
        let k = unique("c01");
        let token = take(&mut p1, &k, "1 hour", &format!(", permits => {permits}"));
        p1.run(discard);
        assert!(check(&mut p2, &k, token));
        assert_eq!(renew(&mut p2, &k, token, ", '2 hours', '{}'").remaining, 7200.0);
        p3.run("begin");
        guard(&mut p3, &k, token);
        p3.run("commit");
        assert!(p3.flag(&format!("select lease_request('{k}')")));
        assert!(release(&mut p2, &k, token));
        assert!(!release(&mut p1, &k, token));
        renew_fails(&mut p1, &k, token).is("55000");
        assert!(is_free(&mut p3, &k));
    }
}

#[test]
fn c04_a_lease_outlives_what_other_libraries_do_in_its_session() {
    let server = Server::shared();
    let mut a = server.session("c04 a");
    let mut b = server.session("c04 b");
    let (k, bound) = (unique("c04"), unique("c04 bound"));
    let token = take(&mut a, &k, "1 hour", "");
    let bound_token = take(&mut a, &bound, "1 hour", ", bound => true");
    for other in [
        "select pg_advisory_lock(4), named_lock('c04 ' || pg_backend_pid())",
        "select named_unlock_all()",
        "select pg_advisory_unlock(4)",
        "begin; select pg_advisory_xact_lock(4); rollback",
        "discard plans; discard temp; discard sequences; reset all; deallocate all",
    ] {
        a.run(other);
        assert!(check(&mut b, &k, token), "{other}");
        assert!(check(&mut b, &bound, bound_token), "{other}");
    }
    for other in ["select pg_advisory_unlock_all()", "discard all"] {
        a.run(other);
        assert!(check(&mut b, &k, token), "{other}");
        assert!(!check(&mut b, &bound, bound_token), "{other}: as documented");
        acquire(&mut b, &k, "1 hour", "").refused_by("c04 a", 3600.0);
    }
    renew(&mut a, &k, token, "");
    assert!(release(&mut a, &k, token));
}

#[test]
fn c06_leases_work_through_a_transaction_pooler_where_session_locks_are_off() {
    let server = Server::shared();
    let role = server.new_role("c06");
    server.session("admin").run(&format!("alter role {role} set named_locks.session_locks = off"));
    let pooler = Pooler::new(server, "transaction", 2, &[&role]);
    let mut watch = server.session("watch");
    let mut one = pooler.session_as(&role, "c06 one");
    let mut two = pooler.session_as(&role, "c06 two");
    let mut backends = Vec::new();
    for round in 0..6 {
        let k = unique("c06");
        // A transaction of the other client holds one of the two backends, now this one, now that.
        two.run("begin");
        backends.push(two.int("select pg_backend_pid()"));
        let token = match round % 2 {
            0 => take(&mut one, &k, "1 hour", ", owner => 'one'"),
            _ => one.int(&format!("call lease_acquire_wait('{k}', '1 hour', '10 s', 'one')")),
        };
        two.run("commit");
        one.run("begin");
        backends.push(one.int("select pg_backend_pid()"));
        assert!(check(&mut two, &k, token));
        assert_eq!(renew(&mut two, &k, token, "").remaining, 3600.0);
        one.run("commit; begin");
        guard(&mut one, &k, token);
        renew(&mut two, &k, token, "");
        one.run("commit");
        acquire(&mut two, &k, "1 hour", "").refused_by("one", 3600.0);
        acquire(&mut two, &k, "1 hour", ", '50 ms'").refused();
        assert_eq!(owners(&mut two, &k), ["one"]);
        assert!(one.flag(&format!("select lease_request('{k}', 'please')")));
        assert_eq!(renew(&mut two, &k, token, "").requested.as_deref(), Some("please"));
        // Waiting takes a backend for as long; the other does the rest.
        let waiting = two.background(&acquire_sql(&k, "1 hour", ", '50 s', 'two'"));
        until_queued(&mut watch, &k, 1);
        assert!(release(&mut one, &k, token));
        let (session, rows) = waiting.end();
        two = session;
        let token = Said::from_rows(&rows.expect("no error")).granted();
        assert!(release(&mut one, &k, token));
        assert!(is_free(&mut two, &k));
    }
    // A bound one would be bound to a backend that is anybody's.
    for call in [
        acquire_sql(&unique("c06"), "1 hour", ", bound => true"),
        acquire_sql(&unique("c06"), "1 hour", ", null, bound => true"),
        format!("call lease_acquire_wait('{}', '1 hour', bound => true)", unique("c06")),
    ] {
        let error = one.fails(&call);
        error.is("0A000");
        assert!(!error.hint.is_empty(), "{error:#?}");
    }
    one.fails("select named_lock('c06')").is("0A000");
    backends.sort_unstable();
    backends.dedup();
    for backend in backends {
        assert_eq!(watch.locks_of(backend as i32), 0, "nothing is left in a session");
    }
}

/// Statement pooling, too: every call is one statement.
#[test]
fn c06_leases_work_through_a_statement_pooler() {
    let server = Server::shared();
    let pooler = Pooler::new(server, "statement", 2, &[]);
    let mut one = pooler.session("c06 one");
    let mut two = pooler.session("c06 two");
    let k = unique("c06");
    let token = take(&mut one, &k, "1 hour", ", owner => 'one'");
    for session in [&mut two, &mut one] {
        assert!(check(session, &k, token));
        renew(session, &k, token, "");
        guard(session, &k, token);
        acquire(session, &k, "1 hour", "").refused_by("one", 3600.0);
    }
    assert!(release(&mut two, &k, token));
    let token = one.int(&format!("call lease_acquire_wait('{k}', '1 hour')"));
    assert_eq!(two.int(&format!("select lease_break('{k}')")), 1);
    renew_fails(&mut one, &k, token).is("55000");
}

#[test]
fn c06_warn_lets_a_bound_lease_through_with_a_warning_and_on_is_silent() {
    let server = Server::shared();
    for (value, warned) in [("warn", true), ("on", false)] {
        let role = server.new_role("c06");
        server.session("admin").run(&format!("alter role {role} set named_locks.session_locks = {value}"));
        let mut a = server.session_as(&role, "c06");
        for bound in [false, true] {
            let k = unique("c06");
            a.notices();
            let token = take(&mut a, &k, "1 hour", &format!(", bound => {bound}"));
            let warnings = a.notices().iter().filter(|notice| notice.severity == "WARNING").count();
            assert_eq!(warnings > 0, warned && bound, "{value}, bound: {bound}");
            assert!(check(&mut a, &k, token));
        }
        a.notices();
        a.run(&format!("call lease_acquire_wait('{}', '1 hour', bound => true)", unique("c06")));
        assert_eq!(a.notices().iter().any(|notice| notice.severity == "WARNING"), warned, "{value}, by CALL");
    }
}
