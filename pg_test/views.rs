//! What `lock_holders`, `lock_waiters` and `lock_graph()` show, and to whom.

use super::support::{
    Answer, Cluster, Form, Rows, Running, Server, Session, SqlError, answer, as_server_user, literal, run, unique,
    unique_ident, until,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

#[test]
fn columns_are_the_contracts() {
    let server = Server::shared();
    let mut a = server.session("views");
    for (view, columns) in [
        (
            "lock_holders",
            "kind domain name mode holds pid usename application_name client_addr state acquired_at held_for \
             hold_limit expires_at remaining token owner payload waiters database gid classid objid objsubid",
        ),
        (
            "lock_waiters",
            "kind domain name mode pid usename application_name wait_started waited deadline queue_position blocked_by",
        ),
    ] {
        assert_eq!(
            a.text(&format!(
                "select string_agg(attname, ' ' order by attnum) from pg_attribute \
                  where attrelid = '{view}'::regclass and attnum > 0"
            )),
            columns
        );
        assert_eq!(
            a.int(&format!(
                "select count(*) from pg_attribute as c where attrelid = '{view}'::regclass and attnum > 0 \
                    and col_description(attrelid, attnum) is null"
            )),
            0,
            "every column has its comment"
        );
    }
    assert_eq!(
        a.text(
            "select format_type(atttypid, atttypmod) from pg_attribute \
                 where attrelid = 'lock_waiters'::regclass and attname = 'blocked_by'"
        ),
        "integer[]"
    );
}

#[test]
fn holders_of_each_kind() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for form in Form::all() {
        let k = unique("views:kind");
        let lock = form.lock(&k);
        let application = unique("views holder");
        let mut a = server.session(&application);
        let before = watch.text("select clock_timestamp()");
        a.run(if form.call { "" } else { "begin" });
        assert!(answer(form, a.query(&lock.acquire_with(Some("1 minute"), "mode => 'share'"))).held());
        let rows = watch.run(&format!(
            "select *, acquired_at between '{before}' and clock_timestamp() as in_time, \
                    held_for between '0' and '1 minute' as for_long, current_database() as here, \
                    (select host(client_addr) from pg_stat_activity where pid = {0}) as address, host(client_addr) as addr \
               from lock_holders where pid = {0}",
            a.pid
        ));
        assert_eq!(rows.len(), 1, "{form:?}");
        let get = |column: &str| rows[0].get(column);
        assert_eq!(get("mode"), Some("share"), "{form:?}");
        assert_eq!(get("pid"), Some(a.pid.to_string().as_str()));
        assert_eq!(get("usename"), Some(server.user.as_str()));
        assert_eq!(get("application_name"), Some(application.as_str()));
        assert_eq!(get("addr"), get("address"));
        assert_eq!(get("state"), Some(if form.call { "idle" } else { "idle in transaction" }));
        assert_eq!(get("waiters"), Some("0"));
        assert_eq!(get("gid"), None);
        for of_a_lease in ["token", "owner", "payload"] {
            assert_eq!(get(of_a_lease), None);
        }
        for of_a_limit in ["hold_limit", "expires_at", "remaining"] {
            assert_eq!(get(of_a_limit), None);
        }
        if form.is_named() {
            let kind = if form.is_session() { "session" } else { "transaction" };
            assert_eq!(get("kind"), Some(kind), "{form:?}");
            assert_eq!(get("name"), Some(k.as_str()));
            assert_eq!(get("domain"), Some("views"));
            assert_eq!(get("holds"), Some("1"));
            assert_eq!(get("in_time"), Some("t"));
            assert_eq!(get("for_long"), Some("t"));
        } else {
            assert_eq!(get("kind"), Some("advisory"), "{form:?}");
            assert_eq!(get("name"), None);
            assert_eq!(get("domain"), None);
        }
        assert_eq!(get("database"), if form.is_cluster_wide() { None } else { get("here") });
        // It is found in pg_locks by its last columns.
        assert_eq!(
            watch.int(&format!(
                "select count(*) from lock_holders as h join pg_locks as l using (pid, classid, objid, objsubid) \
                  where pid = {} and locktype = 'advisory' and granted",
                a.pid
            )),
            1
        );
        drop(a);
    }
}

