//! Cases C17 to C21: names and their keys, encodings, databases, modes, and names that clash.

use super::support::{Answer, Form, Server, Session, answer, literal, unique, unique_ident};
use std::io::Write;
use std::process::Stdio;
use std::sync::{Mutex, MutexGuard, PoisonError};

const MODES: [&str; 5] = ["exclusive", "share", "intent share", "intent exclusive", "share intent exclusive"];

/// Held by the tests with names that are fixed: cluster-wide, they would meet each other.
fn fixed_names() -> MutexGuard<'static, ()> {
    static FIXED: Mutex<()> = Mutex::new(());
    FIXED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A try by the plain session form.
fn try_lock(session: &mut Session, name: &str) -> bool {
    session.flag(&format!("select named_lock({}, '0')", literal(name)))
}

#[test]
fn c17_names_that_weak_hashes_confuse_are_two_locks() {
    let _alone = fixed_names();
    let server = Server::shared();
    let mut a = server.session("c17 a");
    let mut b = server.session("c17 b");
    assert!(a.flag("select hashtext('order-116870') = hashtext('order-126592')"));
    for (one, other) in [("order-116870", "order-126592"), ("plumless", "buckeroo")] {
        for form in Form::named() {
            let (first, second) = (form.lock(one), form.lock(other));
            for session in [&mut a, &mut b] {
                session.run(if form.call { "" } else { "begin" });
            }
            assert!(answer(form, a.query(&first.acquire(Some("0")))).held(), "{form:?} {one}");
            assert!(answer(form, b.query(&second.acquire(Some("0")))).held(), "{form:?} {other}");
            assert_eq!(a.int(&format!("select count(*) from lock_holders where name in ('{one}', '{other}')")), 2);
            for session in [&mut a, &mut b] {
                session.run("rollback");
                session.run("select named_unlock_all()");
            }
        }
    }
}

#[test]
fn names_are_read_out_of_a_table_however_they_are_stored() {
    let server = Server::shared();
    let mut a = server.session("a");
    let mut b = server.session("b");
    let k = unique("stored");
    let table = unique_ident("stored");
    let long = format!("{k}:{}", "x".repeat(1024 - k.len() - 1));
    for storage in ["plain", "main", "extended", "external"] {
        a.run(&format!(
            "create table {table} (number integer, name text, filler text); \
             alter table {table} alter name set storage {storage}, alter filler set storage plain; \
             insert into {table} select number, name, repeat('f', 1500) \
               from (values (1, '{k}'), (2, '{k}' || repeat('y', 300)), (3, '{long}'), (4, repeat('x', 1025)), \
                            (5, {too_long})) as v (number, name)",
            too_long = if storage == "plain" { "repeat('x', 4000)" } else { "repeat('x', 100000)" }
        ));
        for (number, name) in [(1, k.clone()), (2, format!("{k}{}", "y".repeat(300))), (3, long.clone())] {
            assert!(a.flag(&format!("select named_lock(name) from {table} where number = {number}")), "{storage}");
            assert!(!try_lock(&mut b, &name), "{storage} {number}");
            assert_eq!(a.int(&format!("select named_unlock(name) from {table} where number = {number}")), 0);
            assert!(try_lock(&mut b, &name), "{storage} {number}");
            b.run("select named_unlock_all()");
        }
        for number in [4, 5] {
            a.fails(&format!("select named_lock(name) from {table} where number = {number}")).is("22001");
        }
        a.run(&format!("drop table {table}"));
    }
}

