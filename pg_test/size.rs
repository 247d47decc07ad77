//! Case C43: many locks, the limits on them, and what a long session leaves in memory.

use super::support::{Cluster, Form, Reply, Server, Session, Wire, as_server_user, run, unique, unique_ident};

/// How many different locks a session may hold unless it is set otherwise.
const DEFAULT_LIMIT: i64 = 1_000;

/// That a session holds so many locks, by the lock manager and by the view.
#[track_caller]
fn holds(watch: &mut Session, pid: i32, count: i64) {
    assert_eq!(watch.locks_of(pid), count, "in the lock manager");
    assert_eq!(watch.int(&format!("select count(*) from lock_holders where pid = {pid}")), count, "in the view");
}

#[test]
fn c43_too_many_in_one_statement_are_an_error_and_nothing_is_held() {
    let cluster = Cluster::new(&[]);
    let mut watch = cluster.session("watch");
    for (what, call) in [
        ("session", "named_lock('n' || i)"),
        ("strict", "named_lock_strict('n' || i)"),
        ("try", "named_lock('n' || i, '0')"),
        ("with a timeout", "named_lock('n' || i, '1 s')"),
        ("cluster-wide", "named_lock('n' || i, cluster_wide => true)"),
        ("share", "named_lock('n' || i, mode => 'share')"),
        ("with a limit", "named_lock('n' || i, hold_limit => '1 hour')"),
        ("transaction", "named_xact_lock('n' || i)"),
        ("both", "named_lock('s' || i), named_xact_lock('t' || i)"),
        ("twice each", "named_lock('n' || i), named_lock('n' || i)"),
        ("long names", "named_lock(repeat('x', 1000) || i)"),
        ("bigint", "advisory_lock(i)"),
        ("bigint transaction", "advisory_xact_lock(i)"),
        ("pair", "advisory_lock(i, i)"),
    ] {
        let mut a = cluster.session("c43");
        let statement = format!("select {call} from generate_series(1, 100000) as i");
        a.fails(&statement).is("53400").detail_has("max_locks_per_session");
        holds(&mut watch, a.pid, 0);
        // B can still create a table; and A goes on.
        cluster.session("b").run("create table b (i int primary key); insert into b values (1); drop table b");
        a.fails(&statement).is("53400");
        a.run(&format!("select {call} from generate_series(1, 100) as i"));
        a.run("select named_unlock_all(), pg_advisory_unlock_all()");
        holds(&mut watch, a.pid, 0);
        a.run("begin; savepoint s");
        a.fails(&statement).is("53400");
        a.run("rollback to s");
        holds(&mut watch, a.pid, 0);
        a.run(&format!("select {call} from generate_series(1, 100) as i"));
        a.run("rollback; select named_unlock_all(), pg_advisory_unlock_all()");
        holds(&mut watch, a.pid, 0);
        assert!(a.flag("select named_lock('one')"), "{what}");
    }
}

#[test]
fn c43_another_error_leaves_what_the_earlier_rows_took() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let k = unique("c43");
    for (what, fails, code) in [
        ("an error of the statement", "1 / (50 - i)", "22012"),
        ("a timeout", "(named_lock_strict('$k taken', '0') is null)::int", "55P03"),
        ("a bad name", "named_lock('')::int", "22023"),
        ("a lock not held", "named_unlock('$k no such')", "55000"),
        ("a bad timeout", "named_lock('$k x', '-1 s')::int", "22023"),
    ] {
        let mut other = server.session("other");
        other.run(&format!("select named_lock('{k} taken')"));
        for block in ["select 1", "begin"] {
            let mut a = server.session("c43");
            a.run(block);
            a.fails(&format!(
                "select case when i = 50 then {} else named_lock('{k} ' || i)::int end from generate_series(1, 100) as i",
                fails.replace("$k", &k)
            ))
            .is(code);
            holds(&mut watch, a.pid, 49);
            a.run("rollback");
            assert_eq!(a.int("select named_unlock_all()"), 49, "{what}");
        }
    }
}

