//! Case C34, and rules 2, 7 and 11 of the leases: time over steps of the wall clock, restarts and crashes.

use super::support::{
    Cluster, Dir, Rows, Running, Session, SqlError, as_server_user, let_pass, literal, run, signal, until,
};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// How late a lease may end, or be found ended, on a busy machine. It may never end early.
const LATE: Duration = Duration::from_secs(30);

/// A wall clock of which tests say how far it is off. The clocks that count the time since the machine's start go on as
/// they are.
struct WallClock(Dir);

impl WallClock {
    fn new() -> WallClock {
        let clock = WallClock(Dir::new());
        clock.set(0);
        clock
    }

    /// So many minutes off the true time, for all servers that run with this clock, from now on.
    fn set(&self, minutes: i32) {
        let new = self.0.write("new", format!("{minutes:+}m\n"));
        // In one step: nobody reads half of it.
        run(as_server_user("mv").arg(new).arg(self.0.path().join("offset")));
    }

    /// What makes a server run with it.
    fn environment(&self) -> Vec<String> {
        vec![
            format!("LD_PRELOAD={}", libfaketime().display()),
            format!("FAKETIME_TIMESTAMP_FILE={}", self.0.path().join("offset").display()),
            // A change is seen at once.
            "FAKETIME_NO_CACHE=1".into(),
            // By both of its names. It means CLOCK_BOOTTIME as well.
            "FAKETIME_DONT_FAKE_MONOTONIC=1".into(),
            "DONT_FAKE_MONOTONIC=1".into(),
            "NO_FAKE_STAT=1".into(),
        ]
    }

    /// A server that runs with it.
    fn cluster(&self) -> Cluster {
        let cluster = Cluster::with_environment(&[], &self.environment());
        self.until_seen_by(&cluster, 0);
        cluster
    }

    /// That a server's wall clock is so far off: else nothing here would be tested.
    #[track_caller]
    fn until_seen_by(&self, cluster: &Cluster, minutes: i32) {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("after 1970").as_secs();
        let off =
            cluster.session("clock").int(&format!("select extract(epoch from clock_timestamp())::bigint - {now}"));
        let expected = i64::from(minutes) * 60;
        assert!((expected - 5..expected + 60).contains(&off), "the server's clock is {off} s off, not {expected} s");
    }

    /// Sets it and makes sure that a server has it.
    #[track_caller]
    fn step(&self, cluster: &Cluster, minutes: i32) {
        self.set(minutes);
        self.until_seen_by(cluster, minutes);
    }
}

/// Debian's package of this name has it in a folder of the machine's architecture.
fn libfaketime() -> PathBuf {
    let library = PathBuf::from("faketime/libfaketime.so.1");
    let folders = ["/usr/lib", "/usr/local/lib", "/usr/lib64"].map(PathBuf::from);
    let architectures = std::fs::read_dir("/usr/lib").expect("/usr/lib").flatten().map(|entry| entry.path());
    folders
        .into_iter()
        .chain(architectures)
        .map(|folder| folder.join(&library))
        .find(|file| file.is_file())
        .expect("the tests need libfaketime, which isn't installed")
}

/// A lease as the test that has taken it knows it.
#[derive(Debug)]
struct Lease {
    name: String,
    token: i64,
    ttl: Duration,
    /// Whether it is the only grant of its name.
    single: bool,
    /// A moment before the grant or the last renewal, and one after it.
    from: Instant,
    to: Instant,
}

impl Lease {
    #[track_caller]
    fn acquire(session: &mut Session, name: &str, ttl: Duration, more: &str) -> Lease {
        let sql = format!("select token from lease_acquire({}, '{} ms'{more})", literal(name), ttl.as_millis());
        let from = Instant::now();
        let token = session.int(&sql);
        Lease { name: name.into(), token, ttl, single: !more.contains("permits"), from, to: Instant::now() }
    }