#[test]
fn c18_no_native_key_reaches_a_named_lock() {
    let server = Server::shared();
    let mut watch = server.session("watch");
    for form in Form::named() {
        let lock = form.lock(&unique("c18"));
        let mut a = server.session("c18 a");
        let mut b = server.session("c18 b");
        let holder = a.pid;
        a.run(if form.call { "" } else { "begin" });
        assert!(answer(form, a.query(&lock.acquire(Some("0")))).held(), "{form:?}");
        let rows = watch.run(&format!(
            "select (classid::bigint << 32) | objid::bigint, \
                    classid::bigint::bit(32)::int, objid::bigint::bit(32)::int \
               from pg_locks where locktype = 'advisory' and pid = {}",
            a.pid
        ));
        assert_eq!(rows.len(), 1);
        let number = |column: usize| rows[0].get(column).expect("a number").to_owned();
        let (bigint, pair) = (format!("{}::bigint", number(0)), format!("{}, {}", number(1), number(2)));
        for keys in [&bigint, &pair] {
            for shared in ["", "_shared"] {
                let (lock_it, unlock_it) = (
                    format!("select pg_try_advisory_lock{shared}({keys})"),
                    format!("select pg_advisory_unlock{shared}({keys})"),
                );
                // Another session, and the holder itself: the native lock is another one.
                for session in [&mut b, &mut a] {
                    assert!(!session.flag(&unlock_it), "{form:?}: there is nothing to give back");
                    assert!(session.flag(&lock_it), "{form:?}: it is free");
                    assert!(session.flag(&unlock_it));
                    assert_eq!(watch.rows_for(&lock.target, holder, true), 1, "{form:?} {keys}");
                }
                b.run(&format!("begin; select pg_advisory_xact_lock{shared}({keys}); commit"));
            }
            for mode in ["exclusive", "share"] {
                assert!(b.flag(&format!("select advisory_lock({keys}, '0', '{mode}')")));
            }
            b.run("select pg_advisory_unlock_all()");
        }
        a.run("rollback");
        a.run("select named_unlock_all()");

        // The other way round: what is held natively is in no named lock's way.
        b.run(&format!("select pg_advisory_lock({bigint}), pg_advisory_lock({pair})"));
        assert!(answer(form, a.query(&lock.acquire(Some("0")))).held(), "{form:?}");
    }
}

/// Made with another implementation of XXH3. These never change.
const GOLDEN: [(&str, u32, u32, u16); 16] = [
    ("nightly-report", 206_375_894, 992_624_971, 17602),
    ("a", 3_871_748_790, 513_166_879, 17602),
    ("a ", 2_339_890_382, 1_474_704_682, 17602),
    ("Job", 2_906_993_287, 3_497_685_276, 17602),
    ("job", 2_831_892_839, 1_399_508_441, 17602),
    ("\u{e9}", 4_153_674_240, 1_827_736_755, 17602),
    ("e\u{301}", 3_691_751_161, 1_148_749_224, 17602),
    ("🔒", 2_716_548_176, 1_463_245_049, 17602),
    ("🔒 naïve", 4_122_935_275, 2_728_895_444, 17602),
    ("tenant/42", 2_261_172_499, 2_653_275_341, 17602),
    (":", 2_753_599_110, 2_166_219_724, 17602),
    ("app:", 4_016_497_866, 179_769_895, 18208),
    ("app:job", 2_954_180_357, 869_683_388, 18208),
    ("a:b:c", 2_879_484_405, 2_118_056_483, 17951),
    ("日本:ロック", 859_851_653, 2_978_000_725, 17344),
    ("order-36325", 4_180_572_860, 2_894_543_830, 17602),
];

#[test]
fn c19_golden_keys() {
    let _alone = fixed_names();
    let server = Server::shared();
    let mut a = server.session("c19");
    let own = a.text("select oid from pg_database where datname = current_database()");
    let long = "x".repeat(1024);
    let mut golden = GOLDEN.to_vec();
    golden.push((&long, 4_233_537_486, 2_243_106_378, 17602));
    for (name, classid, objid, objsubid) in golden {
        for (cluster_wide, database) in [(false, own.as_str()), (true, "0")] {
            let literal = literal(name);
            let key = format!(
                "select concat_ws(' ', database, classid, objid, objsubid) \
                   from named_lock_key({literal}, cluster_wide => {cluster_wide})"
            );
            let expected = format!("{database} {classid} {objid} {objsubid}");
            assert_eq!(a.text(&key), expected, "{name}");

            // And that is where it is.
            a.run(&format!("select named_lock({literal}, '1 minute', cluster_wide => {cluster_wide})"));
            assert_eq!(
                a.text(&format!(
                    "select concat_ws(' ', database, classid, objid, objsubid) from pg_locks \
                      where locktype = 'advisory' and pid = {}",
                    a.pid
                )),
                expected
            );
            let row = a
                .run(&format!("select name, domain, classid, objid, objsubid from lock_holders where pid = {}", a.pid));
            assert_eq!(row[0].get("name"), Some(name));
            let domain = name.split_once(':').map_or("", |(domain, _)| domain);
            assert_eq!(row[0].get("domain"), Some(domain), "{name}");
            assert_eq!(row[0].get("classid"), Some(classid.to_string().as_str()));
            a.run("select named_unlock_all()");
        }
    }
}