#[test]
fn c43_what_earlier_statements_took_stays() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let pass = "select named_lock('$k ' || i) from generate_series(1, 100000) as i";
    for (what, before, passing, kept) in [
        ("an earlier statement", "select named_lock('$k keep')", pass, 1),
        (
            "a thousandth",
            "select named_lock('$k keep' || i) from generate_series(1, 1000) as i",
            "select named_lock('$k')",
            1000,
        ),
        ("the same names", "select named_lock('$k ' || i) from generate_series(1, 5) as i", pass, 5),
        (
            "in one string",
            "select 1",
            "select named_lock('$k keep'); select named_lock('$k ' || i) from generate_series(1, 100000) as i",
            1,
        ),
        (
            "twice in one string",
            "select 1",
            "select named_lock('$k keep'); select named_lock('$k keep 2'), named_lock('$k keep'); \
             select named_lock('$k ' || i) from generate_series(1, 100000) as i",
            2,
        ),
        ("in one block", "begin; select named_lock('$k keep')", pass, 1),
        ("in a savepoint", "begin; select named_lock('$k keep'); savepoint s; select named_lock('$k keep 2')", pass, 2),
        ("a call", "call named_lock_wait('$k keep')", pass, 1),
        (
            "by a function with a loop, in one string",
            "select 1",
            "select named_lock('$k keep'); \
             do $$ declare r record; begin \
               perform named_lock('$k mine'); \
               for r in select named_lock('$k ' || i) from generate_series(1, 100000) as i loop end loop; \
             end $$",
            1,
        ),
        (
            "by a function with a cursor, in one string",
            "select 1",
            "select named_lock('$k keep'); \
             do $$ declare \
               r record; \
               c cursor for select named_lock('$k ' || i) from generate_series(1, 100000) as i; \
             begin \
               perform named_lock('$k mine'); \
               open c; loop fetch c into r; exit when not found; end loop; \
             end $$",
            1,
        ),
        (
            "a DO with dynamic SQL",
            "select named_lock('$k keep')",
            "do $$ begin for i in 1..2000 loop execute format('select named_lock(%L)', '$k ' || i); end loop; end $$",
            1,
        ),
        (
            "a cursor's earlier fetch",
            "begin; declare c cursor for select named_lock('$k ' || i) from generate_series(1, 100000) as i; \
             fetch 7 from c",
            "fetch all from c",
            7,
        ),
        (
            "another cursor's fetch in one string",
            "begin; declare one cursor for select named_lock('$k one ' || i) from generate_series(1, 9) as i; \
             declare two cursor for select named_lock('$k ' || i) from generate_series(1, 100000) as i",
            "fetch 3 from one; fetch all from two",
            3,
        ),
        (
            "a prepared statement",
            "select named_lock('$k keep'); \
             prepare p as select named_lock('$k ' || i) from generate_series(1, 100000) as i",
            "execute p",
            1,
        ),
    ] {
        let mut a = server.session("c43");
        let k = unique("c43");
        a.run(&before.replace("$k", &k));
        a.fails(&passing.replace("$k", &k)).is("53400");
        let names = watch.column(&format!("select name from lock_holders where pid = {}", a.pid));
        assert_eq!(names.len(), kept, "{what}: {names:?}");
        let due = |name: &String| what == "the same names" || what.contains("fetch") || name.contains("keep");
        assert!(names.iter().all(due), "{what}: {names:?}");
        assert_eq!(watch.locks_of(a.pid), kept as i64, "{what}");
        assert_eq!(
            watch.int(&format!("select coalesce(max(holds), 0) from lock_holders where pid = {}", a.pid)),
            if what == "twice in one string" { 2 } else { 1 },
            "{what}: what it took of a name held before is given back"
        );
        a.run("rollback");
        a.run("select named_unlock_all()");
        holds(&mut watch, a.pid, 0);
    }
}

