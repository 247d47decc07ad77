//! Cases C31, C40, C41 and C51: the fencing token over crashes, failover and restore. No token comes twice, and each is
//! higher than all that anyone was given before.
//!
//! The servers here run with `fsync = off`. That is as good as a disk for them: the operating system doesn't crash, and
//! an immediate stop loses what the server had not written yet, its WAL buffers and its own pages.

use super::support::{Backup, Cluster, Dir, Server, Session, as_server_user, let_pass, literal, run, signal, until};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

/// The WAL writer stays out of the way: what no session flushes is lost in a crash.
const LAZY: &[&str] = &["wal_writer_delay = '10s'", "bgwriter_lru_maxpages = 0"];

/// Acquires a free lease and gives its token.
#[track_caller]
fn token(session: &mut Session, name: &str) -> i64 {
    session.int(&format!("select token from lease_acquire({}, '1 h')", literal(name)))
}

/// Acquires several in one statement.
#[track_caller]
fn tokens(session: &mut Session, stem: &str, count: usize) -> Vec<i64> {
    let tokens = session.column(&format!(
        "select token from generate_series(1, {count}) as i, lease_acquire({} || ' ' || i, '1 h') order by token",
        literal(stem)
    ));
    tokens.iter().map(|token| token.parse().expect("a token")).collect()
}

#[track_caller]
fn held(session: &mut Session, name: &str, token: i64) -> bool {
    session.flag(&format!("select lease_check({}, {token})", literal(name)))
}

/// All tokens that were given out, in the order in which that happened.
struct Ledger {
    highest: i64,
}

impl Ledger {
    fn new() -> Ledger {
        Ledger { highest: 0 }
    }

    /// A new token.
    #[track_caller]
    fn given(&mut self, token: i64) -> i64 {
        assert!(token > self.highest, "{token} was given out after {}", self.highest);
        self.highest = token;
        token
    }

    #[track_caller]
    fn all_given(&mut self, tokens: Vec<i64>) {
        for token in tokens {
            self.given(token);
        }
    }

    /// Tokens that several sessions were given at once.
    #[track_caller]
    fn given_at_once(&mut self, mut tokens: Vec<i64>) {
        tokens.sort_unstable();
        self.all_given(tokens);
    }
}

// --- In one server's life ---------------------------------------------------------------------------------------------

#[test]
fn c31_rollback_savepoint_and_deletion() {
    let server = Server::shared().new_database("c31", "UTF8");
    let mut a = server.session("a");
    let mut b = server.session("b");
    let mut ledger = Ledger::new();
    for round in 0..50 {
        a.run("begin");
        let first = ledger.given(token(&mut a, "k"));
        assert!(held(&mut a, "k", first));
        a.run("rollback");
        assert!(!held(&mut a, "k", first), "round {round}");
        let second = ledger.given(token(&mut b, "k"));
        assert!(b.flag(&format!("select lease_release('k', {second})")));

        a.run("begin; savepoint s");
        ledger.given(token(&mut a, "k"));
        a.run("rollback to s");
        let third = ledger.given(token(&mut a, "k"));
        a.run("release s; commit");
        assert!(held(&mut b, "k", third));
        // Also where the error is caught, and where the name is another one.
        a.run(
            "do $$ begin perform lease_acquire('other', '1 h'); raise exception 'x'; \
                   exception when raise_exception then null; end $$",
        );
        let other = ledger.given(token(&mut b, "other"));
        // The row's end, in each way.
        match round % 3 {
            0 => assert!(b.flag(&format!("select lease_release('k', {third})"))),
            1 => assert_eq!(b.int("select lease_break('k')"), 1),
            _ => drop(b.run("delete from _lease where name = 'k'")),
        }
        assert!(!held(&mut a, "k", third));
        assert!(b.flag(&format!("select lease_release('other', {other})")));
        let last = ledger.given(token(&mut a, "k"));
        a.run(&format!("select lease_release('k', {last})"));
    }
    // With nothing left in the table, and after a VACUUM of it.
    a.run("delete from _lease");
    a.run("vacuum _lease");
    ledger.given(token(&mut a, "k"));
}

#[test]
fn c31_refused_tries_and_permits() {
    let server = Server::shared().new_database("c31", "UTF8");
    let mut a = server.session("a");
    let mut b = server.session("b");
    let mut ledger = Ledger::new();
    for _ in 0..5 {
        let acquire = "select token from lease_acquire('k', '1 h', permits => 3)";
        ledger.given(a.int(acquire));
        ledger.given(b.int(acquire));
        ledger.given(a.int(acquire));
        for session in [&mut a, &mut b] {
            assert_eq!(session.maybe(acquire), None);
        }
        ledger.given(b.int("select token from lease_acquire('bound', '1 h', bound => true)"));
        ledger.given(a.int("call lease_acquire_wait('by call', '1 h')"));
        for name in ["k", "bound", "by call"] {
            a.run(&format!("select lease_break('{name}')"));
        }
    }
}

/// Renewing, also with another TTL and payload, keeps the token; only a grant makes one.
#[test]
fn c31_renewals_keep_the_token() {
    let server = Server::shared().new_database("c31", "UTF8");
    let mut a = server.session("a");
    let mut b = server.session("b");
    let mut ledger = Ledger::new();
    let kept = ledger.given(token(&mut a, "k"));
    for _ in 0..20 {
        b.run(&format!("select lease_renew('k', {kept}, '2 h', '{{}}')"));
        ledger.given(token(&mut b, "other"));
        b.run("select lease_break('other')");
        assert!(held(&mut b, "k", kept));
    }
}

/// Each database counts for itself.
#[test]
fn c31_databases_are_apart() {
    let one = Server::shared().new_database("c31", "UTF8");
    let two = Server::shared().new_database("c31", "UTF8");
    let (mut a, mut b) = (one.session("a"), two.session("b"));
    a.run("select setval('_lease_token', (1000::bigint << 42) + 5)");
    assert!(token(&mut a, "k") > 1000 << 42);
    assert!(token(&mut b, "k") < 1000 << 42);
}

// --- Immediate shutdown -----------------------------------------------------------------------------------------------

