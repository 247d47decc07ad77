//! Leases against each other: the guard against a takeover, grants, renewals and releases that are not committed, and a
//! history of many sessions some of which are killed.
//!
//! `NAMED_LOCKS_SEED=n` runs the history's calls again (how they meet is up to the machine), and `NAMED_LOCKS_SECONDS=n`
//! runs it for longer.

use crate::pg_test::support::lease_queue::{
    Way, give_back, left_no_trace, position, take, take_with, try_take, until_queued,
};
use crate::pg_test::support::{
    Cluster, Random, Rows, Running, Server, Session, SqlError, let_pass, unique, unique_ident, until,
};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::time::{Duration, Instant};

/// Passes a few microseconds without giving up the processor, as a sleep is too coarse.
fn spin(microseconds: u64) {
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_micros(microseconds) {
        std::hint::spin_loop();
    }
}

#[track_caller]
fn waits(session: Session, statement: &str, watch: &mut Session) -> Running<Result<Rows, SqlError>> {
    let waiting = session.background(statement);
    until_queued(watch, waiting.pid, 1);
    waiting
}

/// The end of a waiter that is granted the lease.
#[track_caller]
fn granted(waiting: Running<Result<Rows, SqlError>>) -> (Session, i64) {
    let (session, answer) = waiting.end();
    let rows = answer.unwrap_or_else(|error| panic!("{error:#?}"));
    (session, rows[0].get(0).expect("granted").parse().expect("a token"))
}

const GUARDED: &str = "create table guarded (round int, who text, token bigint, saw bigint, nr bigserial); \
     create index on guarded (round)";

/// A guarded write: it notes how many writes with lower tokens it saw.
fn write(round: u64, who: &str, token: i64) -> String {
    format!(
        "insert into guarded (round, who, token, saw) \
         select {round}, '{who}', {token}, count(*) from guarded where round = {round} and token < {token}"
    )
}

/// What must never be: a write with a lower token that one with a higher token did not see, as it came later.
const LATE_WRITES: &str = "select count(*) from guarded as b join guarded as a using (round) \
      where a.token < b.token and (b.saw = 0 or a.nr > b.nr)";

/// How a holder whose lease is ending writes: BEGIN, the guard, the write and COMMIT.
struct Holder {
    isolation: &'static str,
    /// All in one string, or one by one.
    in_one: bool,
}

impl Holder {
    fn of_round(round: u64) -> Holder {
        // Half of each isolation level, and in each half a third in one string.
        Holder {
            isolation: if round.is_multiple_of(2) { "read committed" } else { "repeatable read" },
            in_one: (round / 2).is_multiple_of(3),
        }
    }

    /// Whether it could; otherwise it is told that the lease is lost.
    #[track_caller]
    fn write(&self, a: &mut Session, k: &str, token: i64, round: u64, pause: u64) -> bool {
        let steps = [
            format!("begin isolation level {}", self.isolation),
            format!("select lease_guard('{k}', {token})"),
            write(round, "a", token),
            "commit".to_owned(),
        ];
        let result = if self.in_one {
            a.query(&steps.join("; ")).map(drop)
        } else {
            steps.iter().try_for_each(|step| {
                let result = a.query(step).map(drop);
                spin(pause);
                result
            })
        };
        match result {
            Ok(()) => true,
            Err(error) => {
                assert!(["55006", "55000"].contains(&error.code.as_str()), "{error:#?}");
                a.run("rollback");
                false
            }
        }
    }
}

/// 9,000 rounds: the holder writes with the guard while an administrator breaks its lease and the next one takes it.
#[test]
fn c30_a_guarded_write_against_a_takeover_by_a_break() {
    const ROUNDS: u64 = 9_000;
    let cluster = Cluster::new(&[]);
    let _log = LogOfFailure(&cluster);
    let server: Server = (*cluster).clone();
    let mut watch = server.session("watch");
    watch.run(GUARDED);
    let barrier = Arc::new(Barrier::new(2));
    let token = Arc::new(AtomicI64::new(0));
    let written = Arc::new(AtomicU64::new(0));

    let holder = {
        let (barrier, token, written) = (barrier.clone(), token.clone(), written.clone());
        server.session("holder").spawn(move |a| {
            let mut random = Random(30);
            for round in 0..ROUNDS {
                barrier.wait();
                let pause = random.below(200);
                spin(random.below(1500));
                let done = Holder::of_round(round).write(a, "k", token.load(Ordering::SeqCst), round, pause);
                written.fetch_add(u64::from(done), Ordering::SeqCst);
                barrier.wait();
            }
        })
    };
    let mut b = server.session("taker");
    let mut random = Random(31);
    let way = |round: u64| match round % 4 {
        0 => Way::Call.take("k", "1 hour", Some("30 s"), ""),
        1 => Way::Call.wait("k"),
        2 => Way::Function.take("k", "1 hour", Some("30 s"), ""),
        _ => Way::Function.wait("k"),
    };
    let mut guarded_first = 0;
    for round in 0..ROUNDS {
        // The pair of a round begins with a lease that is held.
        token.store(take(&mut b, "k", "1 hour"), Ordering::SeqCst);
        barrier.wait();
        spin(random.below(1500));
        b.run("select lease_break('k')");
        if !try_take(&mut b, "k") {
            guarded_first += 1;
        } else {
            b.run("select lease_break('k')");
        }
        let taken = b.int(&way(round));
        assert!(taken > token.load(Ordering::SeqCst));
        b.run(&write(round, "b", taken));
        give_back(&mut b, "k", taken);
        barrier.wait();
    }
    holder.end();
    assert_eq!(watch.int(LATE_WRITES), 0);
    assert_eq!(watch.int("select count(*) from guarded where who = 'b'"), ROUNDS as i64);
    let written = written.load(Ordering::SeqCst);
    assert_eq!(watch.int("select count(*) from guarded where who = 'a'"), written as i64);
    println!("{written} written, {guarded_first} times the taker met the guard");
    // They met: some came first, some too late, some at the same time.
    assert!(written > 100 && written < ROUNDS - 100, "{written} of {ROUNDS} written");
    assert!(guarded_first > 0, "the taker never met a guarded transaction");
}

