//! Who may call what and see what, over every function, procedure, view, table and sequence of the extension: by the table
//! in `support/surface.rs`, which is compared with the catalogue first. Case C44.

use super::support::surface::{Does, FUNCTIONS, For, Function, RELATIONS};
use super::support::{Rows, Server, Session, SqlError, unique};

/// A database with the extension, and a superuser's session in it.
fn database() -> (Server, Session) {
    let database = Server::shared().new_database("rights", "UTF8");
    let admin = database.session("admin");
    (database, admin)
}

/// The members of the extension, as `d`, but for those that only the tests have.
const MEMBERS: &str = "pg_depend as d \
     join pg_extension as e on d.refclassid = 'pg_extension'::regclass and d.refobjid = e.oid and d.deptype = 'e' \
    where e.extname = 'named_locks'";

fn sorted<T: Ord>(items: impl IntoIterator<Item = T>) -> Vec<T> {
    let mut items: Vec<T> = items.into_iter().collect();
    items.sort();
    items
}

/// All that an answer says, errors and notices too.
fn said(session: &mut Session, answer: Result<Rows, SqlError>) -> String {
    let values = match answer {
        Ok(rows) => {
            let value = |row: &postgres::SimpleQueryRow, column| row.get(column).unwrap_or_default().to_owned();
            rows.iter().flat_map(|row| (0..row.len()).map(move |column| value(row, column))).collect::<Vec<_>>()
        }
        Err(error) => vec![format!("{error:?}")],
    };
    format!("{} {:?}", values.join(" | "), session.notices())
}

#[test]
fn the_table_has_all_that_the_catalogue_has() {
    let mut admin = Server::shared().session("rights");
    assert_eq!(
        sorted(admin.column(&format!(
            "select p.oid::regprocedure from pg_proc as p where p.oid in \
                 (select d.objid from {MEMBERS} and d.classid = 'pg_proc'::regclass and p.pronamespace = e.extnamespace)"
        ))),
        sorted(FUNCTIONS.iter().map(|function| function.signature.to_owned()))
    );
    assert_eq!(
        sorted(admin.column(&format!(
            "select c.relkind::text || ' ' || c.relname from pg_class as c where c.oid in \
                 (select d.objid from {MEMBERS} and d.classid = 'pg_class'::regclass)"
        ))),
        sorted(RELATIONS.iter().map(|relation| format!("{} {}", relation.kind, relation.name)))
    );
    assert_eq!(
        admin.column(&format!(
            "select t.typname from pg_type as t where t.typcategory <> 'A' and t.typrelid = 0 and t.oid in \
                 (select d.objid from {MEMBERS} and d.classid = 'pg_type'::regclass)"
        )),
        ["named_lock_mode"]
    );
    // No operators, casts, languages, event triggers or whatever else there is.
    assert_eq!(
        admin.column(&format!(
            "select pg_describe_object(d.classid, d.objid, d.objsubid) from {MEMBERS} \
                 and d.classid not in ('pg_proc'::regclass, 'pg_class'::regclass, 'pg_type'::regclass) \
                 and (d.classid, d.objid) <> ('pg_namespace'::regclass, 'tests'::regnamespace::oid)"
        )),
        [""; 0]
    );
}

/// Nothing is forgotten in the definitions: each function is one of the library's, volatile, parallel unsafe, of the one high
/// cost, and answers NULL arguments itself; none runs as its owner or with settings of its own, or is written in SQL, whose
/// names a search_path could change.
#[test]
fn functions_say_what_they_are() {
    let mut admin = Server::shared().session("rights");
    for function in FUNCTIONS {
        assert_eq!(
            admin.text(&format!(
                "select concat_ws(' ', l.lanname, p.probin, p.provolatile, p.proparallel, p.procost, p.proisstrict, \
                                       p.proleakproof, p.prosecdef, p.proconfig, p.prosqlbody, pg_get_userbyid(p.proowner)) \
                   from pg_proc as p join pg_language as l on l.oid = p.prolang \
                  where p.oid = '{}'::regprocedure",
                function.signature
            )),
            format!(
                "c named_locks v u {} f f f {}",
                if function.is_procedure() { 1 } else { 1000 },
                Server::shared().user
            ),
            "{}",
            function.signature
        );
    }
}

