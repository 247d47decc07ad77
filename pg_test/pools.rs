//! Cases C01 to C04 and C06: what poolers, drivers and other libraries do to a session's locks.

use super::support::{Form, Pooler, Server, Session, Target, unique, until};

const MODES: [&str; 5] = ["exclusive", "share", "intent share", "intent exclusive", "share intent exclusive"];

/// The rows that `lock_holders` has for a name.
fn shown(watch: &mut Session, name: &str) -> i64 {
    watch.int(&format!("select count(*) from lock_holders where name = '{name}'"))
}

/// The session forms by name.
fn session_forms() -> impl Iterator<Item = Form> {
    Form::named().into_iter().filter(Form::is_session)
}

#[test]
fn c01_unlock_on_another_backend_is_an_error_that_says_who_holds_it() {
    let server = Server::shared();
    let mut p2 = server.session("c01 p2");
    for form in session_forms() {
        for mode in MODES {
            let mut p1 = server.session("c01 p1");
            let k = unique("c01");
            let lock = form.lock(&k);
            p1.run(&lock.acquire_with(None, &format!("mode => '{mode}'")));

            p2.fails(&lock.unlock()).is("55000").message_has(&k).detail_has(&p1.pid.to_string()).detail_has("c01 p1");
            assert_eq!(p2.rows_for(&lock.target, p1.pid, true), 1, "{form:?} {mode}: P1 keeps it");
            assert_eq!(shown(&mut p2, &k), 1);

            p1.run("discard all");
            assert_eq!(p2.rows_for(&lock.target, p1.pid, true), 0, "{form:?} {mode}");
            assert_eq!(shown(&mut p2, &k), 0);
            assert!(p2.flag(&lock.for_holder().acquire(Some("0"))));
            p2.run(&lock.unlock());
        }
    }
}

#[test]
fn c01_unlock_of_another_backends_transaction_lock_says_who_holds_it() {
    let server = Server::shared();
    let mut p1 = server.session("c01 p1");
    let mut p2 = server.session("c01 p2");
    let k = unique("c01");
    p1.run(&format!("begin; select named_xact_lock('{k}')"));
    p2.fails(&format!("select named_unlock('{k}')")).is("55000").message_has(&k).detail_has(&p1.pid.to_string());
    p1.run("commit");
    assert_eq!(shown(&mut p2, &k), 0);
    p2.fails(&format!("select named_unlock('{k}')")).is("55000").message_has(&k);
}

#[test]
fn c01_unlock_of_the_local_lock_leaves_the_cluster_wide_one() {
    let server = Server::shared();
    let mut a = server.session("c01");
    let k = unique("c01");
    a.run(&format!("select named_lock('{k}', cluster_wide => true)"));
    a.fails(&format!("select named_unlock('{k}')")).is("55000").message_has(&k);
    assert_eq!(a.int(&format!("select named_lock_held('{k}')")), 0);
    assert_eq!(a.int(&format!("select named_lock_held('{k}', cluster_wide => true)")), 1);
    a.run(&format!("select named_lock('{k}')"));
    assert_eq!(a.int(&format!("select named_unlock('{k}', cluster_wide => true)")), 0);
    assert_eq!(a.int(&format!("select named_lock_held('{k}')")), 1);
}

#[test]
fn c02_a_forgotten_lock_shows_its_kind_since_when_and_that_its_session_is_idle() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for (begin, function, kind, state) in [
        ("", "named_lock", "session", "idle"),
        ("begin", "named_lock", "session", "idle in transaction"),
        ("begin", "named_xact_lock", "transaction", "idle in transaction"),
    ] {
        let mut a = server.session("c02 first caller");
        let k = unique("c02");
        a.run(begin);
        let before = watch.text("select clock_timestamp()");
        a.run(&format!("select {function}('{k}')"));
        let after = watch.text("select clock_timestamp()");
        a.run("set application_name = 'c02 next caller'");

        let rows = watch.run(&format!(
            "select kind, state, acquired_at between '{before}' and '{after}' as known_since, \
                    held_for >= '0' and held_for < '1 hour' as for_long, pid, application_name, holds, mode \
               from lock_holders where name = '{k}'"
        ));
        assert_eq!(rows.len(), 1);
        let row = &rows[0];
        assert_eq!(row.get("kind"), Some(kind));
        assert_eq!(row.get("state"), Some(state), "{kind}");
        assert_eq!(row.get("known_since"), Some("t"));
        assert_eq!(row.get("for_long"), Some("t"));
        assert_eq!(row.get("pid"), Some(a.pid.to_string().as_str()));
        assert_eq!(row.get("application_name"), Some("c02 next caller"));
        assert_eq!(row.get("holds"), Some("1"));
        assert_eq!(row.get("mode"), Some("exclusive"));
    }
}

