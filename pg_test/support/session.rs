//! Servers and sessions on them.

use super::{PATIENCE, Stopped, Target, stop_process, unique_ident, until};
use postgres::{Client, Config, NoTls, SimpleQueryMessage, SimpleQueryRow};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The rows of a result, each value as text.
pub type Rows = Vec<SimpleQueryRow>;

/// A server that takes connections.
#[derive(Clone, Debug)]
pub struct Server {
    pub host: String,
    pub port: u16,
    /// The superuser that owns it, of the same name as the operating system's user who runs it.
    pub user: String,
    /// The database in which the extension is created.
    pub dbname: String,
    /// Where its programs are.
    pub bin_dir: PathBuf,
}

impl Server {
    /// The server that pgrx starts for the tests, with the extension. Started at first use, stopped at the end.
    pub fn shared() -> &'static Server {
        static SHARED: OnceLock<Option<Server>> = OnceLock::new();
        // One test tells why it doesn't start, the others only that.
        let mut failure = None;
        let server = SHARED.get_or_init(|| match std::panic::catch_unwind(Server::boot) {
            Ok(server) => Some(server),
            Err(panic) => {
                failure = Some(panic);
                None
            }
        });
        if let Some(panic) = failure {
            std::panic::resume_unwind(panic);
        }
        server.as_ref().expect("the test server didn't start: see the first failure")
    }

    fn boot() -> Server {
        pgrx_tests::run_test("boot", None, crate::pg_test::postgresql_conf_options()).expect("the test server starts");
        let (mut client, _) = pgrx_tests::client().expect("the test server answers");
        let row = client
            .query_one(
                "select current_setting('port')::int, \
                            (select setting from pg_config where name = 'BINDIR')",
                &[],
            )
            .expect("the test server knows itself");
        Server {
            host: "localhost".into(),
            port: u16::try_from(row.get::<_, i32>(0)).expect("a port"),
            user: pgrx_tests::get_pg_user(),
            dbname: pgrx_tests::get_pg_dbname().into(),
            bin_dir: row.get::<_, String>(1).into(),
        }
    }

    /// The same server, another database.
    pub fn database(&self, dbname: &str) -> Server {
        Server { dbname: dbname.into(), ..self.clone() }
    }

    /// The same server, a new database of that encoding, with the extension.
    pub fn new_database(&self, stem: &str, encoding: &str) -> Server {
        let name = unique_ident(stem);
        self.session("create database").run(&format!(
            "create database {name} template template0 encoding '{encoding}' lc_collate 'C' lc_ctype 'C'"
        ));
        let database = self.database(&name);
        database.session("create extension").run(&format!("create extension {}", env!("CARGO_PKG_NAME")));
        database
    }

    /// Creates a role that can log in and gives its name.
    pub fn new_role(&self, stem: &str) -> String {
        let name = unique_ident(stem);
        self.session("create role").run(&format!("create role {name} login"));
        name
    }

    /// How to connect, for tests that change something about it; open it with [`Session::open`].
    pub fn config(&self, application_name: &str) -> Config {
        let mut config = Config::new();
        config
            .host(&self.host)
            .port(self.port)
            .user(&self.user)
            .dbname(&self.dbname)
            .application_name(application_name);
        config
    }

    /// A client program (`psql`, …) of this server's version, run by the user who runs the tests.
    pub fn client(&self, program: &str) -> Command {
        let mut command = Command::new(self.bin_dir.join(program));
        command
            .env("PGHOST", &self.host)
            .env("PGPORT", self.port.to_string())
            .env("PGUSER", &self.user)
            .env("PGDATABASE", &self.dbname)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        command
    }

    /// A new session of the superuser.
    #[track_caller]
    pub fn session(&self, application_name: &str) -> Session {
        Session::open(self.config(application_name)).expect("a new session")
    }

    /// A new session of another role.
    #[track_caller]
    pub fn session_as(&self, role: &str, application_name: &str) -> Session {
        let mut config = self.config(application_name);
        config.user(role);
        Session::open(config).expect("a new session")
    }
}

/// A client's session.
pub struct Session {
    pub client: Client,
    /// The server process.
    pub pid: i32,
    notices: Arc<Mutex<Vec<SqlError>>>,
}

