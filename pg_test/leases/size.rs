//! How much leases take: many of them, renewals, names that come and go, and old snapshots beside them.

use crate::pg_test::support::lease_queue::{give_back, left_no_trace, take, try_take};
use crate::pg_test::support::{Cluster, Running, Session, SqlError, let_pass, until};
use std::time::{Duration, Instant};

/// A server on which nothing is cleared away by itself, so that sizes can be told.
fn cluster(more: &[&str]) -> Cluster {
    let mut conf = vec!["autovacuum = off", "synchronous_commit = off"];
    conf.extend(more);
    let cluster = Cluster::new(&conf);
    cluster.session("procedures").run(
        // The names have the numbers from one to the other; `batch` of them in a transaction.
        "create procedure take_many(stem text, low int, high int, batch int, ttl interval) language plpgsql as $$ \
         begin \
           for i in low..high loop \
             if not (lease_acquire(stem || i, ttl)).acquired then raise 'refused'; end if; \
             if i % batch = 0 then commit; end if; \
           end loop; \
         end $$; \
         create procedure pairs(stem text, low int, high int) language plpgsql as $$ \
         declare t bigint; \
         begin \
           for i in low..high loop \
             t := (lease_acquire(stem || i, '1 hour')).token; \
             commit; \
             if not lease_release(stem || i, t) then raise 'not held'; end if; \
             commit; \
           end loop; \
         end $$; \
         create procedure renew_many(stem text, leases int, rounds int) language plpgsql as $$ \
         declare held bigint[]; \
         begin \
           for i in 1..leases loop \
             held[i] := (select token from lock_holders where kind = 'lease' and name = stem || i); \
             if held[i] is null then \
               held[i] := (lease_acquire(stem || i, '1 hour', payload => '{\"at\": 0}')).token; \
             end if; \
             commit; \
           end loop; \
           for round in 1..rounds loop \
             for i in 1..leases loop \
               perform lease_renew(stem || i, held[i], payload => case when round % 2 = 0 then \
                 jsonb_build_object('at', round % 10) end); \
               commit; \
             end loop; \
           end loop; \
         end $$",
    );
    cluster
}

/// The whole of the table: rows, index and what else belongs to it.
fn size(watch: &mut Session) -> i64 {
    watch.int("select pg_total_relation_size('_lease')")
}

#[test]
fn c43_a_hundred_thousand_leases_a_hundred_in_a_transaction() {
    let cluster = cluster(&[]);
    let mut watch = cluster.session("watch");
    let running: Vec<Running<Result<_, SqlError>>> = [(1, 50_000), (50_001, 100_000)]
        .into_iter()
        .map(|(low, high)| {
            cluster
                .session("taker")
                .spawn(move |session| session.query(&format!("call take_many('n', {low}, {high}, 100, '1 hour')")))
        })
        .collect();
    for taker in running {
        taker.end().1.expect("no trouble");
    }
    assert_eq!(watch.int("select count(*) from lock_holders where kind = 'lease' and state = 'held'"), 100_000);
    let mut b = cluster.session("b");
    for i in [1, 99, 100, 50_000, 100_000] {
        assert!(!try_take(&mut b, &format!("n{i}")));
        let token = b.int(&format!("select token from lock_holders where name = 'n{i}'"));
        b.run(&format!("select lease_renew('n{i}', {token})"));
        give_back(&mut b, &format!("n{i}"), token);
        assert!(try_take(&mut b, &format!("n{i}")));
    }
    left_no_trace(&mut watch, b.pid, "leases need no locks");
    b.run("create table still_works (i int)");
}