    #[track_caller]
    fn renew(&mut self, session: &mut Session, ttl: Duration) {
        self.from = Instant::now();
        session.run(&format!("select lease_renew({}, {}, '{} ms')", literal(&self.name), self.token, ttl.as_millis()));
        self.ttl = ttl;
        self.to = Instant::now();
    }

    /// That a session finds it held before its end, and not held after it, with what remains told as it is.
    #[track_caller]
    fn is_as_it_should_be(&self, session: &mut Session, what: &str) {
        let name = literal(&self.name);
        let asked = Instant::now();
        let rows = session.run(&format!(
            "select lease_check({name}, {token}), \
                    (select extract(epoch from remaining) from lock_holders where token = {token} and state = 'held'), \
                    (select extract(epoch from remaining) from lease_holder({name}) limit 1)",
            token = self.token
        ));
        let answered = Instant::now();
        let held = rows[0].get(0) == Some("t");
        if held {
            assert!(asked < self.to + self.ttl + LATE, "{what}: held too long: {self:?}");
        } else {
            assert!(answered >= self.from + self.ttl, "{what}: not held any more: {self:?}");
        }
        for remaining in [rows[0].get(1), rows[0].get(2)].into_iter().take(1 + usize::from(self.single)) {
            let Some(remaining) = remaining.map(|text| text.parse::<f64>().expect("seconds")) else {
                assert!(answered >= self.from + self.ttl, "{what}: not shown any more: {self:?}");
                continue;
            };
            // A thousandth is for rounding.
            let most = (self.to + self.ttl).saturating_duration_since(asked).as_secs_f64() + 0.001;
            let least = (self.from + self.ttl).saturating_duration_since(answered).as_secs_f64() - 0.001;
            assert!(
                (least..=most).contains(&remaining),
                "{what}: {remaining} s remain, not {least} to {most}: {self:?}"
            );
        }
    }

    /// Waits for its end in the queue and gives the new token.
    fn wait_for_its_end(&self, session: Session) -> Running<Result<Rows, SqlError>> {
        session.background(&format!("select token from lease_acquire({}, '1 h', '10 min')", literal(&self.name)))
    }

    /// That another one has got it now, and not before its end.
    #[track_caller]
    fn has_ended_now(&self, what: &str) {
        let passed = self.from.elapsed();
        assert!(passed >= self.ttl, "{what}: taken over after {passed:?}: {self:?}");
        assert!(self.to.elapsed() < self.ttl + LATE, "{what}: taken over after {passed:?} only: {self:?}");
    }

    /// Looks and tries all the time until it has ended.
    #[track_caller]
    fn until_taken_over(&self, session: &mut Session, what: &str) {
        until(&format!("{what}: {} is free", self.name), || {
            self.is_as_it_should_be(session, what);
            let sql = format!("select token from lease_acquire({}, '1 h')", literal(&self.name));
            session.maybe(&sql).is_some()
        });
        self.has_ended_now(what);
    }
}

