//! Every function of the extension, called at random by several sessions at once: whatever the arguments, the answer is a
//! value or an error that is expected, nothing is held that nobody knows of, and memory does not grow.
//!
//! The functions are those of the catalogue, so that a new one is called too. `NAMED_LOCKS_SEED=n` runs a certain sequence
//! again (each session's calls; how they meet is up to the machine), `NAMED_LOCKS_CALLS=n` another number of calls.

use super::support::{Cluster, Random, Reply, Session, Wire, literal, until};
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Instant;

const CALLS: u64 = 100_000;

/// The sessions, by their role: what it is given and set to.
const ROLES: [(&str, &str); 8] = [
    ("fuzz_super", "alter role fuzz_super superuser"),
    ("fuzz_owner", "alter role fuzz_owner superuser"),
    ("fuzz_a", ""),
    ("fuzz_b", "grant fuzz_a to fuzz_b"),
    ("fuzz_few", "alter role fuzz_few set named_locks.max_locks_per_session = 5"),
    ("fuzz_warn", "alter role fuzz_warn set named_locks.session_locks = warn"),
    ("fuzz_off", "alter role fuzz_off set named_locks.session_locks = off"),
    ("fuzz_reads", "grant pg_read_all_stats, pg_signal_backend to fuzz_reads"),
];

/// What a call may fail with. None is of class XX, an internal error.
const EXPECTED: [&str; 24] = [
    "0A000", "22001", "22003", "22004", "22007", "22008", "22023", "22P02", "2202E", "25001", "25006", "25P02",
    "39P01", "40001", "40P01", "42501", "42704", "53200", "53400", "54000", "55000", "55006", "55P03", "57014",
];

/// In bytes, so much more may a session have at its end than after a quarter of its calls.
const MEMORY: i64 = 3_000_000;

/// A function as the catalogue has it.
#[derive(Clone, Debug)]
struct Function {
    oid: u32,
    name: String,
    is_procedure: bool,
    returns_rows: bool,
    returns: String,
    required: usize,
    /// Name and type of each.
    arguments: Vec<(String, String)>,
}

fn functions(session: &mut Session) -> Vec<Function> {
    session
        .run(
            "select p.oid, p.proname, p.prokind = 'p', p.proretset, p.prorettype::regtype, p.pronargs - p.pronargdefaults, \
                    coalesce((select string_agg(p.proargnames[n] || '/' || format_type(t, null), ',' order by n) \
                                from unnest(p.proargtypes) with ordinality as u (t, n)), '') \
               from pg_proc as p join pg_depend as d on d.classid = 'pg_proc'::regclass and d.objid = p.oid and d.deptype = 'e' \
               join pg_extension as e on d.refclassid = 'pg_extension'::regclass and d.refobjid = e.oid \
              where e.extname = 'named_locks' and p.pronamespace = e.extnamespace order by p.proname, 7",
        )
        .iter()
        .map(|row| {
            let get = |column: usize| row.get(column).unwrap_or_default();
            Function {
                oid: get(0).parse().expect("an oid"),
                name: get(1).into(),
                is_procedure: get(2) == "t",
                returns_rows: get(3) == "t",
                returns: get(4).into(),
                required: get(5).parse().expect("a number"),
                arguments: get(6)
                    .split(',')
                    .filter_map(|argument| argument.split_once('/'))
                    .map(|(name, kind)| (name.to_owned(), kind.to_owned()))
                    .collect(),
            }
        })
        .collect()
}

/// One argument's value as text; None for NULL.
type Value = Option<String>;

/// A source of arguments.
struct Source<'a> {
    random: Random,
    /// Names and tokens of leases that somebody was granted.
    granted: &'a Mutex<Vec<(String, String)>>,
}

