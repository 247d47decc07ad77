//! What `lock_stats` counts, to the last grant; and the examples of how to monitor it.
//!
//! Each test has a server of its own: counters are the whole server's, and so is their reset.

use super::support::lease_queue::{self, Way, give_back, take, take_with};
use super::support::{Cluster, Form, Session, as_server_user, let_pass, literal, run, signal, until};

/// What has been counted of a domain.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Counts {
    grants: i64,
    waits: i64,
    timeouts: i64,
    deadlocks: i64,
    leases_granted: i64,
    leases_taken_over: i64,
    leases_expired: i64,
}

const NONE: Counts = Counts {
    grants: 0,
    waits: 0,
    timeouts: 0,
    deadlocks: 0,
    leases_granted: 0,
    leases_taken_over: 0,
    leases_expired: 0,
};

/// Of a domain of the session's database; [`NONE`] where it has no row.
#[track_caller]
fn counts(watch: &mut Session, domain: &str) -> Counts {
    counts_where(watch, &format!("domain = {} and database = current_database()", literal(domain)))
}

#[track_caller]
fn counts_where(watch: &mut Session, condition: &str) -> Counts {
    let rows = watch.run(&format!(
        "select grants, waits, timeouts, deadlocks, leases_granted, leases_taken_over, leases_expired \
           from lock_stats where {condition}"
    ));
    assert!(rows.len() <= 1, "{condition}: one row at most is due: {rows:?}");
    let Some(row) = rows.first() else { return NONE };
    let count = |column| row.get(column).expect("not null").parse().expect("a number");
    Counts {
        grants: count(0),
        waits: count(1),
        timeouts: count(2),
        deadlocks: count(3),
        leases_granted: count(4),
        leases_taken_over: count(5),
        leases_expired: count(6),
    }
}

/// The wait_time and max_wait of a domain, in seconds.
#[track_caller]
fn times(watch: &mut Session, domain: &str) -> (f64, f64) {
    let mut seconds = |column: &str| {
        let sql = format!("select extract(epoch from {column}) from lock_stats where domain = {}", literal(domain));
        watch.text(&sql).parse::<f64>().expect("seconds")
    };
    (seconds("wait_time"), seconds("max_wait"))
}

#[track_caller]
fn rows(watch: &mut Session) -> i64 {
    watch.int("select count(*) from lock_stats")
}

#[test]
fn every_form_counts_its_grants() {
    let cluster = Cluster::new(&[]);
    let mut watch = cluster.session("watch");
    for (number, form) in Form::all().into_iter().enumerate() {
        let domain = format!("form {number}");
        let lock = form.lock(&format!("{domain}:k"));
        let mut a = cluster.session("a");
        a.run(if form.call { "" } else { "begin" });
        for timeout in [None, Some("0"), Some("1 s")] {
            a.run(&lock.acquire(timeout));
        }
        // One that is refused is none.
        let mut b = cluster.session("b");
        let _ = b.query(&lock.acquire(Some("0")));
        let grants = if form.is_named() { 3 } else { 0 };
        assert_eq!(counts(&mut watch, &domain), Counts { grants, ..NONE }, "{form:?}");
        // Counted when it is granted, whatever becomes of the transaction.
        a.run(if form.call { "" } else { "rollback" });
        assert_eq!(counts(&mut watch, &domain), Counts { grants, ..NONE }, "{form:?}");
    }
    assert_eq!(rows(&mut watch), Form::named().len() as i64, "native locks have no row");

    let mut a = cluster.session("a");
    a.run("select named_lock('many:' || i) from generate_series(1, 10) as i");
    a.run("select named_lock('many:1', mode => 'share'), named_lock_convert('many:2', 'share')");
    a.run("select named_unlock_all()");
    assert_eq!(counts(&mut watch, "many"), Counts { grants: 11, ..NONE }, "a conversion is no grant");
    a.run("select named_lock('without a domain'), named_lock(':k'), named_lock('many:2:k')");
    assert_eq!(counts(&mut watch, ""), Counts { grants: 2, ..NONE });
    assert_eq!(counts(&mut watch, "many"), Counts { grants: 12, ..NONE });
    for call in ["named_lock('')", "named_lock('refused:k', '-1 s')", "named_unlock('refused:k')"] {
        a.fails(&format!("select {call}"));
    }
    assert_eq!(counts(&mut watch, "refused"), NONE);
    for domain in ["x".repeat(1023), "it's \"ü\" \\".to_owned()] {
        a.run(&format!("select named_lock({})", literal(&format!("{domain}:"))));
        assert_eq!(counts(&mut watch, &domain), Counts { grants: 1, ..NONE });
    }
}