/// A token is never lost, whether its transaction had come to its end or not.
#[test]
fn c31_immediate_shutdown() {
    let cluster = Cluster::new(LAZY);
    let mut ledger = Ledger::new();
    for round in 0..6 {
        for synchronous_commit in ["on", "off"] {
            for (number, drawn) in [1, 2, 31, 32, 33, 34].into_iter().enumerate() {
                if number % 3 != round % 3 {
                    continue;
                }
                let what = format!("round {round}, synchronous_commit = {synchronous_commit}, {drawn} drawn");
                let mut a = cluster.session("a");
                let mut b = cluster.session("b");
                a.run(&format!("set synchronous_commit = {synchronous_commit}"));
                b.run(&format!("set synchronous_commit = {synchronous_commit}"));
                // Committed, and right after it one that isn't.
                let committed = ledger.given(token(&mut a, &what));
                b.run("begin");
                ledger.all_given(tokens(&mut b, &format!("{what}, open"), drawn));
                cluster.stop_immediate();
                cluster.start();
                let mut c = cluster.session("c");
                if synchronous_commit == "on" {
                    assert!(held(&mut c, &what, committed), "{what}");
                }
                assert_eq!(c.int(&format!("select count(*) from lock_holders where name like '{what}, open%'")), 0);
                ledger.given(token(&mut c, &format!("{what}, afterwards")));
            }
        }
    }
}

/// The same with transactions that had been rolled back, and with a subtransaction that had.
#[test]
fn c31_immediate_shutdown_after_a_rollback() {
    let cluster = Cluster::new(LAZY);
    let mut ledger = Ledger::new();
    for round in 0..4 {
        let mut a = cluster.session("a");
        a.run("set synchronous_commit = off; begin");
        ledger.all_given(tokens(&mut a, "k", 1 + 33 * (round % 2)));
        a.run("rollback");
        if round > 1 {
            a.run("begin; savepoint s");
            ledger.all_given(tokens(&mut a, "k", 3));
            a.run("rollback to s");
        }
        cluster.stop_immediate();
        cluster.start();
        ledger.given(token(&mut cluster.session("b"), "k"));
        // The next crash would undo a release.
        cluster.session("b").run("select lease_break('k')");
    }
}

/// A backend that is killed takes all others with it; the server starts again by itself.
#[test]
fn c31_a_killed_backend() {
    let cluster = Cluster::new(&["restart_after_crash = on", LAZY[0], LAZY[1]]);
    let mut ledger = Ledger::new();
    for round in 0..4 {
        let mut a = cluster.session("a");
        let mut b = cluster.session("b");
        a.run("set synchronous_commit = off; begin");
        ledger.all_given(tokens(&mut a, &format!("{round} a"), 5));
        b.run("set synchronous_commit = off");
        ledger.all_given(tokens(&mut b, &format!("{round} b"), 1 + 20 * round));
        signal(a.pid, "KILL");
        until("b sees the crash", || b.query("select 1").is_err());
        let mut c = None;
        until("the server is back", || {
            c = Session::open(cluster.config("c")).ok();
            c.is_some()
        });
        ledger.given(token(&mut c.expect("just opened"), &format!("{round} c")));
    }
}

/// Session 1 draws in an open transaction. Its draw logs 32 values ahead, so the draws of session 2 write no WAL of the
/// sequence: what session 2 has to flush is what session 1 wrote. A session 1 that is granted leases flushes for itself,
/// in the end; one that draws by hand is like one that has not come to it yet.
#[test]
fn c51_the_record_is_another_sessions() {
    let cluster = Cluster::new(LAZY);
    let mut ledger = Ledger::new();
    cluster.session("plain").run("create sequence plain");
    let mut plain_came_twice = 0;
    // 1 + 32 values are covered by the first draw after a start; the next one logs again.
    for (round, drawn) in [1, 2, 1, 31, 32, 33, 34, 65, 66, 67, 1, 33].into_iter().enumerate() {
        let mut one = cluster.session("one");
        let mut two = cluster.session("two");
        two.run("set synchronous_commit = off");
        one.run("begin");
        if round % 4 == 3 {
            ledger.all_given(tokens(&mut one, &format!("{round} one"), drawn));
        } else {
            let by_hand = one.column(&format!("select nextval('_lease_token') from generate_series(1, {drawn})"));
            ledger.all_given(by_hand.iter().map(|token| token.parse().expect("a token")).collect());
        }
        if round % 2 == 0 {
            // In a transaction of its own, or in one that is open.
            two.run("begin");
        }
        ledger.given(token(&mut two, &format!("{round} two")));
        // An ordinary sequence, by the same steps: it shows that these stops do lose what was handed out.
        one.run("select nextval('plain')");
        let plain = two.int("select nextval('plain')");
        cluster.stop_immediate();
        cluster.start();
        let mut three = cluster.session("three");
        ledger.given(token(&mut three, &format!("{round} three")));
        plain_came_twice += i64::from(three.int("select nextval('plain')") <= plain);
    }
    assert!(plain_came_twice > 0, "an ordinary sequence lost nothing: these stops are too gentle to test anything");
}

/// The one that draws for all and the one that is granted change places: stops right before, at and after the token with
/// which the next draw is made, and the one with which the last draw's are used up.
#[test]
fn c51_back_and_forth_over_the_boundary() {
    let cluster = Cluster::new(LAZY);
    let mut ledger = Ledger::new();
    for (round, turns) in [31, 32, 33, 63, 64, 65].into_iter().enumerate() {
        let mut sessions: Vec<Session> = (0..3).map(|_| cluster.session("drawing")).collect();
        for session in &mut sessions {
            session.run("set synchronous_commit = off");
        }
        sessions[0].run("begin");
        sessions[1].run("begin; set transaction isolation level repeatable read");
        for turn in 0..turns {
            let session = &mut sessions[turn % 3];
            ledger.given(token(session, &format!("{round} {turn}")));
        }
        cluster.stop_immediate();
        cluster.start();
        ledger.given(token(&mut cluster.session("afterwards"), &format!("{round} afterwards")));
    }
}

