//! Time is the server's, taken at the grant or renewal itself. Cases C32, C33 and C39.

use super::{
    Said, acquire, acquire_sql, check, is_free, owners, release, renew, shown, take, take_when_free, until_queued,
};
use crate::pg_test::support::{Server, let_pass, unique, until};
use std::time::{Duration, Instant};

#[test]
fn c32_a_ttl_counts_from_the_grant_and_not_from_the_transactions_begin() {
    let server = Server::shared();
    let mut a = server.session("c32 a");
    let mut b = server.session("c32 b");
    for isolation in ["read committed", "repeatable read"] {
        let k = unique("c32");
        a.run(&format!("begin isolation level {isolation}; select now(); select pg_sleep(2)"));
        let asked = Instant::now();
        let said = acquire(&mut a, &k, "2 s", "");
        let token = said.granted();
        assert_eq!(said.remaining, Some(2.0));
        assert!(
            a.flag(&format!(
                "select '{0}'::timestamptz - now() >= interval '4 s' and '{0}'::timestamptz - clock_timestamp() <= '2 s'",
                said.expires_at.expect("a time")
            )),
            "by the clock, not by now()"
        );
        a.run("commit");
        let granted = Instant::now();
        while granted.elapsed() < Duration::from_millis(1200) {
            assert!(check(&mut b, &k, token), "alive after {:?}", asked.elapsed());
            acquire(&mut b, &k, "1 s", "").refused();
        }
        take_when_free(&mut b, &k);
        assert!(asked.elapsed() >= Duration::from_secs(2), "{:?}", asked.elapsed());
    }
}

#[test]
fn c32_a_renewal_late_in_a_transaction_or_a_statement() {
    let server = Server::shared();
    let mut a = server.session("c32 a");
    let mut b = server.session("c32 b");
    let k = unique("c32");
    let token = take(&mut a, &k, "1 hour", "");
    a.run("begin; select now(), pg_sleep(1.2)");
    let asked = Instant::now();
    renew(&mut a, &k, token, ", '1 s'");
    a.run("commit");
    take_when_free(&mut b, &k);
    assert!(asked.elapsed() >= Duration::from_secs(1), "{:?}", asked.elapsed());
    // In one statement, after something slow.
    let k = unique("c32");
    assert!(b.flag(&format!(
        "select expires_at - statement_timestamp() >= '3.7 s' and remaining = '2.5 s' \
           from pg_sleep(1.2), lease_acquire('{k}' || left(pg_sleep::text, 0), '2.5 s')"
    )));
    assert!(!is_free(&mut a, &k));
}

#[test]
fn c32_a_ttl_counts_from_the_grant_and_not_from_the_call() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let mut a = server.session("c32 a");
    for call in [false, true] {
        let k = unique("c32");
        let token = take(&mut a, &k, "1 hour", "");
        let sql = match call {
            true => format!("call lease_acquire_wait('{k}', '2 s')"),
            false => acquire_sql(&k, "2 s", ", '1 minute'"),
        };
        let waiting = server.session("c32 b").background(&sql);
        until_queued(&mut watch, &k, 1);
        // The wait is longer than the TTL.
        let_pass(2200);
        assert!(!waiting.finished());
        let freed = Instant::now();
        assert!(release(&mut a, &k, token));
        let (mut b, rows) = waiting.end();
        assert!(rows.expect("no error")[0].get(0).is_some());
        assert_eq!(owners(&mut b, &k), ["c32 b"], "alive, as its time begins only now");
        take_when_free(&mut a, &k);
        assert!(freed.elapsed() >= Duration::from_secs(2));
    }
}

