//! Every function in every mode: the table, the same in the documentation, and each cell by what really happens.

use super::{Mode, Pin, could_take};
use crate::pg_test::support::surface::{Does, FUNCTIONS, Function};
use crate::pg_test::support::{Pooler, Scope, Server, Session, SqlError, unique};
use postgres::SimpleQueryRow;
use std::collections::BTreeSet;

/// What a function does behind a pooler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// The same as on a connection of the client's own.
    Works,
    /// What it takes is held to the end of its statement, or of the string of statements sent as one: there are no
    /// transaction blocks.
    OneStatement,
    /// What it takes stays on the server's connection when its client has gone: whoever comes there next has it, and
    /// everybody else is shut out.
    Stranded,
    /// It meets what the same transaction took. In the next one it may find nothing, as that may be on another server
    /// connection, or another client may find it.
    SameTransaction,
    /// The same within a string of statements sent as one.
    SameStatement,
}
use Outcome::{OneStatement, SameStatement, SameTransaction, Stranded, Works};

impl Outcome {
    /// What the documentation says.
    fn words(self) -> &'static str {
        match self {
            Works => "yes",
            OneStatement => "for one statement",
            Stranded => "**stranded**",
            SameTransaction => "in one transaction",
            SameStatement => "in one statement",
        }
    }
}

/// Functions that do the same.
pub(super) struct Row {
    functions: &'static [&'static str],
    /// An argument that makes the difference.
    with: &'static str,
    session: Outcome,
    pub(super) transaction: Outcome,
    statement: Outcome,
}

impl Row {
    fn outcome(&self, mode: Mode) -> Outcome {
        match mode {
            Mode::Session => self.session,
            Mode::Transaction => self.transaction,
            Mode::Statement => self.statement,
        }
    }

    /// Each function of the surface that it is about.
    pub(super) fn of_surface(&self) -> impl Iterator<Item = &'static Function> {
        FUNCTIONS.iter().filter(|function| self.functions.contains(&function.name()))
    }

    /// A statement of the surface with the argument that makes the difference.
    pub(super) fn change(&self, statement: &str) -> String {
        match (self.with, statement.rsplit_once(')')) {
            ("", _) | (_, None) => statement.to_owned(),
            (with, Some((head, tail))) => format!("{head}, {with}){tail}"),
        }
    }
}

pub(super) const MATRIX: [Row; 5] = [
    Row {
        functions: &[
            "named_xact_lock",
            "named_xact_lock_strict",
            "named_xact_lock_all",
            "named_xact_lock_any",
            "named_xact_lock_tree",
            "advisory_xact_lock",
            "advisory_xact_lock_strict",
            "lease_guard",
        ],
        with: "",
        session: Works,
        transaction: Works,
        statement: OneStatement,
    },
    Row {
        functions: &[
            "named_lock",
            "named_lock_strict",
            "named_lock_wait",
            "named_lock_all",
            "named_lock_any",
            "named_lock_tree",
            "named_semaphore",
            "advisory_lock",
            "advisory_lock_strict",
        ],
        with: "",
        session: Works,
        transaction: Stranded,
        statement: Stranded,
    },
    Row {
        functions: &["lease_acquire", "lease_acquire_wait"],
        with: "bound => true",
        session: Works,
        transaction: Stranded,
        statement: Stranded,
    },
    Row {
        functions: &[
            "named_unlock",
            "named_unlock_all",
            "named_unlock_tree",
            "named_semaphore_release",
            "named_lock_held",
            "named_lock_convert",
            "named_lock_extend",
        ],
        with: "",
        session: Works,
        transaction: SameTransaction,
        statement: SameStatement,
    },
    Row {
        functions: &[
            "lease_acquire",
            "lease_acquire_wait",
            "lease_renew",
            "lease_release",
            "lease_check",
            "lease_request",
            "lease_break",
            "lease_holder",
            "lock_holders",
            "lock_waiters",
            "lock_graph",
            "lock_stats",
            "lock_stats_reset",
            "named_lock_key",
            "lock_domain_set",
            "lock_domain_drop",
        ],
        with: "",
        session: Works,
        transaction: Works,
        statement: Works,
    },
];

