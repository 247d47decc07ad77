//! Renewing: from now on, with the TTL of before or a new one; safe to repeat; never a quiet false. Cases C29, C35, C37.

use super::{
    acquire, check, guard_sql, is_free, owners, release, renew, renew_fails, renew_sql, stored, take, take_when_free,
};
use crate::pg_test::support::{Server, let_pass, unique};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

#[test]
fn c29_an_old_token_changes_nothing() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let mut a = server.session("c29");
    let mut b = server.session("c29");
    for how in ["released", "expired", "broken", "kept"] {
        let k = unique("c29");
        // The owner's text is the same: it is the token that counts.
        let old = take(&mut a, &k, if how == "expired" { "150 ms" } else { "1 hour" }, ", owner => 'same'");
        match how {
            "released" => assert!(release(&mut a, &k, old)),
            "broken" => assert_eq!(a.int(&format!("select lease_break('{k}')")), 1),
            "kept" => assert!(a.flag(&format!("select lease_release('{k}', {old}, '1 ms')"))),
            _ => let_pass(150),
        }
        let new = take_when_free(&mut b, &k);
        assert!(new > old);
        let before = stored(&mut watch, &k);
        let expires_at = watch.text(&format!("select expires_at from lease_holder('{k}')"));
        for session in [&mut a, &mut b] {
            renew_fails(session, &k, old).is("55006").message_has(&k).detail_has("c29");
            session.fails(&format!("select lease_renew('{k}', {old}, '10 years', '{{}}')")).is("55006");
            assert!(!release(session, &k, old), "{how}");
            assert!(!session.flag(&format!("select lease_release('{k}', {old}, '1 day')")), "{how}");
            session.fails(&guard_sql(&k, old)).is("55006").message_has(&k);
            assert!(!check(session, &k, old), "{how}");
        }
        assert_eq!(stored(&mut watch, &k), before, "{how}: nothing is changed");
        assert_eq!(watch.text(&format!("select expires_at from lease_holder('{k}')")), expires_at);
        assert!(check(&mut a, &k, new));
    }
}

#[test]
fn c29_lost_says_to_whom_and_since_when() {
    let server = Server::shared();
    let mut a = server.session("lost a");
    let mut b = server.session("lost b");
    let k = unique("c29");
    let old = take(&mut a, &k, "1 hour", "");
    assert!(release(&mut a, &k, old));
    take(&mut b, &k, "1 hour", ", owner => 'the new owner'");
    for call in [renew_sql(&k, old, ""), guard_sql(&k, old)] {
        a.fails(&call).is("55006").message_has(&k).detail_has("the new owner");
    }
}

#[test]
fn c29_the_token_of_another_name_or_of_nobody() {
    let server = Server::shared();
    let mut a = server.session("c29");
    let (k, free, other) = (unique("c29"), unique("c29"), unique("c29"));
    let token = take(&mut a, &k, "1 hour", "");
    let other_token = take(&mut a, &other, "1 hour", "");
    for wrong in [other_token, 0, -1, token - 1, token + 1_000_000, i64::MAX, i64::MIN] {
        renew_fails(&mut a, &k, wrong).is("55006");
        a.fails(&guard_sql(&k, wrong)).is("55006");
        assert!(!release(&mut a, &k, wrong));
        assert!(!check(&mut a, &k, wrong));
        renew_fails(&mut a, &free, wrong).is("55000").message_has(&free);
        a.fails(&guard_sql(&free, wrong)).is("55000").message_has(&free);
        assert!(!release(&mut a, &free, wrong));
        assert!(!check(&mut a, &free, wrong));
    }
    assert!(check(&mut a, &k, token));
    assert!(check(&mut a, &other, other_token));
}

