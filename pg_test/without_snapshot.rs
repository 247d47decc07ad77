//! Cases C07, C08 and C47: `CALL named_lock_wait` holds no snapshot while it waits, and where it can't do without one it
//! refuses, with everything rolled back that has to be.

use super::support::{Reply, Rows, Running, Server, Session, SqlError, Wire, until, within};
use std::time::Duration;

/// A database of the test's own: what waits elsewhere holds no snapshot against it.
///
/// What is read before the wait is `u`: its table lock stays to the end of the transaction, and dropping an index of it
/// concurrently would wait for that.
fn database() -> Server {
    let database = Server::shared().new_database("snapshot", "UTF8");
    database.session("setup").run(
        "create table t (i int, v text); create table u (i int); \
         create procedure wait_in_procedure(inout n int, inout got boolean default null) language plpgsql as $$ begin \
           n := n + (select count(*) from u); \
           call named_lock_wait('k', acquired => got); \
           n := n + (select count(*) from u); \
         end $$; \
         create procedure wait_deeper(depth int, inout got boolean default null) language plpgsql as $$ begin \
           if depth > 0 then call wait_deeper(depth - 1, got); else call named_lock_wait('k', acquired => got); end if; \
         end $$",
    );
    database
}

/// A statement that waits for `k` without a snapshot in some way, and how often it has taken it then.
const WAITS: [(&str, &str, i64); 9] = [
    ("CALL", "call named_lock_wait('k')", 1),
    ("CALL with a timeout", "call named_lock_wait('k', '1 hour')", 1),
    ("DO", "do $$ declare got boolean; begin call named_lock_wait('k', acquired => got); end $$", 1),
    (
        "DO after reading",
        "do $$ declare got boolean; begin \
           perform count(*) from u; \
           call named_lock_wait('k', acquired => got); \
           perform count(*) from u; \
         end $$",
        1,
    ),
    (
        "DO after a commit",
        "do $$ declare got boolean; begin \
           insert into t values (1, 'before'); commit; \
           call named_lock_wait('k', acquired => got); \
         end $$",
        1,
    ),
    (
        "DO after a rollback",
        "do $$ declare got boolean; begin \
           insert into t values (1, 'never'); rollback; \
           call named_lock_wait('k', acquired => got); \
         end $$",
        1,
    ),
    (
        "DO in a loop",
        "do $$ declare got boolean; begin \
           for i in 1..3 loop call named_lock_wait('k', acquired => got); end loop; \
         end $$",
        3,
    ),
    ("procedure with INOUT arguments", "call wait_in_procedure(0)", 1),
    ("procedures in procedures", "call wait_deeper(5)", 1),
];

/// How many sessions hold this database's `k`.
const HOLDERS: &str = "select count(*) from lock_holders where name = 'k' and database = current_database()";

/// A session that holds `k`.
fn holder(database: &Server) -> Session {
    let mut holder = database.session("holder");
    holder.run("select named_lock('k')");
    holder
}

/// Starts a statement and returns when it waits.
#[track_caller]
fn start(database: &Server, statement: &str, watch: &mut Session) -> Running<Result<Rows, SqlError>> {
    let waiting = database.session("waiter").background(statement);
    watch.until_waiting(waiting.pid);
    waiting
}

/// That a session is as good as new.
#[track_caller]
fn is_usable(session: &mut Session, what: &str) {
    assert_eq!(session.int("select 1"), 1, "{what}");
    session.run("begin; create temp table usable (i int); insert into usable values (1); savepoint s");
    session.fails("select 1/0").is("22012");
    session.run("rollback to s; select * from usable; rollback");
    session.run("do $$ begin perform count(*) from pg_class; commit; perform count(*) from pg_class; end $$");
    assert_eq!(session.text("call named_lock_wait('usable', '0')"), "t", "{what}");
    assert_eq!(session.int("select named_unlock('usable')"), 0, "{what}");
}

