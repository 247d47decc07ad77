//! Random calls from many clients over few names, with cancels and terminations, against a model of what each holds.
//!
//! `NAMED_LOCKS_SEED=n` runs a certain sequence again (each client's calls; how they meet is up to the machine), and
//! `NAMED_LOCKS_SECONDS=n` runs it for longer.

use super::support::{Random, Server, Session, SqlError, unique};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const CLIENTS: usize = 8;
const MODES: [&str; 5] = ["exclusive", "share", "intent share", "intent exclusive", "share intent exclusive"];
const EXCLUSIVE: usize = 0;
const SHARE: usize = 1;

/// Which modes two sessions can't hold at once, in the order of MODES.
const CONFLICTS: [[bool; 5]; 5] = [
    [true, true, true, true, true],
    [true, false, false, true, true],
    [true, false, false, false, false],
    [true, true, false, false, true],
    [true, true, false, true, true],
];

/// One of the few locks.
#[derive(Clone, Debug)]
enum Target {
    Name { name: String, cluster_wide: bool },
    Key(i64),
}

impl Target {
    fn arguments(&self) -> String {
        match self {
            Target::Name { name, .. } => format!("'{name}'"),
            Target::Key(key) => format!("{key}::bigint"),
        }
    }

    fn reach(&self) -> &'static str {
        match self {
            Target::Name { cluster_wide: true, .. } => ", cluster_wide => true",
            _ => "",
        }
    }

    fn is_named(&self) -> bool {
        matches!(self, Target::Name { .. })
    }
}

/// What all clients hold for certain at this moment: target, client and mode.
///
/// A client tells of its holds between its statements only, and a client that is to be terminated tells of none. So
/// whatever is entered here is held in truth, and two entries in conflict are a fault of the locks.
#[derive(Default)]
struct Certain {
    entries: Vec<(usize, usize, usize)>,
    is_doomed: [bool; CLIENTS],
    /// How often two clients held one lock together, so that it is known to happen.
    shared: u64,
}

struct World {
    targets: Vec<Target>,
    certain: Mutex<Certain>,
    pids: Mutex<[i32; CLIENTS]>,
    is_over: AtomicBool,
    calls: AtomicU64,
}

/// So many calls make it a torture, however slow the machine.
const MIN_CALLS: u64 = 15_000;

/// A transaction's holds of one savepoint level: target and mode.
type Level = Vec<(usize, usize)>;

/// A client and what it should hold.
struct Client<'a> {
    number: usize,
    world: &'a World,
    server: &'a Server,
    random: Random,
    session: Session,
    /// In the order taken.
    by_session: Vec<(usize, usize)>,
    /// Empty outside of a block.
    by_transaction: Vec<Level>,
    calls: BTreeMap<&'static str, u64>,
    errors: BTreeMap<String, u64>,
}