/// Many sessions draw while the server is stopped: of what a client has seen nothing comes again.
#[test]
fn c31_stopped_under_many_drawing_sessions() {
    let cluster = Cluster::new(&["wal_writer_delay = '10s'", "max_connections = 40"]);
    let mut ledger = Ledger::new();
    for round in 0..8_u64 {
        let workers: Vec<_> = (0..8)
            .map(|worker| {
                cluster.session("drawing").spawn(move |session| {
                    let (before, after) = match worker % 4 {
                        0 => ("", ""),
                        1 => ("set synchronous_commit = off", ""),
                        2 => ("set synchronous_commit = off; begin", "rollback; begin"),
                        _ => ("begin", "commit; begin"),
                    };
                    let mut seen = Vec::new();
                    session.query(before).expect("a setting");
                    for turn in 0.. {
                        let name = format!("{round} {worker} {turn}");
                        let sql = format!("select token from lease_acquire('{name}', '1 h')");
                        let Ok(rows) = session.query(&sql) else { break };
                        seen.push(rows[0].get(0).expect("it was free").parse::<i64>().expect("a token"));
                        if turn % 7 == 6 && session.query(after).is_err() {
                            break;
                        }
                    }
                    seen
                })
            })
            .collect();
        let mut watch = cluster.session("watch");
        until("they draw", || watch.int("select count(*) from _lease") > 20);
        drop(watch);
        std::thread::sleep(Duration::from_millis(20 * round));
        cluster.stop_immediate();
        let mut seen = Vec::new();
        for worker in workers {
            let tokens = worker.end().1;
            assert!(tokens.is_sorted_by(|one, next| one < next), "a session's own tokens rise");
            seen.extend(tokens);
        }
        assert!(seen.len() > 20, "round {round}: {} tokens", seen.len());
        ledger.given_at_once(seen);
        cluster.start();
        let mut session = cluster.session("afterwards");
        ledger.given(token(&mut session, &format!("{round} afterwards")));
        session.run("delete from _lease");
    }
}

/// The first grants of a new database come at once: the token is raised by one of them only.
#[test]
fn c31_the_first_grants_at_once() {
    for _ in 0..3 {
        let server = Server::shared().new_database("c31_first", "UTF8");
        let workers: Vec<_> = (0..8)
            .map(|worker| server.session("first").spawn(move |session| tokens(session, &worker.to_string(), 40)))
            .collect();
        let mut ledger = Ledger::new();
        ledger.given_at_once(workers.into_iter().flat_map(|worker| worker.end().1).collect());
        ledger.given(token(&mut server.session("afterwards"), "afterwards"));
    }
}

/// A token that is far behind the clock is raised, and that, too, is there after a crash.
#[test]
fn c31_a_counter_that_lags() {
    let cluster = Cluster::new(LAZY);
    let mut ledger = Ledger::new();
    let mut session = cluster.session("a");
    let first = ledger.given(token(&mut session, "first"));
    let epoch = first >> 42;
    assert!(epoch >= 1, "the epoch begins at the timeline's number: {first}");
    for round in 0..2 {
        // As if nothing had been granted for an hour.
        session.run(&format!("select setval('_lease_token', {})", ledger.highest - 3_600_000));
        session.run("checkpoint; begin");
        let raised = token(&mut session, &format!("{round} raised"));
        assert!(raised > ledger.highest - 120_000, "{raised} is far behind the clock");
        assert_eq!(raised >> 42, epoch);
        ledger.highest = raised;
        cluster.stop_immediate();
        cluster.start();
        session = cluster.session("a");
        ledger.given(token(&mut session, &format!("{round} afterwards")));
    }
    // One that is ahead stays ahead.
    session.run(&format!("select setval('_lease_token', {})", ledger.highest + 3_600_000));
    ledger.highest += 3_600_000;
    ledger.all_given(tokens(&mut session, "ahead", 3));
}

/// Grants go on when the tokens in stock have come to be as far behind the clock as they may be, and the next draw has not.
#[test]
fn c31_a_counter_that_comes_to_lag() {
    const CLOCK: &str = "(extract(epoch from clock_timestamp() - '2025-01-01 00:00:00+00') * 1000)::bigint";
    // A server of its own: where many databases have leases, they put each other's tokens out of stock, and so draw more.
    let cluster = Cluster::new(&[]);
    for _ in 0..3 {
        let mut session = cluster.new_database("c31_lag", "UTF8").session("a");
        // As if it had been used all the time, but less and less: it will be 60 s behind in some 300 ms.
        session.run(&format!(
            "select setval('_lease_timeline', timeline_id) from pg_control_checkpoint(); \
             select setval('_lease_token', (1::bigint << 42) + {CLOCK} - 59800); \
             set statement_timeout = '30 s'"
        ));
        let mut ledger = Ledger::new();
        let begun = Instant::now();
        let mut grants = 0;
        while begun.elapsed() < Duration::from_millis(900) {
            ledger.given(token(&mut session, &grants.to_string()));
            grants += 1;
            let_pass(5);
        }
        let behind = format!("select {CLOCK} - (last_value & ((1::bigint << 42) - 1)) from _lease_token");
        let behind = session.int(&behind);
        assert!(behind < 30_000, "after {grants} grants it is near the clock again, and not {behind} ms behind");
    }
}

// --- Restart ----------------------------------------------------------------------------------------------------------

/// An orderly restart, and a crash: what is unbound goes on.
#[test]
fn c31_restart_and_leases_of_before() {
    let cluster = Cluster::new(&[]);
    let mut ledger = Ledger::new();
    for (round, immediate) in [false, true, false].into_iter().enumerate() {
        let mut a = cluster.session("a");
        let (unbound, bound) = (format!("{round} unbound"), format!("{round} bound"));
        let kept = ledger.given(token(&mut a, &unbound));
        let ended = ledger.given(a.int(&format!("select token from lease_acquire('{bound}', '1 h', bound => true)")));
        if immediate {
            cluster.stop_immediate();
        } else {
            cluster.stop();
        }
        cluster.start();
        let mut b = cluster.session("b");
        assert!(held(&mut b, &unbound, kept));
        assert!(!held(&mut b, &bound, ended));
        assert_eq!(b.maybe(&format!("select token from lease_acquire('{unbound}', '1 h')")), None);
        ledger.given(token(&mut b, &bound));
        b.run(&format!("select lease_renew('{unbound}', {kept})"));
    }
}

// --- Failover ---------------------------------------------------------------------------------------------------------

