//! Case C46: ALTER EXTENSION named_locks UPDATE, from each released version.

use super::catalogue::{Facts, differences, facts};
use super::{CURRENT, SCHEMAS, database_with, quoted, released, version};
use crate::pg_test::install::call_each;
use crate::pg_test::support::lease_queue::{self, until_queued};
use crate::pg_test::support::surface::{FUNCTIONS, Function};
use crate::pg_test::support::{Server, Session, holding};

/// What a new installation makes.
fn installed(schema: &str) -> Facts {
    facts(&mut database_with(Some(CURRENT), schema).session("fresh"))
}

#[test]
fn an_update_makes_what_a_new_installation_makes() {
    for schema in SCHEMAS {
        let expected = installed(schema);
        for name in
            ["comment on view", "definition of function", "initial rights on", "column ", "dependencies of rule"]
        {
            assert!(expected.keys().filter(|key| key.starts_with(name)).count() > 1, "{name}");
        }
        for old in released() {
            let mut admin = database_with(Some(old), schema).session("admin");
            assert_eq!(version(&mut admin), *old);
            admin.run("alter extension named_locks update");
            let differences = differences(&expected, &facts(&mut admin));
            assert!(
                differences.is_empty(),
                "sql/named_locks--{old}--….sql makes other objects than a new installation, in schema {schema}. \
                 What it lacks:\n{}",
                differences.join("\n")
            );
        }
    }
}

/// The comparison above is worth something: each of these is seen.
#[test]
fn the_comparison_sees_whatever_differs() {
    let database = database_with(Some(CURRENT), "public");
    let mut admin = database.session("admin");
    let role = database.new_role("versions");
    let expected = facts(&mut admin);
    assert!(differences(&expected, &facts(&mut database_with(Some(CURRENT), "public").session("other"))).is_empty());
    for change in [
        "comment on function named_unlock_all() is 'another'",
        "comment on function named_unlock_all() is null",
        "comment on column lock_holders.pid is 'another'",
        "comment on column _lease.key is 'another'",
        "comment on trigger changed on _lock_domain is 'another'",
        "comment on index _lease_pkey is 'another'",
        "comment on type named_lock_mode is 'another'",
        "comment on extension named_locks is 'another'",
        "alter function named_unlock_all() cost 1",
        "alter function named_unlock_all() stable",
        "alter function named_unlock_all() set search_path = public",
        "alter procedure named_lock_wait security definer",
        "revoke execute on function named_unlock_all() from public",
        "grant execute on function lock_stats_reset() to public",
        "revoke select on lock_holders from public",
        "grant select (token) on _lease to public",
        "grant usage on type named_lock_mode to ROLE",
        "alter function named_unlock_all() owner to ROLE",
        "alter view lock_waiters owner to ROLE",
        "alter table _lease owner to ROLE",
        "alter type named_lock_mode owner to ROLE",
        "alter table _lease add column another int",
        "alter table _lease rename column kept to another",
        "alter table _lease alter column payload set not null",
        "alter table _lease alter column payload set default '{}'",
        "alter table _lease alter column payload set storage external",
        "alter table _lease alter column payload set statistics 7",
        "alter table _lease alter column permits type bigint",
        "alter table _lease set (fillfactor = 70)",
        "alter table _lease set unlogged",
        "alter table _lease replica identity full",
        "alter table _lease enable row level security",
        "alter table _lease cluster on _lease_pkey",
        "alter table _lease drop constraint _lease_pkey",
        "alter table _lock_domain drop constraint _lock_domain_role_check",
        "alter table _lock_domain add check (role is not null)",
        "alter table _lock_domain disable trigger changed",
        "drop trigger changed on _lock_domain",
        "create index on _lease (expires_at)",
        "alter sequence _lease_token increment 1",
        "alter sequence _lease_timeline start 1",
        "alter sequence _lease_token owned by _lease.token",
        "alter view lock_holders set (security_barrier)",
        "create or replace view lock_domains as select d.domain, d.role, d.max_wait, d.max_wait as max_hold from _lock_domain d",
        "alter type named_lock_mode rename value 'share' to 'shared'",
        "alter extension named_locks drop function lock_graph()",
        "create function another() returns int language sql as 'select 1'; alter extension named_locks add function another()",
        "alter function lock_graph() depends on extension plpgsql",
        "update pg_extension set extconfig = null, extcondition = null where extname = 'named_locks'",
        "update pg_extension set extversion = 'another' where extname = 'named_locks'",
        "delete from pg_init_privs where objoid = 'lock_holders'::regclass",
    ] {
        admin.run(&format!("begin; {}", change.replace("ROLE", &role)));
        assert!(!differences(&expected, &facts(&mut admin)).is_empty(), "{change}");
        admin.run("rollback");
    }
    assert!(differences(&expected, &facts(&mut admin)).is_empty());
}