/// By the extended protocol each Bind and Execute is a statement of its own.
#[test]
fn c43_statements_of_the_extended_protocol() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let mut a = server.session("c43");
    let k = unique("c43");
    let one = a.client.prepare("select named_lock($1)").expect("prepare");
    for name in ["keep 1", "keep 2"] {
        a.client.query(&one, &[&format!("{k} {name}")]).expect("lock");
    }
    let many =
        a.client.prepare("select named_lock($1::text || i) from generate_series(1, 100000) as i").expect("prepare");
    for _ in 0..2 {
        let error = a.client.query(&many, &[&k]).expect_err("too many");
        assert_eq!(error.code().map(|code| code.code().to_owned()).as_deref(), Some("53400"));
        holds(&mut watch, a.pid, 2);
    }
}

/// A driver that fetches rows in parts sends one Execute after the other: still the same statement.
#[test]
fn c43_a_statement_whose_rows_are_fetched_in_parts() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for portal in ["", "named"] {
        let mut wire = Wire::open(server);
        let k = unique("c43");
        wire.query(&format!("begin; select named_lock('{k} keep')")).replies();
        wire.portal(portal, &format!("select named_lock('{k} ' || i) from generate_series(1, 100000) as i"));
        for _ in 0..2 {
            wire.execute(portal, 7).flush().send();
            while wire.reply() != Reply::Suspended {}
        }
        holds(&mut watch, wire.pid, 15);
        let replies = wire.execute(portal, 0).sync().replies();
        assert!(replies.contains(&Reply::Error("53400".into())), "{:?}", replies.last());
        holds(&mut watch, wire.pid, 1);
    }
}

#[test]
fn c43_transaction_locks_of_earlier_statements_stay_to_the_end_of_the_transaction() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let mut a = server.session("c43");
    let k = unique("c43");
    let pass = format!("select named_lock('{k} ' || i) from generate_series(1, 100000) as i");
    a.run(&format!("begin; select named_xact_lock('{k} x'), named_lock('{k} s'); savepoint s"));
    a.fails(&pass).is("53400");
    a.run("rollback to s");
    assert_eq!(
        watch.column(&format!("select kind || ' ' || name from lock_holders where pid = {} order by 1", a.pid)),
        [format!("session {k} s"), format!("transaction {k} x")]
    );
    // Caught in the transaction that goes on.
    a.run(&format!(
        "do $$ begin perform named_lock('{k} ' || i) from generate_series(1, 100000) as i; raise 'none'; \
         exception when configuration_limit_exceeded then perform named_xact_lock('{k} y'); end $$"
    ));
    assert_eq!(
        watch.column(&format!("select kind || ' ' || name from lock_holders where pid = {} order by 1", a.pid)),
        [format!("session {k} s"), format!("transaction {k} x"), format!("transaction {k} y")]
    );
    a.run("commit");
    holds(&mut watch, a.pid, 1);
}

#[test]
fn c43_different_locks_are_counted_both_kinds_together() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let mut a = server.session("c43");
    let k = unique("c43");
    a.run(&format!(
        "begin; \
         select named_lock('{k} s' || i) from generate_series(1, 600) as i; \
         select named_xact_lock('{k} t' || i) from generate_series(1, 390) as i; \
         select advisory_lock(43000 + i), named_lock('{k} w' || i, cluster_wide => true) \
           from generate_series(1, 5) as i; \
         savepoint s"
    ));
    holds(&mut watch, a.pid, DEFAULT_LIMIT);
    // Once more of the same is no other lock.
    a.run(&format!(
        "select named_lock('{k} s1'), named_xact_lock('{k} t1'), named_lock('{k} s2', mode => 'share'), \
                advisory_lock(43001); \
         select named_lock_convert('{k} s3', 'share')"
    ));
    for call in [
        "named_lock('$k new')",
        "named_lock('$k new', '0')",
        "named_lock_strict('$k new')",
        "named_xact_lock('$k new')",
        "named_lock('$k s1', cluster_wide => true)",
        "advisory_lock(43100)",
        "advisory_lock(43, 43)",
        "advisory_xact_lock(43100)",
    ] {
        a.fails(&format!("select {}", call.replace("$k", &k))).is("53400");
        a.run("rollback to s");
        assert_eq!(
            watch.int(&format!(
                "select count(distinct (classid, objid, objsubid)) from lock_holders where pid = {}",
                a.pid
            )),
            DEFAULT_LIMIT
        );
    }
    // What is given back makes room, one for one.
    a.run(&format!("select named_unlock('{k} s600'); select named_lock('{k} new')"));
    a.fails(&format!("select named_lock('{k} newer')")).is("53400");
    a.run("rollback");
    a.run(&format!("select named_lock('{k} newer' || i) from generate_series(1, 300) as i"));
    // Native locks taken natively don't count.
    a.run("select pg_advisory_lock(44000 + i) from generate_series(1, 500) as i");
    a.run(&format!("select named_lock('{k} one more')"));
}

