//! Cases C22 to C24, C27, C28, C46 and C52: what the ends of transactions, savepoints and sessions do to locks.

use super::support::{
    Answer, Cluster, Form, Lock, Server, Session, SqlError, Target, answer, literal, unique, unique_ident, until,
};

const MODES: [&str; 5] = ["exclusive", "share", "intent share", "intent exclusive", "share intent exclusive"];

/// What the view shows of a session: kind, name, mode and count of each row.
fn shown(watch: &mut Session, pid: i32) -> Vec<String> {
    watch.column(&format!(
        "select concat_ws(' ', kind, name, mode, holds) from lock_holders where pid = {pid} \
          order by kind, name, mode"
    ))
}

/// The forms that can be called in a transaction block.
fn in_blocks() -> impl Iterator<Item = Form> {
    Form::all().into_iter().filter(|form| !form.call)
}

/// Raises an error at run time, not when the statement is planned.
const FAIL: &str = "1 / (extract(epoch from clock_timestamp()) * 0)::int";

/// That the view shows what the lock manager has, lock by lock and mode by mode.
#[track_caller]
fn view_is_the_lock_manager(watch: &mut Session, pid: i32) {
    let key = "concat_ws(' ', classid, objid, objsubid, mode)";
    let held = watch.column(&format!(
        "select concat_ws(' ', classid, objid, objsubid, \
                          case mode when 'ExclusiveLock' then 'exclusive' when 'ShareLock' then 'share' \
                                    when 'RowShareLock' then 'intent share' \
                                    when 'RowExclusiveLock' then 'intent exclusive' \
                                    when 'ShareRowExclusiveLock' then 'share intent exclusive' end) \
           from pg_locks where locktype = 'advisory' and granted and pid = {pid} \
            and (objsubid >> 11) & 7 = 0 order by 1"
    ));
    let shown = watch.column(&format!("select distinct {key} from lock_holders where pid = {pid} order by 1"));
    assert_eq!(shown, held);
}

#[test]
fn c22_rollback_to_a_savepoint_frees_what_the_transaction_forms_took_after_it() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for form in in_blocks() {
        let mut a = server.session("c22");
        let before = form.lock(&unique("c22-before"));
        let after = form.lock(&unique("c22-after"));
        a.run("begin");
        a.run(&before.acquire(Some("0")));
        a.run("savepoint s");
        a.run(&after.acquire(Some("0")));
        assert_eq!(watch.rows_for(&after.target, a.pid, true), 1);
        a.run("rollback to s");
        let kept = i64::from(form.is_session());
        assert_eq!(watch.rows_for(&before.target, a.pid, true), 1, "{form:?}");
        assert_eq!(watch.rows_for(&after.target, a.pid, true), kept, "{form:?}");
        view_is_the_lock_manager(&mut watch, a.pid);
        assert_eq!(watch.flag(&after.for_holder().acquire(Some("0"))), kept == 0, "{form:?}");
        a.run("commit");
        assert_eq!(watch.rows_for(&before.target, a.pid, true), kept, "{form:?}");
        view_is_the_lock_manager(&mut watch, a.pid);
        watch.run("select pg_advisory_unlock_all()");
    }
}

#[test]
fn c22_the_case_itself() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let mut a = server.session("c22");
    let k = unique("c22");
    a.run(&format!("begin; savepoint s; select named_xact_lock('{k} 1'), named_lock('{k} 2')"));
    assert_eq!(
        shown(&mut watch, a.pid),
        [format!("session {k} 2 exclusive 1"), format!("transaction {k} 1 exclusive 1")]
    );
    a.run("rollback to s");
    assert_eq!(shown(&mut watch, a.pid), [format!("session {k} 2 exclusive 1")]);
    assert!(watch.flag(&format!("select named_lock('{k} 1', '0')")));
    assert!(!watch.flag(&format!("select named_lock('{k} 2', '0')")));
    a.run("rollback");
    assert_eq!(a.int(&format!("select named_unlock('{k} 2')")), 0);
}

#[test]
fn c22_a_released_savepoint_hands_its_locks_to_the_one_around_it() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for form in in_blocks().filter(|form| !form.is_session()) {
        let mut a = server.session("c22");
        let lock = form.lock(&unique("c22"));
        a.run("begin; savepoint one; savepoint two; savepoint three");
        a.run(&lock.acquire(Some("0")));
        for (step, held) in [("release three", 1), ("release two", 1), ("rollback to one", 0)] {
            a.run(step);
            assert_eq!(watch.rows_for(&lock.target, a.pid, true), held, "{form:?} {step}");
            view_is_the_lock_manager(&mut watch, a.pid);
        }
        a.run("savepoint two");
        a.run(&lock.acquire(Some("0")));
        for (step, held) in
            [("release two", 1), ("release one", 1), ("savepoint one; rollback to one", 1), ("commit", 0)]
        {
            a.run(step);
            assert_eq!(watch.rows_for(&lock.target, a.pid, true), held, "{form:?} {step}");
            view_is_the_lock_manager(&mut watch, a.pid);
        }
    }
}

/// One name in every level: each rollback takes its own part and no more.
#[test]
fn c22_counts_by_level() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let mut a = server.session("c22");
    let k = unique("c22");
    let take = format!("select named_xact_lock('{k}')");
    let held = format!("select named_lock_held('{k}')");
    for mode in MODES {
        let take = take.replace("')", &format!("', mode => '{mode}')"));
        let mut step = |a: &mut Session, sql: &str, count: i64| {
            a.run(sql);
            assert_eq!(a.int(&held), count, "{mode}: {sql}");
            let row = format!("transaction {k} {mode} {count}");
            assert_eq!(shown(&mut watch, a.pid), if count == 0 { vec![] } else { vec![row] }, "{mode}: {sql}");
        };
        a.run("begin");
        step(&mut a, &format!("{take}; {take}"), 2);
        step(&mut a, &format!("savepoint one; {take}"), 3);
        step(&mut a, &format!("savepoint two; {take}; {take}"), 5);
        step(&mut a, "rollback to two", 3);
        step(&mut a, &take, 4);
        step(&mut a, "release two", 4);
        step(&mut a, "rollback to one", 2);
        step(&mut a, &format!("{take}; release one"), 3);
        step(&mut a, "rollback", 0);
    }
}

