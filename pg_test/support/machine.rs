//! The machine under the servers: who runs them, their programs, their folders, signals and ports.

use super::until;
use std::ffi::OsStr;
use std::io::Write;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

/// The operating system's user that runs the servers, where it isn't the one who runs the tests.
fn run_as() -> Option<String> {
    std::env::var("CARGO_PGRX_TEST_RUNAS").ok()
}

/// A command of the user who runs the servers.
pub fn as_server_user(program: impl AsRef<OsStr>) -> Command {
    let mut command = match run_as() {
        Some(user) => {
            let mut sudo = Command::new("sudo");
            sudo.args(["-n", "-u", &user, "--"]).arg(program);
            sudo
        }
        None => Command::new(program),
    };
    command.current_dir("/").stdin(Stdio::null());
    command
}

/// Runs a command to its end and gives what it printed; panics when it fails.
#[track_caller]
pub fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("cannot start {command:?}: {error}"));
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success(),
        "{command:?}: {}\n{printed}{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    printed
}

/// Finds a program that may stand outside of an ordinary user's PATH.
pub fn program(name: &str) -> PathBuf {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin", "/usr/local/sbin", "/sbin"].map(PathBuf::from))
        .map(|folder| folder.join(name))
        .find(|file| file.is_file())
        .unwrap_or_else(|| panic!("the tests need `{name}`, which isn't installed"))
}

/// Sends a signal (`"STOP"`, `"KILL"`, …) to a server process.
#[track_caller]
pub fn signal(pid: i32, name: &str) {
    run(as_server_user("kill").arg(format!("-{name}")).arg(pid.to_string()));
}

/// A stopped process; it goes on when this is dropped.
#[must_use]
pub struct Stopped(i32);

/// Stops a server process, and returns when it stands still.
#[track_caller]
pub fn stop_process(pid: i32) -> Stopped {
    signal(pid, "STOP");
    let stopped = Stopped(pid);
    until("the process stands still", || state(pid) == Some('T'));
    stopped
}

/// The letter that the kernel gives for a process's state.
fn state(pid: i32) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.chars().next()
}

impl Stopped {
    /// Lets it go on.
    pub fn go_on(self) {}
}

impl Drop for Stopped {
    fn drop(&mut self) {
        signal(self.0, "CONT");
    }
}

/// A folder owned by the user who runs the servers; removed when dropped.
pub struct Dir(PathBuf);

impl Dir {
    pub fn new() -> Dir {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        // Short: a Unix socket's path has to fit into 107 bytes.
        let name = format!("nl{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        run(as_server_user("mkdir").args(["-m", "755"]).arg(&path));
        Dir(path)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Writes a file there.
    pub fn write(&self, name: &str, contents: impl AsRef<[u8]>) -> PathBuf {
        let path = self.0.join(name);
        let mut tee = as_server_user("tee")
            .arg(&path)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .expect("cannot start tee");
        tee.stdin.take().expect("tee has an input").write_all(contents.as_ref()).expect("write");
        assert!(tee.wait().expect("wait for tee").success(), "cannot write {}", path.display());
        path
    }

    /// Reads a file there.
    pub fn read(&self, name: &str) -> String {
        run(as_server_user("cat").arg(self.0.join(name)))
    }

    /// Removes it now.
    pub fn remove(&self) {
        let _ = as_server_user("chmod").args(["-R", "u+rwX"]).arg(&self.0).output();
        let _ = as_server_user("rm").arg("-rf").arg(&self.0).output();
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        self.remove();
    }
}

/// A TCP port that was free a moment ago.
pub fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    listener.local_addr().expect("its address").port()
}