/// The standby gets no more WAL from here on.
fn cut_off(standby: &Cluster) {
    let mut session = standby.session("cut off");
    session.run("alter system set primary_conninfo = ''");
    session.run("select pg_reload_conf()");
    until("the WAL receiver is gone", || session.int("select count(*) from pg_stat_wal_receiver") == 0);
    // Read only at the next start: a standby of this one isn't to have it.
    session.run("alter system reset primary_conninfo");
}

/// Takes a lease's place when it expires: the answer comes not before `at_least` after `since`.
#[track_caller]
fn taken_at_expiry(session: &mut Session, name: &str, since: Instant, at_least: Duration) -> i64 {
    let next = session.int(&format!("select token from lease_acquire({}, '1 h', '1 min')", literal(name)));
    let passed = since.elapsed();
    assert!(passed >= at_least, "{name}: taken over {passed:?} after the last grant or renewal");
    assert!(passed < at_least + Duration::from_secs(30), "{name}: taken over {passed:?} after the last grant only");
    next
}

/// Asynchronous replication, the last grants lost.
#[test]
fn c40_a_standby_that_missed_the_last_grants() {
    let primary = Cluster::new(&[]);
    let mut ledger = Ledger::new();
    let mut a = primary.session("a");
    let ttl = Duration::from_secs(15);
    a.run("create role other login");
    let mut other = primary.session_as("other", "of another role");
    let long = ledger.given(token(&mut a, "long"));
    let standby = primary.standby(&[]);
    let begun = Instant::now();
    let short =
        ledger.given(a.int("select token from lease_acquire('short', '15 s', owner => 'me', payload => '[1]')"));
    let pair = [(); 2]
        .map(|()| ledger.given(a.int("select token from lease_acquire('pair', '1 h', permits => 2, owner => 'me')")));
    let bound = ledger.given(a.int("select token from lease_acquire('bound', '1 h', bound => true)"));
    let of_other = ledger.given(token(&mut other, "of other"));
    let released = ledger.given(token(&mut a, "released"));
    let renewed = ledger.given(token(&mut a, "renewed"));
    primary.until_replayed_by(&standby);
    cut_off(&standby);
    // None of this gets to the standby.
    a.run(&format!("select lease_release('released', {released})"));
    a.run(&format!("select lease_renew('renewed', {renewed}, '2 h')"));
    ledger.all_given(tokens(&mut a, "lost", 100));
    let lost = ledger.given(token(&mut a, "lost"));
    primary.stop_immediate();
    standby.promote();
    until("it is promoted", || !standby.in_recovery());

    let mut b = standby.session("b");
    assert_eq!(b.int("select count(*) from lock_holders where name like 'lost%'"), 0);
    assert!(!held(&mut b, "lost", lost));
    let first = ledger.given(token(&mut b, "lost"));
    assert_eq!((first >> 42) - (lost >> 42), 1, "the epoch follows the timeline: {lost} {first}");
    ledger.given(token(&mut b, "new"));

    for (name, token) in [("long", long), ("short", short), ("of other", of_other), ("renewed", renewed)] {
        assert!(held(&mut b, name, token), "{name}");
        assert_eq!(b.maybe(&format!("select token from lease_acquire('{name}', '1 h')")), None, "{name}");
    }
    // Released on the old primary, which this one never heard of: held to its TTL.
    assert!(held(&mut b, "released", released));
    for token in pair {
        assert!(held(&mut b, "pair", token));
    }
    assert_eq!(b.maybe("select token from lease_acquire('pair', '1 h', permits => 2)"), None);
    assert_eq!(
        b.column("select concat_ws(' ', owner, payload, remaining between '0' and '15 s') from lease_holder('short')"),
        ["me [1] t"]
    );
    // Its session is none of this server's.
    assert!(!held(&mut b, "bound", bound));
    assert_eq!(b.int("select count(*) from lock_holders where name = 'bound'"), 0);
    ledger.given(token(&mut b, "bound"));

    // They can be renewed and released here, by the roles that acquired them.
    let mut other = standby.session_as("other", "of another role");
    other.fails(&format!("select lease_renew('long', {long})")).is("42501");
    assert!(other.flag(&format!("select lease_release('of other', {of_other})")));
    b.run(&format!("select lease_renew('long', {long}), lease_release('pair', {})", pair[1]));
    ledger.given(taken_at_expiry(&mut b, "short", begun, ttl));
    ledger.given(b.int("select token from lease_acquire('pair', '1 h', permits => 2)"));
}

/// Failover after failover, each standby without the last grants of its primary.
#[test]
fn c40_again_and_again() {
    let mut ledger = Ledger::new();
    let mut primary = Cluster::new(LAZY);
    for round in 0..3 {
        let standby = primary.standby(LAZY);
        ledger.given(token(&mut primary.session("a"), &format!("{round} replicated")));
        primary.until_replayed_by(&standby);
        cut_off(&standby);
        let mut a = primary.session("a");
        a.run("begin");
        ledger.all_given(tokens(&mut a, &format!("{round} lost"), 40));
        ledger.given(token(&mut primary.session("b"), &format!("{round} lost")));
        primary.stop_immediate();
        standby.promote();
        until("it is promoted", || !standby.in_recovery());
        // The first grants of a new timeline, several at a time; and a crash right after the first of them.
        if round == 1 {
            let mut session = standby.session("first");
            session.run("begin");
            ledger.given(token(&mut session, "first"));
            standby.stop_immediate();
            standby.start();
        }
        let workers: Vec<_> = (0..4)
            .map(|worker| {
                standby.session("first").spawn(move |session| tokens(session, &format!("{round} first {worker}"), 20))
            })
            .collect();
        ledger.given_at_once(workers.into_iter().flat_map(|worker| worker.end().1).collect());
        primary = standby;
    }
    assert_eq!(primary.timeline(), 4);
    assert!(ledger.highest >> 42 >= 4);
}

