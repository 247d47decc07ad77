//! Every error of the contract for bad input: its code, a text that helps, and nothing held after it.

use super::support::{Form, Server, Session, answer, unique, unique_ident};

/// That each statement fails by its code and leaves nothing held or waited for, in a block or not.
#[track_caller]
fn refused(session: &mut Session, statements: &[(&str, &str)]) {
    for (sql, code) in statements {
        for begin in ["", "begin"] {
            session.run(begin);
            let error = session.fails(sql);
            session.run("rollback");
            error.is(code);
            assert!(error.message.len() > 10, "a text that helps: {error:#?}");
            assert_eq!(error.severity, "ERROR");
            assert_eq!(session.locks_of(session.pid), 0, "{sql}: something is held");
            assert_eq!(
                session.int("select count(*) from lock_holders where pid = pg_backend_pid()"),
                0,
                "{sql}: something is shown"
            );
        }
    }
}

#[test]
fn acquire_forms() {
    let server = Server::shared();
    let mut a = server.session("bad input");
    let k = unique("bad");
    for form in Form::all().into_iter().filter(|form| !form.call) {
        let lock = form.lock(&k);
        let call = |timeout, more: &str| lock.acquire_with(timeout, more);
        let mut calls = vec![
            (call(Some("0"), "mode => null"), "22004"),
            (call(Some("0"), "mode => 'no such mode'"), "22P02"),
            (call(Some("0"), "mode => ''"), "22P02"),
            (call(Some("0"), "mode => 'EXCLUSIVE'"), "22P02"),
            (call(Some("-1 ms"), ""), "22023"),
            (call(Some("25 days"), ""), "22023"),
            (call(Some("178000000 years"), ""), "22023"),
            (call(Some("soon"), ""), "22007"),
        ];
        if form.is_named() {
            let name = |name: &str| call(Some("0"), "").replace(&format!("'{k}'"), name);
            let cluster_wide_null =
                call(Some("0"), "").replace(", cluster_wide => true", "").replace(')', ", cluster_wide => null)");
            calls.extend([
                (name("null"), "22004"),
                (name("''"), "22023"),
                (name("repeat('x', 1025)"), "22001"),
                (name("repeat('x', 10000000)"), "22001"),
                (name("repeat('é', 513)"), "22001"),
                (cluster_wide_null, "22004"),
            ]);
        } else {
            for mode in ["intent share", "intent exclusive", "share intent exclusive"] {
                calls.push((call(Some("0"), &format!("mode => '{mode}'")), "22023"));
                calls.push((call(None, &format!("mode => '{mode}'")), "22023"));
            }
            let keys = lock.called();
            let nulls = match keys.split_once(", ") {
                None => vec!["null".to_owned()],
                Some((key1, key2)) => vec![format!("null, {key2}"), format!("{key1}, null")],
            };
            for null in nulls {
                calls.push((call(Some("0"), "").replace(&keys, &null), "22004"));
            }
        }
        if form.is_session() {
            for limit in ["0", "99 ms", "99.9 ms", "-1 s", "-178000000 years"] {
                calls.push((call(Some("0"), &format!("hold_limit => '{limit}'")), "22023"));
            }
        }
        let calls: Vec<_> = calls.iter().map(|(sql, code)| (sql.as_str(), *code)).collect();
        refused(&mut a, &calls);
    }
}

