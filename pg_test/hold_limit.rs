//! Case C49 and rule 9: a session that holds a lock longer than its `hold_limit` is ended, whatever it does.

use super::support::{Cluster, Form, Lock, Reply, Server, Session, Wire, let_pass, unique, unique_ident, until};
use std::time::{Duration, Instant};

/// Short enough for many tests, long enough to do something within it on a busy machine.
const LIMIT: Duration = Duration::from_millis(700);
const WITH_LIMIT: &str = "hold_limit => '700 ms'";

fn session_forms() -> impl Iterator<Item = Form> {
    Form::all().into_iter().filter(Form::is_session)
}

/// A session whose end is awaited, and what it is a test of.
struct Doomed {
    what: String,
    pid: i32,
    since: Instant,
    limit: Duration,
    /// Keeps the connection open.
    _session: Box<dyn std::any::Any>,
}

impl Doomed {
    /// `since`: a moment before the limit was set.
    fn new(what: impl Into<String>, pid: i32, since: Instant, session: impl std::any::Any) -> Doomed {
        Doomed { what: what.into(), pid, since, limit: LIMIT, _session: Box::new(session) }
    }

    fn limit(self, milliseconds: u64) -> Doomed {
        Doomed { limit: Duration::from_millis(milliseconds), ..self }
    }
}

/// That all of them come to their ends, none before its limit. All run at the same time, to take no longer than one.
#[track_caller]
fn all_end(watch: &mut Session, mut doomed: Vec<Doomed>) {
    let pids: Vec<String> = doomed.iter().map(|doomed| doomed.pid.to_string()).collect();
    let begun = Instant::now();
    while !doomed.is_empty() {
        let alive = watch.column(&format!("select pid from pg_stat_activity where pid in ({})", pids.join(",")));
        let seen_at = Instant::now();
        doomed.retain(|doomed| {
            let ended = !alive.contains(&doomed.pid.to_string());
            let after = seen_at - doomed.since;
            assert!(!ended || after >= doomed.limit, "{}: ended after {after:?}", doomed.what);
            !ended
        });
        let left: Vec<&str> = doomed.iter().map(|doomed| doomed.what.as_str()).collect();
        assert!(begun.elapsed() < Duration::from_secs(8), "not ended: {left:#?}");
        std::thread::sleep(Duration::from_millis(5));
    }
    let locks = watch
        .int(&format!("select count(*) from pg_locks where locktype = 'advisory' and pid in ({})", pids.join(",")));
    assert_eq!(locks, 0);
}

/// That none of them is ended, long after the limit. Each can go on.
#[track_caller]
fn none_ends(sessions: Vec<(String, Session)>) {
    let_pass(2 * LIMIT.as_millis() as u64);
    for (what, mut session) in sessions {
        if let Err(error) = session.query("rollback") {
            panic!("{what}: {error:#?}");
        }
        assert_eq!(session.int("select 1"), 1, "{what}");
    }
}

/// A session that has just taken a lock with the limit, in that form, and a moment before.
fn with_limit(server: &Server, form: Form, what: &str) -> (Session, Lock, Instant) {
    let mut session = server.session(what);
    let lock = form.lock(&unique("c49"));
    let since = Instant::now();
    session.run(&lock.acquire_with(Some("0"), WITH_LIMIT));
    (session, lock, since)
}

#[test]
fn c49_an_idle_session_is_ended() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let mut doomed = Vec::new();
    let mut sessions = Vec::new();
    for form in session_forms() {
        let (session, lock, since) = with_limit(server, form, "idle");
        assert_eq!(watch.rows_for(&lock.target, session.pid, true), 1, "{form:?}");
        doomed.push(Doomed::new(format!("{form:?}"), session.pid, since, ()));
        sessions.push((session, lock));
    }
    all_end(&mut watch, doomed);
    for (mut session, lock) in sessions {
        // What the client finds when it comes back; and the lock is anybody's.
        session.fails("select 1").is_end_of_session();
        assert!(watch.flag(&lock.for_holder().acquire(Some("0"))), "{:?}", lock.form);
    }
    watch.run("select pg_advisory_unlock_all()");
}