#[test]
fn a_wait_counts_when_it_has_ended() {
    let cluster = Cluster::new(&[]);
    let mut watch = cluster.session("watch");
    let mut holder = cluster.session("holder");
    for (round, pause) in [(1, 300), (2, 0)] {
        holder.run("select named_lock('granted:k')");
        let waiting = cluster.session("waiter").background("select named_lock('granted:k')");
        watch.until_waiting(waiting.pid);
        let_pass(pause);
        assert_eq!(counts(&mut watch, "granted").waits, round - 1);
        holder.run("select named_unlock('granted:k')");
        let (mut waiter, answer) = waiting.end();
        answer.expect("no error");
        assert_eq!(counts(&mut watch, "granted"), Counts { grants: 2 * round, waits: round, ..NONE });
        waiter.run("select named_unlock('granted:k')"); // or the holder may have to wait for its end
    }
    let (wait_time, max_wait) = times(&mut watch, "granted");
    assert!(max_wait >= 0.3 && wait_time > max_wait, "{wait_time} {max_wait}");
}

#[test]
fn waits_that_their_limit_ends_are_timeouts() {
    let cluster = Cluster::new(&[]);
    let mut watch = cluster.session("watch");
    watch.run("select lock_domain_set('max_wait', max_wait => '60 ms')");
    let mut holder = cluster.session("holder");
    for (domain, before, call, code) in [
        ("timeout", "", "select named_lock('$:k', '60 ms')", ""),
        ("transaction", "", "select named_xact_lock('$:k', '60 ms')", ""),
        ("cluster-wide", "", "select named_lock('$:k', '60 ms', cluster_wide => true)", ""),
        ("strict", "", "select named_lock_strict('$:k', '60 ms')", "55P03"),
        ("call", "", "call named_lock_wait('$:k', '60 ms')", ""),
        ("lock_timeout", "set lock_timeout = '60 ms'", "select named_lock('$:k')", "55P03"),
        ("max_wait", "", "select named_lock('$:k')", "55P03"),
        (
            "convert",
            "select named_lock('$:k', '0', 'share')",
            "select named_lock_convert('$:k', 'exclusive', '60 ms')",
            "",
        ),
    ] {
        let mut a = cluster.session("a");
        let [before, call] = [before, call].map(|sql| sql.replace('$', domain));
        let mode = if domain == "convert" { "share" } else { "exclusive" };
        let cluster_wide = domain == "cluster-wide";
        holder.run(&format!("select named_lock('{domain}:k', '0', '{mode}', cluster_wide => {cluster_wide})"));
        a.run(&before);
        let held = counts(&mut watch, domain).grants;
        match code {
            "" => drop(a.run(&call)),
            _ => drop(a.fails(&call).is(code)),
        }
        assert_eq!(counts(&mut watch, domain), Counts { grants: held, waits: 1, timeouts: 1, ..NONE }, "{domain}");
        let (wait_time, max_wait) = times(&mut watch, domain);
        assert!(wait_time >= 0.06 && wait_time == max_wait, "{domain}: {wait_time} {max_wait}");
    }
}

#[test]
fn waits_that_something_else_ends_are_no_timeouts() {
    let cluster = Cluster::new(&[]);
    let mut watch = cluster.session("watch");
    let mut holder = cluster.session("holder");
    for (domain, end) in [
        ("cancelled", "select pg_cancel_backend($)"),
        ("terminated", "select pg_terminate_backend($)"),
        ("statement_timeout", "select 1"),
    ] {
        holder.run(&format!("select named_lock('{domain}:k')"));
        let mut a = cluster.session("a");
        if domain == "statement_timeout" {
            a.run("set statement_timeout = '500 ms'");
        }
        let waiting = a.background(&format!("select named_lock('{domain}:k', '1 hour')"));
        watch.until_waiting(waiting.pid);
        watch.run(&end.replace('$', &waiting.pid.to_string()));
        waiting.end().1.expect_err("broken off");
        until("it is counted", || counts(&mut watch, domain).waits > 0);
        assert_eq!(counts(&mut watch, domain), Counts { grants: 1, waits: 1, ..NONE }, "{domain}");
    }
    assert!(times(&mut watch, "statement_timeout").0 >= 0.4);
}

#[test]
fn sets_trees_and_semaphores_count() {
    let cluster = Cluster::new(&[]);
    let mut watch = cluster.session("watch");
    let mut a = cluster.session("a");
    let mut b = cluster.session("b");
    a.run("select named_lock_all(array['set:a', 'set:b', 'set:a'])");
    a.run("select named_lock_any(array['set:c', 'set:d'])");
    assert!(!b.flag("select named_lock_all(array['set:x', 'set:a', 'set:y'], '0')"));
    assert_eq!(counts(&mut watch, "set"), Counts { grants: 3, ..NONE });
    a.run("select named_lock_tree('tree:a/b/c')");
    assert_eq!(counts(&mut watch, "tree"), Counts { grants: 3, ..NONE });
    a.run("select named_semaphore('semaphore:k', 1)");
    assert_eq!(b.maybe("select named_semaphore('semaphore:k', 1, '60 ms')"), None);
    assert_eq!(counts(&mut watch, "semaphore"), Counts { grants: 1, waits: 1, timeouts: 1, ..NONE });
}