#[test]
fn every_function_has_its_row() {
    // A trigger is nothing that a client calls, and a function with an underscore is called by the view of its name.
    let called = FUNCTIONS.iter().filter(|function| function.does != Does::Trigger);
    let surface: BTreeSet<&str> = called.map(|function| function.name().trim_start_matches('_')).collect();
    let rows: Vec<&str> =
        MATRIX.iter().filter(|row| row.with.is_empty()).flat_map(|row| row.functions).copied().collect();
    assert_eq!(rows.iter().copied().collect::<BTreeSet<_>>(), surface);
    assert_eq!(rows.len(), surface.len(), "each has one row");
}

#[test]
fn the_documentation_has_the_table() {
    let mut table = "| | session | transaction | statement |\n|---|---|---|---|\n".to_owned();
    for row in MATRIX {
        let mut functions = row.functions.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
        if !row.with.is_empty() {
            functions += &format!(" with `{}`", row.with);
        }
        let outcomes = Mode::ALL.map(|mode| row.outcome(mode).words()).join(" | ");
        table += &format!("| {functions} | {outcomes} |\n");
    }
    let page = include_str!("../../../docs/operations/poolers.md");
    let (_, section) = page.split_once("\n## Behind a pooler\n").expect("the section");
    let (section, _) = section.split_once("\n## ").expect("the next section");
    assert!(section.contains(&format!("\n{table}\n")), "the page's table is to be:\n{table}\nnot:\n{section}");
}

#[test]
fn each_cell_of_session_pooling() {
    each_cell(Mode::Session);
}

#[test]
fn each_cell_of_transaction_pooling() {
    each_cell(Mode::Transaction);
}

#[test]
fn each_cell_of_statement_pooling() {
    each_cell(Mode::Statement);
}

/// Tries every function and compares what happened with the table.
fn each_cell(mode: Mode) {
    let mut trial = Trial::new(mode);
    let mut tried = Vec::new();
    let mut due = Vec::new();
    for row in &MATRIX {
        for function in row.of_surface() {
            let what = row.change(function.signature);
            eprintln!("{mode:?}: {what}");
            tried.push((what.clone(), trial.outcome(row, function)));
            due.push((what, row.outcome(mode)));
        }
    }
    assert_eq!(tried, due);
}

/// Where functions are tried: a database of their own, for domain rules and statistics are everybody's.
struct Trial {
    mode: Mode,
    server: Server,
    /// With one server connection: the next client gets the same one.
    one: Pooler,
    /// With two: it may get another one.
    two: Pooler,
    /// Sees, never waits; past the pooler, as all that is called direct here.
    watch: Session,
    rival: Session,
}

/// How long it is held what a call takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Life {
    /// When the statement has ended.
    after_statement: bool,
    /// Between the statements of a transaction block; None where no block is to be had. Looked at if it didn't outlive its
    /// statement alone.
    in_block: Option<bool>,
    /// When the client has gone.
    after_client: bool,
}

impl Trial {
    fn new(mode: Mode) -> Trial {
        let server = Server::shared().new_database("poolers", "UTF8");
        Trial {
            mode,
            one: mode.pooler(&server, 1),
            two: mode.pooler(&server, 2),
            watch: server.session("watch"),
            rival: server.session("rival"),
            server,
        }
    }

    fn outcome(&mut self, row: &Row, function: &Function) -> Outcome {
        match function.does {
            Does::Own | Does::Convert | Does::Extend => self.outcome_of_using(function),
            _ if function.does.acquires() || function.name() == "lease_guard" => self.outcome_of_taking(row, function),
            _ => self.outcome_of_calling(function),
        }
    }

    /// What takes something: for how long is it held, through the pooler and without it?
    fn outcome_of_taking(&mut self, row: &Row, function: &Function) -> Outcome {
        let direct = self.life(row, function, true);
        let pooled = self.life(row, function, false);
        match (direct, pooled) {
            _ if pooled == direct => Works,
            (Life { after_client: false, .. }, Life { after_client: true, .. }) => Stranded,
            (Life { in_block: Some(true), .. }, Life { in_block: None, after_statement: false, .. }) => OneStatement,
            _ => panic!("{}: {direct:?}, and through the pooler {pooled:?}", function.signature),
        }
    }