#[test]
fn c49_the_case_itself() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let mut doomed = Vec::new();
    for form in session_forms() {
        for errors in [1, 3] {
            let (mut session, _, since) = with_limit(server, form, "error");
            for _ in 0..errors {
                session.fails("select 1/0").is("22012");
            }
            doomed.push(Doomed::new(format!("{form:?} {errors}"), session.pid, since, session));
        }
    }
    all_end(&mut watch, doomed);
}

#[test]
fn c49_whatever_the_session_does() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let other = unique("c49 other");
    let mut holder = server.session("holder of another lock");
    holder.run(&format!("select named_lock('{other}')"));
    let form = session_forms().next().expect("one");
    let mut doomed = Vec::new();

    // Statements after which it is idle, in some state.
    let sleeper = unique_ident("c49_sleep");
    for statements in [
        vec!["begin"],
        vec!["begin", "select count(*) from pg_class"],
        vec!["begin", "select 1/0"],
        vec!["begin", "select 1/0", "select 1", "select 2", "select 3"],
        vec!["begin", "no SQL", "no SQL", "savepoint s"],
        vec!["begin", "savepoint s", "select 1/0", "rollback to s"],
        vec!["begin", "savepoint s", "select 1/0", "rollback to s", "select 1/0", "no SQL"],
        vec!["begin", "savepoint s", "select 1", "release s", "commit"],
        vec!["begin", "savepoint s", "rollback to s", "rollback"],
        vec!["begin", "select 1/0", "rollback"],
        vec!["begin", "select 1/0", "commit"],
        vec!["do $$ begin perform 1/0; exception when others then null; end $$"],
        vec![
            "do $$ begin for i in 1..100 loop begin perform 1/0; exception when others then null; end; end loop; end $$",
        ],
        vec!["do $$ begin commit; rollback; commit; end $$"],
        vec!["set statement_timeout = '10ms'", "select pg_sleep(10)"],
        vec![
            "set statement_timeout = '10ms'",
            "select pg_sleep(10)",
            "begin",
            "select pg_sleep(10)",
            "select pg_sleep(10)",
        ],
        vec!["set lock_timeout = '10ms'", "select named_lock('$other')"],
        vec!["select named_lock('$other', '10 ms')"],
        vec!["select named_lock_strict('$other', '10 ms')"],
        vec!["begin", "select named_lock_strict('$other', '0')", "select named_lock_strict('$other', '0')"],
        vec!["call named_lock_wait('$other', '10 ms')"],
        vec!["select named_unlock('no such name')"],
        vec!["select named_lock('one more') , named_unlock('one more')"],
        vec!["set client_min_messages = 'error'", "begin", "select 1/0", "select 1/0"],
        vec!["set log_min_messages = 'fatal'", "begin", "select 1/0", "select 1/0"],
        vec!["set log_min_messages = 'panic'", "begin", "select 1/0", "select 1/0", "no SQL"],
        vec!["discard plans", "discard temp", "discard sequences"],
        vec!["reset all"],
        vec!["listen a", "notify a"],
        vec!["create temp table t (i int)", "prepare p as select 1", "declare c cursor with hold for select 1"],
        vec!["set role pg_monitor", "select 1/0"],
    ] {
        let (mut session, _, since) = with_limit(server, form, "states");
        for statement in &statements {
            // Some are there for their error.
            let _ = session.query(&statement.replace("$other", &other));
        }
        doomed.push(Doomed::new(format!("{statements:?}"), session.pid, since, session));
    }

    // Statements that never end by themselves.
    watch.run(&format!(
        "create function {sleeper}() returns void language plpgsql as $$ begin \
           loop \
             begin perform pg_sleep(0.01); raise 'x'; exception when raise_exception then null; end; \
           end loop; end $$"
    ));
    for statement in [
        "select pg_sleep(3600)",
        "do $$ begin loop end loop; end $$",
        "do $$ begin loop begin perform 1/0; exception when division_by_zero then null; end; end loop; end $$",
        "do $$ begin loop perform 1; commit; end loop; end $$",
        "do $$ declare inner_name text := 'c49 inner ' || pg_backend_pid(); begin \
           loop perform named_lock(inner_name); perform named_unlock(inner_name); end loop; end $$",
        "do $$ begin loop perform named_lock('$other', '1 ms'); end loop; end $$",
        "do $$ begin loop \
           begin perform named_lock_strict('$other', '1 ms'); exception when lock_not_available then null; end; \
         end loop; end $$",
        "select count(*) from generate_series(1, 100000000000)",
        "select $sleeper()",
        "select named_lock('$other')",
        "select named_lock('$other', '1 hour')",
        "select named_xact_lock('$other')",
        "select named_lock_strict('$other', '1 hour')",
        "call named_lock_wait('$other')",
        "do $$ declare got boolean; begin call named_lock_wait('$other', '1 hour', acquired => got); end $$",
    ] {
        let (session, _, since) = with_limit(server, form, "busy");
        let statement = statement.replace("$other", &other).replace("$sleeper", &sleeper);
        let running = session.background(&statement);
        doomed.push(Doomed::new(statement, running.pid, since, running));
    }
    all_end(&mut watch, doomed);
    drop(holder);
}