/// That a waiter has got a lease.
#[track_caller]
fn got(waiting: Running<Result<Rows, SqlError>>) -> Session {
    let (session, result) = waiting.end();
    assert!(result.expect("no error")[0].get(0).is_some(), "a token");
    session
}

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn c34_the_wall_clock_steps_while_leases_are_held() {
    let clock = WallClock::new();
    let cluster = clock.cluster();
    let mut a = cluster.session("a");
    let mut b = cluster.session("b");
    for (round, minutes) in [60, -60, 0, -1, 60 * 24 * 400].into_iter().enumerate() {
        let what = format!("round {round}, to {minutes} min");
        let ttl = 4 * SECOND;
        let short = Lease::acquire(&mut a, &format!("{round} short"), ttl, "");
        let waited_for = Lease::acquire(&mut a, &format!("{round} waited for"), ttl, "");
        let bound = Lease::acquire(&mut a, &format!("{round} bound"), ttl, ", bound => true");
        let permit = Lease::acquire(&mut a, &format!("{round} permit"), ttl, ", permits => 2");
        let other = Lease::acquire(&mut b, &format!("{round} permit"), 1200 * SECOND, ", permits => 2");
        let long = Lease::acquire(&mut a, &format!("{round} long"), 1800 * SECOND, "");
        let longer = Lease::acquire(&mut a, &format!("{round} longer"), 5400 * SECOND, "");
        let mut renewed = Lease::acquire(&mut a, &format!("{round} renewed"), 2 * SECOND, "");
        let waiting = waited_for.wait_for_its_end(cluster.session("waiter"));
        until("it waits", || b.int("select count(*) from lock_waiters where kind = 'lease'") == 1);

        clock.step(&cluster, minutes);
        for lease in [&short, &waited_for, &bound, &permit, &other, &long, &longer, &renewed] {
            lease.is_as_it_should_be(&mut b, &what);
        }
        // Renewed and granted by the new time.
        renewed.renew(&mut a, 5 * SECOND);
        let new = Lease::acquire(&mut b, &format!("{round} new"), 3 * SECOND, "");
        for lease in [&new, &renewed, &long] {
            lease.is_as_it_should_be(&mut a, &what);
        }
        drop(got(waiting));
        waited_for.has_ended_now(&what);
        short.until_taken_over(&mut b, &what);
        bound.until_taken_over(&mut b, &what);
        new.until_taken_over(&mut a, &what);
        renewed.until_taken_over(&mut b, &what);
        // Of the permits one has ended.
        until("a permit is free", || {
            permit.is_as_it_should_be(&mut b, &what);
            b.maybe(&format!("select token from lease_acquire('{round} permit', '1 h', permits => 2)")).is_some()
        });
        permit.has_ended_now(&what);
        for lease in [&other, &long, &longer] {
            assert!(b.flag(&format!("select lease_check('{}', {})", lease.name, lease.token)), "{what}: {lease:?}");
        }
        other.is_as_it_should_be(&mut b, &what);
        assert_eq!(b.maybe(&format!("select token from lease_acquire('{}', '1 h')", long.name)), None, "{what}");
    }
}

/// What people are told follows the wall clock: the end, and since when.
#[test]
fn c34_what_is_for_people() {
    let clock = WallClock::new();
    let cluster = clock.cluster();
    let mut a = cluster.session("a");
    for minutes in [60, -60] {
        clock.step(&cluster, minutes);
        let name = format!("k {minutes}");
        let told = "expires_at between clock_timestamp() + '29 min' and clock_timestamp() + '30 min', \
                    remaining between '29 min' and '30 min'";
        assert_eq!(
            a.column(&format!("select concat_ws(' ', {told}) from lease_acquire('{name}', '30 min')")),
            ["t t"],
            "{minutes}"
        );
        let token = a.text(&format!("select token from lock_holders where name = '{name}'"));
        assert_eq!(a.column(&format!("select concat_ws(' ', {told}) from lease_renew('{name}', {token})")), ["t t"]);
        assert_eq!(a.column(&format!("select concat_ws(' ', {told}) from lease_holder('{name}')")), ["t t"]);
        assert_eq!(
            a.column(&format!("select concat_ws(' ', {told}) from lock_holders where name = '{name}'")),
            ["t t"]
        );
        assert_eq!(
            a.column(&format!("select acquired_at > clock_timestamp() - interval '1 min' from lease_holder('{name}')")),
            ["t"]
        );
        let refused =
            format!("select acquired, retry_after between '29 min' and '30 min' from lease_acquire('{name}', '1 s')");
        let rows = cluster.session("b").run(&refused);
        assert_eq!((rows[0].get(0), rows[0].get(1)), (Some("f"), Some("t")));
    }
    // What remains doesn't change with the clock.
    for minutes in [60, -60, 0] {
        clock.step(&cluster, minutes);
        let wrong = "select name from lock_holders where remaining not between '28 min' and '30 min'";
        assert!(a.column(wrong).is_empty(), "at {minutes} min");
        assert_eq!(a.int("select count(*) from lock_holders"), 2, "at {minutes} min");
    }
}