#[test]
fn c33_settings_of_time_change_nothing() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let styles = ["ISO, MDY", "SQL, DMY", "German, DMY", "Postgres, YMD"];
    let interval_styles = ["postgres", "iso_8601", "sql_standard", "postgres_verbose"];
    for (index, zone) in
        ["UTC", "America/New_York", "Asia/Kathmandu", "Pacific/Kiritimati", "-12", "Europe/London"].iter().enumerate()
    {
        let mut a = server.session("c33 a");
        a.run(&format!(
            "set timezone = '{zone}'; set datestyle = '{}'; set intervalstyle = '{}'; set extra_float_digits = -15",
            styles[index % 4],
            interval_styles[index % 4]
        ));
        let (k, short) = (unique("c33"), unique("c33"));
        let begun = Instant::now();
        assert!(
            a.flag(&format!(
                "select acquired and remaining = interval '36 hours' \
                        and expires_at - clock_timestamp() between '35:59:00' and '36 hours' \
                   from lease_acquire('{k}', '1 day 12 hours', owner => 'me')"
            )),
            "{zone}"
        );
        let token = a.int(&format!("select token from lock_holders where name = '{k}'"));
        take(&mut a, &short, "400 ms", "");
        // The same for those who look with other settings.
        let seconds = "extract(epoch from acquired_at), extract(epoch from expires_at)";
        let looks = [
            format!("select concat_ws(' ', {seconds}) from lease_holder('{k}')"),
            format!("select concat_ws(' ', {seconds}) from lock_holders where name = '{k}'"),
        ];
        for look in &looks {
            assert_eq!(a.text(look), watch.text(look), "{zone}");
        }
        assert!(watch.flag(&format!(
            "select expires_at - acquired_at = interval '36 hours' \
                and remaining between interval '35:59:00' and interval '36 hours' from lease_holder('{k}')"
        )));
        assert!(
            a.flag(&format!("select remaining = interval '36 hours' from lease_renew('{k}', {token})")),
            "{zone}: the TTL of before"
        );
        renew(&mut watch, &k, token, ", '1 hour'");
        assert!(a.flag(&format!(
            "select not acquired and retry_after between '59 minutes' and '1 hour' and retry_after = remaining \
               from lease_acquire('{k}', '1 s')"
        )));
        assert!(check(&mut a, &k, token) && check(&mut watch, &k, token));
        let mut other = server.session("c33 b");
        other.run("set timezone = 'Asia/Tokyo'; set intervalstyle = 'sql_standard'");
        until("the short one has expired", || {
            other.flag(&format!("select acquired from lease_acquire('{short}', '1 hour')"))
        });
        assert!(begun.elapsed() >= Duration::from_millis(400));
        // An interval with a sign, as the style writes it.
        let style = interval_styles[index % 4];
        assert!(
            a.flag(&format!(
                "select acquired from lease_acquire('{k} text', (interval '1 day 02:03:04.5')::text::interval)"
            )),
            "{style}"
        );
        assert_eq!(
            watch.text(&format!("select expires_at - acquired_at from lease_holder('{k} text')")),
            "1 day 02:03:04.5"
        );
    }
}

#[test]
fn c39_only_the_holders_ttl_counts() {
    let server = Server::shared();
    let mut a = server.session("c39 a");
    let mut b = server.session("c39 b");
    let k = unique("c39");
    let begun = Instant::now();
    let token = take(&mut a, &k, "6 s", "");
    // B's own short one says nothing about A's.
    let said = acquire(&mut b, &k, "100 ms", "");
    said.refused_by("c39 a", 6.0);
    acquire(&mut b, &k, "100 ms", ", '1500 ms'").refused_by("c39 a", 6.0);
    assert!(begun.elapsed() >= Duration::from_millis(1500));
    assert!(check(&mut a, &k, token) || begun.elapsed() > Duration::from_secs(6));
    let granted = acquire(&mut b, &k, "5 s", ", '1 minute'");
    granted.granted();
    assert_eq!(granted.remaining, Some(5.0));
    assert!(begun.elapsed() >= Duration::from_secs(6), "B waits for A's 6 s: {:?}", begun.elapsed());
    assert!(begun.elapsed() < Duration::from_secs(6 + 10), "{:?}", begun.elapsed());
    // And B's long one doesn't prolong A's.
    let k = unique("c39");
    let begun = Instant::now();
    take(&mut a, &k, "700 ms", "");
    acquire(&mut b, &k, "10 years", "").refused_by("c39 a", 0.7);
    assert!(acquire(&mut b, &k, "1 hour", ", '1 minute'").token.is_some());
    assert!(begun.elapsed() >= Duration::from_millis(700));
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
}