#[test]
fn c22_modes_taken_in_a_savepoint_go_alone() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let mut a = server.session("c22");
    let mut b = server.session("c22 other");
    for function in ["named_lock", "named_xact_lock"] {
        let k = unique("c22");
        a.run(&format!("begin; select {function}('{k}', mode => 'share'); savepoint s"));
        a.run(&format!("select named_xact_lock('{k}'), named_xact_lock('{k}', mode => 'intent exclusive')"));
        assert!(!b.flag(&format!("select named_lock('{k}', '0', 'share')")));
        a.run("rollback to s");
        let kind = if function == "named_lock" { "session" } else { "transaction" };
        assert_eq!(shown(&mut watch, a.pid), [format!("{kind} {k} share 1")]);
        assert!(b.flag(&format!("select named_lock('{k}', '0', 'share')")), "the stronger modes are gone");
        assert!(!b.flag(&format!("select named_lock('{k}', '0', 'intent exclusive')")));
        a.run("commit");
        a.run("select named_unlock_all()");
        b.run("select named_unlock_all()");
    }
}

#[test]
fn c22_session_and_transaction_holds_of_one_name_and_mode() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for mode in MODES {
        for session_is_first in [true, false] {
            let mut a = server.session("c22");
            let k = unique("c22");
            let by_session = format!("select named_lock('{k}', mode => '{mode}')");
            let by_transaction = format!("select named_xact_lock('{k}', mode => '{mode}')");
            let session_row = format!("session {k} {mode} 1");
            let both = [session_row.clone(), format!("transaction {k} {mode} 1")];

            // Both within the savepoint.
            a.run("begin; savepoint s");
            if session_is_first {
                a.run(&format!("{by_session}; {by_transaction}"));
            } else {
                a.run(&format!("{by_transaction}; {by_session}"));
            }
            assert_eq!(shown(&mut watch, a.pid), both);
            a.run("rollback to s");
            assert_eq!(shown(&mut watch, a.pid), [session_row.as_str()]);

            // The transaction's part alone.
            a.run(&by_transaction);
            assert_eq!(shown(&mut watch, a.pid), both);
            a.run("rollback to s");
            assert_eq!(shown(&mut watch, a.pid), [session_row.as_str()]);

            // Giving back is not undone, whatever becomes of the savepoint.
            a.run(&by_transaction);
            assert_eq!(a.int(&format!("select named_unlock('{k}')")), 0);
            assert_eq!(shown(&mut watch, a.pid), both[1..]);
            a.run("rollback to s");
            assert_eq!(shown(&mut watch, a.pid), [""; 0]);
            assert_eq!(watch.locks_of(a.pid), 0);

            // The session's part in the savepoint, the transaction's before it.
            a.run(&format!("rollback; begin; {by_transaction}; savepoint s; {by_session}; rollback to s"));
            assert_eq!(shown(&mut watch, a.pid), both);
            a.run("commit");
            assert_eq!(shown(&mut watch, a.pid), [session_row.as_str()]);
            assert_eq!(a.int(&format!("select named_unlock('{k}')")), 0);
            assert_eq!(watch.locks_of(a.pid), 0);
        }
    }
}

#[test]
fn c22_a_caught_exception_is_a_savepoint() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for form in in_blocks() {
        let mut a = server.session("c22");
        let lock = form.lock(&unique("c22"));
        a.run(&format!(
            "begin; do $$ begin \
               begin perform {}; raise 'x'; exception when others then null; end; \
             end $$",
            lock.expression(Some("0"), "")
        ));
        let kept = i64::from(form.is_session());
        assert_eq!(watch.rows_for(&lock.target, a.pid, true), kept, "{form:?}");
        view_is_the_lock_manager(&mut watch, a.pid);
        // Without an exception it is kept, and goes with an exception further out.
        a.run(&format!(
            "do $$ begin \
               begin \
                 begin perform {}; exception when others then null; end; \
                 raise 'x'; \
               exception when others then null; end; \
             end $$",
            lock.expression(Some("0"), "")
        ));
        assert_eq!(watch.rows_for(&lock.target, a.pid, true), kept, "{form:?}");
        view_is_the_lock_manager(&mut watch, a.pid);
        a.run("commit");
        view_is_the_lock_manager(&mut watch, a.pid);
    }
}

#[test]
fn c22_ten_thousand_caught_exceptions_leave_nothing() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let mut a = server.session("c22");
    let k = unique("c22");
    a.run(&format!(
        "begin; select named_xact_lock('{k}'); \
         do $$ begin for i in 1..10000 loop \
           begin perform named_xact_lock('{k}'), named_xact_lock('{k} ' || i % 7); raise 'x'; \
           exception when others then null; end; \
         end loop; end $$"
    ));
    assert_eq!(shown(&mut watch, a.pid), [format!("transaction {k} exclusive 1")]);
    assert_eq!(a.int(&format!("select named_lock_held('{k}')")), 1);
    a.run("commit");
    assert_eq!(watch.locks_of(a.pid), 0);
}

/// What is locked through a cursor belongs to the transaction around the cursor, wherever it was fetched.
#[test]
fn c22_a_cursor_of_the_outer_transaction_fetched_in_a_savepoint() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for mode in MODES {
        for (fetch, close) in [(1, ""), (3, ""), (2, "close c")] {
            let mut a = server.session("c22");
            let k = unique("c22");
            a.run(&format!(
                "begin; declare c cursor for select named_xact_lock('{k}', mode => '{mode}') from generate_series(1, 9); \
                 savepoint s; fetch {fetch} from c; {close}"
            ));
            let row = format!("transaction {k} {mode} {fetch}");
            assert_eq!(shown(&mut watch, a.pid), [row.as_str()]);
            a.run("rollback to s");
            assert_eq!(watch.locks_of(a.pid), 1, "the server keeps it");
            assert_eq!(shown(&mut watch, a.pid), [row.as_str()], "{mode} {close}");
            assert_eq!(a.int(&format!("select named_lock_held('{k}')")), fetch, "{mode} {close}");
            a.run("commit");
            assert_eq!(shown(&mut watch, a.pid), [""; 0]);
            assert_eq!(watch.locks_of(a.pid), 0);
        }
    }
}

