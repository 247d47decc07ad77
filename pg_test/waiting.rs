//! Cases C09 to C16, C48 and C50, and rules 1 to 3: timeouts, the truth of the answer, the queue, and who is in the way.

use super::support::{
    Answer, Form, Lock, Rows, Running, Server, Session, SqlError, answer, let_pass, stop_process, unique, unique_ident,
    until, within,
};
use std::time::{Duration, Instant};

type Waiting = Running<Result<Rows, SqlError>>;

/// Starts a call and returns when it waits.
#[track_caller]
fn start(session: Session, sql: &str, watch: &mut Session) -> Waiting {
    let waiting = session.background(sql);
    watch.until_waiting(waiting.pid);
    waiting
}

/// A session that holds the lock.
#[track_caller]
fn holder(server: &Server, lock: &Lock) -> Session {
    let mut holder = server.session("the holder");
    assert!(holder.flag(&lock.for_holder().acquire(Some("0"))), "{lock:?} was free");
    holder
}

/// That a session holds nothing of a lock, by the lock manager.
#[track_caller]
fn holds_nothing(watch: &mut Session, lock: &Lock, pid: i32) {
    assert_eq!(watch.rows_for(&lock.target, pid, true), 0, "{:?}: held after all", lock.form);
    assert_eq!(watch.rows_for(&lock.target, pid, false), 0, "{:?}: still in the queue", lock.form);
}

/// That what a call answered is so: in the lock manager, in the view and for the next one who tries.
#[track_caller]
fn tells_the_truth(watch: &mut Session, lock: &Lock, session: &mut Session, answer: &Answer) {
    let rows = watch.rows_for(&lock.target, session.pid, true);
    let shown = watch.int(&format!(
        "select count(*) from lock_holders where pid = {} and {}",
        session.pid,
        lock.target.in_lock_holders()
    ));
    // A transaction form outside a block has let go at its statement's end.
    let held = i64::from(answer.held() && lock.form.is_session());
    assert_eq!(rows, held, "{:?} answered {answer:?}", lock.form);
    assert_eq!(shown, held, "{:?} answered {answer:?}, in lock_holders", lock.form);
    assert_eq!(
        watch.flag(&lock.for_holder().acquire(Some("0"))),
        held == 0,
        "{:?} answered {answer:?}, and another tries",
        lock.form
    );
    if held == 0 {
        watch.run(&lock.unlock());
    } else {
        session.run(&lock.unlock());
        holds_nothing(watch, lock, session.pid);
    }
}

#[test]
fn timeout_0_is_one_try() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for form in Form::all() {
        let lock = form.lock(&unique("try"));
        let mut a = holder(server, &lock);
        let mut b = server.session("b");
        // It wins over a lock_timeout, and neither waits nor leaves anything.
        b.run("set lock_timeout = '1h'");
        let said = answer(form, b.query(&lock.acquire(Some("0"))));
        assert!(matches!(said, Answer::NotHeld), "{form:?}: {said:?}");
        holds_nothing(&mut watch, &lock, b.pid);
        a.run(&lock.unlock());
        let said = answer(form, b.query(&lock.acquire(Some("0"))));
        assert!(said.held(), "{form:?}: {said:?}");
        tells_the_truth(&mut watch, &lock, &mut b, &said);
    }
}

#[test]
fn timeout_wins_over_lock_timeout_and_passes_in_time() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for form in Form::all() {
        let lock = form.lock(&unique("limit"));
        let _a = holder(server, &lock);
        for lock_timeout in ["0", "10ms", "1h"] {
            let mut b = server.session("b");
            b.run(&format!("set lock_timeout = '{lock_timeout}'"));
            let begun = Instant::now();
            let said = answer(form, b.query(&lock.acquire(Some("150 ms"))));
            assert!(matches!(said, Answer::NotHeld), "{form:?} {lock_timeout}: {said:?}");
            assert!(begun.elapsed() >= Duration::from_millis(150), "{form:?}: too early");
            assert!(begun.elapsed() < Duration::from_secs(10), "{form:?}: too late");
            holds_nothing(&mut watch, &lock, b.pid);
        }
    }
}

#[test]
fn other_limits_still_raise_and_nothing_is_held_after() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for form in Form::all() {
        for timeout in [Some("1 hour"), None] {
            let lock = form.lock(&unique("cancel"));
            let _a = holder(server, &lock);

            let waiting = start(server.session("b"), &lock.acquire(timeout), &mut watch);
            watch.run(&format!("select pg_cancel_backend({})", waiting.pid));
            let (b, result) = waiting.end();
            answer(form, result).error().is("57014");
            holds_nothing(&mut watch, &lock, b.pid);

            let mut b = server.session("b");
            b.run("set statement_timeout = '200ms'");
            answer(form, b.query(&lock.acquire(timeout))).error().is("57014").message_has("statement timeout");
            b.run("set statement_timeout = 0");
            holds_nothing(&mut watch, &lock, b.pid);

            let waiting = start(server.session("b"), &lock.acquire(timeout), &mut watch);
            watch.run(&format!("select pg_terminate_backend({})", waiting.pid));
            let (b, result) = waiting.end();
            result.expect_err("terminated").is_end_of_session();
            watch.until_gone(b.pid);
            holds_nothing(&mut watch, &lock, b.pid);
        }
    }
}

#[test]
fn a_waiter_gets_the_lock_when_it_is_let_go() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for form in Form::all() {
        for timeout in [None, Some("1 hour")] {
            let lock = form.lock(&unique("handover"));
            let mut a = holder(server, &lock);
            let waiting = start(server.session("b"), &lock.acquire(timeout), &mut watch);
            assert!(!waiting.finished());
            a.run(&lock.unlock());
            let (mut b, result) = waiting.end();
            let said = answer(form, result);
            assert!(said.held(), "{form:?}: {said:?}");
            tells_the_truth(&mut watch, &lock, &mut b, &said);
        }
        // The holder's end lets go as well.
        let lock = form.lock(&unique("handover"));
        let a = holder(server, &lock);
        let waiting = start(server.session("b"), &lock.acquire(None), &mut watch);
        drop(a);
        let (mut b, result) = waiting.end();
        let said = answer(form, result);
        tells_the_truth(&mut watch, &lock, &mut b, &said);
    }
}