/// The first grants of a timeline, many at a time. That a token was drawn on another timeline is all that a server knows
/// of a failover, so a wrong number there is one.
#[test]
fn c40_the_first_grants_of_a_timeline_at_once() {
    let server = Server::shared().new_database("c40_first", "UTF8");
    let mut watch = server.session("watch");
    let mut highest = token(&mut watch, "before");
    for round in 0..30 {
        let sessions: Vec<Session> = (0..8).map(|_| server.session("first")).collect();
        let barrier = Arc::new(Barrier::new(sessions.len()));
        watch.run("select setval('_lease_timeline', 90)");
        let workers: Vec<_> = sessions
            .into_iter()
            .enumerate()
            .map(|(worker, session)| {
                let barrier = barrier.clone();
                session.spawn(move |session| {
                    // The library is loaded before, so that they are at it together.
                    session.run("select named_lock_held('k')");
                    barrier.wait();
                    (0..3).map(|turn| token(session, &format!("{round} {worker} {turn}"))).collect::<Vec<i64>>()
                })
            })
            .collect();
        let given: Vec<i64> = workers.into_iter().flat_map(|worker| worker.end().1).collect();
        let lowest = *given.iter().min().expect("some");
        assert_eq!((lowest >> 42) - (highest >> 42), 1, "round {round}: {lowest} after {highest}");
        highest = *given.iter().max().expect("some");
        assert_eq!(lowest >> 42, highest >> 42, "round {round}: once for a timeline");
    }
}

/// The same step by step: one session stands still in the middle of its grant while another raises the token.
#[test]
fn c40_a_draw_that_stands_still_while_the_token_is_raised() {
    let server = Server::shared().new_database("c40_still", "UTF8");
    let mut watch = server.session("watch");
    let mut ledger = Ledger::new();
    for sequence in ["_lease_timeline", "_lease_token"] {
        let mut still = server.session("still");
        let mut before = ledger.given(token(&mut watch, &format!("{sequence} before")));
        if sequence == "_lease_token" {
            // It knows the timeline already, and does not stop with the right to raise the sequence.
            before = ledger.given(token(&mut still, "on the timeline"));
        }
        watch.run("select setval('_lease_timeline', 90)");
        // It stops at the sequence.
        let mut blocker = server.session("blocker");
        blocker.run(&format!("begin; alter sequence {sequence} owner to current_user"));
        let still = still.background(&format!("select token from lease_acquire('{sequence} still', '1 h')"));
        let stopped = watch.stop_waiting(still.pid);
        blocker.run("rollback");
        let raised = ledger.given(token(&mut server.session("raises"), &format!("{sequence} raised")));
        assert_eq!((raised >> 42) - (before >> 42), 1, "{sequence}");
        stopped.go_on();
        let rows = still.end().1.expect("no error");
        let token: i64 = rows[0].get(0).expect("it was free").parse().expect("a token");
        assert!(token > raised, "{sequence}: {token} was given out after {raised}, and {before} before that");
        ledger.given(token);
    }
}

/// A promotion at which nothing was granted, between two at which something was.
#[test]
fn c40_a_timeline_without_grants() {
    let cluster = Cluster::new(&[]);
    let mut ledger = Ledger::new();
    let first = ledger.given(token(&mut cluster.session("a"), "a"));
    cluster.to_new_timeline();
    cluster.to_new_timeline();
    assert_eq!(cluster.timeline(), 3);
    let second = ledger.given(token(&mut cluster.session("b"), "b"));
    assert_eq!((second >> 42) - (first >> 42), 2);
    // And each database finds out for itself.
    let other = cluster.new_database("other", "UTF8");
    assert!(token(&mut other.session("c"), "c") >> 42 >= 3);
    cluster.to_new_timeline();
    let mut a = cluster.session("a");
    let third = ledger.given(token(&mut a, "third"));
    assert_eq!((third >> 42) - (second >> 42), 1);
    assert_eq!(ledger.given(token(&mut a, "fourth")) >> 42, third >> 42, "once for a timeline");
    assert!(held(&mut a, "a", first) && held(&mut a, "b", second));
}

/// Two servers made of one backup and promoted one after the other are both on the same new timeline.
#[test]
fn c40_two_siblings() {
    let primary = Cluster::new(&[]);
    let mut ledger = Ledger::new();
    let common = ledger.given(token(&mut primary.session("a"), "common"));
    let backup = primary.backup();
    // What the primary grants after the backup is in neither of them.
    ledger.all_given(tokens(&mut primary.session("a"), "lost", 10));
    primary.stop_immediate();
    let mut timelines = Vec::new();
    for sibling in 0..3 {
        let server = backup.server("standby.signal", &[]);
        assert!(held(&mut server.session("before"), "common", common));
        server.promote();
        until("it is promoted", || !server.in_recovery());
        let mut session = server.session("sibling");
        ledger.given(token(&mut session, "first"));
        // Another session, and fewer than one each millisecond.
        for turn in 0..20 {
            ledger.given(token(&mut server.session("other"), &format!("{sibling} {turn}")));
        }
        assert!(held(&mut session, "common", common));
        timelines.push(server.timeline());
        server.stop_immediate();
    }
    assert_eq!(timelines, [2, 2, 2]);
}

/// The same with both promoted first: who grants later grants higher.
#[test]
fn c40_two_siblings_side_by_side() {
    let primary = Cluster::new(&[]);
    let mut ledger = Ledger::new();
    ledger.given(token(&mut primary.session("a"), "common"));
    let backup = primary.backup();
    primary.stop_immediate();
    let siblings = [(); 2].map(|()| backup.server("standby.signal", &[]));
    for server in &siblings {
        server.promote();
        until("it is promoted", || !server.in_recovery());
    }
    for server in &siblings {
        let mut session = server.session("sibling");
        for turn in 0..10 {
            ledger.given(token(&mut session, &format!("k {turn}")));
        }
        // Ten in less than ten milliseconds would be ahead of the clock.
        let_pass(100);
    }
}

// --- Point-in-time recovery -------------------------------------------------------------------------------------------

/// A primary that archives its WAL, and the configuration by which another server restores it to a named point.
fn archiving() -> (Cluster, Dir) {
    let archive = Dir::new();
    let folder = archive.path().display();
    let primary = Cluster::new(&["archive_mode = on", &format!("archive_command = 'cp %p {folder}/%f'")]);
    (primary, archive)
}