#[test]
fn c03_as_many_releases_as_acquires() {
    let server = Server::shared();
    let mut b = server.session("c03 other");
    for form in session_forms() {
        let mut a = server.session("c03 two tasks");
        let k = unique("c03");
        let lock = form.lock(&k);
        let cluster_wide = form.is_cluster_wide();
        for holds in 1..=5 {
            a.run(&lock.acquire(Some("0")));
            assert_eq!(b.int(&format!("select holds from lock_holders where name = '{k}'")), holds, "{form:?}");
            assert_eq!(a.int(&format!("select named_lock_held('{k}', cluster_wide => {cluster_wide})")), holds);
        }
        for remain in (0..5).rev() {
            assert!(!b.flag(&lock.for_holder().acquire(Some("0"))), "{form:?}, {remain} to come");
            assert_eq!(a.int(&lock.unlock()), remain);
        }
        a.fails(&lock.unlock()).is("55000");
        assert!(b.flag(&lock.for_holder().acquire(Some("0"))));
        b.run(&lock.unlock());

        for _ in 0..3 {
            a.run(&lock.acquire(Some("0")));
        }
        let all = format!("select named_unlock('{k}', all_holds => true, cluster_wide => {cluster_wide})");
        assert_eq!(a.int(&all), 0);
        assert_eq!(shown(&mut b, &k), 0);
        a.fails(&all).is("55000");
    }
}

#[test]
fn c03_holds_of_several_modes() {
    let server = Server::shared();
    let mut a = server.session("c03");
    let mut b = server.session("c03 other");
    let k = unique("c03");
    let held = |mode: &str| format!("select named_lock_held('{k}', mode => '{mode}')");
    for mode in ["share", "share", "exclusive", "intent share"] {
        assert!(a.flag(&format!("select named_lock('{k}', '0', '{mode}')")));
    }
    assert_eq!(a.int(&format!("select named_lock_held('{k}')")), 4);
    assert_eq!(a.int(&held("share")), 2);
    assert_eq!(a.int(&held("exclusive")), 1);
    assert_eq!(a.int(&held("intent share")), 1);
    assert_eq!(a.int(&held("intent exclusive")), 0);
    assert_eq!(b.int(&format!("select sum(holds) from lock_holders where name = '{k}'")), 4);

    // Without a mode, the hold taken last goes first.
    assert_eq!(a.int(&format!("select named_unlock('{k}')")), 3);
    assert_eq!(a.int(&held("intent share")), 0);
    assert!(!b.flag(&format!("select named_lock('{k}', '0', 'share')")));
    assert_eq!(a.int(&format!("select named_unlock('{k}')")), 2);
    assert_eq!(a.int(&held("exclusive")), 0);
    assert!(b.flag(&format!("select named_lock('{k}', '0', 'share')")));

    // A mode that isn't held is an error that says what is.
    a.fails(&format!("select named_unlock('{k}', 'exclusive')")).is("55000").message_has(&k).detail_has("share");
    assert_eq!(a.int(&format!("select named_lock_held('{k}')")), 2);

    assert!(a.flag(&format!("select named_lock('{k}', '0', 'intent share')")));
    assert_eq!(a.int(&format!("select named_unlock('{k}', 'share', all_holds => true)")), 1);
    assert_eq!(a.int(&held("share")), 0);
    assert_eq!(a.int(&held("intent share")), 1);
    assert_eq!(a.int(&format!("select named_unlock('{k}', 'intent share')")), 0);
}

#[test]
fn c03_session_and_transaction_holds_together() {
    let server = Server::shared();
    let mut a = server.session("c03");
    let mut b = server.session("c03 other");
    let k = unique("c03");
    a.run(&format!("begin; select named_lock('{k}'); select named_xact_lock('{k}'), named_xact_lock('{k}')"));
    assert_eq!(a.int(&format!("select named_lock_held('{k}')")), 3);
    let rows = b.run(&format!("select kind, holds from lock_holders where name = '{k}' order by kind"));
    let rows: Vec<_> = rows.iter().map(|row| (row.get(0), row.get(1))).collect();
    assert_eq!(rows, [(Some("session"), Some("1")), (Some("transaction"), Some("2"))]);

    // What remains counts the session's holds alone.
    assert_eq!(a.int(&format!("select named_unlock('{k}')")), 0);
    assert_eq!(a.int(&format!("select named_lock_held('{k}')")), 2);
    assert!(!b.flag(&format!("select named_lock('{k}', '0')")));
    a.run("commit");
    assert_eq!(a.int(&format!("select named_lock_held('{k}')")), 0);
    assert!(b.flag(&format!("select named_lock('{k}', '0')")));
}

