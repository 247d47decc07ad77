//! Taking a lease: what a grant and a refusal say, and that a refusal leaves no trace. Cases C03, C05 and C38.

use super::{
    Said, acquire, acquire_sql, check, is_free, owners, release, renew, shown, stored, take, take_when_free,
    until_queued, waiters,
};
use crate::pg_test::support::{Running, Server, Session, SqlError, let_pass, literal, unique, until};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

#[test]
fn a_grant_says_all_about_itself() {
    let server = Server::shared();
    let mut a = server.session("lease a");
    for (ttl, seconds) in [
        ("100 ms", 0.1),
        ("1500.25 ms", 1.500_25),
        ("30 s", 30.0),
        ("01:02:03.004005", 3_723.004_005),
        ("1 day", 86_400.0),
        ("2 days -1 hour", 169_200.0),
        ("3650 days", 315_360_000.0),
    ] {
        let k = unique("lease");
        let before = a.text("select clock_timestamp()");
        let said = acquire(&mut a, &k, ttl, ", owner => 'the owner'");
        said.granted();
        assert_eq!(said.remaining, Some(seconds), "{ttl}");
        assert_eq!(said.holder.as_deref(), Some("the owner"));
        let expires_at = said.expires_at.expect("a time");
        assert!(
            a.flag(&format!(
                "select '{expires_at}'::timestamptz - '{before}'::timestamptz >= interval '{seconds} s' \
                    and '{expires_at}'::timestamptz - clock_timestamp() <= interval '{seconds} s'"
            )),
            "{ttl}: {before} and {expires_at}"
        );
        if seconds > 1.0 {
            assert_eq!(
                a.text(&format!("select expires_at from lease_holder('{k}')")),
                expires_at,
                "{ttl}: the same wherever it is shown"
            );
        }
    }
}

#[test]
fn a_refusal_says_who_has_it_and_when_it_could_be_free() {
    let server = Server::shared();
    let mut a = server.session("lease a");
    let mut b = server.session("lease b");
    let k = unique("lease");
    let token = take(&mut a, &k, "1 hour", ", owner => 'first'");
    for more in ["", ", '0'", ", '50 ms'", ", '0', 'first'", ", owner => 'second', payload => '{}'"] {
        let said = acquire(&mut b, &k, "1 s", more);
        said.refused_by("first", 3600.0);
        assert!(said.remaining.is_some_and(|remaining| remaining > 3500.0), "{said:?}");
        assert_eq!(said.expires_at, Some(b.text(&format!("select expires_at from lease_holder('{k}')"))));
    }
    assert!(check(&mut a, &k, token));
    assert_eq!(owners(&mut b, &k), ["first"]);
}

#[test]
fn a_wait_ends_at_its_timeout_and_not_before() {
    let server = Server::shared();
    let mut a = server.session("lease a");
    let mut b = server.session("lease b");
    let k = unique("lease");
    take(&mut a, &k, "1 hour", "");
    for milliseconds in [1, 120, 700] {
        let begun = Instant::now();
        acquire(&mut b, &k, "1 s", &format!(", '{milliseconds} ms'")).refused_by("lease a", 3600.0);
        let took = begun.elapsed();
        assert!(took >= Duration::from_millis(milliseconds), "{milliseconds} ms: {took:?}");
        assert!(took < Duration::from_millis(milliseconds + 5000), "{milliseconds} ms: {took:?}");
    }
    assert_eq!(waiters(&mut a, &k), 0);
}

#[test]
fn a_free_lease_is_granted_whatever_the_timeout() {
    let server = Server::shared();
    let mut a = server.session("lease a");
    a.run("set lock_timeout = '1 s'");
    for timeout in ["'0'", "'1 ms'", "'24 days'", "null", "'0.4 ms'"] {
        let k = unique("lease");
        let token = take(&mut a, &k, "1 hour", &format!(", {timeout}"));
        assert!(check(&mut a, &k, token), "{timeout}");
    }
    let k = unique("lease");
    for timeout in ["", ", null", ", '10 s'"] {
        let token = a.int(&format!("call lease_acquire_wait('{k}', '1 hour'{timeout})"));
        assert!(check(&mut a, &k, token), "{timeout}");
        assert!(release(&mut a, &k, token));
    }
    assert_eq!(a.text("show lock_timeout"), "1s");
}