#[test]
fn c09_a_deadlock_with_a_row_is_found_and_names_the_lock() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let table = unique_ident("c09");
    watch.run(&format!("create table {table} (id int primary key, v text)"));
    // CALL can't wait in a transaction block, so it can't hold a row: see the next test.
    for (id, form) in Form::all().into_iter().filter(|form| !form.call).enumerate() {
        watch.run(&format!("insert into {table} values ({id}, 'old')"));
        let lock = form.lock(&unique("c09"));
        let mut a = holder(server, &lock);
        let mut b = server.session("c09 b");
        b.run("set deadlock_timeout = '200ms'");
        b.run(&format!("begin; update {table} set v = 'b' where id = {id}"));
        a.run("set deadlock_timeout = '1h'");
        let update = start(a, &format!("update {table} set v = 'a' where id = {id}"), &mut watch);

        let begun = Instant::now();
        let said = answer(form, b.query(&lock.acquire(Some("1 hour"))));
        said.error().is("40P01").context_has(&lock.called());
        assert!(begun.elapsed() < Duration::from_secs(10), "{form:?}: {:?}", begun.elapsed());
        b.run("rollback");
        holds_nothing(&mut watch, &lock, b.pid);

        // The survivor goes on.
        let (mut a, result) = update.end();
        result.expect("the survivor goes on");
        a.run(&lock.unlock());
    }
    assert_eq!(watch.int(&format!("select count(*) from {table} where v <> 'a'")), 0, "every survivor wrote");
}

#[test]
fn c09_the_one_who_waits_for_the_row_may_be_the_victim() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let table = unique_ident("c09");
    watch.run(&format!("create table {table} (id int primary key, v text)"));
    for (id, form) in Form::all().into_iter().filter(|form| !form.call).enumerate() {
        watch.run(&format!("insert into {table} values ({id}, 'old')"));
        let lock = form.lock(&unique("c09"));
        let mut a = holder(server, &lock);
        let mut b = server.session("c09 b");
        b.run("set deadlock_timeout = '1h'");
        b.run(&format!("begin; update {table} set v = 'b' where id = {id}"));
        let waiting = start(b, &lock.acquire(None), &mut watch);
        a.run("set deadlock_timeout = '100ms'");
        a.fails(&format!("update {table} set v = 'a' where id = {id}")).is("40P01");
        // Its session lock stays, as after any error; then B is served.
        assert_eq!(watch.rows_for(&lock.target, a.pid, true), 1);
        a.run(&lock.unlock());
        let (mut b, result) = waiting.end();
        let said = answer(form, result);
        assert!(said.held(), "{form:?}: {said:?}");
        b.run("commit");
    }
}

#[test]
fn c09_a_deadlock_of_two_locks_names_the_one_waited_for() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for form in Form::all() {
        let first = form.lock(&unique("c09-first"));
        let second = form.lock(&unique("c09-second"));
        let mut a = holder(server, &first);
        let mut b = holder(server, &second);
        a.run("set deadlock_timeout = '1h'");
        b.run("set deadlock_timeout = '100ms'");
        let waiting = start(a, &second.acquire(None), &mut watch);
        let said = answer(form, b.query(&first.acquire(Some("1 hour"))));
        said.error().is("40P01").context_has(&first.called()).detail_has("advisory lock");
        holds_nothing(&mut watch, &first, b.pid);
        assert_eq!(watch.rows_for(&second.target, b.pid, true), 1, "the older hold stays");
        b.run(&second.unlock());
        let (mut a, result) = waiting.end();
        let said = answer(form, result);
        assert!(said.held(), "{form:?}: {said:?}");
        if form.is_session() {
            a.run(&second.unlock());
        }
    }
}

#[test]
fn c10_false_leaves_the_transaction_and_every_setting_as_they_were() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let table = unique_ident("c10");
    watch.run(&format!("create table {table} (v text)"));
    let settings = "select md5(string_agg(concat_ws(' ', name, setting, source), ',' order by name)) \
                      from pg_settings";
    for form in Form::all().into_iter().filter(|form| !form.call && !form.strict) {
        for timeout in ["0", "200 ms"] {
            let lock = form.lock(&unique("c10"));
            let mut a = holder(server, &lock);
            let mut b = server.session("c10 b");
            b.run("select count(*) from lock_holders");
            b.run("set lock_timeout = '7s'");
            b.run("begin; set local lock_timeout = '8s'");
            b.run(&format!("insert into {table} values ('{form:?} {timeout} before')"));
            let before = b.text(settings);
            assert!(!b.flag(&lock.acquire(Some(timeout))));
            assert_eq!(b.text("show lock_timeout"), "8s", "{form:?}");
            assert_eq!(b.text(settings), before, "{form:?}");
            b.run(&format!("insert into {table} values ('{form:?} {timeout} after')"));
            b.run("commit");
            assert_eq!(watch.int(&format!("select count(*) from {table} where v like '{form:?} {timeout} %'")), 2);
            assert_eq!(b.text("show lock_timeout"), "7s");
            holds_nothing(&mut watch, &lock, b.pid);
            a.run(&lock.unlock());
        }
    }
}

