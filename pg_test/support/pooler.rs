//! A PgBouncer before a server.

use super::machine::{free_port, program};
use super::{Dir, Server, Session, as_server_user, until};
use postgres::{NoTls, SimpleQueryMessage};
use std::ops::Deref;

/// A PgBouncer before a server; it is stopped when dropped. Sessions opened on it go through it.
pub struct Pooler {
    through: Server,
    dir: Dir,
}

impl Deref for Pooler {
    type Target = Server;

    fn deref(&self) -> &Server {
        &self.through
    }
}

impl Pooler {
    /// `mode`: `transaction`, `session` or `statement`; `size`: how many server sessions for each role and database;
    /// `roles`: who else than the superuser may come in.
    pub fn new(server: &Server, mode: &str, size: u32, roles: &[&str]) -> Pooler {
        Pooler::with_settings(server, mode, size, roles, "")
    }

    /// The same with further lines for the section `[pgbouncer]`.
    pub fn with_settings(server: &Server, mode: &str, size: u32, roles: &[&str], settings: &str) -> Pooler {
        let dir = Dir::new();
        let folder = dir.path().display();
        let users: String = std::iter::once(server.user.as_str())
            .chain(roles.iter().copied())
            .map(|role| format!("\"{role}\" \"\"\n"))
            .collect();
        dir.write("users", &users);
        for attempt in 1.. {
            let port = free_port();
            dir.write(
                "ini",
                format!(
                    "[databases]\n\
                     * = host={host} port={server_port}\n\
                     [pgbouncer]\n\
                     listen_addr = 127.0.0.1\n\
                     listen_port = {port}\n\
                     unix_socket_dir =\n\
                     auth_type = trust\n\
                     admin_users = {admin}\n\
                     auth_file = {folder}/users\n\
                     pool_mode = {mode}\n\
                     default_pool_size = {size}\n\
                     logfile = {folder}/log\n\
                     pidfile = {folder}/pid\n\
                     {settings}\n",
                    admin = server.user,
                    host = server.host,
                    server_port = server.port,
                ),
            );
            let output = as_server_user(program("pgbouncer"))
                .args(["-q", "-d"])
                .arg(dir.path().join("ini"))
                .output()
                .expect("run pgbouncer");
            if output.status.success() {
                let through = Server { host: "127.0.0.1".into(), port, ..server.clone() };
                until("the pooler answers", || Session::open(through.config("hello")).is_ok());
                return Pooler { through, dir };
            }
            // Another process may have taken the port meanwhile.
            assert!(attempt < 5, "{}", String::from_utf8_lossy(&output.stderr));
        }
        unreachable!("the loop returns or panics")
    }

    /// Runs a command on PgBouncer's own console.
    pub fn console(&self, command: &str) -> Vec<SimpleQueryMessage> {
        let mut console = self.database("pgbouncer").config("console").connect(NoTls).expect("PgBouncer's console");
        console.simple_query(command).expect("a command of PgBouncer's")
    }

    /// How many clients wait for a server connection.
    pub fn waiting_clients(&self) -> i64 {
        let waiting = |message| match message {
            SimpleQueryMessage::Row(row) => row.get("cl_waiting").and_then(|count| count.parse::<i64>().ok()),
            _ => None,
        };
        self.console("show pools").into_iter().filter_map(waiting).sum()
    }

    /// Waits until the pooler has noticed that so many clients went without saying good-bye.
    #[track_caller]
    pub fn until_noticed(&self, clients: usize) {
        until("the pooler has noticed that its client is gone", || {
            self.dir.read("log").matches("client unexpected eof").count() >= clients
        });
    }
}

impl Drop for Pooler {
    fn drop(&mut self) {
        let pid = self.dir.read("pid");
        let _ = as_server_user("kill").arg(pid.trim()).output();
    }
}