impl Source<'_> {
    /// Few, so that sessions meet; some odd or bad.
    fn name(&mut self) -> String {
        const NAMES: [&str; 12] =
            ["a:1", "a:2", "a:3", "b:1", "b:2", "plain", "c/d", "c/d/e", "c/f", "c", "c:x/y", "g:1"];
        if !self.random.one_in(5) {
            return self.random.pick(&NAMES).into();
        }
        match self.random.below(22) {
            0 => String::new(),
            1 => "x".repeat(1024),
            2 => "x".repeat(1025),
            3 => "é".repeat(512),
            4 => "é".repeat(513),
            5 => "🔒 漢字".into(),
            6 => "it's \"quoted\" \\ and $1 %s %n".into(),
            7 => ":".into(),
            8 => ":x:y:".into(),
            9 => "/".into(),
            10 => "a//b".into(),
            11 => "/a".into(),
            12 => "a/".into(),
            13 => vec!["p"; 32].join("/"),
            14 => vec!["p"; 33].join("/"),
            15 => "order-36325".into(),
            16 => "M0plytOy".into(), // the same key
            17 => "line\nbreak\ttab".into(),
            18 => "{a,b}".into(),
            19 => "x".repeat(100_000),
            20 => format!("one of many {}", self.random.below(1000)),
            _ => format!("{}/{}", self.random.pick(&NAMES), self.random.below(3)),
        }
    }

    fn names(&mut self) -> String {
        let element = |name: Option<String>| match name {
            None => "NULL".to_owned(),
            Some(name) => format!("\"{}\"", name.replace('\\', "\\\\").replace('"', "\\\"")),
        };
        let count = match self.random.below(40) {
            0 => 0,
            1 => 200,
            2 if self.random.one_in(10) => 20_000,
            _ => 1 + self.random.below(5),
        };
        let elements: Vec<String> = match count {
            200.. => (0..count).map(|number| format!("n{}", number % (count - 7))).collect(),
            _ => (0..count)
                .map(|_| {
                    let name = self.name();
                    element((!self.random.one_in(20)).then_some(name))
                })
                .collect(),
        };
        let list = elements.join(",");
        match self.random.below(30) {
            0 => format!("{{{{{list}}},{{{list}}}}}"),
            1 if count > 0 => format!("[5:{}]={{{list}}}", 4 + count),
            2 => "{a".into(),
            _ => format!("{{{list}}}"),
        }
    }

    fn timeout(&mut self) -> Value {
        Some(
            match self.random.below(20) {
                0..=10 => "0",
                11..=13 => "1 ms",
                14 => "5 ms",
                15 => "20 ms",
                16 if self.random.one_in(4) => return None,
                17 if self.random.one_in(4) => "50 ms",
                _ => return Some(self.interval()),
            }
            .into(),
        )
    }

    fn interval(&mut self) -> String {
        self.random
            .pick(&[
                "0",
                "1 us",
                "0.1 ms",
                "-1 ms",
                "-1 us",
                "24 days",
                "24 days 1 us",
                "1 mon -31 days",
                "-178000000 years",
                "178000000 years",
                "1 day -24 hours",
                "soon",
                "",
                "1 mon -30 days 1 ms",
            ])
            .into()
    }

    /// Not so short that it ends anything while this runs.
    fn long_interval(&mut self) -> String {
        match self.random.below(4) {
            0 => self.interval(),
            _ => self.random.pick(&["10 min", "1 hour", "1 day", "10 years", "99 ms", "3651 days", "1 mon"]).into(),
        }
    }

    fn value(&mut self, name: &str, kind: &str) -> Value {
        if self.random.one_in(25) {
            return None;
        }
        let random = &mut self.random;
        Some(match (name, kind) {
            (_, "text[]") => self.names(),
            ("domain", _) => random.pick(&["a", "b", "c", "", "a:b", "nobody's"]).into(),
            ("owner" | "reason", _) if random.one_in(2) => return None,
            (_, "text") => self.name(),
            ("timeout", _) => return self.timeout(),
            ("max_wait", _) if random.one_in(2) => random.pick(&["0", "5 ms", "20 ms"]).into(),
            ("max_wait" | "max_hold", _) if random.one_in(2) => return None,
            ("hold_limit" | "max_hold", _) => self.long_interval(),
            ("ttl", _) if random.one_in(2) => random.pick(&["100 ms", "300 ms", "1 s"]).into(),
            (_, "interval") => self.long_interval(),
            (_, "named_lock_mode") => random
                .pick(&[
                    "exclusive",
                    "exclusive",
                    "share",
                    "share",
                    "intent share",
                    "intent exclusive",
                    "share intent exclusive",
                    "none",
                    "",
                ])
                .into(),
            (_, "boolean") => random.pick(&["t", "f", "f", "f", "perhaps"]).into(),
            ("permits" | "slot" | "max_locks", _) if !random.one_in(4) => (1 + random.below(3)).to_string(),
            (_, "integer") => random
                .pick(&["0", "1", "-1", "2", "2048", "2049", "65536", "2147483647", "-2147483648", "2147483648"])
                .into(),
            (_, "bigint") => random
                .pick(&["0", "1", "-1", "2", "9223372036854775807", "-9223372036854775808", "9223372036854775808"])
                .into(),
            (_, "jsonb") => match random.below(8) {
                0 => "{\"a\": [1, 2.50, null, {\"b\": \"é\"}]}".into(),
                1 => format!("\"{}\"", "y".repeat(20_000)),
                2 => format!("{}1{}", "[".repeat(1000), "]".repeat(1000)),
                3 => "1e1000".into(),
                4 => "{".into(),
                5 => return None,
                _ => "{\"address\": \"10.0.0.1\"}".into(),
            },
            (_, "regrole") => random.pick(&["fuzz_a", "fuzz_b", "fuzz_super", "-", "4000000000", "nobody"]).into(),
            (_, other) => panic!("make values of the type {other}"),
        })
    }

    fn arguments(&mut self, function: &Function) -> Vec<Value> {
        let all = function.arguments.len();
        let count = function.required + self.random.index(all - function.required + 1);
        let mut values: Vec<Value> =
            function.arguments.iter().take(count).map(|(name, kind)| self.value(name, kind)).collect();
        let has_token = function.arguments.get(1).is_some_and(|(name, _)| name == "token");
        if has_token && !self.random.one_in(3) {
            let granted = self.granted.lock().expect("no panic while it is held");
            if !granted.is_empty() {
                let (name, token) = &granted[self.random.index(granted.len())];
                (values[0], values[1]) = (Some(name.clone()), Some(token.clone()));
            }
        }
        values
    }
}

