//! A library that is older than the script, newer than the objects, or not the only one in the server.

use super::catalogue::{differences, facts};
use super::{CURRENT, Script, database_with, install_script, released, sql_folder, version};
use crate::pg_test::support::{Dir, Server, Session, SqlError, as_server_user, run, until};
use std::path::PathBuf;

/// What PostgreSQL says of itself.
fn pg_config(name: &str) -> PathBuf {
    Server::shared().session("config").text(&format!("select setting from pg_config where name = '{name}'")).into()
}

/// The library that the server has.
fn library() -> PathBuf {
    pg_config("PKGLIBDIR").join("named_locks.so")
}

/// Makes a folder the first in which a session looks for libraries.
fn look_in(session: &mut Session, folder: &Dir) {
    session.run(&format!("set dynamic_library_path = '{}:$libdir'", folder.path().display()));
}

/// A folder with a library in it that knows as much of scripts and versions as the one of 0.1.0: nothing.
fn old_library() -> Dir {
    let folder = Dir::new();
    let source = "#include \"postgres.h\"\n#include \"fmgr.h\"\nPG_MODULE_MAGIC;\n";
    let source = folder.write("named_locks.c", source);
    run(as_server_user("cc")
        .args(["-shared", "-fPIC", "-I"])
        .arg(pg_config("INCLUDEDIR-SERVER"))
        .arg("-o")
        .arg(folder.path().join("named_locks.so"))
        .arg(source));
    folder
}

#[track_caller]
fn is_too_old(error: &SqlError, script: &str, library: &str) {
    error
        .is("55000")
        .message_has(&format!("library of named_locks is too old for version {script} of the extension"))
        .detail_has(library)
        .hint_has("connect again");
}

#[test]
fn a_script_is_refused_by_an_older_library_on_disk() {
    let folder = old_library();
    let mut without = database_with(None, "public").session("without the extension");
    look_in(&mut without, &folder);
    is_too_old(&without.fails("create extension named_locks"), CURRENT, "a version before 1.0.0");
    assert_eq!(without.int("select count(*) from pg_proc where pronamespace = 'public'::regnamespace"), 0);
    for old in released() {
        let database = database_with(Some(old), "public");
        let mut updates = database.session("updates");
        let before = facts(&mut updates);
        look_in(&mut updates, &folder);
        is_too_old(&updates.fails("alter extension named_locks update"), CURRENT, "a version before 1.0.0");
        assert_eq!(differences(&before, &facts(&mut updates)), [""; 0]);
    }
}

/// The package has been upgraded, and the session is one from before.
#[test]
fn a_script_is_refused_by_an_older_library_that_is_still_loaded() {
    let folder = old_library();
    for old in released() {
        let database = database_with(Some(old), "public");
        let mut before = database.session("before the package was upgraded");
        look_in(&mut before, &folder);
        before.run("load 'named_locks'");
        let there = folder.path().join("named_locks.so");
        let new = folder.path().join("new.so");
        let kept = folder.path().join("old.so");
        run(as_server_user("mv").arg(&there).arg(&kept));
        run(as_server_user("cp").arg(library()).arg(&new));
        run(as_server_user("mv").arg(&new).arg(&there));
        is_too_old(&before.fails("alter extension named_locks update"), CURRENT, "a version before 1.0.0");
        assert_eq!(version(&mut before), *old);
        let mut after = database.session("after it");
        look_in(&mut after, &folder);
        after.run("alter extension named_locks update");
        assert_eq!(version(&mut after), CURRENT);
        run(as_server_user("mv").arg(&kept).arg(&there));
    }
}