/// The form without a snapshot takes the same arguments and makes the same lease.
#[test]
fn the_call_form_grants_the_same_lease() {
    let server = Server::shared();
    let mut a = server.session("lease a");
    let k = unique("lease");
    let token = a.int(&format!(
        "call lease_acquire_wait('{k}', '1 hour', '1 s', 'me', '{{\"host\": 1}}', permits => 2, bound => true)"
    ));
    let rows = a.run(&format!(
        "select owner, payload, permits, remaining between '59 minutes' and '1 hour' from lease_holder('{k}')"
    ));
    let row: Vec<_> = (0..4).map(|column| rows[0].get(column)).collect();
    assert_eq!(row, [Some("me"), Some("{\"host\": 1}"), Some("2"), Some("t")]);
    assert_eq!(
        a.text(&format!("select concat_ws(' ', pid, token) from lock_holders where name = '{k}'")),
        format!("{} {token}", a.pid),
        "bound to this session"
    );
    // Refused at its timeout: NULL, not an error.
    let k = unique("lease");
    take(&mut a, &k, "1 hour", "");
    for timeout in ["0", "60 ms"] {
        assert_eq!(a.maybe(&format!("call lease_acquire_wait('{k}', '1 hour', '{timeout}')")), None);
    }
    // What stands in the INOUT argument doesn't matter.
    assert_eq!(a.maybe(&format!("call lease_acquire_wait('{k}', '1 hour', '0', token => 7)")), None);
}

#[test]
fn tokens_rise_from_grant_to_grant_whatever_the_name() {
    let server = Server::shared();
    let mut a = server.session("lease a");
    let mut b = server.session("lease b");
    let mut last = 0;
    for round in 0..20 {
        let session = if round % 2 == 0 { &mut a } else { &mut b };
        let k = unique("lease");
        let token = match round % 4 {
            3 => session.int(&format!("call lease_acquire_wait('{k}', '1 hour')")),
            _ => take(session, &k, "1 hour", ""),
        };
        assert!(token > last, "round {round}: {token} after {last}");
        last = token;
        renew(session, &k, token, "");
        assert!(check(session, &k, token), "a renewal keeps the token");
        if round % 3 == 0 {
            assert!(release(session, &k, token));
            let again = take(session, &k, "1 hour", "");
            assert!(again > token);
            last = again;
        }
    }
    // Many in one statement.
    let stem = unique("lease");
    assert!(a.flag(&format!(
        "select bool_and(token > before) and min(token) > {last} \
           from (select token, lag(token, 1, 0::bigint) over (order by i) as before \
                   from generate_series(1, 100) as i, lease_acquire('{stem} ' || i, '1 hour')) as t"
    )));
}

/// In a database where none was ever granted, the first ones come all at once.
#[test]
fn tokens_of_a_new_database_are_all_different() {
    for _ in 0..5 {
        let database = Server::shared().new_database("lease_tokens", "UTF8");
        let barrier = Arc::new(Barrier::new(8));
        let running: Vec<_> = (0..8)
            .map(|number| {
                let barrier = barrier.clone();
                database.session("lease a").spawn(move |session| {
                    barrier.wait();
                    (0..20).map(|round| take(session, &format!("{number} {round}"), "1 hour", "")).collect::<Vec<_>>()
                })
            })
            .collect();
        let tokens: Vec<Vec<i64>> = running.into_iter().map(|running| running.end().1).collect();
        assert!(tokens.iter().all(|tokens| tokens.is_sorted()), "{tokens:?}");
        let mut all = tokens.concat();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 160);
        assert!(all.iter().all(|token| token >> 42 == all[0] >> 42), "one epoch: {all:?}");
        assert!(all[0] & ((1 << 42) - 1) > 1_000_000_000, "after the jump to the clock: {all:?}");
    }
}

/// A token is `epoch << 42 | counter`, and the counter is never far behind the milliseconds since 2025.
#[test]
fn a_token_has_its_epoch_and_its_counter() {
    let server = Server::shared();
    let mut a = server.session("lease a");
    let now = "select (extract(epoch from clock_timestamp() - timestamptz '2025-01-01 00:00Z') * 1000)::bigint";
    let before = a.int(now);
    let token = take(&mut a, &unique("lease"), "1 s", "");
    assert!(token >> 42 >= 1, "{token}");
    assert!(token & ((1 << 42) - 1) >= before - 60_000, "{token}");
}

#[test]
fn c03_the_same_session_asks_again_and_is_refused_like_anyone() {
    let server = Server::shared();
    let mut a = server.session("c03 two tasks");
    let k = unique("c03");
    let token = take(&mut a, &k, "1 hour", ", owner => 'one'");
    for more in ["", ", owner => 'one'", ", owner => 'other'", ", '30 ms'", ", bound => true", ", '0', 'one', '{}', 1"]
    {
        acquire(&mut a, &k, "1 hour", more).refused_by("one", 3600.0);
    }
    assert_eq!(a.maybe(&format!("call lease_acquire_wait('{k}', '1 hour', '30 ms', 'one')")), None);
    // In one transaction, and in one statement, too.
    let k2 = unique("c03");
    a.run("begin");
    take(&mut a, &k2, "1 hour", ", owner => 'one'");
    acquire(&mut a, &k2, "1 hour", ", owner => 'one'").refused();
    a.run("commit");
    let k3 = unique("c03");
    assert_eq!(
        a.column(&format!(
            "select acquired from generate_series(1, 3) as i, lease_acquire('{k3}' || left(i::text, 0), '1 hour')"
        )),
        ["t", "f", "f"]
    );
    // One acquire, one release.
    assert!(release(&mut a, &k, token));
    assert!(!release(&mut a, &k, token));
    assert!(is_free(&mut a, &k));
}