/// What `show` says isn't all: the waits that follow have to go by it.
#[test]
fn c10_the_next_native_wait_goes_by_the_servers_lock_timeout() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for form in Form::all() {
        let lock = form.lock(&unique("c10"));
        let other = Form::bigint().lock(&unique("c10-native"));
        let _a = (holder(server, &lock), holder(server, &other));
        let native = other.acquire(None).replace("advisory_lock", "pg_advisory_lock");

        let mut b = server.session("c10 b");
        b.run("set lock_timeout = '300ms'");
        let said = answer(form, b.query(&lock.acquire(Some("1 ms"))));
        assert!(matches!(said, Answer::NotHeld), "{said:?}");
        let begun = Instant::now();
        b.fails(&native).is("55P03");
        assert!(begun.elapsed() >= Duration::from_millis(300), "{form:?}: not by the short one");

        // An error of the call leaves it as it was, too.
        b.run("set statement_timeout = '100ms'");
        b.fails(&lock.acquire(Some("1 hour"))).is("57014");
        b.run("set statement_timeout = 0");
        assert_eq!(b.text("show lock_timeout"), "300ms");
        b.fails(&native).is("55P03");

        b.run("set lock_timeout = 0");
        let said = answer(form, b.query(&lock.acquire(Some("50 ms"))));
        assert!(matches!(said, Answer::NotHeld), "{said:?}");
        let waiting = start(b, &native, &mut watch);
        let_pass(150);
        assert!(!waiting.finished(), "{form:?}: the limit outlived its call");
        watch.run(&format!("select pg_cancel_backend({})", waiting.pid));
        waiting.end().1.expect_err("cancelled").is("57014");
    }
}

#[test]
fn c11_a_timeout_wins_over_a_shorter_lock_timeout() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for form in Form::all() {
        let lock = form.lock(&unique("c11"));
        let mut a = holder(server, &lock);
        let mut b = server.session("c11 b");
        b.run("set lock_timeout = '100ms'");
        let waiting = start(b, &lock.acquire(Some("1 hour")), &mut watch);
        let_pass(250);
        assert!(!waiting.finished(), "{form:?}: lock_timeout ended it");
        a.run(&lock.unlock());
        let (mut b, result) = waiting.end();
        let said = answer(form, result);
        assert!(said.held(), "{form:?}: {said:?}");
        tells_the_truth(&mut watch, &lock, &mut b, &said);
    }
}

#[test]
fn c11_without_a_timeout_lock_timeout_raises() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for form in Form::all() {
        let lock = form.lock(&unique("c11"));
        let _a = holder(server, &lock);
        let mut b = server.session("c11 b");
        b.run("set lock_timeout = '200ms'");
        for call in [lock.acquire(None), lock.acquire_with(None, "timeout => null")] {
            let begun = Instant::now();
            b.fails(&call).is("55P03").message_has(&lock.called());
            assert!(begun.elapsed() >= Duration::from_millis(200), "{form:?}");
            assert!(begun.elapsed() < Duration::from_secs(10), "{form:?}");
            holds_nothing(&mut watch, &lock, b.pid);
        }
    }
}

/// What ends a stopped waiter's wait.
#[derive(Clone, Copy, Debug)]
enum Cause {
    Timeout,
    LockTimeout,
    StatementTimeout,
    Cancel,
    TimeoutAndCancel,
}

/// Stops a waiter past its limit, lets the lock go, and wakes the waiter: its answer has to be true.
///
/// The lock is granted while the limit's signal is pending, so that both are found at the same time.
fn stopped_past(cause: Cause, forms: Vec<Form>) {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let stopped: Vec<_> = forms
        .into_iter()
        .map(|form| {
            let lock = form.lock(&unique("c12"));
            let a = holder(server, &lock);
            let mut b = server.session("c12 b");
            let timeout = match cause {
                Cause::Timeout | Cause::TimeoutAndCancel => Some("1 s"),
                Cause::LockTimeout => {
                    b.run("set lock_timeout = '1s'");
                    None
                }
                Cause::StatementTimeout => {
                    b.run("set statement_timeout = '1s'");
                    Some("1 hour")
                }
                Cause::Cancel => None,
            };
            let begun = Instant::now();
            let waiting = b.background(&lock.acquire(timeout));
            watch.until_waiting(waiting.pid);
            let guard = stop_process(waiting.pid);
            // On a busy machine it may have ended before it was stopped: then this says nothing, and fails nothing.
            let in_time = begun.elapsed() < Duration::from_millis(990);
            (form, lock, a, waiting, guard, in_time)
        })
        .collect();
    let_pass(1100);
    let mut met = 0;
    for (form, lock, mut a, waiting, guard, in_time) in stopped {
        if matches!(cause, Cause::Cancel | Cause::TimeoutAndCancel) {
            watch.run(&format!("select pg_cancel_backend({})", waiting.pid));
        }
        a.run(&lock.unlock());
        guard.go_on();
        let (mut b, result) = waiting.end();
        let said = answer(form, result);
        match (cause, &said) {
            (_, Answer::Held) => {}
            (Cause::Timeout | Cause::TimeoutAndCancel, Answer::NotHeld) => {}
            // A strict form's 55P03 by the server's own lock_timeout.
            (Cause::LockTimeout, Answer::NotHeld) if form.strict => {}
            (Cause::LockTimeout, Answer::Failed(error)) => {
                error.is("55P03");
            }
            (Cause::StatementTimeout | Cause::Cancel | Cause::TimeoutAndCancel, Answer::Failed(error)) => {
                error.is("57014");
            }
            (cause, said) => panic!("{form:?} {cause:?}: {said:?}"),
        }
        b.run("reset statement_timeout");
        tells_the_truth(&mut watch, &lock, &mut b, &said);
        met += u32::from(in_time);
    }
    assert!(met > 0, "no waiter was stopped in time");
}

#[test]
fn c12_stopped_waiter_tells_the_truth_at_its_timeout() {
    stopped_past(Cause::Timeout, Form::all());
}

#[test]
fn c12_stopped_waiter_tells_the_truth_at_the_servers_lock_timeout() {
    stopped_past(Cause::LockTimeout, Form::all());
}