impl Session {
    pub fn open(mut config: Config) -> Result<Session, SqlError> {
        let notices = Arc::new(Mutex::new(Vec::new()));
        let seen = notices.clone();
        config.notice_callback(move |notice| {
            seen.lock().expect("no panic while it is held").push(SqlError::from_server(&notice));
        });
        let client = config.connect(NoTls).map_err(SqlError::from)?;
        let mut session = Session { client, pid: 0, notices };
        let rows = session.query("select pg_backend_pid()")?;
        session.pid = rows[0].get(0).and_then(|pid| pid.parse().ok()).expect("a process id");
        Ok(session)
    }

    /// Runs a statement (or several) by the simple protocol.
    pub fn query(&mut self, sql: &str) -> Result<Rows, SqlError> {
        let messages = match self.client.simple_query(sql) {
            Ok(messages) => messages,
            Err(error) => {
                // The error comes before the transaction is rolled back; the answer to the next query comes after.
                let _ = self.client.simple_query("");
                return Err(error.into());
            }
        };
        let row = |message| match message {
            SimpleQueryMessage::Row(row) => Some(row),
            _ => None,
        };
        Ok(messages.into_iter().filter_map(row).collect())
    }

    /// The same; panics on an error.
    #[track_caller]
    pub fn run(&mut self, sql: &str) -> Rows {
        match self.query(sql) {
            Ok(rows) => rows,
            Err(error) => panic!("{sql}\n{error:#?}"),
        }
    }

    /// The one value of the one row; None is SQL's NULL.
    #[track_caller]
    pub fn maybe(&mut self, sql: &str) -> Option<String> {
        let rows = self.run(sql);
        assert_eq!(rows.len(), 1, "{sql}: one row is due");
        rows[0].get(0).map(str::to_owned)
    }

    /// The same, never NULL.
    #[track_caller]
    pub fn text(&mut self, sql: &str) -> String {
        self.maybe(sql).unwrap_or_else(|| panic!("{sql}: NULL"))
    }

    /// The same as a boolean.
    #[track_caller]
    pub fn flag(&mut self, sql: &str) -> bool {
        match self.text(sql).as_str() {
            "t" => true,
            "f" => false,
            other => panic!("{sql}: {other} is no boolean"),
        }
    }

    /// The same as a number.
    #[track_caller]
    pub fn int(&mut self, sql: &str) -> i64 {
        let text = self.text(sql);
        text.parse().unwrap_or_else(|_| panic!("{sql}: {text} is no whole number"))
    }

    /// Whether the server knows of a statement that it stands in a pipeline after others: 14 does since 14.7.
    pub fn knows_pipelines(&mut self) -> bool {
        self.int("show server_version_num") >= 140_007
    }

    /// The first column of all rows.
    #[track_caller]
    pub fn column(&mut self, sql: &str) -> Vec<String> {
        self.run(sql).iter().map(|row| row.get(0).unwrap_or("NULL").to_owned()).collect()
    }

    /// The error of a statement that has to fail.
    #[track_caller]
    pub fn fails(&mut self, sql: &str) -> SqlError {
        match self.query(sql) {
            Ok(rows) => panic!("{sql}\nshould have failed, and gave {rows:?}"),
            Err(error) => error,
        }
    }

    /// The warnings and notices since the last call of this.
    pub fn notices(&mut self) -> Vec<SqlError> {
        std::mem::take(&mut self.notices.lock().expect("no panic while it is held"))
    }

    /// Runs a statement in a thread, so that it can wait.
    pub fn background(self, sql: &str) -> Running<Result<Rows, SqlError>> {
        let sql = sql.to_owned();
        self.spawn(move |session| session.query(&sql))
    }

