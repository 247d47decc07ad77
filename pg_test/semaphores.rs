//! Semaphores: never more than N at once, in order of arrival, free as soon as their session lets go or is gone.

use super::support::lease_queue::{
    Answered, begin_waiting, left_no_trace, median, position, start, start_limited, until_queued,
};
use super::support::{Cluster, Random, Rows, Running, Server, Session, let_pass, stop_process, unique, until};
use std::collections::BTreeSet;
use std::sync::{Arc, Barrier, Mutex};
use std::time::{Duration, Instant};

/// The number of the slot in an answer; None is NULL.
#[track_caller]
fn slot_in(rows: &Rows) -> Option<i64> {
    assert_eq!(rows.len(), 1);
    rows[0].get(0).map(|slot| slot.parse().expect("a number"))
}

/// One try.
#[track_caller]
fn try_take(session: &mut Session, k: &str, permits: i64) -> Option<i64> {
    slot_in(&session.run(&format!("select named_semaphore('{k}', {permits}, '0')")))
}

/// One try that has to succeed.
#[track_caller]
fn take(session: &mut Session, k: &str, permits: i64) -> i64 {
    try_take(session, k, permits).expect("a slot")
}

#[track_caller]
fn give_back(session: &mut Session, k: &str, slot: i64) {
    session.run(&format!("select named_semaphore_release('{k}', {slot})"));
}

fn wait(k: &str, permits: i64) -> String {
    format!("select named_semaphore('{k}', {permits})")
}

/// The end of a waiter that gets a slot: its session, the slot and when it came.
#[track_caller]
fn granted(waiting: Running<Answered>) -> (Session, i64, Instant) {
    let (session, (answer, at)) = waiting.end();
    let rows = answer.unwrap_or_else(|error| panic!("{error:#?}"));
    (session, slot_in(&rows).expect("a slot"), at)
}

/// That the lock manager has nothing of a semaphore: its tags have the key of its name.
#[track_caller]
fn nothing_is_left(watch: &mut Session, k: &str) {
    let rows = format!(
        "select concat_ws(' ', l.pid, l.mode, l.granted, l.objsubid) from pg_locks as l, named_lock_key('{k}') as key \
          where l.locktype = 'advisory' and (l.database, l.classid, l.objid) = (key.database, key.classid, key.objid)"
    );
    assert_eq!(watch.column(&rows), [""; 0], "{k}");
    assert_eq!(watch.int(&format!("select count(*) from lock_holders where name = '{k}'")), 0);
    assert_eq!(watch.int(&format!("select count(*) from lock_waiters where name = '{k}'")), 0);
}

/// The slots of a semaphore and their holders, as the view has them.
#[track_caller]
fn shown(watch: &mut Session, k: &str) -> Vec<String> {
    watch.column(&format!(
        "select pid || ' ' || (objsubid & 2047) + 1 from lock_holders where kind = 'semaphore' and name = '{k}' \
          order by (objsubid & 2047)"
    ))
}

#[test]
fn n_slots_each_another_number() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let mut a = server.session("a");
    let mut b = server.session("b");
    for permits in [1, 2, 3, 7, 20] {
        let k = unique("slots");
        let mut owners = Vec::new();
        for number in 1..=permits {
            // The same session may take several.
            let session = if number % 3 == 2 { &mut b } else { &mut a };
            assert_eq!(take(session, &k, permits), number);
            owners.push(session.pid);
        }
        let rows = |owners: &[i32]| -> Vec<String> {
            owners.iter().enumerate().map(|(index, pid)| format!("{pid} {}", index + 1)).collect()
        };
        assert_eq!(shown(&mut watch, &k), rows(&owners));
        for session in [&mut a, &mut b, &mut watch] {
            assert_eq!(try_take(session, &k, permits), None);
            assert_eq!(session.maybe(&format!("select named_semaphore('{k}', {permits}, '30 ms')")), None, "{permits}");
        }
        assert_eq!(watch.locks_of(watch.pid), 0);
        // One goes, one comes, whichever it is.
        for number in 1..=permits {
            let owner = &mut owners[number as usize - 1];
            give_back(if *owner == a.pid { &mut a } else { &mut b }, &k, number);
            let session = if *owner == a.pid { &mut b } else { &mut a };
            assert_eq!(take(session, &k, permits), number);
            *owner = session.pid;
            assert_eq!(try_take(&mut watch, &k, permits), None);
        }
        assert_eq!(shown(&mut watch, &k), rows(&owners));
        let of_a = owners.iter().filter(|pid| **pid == a.pid).count() as i64;
        assert_eq!(a.int("select named_unlock_all()"), of_a);
        assert_eq!(b.int("select named_unlock_all()"), permits - of_a);
        nothing_is_left(&mut watch, &k);
    }
}

#[test]
fn two_thousand_and_forty_eight_slots() {
    let database = Server::shared().new_database("slots", "UTF8");
    let mut admin = database.session("admin");
    let mut a = database.session("a");
    a.run("set named_locks.max_locks_per_session = 3000");
    for batch in 0..32 {
        assert_eq!(
            a.text(
                "select concat_ws(' ', count(distinct slot), min(slot), max(slot)) \
                   from (select named_semaphore('k', 2048, '0') as slot from generate_series(1, 64)) as s"
            ),
            format!("64 {} {}", batch * 64 + 1, (batch + 1) * 64),
        );
    }
    for permits in [1, 2047, 2048] {
        assert_eq!(try_take(&mut admin, "k", permits), None, "{permits}");
        assert_eq!(try_take(&mut a, "k", permits), None, "{permits}");
    }
    give_back(&mut a, "k", 1234);
    assert_eq!(try_take(&mut admin, "k", 2047), None);
    assert_eq!(take(&mut admin, "k", 2048), 1234);
    give_back(&mut a, "k", 2048);
    give_back(&mut a, "k", 1);
    assert_eq!(take(&mut a, "k", 2047), 1);
    assert_eq!(try_take(&mut a, "k", 2047), None);
    assert_eq!(a.int("select named_unlock_all()"), 2046);
    assert_eq!(shown(&mut admin, "k"), [format!("{} 1234", admin.pid)]);
    give_back(&mut admin, "k", 1234);
    nothing_is_left(&mut admin, "k");
}

/// Slots above a caller's own number count too.
#[test]
fn lowering_the_number_drains() {
    let server = Server::shared();
    let mut a = server.session("a");
    let mut b = server.session("b");
    let mut watch = server.session("watch");
    let k = unique("drain");
    for number in 1..=5 {
        assert_eq!(take(if number % 2 == 0 { &mut b } else { &mut a }, &k, 8), number);
    }
    // A has 1, 3 and 5, B has 2 and 4.
    for permits in 1..=5 {
        assert_eq!(try_take(&mut watch, &k, permits), None, "{permits}");
        assert_eq!(try_take(&mut a, &k, permits), None, "{permits}");
    }
    give_back(&mut a, &k, 1);
    give_back(&mut b, &k, 2);
    for session in [&mut watch, &mut a] {
        // 3, 4 and 5 are taken: 1 and 2 are free, and three are enough.
        assert_eq!(try_take(session, &k, 3), None);
        assert_eq!(session.maybe(&format!("select named_semaphore('{k}', 2, '30 ms')")), None);
    }
    give_back(&mut a, &k, 3);
    assert_eq!(try_take(&mut watch, &k, 2), None);
    assert_eq!(take(&mut watch, &k, 3), 1);
    assert_eq!(try_take(&mut watch, &k, 3), None);
    assert_eq!(take(&mut watch, &k, 4), 2);
    assert_eq!(take(&mut watch, &k, 5), 3);
    assert_eq!(try_take(&mut watch, &k, 5), None);
    // A waiter with a low number waits until it is drained as far.
    let waiting = start(server.session("low"), &wait(&k, 2), &mut a, 1);
    for slot in [1, 2, 3] {
        give_back(&mut watch, &k, slot);
        assert_eq!(position(&mut watch, waiting.pid), 1, "4 and 5 are taken");
    }
    assert!(!waiting.finished());
    give_back(&mut a, &k, 5);
    let (mut low, slot, _) = granted(waiting);
    assert_eq!(slot, 1);
    assert_eq!(try_take(&mut a, &k, 2), None);
    give_back(&mut low, &k, 1);
    give_back(&mut b, &k, 4);
    nothing_is_left(&mut watch, &k);
}