#[test]
fn native_locks_of_other_software_are_shown() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let mut a = server.session("views native");
    a.run(
        "begin; \
           select pg_advisory_lock(9001001), pg_advisory_lock_shared(9001, 2), pg_advisory_xact_lock(-9001003)",
    );
    let rows = watch.run(&format!(
        "select kind, mode, classid, objid, objsubid, name from lock_holders where pid = {} order by objsubid, objid",
        a.pid
    ));
    let rows: Vec<Vec<Option<&str>>> = rows.iter().map(|row| (0..6).map(|column| row.get(column)).collect()).collect();
    let low = (-9_001_003_i32).cast_unsigned().to_string();
    assert_eq!(
        rows,
        [
            vec![Some("advisory"), Some("exclusive"), Some("0"), Some("9001001"), Some("1"), None],
            vec![Some("advisory"), Some("exclusive"), Some("4294967295"), Some(&low), Some("1"), None],
            vec![Some("advisory"), Some("share"), Some("9001"), Some("2"), Some("2"), None],
        ]
    );
    let waiting = server.session("views native waiter").background("select pg_advisory_lock(9001001)");
    watch.until_waiting(waiting.pid);
    let rows = watch.run(&format!(
        "select kind, mode, name, deadline, queue_position, blocked_by from lock_waiters where pid = {}",
        waiting.pid
    ));
    let row: Vec<_> = (0..6).map(|column| rows[0].get(column)).collect();
    let blocked_by = format!("{{{}}}", a.pid);
    assert_eq!(row, [Some("advisory"), Some("exclusive"), None, None, Some("1"), Some(&blocked_by)]);
    assert_eq!(watch.int(&format!("select waiters from lock_holders where pid = {} and objid = 9001001", a.pid)), 1);
    a.run("select pg_advisory_unlock(9001001)");
    waiting.end().1.expect("it has the lock");
}

#[test]
fn session_and_transaction_holds_are_two_rows() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let mut a = server.session("views");
    let k = unique("views");
    a.run(&format!(
        "begin; select named_lock('{k}'), named_xact_lock('{k}'), named_xact_lock('{k}'), \
                       named_lock('{k}', mode => 'share'), named_xact_lock('{k}', mode => 'intent share')"
    ));
    let mut shown = || {
        watch.column(&format!(
            "select concat_ws(' ', kind, mode, holds) from lock_holders where name = '{k}' order by kind, mode"
        ))
    };
    assert_eq!(
        shown(),
        ["session exclusive 1", "session share 1", "transaction exclusive 2", "transaction intent share 1",]
    );
    a.run("commit");
    assert_eq!(shown(), ["session exclusive 1", "session share 1"]);
    a.run(&format!("select named_unlock('{k}', 'exclusive')"));
    assert_eq!(shown(), ["session share 1"]);
}

#[test]
fn what_is_not_held_is_not_shown() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let k = unique("views");
    let mut shown = |pid: i32| {
        let rows = watch.int(&format!("select count(*) from lock_holders where pid = {pid}"));
        assert_eq!(rows, watch.locks_of(pid), "as many as the lock manager has");
        rows
    };
    // A refused call, a rolled back transaction, a rolled back savepoint, an error.
    let mut a = server.session("views");
    a.run(&format!("begin; select named_xact_lock('{k}'); savepoint s; select named_xact_lock('{k} more')"));
    assert_eq!(shown(a.pid), 2);
    a.run("rollback to s");
    assert_eq!(shown(a.pid), 1);
    a.run("rollback");
    assert_eq!(shown(a.pid), 0);
    a.query(&format!("select named_xact_lock('{k}'), 1/0")).expect_err("an error");
    assert_eq!(shown(a.pid), 0);
    a.run(&format!("select named_xact_lock('{k}')"));
    assert_eq!(shown(a.pid), 0, "outside a block it ends with its statement");

    // A session's end, however it comes.
    for end in ["close", "pg_terminate_backend"] {
        let mut b = server.session("views end");
        let pid = b.pid;
        b.run(&format!("select named_lock('{k}')"));
        assert_eq!(shown(pid), 1);
        if end == "close" {
            drop(b);
        } else {
            a.run(&format!("select pg_terminate_backend({pid})"));
        }
        a.until_gone(pid);
        assert_eq!(shown(pid), 0, "{end}");
    }

    // A function that locks, and fails after: a session's lock stays.
    let function = unique_ident("views");
    a.run(&format!(
        "create function {function}() returns void language plpgsql as \
         $$ begin perform named_lock('{k}'); perform named_xact_lock('{k} more'); raise 'no'; end $$"
    ));
    a.query(&format!("select {function}()")).expect_err("an error");
    assert_eq!(shown(a.pid), 1);
    assert_eq!(a.int(&format!("select named_lock_held('{k}')")), 1);
}