/// With the server's own room for locks. Each grant needs a lock to the end of its transaction.
#[test]
fn c43_too_many_grants_in_one_transaction() {
    let cluster = cluster(&[]);
    let mut watch = cluster.session("watch");
    let mut b = cluster.session("b");
    b.run("create table before (i int)");
    let grants = "select lease_acquire('n' || i, '1 hour') from generate_series(1, 100000) as i";
    for (what, before, passing) in [
        ("one statement", "", grants.to_owned()),
        ("in a block", "begin; select lease_acquire('first', '1 hour')", grants.to_owned()),
        ("in a savepoint", "begin; select lease_acquire('first', '1 hour'); savepoint s", grants.to_owned()),
        (
            "in a loop",
            "",
            "do $$ begin for i in 1..100000 loop perform lease_acquire('n' || i, '1 hour'); end loop; end $$".into(),
        ),
        ("bound ones", "", grants.replace("'1 hour'", "'1 hour', bound => true")),
    ] {
        let mut a = cluster.session("too many");
        a.run(before);
        let error = a.fails(&passing);
        assert!(["53200", "53400"].contains(&error.code.as_str()), "{what}: {error:#?}");
        assert!(!error.hint.is_empty() || !error.detail.is_empty(), "{what}: {error:#?}");
        // Before A does anything about it, others go on.
        b.run("create table beside (i int); drop table beside");
        let token = take(&mut b, "n1", "1 hour");
        give_back(&mut b, "n1", token);
        assert_eq!(watch.int("select count(*) from lock_holders where name like 'n%'"), 0, "{what}");
        if what == "in a savepoint" {
            a.run("rollback to s");
            a.run("commit");
            assert_eq!(watch.int("select lease_break('first')"), 1, "{what}: what was before it stands");
        } else {
            a.run("rollback");
        }
        assert_eq!(watch.int("select count(*) from lock_holders"), 0, "{what}");
        if !what.starts_with("bound") {
            left_no_trace(&mut watch, a.pid, what);
        }
        let token = take(&mut a, "n1", "1 hour");
        give_back(&mut a, "n1", token);
    }
}

/// A guard is a lock, too.
#[test]
fn c43_too_many_guards_in_one_transaction() {
    let cluster = cluster(&[]);
    let mut watch = cluster.session("watch");
    let mut a = cluster.session("guards");
    a.run("call take_many('n', 1, 20000, 100, '1 hour')");
    let guards =
        "select lease_guard(name, token) from (select name, token from lock_holders where kind = 'lease') as l";
    let error = a.fails(guards);
    assert!(["53200", "53400"].contains(&error.code.as_str()), "{error:#?}");
    left_no_trace(&mut watch, a.pid, "guards");
    assert_eq!(watch.int("select count(*) from lock_holders where kind = 'lease'"), 20_000, "they are all held");
    // A few hundred are no trouble.
    a.run("begin");
    a.run(&guards.replace("'lease')", "'lease' limit 500)"));
    a.run("commit");
    left_no_trace(&mut watch, a.pid, "guards");
}

/// Ends a session. What it has done to tables is counted then, by 14 a little later.
fn end(session: Session, watch: &mut Session) {
    let pid = session.pid;
    drop(session);
    watch.until_gone(pid);
}

#[test]
fn renewals_leave_the_table_its_size() {
    let cluster = cluster(&[]);
    let mut watch = cluster.session("watch");
    for (stem, leases, rounds) in [("one", 1, 20_000), ("hundred", 100, 200)] {
        let mut a = cluster.session("renews");
        // The first few rounds find the room that they need.
        a.run(&format!("call renew_many('{stem} ', {leases}, 20)"));
        end(a, &mut watch);
        let before = (watch.int("select pg_relation_size('_lease')"), size(&mut watch));
        watch.run("select pg_stat_reset_single_table_counters('_lease'::regclass)");
        let mut a = cluster.session("renews");
        a.run(&format!("call renew_many('{stem} ', {leases}, {rounds})"));
        end(a, &mut watch);
        let updates = leases * rounds;
        until(&format!("{stem}: {updates} updates, all in place"), || {
            watch.column("select n_tup_upd || ' ' || n_tup_hot_upd from pg_stat_user_tables where relname = '_lease'")
                == [format!("{updates} {updates}")]
        });
        let after = (watch.int("select pg_relation_size('_lease')"), size(&mut watch));
        assert_eq!(after, before, "{stem}");
        assert_eq!(watch.int(&format!("select count(*) from lock_holders where name like '{stem} %'")), leases);
    }
}

