//! Runs `isolation/specs` by PostgreSQL's own isolation tester, and compares with `isolation/expected`.

use super::support::{Server, run};
use std::io::Write;
use std::path::Path;
use std::process::Command;

#[test]
fn isolation_specs() {
    let server = Server::shared();
    let library_dir = run(Command::new(server.bin_dir.join("pg_config")).arg("--pkglibdir"));
    let tester = Path::new(library_dir.trim()).join("pgxs/src/test/isolation/pg_isolation_regress");
    if !tester.is_file() {
        // Past the test runner, which shows what is printed only of a test that fails.
        let notice = format!("NOTICE: isolation specs not run: this server comes without {}\n", tester.display());
        std::io::stderr().write_all(notice.as_bytes()).expect("write to stderr");
        return;
    }
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("pg_test/isolation");
    let mut specs: Vec<String> = std::fs::read_dir(here.join("specs"))
        .expect("the folder of specs")
        .map(|file| file.expect("a file").path().file_stem().expect("a name").to_string_lossy().into_owned())
        .collect();
    specs.sort();
    assert!(!specs.is_empty());

    let database = server.new_database("isolation", "UTF8");
    // The tester is a client: its folder belongs to who runs the tests.
    let results = std::env::temp_dir().join(format!("nl{}-isolation", std::process::id()));
    std::fs::create_dir(&results).expect("a folder for results");
    let output = Command::new(&tester)
        .arg("--use-existing")
        .arg(format!("--dbname={}", database.dbname))
        .arg(format!("--host={}", server.host))
        .arg(format!("--port={}", server.port))
        .arg(format!("--user={}", server.user))
        .arg(format!("--bindir={}", server.bin_dir.display()))
        .arg(format!("--inputdir={}", here.display()))
        .arg(format!("--outputdir={}", results.display()))
        .args(&specs)
        .env("PGUSER", &server.user)
        .output()
        .expect("start the isolation tester");
    let differences = std::fs::read_to_string(results.join("regression.diffs")).unwrap_or_default();
    std::fs::remove_dir_all(&results).expect("remove the results");
    if !output.status.success() {
        panic!("{}{}\n{differences}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    }
    // What ran is what there is.
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(printed.contains(&format!("All {} tests passed", specs.len())), "{printed}");
}