#[test]
fn a_hold_limit_is_shown() {
    let server = Server::shared();
    let mut a = server.session("views");
    let mut watch = server.session("watch");
    for form in Form::all().into_iter().filter(|form| form.is_session() && form.is_named()) {
        let k = unique("views");
        let lock = form.lock(&k);
        assert!(answer(form, a.query(&lock.acquire_with(Some("0"), "hold_limit => '1 hour'"))).held());
        assert!(
            watch.flag(&format!(
                "select hold_limit = '1 hour' and expires_at between acquired_at + '1 hour' - interval '1 s' \
                                                      and acquired_at + '1 hour' + interval '1 s' \
                        and remaining > '59 minutes' and remaining <= '1 hour' \
                   from lock_holders where name = '{k}'"
            )),
            "{form:?}"
        );
        let wide = format!("cluster_wide => {}", form.is_cluster_wide());
        let ends = a.text(&format!("select named_lock_extend('{k}', '2 hours', {wide})"));
        assert!(watch.flag(&format!(
            "select hold_limit = '2 hours' and abs(extract(epoch from expires_at - '{ends}')) < 0.01 \
               from lock_holders where name = '{k}'"
        )));
        assert_eq!(a.maybe(&format!("select named_lock_extend('{k}', null, {wide})")), None);
        assert!(watch.flag(&format!(
            "select hold_limit is null and expires_at is null and remaining is null \
               from lock_holders where name = '{k}'"
        )));
        a.run(&lock.unlock());
    }
}

