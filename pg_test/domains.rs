//! Rules for domains: who may use one, how long a call waits, how long a hold or a lease lasts.
//!
//! Each test works in a database of its own: rules hold for a whole database.

use super::support::{Server, Session, unique_ident, until};
use std::process::Stdio;
use std::time::{Duration, Instant};

/// A database with the extension, and a superuser's session in it.
fn database(stem: &str) -> (Server, Session) {
    let database = Server::shared().new_database(stem, "UTF8");
    let admin = database.session("admin");
    (database, admin)
}

/// In every form: `rights.rs`. Here it is who is a member.
#[test]
fn c44_only_members_of_the_role_may_use_the_domain() {
    let (database, mut admin) = database("c44");
    let [team, member, of_member, not_inheriting, stranger] =
        ["c44_team", "c44_member", "c44_of_member", "c44_not_inheriting", "c44_stranger"]
            .map(|role| database.new_role(role));
    admin.run(&format!("grant {team} to {member}; grant {member} to {of_member}"));
    admin.run(&format!("alter role {not_inheriting} noinherit"));
    admin.run(&format!("grant {team} to {not_inheriting}"));
    if admin.int("select current_setting('server_version_num')::int") >= 160_000 {
        admin.run(&format!("grant {team} to {not_inheriting} with inherit false"));
    }
    admin.run(&format!("select lock_domain_set('jobs', '{team}')"));
    for (role, may) in
        [(&team, true), (&member, true), (&of_member, true), (&not_inheriting, false), (&stranger, false)]
    {
        let mut session = database.session_as(role, "role");
        for sql in
            ["select named_lock('jobs:nightly', '0')", "select acquired from lease_acquire('jobs:nightly', '1 s')"]
        {
            if may {
                session.run(sql);
                session.run("select named_unlock_all()");
                admin.run("select lease_break('jobs:nightly')");
            } else {
                session.fails(sql).is("42501");
            }
        }
        // It is the current role that counts.
        if may || role == &not_inheriting {
            session.run(&format!("set role {team}"));
            session.run("select named_lock('jobs:nightly', '0'), named_unlock('jobs:nightly')");
        }
    }
}

#[test]
fn c44_what_was_taken_before_the_rule_can_be_kept_up_and_given_back() {
    let (database, mut admin) = database("c44");
    let [team, other] = ["c44_team", "c44_other"].map(|role| database.new_role(role));
    let mut session = database.session_as(&other, "holder");
    assert!(session.flag("select named_lock('jobs:a')"));
    let token = session.int("select token from lease_acquire('jobs:b', '60 s')");
    admin.run(&format!("select lock_domain_set('jobs', '{team}')"));

    session.fails("select named_lock('jobs:a')").is("42501");
    session.fails("select named_lock_convert('jobs:a', 'share')").is("42501");
    session.fails("select acquired from lease_acquire('jobs:b', '60 s')").is("42501");
    assert_eq!(session.int("select named_lock_held('jobs:a')"), 1);
    assert_eq!(session.int("select named_unlock('jobs:a')"), 0);
    session.run(&format!("select lease_renew('jobs:b', {token})"));
    session.run(&format!("select lease_guard('jobs:b', {token})"));
    assert!(session.flag(&format!("select lease_check('jobs:b', {token})")));
    // Who holds it is for those who may lock it.
    assert_eq!(session.maybe("select owner from lease_holder('jobs:b')"), None);
    let mut member = database.session_as(&team, "member");
    assert_eq!(member.text("select owner from lease_holder('jobs:b')"), "holder");
    assert!(session.flag(&format!("select lease_release('jobs:b', {token})")));
}

