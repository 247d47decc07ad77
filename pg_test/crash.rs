//! What crashes, restarts and killed sessions leave behind: nothing but prepared transactions.

use super::support::{Cluster, Form, Server, Session, as_server_user, signal, unique, until};
use std::time::{Duration, Instant};

/// A new session, as soon as the server lets one in again.
fn back_again(cluster: &Cluster) -> Session {
    let mut session = None;
    until("the server is back", || {
        session = Session::open(cluster.config("witness")).ok();
        session.is_some()
    });
    session.expect("just opened")
}

/// That the server knows of no lock and no waiter, and that locks do their job.
#[track_caller]
fn starts_from_nothing(cluster: &Cluster) {
    let mut a = cluster.session("afterwards a");
    let mut b = cluster.session("afterwards b");
    assert_eq!(a.int("select count(*) from pg_locks where locktype = 'advisory'"), 0);
    assert_eq!(a.int("select count(*) from lock_holders"), 0);
    assert_eq!(a.int("select count(*) from lock_waiters"), 0);
    let long = "x".repeat(1024);
    for name in ["k", "domain:k", &long] {
        assert!(a.flag(&format!("select named_lock('{name}')")));
        assert!(!b.flag(&format!("select named_lock('{name}', '0')")));
        assert_eq!(
            b.column(&format!("select kind || ' ' || holds || ' ' || pid from lock_holders where name = '{name}'")),
            [format!("session 1 {}", a.pid)]
        );
        let waiting = b.background(&format!("select named_lock('{name}')"));
        a.until_waiting(waiting.pid);
        assert_eq!(a.int(&format!("select count(*) from lock_waiters where name = '{name}'")), 1);
        assert_eq!(a.int(&format!("select named_unlock('{name}')")), 0);
        let result;
        (b, result) = waiting.end();
        assert_eq!(result.expect("no error")[0].get(0), Some("t"));
        assert_eq!(b.int(&format!("select named_unlock('{name}')")), 0);
    }
    assert_eq!(a.int("select count(*) from lock_holders"), 0);
}

/// Takes locks of every kind, a few of them with long names and a limit. Leaves the session in a transaction block, in
/// which what it sees of other sessions' activity stands still.
fn take_some(session: &mut Session, stem: &str) {
    session.run("begin");
    session.run(&format!(
        "select named_lock('{stem} session'), named_lock('{stem} session'), \
                named_lock('{stem} wide', cluster_wide => true), \
                named_lock('{stem}' || repeat('x', 900), hold_limit => '1 hour'), \
                named_lock('{stem} share', mode => 'share'), advisory_lock(hashtext('{stem}')), \
                named_xact_lock('{stem} transaction'), named_lock('{stem} both'), named_xact_lock('{stem} both')"
    ));
    session.run(&format!("select named_lock('{stem} many ' || i) from generate_series(1, 100) as i"));
}

#[test]
fn a_killed_holder_with_a_witness() {
    let cluster = Cluster::new(&["restart_after_crash = on"]);
    for round in 0..2 {
        let mut witness = cluster.session("witness");
        let mut holder = cluster.session("holder");
        take_some(&mut holder, "killed");
        let waiting = cluster.session("waiter").background("select named_lock('killed session')");
        witness.until_waiting(waiting.pid);
        assert!(witness.int("select count(*) from lock_holders") > 100);

        signal(holder.pid, "KILL");
        // Every other session is ended, for shared memory may be damaged.
        until("the witness sees the crash", || witness.query("select 1").is_err());
        waiting.end().1.expect_err("ended with the server");
        drop(back_again(&cluster));
        assert!(cluster.log().contains("was terminated by signal 9"), "round {round}");
        starts_from_nothing(&cluster);
    }
}

#[test]
fn a_killed_waiter_and_a_killed_looker() {
    let cluster = Cluster::new(&["restart_after_crash = on"]);
    let mut holder = cluster.session("holder");
    take_some(&mut holder, "a");
    let waiting = cluster.session("waiter").background("select named_lock('a session')");
    cluster.session("watch").until_waiting(waiting.pid);
    signal(waiting.pid, "KILL");
    waiting.end().1.expect_err("killed");
    until("the holder sees the crash", || holder.query("select 1").is_err());
    drop(back_again(&cluster));
    starts_from_nothing(&cluster);

    let mut holder = cluster.session("holder");
    take_some(&mut holder, "b");
    let looker = cluster.session("looker").background(
        "do $$ begin loop perform count(*) from lock_holders; perform count(*) from lock_waiters; end loop; end $$",
    );
    let mut watch = cluster.session("watch");
    until("it looks", || {
        watch.flag(&format!("select state = 'active' from pg_stat_activity where pid = {}", looker.pid))
    });
    signal(looker.pid, "KILL");
    looker.end().1.expect_err("killed");
    until("the holder sees the crash", || holder.query("select 1").is_err());
    drop(back_again(&cluster));
    starts_from_nothing(&cluster);
}