/// Kept for a time after the grant: by elapsed time as well.
#[test]
fn c34_kept_leases() {
    let clock = WallClock::new();
    let cluster = clock.cluster();
    let mut a = cluster.session("a");
    for minutes in [60, -60] {
        let name = format!("kept {minutes}");
        let mut lease = Lease::acquire(&mut a, &name, 600 * SECOND, "");
        assert!(a.flag(&format!("select lease_release('{name}', {}, '4 s')", lease.token)));
        lease.ttl = 4 * SECOND;
        clock.step(&cluster, minutes);
        let acquire = format!("select token from lease_acquire('{name}', '1 h')");
        until("it is free", || a.maybe(&acquire).is_some());
        lease.has_ended_now(&format!("to {minutes} min"));
    }
}

/// How long a waiter waits has nothing to do with the wall clock either.
#[test]
fn c34_the_limits_of_waiters() {
    let clock = WallClock::new();
    let cluster = clock.cluster();
    let mut a = cluster.session("a");
    let _lease = Lease::acquire(&mut a, "k", 1800 * SECOND, "");
    for minutes in [60, -60] {
        for sql in ["select token from lease_acquire('k', '1 h', '3 s')", "call lease_acquire_wait('k', '1 h', '3 s')"]
        {
            let what = format!("{sql} to {minutes} min");
            clock.step(&cluster, 0);
            let begun = Instant::now();
            let waiting = cluster.session("waiter").background(sql);
            until("it waits", || a.int("select count(*) from lock_waiters where kind = 'lease'") == 1);
            clock.step(&cluster, minutes);
            let (_, result) = waiting.end();
            let passed = begun.elapsed();
            assert_eq!(result.expect("no error")[0].get(0), None, "{what}");
            assert!(passed >= 3 * SECOND, "{what}: {passed:?}");
            assert!(passed < 3 * SECOND + LATE, "{what}: {passed:?}");
        }
    }
}

/// Many small steps in both directions while a lease is renewed: held throughout, and never twice.
#[test]
fn c34_a_clock_that_is_never_at_rest() {
    let clock = WallClock::new();
    let cluster = clock.cluster();
    let mut a = cluster.session("a");
    let mut b = cluster.session("b");
    let mut lease = Lease::acquire(&mut a, "k", 10 * SECOND, "");
    let begun = Instant::now();
    let mut tries = 0;
    for minutes in [1, -1, 30, -30, 600, -600, 5, 0].into_iter().cycle() {
        clock.set(minutes);
        lease.is_as_it_should_be(&mut b, "in between");
        let sql = "select token from lease_acquire('k', '1 h')";
        assert_eq!(b.maybe(sql), None, "after {:?}", begun.elapsed());
        lease.renew(&mut a, 10 * SECOND);
        tries += 1;
        if begun.elapsed() > 5 * SECOND {
            break;
        }
    }
    assert!(tries > 10, "{tries} tries");
    lease.renew(&mut a, 2 * SECOND);
    lease.until_taken_over(&mut b, "at the end");
}