#[test]
fn waiters_are_shown_with_their_place_their_deadline_and_who_blocks_them() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for form in Form::all() {
        let k = unique("views:wait");
        let lock = form.lock(&k);
        let mut a = server.session("views holder");
        a.run(&lock.for_holder().acquire(Some("0")));
        let before = watch.text("select clock_timestamp()");
        let first = server.session("views first").background(&lock.acquire(Some("1 hour")));
        watch.until_waiting(first.pid);
        let second = server.session("views second").background(&lock.acquire_with(None, "mode => 'share'"));
        watch.until_waiting(second.pid);
        let rows = watch.run(&format!(
            "select *, wait_started between '{before}' and clock_timestamp() as in_time, \
                    waited between '0' and '1 minute' as for_long, \
                    extract(epoch from deadline - wait_started)::numeric(20, 0) as seconds, \
                    {0} = any (blocked_by) as by_holder, {1} = any (blocked_by) as by_first \
               from lock_waiters where pid in ({1}, {2}) order by queue_position",
            a.pid, first.pid, second.pid
        ));
        assert_eq!(rows.len(), 2, "{form:?}");
        for (row, pid, application, mode, position, seconds) in [
            (&rows[0], first.pid, "views first", "exclusive", "1", Some("3600")),
            (&rows[1], second.pid, "views second", "share", "2", None),
        ] {
            assert_eq!(row.get("pid"), Some(pid.to_string().as_str()), "{form:?}");
            assert_eq!(row.get("application_name"), Some(application));
            assert_eq!(row.get("usename"), Some(server.user.as_str()));
            assert_eq!(row.get("mode"), Some(mode));
            assert_eq!(row.get("queue_position"), Some(position));
            assert_eq!(row.get("in_time"), Some("t"), "{form:?}: {row:?}");
            assert_eq!(row.get("for_long"), Some("t"));
            assert_eq!(row.get("by_holder"), Some("t"));
            if form.is_named() {
                let kind = if form.is_session() { "session" } else { "transaction" };
                assert_eq!(row.get("kind"), Some(kind), "{form:?}");
                assert_eq!(row.get("name"), Some(k.as_str()), "{form:?}");
                assert_eq!(row.get("domain"), Some("views"));
                assert_eq!(row.get("seconds"), seconds, "{form:?}: the deadline");
            } else {
                assert_eq!(row.get("kind"), Some("advisory"), "{form:?}");
                assert_eq!(row.get("name"), None);
            }
        }
        assert_eq!(rows[1].get("by_first"), Some("t"), "{form:?}: it queues behind the first");
        assert_eq!(watch.int(&format!("select waiters from lock_holders where pid = {}", a.pid)), 2, "{form:?}");

        let graph = watch.text("select lock_graph()");
        assert!(graph.starts_with("flowchart") || graph.starts_with("graph"), "{graph}");
        for pid in [a.pid, first.pid, second.pid] {
            assert!(graph.contains(&pid.to_string()), "{form:?}: {pid} is in\n{graph}");
        }
        if form.is_named() {
            assert!(graph.contains(&k), "{form:?}: {k} is in\n{graph}");
        }

        watch.run(&format!("select pg_cancel_backend({})", first.pid));
        first.end().1.expect_err("cancelled").is("57014");
        a.run(&lock.unlock());
        assert!(answer(form, second.end().1).held());
        assert_eq!(
            watch.int(&format!("select count(*) from lock_waiters where {}", lock.target.in_lock_waiters())),
            0,
            "{form:?}: nobody waits any more"
        );
    }
}

#[test]
fn a_convert_that_waits_is_a_holder_and_a_waiter() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let k = unique("views");
    let mut a = server.session("views a");
    let mut b = server.session("views b");
    for session in [&mut a, &mut b] {
        session.run(&format!("select named_lock('{k}', mode => 'share')"));
    }
    let waiting = b.background(&format!("select named_lock_convert('{k}', 'exclusive', '1 hour')"));
    watch.until_waiting(waiting.pid);
    assert_eq!(
        watch.column(&format!(
            "select concat_ws(' ', kind, name, mode, holds) from lock_holders where pid = {}",
            waiting.pid
        )),
        [format!("session {k} share 1")]
    );
    assert_eq!(
        watch.column(&format!(
            "select concat_ws(' ', kind, name, mode, queue_position, (extract(epoch from deadline - wait_started))::int) \
               from lock_waiters where pid = {}",
            waiting.pid
        )),
        [format!("session {k} exclusive 1 3600")]
    );
    a.run(&format!("select named_unlock('{k}')"));
    waiting.end().1.expect("converted");
}

#[test]
fn lock_timeout_is_a_deadline_too() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let k = unique("views");
    let mut a = server.session("views holder");
    a.run(&format!("select named_lock('{k}')"));
    let mut b = server.session("views b");
    b.run("set lock_timeout = '2h'");
    let waiting = b.background(&format!("select named_lock('{k}')"));
    watch.until_waiting(waiting.pid);
    let rows = watch.run(&format!(
        "select extract(epoch from deadline - wait_started)::numeric(20, 0) from lock_waiters where pid = {}",
        waiting.pid
    ));
    // Shown, or not known; never another one.
    assert!([Some("7200"), None].contains(&rows[0].get(0)), "{rows:?}");
    a.run(&format!("select named_unlock('{k}')"));
    waiting.end().1.expect("it has the lock");
}