/// The first sessions of a new server that lock make the registry: one is killed at about that moment.
#[test]
fn killed_while_the_registry_is_made() {
    let cluster = Cluster::new(&["restart_after_crash = on"]);
    for delay in ["0", "0.005", "0.01", "0.02"] {
        cluster.restart();
        let sessions: Vec<Session> = (0..6).map(|_| cluster.session("first")).collect();
        let kill = format!("sleep {delay}; kill -KILL {}", sessions[0].pid);
        let mut killer = as_server_user("sh").args(["-c", &kill]).spawn().expect("start it");
        let running: Vec<_> = sessions
            .into_iter()
            .map(|session| session.background("select named_lock('first', '0'), pg_sleep(3600)"))
            .collect();
        assert!(killer.wait().expect("its end").success());
        for running in running {
            running.end().1.expect_err("ended by the crash");
        }
        drop(back_again(&cluster));
        starts_from_nothing(&cluster);
    }
}

#[test]
fn an_immediate_shutdown_and_a_restart() {
    let cluster = Cluster::new(&[]);
    for immediate in [true, false] {
        let mut holder = cluster.session("holder");
        take_some(&mut holder, "a");
        holder.run("select named_lock('waited for')");
        let waiting = cluster.session("waiter").background("select named_lock('waited for')");
        cluster.session("watch").until_waiting(waiting.pid);
        if immediate {
            cluster.stop_immediate();
        } else {
            cluster.stop();
        }
        waiting.end().1.expect_err("ended with the server");
        cluster.start();
        starts_from_nothing(&cluster);
    }
}

/// Of all that was held only what was prepared is left, and that without its name.
#[test]
fn a_crash_leaves_prepared_transactions_locks() {
    let cluster = Cluster::new(&["restart_after_crash = on"]);
    let mut holder = cluster.session("holder");
    holder.run("begin; select named_xact_lock('prepared'); prepare transaction 'gid'");
    take_some(&mut holder, "a");
    signal(holder.pid, "KILL");
    until("it is gone", || holder.query("select 1").is_err());
    let mut witness = back_again(&cluster);
    assert_eq!(
        witness.column("select concat_ws(' ', kind, coalesce(name, '-'), mode, gid) from lock_holders"),
        ["transaction - exclusive gid"]
    );
    assert!(!witness.flag("select named_lock('prepared', '0')"));
    witness.run("commit prepared 'gid'");
    drop(witness);
    starts_from_nothing(&cluster);
}

/// FATAL is no crash: the others go on, and what the session had is free.
#[test]
fn terminated_while_holding_and_while_waiting() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for form in Form::all() {
        let lock = form.lock(&unique("fatal"));
        let mut holder = server.session("holder");
        if !form.call {
            holder.run("begin");
        }
        holder.run(&lock.acquire(Some("0")));
        let mut bystander = server.session("bystander");
        take_some(&mut bystander, &unique("fatal"));
        let first = server.session("first").background(&lock.acquire(None));
        watch.until_waiting(first.pid);
        let second = server.session("second").background(&lock.acquire(None));
        watch.until_waiting(second.pid);

        watch.run(&format!("select pg_terminate_backend({})", first.pid));
        first.end().1.expect_err("terminated").is_end_of_session();
        watch.run(&format!("select pg_terminate_backend({})", holder.pid));
        let (second, result) = second.end();
        result.unwrap_or_else(|error| panic!("{form:?}: {error:#?}"));
        watch.until_gone(holder.pid);
        let expected = if form.is_session() { vec![second.pid.to_string()] } else { vec![] };
        assert_eq!(
            watch.column(&format!("select pid from lock_holders where {}", lock.target.in_lock_holders())),
            expected,
            "{form:?}"
        );
        bystander.run("commit");
        assert!(bystander.int("select named_unlock_all()") > 100, "{form:?}");
        drop(second);
    }
}