#[test]
fn ten_waiters_are_served_in_order_of_arrival() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for permits in [1, 3] {
        let k = unique("order");
        let mut holders: Vec<(Session, i64)> = (0..permits)
            .map(|_| {
                let mut session = server.session("holder");
                let slot = take(&mut session, &k, permits);
                (session, slot)
            })
            .collect();
        let mut waiters: Vec<Running<Answered>> = (1..=10)
            .map(|place| {
                let timeout = if place % 3 == 0 { ", '1 hour'" } else { "" };
                let sql = format!("select named_semaphore('{k}', {permits}{timeout})");
                start(server.session("waiter"), &sql, &mut watch, place)
            })
            .collect();
        assert_eq!(
            watch.column(&format!("select distinct waiters from lock_holders where name = '{k}'")),
            ["10"],
            "on every slot"
        );
        let mut late = Vec::new();
        while !waiters.is_empty() {
            let (mut session, slot) = holders.remove(0);
            give_back(&mut session, &k, slot);
            let released = Instant::now();
            let (next, next_slot, at) = granted(waiters.remove(0));
            assert_eq!(next_slot, slot, "the one that was free");
            late.push(at.saturating_duration_since(released));
            holders.push((next, next_slot));
            for (place, waiter) in (1..).zip(&waiters) {
                assert!(!waiter.finished(), "one release, one grant");
                until_queued(&mut watch, waiter.pid, place);
            }
        }
        assert!(median(late.clone()) < Duration::from_millis(500), "{late:?}");
        drop(holders);
        until("all sessions are gone", || shown(&mut watch, &k).is_empty());
    }
}

/// Each gives it back at once, and nobody looks on: by looking once in a second it would take longer.
#[test]
fn a_queue_that_serves_itself() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let k = unique("itself");
    let mut a = server.session("holder");
    let slot = take(&mut a, &k, 1);
    let order: Arc<Mutex<Vec<i64>>> = Arc::default();
    let waiters: Vec<Running<()>> = (1..=20)
        .map(|place| {
            let (k, sql, order) = (k.clone(), wait(&k, 1), order.clone());
            let waiting = server.session("waiter").spawn(move |session| {
                let slot = session.int(&sql);
                order.lock().expect("no panic").push(place);
                give_back(session, &k, slot);
            });
            until_queued(&mut watch, waiting.pid, place);
            waiting
        })
        .collect();
    let begun = Instant::now();
    give_back(&mut a, &k, slot);
    for waiter in waiters {
        waiter.end();
    }
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    assert_eq!(*order.lock().expect("no panic"), (1..=20).collect::<Vec<_>>());
    nothing_is_left(&mut watch, &k);
}

#[test]
fn a_try_while_someone_queues_is_refused() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let mut a = server.session("a");
    let mut c = server.session("c");
    let k = unique("queued");
    let slot = take(&mut a, &k, 3);
    // By its own number the head has to wait; by theirs there are two free.
    let waiting = start(server.session("head"), &wait(&k, 1), &mut watch, 1);
    for session in [&mut c, &mut a] {
        for _ in 0..20 {
            assert_eq!(try_take(session, &k, 3), None);
        }
        assert_eq!(session.maybe(&format!("select named_semaphore('{k}', 3, '100 ms')")), None);
    }
    left_no_trace(&mut watch, c.pid, "a try");
    // The head can't come for it: it is free, and it is the head's.
    let stopped = stop_process(waiting.pid);
    give_back(&mut a, &k, slot);
    for _ in 0..20 {
        assert_eq!(try_take(&mut c, &k, 1), None);
    }
    stopped.go_on();
    let (mut b, slot, _) = granted(waiting);
    give_back(&mut b, &k, slot);
    assert_eq!(take(&mut c, &k, 3), 1);
    give_back(&mut c, &k, 1);
    nothing_is_left(&mut watch, &k);
}

/// There is room for all: nobody is refused because others try at the same moment.
#[test]
fn as_many_at_once_as_there_are_slots() {
    const SESSIONS: usize = 8;
    const ROUNDS: usize = 200;
    let server = Server::shared();
    let stem = unique("at once");
    let barrier = Arc::new(Barrier::new(SESSIONS));
    let running: Vec<_> = (0..SESSIONS)
        .map(|_| {
            let (barrier, stem) = (barrier.clone(), stem.clone());
            server.session("at once").spawn(move |session| {
                (0..ROUNDS)
                    .map(|round| {
                        let k = format!("{stem} {}", round % 50);
                        barrier.wait();
                        let slot = try_take(session, &k, SESSIONS as i64);
                        barrier.wait();
                        if let Some(slot) = slot {
                            give_back(session, &k, slot);
                        }
                        slot
                    })
                    .collect::<Vec<_>>()
            })
        })
        .collect();
    let answers: Vec<_> = running.into_iter().map(|running| running.end().1).collect();
    for round in 0..ROUNDS {
        let slots: BTreeSet<i64> = answers.iter().filter_map(|answers| answers[round]).collect();
        assert_eq!(slots, (1..=SESSIONS as i64).collect(), "round {round}");
    }
}