#[test]
fn a_refused_try_counts_nothing() {
    let cluster = Cluster::new(&[]);
    let mut watch = cluster.session("watch");
    let mut holder = cluster.session("holder");
    let mut a = cluster.session("a");
    holder.run("select named_lock('try:k', '0', 'share')");
    for call in [
        "select named_lock('try:k', '0')",
        "select named_xact_lock('try:k', '0')",
        "call named_lock_wait('try:k', '0')",
    ] {
        assert!(!a.flag(call));
    }
    a.fails("select named_lock_strict('try:k', '0')").is("55P03");
    // One that goes through the queue, for it has the lock in another mode.
    assert!(a.flag("select named_lock('try:k', '0', 'share')"));
    assert!(!a.flag("select named_lock('try:k', '0')"));
    assert!(!a.flag("select named_lock_convert('try:k', 'exclusive', '0')"));
    // Native locks neither, whether tried or waited for.
    holder.run("select advisory_lock(1)");
    assert!(!a.flag("select advisory_lock(1, timeout => '0')"));
    assert!(!a.flag("select advisory_lock(1, timeout => '20 ms')"));
    assert_eq!(counts(&mut watch, "try"), Counts { grants: 2, ..NONE });
    assert_eq!(times(&mut watch, "try"), (0.0, 0.0));
    take(&mut holder, "try lease:k", "1 hour");
    assert!(!lease_queue::try_take(&mut a, "try lease:k"));
    assert_eq!(counts(&mut watch, "try lease"), Counts { leases_granted: 1, ..NONE });
    assert_eq!(rows(&mut watch), 2);
}

#[test]
fn a_deadlock_counts_in_the_one_it_ends() {
    let cluster = Cluster::new(&["deadlock_timeout = '1 h'"]);
    let mut watch = cluster.session("watch");
    let mut a = cluster.session("a");
    let mut b = cluster.session("b");
    b.run("set deadlock_timeout = '100 ms'");
    a.run("begin; select named_xact_lock('deadlock:1')");
    b.run("begin; select named_xact_lock('deadlock:2')");
    let waiting = a.background("select named_xact_lock('deadlock:2')");
    watch.until_waiting(waiting.pid);
    b.fails("select named_xact_lock('deadlock:1')").is("40P01");
    b.run("rollback");
    waiting.end().1.expect("b has given way");
    assert_eq!(counts(&mut watch, "deadlock"), Counts { grants: 3, waits: 2, deadlocks: 1, ..NONE });
    let (wait_time, max_wait) = times(&mut watch, "deadlock");
    assert!(max_wait >= 0.1 && wait_time >= max_wait + 0.1, "{wait_time} {max_wait}");
}

#[test]
fn grants_of_leases_count_when_they_are_committed() {
    let cluster = Cluster::new(&[]);
    let mut watch = cluster.session("watch");
    let mut a = cluster.session("a");
    let mut due = 0;
    let mut check = |what: &str, more: i64| {
        due += more;
        assert_eq!(counts(&mut watch, "lease"), Counts { leases_granted: due, ..NONE }, "{what}");
    };
    let token = take(&mut a, "lease:k", "1 hour");
    check("at once", 1);
    a.run(&format!("select lease_renew('lease:k', {token})"));
    give_back(&mut a, "lease:k", token);
    check("a renewal, a release", 0);
    a.run("begin");
    take(&mut a, "lease:k", "1 hour");
    check("not committed", 0);
    a.run("rollback");
    check("rolled back", 0);
    a.run("begin");
    take(&mut a, "lease:k", "1 hour");
    a.run("commit");
    check("committed", 1);
    a.run("begin");
    take(&mut a, "lease:a", "1 hour");
    a.run("savepoint s");
    take(&mut a, "lease:b", "1 hour");
    a.run("savepoint s_in_s");
    take(&mut a, "lease:c", "1 hour");
    a.run("release s_in_s; rollback to s; savepoint t");
    take(&mut a, "lease:d", "1 hour");
    a.run("release t; commit");
    check("but for a savepoint", 2);
    a.run(
        "do $$ begin
           perform lease_acquire('lease:e', '1 hour');
           begin
             perform lease_acquire('lease:f', '1 hour');
             raise 'x';
           exception when raise_exception then null;
           end;
         end $$",
    );
    check("but for a block with an exception", 1);
    a.run("call lease_acquire_wait('lease:g', '1 hour')");
    check("by CALL", 1);
    a.run("do $$ begin for i in 1..3 loop perform lease_acquire('lease:h' || i, '1 hour'); commit; end loop; end $$");
    check("in a procedure with COMMIT", 3);
    a.run("begin");
    take(&mut a, "lease:i", "1 hour");
    a.fails("prepare transaction 'p'").is("0A000");
    a.run("rollback");
    check("a transaction that could not be prepared", 0);
    a.run("begin");
    take(&mut a, "lease:i", "1 hour");
    let pid = a.pid;
    drop(a);
    let mut b = cluster.session("b");
    b.until_gone(pid);
    check("the session ended", 0);
    take_with(&mut b, "lease:j", "1 hour", ", permits => 3");
    take_with(&mut b, "lease:j", "1 hour", ", permits => 3");
    check("permits", 2);
}