#[test]
fn c35_renewed_in_time_it_is_held_throughout_and_free_soon_after() {
    let server = Server::shared();
    let mut a = server.session("c35 a");
    let k = unique("c35");
    let begun = Instant::now();
    let token = take(&mut a, &k, "2 s", "");
    let stop = Arc::new(AtomicBool::new(false));
    let trying = {
        let (k, stop) = (k.clone(), stop.clone());
        server.session("c35 b").spawn(move |session| {
            let mut tries = 0;
            while !stop.load(Ordering::Relaxed) {
                acquire(session, &k, "1 s", "").refused();
                tries += 1;
                let_pass(20);
            }
            tries
        })
    };
    let mut last = begun;
    let mut longest = Duration::ZERO;
    while begun.elapsed() < Duration::from_secs(10) {
        let_pass(300);
        let sent = Instant::now();
        let renewed = renew(&mut a, &k, token, "");
        longest = longest.max(last.elapsed());
        last = sent;
        assert_eq!(renewed.remaining, 2.0);
        assert!(check(&mut a, &k, token));
    }
    assert!(longest < Duration::from_secs(2), "this machine is too busy for the test: {longest:?}");
    stop.store(true, Ordering::Relaxed);
    let (mut b, tries) = trying.end();
    assert!(tries > 10);
    // From here nobody renews.
    let token = take_when_free(&mut b, &k);
    let took = last.elapsed();
    assert!(took >= Duration::from_secs(2), "free after {took:?}");
    assert!(took < Duration::from_secs(2 + 5), "free after {took:?}");
    assert!(check(&mut a, &k, token));
}

#[test]
fn c37_the_same_renewal_twice() {
    let server = Server::shared();
    let mut a = server.session("c37 a");
    let mut b = server.session("c37 b");
    let k = unique("c37");
    let token = take(&mut a, &k, "1 hour", "");
    for more in ["", ", '2 hours'", ", payload => '{\"at\": 7}'"] {
        let first = renew(&mut a, &k, token, more);
        let second = renew(&mut b, &k, token, more);
        assert_eq!(first.remaining, second.remaining);
        assert!(
            a.flag(&format!("select '{}'::timestamptz >= '{}'::timestamptz", second.expires_at, first.expires_at)),
            "from now on: {first:?}, {second:?}"
        );
        assert!(check(&mut a, &k, token));
        assert_eq!(a.text(&format!("select expires_at from lease_holder('{k}')")), second.expires_at);
    }
    // Twice in one transaction and in one statement.
    a.run("begin");
    for _ in 0..3 {
        renew(&mut a, &k, token, "");
    }
    a.run("commit");
    a.run(&format!("select lease_renew('{k}', {token}), lease_renew('{k}', {token})"));
    assert!(check(&mut b, &k, token));
    assert_eq!(a.int(&format!("select count(*) from _lease where name = '{k}'")), 1);
}

#[test]
fn c37_renewing_what_has_ended_and_was_not_taken() {
    let server = Server::shared();
    let mut a = server.session("c37");
    for how in ["expired", "released", "broken", "kept", "never granted"] {
        let k = unique("c37");
        let token = match how {
            "never granted" => 1,
            "expired" => take(&mut a, &k, "100 ms", ""),
            _ => take(&mut a, &k, "1 hour", ""),
        };
        match how {
            "expired" => let_pass(120),
            "released" => assert!(release(&mut a, &k, token)),
            "broken" => assert_eq!(a.int(&format!("select lease_break('{k}')")), 1),
            "kept" => assert!(a.flag(&format!("select lease_release('{k}', {token}, '1 hour')"))),
            _ => {}
        }
        for call in [renew_sql(&k, token, ""), renew_sql(&k, token, ", '1 day'"), guard_sql(&k, token)] {
            let error = a.fails(&call);
            error.is("55000").message_has(&k);
            assert!(error.detail.len() > 10, "{how}: it says how it ended: {error:#?}");
            if how == "expired" {
                error.detail_has("expired");
            }
        }
        assert!(!check(&mut a, &k, token), "{how}");
        assert_eq!(owners(&mut a, &k), [""; 0], "{how}: a failed renewal gives it to nobody");
        if how != "kept" {
            assert!(is_free(&mut a, &k), "{how}");
        }
    }
}