#[test]
fn c22_a_cursor_fetched_in_a_savepoint_of_a_session_that_holds_the_name_already() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for mode in MODES {
        for held_by in ["session", "transaction"] {
            let mut a = server.session("c22");
            let k = unique("c22");
            let function = if held_by == "session" { "named_lock" } else { "named_xact_lock" };
            a.run(&format!(
                "begin; select {function}('{k}', mode => '{mode}'); \
                 declare c cursor for select named_xact_lock('{k}', mode => '{mode}') from generate_series(1, 9); \
                 savepoint s; fetch 1 from c; rollback to s"
            ));
            if held_by == "session" {
                assert_eq!(
                    shown(&mut watch, a.pid),
                    [format!("session {k} {mode} 1"), format!("transaction {k} {mode} 1")]
                );
                assert_eq!(a.int(&format!("select named_unlock('{k}')")), 0);
                assert_eq!(shown(&mut watch, a.pid), [format!("transaction {k} {mode} 1")]);
                assert_eq!(a.int(&format!("select named_lock_held('{k}')")), 1);
            } else {
                assert_eq!(shown(&mut watch, a.pid), [format!("transaction {k} {mode} 2")]);
            }
            a.run("commit");
            assert_eq!(shown(&mut watch, a.pid), [""; 0]);
            assert_eq!(watch.locks_of(a.pid), 0);
        }
    }
}

#[test]
fn c22_cursors_of_savepoints() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let declare = |k: &str| format!("declare c cursor for select named_xact_lock('{k}') from generate_series(1, 9)");
    for (what, before, after, kept) in [
        (
            "of a released savepoint, fetched in another",
            "savepoint one; $d; release one; savepoint two; fetch c",
            "rollback to two",
            true,
        ),
        ("of the savepoint itself", "savepoint one; $d; fetch c", "rollback to one", false),
        ("of the outer savepoint", "savepoint one; $d; savepoint two; fetch c", "rollback to two", true),
        (
            "of the outer savepoint, and that one back, too",
            "savepoint one; $d; savepoint two; fetch c",
            "rollback to two; rollback to one",
            false,
        ),
        ("two levels down", "$d; savepoint one; savepoint two; fetch c", "rollback to one", true),
        (
            "released, then rolled back further out",
            "$d; savepoint one; savepoint two; fetch c; release two",
            "rollback to one",
            true,
        ),
        ("fetched in both", "$d; fetch c; savepoint one; fetch c", "rollback to one", true),
        (
            "with an error of its own",
            "$d; savepoint one; fetch c",
            "select 1 / (random() * 0)::int; rollback to one",
            true,
        ),
        ("read to its end", "$d; savepoint one; fetch all c", "rollback to one", true),
    ] {
        let mut a = server.session("c22");
        let k = unique("c22");
        a.run("begin");
        a.run(&before.replace("$d", &declare(&k)));
        for step in after.split("; ") {
            if let Err(error) = a.query(step) {
                error.is("22012");
            }
        }
        assert_eq!(watch.locks_of(a.pid), i64::from(kept), "{what}: by the lock manager");
        view_is_the_lock_manager(&mut watch, a.pid);
        let names = watch.column(&format!("select concat_ws(' ', kind, name) from lock_holders where pid = {}", a.pid));
        assert_eq!(names, if kept { vec![format!("transaction {k}")] } else { vec![] }, "{what}");
        a.run("commit");
        assert_eq!(watch.locks_of(a.pid), 0, "{what}");
        assert_eq!(shown(&mut watch, a.pid), [""; 0], "{what}");
    }
}

#[test]
fn c22_three_hundred_nested_savepoints() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let mut a = server.session("c22");
    let k = unique("c22");
    let held = format!("select named_lock_held('{k}')");
    let count = format!("select count(*) from lock_holders where pid = {}", a.pid);
    a.run("begin");
    for level in 1..=300 {
        a.run(&format!("savepoint s{level}; select named_xact_lock('{k}'), named_xact_lock('{k} {level}')"));
    }
    assert_eq!(a.int(&held), 300);
    assert_eq!(watch.int(&count), 301);
    a.run("rollback to s201");
    assert_eq!(a.int(&held), 200);
    assert_eq!(watch.int(&count), 201);
    view_is_the_lock_manager(&mut watch, a.pid);
    a.run("release s151");
    assert_eq!(a.int(&held), 200);
    a.run("rollback to s150");
    assert_eq!(a.int(&held), 149);
    assert_eq!(watch.int(&count), 150);
    a.run("release s1");
    assert_eq!(a.int(&held), 149);
    assert_eq!(shown(&mut watch, a.pid)[0], format!("transaction {k} exclusive 149"));
    a.run("rollback");
    assert_eq!(shown(&mut watch, a.pid), [""; 0]);
    assert_eq!(watch.locks_of(a.pid), 0);
}

#[test]
fn c22_three_hundred_nested_exception_blocks() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let mut a = server.session("c22");
    let k = unique("c22");
    let nest = unique_ident("c22_nest");
    a.run(&format!(
        "create function {nest}(level int) returns void language plpgsql as $$ begin \
           begin \
             perform named_xact_lock('{k}'), named_xact_lock('{k} ' || level); \
             if level < 300 then perform {nest}(level + 1); end if; \
             if level = 150 then raise 'x'; end if; \
           exception when raise_exception then null; end; \
         end $$"
    ));
    a.run(&format!("begin; select {nest}(1)"));
    assert_eq!(a.int(&format!("select named_lock_held('{k}')")), 149);
    assert_eq!(watch.int(&format!("select count(*) from lock_holders where pid = {}", a.pid)), 150);
    view_is_the_lock_manager(&mut watch, a.pid);
    a.run("commit");
    assert_eq!(watch.locks_of(a.pid), 0);
}