    /// Runs a piece of code with this session in a thread.
    pub fn spawn<T: Send + 'static>(mut self, work: impl FnOnce(&mut Session) -> T + Send + 'static) -> Running<T> {
        let pid = self.pid;
        let thread = std::thread::spawn(move || {
            let result = work(&mut self);
            (self, result)
        });
        Running { pid, thread }
    }

    /// Waits until a session sleeps in the queue of a lock.
    #[track_caller]
    pub fn until_waiting(&mut self, pid: i32) {
        until(&format!("process {pid} waits for a lock"), || self.is_waiting(pid));
    }

    /// Whether a session sleeps in the queue of a lock.
    #[track_caller]
    pub fn is_waiting(&mut self, pid: i32) -> bool {
        self.flag(&format!(
            "select exists (select from pg_locks where pid = {pid} and not granted) \
                and exists (select from pg_stat_activity where pid = {pid} and wait_event_type = 'Lock')"
        ))
    }

    /// Stops a session's process while it waits, until the guard is dropped.
    #[track_caller]
    pub fn stop_waiting(&mut self, pid: i32) -> Stopped {
        self.until_waiting(pid);
        stop_process(pid)
    }

    /// Waits until a session is gone from the server.
    #[track_caller]
    pub fn until_gone(&mut self, pid: i32) {
        until(&format!("process {pid} is gone"), || {
            self.int(&format!("select count(*) from pg_stat_activity where pid = {pid}")) == 0
        });
    }

    /// That a session holds nothing of the server's that VACUUM or CREATE INDEX CONCURRENTLY would wait for.
    #[track_caller]
    pub fn holds_no_snapshot(&mut self, pid: i32, what: &str) {
        assert_eq!(
            self.text(&format!(
                "select concat_ws(' ', 'xmin', backend_xmin, 'xid', backend_xid) from pg_stat_activity where pid = {pid}"
            )),
            "xmin xid",
            "{what}"
        );
    }

    /// How many advisory locks, ours and native ones, the lock manager has for a session.
    #[track_caller]
    pub fn locks_of(&mut self, pid: i32) -> i64 {
        self.int(&format!("select count(*) from pg_locks where locktype = 'advisory' and pid = {pid}"))
    }

    /// How many rows the lock manager has for a session and a lock: held (`granted`) or waited for.
    #[track_caller]
    pub fn rows_for(&mut self, target: &Target, pid: i32, granted: bool) -> i64 {
        self.int(&format!(
            "select count(*) from pg_locks where locktype = 'advisory' and pid = {pid} \
                and granted = {granted} and {}",
            target.in_pg_locks()
        ))
    }
}

/// Something that a session does in a thread.
pub struct Running<T> {
    pub pid: i32,
    thread: JoinHandle<(Session, T)>,
}

impl<T> Running<T> {
    pub fn finished(&self) -> bool {
        self.thread.is_finished()
    }

    /// Waits for its end and gives the session back; panics when it never ends.
    #[track_caller]
    pub fn end(self) -> (Session, T) {
        let start = Instant::now();
        while !self.thread.is_finished() {
            assert!(start.elapsed() < PATIENCE, "process {}: its statement never ended", self.pid);
            std::thread::sleep(Duration::from_millis(1));
        }
        self.thread.join().expect("no panic in the thread")
    }
}

/// An error or notice as a client sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SqlError {
    /// The SQLSTATE; `closed` when the connection went away without one.
    pub code: String,
    pub severity: String,
    pub message: String,
    pub detail: String,
    pub hint: String,
    pub context: String,
}

impl SqlError {
    fn from_server(error: &postgres::error::DbError) -> SqlError {
        let text = |text: Option<&str>| text.unwrap_or_default().to_owned();
        SqlError {
            code: error.code().code().to_owned(),
            severity: error.severity().to_owned(),
            message: error.message().to_owned(),
            detail: text(error.detail()),
            hint: text(error.hint()),
            context: text(error.where_()),
        }
    }

    #[track_caller]
    pub fn is(&self, code: &str) -> &Self {
        assert_eq!(self.code, code, "{self:#?}");
        self
    }

    #[track_caller]
    pub fn is_end_of_session(&self) -> &Self {
        assert!(["57P01", "closed"].contains(&self.code.as_str()), "{self:#?}");
        self
    }

    #[track_caller]
    pub fn message_has(&self, part: &str) -> &Self {
        assert!(self.message.contains(part), "no `{part}` in the message: {self:#?}");
        self
    }

    #[track_caller]
    pub fn detail_has(&self, part: &str) -> &Self {
        assert!(self.detail.contains(part), "no `{part}` in the detail: {self:#?}");
        self
    }

    #[track_caller]
    pub fn hint_has(&self, part: &str) -> &Self {
        assert!(self.hint.contains(part), "no `{part}` in the hint: {self:#?}");
        self
    }

    #[track_caller]
    pub fn context_has(&self, part: &str) -> &Self {
        assert!(self.context.contains(part), "no `{part}` in the context: {self:#?}");
        self
    }
}

impl From<postgres::Error> for SqlError {
    fn from(error: postgres::Error) -> SqlError {
        match error.as_db_error() {
            Some(error) => SqlError::from_server(error),
            None => SqlError {
                code: "closed".into(),
                severity: String::new(),
                message: error.to_string(),
                detail: String::new(),
                hint: String::new(),
                context: String::new(),
            },
        }
    }
}