#[test]
fn c05_a_hundred_leases_outlive_the_session_that_took_them() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let stem = unique("c05");
    let mut a = server.session("c05 a");
    let pid = a.pid;
    let tokens: Vec<i64> = (a.column(&format!(
        "select token from generate_series(1, 100) as i, lease_acquire('{stem} ' || i, '1 hour', owner => 'a' || i) \
          order by i"
    )))
    .iter()
    .map(|token| token.parse().expect("a token"))
    .collect();
    let stem_short = unique("c05 short");
    let begun = Instant::now();
    a.run(&format!("select lease_acquire('{stem_short} ' || i, '2 s') from generate_series(1, 100) as i"));
    drop(a);
    watch.until_gone(pid);
    let live = |watch: &mut Session, stem: &str| {
        watch.int(&format!(
            "select count(*) from generate_series(1, 100) as i, lease_holder('{stem} ' || i) where owner <> ''"
        ))
    };
    let short = live(&mut watch, &stem_short);
    assert!(short == 100 || begun.elapsed() >= Duration::from_secs(2), "{short} live after {:?}", begun.elapsed());
    assert_eq!(live(&mut watch, &stem), 100);
    assert_eq!(
        watch.int(&format!(
            "select count(*) from lock_holders where name like '{stem} %' and kind = 'lease' and pid is null"
        )),
        100
    );
    for (index, token) in tokens.iter().enumerate() {
        let name = format!("{stem} {}", index + 1);
        assert!(check(&mut watch, &name, *token));
        renew(&mut watch, &name, *token, "");
        acquire(&mut watch, &name, "1 hour", "").refused_by(&format!("a{}", index + 1), 3600.0);
        assert!(release(&mut watch, &name, *token));
        assert!(is_free(&mut watch, &name));
    }
    until("they end at their time", || live(&mut watch, &stem_short) == 0);
    assert!(begun.elapsed() >= Duration::from_secs(2));
}

#[test]
fn owner_is_the_application_name_else_the_role() {
    let server = Server::shared();
    let role = server.new_role("lease_owner");
    let mut a = server.session_as(&role, "lease owner");
    let holder = |session: &mut Session, more: &str| {
        let k = unique("lease");
        let said = acquire(session, &k, "1 hour", more);
        said.granted();
        let holder = said.holder.expect("a holder");
        assert_eq!(owners(session, &k), [holder.as_str()]);
        assert_eq!(session.text(&format!("select owner from lock_holders where name = '{k}'")), holder);
        acquire(session, &k, "1 hour", "").refused_by(&holder, 3600.0);
        holder
    };
    assert_eq!(holder(&mut a, ""), "lease owner");
    assert_eq!(holder(&mut a, ", owner => null"), "lease owner");
    a.run("set application_name = 'another name'");
    assert_eq!(holder(&mut a, ""), "another name");
    a.run("set application_name = ''");
    assert_eq!(holder(&mut a, ""), role);
    for owner in ["me", "", " ", "it''s\nme", "ö 日本 🔒"] {
        let shown = owner.replace("''", "'");
        assert_eq!(holder(&mut a, &format!(", owner => '{owner}'")), shown);
    }
    // A long one is not cut: it fits, or is refused.
    let digits = a.text("select left(string_agg(md5(i::text), ''), 1024) from generate_series(1, 40) as i");
    for long in ["x".repeat(1024), "é".repeat(512), digits] {
        assert_eq!(holder(&mut a, &format!(", owner => '{long}'")), long);
        let k = unique("lease");
        let token = a.int(&format!("call lease_acquire_wait('{k}', '1 hour', owner => '{long}')"));
        assert_eq!(owners(&mut a, &k), [long.as_str()]);
        assert!(a.flag(&format!("select lease_request('{k}', '{long}')")));
        assert_eq!(renew(&mut a, &k, token, "").requested.as_deref(), Some(long.as_str()));
        assert_eq!(a.maybe(&format!("call lease_acquire_wait('{k}', '1 hour', '50 ms')")), None);
        a.fails(&format!("select lease_request('{k}', '{long}x')")).is("22001").message_has("reason");
        assert_eq!(renew(&mut a, &k, token, "").requested.as_deref(), Some(long.as_str()));
        assert!(release(&mut a, &k, token));
        a.fails(&acquire_sql(&k, "1 hour", &format!(", owner => '{long}x'"))).is("22001").message_has("owner");
        a.fails(&format!("call lease_acquire_wait('{k}', '1 hour', owner => '{long}x')")).is("22001");
        assert!(is_free(&mut a, &k));
    }
    // The procedure does the same.
    let k = unique("lease");
    a.run("set application_name = 'by call'");
    a.run(&format!("call lease_acquire_wait('{k}', '1 hour')"));
    assert_eq!(owners(&mut a, &k), ["by call"]);

    // With SET ROLE, the role is the one that is set.
    let mut admin = server.session("");
    assert_eq!(holder(&mut admin, ""), server.user);
    admin.run(&format!("set role {role}"));
    assert_eq!(holder(&mut admin, ""), role);
}