#[test]
fn c12_stopped_waiter_tells_the_truth_at_the_statement_timeout() {
    stopped_past(Cause::StatementTimeout, Form::all());
}

#[test]
fn c12_stopped_waiter_tells_the_truth_when_cancelled() {
    stopped_past(Cause::Cancel, Form::all());
}

#[test]
fn c12_stopped_waiter_tells_the_truth_when_timed_out_and_cancelled() {
    stopped_past(Cause::TimeoutAndCancel, Form::all());
}

/// The recipe meets the moment it is for: the server's own function leaves a lock behind by it.
#[test]
fn c12_the_recipe_makes_the_native_function_leak() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let lock = Form::bigint().lock(&unique("c12"));
    let mut a = holder(server, &lock);
    let mut b = server.session("c12 b");
    b.run("set lock_timeout = '1s'");
    let native = lock.acquire(None).replace("advisory_lock", "pg_advisory_lock");
    let waiting = b.background(&native);
    let guard = watch.stop_waiting(waiting.pid);
    let_pass(1100);
    a.run(&lock.unlock());
    guard.go_on();
    let (b, result) = waiting.end();
    result.expect_err("timed out").is("55P03");
    assert_eq!(watch.rows_for(&lock.target, b.pid, true), 1);
}

/// The same moment for one who stops while it is a transaction's lock, inside a block that goes on.
#[test]
fn c12_stopped_waiter_in_a_block_that_goes_on() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let stopped: Vec<_> = Form::all()
        .into_iter()
        .filter(|form| !form.call && !form.strict)
        .map(|form| {
            let lock = form.lock(&unique("c12"));
            let a = holder(server, &lock);
            let mut b = server.session("c12 b");
            b.run("begin");
            let waiting = b.background(&lock.acquire(Some("1 s")));
            let guard = watch.stop_waiting(waiting.pid);
            (form, lock, a, waiting, guard)
        })
        .collect();
    let_pass(1100);
    for (form, lock, mut a, waiting, guard) in stopped {
        a.run(&lock.unlock());
        guard.go_on();
        let (mut b, result) = waiting.end();
        let said = answer(form, result);
        assert!(matches!(said, Answer::Held | Answer::NotHeld), "{form:?}: {said:?}");
        let held = i64::from(said.held());
        assert_eq!(watch.rows_for(&lock.target, b.pid, true), held, "{form:?}: {said:?}");
        b.run("commit");
        let held = i64::from(said.held() && form.is_session());
        assert_eq!(watch.rows_for(&lock.target, b.pid, true), held, "{form:?}: {said:?}");
    }
}

#[test]
fn c12_stopped_convert_tells_the_truth() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for cause in ["timeout", "lock_timeout", "statement_timeout", "cancel"] {
        let k = unique("c12");
        let mut a = server.session("c12 a");
        a.run(&format!("select named_lock('{k}', mode => 'share')"));
        let mut b = server.session("c12 b");
        b.run(&format!("select named_lock('{k}', mode => 'share')"));
        let timeout = if cause == "timeout" { "'600 ms'" } else { "null" };
        if cause.ends_with("_timeout") {
            b.run(&format!("set {cause} = '600ms'"));
        }
        let waiting = b.background(&format!("select named_lock_convert('{k}', 'exclusive', {timeout})"));
        let guard = watch.stop_waiting(waiting.pid);
        let_pass(700);
        if cause == "cancel" {
            watch.run(&format!("select pg_cancel_backend({})", waiting.pid));
        }
        a.run(&format!("select named_unlock('{k}')"));
        guard.go_on();
        let (mut b, result) = waiting.end();
        let converted = match &result {
            Ok(rows) => rows[0].get(0) == Some("t"),
            Err(error) => {
                assert!(["55P03", "57014"].contains(&error.code.as_str()), "{error:#?}");
                false
            }
        };
        b.run("reset statement_timeout");
        assert_eq!(b.int(&format!("select named_lock_held('{k}')")), 1, "{cause}: {result:?}");
        let mode = watch
            .column(&format!("select mode || ' ' || holds from lock_holders where name = '{k}' and pid = {}", b.pid));
        let expected = if converted { "exclusive 1" } else { "share 1" };
        assert_eq!(mode, [expected], "{cause}: {result:?}");
        assert_eq!(watch.flag(&format!("select named_lock('{k}', '0', 'share')")), !converted, "{cause}: {result:?}");
        watch.query(&format!("select named_unlock('{k}')")).ok();
        assert_eq!(b.int(&format!("select named_unlock('{k}')")), 0);
        assert_eq!(watch.locks_of(b.pid), 0);
    }
}

#[test]
fn c13_timeouts_that_are_refused() {
    let server = Server::shared();
    let mut b = server.session("c13");
    let mut timeouts = vec![
        "-1 ms",
        "-1 microsecond",
        "-1 day",
        "1 day -25 hours",
        "-1 month 29 days",
        "24 days 1 ms",
        "24 days 1 microsecond",
        "25 days",
        "1 month",
        "10000 years",
        "178000000 years",
        "-178000000 years",
    ];
    // 14 itself refuses it.
    if b.int("show server_version_num") >= 150_000 {
        timeouts.push("2562047788:00:54.775807");
    }
    for form in Form::all() {
        let lock = form.lock(&unique("c13"));
        for &timeout in &timeouts {
            b.fails(&lock.acquire(Some(timeout))).is("22023").message_has("timeout");
            assert_eq!(b.locks_of(b.pid), 0, "{form:?} {timeout}");
        }
    }
}

#[test]
fn c13_timeouts_on_a_free_lock() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let mut b = server.session("c13");
    for form in Form::all() {
        for timeout in [
            "0",
            "1 microsecond",
            "1 ms",
            "1 day",
            "24 days",
            "1 day -23 hours",
            "-1 month 31 days",
            "1 month -29 days",
        ] {
            let lock = form.lock(&unique("c13"));
            let said = answer(form, b.query(&lock.acquire(Some(timeout))));
            assert!(said.held(), "{form:?} {timeout}: {said:?}");
            tells_the_truth(&mut watch, &lock, &mut b, &said);
        }
    }
}