/// This library beside a script of tomorrow.
#[test]
fn a_script_is_refused_by_this_library_where_it_is_of_a_later_version() {
    let question = std::fs::read_to_string(sql_folder().join("library.sql")).expect("library.sql");
    let database = database_with(Some(CURRENT), "Odd Schema");
    let mut with = database.session("with the extension");
    let before = facts(&mut with);
    let mut without = database_with(None, "public").session("without the extension");
    for later in ["99.0.0", "1.99.0"] {
        let text = format!("{}\nselect 1/0;", question.replace(CURRENT, later));
        let _install = Script::new(&install_script(later), &text);
        let _update = Script::new(&format!("named_locks--{CURRENT}--{later}.sql"), &text);
        let library = format!("of version {CURRENT}");
        is_too_old(&with.fails(&format!("alter extension named_locks update to '{later}'")), later, &library);
        is_too_old(&without.fails(&format!("create extension named_locks version '{later}'")), later, &library);
    }
    assert_eq!(differences(&before, &facts(&mut with)), [""; 0]);
    // A patch of this one makes the same objects, and needs its library all the same.
    let (numbers, patch) = CURRENT.rsplit_once('.').expect("a patch level");
    let later = format!("{numbers}.{}", patch.parse::<u32>().expect("a number") + 1);
    let _update = Script::new(&format!("named_locks--{CURRENT}--{later}.sql"), &question.replace(CURRENT, &later));
    is_too_old(&with.fails(&format!("alter extension named_locks update to '{later}'")), &later, CURRENT);
    // And one of before goes with this library.
    let _update = Script::new(&format!("named_locks--{CURRENT}--0.9.0.sql"), &question.replace(CURRENT, "0.9.0"));
    with.run("alter extension named_locks update to '0.9.0'");
}

/// Objects that are not as the library knows them, of an older version and of a later one.
#[test]
fn tables_of_another_version_are_not_touched() {
    let database = database_with(Some(CURRENT), "Odd Schema");
    let mut admin = database.session("admin");
    let mut session = database.session("session");
    let token = session.int("select token from lease_acquire('k', '1 hour')");
    for (version, hint) in
        [("0.0.1", "Run ALTER EXTENSION named_locks UPDATE."), ("99.0.0", "connect again"), (CURRENT, "Take back")]
    {
        admin.run(&format!("update pg_extension set extversion = '{version}' where extname = 'named_locks'"));
        for (change, undo, calls) in [
            (
                "alter table _lease add column another int",
                "alter table _lease drop column another",
                vec![
                    "select lease_acquire('l', '1 hour')".to_owned(),
                    "call lease_acquire_wait('l', '1 hour')".to_owned(),
                    format!("select lease_renew('k', {token})"),
                    format!("select lease_guard('k', {token})"),
                    format!("select lease_check('k', {token})"),
                    "select * from lock_holders".to_owned(),
                ],
            ),
            (
                "alter table _lock_domain add column another int",
                "alter table _lock_domain drop column another",
                vec!["select named_lock('domain:a', '0')".to_owned(), "select lease_acquire('l', '1 hour')".to_owned()],
            ),
            (
                "alter sequence _lease_token rename to another",
                "alter sequence another rename to _lease_token",
                vec!["select lease_acquire('l', '1 hour')".to_owned(), "select * from lock_waiters".to_owned()],
            ),
        ] {
            admin.run(&format!("begin; {change}; commit"));
            for call in &calls {
                let error = database.session("new session").fails(call);
                error.is("55000").message_has("tables of the extension").hint_has(hint);
                error.detail_has(&format!("The library is of version {CURRENT}"));
                error.detail_has(&format!("the extension in this database of {version}"));
            }
            // A dropped column stays in the table.
            if change.contains("column") {
                admin.run("drop extension named_locks; create extension named_locks schema \"Odd Schema\"");
                admin.run(&format!("update pg_extension set extversion = '{version}' where extname = 'named_locks'"));
            } else {
                admin.run(undo);
            }
        }
    }
}

/// A folder with a copy of the library in which names are not what they were: of each place to which `name` says yes, the
/// byte that it points at is another.
fn altered_library(name: impl Fn(&[u8]) -> Option<usize>) -> Dir {
    let mut library = std::fs::read(library()).expect("the library");
    let mut found = 0;
    for at in 0..library.len() {
        if let Some(offset) = name(&library[at..]) {
            library[at + offset] = b'~';
            found += 1;
        }
    }
    assert!(found > 0, "the name is in the library");
    let folder = Dir::new();
    folder.write("named_locks.so", library);
    folder
}

/// With another name for what it has in shared memory, as if its layout were another one.
fn library_of_another_layout() -> Dir {
    const NAME: &[u8] = b"named_locks/";
    altered_library(|at| match at.strip_prefix(NAME)? {
        [b'0'..=b'9', 0, ..] => Some(NAME.len()),
        _ => None,
    })
}