impl Client<'_> {
    fn holds(&self) -> impl Iterator<Item = (usize, usize)> {
        self.by_session.iter().chain(self.by_transaction.iter().flatten()).copied()
    }

    /// Tells what it holds for certain from now on.
    fn enter(&self) {
        let mut certain = self.world.certain.lock().expect("no client has failed");
        if certain.is_doomed[self.number] {
            return;
        }
        for (target, mode) in self.holds() {
            for &(other_target, other, other_mode) in &certain.entries {
                assert!(
                    other_target != target || other == self.number || !CONFLICTS[mode][other_mode],
                    "{:?} is held by client {} in mode {} and by client {other} in mode {}",
                    self.world.targets[target],
                    self.number,
                    MODES[mode],
                    MODES[other_mode]
                );
            }
            certain.shared +=
                certain.entries.iter().filter(|entry| entry.0 == target && entry.1 != self.number).count() as u64;
            certain.entries.push((target, self.number, mode));
        }
    }

    /// Takes that back before a statement that may change it.
    fn leave(&self) {
        let mut certain = self.world.certain.lock().expect("no client has failed");
        certain.entries.retain(|entry| entry.1 != self.number);
    }

    /// Runs a statement. None after an error, with the model as the error leaves it.
    fn run(&mut self, what: &'static str, sql: &str) -> Option<Option<String>> {
        self.count(what);
        match self.session.query(sql) {
            Ok(rows) => Some(rows.first().and_then(|row| row.get(0).map(str::to_owned))),
            Err(error) => {
                self.fail(sql, &error);
                None
            }
        }
    }

    fn count(&mut self, what: &'static str) {
        *self.calls.entry(what).or_default() += 1;
        self.world.calls.fetch_add(1, Ordering::Relaxed);
    }

    fn fail(&mut self, sql: &str, error: &SqlError) {
        *self.errors.entry(error.code.clone()).or_default() += 1;
        match error.code.as_str() {
            "57P01" | "closed" => {
                self.by_session.clear();
                self.by_transaction.clear();
                self.connect();
            }
            // Cancelled, deadlock, a timeout of the strict forms or by lock_timeout; a cancel that came a moment late.
            "57014" | "40P01" | "55P03" => self.roll_back(),
            _ => panic!("client {}: {sql}\n{error:#?}", self.number),
        }
    }

    /// After an error in a block: back to a savepoint, or out of it.
    fn roll_back(&mut self) {
        let depth = self.by_transaction.len();
        if depth > 1 && self.random.one_in(2) && self.session.query(&format!("rollback to s{}", depth - 1)).is_ok() {
            self.by_transaction[depth - 1].clear();
            return;
        }
        while !self.by_transaction.is_empty() {
            match self.session.query("rollback") {
                Ok(_) => self.by_transaction.clear(),
                Err(error) if error.code == "57014" => {}
                Err(error) => return self.fail("rollback", &error),
            }
        }
    }

    /// A cancel may come when the call has returned and its statement has not: then the lock may be held. So may what a
    /// conversion changed. (Any other error is the call's: the model stands.)
    fn look_after_cancel(&mut self, cancels_before: u64, number: usize) {
        if self.cancelled() == cancels_before {
            return;
        }
        let Target::Name { name, cluster_wide } = self.world.targets[number].clone() else { return self.look_again() };
        let before: Vec<usize> = self.by_session.iter().filter(|hold| hold.0 == number).map(|hold| hold.1).collect();
        let mut now = Vec::new();
        for (mode, label) in MODES.into_iter().enumerate() {
            let sql = format!("select named_lock_held('{name}', '{label}', cluster_wide => {cluster_wide})");
            let held = loop {
                match self.session.query(&sql) {
                    Ok(rows) => break rows[0].get(0).and_then(|count| count.parse::<usize>().ok()).expect("a number"),
                    Err(error) if error.code == "57014" && self.by_transaction.is_empty() => {}
                    Err(_) => return self.look_again(),
                }
            };
            let by_transaction = self.by_transaction.iter().flatten().filter(|&&hold| hold == (number, mode)).count();
            now.extend(std::iter::repeat_n(mode, held - by_transaction));
        }
        assert!(
            now.len() == before.len() || now.len() == before.len() + 1,
            "client {}: {name} was held {before:?}, is held {now:?} after a cancel",
            self.number
        );
        // The order of the holds isn't known any more.
        self.by_session.retain(|hold| hold.0 != number);
        if now.len() > 1 && now.iter().any(|&mode| mode != now[0]) {
            return self.look_again();
        }
        self.by_session.extend(now.into_iter().map(|mode| (number, mode)));
    }

    fn cancelled(&self) -> u64 {
        self.errors.get("57014").copied().unwrap_or_default()
    }

    /// Begins or ends something. After an error nobody knows whether it did: start again from nothing.
    fn control(&mut self, what: &'static str, sql: &str) -> bool {
        self.count(what);
        let Err(error) = self.session.query(sql) else { return true };
        *self.errors.entry(error.code.clone()).or_default() += 1;
        assert!(
            ["57P01", "closed", "57014"].contains(&error.code.as_str()),
            "client {}: {sql}\n{error:#?}",
            self.number
        );
        self.look_again();
        false
    }

    fn connect(&mut self) {
        self.session = open(self.server, self.number);
        self.world.pids.lock().expect("no client has failed")[self.number] = self.session.pid;
        let mut certain = self.world.certain.lock().expect("no client has failed");
        certain.is_doomed[self.number] = false;
        certain.entries.retain(|entry| entry.1 != self.number);
    }

    fn step(&mut self) {
        match self.random.index(100) {
            0..40 => self.acquire(),
            40..58 => self.unlock(),
            58..62 => self.unlock_all(),
            62..68 => self.convert(),
            68..76 => self.begin_or_savepoint(),
            76..86 => self.end_or_back(),
            86..90 => self.caught(),
            90..98 => self.check(),
            _ => {
                self.run("look", "select count(*) from lock_holders, lock_waiters; select lock_graph()");
            }
        }
    }

    fn acquire(&mut self) {
        let number = self.random.index(self.world.targets.len());
        let target = self.world.targets[number].clone();
        let mode = if target.is_named() {
            self.random.pick(&[0, 0, 1, 1, 2, 3, 4])
        } else {
            self.random.pick(&[EXCLUSIVE, SHARE])
        };
        let in_block = !self.by_transaction.is_empty();
        let by_transaction = in_block && self.random.one_in(2);
        let is_call = target.is_named() && !in_block && self.random.one_in(4);
        let is_strict = !is_call && self.random.one_in(4);
        let timeout = self.random.pick(&["'0'", "'0'", "'1 ms'", "'3 ms'", "'20 ms'", "'1 hour'", "null"]);
        let function = match (target.is_named(), by_transaction, is_call) {
            (_, _, true) => "call named_lock_wait",
            (true, false, _) => "select named_lock",
            (true, true, _) => "select named_xact_lock",
            (false, false, _) => "select advisory_lock",
            (false, true, _) => "select advisory_xact_lock",
        };
        let strict = if is_strict { "_strict" } else { "" };
        let sql = format!("{function}{strict}({}, {timeout}, '{}'{})", target.arguments(), MODES[mode], target.reach());
        let cancels = self.cancelled();
        let Some(answer) = self.run(if is_call { "call" } else { "lock" }, &sql) else {
            return self.look_after_cancel(cancels, number);
        };
        let is_held = match answer.as_deref() {
            Some("t") => true,
            Some("f") => false,
            Some("") if is_strict => true,
            other => panic!("{sql}: {other:?}"),
        };
        if is_held {
            let holds =
                if by_transaction { self.by_transaction.last_mut().expect("in a block") } else { &mut self.by_session };
            holds.push((number, mode));
        }
    }

    fn unlock(&mut self) {
        let number = self.random.index(self.world.targets.len());
        match self.world.targets[number].clone() {
            Target::Name { name, cluster_wide } => {
                let position = self.by_session.iter().rposition(|hold| hold.0 == number);
                let Some(position) = position else { return };
                let mode = self.by_session[position].1;
                let argument = if self.random.one_in(2) { "null".to_owned() } else { format!("'{}'", MODES[mode]) };
                let sql = format!("select named_unlock('{name}', {argument}, cluster_wide => {cluster_wide})");
                let Some(answer) = self.run("unlock", &sql) else { return self.look_again() };
                self.by_session.remove(position);
                let remaining = self.by_session.iter().filter(|hold| hold.0 == number).count();
                assert_eq!(answer, Some(remaining.to_string()), "client {}: {sql}", self.number);
            }
            Target::Key(key) => {
                let Some(position) = self.by_session.iter().rposition(|hold| hold.0 == number) else { return };
                let shared = if self.by_session[position].1 == SHARE { "_shared" } else { "" };
                let sql = format!("select pg_advisory_unlock{shared}({key})");
                let Some(answer) = self.run("native unlock", &sql) else { return self.look_again() };
                assert_eq!(answer.as_deref(), Some("t"), "client {}: {sql}", self.number);
                self.by_session.remove(position);
            }
        }
    }

    /// After an error of a statement that gives back: did it, or not? Start again from nothing.
    fn look_again(&mut self) {
        self.by_session.clear();
        self.by_transaction.clear();
        for sql in ["rollback", "select pg_advisory_unlock_all()"] {
            while let Err(error) = self.session.query(sql) {
                match error.code.as_str() {
                    "57014" => {}
                    "57P01" | "closed" => return self.connect(),
                    _ => panic!("client {}: {sql}\n{error:#?}", self.number),
                }
            }
        }
    }

    fn unlock_all(&mut self) {
        let targets = &self.world.targets;
        if self.random.one_in(3) {
            if self.run("native unlock all", "select pg_advisory_unlock_all()").is_none() {
                return self.look_again();
            }
            self.by_session.clear();
            return;
        }
        let due = self.by_session.iter().filter(|hold| targets[hold.0].is_named()).count();
        let Some(answer) = self.run("unlock all", "select named_unlock_all()") else { return self.look_again() };
        assert_eq!(answer, Some(due.to_string()), "client {}: named_unlock_all()", self.number);
        self.by_session.retain(|hold| !targets[hold.0].is_named());
    }

    fn convert(&mut self) {
        let number = self.random.index(self.world.targets.len());
        let Target::Name { name, cluster_wide } = self.world.targets[number].clone() else { return };
        let mode = self.random.index(MODES.len());
        if self.by_session.iter().filter(|hold| hold.0 == number).count() != 1 {
            return;
        }
        let timeout = self.random.pick(&["'0'", "'3 ms'", "'20 ms'"]);
        let sql = format!(
            "select named_lock_convert('{name}', '{}', {timeout}, cluster_wide => {cluster_wide})",
            MODES[mode]
        );
        let cancels = self.cancelled();
        match self.run("convert", &sql) {
            None => self.look_after_cancel(cancels, number),
            Some(answer) if answer.as_deref() == Some("t") => {
                self.by_session.iter_mut().filter(|hold| hold.0 == number).for_each(|hold| hold.1 = mode);
            }
            Some(_) => {}
        }
    }

    fn begin_or_savepoint(&mut self) {
        let depth = self.by_transaction.len();
        if depth == 0 {
            if self.control("begin", "begin") {
                self.by_transaction.push(Level::new());
            }
        } else if depth < 5 && self.control("savepoint", &format!("savepoint s{depth}")) {
            self.by_transaction.push(Level::new());
        }
    }

    fn end_or_back(&mut self) {
        let depth = self.by_transaction.len();
        match (depth, self.random.index(4)) {
            (0, _) => {}
            (2.., 0) => {
                if self.control("rollback to", &format!("rollback to s{}", depth - 1)) {
                    self.by_transaction[depth - 1].clear();
                }
            }
            (2.., 1) => {
                if self.control("release", &format!("release s{}", depth - 1)) {
                    let holds = self.by_transaction.pop().expect("two at least");
                    self.by_transaction[depth - 2].extend(holds);
                }
            }
            (_, choice) => {
                if self.control("end", if choice == 2 { "rollback" } else { "commit" }) {
                    self.by_transaction.clear();
                }
            }
        }
    }

    /// A lock of each kind in an exception block that fails: the session's stays.
    fn caught(&mut self) {
        let number = self.random.index(self.world.targets.len());
        let Target::Name { name, cluster_wide } = self.world.targets[number].clone() else { return };
        let sql = format!(
            "do $$ declare got boolean; begin \
               perform set_config('torture.got', 'f', false); \
               begin \
                 got := named_lock('{name}', '0', 'share', cluster_wide => {cluster_wide}); \
                 perform set_config('torture.got', got::text, false); \
                 perform named_xact_lock('{name}', '0', cluster_wide => {cluster_wide}); \
                 perform named_xact_lock('{name}', '0', 'intent share', cluster_wide => {cluster_wide}); \
                 if got then raise 'got' using errcode = 'P9001'; else raise 'not' using errcode = 'P9002'; end if; \
               exception when sqlstate 'P9001' then got := true; when sqlstate 'P9002' then got := false; end; \
               perform set_config('torture.got', got::text, false); \
             end $$"
        );
        if self.run("caught", &sql).is_none() {
            return self.look_again();
        }
        match self.run("got", "select current_setting('torture.got')") {
            None => self.look_again(),
            Some(got) if got.as_deref() == Some("true") => self.by_session.push((number, SHARE)),
            Some(_) => {}
        }
    }

    /// That the session holds what it should, by its own account and by the view.
    fn check(&mut self) {
        let mut due: BTreeMap<String, u64> = BTreeMap::new();
        for (kind, (target, mode)) in (self.by_session.iter().map(|hold| ("session", *hold)))
            .chain(self.by_transaction.iter().flatten().map(|hold| ("transaction", *hold)))
        {
            let row = match &self.world.targets[target] {
                Target::Name { name, .. } => format!("{kind} {name} {}", MODES[mode]),
                // The server counts native holds and tells nobody.
                Target::Key(key) => format!("advisory {key} {}", MODES[mode]),
            };
            let count = due.entry(row).or_default();
            *count = if self.world.targets[target].is_named() { *count + 1 } else { 1 };
        }
        let mut due: Vec<String> = due.into_iter().map(|(row, count)| format!("{row} {count}")).collect();
        due.sort();
        self.count("check");
        let sql = "select concat_ws(' ', kind, coalesce(name, objid::text), mode, coalesce(holds, 1)) \
                     from lock_holders where pid = pg_backend_pid()";
        let mut shown: Vec<String> = match self.session.query(sql) {
            Ok(rows) => rows.iter().map(|row| row.get(0).expect("not null").to_owned()).collect(),
            Err(error) => return self.fail(sql, &error),
        };
        shown.sort();
        assert_eq!(shown, due, "client {}", self.number);
        let number = self.random.index(self.world.targets.len());
        if let Target::Name { name, cluster_wide } = self.world.targets[number].clone() {
            let held = self.holds().filter(|hold| hold.0 == number).count();
            let sql = format!("select named_lock_held('{name}', cluster_wide => {cluster_wide})");
            if let Some(answer) = self.run("held", &sql) {
                assert_eq!(answer, Some(held.to_string()), "client {}: {sql}", self.number);
            }
        }
    }
}