#[test]
fn terminated_with_a_thousand_locks() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let stem = unique("fatal");
    for end in ["terminate", "close", "in a block", "in a failed block"] {
        let mut holder = server.session("holder");
        holder.run(&format!(
            "select count(*) from generate_series(1, 900) as i where named_lock('{stem} ' || i || repeat('y', i))"
        ));
        let shown = format!("select count(*) from lock_holders where name like '{stem} %'");
        assert_eq!(watch.int(&shown), 900);
        let pid = holder.pid;
        match end {
            "in a block" => drop(holder.run(&format!("begin; select named_xact_lock('{stem} x')"))),
            "in a failed block" => drop(holder.query("begin; select 1/0")),
            _ => {}
        }
        if end == "terminate" {
            watch.run(&format!("select pg_terminate_backend({pid})"));
        } else {
            drop(holder);
        }
        watch.until_gone(pid);
        assert_eq!(watch.int(&shown), 0, "{end}");
        assert_eq!(watch.locks_of(pid), 0, "{end}");
    }
}

/// Every place for a session is used again and again, each time by another one with other locks.
#[test]
fn sessions_come_and_go_to_the_last_place() {
    let cluster = Cluster::new(&["max_connections = 16", "superuser_reserved_connections = 0"]);
    for round in 0..8 {
        // As many as there is room for; ended ones of the last round may still take a moment.
        let mut sessions: Vec<Session> = Vec::new();
        until("every place is taken", || {
            while let Ok(session) = Session::open(cluster.config("crowd")) {
                sessions.push(session);
            }
            sessions.len() == 16
        });
        let mut expected = Vec::new();
        for (number, session) in sessions.iter_mut().enumerate() {
            let locks = 1 + (number + round) % 20;
            session.run(&format!("select named_lock('{round} {number} ' || i) from generate_series(1, {locks}) as i"));
            expected.push(format!("{} {locks} {round} {number}", session.pid));
        }
        expected.sort();
        let shown = "select concat_ws(' ', pid, count(*), \
                       case when count(distinct left(name, -length(split_part(name, ' ', 3)) - 1)) = 1 \
                            then min(left(name, -length(split_part(name, ' ', 3)) - 1)) end) \
                       from lock_holders group by pid";
        let mut rows = sessions[round].column(shown);
        rows.sort();
        assert_eq!(rows, expected, "round {round}");
        // Half of them go, one by one, and their locks with them.
        let (mut watch, rest) = (sessions.remove(0), sessions.split_off(8));
        let gone: Vec<i32> = sessions.iter().map(|session| session.pid).collect();
        drop(sessions);
        for pid in gone {
            watch.until_gone(pid);
            assert_eq!(watch.int(&format!("select count(*) from lock_holders where pid = {pid}")), 0);
        }
        assert_eq!(watch.int("select count(distinct pid) from lock_holders"), 1 + rest.len() as i64);
    }
}

#[test]
fn killed_in_the_middle_of_heavy_traffic() {
    let cluster = Cluster::new(&["restart_after_crash = on"]);
    for round in 0..5 {
        let workers: Vec<_> = (0..6)
            .map(|worker| {
                cluster.session("traffic").spawn(move |session| {
                    let mut done = 0;
                    let long = "z".repeat(700);
                    for turn in 0.. {
                        let own = worker * 1_000_000 + turn;
                        let result = session.query(&format!(
                            "begin; \
                             select named_lock('own {own}'), named_lock('shared ' || {turn} % 5, '5 ms'), \
                                    named_xact_lock('x {own} {long}'), named_lock('many {own} ' || i) \
                               from generate_series(1, 20) as i; \
                             savepoint s; select named_xact_lock('sub {own}'); rollback to s; commit; \
                             select named_unlock_all()"
                        ));
                        match result {
                            Ok(_) => done += 1,
                            Err(_) => return done,
                        }
                    }
                    done
                })
            })
            .collect();
        // One of them looks all the time.
        let looker = cluster.session("looker").spawn(|session| {
            let mut looks = 0;
            while session.query("select count(name), count(*) from lock_holders; select lock_graph()").is_ok() {
                looks += 1;
            }
            looks
        });
        let begun = Instant::now();
        std::thread::sleep(Duration::from_millis(250 + 70 * round));
        let victim = workers[round as usize % workers.len()].pid;
        signal(victim, "KILL");
        let done: u32 = workers.into_iter().map(|worker| worker.end().1).sum();
        let looks = looker.end().1;
        assert!(done > 0 && looks > 0, "round {round}: {done} turns and {looks} looks in {:?}", begun.elapsed());
        drop(back_again(&cluster));
        starts_from_nothing(&cluster);
    }
}