#[test]
fn c07_the_holder_builds_an_index_concurrently_while_others_wait() {
    for (what, statement, _) in WAITS {
        let database = database();
        let mut watch = database.session("watch");
        let mut a = holder(&database);
        let waiters = [start(&database, statement, &mut watch), start(&database, statement, &mut watch)];
        for waiter in &waiters {
            watch.holds_no_snapshot(waiter.pid, what);
        }
        a.run("insert into t select i, 'x' from generate_series(1, 100) as i");
        for step in [
            "create index concurrently t_i on t (i)",
            "reindex index concurrently t_i",
            "create index concurrently t_iv on t (i, v)",
            "drop index concurrently t_iv",
        ] {
            a.run(step);
        }
        assert!(
            watch.flag("select indisvalid and indisready from pg_index where indexrelid = 't_i'::regclass"),
            "{what}"
        );
        assert!(waiters.iter().all(|waiter| !waiter.finished()), "{what}: they waited");
        assert_eq!(a.int("select named_unlock('k')"), 0);
        let [first, second] = waiters;
        let (mut b, result) = first.end();
        result.unwrap_or_else(|error| panic!("{what}: {error:#?}"));
        assert_eq!(watch.int(HOLDERS), 1, "{what}: then B has k");
        b.run("select named_unlock_all()");
        second.end().1.unwrap_or_else(|error| panic!("{what}: {error:#?}"));
    }
}

/// What the procedure is there for: the function form ends in a deadlock.
#[test]
fn c07_with_the_function_it_is_a_deadlock() {
    let database = database();
    let mut watch = database.session("watch");
    let mut a = holder(&database);
    a.run("set deadlock_timeout = '100ms'");
    let waiting = start(&database, "select named_lock('k')", &mut watch);
    assert!(watch.flag(&format!("select backend_xmin is not null from pg_stat_activity where pid = {}", waiting.pid)));
    a.fails("create index concurrently t_i on t (i)").is("40P01");
    a.run("select named_unlock('k')");
    waiting.end().1.expect("the survivor");
}

/// Three that migrate at once: one does it, the others wait and find it done.
#[test]
fn c07_three_migrations_at_once() {
    let database = database();
    let mut watch = database.session("watch");
    watch.run("create table migrations (version int)");
    let mut gate = database.session("gate");
    gate.run("select named_lock('gate')");
    let pods: Vec<Running<bool>> = (0..3)
        .map(|pod| {
            database.session(&format!("pod {pod}")).spawn(|session| {
                session.run("call named_lock_wait('migrate')");
                let mine = session.int("select count(*) from migrations") == 0;
                if mine {
                    session.run("call named_lock_wait('gate')");
                    session.run("create index concurrently t_v on t (v)");
                    session.run("insert into migrations values (1)");
                }
                session.run("select named_unlock('migrate')");
                mine
            })
        })
        .collect();
    until("one is at the gate, the others wait for it", || {
        watch.column(
            "select name || ' ' || count(*) from lock_waiters where application_name like 'pod %' \
                       group by name order by 1",
        ) == ["gate 1", "migrate 2"]
    });
    gate.run("select named_unlock('gate')");
    let migrated: Vec<bool> = pods.into_iter().map(|pod| pod.end().1).collect();
    assert_eq!(migrated.iter().filter(|&&mine| mine).count(), 1);
    assert!(watch.flag("select indisvalid from pg_index where indexrelid = 't_v'::regclass"));
}

#[test]
fn c08_a_third_session_builds_an_index_while_the_holder_is_idle() {
    for (what, statement, count) in WAITS {
        let database = database();
        let mut watch = database.session("watch");
        let mut a = holder(&database);
        let waiting = start(&database, statement, &mut watch);
        watch.holds_no_snapshot(waiting.pid, what);
        watch.run("set statement_timeout = '60s'");
        watch.run("create index concurrently t_i on t (i)");
        assert!(watch.flag("select indisvalid from pg_index where indexrelid = 't_i'::regclass"), "{what}");
        assert!(!waiting.finished(), "{what}");
        a.run("select named_unlock('k')");
        let (mut b, result) = waiting.end();
        result.unwrap_or_else(|error| panic!("{what}: {error:#?}"));
        assert_eq!(b.int("select named_lock_held('k')"), count, "{what}");
        is_usable(&mut b, what);
        assert_eq!(b.int("select named_unlock_all()"), count, "{what}");
        assert_eq!(watch.locks_of(b.pid), 0, "{what}");
    }
}

