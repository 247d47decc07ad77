//! What the README and the pages in `docs/` show is true: their SQL runs, and gives what they show. Their links lead
//! somewhere.
//!
//! # How a page is tested
//! Pages run one after the other, each in a database of its own, with the extension unless the page creates it. Its
//! blocks run one after the other too, through psql, by a superuser `ann`. What a page takes it also gives back: at its end
//! nothing may be held, leases that are kept aside.
//!
//! - A block `sql` runs. Its output is shown in one of two ways. It stands in the line itself behind an arrow,
//!   `SELECT named_lock('a');  --> t`: values joined by ` | `, rows by ` ; `, of an error its first line. Or the next block is
//!   of the language `text`: it is what psql prints, behind the last arrow if there are any. A result or an error that is
//!   shown nowhere is a failure; `void` shows nothing. psql's variables work: `SELECT … \gset`, then `:token`.
//! - A block `text` is always output. What is neither has another language.
//! - **Markers** are comments in a line of their own before the block that they are for:
//!
//!   | marker | the block |
//!   |---|---|
//!   | `<!-- test: session b -->` | is run by another session, whose application_name this is (else it is `psql`) |
//!   | `<!-- test: session b, waits -->` | the same; it is seen waiting, and the page goes on |
//!   | `<!-- test: session b goes on -->` | is the output of the waiting one, which ends now |
//!   | `<!-- test: not run: why -->` | is not run; [`NOT_RUN`] has all of them |
//!
//! - **What differs from run to run** is compared by its kind, and nothing else is:
//!
//!   | shown | matches |
//!   |---|---|
//!   | a date with a time, `2026-11-30 03:34:37.1+00` | any other |
//!   | a time with a fraction, `00:00:29.998`; seconds with three places, `29.998 s` | any other; without a fraction only itself |
//!   | a number in a column `pid`, `blocked_by` or `token`, or after one of the words pid, process and token | one and the same number all over the page, another one for each; a higher token a higher one |
//!   | a database's number in `advisory lock [5,…]` | likewise |
//!   | widths of columns, blanks at the end | any other |

mod compare;
mod links;
mod page;
mod psql;

use super::support::{Cluster, Server, Session, unique};
use compare::Bindings;
use page::{Page, Step};
use psql::Psql;
use std::path::{Path, PathBuf};

/// Blocks of SQL that no test can run: the page, and the reason that stands there. Keep it short.
const NOT_RUN: &[(&str, &str)] = &[];

/// The superuser who runs the pages.
const ROLE: &str = "ann";

/// Where the checkout is.
fn checkout() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Every Markdown file of the checkout, from its top.
fn markdown_files() -> Vec<PathBuf> {
    fn walk(folder: &Path, files: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(folder).expect("a folder of the checkout") {
            let entry = entry.expect("its entry");
            let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
            if entry.file_type().expect("its type").is_dir() {
                if !name.starts_with('.') && !["target", "node_modules"].contains(&&*name) {
                    walk(&path, files);
                }
            } else if name.ends_with(".md") {
                files.push(path.strip_prefix(checkout()).expect("below it").to_owned());
            }
        }
    }
    let mut files = Vec::new();
    walk(checkout(), &mut files);
    files.sort();
    files
}

/// The README and all pages of the book.
fn pages() -> Vec<(String, Page)> {
    let ours = |file: &PathBuf| file == Path::new("README.md") || file.starts_with("docs");
    let read = |file: PathBuf| {
        let name = file.display().to_string();
        let text = std::fs::read_to_string(checkout().join(file)).expect("a page");
        let page = page::parse(&text).unwrap_or_else(|problem| panic!("{name}:{problem}"));
        (name, page)
    };
    markdown_files().into_iter().filter(ours).map(read).collect()
}

/// A server for pages: `lock_holders` has the locks of a whole server, and a page shows all of them.
fn server() -> Cluster {
    let cluster = Cluster::new(&[]);
    cluster.session("create role").run(&format!("create role {ROLE} superuser login"));
    cluster
}

/// A database with the extension, entered by [`ROLE`].
fn database(cluster: &Cluster) -> Server {
    Server { user: ROLE.into(), ..cluster.new_database("docs", "UTF8") }
}