#[test]
fn call_form() {
    let server = Server::shared();
    let mut a = server.session("bad input");
    let k = unique("bad");
    for (arguments, code) in [
        ("null", "22004"),
        ("''", "22023"),
        ("repeat('x', 1025)", "22001"),
        ("'$k', '-1 ms'", "22023"),
        ("'$k', '25 days'", "22023"),
        ("'$k', '178000000 years'", "22023"),
        ("'$k', mode => null", "22004"),
        ("'$k', mode => 'no such mode'", "22P02"),
        ("'$k', hold_limit => '99 ms'", "22023"),
        ("'$k', hold_limit => '-1 s'", "22023"),
        ("'$k', cluster_wide => null", "22004"),
    ] {
        let call = format!("call named_lock_wait({})", arguments.replace("$k", &k));
        a.fails(&call).is(code);
        assert_eq!(a.locks_of(a.pid), 0, "{call}");
    }
    for (begin, end) in [("begin", "rollback"), ("begin isolation level repeatable read", "rollback")] {
        a.run(begin);
        a.fails(&format!("call named_lock_wait('{k}')")).is("25001").message_has(&k);
        a.run(end);
        assert_eq!(a.locks_of(a.pid), 0);
    }
    // Several statements in one string are a transaction block.
    a.fails(&format!("select 1; call named_lock_wait('{k}')")).is("25001");
    assert_eq!(a.locks_of(a.pid), 0);
}

#[test]
fn unlock_held_convert_extend_and_key() {
    let server = Server::shared();
    let mut a = server.session("bad input");
    let calls: Vec<(String, &str)> = [
        ("named_unlock(null)", "22004"),
        ("named_unlock('')", "22023"),
        ("named_unlock(repeat('x', 1025))", "22001"),
        ("named_unlock('$k', all_holds => null)", "22004"),
        ("named_unlock('$k', cluster_wide => null)", "22004"),
        ("named_unlock('$k', mode => 'no such mode')", "22P02"),
        ("named_unlock('$k')", "55000"),
        ("named_unlock('$k', mode => 'share')", "55000"),
        ("named_unlock('$k', all_holds => true)", "55000"),
        ("named_unlock('$k', cluster_wide => true)", "55000"),
        ("named_lock_held(null)", "22004"),
        ("named_lock_held('')", "22023"),
        ("named_lock_held(repeat('x', 1025))", "22001"),
        ("named_lock_held('$k', cluster_wide => null)", "22004"),
        ("named_lock_held('$k', mode => 'no such mode')", "22P02"),
        ("named_lock_convert(null, 'share')", "22004"),
        ("named_lock_convert('', 'share')", "22023"),
        ("named_lock_convert(repeat('x', 1025), 'share')", "22001"),
        ("named_lock_convert('$k', null)", "22004"),
        ("named_lock_convert('$k', 'no such mode')", "22P02"),
        ("named_lock_convert('$k', 'share', '-1 ms')", "22023"),
        ("named_lock_convert('$k', 'share', '25 days')", "22023"),
        ("named_lock_convert('$k', 'share', cluster_wide => null)", "22004"),
        ("named_lock_convert('$k', 'share')", "55000"),
        ("named_lock_convert('$k', 'share', '0', cluster_wide => true)", "55000"),
        ("named_lock_extend(null, '1 s')", "22004"),
        ("named_lock_extend('', '1 s')", "22023"),
        ("named_lock_extend(repeat('x', 1025), '1 s')", "22001"),
        ("named_lock_extend('$k', '99 ms')", "22023"),
        ("named_lock_extend('$k', '0')", "22023"),
        ("named_lock_extend('$k', '-1 day')", "22023"),
        ("named_lock_extend('$k', '1 s', cluster_wide => null)", "22004"),
        ("named_lock_extend('$k', '1 s')", "55000"),
        ("named_lock_extend('$k', null)", "55000"),
        ("named_lock_key(null)", "22004"),
        ("named_lock_key('')", "22023"),
        ("named_lock_key(repeat('x', 1025))", "22001"),
        ("named_lock_key('$k', cluster_wide => null)", "22004"),
    ]
    .into_iter()
    .map(|(call, code)| (format!("select {}", call.replace("$k", &unique("bad"))), code))
    .collect();
    let calls: Vec<_> = calls.iter().map(|(sql, code)| (sql.as_str(), *code)).collect();
    refused(&mut a, &calls);
}