/// 1,000 rounds in which the lease expires, many at a time.
#[test]
fn c30_a_guarded_write_against_a_takeover_after_expiry() {
    const PAIRS: u64 = 20;
    const ROUNDS: u64 = 50;
    let cluster = Cluster::new(&[]);
    let _log = LogOfFailure(&cluster);
    let server: Server = (*cluster).clone();
    let mut watch = server.session("watch");
    watch.run(GUARDED);
    let written = Arc::new(AtomicU64::new(0));
    let running: Vec<_> = (0..PAIRS)
        .flat_map(|pair| {
            let token = Arc::new(AtomicI64::new(0));
            let barrier = Arc::new(Barrier::new(2));
            let k = format!("k {pair}");
            let holder = {
                let (k, barrier, token, written) = (k.clone(), barrier.clone(), token.clone(), written.clone());
                server.session("holder").spawn(move |a| {
                    let mut random = Random(pair);
                    for round in 0..ROUNDS {
                        let held = take(a, &k, "100 ms");
                        let begun = Instant::now();
                        token.store(held, Ordering::SeqCst);
                        barrier.wait();
                        // At about the time of its end.
                        let delay = Duration::from_micros(88_000 + random.below(14_000));
                        std::thread::sleep(delay.saturating_sub(begun.elapsed()));
                        let number = pair * ROUNDS + round;
                        let done = Holder::of_round(round).write(a, &k, held, number, random.below(3000));
                        written.fetch_add(u64::from(done), Ordering::SeqCst);
                        barrier.wait();
                        // The taker gives it back.
                        barrier.wait();
                    }
                })
            };
            let taker = server.session("taker").spawn(move |b| {
                for round in 0..ROUNDS {
                    barrier.wait();
                    let way = Way::ALL[(round / 2 % 2) as usize];
                    let taken = b.int(&way.take(&k, "1 hour", (round % 3 == 0).then_some("30 s"), ""));
                    assert!(taken > token.load(Ordering::SeqCst));
                    b.run(&write(pair * ROUNDS + round, "b", taken));
                    barrier.wait();
                    give_back(b, &k, taken);
                    barrier.wait();
                }
            });
            [holder, taker]
        })
        .collect();
    for session in running {
        session.end();
    }
    assert_eq!(watch.int(LATE_WRITES), 0);
    assert_eq!(watch.int("select count(*) from guarded where who = 'b'"), (PAIRS * ROUNDS) as i64);
    let written = written.load(Ordering::SeqCst);
    println!("{written} of {} written", PAIRS * ROUNDS);
    assert!(written > 10 && written < PAIRS * ROUNDS - 10, "{written} written");
}

/// The guard reads what is committed when it is called, whatever snapshot its transaction has.
#[test]
fn c30_a_guard_of_an_old_snapshot_sees_the_takeover() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let table = unique_ident("c30");
    watch.run(&format!("create table {table} (i int); insert into {table} values (1)"));
    for isolation in ["read committed", "repeatable read", "serializable"] {
        for taken_over in ["taken", "released", "broken", "expired", "renewed"] {
            let k = unique("c30");
            let mut a = server.session("holder");
            let ttl = if taken_over == "expired" { "600 ms" } else { "1 hour" };
            let token = take(&mut a, &k, ttl);
            a.run(&format!("begin isolation level {isolation}; select * from {table}"));
            if taken_over == "taken" || taken_over == "broken" {
                assert_eq!(watch.int(&format!("select lease_break('{k}')")), 1);
            }
            match taken_over {
                "taken" => {
                    watch.run(&format!("select lease_acquire('{k}', '1 hour', owner => 'the next')"));
                }
                "released" => give_back(&mut watch, &k, token),
                "expired" => let_pass(610),
                "renewed" => {
                    watch.run(&format!("select lease_renew('{k}', {token}, '2 hours')"));
                }
                _ => {}
            }
            let check = a.flag(&format!("select lease_check('{k}', {token})"));
            assert_eq!(check, taken_over == "renewed", "{isolation} {taken_over}");
            let guard = format!("select lease_guard('{k}', {token})");
            match taken_over {
                "renewed" => {
                    a.run(&guard);
                    a.run("commit");
                    give_back(&mut a, &k, token);
                }
                "taken" => {
                    a.fails(&guard).is("55006").detail_has("the next");
                    a.run("rollback");
                }
                _ => {
                    a.fails(&guard).is("55000");
                    a.run("rollback");
                }
            }
            left_no_trace(&mut watch, a.pid, taken_over);
        }
    }
}

/// The write of a holder that was taken over fails before it is done, in the transaction of the guard.
#[test]
fn c30_a_paused_holders_late_write_fails() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let table = unique_ident("c30");
    watch.run(&format!("create table {table} (token bigint); insert into {table} values (0)"));
    let k = unique("c30");
    let mut a = server.session("paused");
    let old = take(&mut a, &k, "300 ms");
    a.run("begin");
    a.run(&format!("select lease_guard('{k}', {old})"));
    a.run(&format!("update {table} set token = {old}"));
    // The pause: its lease ends, and nobody is granted it before its transaction ends.
    let_pass(400);
    let mut b = server.session("next");
    assert_eq!(
        b.text(&format!(
            "select concat_ws(' ', acquired, holder is null, retry_after) from lease_acquire('{k}', '1 hour')"
        )),
        "f t 00:00:00.1"
    );
    let waiting = waits(b, &Way::Function.wait(&k), &mut watch);
    a.run("commit");
    let (mut b, new) = granted(waiting);
    b.run(&format!("begin; select lease_guard('{k}', {new}); update {table} set token = {new}; commit"));
    for statement in [
        format!("begin; select lease_guard('{k}', {old}); update {table} set token = {old}; commit"),
        format!("update {table} set token = {old} from (select lease_guard('{k}', {old}) offset 0) as g"),
        format!("with g as materialized (select lease_guard('{k}', {old})) update {table} set token = {old} from g"),
        format!("do $$ begin perform lease_guard('{k}', {old}); update {table} set token = {old}; end $$"),
    ] {
        a.fails(&statement).is("55006");
        a.run("rollback");
    }
    assert_eq!(watch.int(&format!("select token from {table}")), new);
}