/// Runs a page; the error has the line and what is wrong there.
fn run(page: &Page, server: &Server) -> Result<(), String> {
    let mut watch = server.session("watch");
    let mut sessions: Vec<Psql> = Vec::new();
    let mut bindings = Bindings::default();
    for (line, step) in &page.steps {
        take(step, server, &mut sessions, &mut watch, &mut bindings).map_err(|problem| format!("{line}: {problem}"))?;
    }
    if let Some(session) = sessions.iter().find(|session| session.is_busy()) {
        return Err(format!("end: session {} still waits", session.name));
    }
    let held =
        watch.column("select concat_ws(' ', kind, name, mode) from lock_holders where state is distinct from 'kept'");
    if held.is_empty() { Ok(()) } else { Err(format!("end: still held: {}", held.join("; "))) }
}

fn take(
    step: &Step,
    server: &Server,
    sessions: &mut Vec<Psql>,
    watch: &mut Session,
    bindings: &mut Bindings,
) -> Result<(), String> {
    let name = step.session();
    let at = match sessions.iter().position(|session| session.name == name) {
        Some(at) => at,
        None => {
            sessions.push(Psql::start(server, name)?);
            sessions.len() - 1
        }
    };
    let session = &mut sessions[at];
    match step {
        Step::Output { sql, shown, .. } => {
            let (arrows, rest) = behind_the_last_arrow(sql);
            session.one_by_one(arrows, |line, shown, printed| compare::arrow(line, shown, printed, bindings))?;
            compare::output(shown, &session.run(rest)?, bindings)
        }
        Step::Arrows { sql, .. } => {
            session.one_by_one(sql, |line, shown, printed| compare::arrow(line, shown, printed, bindings))
        }
        Step::Waits { sql, .. } => session.wait(sql, watch),
        Step::GoesOn { shown, .. } => compare::output(shown, &session.go_on()?, bindings),
    }
}

/// The lines up to the last one with an arrow, and the others.
fn behind_the_last_arrow(sql: &str) -> (&str, &str) {
    let end = sql.rfind("-->").map_or(0, |at| sql[at..].find('\n').map_or(sql.len(), |end| at + end + 1));
    sql.split_at(end)
}

#[test]
fn every_page_shows_what_happens() {
    let pages = pages();
    let blocks: usize = pages.iter().map(|(_, page)| page.steps.len()).sum();
    assert!(blocks > 50, "only {blocks} blocks were found");
    let cluster = server();
    let mut failures = Vec::new();
    for (name, page) in pages.iter().filter(|(_, page)| !page.steps.is_empty()) {
        let database = database(&cluster);
        if page.creates_the_extension() {
            database.session("drop extension").run("drop extension named_locks");
        }
        if let Err(problem) = run(page, &database) {
            failures.push(format!("{name}:{problem}"));
        }
        // The next page is to see nothing of it.
        let rest = "select pg_terminate_backend(pid, 60000) from pg_stat_activity where backend_type = 'client backend' \
                        and pid <> pg_backend_pid()";
        cluster.session("tidy up").run(rest);
    }
    assert!(failures.is_empty(), "\n{}", failures.join("\n\n"));
}

#[test]
fn only_these_blocks_are_not_run() {
    let pages = pages();
    let found: Vec<(&str, &str)> = pages
        .iter()
        .flat_map(|(name, page)| page.not_run.iter().map(|reason| (name.as_str(), reason.as_str())))
        .collect();
    assert_eq!(found, NOT_RUN);
}

#[test]
fn the_book_has_every_page() {
    let summary = std::fs::read_to_string(checkout().join("docs/SUMMARY.md")).expect("the list of pages");
    let listed =
        |page: &&PathBuf| summary.contains(&format!("({})", page.strip_prefix("docs").expect("below it").display()));
    let files = markdown_files();
    let pages = files.iter().filter(|file| file.starts_with("docs") && !file.ends_with("SUMMARY.md"));
    let left_out: Vec<_> = pages.filter(|page| !listed(page)).collect();
    assert!(left_out.is_empty(), "not in docs/SUMMARY.md: {left_out:?}");
}

#[test]
fn every_link_leads_somewhere() {
    let broken = links::broken(checkout(), &markdown_files());
    assert!(broken.is_empty(), "\n{}", broken.join("\n"));
}