/// By the extended protocol, as drivers call it, with parameters and a result.
#[test]
fn c08_by_a_prepared_statement() {
    let database = database();
    let mut watch = database.session("watch");
    let mut a = holder(&database);
    for call in [
        "call named_lock_wait($1, $2::text::interval)",
        "call named_lock_wait($1, $2::text::interval, acquired => null)",
    ] {
        let waiting = database.session("waiter").spawn(|session| {
            let row = session.client.query_one(call, &[&"k", &"1 hour"]).expect("the call");
            row.get::<_, bool>("acquired")
        });
        watch.until_waiting(waiting.pid);
        watch.holds_no_snapshot(waiting.pid, call);
        watch.run("create index concurrently t_i on t (i)");
        watch.run("drop index t_i");
        a.run("select named_unlock('k')");
        let (mut b, acquired) = waiting.end();
        assert!(acquired);
        is_usable(&mut b, call);
        b.run("select named_unlock('k')");
        a.run("select named_lock('k')");
    }
}

const FILL: &str = "insert into t select i, repeat('x', 100) from generate_series(1, 1000) as i";

#[test]
fn c08_vacuum_removes_rows_beside_a_waiter() {
    let database = database();
    let mut watch = database.session("watch");
    let mut a = holder(&database);
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
    for (what, statement, _) in WAITS {
        let waiting = start(&database, statement, &mut watch);
        assert!(are_removed(&mut watch), "{what}");
        watch.run(&format!("select pg_cancel_backend({})", waiting.pid));
        waiting.end().1.expect_err("cancelled").is("57014");
    }
    // With a snapshot it can't, so this test can fail.
    let waiting = start(&database, "select named_lock('k')", &mut watch);
    assert!(!are_removed(&mut watch));
    a.run("select named_unlock('k')");
    waiting.end().1.expect("the lock");
}

#[test]
fn the_statements_after_the_wait_see_what_was_committed_meanwhile() {
    let database = database();
    let mut watch = database.session("watch");
    let mut a = holder(&database);
    let [first, second] = [
        "call wait_in_procedure(0)",
        "do $$ declare got boolean; big text := repeat('y', 100000); r record; begin \
               select count(*) as n into r from u; \
               call named_lock_wait('k', '1 hour', 'share', acquired => got); \
               if not got or length(big) <> 100000 or r.n <> 0 then raise 'lost'; end if; \
               if (select count(*) from u) <> 2 then raise 'old'; end if; \
               insert into u values (3); \
             end $$",
    ]
    .map(|statement| start(&database, statement, &mut watch));
    a.run("insert into u values (1), (2)");
    a.run("select named_unlock('k')");
    let (mut b, result) = first.end();
    let rows = result.expect("no error");
    assert_eq!((rows[0].get("n"), rows[0].get("got")), (Some("2"), Some("t")), "0 before and 2 after");
    b.run("select named_unlock('k')");
    second.end().1.expect("no error");
    assert_eq!(watch.int("select count(*) from u"), 3);
}

#[test]
fn false_at_the_timeout_and_the_block_goes_on() {
    let database = database();
    let mut a = holder(&database);
    let mut b = database.session("waiter");
    assert_eq!(b.text("call named_lock_wait('k', '0')"), "f");
    assert_eq!(b.text("call named_lock_wait('k', '50 ms')"), "f");
    b.run(
        "do $$ declare got boolean; begin \
           for i in 1..3 loop \
             call named_lock_wait('k', '20 ms', acquired => got); \
             if got then raise 'got it'; end if; \
             insert into t values (i); \
             commit; \
           end loop; \
         end $$",
    );
    assert_eq!(b.int("select count(*) from t"), 3);
    assert_eq!(b.int("select named_lock_held('k')"), 0);
    assert_eq!(b.locks_of(b.pid), 0);
    is_usable(&mut b, "after false");
    assert_eq!(a.int("select named_unlock('k')"), 0);
}