#[test]
fn c38_eight_at_once_and_exactly_one_is_granted() {
    const SESSIONS: usize = 8;
    let server = Server::shared();
    let mut watch = server.session("watch");
    let stem = unique("c38");
    for batch in 0..4 {
        let barrier = Arc::new(Barrier::new(SESSIONS));
        let running: Vec<_> = (0..SESSIONS)
            .map(|number| {
                let barrier = barrier.clone();
                let stem = stem.clone();
                server.session("c38").spawn(move |session| {
                    // For each round: the token or none, and whether a transaction id was assigned.
                    (0..250)
                        .map(|round| {
                            let name = format!("{stem} {batch} {round}");
                            let call = acquire_sql(&name, "1 hour", &format!(", owner => '{number}'"));
                            let xid = "select pg_current_xact_id_if_assigned()";
                            // A commit within the race, and one after it; a try, and one that waits a little.
                            let sql = match batch {
                                0 | 1 => format!("begin; {call}; {xid}; commit"),
                                2 => format!("with t as materialized ({call}) select *, ({xid}) from t"),
                                _ => format!("begin; {}; {xid}; commit", call.replace(", owner", ", '20 ms', owner")),
                            };
                            barrier.wait();
                            let mut rows = session.run(&sql);
                            let xid = rows.last().and_then(|row| row.get(row.len() - 1)).is_some();
                            rows.truncate(1);
                            (Said::from_rows(&rows).token, xid)
                        })
                        .collect::<Vec<_>>()
                })
            })
            .collect();
        until("all rounds are over", || running.iter().all(Running::finished));
        let answers: Vec<Vec<_>> = running.into_iter().map(|running| running.end().1).collect();
        let mut last = 0;
        for round in 0..250 {
            let of_round: Vec<_> = answers.iter().map(|answers| answers[round]).collect();
            let winners: Vec<_> = of_round.iter().filter_map(|(token, _)| *token).collect();
            assert_eq!(winners.len(), 1, "batch {batch}, round {round}: {of_round:?}");
            assert!(winners[0] > last, "tokens rise from round to round");
            last = winners[0];
            for (token, xid) in of_round {
                assert_eq!(xid, token.is_some(), "batch {batch}, round {round}: who has a transaction id");
            }
        }
        let all = watch
            .int(&format!("select count(*) from lock_holders where kind = 'lease' and name like '{stem} {batch} %'"));
        assert_eq!(all, 250);
    }
}

/// The same over leases that have expired, whose rows are still there.
#[test]
fn c38_eight_at_once_over_what_has_expired() {
    const SESSIONS: usize = 8;
    const ROUNDS: usize = 150;
    let server = Server::shared();
    let stem = unique("c38");
    let mut watch = server.session("watch");
    for permits in [1, 3] {
        watch.run(&format!(
            "select lease_acquire('{stem} {permits} ' || i, '100 ms', permits => {permits}) from generate_series(1, {ROUNDS}) as i"
        ));
        let_pass(110);
        let barrier = Arc::new(Barrier::new(SESSIONS));
        let running: Vec<_> = (0..SESSIONS)
            .map(|_| {
                let (barrier, stem) = (barrier.clone(), stem.clone());
                server.session("c38").spawn(move |session| {
                    (1..=ROUNDS)
                        .map(|round| {
                            let name = format!("{stem} {permits} {round}");
                            let call = acquire_sql(&name, "1 hour", &format!(", permits => {permits}"));
                            let sql = format!("begin; {call}; select pg_current_xact_id_if_assigned(); commit");
                            barrier.wait();
                            let mut rows = session.run(&sql);
                            let xid = rows.last().and_then(|row| row.get(0)).is_some();
                            rows.truncate(1);
                            (Said::from_rows(&rows).token, xid)
                        })
                        .collect::<Vec<_>>()
                })
            })
            .collect();
        until("all rounds are over", || running.iter().all(Running::finished));
        let answers: Vec<Vec<_>> = running.into_iter().map(|running| running.end().1).collect();
        for round in 0..ROUNDS {
            let of_round: Vec<_> = answers.iter().map(|answers| answers[round]).collect();
            let winners = of_round.iter().filter(|(token, _)| token.is_some()).count();
            assert!((1..=permits).contains(&winners), "round {round}: {of_round:?}");
            assert!(of_round.iter().all(|(token, xid)| token.is_some() == *xid), "round {round}: {of_round:?}");
        }
    }
}