/// To guard is for who holds the lease, rule or not. Who neither holds it nor may is in nobody's way, not for a moment.
#[test]
fn c44_guards_in_vain_keep_nobody_waiting() {
    let (database, mut admin) = database("c44");
    let [team, stranger] = ["c44_team", "c44_stranger"].map(|role| database.new_role(role));
    admin.run(&format!("select lock_domain_set('jobs', '{team}')"));
    let strangers: Vec<_> = (0..3)
        .map(|_| {
            database.session_as(&stranger, "stranger").background(
                "do $$ declare over timestamptz := clock_timestamp() + interval '2 s'; begin \
                   while clock_timestamp() < over loop \
                     begin \
                       perform lease_guard('jobs:a', 1); raise 'guarded'; \
                     exception when object_in_use or object_not_in_prerequisite_state then null; \
                     end; \
                   end loop; \
                 end $$",
            )
        })
        .collect();
    let mut member = database.session_as(&team, "member");
    while !strangers.iter().all(|stranger| stranger.finished()) {
        let token = member.maybe("select token from lease_acquire('jobs:a', '1 hour')").expect("granted at once");
        assert!(member.flag(&format!("select lease_release('jobs:a', {token})")));
    }
    for stranger in strangers {
        stranger.end().1.expect("each guard failed");
    }
}

#[test]
fn the_empty_domain_is_that_of_names_without_a_colon_or_beginning_with_one() {
    let (database, mut admin) = database("domain");
    let [team, stranger] = ["domain_team", "domain_stranger"].map(|role| database.new_role(role));
    admin.run(&format!("select lock_domain_set('', '{team}')"));
    let mut session = database.session_as(&stranger, "stranger");
    session.fails("select named_lock('nightly')").is("42501").message_has("domain \"\"");
    session.fails("select named_lock(':nightly')").is("42501");
    assert!(session.flag("select named_lock('jobs:nightly')"));
}

#[test]
fn max_wait_caps_every_wait() {
    let (database, mut admin) = database("domain");
    admin.run("select lock_domain_set('jobs', max_wait => '300 ms')");
    let mut holder = database.session("holder");
    holder.run("select named_lock('jobs:a'), lease_acquire('jobs:b', '1 hour')");
    let mut b = database.session("waiter");
    let start = Instant::now();
    assert!(!b.flag("select named_lock('jobs:a', '60 s')"));
    assert!(!b.flag("select named_xact_lock('jobs:a', '60 s')"));
    assert!(!b.flag("select acquired from lease_acquire('jobs:b', '1 s', '60 s')"));
    for sql in [
        "select named_lock('jobs:a')",
        "select named_lock_strict('jobs:a')",
        "select named_lock_strict('jobs:a', '60 s')",
        "select named_xact_lock('jobs:a')",
        "call named_lock_wait('jobs:a')",
        "select lease_acquire('jobs:b', '1 s', null)",
        "call lease_acquire_wait('jobs:b', '1 s')",
    ] {
        b.fails(sql).is("55P03").message_has("max_wait of its domain (300 ms)").detail_has("Held by");
    }
    assert!(start.elapsed() >= Duration::from_millis(10 * 300));
    assert!(start.elapsed() < Duration::from_secs(50), "{:?}", start.elapsed());
    // Shorter ones stay what they are.
    b.fails("select named_lock_strict('jobs:a', '1 ms')").is("55P03").message_has("within 1 ms");
    b.run("set lock_timeout = '50 ms'");
    b.fails("select named_lock('jobs:a')").is("55P03").message_has("lock_timeout (50 ms)");
    b.run("set lock_timeout = '1h'");
    b.fails("select named_lock('jobs:a')").is("55P03").message_has("max_wait");

    // No wait at all.
    admin.run("select lock_domain_set('jobs', max_wait => '0')");
    assert!(!b.flag("select named_lock('jobs:a', '60 s')"));
    b.fails("select named_lock('jobs:a')").is("55P03");
    assert!(b.flag("select named_lock('jobs:free')"));
}