/// A savepoint's guard goes with it; an outer one stays.
#[test]
fn c30_a_guard_and_savepoints() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for (what, script, keeps_out) in [
        ("in a savepoint that is open", "savepoint s; $g", true),
        ("rolled back to", "savepoint s; $g; rollback to s", false),
        ("rolled back to and guarded before", "$g; savepoint s; $g; rollback to s", true),
        ("released", "savepoint s; $g; release s", true),
        ("released into one that is rolled back to", "savepoint s; savepoint r; $g; release r; rollback to s", false),
        ("the outer one rolled back to", "savepoint s; $g; savepoint r; rollback to s", false),
        ("the inner one rolled back to", "savepoint s; $g; savepoint r; rollback to r", true),
        ("an error in a savepoint", "savepoint s; $g; savepoint r; $e; rollback to r", true),
        ("an error in its savepoint", "savepoint s; $g; $e; rollback to s", false),
        (
            "a caught exception",
            "do $$ begin begin perform lease_guard('$k', $t); raise 'x'; exception when others then null; end; end $$",
            false,
        ),
        (
            "a caught exception beside it",
            "do $$ begin perform lease_guard('$k', $t); begin raise 'x'; exception when others then null; end; end $$",
            true,
        ),
        ("in a cursor's loop", "declare c cursor for select lease_guard('$k', $t); fetch 1 from c; close c", true),
    ] {
        for permits in [1, 2] {
            let k = unique("c30");
            let mut a = server.session("holder");
            let more = format!(", permits => {permits}");
            let tokens: Vec<i64> = (0..permits).map(|_| take_with(&mut a, &k, "1 hour", &more)).collect();
            a.run("begin");
            // A DO is one statement.
            let steps: Vec<&str> = if script.contains("$$") { vec![script] } else { script.split("; ").collect() };
            for step in steps {
                let step = step
                    .replace("$g", "select lease_guard('$k', $t)")
                    .replace("$k", &k)
                    .replace("$t", &tokens[0].to_string());
                if step == "$e" {
                    a.fails("select 1/0").is("22012");
                } else {
                    a.run(&step);
                }
            }
            assert_eq!(watch.int(&format!("select lease_break('{k}')")), permits, "{what}");
            let next = watch.maybe(&format!("select token from lease_acquire('{k}', '1 hour'{more})"));
            assert_eq!(next.is_none(), keeps_out, "{what}, {permits} permits");
            a.run("commit");
            for _ in usize::from(!keeps_out)..permits as usize {
                take_with(&mut watch, &k, "1 hour", &more);
            }
            left_no_trace(&mut watch, a.pid, what);
        }
    }
}

/// Several guards of one lease go side by side; the next grant waits for the last of them.
#[test]
fn c30_guards_of_several_sessions() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let k = unique("c30");
    let token = take(&mut watch, &k, "1 hour");
    let mut guards: Vec<Session> = (0..4).map(|_| server.session("guard")).collect();
    for guard in &mut guards {
        guard.run("set statement_timeout = '30s'; begin");
        guard.run(&format!("select lease_guard('{k}', {token})"));
    }
    watch.run(&format!("select lease_break('{k}')"));
    let waiting = waits(server.session("next"), &Way::Call.wait(&k), &mut watch);
    for (number, guard) in guards.iter_mut().enumerate() {
        assert!(!waiting.finished(), "{number}");
        assert_eq!(position(&mut watch, waiting.pid), 1);
        guard.run(if number % 2 == 0 { "commit" } else { "rollback" });
    }
    granted(waiting);
}

/// PREPARE TRANSACTION keeps the guard, over a restart too.
#[test]
fn c30_a_guard_and_a_prepared_transaction() {
    let cluster = Cluster::new(&[]);
    let mut watch = cluster.session("watch");
    watch.run("create table work (i int)");
    for (gid, end, restart) in [
        ("commit", "commit prepared 'commit'", false),
        ("rollback", "rollback prepared 'rollback'", false),
        ("restart commit", "commit prepared 'restart commit'", true),
        ("restart rollback", "rollback prepared 'restart rollback'", true),
    ] {
        let mut a = cluster.session("holder");
        let token = take(&mut a, gid, "1 hour");
        a.run("begin; insert into work values (1)");
        a.run(&format!("select lease_guard('{gid}', {token})"));
        a.run(&format!("prepare transaction '{gid}'"));
        drop(a);
        if restart {
            cluster.restart();
            watch = cluster.session("watch");
            assert!(watch.flag(&format!("select lease_check('{gid}', {token})")));
        }
        assert_eq!(watch.int(&format!("select lease_break('{gid}')")), 1);
        assert!(!try_take(&mut watch, gid), "{gid}");
        let mut b = cluster.session("limited");
        assert_eq!(b.maybe(&Way::Call.take(gid, "1 hour", Some("1200 ms"), "")), None, "{gid}");
        let waiting = waits(b, &Way::Call.wait(gid), &mut watch);
        let mut committer = cluster.session("committer");
        committer.run(end);
        granted(waiting);
    }
    assert_eq!(watch.int("select count(*) from work"), 2);
}