/// What lets a slot go.
#[derive(Clone, Copy, Debug)]
enum Event {
    /// A statement of the holder.
    Holder(&'static str),
    /// One that fails.
    HolderFails(&'static str),
    /// A statement of another session, with the holder's process for `$p`.
    Other(&'static str),
    /// The holder's client closes its session.
    Closed,
}

/// How a waiter gets the slot that is let go so: how long after.
fn latency(server: &Server, watch: &mut Session, before: &str, event: Event) -> Duration {
    let k = unique("freed");
    let mut a = server.session("holder");
    a.run(before);
    let slot = take(&mut a, &k, 2);
    assert_eq!(take(&mut a, &k, 2), 2);
    let waiting = start(server.session("waiter"), &wait(&k, 2), watch, 1);
    let fill = |sql: &str| sql.replace("$k", &k).replace("$s", &slot.to_string()).replace("$p", &a.pid.to_string());
    let at = Instant::now();
    match event {
        Event::Holder(sql) => {
            let sql = fill(sql);
            a.run(&sql);
        }
        Event::HolderFails(sql) => {
            let sql = fill(sql);
            a.fails(&sql);
        }
        Event::Other(sql) => {
            let sql = fill(sql);
            watch.run(&sql);
        }
        Event::Closed => {
            // A session that is dropped says goodbye.
            drop(std::mem::replace(&mut a, server.session("another")));
        }
    }
    let (mut b, slot, granted_at) = granted(waiting);
    give_back(&mut b, &k, slot);
    granted_at.saturating_duration_since(at)
}

#[test]
fn a_waiter_is_woken_by_whatever_lets_a_slot_go() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for (before, event) in [
        ("", Event::Holder("select named_semaphore_release('$k', $s)")),
        ("", Event::Holder("select named_unlock_all()")),
        ("", Event::Holder("select pg_advisory_unlock_all()")),
        ("", Event::Holder("discard all")),
        ("begin", Event::Holder("select named_semaphore_release('$k', $s)")),
        ("begin", Event::Holder("select named_unlock_all()")),
        ("begin", Event::Holder("select pg_advisory_unlock_all()")),
        ("begin", Event::HolderFails("select pg_advisory_unlock_all(), 1 / (random() * 0)::int")),
        ("begin", Event::HolderFails("select named_semaphore_release('$k', $s), 1 / (random() * 0)::int")),
        ("begin; savepoint s", Event::Holder("select pg_advisory_unlock_all(); rollback to s")),
        ("", Event::Other("select pg_terminate_backend($p)")),
        ("begin", Event::Other("select pg_terminate_backend($p)")),
        ("", Event::Closed),
        ("begin", Event::Closed),
        ("begin; create temp table t (i int)", Event::Closed),
    ] {
        let late: Vec<_> = (0..5).map(|_| latency(server, &mut watch, before, event)).collect();
        assert!(median(late.clone()) < Duration::from_millis(500), "{before:?} {event:?}: {late:?}");
    }
}

/// A statement of the holder that lets go and runs on.
#[test]
fn a_waiter_is_woken_before_the_statement_ends() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for release in ["named_semaphore_release('$k', 1)", "named_unlock_all()"] {
        let k = unique("freed");
        let mut a = server.session("holder");
        assert_eq!(take(&mut a, &k, 1), 1);
        watch.run(&format!("select named_lock('{k}')"));
        let waiting = start(server.session("waiter"), &wait(&k, 1), &mut watch, 1);
        let release = release.replace("$k", &k);
        let releasing = a.background(&format!("do $$ begin perform {release}; perform named_lock('{k}'); end $$"));
        let (mut b, slot, _) = granted(waiting);
        assert!(!releasing.finished());
        give_back(&mut b, &k, slot);
        watch.run(&format!("select named_unlock('{k}')"));
        releasing.end().1.expect("no error");
    }
}

/// What lets nothing go gives the waiter nothing.
#[test]
fn not_granted_before_it_is_free() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let k = unique("early");
    let mut a = server.session("holder");
    assert_eq!(take(&mut a, &k, 1), 1);
    let waiting = start(server.session("waiter"), &wait(&k, 1), &mut watch, 1);
    for sql in [
        "begin; rollback",
        "begin; select named_xact_lock('$k'); savepoint s; rollback to s; rollback",
        "discard plans; discard sequences; discard temp",
        "select named_lock('$k'), named_unlock('$k')",
        "select pg_advisory_lock(1), pg_advisory_unlock(1)",
        "select named_semaphore('$k other', 1), named_semaphore_release('$k other', 1)",
        "select named_semaphore('$k', 1, '0')",
        "select acquired from lease_acquire('$k', '1 hour'); select lease_break('$k')",
        "do $$ begin raise 'x'; exception when others then null; end $$",
    ] {
        a.run(&sql.replace("$k", &k));
        assert_eq!(position(&mut watch, waiting.pid), 1, "{sql}");
        assert_eq!(shown(&mut watch, &k), [format!("{} 1", a.pid)], "{sql}");
    }
    a.fails(&format!("select named_semaphore_release('{k}', 2)")).is("55000");
    a.fails(&format!("select named_unlock('{k}')")).is("55000");
    // And over a few of the looks that it takes once in a second.
    let_pass(2500);
    assert_eq!(position(&mut watch, waiting.pid), 1);
    assert!(!waiting.finished());
    give_back(&mut a, &k, 1);
    granted(waiting);
}

/// A slot is the session's: no end of a transaction gives it back.
#[test]
fn a_slot_outlives_the_transaction() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for (before, then) in [
        ("begin", "rollback"),
        ("begin", "commit"),
        ("begin; savepoint s", "rollback to s; rollback"),
        ("begin; savepoint s", "release s; rollback"),
        ("begin; savepoint s; savepoint t", "rollback to s; commit"),
    ] {
        let k = unique("outlives");
        let mut a = server.session("a");
        a.run(before);
        assert_eq!(take(&mut a, &k, 2), 1);
        a.run(then);
        assert_eq!(shown(&mut watch, &k), [format!("{} 1", a.pid)], "{then}");
        assert_eq!(take(&mut a, &k, 2), 2);
        assert_eq!(try_take(&mut watch, &k, 2), None);
        give_back(&mut a, &k, 1);
        give_back(&mut a, &k, 2);
        nothing_is_left(&mut watch, &k);
    }
    // An error after the grant, in its statement, in an exception block and in a block that is aborted by it.
    let k = unique("outlives");
    let mut a = server.session("a");
    a.fails(&format!("select named_semaphore('{k}', 3), 1 / (random() * 0)::int")).is("22012");
    a.run(&format!(
        "do $$ begin perform named_semaphore('{k}', 3); raise 'back'; exception when raise_exception then null; end $$"
    ));
    a.run("begin");
    a.fails(&format!("select named_semaphore('{k}', 3), 1 / (random() * 0)::int")).is("22012");
    a.run("rollback");
    assert_eq!(shown(&mut watch, &k).len(), 3);
    assert_eq!(try_take(&mut watch, &k, 3), None);
    assert_eq!(a.int("select named_unlock_all()"), 3);
    nothing_is_left(&mut watch, &k);
}

/// Behind our back all slots of a session go together, and it can go on as if it had never had any.
#[test]
fn after_all_were_released_behind_our_back() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for release in ["select pg_advisory_unlock_all()", "discard all", "begin; select pg_advisory_unlock_all(); commit"]
    {
        let k = unique("behind");
        let mut a = server.session("a");
        for slot in 1..=3 {
            assert_eq!(take(&mut a, &k, 3), slot);
        }
        a.run(release);
        nothing_is_left(&mut watch, &k);
        a.fails(&format!("select named_semaphore_release('{k}', 2)")).is("55000").detail_has("Nobody holds it");
        assert_eq!(take(&mut watch, &k, 3), 1);
        assert_eq!(take(&mut a, &k, 3), 2);
        a.fails(&format!("select named_semaphore_release('{k}', 1)"))
            .is("55000")
            .detail_has(&format!("process {}", watch.pid))
            .detail_has(&format!("slot 2 of semaphore \"{k}\""));
        assert_eq!(take(&mut a, &k, 3), 3);
        assert_eq!(try_take(&mut a, &k, 3), None);
        assert_eq!(a.int("select named_unlock_all()"), 2);
        give_back(&mut watch, &k, 1);
        nothing_is_left(&mut watch, &k);
        // In one statement.
        assert_eq!(
            a.column(&format!(
                "select named_semaphore('{k}', 2, '0') || coalesce(pg_advisory_unlock_all()::text, '') \
                   from generate_series(1, 4)"
            )),
            ["1", "1", "1", "1"]
        );
        nothing_is_left(&mut watch, &k);
    }
}