#[test]
fn max_hold_is_the_default_and_the_most() {
    let (database, mut admin) = database("domain");
    admin.run("select lock_domain_set('jobs', max_hold => '1 hour')");
    let mut a = database.session("holder");
    a.run("select named_lock('jobs:a'), named_lock('jobs:b', hold_limit => '1 min'), named_lock('free')");
    let limits = "select coalesce(hold_limit::text, '-') from lock_holders where pid = pg_backend_pid() order by name";
    assert_eq!(a.column(limits), ["-", "01:00:00", "00:01:00"]);
    for sql in [
        "select named_lock('jobs:c', hold_limit => '61 min')",
        "select named_lock_extend('jobs:a', '61 min')",
        "select lease_acquire('jobs:c', '61 min')",
        "call lease_acquire_wait('jobs:c', '61 min')",
    ] {
        a.fails(sql).is("22023").message_has("max_hold").message_has("(3600 s)");
    }
    let token = a.int("select token from lease_acquire('jobs:c', '1 hour')");
    a.fails(&format!("select lease_renew('jobs:c', {token}, '61 min')")).is("22023");
    a.run(&format!("select lease_renew('jobs:c', {token})"));
    let refused = a.fails(&format!("select lease_release('jobs:c', {token}, keep_for => '61 min')"));
    refused.is("22023").message_has("keep_for").message_has("(3600 s)");
    assert!(a.flag(&format!("select lease_check('jobs:c', {token})")), "it is held as before");
    assert!(a.flag(&format!("select lease_release('jobs:c', {token}, keep_for => '1 hour')")));
    // Taking the limit off puts the rule's in its place.
    assert!(a.flag("select named_lock_extend('jobs:b', null) > clock_timestamp() + interval '59 min'"));
    // A transaction's locks end with it.
    a.run("begin; select named_xact_lock('jobs:x'); commit");

    admin.run("select lock_domain_set('jobs', max_hold => '300 ms')");
    let mut b = database.session("overrun");
    b.run("select named_lock('jobs:d')");
    admin.until_gone(b.pid);
}

#[test]
fn native_locks_have_no_domain() {
    let (database, mut admin) = database("domain");
    let [team, stranger] = ["domain_team", "domain_stranger"].map(|role| database.new_role(role));
    admin.run(&format!("select lock_domain_set('', '{team}', '0', '1 s')"));
    let mut session = database.session_as(&stranger, "stranger");
    for sql in
        ["select advisory_lock(1)", "select advisory_lock(1, 2)", "select advisory_xact_lock(3, mode => 'share')"]
    {
        assert!(session.flag(sql), "{sql}");
    }
}

#[test]
fn rules_reach_running_sessions_when_they_are_committed() {
    let (database, mut admin) = database("domain");
    let [team, stranger] = ["domain_team", "domain_stranger"].map(|role| database.new_role(role));
    let mut session = database.session_as(&stranger, "running");
    assert!(session.flag("select named_lock('jobs:a')"));

    admin.run(&format!("begin; select lock_domain_set('jobs', '{team}')"));
    assert!(session.flag("select named_lock('jobs:a')"));
    admin.run("rollback");
    assert!(session.flag("select named_lock('jobs:a')"));
    admin.run(&format!("select lock_domain_set('jobs', '{team}')"));
    session.fails("select named_lock('jobs:a')").is("42501");
    // In a transaction too, whatever its isolation level.
    admin.run("select lock_domain_drop('jobs')");
    session.run("begin isolation level repeatable read; select 1");
    assert!(session.flag("select named_lock('jobs:a')"));
    admin.run(&format!("select lock_domain_set('jobs', '{team}')"));
    session.fails("select named_lock('jobs:a')").is("42501");
    session.run("rollback");
    // By plain SQL too.
    admin.run("delete from _lock_domain");
    assert!(session.flag("select named_lock('jobs:a')"));
    admin.run(&format!("insert into _lock_domain values ('jobs', '{team}')"));
    session.fails("select named_lock('jobs:a')").is("42501");
    admin.run("truncate _lock_domain");
    assert!(session.flag("select named_lock('jobs:a')"));
    // Who has changed them sees it at once, and not after a rollback.
    admin.run(&format!("begin; select lock_domain_set('jobs', '{team}'); set local role {stranger}"));
    admin.fails("select named_xact_lock('jobs:b')").is("42501");
    admin.run(&format!("rollback; begin; set local role {stranger}"));
    assert!(admin.flag("select named_xact_lock('jobs:b')"));
    admin.run("rollback");
}