#[test]
fn c43_what_is_given_back_behind_our_back_makes_room() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let k = unique("c43");
    for give in ["discard all", "select pg_advisory_unlock_all()", "begin; select pg_advisory_unlock_all()"] {
        let mut a = server.session("c43");
        for round in 1..=3 {
            a.run(&format!("select named_lock('{k} {round} ' || i) from generate_series(1, 1000) as i"));
            holds(&mut watch, a.pid, 1000);
            if round < 3 {
                a.run(give);
            }
        }
        assert_eq!(a.int("select named_unlock_all()"), 1000, "{give}");
    }
    // Native twins by the native function.
    let mut a = server.session("c43");
    for round in 1..=3 {
        a.run(&format!("select advisory_lock({round}00000 + i) from generate_series(1, 1000) as i"));
        a.run(&format!("select pg_advisory_unlock({round}00000 + i) from generate_series(1, 1000) as i"));
        holds(&mut watch, a.pid, 0);
    }
}

#[test]
fn c43_the_setting() {
    let server = Server::shared();
    let mut admin = server.session("admin");
    let k = unique("c43");
    let role = server.new_role("c43");
    let taken = |session: &mut Session| {
        let statement =
            |count: i64| format!("select count(*) from generate_series(1, {count}) as i where named_lock('{k} ' || i)");
        (1..=8).take_while(|&count| session.query(&statement(count)).is_ok()).last().unwrap_or(0)
    };
    admin.run(&format!("alter role {role} set named_locks.max_locks_per_session = 3"));
    assert_eq!(taken(&mut server.session_as(&role, "c43")), 3);

    // A client's own value, given before the library is loaded, is not the administrator's.
    let mut config = server.config("c43 options");
    config.user(&role).options("-c named_locks.max_locks_per_session=5");
    assert_eq!(taken(&mut Session::open(config).expect("a session")), 3);
    for set in [
        "set named_locks.max_locks_per_session = 5",
        "select set_config('named_locks.max_locks_per_session', '5', false)",
        "begin; set local named_locks.max_locks_per_session = 5",
    ] {
        let mut session = server.session_as(&role, "c43 set");
        if let Err(refusal) = session.query(set) {
            refusal.is("42501");
            session.run("rollback");
        }
        assert_eq!(taken(&mut session), 3, "{set}");
        session.run("rollback");
        session.run("select named_unlock_all()");
        session.fails("set named_locks.max_locks_per_session = 5").is("42501");
        session.run("reset all");
        session.run("discard all");
        assert_eq!(taken(&mut session), 3, "{set}, then discard all");
    }
    // By database, and for a role in a database; the nearer one counts.
    let database = server.new_database("c43", "UTF8");
    admin.run(&format!("alter role {role} reset all"));
    admin.run(&format!("alter database {} set named_locks.max_locks_per_session = 4", database.dbname));
    assert_eq!(taken(&mut database.session_as(&role, "c43")), 4);
    let mut config = database.config("c43 options");
    config.user(&role).options("-c named_locks.max_locks_per_session=7");
    assert_eq!(taken(&mut Session::open(config).expect("a session")), 4);
    admin.run(&format!("alter role {role} in database {} set named_locks.max_locks_per_session = 2", database.dbname));
    assert_eq!(taken(&mut database.session_as(&role, "c43")), 2);

    // A superuser may, before and after, by options too.
    let mut session = server.session("c43");
    session.run("set named_locks.max_locks_per_session = 6");
    assert_eq!(taken(&mut session), 6);
    session.run("select named_unlock_all(); set named_locks.max_locks_per_session = 7");
    assert_eq!(taken(&mut session), 7);
    let mut config = server.config("c43 options");
    config.options("-c named_locks.max_locks_per_session=5");
    session.run("select named_unlock_all()");
    assert_eq!(taken(&mut Session::open(config).expect("a session")), 5);
}

