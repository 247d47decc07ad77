//! Case C45: on a hot standby.

use super::support::surface::{Does, FUNCTIONS};
use super::support::{Answer, Cluster, Form, Session, answer, until, within};
use std::time::Duration;

/// A primary and its standby.
fn pair() -> (Cluster, Cluster) {
    let primary = Cluster::new(&[]);
    let standby = primary.standby(&[]);
    primary.until_replayed_by(&standby);
    assert!(standby.in_recovery());
    (primary, standby)
}

#[track_caller]
fn holds_nothing(watch: &mut Session, pid: i32) {
    assert_eq!(watch.locks_of(pid), 0);
    assert_eq!(watch.int(&format!("select count(*) from lock_holders where pid = {pid}")), 0);
}

#[test]
fn c45_every_acquire_form_is_refused() {
    let (_primary, standby) = pair();
    let mut watch = standby.session("watch");
    for form in Form::all() {
        let mut a = standby.session("c45");
        let lock = form.lock("c45");
        for timeout in [None, Some("0"), Some("1 s")] {
            for mode in ["exclusive", "share"] {
                a.fails(&lock.acquire_with(timeout, &format!("mode => '{mode}'")))
                    .is("25006")
                    .message_has(&lock.called())
                    .hint_has("allow_on_standby");
                holds_nothing(&mut watch, a.pid);
            }
        }
        if !form.call {
            a.run("begin; savepoint s");
            a.fails(&lock.acquire(None)).is("25006");
            a.run("rollback to s; commit");
        }
        assert_eq!(a.int("select 1"), 1, "{form:?}");
    }
}

/// By the table of all functions: what takes a lock is refused unless the setting allows it, what writes always, and what only
/// looks or gives back never.
#[test]
fn c45_every_function() {
    let (_primary, standby) = pair();
    let mut watch = standby.session("watch");
    for (number, function) in FUNCTIONS.iter().enumerate() {
        let what = function.signature;
        let mut a = standby.session("c45");
        let name = format!("n{number}");
        // Of a lease there need be none: what is refused is refused before any is looked for.
        let is_about_a_lease = function.name().starts_with("lease_");
        a.run("set named_locks.allow_on_standby = on");
        let call = if is_about_a_lease {
            function.call.replace("NAME", &name).replace("VALUE", "1")
        } else {
            function.prepared(&mut a, &name)
        };
        for setting in ["off", "on"] {
            let held = watch.locks_of(a.pid);
            a.run(&format!("set named_locks.allow_on_standby = {setting}"));
            let does = function.does;
            match (setting, does) {
                ("off", _) if does.is_lock_on_standby() => {
                    a.fails(&call).is("25006").hint_has("allow_on_standby");
                    assert_eq!(watch.locks_of(a.pid), held, "{what}");
                }
                _ if does.writes() => _ = a.fails(&call).is("25006"),
                (_, Does::Trigger) => _ = a.fails(&call).is("39P01"),
                (_, Does::Administer) if function.name().starts_with("lock_domain") => _ = a.fails(&call).is("25006"),
                // What is given back can be given back once.
                ("on", Does::Own) => {}
                _ => _ = a.run(&call),
            }
        }
        a.run("select named_unlock_all(), pg_advisory_unlock_all()");
        holds_nothing(&mut watch, a.pid);
    }
}

/// Looking is allowed from the first call on.
#[test]
fn c45_views_work() {
    let (primary, standby) = pair();
    let mut a = primary.session("primary");
    a.run("select named_lock('on the primary')");
    for look in [
        "select count(*) from lock_holders",
        "select count(*) from lock_waiters",
        "select count(*) from (select lock_graph()) as g where lock_graph is null",
        "select named_lock_held('k')",
        "select named_unlock_all()",
    ] {
        let mut session = standby.session("c45 first call");
        assert_eq!(session.int(look), 0, "{look}");
    }
    let mut session = standby.session("c45");
    assert_eq!(
        session.text("select concat_ws(' ', classid, objid, objsubid) from named_lock_key('on the primary')"),
        a.text("select concat_ws(' ', classid, objid, objsubid) from named_lock_key('on the primary')"),
    );
    session.fails("select named_unlock('k')").is("55000").message_has("k");
    // Native locks of the standby's own sessions are shown.
    session.run("select pg_advisory_lock(45)");
    assert_eq!(
        standby.session("watch").column("select kind || ' ' || mode || ' ' || pid from lock_holders"),
        [format!("advisory exclusive {}", session.pid)]
    );
}