/// A queued acquirer, and more behind it, shut out none of the holder's calls.
#[test]
fn c53_a_queue_does_not_shut_out_the_holder() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for permits in [1, 2] {
        let k = unique("c53");
        let more = format!(", permits => {permits}");
        let mut a = server.session("holder");
        let tokens: Vec<i64> = (0..permits).map(|_| take_with(&mut a, &k, "1 hour", &more)).collect();
        let token = tokens[0];
        let head = waits(server.session("head"), &Way::Function.take(&k, "1 hour", None, &more), &mut watch);
        let second = server.session("second").background(&Way::Call.take(&k, "1 hour", Some("1 hour"), &more));
        until_queued(&mut watch, second.pid, 2);

        // From the session that took it and from another.
        let mut other = server.session("other");
        for session in [&mut a, &mut other] {
            session.run("set statement_timeout = '30s'; set lock_timeout = '20s'");
            let begun = Instant::now();
            for round in 0..50 {
                session.run("begin");
                session.run(&format!("select lease_guard('{k}', {token})"));
                if round % 10 == 0 {
                    // A head that tried the lock for a while would be met here.
                    let_pass(30);
                }
                session.run(&format!("select lease_guard('{k}', {token})"));
                session.run("commit");
                assert_eq!(session.int(&format!("select waiters from lease_renew('{k}', {token})")), 2);
                assert!(session.flag(&format!("select lease_check('{k}', {token})")));
            }
            assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
        }
        assert!(!head.finished() && !second.finished());

        // Beside a guarded transaction too: it delays the next grant and nothing else.
        other.run("begin");
        other.run(&format!("select lease_guard('{k}', {token})"));
        a.run(&format!("begin; select lease_guard('{k}', {token}); commit"));
        a.run(&format!("select lease_renew('{k}', {token}, '2 hours')"));
        assert!(a.flag(&format!("select lease_request('{k}', 'hand over')")));
        assert_eq!(a.text(&format!("select release_requested from lease_renew('{k}', {token})")), "hand over");
        // The guard itself releases it, and its transaction goes on.
        if permits == 1 {
            give_back(&mut a, &k, token)
        } else {
            give_back(&mut other, &k, token)
        }
        until_queued(&mut watch, head.pid, 1);
        assert!(!head.finished());
        other.run("commit");
        let (mut b, next) = granted(head);
        give_back(&mut b, &k, next);
        let (mut b, next) = granted(second);
        give_back(&mut b, &k, next);
    }
}

/// A long guarded transaction: other leases, other permits, and all that is no grant go on at once.
#[test]
fn c53_a_long_guarded_transaction_delays_only_the_next_grant() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let k = unique("c53");
    let more = ", permits => 2";
    let mut a = server.session("guarded");
    let token = take_with(&mut a, &k, "1 hour", more);
    a.run("begin");
    a.run(&format!("select lease_guard('{k}', {token})"));

    let mut b = server.session("b");
    b.run("set statement_timeout = '10s'");
    // The other permit comes and goes.
    for _ in 0..20 {
        let other = take_with(&mut b, &k, "1 hour", more);
        b.run(&format!("begin; select lease_guard('{k}', {other}); commit"));
        give_back(&mut b, &k, other);
    }
    // Other leases.
    for number in 0..20 {
        let other = format!("{k} {number}");
        let token = b.int(&format!("call lease_acquire_wait('{other}', '1 hour')"));
        give_back(&mut b, &other, token);
    }
    // The lease's own renewal, release and the end of it.
    b.run(&format!("select lease_renew('{k}', {token})"));
    assert!(b.flag(&format!("select lease_request('{k}')")));
    assert!(b.flag(&format!("select lease_check('{k}', {token})")));
    assert_eq!(b.int(&format!("select count(*) from lease_holder('{k}')")), 1);
    assert_eq!(b.int(&format!("select lease_break('{k}')")), 1, "at once, guarded or not");
    assert_eq!(b.int(&format!("select count(*) from lease_holder('{k}')")), 0);
    assert_eq!(b.maybe(&format!("select token from lease_acquire('{k}', '1 hour'{more})")), None);
    assert_eq!(b.maybe(&format!("select token from lease_acquire('{k}', '1 hour', '100 ms'{more})")), None);
    let waiting = waits(b, &Way::Function.take(&k, "1 hour", None, more), &mut watch);
    a.run("commit");
    granted(waiting);
}

/// What is not committed keeps others out, and is nobody's answer.
#[test]
fn an_uncommitted_grant_against_tries_and_waiters() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for isolation in ["read committed", "repeatable read"] {
        for end in ["commit", "rollback"] {
            let k = unique("uncommitted");
            let mut a = server.session("not committed");
            a.run(&format!("begin isolation level {isolation}; select 1"));
            let token = take(&mut a, &k, "1 hour");
            let mut b = server.session("b");
            b.run(&format!("begin isolation level {isolation}"));
            let begun = Instant::now();
            assert_eq!(
                b.text(&format!(
                    "select concat_ws(' ', acquired, token is null, remaining is null, expires_at is null, \
                                           holder is null, retry_after) from lease_acquire('{k}', '1 hour')"
                )),
                "f t t t t 00:00:00.1"
            );
            assert!(begun.elapsed() < Duration::from_secs(10));
            assert_eq!(b.maybe("select pg_current_xact_id_if_assigned()"), None);
            let begun = Instant::now();
            assert_eq!(b.maybe(&Way::Function.take(&k, "1 hour", Some("200 ms"), "")), None);
            assert!(begun.elapsed() >= Duration::from_millis(200));
            b.run("commit");
            assert_eq!(b.maybe(&Way::Call.take(&k, "1 hour", Some("200 ms"), "")), None);
            left_no_trace(&mut watch, b.pid, "tries");
            // It is in no view, and others can do nothing with it.
            assert_eq!(watch.int(&format!("select count(*) from lock_holders where name = '{k}'")), 0);
            assert_eq!(watch.int(&format!("select count(*) from lease_holder('{k}')")), 0);
            assert!(!watch.flag(&format!("select lease_check('{k}', {token})")));
            assert!(!watch.flag(&format!("select lease_request('{k}')")));

            let waiting = waits(b, &Way::Call.wait(&k), &mut watch);
            a.run(end);
            if end == "commit" {
                assert!(watch.flag(&format!("select lease_check('{k}', {token})")));
                until_queued(&mut watch, waiting.pid, 1);
                assert!(!waiting.finished());
                give_back(&mut a, &k, token);
            }
            let (mut b, next) = granted(waiting);
            assert!(next > token, "a token is used up even if it is rolled back");
            assert!(!watch.flag(&format!("select lease_check('{k}', {token})")));
            give_back(&mut b, &k, next);
        }
    }
}