/// A lower limit than what is held refuses the next one and takes nothing away.
#[test]
fn c43_the_setting_made_lower() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let mut a = server.session("c43");
    let k = unique("c43");
    a.run(&format!("select named_lock('{k} ' || i) from generate_series(1, 20) as i"));
    a.run("set named_locks.max_locks_per_session = 5");
    a.fails(&format!("select named_lock('{k} new')")).is("53400");
    holds(&mut watch, a.pid, 20);
    a.run(&format!("select named_lock('{k} 1')"));
    a.run(&format!("select named_unlock('{k} ' || i) from generate_series(2, 17) as i"));
    assert!(a.flag(&format!("select named_lock('{k} new')")));
    assert_eq!(a.int("select named_unlock_all()"), 6);
}

/// The same when the server has no lock to spare for the view's tables.
#[track_caller]
fn holds_in_full(watch: &mut Session, pid: i32, count: i64) {
    assert_eq!(watch.locks_of(pid), count, "in the lock manager");
    assert_eq!(watch.int(&format!("select count(*) from _lock_holders() where pid = {pid}")), count, "in the view");
}

/// The server's own lock table is full: an error of the call that would pass it, and of no other.
#[test]
fn the_servers_lock_memory_runs_out() {
    let cluster = Cluster::new(&["max_locks_per_transaction = 10", "max_connections = 20", "autovacuum = off"]);
    let mut watch = cluster.session("watch");
    watch.run("select count(*) from pg_locks; select count(*) from lock_holders");
    let mut b = cluster.session("b");
    b.run("select named_lock('b'), named_lock('b share', mode => 'share')");
    for function in ["named_lock", "named_xact_lock", "advisory_lock"] {
        let mut a = cluster.session("a");
        a.run("set named_locks.max_locks_per_session = 400000");
        a.run("select named_lock('a twice')");
        let argument = if function == "advisory_lock" { "i" } else { "'n' || i" };
        a.run("begin; savepoint s");
        a.fails(&format!("select {function}({argument}) from generate_series(1, 400000) as i")).is("53200");
        if function == "named_xact_lock" {
            a.run("rollback to s");
            holds_in_full(&mut watch, a.pid, 1);
        } else {
            // The earlier rows' session locks stay, and the view knows them to the last.
            let held = watch.locks_of(a.pid);
            assert!(held > 500, "{held}");
            holds_in_full(&mut watch, a.pid, held);
            // Others are refused as long as it lasts, with nothing held, and what they had is as it was.
            b.fails("select named_lock('new')").is("53200");
            b.fails("call named_lock_wait('new')").is("53200");
            holds_in_full(&mut watch, b.pid, 2);
            // Asking for a lock that is there takes less room, and there may be that much.
            for call in ["named_lock('a twice', '0')", "named_xact_lock('a twice', '10 ms')"] {
                match b.query(&format!("select {call}")) {
                    Ok(rows) => assert_eq!(rows[0].get(0), Some("f"), "{call}"),
                    Err(error) => assert_eq!(error.code, "53200", "{call}"),
                }
            }
            holds_in_full(&mut watch, b.pid, 2);
            assert!(b.flag("select named_lock('b')"));
            assert_eq!(b.int("select named_unlock('b')"), 1);
            a.run("rollback");
            // In the holder itself the next one fails as well, and counts stay right.
            a.fails("select named_lock('new')").is("53200");
            a.run("begin");
            if a.query("select named_xact_lock('a twice')").is_err() {
                a.run("rollback");
                assert_eq!(a.int("select named_lock_held('a twice')"), 1);
            }
            a.run("rollback");
            holds_in_full(&mut watch, a.pid, held);
            a.run("select named_unlock_all(), pg_advisory_unlock_all()");
        }
        a.run("rollback");
        a.run("select named_unlock_all()");
        holds_in_full(&mut watch, a.pid, 0);
        assert!(b.flag("select named_lock('new')"));
        assert_eq!(b.int("select named_unlock('new')"), 0);
        cluster.session("c").run("create table c (i int primary key); drop table c");
    }
    assert_eq!(b.int("select named_unlock_all()"), 2);
}