/// One name over and over: takeovers of a lease that was released, by eight sessions.
#[test]
fn c38_never_two_at_a_time_over_one_name() {
    let server = Server::shared();
    let k = unique("c38");
    let running: Vec<_> = (0..8)
        .map(|number| {
            let k = k.clone();
            server.session("c38").spawn(move |session| {
                let mut tokens = Vec::new();
                for round in 0..60 {
                    // Some wait in the queue, some only try.
                    let timeout = if (round + number) % 3 == 0 { "0" } else { "30 s" };
                    let Some(token) = acquire(session, &k, "1 hour", &format!(", '{timeout}'")).token else { continue };
                    assert_eq!(session.int(&format!("select count(*) from lease_holder('{k}')")), 1);
                    assert!(check(session, &k, token), "nobody took it over");
                    assert!(release(session, &k, token));
                    tokens.push(token);
                }
                tokens
            })
        })
        .collect();
    until("all rounds are over", || running.iter().all(Running::finished));
    let mut tokens: Vec<i64> = running.into_iter().flat_map(|running| running.end().1).collect();
    let grants = tokens.len();
    tokens.sort_unstable();
    tokens.dedup();
    assert_eq!(tokens.len(), grants, "no token twice");
    assert!(grants >= 8 * 40, "who waits is served: {grants}");
    assert!(is_free(&mut server.session("c38"), &k));
}

#[test]
fn c38_a_refused_try_assigns_no_transaction_id_and_changes_no_row() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let mut a = server.session("c38 a");
    let mut b = server.session("c38 b");
    let k = unique("c38");
    let kept = unique("c38 kept");
    take(&mut a, &k, "1 hour", ", payload => '{\"a\": 1}'");
    let token = take(&mut a, &kept, "1 hour", "");
    a.run(&format!("select lease_release('{kept}', {token}, '1 hour')"));
    for name in [&k, &kept] {
        let before = stored(&mut watch, name);
        assert_eq!(before.len(), 1);
        for more in
            ["", ", '30 ms'", ", owner => 'x', payload => '{\"b\": 2}'", ", bound => true", ", '30 ms', bound => true"]
        {
            for isolation in ["read committed", "repeatable read", "serializable"] {
                b.run(&format!("begin isolation level {isolation}"));
                acquire(&mut b, name, "1 s", more).refused();
                assert_eq!(b.maybe("select pg_current_xact_id_if_assigned()"), None, "{more}");
                assert_eq!(
                    b.int(&format!(
                        "select count(*) from pg_locks where pid = {} and locktype = 'transactionid'",
                        b.pid
                    )),
                    0
                );
                b.run("commit");
                assert_eq!(stored(&mut watch, name), before, "{more}");
            }
        }
        // An error over the number of permits, a look, and a call form that gives up, too.
        b.run("begin");
        b.fails(&acquire_sql(name, "1 s", ", permits => 2")).is("22023");
        b.run("rollback; begin");
        b.run(&format!("select lease_check('{name}', 1), lease_release('{name}', 1); select lease_holder('{name}')"));
        assert_eq!(b.maybe("select pg_current_xact_id_if_assigned()"), None);
        b.run("commit");
        assert_eq!(b.maybe(&format!("call lease_acquire_wait('{name}', '1 s', '30 ms')")), None);
        assert_eq!(stored(&mut watch, name), before);
    }
    assert_eq!(watch.locks_of(b.pid), 0, "nothing is left of the queue");
}

/// The first one must be able to fail: this is what a grant leaves.
#[test]
fn c38_a_grant_and_a_renewal_do_assign_one() {
    let server = Server::shared();
    let mut a = server.session("c38");
    let k = unique("c38");
    a.run("begin");
    let token = take(&mut a, &k, "1 hour", "");
    assert!(a.maybe("select pg_current_xact_id_if_assigned()").is_some());
    a.run("commit");
    let before = stored(&mut a, &k);
    renew(&mut a, &k, token, "");
    assert_ne!(stored(&mut a, &k), before);
}

#[test]
fn a_refused_try_waits_for_nothing() {
    let server = Server::shared();
    let mut a = server.session("lease a");
    let mut b = server.session("lease b");
    b.run("set statement_timeout = '20 s'");
    let k = unique("lease");
    let token = take(&mut a, &k, "1 hour", "");
    // Whatever a transaction under way has done to the lease.
    for work in [
        format!("select lease_renew('{k}', {token})"),
        format!("select lease_guard('{k}', {token})"),
        format!("select lease_request('{k}', 'please')"),
        format!("select lease_release('{k}', {token})"),
        format!("select lease_release('{k}', {token}, '1 hour')"),
        format!("select lease_break('{k}')"),
    ] {
        a.run(&format!("begin; {work}"));
        for _ in 0..2 {
            acquire(&mut b, &k, "1 hour", "").refused();
        }
        a.run("rollback");
        assert!(check(&mut a, &k, token), "{work}");
    }
}