    fn life(&mut self, row: &Row, function: &Function, direct: bool) -> Life {
        let through = if direct { self.server.clone() } else { Server::clone(&self.one) };
        let name = unique("pooled");
        let call = row.change(&function.prepared(&mut self.watch, &name));
        let mut client = through.session("client");
        let pid = client.pid;
        client.run(&call);
        let after_statement = self.held(function, &name, pid);
        drop(client);
        if direct {
            self.watch.until_gone(pid);
        }
        if after_statement {
            let mut next = through.session("next client");
            assert!(direct || next.pid == pid, "the pooler has one connection");
            let after_client = self.held(function, &name, pid);
            next.run("discard all");
            return Life { after_statement, in_block: None, after_client };
        }
        let in_block = self.held_in_block(function, &name, &call, &through);
        Life { after_statement, in_block, after_client: false }
    }

    /// Whether it is held between the statements of a block, and not after that; None: the pooler allows none.
    fn held_in_block(&mut self, function: &Function, name: &str, call: &str, through: &Server) -> Option<bool> {
        let mut client = through.session("client");
        if self.begins(&mut client) {
            client.run(call);
            let in_block = self.held(function, name, client.pid);
            client.run("commit");
            assert!(!self.held(function, name, client.pid), "{call}: held after the commit");
            return Some(in_block);
        }
        // A string of statements is one transaction, without a block.
        let mut client = through.session("client");
        let rows = client.run(&format!(
            "{call}; select count(*) from pg_locks where locktype = 'advisory' and pid = pg_backend_pid()"
        ));
        let held = rows.last().and_then(|row| row.get(0));
        assert_ne!(held, Some("0"), "{call}: to the end of its statement");
        assert!(!self.held(function, name, client.pid), "{call}: held after its statement");
        None
    }

    /// Whether that server process holds what the function takes, or, for a lease, whether anybody does; others are shut out
    /// just as long.
    fn held(&mut self, function: &Function, name: &str, pid: i32) -> bool {
        let leases = format!("select count(*) from lock_holders where kind = 'lease' and name = '{name}'");
        let held = match function.does {
            Does::Lease => self.watch.int(&leases) > 0,
            _ => self.watch.locks_of(pid) > 0,
        };
        let by_rival = match (function.does, function.name()) {
            (Does::Lease, _) => "select acquired from lease_acquire('NAME', '1 hour')",
            (Does::Lock(Scope::Session), "named_lock_wait") => "select named_lock('NAME', '0')",
            (Does::Lock(_), "named_semaphore") => "select named_semaphore('NAME', 1, '0')",
            (Does::Lock(_) | Does::Native(_), _) => function.call,
            // Nobody else takes a guard.
            _ => return held,
        };
        assert_eq!(could_take(&mut self.rival, &by_rival.replace("NAME", name)), !held, "{}", function.signature);
        held
    }

    /// Begins a transaction block, if the pooler allows that.
    fn begins(&self, client: &mut Session) -> bool {
        match client.query("begin") {
            Ok(_) => true,
            Err(error) => {
                assert_eq!(self.mode, Mode::Statement, "{error:#?}");
                assert!(["08P01", "closed"].contains(&error.code.as_str()), "{error:#?}");
                false
            }
        }
    }