/// Each function is called for real, by a role that nobody has given anything.
#[test]
fn what_is_for_everyone_and_what_is_not() {
    let (database, mut admin) = database();
    let stranger = database.new_role("rights_stranger");
    let mut session = database.session_as(&stranger, "stranger");
    for (number, function) in FUNCTIONS.iter().enumerate() {
        let name = format!("n{number}");
        let signature = function.signature;
        match function.is_for {
            For::Everyone => {
                assert!(
                    session.flag(&format!("select has_function_privilege('{signature}', 'execute')")),
                    "{signature}"
                );
                let call = function.prepared(&mut session, &name);
                session.run(&call);
            }
            For::Owner => {
                session.fails(function.call).is("42501");
                if function.does == Does::Trigger {
                    // It is for nobody to call, and for nobody else's tables.
                    admin.fails(function.call).is("39P01");
                    session.run("create temp table mine (i int)");
                    session
                        .fails("create trigger t after insert on mine execute function _lock_domain_changed()")
                        .is("42501");
                } else {
                    admin.run(function.call);
                }
            }
        }
        session.run("select named_unlock_all(), pg_advisory_unlock_all()");
    }
    for relation in RELATIONS {
        let privileges = session.column(&format!(
            "select privilege from unnest(array['select', 'insert', 'update', 'delete', 'truncate', 'references', 'trigger']) \
                 as privilege where has_table_privilege('{}', privilege)",
            relation.name
        ));
        let due: &[&str] = if relation.is_for == For::Everyone { &["select"] } else { &[] };
        assert_eq!(privileges, due, "{}", relation.name);
        let name = relation.name;
        let mut statements = vec![format!("alter table {name} owner to {stranger}"), format!("drop table {name}")];
        match relation.kind {
            'S' => statements.extend([
                format!("select nextval('{name}')"),
                format!("select setval('{name}', 1)"),
                format!("alter sequence {name} restart"),
            ]),
            _ => statements.extend([
                format!("delete from {name}"),
                format!("insert into {name} select * from {name}"),
                format!("copy {name} from stdin"),
            ]),
        }
        match relation.is_for {
            For::Everyone => _ = session.run(&format!("select * from {name}")),
            For::Owner => statements.push(format!("select * from {name}")),
        }
        for statement in statements {
            let error = session.fails(&statement);
            // Of a kind of thing that can't be dropped or altered so, nobody may.
            assert!(["42501", "42809", "55000"].contains(&error.code.as_str()), "{statement}: {error:#?}");
        }
    }
}

/// The extension can be closed to all, and opened to some.
#[test]
fn execute_can_be_taken_away_and_given() {
    let (database, mut admin) = database();
    let [stranger, friend] = ["rights_stranger", "rights_friend"].map(|role| database.new_role(role));
    admin.run(&format!(
        "revoke execute on all functions in schema public from public; \
         revoke execute on all procedures in schema public from public; \
         grant execute on all functions in schema public to {friend}; \
         grant execute on all procedures in schema public to {friend}"
    ));
    let mut session = database.session_as(&stranger, "stranger");
    let mut other = database.session_as(&friend, "friend");
    for (number, function) in FUNCTIONS.iter().filter(|function| function.is_for == For::Everyone).enumerate() {
        let call = function.prepared(&mut other, &format!("n{number}"));
        session.fails(&call).is("42501").message_has("permission denied for");
        other.run(&call);
        other.run("select named_unlock_all(), pg_advisory_unlock_all()");
    }
    // The views are these functions.
    for view in ["lock_holders", "lock_waiters", "lock_stats"] {
        session.fails(&format!("select * from {view}")).is("42501");
    }
}