#[test]
fn c04_named_unlock_all_leaves_native_and_transaction_locks() {
    let server = Server::shared();
    let mut a = server.session("c04");
    let mut b = server.session("c04 other");
    let k = unique("c04");
    let Target::Bigint(key) =
        (Form::all().into_iter().find(|form| !form.is_named())).expect("a native form").lock(&k).target
    else {
        panic!("the first native form takes a bigint")
    };
    a.run(&format!(
        "begin; \
         select pg_advisory_lock({key}), advisory_lock({key} + 1), pg_advisory_xact_lock({key} + 2), \
                named_xact_lock('{k} transaction'), \
                named_lock('{k} twice'), named_lock('{k} twice'), named_lock('{k} share', mode => 'share'), \
                named_lock('{k} everywhere', cluster_wide => true), \
                named_lock('{k} transaction')"
    ));
    assert_eq!(a.int("select named_unlock_all()"), 5);
    assert_eq!(a.int("select named_unlock_all()"), 0);
    assert_eq!(
        b.column(&format!(
            "select kind || ' ' || coalesce(name, '-') from lock_holders where pid = {} order by 1",
            a.pid
        )),
        ["advisory -", "advisory -", "advisory -", &format!("transaction {k} transaction")]
    );
    assert!(b.flag(&format!("select named_lock('{k} twice', '0')")));
    assert!(!b.flag(&format!("select named_lock('{k} transaction', '0')")));
    assert!(!b.flag(&format!("select pg_try_advisory_lock({key})")));
    assert!(!b.flag(&format!("select advisory_lock({key} + 1, '0')")));
    a.run("commit");
    assert!(b.flag(&format!("select named_lock('{k} transaction', '0')")));
}

#[test]
fn c04_pg_advisory_unlock_all_takes_named_locks_along_and_nobody_says_otherwise() {
    let server = Server::shared();
    let mut b = server.session("c04 other");
    for all in ["select pg_advisory_unlock_all()", "discard all"] {
        for mode in MODES {
            let mut a = server.session("c04");
            let k = unique("c04");
            a.run(&format!("select named_lock('{k}', mode => '{mode}'), named_lock('{k}', mode => '{mode}')"));
            a.run(all);
            assert_eq!(shown(&mut b, &k), 0, "{all}");
            assert_eq!(a.int(&format!("select named_lock_held('{k}')")), 0, "{all}");
            a.fails(&format!("select named_unlock('{k}')")).is("55000");
            assert_eq!(a.int("select named_unlock_all()"), 0, "{all}");
            // The next hold is the first one again.
            assert!(a.flag(&format!("select named_lock('{k}')")));
            assert_eq!(a.int(&format!("select named_lock_held('{k}')")), 1, "{all}");
            assert_eq!(b.int(&format!("select holds from lock_holders where name = '{k}'")), 1);
            assert_eq!(a.int(&format!("select named_unlock('{k}')")), 0);
            assert_eq!(a.locks_of(a.pid), 0, "{all}");
        }
    }
}

#[test]
fn c04_an_unlock_right_after_unlock_all_finds_nothing_held_and_nothing_is_left() {
    let server = Server::shared();
    let mut b = server.session("c04 other");
    for all in ["select pg_advisory_unlock_all()", "discard all"] {
        for with in ["", ", hold_limit => '1 hour'", ", mode => 'share'"] {
            for arguments in ["", ", mode => 'share'", ", mode => 'exclusive'", ", all_holds => true"] {
                let mut a = server.session("c04");
                let k = unique("c04");
                a.run(&format!("select named_lock('{k}'{with})"));
                a.run(all);
                a.fails(&format!("select named_unlock('{k}'{arguments})")).is("55000").message_has(&k);
                assert_eq!(shown(&mut b, &k), 0, "{all}{with}{arguments}");
                assert!(b.flag(&format!("select named_lock('{k}', '0')")), "{all}{with}{arguments}");
                assert_eq!(b.int(&format!("select named_unlock('{k}')")), 0);
                assert!(a.flag(&format!("select named_lock('{k}')")));
                assert_eq!(
                    b.column(&format!(
                        "select holds || coalesce(' ' || hold_limit, '') from lock_holders where name = '{k}'"
                    )),
                    ["1"],
                    "{all}{with}{arguments}"
                );
                assert_eq!(a.int(&format!("select named_unlock('{k}')")), 0);
                assert_eq!(a.locks_of(a.pid), 0, "{all}{with}{arguments}");
            }
        }
    }
}

