//! Who may renew, release, guard and break, who sees what, and that nothing but the functions touches the table.

use super::{
    acquire, acquire_sql, check, guard_sql, owners, release, renew, renew_sql, shown, stored, take, until_queued,
    waiters,
};
use crate::pg_test::support::{Server, Session, unique, unique_ident};

/// A role that acquires, one that is a member of it, one that has nothing to do with it, and two with special rights.
struct Roles {
    owner: Session,
    member: Session,
    stranger: Session,
    signaller: Session,
    monitor: Session,
    superuser: Session,
    owner_name: String,
}

fn roles(server: &Server) -> Roles {
    let owner_name = server.new_role("lease_owner");
    let session = |stem: &str, grant: &str| {
        let role = server.new_role(stem);
        if !grant.is_empty() {
            server.session("admin").run(&format!("grant {grant} to {role}"));
        }
        server.session_as(&role, stem)
    };
    Roles {
        member: session("lease_member", &owner_name),
        stranger: session("lease_stranger", ""),
        signaller: session("lease_signaller", "pg_signal_backend"),
        monitor: session("lease_monitor", "pg_read_all_stats"),
        superuser: server.session("lease_superuser"),
        owner: server.session_as(&owner_name, "lease_owner"),
        owner_name,
    }
}

impl Roles {
    /// Each with whether it may use what the owner acquired, and whether it may break it.
    fn all(&mut self) -> [(&'static str, &mut Session, bool, bool); 6] {
        [
            ("owner", &mut self.owner, true, true),
            ("member", &mut self.member, true, true),
            ("superuser", &mut self.superuser, true, true),
            ("signaller", &mut self.signaller, false, true),
            ("monitor", &mut self.monitor, false, false),
            ("stranger", &mut self.stranger, false, false),
        ]
    }
}

#[test]
fn only_the_role_that_acquired_it_and_its_members_may_use_the_token() {
    let server = Server::shared();
    let mut roles = roles(server);
    let mut watch = server.session("watch");
    let k = unique("rights");
    let mut token = take(&mut roles.owner, &k, "1 hour", ", owner => 'it'");
    for index in 0..6 {
        let before = stored(&mut watch, &k);
        let (who, session, may, _) = &mut roles.all()[index];
        let calls = [
            renew_sql(&k, token, ""),
            renew_sql(&k, token, ", '2 hours', '{}'"),
            guard_sql(&k, token),
            format!("select lease_release('{k}', {token}, '1 hour')"),
            format!("select lease_release('{k}', {token})"),
        ];
        for call in calls {
            session.run("begin");
            match session.query(&call) {
                Ok(_) => assert!(*may, "{who}: {call}"),
                Err(error) => {
                    assert!(!*may, "{who}: {call}: {error:#?}");
                    error.is("42501").message_has(&k);
                    let text = format!("{error:?}");
                    assert!(!text.contains(&token.to_string()), "a token is not told: {text}");
                }
            }
            session.run("rollback");
        }
        if !*may {
            assert_eq!(stored(&mut watch, &k), before, "{who}: nothing is changed");
        }
        // Asking, checking and looking are for everyone.
        assert!(check(session, &k, token), "{who}");
        assert_eq!(owners(session, &k), ["it"], "{who}");
        assert!(session.flag(&format!("select lease_request('{k}', '{who}')")), "{who}");
        acquire(session, &k, "1 hour", "").refused_by("it", 3600.0);
        // What it acquired itself, it may.
        let own = unique("rights own");
        let own_token = take(session, &own, "1 hour", "");
        renew(session, &own, own_token, "");
        session.run(&guard_sql(&own, own_token));
        assert!(release(session, &own, own_token));
        // For good, once.
        if *may {
            assert!(release(session, &k, token), "{who}");
            token = take(&mut roles.owner, &k, "1 hour", ", owner => 'it'");
        }
    }
}

#[test]
fn a_break_is_also_for_pg_signal_backend_and_superusers() {
    let server = Server::shared();
    let mut roles = roles(server);
    for index in 0..6 {
        for what in ["held", "kept", "bound", "three permits"] {
            let k = unique("rights");
            let mut count = 1;
            match what {
                "held" => _ = take(&mut roles.owner, &k, "1 hour", ""),
                "bound" => _ = take(&mut roles.owner, &k, "1 hour", ", bound => true"),
                "kept" => {
                    let token = take(&mut roles.owner, &k, "1 hour", "");
                    assert!(roles.owner.flag(&format!("select lease_release('{k}', {token}, '1 hour')")));
                }
                _ => {
                    count = 3;
                    for _ in 0..count {
                        take(&mut roles.owner, &k, "1 hour", ", permits => 3");
                    }
                }
            }
            let (who, session, _, may) = &mut roles.all()[index];
            let break_it = format!("select lease_break('{k}')");
            if *may {
                assert_eq!(session.int(&break_it), count, "{who}: {what}");
                assert_eq!(shown(&mut roles.owner, &k), [""; 0], "{who}: {what}");
            } else {
                session.fails(&break_it).is("42501").message_has(&k);
                assert_eq!(shown(&mut roles.owner, &k).len() as i64, count, "{who}: {what}");
            }
        }
        // Where there is nothing, there is nothing to forbid.
        let (who, session, ..) = &mut roles.all()[index];
        assert_eq!(session.int(&format!("select lease_break('{}')", unique("rights"))), 0, "{who}");
    }
}

/// All or nothing: one's own grant does not go because another's may not.
#[test]
fn a_break_of_grants_of_several_roles() {
    let server = Server::shared();
    let mut roles = roles(server);
    let k = unique("rights");
    let first = take(&mut roles.owner, &k, "1 hour", ", permits => 3");
    let second = take(&mut roles.stranger, &k, "1 hour", ", permits => 3");
    let break_it = format!("select lease_break('{k}')");
    for session in [&mut roles.owner, &mut roles.stranger, &mut roles.member, &mut roles.monitor] {
        session.fails(&break_it).is("42501");
    }
    assert!(check(&mut roles.monitor, &k, first));
    assert!(check(&mut roles.monitor, &k, second));
    assert_eq!(roles.signaller.int(&break_it), 2);
}

/// With a token that is lost, everyone is told that it is lost: there is nothing left to forbid.
#[test]
fn a_lost_token_is_lost_for_everyone() {
    let server = Server::shared();
    let mut roles = roles(server);
    let k = unique("rights");
    let old = take(&mut roles.owner, &k, "1 hour", "");
    assert!(release(&mut roles.owner, &k, old));
    for (who, session, ..) in roles.all() {
        session.fails(&renew_sql(&k, old, "")).is("55000");
        session.fails(&guard_sql(&k, old)).is("55000");
        assert!(!release(session, &k, old), "{who}");
    }
    let new = take(&mut roles.owner, &k, "1 hour", "");
    for (who, session, ..) in roles.all() {
        for wrong in [old, new + 1] {
            session.fails(&renew_sql(&k, wrong, "")).is("55006");
            session.fails(&guard_sql(&k, wrong)).is("55006");
            assert!(!release(session, &k, wrong), "{who}");
        }
    }
    assert!(check(&mut roles.owner, &k, new));
}

/// It is the current role that counts, as everywhere in the server: SET ROLE, and a SECURITY DEFINER function's owner.
#[test]
fn the_role_is_the_current_one() {
    let server = Server::shared();
    let mut admin = server.session("admin");
    let (one, other) = (server.new_role("lease_one"), server.new_role("lease_other"));
    let k = unique("rights");
    admin.run(&format!("set role {one}"));
    let token = take(&mut admin, &k, "1 hour", "");
    assert_eq!(admin.text(&format!("select usename from lock_holders where name = '{k}'")), one);
    admin.run(&format!("set role {other}"));
    admin.fails(&renew_sql(&k, token, "")).is("42501");
    admin.fails(&format!("select lease_release('{k}', {token})")).is("42501");
    admin.run(&format!("set role {one}"));
    renew(&mut admin, &k, token, "");
    admin.run("reset role");
    // A function that acquires and releases for its callers.
    let function = unique_ident("lease_for_others");
    admin.run(&format!(
        "create function {function}(k text) returns bigint language sql security definer \
             as $$ select token from lease_acquire(k, '1 hour') $$; \
         create function {function}_end(k text, t bigint) returns boolean language sql security definer \
             as $$ select lease_release(k, t) $$; \
         alter function {function}(text) owner to {one}; alter function {function}_end(text, bigint) owner to {one}"
    ));
    let mut b = server.session_as(&other, "b");
    let k = unique("rights");
    let token = b.int(&format!("select {function}('{k}')"));
    b.fails(&renew_sql(&k, token, "")).is("42501");
    assert!(b.flag(&format!("select {function}_end('{k}', {token})")));
    // The functions leave the caller's role as it is, after an error, too.
    b.fails(&acquire_sql(&k, "1 ms", "")).is("22023");
    assert_eq!(b.text("select current_user || ' ' || session_user"), format!("{other} {other}"));
    b.run("begin");
    take(&mut b, &k, "1 hour", "");
    assert_eq!(b.text("select current_user"), other);
    b.run("rollback");
}

#[test]
fn a_role_that_is_dropped_leaves_its_lease_to_superusers() {
    let server = Server::shared();
    let role = server.new_role("lease_dropped");
    let stranger = server.new_role("lease_stranger");
    let mut admin = server.session("admin");
    let mut b = server.session_as(&stranger, "b");
    let k = unique("rights");
    let token = take(&mut server.session_as(&role, "a"), &k, "1 hour", ", owner => 'gone'");
    admin.run(&format!("drop role {role}"));
    assert_eq!(shown(&mut admin, &k), ["held gone"]);
    b.fails(&renew_sql(&k, token, "")).is("42501");
    b.fails(&format!("select lease_break('{k}')")).is("42501");
    b.run("select * from lock_holders");
    acquire(&mut b, &k, "1 hour", "").refused_by("gone", 3600.0);
    renew(&mut admin, &k, token, "");
    assert_eq!(admin.int(&format!("select lease_break('{k}')")), 1);
    take(&mut b, &k, "1 hour", "");
}

#[test]
fn the_views_show_of_other_roles_leases_what_is_for_everyone() {
    let server = Server::shared();
    let mut roles = roles(server);
    let mut watch = server.session("watch");
    let k = format!("secret:{}", unique("rights"));
    let token = take(&mut roles.owner, &k, "1 hour", ", owner => 'me', payload => '{\"a\": 1}', bound => true");
    let pid = roles.owner.pid;
    // And one who waits for it.
    let waiting =
        server.session_as(&roles.owner_name, "lease waiter").background(&acquire_sql(&k, "1 hour", ", '1 minute'"));
    until_queued(&mut watch, &k, 1);
    let owner_name = roles.owner_name.clone();
    for (who, session, member, _) in roles.all() {
        let names = member || who == "monitor";
        let rows = session.run(&format!(
            "select name, domain, owner, payload, token, usename, state, acquired_at, expires_at, remaining, waiters, kind \
               from lock_holders where pid = {pid}"
        ));
        assert_eq!(rows.len(), 1, "{who}: the row is there for everyone");
        let get = |column| rows[0].get(column);
        assert_eq!(get("name"), names.then_some(k.as_str()), "{who}");
        assert_eq!(get("domain"), names.then_some("secret"), "{who}");
        assert_eq!(get("owner"), names.then_some("me"), "{who}");
        assert_eq!(get("payload"), names.then_some("{\"a\": 1}"), "{who}");
        // A token is a key to the lease, and pg_read_all_stats opens nothing.
        assert_eq!(get("token"), member.then_some(token.to_string().as_str()), "{who}");
        assert_eq!(get("usename"), Some(owner_name.as_str()), "{who}");
        assert_eq!(get("state"), Some("held"), "{who}");
        assert_eq!(get("kind"), Some("lease"), "{who}");
        assert_eq!(get("waiters"), Some("1"), "{who}");
        for always in ["acquired_at", "expires_at", "remaining"] {
            assert!(get(always).is_some(), "{who}: {always}");
        }
        let rows = session.run(&format!("select name, domain, kind from lock_waiters where pid = {}", waiting.pid));
        assert_eq!(rows.len(), 1, "{who}: the row is there for everyone");
        assert_eq!(rows[0].get("name"), names.then_some(k.as_str()), "{who}");
        assert_eq!(rows[0].get("domain"), names.then_some("secret"), "{who}");
        let graph = session.text("select lock_graph()");
        assert_eq!(graph.contains(&k), names, "{who}: the graph tells no more:\n{graph}");
        // Whoever may lock that name is told who has it.
        let rows = session.run(&format!("select owner, payload from lease_holder('{k}')"));
        assert_eq!((rows[0].get(0), rows[0].get(1)), (Some("me"), Some("{\"a\": 1}")), "{who}");
        acquire(session, &k, "1 hour", "").refused();
    }
    watch.run(&format!("select pg_cancel_backend({})", waiting.pid));
    waiting.end().1.expect_err("cancelled").is("57014");
    assert_eq!(waiters(&mut watch, &k), 0);
    for (who, session, ..) in roles.all() {
        let said = acquire(session, &k, "1 hour", "");
        said.refused_by("me", 3600.0);
        let error = session.fails(&renew_sql(&k, 1, ""));
        error.is("55006").message_has(&k).detail_has("me");
        assert!(!format!("{error:?}").contains(&token.to_string()), "{who}");
    }
}

#[test]
fn nobody_has_rights_on_the_table_and_the_sequences() {
    let server = Server::shared();
    let mut roles = roles(server);
    let k = unique("rights");
    take(&mut roles.owner, &k, "1 hour", "");
    for (who, session, ..) in roles.all() {
        if who == "superuser" {
            // Who may do anything can, so that what follows is about rights.
            session.run("begin; select count(*) from _lease; select last_value from _lease_token; rollback");
            continue;
        }
        session.run("begin");
        session.fails("lock table _lease in access share mode").is("42501");
        session.run("rollback");
        for statement in [
            "select count(*) from _lease",
            "select key from _lease limit 1",
            "update _lease set expires_at = 'infinity'",
            "delete from _lease",
            "insert into _lease select * from _lease",
            "truncate _lease",
            "alter table _lease add column x int",
            "create trigger t before insert on _lease for each row execute function suppress_redundant_updates_trigger()",
            "select last_value from _lease_token",
            "select nextval('_lease_token')",
            "select setval('_lease_token', 1)",
            "select setval('_lease_timeline', 1)",
            "select nextval('_lease_timeline')",
            "copy _lease to stdout",
        ] {
            session.fails(statement).is("42501");
        }
    }
    assert_eq!(
        roles.superuser.column(
            "select c.relname from pg_class as c where c.relname in ('_lease', '_lease_token', '_lease_timeline') \
                and has_table_privilege('pg_monitor', c.oid, 'select, insert, update, delete, truncate, references, trigger')"
        ),
        [""; 0]
    );
}

/// Everything works without the extension's schema in the search_path, and with traps in it.
#[test]
fn nothing_depends_on_the_callers_search_path() {
    let server = Server::shared();
    let schema = unique_ident("leases_elsewhere");
    let trap = unique_ident("trap");
    let database = server.new_database("lease_schema", "UTF8");
    let role = server.new_role("lease_elsewhere");
    let mut admin = database.session("admin");
    admin.run(&format!(
        "drop extension named_locks cascade; create schema {schema}; create extension named_locks schema {schema}; \
         grant usage on schema {schema} to {role}; \
         create schema {trap} authorization {role};          create table {trap}._lease (like {schema}._lease); alter table {trap}._lease owner to {role}"
    ));
    let mut a = database.session_as(&role, "lease a");
    a.run(&format!(
        "create sequence {trap}._lease_token; create sequence {trap}._lease_timeline; \
         create function {trap}.sprung() returns void language plpgsql as $$ begin raise 'trapped as %', current_user; end $$; \
         create function {trap}.clock_timestamp() returns timestamptz language plpgsql as $$ begin raise 'trapped'; end $$; \
         create function {trap}.nextval(regclass) returns bigint language plpgsql as $$ begin raise 'trapped'; end $$; \
         create function {trap}.lease_check(text, bigint) returns boolean language plpgsql as $$ begin raise 'trapped'; end $$; \
         create function {trap}.eq(bigint, bigint) returns boolean language plpgsql as $$ begin raise 'trapped'; end $$; \
         create function {trap}.eq(text, text) returns boolean language plpgsql as $$ begin raise 'trapped'; end $$; \
         create function {trap}.eq(bigint, integer) returns boolean language plpgsql as $$ begin raise 'trapped'; end $$; \
         create operator {trap}.= (leftarg = bigint, rightarg = bigint, function = {trap}.eq); \
         create operator {trap}.= (leftarg = text, rightarg = text, function = {trap}.eq); \
         create operator {trap}.= (leftarg = bigint, rightarg = integer, function = {trap}.eq); \
         create function {trap}.minus(timestamptz, timestamptz) returns interval language plpgsql as $$ begin raise 'trapped'; end $$; \
         create operator {trap}.- (leftarg = timestamptz, rightarg = timestamptz, function = {trap}.minus)"
    ));
    for path in [format!("{trap}, pg_catalog"), String::from("''"), String::from("pg_temp, pg_catalog")] {
        a.run(&format!("set search_path = {path}"));
        let k = unique("rights");
        let token = a.int(&format!("select token from {schema}.lease_acquire('{k}', '1 hour', permits => 2)"));
        let second = a.int(&format!("call {schema}.lease_acquire_wait('{k}', '1 hour', permits => 2, bound => true)"));
        assert!(a.flag(&format!("select {schema}.lease_check('{k}', {token})")));
        a.run(&format!("select * from {schema}.lease_renew('{k}', {token}, '2 hours', '{{}}')"));
        assert!(a.flag(&format!("select {schema}.lease_request('{k}', 'please')")));
        a.run(&format!("begin; select {schema}.lease_guard('{k}', {token}); commit"));
        assert_eq!(a.int(&format!("select count(*) from {schema}.lease_holder('{k}')")), 2);
        a.run(&format!("select * from {schema}.lock_holders"));
        a.run(&format!("select * from {schema}.lock_waiters"));
        assert_eq!(a.text(&format!("select count(*) from {schema}.lock_holders where kind like 'lease'")), "2");
        a.fails(&format!("select * from {schema}.lease_renew('{k}', 1)")).is("55006");
        assert!(a.flag(&format!("select {schema}.lease_release('{k}', {second})")));
        assert_eq!(a.int(&format!("select {schema}.lease_break('{k}')")), 1);
    }
    assert_eq!(admin.int(&format!("select count(*) from {trap}._lease")), 0);
    assert_eq!(admin.int(&format!("select count(*) from {schema}.lock_holders where kind = 'lease'")), 0);
}

/// The extension's schema may be closed to a role, or a function: then it has none of it.
#[test]
fn execute_can_be_taken_away() {
    let server = Server::shared();
    let database = server.new_database("lease_execute", "UTF8");
    let role = server.new_role("lease_execute");
    database.session("admin").run(
        "revoke execute on function lease_acquire from public; revoke execute on procedure lease_acquire_wait from public; \
         revoke execute on function lease_break from public",
    );
    let mut a = database.session_as(&role, "lease a");
    a.fails(&acquire_sql("k", "1 hour", "")).is("42501");
    a.fails("call lease_acquire_wait('k', '1 hour')").is("42501");
    a.fails("select lease_break('k')").is("42501");
    assert_eq!(owners(&mut a, "k"), [""; 0]);
}
