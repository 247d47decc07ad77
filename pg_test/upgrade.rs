//! pg_upgrade from an older major version.
//!
//! It needs a second installation of PostgreSQL, with the extension as users install it: `make upgrade` prepares both.

use super::support::{Cluster, Server, Session, as_server_user};
use std::path::PathBuf;

/// Where the programs of the older server are.
const OLD_BIN: &str = "NAMED_LOCKS_OLD_BIN";

#[track_caller]
fn token(session: &mut Session, name: &str, more: &str) -> i64 {
    session.int(&format!("select token from lease_acquire('{name}', '1 h'{more})"))
}

#[track_caller]
fn held(session: &mut Session, name: &str, token: i64) -> bool {
    session.flag(&format!("select lease_check('{name}', {token})"))
}

/// All that the extension has made in its schema, each object with its definition, rights and comment.
fn objects(server: &Server) -> Vec<String> {
    server.session("objects").column(
        "with members as (
            select d.classid, d.objid
              from pg_depend as d
             where d.refclassid = 'pg_extension'::regclass and d.deptype = 'e'
               and d.refobjid = (select oid from pg_extension where extname = 'named_locks')
         ), schema as (
            select extnamespace as oid from pg_extension where extname = 'named_locks'
         )
         select format('function %s | %s | %s', pg_get_functiondef(p.oid), p.proacl, obj_description(p.oid, 'pg_proc'))
           from members as m join pg_proc as p on m.classid = 'pg_proc'::regclass and p.oid = m.objid
          where p.pronamespace = (select oid from schema)
         union all
         select format('%s %s | %s | %s | %s | %s | %s | %s', c.relkind, c.relname,
                       (select string_agg(format('%s %s %s %s %s', a.attname, format_type(a.atttypid, a.atttypmod),
                                                 a.attnotnull, a.attcollation::regcollation,
                                                 col_description(c.oid, a.attnum)),
                                          ', ' order by a.attnum)
                          from pg_attribute as a where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped),
                       case when c.relkind = 'v' then pg_get_viewdef(c.oid) end,
                       (select string_agg(pg_get_indexdef(i.indexrelid), ', ') from pg_index as i
                         where i.indrelid = c.oid),
                       c.reloptions, c.relacl, obj_description(c.oid, 'pg_class'))
           from members as m join pg_class as c on m.classid = 'pg_class'::regclass and c.oid = m.objid
          where c.relnamespace = (select oid from schema)
         union all
         select format('type %s | %s | %s', t.typname,
                       (select string_agg(e.enumlabel, ', ' order by e.enumsortorder) from pg_enum as e
                         where e.enumtypid = t.oid),
                       obj_description(t.oid, 'pg_type'))
           from members as m join pg_type as t on m.classid = 'pg_type'::regclass and t.oid = m.objid
          where t.typnamespace = (select oid from schema)
         union all
         select format('sequence %s | %s %s %s %s %s %s %s', s.seqrelid::regclass, s.seqtypid::regtype, s.seqstart,
                       s.seqincrement, s.seqmax, s.seqmin, s.seqcache, s.seqcycle)
           from members as m join pg_sequence as s on m.classid = 'pg_class'::regclass and s.seqrelid = m.objid
         union all
         select format('extension %s | %s', extversion, array(select c::regclass::text from unnest(extconfig) as c order by 1))
           from pg_extension where extname = 'named_locks'
         order by 1",
    )
}

/// PostgreSQL 15.20 marks each column that it makes with an option `pg_attver`. An 18 that is older than that release
/// (18.6 is) doesn't know it, and pg_upgrade fails for any table, ours or not. Where this is so, the marks are taken off.
fn without_unknown_marks(old: &Cluster, databases: &[&str]) {
    let pg_dump = Server::shared().bin_dir.join("pg_dump");
    let knows = as_server_user("grep").args(["-q", "pg_attver"]).arg(pg_dump).status().expect("run grep");
    if !knows.success() {
        for dbname in databases {
            old.database(dbname).session("marks").run(
                "update pg_attribute set attoptions = null where attoptions::text like '{pg_attver=%}' \
                    and attrelid in (select oid from pg_class where relnamespace <> 'pg_catalog'::regnamespace)",
            );
        }
    }
}