fn restored(backup: &Backup, archive: &Dir, point: &str, timeline: &str) -> Cluster {
    let restore = format!("restore_command = 'cp {}/%f %p'", archive.path().display());
    let target = format!("recovery_target_name = '{point}'");
    let timeline = format!("recovery_target_timeline = '{timeline}'");
    let action = "recovery_target_action = 'promote'";
    let server = backup.server("recovery.signal", &[&restore, &target, &timeline, action, "archive_mode = off"]);
    until("it is restored", || !server.in_recovery());
    server
}

/// Waits until all WAL of now is in the archive.
fn archive_all(primary: &Cluster) {
    let mut session = primary.session("archive");
    let segment = session.text("select pg_walfile_name(pg_current_wal_lsn())");
    session.run("select pg_switch_wal()");
    until("the WAL is archived", || {
        session.maybe("select last_archived_wal from pg_stat_archiver").is_some_and(|last| last >= segment)
    });
}

#[test]
fn c40_point_in_time_recovery() {
    let (primary, archive) = archiving();
    let mut ledger = Ledger::new();
    let mut a = primary.session("a");
    let backup = primary.backup();
    let early = ledger.given(token(&mut a, "early"));
    let bound = ledger.given(a.int("select token from lease_acquire('bound', '1 h', bound => true)"));
    a.run("select pg_create_restore_point('here')");
    let late = ledger.given(token(&mut a, "late"));
    a.run(&format!("select lease_release('early', {early})"));
    ledger.all_given(tokens(&mut a, "lost", 50));
    archive_all(&primary);
    primary.stop();

    // To that point, again and again: nobody tells the later ones about the timeline of the first.
    for round in 0..2 {
        let server = restored(&backup, &archive, "here", "current");
        let mut b = server.session("b");
        assert_eq!(server.timeline(), 2);
        assert!(held(&mut b, "early", early), "round {round}");
        assert!(!held(&mut b, "late", late));
        assert!(!held(&mut b, "bound", bound));
        assert_eq!(b.maybe("select token from lease_acquire('early', '1 h')"), None);
        ledger.given(token(&mut b, "late"));
        ledger.given(token(&mut b, "bound"));
        ledger.all_given(tokens(&mut b, "lost", 20));
        server.stop();
    }
}

/// The recovered server archives as well, and is recovered itself.
#[test]
fn c40_point_in_time_recovery_of_a_recovered_server() {
    let (primary, archive) = archiving();
    let mut ledger = Ledger::new();
    let backup = primary.backup();
    ledger.given(token(&mut primary.session("a"), "a"));
    primary.session("a").run("select pg_create_restore_point('here')");
    ledger.given(token(&mut primary.session("a"), "b"));
    archive_all(&primary);
    primary.stop();
    let first = restored(&backup, &archive, "here", "latest");
    ledger.all_given(tokens(&mut first.session("b"), "lost", 20));
    // What a timeline's history file in the archive is for: the next one is numbered after it.
    let history = first.data().join("pg_wal/00000002.history");
    run(as_server_user("cp").arg(history).arg(archive.path()));
    first.stop();
    let second = restored(&backup, &archive, "here", "1");
    assert_eq!(second.timeline(), 3);
    ledger.all_given(tokens(&mut second.session("c"), "c", 3));
}

// --- Dump and restore -------------------------------------------------------------------------------------------------

/// Ways to dump a database and to bring it back.
const DUMPS: &[(&str, &[&str])] = &[("plain", &[]), ("custom", &[]), ("directory", &["-j", "2"]), ("tar", &[])];

fn dump(server: &Cluster, dbname: &str, form: &str, dir: &Dir) {
    let file = dir.path().join(form);
    run(server.client_program("pg_dump").args(["-F", form, "-f"]).arg(file).arg(dbname));
}

#[track_caller]
fn restore(server: &Cluster, dbname: &str, form: &str, options: &[&str], dir: &Dir) {
    server.session("restore").run(&format!("create database {dbname} template template0"));
    let file = dir.path().join(form);
    let mut command = match form {
        "plain" => server.client_program("psql"),
        _ => server.client_program("pg_restore"),
    };
    match form {
        "plain" => command.args(["-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", dbname, "-f"]),
        _ => command.args(["-e", "-d", dbname]),
    };
    run(command.args(options).arg(file));
}

/// What a copy of a database is like.
#[track_caller]
fn is_a_good_copy(copy: &Server, ledger: &mut Ledger, held_there: &[(String, i64)], what: &str) {
    let mut session = copy.session("copy");
    assert_eq!(session.int("select count(*) from lock_holders where kind = 'lease'"), 0, "{what}");
    assert_eq!(session.int("select count(*) from _lease"), 0, "{what}");
    for (name, token) in held_there {
        assert!(!held(&mut session, name, *token), "{what}: {name}");
        session.fails(&format!("select lease_guard('{name}', {token})")).is("55000");
        session.fails(&format!("select lease_renew('{name}', {token})")).is("55000");
        assert!(!session.flag(&format!("select lease_release('{name}', {token})")), "{what}: {name}");
    }
    for (name, _) in held_there {
        ledger.given(token(&mut session, name));
    }
}

#[test]
fn c41_dump_and_restore_while_held() {
    let cluster = Cluster::new(&[]);
    let other = Cluster::bare(&[]);
    // The extension in a schema of its own, and in the usual one.
    for (schema, quoted) in [("public", "public"), ("Locks here", "\"Locks here\"")] {
        let number = schema.len();
        let dbname = format!("source{number}");
        cluster.session("create").run(&format!("create database {dbname}"));
        let mut source = cluster.database(&dbname);
        let path = format!("alter database {dbname} set search_path = {quoted}, public");
        source.session("create").run(&format!(
            "create schema if not exists {quoted}; create extension named_locks schema {quoted}; {path}"
        ));
        source.dbname = dbname.clone();
        let mut a = source.session("a");
        let mut ledger = Ledger::new();
        // Far ahead, as after many failovers: no clock and no timeline of the copy's server comes up to it.
        a.run("select setval('_lease_token', (70000::bigint << 42) + (1::bigint << 41))");
        ledger.highest = (70_000 << 42) + (1 << 41);
        let mut held_there = Vec::new();
        for (name, more) in
            [("k", ""), ("bound", ", bound => true"), ("pair", ", permits => 2"), ("waited", ", timeout => '1 s'")]
        {
            let sql = format!("select token from lease_acquire('{name}', '1 h', payload => '{{}}'{more})");
            held_there.push((name.to_owned(), ledger.given(a.int(&sql))));
        }
        for &(form, options) in DUMPS {
            let dir = Dir::new();
            dump(&cluster, &dbname, form, &dir);
            // What is granted after the dump is not in it: the floor is the dump's, and the copy is another database.
            let what = format!("{form}, {schema}");
            for server in [&cluster, &other] {
                let copy = format!("copy_{form}_{number}");
                restore(server, &copy, form, options, &dir);
                server.session("path").run(&path.replace(&dbname, &copy));
                let mut own = Ledger { highest: ledger.highest };
                is_a_good_copy(&server.database(&copy), &mut own, &held_there, &what);
                // And a copy of the copy, after grants there.
                if form == "custom" {
                    let again = Dir::new();
                    dump(server, &copy, form, &again);
                    let second = format!("{copy}_again");
                    restore(server, &second, form, options, &again);
                    server.session("path").run(&path.replace(&dbname, &second));
                    is_a_good_copy(&server.database(&second), &mut own, &held_there, &what);
                }
            }
            for (name, token) in &held_there {
                assert!(held(&mut a, name, *token), "{what}: {name} in the source");
            }
        }
    }
}

