//! The extension in odd schemas, in schemas where others have been before, and beside things that are named as its own.

use super::support::surface::{FUNCTIONS, For, Function, RELATIONS, qualified};
use super::support::{Server, Session, unique, unique_ident};

/// A database without the extension, and a superuser's session in it.
fn bare(encoding: &str) -> (Server, Session) {
    let database = Server::shared().new_database("install", encoding);
    let mut admin = database.session("admin");
    admin.run("drop extension named_locks");
    (database, admin)
}

fn quoted(identifier: &str) -> String {
    format!("\"{}\"", identifier.replace('"', "\"\""))
}

/// Calls every function and reads every view, all qualified. `schema` as it stands in SQL.
fn call_all(session: &mut Session, schema: &str) {
    call_each(&FUNCTIONS, session, schema);
}

/// Calls these functions and reads every view.
pub fn call_each<'a>(functions: impl IntoIterator<Item = &'a Function>, session: &mut Session, schema: &str) {
    let stem = unique_ident("install");
    for (number, function) in functions.into_iter().enumerate() {
        let name = format!("{stem}:{number}");
        let call = function.prepared_in(session, &name, |statement| qualified(statement, schema));
        if let Err(error) = session.query(&call) {
            assert_eq!((function.is_for, error.code.as_str()), (For::Owner, "39P01"), "{call}: {error:#?}");
        }
        session.run(&qualified("select named_unlock_all()", schema));
        session.run("select pg_advisory_unlock_all()");
    }
    for relation in RELATIONS.iter().filter(|relation| relation.kind == 'v') {
        session.run(&format!("select * from {schema}.{}", relation.name));
    }
}

#[test]
fn in_schemas_of_any_name() {
    let (_database, mut admin) = bare("UTF8");
    let long = "x".repeat(63);
    for name in ["Odd Schema", "UPPER", "with.dot", "with-dash", "select", "ä 漢字", "percent%s", "semi;colon", &long]
    {
        let schema = quoted(name);
        admin.run(&format!("create schema {schema}; create extension named_locks schema {schema}"));
        admin.run("set search_path = ''");
        call_all(&mut admin, &schema);
        admin.run(&format!("select {schema}.lock_domain_set('a', max_wait => '1 s')"));
        assert_eq!(admin.column(&format!("select domain from {schema}.lock_domains")), ["a"], "{name}");
        assert!(admin.flag(&format!("select {schema}.lock_domain_drop('a')")));
        admin.run(&format!("reset search_path; drop extension named_locks; drop schema {schema}"));
    }
    // What could break out of the script's quotes the server refuses, 14 since 14.9.
    if admin.int("show server_version_num") < 140_009 {
        return;
    }
    for name in ["double\"quote", "single'quote", "dollar$", "back\\slash"] {
        let schema = quoted(name);
        admin.run(&format!("create schema {schema}"));
        admin.fails(&format!("create extension named_locks schema {schema}")).is("22P02");
        assert_eq!(admin.int("select count(*) from pg_extension where extname = 'named_locks'"), 0);
        admin.run(&format!("drop schema {schema}"));
    }
}

/// The schema's name is in the database's encoding.
#[test]
fn in_a_schema_of_another_encoding() {
    let (_database, mut admin) = bare("LATIN1");
    admin.run("create schema \"é\"; create extension named_locks schema \"é\"; set search_path = ''");
    call_all(&mut admin, "\"é\"");
    admin.run("select \"é\".lock_domain_set('ü', max_wait => '1 s')");
    assert_eq!(admin.column("select domain || max_wait from \"é\".lock_domains"), ["ü00:00:01"]);
    assert!(admin.flag("select \"é\".lock_domain_drop('ü')"));
}