fn expression(function: &Function, values: &[Value]) -> String {
    let values: Vec<String> = values
        .iter()
        .zip(&function.arguments)
        .map(|(value, (_, kind))| match value {
            None => format!("null::{kind}"),
            Some(value) => format!("{}::{kind}", literal(value)),
        })
        .collect();
    format!("{}({})", function.name, values.join(", "))
}

/// A query that calls a function.
fn query(function: &Function, values: &[Value]) -> String {
    let call = expression(function, values);
    match function.returns.as_str() {
        "trigger" => format!("select {call} is null"), // of no type that a query could give
        _ => format!("select * from {call}"),
    }
}

/// A session that calls.
struct Caller<'a> {
    wire: Wire,
    role: &'static str,
    source: Source<'a>,
    functions: &'a [Function],
    /// As the server has to say at the end of each statement.
    state: char,
    has_savepoint: bool,
    calls: u64,
    answers: BTreeMap<String, u64>,
    faults: Vec<String>,
}

impl Caller<'_> {
    /// Reads the answer to what was put on the wire; None if the connection is gone. Checks the transaction's state.
    fn finish(&mut self, sql: &str, after: [char; 2]) -> Option<Vec<Reply>> {
        let replies = self.wire.replies();
        let error = replies.iter().find_map(|reply| match reply {
            Reply::Error(code) => Some(code.clone()),
            _ => None,
        });
        let shown: String = sql.chars().take(2000).collect();
        match replies.last() {
            Some(Reply::Ready(state)) => {
                let due = after[usize::from(error.is_some())];
                if *state != due {
                    self.faults.push(format!("{}: state {state}, not {due}, after {error:?} of {shown}", self.role));
                }
                self.state = *state;
            }
            _ => {
                self.faults.push(format!("{}: the connection is gone after {error:?} of {shown}", self.role));
                return None;
            }
        }
        let code = error.unwrap_or_else(|| "00000".into());
        if code != "00000" && !EXPECTED.contains(&code.as_str()) {
            self.faults.push(format!("{}: {code} of {shown}", self.role));
        }
        *self.answers.entry(code).or_default() += 1;
        Some(replies)
    }

    fn statement(&mut self, sql: &str, after: [char; 2]) -> Option<Vec<Reply>> {
        self.wire.query(sql);
        self.finish(sql, after)
    }

    /// The states after a statement that changes none: if it succeeds, and if it fails.
    fn same(&self) -> [char; 2] {
        [self.state, if self.state == 'I' { 'I' } else { 'E' }]
    }

    fn step(&mut self) -> Option<()> {
        let random = &mut self.source.random;
        match (self.state, random.below(100)) {
            ('E', _) if self.has_savepoint && random.one_in(2) => _ = self.statement("rollback to s", ['T', 'E'])?,
            ('E', _) | ('T', 0..5) => {
                self.has_savepoint = false;
                self.statement("rollback", ['I', 'I'])?;
            }
            ('T', 5..12) => {
                self.has_savepoint = false;
                self.statement("commit", ['I', 'I'])?;
            }
            ('T', 12..14) => {
                self.has_savepoint = false;
                let gid = self.role;
                self.statement(&format!("prepare transaction '{gid}'"), ['I', 'I'])?;
                // Where it could not be prepared there is none.
                self.statement(&format!("rollback prepared '{gid}'"), ['I', 'I'])?;
            }
            ('T', 14..20) => {
                self.has_savepoint = true;
                self.statement("savepoint s", ['T', 'E'])?;
            }
            ('T', 20..24) if self.has_savepoint => _ = self.statement("rollback to s", ['T', 'E'])?,
            ('I', 0..6) => {
                let level = random.pick(&[
                    "",
                    "",
                    " isolation level repeatable read",
                    " isolation level serializable",
                    " read only",
                ]);
                self.statement(&format!("begin{level}"), ['T', 'E'])?;
            }
            ('I', 6) => _ = self.statement("discard all", ['I', 'I'])?,
            ('I', 7..12) => _ = self.statement("select named_unlock_all(), pg_advisory_unlock_all()", ['I', 'I'])?,
            (_, 30..75) => self.many_calls()?,
            (_, 75..80) => self.fast_path_call()?,
            _ => self.one_call()?,
        }
        Some(())
    }

    fn pick(&mut self) -> (Function, Vec<Value>) {
        let function = self.functions[self.source.random.index(self.functions.len())].clone();
        let values = self.source.arguments(&function);
        (function, values)
    }

    fn one_call(&mut self) -> Option<()> {
        let (function, values) = self.pick();
        let call = match function.is_procedure {
            true => format!("call {}", expression(&function, &values)),
            false => query(&function, &values),
        };
        let replies = self.statement(&call, self.same())?;
        self.calls += 1;
        let token = replies.iter().find_map(|reply| match (reply, function.name.as_str()) {
            (Reply::Row(row), "lease_acquire") => row.get(1).cloned().flatten(),
            (Reply::Row(row), "lease_acquire_wait") => row.first().cloned().flatten(),
            _ => None,
        });
        if let (Some(token), Some(Some(name))) = (token, values.first()) {
            let mut granted = self.source.granted.lock().expect("no panic while it is held");
            if granted.len() >= 32 {
                granted.remove(0);
            }
            granted.push((name.clone(), token));
        }
        Some(())
    }

    /// Several in one statement, each in a block that catches what is expected.
    fn many_calls(&mut self) -> Option<()> {
        let count = 10;
        let mut body = String::from("do $fuzz$ declare r record; got_boolean boolean; got_bigint bigint; begin\n");
        for _ in 0..count {
            let (function, values) = self.pick();
            let call = if function.is_procedure {
                // The last argument gives something back, which wants a variable.
                let (last, others) = function.arguments.split_last().expect("it has one");
                let call = expression(&function, &values[..values.len().min(others.len())]);
                format!("call {}, {} => got_{})", call.strip_suffix(')').expect("a call"), last.0, last.1)
            } else {
                format!("for r in {} loop end loop", query(&function, &values))
            };
            body += &format!(
                "begin {call}; exception when others then if sqlstate <> all ('{{{}}}') then raise; end if; end;\n",
                EXPECTED.join(",")
            );
        }
        body += "end $fuzz$";
        let replies = self.statement(&body, self.same())?;
        let failed = replies.iter().any(|reply| matches!(reply, Reply::Error(_)));
        self.calls += if failed { 1 } else { count };
        Some(())
    }

    fn fast_path_call(&mut self) -> Option<()> {
        let (function, _) = self.pick();
        if function.is_procedure || function.returns_rows {
            return Some(());
        }
        let values: Vec<Value> = function.arguments.iter().map(|(name, kind)| self.source.value(name, kind)).collect();
        self.wire.function_call(function.oid, &values);
        self.finish(&format!("fast path: {}", expression(&function, &values)), self.same())?;
        self.calls += 1;
        Some(())
    }

    /// The one value of a query.
    fn number(&mut self, sql: &str) -> Option<i64> {
        let replies = self.statement(sql, self.same())?;
        let value = replies.iter().find_map(|reply| match reply {
            Reply::Row(row) => row.first().cloned().flatten(),
            _ => None,
        });
        if value.is_none() {
            self.faults.push(format!("{}: no answer to {sql}: {replies:?}", self.role));
        }
        value?.parse().ok()
    }

    fn expect(&mut self, what: &str, sql: &str, due: i64) -> Option<()> {
        let found = self.number(sql)?;
        if found != due {
            self.faults.push(format!("{}: {what}: {found}, not {due}", self.role));
        }
        Some(())
    }

    fn memory(&mut self) -> Option<i64> {
        self.number("select sum(total_bytes) from pg_backend_memory_contexts")
    }

    /// Runs so many calls; what the session has in memory more at the end than after a quarter of them.
    fn run(&mut self, calls: u64) -> Option<i64> {
        let mut early = None;
        while self.calls < calls && self.faults.is_empty() {
            if early.is_none() && self.calls > calls / 4 && self.state == 'I' {
                early = Some(self.memory()?);
            }
            self.step()?;
        }
        if self.state != 'I' {
            self.statement("rollback", ['I', 'I'])?;
        }
        // In the session that is left: what it is said to hold is what it holds.
        self.expect(
            "holds that named_lock_held() does not know",
            "select count(*) from (select name, database is null as wide, sum(holds) as holds from lock_holders \
                                    where pid = pg_backend_pid() and kind in ('session', 'transaction') group by 1, 2) as h \
              where named_lock_held(name, cluster_wide => wide) <> holds",
            0,
        )?;
        self.expect(
            "named locks in the lock manager that the view does not know",
            "select count(*) from (select classid, objid, objsubid from pg_locks \
                                    where locktype = 'advisory' and pid = pg_backend_pid() and granted \
                                      and (objsubid < 16384 or objsubid & 14336 = 0) \
                                   except select classid, objid, objsubid from lock_holders where pid = pg_backend_pid()) as l",
            0,
        )?;
        self.statement("select named_unlock_all()", ['I', 'I'])?;
        self.expect(
            "held after named_unlock_all()",
            "select count(*) from lock_holders where pid = pg_backend_pid() and kind not in ('advisory', 'lease')",
            0,
        )?;
        self.statement("discard all", ['I', 'I'])?;
        self.expect("shown after DISCARD ALL", "select count(*) from lock_holders where pid = pg_backend_pid()", 0)?;
        self.expect(
            "held after DISCARD ALL",
            "select count(*) from pg_locks where locktype = 'advisory' and pid = pg_backend_pid()",
            0,
        )?;
        Some(self.memory()? - early?)
    }
}

