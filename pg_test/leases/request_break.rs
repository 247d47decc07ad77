//! Asking the holder to hand over, and ending a lease from outside.

use super::{
    Said, acquire, acquire_sql, check, guard_sql, is_free, owners, release, renew, renew_fails, shown, take,
    until_queued,
};
use crate::pg_test::support::{Server, let_pass, unique};

#[test]
fn the_reason_reaches_the_holder_at_its_next_renewal() {
    let server = Server::shared();
    let mut a = server.session("request a");
    let mut b = server.session("request b");
    let long = "é".repeat(512);
    for (argument, reason) in [
        ("", ""),
        (", null", ""),
        (", ''", ""),
        (", 'deployment'", "deployment"),
        (", reason => 'it''s 日本 🔒'", "it's 日本 🔒"),
        (", repeat('é', 512)", long.as_str()),
    ] {
        let k = unique("request");
        let token = take(&mut a, &k, "1 hour", "");
        assert_eq!(renew(&mut a, &k, token, "").requested, None, "nobody has asked");
        assert!(b.flag(&format!("select lease_request('{k}'{argument})")));
        // It stays asked for, and whoever renews is told.
        for session in [&mut a, &mut b] {
            assert_eq!(renew(session, &k, token, "").requested.as_deref(), Some(reason));
            assert_eq!(renew(session, &k, token, ", '2 hours', '{}'").requested.as_deref(), Some(reason));
        }
        assert!(check(&mut b, &k, token), "the holder decides");
        acquire(&mut b, &k, "1 hour", "").refused();
        // The next grant is asked for nothing.
        assert!(release(&mut a, &k, token));
        let token = take(&mut b, &k, "1 hour", "");
        assert_eq!(renew(&mut b, &k, token, "").requested, None);
    }
}

#[test]
fn the_last_reason_counts() {
    let server = Server::shared();
    let mut a = server.session("request a");
    let k = unique("request");
    let token = take(&mut a, &k, "1 hour", "");
    for reason in ["one", "two", ""] {
        assert!(a.flag(&format!("select lease_request('{k}', '{reason}')")));
        assert_eq!(renew(&mut a, &k, token, "").requested.as_deref(), Some(reason));
    }
}

#[test]
fn a_request_changes_nothing_else() {
    let server = Server::shared();
    let mut a = server.session("request a");
    let k = unique("request");
    let token = take(&mut a, &k, "1 hour", ", payload => '{\"v\": 1}'");
    let shown =
        format!("select h::text from lease_holder('{k}') as h(owner, payload, acquired_at, r, expires_at, permits)")
            .replace("h::text", "concat_ws(' ', owner, payload, acquired_at, expires_at, permits)");
    let before = a.text(&shown);
    assert!(a.flag(&format!("select lease_request('{k}', 'please')")));
    assert_eq!(a.text(&shown), before);
    assert!(check(&mut a, &k, token));
}

#[test]
fn false_if_nobody_holds_it() {
    let server = Server::shared();
    let mut a = server.session("request a");
    let mut b = server.session("request b");
    let request = |k: &str| format!("select lease_request('{k}', 'please')");
    let k = unique("request");
    assert!(!a.flag(&request(&k)), "never granted");
    let token = take(&mut a, &k, "100 ms", "");
    let_pass(120);
    assert!(!a.flag(&request(&k)), "expired");
    let _ = token;
    let token = take(&mut a, &k, "1 hour", "");
    assert!(a.flag(&format!("select lease_release('{k}', {token}, '1 hour')")));
    assert!(!a.flag(&request(&k)), "kept");
    a.run(&format!("select lease_break('{k}')"));
    assert!(!a.flag(&request(&k)), "broken");
    // Not committed yet: nobody but the transaction itself knows of it.
    a.run("begin");
    take(&mut a, &k, "1 hour", "");
    assert!(!b.flag(&request(&k)));
    a.run("commit");
    assert!(b.flag(&request(&k)));
}

#[test]
fn a_request_is_transactional() {
    let server = Server::shared();
    let mut a = server.session("request a");
    let mut b = server.session("request b");
    let k = unique("request");
    let token = take(&mut a, &k, "1 hour", "");
    b.run(&format!("begin; select lease_request('{k}', 'undone'); rollback"));
    b.run(&format!("begin; savepoint s; select lease_request('{k}', 'undone'); rollback to s; commit"));
    assert_eq!(renew(&mut a, &k, token, "").requested, None);
    b.run(&format!("begin; select lease_request('{k}', 'done'); commit"));
    assert_eq!(renew(&mut a, &k, token, "").requested.as_deref(), Some("done"));
    // By the holder itself, within one transaction.
    a.run("begin");
    a.run(&format!("select lease_request('{k}', 'own')"));
    assert_eq!(renew(&mut a, &k, token, "").requested.as_deref(), Some("own"));
    a.run("rollback");
    assert_eq!(renew(&mut a, &k, token, "").requested.as_deref(), Some("done"));
}