/// How a waiter leaves the queue without a slot.
#[derive(Clone, Copy, Debug)]
enum Leaves {
    Timeout,
    LockTimeout,
    StatementTimeout,
    Cancelled,
    Terminated,
    /// Cancelled in an exception block, whose transaction goes on.
    Caught,
    /// In a cursor of the outer transaction, whose savepoint is rolled back.
    InCursor,
}

#[test]
fn one_who_leaves_the_queue_leaves_no_trace() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for leaves in [
        Leaves::Timeout,
        Leaves::LockTimeout,
        Leaves::StatementTimeout,
        Leaves::Cancelled,
        Leaves::Terminated,
        Leaves::Caught,
        Leaves::InCursor,
    ] {
        for place in [1, 2] {
            let what = format!("{leaves:?} at {place}");
            let k = unique("leaves");
            let mut a = server.session("holder");
            assert_eq!(take(&mut a, &k, 1), 1);
            let mut others = Vec::new();
            if place == 2 {
                others.push(start(server.session("first"), &wait(&k, 1), &mut watch, 1));
            }
            let mut b = server.session("leaver");
            let (before, sql) = match leaves {
                Leaves::Timeout => ("", format!("select named_semaphore('{k}', 1, '3 s')")),
                Leaves::LockTimeout => ("set lock_timeout = '3 s'", wait(&k, 1)),
                Leaves::StatementTimeout => ("set statement_timeout = '3 s'", wait(&k, 1)),
                Leaves::Caught => (
                    "begin",
                    format!(
                        "do $$ begin perform named_semaphore('{k}', 1); \
                               exception when query_canceled then null; end $$"
                    ),
                ),
                Leaves::InCursor => {
                    b.run(&format!("begin; declare c cursor for {}; savepoint s", wait(&k, 1)));
                    ("", "fetch c".to_owned())
                }
                _ => ("", wait(&k, 1)),
            };
            b.run(before);
            let is_limited = matches!(leaves, Leaves::Timeout | Leaves::LockTimeout | Leaves::StatementTimeout);
            let leaver = if is_limited { start_limited } else { start }(b, &sql, &mut watch, place);
            // One whose time is up may be gone before the next one is seen behind it.
            let last = begin_waiting(server.session("last"), &wait(&k, 1));
            if !is_limited {
                until_queued(&mut watch, last.pid, place + 1);
            }
            others.push(last);
            let pid = leaver.pid;
            match leaves {
                Leaves::Cancelled | Leaves::Caught | Leaves::InCursor => {
                    watch.run(&format!("select pg_cancel_backend({pid})"));
                }
                Leaves::Terminated => {
                    watch.run(&format!("select pg_terminate_backend({pid})"));
                }
                _ => {}
            }
            let (mut b, (answer, _)) = leaver.end();
            match (leaves, answer) {
                (Leaves::Timeout, answer) => assert_eq!(slot_in(&answer.expect("no error")), None),
                (Leaves::Caught, answer) => assert!(answer.is_ok(), "{what}"),
                (Leaves::LockTimeout, Err(error)) => {
                    error.is("55P03").message_has("lock_timeout").message_has(&format!("slot of semaphore \"{k}\""));
                    error.detail_has(&format!("process {}", a.pid));
                }
                (Leaves::StatementTimeout | Leaves::Cancelled | Leaves::InCursor, Err(error)) => {
                    error.is("57014");
                }
                (Leaves::Terminated, Err(error)) => {
                    error.is_end_of_session();
                }
                (_, answer) => panic!("{what}: {answer:?}"),
            }
            match leaves {
                Leaves::Terminated => watch.until_gone(pid),
                Leaves::InCursor => {
                    b.run("rollback to s");
                }
                _ => {}
            }
            left_no_trace(&mut watch, pid, &what);
            for (place, other) in (1..).zip(&others) {
                until_queued(&mut watch, other.pid, place);
            }
            if matches!(leaves, Leaves::Caught | Leaves::InCursor) {
                assert_eq!(b.int("select 1"), 1, "{what}: its transaction goes on");
                b.run("rollback");
            }
            let mut holder = (a, 1);
            for other in others {
                give_back(&mut holder.0, &k, holder.1);
                let (session, slot, _) = granted(other);
                holder = (session, slot);
            }
            give_back(&mut holder.0, &k, holder.1);
            nothing_is_left(&mut watch, &k);
        }
    }
}

/// A head that is stopped past the end of its wait, while the slot comes free: its answer is true.
#[test]
fn a_stopped_head_tells_the_truth() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for (before, timeout) in [
        ("", ", '1 s'"),
        ("set lock_timeout = '1 s'", ""),
        ("set statement_timeout = '1 s'", ""),
        ("set statement_timeout = '1 s'", ", '1 s'"),
    ] {
        for release in [false, true] {
            let k = unique("stopped");
            let mut a = server.session("holder");
            assert_eq!(take(&mut a, &k, 1), 1);
            let mut b = server.session("stopped");
            b.run(before);
            let waiting = start(b, &format!("select named_semaphore('{k}', 1{timeout})"), &mut watch, 1);
            let stopped = stop_process(waiting.pid);
            let_pass(1050);
            if release {
                give_back(&mut a, &k, 1);
            }
            stopped.go_on();
            let (b, (answer, _)) = waiting.end();
            let is_held = matches!(&answer, Ok(rows) if slot_in(rows).is_some());
            assert!(release || !is_held);
            let shown = shown(&mut watch, &k);
            assert_eq!(shown.contains(&format!("{} 1", b.pid)), is_held, "{before}{timeout}: {answer:?} {shown:?}");
            assert_eq!(watch.locks_of(b.pid), if is_held { 2 } else { 0 }, "the slot and its count");
            if before.is_empty() {
                assert_eq!(is_held, release, "{answer:?}");
            }
        }
    }
}

#[test]
fn limits_on_the_wait() {
    let server = Server::shared();
    let mut a = server.session("holder");
    let mut b = server.session("waiter");
    let k = unique("limits");
    assert_eq!(take(&mut a, &k, 1), 1);
    let start = Instant::now();
    b.run("set lock_timeout = '1 h'");
    assert_eq!(b.maybe(&format!("select named_semaphore('{k}', 1, '300 ms')")), None);
    b.run("set lock_timeout = '10 ms'");
    assert_eq!(b.maybe(&format!("select named_semaphore('{k}', 1, '300 ms')")), None);
    assert!(start.elapsed() >= Duration::from_millis(600));
    let error = b.fails(&wait(&k, 1));
    error.is("55P03").message_has("within lock_timeout (10 ms)").detail_has(&format!("process {}", a.pid));
    assert_eq!(b.text("show lock_timeout"), "10ms", "as it was");
    // A session that has the slots itself.
    a.run("set lock_timeout = '10 ms'");
    a.fails(&wait(&k, 1)).is("55P03").detail_has(&format!("process {}", a.pid));
    assert_eq!(a.maybe(&format!("select named_semaphore('{k}', 1, '10 ms')")), None);
    assert_eq!(shown(&mut b, &k), [format!("{} 1", a.pid)]);
    give_back(&mut a, &k, 1);
    nothing_is_left(&mut b, &k);
}