#[test]
fn c23_an_error_after_the_lock_leaves_session_locks_and_frees_the_others() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for form in in_blocks() {
        for failure in ["select 1/0", "set statement_timeout = '20ms'; select pg_sleep(60)", "no SQL"] {
            let mut a = server.session("c23");
            let lock = form.lock(&unique("c23"));
            a.run("begin");
            a.run(&lock.acquire(Some("0")));
            a.fails(failure);
            // Before the ROLLBACK already.
            let kept = i64::from(form.is_session());
            assert_eq!(watch.rows_for(&lock.target, a.pid, true), kept, "{form:?}");
            view_is_the_lock_manager(&mut watch, a.pid);
            a.fails(&lock.unlock()).is("25P02");
            a.run("rollback");
            assert_eq!(watch.rows_for(&lock.target, a.pid, true), kept, "{form:?}");
            if form.is_session() {
                a.run(&lock.unlock());
            }
            assert_eq!(watch.locks_of(a.pid), 0, "{form:?}");
        }
    }
}

#[test]
fn c23_an_error_in_the_statement_that_locks() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for form in in_blocks() {
        for block in ["begin", "select 1"] {
            let mut a = server.session("c23");
            let lock = form.lock(&unique("c23"));
            a.run(block);
            a.fails(&format!("{}, {FAIL}", lock.acquire(Some("0")))).is("22012");
            let kept = i64::from(form.is_session());
            assert_eq!(watch.rows_for(&lock.target, a.pid, true), kept, "{form:?}");
            view_is_the_lock_manager(&mut watch, a.pid);
            a.run("rollback");
            if form.is_session() {
                a.run(&lock.unlock());
            }
            assert_eq!(watch.locks_of(a.pid), 0, "{form:?}");
        }
    }
}

#[test]
fn c23_a_commit_that_fails() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let table = unique_ident("c23");
    watch.run(&format!("create table {table} (i int unique deferrable initially deferred)"));
    for form in in_blocks() {
        let mut a = server.session("c23");
        let lock = form.lock(&unique("c23"));
        a.run(&format!("begin; insert into {table} values (1), (1)"));
        a.run(&lock.acquire(Some("0")));
        a.fails("commit").is("23505");
        let kept = i64::from(form.is_session());
        assert_eq!(watch.rows_for(&lock.target, a.pid, true), kept, "{form:?}");
        view_is_the_lock_manager(&mut watch, a.pid);
    }
}

/// A transaction form outside a block ends with its statement, as natively.
#[test]
fn c23_a_transaction_form_outside_a_block_ends_with_its_statement() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for form in in_blocks().filter(|form| !form.is_session()) {
        let mut a = server.session("c23");
        let lock = form.lock(&unique("c23"));
        a.run(&lock.acquire(Some("0")));
        assert_eq!(watch.locks_of(a.pid), 0, "{form:?}");
        assert_eq!(shown(&mut watch, a.pid), [""; 0]);
        // A string of statements is one transaction.
        let held = a.int(&format!(
            "{}; select count(*) from pg_locks where locktype = 'advisory' and pid = pg_backend_pid()",
            lock.acquire(Some("0")).replace("select ", "do $$ begin perform ") + "; end $$"
        ));
        assert_eq!(held, 1, "{form:?}");
        assert_eq!(watch.locks_of(a.pid), 0, "{form:?}");
    }
}

#[test]
fn c24_the_statement_after_the_lock_sees_the_last_holders_commit() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let table = unique_ident("c24");
    watch.run(&format!(
        "create table {table} (id int, v int); insert into {table} select i, 0 from generate_series(1, 99) as i"
    ));
    for (id, form) in Form::all().into_iter().enumerate() {
        let lock = form.lock(&unique("c24"));
        let mut a = server.session("c24 a");
        let read = format!("select v from {table} where id = {}", id + 1);
        let holder = if form.call { lock.for_holder() } else { lock.clone() };
        a.run("begin");
        a.run(&holder.acquire(Some("0")));
        a.run(&format!("update {table} set v = 1 where id = {}", id + 1));
        let mut b = server.session("c24 b");
        if !form.call {
            b.run("begin");
        }
        assert_eq!(b.int(&read), 0);
        let waiting = b.background(&lock.acquire(None));
        watch.until_waiting(waiting.pid);
        a.run("commit");
        if form.is_session() {
            a.run(&lock.unlock());
        }
        let (mut b, result) = waiting.end();
        assert!(answer(form, result).held(), "{form:?}");
        assert_eq!(b.int(&read), 1, "{form:?}");
    }
}

/// The same within one function, whose statements have snapshots of their own.
#[test]
fn c24_a_function_that_locks_and_reads() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let table = unique_ident("c24");
    let function = unique_ident("c24_next");
    let k = unique("c24");
    watch.run(&format!(
        "create table {table} (v int); insert into {table} values (0); \
         create function {function}() returns int language plpgsql as $$ declare seen int; begin \
           perform named_xact_lock('{k}'); \
           select v into seen from {table}; \
           update {table} set v = seen + 1; \
           return seen; \
         end $$"
    ));
    let workers: Vec<_> = (0..4)
        .map(|_| {
            let call = format!("select {function}()");
            server.session("c24").spawn(move |session| (0..100).map(|_| session.int(&call)).collect::<Vec<_>>())
        })
        .collect();
    let mut seen: Vec<i64> = workers.into_iter().flat_map(|worker| worker.end().1).collect();
    seen.sort_unstable();
    assert_eq!(seen, (0..400).collect::<Vec<_>>(), "no two read the same");
}