#[test]
fn a_link_that_leads_nowhere_is_found() {
    let folder = std::env::temp_dir().join(unique("links"));
    std::fs::create_dir_all(folder.join("sub")).expect("a folder");
    let a = "[](sub/b.md) [](sub/b.md#a-b-c) [](#here) [](https://example.com/x) ![](sub)\n\n# Here\n\n## Here\n\n[](#here-1)\n";
    std::fs::write(folder.join("a.md"), format!("{a}\n[](c.md) [](#there) [](sub/b.md#here) ![](c.svg)\n"))
        .expect("a file");
    std::fs::write(folder.join("sub/b.md"), "# A `b`, c\n\n[](../a.md#here) [x](<b.md>)\n").expect("a file");
    let broken = links::broken(&folder, &["a.md".into(), "sub/b.md".into()]);
    std::fs::remove_dir_all(&folder).expect("it was made above");
    assert_eq!(
        broken,
        [
            "a.md:9: there is no c.md",
            "a.md:9: there is no heading #there",
            "a.md:9: there is no heading sub/b.md#here",
            "a.md:9: there is no c.svg"
        ]
    );
}

/// What happens to a page of this text.
fn outcome(server: &Server, text: &str) -> Result<(), String> {
    // Fences and arrows that are easier to read here.
    page::parse(&text.replace("~~~", "```")).and_then(|page| run(&page, server))
}

#[test]
fn a_page_that_is_right_passes() {
    let page = "\
~~~sql
SELECT named_lock('a');  --> t
SELECT acquired, token FROM lease_acquire('l', '30 s');  --> t | 60480000123
SELECT token AS token, NULL AS nothing FROM lock_holders WHERE name = 'l' \\gset
SELECT lease_guard('l', :token);
SELECT lease_release('l', :token);  --> t
SELECT n FROM generate_series(1, 2) n;  --> 1 ; 2
SELECT 1 WHERE false;  --> (0 rows)
SELECT named_unlock('b');  --> ERROR:  named lock \"b\" is not held by this session
~~~
Another one waits.
<!-- test: session b, waits -->
~~~sql
SELECT named_lock('a', '1 min');
SELECT named_unlock_all();
~~~
~~~sql
SELECT pid, name, waited, blocked_by FROM lock_waiters;
SELECT pid FROM lock_holders WHERE name = 'a';
~~~
~~~text
 pid | name | waited | blocked_by
---+---+---+---
 11 | a | 00:00:00.1 | {12}
(1 row)
 pid
 ---
 12
(1 row)
~~~
~~~sql
SELECT named_unlock('a');  --> 0
~~~
<!-- test: session b goes on -->
~~~text
 named_lock
------------
 t
(1 row)

 named_unlock_all
------------------
                1
(1 row)
~~~
<!-- test: not run: for the test -->
~~~sql
DROP DATABASE everything;
~~~
";
    outcome(&database(&server()), page).expect("nothing is wrong with it");
}