#[test]
fn c44_every_form_asks_the_rule_of_the_domain() {
    let (database, mut admin) = database();
    let [team, member, stranger] = ["c44_team", "c44_member", "c44_stranger"].map(|role| database.new_role(role));
    admin.run(&format!("grant {team} to {member}"));
    let mut sessions = [
        ("member", database.session_as(&member, "c44"), true),
        ("stranger", database.session_as(&stranger, "c44"), false),
        ("superuser", database.session("c44"), true),
    ];
    let mut number = 0;
    let mut refused = 0;
    for function in FUNCTIONS.iter().filter(|function| function.is_for == For::Everyone) {
        for (who, session, may) in &mut sessions {
            let what = format!("{who}: {}", function.signature);
            number += 1;
            let name = format!("jobs:{number}");
            let call = function.prepared(session, &name);
            let held = session.locks_of(session.pid);
            admin.run(&format!("select lock_domain_set('jobs', '{team}')"));
            if *may || !function.does.is_under_rules() {
                session.run(&call);
            } else {
                let error = session.fails(&call);
                error.is("42501").message_has("permission denied for domain \"jobs\"").message_has(&name);
                error.hint_has("lock_domains");
                assert_eq!(session.locks_of(session.pid), held, "{what}: nothing is held");
                refused += 1;
                // In a transaction that goes on, too.
                if !function.is_procedure() {
                    session.run("begin; savepoint s");
                    session.fails(&call).is("42501");
                    session.run("rollback to s");
                    assert_eq!(session.locks_of(session.pid), held, "{what}: nothing is held");
                    session.run("commit");
                }
            }
            // Other domains, and names that only begin alike, are open.
            for stem in ["jobs", "jobs2:", "Jobs:", ":jobs:"] {
                if function.before.is_empty() {
                    let call = function.prepared(session, &format!("{stem}{number}"));
                    session.run(&call);
                }
            }
            session.run("select named_unlock_all(), pg_advisory_unlock_all()");
            assert_eq!(session.locks_of(session.pid), 0, "{what}");
            admin.run("select lock_domain_drop('jobs')");
        }
    }
    assert_eq!(refused, FUNCTIONS.iter().filter(|function| function.does.is_under_rules()).count());
}

/// The rule of any domain that a call would lock a name in, not only that of the first.
#[test]
fn c44_of_several_names_each_is_asked_for() {
    let (database, mut admin) = database();
    let [team, stranger] = ["c44_team", "c44_stranger"].map(|role| database.new_role(role));
    let mut session = database.session_as(&stranger, "c44");
    admin.run(&format!("select lock_domain_set('jobs', '{team}')"));
    for call in [
        "named_lock_all(array['a', 'b', 'jobs:c', 'd'], '0')",
        "named_lock_all(array['jobs:c', 'a'], '0')",
        "named_lock_all(array['a', 'jobs:c'])",
        "named_lock_all(array['a', 'a', 'jobs:c', 'jobs:c'], mode => 'share')",
        "named_xact_lock_all(array['a', 'b', 'jobs:c'], '0')",
        "named_lock_any(array['a', 'jobs:c'], 2)",
        "named_lock_any(array['a', 'jobs:c'], 2, 'share')",
        "named_xact_lock_any(array['jobs:c', 'a'], 2)",
        "named_lock_tree('jobs:a/b/c', '0')",
        "named_xact_lock_tree('jobs:a/b', '0', 'share')",
        "named_semaphore('jobs:c', 3, '0')",
    ] {
        session.fails(&format!("select {call}")).is("42501").message_has("jobs");
        assert_eq!(session.locks_of(session.pid), 0, "{call}");
    }
    // A tree locks what is above it, each by its own name: here a name without a domain.
    admin.run(&format!("select lock_domain_drop('jobs'), lock_domain_set('', '{team}')"));
    for call in ["named_lock_tree('a/x:y', '0')", "named_xact_lock_tree('a/b/x:y', '0', 'share')"] {
        session.fails(&format!("select {call}")).is("42501").message_has("\"a\"");
        assert_eq!(session.locks_of(session.pid), 0, "{call}");
    }
    // And below: a part with a colon makes the whole up to it the domain.
    admin.run(&format!("select lock_domain_drop(''), lock_domain_set('a/x', '{team}')"));
    session.fails("select named_lock_tree('a/x:y', '0')").is("42501").message_has("a/x:y");
    assert_eq!(session.locks_of(session.pid), 0);
    assert!(session.flag("select named_lock_tree('a/x', '0')"));
}