#[test]
fn cancel_timeout_and_deadlock_leave_a_usable_session() {
    for (what, statement, _) in WAITS {
        let database = database();
        let mut watch = database.session("watch");
        let mut a = holder(&database);

        let waiting = start(&database, statement, &mut watch);
        watch.run(&format!("select pg_cancel_backend({})", waiting.pid));
        let (mut b, result) = waiting.end();
        result.expect_err("cancelled").is("57014").context_has("k");
        assert_eq!(watch.locks_of(b.pid), 0, "{what}");
        is_usable(&mut b, what);

        b.run("set statement_timeout = '100ms'");
        b.fails(statement).is("57014");
        b.run("reset statement_timeout");
        assert_eq!(watch.locks_of(b.pid), 0, "{what}");
        is_usable(&mut b, what);

        if !statement.contains("1 hour") {
            b.run("set lock_timeout = '50ms'");
            b.fails(statement).is("55P03").message_has("k").detail_has(&a.pid.to_string());
            b.run("reset lock_timeout");
            assert_eq!(watch.locks_of(b.pid), 0, "{what}");
            is_usable(&mut b, what);
        }

        b.run("select named_lock('other')");
        b.run("set deadlock_timeout = '50ms'");
        a.run("set deadlock_timeout = '1h'");
        let waiting = a.background("select named_lock('other')");
        watch.until_waiting(waiting.pid);
        b.fails(statement).is("40P01").context_has("k");
        assert_eq!(b.int("select named_unlock('other')"), 0, "{what}");
        let (mut a, result) = waiting.end();
        result.expect("the survivor");
        assert_eq!(watch.locks_of(b.pid), 0, "{what}");
        is_usable(&mut b, what);
        assert_eq!(watch.int("select count(*) from t where v = 'never'"), 0);

        a.run("select named_unlock_all()");
        b.run(statement);
        assert!(b.int("select named_unlock_all()") > 0, "{what}");
    }
}

#[test]
fn termination_while_waiting() {
    let database = database();
    let mut watch = database.session("watch");
    let _a = holder(&database);
    for (what, statement, _) in WAITS {
        let waiting = start(&database, statement, &mut watch);
        watch.run(&format!("select pg_terminate_backend({})", waiting.pid));
        let (b, result) = waiting.end();
        result.expect_err("terminated").is_end_of_session();
        watch.until_gone(b.pid);
        assert_eq!(watch.int(&format!("select count(*) from lock_waiters where pid = {}", b.pid)), 0, "{what}");
    }
}