#[test]
fn a_page_that_is_wrong_fails() {
    let cluster = server();
    let server = database(&cluster);
    let wrong = [
        // Output.
        ("~~~sql\nSELECT 1 AS a;\n~~~\n~~~text\n a\n---\n 2\n(1 row)\n~~~", "shown"),
        ("~~~sql\nSELECT 1 AS a;\n~~~\n~~~text\n b\n---\n 1\n(1 row)\n~~~", "shown"),
        ("~~~sql\nSELECT 1 AS a;\n~~~\n~~~text\n a\n---\n 1\n(1 row)\nNOTICE:  more\n~~~", "shown"),
        ("~~~sql\nSELECT 1;  --> 2\n~~~", "shown"),
        ("~~~sql\nSELECT 1 AS a, 2 AS b;  --> 1\n~~~", "shown"),
        ("~~~sql\nSELECT 1 AS a FROM generate_series(1, 2);  --> 1\n~~~", "shown"),
        ("~~~sql\nSELECT 1;\n~~~", "not shown"),
        ("~~~sql\nSELECT 1; SELECT 2;  --> 2\n~~~", "shown"),
        ("~~~sql\nSELECT 1;  --> 1\nSELECT 2;\n~~~", "not shown"),
        ("~~~sql\nSELECT 1;  --> 1\nSELECT 2 AS a;\n~~~\n~~~text\n a\n---\n 3\n(1 row)\n~~~", "shown"),
        ("~~~sql\nSELECT 1;  --> 2\nSELECT 2 AS a;\n~~~\n~~~text\n a\n---\n 2\n(1 row)\n~~~", "shown"),
        ("~~~sql\nSELECT 1 WHERE false;\n~~~", "not shown"),
        ("~~~sql\nBEGIN;  --> t\nCOMMIT;\n~~~", "shown"),
        // Errors.
        ("~~~sql\nSELECT 1/0;\n~~~", "not shown"),
        ("~~~sql\nSELECT 1/0;  --> 0\n~~~", "shown"),
        ("~~~sql\nSELECT 1/0;\n~~~\n~~~text\n a\n---\n 2\n(1 row)\n~~~", "shown"),
        ("~~~sql\nSELECT 1;  --> ERROR:  division by zero\n~~~", "shown"),
        ("~~~sql\n\\gnet\n~~~", "not shown"),
        ("~~~sql\nDO $$ BEGIN RAISE NOTICE 'x'; END $$;\n~~~", "not shown"),
        // What differs from run to run is not anything.
        ("~~~sql\nSELECT pg_backend_pid() AS a;  --> 11\n~~~", "shown"),
        ("~~~sql\nSELECT 5 AS pid;  --> 11\nSELECT 6 AS pid;  --> 11\n~~~", "stands for"),
        ("~~~sql\nSELECT 5 AS pid;  --> 11\nSELECT 5 AS pid;  --> 12\n~~~", "stands for"),
        ("~~~sql\nSELECT 5 AS token;  --> 11\nSELECT 6 AS token;  --> 10\n~~~", "order"),
        ("~~~sql\nSELECT '00:05'::interval;  --> 00:06:00\n~~~", "shown"),
        ("~~~sql\nSELECT now();  --> 00:00:00.1\n~~~", "shown"),
        // Form.
        ("~~~sql\nSELECT 1\n~~~", "no end"),
        ("~~~sql\nSELECT 1;", "never closed"),
        ("~~~\nSELECT 1;\n~~~", "language"),
        ("~~~SQL\nSELECT 1;\n~~~", "language"),
        ("x\n\n    SELECT 1;\n", "fence"),
        ("~~~text\n1\n~~~", "no block"),
        ("~~~sql\nBEGIN;\n~~~\n~~~sh\nls\n~~~\n~~~text\n1\n~~~", "no block"),
        ("<!-- test: not run: because\n~~~sql\nSELECT 1;\n~~~", "never closed"),
        ("<!-- a comment\n~~~sql\nSELECT 1;\n~~~", "never closed"),
        ("<!-- test: not run: because\n~~~sql\nSELECT 1;  --> 1\n~~~", "never closed"),
        ("<!-- test: not run: because\nit is so -->\n~~~sql\nSELECT 1;\n~~~", "one line"),
        ("<!-- test: not run -->\n~~~sql\nSELECT 1;\n~~~", "marker"),
        ("<!-- test: not run: -->\n~~~sql\nSELECT 1;\n~~~", "marker"),
        ("<!-- test: skip -->\n~~~sql\nSELECT 1;\n~~~", "marker"),
        ("<!-- test: session b -->\n\nText.\n\n~~~sql\nSELECT 1;\n~~~", "block right behind"),
        ("<!-- test: session b -->\n", "block right behind"),
        ("<!-- test: session b -->\n~~~sh\nls\n~~~", "not for"),
        ("text <!-- test: session b -->\n~~~sql\nSELECT 1;\n~~~", "line of its own"),
        // Waiting.
        ("<!-- test: session b, waits -->\n~~~sql\nSELECT 1;\n~~~", "did not wait"),
        ("<!-- test: session b goes on -->\n~~~text\n1\n~~~", "does not wait"),
        ("~~~sql\nSELECT named_lock('a');  --> t\n~~~", "still held"),
        ("~~~sql\nSELECT acquired FROM lease_acquire('a', '1 h');  --> t\n~~~", "still held"),
    ];
    for (text, problem) in wrong {
        let found = outcome(&server, text).expect_err(text);
        assert!(found.contains(problem), "{text}\nis wrong by: {found}");
        server.session("tidy up").run("select pg_terminate_backend(pid, 60000) from pg_stat_activity where application_name in ('psql', 'b') and datname = current_database()");
    }
    let waits = "~~~sql\nSELECT named_lock('w');  --> t\n~~~\n<!-- test: session b, waits -->\n~~~sql\nSELECT named_lock('w');\n~~~";
    assert!(outcome(&server, waits).expect_err("it waits").contains("still waits"));
    let busy = format!("{waits}\n<!-- test: session b -->\n~~~sql\nBEGIN;\n~~~");
    assert!(outcome(&server, &busy).expect_err("it waits").contains("still waits"));
}
