//! A server of one test.

use super::machine::free_port;
use super::{Dir, Server, as_server_user, run, until};
use std::ops::Deref;
use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;

/// A server of one test, which may crash, restart, promote and configure it. Stopped and removed when dropped.
pub struct Cluster {
    server: Server,
    dir: Dir,
}

impl Deref for Cluster {
    type Target = Server;

    fn deref(&self) -> &Server {
        &self.server
    }
}

impl Cluster {
    /// A new server with these lines of configuration, started, and with the extension in its database `postgres`.
    pub fn new(conf: &[&str]) -> Cluster {
        let cluster = Cluster::bare(conf);
        cluster.session("create extension").run(&format!("create extension {}", env!("CARGO_PKG_NAME")));
        cluster
    }

    /// The same without the extension.
    pub fn bare(conf: &[&str]) -> Cluster {
        // Its boot installs the extension's files.
        let shared = Server::shared();
        let dir = Dir::new();
        run(as_server_user("cp").arg("-a").arg(template().join("data")).arg(dir.path()));
        let server = Server {
            host: "127.0.0.1".into(),
            port: 0,
            user: shared.user.clone(),
            dbname: "postgres".into(),
            bin_dir: shared.bin_dir.clone(),
        };
        Cluster::configured(server, dir, conf)
    }

    /// Writes the configuration, finds a port and starts.
    fn configured(server: Server, dir: Dir, conf: &[&str]) -> Cluster {
        let mut cluster = Cluster { server, dir };
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
            cluster.dir.write("data/test.conf", &lines.join("\n"));
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
        let mut command = self.program("pg_ctl");
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
        let dir = Dir::new();
        run(self.client_program("pg_basebackup").arg("-D").arg(dir.path().join("data")).args([
            "-R",
            "-X",
            "stream",
            "-c",
            "fast",
            "--no-sync",
        ]));
        let mut lines = vec!["hot_standby = on"];
        lines.extend(conf);
        Cluster::configured(self.server.clone(), dir, &lines)
    }

    /// Waits until a standby has replayed all that this server has written.
    pub fn until_replayed_by(&self, standby: &Cluster) {
        let end = self.session("position").text("select pg_current_wal_lsn()");
        let mut session = standby.session("replay");
        until("the standby has replayed it all", || {
            session.flag(&format!("select coalesce(pg_last_wal_replay_lsn() >= '{end}', false)"))
        });
    }

    /// Makes a standby a primary.
    pub fn promote(&self) {
        run(&mut self.pg_ctl("promote"));
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

/// A folder with a fresh `data`, made once, to be copied.
fn template() -> PathBuf {
    static TEMPLATE: OnceLock<PathBuf> = OnceLock::new();
    TEMPLATE
        .get_or_init(|| {
            let shared = Server::shared();
            let dir = Dir::new();
            let path = dir.path().to_owned();
            let data = path.join("data");
            run(as_server_user(shared.bin_dir.join("initdb"))
                .arg("-D")
                .arg(&data)
                .args(["-U", &shared.user, "-A", "trust", "--no-sync"])
                .args(["--locale=C", "--encoding=UTF8"]));
            run(as_server_user("sh").args(["-c", "echo \"include 'test.conf'\" >> \"$0\"/postgresql.conf"]).arg(&data));
            pgrx_tests::add_shutdown_hook(move || drop(dir));
            path
        })
        .clone()
}