#[test]
fn the_graph_is_text_whatever_the_names_are() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let stem = unique("graph");
    for odd in ["\"];", "]\nevil-->x", "<b>", "`", "%% comment", "end", "\\", "#quot;", "click a \"javascript:1\""] {
        let name = format!("{stem}{odd}");
        let mut a = server.session(&format!("app{odd}").replace('\n', " "));
        a.run(&format!("select named_lock({})", literal(&name)));
        let waiting = server.session("waiter").background(&format!("select named_lock({})", literal(&name)));
        watch.until_waiting(waiting.pid);
        let graph = watch.text("select lock_graph()");
        assert!(graph.contains(&waiting.pid.to_string()));
        assert!(!graph.contains("evil-->x"), "{graph}");
        assert!(!graph.contains("\"];\""), "{graph}");
        assert!(!graph.contains("<b>"), "{graph}");
        // Quotes pair up in each line.
        for line in graph.lines() {
            assert_eq!(line.matches('"').count() % 2, 0, "{line}");
        }
        a.run("select named_unlock_all()");
        waiting.end().1.expect("it has the lock");
    }
}

/// A holder and a waiter of one role, looked at by others.
struct Looked {
    holder: Session,
    waiter: Running<Result<Rows, SqlError>>,
    name: String,
}

fn looked_at(server: &Server, role: &str) -> Looked {
    let name = unique("secret");
    let mut holder = server.session_as(role, "views holder");
    holder.run(&format!("select named_lock('{name}')"));
    let waiter = server.session_as(role, "views waiter").background(&format!("select named_lock('{name}')"));
    server.session("watch").until_waiting(waiter.pid);
    Looked { holder, waiter, name }
}

/// The names that a viewer gets to see for both, and what else is to be seen.
fn seen(viewer: &mut Session, looked: &Looked) -> (Option<String>, Option<String>) {
    let rows = viewer.run(&format!(
        "select name, usename, application_name, domain from lock_holders where pid = {}",
        looked.holder.pid
    ));
    assert_eq!(rows.len(), 1, "the row is there for everyone");
    assert!(rows[0].get("usename").is_some());
    let held = rows[0].get("name").map(str::to_owned);
    assert_eq!(held.is_some(), rows[0].get("domain").is_some());
    let rows = viewer.run(&format!("select name, domain from lock_waiters where pid = {}", looked.waiter.pid));
    assert_eq!(rows.len(), 1, "the row is there for everyone");
    let waited_for = rows[0].get("name").map(str::to_owned);
    assert_eq!(waited_for.is_some(), rows[0].get("domain").is_some());
    let graph = viewer.text("select lock_graph()");
    assert_eq!(graph.contains(&looked.name), held.is_some(), "the graph tells no more:\n{graph}");
    (held, waited_for)
}

#[test]
fn names_are_for_the_own_role_its_members_and_pg_read_all_stats() {
    let server = Server::shared();
    let owner = server.new_role("views_owner");
    let stranger = server.new_role("views_stranger");
    let member = server.new_role("views_member");
    let monitor = server.new_role("views_monitor");
    let mut admin = server.session("admin");
    admin.run(&format!("grant {owner} to {member}; grant pg_read_all_stats to {monitor}"));
    let looked = looked_at(server, &owner);
    let all = (Some(looked.name.clone()), Some(looked.name.clone()));

    assert_eq!(seen(&mut server.session_as(&owner, "viewer"), &looked), all);
    assert_eq!(seen(&mut server.session_as(&member, "viewer"), &looked), all);
    assert_eq!(seen(&mut server.session_as(&monitor, "viewer"), &looked), all);
    assert_eq!(seen(&mut admin, &looked), all);
    let mut stranger_session = server.session_as(&stranger, "viewer");
    assert_eq!(seen(&mut stranger_session, &looked), (None, None));
    // Its own locks it does see.
    let own = unique("own");
    stranger_session.run(&format!("select named_lock('{own}')"));
    assert_eq!(stranger_session.column("select name from lock_holders where pid = pg_backend_pid()"), [own]);
    // By the current role, as in pg_stat_activity.
    admin.run(&format!("set role {stranger}"));
    assert_eq!(seen(&mut admin, &looked), (None, None));
    admin.run(&format!("set role {owner}"));
    assert_eq!(seen(&mut admin, &looked), all);
    // As in pg_stat_activity, the address isn't for a stranger.
    assert_eq!(
        stranger_session.maybe(&format!("select client_addr from lock_holders where pid = {}", looked.holder.pid)),
        None
    );
}