#[test]
fn c06_a_role_behind_a_transaction_pooler_is_kept_from_session_locks() {
    let server = Server::shared();
    let role = server.new_role("c06");
    server.session("admin").run(&format!("alter role {role} set named_locks.session_locks = off"));
    let pooler = Pooler::new(server, "transaction", 2, &[&role]);

    let mut other = server.session("c06 other");
    for form in Form::all() {
        let lock = form.lock(&unique("c06"));
        let mut pooled = pooler.session_as(&role, "c06");
        if form.is_session() {
            for timeout in [Some("0"), Some("1 s"), None] {
                let error = pooled.fails(&lock.acquire(timeout));
                error.is("0A000");
                assert!(!error.hint.is_empty(), "{error:#?}");
            }
        } else {
            pooled.run("begin");
            pooled.run(&lock.acquire(Some("0")));
            let holder = pooled.int("select pg_backend_pid()") as i32;
            assert_eq!(other.rows_for(&lock.target, holder, true), 1, "{form:?}");
            assert!(!other.flag(&lock.for_holder().acquire(Some("0"))), "{form:?}");
            pooled.run("commit");
        }
        assert!(other.flag(&lock.for_holder().acquire(Some("0"))), "{form:?}: nothing is held after");
        other.run(&lock.unlock());
    }
}

#[test]
fn c06_transaction_locks_of_two_clients_behind_one_pooler_exclude_each_other() {
    let server = Server::shared();
    let role = server.new_role("c06");
    server.session("admin").run(&format!("alter role {role} set named_locks.session_locks = off"));
    let pooler = Pooler::new(server, "transaction", 2, &[&role]);
    let mut watch = server.session("watch");
    let k = unique("c06");
    let mut one = pooler.session_as(&role, "c06 one");
    let mut two = pooler.session_as(&role, "c06 two");
    one.run(&format!("begin; select named_xact_lock('{k}')"));
    assert!(!two.flag(&format!("select named_xact_lock('{k}', '0')")));
    let waiting = two.background(&format!("select named_xact_lock('{k}', '60 s')"));
    until("the second client waits", || {
        watch.int(&format!("select count(*) from lock_waiters where name = '{k}'")) == 1
    });
    one.run("commit");
    let (_, result) = waiting.end();
    assert_eq!(result.expect("no error")[0].get(0), Some("t"));
}

#[test]
fn c06_warn_lets_through_with_a_warning_and_on_is_silent() {
    let server = Server::shared();
    for (value, warned) in [("warn", true), ("on", false)] {
        let role = server.new_role("c06");
        server.session("admin").run(&format!("alter role {role} set named_locks.session_locks = {value}"));
        for form in Form::all().into_iter().filter(Form::is_session) {
            let mut a = server.session_as(&role, "c06");
            let lock = form.lock(&unique("c06"));
            a.notices();
            a.run(&lock.acquire(Some("0")));
            let notices = a.notices();
            let warnings: Vec<_> = notices.iter().filter(|notice| notice.severity == "WARNING").collect();
            assert_eq!(!warnings.is_empty(), warned, "{value} {form:?}: {notices:#?}");
            assert_eq!(a.locks_of(a.pid), 1, "{value} {form:?}");
        }
    }
}

/// Without preload, a client can set a placeholder of that name before the library is loaded.
#[test]
fn c06_a_client_cannot_lift_the_ban_before_the_library_is_loaded() {
    let server = Server::shared();
    let role = server.new_role("c06");
    server.session("admin").run(&format!("alter role {role} set named_locks.session_locks = off"));

    let mut config = server.config("c06 options");
    config.user(&role).options("-c named_locks.session_locks=on");
    let mut sessions = vec![Session::open(config).expect("a session")];
    for set in [
        "set named_locks.session_locks = on",
        "select set_config('named_locks.session_locks', 'on', false)",
        "begin; set local named_locks.session_locks = on",
    ] {
        let mut session = server.session_as(&role, "c06 set");
        if let Err(refusal) = session.query(set) {
            // Refusing it there and then is fine, too.
            refusal.is("42501");
            session.run("rollback");
        }
        sessions.push(session);
    }
    for mut session in sessions {
        let k = unique("c06");
        session.fails(&format!("select named_lock('{k}', '0')")).is("0A000");
        session.run("rollback");
        assert_eq!(session.locks_of(session.pid), 0);
    }
}