#[test]
#[ignore = "needs two servers: make upgrade"]
fn upgrade_from_an_older_version() {
    let bin = std::env::var_os(OLD_BIN).map(PathBuf::from);
    let bin = bin.unwrap_or_else(|| panic!("{OLD_BIN} is to say where the older server's programs are: make upgrade"));
    let old = Cluster::of_programs(&bin, &[]);
    assert!(
        old.session("version").int("select current_setting('server_version_num')::int / 10000")
            < Server::shared().session("version").int("select current_setting('server_version_num')::int / 10000"),
        "the server at {} isn't older than this one",
        bin.display()
    );
    let mut highest = 0;
    let mut given = |token: i64| {
        assert!(token > highest, "{token} was given out after {highest}");
        highest = token;
        token
    };
    let mut create = old.session("create");
    create.run("create extension named_locks; create role other login; create role looker login");
    create.run("create database apart");
    create.run("create database unused");
    create.run("alter database apart set search_path = \"Locks here\"");
    old.database("apart").session("create").run(
        "create schema \"Locks here\"; grant usage on schema \"Locks here\" to public; \
              create extension named_locks schema \"Locks here\"",
    );
    old.database("unused").session("create").run("create extension named_locks");
    let first = given(token(&mut old.session("a"), "first", ""));
    // The old server has been failed over to, twice: what pg_upgrade makes is back on timeline 1.
    old.to_new_timeline();
    given(token(&mut old.session("a"), "second", ""));
    old.to_new_timeline();
    assert_eq!(old.timeline(), 3);

    let mut a = old.session("a");
    let mut other = old.session_as("other", "of another role");
    let k = given(token(&mut a, "k", ", owner => 'me', payload => '{\"at\": 1}'"));
    let pair = [(); 2].map(|()| given(token(&mut a, "pair", ", permits => 2")));
    let bound = given(token(&mut a, "bound", ", bound => true"));
    let of_other = given(token(&mut other, "of other", ""));
    let kept = given(token(&mut a, "kept", ""));
    assert!(a.flag(&format!("select lease_release('kept', {kept}, '50 min')")));
    let released = given(token(&mut a, "released", ""));
    assert!(a.flag(&format!("select lease_release('released', {released})")));
    let short = given(a.int("select token from lease_acquire('short', '500 ms')"));
    assert!(a.flag("select lease_request('k', 'an upgrade')"));
    a.run("select named_lock('session lock')");
    a.run("select lock_domain_set('ours', 'other', '1 min', '1 day')");
    let domains = "select d::text from lock_domains as d";
    let rules = a.column(domains);
    assert_eq!(rules.len(), 1);
    // The last ones in an open transaction, which the stop rolls back.
    other.run("begin");
    let open = given(token(&mut other, "open", ""));
    let apart_highest;
    let apart_held;
    {
        let mut b = old.database("apart").session("b");
        apart_held = token(&mut b, "k", "");
        b.run("begin");
        apart_highest = token(&mut b, "open", "");
    }
    without_unknown_marks(&old, &["postgres", "apart", "unused"]);
    old.stop();

    let new = old.upgraded(&[]);
    assert_eq!(new.timeline(), 1);
    let mut b = new.session("b");
    let mut other = new.session_as("other", "of another role");

    // What was held is held, to its end, by whom it was.
    assert_eq!(
        b.column("select concat_ws(' ', name, state, usename) from lock_holders order by name, token"),
        [
            format!("first held {}", new.user),
            format!("k held {}", new.user),
            format!("kept kept {}", new.user),
            "of other held other".to_owned(),
            format!("pair held {}", new.user),
            format!("pair held {}", new.user),
            format!("second held {}", new.user),
        ]
    );
    for (name, token, expected) in [
        ("first", first, true),
        ("k", k, true),
        ("pair", pair[0], true),
        ("pair", pair[1], true),
        ("of other", of_other, true),
        ("bound", bound, false),
        ("kept", kept, false),
        ("released", released, false),
        ("short", short, false),
        ("open", open, false),
    ] {
        assert_eq!(held(&mut b, name, token), expected, "{name}");
    }
    assert_eq!(
        b.column(
            "select concat_ws(' ', owner, payload, permits, remaining between '30 min' and '1 h') \
                    from lease_holder('k')"
        ),
        ["me {\"at\": 1} 1 t"]
    );
    for (name, permits) in [("k", 1), ("pair", 2), ("of other", 1), ("kept", 1), ("first", 1)] {
        assert_eq!(
            b.maybe(&format!("select token from lease_acquire('{name}', '1 h', permits => {permits})")),
            None,
            "{name}"
        );
    }

    // The first token here, and all later ones. Of several sessions at once.
    let workers: Vec<_> = (0..4)
        .map(|worker| {
            new.session("first").spawn(move |session| {
                (0..10).map(|turn| token(session, &format!("new {worker} {turn}"), "")).collect::<Vec<i64>>()
            })
        })
        .collect();
    let mut tokens: Vec<i64> = workers.into_iter().flat_map(|worker| worker.end().1).collect();
    tokens.sort_unstable();
    for token in tokens {
        given(token);
    }
    for name in ["bound", "released", "short", "open"] {
        given(token(&mut b, name, ""));
    }

    // All calls do what they do.
    assert_eq!(
        b.column(&format!(
            "select concat_ws(' ', remaining, release_requested, waiters) from lease_renew('k', {k}, '2 h')"
        )),
        ["02:00:00 an upgrade 0"]
    );
    b.run(&format!("begin; select lease_guard('k', {k}); commit"));
    other.fails(&format!("select lease_renew('k', {k})")).is("42501");
    assert!(other.flag(&format!("select lease_release('of other', {of_other})")));
    assert_eq!(b.int("select lease_break('pair')"), 2);
    given(b.int("call lease_acquire_wait('pair', '1 h', permits => 3)"));
    given(b.int("select token from lease_acquire('bound too', '1 h', bound => true)"));
    assert!(b.flag("select named_lock('k') and named_lock('l', mode => 'share')"));
    assert_eq!(b.int("select count(*) from lock_holders where kind = 'session'"), 2);
    assert_eq!(b.int("select named_unlock_all()"), 2);
    new.session_as("looker", "without rights").run("select * from lock_holders; select * from lock_waiters");

    // Rules for domains.
    assert_eq!(b.column(domains), rules);
    assert!(other.flag("select named_lock('ours:k', '0')"));
    new.session_as("looker", "not of the domain's role").fails("select named_lock('ours:k', '0')").is("42501");

    // What pg_upgrade brought is what a new installation makes.
    let fresh = new.new_database("fresh", "UTF8");
    let expected = objects(&fresh);
    assert!(expected.len() > 30, "{} objects", expected.len());
    for dbname in ["postgres", "unused"] {
        let found = objects(&new.database(dbname));
        for object in &expected {
            assert!(found.contains(object), "{dbname} has no\n{object}\nbut\n{}", found.join("\n"));
        }
        assert_eq!(found, expected, "{dbname}");
    }

    // Each database has its own tokens.
    let mut apart = new.database("apart").session("apart");
    assert!(held(&mut apart, "k", apart_held));
    assert!(token(&mut apart, "open", "") > apart_highest);
    assert!(token(&mut new.database("unused").session("unused"), "k", "") > 0);

    // And on it goes, through a failover of the new server.
    let last = given(token(&mut b, "last", ""));
    drop(b);
    new.to_new_timeline();
    assert_eq!(new.timeline(), 2);
    let mut c = new.session("c");
    assert!(held(&mut c, "last", last));
    given(token(&mut c, "after", ""));
}
