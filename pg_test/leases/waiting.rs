//! Waiting for leases: the order, who is woken when, who leaves the queue and what is left of them, limits of all
//! kinds, and the wait without a snapshot.

use crate::pg_test::support::lease_queue::{
    Answered, Way, begin_waiting, give_back, left_no_trace, median, position, start, start_limited, take, take_with,
    try_take, until_queued,
};
use crate::pg_test::support::{
    Reply, Rows, Running, Server, Session, SqlError, Wire, let_pass, stop_process, unique, unique_ident, until, within,
};
use std::process::Child;
use std::time::{Duration, Instant};

/// The token in an answer.
#[track_caller]
fn token_in(answer: &Result<Rows, SqlError>) -> Option<i64> {
    let rows = answer.as_ref().unwrap_or_else(|error| panic!("{error:#?}"));
    assert_eq!(rows.len(), 1);
    rows[0].get(0).map(|token| token.parse().expect("a token"))
}

/// The end of a waiter that is granted the lease: its session, the token and when it came.
#[track_caller]
fn granted(waiting: Running<Answered>) -> (Session, i64, Instant) {
    let (session, (answer, at)) = waiting.end();
    (session, token_in(&answer).expect("granted"), at)
}

#[test]
fn c14_ten_waiters_are_served_in_order_of_arrival() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for permits in [1, 3] {
        let k = unique("c14");
        let more = format!(", permits => {permits}");
        let mut a = server.session("c14 a");
        let mut held: Vec<i64> = (0..permits).map(|_| take_with(&mut a, &k, "1 hour", &more)).collect();
        let mut waiters: Vec<Running<Answered>> = (1..=10)
            .map(|place| {
                // Both ways stand in one queue.
                let way = Way::ALL[place as usize % 2];
                let timeout = (place % 3 == 0).then_some("1 hour");
                let statement = way.take(&k, "1 hour", timeout, &more);
                start(server.session(&format!("c14 waiter {place}")), &statement, &mut watch, place)
            })
            .collect();
        let queue =
            watch.column(&format!("select pid from lock_waiters where name = '{k}' order by queue_position, pid"));
        let pids: Vec<String> = waiters.iter().map(|waiter| waiter.pid.to_string()).collect();
        assert_eq!(queue, pids, "the queue as shown");
        assert_eq!(watch.int(&format!("select max(waiters) from lock_holders where name = '{k}'")), 10);

        // Each release lets in one, the one who came first.
        let mut late = Vec::new();
        while !waiters.is_empty() {
            let token = held.remove(0);
            give_back(&mut a, &k, token);
            let released = Instant::now();
            let first = waiters.remove(0);
            let pid = first.pid;
            let (b, next, at) = granted(first);
            assert!(b.pid == pid && next > *held.last().unwrap_or(&token), "tokens in the order of the grants");
            late.push(at.saturating_duration_since(released));
            held.push(next);
            for (place, waiter) in (1..).zip(&waiters) {
                assert!(!waiter.finished(), "one release, one grant");
                until_queued(&mut watch, waiter.pid, place);
            }
        }
        assert!(median(late.clone()) < Duration::from_millis(500), "{late:?}");
        assert_eq!(watch.int(&format!("select lease_break('{k}')")), permits);
    }
}

/// The same when each of them gives it back at once and nobody looks on.
#[test]
fn c14_a_queue_that_serves_itself() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for way in Way::ALL {
        let k = unique("c14");
        let order = unique_ident("c14_order");
        watch.run(&format!("create sequence {order}"));
        let mut a = server.session("c14 a");
        let token = take(&mut a, &k, "1 hour");
        let waiters: Vec<Running<i64>> = (1..=10)
            .map(|place| {
                let (k, acquire) = (k.clone(), way.wait(&k));
                let next = format!("select nextval('{order}')");
                let waiting = server.session("c14 waiter").spawn(move |session| {
                    let token = session.int(&acquire);
                    let position = session.int(&next);
                    give_back(session, &k, token);
                    position
                });
                until_queued(&mut watch, waiting.pid, place);
                waiting
            })
            .collect();
        let begun = Instant::now();
        give_back(&mut a, &k, token);
        let served: Vec<i64> = waiters.into_iter().map(|waiter| waiter.end().1).collect();
        assert_eq!(served, (1..=10).collect::<Vec<_>>(), "{way:?}");
        // By looking once in a second it would take ten.
        assert!(begun.elapsed() < Duration::from_secs(5), "{way:?}: {:?}", begun.elapsed());
    }
}

#[test]
fn only_the_head_of_the_queue_is_woken() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let k = unique("herd");
    let mut a = server.session("a");
    let mut token = take(&mut a, &k, "1 hour");
    let mut waiters: Vec<Running<Answered>> = (1..=8)
        .map(|place| start(server.session("waiter"), &Way::ALL[place as usize % 2].wait(&k), &mut watch, place))
        .collect();
    // A session that is woken and goes to sleep again starts a new wait.
    let sleeping = |watch: &mut Session| {
        let mut rows = watch.column(&format!(
            "select l.pid || ' since ' || l.waitstart from pg_locks as l join lock_waiters as w using (pid) \
              where w.name = '{k}' and w.queue_position > 1 and not l.granted order by w.queue_position"
        ));
        rows.retain(|row| row != "NULL");
        rows
    };
    let mut before = Vec::new();
    until("all seven sleep", || {
        before = sleeping(&mut watch);
        before.len() == 7
    });
    while waiters.len() > 1 {
        give_back(&mut a, &k, token);
        token = granted(waiters.remove(0)).1;
        until_queued(&mut watch, waiters[0].pid, 1);
        assert_eq!(sleeping(&mut watch), before[1..], "the others slept on");
        before.remove(0);
    }
    give_back(&mut a, &k, token);
    granted(waiters.remove(0));
}