#[test]
fn c44_a_dropped_role_leaves_the_domain_to_superusers_in_every_form() {
    let (database, mut admin) = database();
    let stranger = database.new_role("c44_stranger");
    let mut session = database.session_as(&stranger, "c44");
    let forms: Vec<&Function> = FUNCTIONS.iter().filter(|function| function.does.is_under_rules()).collect();
    let calls: Vec<String> = forms
        .iter()
        .enumerate()
        .map(|(number, function)| function.prepared(&mut session, &format!("jobs:{number}")))
        .collect();
    let team = database.new_role("c44_team");
    admin.run(&format!("select lock_domain_set('jobs', '{team}')"));
    admin.run(&format!("drop role {team}"));
    for call in &calls {
        session.fails(call).is("42501");
    }
    session.run("select named_unlock_all()");
    for (number, function) in forms.iter().enumerate() {
        let call = function.prepared(&mut admin, &format!("jobs:by the superuser {number}"));
        admin.run(&call);
        admin.run("select named_unlock_all()");
    }
}

#[test]
fn session_locks_off_refuses_the_session_forms_and_no_others() {
    let mut session = Server::shared().session("rights");
    let stem = unique("rights");
    for (number, function) in FUNCTIONS.iter().filter(|function| function.is_for == For::Everyone).enumerate() {
        let signature = function.signature;
        let bound = (function.does == Does::Lease).then(|| function.call.replace(')', ", bound => true)"));
        for (index, (template, is_session_form)) in [(function.call.to_owned(), function.does.is_session_form())]
            .into_iter()
            .chain(bound.map(|call| (call, true)))
            .enumerate()
        {
            let name = format!("{stem} {number} {index}");
            for setting in ["off", "warn", "on"] {
                let name = format!("{name} {setting}");
                session.run("set named_locks.session_locks = on");
                let prepared = function.prepared(&mut session, &name);
                let call = if index == 0 { prepared } else { template.replace("NAME", &name) };
                let held = session.locks_of(session.pid);
                session.run(&format!("set named_locks.session_locks = {setting}"));
                session.notices();
                match (setting, is_session_form) {
                    ("off", true) => {
                        session.fails(&call).is("0A000").hint_has("named_xact_lock").hint_has("lease");
                        assert_eq!(session.locks_of(session.pid), held, "{signature}: nothing is held");
                    }
                    ("warn", true) => {
                        session.run(&call);
                        let warnings = session.notices();
                        assert_eq!(warnings.len(), 1, "{signature}: one warning: {warnings:#?}");
                        warnings[0].is("01000").hint_has("named_xact_lock");
                    }
                    _ => {
                        session.run(&call);
                        assert!(session.notices().is_empty(), "{signature}, {setting}");
                    }
                }
                session.run("select named_unlock_all(), pg_advisory_unlock_all()");
            }
        }
    }
}