/// The client is told why, busy or idle.
#[test]
fn c49_the_client_gets_57p01() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for statement in ["select pg_sleep(3600)", "do $$ begin loop end loop; end $$", ""] {
        let mut wire = Wire::open(server);
        wire.query(&format!("select named_lock('{}', {WITH_LIMIT})", unique("c49"))).replies();
        if !statement.is_empty() {
            wire.query(statement);
        }
        assert_eq!(wire.replies(), [Reply::Error("57P01".into()), Reply::Closed], "{statement}");
        watch.until_gone(wire.pid);
    }
}

/// By hand: a client that is in the middle of something, from the server's side idle.
#[test]
fn c49_a_client_that_stops_in_the_middle() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let table = unique_ident("c49");
    watch.run(&format!("create table {table} (i int)"));
    let mut doomed = Vec::new();
    for middle in ["copy", "pipeline", "pipeline that failed", "suspended portal"] {
        let mut wire = Wire::open(server);
        let since = Instant::now();
        wire.query(&format!("select named_lock('{}', {WITH_LIMIT})", unique("c49"))).replies();
        match middle {
            "copy" => {
                wire.query(&format!("copy {table} from stdin")).send();
                assert_eq!(wire.reply(), Reply::CopyIn);
            }
            "pipeline" => {
                wire.statement("select 1").flush().send();
                assert_eq!(wire.reply(), Reply::Row(vec![Some("1".into())]));
            }
            "pipeline that failed" => {
                wire.statement("select 1/0").flush().send();
                assert_eq!(wire.reply(), Reply::Error("22012".into()));
            }
            _ => {
                wire.portal("", "select i from generate_series(1, 9) as i").execute("", 1).flush().send();
                assert_eq!(wire.reply(), Reply::Row(vec![Some("1".into())]));
                assert_eq!(wire.reply(), Reply::Suspended);
            }
        }
        doomed.push((middle, since, wire));
    }
    let awaited = doomed.iter().map(|(what, since, wire)| Doomed::new(*what, wire.pid, *since, ())).collect();
    all_end(&mut watch, awaited);
    for (what, _, mut wire) in doomed {
        let mut last = wire.reply();
        while matches!(last, Reply::Complete(_)) {
            last = wire.reply();
        }
        assert_eq!(last, Reply::Error("57P01".into()), "{what}");
        assert_eq!(wire.reply(), Reply::Closed, "{what}");
    }
}