/// What lets a lease go.
#[derive(Clone, Copy, Debug)]
enum Event {
    /// A statement of the holder.
    Holder(&'static str),
    /// One that fails.
    HolderFails(&'static str),
    /// A statement of another session.
    Other(&'static str),
    /// The holder's client closes its session.
    Closed,
    /// Time, from the grant.
    ExpiryOfGrant,
    /// Time, from the holder's second statement.
    ExpiryOfRenewal,
}

/// How a lease is held and let go. `$k` is its name, `$t` the token, `$p` the holder's process.
#[derive(Clone, Copy, Debug)]
struct Freed {
    what: &'static str,
    /// What the holder does before it takes the lease.
    before: &'static str,
    ttl: &'static str,
    more: &'static str,
    /// What the holder does with the lease.
    then: &'static str,
    /// What another session does then.
    other: &'static str,
    event: Event,
}

const PLAIN: Freed = Freed { what: "", before: "", ttl: "1 hour", more: "", then: "", other: "", event: Event::Closed };
const RELEASE: &str = "select lease_release('$k', $t)";
const BREAK: &str = "select lease_break('$k')";
const GUARD: &str = "begin; select lease_guard('$k', $t)";
const TERMINATE: &str = "select pg_terminate_backend($p)";
const TTL: Duration = Duration::from_millis(400);

impl Freed {
    /// One try: how long after the event the waiter had the lease.
    fn latency(self, server: &Server, watch: &mut Session, way: Way) -> Duration {
        let k = unique("woken");
        let mut a = server.session("holder");
        let pid = a.pid;
        a.run(self.before);
        let mut begun = Instant::now();
        let token = take_with(&mut a, &k, self.ttl, self.more);
        let mut ended = Instant::now();
        let fill = |sql: &str| sql.replace("$k", &k).replace("$t", &token.to_string()).replace("$p", &pid.to_string());
        if matches!(self.event, Event::ExpiryOfRenewal) {
            begun = Instant::now();
        }
        a.run(&fill(self.then));
        if matches!(self.event, Event::ExpiryOfRenewal) {
            ended = Instant::now();
        }
        watch.run(&fill(self.other));

        let waiting = begin_waiting(server.session("waiter"), &way.wait(&k));
        let expires = matches!(self.event, Event::ExpiryOfGrant | Event::ExpiryOfRenewal);
        if !expires {
            until_queued(watch, waiting.pid, 1);
        }
        let mut holder = Some(a);
        let a = holder.as_mut().expect("just put there");
        assert!(expires || !waiting.finished(), "{}: too early", self.what);
        match self.event {
            Event::Holder(sql) => {
                a.run(&fill(sql));
            }
            Event::HolderFails(sql) => {
                a.fails(&fill(sql));
            }
            Event::Other(sql) => {
                watch.run(&fill(sql));
            }
            Event::Closed => holder = None,
            Event::ExpiryOfGrant | Event::ExpiryOfRenewal => {}
        }
        let freed = if expires { ended + TTL } else { Instant::now() };
        let (b, token, at) = granted(waiting);
        assert!(!expires || at >= begun + TTL, "{}: before it expired", self.what);
        // The holder's session, where it goes on, has lost it.
        drop(holder);
        give_back(watch, &k, token);
        drop(b);
        at.saturating_duration_since(freed)
    }
}

/// Ten tries each; most of them have to be much quicker than a look once in a second.
fn wakes(ways: &[Freed]) {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for freed in ways {
        let late: Vec<Duration> = (0..10).map(|round| freed.latency(server, &mut watch, Way::ALL[round % 2])).collect();
        assert!(median(late.clone()) < Duration::from_millis(500), "{}: {late:?}", freed.what);
    }
}

#[test]
fn woken_by_a_release() {
    wakes(&[
        Freed { what: "release", event: Event::Holder(RELEASE), ..PLAIN },
        Freed { what: "release by another session", event: Event::Other(RELEASE), ..PLAIN },
        Freed { what: "release of a bound one", more: ", bound => true", event: Event::Holder(RELEASE), ..PLAIN },
        Freed {
            what: "commit of a release",
            then: "begin; select lease_release('$k', $t)",
            event: Event::Holder("commit"),
            ..PLAIN
        },
        Freed {
            what: "release that keeps it for a time that is over",
            event: Event::Holder("select lease_release('$k', $t, '0')"),
            ..PLAIN
        },
        Freed {
            what: "release in a DO that commits and goes on",
            event: Event::Holder("do $$ begin perform lease_release('$k', $t); commit; perform 1; end $$"),
            ..PLAIN
        },
    ]);
}

#[test]
fn woken_by_a_break() {
    let kept = "select lease_release('$k', $t, '1 hour')";
    wakes(&[
        Freed { what: "break", event: Event::Other(BREAK), ..PLAIN },
        Freed { what: "break by the holder", event: Event::Holder(BREAK), ..PLAIN },
        Freed { what: "break of a kept one", then: kept, event: Event::Other(BREAK), ..PLAIN },
        Freed {
            what: "commit of a break",
            then: "begin; select lease_break('$k')",
            event: Event::Holder("commit"),
            ..PLAIN
        },
    ]);
}

#[test]
fn woken_when_it_expires() {
    wakes(&[
        Freed { what: "expiry", ttl: "400 ms", event: Event::ExpiryOfGrant, ..PLAIN },
        Freed {
            what: "expiry of a bound one",
            ttl: "400 ms",
            more: ", bound => true",
            event: Event::ExpiryOfGrant,
            ..PLAIN
        },
        Freed {
            what: "expiry of a kept one",
            then: "select lease_release('$k', $t, '400 ms')",
            event: Event::ExpiryOfGrant,
            ..PLAIN
        },
        Freed {
            what: "expiry of a shortened one",
            then: "select lease_renew('$k', $t, '400 ms')",
            event: Event::ExpiryOfRenewal,
            ..PLAIN
        },
    ]);
}

/// The waiter sleeps already when the expiry is brought forward or put off.
#[test]
fn woken_when_it_expires_after_a_renewal_meanwhile() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let mut late = Vec::new();
    for round in 0..10 {
        let k = unique("renewed");
        let mut a = server.session("holder");
        // Shortened under a waiter that reckons with an hour, or prolonged under one that reckons with 300 ms.
        let ttl = if round % 2 == 0 { "1 hour" } else { "300 ms" };
        let token = take(&mut a, &k, ttl);
        let waiting = begin_waiting(server.session("waiter"), &Way::ALL[round / 2 % 2].wait(&k));
        until("it waits, or has it", || waiting.finished() || position(&mut watch, waiting.pid) == 1);
        let begun = Instant::now();
        if let Err(error) = a.query(&format!("select lease_renew('{k}', {token}, '600 ms')")) {
            // On a busy machine it has ended before.
            error.is(if round % 2 == 0 { "" } else { "55006" });
            granted(waiting);
            continue;
        }
        let expires = Instant::now() + Duration::from_millis(600);
        let (_, _, at) = granted(waiting);
        assert!(at >= begun + Duration::from_millis(600), "held for 600 ms from the renewal");
        late.push(at.saturating_duration_since(expires));
    }
    assert!(late.len() >= 5);
    assert!(median(late.clone()) < Duration::from_millis(500), "{late:?}");
}

#[test]
fn woken_by_the_end_of_an_uncommitted_grant() {
    wakes(&[
        Freed { what: "rollback", before: "begin", event: Event::Holder("rollback"), ..PLAIN },
        Freed { what: "rollback to", before: "begin; savepoint s", event: Event::Holder("rollback to s"), ..PLAIN },
        Freed { what: "error", before: "begin", event: Event::HolderFails("select 1/0"), ..PLAIN },
        Freed { what: "terminated", before: "begin", event: Event::Other(TERMINATE), ..PLAIN },
        Freed { what: "closed", before: "begin", event: Event::Closed, ..PLAIN },
        Freed {
            what: "commit of a grant that is released already",
            before: "begin",
            then: RELEASE,
            event: Event::Holder("commit"),
            ..PLAIN
        },
        Freed {
            what: "released at once after the commit",
            before: "begin",
            event: Event::Holder("commit; select lease_release('$k', $t)"),
            ..PLAIN
        },
    ]);
}

#[test]
fn woken_by_the_end_of_a_guarded_transaction() {
    let savepoint = "begin; savepoint s; select lease_guard('$k', $t)";
    // Nobody holds the lease any more; the guarded transaction alone keeps others out.
    let guarded = Freed { then: GUARD, other: BREAK, ..PLAIN };
    wakes(&[
        Freed { what: "commit", event: Event::Holder("commit"), ..guarded },
        Freed { what: "rollback", event: Event::Holder("rollback"), ..guarded },
        Freed { what: "error", event: Event::HolderFails("select 1/0"), ..guarded },
        Freed { what: "terminated", event: Event::Other(TERMINATE), ..guarded },
        Freed { what: "closed", event: Event::Closed, ..guarded },
        Freed { what: "rollback to", then: savepoint, event: Event::Holder("rollback to s"), ..guarded },
        Freed {
            what: "release of the savepoint and commit",
            then: savepoint,
            event: Event::Holder("release s; commit"),
            ..guarded
        },
        Freed { what: "commit after a release", other: RELEASE, event: Event::Holder("commit"), ..guarded },
        Freed {
            what: "commit after it expired",
            ttl: "400 ms",
            other: "select pg_sleep(0.41)",
            event: Event::Holder("commit"),
            ..guarded
        },
    ]);
}

#[test]
fn woken_by_the_end_of_a_bound_session() {
    let bound = Freed { more: ", bound => true", ..PLAIN };
    wakes(&[
        Freed { what: "terminated", event: Event::Other(TERMINATE), ..bound },
        Freed { what: "closed", event: Event::Closed, ..bound },
        Freed { what: "DISCARD ALL", event: Event::Holder("discard all"), ..bound },
        Freed { what: "unlock all", event: Event::Holder("select pg_advisory_unlock_all()"), ..bound },
        Freed { what: "terminated in a transaction", then: "begin", event: Event::Other(TERMINATE), ..bound },
        Freed {
            what: "renewed by another",
            other: "select lease_renew('$k', $t, '2 hours')",
            event: Event::Closed,
            ..bound
        },
    ]);
}

/// PL/pgSQL's exception block is a savepoint: what it has guarded is free when it is left, in the statement that goes on.
#[test]
fn woken_when_an_exception_block_is_left() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let late = (0..10)
        .map(|round| {
            let k = unique("caught");
            let mut a = server.session("holder");
            let token = take(&mut a, &k, "1 hour");
            watch.run(&format!("select named_lock('{k} 1'), named_lock('{k} 2')"));
            let guarding = a.background(&format!(
                "do $$ begin \
                   begin \
                     perform lease_guard('{k}', {token}); perform named_lock('{k} 1'); raise 'back'; \
                   exception when raise_exception then null; end; \
                   perform named_lock('{k} 2'); \
                 end $$"
            ));
            watch.until_waiting(guarding.pid);
            assert_eq!(watch.int(&format!("select lease_break('{k}')")), 1);
            let waiting = start(server.session("waiter"), &Way::ALL[round % 2].wait(&k), &mut watch, 1);
            watch.run(&format!("select named_unlock('{k} 1')"));
            let freed = Instant::now();
            let (mut b, token, at) = granted(waiting);
            assert!(!guarding.finished(), "the statement goes on");
            give_back(&mut b, &k, token);
            watch.run(&format!("select named_unlock('{k} 2')"));
            guarding.end().1.expect("no error");
            at.saturating_duration_since(freed)
        })
        .collect::<Vec<_>>();
    assert!(median(late.clone()) < Duration::from_millis(500), "{late:?}");
}

/// What ends nothing wakes nobody to a grant.
#[test]
fn not_granted_before_it_is_free() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for way in Way::ALL {
        let k = unique("early");
        let mut a = server.session("holder");
        let token = take_with(&mut a, &k, "1 hour", ", bound => true");
        let waiting = start(server.session("waiter"), &way.wait(&k), &mut watch, 1);
        let held = |watch: &mut Session, what: &str| {
            assert_eq!(position(watch, waiting.pid), 1, "{way:?} {what}");
            assert!(!waiting.finished(), "{way:?} {what}");
            assert!(watch.flag(&format!("select lease_check('{k}', {token})")), "{way:?} {what}");
        };
        for sql in [
            "select lease_renew('$k', $t)",
            "begin; select lease_release('$k', $t); rollback",
            "begin; select lease_break('$k'); rollback",
            "begin; savepoint s; select lease_release('$k', $t); rollback to s; commit",
            "begin; select lease_guard('$k', $t); commit",
            "begin; select lease_guard('$k', $t); rollback",
            "select lease_request('$k', 'please')",
            "begin; select lease_renew('$k', $t, '100 ms'); rollback",
            "begin; rollback",
            "discard plans; discard sequences; discard temp",
            "select named_lock('$k'), named_unlock('$k')",
            "select pg_advisory_lock(1), pg_advisory_unlock(1)",
            "select named_unlock_all()",
        ] {
            a.run(&sql.replace("$k", &k).replace("$t", &token.to_string()));
            held(&mut watch, sql);
        }
        // And over a few of the looks that it takes once in a second.
        let_pass(2500);
        held(&mut watch, "later");
        give_back(&mut a, &k, token);
        granted(waiting);
    }
}