#[test]
fn c13_long_timeouts_wait() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let endless = server.session("version").int("show server_version_num") >= 170_000;
    let mut timeouts = vec!["24 days", "23 days 23:59:59.999999"];
    timeouts.extend(endless.then_some("infinity"));
    for form in Form::all() {
        for &timeout in &timeouts {
            let lock = form.lock(&unique("c13"));
            let mut a = holder(server, &lock);
            let mut b = server.session("c13 b");
            if timeout == "infinity" {
                b.run("set lock_timeout = '100ms'");
            }
            let waiting = start(b, &lock.acquire(Some(timeout)), &mut watch);
            let_pass(200);
            assert!(!waiting.finished(), "{form:?} {timeout}");
            a.run(&lock.unlock());
            let (mut b, result) = waiting.end();
            let said = answer(form, result);
            assert!(said.held(), "{form:?} {timeout}: {said:?}");
            tells_the_truth(&mut watch, &lock, &mut b, &said);
        }
        if endless {
            let lock = form.lock(&unique("c13"));
            server.session("c13").fails(&lock.acquire(Some("-infinity"))).is("22023");
        }
    }
}

#[test]
fn c13_short_timeouts_are_kept() {
    let server = Server::shared();
    let k = unique("c13");
    let mut a = server.session("c13 a");
    a.run(&format!("select named_lock('{k}')"));
    let mut b = server.session("c13 b");
    for milliseconds in [1, 5, 20] {
        let limit = Duration::from_millis(milliseconds);
        let mut late: Vec<Duration> = (0..41)
            .map(|_| {
                let begun = Instant::now();
                assert!(!b.flag(&format!("select named_lock('{k}', '{milliseconds} ms')")));
                let took = begun.elapsed();
                assert!(took >= limit, "{took:?} is less than {limit:?}");
                took - limit
            })
            .collect();
        late.sort();
        // The median, as other tests keep the machine busy.
        assert!(late[20] < Duration::from_millis(10), "{limit:?} overrun by {:?}", late[20]);
    }
    // A part of a millisecond is rounded up: it is a wait, not a try that must never be.
    assert!(!b.flag(&format!("select named_lock('{k}', '1 microsecond')")));
}

#[test]
fn c14_ten_waiters_are_served_in_order_of_arrival() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for form in Form::all() {
        let lock = form.lock(&unique("c14"));
        let order = unique_ident("c14_order");
        watch.run(&format!("create sequence {order}"));
        let mut a = holder(server, &lock);
        let waiters: Vec<Running<i64>> = (0..10)
            .map(|_| {
                let (acquire, unlock) = (lock.acquire(Some("1 hour")), lock.unlock());
                let next = format!("select nextval('{order}')");
                let waiting = server.session("c14 waiter").spawn(move |session| {
                    if form.is_session() {
                        session.run(&acquire);
                        let position = session.int(&next);
                        session.run(&unlock);
                        position
                    } else {
                        session.run("begin");
                        session.run(&acquire);
                        let position = session.int(&next);
                        session.run("commit");
                        position
                    }
                });
                watch.until_waiting(waiting.pid);
                waiting
            })
            .collect();
        let queue = watch.column(&format!(
            "select pid from lock_waiters where {} order by queue_position",
            lock.target.in_lock_waiters()
        ));
        let pids: Vec<String> = waiters.iter().map(|waiter| waiter.pid.to_string()).collect();
        assert_eq!(queue, pids, "{form:?}: the queue as shown");
        a.run(&lock.unlock());
        let served: Vec<i64> = waiters.into_iter().map(|waiter| waiter.end().1).collect();
        assert_eq!(served, (1..=10).collect::<Vec<_>>(), "{form:?}");
    }
}

#[test]
fn c14_a_try_never_overtakes_a_waiter() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for form in Form::all() {
        let lock = form.lock(&unique("c14"));
        let share = "mode => 'share'";
        let mut a = server.session("c14 a");
        assert!(a.flag(&lock.for_holder().acquire_with(Some("0"), share)));
        // B can't share with A; C could, but B was there before.
        let waiting = start(server.session("c14 b"), &lock.acquire(Some("1 hour")), &mut watch);
        let mut c = server.session("c14 c");
        let said = answer(form, c.query(&lock.acquire_with(Some("0"), share)));
        assert!(matches!(said, Answer::NotHeld), "{form:?}: {said:?}");
        let said = answer(form, c.query(&lock.acquire_with(Some("50 ms"), share)));
        assert!(matches!(said, Answer::NotHeld), "{form:?}: {said:?}");
        // Who holds part already may go first.
        assert!(a.flag(&lock.for_holder().acquire_with(Some("0"), share)), "{form:?}");
        a.run(&lock.unlock());

        watch.run(&format!("select pg_cancel_backend({})", waiting.pid));
        waiting.end().1.expect_err("cancelled").is("57014");
        let said = answer(form, c.query(&lock.acquire_with(Some("0"), share)));
        assert!(said.held(), "{form:?}: a waiter that left is in nobody's way: {said:?}");
    }
}