/// The new package is there and nobody has run ALTER EXTENSION UPDATE yet.
#[test]
fn the_library_works_with_the_objects_of_each_released_version() {
    for old in released() {
        for schema in SCHEMAS {
            let mut session = database_with(Some(old), schema).session("old objects");
            // Those that have other names there are behind the views.
            let there = session.column(
                "select proname from pg_proc
                  where pronamespace = (select extnamespace from pg_extension where extname = 'named_locks')",
            );
            let functions: Vec<&Function> =
                FUNCTIONS.iter().filter(|function| there.iter().any(|name| name == function.name())).collect();
            assert!(functions.len() > 40, "{there:#?}");
            call_each(functions, &mut session, &quoted(schema));
            assert_eq!(version(&mut session), *old);
        }
    }
}

/// A session's locks and leases as others see them, but for what goes on with time.
#[track_caller]
fn seen(watch: &mut Session, relation: &str, leave_out: &str) -> Vec<String> {
    watch.column(&format!("select (to_jsonb(r) - '{leave_out}'::text[])::text as r from {relation} as r order by 1"))
}

#[track_caller]
fn held(watch: &mut Session) -> Vec<String> {
    // Other tests are in other databases.
    let here = "(select pid from pg_stat_activity where datname = current_database())";
    let holders = format!("(select * from lock_holders where kind = 'lease' or pid in {here})");
    let mut all = seen(watch, &holders, "{held_for, remaining, state}");
    let waiters = format!("(select * from lock_waiters where pid in {here})");
    all.extend(seen(watch, &waiters, "{waited}"));
    let leases = watch.text("select coalesce(to_regclass('_lease'), to_regclass('lease'))");
    all.extend(seen(watch, &leases, "{}"));
    all.extend(seen(watch, "lock_domains", "{}"));
    all
}

#[test]
fn c46_what_is_held_stays_held() {
    for old in released() {
        for schema in SCHEMAS {
            held_through_an_update(&database_with(Some(old), schema));
        }
    }
}