#[test]
fn c49_a_limit_taken_in_a_savepoint_that_is_rolled_back() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let mut doomed = Vec::new();
    for form in session_forms().filter(|form| !form.call) {
        for end in ["rollback to s", "rollback to s; commit", "rollback", "release s", "commit"] {
            let mut session = server.session("savepoint");
            let lock = form.lock(&unique("c49"));
            session.run("begin; savepoint s");
            let since = Instant::now();
            session.run(&lock.acquire_with(Some("0"), WITH_LIMIT));
            session.run(end);
            assert_eq!(watch.rows_for(&lock.target, session.pid, true), 1, "{form:?}: the lock is the session's");
            doomed.push(Doomed::new(format!("{form:?} {end}"), session.pid, since, session));
        }
    }
    all_end(&mut watch, doomed);
}

#[test]
fn c49_of_several_limits_the_earliest_counts() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let mut doomed = Vec::new();
    let k = unique("c49");
    for (limits, ends_after) in [
        (vec!["1 hour", "700 ms"], 700),
        (vec!["700 ms", "1 hour"], 700),
        (vec!["1 hour", "900 ms", "700 ms", "1 hour"], 700),
        (vec!["", "700 ms", ""], 700),
        (vec!["700 ms", ""], 700),
    ] {
        // The same name again and again; or another each time; or in other modes.
        for variant in ["again", "names", "modes"] {
            let mut session = server.session("several");
            let since = Instant::now();
            for (number, limit) in limits.iter().enumerate() {
                let name = if variant == "names" {
                    format!("{k} {} {number}", session.pid)
                } else {
                    format!("{k} {}", session.pid)
                };
                let mode =
                    if variant == "modes" { ["exclusive", "share", "intent share"][number % 3] } else { "exclusive" };
                let limit = if limit.is_empty() { "null".to_owned() } else { format!("'{limit}'") };
                session.run(&format!("select named_lock('{name}', '0', '{mode}', hold_limit => {limit})"));
            }
            if variant == "again" {
                assert_eq!(
                    watch.text(&format!("select hold_limit from lock_holders where pid = {}", session.pid)),
                    "00:00:00.7",
                    "{limits:?}"
                );
            }
            doomed.push(Doomed::new(format!("{limits:?} {variant}"), session.pid, since, session).limit(ends_after));
        }
    }
    all_end(&mut watch, doomed);
}

#[test]
fn c49_a_thousand_limits() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let mut session = server.session("many");
    let k = unique("c49");
    session.run("set named_locks.max_locks_per_session = 2000");
    session.run(&format!(
        "select count(*) from generate_series(1, 1000) as i \
          where named_lock('{k} ' || i, hold_limit => make_interval(secs => 3600 + i))"
    ));
    let since = Instant::now();
    session.run(&format!("select named_lock('{k} 500', {WITH_LIMIT})"));
    all_end(&mut watch, vec![Doomed::new("the one in the middle", session.pid, since, session)]);
}

