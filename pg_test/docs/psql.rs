//! A psql that a page is typed into.

use crate::pg_test::support::{PATIENCE, Server, Session};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Instant;

/// What `\echo` prints behind the output of what was sent.
const END: &str = "-- the end of this output --";

/// For output behind arrows: easy to take apart, whatever is in the values.
pub const END_OF_VALUE: char = '\x1f';
pub const END_OF_ROW: char = '\x1e';
const ROWS: &str = "\\pset format unaligned\n\\pset fieldsep '\\x1f'\n\\pset recordsep '\\x1e\\n'\n\\pset null NULL\n";
const TABLES: &str = "\\pset format aligned\n\\pset null ''\n";

/// A psql with its session.
pub struct Psql {
    pub name: String,
    child: Child,
    stdin: Option<ChildStdin>,
    /// What it prints, errors too, as a reader at a terminal sees it.
    lines: Receiver<String>,
    pid: i32,
    busy: bool,
}

impl Psql {
    pub fn start(server: &Server, name: &str) -> Result<Psql, String> {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        let mut command = server.client("psql");
        command.args(["--no-psqlrc", "--quiet", "--no-password"]);
        command.env("PGAPPNAME", name).env("LC_ALL", "C").env("PGCLIENTENCODING", "UTF8");
        command.env_remove("PSQL_PAGER").env_remove("COLUMNS");
        command.stdin(Stdio::piped()).stdout(writer.try_clone().expect("its other end")).stderr(writer);
        let mut child = command.spawn().expect("psql starts");
        // It has the pipe's other end too.
        drop(command);
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(reader).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        let stdin = child.stdin.take();
        let mut psql = Psql { name: name.into(), child, stdin, lines, pid: 0, busy: false };
        let pid = psql.run("\\pset tuples_only on\nselect pg_backend_pid();\n\\pset tuples_only off\n")?;
        psql.pid = pid.trim().parse().map_err(|_| format!("psql starts with: {pid}"))?;
        Ok(psql)
    }

    pub fn is_busy(&self) -> bool {
        self.busy
    }

    /// Runs SQL to its end and gives what was printed.
    pub fn run(&mut self, sql: &str) -> Result<String, String> {
        self.send(sql)?;
        self.end()
    }

    /// Sends SQL line by line, and gives what was printed up to each arrow, and after the last one, to be compared.
    pub fn one_by_one(
        &mut self,
        sql: &str,
        mut compare: impl FnMut(&str, Option<&str>, &str) -> Result<(), String>,
    ) -> Result<(), String> {
        self.run(ROWS)?;
        let mut so_far = String::new();
        for line in sql.lines() {
            so_far += line;
            so_far.push('\n');
            if let Some((_, shown)) = line.rsplit_once("-->") {
                let printed = self.run(&std::mem::take(&mut so_far))?;
                compare(line, Some(shown.trim()), &printed)?;
            }
        }
        let printed = self.run(&so_far)?;
        compare(so_far.trim_end(), None, &printed)?;
        self.run(TABLES).map(drop)
    }

    /// Sends SQL, and returns when it waits.
    pub fn wait(&mut self, sql: &str, watch: &mut Session) -> Result<(), String> {
        self.send(sql)?;
        self.busy = true;
        let waiting = format!(
            "select count(*) from pg_stat_activity where pid = {} and state = 'active' \
                and wait_event_type in ('Lock', 'Extension')",
            self.pid
        );
        let start = Instant::now();
        while watch.int(&waiting) == 0 {
            if let Ok(line) = self.lines.try_recv() {
                return Err(format!("it did not wait, and printed: {line}"));
            }
            if start.elapsed() > PATIENCE {
                return Err("it did not wait".into());
            }
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        Ok(())
    }

    /// What a waiting one has printed, when it has come to its end.
    pub fn go_on(&mut self) -> Result<String, String> {
        if !std::mem::take(&mut self.busy) {
            return Err(format!("session {} does not wait", self.name));
        }
        self.end()
    }

    fn send(&mut self, sql: &str) -> Result<(), String> {
        if self.busy {
            return Err(format!("session {} still waits", self.name));
        }
        let stdin = self.stdin.as_mut().expect("until the end");
        write!(stdin, "{sql}\n\\echo '{END}'\n").and_then(|()| stdin.flush()).map_err(|error| error.to_string())
    }

    fn end(&mut self) -> Result<String, String> {
        let (mut printed, start) = (String::new(), Instant::now());
        loop {
            match self.lines.recv_timeout(PATIENCE.saturating_sub(start.elapsed())) {
                Ok(line) if line == END => return Ok(printed),
                Ok(line) => {
                    printed += &line;
                    printed.push('\n');
                }
                Err(RecvTimeoutError::Timeout) => return Err(format!("it never ends; so far it printed:\n{printed}")),
                Err(RecvTimeoutError::Disconnected) => return Err(format!("psql has ended; it printed:\n{printed}")),
            }
        }
    }
}

impl Drop for Psql {
    fn drop(&mut self) {
        drop(self.stdin.take());
        if self.busy {
            // It would wait to the end of its wait.
            let _ = self.child.kill();
        }
        let _ = self.child.wait();
    }
}