/// Another role has made something of a name that the extension needs: CREATE EXTENSION fails, and all is as before.
#[test]
fn where_something_of_that_name_is() {
    let (database, mut admin) = bare("UTF8");
    let squatter = database.new_role("squatter");
    admin.run(&format!("create schema home; grant all on schema home to {squatter}"));
    let mut other = database.session_as(&squatter, "squatter");
    let mut there: Vec<(String, String)> = Vec::new();
    for relation in RELATIONS {
        let name = relation.name;
        for kind in ["table home.$ (i int)", "view home.$ as select 1", "sequence home.$", "type home.$ as (i int)"] {
            let (kind, rest) = kind.split_once(' ').expect("a kind");
            let rest = rest.replace('$', name);
            there.push((format!("create {kind} {rest}"), format!("drop {kind} home.{name}")));
        }
    }
    for kind in ["table home.$ (i int)", "type home.$ as enum ('exclusive')", "domain home.$ as text"] {
        let (kind, rest) = kind.split_once(' ').expect("a kind");
        let name = "named_lock_mode";
        there.push((format!("create {kind} {}", rest.replace('$', name)), format!("drop {kind} home.{name}")));
    }
    // Of the others the type comes first.
    for function in FUNCTIONS.iter().filter(|function| !function.signature.contains("named_lock_mode")) {
        let signature = function.signature;
        there.push((
            format!("create function home.{signature} returns int language sql as 'select 1'"),
            format!("drop function home.{signature}"),
        ));
    }
    for (create, drop) in there {
        other.run(&create);
        let error = admin.fails("create extension named_locks schema home");
        assert!(["42P07", "42710", "42723"].contains(&error.code.as_str()), "{create}: {error:#?}");
        error.message_has("already exists");
        assert_eq!(admin.int("select count(*) from pg_extension where extname = 'named_locks'"), 0);
        // It is still the squatter's, and nothing else is there.
        other.run(&drop);
        assert_eq!(
            admin.int(
                "select (select count(*) from pg_class where relnamespace = 'home'::regnamespace) \
                      + (select count(*) from pg_proc where pronamespace = 'home'::regnamespace) \
                      + (select count(*) from pg_type where typnamespace = 'home'::regnamespace)"
            ),
            0,
            "{create}"
        );
    }
    admin.run("create extension named_locks schema home");
    call_all(&mut admin, "home");
}

/// Operators, functions and types of the names that views, checks and signatures use, each of which raises an error when
/// it is called.
fn set_traps(session: &mut Session, schema: &str) {
    session.run(&format!(
        "create function {schema}.sprung() returns boolean language plpgsql as $$ begin raise 'sprung by %', current_user; end $$; \
         do $do$ declare t text; o text; begin \
           foreach t in array array['text', 'name', 'bigint', 'integer', 'smallint', 'oid', 'xid', 'interval', 'timestamptz', \
                                    'boolean', 'regrole', 'jsonb'] loop \
             execute format('create function {schema}.trap(%s, %s) returns boolean language plpgsql as \
                             $$ begin return {schema}.sprung(); end $$', t, t); \
             foreach o in array array['=', '<>', '<', '>', '<=', '>=', '+', '-', '||', '~', '!~', '->', '->>'] loop \
               execute format('create operator {schema}.%s (leftarg = %s, rightarg = %s, function = {schema}.trap)', o, t, t); \
             end loop; \
           end loop; \
           foreach t in array array['clock_timestamp()', 'now()', 'pg_get_userbyid(oid)', 'pg_prepared_xact()', \
               'nextval(regclass)', 'setval(regclass, bigint)', 'strpos(text, text)', 'octet_length(text)', \
               'current_setting(text)', 'pg_extension_config_dump(regclass, text)', \
               'named_lock_mode(text)', '_lock_holders(integer)', '_lock_waiters(integer)', '_lock_stats(integer)'] loop \
             execute format('create function {schema}.%s returns boolean language plpgsql as \
                             $$ begin return {schema}.sprung(); end $$', t); \
           end loop; \
         end $do$; \
         create type {schema}.text as enum ('trap'); create type {schema}.jsonb as enum ('trap'); \
         create type {schema}.oid as enum ('trap'); create type {schema}.regrole as enum ('trap'); \
         create type {schema}.name as enum ('trap'); create type {schema}.xid as enum ('trap'); \
         create type {schema}.inet as enum ('trap'); create type {schema}.trigger as enum ('trap')"
    ));
}

/// Another role has set traps in the schema before the extension comes: it is made of its own things and the server's.
#[test]
fn where_traps_are_set() {
    let (database, mut admin) = bare("UTF8");
    let squatter = database.new_role("squatter");
    admin.run(&format!("create schema home; grant all on schema home to {squatter}"));
    set_traps(&mut database.session_as(&squatter, "squatter"), "home");
    admin.run("create extension named_locks schema home");
    for path in ["''", "home", "home, pg_catalog", "public, home"] {
        let mut session = database.session("victim");
        session.run(&format!("set search_path = {path}"));
        call_all(&mut session, "home");
    }
    // Nothing of the extension depends on anything of theirs.
    admin.run(&format!("drop owned by {squatter}"));
    assert_eq!(admin.int(&format!("select count(*) from pg_proc where proowner = '{squatter}'::regrole")), 0);
    call_all(&mut admin, "home");
}