#[test]
fn c49_what_is_given_back_in_time_ends_nobody() {
    let server = Server::shared();
    let mut sessions = Vec::new();
    for form in session_forms() {
        let (mut session, lock, _) = with_limit(server, form, "in time");
        session.run(&lock.unlock());
        sessions.push((format!("{form:?}"), session));
    }
    for (what, take, give) in [
        ("unlock_all", "select named_lock('$k', hold_limit => '700 ms')", "select named_unlock_all()"),
        (
            "all holds",
            "select named_lock('$k', hold_limit => '700 ms'), named_lock('$k', hold_limit => '700 ms')",
            "select named_unlock('$k', all_holds => true)",
        ),
        (
            "the last hold had it",
            "select named_lock('$k'), named_lock('$k', hold_limit => '700 ms')",
            "select named_unlock('$k')",
        ),
        (
            "the mode had it",
            "select named_lock('$k', mode => 'share', hold_limit => '700 ms'), named_lock('$k', mode => 'exclusive')",
            "select named_unlock('$k', 'share')",
        ),
        (
            "extend takes it off",
            "select named_lock('$k', hold_limit => '700 ms')",
            "select named_lock_extend('$k', null)",
        ),
        (
            "extend puts it off",
            "select named_lock('$k', hold_limit => '700 ms')",
            "select named_lock_extend('$k', '1 hour')",
        ),
        (
            "extend puts all of them off",
            "select named_lock('$k', hold_limit => '700 ms'), named_lock('$k', mode => 'share', hold_limit => '700 ms')",
            "select named_lock_extend('$k', '1 hour')",
        ),
        (
            "extend, then an error",
            "select named_lock('$k', hold_limit => '700 ms')",
            "do $$ begin perform named_lock_extend('$k', '1 hour'); perform 1/0; exception when others then null; end $$",
        ),
        (
            "given back in a block",
            "begin; select named_lock('$k', hold_limit => '700 ms')",
            "select named_unlock('$k')",
        ),
        (
            "given back in a savepoint that is rolled back",
            "begin; select named_lock('$k', hold_limit => '700 ms')",
            "savepoint s; select named_unlock('$k'); rollback to s",
        ),
        (
            "of two names one by one",
            "select named_lock('$k 1', hold_limit => '700 ms'), named_lock('$k 2', hold_limit => '700 ms')",
            "select named_unlock('$k 1'), named_unlock('$k 2')",
        ),
        (
            "convert, then given back",
            "select named_lock('$k', hold_limit => '700 ms'), named_lock_convert('$k', 'share')",
            "select named_unlock('$k')",
        ),
    ] {
        let mut session = server.session("in time");
        let k = unique("c49");
        session.run(&take.replace("$k", &k));
        session.run(&give.replace("$k", &k));
        sessions.push((what.to_owned(), session));
    }
    none_ends(sessions);
}

/// `DISCARD ALL` and `pg_advisory_unlock_all()` never call us.
#[test]
fn c49_what_is_given_back_behind_our_back_ends_nobody() {
    let server = Server::shared();
    let mut sessions = Vec::new();
    for (what, take) in [
        ("one", "select named_lock('$k', hold_limit => '700 ms')"),
        ("cluster-wide", "select named_lock('$k', hold_limit => '700 ms', cluster_wide => true)"),
        ("call", "call named_lock_wait('$k', hold_limit => '700 ms')"),
        ("two", "select named_lock('$k 1', hold_limit => '600 ms'), named_lock('$k 2', hold_limit => '700 ms')"),
        (
            "five",
            "select named_lock('$k' || i, hold_limit => make_interval(secs => 0.3 + i / 10.0)) \
               from generate_series(1, 5) as i",
        ),
        (
            "two modes",
            "select named_lock('$k', mode => m::named_lock_mode, hold_limit => '700 ms') \
               from unnest(array['share', 'exclusive']) as m",
        ),
        ("one with and one without", "select named_lock('$k 1'), named_lock('$k 2', hold_limit => '700 ms')"),
    ] {
        for give in
            ["discard all", "select pg_advisory_unlock_all()", "do $$ begin perform pg_advisory_unlock_all(); end $$"]
        {
            let mut session = server.session("behind our back");
            session.run(&take.replace("$k", &unique("c49")));
            session.run(give);
            assert_eq!(session.locks_of(session.pid), 0);
            sessions.push((format!("{what}: {give}"), session));
        }
        // In a block that goes on.
        let mut session = server.session("behind our back");
        session.run(&take.replace("$k", &unique("c49")));
        session.run("begin; select pg_advisory_unlock_all()");
        assert_eq!(session.locks_of(session.pid), 0);
        sessions.push((format!("{what}: in a block"), session));
        // With an error afterwards.
        let mut session = server.session("behind our back");
        session.run(&take.replace("$k", &unique("c49")));
        session.run("select pg_advisory_unlock_all()");
        session.fails("select 1/0").is("22012");
        sessions.push((format!("{what}: then an error"), session));
    }
    // The name is held by the transaction as well, so the lock manager still has it.
    let mut session = server.session("behind our back");
    let k = unique("c49");
    session.run(&format!("begin; select named_xact_lock('{k}'), named_lock('{k}', hold_limit => '700 ms')"));
    session.run("select pg_advisory_unlock_all()");
    sessions.push(("held by the transaction, too".to_owned(), session));
    none_ends(sessions);
}

