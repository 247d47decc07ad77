//! A server of one test.

use super::machine::free_port;
use super::{Dir, Server, as_server_user, run, until};
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// A server of one test, which may crash, restart, promote and configure it. Stopped and removed when dropped.
pub struct Cluster {
    server: Server,
    dir: Dir,
    /// What its processes find in their environment, as `NAME=value`.
    environment: Vec<String>,
}

impl Deref for Cluster {
    type Target = Server;

    fn deref(&self) -> &Server {
        &self.server
    }
}

/// A commit that waits for the disk, and with it all before it: releases of leases do not.
pub const AS_FAR_AS_THE_DISK: &str = "select pg_logical_emit_message(true, 'named_locks', '')";

impl Cluster {
    /// A new server with these lines of configuration, started, and with the extension in its database `postgres`.
    pub fn new(conf: &[&str]) -> Cluster {
        Cluster::with_environment(conf, &[])
    }

    /// The same, its processes with these variables (`NAME=value`) in their environment.
    pub fn with_environment(conf: &[&str], environment: &[String]) -> Cluster {
        let cluster = Cluster::configured(server_of_tests(), copy_of(template()), conf, environment);
        cluster.session("create extension").run(&format!("create extension {}", env!("CARGO_PKG_NAME")));
        cluster
    }

    /// A new server without the extension.
    pub fn bare(conf: &[&str]) -> Cluster {
        Cluster::configured(server_of_tests(), copy_of(template()), conf, &[])
    }

    /// The same by the programs of another installation.
    pub fn of_programs(bin_dir: &Path, conf: &[&str]) -> Cluster {
        let server = Server { bin_dir: bin_dir.to_owned(), ..server_of_tests() };
        let dir = Dir::new();
        initdb(&server, dir.path(), &[]);
        Cluster::configured(server, dir, conf, &[])
    }

    /// What pg_upgrade makes of this server, which is stopped: one of this test's version, started.
    pub fn upgraded(&self, conf: &[&str]) -> Cluster {
        let server = server_of_tests();
        let dir = Dir::new();
        initdb(&server, dir.path(), &no_checksums(&server));
        let mut pg_upgrade = as_server_user(server.bin_dir.join("pg_upgrade"));
        // It writes into its working directory.
        pg_upgrade.current_dir(dir.path());
        pg_upgrade.arg("--old-bindir").arg(&self.server.bin_dir).arg("--new-bindir").arg(&server.bin_dir);
        pg_upgrade.arg("--old-datadir").arg(self.data()).arg("--new-datadir").arg(dir.path().join("data"));
        pg_upgrade.arg("--socketdir").arg(dir.path()).args(["--username", &server.user]);
        pg_upgrade.args(["--old-port", &free_port().to_string(), "--new-port", &free_port().to_string()]);
        let output = pg_upgrade.output().expect("run pg_upgrade");
        if !output.status.success() {
            // They go with the folder.
            let logs = "tail -n 30 \"$0\"/data/pg_upgrade_output.d/*/log/*";
            let logs = run(as_server_user("sh").args(["-c", logs]).arg(dir.path()));
            panic!("pg_upgrade: {}\n{}\n{logs}", output.status, String::from_utf8_lossy(&output.stdout));
        }
        Cluster::configured(server, dir, conf, &[])
    }

    /// Writes the configuration, finds a port and starts.
    fn configured(server: Server, dir: Dir, conf: &[&str], environment: &[String]) -> Cluster {
        let mut cluster = Cluster { server, dir, environment: environment.to_vec() };
        for attempt in 1.. {
            cluster.server.port = free_port();
            let own = [
                "listen_addresses = '127.0.0.1'".to_owned(),
                format!("port = {}", cluster.server.port),
                format!("unix_socket_directories = '{}'", cluster.dir.path().display()),
                "logging_collector = off".to_owned(),
                "log_line_prefix = '[%p] '".to_owned(),
                "timezone = 'UTC'".to_owned(),
                // The operating system doesn't crash here, so what was written is there after any crash of the server.
                "fsync = off".to_owned(),
                "max_prepared_transactions = 20".to_owned(),
                "max_connections = 50".to_owned(),
                "wal_level = replica".to_owned(),
                "max_wal_senders = 5".to_owned(),
                "shared_buffers = '16MB'".to_owned(),
            ];
            let lines: Vec<&str> = own.iter().map(String::as_str).chain(conf.iter().copied()).collect();
            cluster.dir.write("data/test.conf", lines.join("\n"));
            match cluster.try_start() {
                Ok(()) => break,
                // Another process may have taken the port meanwhile.
                Err(log) => assert!(attempt < 5, "the server doesn't start:\n{log}"),
            }
        }
        cluster
    }

    /// Where its files are.
    pub fn data(&self) -> PathBuf {
        self.dir.path().join("data")
    }

    /// One of its programs (`pg_dump`, …), run by the user who runs the server.
    pub fn program(&self, name: &str) -> Command {
        as_server_user(self.server.bin_dir.join(name))
    }

    /// One of its programs that is a client, ready to connect.
    pub fn client_program(&self, name: &str) -> Command {
        let mut command = self.program(name);
        let port = self.server.port.to_string();
        command.args(["-h", &self.server.host, "-p", &port, "-U", &self.server.user]);
        command
    }

    fn pg_ctl(&self, action: &str) -> Command {
        let mut command = as_server_user("env");
        command.args(&self.environment).arg(self.server.bin_dir.join("pg_ctl"));
        command.arg(action).arg("-D").arg(self.data()).args(["-w", "-t", "120", "-s"]);
        command
    }