/// What a session's process has in memory: by the server's own account, and by the operating system's.
#[derive(Debug)]
struct Memory {
    contexts: i64,
    resident: i64,
}

fn memory(session: &mut Session) -> Memory {
    let statm = std::fs::read_to_string(format!("/proc/{}/statm", session.pid)).expect("a process");
    let mut pages = statm.split(' ').skip(1).map(|pages| pages.parse::<i64>().expect("a number"));
    // Shared buffers count as the process's once it has touched them: what is its own is the difference.
    let own = pages.next().expect("resident") - pages.next().expect("shared");
    Memory { contexts: session.int("select sum(total_bytes) from pg_backend_memory_contexts"), resident: own * 4096 }
}

/// That a piece of work, done again and again, leaves no more memory in use than it did after two rounds: with some C
/// libraries' allocators the second one takes more than the first, for native locks too, and no later one does.
#[track_caller]
fn leaves_no_memory(session: &mut Session, what: &str, allowed: i64, mut work: impl FnMut(&mut Session)) {
    work(session);
    work(session);
    let before = memory(session);
    work(session);
    let after = memory(session);
    let growth = (after.contexts - before.contexts).max(after.resident - before.resident);
    println!("{what}: {growth} bytes");
    assert!(growth < allowed, "{what}: {growth} bytes more: {before:?} {after:?}");
}

/// A server on which nothing else happens: what others hold takes memory in whoever looks.
fn undisturbed() -> Cluster {
    Cluster::new(&["autovacuum = off"])
}

#[test]
fn no_leak_over_a_million_pairs() {
    let server = undisturbed();
    let mut watch = server.session("watch");
    let mut a = server.session("leak");
    let k = unique("leak");
    for (what, pair) in [
        ("by a name", "named_lock('$k'), named_unlock('$k')"),
        ("by many names", "named_lock('$k ' || i), named_unlock('$k ' || i)"),
        ("long names", "named_lock(repeat('x', 1000) || i % 100), named_unlock(repeat('x', 1000) || i % 100)"),
        ("with a limit", "named_lock('$k', hold_limit => '1 hour'), named_unlock('$k')"),
        (
            "in share mode, cluster-wide",
            "named_lock('$k', '0', 'share', cluster_wide => true), named_unlock('$k', cluster_wide => true)",
        ),
    ] {
        // A round of 100,000, twice: a million pairs in all.
        leaves_no_memory(&mut a, what, 1_000_000, |a| {
            let pair = pair.replace("$k", &k);
            assert_eq!(
                a.int(&format!("select count(*) from (select {pair} from generate_series(1, 100000) as i) as pairs")),
                100_000
            );
        });
        holds(&mut watch, a.pid, 0);
    }
}