/// That knows the tables by their names of before 1.0.0 only.
fn library_without_new_names() -> Dir {
    const NAMES: [&[u8]; 4] = [b"_lease\0", b"_lease_token\0", b"_lease_timeline\0", b"_lock_domain\0"];
    altered_library(|at| NAMES.iter().any(|name| at.starts_with(name)).then_some(0))
}

/// The update to 1.0.0 gives the tables other names. Who is connected with the library of before has what it held, and
/// nobody else gets it; for what looks into the tables it has to connect again.
#[test]
fn a_library_of_0_1_0_does_not_find_the_tables_of_1_0_0() {
    let folder = library_without_new_names();
    let database = database_with(Some("0.1.0"), "Odd Schema");
    let mut before = database.session("connected before");
    look_in(&mut before, &folder);
    before.run("select named_lock('k')");
    let token = before.int("select token from lease_acquire('lease', '1 hour')");
    let mut after = database.session("connected after");
    after.run("alter extension named_locks update");
    assert!(!after.flag("select named_lock('k', '0')"));
    assert!(after.flag(&format!("select lease_check('lease', {token})")));
    for call in [
        "select named_lock('l')".to_owned(),
        "select named_xact_lock('l')".to_owned(),
        "select named_lock_tree('l')".to_owned(),
        "select named_semaphore('l', 1)".to_owned(),
        format!("select lease_check('lease', {token})"),
        format!("select lease_guard('lease', {token})"),
        format!("select lease_renew('lease', {token})"),
        "select lease_acquire('l', '1 hour')".to_owned(),
        "select lock_domain_set('l')".to_owned(),
        "select * from lock_holders".to_owned(),
    ] {
        before.fails(&call).is("55000").message_has("tables of the extension");
    }
    before.run("select advisory_lock(42)");
    assert_eq!(before.int("select named_lock_held('k')"), 1);
    assert_eq!(before.int("select named_unlock('k')"), 0);
    assert!(after.flag("select named_lock('k', '0')"));
    assert!(after.flag(&format!("select lease_release('lease', {token})")));
}