#[test]
fn waits_for_leases_count() {
    let cluster = Cluster::new(&[]);
    let mut watch = cluster.session("watch");
    let mut holder = cluster.session("holder");
    for way in Way::ALL {
        let domain = format!("{way:?}");
        let name = format!("{domain}:k");
        let token = take(&mut holder, &name, "1 hour");
        let [first, second] = [(); 2].map(|()| {
            let waiting = cluster.session("waiter").background(&way.wait(&name));
            until("it waits", || lease_queue::position(&mut watch, waiting.pid) > 0);
            waiting
        });
        let_pass(200);
        assert_eq!(counts(&mut watch, &domain), Counts { leases_granted: 1, ..NONE });
        give_back(&mut holder, &name, token);
        let (mut first, rows) = first.end();
        let token = rows.expect("no error")[0].get(0).expect("a token").parse().expect("a number");
        give_back(&mut first, &name, token);
        second.end().1.expect("no error");
        assert_eq!(counts(&mut watch, &domain), Counts { waits: 2, leases_granted: 3, ..NONE });
        let (wait_time, max_wait) = times(&mut watch, &domain);
        assert!(max_wait >= 0.2 && wait_time >= max_wait + 0.2, "{wait_time} {max_wait}");

        let domain = format!("{way:?} not granted");
        let name = format!("{domain}:k");
        take(&mut holder, &name, "1 hour");
        let mut a = cluster.session("a");
        assert_eq!(
            a.maybe(&way.take(&name, "1 hour", Some("60 ms"), "").replace("select token", "select token::text")),
            None
        );
        assert_eq!(counts(&mut watch, &domain), Counts { waits: 1, timeouts: 1, leases_granted: 1, ..NONE });
        let (wait_time, max_wait) = times(&mut watch, &domain);
        assert!(wait_time >= 0.06 && wait_time == max_wait, "{wait_time} {max_wait}");
        let waiting = a.background(&way.wait(&name));
        lease_queue::until_queued(&mut watch, waiting.pid, 1);
        watch.run(&format!("select pg_cancel_backend({})", waiting.pid));
        let (a, result) = waiting.end();
        result.expect_err("cancelled").is("57014");
        let waiting = a.background(&way.wait(&name));
        lease_queue::until_queued(&mut watch, waiting.pid, 1);
        watch.run(&format!("select pg_terminate_backend({})", waiting.pid));
        waiting.end().1.expect_err("terminated");
        until("it is counted", || counts(&mut watch, &domain).waits >= 3);
        assert_eq!(counts(&mut watch, &domain), Counts { waits: 3, timeouts: 1, leases_granted: 1, ..NONE });
    }
    let mut a = cluster.session("a");
    a.run("set lock_timeout = '60 ms'");
    take(&mut holder, "lock_timeout:k", "1 hour");
    a.fails("select lease_acquire('lock_timeout:k', '1 hour', null)").is("55P03");
    assert_eq!(counts(&mut watch, "lock_timeout"), Counts { waits: 1, timeouts: 1, leases_granted: 1, ..NONE });
}

/// Waits until a lease is not held with a token any more.
#[track_caller]
fn until_over(watch: &mut Session, name: &str, token: i64) {
    until("the lease is over", || !watch.flag(&format!("select lease_check('{name}', {token})")));
}

/// Grants other leases until a lease has no row any more.
#[track_caller]
fn sweep(session: &mut Session, name: &str) {
    until("its row is swept away", || {
        let token = take(session, "sweeper:k", "1 hour");
        give_back(session, "sweeper:k", token);
        session.int(&format!("select count(*) from _lease where name = '{name}'")) == 0
    });
}

