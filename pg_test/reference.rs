//! The reference, `docs/reference`, against what there is: the catalogue's objects and their comments, the settings, the
//! errors; and what psql shows of the extension.
//!
//! What a page has from there stands between `<!-- from the catalogue: KEY -->` and `<!-- end -->`: an object without a
//! place in the pages, or a place for what is not there, fails. `make reference` writes these parts anew.

use super::support::{Server, run};
use crate::rules::error::Error;
use crate::rules::error::tests::samples;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Stdio;

/// Set to write the pages instead of failing where they differ.
const WRITE: &str = "NAMED_LOCKS_WRITE_REFERENCE";
const START: &str = "<!-- from the catalogue: ";
const END: &str = "<!-- end -->";
/// A signature is shown on one line up to this.
const LINE: usize = 100;
/// What fits into psql's tables.
const COMMENT: usize = 100;

fn docs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("docs")
}

fn page(name: &str) -> PathBuf {
    docs().join("reference").join(name)
}

fn read(file: &Path) -> String {
    std::fs::read_to_string(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()))
}

/// Compares the parts of a page that come from elsewhere, each a key and its text.
#[track_caller]
fn check(name: &str, parts: &[(String, String)]) {
    let file = page(name);
    let text = read(&file);
    let mut pieces = text.split(START);
    let mut written = pieces.next().expect("a first piece").to_owned();
    let mut places = BTreeSet::new();
    for piece in pieces {
        let (key, rest) = piece.split_once(" -->\n").unwrap_or_else(|| panic!("{name}: no --> after {piece}"));
        let (_, rest) = rest.split_once(END).unwrap_or_else(|| panic!("{name}: no {END} after {key}"));
        assert!(places.insert(key), "{name}: {key} has two places");
        let part = parts.iter().find(|(wanted, _)| wanted == key);
        let (_, part) = part.unwrap_or_else(|| panic!("{name}: there is no {key}"));
        written.push_str(&format!("{START}{key} -->\n{part}\n\n{END}{rest}"));
    }
    for (key, _) in parts {
        assert!(places.contains(key.as_str()), "{name} has no place for {key}: {START}{key} -->\n{END}");
    }
    if std::env::var_os(WRITE).is_some() {
        std::fs::write(&file, &written).expect("write the page");
    } else if let Some((here, there)) = text.lines().zip(written.lines()).find(|(here, there)| here != there) {
        panic!("{name} is out of date, `make reference` writes it anew:\n  here:  {here}\n  there: {there}");
    } else {
        assert_eq!(text.len(), written.len(), "{name} is out of date, `make reference` writes it anew");
    }
}

/// A comment as a sentence.
fn sentence(comment: &str) -> String {
    let word = comment.split(' ').next().unwrap_or_default();
    let mut text = comment.to_owned();
    if !word.contains('_') {
        text[..1].make_ascii_uppercase();
    }
    text + "."
}

/// Joins what stands in parentheses, on one line if it is short.
fn in_parentheses(before: &str, items: &[&str], after: &str) -> String {
    let line = format!("{before}({}){after}", items.join(", "));
    match line.len() {
        0..=LINE => line,
        _ => format!("{before}(\n    {}\n){after}", items.join(",\n    ")),
    }
}

/// The extension's schema, as the functions in it see themselves.
const SCHEMA: &str = "(select extnamespace from pg_extension where extname = 'named_locks')";