/// The clock is stepped while the server is down. Elapsed time goes on, and counts.
#[test]
fn c34_a_restart_in_between() {
    let clock = WallClock::new();
    let cluster = clock.cluster();
    for (round, minutes) in [60, -60, 0].into_iter().enumerate() {
        let what = format!("round {round}, to {minutes} min");
        let mut a = cluster.session("a");
        let short = Lease::acquire(&mut a, &format!("{round} short"), 8 * SECOND, "");
        let permits =
            [(); 2].map(|()| Lease::acquire(&mut a, &format!("{round} permit"), 8 * SECOND, ", permits => 2"));
        let long = Lease::acquire(&mut a, &format!("{round} long"), 1800 * SECOND, "");
        let bound = Lease::acquire(&mut a, &format!("{round} bound"), 1800 * SECOND, ", bound => true");
        let gone = Lease::acquire(&mut a, &format!("{round} gone"), Duration::from_millis(300), "");
        if round % 2 == 0 {
            cluster.stop();
        } else {
            cluster.stop_immediate();
        }
        clock.set(minutes);
        let_pass(300);
        cluster.start();
        clock.until_seen_by(&cluster, minutes);
        let mut b = cluster.session("b");
        for lease in [&short, &permits[0], &permits[1], &long] {
            lease.is_as_it_should_be(&mut b, &what);
        }
        assert!(b.flag(&format!("select lease_check('{}', {})", long.name, long.token)), "{what}");
        for lease in [&bound, &gone] {
            assert!(!b.flag(&format!("select lease_check('{}', {})", lease.name, lease.token)), "{what}: {lease:?}");
            let sql = format!("select token from lease_acquire('{}', '1 s')", lease.name);
            assert!(b.maybe(&sql).is_some(), "{what}: {lease:?}");
        }
        let waiting = permits[0].wait_for_its_end(cluster.session("not the same permits"));
        waiting.end().1.expect_err("permits").is("22023");
        short.until_taken_over(&mut b, &what);
    }
}

// --- Without a boot time ----------------------------------------------------------------------------------------------

/// Makes leases as they are after the machine was started anew, or moved to another one: the boot that they are counted
/// from isn't this one, or is not known.
#[track_caller]
fn forget_boot(session: &mut Session, boot: &str) {
    session.run(&format!("update _lease set boot = {boot}"));
}

#[test]
fn c34_another_boot_follows_the_wall_clock() {
    let clock = WallClock::new();
    let cluster = clock.cluster();
    let mut a = cluster.session("a");
    let mut b = cluster.session("b");
    for (round, boot) in ["boot + 1", "0", "-boot"].into_iter().enumerate() {
        let what = format!("boot = {boot}");
        clock.step(&cluster, 0);
        let short = Lease::acquire(&mut a, &format!("{round} short"), 4 * SECOND, "");
        let half = Lease::acquire(&mut a, &format!("{round} half an hour"), 1800 * SECOND, "");
        let two = Lease::acquire(&mut a, &format!("{round} two hours"), 7200 * SECOND, "");
        // The numbers of another boot mean nothing here.
        forget_boot(&mut a, &format!("{boot}, acquired_boot = acquired_boot + 7, expires_boot = 0"));
        for lease in [&short, &half, &two] {
            lease.is_as_it_should_be(&mut b, &what);
        }
        short.until_taken_over(&mut b, &what);

        // The clock goes forward: what would have ended by then has ended.
        clock.step(&cluster, 60);
        assert!(!b.flag(&format!("select lease_check('{}', {})", half.name, half.token)), "{what}");
        assert_eq!(b.int(&format!("select count(*) from lease_holder('{}')", half.name)), 0, "{what}");
        assert!(b.flag(&format!("select lease_check('{}', {})", two.name, two.token)), "{what}");
        let remaining = |session: &mut Session| {
            session
                .text(&format!("select remaining > '55 min' and remaining < '1 h' from lease_holder('{}')", two.name))
        };
        assert_eq!(remaining(&mut b), "t", "{what}");
        b.fails(&format!("select lease_renew('{}', {})", half.name, half.token)).is("55000");
        let taken = Lease::acquire(&mut b, &half.name, 60 * SECOND, "");
        taken.is_as_it_should_be(&mut a, &what);

        // It goes back: never more than the TTL.
        clock.step(&cluster, -60);
        for rest in [
            format!("select remaining = '2 h' from lease_holder('{}')", two.name),
            format!("select remaining = '2 h' from lock_holders where token = {}", two.token),
            format!("select remaining = '2 h' and retry_after = '2 h' from lease_acquire('{}', '1 s')", two.name),
        ] {
            assert!(b.flag(&rest), "{what}: {rest}");
        }
        // A renewal counts from this boot again.
        let mut two = two;
        two.renew(&mut a, 1200 * SECOND);
        clock.step(&cluster, 600);
        two.is_as_it_should_be(&mut b, &what);
        assert!(a.flag(&format!("select lease_release('{}', {})", two.name, two.token)));
        assert!(a.flag(&format!("select lease_release('{}', {})", taken.name, taken.token)));
    }
}

