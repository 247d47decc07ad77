//! Versions: of the extension's objects, and of the library.
//!
//! `sql/install/` has the script of each version as it was released. From each of them the extension is updated to today's,
//! with locks and leases held, and compared with what a new installation makes.

mod catalogue;
mod library;
mod scripts;
mod update;

use super::support::{Server, Session};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

const CURRENT: &str = env!("CARGO_PKG_VERSION");

/// Schemas that the extension is created in; some need quoting.
const SCHEMAS: [&str; 3] = ["public", "Odd Schema", "select"];

/// The folder with the sources of the scripts.
fn sql_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("sql")
}

/// The name of the script that makes a version's objects.
fn install_script(version: &str) -> String {
    format!("named_locks--{version}.sql")
}

/// The versions before this one, oldest first.
fn released() -> &'static [String] {
    static RELEASED: OnceLock<Vec<String>> = OnceLock::new();
    RELEASED.get_or_init(|| {
        let folder = sql_folder().join("install");
        let files = std::fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
        let mut versions: Vec<String> = files
            .map(|file| file.expect("a file").file_name().into_string().expect("UTF-8"))
            .filter_map(|name| Some(name.strip_prefix("named_locks--")?.strip_suffix(".sql")?.to_owned()))
            .filter(|version| version != CURRENT)
            .collect();
        versions.sort_by_key(|version| version.split('.').map(|part| part.parse().unwrap_or(0)).collect::<Vec<u32>>());
        assert!(!versions.is_empty(), "no script of a released version in {}", folder.display());
        for version in &versions {
            let script = install_script(version);
            let text = std::fs::read_to_string(folder.join(&script)).expect("a readable script");
            let script = Script::new(&script, &text);
            pgrx_tests::add_shutdown_hook(move || drop(script));
        }
        versions
    })
}

/// Where the server looks for extensions' scripts.
fn extension_folder() -> PathBuf {
    let share = Server::shared().session("share").text("select setting from pg_config where name = 'SHAREDIR'");
    PathBuf::from(share).join("extension")
}

/// A script of the extension in the server's folder; removed when dropped.
struct Script(PathBuf);

impl Script {
    fn new(name: &str, text: &str) -> Script {
        let path = extension_folder().join(name);
        std::fs::write(&path, text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        Script(path)
    }
}

impl Drop for Script {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn quoted(identifier: &str) -> String {
    format!("\"{}\"", identifier.replace('"', "\"\""))
}

/// A new database with a version of the extension in a schema, which is the search_path of its sessions; None: without the
/// extension.
fn database_with(version: Option<&str>, schema: &str) -> Server {
    released();
    let database = Server::shared().new_database("versions", "UTF8");
    let schema = quoted(schema);
    let mut admin = database.session("admin");
    admin.run(&format!(
        "drop extension named_locks; create schema if not exists {schema}; \
         alter database {} set search_path = {schema}",
        database.dbname
    ));
    if let Some(version) = version {
        admin.run(&format!("create extension named_locks schema {schema} version '{version}'"));
    }
    database
}

/// The version of the extension's objects.
#[track_caller]
fn version(session: &mut Session) -> String {
    session.text("select extversion from pg_extension where extname = 'named_locks'")
}