/// Where a snapshot or work remains: an error, nothing held, and nothing committed that the caller did not commit.
#[test]
fn c47_refused_where_it_cannot_do_without_a_snapshot() {
    let database = database();
    let mut watch = database.session("watch");
    watch.run(
        "create function wait_in_function() returns boolean language plpgsql as $$ declare got boolean; begin \
           call named_lock_wait('k', acquired => got); return got; end $$; \
         create function wait_in_trigger() returns trigger language plpgsql as $$ declare got boolean; begin \
           call named_lock_wait('k', acquired => got); return new; end $$; \
         create table watched (i int); \
         create trigger watched before insert on watched for each row execute function wait_in_trigger(); \
         create procedure wait_as_definer() language plpgsql security definer as $$ declare got boolean; begin \
           call named_lock_wait('k', acquired => got); end $$; \
         create procedure wait_with_set() language plpgsql set work_mem = '1MB' as $$ declare got boolean; begin \
           call named_lock_wait('k', acquired => got); end $$",
    );
    let wait = "call named_lock_wait('k', acquired => got)";
    let block = |body: &str| {
        format!("do $$ declare got boolean; r record; c cursor for select * from pg_class; begin {body} end $$")
    };
    let plain: Vec<(&str, Vec<String>)> = vec![
        ("a transaction block", vec!["begin".into(), "call named_lock_wait('k')".into()]),
        (
            "a block that has written",
            vec!["begin".into(), "insert into t values (1)".into(), "call named_lock_wait('k')".into()],
        ),
        ("a savepoint", vec!["begin; savepoint s".into(), "call named_lock_wait('k')".into()]),
        ("a DO in a block", vec!["begin".into(), block(&format!("{wait};"))]),
        ("several statements in a string", vec!["insert into t values (1); call named_lock_wait('k')".into()]),
        ("first of several in a string", vec!["call named_lock_wait('k'); insert into t values (1)".into()]),
        ("a function", vec!["select wait_in_function()".into()]),
        ("a function in a DO", vec![block("perform wait_in_function();")]),
        ("a trigger", vec!["insert into watched values (1)".into()]),
        ("a function in a WHERE", vec!["insert into t select 1 from pg_class where wait_in_function()".into()]),
        ("SECURITY DEFINER", vec!["call wait_as_definer()".into()]),
        ("a SET clause", vec!["call wait_with_set()".into()]),
        ("a DO that has written", vec![block(&format!("insert into t values (1); {wait};"))]),
        ("a DO that has written after a commit", vec![block(&format!("commit; insert into t values (1); {wait};"))]),
        (
            "a DO that has locked rows",
            vec![
                "insert into t values (47)".into(),
                block(&format!("perform * from t for update; {wait};")),
                "delete from t where i = 47".into(),
            ],
        ),
        (
            "a FOR loop over rows",
            vec![block(&format!("for r in select * from generate_series(1, 3) loop {wait}; end loop;"))],
        ),
        ("an open cursor", vec![block(&format!("open c; fetch c into r; {wait}; fetch c into r;"))]),
        ("an exception block", vec![block(&format!("begin {wait}; exception when raise_exception then null; end;"))]),
        ("dynamic SQL", vec![block("execute 'call named_lock_wait(''k'')';")]),
        (
            "REPEATABLE READ",
            vec!["set default_transaction_isolation = 'repeatable read'".into(), "call named_lock_wait('k')".into()],
        ),
        (
            "SERIALIZABLE",
            vec!["set default_transaction_isolation = 'serializable'".into(), "call named_lock_wait('k')".into()],
        ),
        (
            "REPEATABLE READ of a DO",
            vec![
                "set default_transaction_isolation = 'repeatable read'".into(),
                block(&format!("perform 1 from pg_class; {wait};")),
            ],
        ),
        (
            "REPEATABLE READ after a commit",
            vec![block(&format!(
                "commit; set transaction isolation level repeatable read; perform 1 from pg_class; {wait};"
            ))],
        ),
    ];
    for is_held in [false, true] {
        let _a = is_held.then(|| holder(&database));
        for (what, statements) in &plain {
            let mut b = database.session("refused");
            let mut refused = None;
            for statement in statements {
                if let Err(error) = b.query(statement) {
                    refused = Some(error);
                }
            }
            refused.unwrap_or_else(|| panic!("{what}: not refused")).is("25001").message_has("k");
            assert_eq!(watch.locks_of(b.pid), 0, "{what}: nothing is held");
            b.run("rollback; reset all");
            assert_eq!(watch.int("select count(*) from t"), 0, "{what}: nothing is written");
            is_usable(&mut b, what);
        }
    }
    assert_eq!(watch.int("select count(*) from watched"), 0);
}