/// The native twins, given back by the server's own function.
#[test]
fn c49_native_locks_given_back_by_pg_advisory_unlock() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let mut sessions = Vec::new();
    for form in session_forms().filter(|form| !form.is_named()) {
        for block in ["select 1", "begin"] {
            let mut session = server.session("native");
            let lock = form.lock(&unique("c49"));
            session.run(&lock.acquire_with(Some("0"), WITH_LIMIT));
            session.run(block);
            assert!(session.flag(&lock.unlock()));
            sessions.push((format!("{form:?} {block}"), session));

            // Two of them.
            let mut session = server.session("native");
            let (one, two) = (form.lock(&unique("c49")), form.lock(&unique("c49")));
            session.run(&one.acquire_with(Some("0"), WITH_LIMIT));
            session.run(&two.acquire_with(Some("0"), WITH_LIMIT));
            session.run(block);
            let both = format!("{}, {}", one.unlock(), two.unlock().trim_start_matches("select "));
            session.run(&both);
            assert_eq!(session.locks_of(session.pid), 0);
            sessions.push((format!("two: {form:?} {block}"), session));
        }
        // In share mode there is another function for it.
        let mut session = server.session("native");
        let lock = form.lock(&unique("c49"));
        session.run(&lock.acquire_with(Some("0"), &format!("mode => 'share', {WITH_LIMIT}")));
        session.run(&lock.unlock().replace("unlock", "unlock_shared"));
        assert_eq!(session.locks_of(session.pid), 0);
        sessions.push((format!("share: {form:?}"), session));
    }
    none_ends(sessions);

    // One of two remains, or the wrong one is given back: ended.
    let mut doomed = Vec::new();
    for form in session_forms().filter(|form| !form.is_named()) {
        let mut session = server.session("native");
        let (one, two) = (form.lock(&unique("c49")), form.lock(&unique("c49")));
        session.run(&one.acquire_with(Some("0"), "hold_limit => '650 ms'"));
        let since = Instant::now();
        session.run(&two.acquire_with(Some("0"), WITH_LIMIT));
        session.run(&one.unlock());
        doomed.push(Doomed::new(format!("{form:?}"), session.pid, since, session));

        let mut session = server.session("native");
        let since = Instant::now();
        session.run(&one.acquire_with(Some("0"), WITH_LIMIT));
        session.run(&two.unlock());
        doomed.push(Doomed::new(format!("wrong: {form:?}"), session.pid, since, session));
    }
    all_end(&mut watch, doomed);
}