#[test]
fn names_of_other_databases_are_for_pg_read_all_stats() {
    let server = Server::shared();
    let second = server.new_database("views", "UTF8");
    let owner = server.new_role("views_owner");
    let monitor = server.new_role("views_monitor");
    server.session("admin").run(&format!("grant pg_read_all_stats to {monitor}"));
    let looked = looked_at(server, &owner);
    assert_eq!(seen(&mut second.session_as(&owner, "viewer"), &looked), (None, None));
    let all = (Some(looked.name.clone()), Some(looked.name.clone()));
    assert_eq!(seen(&mut second.session_as(&monitor, "viewer"), &looked), all);
    assert_eq!(seen(&mut second.session("viewer"), &looked), all);
}

/// Whoever knows a name and is refused may know who is in the way.
#[test]
fn a_timeouts_detail_is_for_everyone_but_no_more_than_the_views() {
    let server = Server::shared();
    let owner = server.new_role("views_owner");
    let stranger = server.new_role("views_stranger");
    let looked = looked_at(server, &owner);
    let mut session = server.session_as(&stranger, "viewer");
    for call in ["named_lock_strict('$k', '0')", "named_lock_strict('$k', '10 ms')", "named_unlock('$k')"] {
        session
            .fails(&format!("select {}", call.replace("$k", &looked.name)))
            .message_has(&looked.name)
            .detail_has(&looked.holder.pid.to_string())
            .detail_has("views holder");
    }
}

#[test]
fn a_prepared_transactions_lock_is_shown_with_its_gid() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for form in Form::all().into_iter().filter(|form| !form.is_session()) {
        let k = unique("views");
        let gid = unique("gid 'x'");
        let lock = form.lock(&k);
        let mut a = server.session("views prepared");
        a.run("begin");
        a.run(&lock.acquire(Some("0")));
        a.run(&format!("prepare transaction {}", literal(&gid)));
        let pid = a.pid;
        // Whoever prepared it may be gone or doing other things.
        a.run(&format!("select named_lock('{k} other')"));
        let shown = format!("select * from lock_holders where gid = {}", literal(&gid));
        for gone in [false, true] {
            if gone {
                a.run("select named_unlock_all()");
                watch.run(&format!("select pg_terminate_backend({pid})"));
                watch.until_gone(pid);
            }
            let rows = watch.run(&shown);
            assert_eq!(rows.len(), 1, "{form:?}");
            assert_eq!(rows[0].get("pid"), None);
            assert_eq!(rows[0].get("mode"), Some("exclusive"));
            if form.is_named() {
                assert_eq!(rows[0].get("kind"), Some("transaction"), "{form:?}");
                let name = rows[0].get("name");
                assert!(name == Some(&k) || (gone && name.is_none()), "{form:?}: {name:?}");
            }
        }
        assert!(!watch.flag(&lock.for_holder().acquire(Some("0"))));
        let waiting = server.session("views waiter").background(&lock.acquire(Some("1 hour")));
        watch.until_waiting(waiting.pid);
        assert_eq!(watch.text(&format!("select waiters from lock_holders where gid = {}", literal(&gid))), "1");
        assert_eq!(
            watch.text(&format!("select blocked_by from lock_waiters where pid = {}", waiting.pid)),
            "{0}",
            "as pg_blocking_pids() has it"
        );
        assert!(watch.text("select lock_graph()").contains(&waiting.pid.to_string()));
        watch.run(&format!("select pg_cancel_backend({})", waiting.pid));
        waiting.end().1.expect_err("cancelled").is("57014");
        if form.strict {
            let error = watch.fails(&lock.acquire(Some("0")));
            error.is("55P03").detail_has("prepared");
        }
        watch.run(&format!("commit prepared {}", literal(&gid)));
        assert_eq!(watch.run(&shown).len(), 0);
        assert!(watch.flag(&lock.for_holder().acquire(Some("0"))), "{form:?}");
        watch.run("select named_unlock_all(), pg_advisory_unlock_all()");
    }
}