#[test]
fn only_the_extensions_owner_and_superusers_change_the_rules() {
    let (database, mut admin) = database("domain");
    let stranger = database.new_role("domain_stranger");
    let mut session = database.session_as(&stranger, "stranger");
    session.fails("select lock_domain_set('jobs')").is("42501").hint_has("owner");
    session.fails("select lock_domain_drop('jobs')").is("42501");
    for sql in ["insert into _lock_domain values ('jobs')", "delete from _lock_domain", "select * from _lock_domain"] {
        session.fails(sql).is("42501");
    }
    assert_eq!(session.int("select count(*) from lock_domains"), 0);
    // An owner who is no superuser.
    admin.run(&format!("alter table _lock_domain owner to {stranger}"));
    session.run("select lock_domain_set('jobs', max_wait => '1 s')");
    assert_eq!(session.text("select domain || max_wait from lock_domains"), "jobs00:00:01");
    assert!(session.flag("select lock_domain_drop('jobs')"));
    assert!(!session.flag("select lock_domain_drop('jobs')"));
}

#[test]
fn bad_rules_are_refused() {
    let (_database, mut admin) = database("domain");
    for (sql, code, part) in [
        ("select lock_domain_set(null)", "22004", "domain must not be null"),
        ("select lock_domain_drop(null)", "22004", "domain must not be null"),
        ("select lock_domain_set('jobs:a')", "22023", "colon"),
        ("select lock_domain_set(repeat('x', 1025))", "22001", "1025"),
        ("select lock_domain_set('jobs', max_wait => '-1 ms')", "22023", "max_wait"),
        ("select lock_domain_set('jobs', max_wait => '25 days')", "22023", "max_wait"),
        ("select lock_domain_set('jobs', max_hold => '99 ms')", "22023", "max_hold"),
        ("select lock_domain_set('jobs', max_hold => '11 years')", "22023", "max_hold"),
        ("insert into _lock_domain values ('jobs', null, '-1 s')", "23514", "_lock_domain"),
    ] {
        admin.fails(sql).is(code).message_has(part);
    }
    assert_eq!(admin.int("select count(*) from lock_domains"), 0);
}

#[test]
fn a_dropped_role_leaves_the_domain_to_superusers() {
    let (database, mut admin) = database("domain");
    let [team, stranger] = ["domain_team", "domain_stranger"].map(|role| database.new_role(role));
    admin.run(&format!("select lock_domain_set('jobs', '{team}')"));
    admin.run(&format!("drop role {team}"));
    database.session_as(&stranger, "stranger").fails("select named_lock('jobs:a')").is("42501");
    assert!(admin.flag("select named_lock('jobs:a')"));
    assert_eq!(admin.int("select count(*) from lock_domains"), 1);
}

#[test]
fn rules_are_dumped_and_restored() {
    let (database, mut admin) = database("domain");
    let team = database.new_role("domain_team");
    admin.run(&format!("select lock_domain_set('jobs', '{team}', '1 s', '1 min'), lock_domain_set('')"));
    let copy = unique_ident("domain_copy");
    admin.run(&format!("create database {copy} template template0"));
    let mut dump = database.client("pg_dump").stdout(Stdio::piped()).spawn().expect("pg_dump");
    let restored = database
        .database(&copy)
        .client("psql")
        .args(["-X", "-q", "-v", "ON_ERROR_STOP=1"])
        .stdin(dump.stdout.take().expect("its output"))
        .status()
        .expect("psql");
    assert!(restored.success() && dump.wait().expect("pg_dump").success());
    let rules =
        "select domain || ' ' || coalesce(role::text || max_wait || max_hold, '-') from lock_domains order by 1";
    let mut session = database.database(&copy).session("restored");
    assert_eq!(session.column(rules), [" -".to_owned(), format!("jobs {team}00:00:0100:01:00")]);
    let stranger = database.new_role("domain_stranger");
    let copy = database.database(&copy);
    copy.session_as(&stranger, "stranger").fails("select named_lock('jobs:a')").is("42501");
    let mut other = copy.session("still there");
    until("the rules hold there", || other.query("select named_lock('jobs:b', hold_limit => '2 min')").is_err());
}