#[test]
fn from_now_on_by_the_ttl_of_before_or_a_new_one() {
    let server = Server::shared();
    let mut a = server.session("lease a");
    let k = unique("lease");
    let token = take(&mut a, &k, "1 hour", "");
    for (more, seconds) in [
        ("", 3600.0),
        (", '2 hours'", 7200.0),
        ("", 7200.0),
        (", null", 7200.0),
        (", ttl => '100 ms'", 0.1),
        (", ttl => '3650 days'", 315_360_000.0),
        ("", 315_360_000.0),
        (", '1.5 s'", 1.5),
        ("", 1.5),
        (", '30 minutes'", 1800.0),
        (", payload => '{}'", 1800.0),
    ] {
        let before = a.text("select clock_timestamp()");
        let renewed = renew(&mut a, &k, token, more);
        assert_eq!(renewed.remaining, seconds, "{more}");
        assert_eq!(renewed.requested, None);
        assert_eq!(renewed.waiters, 0);
        assert!(
            a.flag(&format!(
                "select '{0}'::timestamptz - '{before}'::timestamptz >= interval '{seconds} s' \
                    and '{0}'::timestamptz - clock_timestamp() <= interval '{seconds} s'",
                renewed.expires_at
            )),
            "{more}: {renewed:?}"
        );
        if seconds > 1.0 {
            let of_holder = format!("select expires_at from lease_holder('{k}')");
            assert_eq!(a.text(&of_holder), renewed.expires_at, "{more}");
        }
    }
}

#[test]
fn a_shorter_ttl_ends_it_earlier() {
    let server = Server::shared();
    let mut a = server.session("lease a");
    let mut b = server.session("lease b");
    let k = unique("lease");
    let token = take(&mut a, &k, "1 hour", "");
    let begun = Instant::now();
    renew(&mut a, &k, token, ", '400 ms'");
    acquire(&mut b, &k, "1 s", "").refused_by("lease a", 0.4);
    take_when_free(&mut b, &k);
    assert!(begun.elapsed() >= Duration::from_millis(400));
}

#[test]
fn a_renewal_keeps_all_but_the_time() {
    let server = Server::shared();
    let mut a = server.session("lease a");
    let mut b = server.session("lease b");
    let k = unique("lease");
    let token = take(&mut a, &k, "1 hour", ", owner => 'me', payload => '{\"v\": 1}', permits => 3");
    let shown = format!(
        "select concat_ws(' ', name, state, usename, token, owner, payload, acquired_at) from lock_holders \
          where kind = 'lease' and name = '{k}'"
    );
    let before = a.text(&shown);
    // By another session under another name, with no payload given.
    renew(&mut b, &k, token, "");
    renew(&mut b, &k, token, ", '2 hours'");
    assert_eq!(a.text(&shown), before);
    assert_eq!(a.int(&format!("select permits from lease_holder('{k}')")), 3);
    // A payload that is given is the new one; NULL leaves it.
    renew(&mut b, &k, token, ", payload => '{\"v\": 2}'");
    assert_eq!(a.text(&format!("select payload from lease_holder('{k}')")), "{\"v\": 2}");
    renew(&mut b, &k, token, ", payload => null");
    assert_eq!(a.text(&format!("select payload from lease_holder('{k}')")), "{\"v\": 2}");
    renew(&mut b, &k, token, ", payload => 'null'");
    assert_eq!(a.text(&format!("select payload from lease_holder('{k}')")), "null");
}

#[test]
fn a_renewal_stays_in_its_place() {
    let database = Server::shared().new_database("lease_renew", "UTF8");
    let mut a = database.session("lease a");
    let tokens: Vec<i64> =
        (0..20).map(|i| take(&mut a, &format!("k{i}"), "1 hour", ", payload => '{\"v\": 1}'")).collect();
    let size = "select pg_total_relation_size('_lease')";
    for (i, token) in tokens.iter().enumerate() {
        renew(&mut a, &format!("k{i}"), *token, "");
    }
    let before = a.int(size);
    for _ in 0..300 {
        for (i, token) in tokens.iter().enumerate() {
            a.run(&format!("select lease_renew('k{i}', {token})"));
        }
    }
    assert!(a.int(size) <= before + 5 * 8192, "{before} and now {}", a.int(size));
    assert_eq!(a.int("select count(*) from lock_holders where kind = 'lease'"), 20);
}