/// A waiter for such a lease: woken when the wall clock says so, and not before.
#[test]
fn c34_another_boot_and_a_waiter() {
    let clock = WallClock::new();
    let cluster = clock.cluster();
    let mut a = cluster.session("a");
    let lease = Lease::acquire(&mut a, "k", 4 * SECOND, "");
    forget_boot(&mut a, "boot + 1");
    drop(got(lease.wait_for_its_end(cluster.session("waiter"))));
    lease.has_ended_now("without a step");

    let lease = Lease::acquire(&mut a, "l", 1800 * SECOND, "");
    forget_boot(&mut a, "boot + 1");
    let waiting = lease.wait_for_its_end(cluster.session("waiter"));
    until("it waits", || a.int("select count(*) from lock_waiters where kind = 'lease'") == 1);
    let_pass(1500);
    assert!(!waiting.finished(), "nothing has ended yet");
    clock.step(&cluster, 60);
    let _waiter = got(waiting);
}

/// Bound leases of another boot end with their session as well.
#[test]
fn c34_another_boot_and_a_bound_lease() {
    let cluster = Cluster::new(&[]);
    let mut a = cluster.session("a");
    let mut b = cluster.session("b");
    let lease = Lease::acquire(&mut a, "k", 1800 * SECOND, ", bound => true");
    forget_boot(&mut b, "0");
    lease.is_as_it_should_be(&mut b, "bound");
    let pid = a.pid;
    drop(a);
    b.until_gone(pid);
    assert!(!b.flag(&format!("select lease_check('k', {})", lease.token)));
}

// --- Restart and crash ------------------------------------------------------------------------------------------------

/// Downtime counts; unbound leases go on and bound ones have ended, after an orderly stop and after a crash.
#[test]
fn a_restart_and_a_crash() {
    let cluster = Cluster::new(&[]);
    for (round, immediate) in [false, true].into_iter().enumerate() {
        let what = if immediate { "immediate" } else { "fast" };
        let mut a = cluster.session("a");
        let mut goes_on =
            Lease::acquire(&mut a, &format!("{round} goes on"), 20 * SECOND, ", owner => 'me', payload => '1'");
        let ends = Lease::acquire(&mut a, &format!("{round} ends"), 2 * SECOND, "");
        let bound = Lease::acquire(&mut a, &format!("{round} bound"), 1800 * SECOND, ", bound => true");
        let both = [
            Lease::acquire(&mut a, &format!("{round} both"), 1800 * SECOND, ", permits => 2"),
            Lease::acquire(&mut a, &format!("{round} both"), 1800 * SECOND, ", permits => 2, bound => true"),
        ];
        let kept = Lease::acquire(&mut a, &format!("{round} kept"), 1800 * SECOND, "");
        assert!(a.flag(&format!("select lease_release('{}', {}, '20 min')", kept.name, kept.token)));
        let asked_for = Lease::acquire(&mut a, &format!("{round} asked for"), 1800 * SECOND, "");
        assert!(a.flag(&format!("select lease_request('{}', 'a reason')", asked_for.name)));
        // Held by a session that waits, or guarded by one in a transaction: all of that is over.
        let mut guarding = cluster.session("guarding");
        guarding.run(&format!("begin; select lease_guard('{}', {})", ends.name, ends.token));
        let waiting = goes_on.wait_for_its_end(cluster.session("waiting"));
        until("it waits", || a.int("select count(*) from lock_waiters where kind = 'lease'") == 1);
        if immediate {
            cluster.stop_immediate();
        } else {
            cluster.stop();
        }
        waiting.end().1.expect_err("ended with the server");
        // The lease ends while the server is down.
        while ends.to.elapsed() < ends.ttl {
            let_pass(50);
        }
        cluster.start();
        let mut b = cluster.session("b");
        let mut shown = b.column("select concat_ws(' ', name, state) from lock_holders where kind = 'lease'");
        shown.retain(|row| row.starts_with(&round.to_string()));
        shown.sort();
        assert_eq!(
            shown,
            [
                format!("{round} asked for held"),
                format!("{round} both held"),
                format!("{round} goes on held"),
                format!("{round} kept kept")
            ],
            "{what}"
        );
        goes_on.is_as_it_should_be(&mut b, what);
        both[0].is_as_it_should_be(&mut b, what);
        for lease in [&ends, &bound, &both[1], &kept] {
            assert!(!b.flag(&format!("select lease_check('{}', {})", lease.name, lease.token)), "{what}: {lease:?}");
            b.fails(&format!("select lease_guard('{}', {})", lease.name, lease.token)).is("55000");
        }
        // At the first try.
        for lease in [&ends, &bound] {
            let next = Lease::acquire(&mut b, &lease.name, SECOND, "");
            assert!(next.token > asked_for.token, "{what}");
        }
        assert!(b.maybe(&format!("select token from lease_acquire('{round} both', '1 h', permits => 2)")).is_some());
        assert!(b.maybe(&format!("select token from lease_acquire('{round} both', '1 h', permits => 2)")).is_none());
        assert_eq!(
            b.text(&format!("select release_requested from lease_renew('{}', {})", asked_for.name, asked_for.token)),
            "a reason"
        );
        assert_eq!(b.text(&format!("select owner || payload from lease_holder('{}')", goes_on.name)), "me1");
        assert_eq!(b.int("select count(*) from lock_waiters"), 0);
        goes_on.renew(&mut b, 2 * SECOND);
        goes_on.until_taken_over(&mut b, what);
    }
}