/// What else changes a row.
#[test]
fn requests_and_kept_releases_leave_a_small_table() {
    let cluster = cluster(&[]);
    let mut watch = cluster.session("watch");
    let mut a = cluster.session("changes");
    let token = take(&mut a, "k", "1 hour");
    for number in 0..1000 {
        a.run(&format!("select lease_request('k', 'reason {number}')"));
        a.run(&format!("select lease_renew('k', {token})"));
    }
    a.run(&format!("select lease_release('k', {token}, '1 hour')"));
    end(a, &mut watch);
    until("1001 updates", || watch.flag("select n_tup_upd >= 1001 from pg_stat_user_tables where relname = '_lease'"));
    // Nearly all in place: now and then the rows of requests, which come and go, fill the page.
    assert!(watch.flag("select n_tup_hot_upd >= 0.95 * n_tup_upd from pg_stat_user_tables where relname = '_lease'"));
    // A request is a row of its own, the one before it goes; the last one stays until somebody's grant comes by.
    assert!(watch.int("select count(*) from _lease") <= 2);
    let pages = watch.int("select pg_relation_size('_lease') / 8192");
    assert!(pages <= 100, "{pages} pages");
}

/// By several sessions at once, each with leases of its own, in loops that leave the server no moment of rest. A version
/// stays as long as any transaction that began before, so a few need a new page; that is left to autovacuum.
fn renewed_by_many_sessions(looks: bool) {
    let cluster = cluster(&["autovacuum = on", "autovacuum_naptime = '1s'"]);
    let mut watch = cluster.session("watch");
    let running: Vec<_> = (0..4)
        .map(|number| {
            cluster.session("renews").spawn(move |session| {
                session.query(&format!("call renew_many('{number} ', 10, 1000)")).expect("no error");
            })
        })
        .collect();
    while running.iter().any(|running| !running.finished()) {
        if looks {
            watch.run("select count(*) from lock_holders where kind = 'lease'");
        }
        let_pass(1);
    }
    running.into_iter().for_each(|running| end(running.end().0, &mut watch));
    until("all renewals are counted", || {
        watch.flag("select n_tup_upd >= 40000 from pg_stat_user_tables where relname = '_lease'")
    });
    let pages = watch.int("select pg_relation_size('_lease') / 8192");
    let in_place =
        watch.int("select n_tup_hot_upd * 100 / n_tup_upd from pg_stat_user_tables where relname = '_lease'");
    println!("looks {looks}: {pages} pages for 40 leases after 40,000 renewals, {in_place} of 100 in place");
    assert!(pages <= 1000, "{pages} pages for 40 leases");
    assert!(in_place >= 80, "{in_place} of 100 renewals in place");
}

#[test]
fn renewals_by_many_sessions_leave_a_small_table() {
    renewed_by_many_sessions(false);
}

#[test]
fn renewals_beside_many_looks_leave_a_small_table() {
    renewed_by_many_sessions(true);
}

/// The table is bounded by live leases, not by names ever used.
#[test]
fn a_million_names_leave_a_small_table() {
    const NAMES: i64 = 1_000_000;
    const SESSIONS: i64 = 4;
    let cluster =
        cluster(&["shared_buffers = '128MB'", "wal_level = minimal", "max_wal_senders = 0", "max_wal_size = '4GB'"]);
    let mut watch = cluster.session("watch");
    let begun = Instant::now();
    let share = NAMES / SESSIONS;
    let running: Vec<_> = (0..SESSIONS)
        .map(|number| {
            let (low, high) = (number * share + 1, (number + 1) * share);
            cluster.session("pairs").spawn(move |session| session.query(&format!("call pairs('n', {low}, {high})")))
        })
        .collect();
    while running.iter().any(|running| !running.finished()) {
        assert!(begun.elapsed() < Duration::from_secs(900), "too slow");
        let_pass(50);
    }
    for running in running {
        running.end().1.expect("no error");
    }
    let took = begun.elapsed();
    let before = size(&mut watch);
    watch.run("vacuum _lease");
    let after = size(&mut watch);
    println!("{NAMES} pairs in {took:?}; {before} bytes, {after} after VACUUM");
    assert_eq!(watch.int("select count(*) from _lease"), 0);
    assert!(after < 16 * 1024 * 1024, "{after} bytes after VACUUM, {before} before");
}