#[test]
fn no_leak_over_many_transactions() {
    let server = undisturbed();
    let mut watch = server.session("watch");
    let mut a = server.session("leak");
    let k = unique("leak");
    for (what, body) in [
        ("commit", "perform named_xact_lock('$k ' || i), named_xact_lock('$k'); commit;"),
        ("rollback", "perform named_xact_lock('$k ' || i), named_lock('$k'); rollback; perform named_unlock('$k');"),
        (
            "subtransactions",
            "begin perform named_xact_lock('$k ' || i % 10); raise 'x'; exception when raise_exception then null; end;",
        ),
        ("call", "call named_lock_wait('$k', acquired => got); perform named_unlock('$k'); commit;"),
    ] {
        leaves_no_memory(&mut a, what, 1_000_000, |a| {
            a.run(&format!(
                "do $$ declare got boolean; begin for i in 1..20000 loop {} end loop; end $$",
                body.replace("$k", &k)
            ));
        });
        holds(&mut watch, a.pid, 0);
    }
}

#[test]
fn no_leak_over_ten_thousand_timeouts() {
    let server = undisturbed();
    let mut watch = server.session("watch");
    let mut holder = server.session("holder");
    let mut a = server.session("leak");
    let k = unique("leak");
    holder.run(&format!("select named_lock('{k}')"));
    for (what, call, rounds) in [
        ("timeouts", "named_lock('$k', '1 ms')", 4000),
        ("transaction form", "named_xact_lock('$k', '1 ms')", 1000),
        ("tries", "named_lock('$k', '0')", 50_000),
    ] {
        leaves_no_memory(&mut a, what, 1_000_000, |a| {
            let call = call.replace("$k", &k);
            assert_eq!(a.int(&format!("select count(*) from generate_series(1, {rounds}) where not {call}")), rounds);
        });
        holds(&mut watch, a.pid, 0);
    }
    assert_eq!(watch.int(&format!("select count(*) from lock_waiters where name = '{k}'")), 0);
}

/// Each error, thousands of times: what Rust had allocated must be gone before the error leaves it.
#[test]
fn no_leak_over_errors() {
    let server = undisturbed();
    let mut watch = server.session("watch");
    let mut holder = server.session("holder");
    let mut a = server.session("leak");
    let k = unique("leak");
    holder.run(&format!("select named_lock('{k}')"));
    a.run("set named_locks.max_locks_per_session = 1");
    for (code, call) in [
        ("55000", "named_unlock('$k')"),
        ("55000", "named_unlock('$k' || repeat('x', 900))"),
        ("55000", "named_lock_convert('$k', 'share')"),
        ("55000", "named_lock_extend('$k', null)"),
        ("55P03", "named_lock_strict('$k', '0')"),
        ("55P03", "named_xact_lock_strict('$k', '0')"),
        ("22001", "named_lock(repeat('x', 1025))"),
        ("22023", "named_lock('')"),
        ("22023", "named_lock('$k', '-1 s')"),
        ("22004", "named_lock(null)"),
        ("22023", "advisory_lock(1, mode => 'intent share')"),
        ("53400", "named_lock('$k' || repeat('y', 900)), named_lock('$k' || repeat('z', 900))"),
    ] {
        leaves_no_memory(&mut a, call, 400_000, |a| {
            a.run(&format!(
                "do $$ begin for i in 1..5000 loop \
                   begin perform {}; raise 'no error'; \
                   exception when sqlstate '{code}' then null; end; \
                 end loop; end $$",
                call.replace("$k", &k)
            ));
        });
        holds(&mut watch, a.pid, 0);
    }
}

#[test]
fn no_leak_of_the_views() {
    let server = undisturbed();
    let mut holder = server.session("holder");
    let mut a = server.session("leak");
    let k = unique("leak");
    holder.run(&format!("select named_lock('{k} ' || i || repeat('x', 900)) from generate_series(1, 100) as i"));
    for look in
        ["select count(*) from lock_holders", "select count(*) from lock_waiters", "select length(lock_graph())"]
    {
        leaves_no_memory(&mut a, look, 1_000_000, |a| {
            a.run(&format!("do $$ begin for i in 1..500 loop execute '{look}'; end loop; end $$"));
        });
    }
}

