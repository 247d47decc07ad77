//! Counting leases: each permit has a token of its own, and never are there more holders than permits.

use super::{
    Said, acquire, acquire_sql, check, guard, is_free, owners, release, renew, renew_fails, shown, take, until_queued,
    waiters,
};
use crate::pg_test::support::{Running, Server, let_pass, unique, until};
use std::sync::{Arc, Barrier, Mutex};

#[test]
fn as_many_grants_as_permits_each_with_a_token_of_its_own() {
    let server = Server::shared();
    let mut a = server.session("permits a");
    let mut b = server.session("permits b");
    for permits in [1, 2, 3, 7] {
        let k = unique("permits");
        let more = |number: usize| format!(", owner => 'o{number}', permits => {permits}");
        let mut tokens = Vec::new();
        for number in 0..permits {
            let session = if number % 2 == 0 { &mut a } else { &mut b };
            // The later, the sooner they expire.
            let ttl = format!("{} minutes", 60 - number);
            let token = take(session, &k, &ttl, &more(number));
            assert!(tokens.iter().all(|earlier| *earlier < token));
            tokens.push(token);
        }
        assert_eq!(owners(&mut b, &k), (0..permits).map(|number| format!("o{number}")).collect::<Vec<_>>());
        assert_eq!(shown(&mut b, &k).len(), permits);
        assert_eq!(b.column(&format!("select distinct permits from lease_holder('{k}')")), [permits.to_string()],);
        // All are taken: the holder that expires first is named.
        for session in [&mut a, &mut b] {
            let said = acquire(session, &k, "1 hour", &more(99));
            said.refused_by(&format!("o{}", permits - 1), 60.0 * (61 - permits) as f64);
        }
        // One goes, one comes, whichever it is.
        for index in 0..permits {
            assert!(release(&mut b, &k, tokens[index]));
            assert!(!release(&mut b, &k, tokens[index]));
            let token = take(&mut a, &k, "1 hour", &more(index));
            assert!(token > *tokens.iter().max().expect("some"));
            tokens[index] = token;
            acquire(&mut b, &k, "1 hour", &more(99)).refused();
            assert_eq!(owners(&mut b, &k).len(), permits);
        }
        assert_eq!(a.int(&format!("select lease_break('{k}')")), permits as i64);
        assert!(is_free(&mut b, &k));
    }
}

#[test]
fn each_permit_is_renewed_guarded_kept_and_expires_for_itself() {
    let server = Server::shared();
    let mut a = server.session("permits a");
    let k = unique("permits");
    let more = ", permits => 4";
    let first = take(&mut a, &k, "1 hour", more);
    let second = take(&mut a, &k, "300 ms", more);
    let third = take(&mut a, &k, "1 hour", &format!("{more}, payload => '3'"));
    let fourth = take(&mut a, &k, "1 hour", more);
    let of_first =
        format!("select expires_at from lock_holders where kind = 'lease' and name = '{k}' and token = {first}");
    let before = a.text(&of_first);
    assert_eq!(renew(&mut a, &k, third, ", '2 hours'").remaining, 7200.0);
    guard(&mut a, &k, first);
    assert!(a.flag(&format!("select lease_release('{k}', {fourth}, '1 hour')")));
    let_pass(310);
    renew_fails(&mut a, &k, second).is("55000");
    renew_fails(&mut a, &k, fourth).is("55000");
    assert_eq!(a.text(&of_first), before);
    assert_eq!([first, second, third, fourth].map(|token| check(&mut a, &k, token)), [true, false, true, false]);
    assert_eq!(shown(&mut a, &k).len(), 3);
    // The second's permit is free, the fourth's is kept.
    take(&mut a, &k, "1 hour", more);
    let said = acquire(&mut a, &k, "1 hour", more);
    said.refused();
    assert_eq!(a.column(&format!("select payload from lease_holder('{k}') where payload is not null")), ["3"]);
    assert_eq!(a.int(&format!("select lease_break('{k}')")), 4, "the kept one is counted");
}

/// A lost permit's renewal: others hold the lease, but not this permit alone.
#[test]
fn a_lost_permit_while_others_are_held() {
    let server = Server::shared();
    let mut a = server.session("permits a");
    let k = unique("permits");
    let more = ", permits => 2";
    let first = take(&mut a, &k, "1 hour", more);
    let second = take(&mut a, &k, "1 hour", more);
    assert!(release(&mut a, &k, first));
    let error = renew_fails(&mut a, &k, first);
    assert!(["55000", "55006"].contains(&error.code.as_str()), "{error:#?}");
    take(&mut a, &k, "1 hour", more);
    renew_fails(&mut a, &k, first).is("55006");
    assert!(check(&mut a, &k, second));
}