/// A caller whose search_path leads through traps, as who may create in a schema that others use could set them.
#[test]
fn a_search_path_full_of_traps() {
    let (database, mut admin) = bare("UTF8");
    let attacker = database.new_role("attacker");
    let victim = database.new_role("victim");
    admin.run(&format!(
        "create schema home; create extension named_locks schema home; grant usage on schema home to public; \
         create schema trap authorization {attacker}; grant usage on schema trap to public"
    ));
    let mut set = database.session_as(&attacker, "attacker");
    set_traps(&mut set, "trap");
    for relation in RELATIONS {
        let name = relation.name;
        let create = match relation.kind {
            'S' => format!("create sequence trap.{name}"),
            _ => format!("create table trap.{name} (like home.{name})"),
        };
        admin
            .run(&format!("{create}; alter table trap.{name} owner to {attacker}; grant all on trap.{name} to public"));
    }
    set.run("create type trap.named_lock_mode as enum ('trap')");
    for function in FUNCTIONS.iter().filter(|function| !function.signature.contains("named_lock_mode")) {
        set.run(&format!(
            "create function trap.{} returns boolean language plpgsql as $$ begin return trap.sprung(); end $$",
            function.signature
        ));
    }
    for user in [None, Some(&victim)] {
        for path in ["trap, pg_catalog", "pg_temp, trap, pg_catalog", "trap, home, pg_catalog"] {
            let mut session = match user {
                None => database.session("victim"),
                Some(role) => database.session_as(role, "victim"),
            };
            for relation in RELATIONS {
                match relation.kind {
                    'S' => session.run(&format!("create temp sequence {}", relation.name)),
                    _ => session.run(&format!("create temp table {} (like trap.{})", relation.name, relation.name)),
                };
            }
            session.run(&format!("set search_path = {path}"));
            session.fails("select 1::bigint = 1::bigint").message_has("sprung");
            session.fails("select clock_timestamp()").message_has("sprung");
            if user.is_none() {
                call_all(&mut session, "home");
                session.run("select home.lock_domain_set('of the victim', null, '1 s', '1 hour')");
                session.run("select home.named_lock('of the victim:a', '0')");
                session.run("select home.lock_domain_drop('of the victim')");
                continue;
            }
            for (number, function) in FUNCTIONS.iter().filter(|function| function.is_for == For::Everyone).enumerate() {
                let name = unique(&format!("victim {number}"));
                let call = function.prepared_in(&mut session, &name, |statement| qualified(statement, "home"));
                session.run(&call);
                session.run("select home.named_unlock_all(), pg_advisory_unlock_all()");
            }
        }
    }
    for relation in RELATIONS.iter().filter(|relation| relation.kind != 'S') {
        assert_eq!(admin.int(&format!("select count(*) from trap.{}", relation.name)), 0, "{}", relation.name);
    }
    assert_eq!(admin.int("select count(*) from home.lock_domains"), 0);
}

/// The library's functions can be had by SQL only as the extension declares them, where arguments and rights are right.
#[test]
fn nobody_declares_the_librarys_functions_anew() {
    let server = Server::shared();
    let role = server.new_role("declares");
    let mut session = server.session_as(&role, "declares");
    session
        .fails("create function pg_temp.mine(bigint) returns boolean language c as 'named_locks', 'named_lock_wrapper'")
        .is("42501");
    session.fails("load 'named_locks'").is("42501");
    session.fails("create extension named_locks").is("42710");
    for change in [
        "alter extension named_locks update",
        "alter extension named_locks drop function named_unlock_all()",
        "drop extension named_locks",
        "alter function named_unlock_all() security definer",
        "create or replace function named_unlock_all() returns integer language sql as 'select 1'",
        "alter type named_lock_mode add value 'mine'",
        "create cast (text as named_lock_mode) with inout as implicit",
        "create rule r as on insert to lock_holders do instead nothing",
        "create trigger t before insert on _lock_domain for each row execute function suppress_redundant_updates_trigger()",
    ] {
        session.fails(change).is("42501");
    }
    let mut admin = server.session("admin");
    admin.fails("alter extension named_locks set schema pg_temp").is("0A000");
    // Creating it is for superusers.
    let (database, _) = bare("UTF8");
    let owner = database.new_role("owner");
    database
        .session("admin")
        .run(&format!("grant all on database {} to {owner}; grant all on schema public to {owner}", database.dbname));
    database.session_as(&owner, "owner").fails("create extension named_locks").is("42501");
}