fn held_through_an_update(database: &Server) {
    let mut admin = database.session("admin");
    let mut a = database.session("a");
    let mut b = database.session("b");
    let mut highest = 0;
    let mut given = |token: i64| {
        assert!(token > highest, "{token} was given out after {highest}");
        highest = token;
        token
    };

    a.run("select named_lock('session'), named_lock('session'), named_lock('shared', mode => 'share')");
    a.run("select named_lock('limited', hold_limit => '1 hour'), named_lock('all', cluster_wide => true)");
    a.run("select named_lock_all(array['one', 'two']), named_lock_tree('tree/a/b'), advisory_lock(42)");
    let slot = a.int("select named_semaphore('semaphore', 1)");
    let mut take = |session: &mut Session, name: &str, more: &str| {
        given(lease_queue::take_with(session, name, "1 hour", &format!(", payload => '{{\"a\": 1}}'{more}")))
    };
    let k = take(&mut a, "k", "");
    let pair = [(); 2].map(|()| take(&mut a, "pair", ", permits => 2"));
    let bound = take(&mut a, "bound", ", bound => true");
    let kept = take(&mut a, "kept", "");
    assert!(a.flag(&format!("select lease_release('kept', {kept}, '1 hour')")));
    assert!(b.flag("select lease_request('k', 'an update')"));
    admin.run("select lock_domain_set('ours', max_wait => '1 s', max_hold => '1 day')");
    // Planned before, executed after.
    a.run("prepare session_held as select named_lock_held('session')");
    b.run(&format!("prepare k_held as select lease_check('k', {k})"));
    assert_eq!(a.int("execute session_held"), 2);
    assert!(b.flag("execute k_held"));
    // Transactions are open meanwhile, one with a guard, and one that has changed a lease.
    b.run("begin; select named_xact_lock('transaction'); savepoint s; select named_xact_lock('in a savepoint')");
    b.run(&format!("select lease_guard('k', {k})"));
    let mut c = database.session("c");
    c.run("begin");
    given(lease_queue::take(&mut c, "open", "1 hour"));
    // Waiting for each.
    let mut wait = |statement: &str| holding::start(database.session("waiter"), statement, &mut admin);
    let for_session = wait("select named_lock('session', '1 min')");
    let for_transaction = wait("select named_xact_lock('transaction', '1 min')");
    let for_tree = wait("call named_lock_wait('tree/a/b', '1 min')");
    let mut queue = |statement: &str| {
        let waiting = database.session("waiter").background(statement);
        until_queued(&mut admin, waiting.pid, 1);
        waiting
    };
    let for_semaphore = queue("select named_semaphore('semaphore', 1, '1 min')");
    let for_k = queue("select token from lease_acquire('k', '1 hour', '1 min')");
    let for_bound = queue("call lease_acquire_wait('bound', '1 hour')");
    let before = held(&mut admin);
    assert!(before.len() > 25, "{before:#?}");

    // It waits for the last of these.
    let update = database.session("updates").background("alter extension named_locks update");
    admin.until_waiting(update.pid);
    c.run("rollback");
    update.end().1.expect("updated");
    assert_eq!(version(&mut admin), CURRENT);
    assert_eq!(held(&mut admin), before);
    // For those who were there, and for those who come.
    let mut later = database.session("later");
    assert_eq!(held(&mut later), before);
    for session in [&mut admin, &mut later] {
        for name in
            ["session", "shared", "limited", "one", "two", "transaction", "in a savepoint", "tree/a", "tree/a/b"]
        {
            assert!(!session.flag(&format!("select named_lock('{name}', '0')")), "{name}");
        }
        assert!(!session.flag("select named_lock('all', '0', cluster_wide => true)"));
        assert!(!session.flag("select named_lock_tree('tree/a/b/c', '0')"));
        assert!(!session.flag("select pg_try_advisory_lock(42)"));
        assert_eq!(session.maybe("select named_semaphore('semaphore', 1, '0')"), None);
        for (name, permits) in [("k", 1), ("pair", 2), ("bound", 1), ("kept", 1)] {
            let sql = format!("select token from lease_acquire('{name}', '1 hour', permits => {permits})");
            assert_eq!(session.maybe(&sql), None, "{name}");
        }
    }
    for session in [&mut a, &mut b, &mut later] {
        for (name, token, expected) in [
            ("k", k, true),
            ("pair", pair[0], true),
            ("pair", pair[1], true),
            ("bound", bound, true),
            ("kept", kept, false),
        ] {
            assert_eq!(session.flag(&format!("select lease_check('{name}', {token})")), expected, "{name}");
        }
    }
    assert_eq!(a.int("execute session_held"), 2);
    assert!(b.flag("execute k_held"));
    assert_eq!(a.text(&format!("select release_requested from lease_renew('k', {k})")), "an update");
    later.fails("select named_lock('ours:a', hold_limit => '2 days')").is("22023");

    // All is given back by those who took it, to those who wait.
    assert_eq!(a.int("select named_unlock('session', all_holds => true)"), 0);
    let (mut waiter, granted) = for_session.end();
    assert_eq!(granted.expect("granted")[0].get(0), Some("t"));
    assert_eq!(waiter.int("select named_unlock('session')"), 0);
    assert_eq!(a.int("select named_unlock_tree('tree/a/b')"), 0);
    assert_eq!(for_tree.end().1.expect("granted")[0].get(0), Some("t"));
    a.run(&format!("select named_semaphore_release('semaphore', {slot})"));
    assert_eq!(for_semaphore.end().1.expect("granted")[0].get(0), Some("1"));
    assert!(a.flag(&format!("select lease_release('k', {k})")));
    assert!(!for_k.finished(), "it is guarded");
    b.run("rollback to s");
    assert_eq!(b.int("select named_lock_held('transaction') + named_lock_held('in a savepoint')"), 1);
    b.run("commit");
    assert_eq!(for_transaction.end().1.expect("granted")[0].get(0), Some("t"));
    let mut granted =
        |rows: Vec<postgres::SimpleQueryRow>| given(rows[0].get(0).expect("a token").parse().expect("a number"));
    granted(for_k.end().1.expect("granted"));
    granted(later.run("select token from lease_acquire('open', '1 hour')"));
    a.run("discard all");
    granted(for_bound.end().1.expect("granted"));
    assert_eq!(admin.locks_of(a.pid), 0);
    for token in pair {
        assert!(a.flag(&format!("select lease_release('pair', {token})")));
    }
    granted(later.run("select token from lease_acquire('pair', '1 hour', permits => 3)"));
    assert!(later.flag("select lock_domain_drop('ours')"));
    later.run("select lock_graph(); select * from lock_stats");
}