#[test]
fn c19_names_that_look_alike_are_two_locks() {
    let server = Server::shared();
    let mut a = server.session("c19 a");
    let mut b = server.session("c19 b");
    let stem = unique("c19");
    for (one, other) in [
        ("Job", "job"),
        ("a", "a "),
        ("a", " a"),
        ("\u{e9}", "e\u{301}"),
        ("ﬁ", "fi"),
        ("a", "a\u{200b}"),
        ("a", "a\n"),
        ("a:b", "a :b"),
        ("a:b", "a/b"),
    ] {
        let (one, other) = (format!("{stem}{one}"), format!("{stem}{other}"));
        assert!(try_lock(&mut a, &one));
        assert!(try_lock(&mut b, &other), "{one:?} and {other:?}");
        assert!(!try_lock(&mut b, &one));
        for session in [&mut a, &mut b] {
            session.run("select named_unlock_all()");
        }
    }
}

#[test]
fn c19_odd_names_are_names() {
    let server = Server::shared();
    let mut a = server.session("c19 a");
    let mut b = server.session("c19 b");
    let stem = unique("c19");
    for odd in [" ", "\t", "\n", "'", "\"", "\\", "%s%n", "{}", "$1", "\u{7f}", "\u{1}", "\u{feff}", "::", "/", "null"]
    {
        let name = format!("{odd}{stem}{odd}");
        assert!(try_lock(&mut a, &name), "{name:?}");
        assert!(!try_lock(&mut b, &name), "{name:?}");
        assert_eq!(b.text(&format!("select name from lock_holders where pid = {}", a.pid)), name);
        b.fails(&format!("select named_lock_strict({}, '0')", literal(&name))).is("55P03").message_has(&stem);
        a.run("select named_unlock_all()");
    }
}

#[test]
fn c19_length_is_counted_in_utf8_bytes_and_never_cut() {
    let server = Server::shared();
    let latin1 = server.new_database("c19_latin1", "LATIN1");
    let mut utf8 = server.session("c19");
    let mut latin1 = latin1.session("c19 latin1");
    for form in Form::named() {
        for (in_latin1, fits, too_long) in [
            (false, "x".repeat(1024), "x".repeat(1025)),
            (false, "é".repeat(512), "é".repeat(512) + "x"),
            (false, "🔒".repeat(256), "🔒".repeat(257)),
            (true, "x".repeat(1024), "x".repeat(1025)),
            (true, "é".repeat(512), "é".repeat(512) + "x"),
            (true, "é".repeat(512), "é".repeat(1000)),
        ] {
            let session = if in_latin1 { &mut latin1 } else { &mut utf8 };
            let said = answer(form, session.query(&form.lock(&fits).acquire(Some("1 minute"))));
            assert!(said.held(), "{form:?}: {said:?}");
            session.run("select named_unlock_all()");
            session.fails(&form.lock(&too_long).acquire(Some("0"))).is("22001");
            assert_eq!(session.locks_of(session.pid), 0, "{form:?}");
        }
    }
}