#[test]
fn of_several_holders_somebody_is_asked() {
    let server = Server::shared();
    let mut a = server.session("request a");
    let k = unique("request");
    let tokens: Vec<i64> = (0..3).map(|_| take(&mut a, &k, "1 hour", ", permits => 3")).collect();
    assert!(a.flag(&format!("select lease_request('{k}', 'one of you')")));
    let told = tokens.iter().filter(|token| renew(&mut a, &k, **token, "").requested.as_deref() == Some("one of you"));
    assert!(told.count() >= 1);
}

#[test]
fn a_break_ends_all_grants_and_says_how_many() {
    let server = Server::shared();
    let mut a = server.session("break a");
    let mut b = server.session("break b");
    for permits in [1, 2, 5] {
        let k = unique("break");
        let tokens: Vec<i64> =
            (0..permits).map(|_| take(&mut a, &k, "1 hour", &format!(", permits => {permits}"))).collect();
        assert_eq!(b.int(&format!("select lease_break('{k}')")), permits);
        assert_eq!(b.int(&format!("select lease_break('{k}')")), 0);
        assert_eq!(owners(&mut b, &k), [""; 0]);
        assert_eq!(shown(&mut b, &k), [""; 0]);
        for token in tokens {
            assert!(!check(&mut a, &k, token));
            renew_fails(&mut a, &k, token).is("55000");
            a.fails(&guard_sql(&k, token)).is("55000");
            assert!(!release(&mut a, &k, token));
        }
        assert!(is_free(&mut b, &k));
    }
    let k = unique("break");
    assert_eq!(b.int(&format!("select lease_break('{k}')")), 0, "never granted");
    // An expired one isn't a grant any more.
    take(&mut a, &k, "100 ms", "");
    let_pass(120);
    assert_eq!(b.int(&format!("select lease_break('{k}')")), 0, "expired");
    // A kept one is, and so is a bound one.
    let token = take(&mut a, &k, "1 hour", "");
    assert!(a.flag(&format!("select lease_release('{k}', {token}, '1 hour')")));
    assert_eq!(b.int(&format!("select lease_break('{k}')")), 1, "kept");
    take(&mut a, &k, "1 hour", ", bound => true");
    assert_eq!(b.int(&format!("select lease_break('{k}')")), 1, "bound");
    assert!(is_free(&mut b, &k));
}

#[test]
fn a_break_is_transactional() {
    let server = Server::shared();
    let mut a = server.session("break a");
    let mut b = server.session("break b");
    let k = unique("break");
    let token = take(&mut a, &k, "1 hour", "");
    for (begin, end) in [("begin", "rollback"), ("begin; savepoint s", "rollback to s; commit")] {
        b.run(begin);
        assert_eq!(b.int(&format!("select lease_break('{k}')")), 1);
        assert!(!check(&mut b, &k, token));
        assert!(check(&mut a, &k, token), "others see it at the commit");
        b.run(end);
        assert!(check(&mut b, &k, token));
    }
    assert!(check(&mut a, &k, token));
    renew(&mut a, &k, token, "");
    b.run(&format!("begin; select lease_break('{k}'); commit"));
    renew_fails(&mut a, &k, token).is("55000");
    // What isn't committed can't be broken, and isn't waited for.
    a.run("begin");
    let token = take(&mut a, &k, "1 hour", "");
    b.run("set statement_timeout = '20 s'");
    assert_eq!(b.int(&format!("select lease_break('{k}')")), 0);
    a.run("commit");
    assert!(check(&mut b, &k, token));
    // Broken and taken in one transaction.
    b.run("begin");
    assert_eq!(b.int(&format!("select lease_break('{k}')")), 1);
    let new = take(&mut b, &k, "1 hour", "");
    b.run("commit");
    assert!(new > token);
    renew_fails(&mut a, &k, token).is("55006");
}

#[test]
fn who_waits_gets_what_is_broken() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let mut a = server.session("break a");
    let k = unique("break");
    take(&mut a, &k, "1 hour", "");
    let waiting = server.session("break b").background(&acquire_sql(&k, "1 hour", ", '1 minute'"));
    until_queued(&mut watch, &k, 1);
    watch.run(&format!("select lease_break('{k}')"));
    let (mut b, rows) = waiting.end();
    let token = Said::from_rows(&rows.expect("no error")).granted();
    assert!(check(&mut b, &k, token));
}