#[test]
fn hold_limits_end_the_session() {
    let cluster = Cluster::new(&[]);
    let mut watch = cluster.session("watch");
    let mut a = cluster.session("a");
    let mut b = cluster.session("b");
    let taken = Instant::now();
    a.run("select named_semaphore('k', 2)");
    assert_eq!(a.int("select named_semaphore('k', 2, hold_limit => '1500 ms')"), 2);
    assert_eq!(b.int("select named_semaphore('back in time', 1, hold_limit => '1500 ms')"), 1);
    assert_eq!(
        watch.column("select name || ' ' || coalesce(hold_limit::text, '-') from lock_holders order by 1"),
        ["back in time 00:00:01.5", "k -", "k 00:00:01.5"]
    );
    give_back(&mut b, "back in time", 1);
    let waiting = start(cluster.session("waiter"), &wait("k", 1), &mut watch, 1);
    let (_waiter, slot, at) = granted(waiting);
    assert!(slot == 1 && at - taken >= Duration::from_millis(1500));
    watch.until_gone(a.pid);
    assert!(
        cluster
            .log()
            .contains("session ended: slot 2 of semaphore \"k\" was held longer than its hold_limit of 1500 ms")
    );
    let_pass(100);
    assert_eq!(b.int("select 1"), 1, "given back in time");
    // A limit on a wait that comes to nothing ends nobody.
    assert_eq!(b.maybe("select named_semaphore('k', 1, '10 ms', '100 ms')"), None);
    let_pass(200);
    assert_eq!(b.int("select 1"), 1);
    // Behind our back: no limit any more.
    b.run("select named_semaphore('k', 3, hold_limit => '300 ms'); select pg_advisory_unlock_all()");
    let_pass(400);
    assert_eq!(b.int("select 1"), 1);
}

#[test]
fn c43_slots_count_among_a_sessions_locks() {
    let database = Server::shared().new_database("slots", "UTF8");
    let mut watch = database.session("watch");
    let mut a = database.session("a");
    a.run("set named_locks.max_locks_per_session = 5; select named_lock('one'), named_semaphore('k', 100)");
    let error = a.fails("select named_semaphore('k', 100) from generate_series(1, 10)");
    error.is("53400").detail_has("max_locks_per_session").message_has("semaphore \"k\"");
    assert_eq!(shown(&mut watch, "k"), [format!("{} 1", a.pid)], "what the statement took is released");
    assert_eq!(watch.locks_of(a.pid), 3, "a lock, a slot and its count");
    a.run("select named_semaphore('k', 100) from generate_series(1, 3)");
    // It fails before it waits.
    assert_eq!(watch.int("select named_semaphore('full', 1)"), 1);
    for sql in
        ["select named_semaphore('full', 1)", "select named_semaphore('k', 100, '0')", "select named_lock('two')"]
    {
        a.fails(sql).is("53400");
    }
    give_back(&mut a, "k", 2);
    assert_eq!(take(&mut a, "k", 100), 2);
    assert_eq!(a.int("select named_unlock_all()"), 5);
    watch.run("select named_unlock_all()");
    nothing_is_left(&mut watch, "k");
}

/// Two names with one key, and so one place in the lock manager.
const CLASH: (&str, &str) = ("order-36325", "M0plytOy");

#[test]
fn clash_of_two_names_with_one_key_is_refused() {
    let database = Server::shared().new_database("clash", "UTF8");
    let mut watch = database.session("watch");
    for (held, asked) in [CLASH, (CLASH.1, CLASH.0)] {
        let mut a = database.session("a");
        let mut b = database.session("b");
        assert_eq!(take(&mut a, held, 1), 1);
        for timeout in ["'0'", "'1 minute'", "null"] {
            for session in [&mut a, &mut b] {
                let error = session.fails(&format!("select named_semaphore('{asked}', 1, {timeout})"));
                error.is("54000").message_has(asked).detail_has(held);
            }
            // Among the session's own, free or not.
            a.fails(&format!("select named_semaphore('{asked}', 5, {timeout})")).is("54000");
        }
        assert_eq!(watch.locks_of(b.pid), 0);
        a.fails(&format!("select named_semaphore_release('{asked}', 1)")).is("55000").message_has(asked);
        // With a waiter.
        let waiting = start(database.session("c"), &wait(held, 1), &mut watch, 1);
        b.fails(&format!("select named_semaphore('{asked}', 5, '0')")).is("54000");
        b.fails(&format!("select named_semaphore('{asked}', 5)")).is("54000");
        give_back(&mut a, held, 1);
        let (mut c, slot, _) = granted(waiting);
        give_back(&mut c, held, slot);
        // It isn't in use any more.
        for session in [&mut a, &mut b] {
            assert_eq!(take(session, asked, 1), 1);
            give_back(session, asked, 1);
        }
        // Locks and leases of that name have other tags.
        a.run(&format!("select named_lock('{held}'), lease_acquire('{held}', '1 hour')"));
        assert_eq!(take(&mut b, asked, 1), 1);
        a.run(&format!("select named_unlock_all(), lease_break('{held}')"));
    }
}

#[test]
fn bad_input_is_refused() {
    let server = Server::shared();
    let mut a = server.session("bad input");
    for (sql, code, part) in [
        ("select named_semaphore(null, 1)", "22004", "name must not be null"),
        ("select named_semaphore('k', null)", "22004", "permits must not be null"),
        ("select named_semaphore_release(null, 1)", "22004", "name must not be null"),
        ("select named_semaphore_release('k', null)", "22004", "slot must not be null"),
        ("select named_semaphore('', 1)", "22023", "empty"),
        ("select named_semaphore(repeat('x', 1025), 1)", "22001", "1025"),
        ("select named_semaphore_release('', 1)", "22023", "empty"),
        ("select named_semaphore('k', 0)", "22023", "permits must be between 1 and 2048"),
        ("select named_semaphore('k', -1)", "22023", "permits"),
        ("select named_semaphore('k', 2049)", "22023", "permits"),
        ("select named_semaphore('k', 65537)", "22023", "permits"),
        ("select named_semaphore('k', 2147483647)", "22023", "permits"),
        ("select named_semaphore_release('k', 0)", "22023", "slot must be between 1 and 2048"),
        ("select named_semaphore_release('k', -1)", "22023", "slot"),
        ("select named_semaphore_release('k', 2049)", "22023", "slot"),
        ("select named_semaphore_release('k', 65537)", "22023", "slot"),
        ("select named_semaphore('k', 1, '-1 ms')", "22023", "timeout"),
        ("select named_semaphore('k', 1, '25 days')", "22023", "timeout"),
        ("select named_semaphore('k', 1, hold_limit => '99 ms')", "22023", "hold_limit"),
    ] {
        a.fails(sql).is(code).message_has(part);
        assert_eq!(a.locks_of(a.pid), 0, "{sql}");
    }
    // Names and numbers at the edge.
    let long = "x".repeat(1024);
    for slot in [1, 2] {
        assert_eq!(take(&mut a, &long, 2), slot);
        give_back(&mut a, &long, slot);
        assert_eq!(take(&mut a, &long, 2), slot);
    }
    assert_eq!(
        a.text("select distinct length(name) || ' ' || mode from lock_holders where pid = pg_backend_pid()"),
        "1024 exclusive"
    );
    a.run("select named_unlock_all()");
}