#[test]
fn never_free_before_its_time_and_soon_after() {
    let server = Server::shared();
    let mut a = server.session("ttl a");
    let mut b = server.session("ttl b");
    for (ttl, milliseconds) in [("100 ms", 100), ("150.5 ms", 150), ("777 ms", 777), ("1 s", 1000), ("0.2 s", 200)] {
        for waits in [false, true] {
            let k = unique("ttl");
            let begun = Instant::now();
            let token = take(&mut a, &k, ttl, "");
            if waits {
                acquire(&mut b, &k, "1 hour", ", '1 minute'").granted();
            } else {
                take_when_free(&mut b, &k);
            }
            let took = begun.elapsed();
            assert!(took >= Duration::from_millis(milliseconds), "{ttl}: {took:?}");
            assert!(took < Duration::from_millis(milliseconds + 5000), "{ttl}: {took:?}");
            assert!(!check(&mut a, &k, token));
        }
    }
}

/// It ends by itself, for everyone at the same time, with nobody having called anything.
#[test]
fn what_has_expired_is_shown_nowhere() {
    let server = Server::shared();
    let mut a = server.session("ttl a");
    let k = unique("ttl");
    let token = take(&mut a, &k, "300 ms", "");
    let_pass(310);
    assert!(!check(&mut a, &k, token));
    assert_eq!(owners(&mut a, &k), [""; 0]);
    assert_eq!(shown(&mut a, &k), [""; 0]);
    assert!(!release(&mut a, &k, token));
}

/// Within a transaction and within a statement, too: it's the clock that counts.
#[test]
fn it_expires_in_the_middle_of_a_transaction_and_of_a_statement() {
    let server = Server::shared();
    let mut a = server.session("ttl a");
    let k = unique("ttl");
    let token = take(&mut a, &k, "300 ms", "");
    a.run("begin isolation level repeatable read");
    let early = check(&mut a, &k, token);
    let_pass(310);
    assert!(!check(&mut a, &k, token));
    a.run("commit");
    assert!(early, "unless this machine is far too busy");
    let k = unique("ttl");
    let rows = a.run(&format!(
        "select lease_check('{k}', token), pg_sleep(0.35), lease_check('{k}', token) from lease_acquire('{k}', '300 ms')"
    ));
    assert_eq!((rows[0].get(0), rows[0].get(2)), (Some("t"), Some("f")));
    // Its own transaction may run out of it before the commit.
    a.run("begin");
    let k = unique("ttl");
    let token = take(&mut a, &k, "200 ms", "");
    let_pass(210);
    assert!(!check(&mut a, &k, token));
    a.run("commit");
    assert!(is_free(&mut a, &k));
}

#[test]
fn what_remains_grows_less() {
    let server = Server::shared();
    let mut a = server.session("ttl a");
    let mut b = server.session("ttl b");
    let k = unique("ttl");
    take(&mut a, &k, "1 hour", "");
    let looks = [
        format!("select extract(epoch from remaining) from lease_holder('{k}')"),
        format!("select extract(epoch from remaining) from lock_holders where name = '{k}'"),
        format!("select extract(epoch from remaining) from lease_acquire('{k}', '1 s')"),
        format!("select extract(epoch from retry_after) from lease_acquire('{k}', '1 s')"),
    ];
    let mut last = 3600.0;
    for round in 0..3 {
        for look in &looks {
            let remaining: f64 = b.text(look).parse().expect("seconds");
            assert!(remaining < last && remaining > 3000.0, "round {round}: {look}: {remaining} after {last}");
            last = remaining;
        }
    }
    assert!(b.flag(&format!(
        "select held_for > '0' and held_for < '10 minutes' and acquired_at + held_for <= clock_timestamp() \
            and expires_at - acquired_at = '1 hour' from lock_holders where name = '{k}'"
    )));
}

#[test]
fn who_waits_is_granted_at_the_end_of_the_ttl_though_it_was_shortened_or_prolonged() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let mut a = server.session("ttl a");
    for (ttl, new, milliseconds) in [("1 hour", "500 ms", 500), ("800 ms", "2500 ms", 2500)] {
        let k = unique("ttl");
        let token = take(&mut a, &k, ttl, "");
        let waiting = server.session("ttl b").background(&acquire_sql(&k, "1 hour", ", '1 minute'"));
        until_queued(&mut watch, &k, 1);
        let begun = Instant::now();
        renew(&mut a, &k, token, &format!(", '{new}'"));
        let (_, rows) = waiting.end();
        Said::from_rows(&rows.expect("no error")).granted();
        let took = begun.elapsed();
        assert!(took >= Duration::from_millis(milliseconds), "{ttl}, then {new}: {took:?}");
        assert!(took < Duration::from_millis(milliseconds + 6000), "{ttl}, then {new}: {took:?}");
    }
}