/// Leases that nobody releases are cleared away by later calls of other names.
#[test]
fn expired_rows_go_away_by_later_calls() {
    let cluster = cluster(&[]);
    let mut watch = cluster.session("watch");
    watch.run("call take_many('expired ', 1, 1000, 100, '100 ms')");
    let_pass(150);
    assert_eq!(watch.int("select count(*) from lock_holders"), 0);
    watch.run("call pairs('other ', 1, 500)");
    let left = watch.int("select count(*) from _lease");
    println!("{left} of 1,000 expired rows are left after 500 grants");
    assert!(left < 200, "{left} rows are left");
    watch.run("call pairs('more ', 1, 1000)");
    let left = watch.int("select count(*) from _lease");
    assert!(left < 50, "{left} rows are left after more");

    // And where every lease is left to expire, the table is as large as one that has those of the last while.
    for round in 0..20 {
        watch.run(&format!("call take_many('round {round} ', 1, 200, 10, '100 ms')"));
        let_pass(110);
    }
    let left = watch.int("select count(*) from _lease");
    println!("{left} of 4,000 expired rows are left");
    assert!(left < 1000, "{left} rows are left");
}

/// The same while autovacuum does its work and some leases live on, all over the table, so that it can't be cut off.
#[test]
fn names_that_come_and_go_beside_live_leases_leave_a_small_table() {
    let cluster = cluster(&["autovacuum = on", "autovacuum_naptime = '1s'", "shared_buffers = '128MB'"]);
    let mut watch = cluster.session("watch");
    let mut most = 0;
    for part in 0..4 {
        watch.run(&format!("call take_many('stays {part} ', 1, 10, 1, '1 hour')"));
        let running: Vec<_> = (0..2)
            .map(|number| {
                let (low, high) = (number * 25_000 + 1, (number + 1) * 25_000);
                cluster
                    .session("pairs")
                    .spawn(move |session| session.query(&format!("call pairs('n {part} ', {low}, {high})")))
            })
            .collect();
        while running.iter().any(|running| !running.finished()) {
            most = most.max(size(&mut watch));
            let_pass(100);
        }
        for running in running {
            running.end().1.expect("no error");
        }
    }
    println!("200,000 pairs: at most {most} bytes");
    assert_eq!(watch.int("select count(*) from lock_holders where name like 'stays %'"), 40);
    assert!(most < 32 * 1024 * 1024, "{most} bytes");
}

/// An old snapshot keeps all dead rows, but a call doesn't have to read those of other names. (Those of its own name it has
/// to, as any look into an index would.)
#[test]
fn an_old_snapshot_does_not_make_calls_slow_in_proportion() {
    let cluster = cluster(&[]);
    let mut old = cluster.session("old snapshot");
    let mut a = cluster.session("pairs");
    // The first calls of a session have caches to fill.
    a.run("call pairs('n', 1, 100)");
    old.run("begin isolation level repeatable read; select count(*) from pg_class");
    let early = a.time("call pairs('n', 1, 200)");
    a.run("call pairs('n', 1, 19800)");
    let late = a.time("call pairs('m', 1, 200)");
    assert!(late < early * 20, "200 pairs took {early:?} and, after 20,000 others, {late:?}");
}

trait Timed {
    fn time(&mut self, sql: &str) -> Duration;
}

impl Timed for Session {
    fn time(&mut self, sql: &str) -> Duration {
        let begun = Instant::now();
        self.run(sql);
        begun.elapsed()
    }
}