#[test]
fn another_number_than_the_live_grants_is_refused() {
    let server = Server::shared();
    let mut a = server.session("permits a");
    let mut b = server.session("permits b");
    for (held, asked) in [(1, 2), (2, 1), (3, 2), (2, 3), (1, 2048), (2048, 1)] {
        let k = unique("permits");
        let token = take(&mut a, &k, "1 hour", &format!(", permits => {held}"));
        for session in [&mut a, &mut b] {
            for more in ["", ", timeout => '50 ms'", ", timeout => null", ", bound => true"] {
                let error = session.fails(&acquire_sql(&k, "1 hour", &format!("{more}, permits => {asked}")));
                error.is("22023").message_has(&k);
            }
            session.fails(&format!("call lease_acquire_wait('{k}', '1 hour', permits => {asked})")).is("22023");
            assert_eq!(session.locks_of(session.pid), 0);
        }
        assert_eq!(owners(&mut b, &k), ["permits a"]);
        assert_eq!(waiters(&mut b, &k), 0);
        // When all have ended, the number is free to choose.
        assert!(release(&mut a, &k, token));
        let token = take(&mut a, &k, "150 ms", &format!(", permits => {asked}"));
        let_pass(160);
        assert!(!check(&mut a, &k, token));
        take(&mut b, &k, "1 hour", &format!(", permits => {held}"));
    }
}

#[test]
fn another_number_than_an_uncommitted_grant_never_makes_too_many() {
    let server = Server::shared();
    for (held, asked) in [(1, 2), (2, 1), (1, 3), (3, 1), (3, 2), (2, 3), (1, 2048), (2048, 1)] {
        for end in ["commit", "rollback"] {
            let mut a = server.session("permits a");
            let mut b = server.session("permits b");
            let k = unique("permits");
            a.run("begin");
            let token = take(&mut a, &k, "1 hour", &format!(", permits => {held}"));
            let other = format!(", permits => {asked}");
            for more in ["", ", timeout => '60 ms'"] {
                match b.query(&acquire_sql(&k, "1 hour", &format!("{other}{more}"))) {
                    Ok(rows) => {
                        Said::from_rows(&rows).refused();
                    }
                    Err(error) => {
                        error.is("22023");
                    }
                }
            }
            // One that waits: by then the first is committed, or never was.
            let waiting = b.background(&acquire_sql(&k, "1 hour", &format!("{other}, timeout => '2 s'")));
            let_pass(100);
            a.run(end);
            let (mut b, result) = waiting.end();
            if end == "commit" {
                match result {
                    Ok(rows) => {
                        Said::from_rows(&rows).refused();
                    }
                    Err(error) => {
                        error.is("22023");
                    }
                }
                assert!(check(&mut b, &k, token));
                assert_eq!(owners(&mut b, &k), ["permits a"], "{held} and {asked}");
                b.fails(&acquire_sql(&k, "1 hour", &other)).is("22023");
            } else {
                let mut token = result.ok().and_then(|rows| Said::from_rows(&rows).token);
                if token.is_none() {
                    token = acquire(&mut b, &k, "1 hour", &other).token;
                }
                assert!(check(&mut b, &k, token.expect("it is free after a rollback")));
                a.fails(&acquire_sql(&k, "1 hour", &format!(", permits => {held}"))).is("22023");
            }
        }
    }
}

/// Two grants of different numbers that don't know of each other, the one rolled back to a savepoint.
#[test]
fn another_number_after_a_grant_that_was_undone() {
    let server = Server::shared();
    let mut a = server.session("permits a");
    let mut b = server.session("permits b");
    let k = unique("permits");
    a.run("begin; savepoint s");
    take(&mut a, &k, "1 hour", ", permits => 3");
    a.run("rollback to s");
    take(&mut a, &k, "1 hour", ", permits => 2");
    a.run("commit");
    b.fails(&acquire_sql(&k, "1 hour", ", permits => 3")).is("22023");
    take(&mut b, &k, "1 hour", ", permits => 2");
    acquire(&mut b, &k, "1 hour", ", permits => 2").refused();
}