#[test]
fn leases_that_nobody_released_are_taken_over() {
    let cluster = Cluster::new(&[]);
    let mut watch = cluster.session("watch");
    let mut a = cluster.session("a");
    let mut b = cluster.session("b");
    let one = Counts { leases_granted: 1, ..NONE };
    let two = Counts { leases_granted: 2, ..NONE };
    let taken_over = Counts { leases_taken_over: 1, leases_expired: 1, ..two };

    let token = take(&mut a, "expired:k", "100 ms");
    until_over(&mut watch, "expired:k", token);
    assert!(!a.flag(&format!("select lease_release('expired:k', {token})")), "too late");
    for undo in ["rollback", "savepoint"] {
        b.run("begin; savepoint s");
        take(&mut b, "expired:k", "1 hour");
        b.run(if undo == "rollback" { "rollback" } else { "rollback to s; commit" });
        assert_eq!(counts(&mut watch, "expired"), one, "{undo}");
    }
    take(&mut b, "expired:k", "1 hour");
    assert_eq!(counts(&mut watch, "expired"), taken_over);

    let token = take(&mut a, "released:k", "1 hour");
    give_back(&mut a, "released:k", token);
    take(&mut b, "released:k", "1 hour");
    assert_eq!(counts(&mut watch, "released"), two);

    let token = take(&mut a, "kept:k", "1 hour");
    a.run(&format!("select lease_release('kept:k', {token}, '100 ms')"));
    until("it is free", || lease_queue::try_take(&mut b, "kept:k"));
    assert_eq!(counts(&mut watch, "kept"), two);

    take(&mut a, "broken:k", "1 hour");
    b.run("select lease_break('broken:k')");
    take(&mut b, "broken:k", "1 hour");
    assert_eq!(counts(&mut watch, "broken"), two);

    // The holder is about to renew it: the row stays, and an order ends the grant. Its time passes too.
    for (domain, swept) in [("broken meanwhile", false), ("broken and swept", true)] {
        let name = format!("{domain}:k");
        let token = take(&mut a, &name, "1 hour");
        a.run(&format!("begin; select lease_renew('{name}', {token}, '100 ms')"));
        assert_eq!(b.int(&format!("select lease_break('{name}')")), 1);
        a.run("commit");
        let_pass(150);
        assert_eq!(b.int(&format!("select count(*) from _lease where name = '{name}' and token > 0")), 1);
        if swept {
            sweep(&mut b, &name);
        }
        take(&mut b, &name, "1 hour");
        assert_eq!(counts(&mut watch, domain), two, "{domain}");
    }

    // The session that it was bound to has ended. Its time passes too.
    for (domain, swept) in [("bound", false), ("bound and swept", true)] {
        let name = format!("{domain}:k");
        let mut bound = cluster.session("bound");
        take_with(&mut bound, &name, "100 ms", ", bound => true");
        let pid = bound.pid;
        drop(bound);
        watch.until_gone(pid);
        let_pass(150);
        if swept {
            sweep(&mut b, &name);
        }
        take(&mut b, &name, "1 hour");
        assert_eq!(counts(&mut watch, domain), two, "{domain}");
    }
    let token = take_with(&mut a, "bound and alive:k", "100 ms", ", bound => true");
    until_over(&mut watch, "bound and alive:k", token);
    take(&mut b, "bound and alive:k", "1 hour");
    assert_eq!(counts(&mut watch, "bound and alive"), taken_over);

    // Each permit for itself.
    let permits = ", permits => 3";
    let token = take_with(&mut a, "permits:k", "100 ms", permits);
    take_with(&mut a, "permits:k", "1 hour", permits);
    until_over(&mut watch, "permits:k", token);
    let more = [(); 2].map(|()| take_with(&mut b, "permits:k", "1 hour", permits));
    assert_eq!(counts(&mut watch, "permits"), Counts { leases_granted: 4, ..taken_over }, "one of two took over");
    give_back(&mut b, "permits:k", more[0]);
    take_with(&mut a, "permits:k", "1 hour", permits);
    assert_eq!(counts(&mut watch, "permits"), Counts { leases_granted: 5, ..taken_over });
    // All have expired, and are cleared away together.
    let tokens = [(); 2].map(|()| take_with(&mut a, "permits together:k", "100 ms", permits));
    tokens.iter().for_each(|&token| until_over(&mut watch, "permits together:k", token));
    take_with(&mut b, "permits together:k", "1 hour", permits);
    assert_eq!(
        counts(&mut watch, "permits together"),
        Counts { leases_granted: 3, leases_taken_over: 1, leases_expired: 2, ..NONE }
    );

    // Cleared away in passing: who comes after that finds nothing to take over.
    let token = take(&mut a, "swept:k", "100 ms");
    until_over(&mut watch, "swept:k", token);
    b.run("begin");
    sweep(&mut b, "swept:k");
    b.run("rollback");
    assert_eq!(counts(&mut watch, "swept"), one);
    sweep(&mut b, "swept:k");
    assert_eq!(counts(&mut watch, "swept"), Counts { leases_expired: 1, ..one });
    take(&mut b, "swept:k", "1 hour");
    assert_eq!(counts(&mut watch, "swept"), Counts { leases_expired: 1, ..two });
}

/// How much dynamic shared memory a server has that keeps it in files.
fn shared_memory(cluster: &Cluster) -> i64 {
    let folder = cluster.data().join("pg_dynshmem");
    let listed = run(as_server_user("find").arg(folder).args(["-type", "f", "-printf", "%s\\n"]));
    listed.lines().map(|size| size.parse::<i64>().expect("a size")).sum()
}

/// Locks and unlocks names of so many domains, one after the other.
#[track_caller]
fn use_domains(session: &mut Session, stem: &str, count: i64) {
    let pairs = format!("select named_lock('{stem}' || i || ':k'), named_unlock('{stem}' || i || ':k')");
    let all = format!("select count(*) from ({pairs} from generate_series(1, {count}) as i) as pairs");
    assert_eq!(session.int(&all), count);
}

const MOST: i64 = 1_024;