fn open(server: &Server, number: usize) -> Session {
    let mut session = server.session(&format!("torture {number}"));
    // Waits without a limit of their own end by lock_timeout or by a deadlock.
    session.run("set deadlock_timeout = '15ms'; set lock_timeout = '60ms'");
    session
}

fn work(
    number: usize,
    seed: u64,
    world: &World,
    server: &Server,
) -> (BTreeMap<&'static str, u64>, BTreeMap<String, u64>) {
    let mut client = Client {
        number,
        world,
        server,
        random: Random(seed.wrapping_mul(1_000_003).wrapping_add(number as u64)),
        session: open(server, number),
        by_session: Vec::new(),
        by_transaction: Vec::new(),
        calls: BTreeMap::new(),
        errors: BTreeMap::new(),
    };
    world.pids.lock().expect("no client has failed")[number] = client.session.pid;
    while !world.is_over.load(Ordering::Relaxed) {
        client.leave();
        client.step();
        client.enter();
        // Something is done under the locks.
        if client.random.one_in(4) {
            std::thread::sleep(Duration::from_micros(client.random.index(2000) as u64));
        }
    }
    client.leave();
    client.look_again();
    (client.calls, client.errors)
}

/// Cancels and ends sessions at any moment.
fn disturb(seed: u64, world: &World, server: &Server) -> (u64, u64) {
    let mut random = Random(seed);
    let mut session = server.session("torture disturber");
    let (mut cancels, mut ends) = (0, 0);
    while !world.is_over.load(Ordering::Relaxed) {
        std::thread::sleep(Duration::from_micros(random.index(20_000) as u64));
        let number = random.index(CLIENTS);
        let pid = world.pids.lock().expect("no client has failed")[number];
        if random.one_in(8) {
            {
                let mut certain = world.certain.lock().expect("no client has failed");
                if world.pids.lock().expect("no client has failed")[number] != pid {
                    continue;
                }
                certain.is_doomed[number] = true;
                certain.entries.retain(|entry| entry.1 != number);
            }
            session.run(&format!("select pg_terminate_backend({pid})"));
            ends += 1;
        } else {
            session.run(&format!("select pg_cancel_backend({pid})"));
            cancels += 1;
        }
    }
    (cancels, ends)
}