#[test]
fn releasing_a_slot_not_held_says_who_holds_it() {
    let server = Server::shared();
    let mut a = server.session("semaphore a");
    let mut b = server.session("semaphore b");
    let k = unique("not held");
    b.fails(&format!("select named_semaphore_release('{k}', 1)"))
        .is("55000")
        .message_has(&format!("slot 1 of semaphore \"{k}\" is not held by this session"))
        .detail_has("Nobody holds it. This session holds no session lock.");
    assert_eq!(take(&mut a, &k, 3), 1);
    assert_eq!(take(&mut b, &k, 3), 2);
    b.fails(&format!("select named_semaphore_release('{k}', 1)"))
        .is("55000")
        .detail_has(&format!("Held by process {} (application \"semaphore a\"", a.pid))
        .detail_has(&format!("This session holds slot 2 of semaphore \"{k}\" (exclusive)."));
    let error = b.fails(&format!("select named_semaphore_release('{k}', 3)"));
    error.is("55000").detail_has("Nobody holds it.");
    assert_eq!(shown(&mut a, &k).len(), 2);
    give_back(&mut b, &k, 2);
    b.fails(&format!("select named_semaphore_release('{k}', 2)")).is("55000");
    // Of another name, and of the lock of that name.
    b.run(&format!("select named_lock('{k}')"));
    b.fails(&format!("select named_semaphore_release('{k} other', 1)")).is("55000");
    b.fails(&format!("select named_semaphore_release('{k}', 1)"))
        .is("55000")
        .detail_has(&format!("This session holds named lock \"{k}\" (exclusive)."));
}

/// Semaphores, locks and leases of one name have nothing to do with each other.
#[test]
fn a_semaphore_is_no_lock_and_no_lease() {
    let server = Server::shared();
    let mut a = server.session("a");
    let mut b = server.session("b");
    let k = unique("apart");
    assert_eq!(take(&mut a, &k, 1), 1);
    assert_eq!(a.int(&format!("select named_lock_held('{k}')")), 0);
    a.fails(&format!("select named_unlock('{k}')")).is("55000").detail_has(&format!("slot 1 of semaphore \"{k}\""));
    a.fails(&format!("select named_lock_convert('{k}', 'share')")).is("55000");
    a.fails(&format!("select named_lock_extend('{k}', '1 hour')")).is("55000");
    assert!(b.flag(&format!("select named_lock('{k}', '0')")));
    assert!(b.flag(&format!("select named_xact_lock('{k}', '0', cluster_wide => true)")));
    assert!(b.flag(&format!("select acquired from lease_acquire('{k}', '1 hour', permits => 3)")));
    assert_eq!(try_take(&mut b, &k, 1), None);
    assert_eq!(
        b.column(&format!("select kind || ' ' || holds from lock_holders where name = '{k}' and holds > 0 order by 1")),
        ["semaphore 1", "session 1"]
    );
    assert_eq!(b.int("select named_unlock_all()"), 1);
    assert_eq!(a.int("select named_unlock_all()"), 1);
    assert_eq!(take(&mut b, &k, 1), 1);
    b.run(&format!("select lease_break('{k}'), named_semaphore_release('{k}', 1)"));
    nothing_is_left(&mut a, &k);
}

#[test]
fn c06_session_locks_off_and_warn() {
    let server = Server::shared();
    let k = unique("c06");
    for (value, code) in [("off", "0A000"), ("warn", "01000"), ("on", "")] {
        let role = server.new_role("c06");
        server.session("admin").run(&format!("alter role {role} set named_locks.session_locks = {value}"));
        let mut a = server.session_as(&role, "c06");
        let sql = format!("select named_semaphore('{k}', 3, '0')");
        if value == "off" {
            let error = a.fails(&sql);
            error.is(code).message_has(&format!("semaphore \"{k}\"")).hint_has("lease");
            assert_eq!(a.locks_of(a.pid), 0);
            continue;
        }
        assert_eq!(a.int(&sql), 1);
        let codes: Vec<String> = a.notices().into_iter().map(|notice| notice.code).collect();
        assert_eq!(codes.join(" "), code);
        a.run("select named_unlock_all()");
    }
}

#[test]
fn c45_on_a_standby() {
    let primary = Cluster::new(&[]);
    let standby = primary.standby(&[]);
    primary.until_replayed_by(&standby);
    let mut a = standby.session("a");
    let mut b = standby.session("b");
    for timeout in ["'0'", "'1 s'", "null"] {
        let error = a.fails(&format!("select named_semaphore('k', 1, {timeout})"));
        error.is("25006").message_has("semaphore \"k\"").hint_has("allow_on_standby");
    }
    a.fails("select named_semaphore_release('k', 1)").is("55000");
    assert_eq!(a.locks_of(a.pid), 0);
    for session in [&mut a, &mut b] {
        session.run("set named_locks.allow_on_standby = on");
    }
    assert_eq!(take(&mut a, "k", 1), 1);
    assert_eq!(try_take(&mut b, "k", 1), None);
    let mut watch = standby.session("watch");
    assert_eq!(shown(&mut watch, "k"), [format!("{} 1", a.pid)]);
    let waiting = start(b, &wait("k", 1), &mut watch, 1);
    give_back(&mut a, "k", 1);
    granted(waiting);
    assert_eq!(take(&mut primary.session("primary"), "k", 1), 1);
}

#[test]
fn rules_for_the_domain() {
    let database = Server::shared().new_database("slots", "UTF8");
    let [team, stranger] = ["slots_team", "slots_stranger"].map(|role| database.new_role(role));
    let mut admin = database.session("admin");
    let mut member = database.session_as(&team, "member");
    let mut other = database.session_as(&stranger, "stranger");
    assert_eq!(take(&mut other, "jobs:a", 5), 1);
    admin.run(&format!("select lock_domain_set('jobs', '{team}', '300 ms', '1 hour')"));
    other.fails("select named_semaphore('jobs:a', 5, '0')").is("42501").message_has("domain \"jobs\"");
    // What was taken before can be given back.
    give_back(&mut other, "jobs:a", 1);
    assert_eq!(take(&mut other, "jobs", 5), 1);
    assert_eq!(take(&mut member, "jobs:a", 1), 1);
    assert_eq!(
        member.column("select hold_limit from lock_holders where name = 'jobs:a'"),
        ["01:00:00"],
        "the rule's, where the call gives none"
    );
    member.fails("select named_semaphore('jobs:b', 1, hold_limit => '61 min')").is("22023").message_has("max_hold");
    let start = Instant::now();
    admin.fails("select named_semaphore('jobs:a', 1)").is("55P03").message_has("max_wait of its domain (300 ms)");
    assert_eq!(admin.maybe("select named_semaphore('jobs:a', 1, '60 s')"), None);
    assert!(start.elapsed() >= Duration::from_millis(600) && start.elapsed() < Duration::from_secs(30));
    admin.run("select lock_domain_set('jobs', max_wait => '0')");
    admin.fails("select named_semaphore('jobs:a', 1)").is("55P03");
    assert_eq!(admin.maybe("select named_semaphore('jobs:a', 1, '60 s')"), None);
    admin.run("select lock_domain_set('jobs', max_hold => '300 ms')");
    assert_eq!(take(&mut other, "jobs:b", 1), 1);
    admin.until_gone(other.pid);
}