#[test]
fn a_try_while_someone_queues_is_refused() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let said =
        "select concat_ws(' ', acquired, token is null, retry_after$c) from lease_acquire('$k', '1 hour', '$l'$m)";
    for (way, permits) in [(Way::Function, 1), (Way::Call, 1), (Way::Function, 3), (Way::Call, 3)] {
        let k = unique("queued");
        let more = format!(", permits => {permits}");
        // Of several permits others are held.
        let (columns, nulls) =
            if permits == 1 { (", remaining is null, expires_at is null, holder is null", " t t t") } else { ("", "") };
        let said = said.replace("$k", &k).replace("$m", &more).replace("$c", columns);
        let due = format!("f t 00:00:00.1{nulls}");
        let mut a = server.session("holder");
        let tokens: Vec<i64> = (0..permits).map(|_| take_with(&mut a, &k, "1 hour", &more)).collect();
        let waiting = start(server.session("head"), &way.take(&k, "1 hour", None, &more), &mut watch, 1);
        let mut c = server.session("c");
        // The head can't come for it: it is free, and it is the head's.
        let stopped = stop_process(waiting.pid);
        give_back(&mut a, &k, tokens[0]);
        for _ in 0..20 {
            assert_eq!(c.text(&said.replace("$l", "0")), due);
        }
        assert_eq!(c.text(&said.replace("$l", "150 ms")), due);
        assert_eq!(c.maybe(&format!("call lease_acquire_wait('{k}', '1 hour', '0'{more})")), None);
        assert_eq!(c.maybe(&format!("call lease_acquire_wait('{k}', '1 hour', '150 ms'{more})")), None);
        left_no_trace(&mut watch, c.pid, "a try");
        stopped.go_on();
        let (mut b, token, _) = granted(waiting);
        give_back(&mut b, &k, token);
        // Nobody queues any more.
        c.int(&format!("select token from lease_acquire('{k}', '1 hour'{more})"));
    }
}

/// When the lease will be free for one who tries, nobody can say then: the queue comes first.
#[test]
fn a_try_while_someone_queues_for_a_held_lease() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let k = unique("queued");
    let mut a = server.session("holder");
    let token = take(&mut a, &k, "1 hour");
    let said = format!("select acquired, token is null, retry_after from lease_acquire('{k}', '1 hour')");
    let waiting = start(server.session("head"), &Way::Function.wait(&k), &mut watch, 1);
    // Another, and the holder itself.
    for session in [&mut server.session("c"), &mut a] {
        let rows = session.run(&said);
        assert_eq!([0, 1, 2].map(|column| rows[0].get(column)), [Some("f"), Some("t"), Some("00:00:00.1")]);
    }
    give_back(&mut a, &k, token);
    granted(waiting);
}

/// A refused try behind a queue assigns no transaction id and changes nothing.
#[test]
fn a_try_while_someone_queues_leaves_no_trace() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let k = unique("queued");
    let mut a = server.session("holder");
    let token = take(&mut a, &k, "1 hour");
    let head = start(server.session("head"), &Way::Function.wait(&k), &mut watch, 1);
    let behind = start(server.session("behind"), &Way::Call.wait(&k), &mut watch, 2);
    let mut c = server.session("c");
    for isolation in ["read committed", "repeatable read", "serializable"] {
        c.run(&format!("begin isolation level {isolation}"));
        assert!(!try_take(&mut c, &k));
        assert_eq!(c.maybe("select pg_current_xact_id_if_assigned()"), None, "{isolation}");
        left_no_trace(&mut watch, c.pid, isolation);
        c.run("commit");
    }
    until_queued(&mut watch, head.pid, 1);
    until_queued(&mut watch, behind.pid, 2);
    give_back(&mut a, &k, token);
    let (mut b, token, _) = granted(head);
    give_back(&mut b, &k, token);
    granted(behind);
}

/// How a waiter leaves the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Leaves {
    TimesOut,
    /// The same in a transaction block that goes on.
    TimesOutInABlock,
    LockTimeout,
    StatementTimeout,
    Cancelled,
    /// The same, caught by an exception block in a statement that goes on.
    CancelledAndCaught,
    Terminated,
    ClientVanishes,
}

impl Leaves {
    /// Whether it leaves when its time is up.
    fn by_a_limit(self) -> bool {
        matches!(self, Leaves::TimesOut | Leaves::TimesOutInABlock | Leaves::LockTimeout | Leaves::StatementTimeout)
    }
}

/// A limit that is mostly long enough to line up all waiters before it is over.
const LIMIT: &str = "4s";

/// A waiter that is to leave.
enum Leaver {
    Session(Running<Answered>),
    Client { program: Child, pid: i32 },
}

impl Leaver {
    /// Starts it and waits until it stands at that place. None: that way of leaving can't be with this way of waiting.
    fn start(server: &Server, leaves: Leaves, way: Way, k: &str, place: i64, watch: &mut Session) -> Option<Leaver> {
        let mut session = server.session("leaver");
        let statement = match leaves {
            Leaves::TimesOut => way.take(k, "1 hour", Some(LIMIT), ""),
            Leaves::TimesOutInABlock if way == Way::Function => {
                session.run("begin; create temp table work (i int)");
                way.take(k, "1 hour", Some(LIMIT), "")
            }
            Leaves::LockTimeout if way == Way::Function => {
                session.run(&format!("set lock_timeout = '{LIMIT}'"));
                way.wait(k)
            }
            Leaves::StatementTimeout => {
                session.run(&format!("set statement_timeout = '{LIMIT}'"));
                way.wait(k)
            }
            Leaves::CancelledAndCaught if way == Way::Function => {
                session.run("begin");
                format!(
                    "do $$ begin \
                       begin perform lease_acquire('{k}', '1 hour', null); exception when query_canceled then null; end; \
                       perform pg_sleep(3600); \
                     end $$"
                )
            }
            Leaves::TimesOutInABlock | Leaves::LockTimeout | Leaves::CancelledAndCaught => return None,
            Leaves::Cancelled | Leaves::Terminated => way.wait(k),
            Leaves::ClientVanishes => {
                let name = unique("vanishing");
                let program = server
                    .client("psql")
                    .env("PGAPPNAME", &name)
                    .env("PGOPTIONS", "-c client_connection_check_interval=300ms")
                    .args(["-X", "-c", &way.wait(k)])
                    .spawn()
                    .expect("start psql");
                let mut pid = 0;
                until("the client's session waits", || {
                    pid = watch.int(&format!(
                        "select coalesce((select pid from lock_waiters where application_name = '{name}'), 0)"
                    )) as i32;
                    pid != 0
                });
                until_queued(watch, pid, place);
                return Some(Leaver::Client { program, pid });
            }
        };
        let start = if leaves.by_a_limit() { start_limited } else { start };
        Some(Leaver::Session(start(session, &statement, watch, place)))
    }

    fn pid(&self) -> i32 {
        match self {
            Leaver::Session(waiting) => waiting.pid,
            Leaver::Client { pid, .. } => *pid,
        }
    }