#[test]
fn random_calls_of_many_clients() {
    let number_of = |variable: &str, otherwise: u64| {
        std::env::var(variable).ok().and_then(|text| text.parse().ok()).unwrap_or(otherwise)
    };
    let seed = number_of("NAMED_LOCKS_SEED", 20_250_101);
    let seconds = number_of("NAMED_LOCKS_SECONDS", 10);
    println!("NAMED_LOCKS_SEED={seed}");

    // A database of its own: other sessions that are ended meanwhile are not these.
    let server = Server::shared().new_database("torture", "UTF8");
    let stem = unique("torture");
    let world = Arc::new(World {
        targets: vec![
            Target::Name { name: format!("{stem}:a"), cluster_wide: false },
            Target::Name { name: format!("{stem}:b"), cluster_wide: false },
            Target::Name { name: format!("{stem}:{}", "c".repeat(500)), cluster_wide: false },
            Target::Name { name: format!("{stem}:wide"), cluster_wide: true },
            Target::Key(77_000_001),
        ],
        certain: Mutex::default(),
        pids: Mutex::default(),
        is_over: AtomicBool::new(false),
        calls: AtomicU64::new(0),
    });
    let clients: Vec<_> = (0..CLIENTS)
        .map(|number| {
            let (world, server) = (world.clone(), server.clone());
            std::thread::spawn(move || {
                let guard = EndsAll(world.clone());
                let done = work(number, seed, &world, &server);
                std::mem::forget(guard);
                done
            })
        })
        .collect();
    let mut watch = server.session("watch");
    let connected = |world: &World| world.pids.lock().expect("no client has failed").iter().all(|&pid| pid != 0);
    super::support::until("all are connected", || connected(&world));
    let disturber = {
        let (world, server) = (world.clone(), server.clone());
        std::thread::spawn(move || disturb(seed, &world, &server))
    };
    let begun = Instant::now();
    let is_enough =
        || begun.elapsed() > Duration::from_secs(seconds) && world.calls.load(Ordering::Relaxed) > MIN_CALLS;
    while !is_enough() && !world.is_over.load(Ordering::Relaxed) {
        std::thread::sleep(Duration::from_millis(20));
    }
    world.is_over.store(true, Ordering::Relaxed);
    let (cancels, ends) = disturber.join().expect("the disturber goes on to the end");
    let mut calls: BTreeMap<&'static str, u64> = BTreeMap::new();
    let mut errors: BTreeMap<String, u64> = BTreeMap::new();
    for client in clients {
        let (own_calls, own_errors) = client.join().expect("no client has failed");
        own_calls.into_iter().for_each(|(what, count)| *calls.entry(what).or_default() += count);
        own_errors.into_iter().for_each(|(code, count)| *errors.entry(code).or_default() += count);
    }
    let shared = world.certain.lock().expect("no client has failed").shared;
    println!("{calls:?}\n{errors:?}\n{cancels} cancels, {ends} ends, {shared} times held together");

    // It was a torture: everything was called, and each kind of trouble came.
    for what in ["lock", "call", "unlock", "convert", "savepoint", "rollback to", "caught", "check", "held"] {
        assert!(calls.get(what).is_some_and(|&count| count > 20), "{what} is missing: {calls:?}");
    }
    for code in ["57014", "55P03", "57P01"] {
        assert!(errors.contains_key(code), "{code} is missing: {errors:?}");
    }
    assert!(shared > 0);

    // And nothing is left of it.
    super::support::until("the clients are gone", || {
        watch.int("select count(*) from pg_stat_activity where application_name ~ '^torture [0-9]'") == 0
    });
    assert_eq!(watch.column(&format!("select name from lock_holders where name like '{stem}%'")), [""; 0]);
    assert_eq!(watch.column(&format!("select name from lock_waiters where name like '{stem}%'")), [""; 0]);
    assert_eq!(
        watch.int(
            "select count(*) from pg_locks where locktype = 'advisory' \
                and database = (select oid from pg_database where datname = current_database())"
        ),
        0
    );
}

/// Ends the test early when a client fails, as the others would go on.
struct EndsAll(Arc<World>);

impl Drop for EndsAll {
    fn drop(&mut self) {
        self.0.is_over.store(true, Ordering::Relaxed);
    }
}