#[test]
fn c27_a_session_lock_in_a_procedure_that_commits() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let table = unique_ident("c27");
    let procedure = unique_ident("c27_batches");
    let k = unique("c27");
    watch.run(&format!("create table {table} (batch int)"));
    for (variant, take) in [
        "perform named_lock('$k')",
        "perform named_lock('$k', cluster_wide => true)",
        "call named_lock_wait('$k', acquired => got)",
        "perform named_lock('$k', mode => 'share')",
        "perform named_lock('$k'), named_xact_lock('$k')",
    ]
    .into_iter()
    .enumerate()
    {
        let k = format!("{k} {variant}");
        // Each batch stops at a gate that the watcher holds.
        watch.run(&format!(
            "create or replace procedure {procedure}() language plpgsql as $$ declare got boolean; begin \
               {}; \
               for batch in 1..3 loop \
                 insert into {table} values (batch); \
                 commit; \
                 perform named_xact_lock('{k} gate ' || batch); \
                 insert into {table} values (-batch); \
                 rollback; \
               end loop; \
             end $$; \
             truncate {table}; \
             select named_lock('{k} gate ' || batch) from generate_series(1, 3) as batch",
            take.replace("$k", &k)
        ));
        let running = server.session("c27").background(&format!("call {procedure}()"));
        for batch in 1..=3 {
            watch.until_waiting(running.pid);
            until("the batch is committed", || watch.int(&format!("select count(*) from {table}")) == batch);
            let row =
                format!("select kind || ' ' || holds from lock_holders where pid = {} and name = '{k}'", running.pid);
            assert_eq!(watch.column(&row), ["session 1"], "{take}, batch {batch}");
            assert!(!watch.flag(&format!("select named_lock('{k}', '0', cluster_wide => {})", variant == 1)));
            watch.run(&format!("select named_unlock('{k} gate {batch}')"));
        }
        let (mut a, result) = running.end();
        result.unwrap_or_else(|error| panic!("{take}: {error:#?}"));
        assert_eq!(watch.int(&format!("select sum(batch) from {table}")), 6);
        assert_eq!(watch.locks_of(a.pid), 1, "{take}: still held after the procedure");
        assert_eq!(a.int("select named_unlock_all()"), 1);
        assert_eq!(watch.locks_of(a.pid), 0);
    }
}

#[test]
fn c27_a_transaction_lock_in_a_procedure_goes_with_each_commit() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let mut a = server.session("c27");
    let k = unique("c27");
    for end in ["commit", "rollback"] {
        a.run(&format!(
            "do $$ begin \
               for i in 1..3 loop \
                 perform named_xact_lock('{k}'), named_xact_lock('{k} ' || i); \
                 if named_lock_held('{k}') <> 1 then raise 'held % times', named_lock_held('{k}'); end if; \
                 {end}; \
                 if named_lock_held('{k}') <> 0 then raise 'still held'; end if; \
               end loop; \
               perform named_xact_lock('{k} last'); \
             end $$"
        ));
        assert_eq!(watch.locks_of(a.pid), 0);
        assert_eq!(shown(&mut watch, a.pid), [""; 0]);
    }
}

/// Names a prepared transaction's rows in the view.
fn shown_prepared(watch: &mut Session, gid: &str) -> Vec<String> {
    watch.column(&format!(
        "select concat_ws(' ', kind, coalesce(name, '-'), mode, holds, state, coalesce(pid::text, 'no pid')) \
           from lock_holders \
          where gid = {} order by kind, name, mode",
        literal(gid)
    ))
}

#[test]
fn c28_prepared_in_each_mode() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let conflicts = [
        ("exclusive", MODES.to_vec()),
        ("share", vec!["exclusive", "intent exclusive", "share intent exclusive"]),
        ("intent share", vec!["exclusive"]),
        ("intent exclusive", vec!["exclusive", "share", "share intent exclusive"]),
        ("share intent exclusive", vec!["exclusive", "share", "intent exclusive", "share intent exclusive"]),
    ];
    for (mode, shut_out) in conflicts {
        for cluster_wide in [false, true] {
            for end in ["commit", "rollback"] {
                let (k, gid) = (unique("c28"), unique("c28 gid"));
                let mut a = server.session("c28");
                let wide = format!("cluster_wide => {cluster_wide}");
                a.run(&format!(
                    "begin; select named_xact_lock('{k}', mode => '{mode}', {wide}), \
                                   named_xact_lock('{k}', mode => '{mode}', {wide}); \
                     prepare transaction '{gid}'"
                ));
                let row = format!("transaction {k} {mode} 2 prepared no pid");
                assert_eq!(shown_prepared(&mut watch, &gid), [row.as_str()]);
                assert_eq!(shown(&mut watch, a.pid), [""; 0], "the session has nothing any more");
                assert_eq!(a.int(&format!("select named_lock_held('{k}', {wide})")), 0);
                a.fails(&format!("select named_unlock('{k}', {wide})"))
                    .is("55000")
                    .message_has(&k)
                    .detail_has("prepared");
                drop(a);
                for other in MODES {
                    let free = watch.flag(&format!("select named_lock('{k}', '0', '{other}', {wide})"));
                    assert_eq!(free, !shut_out.contains(&other), "prepared {mode}, asked for {other}");
                    watch.run("select named_unlock_all()");
                }
                assert_eq!(shown_prepared(&mut watch, &gid), [row.as_str()]);
                watch.run(&format!("{end} prepared '{gid}'"));
                assert_eq!(shown_prepared(&mut watch, &gid), [""; 0]);
                assert!(watch.flag(&format!("select named_lock('{k}', '0', {wide})")));
                watch.run("select named_unlock_all()");
            }
        }
    }
}

#[test]
fn c28_who_waits_for_a_prepared_transaction_gets_the_lock_at_its_end() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for form in Form::all() {
        for end in ["commit", "rollback"] {
            let gid = unique("c28 gid");
            let lock = form.lock(&unique("c28"));
            let by_transaction = in_blocks()
                .find(|other| !other.is_session() && !other.strict && other.lock("x").target == form.lock("x").target)
                .expect("each has its transaction form");
            let mut a = server.session("c28");
            a.run("begin");
            a.run(&Lock { form: by_transaction, target: lock.target.clone() }.acquire(Some("0")));
            a.run(&format!("prepare transaction '{gid}'"));
            let mut b = server.session("c28 waiter");
            let said = answer(form, b.query(&lock.acquire(Some("20 ms"))));
            assert!(matches!(said, Answer::NotHeld), "{form:?}: {said:?}");
            if form.strict {
                b.fails(&lock.acquire(Some("0"))).hint_has("ROLLBACK PREPARED");
            }
            let waiting = b.background(&lock.acquire(None));
            watch.until_waiting(waiting.pid);
            assert_eq!(
                watch.column(&format!(
                    "select blocked_by from lock_waiters where pid = {} and {}",
                    waiting.pid,
                    lock.target.in_lock_waiters()
                )),
                ["{0}"],
                "{form:?}: 0 stands for a prepared transaction"
            );
            watch.run(&format!("{end} prepared '{gid}'"));
            let (_, result) = waiting.end();
            assert!(answer(form, result).held(), "{form:?}");
        }
    }
}