/// The lock manager lets someone go first who already holds what a waiter waits for; the view shows its order.
#[test]
fn c14_a_holder_that_asks_for_more_goes_before_those_who_wait_for_it() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for form in Form::all() {
        let lock = form.lock(&unique("c14"));
        let (mut a, mut c) = (server.session("c14 a"), server.session("c14 c"));
        for session in [&mut a, &mut c] {
            assert!(session.flag(&lock.for_holder().acquire_with(Some("0"), "mode => 'share'")));
        }
        let b = start(server.session("c14 b"), &lock.acquire(None), &mut watch);
        let a = start(a, &lock.acquire(None), &mut watch);
        assert_eq!(
            watch.column(&format!(
                "select pid || ' at ' || queue_position from lock_waiters where {} order by queue_position",
                lock.target.in_lock_waiters()
            )),
            [format!("{} at 1", a.pid), format!("{} at 2", b.pid)],
            "{form:?}"
        );
        drop(c);
        let (a, result) = a.end();
        assert!(answer(form, result).held(), "{form:?}");
        assert!(!b.finished());
        drop(a);
        assert!(answer(form, b.end().1).held(), "{form:?}");
    }
}

#[test]
fn c14_who_leaves_the_queue_leaves_no_gap() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for form in Form::all() {
        let lock = form.lock(&unique("c14"));
        let mut a = holder(server, &lock);
        let times_out = start(server.session("times out"), &lock.acquire(Some("900 ms")), &mut watch);
        let cancelled = start(server.session("cancelled"), &lock.acquire(None), &mut watch);
        let ended = start(server.session("ended"), &lock.acquire(None), &mut watch);
        let last = start(server.session("last"), &lock.acquire(None), &mut watch);
        watch.run(&format!("select pg_cancel_backend({})", cancelled.pid));
        watch.run(&format!("select pg_terminate_backend({})", ended.pid));
        assert!(matches!(answer(form, times_out.end().1), Answer::NotHeld));
        cancelled.end().1.expect_err("cancelled").is("57014");
        ended.end().1.expect_err("ended").is_end_of_session();
        let queue =
            format!("select pid || ' at ' || queue_position from lock_waiters where {}", lock.target.in_lock_waiters());
        until("one is left in the queue", || watch.column(&queue) == [format!("{} at 1", last.pid)]);
        a.run(&lock.unlock());
        assert!(answer(form, last.end().1).held(), "{form:?}");
    }
}

#[test]
fn c15_a_waiter_whose_client_vanished_leaves_the_queue() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for form in Form::all() {
        let lock = form.lock(&unique("c15"));
        let mut a = holder(server, &lock);
        let name = unique("c15-client");
        let mut client = server
            .client("psql")
            .env("PGAPPNAME", &name)
            .env("PGOPTIONS", "-c client_connection_check_interval=300ms")
            .args(["-X", "-c", &lock.acquire(None)])
            .spawn()
            .expect("start psql");
        let queued = format!("select coalesce((select pid from lock_waiters where application_name = '{name}'), 0)");
        let mut pid = 0;
        until("the client's session waits", || {
            pid = watch.int(&queued) as i32;
            pid != 0
        });
        watch.until_waiting(pid);
        client.kill().expect("kill psql");
        client.wait().expect("psql's end");
        let gone = within(Duration::from_secs(5), || watch.rows_for(&lock.target, pid, false) == 0);
        assert!(gone, "{form:?}: it left the queue within the interval and a second");
        watch.until_gone(pid);
        holds_nothing(&mut watch, &lock, pid);
        a.run(&lock.unlock());
        assert!(watch.flag(&lock.for_holder().acquire(Some("0"))), "{form:?}");
    }
}

/// The texts that tell who holds a lock, for a holder in each state.
#[test]
fn c16_c50_a_strict_timeout_says_who_is_in_the_way() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for form in Form::all().into_iter().filter(|form| form.strict) {
        for state in ["idle", "idle in transaction", "active"] {
            let lock = form.lock(&unique("c16"));
            let mut a = holder(server, &lock);
            let application = unique("c16 holder");
            a.run(&format!("set application_name = '{application}'"));
            let address = a.text("select host(inet_client_addr())");
            let pid = a.pid;
            let busy = match state {
                "idle" => Err(a),
                "idle in transaction" => {
                    a.run("begin");
                    Err(a)
                }
                _ => Ok(a.background("select pg_sleep(3600)")),
            };
            until("the holder is in that state", || {
                watch.text(&format!("select state from pg_stat_activity where pid = {pid}")) == state
            });
            for timeout in ["0", "50 ms"] {
                let error = server.session("c16 b").fails(&lock.acquire(Some(timeout)));
                error
                    .is("55P03")
                    .message_has(&lock.called())
                    .detail_has(&pid.to_string())
                    .detail_has(&application)
                    .detail_has(&address)
                    .detail_has(state);
                if form.is_named() {
                    let since = watch.text(&format!(
                        "select to_char(acquired_at, 'YYYY-MM-DD HH24:MI:SS') from lock_holders \
                          where pid = {pid} and {}",
                        lock.target.in_lock_holders()
                    ));
                    error.detail_has(&since);
                }
            }
            if let Ok(busy) = busy {
                watch.run(&format!("select pg_cancel_backend({})", busy.pid));
                busy.end().1.expect_err("cancelled").is("57014");
            }
        }
    }
}

/// By a Unix socket there is no address, and an application's name may be any text.
#[test]
fn c16_a_holder_without_an_address_and_with_an_odd_name() {
    let server = Server::shared();
    let mut config = server.config("%s%n \"{}\"");
    let folder = server.session("where").text("show unix_socket_directories");
    let mut by_socket = postgres::Config::new();
    by_socket
        .host_path(folder)
        .port(server.port)
        .user(&server.user)
        .dbname(&server.dbname)
        .application_name("%s%n \"{}\"");
    config.application_name("");
    for (config, application) in [(by_socket, "%s%n"), (config, "")] {
        for form in Form::all().into_iter().filter(|form| form.strict) {
            let lock = form.lock(&unique("c16"));
            let mut a = Session::open(config.clone()).expect("a session");
            a.run(&lock.for_holder().acquire(Some("0")));
            let error = server.session("c16 b").fails(&lock.acquire(Some("0")));
            error.is("55P03").detail_has(&a.pid.to_string()).detail_has(application).detail_has("idle");
        }
    }
}

