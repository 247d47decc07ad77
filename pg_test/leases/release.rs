//! Releasing, at once or with `keep_for`. Case C36.

use super::{
    Said, acquire, acquire_sql, check, guard_sql, is_free, owners, release, renew, renew_fails, shown, stored, take,
    take_when_free, until_queued,
};
use crate::pg_test::support::{Server, let_pass, unique};
use std::time::{Duration, Instant};

#[test]
fn true_once_then_false() {
    let server = Server::shared();
    let mut a = server.session("lease a");
    let mut b = server.session("lease b");
    for by_another in [false, true] {
        let k = unique("lease");
        let token = take(&mut a, &k, "1 hour", "");
        let session = if by_another { &mut b } else { &mut a };
        assert!(release(session, &k, token));
        for keep_for in ["", ", null", ", '1 hour'", ", '0'"] {
            assert!(!session.flag(&format!("select lease_release('{k}', {token}{keep_for})")), "{keep_for}");
        }
        assert!(!check(session, &k, token));
        assert_eq!(owners(session, &k), [""; 0]);
        assert_eq!(shown(session, &k), [""; 0]);
        take(session, &k, "1 hour", "");
    }
}

#[test]
fn what_has_expired_is_not_released() {
    let server = Server::shared();
    let mut a = server.session("lease a");
    let k = unique("lease");
    let token = take(&mut a, &k, "100 ms", "");
    let_pass(120);
    assert!(!release(&mut a, &k, token));
    let token = take(&mut a, &k, "100 ms", "");
    let_pass(120);
    // Nor is it kept: that would shut out others from a lease that is free.
    assert!(!a.flag(&format!("select lease_release('{k}', {token}, '1 hour')")));
    assert!(is_free(&mut a, &k));
}

#[test]
fn c36_kept_until_that_long_after_the_grant() {
    let server = Server::shared();
    let mut a = server.session("c36 a");
    let mut b = server.session("c36 b");
    let k = unique("c36");
    let begun = Instant::now();
    let token = take(&mut a, &k, "1 minute", ", owner => 'worker'");
    let granted = Instant::now();
    let_pass(10);
    assert!(a.flag(&format!("select lease_release('{k}', {token}, keep_for => '5 s')")));
    // Nobody holds it.
    assert_eq!(owners(&mut b, &k), [""; 0]);
    assert!(!check(&mut a, &k, token));
    assert!(!release(&mut a, &k, token));
    renew_fails(&mut a, &k, token).is("55000");
    a.fails(&guard_sql(&k, token)).is("55000");
    assert!(!b.flag(&format!("select lease_request('{k}', 'please')")));
    // The view shows it.
    let rows = b.run(&format!(
        "select state, remaining between '0' and '5 s', expires_at - acquired_at = '5 s', kind \
           from lock_holders where name = '{k}'"
    ));
    assert_eq!(rows.len(), 1);
    let row: Vec<_> = (0..4).map(|column| rows[0].get(column)).collect();
    assert_eq!(row, [Some("kept"), Some("t"), Some("t"), Some("lease")]);
    // Others are out, and know for how long.
    let mut last = 5.0;
    let mut tries = 0;
    loop {
        let said = acquire(&mut b, &k, "1 hour", "");
        if said.token.is_some() {
            break;
        }
        assert_eq!(said.holder, None, "nobody holds it");
        let retry_after = said.retry_after.expect("a time");
        assert!(retry_after <= last, "{said:?}");
        assert!(tries > 0 || retry_after > 2.0 || granted.elapsed() > Duration::from_secs(3), "{said:?}");
        last = retry_after;
        tries += 1;
        let_pass(20);
        assert!(granted.elapsed() < Duration::from_secs(5 + 10), "it is never free");
    }
    assert!(tries > 3);
    assert!(begun.elapsed() >= Duration::from_secs(5), "in after {:?}", begun.elapsed());
}