/// A dump brought back over the database that it was made of: what was granted since is in no sequence any more.
#[test]
fn c41_restored_over_itself() {
    let cluster = Cluster::new(&[]);
    let server = cluster.new_database("itself", "UTF8");
    let dir = Dir::new();
    let mut ledger = Ledger::new();
    let mut a = server.session("a");
    let old = ledger.given(token(&mut a, "old"));
    dump(&cluster, &server.dbname, "custom", &dir);
    for round in 0..2 {
        let since = ledger.given(token(&mut a, &format!("since {round}")));
        ledger.all_given(tokens(&mut a, &format!("since {round}"), 50));
        let mut restore = cluster.client_program("pg_restore");
        restore.args(["-e", "--clean", "--if-exists", "-d", &server.dbname]);
        run(restore.arg(dir.path().join("custom")));
        // A session of before, which knows the old tables, and a new one.
        assert!(!held(&mut a, "old", old));
        ledger.given(token(&mut a, "old"));
        let mut b = server.session("b");
        assert!(!held(&mut b, &format!("since {round}"), since));
        ledger.given(token(&mut b, &format!("since {round}")));
        assert_eq!(b.int("select count(*) from lock_holders where kind = 'lease'"), 2, "round {round}");
    }
}

/// The extension created anew, after more grants than milliseconds have gone by: the server remembers while it is up.
#[test]
fn c46_created_anew() {
    let cluster = Cluster::new(&[]);
    let mut ledger = Ledger::new();
    let mut a = cluster.session("a");
    for round in 0..4 {
        ledger.all_given(tokens(&mut a, &format!("round {round}"), 3_000));
        a.run("drop extension named_locks; create extension named_locks");
        ledger.given(token(&mut cluster.session("b"), "b"));
        // Not committed: the sequence of before goes on.
        a.run("begin; drop extension named_locks; create extension named_locks");
        ledger.given(token(&mut a, "undone"));
        a.run("rollback");
        ledger.given(token(&mut a, "a"));
    }
}

/// The copy of a hot standby's database, made while the primary goes on.
#[test]
fn c41_a_dump_of_a_standby() {
    let primary = Cluster::new(&[]);
    let mut ledger = Ledger::new();
    let mut a = primary.session("a");
    a.run("select setval('_lease_token', (500::bigint << 42) + 5)");
    ledger.highest = (500 << 42) + 5;
    let standby = primary.standby(&[]);
    let k = ledger.given(token(&mut a, "k"));
    primary.until_replayed_by(&standby);
    let dir = Dir::new();
    dump(&standby, "postgres", "custom", &dir);
    restore(&primary, "copy", "custom", &[], &dir);
    is_a_good_copy(&primary.database("copy"), &mut ledger, &[("k".to_owned(), k)], "of the standby");
    assert!(held(&mut a, "k", k));
}

/// A database of which nothing was ever leased.
#[test]
fn c41_dump_and_restore_of_an_unused_database() {
    let cluster = Cluster::new(&[]);
    let dir = Dir::new();
    dump(&cluster, "postgres", "custom", &dir);
    restore(&cluster, "copy", "custom", &[], &dir);
    let mut ledger = Ledger::new();
    is_a_good_copy(&cluster.database("copy"), &mut ledger, &[("k".to_owned(), 5)], "unused");
    ledger.all_given(tokens(&mut cluster.database("copy").session("a"), "more", 3));
}

/// `create database … template` copies the files: leases and all.
#[test]
fn c41_a_template_copy() {
    let cluster = Cluster::new(&[]);
    let source = cluster.new_database("source", "UTF8");
    let mut ledger = Ledger::new();
    let mut a = source.session("a");
    let taken = ledger.given(token(&mut a, "k"));
    let pid = a.pid;
    drop(a);
    cluster.session("watch").until_gone(pid);
    cluster.session("copy").run(&format!("create database copy template {}", source.dbname));
    let mut b = cluster.database("copy").session("b");
    ledger.given(token(&mut b, "other"));
    // It is held there to its TTL, as a row that came with the files; the two are apart from now on.
    assert!(held(&mut b, "k", taken));
    assert!(b.flag(&format!("select lease_release('k', {taken})")));
    assert!(held(&mut source.session("a"), "k", taken));
}

// --- Hot standby ------------------------------------------------------------------------------------------------------