/// Five thousand of the longest names, given back: so is the shared memory that held them.
#[test]
fn shared_memory_for_names_is_given_back() {
    // In files of its own, so that it can be measured from outside.
    let cluster = Cluster::new(&["dynamic_shared_memory_type = mmap", "max_locks_per_transaction = 300"]);
    let mut watch = cluster.session("watch");
    watch.run("select count(*) from lock_holders");
    let shared = |watch: &mut Session| {
        // A process that has mapped what was given back lets go of it when it next looks.
        watch.run("select count(*) from lock_holders");
        let listed = run(as_server_user("find")
            .arg(cluster.data().join("pg_dynshmem"))
            .args(["-type", "f", "-printf", "%s\\n"]));
        listed.lines().map(|size| size.parse::<i64>().expect("a size")).sum::<i64>()
    };
    let mut a = cluster.session("names");
    a.run("set named_locks.max_locks_per_session = 6000");
    a.run("select named_lock('first'), named_unlock('first')");
    let before = shared(&mut watch);
    let table = unique_ident("names");
    watch.run(&format!(
        "create table {table} as \
         select i, rpad('name ' || i || ' ', 1024, 'x') as name from generate_series(1, 5000) as i"
    ));
    let take = format!("select count(*) from {table} where named_lock(name)");
    let mut peaks = Vec::new();
    for round in 0..6 {
        assert_eq!(a.int(&take), 5000);
        let peak = shared(&mut watch);
        assert!(peak - before > 5_000_000, "{round}: the names need memory: {before} {peak}");
        peaks.push(peak);
        if round == 0 {
            let names = format!(
                "select count(*) from lock_holders as h join {table} as t using (name) where h.pid = {}",
                a.pid
            );
            assert_eq!(watch.int(&names), 5000, "to the last byte");
        }
        match round % 3 {
            0 => assert_eq!(a.int("select named_unlock_all()"), 5000),
            1 => assert_eq!(a.int(&format!("select count(*) from {table} where named_unlock(name) = 0")), 5000),
            _ => {
                a.run("select pg_advisory_unlock_all()");
                // Noticed by the next call.
                a.run("select named_unlock_all()");
            }
        }
        holds(&mut watch, a.pid, 0);
        let after = shared(&mut watch);
        assert!(after - before < 1_500_000, "{round}: given back: {before} {peak} {after}");
    }
    assert!(peaks[5] <= peaks[0] + 1_500_000, "{peaks:?}");

    // The end of the session, and of a transaction, does it too.
    assert_eq!(a.int(&take), 5000);
    let pid = a.pid;
    drop(a);
    watch.until_gone(pid);
    let after = shared(&mut watch);
    assert!(after - before < 1_500_000, "at the session's end: {before} {after}");
    let mut a = cluster.session("names");
    a.run("set named_locks.max_locks_per_session = 6000");
    a.run(&format!("begin; {}", take.replace("named_lock", "named_xact_lock")));
    assert!(shared(&mut watch) - before > 5_000_000);
    a.run("commit");
    let after = shared(&mut watch);
    assert!(after - before < 1_500_000, "at the transaction's end: {before} {after}");

    // Many sessions, one after the other.
    for _ in 0..20 {
        let mut session = cluster.session("names");
        session.run(&format!("select count(*) from {table} where i <= 500 and named_lock(name)"));
        let pid = session.pid;
        drop(session);
        watch.until_gone(pid);
    }
    let after = shared(&mut watch);
    assert!(after - before < 1_500_000, "after many sessions: {before} {after}");
}

/// What one session has shows nowhere in another's memory.
#[test]
fn many_forms_leave_nothing_in_the_lock_manager() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let mut a = server.session("leak");
    for form in Form::all() {
        let lock = form.lock(&unique("leak"));
        for _ in 0..200 {
            a.run(&lock.acquire(Some("0")));
            if form.is_session() {
                a.run(&lock.unlock());
            }
        }
        holds(&mut watch, a.pid, 0);
    }
}