#[test]
fn all_of_two_thousand_and_forty_eight() {
    let database = Server::shared().new_database("permits", "UTF8");
    let mut a = database.session("permits a");
    for batch in 0..32 {
        let granted = a.int(&format!(
            "select count(*) filter (where acquired) from generate_series(1, 64) as i, \
                    lease_acquire('k' || left(i::text, 0), '1 hour', owner => {batch} || ' ' || i, permits => 2048)"
        ));
        assert_eq!(granted, 64, "batch {batch}");
    }
    acquire(&mut a, "k", "1 hour", ", permits => 2048").refused();
    assert_eq!(
        a.text("select concat_ws(' ', count(*), count(distinct owner), min(permits)) from lease_holder('k')"),
        "2048 2048 2048"
    );
    assert_eq!(
        a.text("select concat_ws(' ', count(*), count(distinct slot), max(slot)) from _lease"),
        "2048 2048 2047"
    );
    let token = a.int("select token from _lease where slot = 1234");
    assert!(release(&mut a, "k", token));
    take(&mut a, "k", "1 hour", ", permits => 2048");
    acquire(&mut a, "k", "1 hour", ", permits => 2048").refused();
    assert_eq!(a.int("select lease_break('k')"), 2048);
    take(&mut a, "k", "1 hour", "");
}

/// There is room for all: nobody is refused because others try at the same moment.
#[test]
fn as_many_at_once_as_there_are_permits() {
    const SESSIONS: usize = 8;
    let server = Server::shared();
    let stem = unique("permits");
    let more = format!(", permits => {}", SESSIONS + 1);
    // The first grant of all tells the number.
    let mut first = server.session("permits");
    for round in 0..100 {
        take(&mut first, &format!("{stem} {round}"), "1 hour", &more);
    }
    let barrier = Arc::new(Barrier::new(SESSIONS));
    let running: Vec<_> = (0..SESSIONS)
        .map(|_| {
            let (barrier, stem, more) = (barrier.clone(), stem.clone(), more.clone());
            server.session("permits").spawn(move |session| {
                (0..100)
                    .map(|round| {
                        barrier.wait();
                        acquire(session, &format!("{stem} {round}"), "1 hour", &more).token.is_some()
                    })
                    .collect::<Vec<_>>()
            })
        })
        .collect();
    until("all rounds are over", || running.iter().all(Running::finished));
    let answers: Vec<Vec<bool>> = running.into_iter().map(|running| running.end().1).collect();
    let granted = |round: usize| answers.iter().filter(|answers| answers[round]).count();
    assert_eq!((0..100).map(granted).filter(|granted| *granted < SESSIONS).count(), 0, "rounds with a refusal");
    acquire(&mut first, &format!("{stem} 0"), "1 hour", &more).refused();
}

/// Where a kept permit is the first to be free, nobody is named, and the time is its.
#[test]
fn held_and_kept_permits() {
    let server = Server::shared();
    let mut a = server.session("permits a");
    for kept_first in [true, false] {
        let k = unique("permits");
        let held = take(&mut a, &k, if kept_first { "2 hours" } else { "30 minutes" }, ", permits => 2");
        let kept = take(&mut a, &k, "1 minute", ", permits => 2");
        assert!(a.flag(&format!("select lease_release('{k}', {kept}, '1 hour')")));
        assert_eq!(owners(&mut a, &k), ["permits a"]);
        let said = acquire(&mut a, &k, "1 hour", ", permits => 2");
        if kept_first {
            assert_eq!(said.refused().holder, None, "{said:?}");
            assert!(said.retry_after.is_some_and(|seconds| seconds > 3000.0 && seconds <= 3600.0), "{said:?}");
        } else {
            said.refused_by("permits a", 1800.0);
        }
        assert!(release(&mut a, &k, held));
        take(&mut a, &k, "1 hour", ", permits => 2");
        acquire(&mut a, &k, "1 hour", ", permits => 2").refused();
    }
}

#[test]
fn waiters_for_permits_are_served_one_by_one() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let mut a = server.session("permits a");
    let k = unique("permits");
    let mut tokens: Vec<i64> = (0..2).map(|_| take(&mut a, &k, "1 hour", ", permits => 2")).collect();
    let mut waiting = Vec::new();
    for count in 1..=4 {
        let sql = acquire_sql(&k, "1 hour", &format!(", '1 minute', 'w{count}', permits => 2"));
        waiting.push(server.session("permits waiter").background(&sql));
        until_queued(&mut watch, &k, count);
    }
    for (index, waiting) in waiting.into_iter().enumerate() {
        // One at a time. Who comes to the head of the queue is between two places for a moment.
        until_queued(&mut watch, &k, 4 - index as i64);
        assert!(release(&mut a, &k, tokens[index]));
        let (_, rows) = waiting.end();
        let said = Said::from_rows(&rows.expect("no error"));
        assert_eq!(said.holder, Some(format!("w{}", index + 1)), "in the order of arrival");
        tokens.push(said.granted());
        assert_eq!(owners(&mut watch, &k).len(), 2);
    }
    assert_eq!(waiters(&mut watch, &k), 0);
}