    /// Makes it leave, or waits until its limit does. Its session is given back where it goes on.
    #[track_caller]
    fn leave(self, leaves: Leaves, watch: &mut Session) -> Option<Running<Answered>> {
        let pid = self.pid();
        let waiting = match self {
            Leaver::Session(waiting) => waiting,
            Leaver::Client { mut program, .. } => {
                program.kill().expect("kill psql");
                program.wait().expect("psql's end");
                let gone = within(Duration::from_secs(5), || position(watch, pid) == 0);
                assert!(gone, "it left the queue within the interval and a second");
                watch.until_gone(pid);
                return None;
            }
        };
        match leaves {
            Leaves::Cancelled => watch.run(&format!("select pg_cancel_backend({pid})")),
            Leaves::CancelledAndCaught => {
                watch.run(&format!("select pg_cancel_backend({pid})"));
                until("it goes on without the lease", || {
                    watch.flag(&format!(
                        "select exists (select from pg_stat_activity where pid = {pid} and wait_event = 'PgSleep')"
                    ))
                });
                return Some(waiting);
            }
            Leaves::Terminated => watch.run(&format!("select pg_terminate_backend({pid})")),
            _ => Vec::new(),
        };
        let (mut session, (answer, _)) = waiting.end();
        match leaves {
            Leaves::TimesOut => assert_eq!(token_in(&answer), None),
            Leaves::TimesOutInABlock => {
                assert_eq!(token_in(&answer), None);
                session.run("insert into work values (1)");
            }
            Leaves::LockTimeout => {
                answer.expect_err("timed out").is("55P03");
            }
            Leaves::StatementTimeout | Leaves::Cancelled => {
                answer.expect_err("ended").is("57014");
            }
            _ => {
                answer.expect_err("terminated").is_end_of_session();
                watch.until_gone(pid);
                return None;
            }
        }
        // It is there, in its transaction block maybe, and in nobody's way.
        Some(session.spawn(|_| (Ok(Vec::new()), Instant::now())))
    }
}

/// Lines up A, who holds it, and in the queue the leaver and those who stay; then the leaver leaves.
fn c54(all: &[Leaves]) {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let mut lines = Vec::new();
    for &leaves in all {
        for way in Way::ALL {
            // At the head; second of three; last.
            for (place, stay) in [(1, 2), (2, 2), (3, 2)] {
                let what = format!("{leaves:?} {way:?} at place {place}");
                let k = unique("c54");
                let mut a = server.session("holder");
                let token = take(&mut a, &k, "1 hour");
                let mut staying = Vec::new();
                let mut leaver = None;
                for number in 1..=stay + 1 {
                    if number == place {
                        leaver = Leaver::start(server, leaves, way, &k, place, &mut watch);
                        if leaver.is_none() {
                            break;
                        }
                    } else {
                        let way = Way::ALL[number as usize % 2];
                        let waiting = begin_waiting(server.session("stays"), &way.wait(&k));
                        until("it is in the queue", || {
                            let at = position(&mut watch, waiting.pid);
                            at == number || number > place && leaves.by_a_limit() && at == number - 1
                        });
                        staying.push(waiting);
                    }
                }
                if let Some(leaver) = leaver {
                    lines.push((what, k, a, token, leaves, leaver, staying));
                }
            }
        }
    }
    assert!(!lines.is_empty());
    let mut late = Vec::new();
    for (what, k, mut a, mut token, leaves, leaver, staying) in lines {
        let pid = leaver.pid();
        let session = leaver.leave(leaves, &mut watch);
        left_no_trace(&mut watch, pid, &what);
        // The others close up.
        for (place, waiting) in (1..).zip(&staying) {
            until_queued(&mut watch, waiting.pid, place);
            assert!(!waiting.finished(), "{what}");
        }
        assert_eq!(watch.int(&format!("select max(waiters) from lock_holders where name = '{k}'")), 2, "{what}");
        assert!(watch.flag(&format!("select lease_check('{k}', {token})")), "{what}");
        for waiting in staying {
            give_back(&mut a, &k, token);
            let freed = Instant::now();
            let (b, next, at) = granted(waiting);
            late.push(at.saturating_duration_since(freed));
            token = next;
            a = b;
        }
        give_back(&mut a, &k, token);
        // Nobody queues any more.
        assert!(try_take(&mut watch, &k), "{what}");
        if let Some(session) = session {
            left_no_trace(&mut watch, pid, &what);
            watch.run(&format!("select pg_terminate_backend({pid})"));
            drop(session);
        }
    }
    assert!(median(late.clone()) < Duration::from_millis(500), "{late:?}");
}

#[test]
fn c54_one_who_timed_out_leaves_no_trace_in_the_queue() {
    c54(&[Leaves::TimesOut, Leaves::TimesOutInABlock, Leaves::LockTimeout, Leaves::StatementTimeout]);
}

#[test]
fn c54_one_who_was_cancelled_or_terminated_leaves_no_trace_in_the_queue() {
    c54(&[Leaves::Cancelled, Leaves::CancelledAndCaught, Leaves::Terminated]);
}

#[test]
fn c54_one_whose_client_vanished_leaves_no_trace_in_the_queue() {
    c54(&[Leaves::ClientVanishes]);
}

/// All at once, of a long queue.
#[test]
fn c54_many_who_leave_at_once() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let k = unique("c54");
    let mut a = server.session("holder");
    let token = take(&mut a, &k, "1 hour");
    let mut leaving = Vec::new();
    let mut staying = Vec::new();
    for place in 1..=20 {
        let waiting = start(server.session("waiter"), &Way::ALL[place as usize % 2].wait(&k), &mut watch, place);
        // The head, the last, and some in between stay out of it.
        if [3, 4, 9, 17].contains(&place) { staying.push(waiting) } else { leaving.push(waiting) }
    }
    let pids: Vec<String> = leaving.iter().map(|waiting| waiting.pid.to_string()).collect();
    let ends = |function: &str, pids: &[String]| {
        format!("select count({function}(pid)) from unnest(array[{}]) as pid", pids.join(", "))
    };
    watch.run(&ends("pg_cancel_backend", &pids[..8]));
    watch.run(&ends("pg_terminate_backend", &pids[8..]));
    for waiting in leaving {
        let pid = waiting.pid;
        waiting.end().1.0.expect_err("ended");
        until("it is out of it", || {
            watch.int(&format!("select count(*) from pg_locks where locktype = 'advisory' and pid = {pid}")) == 0
        });
        left_no_trace(&mut watch, pid, "ended");
    }
    for (place, waiting) in (1..).zip(&staying) {
        until_queued(&mut watch, waiting.pid, place);
    }
    let begun = Instant::now();
    give_back(&mut a, &k, token);
    for waiting in staying {
        let (mut b, token, _) = granted(waiting);
        give_back(&mut b, &k, token);
    }
    assert!(begun.elapsed() < Duration::from_millis(2000), "{:?}", begun.elapsed());
}

/// What ends a stopped waiter's wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cause {
    Timeout,
    LockTimeout,
    StatementTimeout,
    Cancel,
    Terminate,
    TimeoutAndCancel,
}

const CAUSES: [Cause; 6] = [
    Cause::Timeout,
    Cause::LockTimeout,
    Cause::StatementTimeout,
    Cause::Cancel,
    Cause::Terminate,
    Cause::TimeoutAndCancel,
];