#[test]
fn as_the_views_and_the_graph_show_them() {
    let server = Server::shared();
    let owner = server.new_role("semaphore_owner");
    let stranger = server.new_role("semaphore_stranger");
    let mut watch = server.session("watch");
    let k = format!("{}:slots", unique("views"));
    let mut a = server.session_as(&owner, "app a");
    let mut b = server.session_as(&owner, "app b");
    assert_eq!(take(&mut a, &k, 2), 1);
    assert_eq!(take(&mut b, &k, 2), 2);
    let mut waiters = vec![start(server.session_as(&owner, "app c"), &wait(&k, 2), &mut watch, 1)];
    for place in [2, 3] {
        let sql = format!("select named_semaphore('{k}', 2, '1 hour')");
        waiters.push(start(server.session("app d"), &sql, &mut watch, place));
    }
    assert_eq!(
        watch.column(&format!(
            "select concat_ws(' ', kind, domain || ':slots' = name, mode, holds, pid, usename, application_name, state, \
                              now() - acquired_at < '1 minute' and held_for < '1 minute', hold_limit, expires_at, token, \
                              owner, waiters, database = current_database(), gid) \
               from lock_holders where name = '{k}' order by objsubid"
        )),
        [(&a, "app a"), (&b, "app b")]
            .map(|(session, app)| format!("semaphore t exclusive 1 {} {owner} {app} idle t 3 t", session.pid)),
    );
    let [first, second] = [0, 1].map(|index| waiters[index].pid);
    let rows = watch.column(&format!(
        "select concat_ws(' ', kind, domain || ':slots' = name, mode, pid, application_name, \
                          waited < '1 minute' and wait_started < now() + '1 s', \
                          round(extract(epoch from deadline - wait_started)), queue_position, \
                          array(select unnest(blocked_by) order by 1)) \
           from lock_waiters where name = '{k}' order by queue_position"
    ));
    let holders = sorted([a.pid, b.pid]);
    let ahead = sorted([first, second]);
    assert_eq!(
        rows,
        [
            format!("semaphore t exclusive {first} app c t 1 {{{},{}}}", holders[0], holders[1]),
            format!("semaphore t exclusive {second} app d t 3600 2 {{{first}}}"),
            format!("semaphore t exclusive {} app d t 3600 3 {{{},{}}}", waiters[2].pid, ahead[0], ahead[1]),
        ]
    );
    let graph = watch.text("select lock_graph()");
    for line in [
        format!("p{first} -->|\"{k}\"| p{}", a.pid),
        format!("p{first} -->|\"{k}\"| p{}", b.pid),
        format!("p{second} -->|\"{k}\"| p{first}"),
    ] {
        assert_eq!(graph.matches(&line).count(), 1, "{line}\n{graph}");
    }
    // The names are not for strangers; that there is something is.
    let mut stranger = server.session_as(&stranger, "stranger");
    let at = format!("where pid in ({}, {first})", a.pid);
    assert_eq!(
        stranger.column(&format!(
            "select concat_ws(' ', kind, domain, name, mode) from lock_holders {at} \
             union all select concat_ws(' ', kind, domain, name, mode) from lock_waiters {at}"
        )),
        ["semaphore exclusive", "semaphore exclusive"]
    );
    let graph = stranger.text("select lock_graph()");
    assert!(!graph.contains(&k) && graph.contains(&format!("p{first} -->|\"semaphore\"| p{}", a.pid)), "{graph}");
    // What is beside the slots is not shown.
    assert_eq!(watch.int(&format!("select count(*) from lock_holders where pid in ({}, {})", a.pid, b.pid)), 2);
    assert_eq!(watch.int(&format!("select count(*) from lock_holders where pid in ({first}, {second})")), 0);
    for session in [&mut a, &mut b] {
        session.run("select named_unlock_all()");
    }
    for waiter in waiters {
        let (mut session, slot, _) = granted(waiter);
        give_back(&mut session, &k, slot);
    }
    nothing_is_left(&mut watch, &k);
}

fn sorted(mut pids: [i32; 2]) -> [i32; 2] {
    pids.sort_unstable();
    pids
}

/// What is shown while slots come and go is a slot, by its name if that is known.
#[test]
fn looking_while_slots_come_and_go() {
    let server = Server::shared();
    let k = unique("looking");
    let is_over = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let running: Vec<_> = (0..4)
        .map(|_| {
            let (k, is_over) = (k.clone(), is_over.clone());
            server.session("comes and goes").spawn(move |session| {
                let mut grants = 0;
                while !is_over.load(std::sync::atomic::Ordering::Relaxed) {
                    session.run(&format!(
                        "do $$ declare slot int; begin for i in 1..100 loop \
                           slot := named_semaphore('{k}', 3); perform named_semaphore_release('{k}', slot); \
                         end loop; end $$"
                    ));
                    grants += 100;
                }
                grants
            })
        })
        .collect();
    let pids: Vec<String> = running.iter().map(|running| running.pid.to_string()).collect();
    let mut watch = server.session("watch");
    let mut seen = 0;
    for _ in 0..300 {
        let rows = watch.column(&format!(
            "select concat_ws(' ', kind, name, mode) from lock_holders where pid in ({})",
            pids.join(", ")
        ));
        assert!(rows.len() <= 3, "{rows:?}");
        seen += rows.len();
        for row in rows {
            assert!(row == format!("semaphore {k} exclusive") || row == "semaphore exclusive", "{row}");
        }
    }
    is_over.store(true, std::sync::atomic::Ordering::Relaxed);
    for running in running {
        assert!(running.end().1 > 0);
    }
    assert!(seen > 0);
    nothing_is_left(&mut watch, &k);
}

#[test]
fn a_transaction_is_prepared_while_a_slot_is_held() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let k = unique("prepared");
    let mut a = server.session("a");
    assert_eq!(take(&mut a, &k, 2), 1);
    a.run("begin");
    assert_eq!(take(&mut a, &k, 2), 2);
    assert_eq!(try_take(&mut a, &k, 2), None);
    a.run(&format!("select named_semaphore('{k}', 2, '10 ms')"));
    a.run(&format!("select named_xact_lock('{k}'); prepare transaction '{k}'"));
    assert_eq!(shown(&mut watch, &k), [format!("{} 1", a.pid), format!("{} 2", a.pid)]);
    give_back(&mut a, &k, 1);
    assert_eq!(take(&mut watch, &k, 2), 1);
    watch.run(&format!("commit prepared '{k}'"));
    assert_eq!(a.int("select named_unlock_all()"), 1);
    give_back(&mut watch, &k, 1);
    nothing_is_left(&mut watch, &k);
}

#[test]
fn c20_a_database_has_its_own_semaphores() {
    let server = Server::shared();
    let elsewhere = server.new_database("slots", "UTF8");
    let mut here = server.session("here");
    let mut there = elsewhere.session("there");
    let mut watch = server.session("watch");
    let k = unique("c20");
    assert_eq!(take(&mut here, &k, 1), 1);
    assert_eq!(take(&mut there, &k, 1), 1);
    let waiting = start(elsewhere.session("waiter"), &wait(&k, 1), &mut watch, 1);
    assert_eq!(
        watch.column(&format!("select database || waiters from lock_holders where name = '{k}' order by waiters")),
        [format!("{}0", server.dbname), format!("{}1", elsewhere.dbname)]
    );
    give_back(&mut here, &k, 1);
    assert_eq!(position(&mut watch, waiting.pid), 1);
    give_back(&mut there, &k, 1);
    granted(waiting);
}

/// How many grants in all, among so many sessions.
const GRANTS: usize = 19_200;
const SESSIONS: usize = 64;
const SLOTS: usize = 5;