/// Sessions come and go while others look: the view never fails and never shows a lock under another's name.
#[test]
fn looking_while_others_lock_and_unlock() {
    // A database of its own: other tests' leases would make each look slow.
    let server = Server::shared().new_database("views_looking", "UTF8");
    let stem = unique("views");
    let done = Arc::new(AtomicBool::new(false));
    let workers: Vec<_> = (0..4)
        .map(|worker| {
            let (stem, done) = (stem.clone(), done.clone());
            server.session(&format!("{stem} {worker}")).spawn(move |session| {
                for round in 0.. {
                    if done.load(Ordering::Relaxed) {
                        break;
                    }
                    session.run(&format!(
                        "begin; select named_xact_lock('{stem} {worker} x{round}'), named_lock('{stem} {worker} s{round}'); \
                         commit; select named_unlock('{stem} {worker} s{round}')"
                    ));
                }
            })
        })
        .collect();
    let mut watch = server.session("watch");
    let mut seen = 0;
    while seen < 200 {
        assert!(!workers.iter().any(Running::finished), "a worker has failed");
        for row in watch.run(&format!(
            "select h.name, h.application_name, h.kind, h.pid, \
                    (select (k.classid, k.objid, k.objsubid) = (h.classid, h.objid, h.objsubid) \
                       from named_lock_key(h.name) as k) as by_key \
               from lock_holders as h where h.application_name like '{stem} %' and h.name is not null"
        )) {
            let (name, application) = (row.get(0).expect("a name"), row.get(1).expect("one"));
            assert!(name.starts_with(application), "{row:?}");
            assert_eq!(row.get("by_key"), Some("t"), "{row:?}");
            seen += 1;
        }
    }
    done.store(true, Ordering::Relaxed);
    for worker in workers {
        let (session, ()) = worker.end();
        assert_eq!(watch.locks_of(session.pid), 0);
        assert_eq!(watch.int(&format!("select count(*) from lock_holders where pid = {}", session.pid)), 0);
    }
}

#[test]
fn ten_thousand_holds() {
    let cluster = Cluster::new(&["max_locks_per_transaction = 400"]);
    let mut a = cluster.session("views holder");
    let mut watch = cluster.session("watch");
    a.run("set named_locks.max_locks_per_session = 20000");
    a.run("select count(*) from generate_series(1, 5000) as i where named_lock('many:' || i)");
    a.run("begin");
    a.run("select count(*) from generate_series(5001, 10000) as i where named_xact_lock('many:' || i)");
    let begun = Instant::now();
    assert_eq!(watch.int("select count(*) from lock_holders"), 10_000);
    // The contract has 100 ms for a build that is optimised.
    assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
    assert_eq!(
        watch.text(
            "select concat_ws(' ', count(distinct name), min(name), count(distinct domain), sum(holds), \
                                          count(*) filter (where kind = 'session')) from lock_holders"
        ),
        "10000 many:1 1 10000 5000"
    );
    a.run("commit");
    assert_eq!(watch.int("select count(*) from lock_holders"), 5000);
    assert_eq!(a.int("select named_unlock_all()"), 5000);
    assert_eq!(watch.int("select count(*) from lock_holders"), 0);
    assert_eq!(watch.locks_of(a.pid), 0);
}