/// The grant's TTL is over before its transaction is: then it is free at that transaction's end, whichever way.
#[test]
fn an_uncommitted_grant_that_expires() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for end in ["commit", "rollback"] {
        let k = unique("uncommitted");
        let mut a = server.session("not committed");
        a.run("begin");
        let token = take(&mut a, &k, "200 ms");
        let_pass(250);
        assert!(!a.flag(&format!("select lease_check('{k}', {token})")), "its own, too");
        assert!(!try_take(&mut watch, &k), "{end}: not while the grant may still be committed");
        let waiting = waits(server.session("b"), &Way::Function.wait(&k), &mut watch);
        a.run(end);
        let (mut b, next) = granted(waiting);
        give_back(&mut b, &k, next);
    }
}

#[test]
fn an_uncommitted_renewal_against_tries_and_waiters() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for isolation in ["read committed", "repeatable read"] {
        for end in ["commit", "rollback", "rollback to s", "terminated"] {
            let k = unique("uncommitted");
            let mut a = server.session("renews");
            let token = take(&mut a, &k, "700 ms");
            let granted_by = Instant::now();
            a.run(&format!("begin isolation level {isolation}; savepoint s"));
            a.run(&format!("select lease_renew('{k}', {token}, '1 hour')"));
            // The old expiry passes. The new one may be committed any moment, so nobody else may be granted it.
            std::thread::sleep((granted_by + Duration::from_millis(720)).saturating_duration_since(Instant::now()));
            let mut b = server.session("b");
            let begun = Instant::now();
            assert!(!try_take(&mut b, &k), "{isolation} {end}");
            assert!(begun.elapsed() < Duration::from_secs(10), "{isolation} {end}: a try doesn't wait");
            let begun = Instant::now();
            assert_eq!(b.maybe(&Way::Call.take(&k, "1 hour", Some("200 ms"), "")), None, "{isolation} {end}");
            assert!(begun.elapsed() < Duration::from_secs(10), "{isolation} {end}: no longer than its timeout");
            left_no_trace(&mut watch, b.pid, end);
            assert!(a.flag(&format!("select lease_check('{k}', {token})")), "{isolation} {end}: its own");
            let waiting = waits(b, &Way::Function.wait(&k), &mut watch);
            // Over a few of its looks.
            let_pass(1300);
            assert!(!waiting.finished(), "{isolation} {end}");
            match end {
                "terminated" => {
                    watch.run(&format!("select pg_terminate_backend({})", a.pid));
                }
                end => {
                    a.run(end);
                }
            }
            if end == "commit" {
                assert!(watch.flag(&format!("select lease_check('{k}', {token})")), "held for an hour");
                let_pass(1300);
                assert!(!waiting.finished());
                give_back(&mut a, &k, token);
            }
            let (mut b, next) = granted(waiting);
            if end == "rollback to s" {
                // The transaction that lost it goes on, and is told.
                a.fails(&format!("select lease_guard('{k}', {token})")).is("55006");
                a.run("rollback");
            }
            assert!(b.flag(&format!("select lease_check('{k}', {next})")));
            give_back(&mut b, &k, next);
        }
    }
}

/// The same for a waiter that sleeps until the old expiry.
#[test]
fn an_uncommitted_renewal_under_a_waiter_that_reckons_with_the_old_expiry() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for way in Way::ALL {
        for end in ["commit", "rollback"] {
            let k = unique("uncommitted");
            let mut a = server.session("renews");
            let token = take(&mut a, &k, "1500 ms");
            let begun = Instant::now();
            let waiting = waits(server.session("b"), &way.wait(&k), &mut watch);
            a.run("begin");
            a.run(&format!("select lease_renew('{k}', {token}, '1 hour')"));
            std::thread::sleep((begun + Duration::from_millis(1900)).saturating_duration_since(Instant::now()));
            assert!(!waiting.finished(), "{way:?} {end}");
            a.run(end);
            if end == "commit" {
                let_pass(1300);
                assert!(!waiting.finished(), "{way:?} {end}");
                give_back(&mut a, &k, token);
            }
            granted(waiting);
        }
    }
}

#[test]
fn an_uncommitted_release_or_break_against_tries_and_waiters() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for isolation in ["read committed", "repeatable read"] {
        for (ends, one) in [
            ("select lease_release('$k', $t)", true),
            ("select lease_release('$k', $t, '2 hours')", true),
            ("select lease_break('$k')", true),
            ("select lease_renew('$k', $t, '200 ms')", false),
        ] {
            for end in ["commit", "rollback"] {
                let what = format!("{isolation} {ends} {end}");
                let k = unique("uncommitted");
                let mut a = server.session("not committed");
                let token = take(&mut a, &k, "1 hour");
                a.run(&format!("begin isolation level {isolation}; select 1"));
                a.run(&ends.replace("$k", &k).replace("$t", &token.to_string()));
                let_pass(if one { 0 } else { 250 });
                assert!(!a.flag(&format!("select lease_check('{k}', {token})")), "{what}: its own");
                let mut b = server.session("b");
                assert!(!try_take(&mut b, &k), "{what}");
                assert_eq!(b.maybe(&Way::Call.take(&k, "1 hour", Some("100 ms"), "")), None, "{what}");
                assert!(b.flag(&format!("select lease_check('{k}', {token})")), "{what}: for others it is held");
                assert_eq!(b.int(&format!("select count(*) from lease_holder('{k}')")), 1, "{what}");
                let waiting = waits(b, &Way::Function.wait(&k), &mut watch);
                a.run(end);
                if end == "rollback" || ends.contains("2 hours") {
                    until_queued(&mut watch, waiting.pid, 1);
                    assert!(!waiting.finished(), "{what}");
                    assert_eq!(watch.flag(&format!("select lease_check('{k}', {token})")), end == "rollback", "{what}");
                    assert_eq!(watch.int(&format!("select lease_break('{k}')")), 1, "{what}");
                }
                let (mut b, next) = granted(waiting);
                give_back(&mut b, &k, next);
            }
        }
    }
}