/// What `psql` prints for a script in bytes of its own encoding.
fn psql(server: &Server, encoding: &str, script: &[u8]) -> String {
    let mut child = server
        .client("psql")
        .env("PGCLIENTENCODING", encoding)
        .args(["-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("start psql");
    child.stdin.take().expect("an input").write_all(script).expect("write");
    let output = child.wait_with_output().expect("psql's end");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

/// `named_lock_key` of `stem` and é, the é in the bytes given.
fn key_by_psql(server: &Server, encoding: &str, stem: &str, e: &[u8]) -> String {
    let mut script =
        format!("select concat_ws(' ', classid, objid, objsubid) from named_lock_key('{stem}").into_bytes();
    script.extend(e);
    script.extend(b"');");
    psql(server, encoding, &script)
}

#[test]
fn c19_clients_and_databases_of_all_encodings_mean_the_same_lock() {
    let server = Server::shared();
    let latin1 = server.new_database("c19_latin1", "LATIN1");
    let sql_ascii = server.new_database("c19_ascii", "SQL_ASCII");
    let stem = unique("c19");
    let (in_latin1, in_utf8): (&[u8], &[u8]) = (b"\xe9", b"\xc3\xa9");

    let key = key_by_psql(server, "UTF8", &stem, in_utf8);
    assert_eq!(key_by_psql(server, "LATIN1", &stem, in_latin1), key);
    assert_eq!(key_by_psql(&latin1, "UTF8", &stem, in_utf8), key);
    assert_eq!(key_by_psql(&latin1, "LATIN1", &stem, in_latin1), key);
    // Nothing is known of a SQL_ASCII database's bytes: they are taken as they are.
    assert_eq!(key_by_psql(&sql_ascii, "UTF8", &stem, in_utf8), key);
    assert_ne!(key_by_psql(&sql_ascii, "LATIN1", &stem, in_latin1), key);

    // They exclude each other, whoever comes first.
    let name = format!("{stem}é");
    let servers = [server, &latin1, &sql_ascii];
    for (index, one) in servers.iter().enumerate() {
        for other in &servers[index + 1..] {
            for (first, second) in [(one, other), (other, one)] {
                let lock = Form::named()[4].lock(&name);
                assert!(lock.form.is_cluster_wide());
                let mut a = first.session("c19 a");
                let mut b = second.session("c19 b");
                assert!(a.flag(&lock.acquire(Some("1 minute"))));
                assert!(!b.flag(&lock.acquire(Some("0"))), "{} {}", first.dbname, second.dbname);
                assert_eq!(b.column(&format!("select name from lock_holders where pid = {}", a.pid)), [name.as_str()]);
                a.run("select named_unlock_all()");
                assert!(b.flag(&lock.acquire(Some("1 minute"))));
            }
        }
    }
}

#[test]
fn c19_a_name_that_the_viewers_encoding_lacks_breaks_no_view() {
    let server = Server::shared();
    let latin1 = server.new_database("c19_latin1", "LATIN1");
    let sql_ascii = server.new_database("c19_ascii", "SQL_ASCII");
    let k = unique("c19");
    let mut utf8_holder = server.session("c19 utf8");
    utf8_holder.run(&format!("select named_lock('{k} 日本🔒', cluster_wide => true)"));
    let mut raw_holder = sql_ascii.session("c19 raw");
    raw_holder.run(&format!("select named_lock('{k} ' || chr(255), cluster_wide => true)"));
    for database in [server, &latin1, &sql_ascii] {
        let mut viewer = database.session("c19 viewer");
        for pid in [utf8_holder.pid, raw_holder.pid] {
            // Converted, spelled otherwise or NULL; but the row is there, and its text is of the viewer's encoding.
            assert_eq!(
                viewer.int(&format!(
                    "select count(*) from lock_holders where pid = {pid} and coalesce(length(name), 0) >= 0"
                )),
                1,
                "{}",
                database.dbname
            );
        }
        viewer.int("select length(lock_graph())");
    }
}

#[test]
fn c19_messages_are_in_the_databases_encoding() {
    let server = Server::shared();
    let latin1 = server.new_database("c19_latin1", "LATIN1");
    let sql_ascii = server.new_database("c19_ascii", "SQL_ASCII");
    for database in [server, &latin1, &sql_ascii] {
        let mut watch = database.session("watch");
        let name = format!("dömäne:{}é", unique("c19"));
        let mut a = database.session("c19 a");
        a.run("set application_name = 'größer'");
        let application = a.text("show application_name");
        a.run(&format!("select named_lock('{name}')"));
        let mut b = database.session("c19 b");
        b.fails(&format!("select named_lock_strict('{name}', '0')"))
            .is("55P03")
            .message_has(&name)
            .detail_has(&application);
        b.fails(&format!("select named_unlock('{name}')")).is("55000").message_has(&name);

        b.run(&format!("select named_lock('{name} b')"));
        b.run("set deadlock_timeout = '100ms'");
        let waiting = a.background(&format!("select named_lock('{name} b')"));
        watch.until_waiting(waiting.pid);
        b.fails(&format!("select named_lock('{name}')")).is("40P01").context_has(&name);
        let graph = watch.text("select lock_graph()");
        assert!(graph.contains(&format!("{name} b")), "{graph}");
        assert_eq!(
            watch.column(&format!("select name || ' in ' || domain from lock_waiters where pid = {}", waiting.pid)),
            [format!("{name} b in dömäne")]
        );
        drop(b);
        waiting.end().1.expect("it has the lock");
    }
}

#[test]
fn c20_a_database_has_its_own_names_but_for_cluster_wide_ones() {
    let server = Server::shared();
    let second = server.new_database("c20", "UTF8");
    let mut one = server.session("c20 one");
    let mut two = second.session("c20 two");
    let k = unique("c20");
    for mode in MODES {
        for cluster_wide in [false, true] {
            let lock = format!("select named_lock('{k}', '0', '{mode}', cluster_wide => {cluster_wide})");
            let exclusive = format!("select named_lock('{k}', '0', cluster_wide => {cluster_wide})");
            assert!(one.flag(&lock));
            assert_eq!(two.flag(&exclusive), !cluster_wide, "{mode} cluster_wide {cluster_wide}");
            let shown = |session: &mut Session, pid: i32| {
                session.column(&format!(
                    "select coalesce(database, '-') || ' ' || name from lock_holders where pid = {pid}"
                ))
            };
            let database = if cluster_wide { "-".to_owned() } else { server.dbname.clone() };
            for session in [&mut one, &mut two] {
                let one_pid = one_pid_of(session, &k, "c20 one");
                assert_eq!(shown(session, one_pid), [format!("{database} {k}")]);
            }
            for session in [&mut one, &mut two] {
                session.run("select named_unlock_all()");
            }
        }
    }
    // The same name in both ways is two locks, in one session too.
    assert!(one.flag(&format!("select named_lock('{k}', '0')")));
    assert!(one.flag(&format!("select named_lock('{k}', '0', cluster_wide => true)")));
    assert_eq!(one.int(&format!("select named_lock_held('{k}')")), 1);
    assert_eq!(one.int(&format!("select named_unlock('{k}')")), 0);
    assert!(!two.flag(&format!("select named_lock('{k}', '0', cluster_wide => true)")));
}

/// The process that holds a name, by its application's name.
fn one_pid_of(session: &mut Session, name: &str, application_name: &str) -> i32 {
    session
        .int(&format!("select pid from lock_holders where name = '{name}' and application_name = '{application_name}'"))
        as i32
}

#[test]
fn c20_waiting_across_databases() {
    let server = Server::shared();
    let second = server.new_database("c20", "UTF8");
    let mut one = server.session("c20 one");
    let mut watch = server.session("watch");
    let k = unique("c20");
    for form in Form::named().into_iter().filter(Form::is_cluster_wide) {
        let lock = form.lock(&k);
        assert!(one.flag(&lock.for_holder().acquire(Some("0"))));
        let waiting = second.session("c20 two").background(&lock.acquire(None));
        watch.until_waiting(waiting.pid);
        assert_eq!(
            watch.column(&format!("select pid from lock_waiters where name = '{k}'")),
            [waiting.pid.to_string()]
        );
        one.run(&lock.unlock());
        let (mut two, result) = waiting.end();
        assert!(answer(form, result).held());
        two.run("select named_unlock_all()");
    }
}

#[test]
fn c21_paths_are_names_like_others() {
    let server = Server::shared();
    let mut a = server.session("c21 a");
    let mut b = server.session("c21 b");
    let k = unique("c21");
    assert!(try_lock(&mut a, &format!("{k}/a")));
    assert!(try_lock(&mut b, &format!("{k}/b")));
    assert!(try_lock(&mut b, &k));
    assert!(!try_lock(&mut b, &format!("{k}/a")));
}

/// What a tree of locks stands on: the lock manager's table of conflicts.
#[test]
fn c21_the_conflict_table() {
    let server = Server::shared();
    let mut a = server.session("c21 a");
    let mut b = server.session("c21 b");
    // In the order of MODES; the table is symmetric.
    let conflicts = [
        [true, true, true, true, true],
        [true, false, false, true, true],
        [true, false, false, false, false],
        [true, true, false, false, true],
        [true, true, false, true, true],
    ];
    for form in Form::named() {
        let lock = form.lock(&unique("c21"));
        for (one, row) in MODES.iter().zip(conflicts) {
            for (other, conflict) in MODES.iter().zip(row) {
                let begin = if form.call { "" } else { "begin" };
                a.run(begin);
                b.run(begin);
                let mine = answer(form, a.query(&lock.acquire_with(Some("0"), &format!("mode => '{one}'"))));
                assert!(mine.held(), "{form:?} {one}: {mine:?}");
                assert_eq!(
                    a.int(&format!(
                        "select named_lock_held('{}', '{one}', cluster_wide => {})",
                        lock.called(),
                        form.is_cluster_wide()
                    )),
                    1
                );
                let theirs = answer(form, b.query(&lock.acquire_with(Some("0"), &format!("mode => '{other}'"))));
                assert_eq!(theirs.held(), !conflict, "{form:?} {one}, {other}: {theirs:?}");
                for session in [&mut a, &mut b] {
                    session.run("rollback");
                    session.run("select named_unlock_all()");
                }
            }
        }
    }
}

#[test]
fn native_twins_know_exclusive_and_share() {
    let server = Server::shared();
    let mut a = server.session("a");
    let mut b = server.session("b");
    for form in Form::all().into_iter().filter(|form| !form.is_named()) {
        let lock = form.lock(&unique("twin"));
        let keys = lock.called();
        for (mode, shared) in [("exclusive", false), ("share", true)] {
            a.run("begin");
            assert!(answer(form, a.query(&lock.acquire_with(Some("0"), &format!("mode => '{mode}'")))).held());
            // The server's own functions meet it.
            assert!(!b.flag(&format!("select pg_try_advisory_lock({keys})")));
            assert_eq!(b.flag(&format!("select pg_try_advisory_lock_shared({keys})")), shared);
            b.run("select pg_advisory_unlock_all()");
            if form.is_session() {
                let unlock = if shared { "pg_advisory_unlock_shared" } else { "pg_advisory_unlock" };
                assert!(a.flag(&format!("select {unlock}({keys})")));
            }
            a.run("commit");
            assert_eq!(b.locks_of(a.pid), 0, "{form:?}");

            b.run(&format!("select pg_advisory_lock({keys})"));
            let said = answer(form, a.query(&lock.acquire_with(Some("20 ms"), &format!("mode => '{mode}'"))));
            assert!(matches!(said, Answer::NotHeld), "{said:?}");
            b.run("select pg_advisory_unlock_all()");
        }
    }
}

/// An integer is a bigint's key, as for the server's own functions.
#[test]
fn native_twins_take_integers() {
    let server = Server::shared();
    let database = server.new_database("twins", "UTF8");
    let mut a = database.session("a");
    let mut b = database.session("b");
    for function in ["advisory_lock", "advisory_lock_strict", "advisory_xact_lock", "advisory_xact_lock_strict"] {
        for key in ["42", "-42", "0", "2147483647", "-2147483648", "42::smallint", "2147483648", "-1::bigint"] {
            a.run("begin");
            a.run(&format!("select {function}({key}, timeout => '0')"));
            assert!(!b.flag(&format!("select pg_try_advisory_lock(({key})::bigint)")), "{function}({key})");
            assert_eq!(b.locks_of(a.pid), 1);
            a.run("rollback; select pg_advisory_unlock_all()");
        }
    }
}

/// Two names with one key, and so one place in the lock manager.
const CLASH: (&str, &str) = ("order-36325", "M0plytOy");

#[test]
fn clash_the_pair_has_one_key() {
    let server = Server::shared();
    let mut a = server.session("clash");
    assert!(a.flag(&format!("select named_lock_key('{}') = named_lock_key('{}')", CLASH.0, CLASH.1)));
}

#[test]
fn clash_with_another_sessions_hold_is_refused() {
    let _alone = fixed_names();
    let server = Server::shared().new_database("clash", "UTF8");
    let mut watch = server.session("watch");
    for (held, asked) in [CLASH, (CLASH.1, CLASH.0)] {
        for holder in Form::named() {
            for form in Form::named() {
                if holder.is_cluster_wide() != form.is_cluster_wide() {
                    continue;
                }
                let mut a = server.session("clash a");
                let mut b = server.session("clash b");
                a.run(if holder.call { "" } else { "begin" });
                assert!(answer(holder, a.query(&holder.lock(held).acquire(Some("0")))).held());
                for timeout in [Some("0"), Some("1 minute"), None] {
                    let error = b.fails(&form.lock(asked).acquire(timeout));
                    error.is("54000").message_has(asked);
                    assert_eq!(watch.locks_of(b.pid), 0, "{form:?}");
                }
                assert_eq!(watch.column(&format!("select name from lock_holders where pid = {}", a.pid)), [held]);
                a.run("rollback");
                a.run("select named_unlock_all()");
                // It isn't in use any more.
                assert!(answer(form, b.query(&form.lock(asked).acquire(Some("0")))).held());
                b.run("select named_unlock_all()");
            }
        }
    }
}

#[test]
fn clash_with_a_hold_of_another_mode_is_refused() {
    let server = Server::shared().new_database("clash", "UTF8");
    let mut a = server.session("clash a");
    let mut b = server.session("clash b");
    for (held, asked) in [("share", "exclusive"), ("exclusive", "share"), ("intent exclusive", "share")] {
        a.run(&format!("select named_lock('{}', mode => '{held}')", CLASH.0));
        for timeout in ["'0'", "'1 minute'", "null"] {
            b.fails(&format!("select named_lock('{}', {timeout}, '{asked}')", CLASH.1)).is("54000");
        }
        a.run("select named_unlock_all()");
    }
    // Those who share don't wait for each other, and each is shown by its own name.
    a.run(&format!("select named_lock('{}', mode => 'share')", CLASH.0));
    if b.flag(&format!("select named_lock('{}', mode => 'share')", CLASH.1)) {
        for (pid, name) in [(a.pid, CLASH.0), (b.pid, CLASH.1)] {
            assert_eq!(a.column(&format!("select name from lock_holders where pid = {pid}")), [name]);
        }
        a.fails(&format!("select named_lock_convert('{}', 'exclusive', '1 minute')", CLASH.0)).is("54000");
        assert_eq!(a.int(&format!("select named_lock_held('{}', 'share')", CLASH.0)), 1);
    }
}

#[test]
fn clash_with_a_prepared_transactions_hold_is_refused() {
    let database = Server::shared().new_database("clash", "UTF8");
    let gid = unique("clash");
    let mut a = database.session("clash a");
    a.run(&format!("begin; select named_xact_lock('{}'); prepare transaction '{gid}'", CLASH.0));
    for mut session in [a, database.session("clash b")] {
        for form in Form::named().into_iter().filter(|form| !form.is_cluster_wide()) {
            for timeout in [Some("0"), Some("1 minute"), None] {
                session.fails(&form.lock(CLASH.1).acquire(timeout)).is("54000");
                assert_eq!(session.locks_of(session.pid), 0, "{form:?}");
            }
        }
    }
    database.session("clash c").run(&format!("commit prepared '{gid}'"));
}

#[test]
fn clash_with_a_waiter_is_refused() {
    let _alone = fixed_names();
    let server = Server::shared().new_database("clash", "UTF8");
    let mut watch = server.session("watch");
    for form in Form::named() {
        let (held, asked) = (form.lock(CLASH.0), form.lock(CLASH.1));
        let mut a = server.session("clash a");
        let share = "mode => 'share'";
        assert!(a.flag(&held.for_holder().acquire_with(Some("1 minute"), share)));
        let waiting = server.session("clash b").background(&held.acquire(None));
        watch.until_waiting(waiting.pid);
        // By its mode it could share with A, but it would queue behind B.
        let mut c = server.session("clash c");
        for timeout in [Some("0"), Some("1 minute"), None] {
            c.fails(&asked.acquire_with(timeout, share)).is("54000");
            assert_eq!(watch.locks_of(c.pid), 0, "{form:?}");
        }
        a.run(&held.unlock());
        assert!(answer(form, waiting.end().1).held());
    }
}

/// Who waits next asks whoever has waited last, and that one's word may not be true any more.
#[test]
fn clash_with_one_who_was_granted_after_a_wait_is_refused() {
    let _alone = fixed_names();
    let server = Server::shared().new_database("clash", "UTF8");
    let mut watch = server.session("watch");
    for (name, other) in [CLASH, (CLASH.1, CLASH.0)] {
        let mut a = server.session("clash a");
        assert!(a.flag(&format!("select named_lock('{name}')")));
        let waiting = server.session("clash b").background(&format!("select named_lock('{name}', '1 minute')"));
        watch.until_waiting(waiting.pid);
        a.run(&format!("select named_unlock('{name}')"));
        let (mut b, granted) = waiting.end();
        assert_eq!(granted.expect("no error")[0].get(0), Some("t"));
        for timeout in ["'0'", "'1 minute'", "null"] {
            a.fails(&format!("select named_lock('{other}', {timeout})")).is("54000");
        }
        assert!(!a.flag(&format!("select named_lock('{name}', '10 ms')")));

        // It has given it back, and asks again where the other name has it now.
        b.run(&format!("select named_unlock('{name}')"));
        assert!(a.flag(&format!("select named_lock('{other}', '0')")));
        for timeout in ["'0'", "'1 minute'", "null"] {
            b.fails(&format!("select named_lock('{name}', {timeout})")).is("54000");
        }
        assert!(!b.flag(&format!("select named_lock('{other}', '10 ms')")));
        a.run("select named_unlock_all()");
    }
}

#[test]
fn clash_in_one_session_is_never_a_second_hold() {
    let _alone = fixed_names();
    let server = Server::shared().new_database("clash", "UTF8");
    for holder in Form::named() {
        for form in Form::named() {
            if holder.is_cluster_wide() != form.is_cluster_wide() || holder.call != form.call {
                continue;
            }
            for mode in MODES {
                let (held, asked) = (holder.lock(CLASH.0), form.lock(CLASH.1));
                let wide = form.is_cluster_wide();
                let mut a = server.session("clash");
                a.run(if holder.call { "" } else { "begin" });
                let more = format!("mode => '{mode}'");
                assert!(answer(holder, a.query(&held.acquire_with(Some("1 minute"), &more))).held());
                for (timeout, mode) in [(Some("0"), mode), (None, mode), (Some("0"), "intent share")] {
                    a.run(if holder.call { "" } else { "savepoint s" });
                    a.fails(&asked.acquire_with(timeout, &format!("mode => '{mode}'"))).is("54000");
                    a.run(if holder.call { "" } else { "rollback to s" });
                }
                let count = |name| format!("select named_lock_held('{name}', cluster_wide => {wide})");
                assert_eq!(a.int(&count(CLASH.0)), 1, "{holder:?} {form:?}");
                assert_eq!(a.int(&count(CLASH.1)), 0, "{holder:?} {form:?}");
                a.run(if holder.call { "" } else { "savepoint s" });
                a.fails(&asked.unlock()).is("55000").message_has(CLASH.1);
                a.run(if holder.call { "" } else { "rollback to s" });
                assert_eq!(a.int(&count(CLASH.0)), 1, "{holder:?} {form:?}");
                a.run(if holder.call { "" } else { "commit" });
                a.run("select named_unlock_all()");
                // The first one is gone: now it's a name like any other.
                assert!(answer(form, a.query(&asked.acquire(Some("0")))).held());
                a.run("select named_unlock_all()");
                assert_eq!(a.locks_of(a.pid), 0);
            }
        }
    }
}

#[test]
fn clash_is_none_between_a_local_and_a_cluster_wide_name() {
    let _alone = fixed_names();
    let server = Server::shared().new_database("clash", "UTF8");
    let mut a = server.session("clash a");
    let mut b = server.session("clash b");
    a.run(&format!("select named_lock('{}')", CLASH.0));
    assert!(a.flag(&format!("select named_lock('{}', '1 minute', cluster_wide => true)", CLASH.1)));
    a.run(&format!("select named_unlock('{}', cluster_wide => true)", CLASH.1));
    assert!(b.flag(&format!("select named_lock('{}', '1 minute', cluster_wide => true)", CLASH.1)));
    b.run(&format!("select named_unlock('{}', cluster_wide => true)", CLASH.1));
}