/// An error later on takes back what was written after the wait, and no more. The lock stays: it is the session's.
#[test]
fn c47_an_error_after_the_wait() {
    let database = database();
    let mut watch = database.session("watch");
    let mut b = database.session("c47");
    for (what, body, committed) in [
        ("without a commit", "$w; insert into t values (1); raise 'late'", 0),
        ("after a commit", "insert into t values (1); commit; $w; insert into t values (2); raise 'late'", 1),
        ("in a later transaction", "$w; insert into t values (1); commit; insert into t values (2); raise 'late'", 1),
        ("after a rollback", "insert into t values (1); rollback; $w; insert into t values (2); raise 'late'", 0),
    ] {
        let body = body.replace("$w", "call named_lock_wait('k', acquired => got)");
        b.fails(&format!("do $$ declare got boolean; begin {body}; end $$")).is("P0001");
        assert_eq!(watch.int("select count(*) from t"), committed, "{what}");
        watch.run("truncate t");
        assert_eq!(b.int("select named_unlock('k')"), 0, "{what}");
        is_usable(&mut b, what);
    }
}

/// The caller may go on after a refusal that it has caught: its work stands, once.
#[test]
fn c47_a_refusal_that_is_caught() {
    let database = database();
    let mut watch = database.session("watch");
    let mut b = database.session("c47");
    let caught = "begin call named_lock_wait('k', acquired => got); raise 'not refused'; \
                  exception when active_sql_transaction then insert into t values (25001); end;";
    for (what, before) in
        [("first", ""), ("after writing", "insert into t values (1);"), ("after reading", "perform 1 from t;")]
    {
        b.run(&format!("do $$ declare got boolean; begin {before} {caught} insert into t values (2); end $$"));
        let rows = watch.int("select count(*) from t");
        assert_eq!(rows, if before.contains("insert") { 3 } else { 2 }, "{what}");
        watch.run("truncate t");
        // And rolled back, it is as if it had never been.
        b.fails(&format!("do $$ declare got boolean; begin {before} {caught} raise 'late'; end $$")).is("P0001");
        assert_eq!(watch.int("select count(*) from t"), 0, "{what}");
        assert_eq!(watch.locks_of(b.pid), 0, "{what}");
        is_usable(&mut b, what);
    }
}

#[test]
fn c47_a_pipeline_with_open_work_is_refused_and_rolled_back() {
    let database = database();
    let mut watch = database.session("watch");
    let call = "call named_lock_wait('k')";
    let refused = Reply::Error("25001".into());
    for is_held in [false, true] {
        let _a = is_held.then(|| holder(&database));
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
            assert_eq!(watch.locks_of(wire.pid), 0, "{before}");
            // The connection is as good as new.
            let replies = wire.statement("select 7").sync().replies();
            assert_eq!(replies[0], Reply::Row(vec![Some("7".into())]));
        }

        // A portal that has given some of its rows, or is only bound, has a snapshot of its own.
        for rows in [Some(1), None] {
            let mut wire = Wire::open(&database);
            wire.portal("open", "select relname from pg_class");
            if let Some(rows) = rows {
                wire.execute("open", rows);
            }
            let replies = wire.statement(call).sync().replies();
            assert!(replies.contains(&refused), "{rows:?}: {replies:?}");
            assert_eq!(watch.locks_of(wire.pid), 0);
            let replies = wire.query("select 7").replies();
            assert_eq!(replies[0], Reply::Row(vec![Some("7".into())]));
        }

        // In a block that the client has begun.
        let mut wire = Wire::open(&database);
        wire.query("begin").replies();
        let replies = wire.statement("insert into t values (1)").statement(call).sync().replies();
        assert!(replies.contains(&refused), "{replies:?}");
        assert_eq!(replies.last(), Some(&Reply::Ready('E')));
        wire.query("rollback").replies();
        assert_eq!(watch.int("select count(*) from t"), 0);
    }
}