/// A release that is not committed when the lease expires: the next may be granted it then or at the end of that
/// transaction, never waits longer than its limit, and keeps what it has.
#[test]
fn an_uncommitted_release_of_a_lease_that_expires() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for end in ["commit", "rollback"] {
        for ends in ["select lease_release('$k', $t)", "select lease_break('$k')", "select lease_request('$k', 'x')"] {
            let what = format!("{ends} {end}");
            let k = unique("uncommitted");
            let mut a = server.session("not committed");
            let token = take(&mut a, &k, "500 ms");
            a.run("begin");
            a.run(&ends.replace("$k", &k).replace("$t", &token.to_string()));
            let_pass(550);
            let mut b = server.session("b");
            let begun = Instant::now();
            let early = b.maybe(&Way::Function.take(&k, "1 hour", Some("200 ms"), ""));
            assert!(begun.elapsed() < Duration::from_secs(10), "{what}");
            a.run(end);
            let next = match early {
                Some(token) => token.parse().expect("a token"),
                None => b.int(&Way::Function.take(&k, "1 hour", Some("1 hour"), "")),
            };
            assert!(b.flag(&format!("select lease_check('{k}', {next})")), "{what}");
            assert_eq!(watch.int(&format!("select count(*) from lock_holders where name = '{k}'")), 1, "{what}");
            give_back(&mut b, &k, next);
        }
    }
}

/// Several changes in one transaction, undone in parts.
#[test]
fn uncommitted_changes_and_savepoints() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let k = unique("savepoint");
    let mut a = server.session("a");
    let mut b = server.session("b");
    a.run("begin; savepoint s");
    let first = take(&mut a, &k, "1 hour");
    a.run("rollback to s");
    // It is free again, while A's transaction goes on; and A is refused like anyone.
    let taken = take(&mut b, &k, "1 hour");
    assert!(taken > first);
    assert!(!try_take(&mut a, &k));
    assert!(!a.flag(&format!("select lease_check('{k}', {first})")));
    assert!(a.flag(&format!("select lease_check('{k}', {taken})")));
    give_back(&mut b, &k, taken);
    let second = take(&mut a, &k, "1 hour");
    assert!(second > taken);
    a.run("savepoint r");
    give_back(&mut a, &k, second);
    assert!(!try_take(&mut b, &k), "the grant before it is not committed, nor its release");
    a.run("rollback to r");
    assert!(a.flag(&format!("select lease_check('{k}', {second})")));
    a.run("savepoint q");
    give_back(&mut a, &k, second);
    let third = take(&mut a, &k, "1 hour");
    assert!(third > second);
    a.run("release q; commit");
    assert!(!b.flag(&format!("select lease_check('{k}', {second})")));
    assert!(b.flag(&format!("select lease_check('{k}', {third})")));
    assert_eq!(watch.int(&format!("select count(*) from lock_holders where name = '{k}'")), 1);
    give_back(&mut b, &k, third);

    // Taken and given back in one transaction, many times.
    a.run("begin");
    for _ in 0..20 {
        let token = take(&mut a, &k, "1 hour");
        a.run(&format!("select lease_renew('{k}', {token})"));
        give_back(&mut a, &k, token);
    }
    assert!(!try_take(&mut b, &k));
    a.run("commit");
    let token = take(&mut b, &k, "1 hour");
    give_back(&mut b, &k, token);
}

/// Of three permits one is held, and one is granted to a transaction that is not committed: the third is free, and the
/// fourth waits.
#[test]
fn an_uncommitted_grant_of_one_permit() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let more = ", permits => 3";
    for end in ["commit", "rollback"] {
        let k = unique("permits");
        let (mut a, mut b) = (server.session("a"), server.session("b"));
        let held = take_with(&mut watch, &k, "1 hour", more);
        a.run("begin");
        let first = take_with(&mut a, &k, "1 hour", more);
        b.run("begin");
        let second = take_with(&mut b, &k, "1 hour", more);
        let mut c = server.session("c");
        assert_eq!(c.maybe(&Way::Function.take(&k, "1 hour", Some("100 ms"), more)), None);
        let waiting = waits(c, &Way::Call.take(&k, "1 hour", None, more), &mut watch);
        b.run("commit");
        until_queued(&mut watch, waiting.pid, 1);
        assert!(!waiting.finished());
        a.run(end);
        if end == "commit" {
            until_queued(&mut watch, waiting.pid, 1);
            assert!(!waiting.finished());
            give_back(&mut b, &k, first);
        }
        let (_, third) = granted(waiting);
        assert!(held < first && first < second && second < third);
        assert_eq!(watch.int(&format!("select count(*) from lease_holder('{k}')")), 3, "{end}");
        assert_eq!(watch.int(&format!("select lease_break('{k}')")), 3, "{end}");
    }
}

/// The first grants of a counting lease at once, not committed: never more than there are permits, whichever way they end.
#[test]
fn uncommitted_grants_of_all_permits() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for permits in [1, 2, 5] {
        let k = unique("permits");
        let more = format!(", permits => {permits}");
        let mut sessions: Vec<Session> = (0..permits + 3).map(|_| server.session("grants")).collect();
        for round in 0..10 {
            let mut granted = Vec::new();
            for session in &mut sessions {
                session.run("begin");
                let token = session.maybe(&format!("select token from lease_acquire('{k}', '1 hour', '0'{more})"));
                granted.extend(token);
            }
            assert!(!granted.is_empty() && granted.len() <= permits, "{granted:?}");
            for (number, session) in sessions.iter_mut().enumerate() {
                session.run(if (number + round) % 3 == 0 { "rollback" } else { "commit" });
            }
            let held = watch.int(&format!("select count(*) from lease_holder('{k}')"));
            assert!(held <= granted.len() as i64);
            // Then all that are free are free.
            for _ in held..permits as i64 {
                take_with(&mut watch, &k, "1 hour", &more);
            }
            assert!(watch.maybe(&format!("select token from lease_acquire('{k}', '1 hour', '0'{more})")).is_none());
            assert_eq!(watch.int(&format!("select lease_break('{k}')")), permits as i64);
        }
    }
}