#[test]
fn functions_are_those_of_the_catalogue() {
    let mut admin = Server::shared().session("reference");
    // Arguments and columns one a line; those of the extension's own use begin with an underscore.
    let rows = admin.query(&format!(
        r"select p.oid::regprocedure, p.proname, p.prokind, p.proretset, format_type(p.prorettype, null),
                 (select string_agg(concat_ws(' ', case a.mode when 'b' then 'INOUT' end, a.name, format_type(a.type, null),
                                              'DEFAULT ' || regexp_replace(pg_get_function_arg_default(p.oid, a.number::int),
                                                                           '::[^:]*$', '')),
                                    chr(10) order by a.number)
                    from unnest(p.proargnames, coalesce(p.proallargtypes, p.proargtypes::oid[]), p.proargmodes)
                         with ordinality as a (name, type, mode, number)
                   where a.mode is distinct from 'o'),
                 (select string_agg(a.name || ' ' || format_type(a.type, null), chr(10) order by a.number)
                    from unnest(p.proargnames, p.proallargtypes, p.proargmodes) with ordinality as a (name, type, mode, number)
                   where a.mode = 'o'),
                 obj_description(p.oid, 'pg_proc')
            from pg_proc as p
           where p.pronamespace = {SCHEMA} and p.proname !~ '^_'
             and p.oid in (select objid from pg_depend where deptype = 'e' and classid = 'pg_proc'::regclass
                              and refobjid = (select oid from pg_extension where extname = 'named_locks'))
           order by 1"
    ));
    let mut parts: Vec<(String, String)> = rows
        .expect("the functions")
        .iter()
        .map(|row| {
            let lines = |column: usize| row.get(column).map_or_else(Vec::new, |text| text.lines().collect::<Vec<_>>());
            let [signature, name, kind, set, result] = [0, 1, 2, 3, 4].map(|column| row.get(column).expect("a value"));
            let columns = lines(6);
            let of = if set == "t" { "SETOF " } else { "" };
            let returns = match (kind, columns.as_slice()) {
                ("p", _) => String::new(),
                (_, []) => format!(" RETURNS {of}{result}"),
                (_, columns) => in_parentheses(&format!(" RETURNS {of}"), columns, ""),
            };
            let call = if kind == "p" { "CALL " } else { "" };
            let text = in_parentheses(&format!("{call}{name}"), &lines(5), &returns);
            let comment = sentence(row.get(7).expect("a comment"));
            (signature.to_owned(), format!("```log\n{text}\n```\n\n{comment}"))
        })
        .collect();
    assert!(parts.len() > 35);
    parts.push((
        "type named_lock_mode".into(),
        admin.text(
            "select string_agg('`' || e.enumlabel || '`', ', ' order by e.enumsortorder) || ': ' \
                    || obj_description('named_lock_mode'::regtype, 'pg_type') || '.' \
               from pg_enum as e where e.enumtypid = 'named_lock_mode'::regtype",
        ),
    ));
    check("functions.md", &parts);
}

#[test]
fn views_are_those_of_the_catalogue() {
    let mut admin = Server::shared().session("reference");
    let views = admin.column(&format!(
        "select relname from pg_class where relkind = 'v' and relnamespace = {SCHEMA} and relname !~ '^_' order by 1"
    ));
    assert!(views.len() >= 4);
    let parts: Vec<(String, String)> = views
        .iter()
        .map(|view| {
            let rows = admin.column(&format!(
                "select format('| `%s` | `%s` | %s |', a.attname, format_type(a.atttypid, a.atttypmod),
                               col_description(a.attrelid, a.attnum))
                   from pg_attribute as a where a.attrelid = '{view}'::regclass and a.attnum > 0 order by a.attnum"
            ));
            let comment = sentence(&admin.text(&format!("select obj_description('{view}'::regclass, 'pg_class')")));
            (format!("view {view}"), format!("{comment}\n\n| column | type | |\n|---|---|---|\n{}", rows.join("\n")))
        })
        .collect();
    check("views.md", &parts);
}

#[test]
fn settings_are_those_of_the_server() {
    let mut admin = Server::shared().session("reference");
    admin.run("select named_lock_held('x')");
    let rows = admin.query(
        "select name, short_desc, boot_val, vartype, enumvals, min_val, max_val, context \
           from pg_settings where name like 'named\\_locks.%' order by 1",
    );
    let parts: Vec<(String, String)> = rows
        .expect("the settings")
        .iter()
        .map(|row| {
            let get = |column: &str| row.get(column).unwrap_or_default();
            let values = match get("vartype") {
                "integer" => format!("{} to {}", get("min_val"), get("max_val")),
                "bool" => "`on`, `off`".to_owned(),
                _ => get("enumvals")
                    .trim_matches(['{', '}'])
                    .split(',')
                    .map(|value| format!("`{value}`"))
                    .collect::<Vec<_>>()
                    .join(", "),
            };
            let text = format!(
                "{}\n\n| values | default | context |\n|---|---|---|\n| {values} | `{}` | `{}` |",
                get("short_desc"),
                get("boot_val"),
                get("context")
            );
            (format!("setting {}", get("name")), text)
        })
        .collect();
    assert!(parts.len() >= 3);
    check("settings.md", &parts);
}

/// An error as `psql` shows it with `\set VERBOSITY verbose`.
fn shown(error: &Error) -> String {
    let code = error.sqlstate();
    let (severity, message, detail) = match error {
        Error::SessionLocksWarn { .. } | Error::NoNames => ("WARNING", error.to_string(), error.detail()),
        // The server's own message.
        Error::HoldLimitOverrun { .. } => {
            ("FATAL", "terminating connection due to administrator command".into(), Some(format!("The {error}.")))
        }
        _ => ("ERROR", error.to_string(), error.detail()),
    };
    let detail = detail.map(|detail| format!("DETAIL:  {detail}\n")).unwrap_or_default();
    format!("```log\n{severity}:  {code}: {message}\n{detail}HINT:  {}\n```", error.hint())
}