/// Stops a waiter past its limit, lets the lease go, and wakes the waiter. Whatever it answers is true, and if it isn't
/// granted, the next in line is.
fn stopped_past(place: i64) {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let mut lines = Vec::new();
    for cause in CAUSES {
        for (way, more) in
            [(Way::Function, ""), (Way::Call, ""), (Way::Function, ", bound => true"), (Way::Call, ", bound => true")]
        {
            if cause == Cause::LockTimeout && way == Way::Call {
                continue;
            }
            let k = unique("c12");
            let mut a = server.session("holder");
            let token = take(&mut a, &k, "1 hour");
            let head = (place > 1).then(|| start(server.session("head"), &way.wait(&k), &mut watch, 1));
            let mut b = server.session("stopped");
            let timeout = match cause {
                Cause::Timeout | Cause::TimeoutAndCancel => Some("2 s"),
                Cause::LockTimeout | Cause::StatementTimeout => {
                    let setting = if cause == Cause::LockTimeout { "lock_timeout" } else { "statement_timeout" };
                    b.run(&format!("set {setting} = '2s'"));
                    None
                }
                _ => None,
            };
            let begun = Instant::now();
            let waiting = begin_waiting(b, &way.take(&k, "1 hour", timeout, more));
            until_queued(&mut watch, waiting.pid, place);
            let guard = stop_process(waiting.pid);
            // On a busy machine it may have ended before it was stopped: then this says nothing, and fails nothing.
            let in_time = begun.elapsed() < Duration::from_millis(1990);
            let next = start(server.session("next"), &Way::Call.wait(&k), &mut watch, place + 1);
            lines.push((cause, way, more, k, a, token, head, waiting, guard, next, in_time));
        }
    }
    let_pass(2100);
    let mut met = 0;
    for (cause, way, more, k, mut a, token, head, waiting, guard, next, in_time) in lines {
        let what = format!("{cause:?} {way:?}{more} at place {place}");
        let pid = waiting.pid;
        match cause {
            Cause::Cancel | Cause::TimeoutAndCancel => {
                watch.run(&format!("select pg_cancel_backend({pid})"));
            }
            Cause::Terminate => {
                watch.run(&format!("select pg_terminate_backend({pid})"));
            }
            _ => {}
        }
        give_back(&mut a, &k, token);
        if let Some(head) = head {
            // The stopped one becomes the head meanwhile.
            let (mut head, token, _) = granted(head);
            give_back(&mut head, &k, token);
        }
        assert!(!next.finished(), "{what}: not before its turn");
        guard.go_on();
        let freed = Instant::now();
        let (mut b, (answer, _)) = waiting.end();
        match (cause, &answer) {
            (_, Ok(_)) => {}
            (Cause::LockTimeout, Err(error)) => {
                error.is("55P03");
            }
            (Cause::StatementTimeout | Cause::Cancel | Cause::TimeoutAndCancel, Err(error)) => {
                error.is("57014");
            }
            (Cause::Terminate, Err(error)) => {
                error.is_end_of_session();
            }
            (_, Err(error)) => panic!("{what}: {error:#?}"),
        }
        let token = answer.as_ref().ok().and_then(|_| token_in(&answer));
        if let Some(token) = token {
            assert!(watch.flag(&format!("select lease_check('{k}', {token})")), "{what}: it said so");
            assert_eq!(watch.int(&format!("select count(*) from lock_holders where name = '{k}'")), 1, "{what}");
            assert!(!next.finished(), "{what}: one at a time");
            b.run("reset statement_timeout");
            give_back(&mut b, &k, token);
        }
        let (mut next, next_token, at) = granted(next);
        if token.is_none() {
            let late = at.saturating_duration_since(freed);
            assert!(late < Duration::from_secs(10), "{what}: the next was not woken for {late:?}");
        }
        assert_eq!(watch.int(&format!("select count(*) from lock_holders where name = '{k}'")), 1, "{what}");
        if cause != Cause::Terminate {
            b.run("reset statement_timeout");
            assert_eq!(
                watch.int(&format!("select count(*) from lock_waiters where pid = {pid}")),
                0,
                "{what}: it waits no more"
            );
            // A bound one that was granted may leave what tells that its session is there.
            if token.is_none() {
                left_no_trace(&mut watch, pid, &what);
            }
        }
        give_back(&mut next, &k, next_token);
        met += u32::from(in_time);
    }
    assert!(met > 0, "no waiter was stopped in time");
}

#[test]
fn c12_a_stopped_head_tells_the_truth() {
    stopped_past(1);
}

#[test]
fn c12_a_stopped_second_in_line_tells_the_truth() {
    stopped_past(2);
}

#[test]
fn the_queue_as_shown() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for way in Way::ALL {
        let k = unique("shown");
        let domain = unique("domain");
        let k = format!("{domain}:{k}");
        let mut a = server.session("holder");
        let token = take(&mut a, &k, "1 hour");
        let head = start(server.session("the head"), &way.take(&k, "1 hour", Some("1 hour"), ""), &mut watch, 1);
        let second = start(server.session("the second"), &way.wait(&k), &mut watch, 2);
        let third = start(server.session("the third"), &way.take(&k, "1 hour", Some("2 hours"), ""), &mut watch, 3);
        let user = &server.user;
        assert_eq!(
            watch.column(&format!(
                "select concat_ws(' | ', kind, domain, mode is null, pid, usename, application_name, queue_position, \
                                  round(extract(epoch from deadline - wait_started)), \
                                  waited between '0' and '1 minute', \
                                  wait_started between clock_timestamp() - interval '1 minute' and clock_timestamp()) \
                   from lock_waiters where name = '{k}' order by queue_position"
            )),
            [
                format!("lease | {domain} | t | {} | {user} | the head | 1 | 3600 | t | t", head.pid),
                format!("lease | {domain} | t | {} | {user} | the second | 2 | t | t", second.pid),
                format!("lease | {domain} | t | {} | {user} | the third | 3 | 7200 | t | t", third.pid),
            ],
            "{way:?}"
        );
        let blocked_by = |watch: &mut Session, pid: i32| {
            watch.text(&format!("select blocked_by from lock_waiters where name = '{k}' and pid = {pid}"))
        };
        let natively = |watch: &mut Session, pid: i32| watch.text(&format!("select pg_blocking_pids({pid})"));
        // An unbound lease is no session's.
        assert_eq!(blocked_by(&mut watch, head.pid), "{}");
        for waiting in [&second, &third] {
            let blocked = blocked_by(&mut watch, waiting.pid);
            assert_eq!(blocked, natively(&mut watch, waiting.pid));
            assert!(blocked.contains(&head.pid.to_string()), "{way:?}: {blocked}");
        }
        // A guarded transaction keeps the head out, with the lease or without.
        a.run("begin");
        a.run(&format!("select lease_guard('{k}', {token})"));
        assert_eq!(blocked_by(&mut watch, head.pid), format!("{{{}}}", a.pid));
        assert_eq!(watch.int(&format!("select waiters from lock_holders where name = '{k}'")), 3);
        assert_eq!(watch.int(&format!("select lease_break('{k}')")), 1);
        assert_eq!(blocked_by(&mut watch, head.pid), format!("{{{}}}", a.pid));
        until_queued(&mut watch, head.pid, 1);
        a.run("commit");

        // Each leaves, the next closes up.
        let (mut b, token, _) = granted(head);
        until_queued(&mut watch, second.pid, 1);
        until_queued(&mut watch, third.pid, 2);
        assert_eq!(watch.int(&format!("select waiters from lease_renew('{k}', {token})")), 2);
        give_back(&mut b, &k, token);
        let (mut b, token, _) = granted(second);
        assert_eq!(watch.int(&format!("select waiters from lease_renew('{k}', {token})")), 1);
        give_back(&mut b, &k, token);
        let (mut b, token, _) = granted(third);
        assert_eq!(watch.int(&format!("select waiters from lease_renew('{k}', {token})")), 0);
        assert_eq!(watch.int(&format!("select count(*) from lock_waiters where name = '{k}'")), 0);
        give_back(&mut b, &k, token);
    }
}

/// Whom the head waits for: the session that a lease is bound to, the one whose grant is not committed, each that guards.
#[test]
fn the_head_is_blocked_by_sessions_if_any() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let k = unique("blocked");
    let mut a = server.session("bound");
    let token = take_with(&mut a, &k, "1 hour", ", bound => true");
    let head = start(server.session("head"), &Way::Function.wait(&k), &mut watch, 1);
    let blocked_by = |watch: &mut Session| {
        watch.text(&format!(
            "select array(select unnest(blocked_by) order by 1) from lock_waiters where pid = {}",
            head.pid
        ))
    };
    assert_eq!(blocked_by(&mut watch), format!("{{{}}}", a.pid), "the bound holder");
    let mut guards: Vec<Session> = (0..3).map(|_| server.session("guard")).collect();
    for guard in &mut guards {
        guard.run("begin");
        guard.run(&format!("select lease_guard('{k}', {token})"));
    }
    let mut pids: Vec<i32> = guards.iter().map(|guard| guard.pid).collect();
    watch.run(&format!("select lease_break('{k}')"));
    pids.sort_unstable();
    let pids: Vec<String> = pids.iter().map(i32::to_string).collect();
    assert_eq!(blocked_by(&mut watch), format!("{{{}}}", pids.join(",")), "those who guard");
    let graph = watch.text("select lock_graph()");
    assert!(!graph.is_empty());
    drop(guards);
    granted(head);

    let k = unique("blocked");
    let mut a = server.session("not committed");
    a.run("begin");
    take(&mut a, &k, "1 hour");
    let head = start(server.session("head"), &Way::Call.wait(&k), &mut watch, 1);
    assert_eq!(
        watch.text(&format!("select blocked_by from lock_waiters where pid = {}", head.pid)),
        format!("{{{}}}", a.pid)
    );
    a.run("rollback");
    granted(head);
}