/// A wrapper that says it is parallel safe can bring a call into a worker: an error there, as a worker's locks are no
/// session's. Looking is allowed, but never with a wrong answer.
#[test]
fn in_a_parallel_worker() {
    let (_database, mut admin) = database();
    admin.run(
        "create table many as select i from generate_series(1, 20000) as i; \
         analyze many; \
         set parallel_setup_cost = 0; set parallel_tuple_cost = 0; set min_parallel_table_scan_size = 0; \
         set parallel_leader_participation = off; set max_parallel_workers_per_gather = 2",
    );
    for (number, function) in FUNCTIONS.iter().filter(|function| !function.is_procedure()).enumerate() {
        let what = function.signature;
        let call = function.prepared(&mut admin, &format!("n{number}"));
        let held = admin.locks_of(admin.pid);
        admin.run(&format!(
            "create function wrapper{number}() returns boolean parallel safe volatile language plpgsql cost 1000 as \
             $$ begin perform {}; return true; end $$",
            call.strip_prefix("select ").expect("a query")
        ));
        let count = format!("select count(*) from many where wrapper{number}()");
        let plan = admin.column(&format!("explain {count}")).join("\n");
        assert!(plan.contains("Gather"), "the plan has workers:\n{plan}");
        match admin.query(&count) {
            Ok(rows) => {
                assert!(matches!(function.does, Does::Look | Does::Administer), "{what}");
                assert_eq!(rows[0].get(0), Some("20000"), "{what}");
            }
            Err(error) if function.does == Does::Trigger => _ = error.is("39P01"),
            Err(error) => _ = error.message_has("parallel"),
        }
        let in_database = "select count(*) from pg_locks where locktype = 'advisory' \
                              and database = (select oid from pg_database where datname = current_database())";
        assert_eq!(admin.int(in_database), held, "{what}: the leader's own locks, and no other");
        admin.run("select named_unlock_all(), pg_advisory_unlock_all()");
    }
}

/// One session holds, leases and waits under names and with values that are nobody else's business. Whatever a stranger
/// calls says nothing of them.
#[test]
fn nothing_shows_other_roles_data() {
    const NAME: &str = "NoSuchSecret";
    const VALUE: &str = "NoSuchValue";
    let (database, mut admin) = database();
    let [owner, member, stranger, monitor] =
        ["rights_owner", "rights_member", "rights_stranger", "rights_monitor"].map(|role| database.new_role(role));
    admin.run(&format!("grant {owner} to {member}; grant pg_read_all_stats to {monitor}"));
    let mut holder = database.session_as(&owner, "holder");
    for function in FUNCTIONS.iter().filter(|function| function.does.acquires()) {
        let name = format!("vault:{NAME} {}", function.name());
        let call = match function.does {
            Does::Lease => {
                function.call.replace(')', &format!(", owner => '{VALUE}', payload => '{{\"{VALUE}\": \"{VALUE}\"}}')"))
            }
            _ => function.call.to_owned(),
        };
        holder.run(&call.replace("NAME", &name));
    }
    holder.run(&format!("select named_lock('{NAME} domain:x')"));
    let lease = format!("vault:{NAME} lease");
    holder.run(&format!(
        "select lease_acquire('{lease}', '1 hour', owner => '{VALUE}', payload => '{{\"{VALUE}\": 1}}', bound => true)"
    ));
    let tokens = admin.column("select token from lock_holders where kind = 'lease'");
    assert_eq!(tokens.len(), 3);
    holder
        .run(&format!("begin; select named_xact_lock('vault:{NAME} x'), named_xact_lock_all(array['vault:{NAME} y'])"));
    let lock = format!("vault:{NAME} named_lock");
    let waiters = [
        format!("select named_lock('{lock}')"),
        format!("select acquired from lease_acquire('{lease}', '1 hour', null)"),
    ]
    .map(|sql| database.session_as(&owner, "waiter").background(&sql));
    let pids = format!("{}, {}", waiters[0].pid, waiters[1].pid);
    super::support::until("both wait", || {
        admin.int(&format!("select count(*) from lock_waiters where pid in ({pids})")) == 2
    });
    admin.run(&format!("select lock_domain_set('vault', '{owner}')"));

    let looks: Vec<String> = RELATIONS
        .iter()
        .filter(|relation| relation.is_for == For::Everyone)
        .map(|relation| format!("select * from {}", relation.name))
        .chain(FUNCTIONS.iter().filter(|function| function.before.is_empty()).map(|function| function.call.to_owned()))
        .collect();
    let tells = |text: &str, what: &str| text.contains(what);
    let tells_token = |text: &str| tokens.iter().any(|token| text.contains(token.as_str()));
    let mut seen_by_monitor = String::new();
    let mut seen_by_member = String::new();
    for (role, seen) in
        [(&stranger, None), (&monitor, Some(&mut seen_by_monitor)), (&member, Some(&mut seen_by_member))]
    {
        let mut session = database.session_as(role, "viewer");
        let mut all = String::new();
        for look in &looks {
            let answer = session.query(&look.replace("NAME", "other:name"));
            let text = said(&mut session, answer);
            if seen.is_none() {
                assert!(!tells(&text, NAME) && !tells(&text, VALUE) && !tells_token(&text), "{look}:\n{text}");
            }
            all += &text;
            session.run("select named_unlock_all(), pg_advisory_unlock_all()");
        }
        if let Some(seen) = seen {
            *seen = all;
        }
    }
    // So that it is known that there was something to see.
    assert!(tells(&seen_by_monitor, NAME) && tells(&seen_by_monitor, VALUE) && !tells_token(&seen_by_monitor));
    assert!(tells(&seen_by_member, NAME) && tells(&seen_by_member, VALUE) && tells_token(&seen_by_member));

    // Asked about the very names, it tells no more than that they are not for a stranger.
    let mut session = database.session_as(&stranger, "viewer");
    let names: Vec<String> = FUNCTIONS
        .iter()
        .filter(|function| function.does.acquires())
        .map(|function| format!("vault:{NAME} {}", function.name()))
        .chain([lease, format!("vault:{NAME} x")])
        .collect();
    for function in FUNCTIONS {
        for name in &names {
            let answer = session.query(&function.call.replace("NAME", name).replace("VALUE", "1"));
            let text = said(&mut session, answer);
            assert!(!tells(&text, VALUE) && !tells_token(&text), "{}, {name}:\n{text}", function.signature);
            session.run("select named_unlock_all(), pg_advisory_unlock_all()");
        }
    }
    for waiter in waiters {
        admin.run(&format!("select pg_terminate_backend({})", waiter.pid));
        waiter.end().1.expect_err("terminated").is_end_of_session();
    }
}