/// They were first, whatever the holder's time is.
#[test]
fn a_try_while_someone_queues_is_told_to_come_again_soon() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let mut a = server.session("lease a");
    let mut b = server.session("lease b");
    for permits in [1, 2] {
        let k = unique("lease");
        let more = format!(", permits => {permits}");
        let tokens: Vec<i64> = (0..permits).map(|_| take(&mut a, &k, "1 hour", &more)).collect();
        let waiting = server.session("lease waiter").background(&acquire_sql(
            &k,
            "1 hour",
            &format!("{more}, timeout => '1 minute'"),
        ));
        until_queued(&mut watch, &k, 1);
        let said = acquire(&mut b, &k, "1 hour", &more);
        assert_eq!(said.refused().retry_after, Some(0.1), "{said:?}");
        assert!(release(&mut a, &k, tokens[0]));
        waiting.end().1.expect("granted");
    }
}

#[test]
fn null_timeout_waits_as_the_server_would() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let mut a = server.session("lease holder");
    let k = unique("lease");
    let token = take(&mut a, &k, "1 hour", ", owner => 'the owner of it'");
    let mut b = server.session("lease b");
    b.run("set lock_timeout = '300 ms'");
    let begun = Instant::now();
    b.fails(&acquire_sql(&k, "1 hour", ", null")).is("55P03").message_has(&k).detail_has("the owner of it");
    assert!(begun.elapsed() >= Duration::from_millis(300));
    assert_eq!(waiters(&mut watch, &k), 0);
    assert_eq!(b.text("show lock_timeout"), "300ms");
    // A timeout that is given wins over it, in both directions.
    let begun = Instant::now();
    acquire(&mut b, &k, "1 hour", ", '700 ms'").refused();
    assert!(begun.elapsed() >= Duration::from_millis(700));
    b.run("set lock_timeout = '1 h'");
    let begun = Instant::now();
    acquire(&mut b, &k, "1 hour", ", '100 ms'").refused();
    assert!(begun.elapsed() < Duration::from_secs(20));

    // Without one: for ever.
    b.run("set lock_timeout = 0");
    let waiting = b.background(&acquire_sql(&k, "1 hour", ", null"));
    until_queued(&mut watch, &k, 1);
    assert!(release(&mut a, &k, token));
    let (mut b, rows) = waiting.end();
    let token = Said::from_rows(&rows.expect("no error")).granted();
    assert!(check(&mut b, &k, token));
}

#[test]
fn statement_timeout_and_cancel_end_a_wait_and_leave_no_trace() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let mut a = server.session("lease holder");
    let k = unique("lease");
    let token = take(&mut a, &k, "1 hour", "");
    let mut b = server.session("lease b");
    b.run("set statement_timeout = '200 ms'");
    for call in [acquire_sql(&k, "1 hour", ", '1 hour'"), format!("call lease_acquire_wait('{k}', '1 hour')")] {
        b.fails(&call).is("57014");
        assert_eq!(waiters(&mut watch, &k), 0);
        assert_eq!(watch.locks_of(b.pid), 0);
    }
    b.run("set statement_timeout = 0");
    for call in [acquire_sql(&k, "1 hour", ", '1 hour'"), format!("call lease_acquire_wait('{k}', '1 hour')")] {
        let waiting = b.background(&call);
        until_queued(&mut watch, &k, 1);
        watch.run(&format!("select pg_cancel_backend({})", waiting.pid));
        let (session, result) = waiting.end();
        b = session;
        result.expect_err("cancelled").is("57014");
        assert_eq!(waiters(&mut watch, &k), 0);
        assert_eq!(watch.locks_of(b.pid), 0);
    }
    // The next in line isn't kept by any of it.
    assert!(release(&mut a, &k, token));
    take(&mut b, &k, "1 hour", "");
}