#[test]
fn domains_after_the_1024th_share_a_row() {
    let cluster = Cluster::new(&["dynamic_shared_memory_type = mmap"]);
    let mut watch = cluster.session("watch");
    let mut a = cluster.session("a");
    let mut b = cluster.session("b");
    let other = "domain = '(other)' and database is null";
    assert_eq!(rows(&mut watch), 0);
    let memory = shared_memory(&cluster);
    use_domains(&mut a, "d", MOST);
    assert_eq!(rows(&mut watch), MOST);
    use_domains(&mut a, "d", MOST + 500);
    assert_eq!(rows(&mut watch), MOST + 1);
    assert_eq!(counts_where(&mut watch, other), Counts { grants: 500, ..NONE });
    assert_eq!(counts(&mut watch, "d1"), Counts { grants: 2, ..NONE });
    assert_eq!(counts(&mut watch, "d1024"), Counts { grants: 2, ..NONE });
    assert_eq!(counts(&mut watch, "d1025"), NONE);
    // For every session.
    use_domains(&mut b, "d", MOST + 10);
    b.run("select named_lock('d1025:k')");
    assert_eq!(counts(&mut watch, "d1024"), Counts { grants: 3, ..NONE });
    assert_eq!(counts_where(&mut watch, other), Counts { grants: 511, ..NONE });
    // All else too.
    assert!(!a.flag("select named_lock('d1025:k', '20 ms')"));
    take(&mut a, "d1026:k", "1 hour");
    assert_eq!(
        counts_where(&mut watch, other),
        Counts { grants: 511, waits: 1, timeouts: 1, leases_granted: 1, ..NONE }
    );
    b.run("select named_unlock_all()");
    // A domain of that name is another.
    let all = "select sum(grants) from lock_stats";
    let before = watch.int(all);
    use_domains(&mut b, "x", 50_000);
    assert_eq!(rows(&mut watch), MOST + 1);
    assert_eq!(watch.int(all), before + 50_000);
    let used = shared_memory(&cluster) - memory;
    assert!(used <= 4 << 20, "{used} bytes of shared memory");

    // A reset forgets them, in sessions that know them too.
    watch.run("select lock_stats_reset()");
    assert_eq!(rows(&mut watch), 0);
    a.run("select named_lock('(other):k'), named_lock('d1026:k'), named_lock('d1:k')");
    b.run("select named_lock('d2:k'), named_lock('x49999:k')");
    for domain in ["(other)", "d1026", "d1", "d2", "x49999"] {
        assert_eq!(counts(&mut watch, domain), Counts { grants: 1, ..NONE }, "{domain}");
    }
    assert_eq!(counts_where(&mut watch, other), NONE);
    assert_eq!(rows(&mut watch), 5);
    for _ in 0..5 {
        use_domains(&mut a, "y", MOST + 100);
        watch.run("select lock_stats_reset()");
    }
    use_domains(&mut b, "y", MOST + 100);
    assert_eq!(counts_where(&mut watch, other), Counts { grants: 100, ..NONE });
    let used = shared_memory(&cluster) - memory;
    assert!(used <= 4 << 20, "{used} bytes of shared memory, after resets");
}

#[test]
fn a_reset_begins_anew() {
    let cluster = Cluster::new(&[]);
    let mut watch = cluster.session("watch");
    let mut a = cluster.session("a");
    let since = "select distinct stats_reset from lock_stats";
    let is_between = |watch: &mut Session, before: &str, at: &str| {
        assert!(watch.flag(&format!("select '{at}'::timestamptz between '{before}' and clock_timestamp()")), "{at}");
    };
    let before = watch.text("select clock_timestamp()");
    a.run("select named_lock('reset:k')");
    take(&mut a, "reset:k", "1 hour");
    assert!(!watch.flag("select named_lock('reset:k', '20 ms')"));
    let made = watch.text(since);
    is_between(&mut watch, &before, &made);
    let before = watch.text("select clock_timestamp()");
    assert_eq!(watch.maybe("select lock_stats_reset()").as_deref(), Some(""));
    assert_eq!(rows(&mut watch), 0);
    a.run("select named_lock('reset:k')");
    assert_eq!(counts(&mut watch, "reset"), Counts { grants: 1, ..NONE });
    assert_eq!(times(&mut watch, "reset"), (0.0, 0.0));
    let reset = watch.text(since);
    is_between(&mut watch, &before, &reset);

    // A grant that is committed after the reset counts after it, and so does a wait that ends then.
    a.run("begin");
    take(&mut a, "reset:later", "1 hour");
    let waiting = cluster.session("waiter").background("select named_lock('reset:k', '10 s')");
    watch.until_waiting(waiting.pid);
    watch.run("select lock_stats_reset()");
    a.run("commit; select named_unlock_all()");
    waiting.end().1.expect("no error");
    assert_eq!(counts(&mut watch, "reset"), Counts { grants: 1, waits: 1, leases_granted: 1, ..NONE });
}