/// Where an error's hint sends its reader: the page and the anchor in it.
fn place(error: &Error) -> (String, String) {
    let hint = error.hint();
    let (_, place) = hint.split_once("\nDocumentation: ").expect("a place to read on");
    let (page, anchor) = place.split_once('#').expect("an anchor");
    (page.to_owned(), anchor.to_owned())
}

#[test]
fn errors_are_those_that_are_raised() {
    let parts: Vec<(String, String)> =
        samples().iter().map(|error| (format!("error {}", place(error).1), shown(error))).collect();
    check("errors.md", &parts);
    let text = read(&page("errors.md"));
    // Each hint's anchor is a heading, and each heading of this level is such an anchor.
    let headings: BTreeSet<&str> = text.lines().filter_map(|line| line.strip_prefix("### ")).collect();
    let anchors: Vec<String> = samples().iter().map(|error| place(error).1).collect();
    assert_eq!(headings, anchors.iter().map(String::as_str).collect());
    for error in samples() {
        let (file, anchor) = place(&error);
        assert_eq!(docs().join(file), page("errors.md"));
        // The part stands under its heading, and the table at the top has it by its SQLSTATE.
        assert!(text.contains(&format!("### {anchor}\n\n{START}error {anchor} -->")), "{anchor}");
        let row = format!("| `{}` |", error.sqlstate());
        let row = text.lines().find(|line| line.starts_with(&row)).unwrap_or_else(|| panic!("no row {row}"));
        assert!(row.contains(&format!("(#{anchor})")), "{anchor} is not in {row}");
    }
}

#[test]
fn hints_reach_the_client() {
    let server = Server::shared();
    let mut session = server.session("reference");
    session.fails("select named_lock('')").is("22023").hint_has("\nDocumentation: reference/errors.md#empty-name");
    session.run("set named_locks.session_locks = warn; select named_lock('reference')");
    let warnings = session.notices();
    assert!(warnings[0].hint.ends_with("\nDocumentation: reference/errors.md#session-locks-warn"), "{warnings:#?}");
    // The end of a session: libpq waits for its last words.
    let mut psql = server.client("psql");
    psql.args(["-X", "-c", "select named_lock('to its end', hold_limit => '100 ms'), pg_sleep(60)"]);
    let output = psql.stderr(Stdio::piped()).output().expect("psql starts");
    let words = String::from_utf8_lossy(&output.stderr);
    for part in [
        "DETAIL:  The named lock \"to its end\" was held longer than its hold_limit of 100 ms.\nHINT:  ",
        "\nDocumentation: reference/errors.md#hold-limit-overrun\n",
    ] {
        assert!(words.contains(part), "{words}");
    }
}

fn markdown_files(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            markdown_files(&path, files);
        } else if path.extension().is_some_and(|extension| extension == "md") {
            files.push(path);
        }
    }
}

/// No page speaks of a function or setting that is not there.
#[test]
fn what_the_pages_name_is_there() {
    let mut admin = Server::shared().session("reference");
    let mut known: BTreeSet<String> =
        admin.column(&format!("select proname from pg_proc where pronamespace = {SCHEMA}")).into_iter().collect();
    admin.run("select named_lock_held('x')");
    known.extend(admin.column("select name from pg_settings where name like 'named\\_locks.%'"));
    let mut files = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md")];
    markdown_files(&docs(), &mut files);
    for file in files {
        let text = read(&file);
        let is_name = |character: char| character.is_ascii_alphanumeric() || "_.".contains(character);
        let ends = text.match_indices(|character: char| !is_name(character));
        for (end, after) in ends {
            let word = text[..end].rsplit(|character: char| !is_name(character)).next().unwrap_or_default();
            let word = word.trim_end_matches('.');
            let is_ours = match after {
                "(" => ["named_", "lease_", "lock_", "advisory_"].iter().any(|prefix| word.starts_with(prefix)),
                _ => {
                    word.starts_with("named_locks.") && !["so", "control", "sql"].iter().any(|end| word.ends_with(end))
                }
            };
            assert!(!is_ours || known.contains(word), "{} speaks of {word}", file.display());
        }
    }
}