#[test]
fn odd_names_are_names() {
    let server = Server::shared();
    let mut a = server.session("lease a");
    let mut b = server.session("lease b");
    let stem = unique("lease");
    let mut names: Vec<String> = [
        " ",
        "\t",
        "\n",
        "'",
        "\"",
        "\\",
        "%s%n",
        "{}",
        "$1",
        "\u{7f}",
        "\u{1}",
        "\u{feff}",
        "::",
        "/",
        "null",
        "é",
        "e\u{301}",
        "日本:ロック",
        "🔒",
    ]
    .iter()
    .map(|odd| format!("{odd}{stem}{odd}"))
    .collect();
    names.push(format!("{stem}{}", "x".repeat(1024 - stem.len())));
    names.push(format!("{stem}{}", "é".repeat((1024 - stem.len()) / 2)));
    for name in &names {
        let token = take(&mut a, name, "1 hour", "");
        acquire(&mut b, name, "1 hour", "").refused_by("lease a", 3600.0);
        assert!(check(&mut b, name, token), "{name:?}");
        assert_eq!(renew(&mut b, name, token, "").remaining, 3600.0);
        assert_eq!(shown(&mut b, name), ["held lease a"], "{name:?}");
        b.run(&format!("begin; select lease_guard({}, {token}); rollback", literal(name)));
        assert!(b.flag(&format!("select lease_request({}, 'please')", literal(name))));
        let lost: SqlError = b.fails(&format!("select lease_renew({}, 1)", literal(name)));
        lost.is("55006").message_has(name);
    }
    // They are all live at once: no two are one.
    assert_eq!(
        b.int(&format!("select count(*) from lock_holders where kind = 'lease' and name like '%{stem}%'")),
        names.len() as i64
    );
    for name in &names {
        let domain = name.split_once(':').map_or("", |(domain, _)| domain);
        assert_eq!(b.text(&format!("select domain from lock_holders where name = {}", literal(name))), domain);
        assert_eq!(b.int(&format!("select lease_break({})", literal(name))), 1);
    }
}

#[test]
fn names_that_look_alike_are_two_leases() {
    let server = Server::shared();
    let mut a = server.session("lease a");
    let stem = unique("lease");
    for (one, other) in [
        ("Job", "job"),
        ("a", "a "),
        ("\u{e9}", "e\u{301}"),
        ("ﬁ", "fi"),
        ("a", "a\u{200b}"),
        ("a:b", "a :b"),
        ("a:b", "b"),
    ] {
        let (one, other) = (format!("{stem}{one}"), format!("{stem}{other}"));
        let token = take(&mut a, &one, "1 hour", "");
        let token_of_other = take(&mut a, &other, "1 hour", "");
        // A token is good for its name only.
        assert!(!check(&mut a, &one, token_of_other));
        assert!(!release(&mut a, &other, token));
        assert!(release(&mut a, &one, token));
        assert!(check(&mut a, &other, token_of_other));
        assert!(release(&mut a, &other, token_of_other));
    }
}

#[test]
fn a_latin1_database_has_the_same_names() {
    let server = Server::shared();
    let latin1 = server.new_database("lease_latin1", "LATIN1");
    let mut a = latin1.session("größer");
    for name in ["é", "dömäne:ß", &"é".repeat(512)] {
        let token = take(&mut a, name, "1 hour", "");
        assert!(check(&mut a, name, token));
        assert_eq!(owners(&mut a, name), [a.text("show application_name")]);
        assert_eq!(a.column("select name from lock_holders where kind = 'lease'"), [name]);
        let error = a.fails(&format!("select lease_renew('{name}', 1)"));
        error.is("55006").message_has(name);
        // The key is that of the name in UTF-8.
        assert_eq!(
            a.text(&format!("select key from _lease where name = '{name}'")),
            server
                .session("lease")
                .text(&format!("select ((classid::bigint << 32) | objid::bigint)::text from named_lock_key('{name}')")),
            "{name}"
        );
        assert!(release(&mut a, name, token));
    }
    a.fails(&acquire_sql(&format!("{}x", "é".repeat(512)), "1 hour", "")).is("22001");
}

/// Nothing is known of a SQL_ASCII database's bytes: they are a name as they are.
#[test]
fn a_sql_ascii_database_has_names_of_any_bytes() {
    let database = Server::shared().new_database("lease_ascii", "SQL_ASCII");
    let mut a = database.session("lease a");
    let mut b = database.session("lease b");
    for name in ["'k ' || chr(255)", "'k ' || chr(254)", "'é'", "chr(195)", "repeat(chr(200), 1024)"] {
        let token = a.int(&format!("select token from lease_acquire({name}, '1 hour', owner => 'o ' || chr(255))"));
        assert!(b.flag(&format!("select lease_check({name}, {token})")), "{name}");
        assert!(b.flag(&format!("select not acquired from lease_acquire({name}, '1 hour')")), "{name}");
        assert!(b.flag(&format!("select remaining = '2 hours' from lease_renew({name}, {token}, '2 hours')")));
        assert!(b.flag(&format!("select owner = 'o ' || chr(255) from lease_holder({name})")), "{name}");
        assert_eq!(
            b.int(&format!(
                "select count(*) from lock_holders where kind = 'lease' and name = {name} and token = {token}"
            )),
            1,
            "{name}"
        );
        assert_eq!(b.fails(&format!("select lease_renew({name}, 1)")).code, "55006", "{name}");
    }
    a.fails("select lease_acquire(repeat(chr(200), 1025), '1 hour')").is("22001");
    assert_eq!(a.int("select count(*) from lock_holders where kind = 'lease'"), 5);
}