/// Limits run from the call on, in the first place of the queue and behind it, held, guarded and not committed alike.
#[test]
fn limits_of_all_kinds_are_kept() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for state in ["held", "guarded", "uncommitted", "kept", "behind"] {
        let k = unique("limit");
        let mut a = server.session("holder");
        if state == "uncommitted" {
            a.run("begin");
        }
        let token = take_with(&mut a, &k, "1 hour", ", owner => 'the holder of it'");
        let mut queue = None;
        match state {
            "guarded" => {
                a.run("begin");
                a.run(&format!("select lease_guard('{k}', {token})"));
                watch.run(&format!("select lease_break('{k}')"));
            }
            "kept" => {
                a.run(&format!("select lease_release('{k}', {token}, '1 hour')"));
            }
            "behind" => queue = Some(start(server.session("head"), &Way::Call.wait(&k), &mut watch, 1)),
            _ => {}
        }
        let mut b = server.session("limited");
        for way in Way::ALL {
            for (timeout, least) in [("0", 0), ("1 microsecond", 1), ("1 ms", 1), ("200 ms", 200)] {
                let begun = Instant::now();
                assert_eq!(b.maybe(&way.take(&k, "1 hour", Some(timeout), "")), None, "{state} {way:?} {timeout}");
                let took = begun.elapsed();
                assert!(took >= Duration::from_millis(least), "{state} {way:?} {timeout}: {took:?}");
                assert!(took < Duration::from_secs(10), "{state} {way:?} {timeout}: {took:?}");
                left_no_trace(&mut watch, b.pid, state);
            }
            // Short ones are kept well, most of the time.
            let late: Vec<Duration> = (0..21)
                .map(|_| {
                    let begun = Instant::now();
                    assert_eq!(b.maybe(&way.take(&k, "1 hour", Some("20 ms"), "")), None);
                    begun.elapsed().checked_sub(Duration::from_millis(20)).expect("20 ms at least")
                })
                .collect();
            assert!(median(late.clone()) < Duration::from_millis(40), "{state} {way:?}: {late:?}");

            // It wins over the server's lock_timeout, in both directions.
            b.run("set lock_timeout = '10ms'");
            let begun = Instant::now();
            assert_eq!(b.maybe(&way.take(&k, "1 hour", Some("200 ms"), "")), None, "{state} {way:?}");
            assert!(begun.elapsed() >= Duration::from_millis(200), "{state} {way:?}");
            b.run("set lock_timeout = '1h'");
            assert_eq!(b.maybe(&way.take(&k, "1 hour", Some("50 ms"), "")), None, "{state} {way:?}");
            assert_eq!(b.text("show lock_timeout"), "1h");
            b.run("reset lock_timeout");

            // The statement's limit and a cancel raise.
            b.run("set statement_timeout = '200ms'");
            for timeout in [None, Some("1 hour")] {
                let begun = Instant::now();
                b.fails(&way.take(&k, "1 hour", timeout, "")).is("57014");
                assert!(begun.elapsed() >= Duration::from_millis(200), "{state} {way:?}");
                assert!(begun.elapsed() < Duration::from_secs(10), "{state} {way:?}");
                left_no_trace(&mut watch, b.pid, state);
            }
            b.run("reset statement_timeout");
            let place = if state == "behind" { 2 } else { 1 };
            for timeout in [None, Some("1 hour")] {
                let waiting = start(b, &way.take(&k, "1 hour", timeout, ""), &mut watch, place);
                watch.run(&format!("select pg_cancel_backend({})", waiting.pid));
                let answer;
                (b, answer) = waiting.end();
                answer.0.expect_err("cancelled").is("57014");
                left_no_trace(&mut watch, b.pid, state);
            }
        }

        // Without a limit the function waits as the server would.
        b.run("set lock_timeout = '200ms'");
        for call in [
            format!("select token from lease_acquire('{k}', '1 hour', null)"),
            format!("select token from lease_acquire('{k}', '1 hour', timeout => null::interval)"),
        ] {
            let begun = Instant::now();
            let error = b.fails(&call);
            error.is("55P03").message_has(&k);
            if state == "held" {
                error.detail_has("the holder of it");
            }
            assert!(begun.elapsed() >= Duration::from_millis(200), "{state}");
            assert!(begun.elapsed() < Duration::from_secs(10), "{state}");
            left_no_trace(&mut watch, b.pid, state);
        }
        // The procedure for ever.
        let waiting = start(b, &Way::Call.wait(&k), &mut watch, if state == "behind" { 2 } else { 1 });
        let_pass(400);
        assert!(!waiting.finished(), "{state}: NULL is for ever");
        watch.run(&format!("select pg_cancel_backend({})", waiting.pid));
        waiting.end().1.0.expect_err("cancelled").is("57014");
        drop(queue.map(|head| watch.run(&format!("select pg_terminate_backend({})", head.pid))));
    }
}

#[test]
fn c13_limits_that_are_refused_and_long_ones() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let endless = watch.int("show server_version_num") >= 170_000;
    let k = unique("c13");
    let mut b = server.session("c13");
    for way in Way::ALL {
        for timeout in
            ["-1 ms", "-1 microsecond", "-1 day", "24 days 1 ms", "24 days 1 microsecond", "1 month", "10 years"]
        {
            b.fails(&way.take(&k, "1 hour", Some(timeout), "")).is("22023").message_has("timeout");
        }
        if endless {
            b.fails(&way.take(&k, "1 hour", Some("-infinity"), "")).is("22023");
        }
        left_no_trace(&mut watch, b.pid, "refused");
        assert_eq!(watch.int(&format!("select count(*) from lock_holders where name = '{k}'")), 0);
    }
    let mut long = vec!["24 days", "23 days 23:59:59.999999"];
    long.extend(endless.then_some("infinity"));
    for way in Way::ALL {
        for timeout in &long {
            let k = unique("c13");
            let mut a = server.session("holder");
            let token = take(&mut a, &k, "1 hour");
            let mut b = server.session("c13");
            if *timeout == "infinity" {
                b.run("set lock_timeout = '50ms'");
            }
            let waiting = start(b, &way.take(&k, "1 hour", Some(timeout), ""), &mut watch, 1);
            let_pass(150);
            assert!(!waiting.finished(), "{way:?} {timeout}");
            give_back(&mut a, &k, token);
            granted(waiting);
            // And one who doesn't have to wait.
            let k = unique("c13");
            watch.int(&way.take(&k, "1 hour", Some(timeout), ""));
        }
    }
}

/// A waiter's limit is its own, not its lease's; and a lease's life begins at the grant, after the wait.
#[test]
fn a_lease_lives_from_the_grant_on_not_from_the_call() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for way in Way::ALL {
        let k = unique("c32");
        let mut a = server.session("holder");
        let token = take(&mut a, &k, "1 hour");
        let waiting = start(server.session("waiter"), &way.take(&k, "2 s", None, ""), &mut watch, 1);
        // It waits for A's hour, not for its own two seconds.
        let_pass(2300);
        assert!(!waiting.finished(), "{way:?}");
        let freed = Instant::now();
        give_back(&mut a, &k, token);
        let (mut b, token, at) = granted(waiting);
        let latest = Instant::now();
        let alive = b.flag(&format!("select lease_check('{k}', {token})"));
        assert!(alive || freed.elapsed() > Duration::from_secs(2), "{way:?}");
        until("it ends", || !b.flag(&format!("select lease_check('{k}', {token})")));
        assert!(freed.elapsed() >= Duration::from_secs(2), "{way:?}: two seconds from the grant");
        assert!(latest >= at);
    }
}

/// A database of the test's own: what waits elsewhere holds no snapshot against it.
fn database() -> Server {
    let database = Server::shared().new_database("leases", "UTF8");
    database.session("setup").run(
        "create table t (i int, v text); create table u (i int); \
         create procedure wait_in_procedure(inout n int, inout token bigint default null) language plpgsql as $$ begin \
           n := n + (select count(*) from u); \
           call lease_acquire_wait('k', '1 hour', token => token); \
           n := n + (select count(*) from u); \
         end $$; \
         create procedure wait_deeper(depth int, inout token bigint default null) language plpgsql as $$ begin \
           if depth > 0 then call wait_deeper(depth - 1, token); \
           else call lease_acquire_wait('k', '1 hour', token => token); end if; \
         end $$",
    );
    database
}

/// A statement that waits for `k` without a snapshot in some way.
const WAITS: [(&str, &str); 9] = [
    ("CALL", "call lease_acquire_wait('k', '1 hour')"),
    ("CALL with a timeout", "call lease_acquire_wait('k', '1 hour', '1 hour')"),
    ("CALL with a bound one", "call lease_acquire_wait('k', '1 hour', bound => true)"),
    ("DO", "do $$ declare t bigint; begin call lease_acquire_wait('k', '1 hour', token => t); end $$"),
    (
        "DO after reading",
        "do $$ declare t bigint; begin \
           perform count(*) from u; \
           call lease_acquire_wait('k', '1 hour', token => t); \
           perform count(*) from u; \
         end $$",
    ),
    (
        "DO after a commit",
        "do $$ declare t bigint; begin \
           insert into t values (1, 'before'); commit; \
           call lease_acquire_wait('k', '1 hour', token => t); \
         end $$",
    ),
    (
        "DO after a rollback",
        "do $$ declare t bigint; begin \
           insert into t values (1, 'never'); rollback; \
           call lease_acquire_wait('k', '1 hour', token => t); \
         end $$",
    ),
    ("procedure with INOUT arguments", "call wait_in_procedure(0)"),
    ("procedures in procedures", "call wait_deeper(5)"),
];