#[test]
fn c16_a_strict_timeout_behind_several_holders_or_a_waiter_names_one_of_them() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for form in Form::all().into_iter().filter(|form| form.strict) {
        let lock = form.lock(&unique("c16"));
        let share = "mode => 'share'";
        let mut holders: Vec<Session> = (0..3).map(|_| server.session("c16 sharer")).collect();
        for holder in &mut holders {
            assert!(holder.flag(&lock.for_holder().acquire_with(Some("0"), share)));
        }
        let error = server.session("c16 b").fails(&lock.acquire(Some("0")));
        error.is("55P03").detail_has("c16 sharer");
        assert!(holders.iter().any(|holder| error.detail.contains(&holder.pid.to_string())), "{error:#?}");

        // C could share with the holders, but for the one who waits.
        let waiting = start(server.session("c16 waiter"), &lock.acquire(None), &mut watch);
        let error = server.session("c16 c").fails(&lock.acquire_with(Some("0"), share));
        error.is("55P03").message_has(&lock.called());
        drop(holders);
        assert!(answer(form, waiting.end().1).held());
    }
}

#[test]
fn c16_lock_timeout_says_who_is_in_the_way_as_well() {
    let server = Server::shared();
    for form in Form::all() {
        let lock = form.lock(&unique("c16"));
        let a = holder(server, &lock);
        let mut b = server.session("c16 b");
        b.run("set lock_timeout = '50ms'");
        b.fails(&lock.acquire(None))
            .is("55P03")
            .message_has(&lock.called())
            .detail_has(&a.pid.to_string())
            .detail_has("the holder");
    }
}

/// Both limits run out while the waiter is stopped, and the lock may be let go as well. Where it can, the statement goes
/// on after the call: then the statement's limit has to end it.
#[test]
fn c48_both_limits_due_at_once() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    // The server reports the one that is due first, and forgets the other.
    for (released, limit) in [(true, "800 ms"), (false, "800 ms"), (true, "650 ms"), (false, "650 ms")] {
        let stopped: Vec<_> = Form::all()
            .into_iter()
            .map(|form| {
                let lock = form.lock(&unique("c48"));
                let a = holder(server, &lock);
                let mut b = server.session("c48 b");
                b.run("set statement_timeout = '800ms'");
                let call = lock.acquire(Some(limit));
                let waiting = b.background(&if form.call { call } else { format!("{call}, pg_sleep(20)") });
                let guard = watch.stop_waiting(waiting.pid);
                (form, lock, a, waiting, guard)
            })
            .collect();
        let_pass(900);
        for (form, lock, mut a, waiting, guard) in stopped {
            if released {
                a.run(&lock.unlock());
            }
            let begun = Instant::now();
            guard.go_on();
            let (mut b, result) = waiting.end();
            b.run("reset statement_timeout");
            assert!(begun.elapsed() < Duration::from_secs(10), "{form:?}: it slept on");
            if form.call {
                let said = answer(form, result);
                if let Answer::Failed(error) = &said {
                    error.is("57014");
                }
                if released {
                    tells_the_truth(&mut watch, &lock, &mut b, &said);
                } else {
                    assert!(!said.held());
                    holds_nothing(&mut watch, &lock, b.pid);
                }
                continue;
            }
            match result {
                // A strict form may say that its own limit passed.
                Err(error) if form.strict && error.code == "55P03" => {}
                Err(error) => {
                    error.is("57014").message_has("statement timeout");
                }
                Ok(_) => panic!("{form:?}: the statement timeout was lost"),
            }
            if !form.is_session() || !released {
                holds_nothing(&mut watch, &lock, b.pid);
            }
        }
    }
}

/// A session form that raised has nothing, whatever else its statement had in mind.
#[test]
fn c48_both_limits_due_at_once_and_nothing_after() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let limits = ["800 ms", "650 ms"];
    let stopped: Vec<_> = Form::all()
        .into_iter()
        .flat_map(|form| limits.map(|limit| (form, limit)))
        .map(|(form, limit)| {
            let lock = form.lock(&unique("c48"));
            let a = holder(server, &lock);
            let mut b = server.session("c48 b");
            b.run("set statement_timeout = '800ms'");
            let waiting = b.background(&lock.acquire(Some(limit)));
            let guard = watch.stop_waiting(waiting.pid);
            (form, lock, a, waiting, guard)
        })
        .collect();
    let_pass(900);
    for (form, lock, mut a, waiting, guard) in stopped {
        a.run(&lock.unlock());
        guard.go_on();
        let (mut b, result) = waiting.end();
        b.run("reset statement_timeout");
        let said = answer(form, result);
        if let Answer::Failed(error) = &said {
            error.is("57014");
        }
        tells_the_truth(&mut watch, &lock, &mut b, &said);
    }
}

/// A wait that ended at its timeout takes nothing from the limit of its statement.
#[test]
fn c48_the_statement_timeout_goes_on_after_false() {
    let server = Server::shared();
    for form in Form::all().into_iter().filter(|form| !form.call && !form.strict) {
        let lock = form.lock(&unique("c48"));
        let _a = holder(server, &lock);
        let mut b = server.session("c48 b");
        b.run("set statement_timeout = '400ms'");
        let begun = Instant::now();
        b.fails(&format!("{}, pg_sleep(20)", lock.acquire(Some("50 ms")))).is("57014").message_has("statement timeout");
        assert!(begun.elapsed() >= Duration::from_millis(400), "{form:?}: {:?}", begun.elapsed());
        assert!(begun.elapsed() < Duration::from_secs(10), "{form:?}: {:?}", begun.elapsed());
        // And in the next statement it starts anew.
        b.fails("select pg_sleep(20)").is("57014");
    }
}