#[test]
fn hold_limits() {
    let server = Server::shared();
    let mut a = server.session("bad input");
    let k = unique("bad");
    for form in Form::all().into_iter().filter(Form::is_session) {
        let lock = form.lock(&k);
        // An interval that no clock can be set to: refused, or as good as none; never one that ends at once.
        if let Ok(rows) = a.query(&lock.acquire_with(Some("0"), "hold_limit => '178000000 years'")) {
            assert!(answer(form, Ok(rows)).held());
            assert_eq!(a.int("select 1"), 1);
            a.run(&lock.unlock());
        }
        assert_eq!(a.locks_of(a.pid), 0, "{form:?}");
        // The least that is allowed.
        assert!(answer(form, a.query(&lock.acquire_with(Some("0"), "hold_limit => '100 ms'"))).held());
        a.run(&lock.unlock());
        assert_eq!(a.locks_of(a.pid), 0, "{form:?}");
    }
}

#[test]
fn a_refused_hold_limit_changes_nothing_of_a_held_lock() {
    let server = Server::shared();
    let mut a = server.session("bad input");
    let k = unique("bad");
    a.run(&format!("select named_lock('{k}', hold_limit => '1 hour')"));
    let limit = format!("select expires_at from lock_holders where name = '{k}'");
    let before = a.text(&limit);
    for (call, code) in [
        ("named_lock_extend('$k', '99 ms')", "22023"),
        ("named_lock_extend('$k', '-1 s')", "22023"),
        ("named_lock('$k', hold_limit => '1 ms')", "22023"),
        ("named_lock('$k', mode => null)", "22004"),
        ("named_lock_convert('$k', null)", "22004"),
        ("named_unlock('$k', 'share')", "55000"),
        ("named_unlock('$k', 'share', all_holds => true)", "55000"),
    ] {
        a.fails(&format!("select {}", call.replace("$k", &k))).is(code);
        assert_eq!(a.text(&limit), before, "{call}");
        assert_eq!(a.int(&format!("select named_lock_held('{k}')")), 1, "{call}");
    }
}

#[test]
fn not_held_says_who_holds_it_and_what_this_session_holds() {
    let server = Server::shared();
    let mut a = server.session("bad input a");
    let mut b = server.session("bad input b");
    let k = unique("bad");
    let unlock = format!("select named_unlock('{k}')");

    // Nobody.
    let error = b.fails(&unlock);
    error.is("55000").message_has(&k);
    assert!(!error.detail.contains(&a.pid.to_string()), "{error:#?}");

    // Another, idle; then in a transaction; then two of them.
    a.run(&format!("select named_lock('{k}', mode => 'share')"));
    for state in ["idle", "idle in transaction"] {
        if state != "idle" {
            a.run("begin");
        }
        b.fails(&unlock)
            .is("55000")
            .message_has(&k)
            .detail_has(&a.pid.to_string())
            .detail_has("bad input a")
            .detail_has(state);
    }
    a.run("commit");

    // This one in another mode.
    b.run(&format!("select named_lock('{k}', mode => 'intent share')"));
    for call in ["named_unlock('$k', 'share')", "named_unlock('$k', 'exclusive', all_holds => true)"] {
        b.fails(&format!("select {}", call.replace("$k", &k))).is("55000").message_has(&k).detail_has("intent share");
    }
    assert_eq!(b.int(&unlock), 0);
    b.fails(&unlock).is("55000").detail_has(&a.pid.to_string());
    assert_eq!(a.int(&format!("select named_lock_held('{k}')")), 1);
}