/// Rule 11: no lease is changed on a standby, whatever the settings.
#[test]
fn c45_leases_are_not_changed_on_a_standby() {
    let primary = Cluster::new(&[]);
    let mut a = primary.session("a");
    let k = token(&mut a, "k");
    let standby = primary.standby(&[]);
    primary.until_replayed_by(&standby);
    for setting in ["off", "on"] {
        for block in [false, true] {
            for sql in [
                "select lease_acquire('free', '1 s')",
                "select lease_acquire('free', '1 s', '0')",
                "select lease_acquire('free', '1 s', '1 s')",
                "select lease_acquire('free', '1 s', NULL)",
                "select lease_acquire('free', '1 s', bound => true)",
                "select lease_acquire('free', '1 s', permits => 3)",
                "select lease_acquire('k', '1 s')",
                "call lease_acquire_wait('free', '1 s')",
                "call lease_acquire_wait('k', '1 s', '1 s')",
                "select lease_request('k', 'please')",
                "select lease_request('free')",
                "select lease_break('k')",
                "select lease_break('free')",
                &format!("select lease_renew('k', {k})"),
                &format!("select lease_renew('k', {})", k + 1),
                &format!("select lease_release('k', {k})"),
                &format!("select lease_release('k', {k}, '1 s')"),
                "select lease_release('free', 1)",
                &format!("select lease_guard('k', {k})"),
                "select lease_guard('free', 1)",
            ] {
                if block && sql.starts_with("call") {
                    continue;
                }
                let mut session = standby.session("c45 first call");
                session.run(&format!("set named_locks.allow_on_standby = {setting}"));
                if block {
                    session.run("begin; savepoint s");
                }
                session.fails(sql).is("25006");
                if block {
                    session.run("rollback to s");
                }
                assert!(held(&mut session, "k", k), "{sql}");
                assert_eq!(session.locks_of(session.pid), 0, "{sql}");
            }
        }
    }
    assert_eq!(a.int("select count(*) from _lease"), 1);
}

#[test]
fn c45_leases_can_be_looked_at_on_a_standby() {
    let primary = Cluster::new(&[]);
    let mut a = primary.session("a");
    a.run("create role other login");
    let standby = primary.standby(&["hot_standby_feedback = on"]);
    let k = a.int("select token from lease_acquire('k', '1 h', owner => 'me', payload => '{\"at\": 1}')");
    let pair = [(); 2].map(|()| a.int("select token from lease_acquire('pair', '1 h', permits => 2)"));
    let bound = a.int("select token from lease_acquire('bound', '1 h', bound => true)");
    let kept = token(&mut a, "kept");
    a.run(&format!("select lease_release('kept', {kept}, '30 min')"));
    let short = a.int("select token from lease_acquire('short', '100 ms')");
    let released = token(&mut a, "released");
    a.run(&format!("select lease_release('released', {released})"));
    let mut open = primary.session("open");
    open.run("begin");
    let uncommitted = token(&mut open, "uncommitted");
    primary.until_replayed_by(&standby);

    // Each as a session's first call.
    assert!(held(&mut standby.session("b"), "k", k));
    assert_eq!(
        standby.session("b").column(
            "select concat_ws(' ', owner, payload, permits, remaining between '50 min' and '1 h') from lease_holder('k')"
        ),
        ["me {\"at\": 1} 1 t"]
    );
    assert_eq!(standby.session("b").int("select count(*) from lease_holder('pair')"), 2);
    let mut b = standby.session("b");
    for (name, token, expected) in [
        ("k", k, true),
        ("k", k + 1, false),
        ("pair", pair[0], true),
        ("pair", pair[1], true),
        // The session that it ends with is the primary's, and lives.
        ("bound", bound, true),
        ("kept", kept, false),
        ("released", released, false),
        ("uncommitted", uncommitted, false),
        ("never", 1, false),
    ] {
        assert_eq!(held(&mut b, name, token), expected, "{name}");
    }
    until("the short one has expired", || !held(&mut b, "short", short));
    assert_eq!(
        b.column(
            "select concat_ws(' ', name, state, token) from lock_holders where kind = 'lease' order by name, token"
        ),
        [
            format!("bound held {bound}"),
            format!("k held {k}"),
            format!("kept kept {kept}"),
            format!("pair held {}", pair[0]),
            format!("pair held {}", pair[1]),
        ]
    );
    assert_eq!(b.int("select count(*) from lock_waiters"), 0);
    // A reader without rights sees that there are leases, and may ask who holds one.
    let mut other = standby.session_as("other", "of another role");
    assert_eq!(other.int("select count(*) from lock_holders where kind = 'lease' and name is null"), 5);
    assert_eq!(other.int("select count(*) from lock_holders where token is not null"), 0);
    assert_eq!(other.text("select owner from lease_holder('k')"), "me");

    // What happens on the primary is seen when it is replayed.
    a.run(&format!("select lease_renew('k', {k}, '5 h', '2')"));
    open.run("commit");
    a.run(&format!("select lease_release('pair', {})", pair[0]));
    primary.until_replayed_by(&standby);
    assert_eq!(b.text("select payload from lease_holder('k') where remaining > '4 h'"), "2");
    assert!(held(&mut b, "uncommitted", uncommitted));
    assert!(!held(&mut b, "pair", pair[0]));

    // A snapshot of before changes nothing: the newest committed state counts.
    b.run("begin isolation level repeatable read");
    assert!(held(&mut b, "pair", pair[1]));
    a.run(&format!("select lease_release('pair', {})", pair[1]));
    primary.until_replayed_by(&standby);
    assert!(!held(&mut b, "pair", pair[1]));
    b.run("commit");

    // Promoted: bound ones ended with the old server's sessions. A looker of before goes on.
    primary.stop();
    standby.promote();
    until("it is promoted", || !standby.in_recovery());
    assert!(!held(&mut b, "bound", bound));
    assert!(held(&mut b, "k", k));
    assert_eq!(b.int("select count(*) from lock_holders where name = 'bound'"), 0);
    let mut ledger = Ledger { highest: uncommitted };
    ledger.given(token(&mut b, "bound"));
    ledger.given(token(&mut b, "pair"));
}

/// Promoted under a session that has already used its library there: nothing about the timeline was remembered.
#[test]
fn c45_a_session_that_saw_the_promotion() {
    let primary = Cluster::new(&[]);
    let mut ledger = Ledger::new();
    ledger.given(token(&mut primary.session("a"), "a"));
    let standby = primary.standby(&[]);
    primary.until_replayed_by(&standby);
    let mut b = standby.session("b");
    b.fails("select lease_acquire('k', '1 h')").is("25006");
    cut_off(&standby);
    let lost = ledger.given(token(&mut primary.session("a"), "lost"));
    primary.stop_immediate();
    standby.promote();
    until("it is promoted", || !standby.in_recovery());
    let first = ledger.given(token(&mut b, "k"));
    assert_eq!((first >> 42) - (lost >> 42), 1);
    ledger.given(token(&mut standby.session("c"), "c"));
}