#[test]
fn who_may_see_and_reset() {
    let cluster = Cluster::new(&[]);
    let mut watch = cluster.session("watch");
    let [stranger, reader, resetter] = ["stranger", "reader", "resetter"].map(|role| cluster.new_role(role));
    watch.run(&format!(
        "grant pg_read_all_stats to {reader}; grant execute on function lock_stats_reset() to {resetter}"
    ));
    let mut a = cluster.session_as(&stranger, "a");
    a.run("select named_lock('secret:k'), named_lock('plain'), named_lock('plain 2')");
    let look = "select concat_ws(' ', domain, database, grants) from lock_stats order by grants";
    for role in [&stranger, &resetter] {
        let mut session = cluster.session_as(role, "look");
        assert_eq!(session.column(look), ["postgres 1", " postgres 2"], "{role}");
        assert_eq!(session.int("select count(*) from lock_stats where domain is null"), 1, "{role}");
    }
    for mut session in [cluster.session_as(&reader, "look"), cluster.session("superuser")] {
        assert_eq!(session.column(look), ["secret postgres 1", " postgres 2"]);
    }
    use_domains(&mut watch, "many", MOST);
    assert_eq!(a.column("select grants from lock_stats where domain = '(other)'"), ["2"], "the rest is no secret");

    for role in [&stranger, &reader] {
        cluster.session_as(role, "reset").fails("select lock_stats_reset()").is("42501");
    }
    assert_eq!(rows(&mut watch), MOST + 1);
    cluster.session_as(&resetter, "reset").run("select lock_stats_reset()");
    assert_eq!(rows(&mut watch), 0);
}

#[test]
fn each_database_for_itself() {
    let cluster = Cluster::new(&[]);
    let mut watch = cluster.session("watch");
    let other = cluster.new_database("other", "UTF8");
    let mut a = cluster.session("a");
    let mut b = other.session("b");
    a.run("select named_lock('shared:k'), named_lock('shared:wide', cluster_wide => true)");
    b.run("select named_lock('shared:k'), named_lock('only there:k'), named_lock('shared:k 2')");
    assert!(!b.flag("select named_lock('shared:wide', '20 ms', cluster_wide => true)"));
    take(&mut b, "shared:k", "1 hour");
    let here = Counts { grants: 2, ..NONE };
    let there = Counts { grants: 2, waits: 1, timeouts: 1, leases_granted: 1, ..NONE };
    for session in [&mut watch, &mut b] {
        for (database, due) in [("postgres", here), (other.dbname.as_str(), there)] {
            let condition = format!("domain = 'shared' and database = '{database}'");
            assert_eq!(counts_where(session, &condition), due, "{database}");
        }
        assert_eq!(rows(session), 3);
    }
    // A database that is gone has no name any more.
    let pid = b.pid;
    drop(b);
    watch.until_gone(pid);
    watch.run(&format!("drop database {}", other.dbname));
    assert_eq!(counts_where(&mut watch, "domain = 'shared' and database is null"), there);
    assert_eq!(rows(&mut watch), 3);
}

#[test]
fn nothing_is_lost_between_sessions() {
    let cluster = Cluster::new(&[]);
    let mut watch = cluster.session("watch");
    let mut sum = 0;
    for round in 1..=3 {
        // All begin with a domain that is not there yet; most of the time each uses another than before.
        let name = format!("'sum ' || {round} || i % 4 || ':' || pg_backend_pid()");
        let statement = format!(
            "select count(*) from generate_series(1, 4000) as i where named_lock({name}) and named_unlock({name}) = 0"
        );
        let running: Vec<_> = (0..16).map(|_| cluster.session("count").background(&statement)).collect();
        for running in running {
            assert_eq!(running.end().1.expect("no error")[0].get(0), Some("4000"));
        }
        for domain in 0..4 {
            let domain = format!("sum {round}{domain}");
            assert_eq!(counts(&mut watch, &domain), Counts { grants: 16_000, ..NONE }, "{domain}");
        }
        sum += 64_000;
        assert_eq!(watch.int("select sum(grants) from lock_stats"), sum);
        assert_eq!(rows(&mut watch), 4 * round);
    }
    // One lock for all of them, and all wait for it at first.
    watch.run("select named_lock('one:k')");
    let statement = "do $$ begin for i in 1..200 loop \
                       perform named_lock('one:k'); perform named_unlock('one:k'); \
                     end loop; end $$";
    let running: Vec<_> = (0..16).map(|_| cluster.session("count").background(statement)).collect();
    until("all wait", || watch.int("select count(*) from lock_waiters") == 16);
    watch.run("select named_unlock('one:k')");
    running.into_iter().for_each(|running| drop(running.end().1.expect("no error")));
    let counted = counts(&mut watch, "one");
    assert_eq!(counted, Counts { grants: 3201, waits: counted.waits, ..NONE });
    assert!(counted.waits >= 16);
    let (wait_time, max_wait) = times(&mut watch, "one");
    assert!(max_wait <= wait_time, "{wait_time} {max_wait}");
}