#[test]
fn random_calls_of_every_function() {
    let number_of = |variable: &str| std::env::var(variable).ok().map(|text| text.parse().expect("a number"));
    let seed: u64 = number_of("NAMED_LOCKS_SEED").unwrap_or_else(|| u64::from(std::process::id()));
    let calls: u64 = number_of("NAMED_LOCKS_CALLS").unwrap_or(CALLS);
    let cluster =
        Cluster::new(&["deadlock_timeout = 10ms", "synchronous_commit = off", "log_min_error_statement = panic"]);
    let mut admin = cluster.session("admin");
    for (role, more) in ROLES {
        admin.run(&format!(
            "create role {role} login; alter role {role} set lock_timeout = '20ms'; alter role {role} set statement_timeout = '500ms'"
        ));
        admin.run(more);
    }
    admin.run(
        "grant select on pg_backend_memory_contexts to public; \
         grant execute on function pg_get_backend_memory_contexts() to public",
    );
    let functions = functions(&mut admin);
    let granted = Mutex::new(Vec::new());
    println!("seed {seed}, {} functions", functions.len());
    let start = Instant::now();
    let callers: Vec<(Caller<'_>, Option<i64>)> = std::thread::scope(|scope| {
        let callers: Vec<_> = ROLES
            .iter()
            .enumerate()
            .map(|(number, (role, _))| {
                let mut caller = Caller {
                    wire: Wire::open_as(&cluster, role),
                    role,
                    source: Source { random: Random(seed.wrapping_add(number as u64 * 1000)), granted: &granted },
                    functions: &functions,
                    state: 'I',
                    has_savepoint: false,
                    calls: 0,
                    answers: BTreeMap::new(),
                    faults: Vec::new(),
                };
                scope.spawn(move || {
                    let growth = caller.run(calls / ROLES.len() as u64);
                    (caller, growth)
                })
            })
            .collect();
        callers.into_iter().map(|caller| caller.join().expect("no panic in the thread")).collect()
    });
    let total: u64 = callers.iter().map(|(caller, _)| caller.calls).sum();
    println!("{total} calls in {:?}", start.elapsed());
    let log = cluster.log();
    for (caller, growth) in &callers {
        println!("{}: {} calls, {growth:?} bytes more, {:?}", caller.role, caller.calls, caller.answers);
    }
    let tail = log.lines().rev().take(40).collect::<Vec<_>>();
    let tail = tail.into_iter().rev().collect::<Vec<_>>().join("\n");
    for (caller, growth) in callers {
        assert_eq!(caller.faults, [""; 0], "seed {seed}\n{tail}");
        assert!(growth.is_some_and(|bytes| bytes < MEMORY), "{}: {growth:?} bytes more, seed {seed}", caller.role);
        // Every session has seen values and errors of several kinds.
        assert!(caller.answers.len() > 5 && caller.answers["00000"] > 100, "{}: {:?}", caller.role, caller.answers);
    }
    assert!(total >= calls / 10 * 9, "{total}");
    until("the sessions are gone", || {
        admin.int("select count(*) from pg_stat_activity where usename like 'fuzz%'") == 0
    });
    assert_eq!(admin.int("select count(*) from pg_locks where locktype = 'advisory'"), 0);
    assert_eq!(admin.int("select count(*) from lock_waiters"), 0);
    const BAD: [&str; 6] = ["PANIC", "FATAL", "TRAP", "panicked", "terminated by signal", "WARNING"];
    let log = cluster.log().replace("line\n\tbreak", "line break");
    let bad: Vec<&str> = log
        .lines()
        .filter(|line| BAD.iter().any(|word| line.contains(word)) && !line.contains("session_locks is \"warn\""))
        .collect();
    assert_eq!(bad, [""; 0], "seed {seed}");
}