/// The first of a pipeline has nothing open before it. What comes after it is one transaction with it.
#[test]
fn c47_first_in_a_pipeline() {
    let database = database();
    let mut watch = database.session("watch");
    let mut a = holder(&database);
    let mut wire = Wire::open(&database);
    wire.statement("call named_lock_wait('k')").statement("insert into t values (1)").sync().send();
    watch.until_waiting(wire.pid);
    watch.holds_no_snapshot(wire.pid, "pipeline");
    a.run("select named_unlock('k')");
    let replies = wire.replies();
    assert_eq!(
        replies,
        [
            Reply::Row(vec![Some("t".into())]),
            Reply::Complete("CALL".into()),
            Reply::Complete("INSERT 0 1".into()),
            Reply::Ready('I')
        ]
    );
    assert_eq!(watch.int("select count(*) from t"), 1);

    // An error later in the pipeline takes back the row. The lock is the session's, as after any error.
    wire.query("select named_unlock('k')").replies();
    let replies = wire
        .statement("call named_lock_wait('k')")
        .statement("insert into t values (2)")
        .statement("select 1/0")
        .statement("insert into t values (3)")
        .sync()
        .replies();
    assert!(replies.contains(&Reply::Error("22012".into())), "{replies:?}");
    assert_eq!(watch.int("select count(*) from t"), 1);
    assert_eq!(watch.locks_of(wire.pid), 1);

    // A second one in the same pipeline is refused: the first is not committed yet.
    wire.query("select named_unlock('k')").replies();
    if watch.knows_pipelines() {
        let calls = wire.statement("call named_lock_wait('k')").statement("call named_lock_wait('k')");
        let replies = calls.sync().replies();
        assert!(replies.contains(&Reply::Error("25001".into())), "{replies:?}");
    }
    // With a Sync in between they are two.
    wire.query("select named_unlock_all()").replies();
    wire.statement("call named_lock_wait('k')").sync().statement("call named_lock_wait('k')").sync();
    for _ in 0..2 {
        assert_eq!(wire.replies()[1], Reply::Complete("CALL".into()));
    }
    assert_eq!(watch.int("select holds from lock_holders where name = 'k' and database = current_database()"), 2);
}

/// What outlives its transaction holds no snapshot.
#[test]
fn a_cursor_with_hold_and_a_prepared_statement_are_in_nobodys_way() {
    let database = database();
    let mut watch = database.session("watch");
    let mut a = holder(&database);
    let mut b = database.session("waiter");
    b.run("prepare p as select count(*) from pg_class; declare h cursor with hold for select relname from pg_class");
    b.run("execute p");
    let waiting = b.background("call named_lock_wait('k')");
    watch.until_waiting(waiting.pid);
    watch.holds_no_snapshot(waiting.pid, "with hold");
    a.run("select named_unlock('k')");
    let (mut b, result) = waiting.end();
    result.expect("no error");
    assert_eq!(b.run("fetch 2 from h").len(), 2);
    b.run("execute p; close h");
    is_usable(&mut b, "with hold");
}

/// Each argument, by the call that has no snapshot.
#[test]
fn modes_limits_and_reach_are_the_functions() {
    let database = database();
    let mut watch = database.session("watch");
    let mut a = database.session("a");
    for mode in ["exclusive", "share", "intent share", "intent exclusive", "share intent exclusive"] {
        for cluster_wide in [false, true] {
            assert_eq!(
                a.text(&format!(
                    "call named_lock_wait('k', '1 s', '{mode}', hold_limit => '1 hour', cluster_wide => {cluster_wide})"
                )),
                "t"
            );
            assert_eq!(
                watch.column(&format!(
                    "select concat_ws(' ', kind, mode, holds, hold_limit, database is null) \
                       from lock_holders where pid = {}",
                    a.pid
                )),
                [format!("session {mode} 1 01:00:00 {}", if cluster_wide { "t" } else { "f" })]
            );
            assert_eq!(a.int(&format!("select named_unlock('k', '{mode}', cluster_wide => {cluster_wide})")), 0);
        }
    }
    for (arguments, code) in [
        ("null", "22004"),
        ("''", "22023"),
        ("repeat('x', 1025)", "22001"),
        ("'k', '-1 s'", "22023"),
        ("'k', hold_limit => '99 ms'", "22023"),
        ("'k', mode => null", "22004"),
    ] {
        a.fails(&format!("call named_lock_wait({arguments})")).is(code);
        is_usable(&mut a, arguments);
    }
    assert_eq!(watch.locks_of(a.pid), 0);
}