#[test]
fn held_only_by_the_transaction_forms() {
    let server = Server::shared();
    let mut a = server.session("bad input");
    let k = unique("bad");
    for function in ["named_xact_lock", "named_xact_lock_strict"] {
        for call in [
            "named_unlock('$k')",
            "named_unlock('$k', 'exclusive')",
            "named_unlock('$k', all_holds => true)",
            "named_lock_convert('$k', 'share')",
            "named_lock_extend('$k', '1 hour')",
            "named_lock_extend('$k', null)",
        ] {
            a.run(&format!("begin; select {function}('{k}'); savepoint s"));
            let error = a.fails(&format!("select {}", call.replace("$k", &k)));
            error.is("55000").message_has(&k);
            if call.starts_with("named_unlock") {
                let text = format!("{} {} {}", error.message, error.detail, error.hint);
                assert!(text.contains("transaction"), "it says why: {error:#?}");
            }
            a.run("rollback to s");
            assert_eq!(a.int(&format!("select named_lock_held('{k}')")), 1, "{call}");
            a.run("commit");
            assert_eq!(a.locks_of(a.pid), 0, "{call}");
        }
    }
}

#[test]
fn convert_of_other_than_one_hold() {
    let server = Server::shared();
    let mut a = server.session("bad input");
    let k = unique("bad");
    let convert = format!("select named_lock_convert('{k}', 'share intent exclusive', '0')");
    a.fails(&convert).is("55000").message_has(&k);
    for modes in [["exclusive", "exclusive"], ["share", "exclusive"], ["intent share", "share"]] {
        for mode in modes {
            a.run(&format!("select named_lock('{k}', '0', '{mode}')"));
        }
        a.fails(&convert).is("55000").message_has(&k);
        assert_eq!(a.int(&format!("select named_lock_held('{k}')")), 2);
        assert_eq!(a.int(&format!("select named_lock_held('{k}', 'share intent exclusive')")), 0);
        a.run("select named_unlock_all()");
    }
    a.run(&format!("select named_lock('{k}')"));
    assert!(a.flag(&convert));
    assert_eq!(a.int(&format!("select named_lock_held('{k}', 'share intent exclusive')")), 1);
}

#[test]
fn settings_are_not_for_everyone() {
    let server = Server::shared();
    let role = server.new_role("bad");
    let mut a = server.session_as(&role, "bad input");
    // The first use of the extension in a session loads its library.
    a.run("select count(*) from lock_holders");
    for (setting, value) in [
        ("session_locks", "off"),
        ("session_locks", "warn"),
        ("max_locks_per_session", "10"),
        ("allow_on_standby", "on"),
    ] {
        for set in [
            format!("set named_locks.{setting} = {value}"),
            format!("select set_config('named_locks.{setting}', '{value}', false)"),
            format!("alter role {role} set named_locks.{setting} = {value}"),
        ] {
            a.fails(&set).is("42501").message_has(setting);
        }
    }
    assert_eq!(a.text("show named_locks.session_locks"), "on");
    assert_eq!(a.text("show named_locks.max_locks_per_session"), "1000");
    assert_eq!(a.text("show named_locks.allow_on_standby"), "off");
}

#[test]
fn settings_have_their_values() {
    let server = Server::shared();
    let mut a = server.session("bad input");
    a.run("select count(*) from lock_holders");
    for set in [
        "set named_locks.session_locks = 'perhaps'",
        "set named_locks.max_locks_per_session = 'many'",
        "set named_locks.max_locks_per_session = -1",
        "set named_locks.allow_on_standby = 'perhaps'",
    ] {
        a.fails(set).is("22023");
    }
    // The prefix is the extension's.
    if a.int("show server_version_num") >= 150_000 {
        a.fails("set named_locks.no_such_setting = 1").is("42602");
    }
}

/// In a WHERE clause the planner runs what is cheap first.
#[test]
fn a_lock_runs_before_an_unlock_that_stands_after_it() {
    let server = Server::shared();
    let mut a = server.session("bad input");
    let k = unique("bad");
    let table = unique_ident("bad");
    a.run(&format!("create table {table} as select i from generate_series(1, 10) as i"));
    assert_eq!(
        a.int(&format!("select count(*) from {table} where named_lock('{k}' || i) and named_unlock('{k}' || i) = 0")),
        10
    );
    assert_eq!(a.locks_of(a.pid), 0);
}