#[test]
fn c36_who_waits_gets_it_at_the_end_of_that_time() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let mut a = server.session("c36 a");
    for first in ["release", "wait"] {
        let k = unique("c36");
        let begun = Instant::now();
        let token = take(&mut a, &k, "1 hour", "");
        let keep = format!("select lease_release('{k}', {token}, '1500 ms')");
        if first == "release" {
            assert!(a.flag(&keep));
        }
        let waiting = server.session("c36 b").background(&acquire_sql(&k, "1 hour", ", '1 minute'"));
        until_queued(&mut watch, &k, 1);
        if first == "wait" {
            assert!(a.flag(&keep));
        }
        let (mut b, rows) = waiting.end();
        let token = Said::from_rows(&rows.expect("no error")).granted();
        let took = begun.elapsed();
        assert!(took >= Duration::from_millis(1500), "{first} first: in after {took:?}");
        assert!(took < Duration::from_millis(1500 + 5000), "{first} first: in after {took:?}");
        assert!(check(&mut b, &k, token));
    }
}

#[test]
fn c36_how_long_is_counted_from_the_grant_and_not_from_a_renewal() {
    let server = Server::shared();
    let mut a = server.session("c36 a");
    let k = unique("c36");
    let begun = Instant::now();
    let token = take(&mut a, &k, "1 hour", "");
    let_pass(600);
    renew(&mut a, &k, token, ", '2 hours'");
    assert!(a.flag(&format!("select lease_release('{k}', {token}, '1 s')")));
    assert!(a.flag(&format!(
        "select coalesce((select expires_at - acquired_at = '1 s' from lock_holders where name = '{k}'), true)"
    )));
    take_when_free(&mut a, &k);
    let took = begun.elapsed();
    assert!(took >= Duration::from_secs(1), "{took:?}");
    assert!(took < Duration::from_millis(1590 + 5000), "{took:?}");
}

#[test]
fn c36_a_time_that_has_passed_already_is_a_plain_release() {
    let server = Server::shared();
    let mut a = server.session("c36 a");
    for keep_for in ["0", "1 us", "20 ms", "1 day -24 hours"] {
        let k = unique("c36");
        let token = take(&mut a, &k, "1 hour", "");
        let_pass(25);
        assert!(a.flag(&format!("select lease_release('{k}', {token}, '{keep_for}')")));
        assert_eq!(shown(&mut a, &k), [""; 0], "{keep_for}");
        take(&mut a, &k, "1 hour", "");
    }
}

#[test]
fn c36_longer_than_the_ttl_was() {
    let server = Server::shared();
    let mut a = server.session("c36 a");
    let k = unique("c36");
    let begun = Instant::now();
    let token = take(&mut a, &k, "30 s", "");
    renew(&mut a, &k, token, ", '500 ms'");
    assert!(a.flag(&format!("select lease_release('{k}', {token}, '1200 ms')")));
    take_when_free(&mut a, &k);
    assert!(begun.elapsed() >= Duration::from_millis(1200));
    // The longest.
    let k = unique("c36");
    let token = take(&mut a, &k, "30 s", "");
    assert!(a.flag(&format!("select lease_release('{k}', {token}, '3650 days')")));
    let said = acquire(&mut a, &k, "1 s", "");
    said.refused();
    assert!(said.retry_after.is_some_and(|seconds| seconds > 300_000_000.0), "{said:?}");
    // An administrator can end it.
    assert_eq!(a.int(&format!("select lease_break('{k}')")), 1);
    take(&mut a, &k, "1 s", "");
}

#[test]
fn c36_undone_by_a_rollback() {
    let server = Server::shared();
    let mut a = server.session("c36 a");
    let mut b = server.session("c36 b");
    let k = unique("c36");
    let token = take(&mut a, &k, "1 hour", "");
    for call in [format!("lease_release('{k}', {token})"), format!("lease_release('{k}', {token}, '1 hour')")] {
        let before = a.text(&format!("select expires_at from lease_holder('{k}')"));
        for (begin, end) in [("begin", "rollback"), ("begin; savepoint s", "rollback to s; commit")] {
            a.run(begin);
            assert!(a.flag(&format!("select {call}")));
            assert!(!a.flag(&format!("select {call}")), "the second time it isn't held any more");
            assert!(!check(&mut a, &k, token));
            assert!(check(&mut b, &k, token), "others see it at the commit");
            a.run(end);
            assert!(check(&mut a, &k, token), "{call}");
            assert_eq!(a.text(&format!("select expires_at from lease_holder('{k}')")), before);
            acquire(&mut b, &k, "1 hour", "").refused_by("c36 a", 3600.0);
        }
    }
    renew(&mut a, &k, token, "");
    assert!(release(&mut a, &k, token));
    assert_eq!(stored(&mut b, &k), [""; 0]);
}