#[test]
fn c28_what_a_prepared_transaction_has_and_has_not() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let (k, gid) = (unique("c28"), unique("c28 gid"));
    let mut a = server.session("c28");
    a.run(&format!(
        "select named_lock('{k} session before'); \
         begin; \
         select named_xact_lock('{k} one'), named_lock('{k} session'); \
         savepoint s; select named_xact_lock('{k} two', mode => 'share'); release s; \
         savepoint s; select named_xact_lock('{k} three'), named_xact_lock('{k} one'); rollback to s; \
         savepoint s; select named_xact_lock('{k} one')"
    ));
    a.run(&format!("prepare transaction '{gid}'"));
    assert_eq!(
        shown_prepared(&mut watch, &gid),
        [
            format!("transaction {k} one exclusive 2 prepared no pid"),
            format!("transaction {k} two share 1 prepared no pid")
        ]
    );
    assert_eq!(
        shown(&mut watch, a.pid),
        [format!("session {k} session exclusive 1"), format!("session {k} session before exclusive 1")]
    );
    assert!(watch.flag(&format!("select named_lock('{k} three', '0')")));
    // The session goes on: its next locks are its own, the same names in compatible modes too.
    assert!(a.flag(&format!("select named_lock('{k} two', '0', 'share')")));
    assert_eq!(a.int(&format!("select named_unlock('{k} two')")), 0);
    assert!(!a.flag(&format!("select named_lock('{k} one', '0')")), "not even its own old lock");
    assert_eq!(a.int("select named_unlock_all()"), 2);
    assert_eq!(shown_prepared(&mut watch, &gid).len(), 2);
    watch.run(&format!("rollback prepared '{gid}'"));
    assert_eq!(shown_prepared(&mut watch, &gid).len(), 0);
}

#[test]
fn c28_held_both_ways_cannot_be_prepared() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for mode in MODES {
        let (k, gid) = (unique("c28"), unique("c28 gid"));
        let mut a = server.session("c28");
        a.run(&format!("begin; select named_lock('{k}', mode => '{mode}'), named_xact_lock('{k}', mode => '{mode}')"));
        // The server's own rule for any lock.
        a.fails(&format!("prepare transaction '{gid}'")).is("0A000");
        a.run("rollback");
        assert_eq!(shown_prepared(&mut watch, &gid).len(), 0);
        assert_eq!(
            shown(&mut watch, a.pid),
            [format!("session {k} {mode} 1")],
            "the transaction's part went, the session's stayed"
        );
        assert_eq!(a.int(&format!("select named_unlock('{k}')")), 0);
        assert_eq!(watch.locks_of(a.pid), 0);
    }
}

#[test]
fn c28_two_prepared_transactions_share_a_name() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let mut a = server.session("c28");
    let (k, gid) = (unique("c28"), unique("c28 gid"));
    for number in 1..=2 {
        a.run(&format!("begin; select named_xact_lock('{k}', mode => 'share'); prepare transaction '{gid} {number}'"));
    }
    let row = format!("transaction {k} share 1 prepared no pid");
    for number in 1..=2 {
        assert_eq!(shown_prepared(&mut watch, &format!("{gid} {number}")), [row.as_str()]);
    }
    watch.run(&format!("commit prepared '{gid} 1'"));
    assert_eq!(shown_prepared(&mut watch, &format!("{gid} 1")), [""; 0]);
    assert_eq!(shown_prepared(&mut watch, &format!("{gid} 2")), [row.as_str()]);
    assert!(!watch.flag(&format!("select named_lock('{k}', '0')")));
    watch.run(&format!("commit prepared '{gid} 2'"));
    assert!(watch.flag(&format!("select named_lock('{k}', '0')")));
}

/// Names of prepared transactions are not kept for ever: many of them, one after the other, each with the right name.
#[test]
fn c28_many_prepared_transactions_in_turn() {
    let server = Server::shared();
    let mut a = server.session("c28");
    let (k, gid) = (unique("c28"), unique("c28 gid"));
    for round in 0..300 {
        a.run(&format!("begin; select named_xact_lock('{k}'), named_xact_lock('{k} {round}')"));
        a.run(&format!("prepare transaction '{gid}'"));
        if round % 50 == 0 {
            assert_eq!(
                shown_prepared(&mut a, &gid),
                [
                    format!("transaction {k} exclusive 1 prepared no pid"),
                    format!("transaction {k} {round} exclusive 1 prepared no pid")
                ]
            );
        }
        a.run(&format!("rollback prepared '{gid}'"));
    }
    assert!(a.flag(&format!("select named_lock('{k}', '0')")));
}