    /// What is about the session's own holds: does it find them?
    fn outcome_of_using(&mut self, function: &Function) -> Outcome {
        // What it says where the lock is, and where not.
        let mut client = self.server.session("direct");
        let call = function.prepared(&mut client, &unique("pooled"));
        let found = said(function, &call, &mut client);
        drop(client);
        let name = unique("pooled");
        let not_found = said(function, &call_for(function, &name, "1"), &mut self.server.session("direct"));
        assert_ne!(found, not_found);

        let mut client = self.two.session("client");
        let rows = client.run(&format!("{}; select pg_backend_pid()", function.before.replace("NAME", &name)));
        let call = call_for(function, &name, rows[0].get(0).unwrap_or_default());
        let holder: i32 = rows[1].get(0).and_then(|pid| pid.parse().ok()).expect("a process id");
        let held = format!("select count(*) from lock_holders where pid = {holder} and name = '{name}'");
        if self.mode == Mode::Session {
            // Nobody else comes to its connection.
            assert_ne!(self.two.session("other client").pid, holder);
            assert_eq!(said(function, &call, &mut client), found);
            return Works;
        }
        let pin = Pin::on(&self.two, holder, &mut self.watch);
        assert_eq!(said(function, &call, &mut client), not_found, "{call}: on another connection");
        assert_eq!(self.watch.int(&held), 1);
        let other = client.int("select pg_backend_pid()") as i32;
        pin.end(&mut self.watch);

        let pin = Pin::on(&self.two, other, &mut self.watch);
        let mut stranger = self.two.session("stranger");
        assert_eq!(said(function, &call, &mut stranger), found, "{call}: by another client");
        stranger.run("discard all");
        pin.end(&mut self.watch);

        let name = unique("pooled");
        if self.begins(&mut client) {
            let call = function.prepared(&mut client, &name);
            assert_eq!(said(function, &call, &mut client), found);
            client.run("select pg_advisory_unlock_all(); commit");
            return SameTransaction;
        }
        let string = match function.call.split_once("VALUE") {
            Some((head, tail)) => format!("{head}({}){tail}", function.before),
            None => format!("{}; {}", function.before, function.call),
        };
        let string = format!("{string}; select pg_advisory_unlock_all()").replace("NAME", &name);
        let rows = self.two.session("client").run(&string);
        assert_eq!(answer(function, rows.iter().rev().nth(1)), found);
        SameStatement
    }

    /// What only looks, writes or is about leases: does it say the same through the pooler, to another client than the one
    /// who came before, and on another connection?
    fn outcome_of_calling(&mut self, function: &Function) -> Outcome {
        let name = unique("pooled");
        self.set_a_rule(function);
        let call = function.prepared(&mut self.watch, &name);
        let direct = said(function, &call, &mut self.watch);

        let name = unique("pooled");
        self.set_a_rule(function);
        let before = if function.before.is_empty() { "select 0" } else { function.before };
        let mut client = self.two.session("client");
        let rows = client.run(&format!("{}; select pg_backend_pid()", before.replace("NAME", &name)));
        let call = call_for(function, &name, rows[0].get(0).unwrap_or_default());
        let pid: i32 = rows[1].get(0).and_then(|pid| pid.parse().ok()).expect("a process id");
        let pin = (self.mode != Mode::Session).then(|| Pin::on(&self.two, pid, &mut self.watch));
        let mut other = self.two.session("other client");
        assert_ne!(other.pid, pid);
        let pooled = said(function, &call, &mut other);
        pin.into_iter().for_each(|pin| pin.end(&mut self.watch));
        assert_eq!(pooled, direct, "{call}");
        Works
    }

    /// There is a rule to be dropped.
    fn set_a_rule(&mut self, function: &Function) {
        if function.name() == "lock_domain_drop" {
            self.watch.run("select lock_domain_set('of the table', max_wait => '1 s')");
        }
    }
}

/// A call of the surface, with the value that came before.
fn call_for(function: &Function, name: &str, value: &str) -> String {
    function.call.replace("NAME", name).replace("VALUE", value)
}

/// What a call said, but for what is never the same twice: an error's code or the first value.
fn said(function: &Function, call: &str, session: &mut Session) -> String {
    match session.query(call) {
        Ok(rows) => answer(function, rows.first()),
        Err(SqlError { code, .. }) => code,
    }
}

fn answer(function: &Function, row: Option<&SimpleQueryRow>) -> String {
    let looks_at_all = function.does == Does::Look && function.before.is_empty() && function.name() != "named_lock_key";
    match row {
        _ if looks_at_all => "an answer".to_owned(),
        None => "no row".to_owned(),
        Some(row) => match row.get(0) {
            None => "NULL".to_owned(),
            Some(value) if ["", "t", "f"].contains(&value) || value.parse::<i64>().is_ok() => value.to_owned(),
            Some(_) => "a text, a time".to_owned(),
        },
    }
}