#[test]
fn c48_both_limits_due_at_once_without_a_stop() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for form in Form::all().into_iter().filter(|form| !form.call) {
        let lock = form.lock(&unique("c48"));
        let _a = holder(server, &lock);
        let mut b = server.session("c48 b");
        b.run("set statement_timeout = '100ms'");
        for _ in 0..5 {
            let begun = Instant::now();
            let error = b.fails(&format!("{}, pg_sleep(20)", lock.acquire(Some("100 ms"))));
            assert!(error.code == "57014" || (form.strict && error.code == "55P03"), "{error:#?}");
            assert!(begun.elapsed() < Duration::from_secs(10), "{form:?}");
            holds_nothing(&mut watch, &lock, b.pid);
        }
    }
}

#[test]
fn convert_waits_and_leaves_the_old_hold_when_its_time_is_up() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for cluster_wide in [false, true] {
        let k = unique("convert");
        let wide = format!("cluster_wide => {cluster_wide}");
        let mut a = server.session("a");
        let mut b = server.session("b");
        for session in [&mut a, &mut b] {
            assert!(session.flag(&format!("select named_lock('{k}', '0', 'share', {wide})")));
        }
        for timeout in ["0", "100 ms"] {
            assert!(!b.flag(&format!("select named_lock_convert('{k}', 'exclusive', '{timeout}', {wide})")));
            assert_eq!(
                watch.column(&format!("select mode from lock_holders where name = '{k}' and pid = {}", b.pid)),
                ["share"]
            );
        }
        let waiting = start(b, &format!("select named_lock_convert('{k}', 'exclusive', {wide})"), &mut watch);
        a.run(&format!("select named_unlock('{k}', {wide})"));
        let (mut b, result) = waiting.end();
        assert_eq!(result.expect("no error")[0].get(0), Some("t"));
        assert_eq!(
            watch.column(&format!("select mode || ' ' || holds from lock_holders where name = '{k}'")),
            ["exclusive 1"]
        );
        assert!(!a.flag(&format!("select named_lock('{k}', '0', 'intent share', {wide})")));
        // Down again, at once, and others come in.
        assert!(b.flag(&format!("select named_lock_convert('{k}', 'intent share', '0', {wide})")));
        assert!(a.flag(&format!("select named_lock('{k}', '0', 'intent exclusive', {wide})")));
        // To the mode that it has.
        assert!(b.flag(&format!("select named_lock_convert('{k}', 'intent share', '0', {wide})")));
        assert_eq!(b.int(&format!("select named_lock_held('{k}', {wide})")), 1);
        assert_eq!(b.int(&format!("select named_unlock('{k}', {wide})")), 0);
        assert_eq!(watch.locks_of(b.pid), 0);
    }
}

/// Neither way is the lock free for a moment, and who holds part of it goes before those who wait.
#[test]
fn convert_is_one_step() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let k = unique("convert");
    let mut a = server.session("a");
    a.run(&format!("select named_lock('{k}', hold_limit => '1 hour')"));
    let waiting = start(server.session("b"), &format!("select named_lock('{k}')"), &mut watch);
    for _ in 0..20 {
        for mode in ["share", "exclusive", "intent share", "share intent exclusive", "intent exclusive", "exclusive"] {
            assert!(a.flag(&format!("select named_lock_convert('{k}', '{mode}', '1 minute')")), "{mode}");
            assert_eq!(
                watch.column(&format!(
                    "select concat_ws(' ', pid, mode, holds, hold_limit) from lock_holders where name = '{k}'"
                )),
                [format!("{} {mode} 1 01:00:00", a.pid)],
                "the limit stays as well"
            );
        }
    }
    assert!(!waiting.finished());
    a.run(&format!("select named_unlock('{k}')"));
    assert_eq!(waiting.end().1.expect("no error")[0].get(0), Some("t"));
}

#[test]
fn convert_of_two_sharers_is_a_deadlock_that_names_the_lock() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    let k = unique("convert");
    let mut a = server.session("a");
    let mut b = server.session("b");
    for session in [&mut a, &mut b] {
        session.run(&format!("select named_lock('{k}', mode => 'share')"));
    }
    a.run("set deadlock_timeout = '1h'");
    b.run("set deadlock_timeout = '100ms'");
    let convert = format!("select named_lock_convert('{k}', 'exclusive')");
    let waiting = start(a, &convert, &mut watch);
    b.fails(&convert).is("40P01").context_has(&k);
    assert_eq!(
        watch.column(&format!("select mode from lock_holders where name = '{k}'")),
        ["share", "share"],
        "both old holds stand"
    );
    b.run(&format!("select named_unlock('{k}')"));
    let (_, result) = waiting.end();
    assert_eq!(result.expect("no error")[0].get(0), Some("t"));
}

/// The same by the extended protocol, as most drivers do it.
#[test]
fn prepared_statements_with_parameters() {
    let server = Server::shared();
    let mut a = server.session("a");
    let mut b = server.session("b");
    let k = unique("prepared");
    let lock = "select named_lock($1, $2::text::interval)";
    let statement = a.client.prepare(lock).expect("prepare");
    for holds in 1..=3_i32 {
        let row = a.client.query_one(&statement, &[&k, &None::<&str>]).expect("lock");
        assert!(row.get::<_, bool>(0));
        let held = a.client.query_one("select named_lock_held($1)", &[&k]).expect("held");
        assert_eq!(held.get::<_, i32>(0), holds);
    }
    for timeout in ["0", "20 ms"] {
        let row = b.client.query_one(lock, &[&k, &Some(timeout)]).expect("try");
        assert!(!row.get::<_, bool>(0));
    }
    let error: SqlError = b.client.query_one("select named_unlock($1)", &[&k]).expect_err("not held").into();
    error.is("55000").message_has(&k);
    let row = b.client.query_one("call named_lock_wait($1, $2::text::interval)", &[&k, &Some("20 ms")]).expect("call");
    assert!(!row.get::<_, bool>(0));
}