/// Two names with one key: while the one is live, the other is refused, and never taken for the same.
#[test]
fn names_that_clash_are_refused() {
    const CLASH: (&str, &str) = ("order-36325", "M0plytOy");
    let database = Server::shared().new_database("lease_clash", "UTF8");
    let mut watch = database.session("watch");
    let mut a = database.session("lease a");
    let mut b = database.session("lease b");
    for (held, asked) in [CLASH, (CLASH.1, CLASH.0)] {
        let token = take(&mut a, held, "1 hour", ", permits => 2");
        for more in ["", ", '50 ms'", ", null", ", permits => 2", ", bound => true"] {
            b.fails(&acquire_sql(asked, "1 hour", more)).is("54000").message_has(asked);
            assert_eq!(watch.locks_of(b.pid), 0, "{more}");
        }
        b.fails(&format!("call lease_acquire_wait('{asked}', '1 hour')")).is("54000").message_has(asked);
        // The other functions know the two apart.
        assert!(!check(&mut b, asked, token));
        assert!(!release(&mut b, asked, token));
        assert_eq!(owners(&mut b, asked), [""; 0]);
        assert_eq!(b.int(&format!("select lease_break('{asked}')")), 0);
        assert!(!b.flag(&format!("select lease_request('{asked}')")));
        b.fails(&format!("select lease_renew('{asked}', {token})")).is("55000").message_has(asked);
        b.fails(&format!("select lease_guard('{asked}', {token})")).is("55000").message_has(asked);
        assert!(check(&mut a, held, token));
        assert_eq!(shown(&mut watch, held), ["held lease a"]);
        assert!(release(&mut a, held, token));
        // Then it is a name like any other.
        let token = take(&mut b, asked, "200 ms", "");
        let_pass(250);
        let other = take(&mut a, held, "1 hour", "");
        assert!(!check(&mut a, asked, token));
        assert!(release(&mut a, held, other));
        assert!(!release(&mut a, asked, token));
    }
    // Also while the first grant is not committed yet: never both.
    a.run("begin");
    take(&mut a, CLASH.0, "1 hour", "");
    match b.query(&acquire_sql(CLASH.1, "1 hour", "")) {
        Ok(rows) => {
            Said::from_rows(&rows).refused();
        }
        Err(error) => {
            error.is("54000");
        }
    }
    a.run("commit");
    b.fails(&acquire_sql(CLASH.1, "1 hour", "")).is("54000");
}

/// A lease and a lock of one name have nothing to do with each other.
#[test]
fn a_named_lock_of_the_same_name_is_another_thing() {
    let server = Server::shared();
    let mut a = server.session("lease a");
    let mut b = server.session("lease b");
    let k = unique("lease");
    let token = take(&mut a, &k, "1 hour", "");
    assert!(b.flag(&format!("select named_lock('{k}', '0')")));
    assert!(a.flag(&format!("select named_lock('{k} 2', '0')")));
    take(&mut b, &format!("{k} 2"), "1 hour", "");
    a.run(&format!("begin; select lease_guard('{k}', {token})"));
    assert!(b.flag(&format!("select named_xact_lock('{k}', '0')")));
    a.run("commit");
    assert_eq!(
        a.column(&format!("select kind from lock_holders where name = '{k}' order by kind")),
        ["lease", "session"]
    );
    assert_eq!(b.int("select named_unlock_all()"), 1);
    assert!(check(&mut b, &k, token));
}

/// Rows of ended leases are cleared away by later calls, of other names too.
#[test]
fn rows_of_ended_leases_go() {
    let database = Server::shared().new_database("lease_rows", "UTF8");
    let mut a = database.session("lease a");
    let rows = "select count(*) from _lease";
    a.run(
        "select lease_release(k, token) from (select 'r' || i from generate_series(1, 50) as i) as n(k), \
           lateral lease_acquire(k, '1 hour')",
    );
    assert_eq!(a.int(rows), 0, "a release deletes its row");
    a.run("select lease_acquire('e' || i, '1 s') from generate_series(1, 200) as i");
    a.run("select lease_request('e' || i, 'please') from generate_series(1, 200, 3) as i");
    let_pass(1000);
    let keeper = take(&mut a, "keeper", "1 hour", "");
    let_pass(150);
    let mut calls = 0;
    while a.int(rows) > 2 {
        let name = format!("n{calls}");
        let token = take(&mut a, &name, "1 hour", "");
        assert!(release(&mut a, &name, token));
        calls += 1;
        assert!(calls < 5000, "{} rows are left", a.int(rows));
    }
    assert!(check(&mut a, "keeper", keeper));
    // The same name again and again leaves one row.
    for _ in 0..10 {
        take_when_free(&mut a, "again");
        a.run("select lease_break('again')");
    }
    assert!(a.int(rows) <= 3);
}
