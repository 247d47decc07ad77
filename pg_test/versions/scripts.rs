//! The scripts themselves: frozen once they are released, and each beginning with the question to the library.

use super::{CURRENT, database_with, extension_folder, install_script, released, sql_folder};
use crate::pg_test::support::Server;
use std::collections::{BTreeMap, BTreeSet};

fn read(path: &std::path::Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The parts of a script that pgrx has made, without its comments about where each comes from, which change with any line
/// of the source, and without those that say nothing or are only for tests. Their order is only given as far as they depend on each
/// other.
fn parts(script: &str) -> BTreeSet<String> {
    script
        .split("/* <begin connected objects> */")
        .skip(1)
        .map(|part| part.split("/* </end connected objects> */").next().unwrap_or(part))
        .filter(|part| !part.contains("-- Skipped due to `#[pgrx(sql = false)]`"))
        .filter(|part| !part.contains("named_locks::pg_test::") && !part.contains("CREATE SCHEMA"))
        .map(|part| part.lines().filter(|line| !line.starts_with("-- src/")).collect::<Vec<_>>().join("\n"))
        .map(|part| part.trim().to_owned())
        .collect()
}

#[test]
fn the_script_of_this_version_is_frozen_as_it_is_built() {
    let frozen = sql_folder().join("install").join(install_script(CURRENT));
    assert!(frozen.exists(), "{} is missing: make freeze", frozen.display());
    Server::shared();
    let (frozen, built) = (parts(&read(&frozen)), parts(&read(&extension_folder().join(install_script(CURRENT)))));
    let lines = |parts: &BTreeSet<String>, others: &BTreeSet<String>, sign: char| -> Vec<String> {
        let there: BTreeSet<&str> = others.iter().flat_map(|part| part.lines()).collect();
        let changed = parts.difference(others).flat_map(|part| part.lines()).filter(|line| !there.contains(line));
        changed.map(|line| format!("{sign}{line}")).collect()
    };
    let changes = [lines(&frozen, &built, '-'), lines(&built, &frozen, '+')].concat().join("\n");
    assert!(
        frozen == built,
        "it has changed since it was frozen: see to the update script, and make freeze\n{changes}"
    );
}

/// The script's first statement.
#[test]
fn scripts_ask_the_library_first() {
    let question = read(&sql_folder().join("library.sql"));
    assert!(question.contains(&format!("version CONSTANT pg_catalog.text := '{CURRENT}';")), "{question}");
    let mut updates = 0;
    for file in std::fs::read_dir(sql_folder()).expect("sql/") {
        let path = file.expect("a file").path();
        let name = path.file_name().and_then(std::ffi::OsStr::to_str).expect("UTF-8");
        if name.starts_with("named_locks--") && name.ends_with(&format!("--{CURRENT}.sql")) {
            assert!(read(&path).starts_with(&question), "{name} does not begin with library.sql");
            updates += 1;
        }
    }
    assert!(updates > 0, "no script updates to {CURRENT}");
    let script = read(&sql_folder().join("install").join(install_script(CURRENT)));
    let first = script.find("DO LANGUAGE plpgsql").expect("the question to the library");
    assert!(!script[..first].contains(';'), "something comes before the question to the library");
    assert!(script[first..].starts_with(question[question.find("DO ").expect("DO")..].trim_end()));
}

/// A library meets objects of other versions: what a function of it is given and returns never changes. One with other
/// arguments has another name in the library, beside the old one.
#[test]
fn functions_of_the_library_keep_their_signatures() {
    let mut known: BTreeMap<String, (String, &str)> = BTreeMap::new();
    for version in released().iter().map(String::as_str).chain([CURRENT]) {
        let mut session = database_with(Some(version), "public").session("signatures");
        let rows = session.run(
            "select prosrc,
                    format('%s %s%s of %s, %s', prokind, case when proretset then 'set of ' end, prorettype::regtype,
                           proargtypes::regtype[], coalesce(proallargtypes, '{}')::regtype[])
               from pg_proc
              where pronamespace = 'public'::regnamespace and probin = 'named_locks'",
        );
        assert!(rows.len() > 40, "{} functions in {version}", rows.len());
        for row in rows {
            let (name, signature) = (row.get(0).expect("a name"), row.get(1).expect("a signature"));
            let (before, since) = known.entry(name.to_owned()).or_insert_with(|| (signature.to_owned(), version));
            assert_eq!(before, signature, "{name}: not the same in {since} and in {version}");
        }
    }
}