/// That a session is as good as new.
#[track_caller]
fn is_usable(session: &mut Session, what: &str) {
    assert_eq!(session.int("select 1"), 1, "{what}");
    session.run("begin; create temp table usable (i int); insert into usable values (1); savepoint s");
    session.fails("select 1/0").is("22012");
    session.run("rollback to s; select * from usable; rollback");
    session.run("do $$ begin perform count(*) from pg_class; commit; perform count(*) from pg_class; end $$");
    let token = session.int("call lease_acquire_wait('usable', '1 hour', '0')");
    give_back(session, "usable", token);
}

#[test]
fn c08_others_build_indexes_and_vacuum_beside_waiters() {
    for (what, statement) in WAITS {
        let database = database();
        let mut watch = database.session("watch");
        let mut a = database.session("holder");
        let token = take(&mut a, "k", "1 hour");
        let waiters: Vec<Running<Answered>> =
            (1..=3).map(|place| start(database.session("waiter"), statement, &mut watch, place)).collect();
        for waiter in &waiters {
            watch.holds_no_snapshot(waiter.pid, what);
        }
        // A third session.
        watch.run("set statement_timeout = '60s'");
        watch.run("create index concurrently t_i on t (i)");
        assert!(watch.flag("select indisvalid from pg_index where indexrelid = 't_i'::regclass"), "{what}");
        watch.run("reset statement_timeout");
        // C07: the holder itself.
        a.run("insert into t select i, 'x' from generate_series(1, 100) as i");
        for step in [
            "create index concurrently t_v on t (v)",
            "reindex index concurrently t_v",
            "drop index concurrently t_v",
            "vacuum t",
        ] {
            a.run(step);
        }
        // After a while, too: the head looks once in a second.
        let_pass(1200);
        for (place, waiter) in (1..).zip(&waiters) {
            until_queued(&mut watch, waiter.pid, place);
            until("it holds no snapshot", || {
                watch.flag(&format!(
                    "select backend_xmin is null and backend_xid is null from pg_stat_activity where pid = {}",
                    waiter.pid
                ))
            });
        }
        give_back(&mut a, "k", token);
        for waiter in waiters {
            let (mut b, (answer, _)) = waiter.end();
            answer.unwrap_or_else(|error| panic!("{what}: {error:#?}"));
            is_usable(&mut b, what);
            assert_eq!(watch.int("select count(*) from lease_holder('k')"), 1, "{what}: it has k");
            assert_eq!(watch.int("select lease_break('k')"), 1, "{what}");
        }
        assert_eq!(watch.int("select count(*) from t where v = 'never'"), 0, "{what}");
    }
}

#[test]
fn c08_by_a_prepared_statement() {
    let database = database();
    let mut watch = database.session("watch");
    let mut a = database.session("holder");
    let mut held = take(&mut a, "k", "1 hour");
    for call in [
        "call lease_acquire_wait($1, '1 hour', $2::text::interval)",
        "call lease_acquire_wait($1, '1 hour', $2::text::interval, token => null)",
    ] {
        let waiting = database.session("waiter").spawn(move |session| {
            let row = session.client.query_one(call, &[&"k", &"1 hour"]).expect("the call");
            row.get::<_, Option<i64>>("token")
        });
        until_queued(&mut watch, waiting.pid, 1);
        watch.holds_no_snapshot(waiting.pid, call);
        watch.run("create index concurrently t_i on t (i)");
        watch.run("drop index t_i");
        give_back(&mut a, "k", held);
        let (mut b, token) = waiting.end();
        is_usable(&mut b, call);
        give_back(&mut b, "k", token.expect("granted"));
        held = take(&mut a, "k", "1 hour");
    }
}

#[test]
fn c08_vacuum_removes_rows_beside_a_waiter() {
    const FILL: &str = "insert into t select i, repeat('x', 100) from generate_series(1, 1000) as i";
    let database = database();
    let mut watch = database.session("watch");
    let mut a = database.session("holder");
    let token = take(&mut a, "k", "1 hour");
    // Where the rows are gone their room is used again, and the table stays as it is.
    let are_removed = |watch: &mut Session| {
        let size = watch.int("select pg_relation_size('t')");
        // An autovacuum at the same time may keep it from that once.
        within(Duration::from_secs(2), || {
            watch.run("delete from t");
            watch.run("vacuum t");
            watch.run(FILL);
            watch.int("select pg_relation_size('t')") <= size
        })
    };
    watch.run(FILL);
    for (what, statement) in WAITS {
        let head = start(database.session("head"), statement, &mut watch, 1);
        let behind = start(database.session("behind"), statement, &mut watch, 2);
        assert!(are_removed(&mut watch), "{what}");
        for waiting in [behind, head] {
            watch.run(&format!("select pg_cancel_backend({})", waiting.pid));
            waiting.end().1.0.expect_err("cancelled").is("57014");
        }
    }
    // With a snapshot it can't, so this test can fail.
    let waiting = start(database.session("function"), &Way::Function.wait("k"), &mut watch, 1);
    assert!(!are_removed(&mut watch));
    give_back(&mut a, "k", token);
    granted(waiting);
}

#[test]
fn the_statements_after_the_wait_see_what_was_committed_meanwhile() {
    let database = database();
    let mut watch = database.session("watch");
    let mut a = database.session("holder");
    let token = take(&mut a, "k", "1 hour");
    let first = start(database.session("first"), "call wait_in_procedure(0)", &mut watch, 1);
    let second = start(
        database.session("second"),
        "do $$ declare t bigint; big text := repeat('y', 100000); r record; begin \
           select count(*) as n into r from u; \
           call lease_acquire_wait('k', '1 hour', '1 hour', token => t); \
           if t is null or length(big) <> 100000 or r.n <> 0 then raise 'lost'; end if; \
           if (select count(*) from u) <> 2 then raise 'old'; end if; \
           perform lease_guard('k', t); \
           insert into u values (3); \
           commit; \
           if not lease_release('k', t) then raise 'not held'; end if; \
         end $$",
        &mut watch,
        2,
    );
    a.run("insert into u values (1), (2)");
    give_back(&mut a, "k", token);
    let (mut b, (answer, _)) = first.end();
    let rows = answer.expect("no error");
    assert_eq!(rows[0].get("n"), Some("2"), "0 before and 2 after");
    let token = rows[0].get("token").expect("a token").parse().expect("a number");
    give_back(&mut b, "k", token);
    second.end().1.0.expect("no error");
    assert_eq!(watch.int("select count(*) from u"), 3);
    assert_eq!(watch.int("select count(*) from lease_holder('k')"), 0);
}

#[test]
fn null_at_the_timeout_and_the_block_goes_on() {
    let database = database();
    let mut watch = database.session("watch");
    take(&mut watch, "k", "1 hour");
    let mut b = database.session("waiter");
    assert_eq!(b.maybe("call lease_acquire_wait('k', '1 hour', '0')"), None);
    assert_eq!(b.maybe("call lease_acquire_wait('k', '1 hour', '50 ms')"), None);
    b.run(
        "do $$ declare t bigint; begin \
           for i in 1..3 loop \
             t := 7; \
             call lease_acquire_wait('k', '1 hour', '20 ms', token => t); \
             if t is not null then raise 'got it'; end if; \
             insert into t values (i); \
             commit; \
           end loop; \
         end $$",
    );
    assert_eq!(b.int("select count(*) from t"), 3);
    left_no_trace(&mut watch, b.pid, "after NULL");
    is_usable(&mut b, "after NULL");
}