#[test]
fn resets_in_the_midst_of_it() {
    let cluster = Cluster::new(&[]);
    let mut watch = cluster.session("watch");
    let count = "do $$ begin for i in 1..60000 loop \
                   perform named_lock('d' || i % 1500 || ':' || pg_backend_pid()); \
                   perform named_unlock('d' || i % 1500 || ':' || pg_backend_pid()); \
                 end loop; end $$";
    let running: Vec<_> = (0..6).map(|_| cluster.session("count").background(count)).collect();
    let mut resets = 0;
    while !running.iter().all(|running| running.finished()) {
        watch.run("select lock_stats_reset()");
        assert!(watch.int("select coalesce(sum(grants), 0) from lock_stats") <= 360_000);
        assert!(rows(&mut watch) <= MOST + 1);
        resets += 1;
    }
    assert!(resets > 10, "{resets}");
    let mut sessions: Vec<Session> = running
        .into_iter()
        .map(|running| {
            let (session, result) = running.end();
            result.expect("no error");
            session
        })
        .collect();
    watch.run("select lock_stats_reset()");
    for session in &mut sessions {
        use_domains(session, "d", 700);
    }
    assert_eq!(
        watch.text("select count(*) || ' ' || sum(grants) || ' ' || min(grants) || ' ' || max(grants) from lock_stats"),
        "700 4200 6 6"
    );
}

#[test]
fn a_crash_begins_anew() {
    let cluster = Cluster::new(&["restart_after_crash = on"]);
    let mut a = cluster.session("a");
    a.run("select named_lock('crash:k')");
    let mut watch = cluster.session("watch");
    assert_eq!(counts(&mut watch, "crash"), Counts { grants: 1, ..NONE });
    let before = watch.text("select max(stats_reset) from lock_stats");
    signal(a.pid, "KILL");
    until("the witness sees the crash", || watch.query("select 1").is_err());
    let mut back = None;
    until("the server is back", || {
        back = Session::open(cluster.config("watch")).ok();
        back.is_some()
    });
    let mut watch = back.expect("just opened");
    assert_eq!(rows(&mut watch), 0);
    watch.run("select named_lock('crash:k'), named_lock('crash:k')");
    assert_eq!(counts(&mut watch, "crash"), Counts { grants: 2, ..NONE });
    assert!(watch.flag(&format!("select min(stats_reset) > '{before}' from lock_stats")));
    cluster.restart();
    assert_eq!(rows(&mut cluster.session("watch")), 0);
}

#[test]
fn without_shared_memory_nothing_is_counted() {
    let cluster = Cluster::bare(&["dynamic_shared_memory_type = mmap"]);
    // Segments are files there: now nobody can make one.
    run(as_server_user("chmod").arg("555").arg(cluster.data().join("pg_dynshmem")));
    let mut a = cluster.session("a");
    a.run("create extension named_locks");
    a.run("select named_lock('none:k'), named_xact_lock('none:k')");
    take(&mut a, "none:k", "1 hour");
    let mut b = cluster.session("b");
    assert!(!b.flag("select named_lock('none:k', '20 ms')"));
    b.run("select lease_acquire('none:k', '1 hour', '20 ms')");
    assert_eq!(rows(&mut b), 0);
    b.run("select lock_stats_reset()");
    assert_eq!(rows(&mut a), 0);
}

/// There was some, and then there was no more: what has no room of its own is counted with the rest.
#[test]
fn when_shared_memory_runs_out() {
    let cluster = Cluster::new(&["dynamic_shared_memory_type = mmap"]);
    let mut watch = cluster.session("watch");
    let mut a = cluster.session("a");
    a.run("select named_lock('first:k')");
    run(as_server_user("chmod").arg("555").arg(cluster.data().join("pg_dynshmem")));
    use_domains(&mut a, "d", MOST);
    use_domains(&mut a, "d", MOST);
    let counted = rows(&mut watch);
    assert!((2..MOST).contains(&counted), "{counted} rows");
    assert_eq!(watch.int("select sum(grants) from lock_stats"), 2 * MOST + 1);
    assert_eq!(counts(&mut watch, "d1"), Counts { grants: 2, ..NONE });
    assert!(counts_where(&mut watch, "database is null").grants > 0);
    assert_eq!(a.notices().len(), 0);
    // What a reset has emptied serves again.
    watch.run("select lock_stats_reset()");
    use_domains(&mut a, "e", 100);
    assert_eq!(rows(&mut watch), 100);
    run(as_server_user("chmod").arg("755").arg(cluster.data().join("pg_dynshmem")));
}

#[test]
fn on_a_standby() {
    let primary = Cluster::new(&[]);
    primary.session("a").run("select named_lock('primary:k')");
    let standby = primary.standby(&["named_locks.allow_on_standby = on"]);
    primary.until_replayed_by(&standby);
    let mut watch = standby.session("watch");
    assert_eq!(rows(&mut watch), 0);
    watch.run("select named_lock('standby:k')");
    assert_eq!(counts(&mut watch, "standby"), Counts { grants: 1, ..NONE });
    watch.run("begin read only; select lock_stats_reset(); commit");
    assert_eq!(rows(&mut watch), 0);
}