/// Many sessions that each want the one lease for a guarded read, change and write, while some are cancelled and killed.
const WORKERS: usize = 16;

/// Who is certainly in its guarded transaction at this moment.
///
/// A worker tells of it between its statements only, and one that is to be terminated tells of nothing. So two entries
/// at once are a fault of the leases.
#[derive(Default)]
struct Inside {
    workers: Vec<usize>,
    is_doomed: [bool; WORKERS],
}

struct History {
    k: String,
    permits: u32,
    inside: Mutex<Inside>,
    pids: Mutex<[i32; WORKERS]>,
    is_over: AtomicBool,
}

struct Worker<'a> {
    number: usize,
    history: &'a History,
    server: &'a Server,
    random: Random,
    session: Session,
    counts: BTreeMap<String, u64>,
}

impl Worker<'_> {
    fn enter(&self) {
        let mut inside = self.history.inside.lock().expect("no worker has failed");
        if !inside.is_doomed[self.number] {
            assert!(
                inside.workers.len() < self.history.permits as usize,
                "{} is inside with {:?}",
                self.number,
                inside.workers
            );
            inside.workers.push(self.number);
        }
    }

    fn leave(&self) {
        let mut inside = self.history.inside.lock().expect("no worker has failed");
        inside.workers.retain(|&worker| worker != self.number);
    }

    fn count(&mut self, what: &str) {
        *self.counts.entry(what.to_owned()).or_default() += 1;
    }

    /// A new session after the end of the old one.
    fn connect(&mut self) {
        self.session = self.server.session(&format!("history {}", self.number));
        self.history.pids.lock().expect("no worker has failed")[self.number] = self.session.pid;
        let mut inside = self.history.inside.lock().expect("no worker has failed");
        inside.is_doomed[self.number] = false;
        inside.workers.retain(|&worker| worker != self.number);
    }

    /// Runs a statement; None after an error that had to be reckoned with, out of any transaction.
    fn run(&mut self, sql: &str) -> Option<Rows> {
        match self.session.query(sql) {
            Ok(rows) => Some(rows),
            Err(error) => {
                self.count(&error.code);
                match error.code.as_str() {
                    "57P01" | "closed" => self.connect(),
                    "57014" | "55P03" | "55006" | "55000" => loop {
                        match self.session.query("rollback") {
                            Ok(_) => break,
                            Err(error) if error.code == "57014" => {}
                            Err(_) => {
                                self.connect();
                                break;
                            }
                        }
                    },
                    _ => panic!("worker {}: {sql}\n{error:#?}", self.number),
                }
                None
            }
        }
    }

    fn step(&mut self) {
        let k = self.history.k.clone();
        let ttl = ["100 ms", "150 ms", "300 ms", "300 ms"][self.random.below(4) as usize];
        let timeout = ["'0'", "'5 ms'", "'100 ms'", "'1 hour'", "null", "null"][self.random.below(6) as usize];
        let more = format!(", permits => {}, bound => {}", self.history.permits, self.random.one_in(3));
        let acquire = if self.random.one_in(2) {
            format!("select token from lease_acquire('{k}', '{ttl}', {timeout}{more})")
        } else {
            format!("call lease_acquire_wait('{k}', '{ttl}', {timeout}{more})")
        };
        let Some(rows) = self.run(&acquire) else { return };
        let Some(token) = rows[0].get(0).map(str::to_owned) else {
            self.count("refused");
            return;
        };
        self.count("granted");
        // Some are late: their lease has ended and another has it, or they renew it.
        match self.random.below(20) {
            0 | 1 => std::thread::sleep(Duration::from_millis(80 + self.random.below(60))),
            2 | 3 if self.run(&format!("select lease_renew('{k}', {token}, '200 ms')")).is_none() => return,
            // Some forget it.
            4 => return,
            _ => {}
        }
        let isolation = ["read committed", "repeatable read"][self.random.below(2) as usize];
        if self.write(&token, isolation).is_none() {
            self.leave();
            return;
        }
        self.count("written");
        match self.random.below(8) {
            0 => {}
            1 => drop(self.run(&format!("select lease_break('{k}')"))),
            2 => drop(self.run(&format!("begin; select lease_release('{k}', {token}); commit"))),
            3 => drop(self.run("discard all")),
            _ => drop(self.run(&format!("select lease_release('{k}', {token})"))),
        }
    }

    /// Reads, thinks and writes: without exclusion some of these would be lost.
    fn write(&mut self, token: &str, isolation: &str) -> Option<()> {
        let k = self.history.k.clone();
        // REPEATABLE READ takes its snapshot with the guard's statement: it sees what was committed before the grant.
        self.run(&format!("begin isolation level {isolation}"))?;
        self.run(&format!("select lease_guard('{k}', {token})"))?;
        self.enter();
        spin(self.random.below(500));
        self.leave();
        let rows = self.run("select n from protected")?;
        let n: i64 = rows[0].get(0).and_then(|n| n.parse().ok()).expect("a number");
        self.enter();
        if self.random.one_in(4) {
            std::thread::sleep(Duration::from_millis(self.random.below(20)));
        }
        self.leave();
        if self.history.permits == 1 {
            self.run(&format!("update protected set n = {}", n + 1))?;
        }
        self.enter();
        spin(self.random.below(200));
        self.leave();
        self.run(&format!("insert into history (n, token) values ({}, {token})", n + 1))?;
        self.run("commit")?;
        Some(())
    }
}

/// Ends the test early when a worker fails, as the others would go on.
struct EndsAll(Arc<History>);

impl Drop for EndsAll {
    fn drop(&mut self) {
        self.0.is_over.store(true, Ordering::Relaxed);
    }
}

/// Prints the end of the server's log when a test fails.
struct LogOfFailure<'a>(&'a Cluster);