/// After the upgrade of a package old and new sessions may have libraries of different layouts, and know nothing of each
/// other but what the lock manager and the tables say.
#[test]
fn libraries_of_different_layouts_exclude_each_other() {
    let folder = library_of_another_layout();
    let database = database_with(Some(CURRENT), "public");
    let open = |other_layout: bool, name: &str| {
        let mut session = database.session(name);
        if other_layout {
            look_in(&mut session, &folder);
        }
        session
    };
    for other_layout in [false, true] {
        let mut watch = open(other_layout, "watch");
        let mut a = open(other_layout, "a");
        let mut b = open(!other_layout, "b");

        // Named locks, trees, semaphores.
        a.run("select named_lock('k'), named_lock('shared', mode => 'share'), named_lock_tree('tree/a')");
        let slot = a.int("select named_semaphore('semaphore', 1)");
        assert!(!b.flag("select named_lock('k', '0')"));
        assert!(b.flag("select named_lock('shared', '0', 'share')"));
        assert!(!b.flag("select named_lock_tree('tree', '0')"));
        assert_eq!(b.maybe("select named_semaphore('semaphore', 1, '0')"), None);
        b.fails("select named_unlock('k')").is("55000").detail_has(&format!("Held by process {}", a.pid));
        // The view has the locks, and not their names.
        let names = |session: &mut Session, pid: i32| {
            session.column(&format!(
                "select concat_ws(' ', kind, mode, holds, name) from lock_holders where pid = {pid} order by 1"
            ))
        };
        let pid = a.pid;
        let own = [
            "semaphore exclusive 1 semaphore",
            "session exclusive 1 k",
            "session exclusive 1 tree/a",
            "session intent exclusive 1 tree",
            "session share 1 shared",
        ];
        assert_eq!(names(&mut a, pid), own, "{other_layout}");
        let of_others = ["exclusive", "exclusive", "intent exclusive", "semaphore exclusive 1", "share"];
        assert_eq!(names(&mut b, pid), of_others, "{other_layout}");
        for (call, give_back) in [
            ("select named_lock('k', '1 min')", "select named_unlock('k')".to_owned()),
            ("call named_lock_wait('tree', '1 min')", "select named_unlock_tree('tree/a')".to_owned()),
        ] {
            let waiting = open(!other_layout, "waiter").background(call);
            watch.until_waiting(waiting.pid);
            a.run(&give_back);
            assert_eq!(waiting.end().1.expect("granted")[0].get(0), Some("t"), "{call}");
        }
        // Who waits for a slot or a lease is not waked from there, and looks by itself.
        let queue = |call: &str, watch: &mut Session| {
            let waiting = open(!other_layout, "waiter").background(call);
            until("it waits", || {
                watch.flag(&format!(
                    "select exists (select from pg_stat_activity where pid = {} and wait_event_type = 'Extension')",
                    waiting.pid
                ))
            });
            waiting
        };
        let waiting = queue("select named_semaphore('semaphore', 1, '1 min')", &mut watch);
        a.run(&format!("select named_semaphore_release('semaphore', {slot})"));
        assert_eq!(waiting.end().1.expect("granted")[0].get(0), Some("1"));

        // Leases, with tokens that rise.
        let take = |session: &mut Session, more: &str| {
            session
                .maybe(&format!("select token from lease_acquire('lease', '1 hour'{more})"))
                .map(|token| token.parse::<i64>().expect("a token"))
        };
        let mut highest = 0;
        for _ in 0..100 {
            let token = take(&mut a, "").expect("granted");
            assert!(token > highest, "{token} after {highest}");
            highest = token;
            assert_eq!(take(&mut b, ""), None);
            assert!(b.flag(&format!("select lease_check('lease', {token})")));
            assert!(b.flag(&format!("select lease_release('lease', {token})")));
            std::mem::swap(&mut a, &mut b);
        }
        let token = take(&mut a, "").expect("granted");
        let waiting = queue("select token from lease_acquire('lease', '1 hour', '1 min')", &mut watch);
        // A guard of there keeps it.
        b.run(&format!("begin; select lease_guard('lease', {token})"));
        assert!(a.flag(&format!("select lease_release('lease', {token})")));
        assert_eq!(take(&mut a, ""), None);
        b.run("commit");
        let (mut waiter, granted) = waiting.end();
        let next: i64 = granted.expect("granted")[0].get(0).expect("a token").parse().expect("a number");
        assert!(next > token);
        assert!(waiter.flag(&format!("select lease_release('lease', {next})")));
        // Bound to a session of there, until that ends.
        let bound = take(&mut a, ", bound => true").expect("granted");
        assert!(b.flag(&format!("select lease_check('lease', {bound})")));
        assert_eq!(take(&mut b, ""), None);
        drop(a);
        until("the session is gone", || take(&mut b, "").is_some());
        assert!(!b.flag(&format!("select lease_check('lease', {bound})")));
        b.run("select lease_break('lease')");
    }
}

/// Several of each at once: no token twice, and those of each lease rise.
#[test]
fn libraries_of_different_layouts_give_no_token_twice() {
    let folder = library_of_another_layout();
    let database = database_with(Some(CURRENT), "public");
    let workers: Vec<_> = (0..6)
        .map(|number| {
            let mut session = database.session("worker");
            if number % 2 == 0 {
                look_in(&mut session, &folder);
            }
            session.spawn(move |session| {
                // In pairs, one of each kind.
                let name = number / 2;
                let mut tokens = Vec::new();
                while tokens.len() < 150 {
                    let sql = format!("select token from lease_acquire('{name}', '1 hour')");
                    let Some(token) = session.maybe(&sql) else { continue };
                    let token: i64 = token.parse().expect("a number");
                    tokens.push((name, token, session.int("select txid_current()")));
                    assert!(session.flag(&format!("select lease_release('{name}', {token})")));
                }
                tokens
            })
        })
        .collect();
    let mut all: Vec<(i32, i64, i64)> = workers.into_iter().flat_map(|worker| worker.end().1).collect();
    let count = all.len();
    assert_eq!(count, 900);
    // A transaction within each term has a number too, and these tell the order.
    all.sort_by_key(|&(name, _, transaction)| (name, transaction));
    for pair in all.windows(2) {
        assert!(pair[0].0 != pair[1].0 || pair[0].1 < pair[1].1, "{pair:?}");
    }
    all.sort_by_key(|&(_, token, _)| token);
    all.dedup_by_key(|&mut (_, token, _)| token);
    assert_eq!(all.len(), count, "a token came twice");
}