#[test]
fn c49_what_is_left_still_counts() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let mut doomed = Vec::new();
    for (what, take, then) in [
        (
            "the first of two holds had it",
            "select named_lock('$k', hold_limit => '700 ms'), named_lock('$k')",
            "select named_unlock('$k')",
        ),
        (
            "the other mode had it",
            "select named_lock('$k', mode => 'share', hold_limit => '700 ms'), named_lock('$k', mode => 'exclusive')",
            "select named_unlock('$k', 'exclusive')",
        ),
        (
            "the second of two limits extended",
            "select named_lock('$k 1', hold_limit => '700 ms'), named_lock('$k 2', hold_limit => '700 ms')",
            "select named_lock_extend('$k 2', '1 hour')",
        ),
        (
            "the second of two limits taken off",
            "select named_lock('$k 1', hold_limit => '700 ms'), named_lock('$k 2', hold_limit => '700 ms')",
            "select named_lock_extend('$k 2', null)",
        ),
        ("made shorter", "select named_lock('$k', hold_limit => '1 hour')", "select named_lock_extend('$k', '700 ms')"),
        ("put on later", "select named_lock('$k')", "select named_lock_extend('$k', '700 ms')"),
        (
            "extended, then made shorter",
            "select named_lock('$k', hold_limit => '1 hour'), named_lock_extend('$k', '2 hours')",
            "select named_lock_extend('$k', '700 ms')",
        ),
        (
            "extended in a savepoint that is rolled back",
            "begin; select named_lock('$k', hold_limit => '1 hour'); savepoint s",
            "select named_lock_extend('$k', '700 ms'); rollback to s; commit",
        ),
        ("converted", "select named_lock('$k', hold_limit => '700 ms')", "select named_lock_convert('$k', 'share')"),
        (
            "other locks given back",
            "select named_lock('$k', hold_limit => '700 ms'), named_lock('$k 2')",
            "select named_unlock('$k 2')",
        ),
        (
            "native locks given back",
            "select named_lock('$k', hold_limit => '700 ms'), pg_advisory_lock(1)",
            "select pg_advisory_unlock(1)",
        ),
        (
            "taken anew after DISCARD ALL",
            "select named_lock('$k', hold_limit => '1 hour')",
            "discard all; select named_lock('$k', hold_limit => '700 ms')",
        ),
        (
            "a prepared transaction's session lock",
            "begin; select named_xact_lock('$k x'), named_lock('$k', hold_limit => '700 ms')",
            "prepare transaction '$k'; rollback prepared '$k'",
        ),
    ] {
        let mut session = server.session("left");
        let k = unique("c49");
        let since = Instant::now();
        session.run(&take.replace("$k", &k));
        for statement in then.replace("$k", &k).split("; ") {
            session.run(statement);
        }
        doomed.push(Doomed::new(what, session.pid, since, session));
    }
    all_end(&mut watch, doomed);
}

#[test]
fn c49_the_limit_begins_with_the_grant() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let waiters: Vec<_> = session_forms()
        .map(|form| {
            let lock = form.lock(&unique("c49"));
            let mut holder = server.session("holder");
            holder.run(&lock.for_holder().acquire(Some("0")));
            let running = server.session("waiter").background(&lock.acquire_with(None, WITH_LIMIT));
            watch.until_waiting(running.pid);
            (lock, holder, running)
        })
        .collect();
    // The wait takes longer than the limit.
    let_pass(2 * LIMIT.as_millis() as u64);
    let mut doomed = Vec::new();
    for (lock, mut holder, running) in waiters {
        assert!(watch.is_waiting(running.pid), "{:?}: ended while it waited", lock.form);
        let since = Instant::now();
        holder.run(&lock.unlock());
        let (session, result) = running.end();
        result.unwrap_or_else(|error| panic!("{:?}: {error:#?}", lock.form));
        doomed.push(Doomed::new(format!("{:?}", lock.form), session.pid, since, (session, holder)));
    }
    all_end(&mut watch, doomed);
}

#[test]
fn c49_without_the_lock_there_is_no_limit() {
    let server = Server::shared();
    let mut sessions = Vec::new();
    for form in session_forms() {
        let lock = form.lock(&unique("c49"));
        let mut holder = server.session("holder");
        holder.run(&lock.for_holder().acquire(Some("0")));
        for timeout in ["0", "10 ms"] {
            let mut session = server.session("refused");
            // False, or the strict form's error.
            let _ = session.query(&lock.acquire_with(Some(timeout), WITH_LIMIT));
            assert_eq!(session.locks_of(session.pid), 0, "{form:?}");
            sessions.push((format!("{form:?} {timeout}"), session));
        }
        sessions.push((format!("{form:?}: the holder"), holder));
    }
    none_ends(sessions);
}