/// Without shared memory for the names, locking goes on: no call becomes one that does nothing.
#[test]
fn without_shared_memory_locking_goes_on() {
    let cluster = Cluster::bare(&["dynamic_shared_memory_type = mmap"]);
    // Segments are files there: now nobody can make one.
    run(as_server_user("chmod").arg("555").arg(cluster.data().join("pg_dynshmem")));
    cluster.session("create extension").run("create extension named_locks");
    let mut watch = cluster.session("watch");
    let mut warned = 0;
    for form in Form::all() {
        let lock = form.lock(&unique("views"));
        let mut a = cluster.session("views a");
        let mut b = cluster.session("views b");
        a.run(if form.call { "" } else { "begin" });
        for _ in 0..2 {
            assert!(answer(form, a.query(&lock.acquire(Some("1 s")))).held(), "{form:?}");
        }
        let notices = a.notices();
        assert!(notices.iter().filter(|notice| notice.severity == "WARNING").count() <= 1, "one warning: {notices:#?}");
        warned += notices.len();
        for timeout in ["0", "20 ms"] {
            let said = answer(form, b.query(&lock.acquire(Some(timeout))));
            assert!(matches!(said, Answer::NotHeld), "{form:?}: {said:?}");
        }
        assert_eq!(watch.int(&format!("select count(*) from lock_holders where pid = {}", a.pid)), 1, "{form:?}");
        if form.strict {
            b.fails(&lock.acquire(Some("0"))).is("55P03").detail_has(&a.pid.to_string());
        }
        a.run(if form.call { "" } else { "commit" });
        if form.is_session() {
            a.run(&lock.unlock());
            assert_eq!(watch.rows_for(&lock.target, a.pid, true), 1, "{form:?}");
            a.run(&lock.unlock());
        }
        assert_eq!(watch.rows_for(&lock.target, a.pid, true), 0, "{form:?}");
        assert!(answer(form, b.query(&lock.acquire(Some("0")))).held(), "{form:?}");
    }
    assert!(warned > 0, "nobody was told");
}

/// Many sessions, each with a few locks.
#[test]
fn holders_of_many_sessions() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let k = unique("views");
    let mut sessions: Vec<Session> = (0..60)
        .map(|number| {
            let mut session = server.session("views many");
            session.run(&format!("select named_lock('{k} {number}'), named_lock('{k} shared', mode => 'share')"));
            session
        })
        .collect();
    let shown = format!("select count(*) from lock_holders where name like '{k} %'");
    assert_eq!(watch.int(&shown), 120);
    sessions.truncate(20);
    until("forty are gone", || watch.int(&shown) == 40);
    assert_eq!(watch.int(&format!("select count(*) from lock_holders where name = '{k} shared'")), 20);
}

/// Everything works without the extension's schema in the search_path, and with traps in it.
#[test]
fn nothing_depends_on_the_callers_search_path() {
    let server = Server::shared();
    let schema = unique_ident("named_locks_elsewhere");
    let trap = unique_ident("trap");
    let database = server.new_database("views_schema", "UTF8");
    let mut a = database.session("views");
    a.run(&format!(
        "drop extension named_locks cascade; create schema {schema}; create extension named_locks schema {schema}; \
         create schema {trap}; \
         create type {trap}.named_lock_mode as enum ('trap'); \
         create function {trap}.clock_timestamp() returns timestamptz language plpgsql as $$ begin raise 'trapped'; end $$; \
         create function {trap}._lock_holders() returns int language plpgsql as $$ begin raise 'trapped'; end $$; \
         create function {trap}.minus(timestamptz, timestamptz) returns interval language plpgsql as $$ begin raise 'trapped'; end $$; \
         create operator {trap}.- (leftarg = timestamptz, rightarg = timestamptz, function = {trap}.minus); \
         set search_path = {trap}, pg_catalog"
    ));
    let k = unique("views");
    assert!(a.flag(&format!("select {schema}.named_lock('{k}', '1 s', 'share')")));
    assert!(a.flag(&format!("select {schema}.named_lock_convert('{k}', 'exclusive', '1 s')")));
    a.run(&format!("call {schema}.named_lock_wait('{k}', '1 s')"));
    assert_eq!(a.int(&format!("select holds from {schema}.lock_holders where name = '{k}'")), 2);
    assert_eq!(a.int(&format!("select count(*) from {schema}.lock_waiters where pid = {}", a.pid)), 0);
    a.run(&format!("select {schema}.lock_graph()"));
    a.fails(&format!("select {schema}.named_unlock('{k}', 'share')")).is("55000");
    assert_eq!(a.int(&format!("select {schema}.named_unlock_all()")), 2);
}