/// Where a snapshot or work remains: an error, nothing held, and nothing committed that the caller did not commit.
#[test]
fn c47_refused_where_it_cannot_do_without_a_snapshot() {
    let database = database();
    let mut watch = database.session("watch");
    watch.run(
        "create function wait_in_function() returns bigint language plpgsql as $$ declare t bigint; begin \
           call lease_acquire_wait('k', '1 hour', token => t); return t; end $$; \
         create function wait_in_trigger() returns trigger language plpgsql as $$ declare t bigint; begin \
           call lease_acquire_wait('k', '1 hour', token => t); return new; end $$; \
         create table watched (i int); \
         create trigger watched before insert on watched for each row execute function wait_in_trigger(); \
         create procedure wait_as_definer() language plpgsql security definer as $$ declare t bigint; begin \
           call lease_acquire_wait('k', '1 hour', token => t); end $$; \
         create procedure wait_with_set() language plpgsql set work_mem = '1MB' as $$ declare t bigint; begin \
           call lease_acquire_wait('k', '1 hour', token => t); end $$",
    );
    let wait = "call lease_acquire_wait('k', '1 hour', token => tok)";
    let block = |body: &str| {
        format!("do $$ declare tok bigint; r record; c cursor for select * from pg_class; begin {body} end $$")
    };
    let call = "call lease_acquire_wait('k', '1 hour')";
    let plain: Vec<(&str, Vec<String>)> = vec![
        ("a transaction block", vec!["begin".into(), call.into()]),
        ("a block that has written", vec!["begin".into(), "insert into t values (1)".into(), call.into()]),
        ("a savepoint", vec!["begin; savepoint s".into(), call.into()]),
        ("a DO in a block", vec!["begin".into(), block(&format!("{wait};"))]),
        ("several statements in a string", vec![format!("insert into t values (1); {call}")]),
        ("first of several in a string", vec![format!("{call}; insert into t values (1)")]),
        ("a function", vec!["select wait_in_function()".into()]),
        ("a function in a DO", vec![block("perform wait_in_function();")]),
        ("a trigger", vec!["insert into watched values (1)".into()]),
        ("SECURITY DEFINER", vec!["call wait_as_definer()".into()]),
        ("a SET clause", vec!["call wait_with_set()".into()]),
        ("a DO that has written", vec![block(&format!("insert into t values (1); {wait};"))]),
        ("a DO that has written after a commit", vec![block(&format!("commit; insert into t values (1); {wait};"))]),
        (
            "a DO that has taken another lease",
            vec![block(&format!("perform lease_acquire('other', '1 hour'); {wait};"))],
        ),
        (
            "a FOR loop over rows",
            vec![block(&format!("for r in select * from generate_series(1, 3) loop {wait}; end loop;"))],
        ),
        ("an open cursor", vec![block(&format!("open c; fetch c into r; {wait}; fetch c into r;"))]),
        ("an exception block", vec![block(&format!("begin {wait}; exception when raise_exception then null; end;"))]),
        ("dynamic SQL", vec![block("execute 'call lease_acquire_wait(''k'', ''1 hour'')';")]),
        ("REPEATABLE READ", vec!["set default_transaction_isolation = 'repeatable read'".into(), call.into()]),
        ("SERIALIZABLE", vec!["set default_transaction_isolation = 'serializable'".into(), call.into()]),
    ];
    for is_held in [false, true] {
        let held = is_held.then(|| take(&mut watch, "k", "1 hour"));
        for (what, statements) in &plain {
            let mut b = database.session("refused");
            let mut refused = None;
            for statement in statements {
                if let Err(error) = b.query(statement) {
                    refused = Some(error);
                }
            }
            refused.unwrap_or_else(|| panic!("{what}: not refused")).is("25001").message_has("k");
            left_no_trace(&mut watch, b.pid, what);
            b.run("rollback; reset all");
            assert_eq!(watch.int("select count(*) from t"), 0, "{what}: nothing is written");
            assert_eq!(watch.int("select count(*) from lease_holder('k')"), i64::from(is_held), "{what}");
            assert_eq!(watch.int("select count(*) from lease_holder('other')"), 0, "{what}");
            is_usable(&mut b, what);
        }
        if let Some(token) = held {
            give_back(&mut watch, "k", token);
        }
    }
    assert_eq!(watch.int("select count(*) from watched"), 0);
}

/// The grant is part of the transaction that the wait began: an error later on takes it back, with what was written.
#[test]
fn c47_an_error_after_the_wait() {
    let database = database();
    let mut watch = database.session("watch");
    let mut b = database.session("c47");
    for (what, body, committed, is_held) in [
        ("without a commit", "$w; insert into t values (1); raise 'late'", 0, false),
        ("after a commit", "insert into t values (1); commit; $w; insert into t values (2); raise 'late'", 1, false),
        (
            "in a later transaction",
            "$w; insert into t values (1); commit; insert into t values (2); raise 'late'",
            1,
            true,
        ),
        (
            "after a rollback",
            "insert into t values (1); rollback; $w; insert into t values (2); raise 'late'",
            0,
            false,
        ),
        ("taken back by a rollback", "$w; rollback; insert into t values (1)", 1, false),
        ("a second one, after a commit", "$w; commit; perform lease_release('k', tok); commit; $w", 0, true),
        ("a second one without", "$w; perform lease_release('k', tok); $w", 0, false),
    ] {
        let body = body.replace("$w", "call lease_acquire_wait('k', '1 hour', token => tok)");
        let result = b.query(&format!("do $$ declare tok bigint; begin {body}; end $$"));
        if body.contains("late") {
            result.expect_err("raised").is("P0001");
        } else if what == "a second one without" {
            result.expect_err("it has written").is("25001");
        } else {
            result.unwrap_or_else(|error| panic!("{what}: {error:#?}"));
        }
        assert_eq!(watch.int("select count(*) from t"), committed, "{what}");
        watch.run("truncate t");
        assert_eq!(watch.int("select lease_break('k')"), i64::from(is_held), "{what}");
        left_no_trace(&mut watch, b.pid, what);
        is_usable(&mut b, what);
    }
}

#[test]
fn c47_a_pipeline_with_open_work_is_refused_and_rolled_back() {
    let database = database();
    let mut watch = database.session("watch");
    let call = "call lease_acquire_wait('k', '1 hour')";
    let refused = Reply::Error("25001".into());
    for is_held in [false, true] {
        let held = is_held.then(|| take(&mut watch, "k", "1 hour"));
        let mut openings = vec!["insert into t values (1)"];
        if watch.knows_pipelines() {
            openings.extend(["select 1", "select count(*) from t"]);
        }
        for before in openings {
            let mut wire = Wire::open(&database);
            wire.statement(before).statement(call).statement("insert into t values (2)").sync();
            let replies = wire.replies();
            assert!(replies.contains(&refused), "{before}: {replies:?}");
            assert!(!replies.contains(&Reply::Complete("CALL".into())), "{before}: {replies:?}");
            assert_eq!(replies.last(), Some(&Reply::Ready('I')), "{before}");
            assert_eq!(watch.int("select count(*) from t"), 0, "{before}");
            left_no_trace(&mut watch, wire.pid, before);
            let replies = wire.statement("select 7").sync().replies();
            assert_eq!(replies[0], Reply::Row(vec![Some("7".into())]));
        }
        if let Some(token) = held {
            give_back(&mut watch, "k", token);
        }
    }

    // The first of a pipeline has nothing open before it. What comes after it is one transaction with it.
    let token = take(&mut watch, "k", "1 hour");
    let mut wire = Wire::open(&database);
    wire.statement(call).statement("insert into t values (1)").statement("select 1/0").sync().send();
    until_queued(&mut watch, wire.pid, 1);
    watch.holds_no_snapshot(wire.pid, "pipeline");
    give_back(&mut watch, "k", token);
    let replies = wire.replies();
    assert!(replies.contains(&Reply::Complete("INSERT 0 1".into())), "{replies:?}");
    assert!(replies.contains(&Reply::Error("22012".into())), "{replies:?}");
    assert_eq!(watch.int("select count(*) from t"), 0);
    assert_eq!(watch.int("select count(*) from lease_holder('k')"), 0, "the grant is taken back with the row");
    let replies = wire.statement(call).statement("insert into t values (1)").sync().replies();
    assert!(replies.contains(&Reply::Complete("INSERT 0 1".into())), "{replies:?}");
    assert_eq!(watch.int("select lease_break('k')"), 1);
}

/// One who waits for a lease inside a transaction that holds locks is no part of the lock manager's deadlock check, but
/// others who wait for its locks are, and its limit ends it.
#[test]
fn a_waiter_in_a_transaction_block_keeps_what_it_has() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let k = unique("block");
    let table = unique_ident("block");
    watch.run(&format!("create table {table} (i int); insert into {table} values (1)"));
    let mut a = server.session("holder");
    for isolation in ["read committed", "repeatable read"] {
        let token = take(&mut a, &k, "1 hour");
        let mut b = server.session("waiter");
        b.run(&format!("begin isolation level {isolation}; update {table} set i = i + 1"));
        assert_eq!(b.maybe(&format!("select token from lease_acquire('{k}', '1 hour', '100 ms')")), None);
        let waiting = start(b, &Way::Function.take(&k, "1 hour", Some("1 hour"), ""), &mut watch, 1);
        give_back(&mut a, &k, token);
        let (mut b, next, _) = granted(waiting);
        // Not committed yet: nobody else knows of it.
        assert!(b.flag(&format!("select lease_check('{k}', {next})")), "{isolation}");
        assert!(!try_take(&mut watch, &k), "{isolation}");
        b.run(&format!("update {table} set i = i + 1; commit"));
        assert!(watch.flag(&format!("select lease_check('{k}', {next})")), "{isolation}");
        give_back(&mut b, &k, next);
    }
    assert_eq!(watch.int(&format!("select i from {table}")), 5);
}