#[test]
fn c45_with_the_setting_locks_work_among_the_standbys_sessions() {
    let (primary, standby) = pair();
    let mut on_primary = primary.session("primary");
    let mut watch = standby.session("watch");
    watch.run("set named_locks.allow_on_standby = on");
    for form in Form::all() {
        let lock = form.lock("c45");
        let mut a = standby.session("a");
        let mut b = standby.session("b");
        for session in [&mut a, &mut b] {
            session.run("set named_locks.allow_on_standby = on");
        }
        if !form.is_session() {
            a.run("begin");
        }
        assert!(answer(form, a.query(&lock.acquire(Some("0")))).held(), "{form:?}");
        let said = answer(form, b.query(&lock.acquire(Some("20 ms"))));
        assert!(matches!(said, Answer::NotHeld), "{form:?}: {said:?}");
        assert_eq!(watch.rows_for(&lock.target, a.pid, true), 1, "{form:?}");
        assert_eq!(
            watch.int(&format!(
                "select count(*) from lock_holders where pid = {} and {}",
                a.pid,
                lock.target.in_lock_holders()
            )),
            1
        );
        // They exclude nobody on the primary, nor the other way round.
        assert!(on_primary.flag(&lock.for_holder().acquire(Some("0"))), "{form:?}");

        let waiting = b.background(&lock.acquire(None));
        watch.until_waiting(waiting.pid);
        if form.call {
            let xmin = format!(
                "select coalesce(backend_xmin::text, 'none') from pg_stat_activity where pid = {}",
                waiting.pid
            );
            assert_eq!(watch.text(&xmin), "none");
        }
        if form.is_session() {
            a.run(&lock.unlock());
        } else {
            a.run("commit");
        }
        assert!(answer(form, waiting.end().1).held(), "{form:?}");
        holds_nothing(&mut watch, a.pid);
        on_primary.run("select named_unlock_all(), pg_advisory_unlock_all()");
    }
}

#[test]
fn c45_convert_and_unlock_when_the_setting_is_off_again() {
    let (_primary, standby) = pair();
    let mut watch = standby.session("watch");
    let mut a = standby.session("a");
    a.run("set named_locks.allow_on_standby = on");
    a.run("select named_lock('k', mode => 'share'), named_lock('k 2', hold_limit => '1 hour')");
    assert!(a.flag("select named_lock_convert('k', 'exclusive')"));
    a.run("set named_locks.allow_on_standby = off");
    a.fails("select named_lock_convert('k', 'share')").is("25006").message_has("k");
    assert_eq!(watch.text("select mode from lock_holders where name = 'k'"), "exclusive");
    assert_eq!(a.int("select named_lock_held('k')"), 1);
    a.fails("select named_lock('k')").is("25006");
    assert_eq!(a.int("select named_lock_held('k')"), 1);
    // Giving back is always allowed.
    assert_eq!(a.int("select named_unlock('k')"), 0);
    assert_eq!(a.int("select named_unlock_all()"), 1);
    holds_nothing(&mut watch, a.pid);
}

#[test]
fn c45_the_setting_by_role_comes_with_replication() {
    let (primary, standby) = pair();
    primary.session("primary").run(
        "create role reader login; alter role reader set named_locks.allow_on_standby = on; create role other login",
    );
    primary.until_replayed_by(&standby);
    assert!(standby.session_as("reader", "c45").flag("select named_lock('k')"));
    let mut other = standby.session_as("other", "c45");
    other.fails("select named_lock('k')").is("25006");
    other.fails("set named_locks.allow_on_standby = on").is("42501");
    // A value given before the library is loaded is not the administrator's.
    let mut config = standby.config("c45");
    config.user("other").options("-c named_locks.allow_on_standby=on");
    Session::open(config).expect("a session").fails("select named_lock('k')").is("25006");
}

#[test]
fn c45_hold_limit_on_a_standby() {
    let (_primary, standby) = pair();
    let mut watch = standby.session("watch");
    let mut a = standby.session("a");
    a.run("set named_locks.allow_on_standby = on");
    a.run("select named_lock('k', hold_limit => '300 ms')");
    watch.until_gone(a.pid);
    until("the log has it", || standby.log().contains("\"k\""));
}

/// Promotion: sessions go on, with what they hold, and need the setting no more.
#[test]
fn c45_promotion() {
    let (primary, standby) = pair();
    let mut watch = standby.session("watch");
    let mut a = standby.session("a");
    a.run("set named_locks.allow_on_standby = on");
    a.run("select named_lock('before')");
    let mut b = standby.session("b");
    b.fails("select named_lock('after')").is("25006");
    primary.stop();
    standby.promote();
    assert!(within(Duration::from_secs(60), || !standby.in_recovery()));
    assert!(b.flag("select named_lock('after')"));
    assert!(!b.flag("select named_lock('before', '0')"));
    assert_eq!(
        watch.column("select name || ' ' || pid from lock_holders order by 1"),
        [format!("after {}", b.pid), format!("before {}", a.pid)]
    );
    assert_eq!(a.int("select named_unlock('before')"), 0);
    assert!(b.flag("select named_xact_lock('before', '0')"));
}

/// A lock of a transaction prepared on the primary is there after the promotion.
#[test]
fn c45_a_prepared_transaction_of_the_primary() {
    let (primary, standby) = pair();
    primary
        .session("primary")
        .run("begin; create table t (i int); select named_xact_lock('k'); prepare transaction 'gid'");
    primary.until_replayed_by(&standby);
    assert_eq!(standby.session("watch").int("select count(*) from lock_holders"), 0);
    primary.stop_immediate();
    standby.promote();
    assert!(within(Duration::from_secs(60), || !standby.in_recovery()));
    let mut a = standby.session("a");
    assert_eq!(
        a.column("select concat_ws(' ', kind, coalesce(name, '-'), mode, gid) from lock_holders"),
        ["transaction - exclusive gid"]
    );
    assert!(!a.flag("select named_lock('k', '0')"));
    a.run("commit prepared 'gid'");
    assert!(a.flag("select named_lock('k', '0')"));
}