/// The process number of a bound lease's session comes again; the lease doesn't.
#[test]
fn a_bound_lease_and_a_new_session_of_the_same_number() {
    let cluster = Cluster::new(&[]);
    let mut a = cluster.session("a");
    let lease = Lease::acquire(&mut a, "k", 1800 * SECOND, ", bound => true");
    cluster.restart();
    let mut b = cluster.session("b");
    // As if the new session had the old one's number.
    b.run(&format!("update _lease set bound_pid = {}", b.pid));
    assert!(!b.flag(&format!("select lease_check('k', {})", lease.token)));
    // Also when it holds a bound lease of its own.
    let own = Lease::acquire(&mut b, "own", 1800 * SECOND, ", bound => true");
    assert!(!b.flag(&format!("select lease_check('k', {})", lease.token)));
    assert!(b.flag(&format!("select lease_check('own', {})", own.token)));
    assert_eq!(b.column("select name from lock_holders where kind = 'lease'"), ["own"]);
    assert!(b.maybe("select token from lease_acquire('k', '1 s')").is_some());
}

/// A backend that is killed ends all sessions, and with them all that was bound to one.
#[test]
fn a_killed_backend() {
    let cluster = Cluster::new(&["restart_after_crash = on"]);
    let mut a = cluster.session("a");
    let mut b = cluster.session("b");
    let unbound = Lease::acquire(&mut a, "unbound", 1800 * SECOND, "");
    let bound = Lease::acquire(&mut a, "bound", 1800 * SECOND, ", bound => true");
    signal(a.pid, "KILL");
    until("b sees the crash", || b.query("select 1").is_err());
    let mut c = None;
    until("the server is back", || {
        c = Session::open(cluster.config("c")).ok();
        c.is_some()
    });
    let mut c = c.expect("just opened");
    unbound.is_as_it_should_be(&mut c, "after the crash");
    assert!(c.flag(&format!("select lease_check('unbound', {})", unbound.token)));
    assert!(!c.flag(&format!("select lease_check('bound', {})", bound.token)));
    assert!(c.maybe("select token from lease_acquire('bound', '1 s')").is_some());
}