#[test]
fn c28_a_prepared_transactions_lock_survives_a_restart_without_its_name() {
    let cluster = Cluster::new(&[]);
    let names = [("one", "exclusive", false), ("two", "share", false), ("everywhere", "intent exclusive", true)];
    let mut a = cluster.session("c28");
    a.run("begin");
    for (name, mode, cluster_wide) in names {
        a.run(&format!("select named_xact_lock('{name}', mode => '{mode}', cluster_wide => {cluster_wide})"));
    }
    a.run("select pg_advisory_xact_lock(42)");
    a.run("prepare transaction 'the gid'");
    for immediate in [false, true, true] {
        if immediate {
            cluster.stop_immediate();
        } else {
            cluster.stop();
        }
        cluster.start();
        let mut watch = cluster.session("watch");
        let rows = shown_prepared(&mut watch, "the gid");
        assert_eq!(
            rows,
            [
                "advisory - exclusive prepared no pid",
                "transaction - exclusive prepared no pid",
                "transaction - share prepared no pid",
                "transaction - intent exclusive prepared no pid"
            ]
        );
        for (name, mode, cluster_wide) in names {
            let wide = format!("cluster_wide => {cluster_wide}");
            let target = Target::Name { name: name.into(), cluster_wide };
            assert_eq!(
                watch.column(&format!(
                    "select mode from lock_holders where gid = 'the gid' and (classid, objid, objsubid) = \
                     (select classid, objid, objsubid from named_lock_key('{name}', {wide}))"
                )),
                [mode]
            );
            assert!(!watch.flag(&format!("select named_lock('{name}', '0', {wide})")), "{name}");
            let error = watch.fails(&format!("select named_lock_strict('{name}', '0', {wide})"));
            error.is("55P03").message_has(name).detail_has("prepared");
            assert_eq!(watch.rows_for(&target, watch.pid, true), 0);
        }
        // What is compatible with it gets in and out.
        assert!(watch.flag("select named_lock('two', '0', 'share')"));
        assert_eq!(watch.int("select named_unlock('two')"), 0);
        assert!(!watch.flag("select advisory_lock(42, timeout => '0')"));
    }
    let mut watch = cluster.session("watch");
    let waiting = cluster.session("c28 waiter").background("select named_lock('one')");
    watch.until_waiting(waiting.pid);
    watch.run("commit prepared 'the gid'");
    assert_eq!(waiting.end().1.expect("no error")[0].get(0), Some("t"));
    assert_eq!(shown_prepared(&mut watch, "the gid"), [""; 0]);
    for (name, _, cluster_wide) in &names[1..] {
        assert!(watch.flag(&format!("select named_lock('{name}', '0', cluster_wide => {cluster_wide})")));
    }
}

/// The functions go and come again under sessions that hold, wait and run.
#[test]
fn c46_drop_extension_with_locks_held_and_create_it_again() {
    let server = Server::shared();
    let database = server.new_database("c46", "UTF8");
    let mut admin = database.session("c46 admin");
    let k = unique("c46");

    let mut a = database.session("c46 holder");
    a.run(&format!(
        "select named_lock('{k}'), named_lock('{k}'), named_lock('{k} share', mode => 'share'), \
                advisory_lock(46), named_lock('{k} long' || repeat('x', 900)), \
                named_lock('{k} wide', cluster_wide => true)"
    ));
    let mut b = database.session("c46 in a transaction");
    b.run(&format!(
        "begin; select named_xact_lock('{k} transaction'), named_lock('{k} both'), named_xact_lock('{k} both')"
    ));
    let waiter = database.session("c46 waiter").background(&format!("select named_lock('{k}')"));
    admin.until_waiting(waiter.pid);

    for schema in ["public", "elsewhere"] {
        admin.run("drop extension named_locks cascade");
        a.fails(&format!("select named_unlock('{k}')")).is("42883");
        assert_eq!(admin.locks_of(a.pid), 5, "locks outlive the functions");
        admin.run(&format!(
            "create schema if not exists {schema}; create extension named_locks schema {schema}; \
             set search_path = {schema}, public"
        ));
        a.run(&format!("set search_path = {schema}, public"));
        assert_eq!(shown(&mut admin, a.pid).len(), 5, "in {schema}");
        assert_eq!(a.int(&format!("select named_lock_held('{k}')")), 2, "in {schema}");
        assert_eq!(a.int(&format!("select named_lock_held('{k} share', 'share')")), 1, "in {schema}");
    }
    b.run("set search_path = elsewhere, public");
    assert_eq!(a.int(&format!("select named_unlock('{k}')")), 1);
    assert!(!waiter.finished());
    assert_eq!(a.int(&format!("select named_unlock('{k}')")), 0);
    let (c, result) = waiter.end();
    assert_eq!(result.expect("no error")[0].get(0), Some("t"));
    assert_eq!(shown(&mut admin, c.pid), [format!("session {k} exclusive 1")]);

    assert_eq!(a.int("select named_unlock_all()"), 3);
    a.run("select pg_advisory_unlock(46)");
    assert_eq!(admin.locks_of(a.pid), 0);

    // And without it, at the end of a transaction and of a session.
    admin.run("drop extension named_locks");
    b.run("commit");
    assert_eq!(
        b.int(
            "select count(*) from pg_locks \
                           where locktype = 'advisory' and pid = pg_backend_pid() and (objsubid >> 11) & 7 = 0"
        ),
        1
    );
    let gone = [b.pid, c.pid];
    drop((b, c));
    for pid in gone {
        admin.until_gone(pid);
        assert_eq!(admin.locks_of(pid), 0);
    }
    admin.run("create extension named_locks schema elsewhere");
    assert_eq!(admin.int(&format!("select count(*) from lock_holders where name like '{k}%'")), 0);
    assert_eq!(a.int(&format!("select named_lock('{k}')::int")), 1);
}

#[test]
fn c46_drop_extension_by_the_holder_itself_and_undone() {
    let server = Server::shared();
    let database = server.new_database("c46", "UTF8");
    let mut watch = server.session("watch");
    let mut a = database.session("c46");
    let k = unique("c46");
    a.run(&format!("begin; select named_lock('{k}'), named_xact_lock('{k} x'); drop extension named_locks; rollback"));
    assert_eq!(a.int(&format!("select named_lock_held('{k}')")), 1);
    assert_eq!(a.int(&format!("select named_lock_held('{k} x')")), 0);
    a.run(&format!(
        "begin; select named_xact_lock('{k} x'); drop extension named_locks; create extension named_locks; commit"
    ));
    assert_eq!(shown(&mut watch, a.pid), [format!("session {k} exclusive 1")]);
    for mode in MODES {
        assert!(a.flag(&format!("select named_lock('{k} {mode}', '0', '{mode}')")), "{mode}");
        assert_eq!(a.int(&format!("select named_lock_held('{k} {mode}', '{mode}')")), 1);
    }
    assert_eq!(a.int("select named_unlock_all()"), 6);
    assert_eq!(watch.locks_of(a.pid), 0);
}

#[test]
fn c46_a_hold_limit_outlives_the_extension() {
    let server = Server::shared();
    let database = server.new_database("c46", "UTF8");
    let mut watch = server.session("watch");
    let mut a = database.session("c46");
    let k = unique("c46");
    a.run(&format!("select named_lock('{k}', hold_limit => '400 ms'); drop extension named_locks"));
    watch.until_gone(a.pid);
    assert_eq!(watch.locks_of(a.pid), 0);
}