    fn try_start(&self) -> Result<(), String> {
        let output = self.pg_ctl("start").arg("-l").arg(self.dir.path().join("log")).output().expect("run");
        if output.status.success() { Ok(()) } else { Err(self.log()) }
    }

    pub fn start(&self) {
        if let Err(log) = self.try_start() {
            panic!("the server doesn't start:\n{log}");
        }
    }

    /// An orderly stop; sessions are ended.
    pub fn stop(&self) {
        run(self.pg_ctl("stop").args(["-m", "fast"]));
    }

    /// A stop without a checkpoint: the next start is crash recovery.
    pub fn stop_immediate(&self) {
        run(self.pg_ctl("stop").args(["-m", "immediate"]));
    }

    pub fn restart(&self) {
        self.stop();
        self.start();
    }

    /// All that the server has logged.
    pub fn log(&self) -> String {
        self.dir.read("log")
    }

    /// A hot standby of this server, streaming, with further lines of configuration.
    pub fn standby(&self, conf: &[&str]) -> Cluster {
        let backup = self.backup();
        let from = format!(
            "primary_conninfo = 'host={} port={} user={}'",
            self.server.host, self.server.port, self.server.user
        );
        let mut lines = vec!["hot_standby = on", &from];
        lines.extend(conf);
        backup.into_server("standby.signal", &lines)
    }

    /// A base backup of this server, with the WAL that it needs.
    pub fn backup(&self) -> Backup {
        let dir = Dir::new();
        run(self.client_program("pg_basebackup").arg("-D").arg(dir.path().join("data")).args([
            "-X",
            "stream",
            "-c",
            "fast",
            "--no-sync",
        ]));
        Backup { server: self.server.clone(), dir }
    }

    /// Waits until a standby has replayed all that this server has written.
    pub fn until_replayed_by(&self, standby: &Cluster) {
        let mut position = self.session("position");
        position.run(AS_FAR_AS_THE_DISK);
        let end = position.text("select pg_current_wal_lsn()");
        let mut session = standby.session("replay");
        until("the standby has replayed it all", || {
            session.flag(&format!("select coalesce(pg_last_wal_replay_lsn() >= '{end}', false)"))
        });
    }

    /// Makes a standby a primary.
    pub fn promote(&self) {
        run(&mut self.pg_ctl("promote"));
    }

    /// Stops and starts it as a standby of nobody and promotes it: it goes on, on a new timeline.
    pub fn to_new_timeline(&self) {
        self.stop();
        self.dir.write("data/standby.signal", "");
        self.start();
        self.promote();
    }

    /// The timeline on which it writes.
    pub fn timeline(&self) -> i64 {
        self.session("timeline").int("select ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::int")
    }

    /// Whether it is in recovery.
    pub fn in_recovery(&self) -> bool {
        self.session("recovery").flag("select pg_is_in_recovery()")
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let _ = self.pg_ctl("stop").args(["-m", "immediate"]).output();
    }
}

/// A base backup: of one, several servers can be made.
pub struct Backup {
    server: Server,
    dir: Dir,
}

impl Backup {
    /// A server made of a copy of it. `signal` says how it starts: `standby.signal`, `recovery.signal`.
    pub fn server(&self, signal: &str, conf: &[&str]) -> Cluster {
        Backup { server: self.server.clone(), dir: copy_of(self.dir.path()) }.into_server(signal, conf)
    }

    fn into_server(self, signal: &str, conf: &[&str]) -> Cluster {
        self.dir.write(&format!("data/{signal}"), "");
        Cluster::configured(self.server, self.dir, conf, &[])
    }
}

/// A server like the shared one, with no port yet.
fn server_of_tests() -> Server {
    // Its boot installs the extension's files.
    let shared = Server::shared();
    Server {
        host: "127.0.0.1".into(),
        port: 0,
        user: shared.user.clone(),
        dbname: "postgres".into(),
        bin_dir: shared.bin_dir.clone(),
    }
}

/// A folder with a copy of this one's `data`.
fn copy_of(folder: &Path) -> Dir {
    let dir = Dir::new();
    run(as_server_user("cp").arg("-a").arg(folder.join("data")).arg(dir.path()));
    dir
}

/// Makes a fresh `data` in a folder.
fn initdb(server: &Server, folder: &Path, options: &[&str]) {
    let data = folder.join("data");
    run(as_server_user(server.bin_dir.join("initdb"))
        .arg("-D")
        .arg(&data)
        .args(["-U", &server.user, "-A", "trust", "--no-sync"])
        .args(["--locale=C", "--encoding=UTF8"])
        .args(options));
    let include = "touch \"$0\"/test.conf && echo \"include 'test.conf'\" >> \"$0\"/postgresql.conf";
    run(as_server_user("sh").args(["-c", include]).arg(&data));
}

/// For an initdb that makes checksums unless told not to: both sides of an upgrade have to be alike.
fn no_checksums(server: &Server) -> Vec<&'static str> {
    let help = run(as_server_user(server.bin_dir.join("initdb")).arg("--help"));
    if help.contains("--no-data-checksums") { vec!["--no-data-checksums"] } else { vec![] }
}

/// A folder with a fresh `data`, made once, to be copied.
fn template() -> &'static Path {
    static TEMPLATE: OnceLock<PathBuf> = OnceLock::new();
    TEMPLATE.get_or_init(|| {
        let dir = Dir::new();
        let path = dir.path().to_owned();
        initdb(Server::shared(), &path, &[]);
        pgrx_tests::add_shutdown_hook(move || drop(dir));
        path
    })
}