impl Drop for LogOfFailure<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let log = self.0.log();
            let lines: Vec<&str> = log.lines().filter(|line| !line.contains("canceling statement")).collect();
            println!("{}", lines[lines.len().saturating_sub(200)..].join("\n"));
        }
    }
}

fn number_of(variable: &str, otherwise: u64) -> u64 {
    std::env::var(variable).ok().and_then(|text| text.parse().ok()).unwrap_or(otherwise)
}

fn history(permits: u32, seconds: u64) {
    let seed = number_of("NAMED_LOCKS_SEED", 20_250_102);
    println!("NAMED_LOCKS_SEED={seed}");
    // A server of its own, whose log can be looked at.
    let cluster = Cluster::new(&[]);
    let _log = LogOfFailure(&cluster);
    let server: Server = (*cluster).clone();
    let mut watch = server.session("watch");
    watch.run(
        "create table protected (n bigint); insert into protected values (0); \
         create table history (nr bigserial, n bigint, token bigint)",
    );
    let history = Arc::new(History {
        k: unique("history"),
        permits,
        inside: Mutex::default(),
        pids: Mutex::default(),
        is_over: AtomicBool::new(false),
    });
    let workers: Vec<_> = (0..WORKERS)
        .map(|number| {
            let (history, server) = (history.clone(), server.clone());
            std::thread::spawn(move || {
                let guard = EndsAll(history.clone());
                let session = server.session(&format!("history {number}"));
                history.pids.lock().expect("no worker has failed")[number] = session.pid;
                let mut worker = Worker {
                    number,
                    history: &history,
                    server: &server,
                    random: Random(seed.wrapping_mul(1_000_003).wrapping_add(number as u64)),
                    session,
                    counts: BTreeMap::new(),
                };
                while !history.is_over.load(Ordering::Relaxed) {
                    worker.step();
                }
                std::mem::forget(guard);
                worker.counts
            })
        })
        .collect();
    until("all are connected", || history.pids.lock().expect("no worker has failed").iter().all(|&pid| pid != 0));

    // Cancels and ends sessions at any moment.
    let mut random = Random(seed);
    let begun = Instant::now();
    let (mut cancels, mut ends) = (0, 0);
    while begun.elapsed() < Duration::from_secs(seconds) && !history.is_over.load(Ordering::Relaxed) {
        std::thread::sleep(Duration::from_micros(random.below(40_000)));
        let number = random.below(WORKERS as u64) as usize;
        let pid = history.pids.lock().expect("no worker has failed")[number];
        if random.one_in(5) {
            {
                let mut inside = history.inside.lock().expect("no worker has failed");
                if history.pids.lock().expect("no worker has failed")[number] != pid {
                    continue;
                }
                inside.is_doomed[number] = true;
                inside.workers.retain(|&worker| worker != number);
            }
            watch.run(&format!("select pg_terminate_backend({pid})"));
            ends += 1;
        } else {
            watch.run(&format!("select pg_cancel_backend({pid})"));
            cancels += 1;
        }
    }
    // The last ones wait for nothing but leases that expire, or for each other.
    history.is_over.store(true, Ordering::Relaxed);
    let mut counts: BTreeMap<String, u64> = BTreeMap::new();
    let mut failed = false;
    let ended = Instant::now();
    for worker in workers {
        while !worker.is_finished() && ended.elapsed() < Duration::from_secs(60) {
            std::thread::sleep(Duration::from_millis(5));
        }
        if !worker.is_finished() {
            let queue = watch.column("select concat_ws(' ', pid, queue_position, blocked_by) from lock_waiters");
            panic!("a worker hangs; the queue: {queue:?}");
        }
        match worker.join() {
            Ok(own) => own.into_iter().for_each(|(what, count)| *counts.entry(what).or_default() += count),
            Err(_) => failed = true,
        }
    }
    assert!(!failed, "a worker has failed");
    println!("{counts:?}, {cancels} cancels, {ends} ends");

    if permits == 1 {
        // Each write built on the one before it, and its token was higher.
        assert_eq!(
            watch.column(
                "select format('%s %s after %s %s', n, token, last_n, last_token) from \
                   (select n, token, lag(n, 1, 0) over w as last_n, lag(token, 1, 0) over w as last_token \
                      from history window w as (order by nr)) as h \
                  where n <> last_n + 1 or token <= last_token"
            ),
            [""; 0]
        );
        assert_eq!(watch.int("select n from protected"), watch.int("select count(*) from history"), "no write is lost");
    }
    assert_eq!(watch.int("select count(*) - count(distinct token) from history"), 0, "one write of each grant");
    // It was a torture.
    let count = |what: &str| counts.get(what).copied().unwrap_or(0);
    let written = watch.int("select count(*) from history") as u64;
    assert!(written >= count("written") && written > 100, "{written} written: {counts:?}");
    assert!(count("57014") > 10 && count("57P01") + count("closed") > 10, "{counts:?}");
    assert!(count("55006") + count("55000") > 0, "nobody was late: {counts:?}");
    assert!(count("refused") > 10, "{counts:?}");

    // And nothing is left of it.
    until("the workers are gone", || {
        watch.int("select count(*) from pg_stat_activity where application_name ~ '^history [0-9]'") == 0
    });
    assert_eq!(watch.int(&format!("select count(*) from lock_waiters where name = '{}'", history.k)), 0);
    assert_eq!(
        watch.int(
            "select count(*) from pg_locks where locktype = 'advisory' and pid <> pg_backend_pid() \
                and database = (select oid from pg_database where datname = current_database())"
        ),
        0
    );
    until("the last leases expire", || {
        watch.int(&format!("select count(*) from lock_holders where name = '{}'", history.k)) == 0
    });
    let more = format!(", permits => {permits}");
    for _ in 0..permits {
        take_with(&mut watch, &history.k, "1 hour", &more);
    }
}

#[test]
fn no_two_holders_at_once_in_a_history_of_many_sessions() {
    history(1, number_of("NAMED_LOCKS_SECONDS", 20));
}

#[test]
fn no_more_holders_at_once_than_permits() {
    history(3, number_of("NAMED_LOCKS_SECONDS", 20) / 2);
}