/// Giving back in time, again and again, for longer than the limit.
#[test]
fn c49_many_short_holds() {
    let server = Server::shared();
    let mut session = server.session("many");
    let k = unique("c49");
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(2) {
        session.run(&format!(
            "do $$ begin for i in 1..100 loop \
               perform named_lock('{k}', hold_limit => '500 ms'), named_unlock('{k}'); \
             end loop; end $$"
        ));
    }
    let_pass(600);
    assert_eq!(session.int(&format!("select named_lock_held('{k}')")), 0);
}

/// Renewed in time by whoever works on: it lives as long as it extends.
#[test]
fn c49_extended_in_time_again_and_again() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let mut session = server.session("extends");
    let k = unique("c49");
    session.run(&format!("select named_lock('{k}', {WITH_LIMIT})"));
    let begun = Instant::now();
    let mut last = Instant::now();
    while begun.elapsed() < 3 * LIMIT {
        let_pass(50);
        last = Instant::now();
        let expires_at = session.text(&format!("select named_lock_extend('{k}', '700 ms')"));
        assert_eq!(watch.text(&format!("select expires_at from lock_holders where name = '{k}'")), expires_at);
    }
    all_end(&mut watch, vec![Doomed::new("extends no more", session.pid, last, session)]);
}

#[test]
fn c49_the_next_in_the_queue_gets_the_lock() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let queues: Vec<_> = session_forms()
        .map(|form| {
            let (session, lock, since) = with_limit(server, form, "holder");
            (form, session, since, server.session("next").background(&lock.acquire(None)))
        })
        .collect();
    for (form, session, since, waiting) in queues {
        let (_next, result) = waiting.end();
        result.unwrap_or_else(|error| panic!("{form:?}: {error:#?}"));
        assert!(since.elapsed() >= LIMIT, "{form:?}");
        watch.until_gone(session.pid);
    }
}

/// The log says which lock it was, and since when it should have been given back.
#[test]
fn c49_the_log_names_the_lock() {
    let cluster =
        Cluster::new(&["log_min_messages = warning", "log_statement = none", "log_min_error_statement = panic"]);
    let mut watch = cluster.session("watch");
    for (take, then, named) in [
        ("select named_lock('the idle one', hold_limit => '300 ms')", "select 1", "the idle one"),
        ("select named_lock('in a block', hold_limit => '300 ms')", "begin", "in a block"),
        ("select named_lock('busy one', hold_limit => '300 ms')", "select pg_sleep(3600)", "busy one"),
        ("select named_lock('everywhere', hold_limit => '300 ms', cluster_wide => true)", "select 1", "everywhere"),
        ("call named_lock_wait('called', hold_limit => '300 ms')", "select 1", "called"),
        ("select advisory_lock(4711, hold_limit => '300 ms')", "select 1", "4711"),
        (
            "select named_lock('the later one', hold_limit => '1 hour'), \
                    named_lock('the earlier one', hold_limit => '300 ms')",
            "select 1",
            "the earlier one",
        ),
    ] {
        let mut session = cluster.session("ended");
        let pid = session.pid;
        session.run(take);
        let _running = session.background(then);
        watch.until_gone(pid);
        let of_it = |log: &str| -> Vec<String> {
            log.lines().filter(|line| line.starts_with(&format!("[{pid}]"))).map(str::to_owned).collect()
        };
        let mut lines = Vec::new();
        until("the log has a line with the name", || {
            lines = of_it(&cluster.log());
            lines.iter().any(|line| line.contains("LOG:") && line.contains(named) && line.contains("300 ms"))
        });
        let line = lines.iter().find(|line| line.contains(named)).expect("found");
        assert!(!line.contains("the later one"), "{line}");
    }
    // Ended by other hands: no such line.
    let mut session = cluster.session("ended otherwise");
    session.run("select named_lock('terminated', hold_limit => '1 hour')");
    watch.run(&format!("select pg_terminate_backend({})", session.pid));
    watch.until_gone(session.pid);
    assert!(!cluster.log().contains("\"terminated\""));
}