/// Whoever has a slot takes a native lock of the same number, which nobody else has unless a slot is taken twice.
#[test]
fn never_more_than_n_of_sixty_four_sessions() {
    let database = Server::shared().new_database("slots", "UTF8");
    let mut watch = database.session("watch");
    let start = Instant::now();
    let running: Vec<_> = (0..SESSIONS)
        .map(|number| {
            // Every third only tries.
            let timeout = if number % 3 == 0 { "'0'" } else { "null" };
            database.session("slots").background(&format!(
                "do $$ declare slot int; granted int := 0; begin \
                   while granted < {} loop \
                     slot := named_semaphore('k', {SLOTS}, {timeout}); \
                     if slot is null then perform pg_sleep(0.0001); continue; end if; \
                     if slot not between 1 and {SLOTS} or not pg_try_advisory_lock(1, slot) then \
                       raise 'slot % is taken by two', slot; \
                     end if; \
                     granted := granted + 1; \
                     perform pg_advisory_unlock(1, slot), named_semaphore_release('k', slot); \
                   end loop; end $$",
                GRANTS / SESSIONS
            ))
        })
        .collect();
    for running in running {
        running.end().1.expect("no slot is taken by two");
    }
    println!("{GRANTS} grants in {:?}", start.elapsed());
    nothing_is_left(&mut watch, "k");
}

/// Who is in with a slot for certain, since when.
#[derive(Default)]
struct Inside {
    clock: u64,
    entries: Vec<(u64, usize, i64)>,
    is_doomed: Vec<bool>,
    pids: Vec<i32>,
}

impl Inside {
    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// One comes in who asked for `permits` at that time.
    fn enter(&mut self, who: usize, asked: u64, permits: i64, slot: i64) {
        assert!((1..=permits).contains(&slot), "{slot} of {permits}");
        let all_the_while = self.entries.iter().filter(|entry| entry.0 < asked).count() as i64;
        assert!(all_the_while < permits, "{all_the_while} of {permits}, and one more: {:?}", self.entries);
        assert!(self.entries.iter().all(|entry| entry.2 != slot), "slot {slot}: {:?}", self.entries);
        let since = self.tick();
        self.entries.push((since, who, slot));
    }

    fn leave(&mut self, who: usize) {
        self.entries.retain(|entry| entry.1 != who);
    }
}

/// Callers of different numbers at once: each finds fewer than its own number.
#[test]
fn mixed_numbers_under_load() {
    const SESSIONS: usize = 12;
    let server = Server::shared();
    let mut watch = server.session("watch");
    let k = unique("mixed");
    let inside: Arc<Mutex<Inside>> = Arc::default();
    let running: Vec<_> = (0..SESSIONS)
        .map(|who| {
            let (k, inside) = (k.clone(), inside.clone());
            server.session("mixed").spawn(move |session| {
                let mut random = Random(who as u64);
                let mut grants = [0; 3];
                for _ in 0..400 {
                    let index = random.index(3);
                    let permits = [3, 5, 8][index];
                    let timeout = random.pick(&["'0'", "'0'", "'5 ms'", "'20 s'"]);
                    let asked = inside.lock().expect("no panic").tick();
                    let rows = session.run(&format!("select named_semaphore('{k}', {permits}, {timeout})"));
                    let Some(slot) = slot_in(&rows) else { continue };
                    inside.lock().expect("no panic").enter(who, asked, permits, slot);
                    grants[index] += 1;
                    if random.one_in(3) {
                        session.run("select 1");
                    }
                    inside.lock().expect("no panic").leave(who);
                    give_back(session, &k, slot);
                }
                grants
            })
        })
        .collect();
    let mut all = [0; 3];
    for running in running {
        for (sum, of_one) in all.iter_mut().zip(running.end().1) {
            *sum += of_one;
        }
    }
    assert!(all.iter().all(|grants| *grants > 50), "{all:?}");
    nothing_is_left(&mut watch, &k);
}

/// Sessions are cancelled and killed wherever they are.
#[test]
fn never_more_than_three_whoever_is_killed() {
    const SESSIONS: usize = 8;
    const PERMITS: i64 = 3;
    let server = Server::shared();
    let mut watch = server.session("watch");
    let k = unique("killed");
    let sessions: Vec<Session> = (0..SESSIONS).map(|_| server.session("killed")).collect();
    let inside = Arc::new(Mutex::new(Inside {
        is_doomed: vec![false; SESSIONS],
        pids: sessions.iter().map(|session| session.pid).collect(),
        ..Inside::default()
    }));
    let end = Instant::now() + Duration::from_secs(8);
    let running: Vec<_> = sessions
        .into_iter()
        .enumerate()
        .map(|(who, session)| {
            let (k, inside) = (k.clone(), inside.clone());
            session.spawn(move |session| {
                let mut random = Random(who as u64);
                let (mut grants, mut ends) = (0, 0);
                let mut held = None;
                while Instant::now() < end {
                    let timeout = random.pick(&["'0'", "'50 ms'", "null", "null"]);
                    let (asked, sql) = match held {
                        None => (
                            inside.lock().expect("no panic").tick(),
                            format!("select named_semaphore('{k}', {PERMITS}, {timeout})"),
                        ),
                        Some(slot) => {
                            inside.lock().expect("no panic").leave(who);
                            (0, format!("select named_semaphore_release('{k}', {slot})"))
                        }
                    };
                    let answer = session.query(&sql);
                    let mut inside = inside.lock().expect("no panic");
                    match answer {
                        Ok(rows) if held.is_none() => {
                            held = slot_in(&rows);
                            if let Some(slot) = held {
                                grants += 1;
                                if !inside.is_doomed[who] {
                                    inside.enter(who, asked, PERMITS, slot);
                                }
                            }
                        }
                        Ok(_) => held = None,
                        Err(error) if error.code == "57014" => {
                            // Cancelled: it may have the slot of a call that came to its end before.
                            drop(inside);
                            until("the next statement is not cancelled", || {
                                session.query("select named_unlock_all()").is_ok() || session.client.is_closed()
                            });
                            held = None;
                        }
                        Err(error) => {
                            error.is_end_of_session();
                            ends += 1;
                            held = None;
                            *session = Server::shared().session("killed");
                            inside.pids[who] = session.pid;
                            inside.is_doomed[who] = false;
                        }
                    }
                }
                (grants, ends)
            })
        })
        .collect();
    let mut random = Random(99);
    while Instant::now() < end {
        let who = random.index(SESSIONS);
        let mut inside = inside.lock().expect("no panic");
        let pid = inside.pids[who];
        if random.one_in(2) {
            inside.is_doomed[who] = true;
            inside.leave(who);
            watch.run(&format!("select pg_terminate_backend({pid})"));
        } else {
            watch.run(&format!("select pg_cancel_backend({pid})"));
        }
        drop(inside);
        let_pass(random.below(20));
    }
    let (mut grants, mut ends) = (0, 0);
    // Who waits without a limit for others that have ended with a slot in hand is served as they are dropped.
    until("all have come to their end", || {
        watch
            .run(&format!("select pg_cancel_backend(pid) from lock_waiters where name = '{k}' and kind = 'semaphore'"));
        running.iter().all(Running::finished)
    });
    for running in running {
        let (session, (of_one, ended)) = running.end();
        grants += of_one;
        ends += ended;
        drop(session);
    }
    assert!(grants > 100 && ends > 20, "{grants} grants, {ends} ends");
    until("all sessions are gone", || shown(&mut watch, &k).is_empty());
    nothing_is_left(&mut watch, &k);
    for slot in 1..=PERMITS {
        assert_eq!(take(&mut watch, &k, PERMITS), slot);
    }
    assert_eq!(try_take(&mut watch, &k, PERMITS), None);
}