/// Sessions that come and go, always with the same number: at most that many are in at a time.
#[test]
fn never_more_holders_than_permits() {
    const PERMITS: usize = 3;
    let server = Server::shared();
    let k = unique("permits");
    let inside: Arc<Mutex<Vec<i64>>> = Arc::default();
    let running: Vec<_> = (0..8)
        .map(|number| {
            let (k, inside) = (k.clone(), inside.clone());
            server.session("permits").spawn(move |session| {
                let mut grants = 0;
                for round in 0..80 {
                    let timeout = if (round + number) % 2 == 0 { "0" } else { "30 s" };
                    // Some grants are undone.
                    let undone = round % 9 == 4;
                    session.run(if undone { "begin" } else { "" });
                    let said = acquire(session, &k, "1 hour", &format!(", '{timeout}', permits => {PERMITS}"));
                    if undone {
                        session.run("rollback");
                        continue;
                    }
                    let Some(token) = said.token else { continue };
                    {
                        let mut inside = inside.lock().expect("no panic while it is held");
                        inside.push(token);
                        assert!(inside.len() <= PERMITS, "{inside:?}");
                    }
                    grants += 1;
                    assert!(check(session, &k, token));
                    assert!(session.int(&format!("select count(*) from lease_holder('{k}')")) <= PERMITS as i64);
                    inside.lock().expect("no panic while it is held").retain(|inside| *inside != token);
                    assert!(release(session, &k, token));
                }
                grants
            })
        })
        .collect();
    until("all rounds are over", || running.iter().all(Running::finished));
    let grants: i32 = running.into_iter().map(|running| running.end().1).sum();
    assert!(grants > 100, "{grants}");
    assert_eq!(shown(&mut server.session("permits"), &k), [""; 0]);
}

/// And with different numbers: whoever is in at a time came with one number, and no more than that are in.
#[test]
fn never_holders_of_different_numbers() {
    let server = Server::shared();
    let k = unique("permits");
    let inside: Arc<Mutex<Vec<(i64, usize)>>> = Arc::default();
    let running: Vec<_> = (0..8_usize)
        .map(|number| {
            let (k, inside) = (k.clone(), inside.clone());
            server.session("permits").spawn(move |session| {
                let (mut grants, mut refused) = (0, 0);
                for round in 0..120 {
                    let permits = (round * 7 + number * 3) % 3 + 1;
                    let timeout = if (round + number) % 4 == 0 { "20 ms" } else { "0" };
                    // Some are granted a while before they are committed.
                    let slow = round % 3 == 0;
                    let sql = acquire_sql(&k, "1 hour", &format!(", '{timeout}', permits => {permits}"));
                    session.run(if slow { "begin" } else { "" });
                    let answer = session.query(&sql);
                    if slow && answer.is_ok() {
                        session.run("select 1");
                    }
                    session.run(if slow { "commit" } else { "" });
                    let token = match answer {
                        Ok(rows) => Said::from_rows(&rows).token,
                        Err(error) => {
                            error.is("22023");
                            None
                        }
                    };
                    let Some(token) = token else {
                        refused += 1;
                        continue;
                    };
                    {
                        let mut inside = inside.lock().expect("no panic while it is held");
                        inside.push((token, permits));
                        assert!(inside.len() <= permits, "{inside:?}");
                        assert!(inside.iter().all(|(_, number)| *number == permits), "{inside:?}");
                    }
                    grants += 1;
                    assert!(check(session, &k, token));
                    inside.lock().expect("no panic while it is held").retain(|(inside, _)| *inside != token);
                    assert!(release(session, &k, token));
                }
                (grants, refused)
            })
        })
        .collect();
    until("all rounds are over", || running.iter().all(Running::finished));
    let (mut grants, mut refused) = (0, 0);
    for running in running {
        let (of_one, of_none) = running.end().1;
        grants += of_one;
        refused += of_none;
    }
    assert!(grants > 50 && refused > 50, "they did meet: {grants} granted, {refused} refused");
}