/// Every object has a comment that fits into psql's tables, of one line.
#[test]
fn every_object_has_a_comment() {
    let mut admin = Server::shared().session("reference");
    let comments = admin.query(
        "with members as (
            select d.classid, d.objid from pg_depend as d
             where d.deptype = 'e' and d.refobjid = (select oid from pg_extension where extname = 'named_locks')
               -- Not what is there for tests.
               and (d.classid, d.objid) <> ('pg_namespace'::regclass, 'tests'::regnamespace::oid)
               and (pg_identify_object(d.classid, d.objid, 0)).schema is distinct from 'tests'
               -- Of types, those that have been made as such.
               and not exists (select from pg_type as t where d.classid = 'pg_type'::regclass and t.oid = d.objid
                                  and (t.typcategory = 'A' or t.typrelid <> 0))
         )
         select pg_describe_object(classid, objid, 0), obj_description(objid, classid::regclass::text::name) from members
         union all
         select pg_describe_object(m.classid, m.objid, a.attnum), col_description(m.objid, a.attnum)
           from members as m join pg_class as c on m.classid = 'pg_class'::regclass and c.oid = m.objid
           join pg_attribute as a on a.attrelid = c.oid and a.attnum > 0
          where c.relkind <> 'S'
         union all
         select pg_describe_object('pg_trigger'::regclass, t.oid, 0), obj_description(t.oid, 'pg_trigger')
           from members as m join pg_trigger as t on m.classid = 'pg_class'::regclass and t.tgrelid = m.objid
          where not t.tgisinternal
         union all
         select 'extension', obj_description(oid, 'pg_extension') from pg_extension where extname = 'named_locks'"
    );
    let comments = comments.expect("the comments");
    assert!(comments.len() > 100);
    for row in &comments {
        let object = row.get(0).expect("an object");
        let comment = row.get(1).unwrap_or_else(|| panic!("{object} has no comment"));
        assert!(!comment.contains('\n') && !comment.ends_with('.'), "{object}: {comment}");
        assert!(comment.len() <= COMMENT, "{object}: {} bytes: {comment}", comment.len());
    }
}

/// What psql answers to one of its own commands: the second column of its table, the name, and all of it.
fn psql(server: &Server, command: &str) -> (Vec<String>, String) {
    let mut psql = server.client("psql");
    let shown = run(psql.args(["-X", "-A", "-t", "-c", command]).stdout(Stdio::piped()).stderr(Stdio::piped()));
    let names = shown.lines().filter_map(|line| line.split('|').nth(1)).map(str::to_owned).collect();
    (names, shown)
}

/// What is for users stands where they look, and nothing else is in the way.
#[test]
fn what_psql_shows() {
    let server = Server::shared().new_database("psql", "UTF8");
    let functions = |pattern: &str| {
        let (mut names, _) = psql(&server, &format!("\\df {pattern}"));
        names.dedup();
        names
    };
    assert_eq!(
        functions("named_*"),
        [
            "named_lock",
            "named_lock_all",
            "named_lock_any",
            "named_lock_convert",
            "named_lock_extend",
            "named_lock_held",
            "named_lock_key",
            "named_lock_strict",
            "named_lock_tree",
            "named_lock_wait",
            "named_semaphore",
            "named_semaphore_release",
            "named_unlock",
            "named_unlock_all",
            "named_unlock_tree",
            "named_xact_lock",
            "named_xact_lock_all",
            "named_xact_lock_any",
            "named_xact_lock_strict",
            "named_xact_lock_tree",
        ]
    );
    assert_eq!(
        functions("lease_*"),
        [
            "lease_acquire",
            "lease_acquire_wait",
            "lease_break",
            "lease_check",
            "lease_guard",
            "lease_holder",
            "lease_release",
            "lease_renew",
            "lease_request",
        ]
    );
    assert_eq!(functions("lock_*"), ["lock_domain_drop", "lock_domain_set", "lock_graph", "lock_stats_reset"]);
    assert_eq!(
        functions("advisory_*"),
        ["advisory_lock", "advisory_lock_strict", "advisory_xact_lock", "advisory_xact_lock_strict"]
    );
    let (views, text) = psql(&server, "\\dv+");
    assert_eq!(views, ["lock_domains", "lock_holders", "lock_stats", "lock_waiters"]);
    assert!(text.contains("|who waits: "), "{text}");
    // What TAB offers after FROM, or `lease` and `lock_`: tables and sequences of ours begin with an underscore.
    let (relations, _) = psql(&server, "\\dts");
    assert_eq!(relations, ["_lease", "_lease_timeline", "_lease_token", "_lock_domain"]);
    let (types, _) = psql(&server, "\\dT");
    assert_eq!(types, ["named_lock_mode"]);
    let (_, text) = psql(&server, "\\dx named_locks");
    assert!(text.contains("|locks with names and timeouts"), "{text}");
    // All that the extension has, by kind and name, as an administrator sees it before DROP EXTENSION.
    let (_, text) = psql(&server, "\\dx+ named_locks");
    for object in [
        "function named_lock(text,interval,named_lock_mode,interval,boolean)",
        "function named_lock_wait(text,interval,named_lock_mode,interval,boolean,boolean)",
        "sequence _lease_token",
        "table _lease",
        "type named_lock_mode",
        "view lock_holders",
    ] {
        assert!(text.lines().any(|line| line == object), "{object} is not in {text}");
    }
}