#[test]
fn c52_pg_advisory_unlock_all_takes_the_session_row_and_leaves_the_transactions() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let mut b = server.session("c52 other");
    for mode in MODES {
        for session_is_first in [true, false] {
            let mut a = server.session("c52");
            let k = unique("c52");
            let by_session = format!("select named_lock('{k}', mode => '{mode}'), named_lock('{k}', mode => '{mode}')");
            let by_transaction = format!("select named_xact_lock('{k}', mode => '{mode}')");
            a.run("begin");
            if session_is_first {
                a.run(&format!("{by_session}; {by_transaction}"));
            } else {
                a.run(&format!("{by_transaction}; {by_session}"));
            }
            let transaction_row = format!("transaction {k} {mode} 1");
            assert_eq!(shown(&mut watch, a.pid), [format!("session {k} {mode} 2"), transaction_row.clone()]);
            a.run("select pg_advisory_unlock_all()");
            assert_eq!(shown(&mut watch, a.pid), [transaction_row.as_str()]);
            assert_eq!(a.int(&format!("select named_lock_held('{k}')")), 1);
            assert_eq!(shown(&mut watch, a.pid), [transaction_row.as_str()]);
            a.run("savepoint s");
            a.fails(&format!("select named_unlock('{k}')")).is("55000").message_has(&k);
            a.run("rollback to s");
            assert!(!b.flag(&format!("select named_lock('{k}', '0', 'exclusive')")));

            // Once more, and this time the session's part is given back as it should be.
            a.run(&by_session);
            assert_eq!(shown(&mut watch, a.pid), [format!("session {k} {mode} 2"), transaction_row.clone()]);
            assert_eq!(a.int(&format!("select named_unlock('{k}')")), 1);
            assert_eq!(a.int(&format!("select named_unlock('{k}')")), 0);
            assert_eq!(shown(&mut watch, a.pid), [transaction_row.as_str()]);
            a.run("commit");
            assert_eq!(shown(&mut watch, a.pid), [""; 0]);
            assert_eq!(watch.locks_of(a.pid), 0, "nothing internal is left either");
        }
    }
}

#[test]
fn c52_several_names_held_both_ways() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let mut a = server.session("c52");
    let k = unique("c52");
    let both = |name: &str| format!("select named_lock('{k} {name}'), named_xact_lock('{k} {name}')");
    a.run(&format!(
        "begin; {}; {}; select named_lock('{k} session'), named_xact_lock('{k} transaction')",
        both("a"),
        both("b")
    ));
    assert_eq!(shown(&mut watch, a.pid).len(), 6);
    // One of the two is no longer held both ways.
    assert_eq!(a.int(&format!("select named_unlock('{k} a')")), 0);
    a.run("select pg_advisory_unlock_all()");
    let rows = ["a", "b", "transaction"].map(|name| format!("transaction {k} {name} exclusive 1"));
    assert_eq!(shown(&mut watch, a.pid), rows);
    a.run(&format!("{}; savepoint s; {}; rollback to s", both("c"), both("d")));
    a.run("select pg_advisory_unlock_all()");
    assert_eq!(a.int("select named_unlock_all()"), 0);
    let rows = ["a", "b", "c", "transaction"].map(|name| format!("transaction {k} {name} exclusive 1"));
    assert_eq!(shown(&mut watch, a.pid), rows);
    a.run("rollback");
    assert_eq!(watch.locks_of(a.pid), 0);
    assert_eq!(shown(&mut watch, a.pid), [""; 0]);
}

#[test]
fn c52_other_modes_of_the_name() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let mut b = server.session("c52 other");
    let mut a = server.session("c52");
    let k = unique("c52");
    a.run(&format!("begin; select named_lock('{k}', mode => 'exclusive'), named_xact_lock('{k}', mode => 'share')"));
    a.run("select pg_advisory_unlock_all()");
    assert_eq!(shown(&mut watch, a.pid), [format!("transaction {k} share 1")]);
    assert!(b.flag(&format!("select named_lock('{k}', '0', 'share')")));
    a.run("commit");
    assert_eq!(shown(&mut watch, a.pid), [""; 0]);
}

/// `DISCARD ALL` can't be in a block; what it meets is a session that the last transaction left with both.
#[test]
fn c52_discard_all_after_the_transaction() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let mut a = server.session("c52");
    let k = unique("c52");
    a.run(&format!("begin; select named_lock('{k}'), named_xact_lock('{k}'); commit"));
    assert_eq!(shown(&mut watch, a.pid), [format!("session {k} exclusive 1")]);
    a.run("discard all");
    assert_eq!(shown(&mut watch, a.pid), [""; 0]);
    assert_eq!(watch.locks_of(a.pid), 0);
    a.run(&format!("begin; select named_lock('{k}'), named_xact_lock('{k}')"));
    assert_eq!(shown(&mut watch, a.pid), [format!("session {k} exclusive 1"), format!("transaction {k} exclusive 1")]);
    a.run("rollback");
    assert_eq!(a.int(&format!("select named_unlock('{k}')")), 0);
}

/// Errors of one transaction after another, and the session is as good as new.
#[test]
fn c23_a_hundred_failed_transactions_in_a_row() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let mut a = server.session("c23");
    let k = unique("c23");
    for round in 0..100 {
        a.run(&format!("begin; select named_xact_lock('{k}'); savepoint s; select named_lock('{k} {round}')"));
        let errors: Vec<SqlError> = vec![a.fails("select 1/0"), a.fails("select 1")];
        assert_eq!(errors.iter().map(|error| error.code.as_str()).collect::<Vec<_>>(), ["22012", "25P02"]);
        a.run("rollback");
    }
    assert_eq!(watch.locks_of(a.pid), 100);
    assert_eq!(shown(&mut watch, a.pid).len(), 100);
    assert_eq!(a.int("select named_unlock_all()"), 100);
    assert_eq!(watch.locks_of(a.pid), 0);
}