/// What is granted on the table of rules can be used, and makes no rule that means nothing or that nobody can lift.
#[test]
fn rules_made_by_plain_sql_are_rules() {
    let (database, mut admin) = database();
    let role = database.new_role("rights_editor");
    admin.run(&format!("grant select, insert, update, delete on _lock_domain to {role}"));
    let mut editor = database.session_as(&role, "editor");
    let mut running = database.session_as(&role, "running");
    assert!(running.flag("select named_lock('jobs:a', '0') and named_unlock('jobs:a') = 0"));
    for row in [
        "'a:b'",
        "repeat('x', 1025)",
        "'jobs', null, '-1 ms'",
        "'jobs', null, '25 days'",
        "'jobs', null, null, '99 ms'",
        "'jobs', null, null, '11 years'",
        "'jobs', '-'",
    ] {
        editor.fails(&format!("insert into _lock_domain values ({row})")).is("23514");
    }
    editor.fails("insert into _lock_domain values (null)").is("23502");
    editor.run("insert into _lock_domain values ('jobs', (select usesysid from pg_user where usesuper limit 1), '1 s', '1 min')");
    // It reaches those who are there, by a trigger that they have no right to call.
    running.fails("select named_lock('jobs:a', '0')").is("42501");
    editor.fails("update _lock_domain set domain = 'a:b'").is("23514");
    editor.fails("insert into _lock_domain values ('jobs')").is("23505");
    editor.run("update _lock_domain set role = null");
    assert!(running.flag("select named_lock('jobs:a', '0')"));
    editor.run("delete from _lock_domain");
    // To use the functions one has to be the owner, or a member of it.
    editor.fails("select lock_domain_set('jobs')").is("42501");
    admin.fails("select lock_domain_set('jobs', '-')").is("42704");
    admin.fails("select lock_domain_set('jobs', 4000000000::oid::regrole)").is("42704");
    assert_eq!(admin.int("select count(*) from lock_domains"), 0);
}
