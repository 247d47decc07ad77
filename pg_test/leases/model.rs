//! Leases against a model: random schedules of three sessions, every answer of which is compared.
//!
//! The model knows what is committed, what each open transaction has changed, and when each lease ends. Time is the
//! server's own; a call that would come near a lease's end waits until that is over, so no answer is left to chance.
//! `NAMED_LOCKS_SEED=n` runs certain schedules again, and `NAMED_LOCKS_CASES=n` more of them.

use crate::pg_test::support::{AS_FAR_AS_THE_DISK, Cluster, Rows, Server, Session, SqlError, unique};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestCaseResult, TestError, TestRng, TestRunner};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

const SESSIONS: usize = 3;
/// The names' permits.
const PERMITS: [usize; 2] = [1, 2];
const SHORT: Duration = Duration::from_millis(500);
const LONG: Duration = Duration::from_secs(3600);
/// No call begins so near before a lease's end.
const MARGIN: Duration = Duration::from_millis(200);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ttl {
    Short,
    Long,
}

impl Ttl {
    fn length(self) -> Duration {
        if self == Ttl::Short { SHORT } else { LONG }
    }

    fn sql(self) -> &'static str {
        if self == Ttl::Short { "'500 ms'" } else { "'1 hour'" }
    }
}

/// How to ask for a lease. Those without a limit are for one that is free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ask {
    Try,
    Limit,
    Hour,
    Null,
    CallTry,
    CallNull,
}

/// One of the tokens known so far, from the newest.
type Pick = usize;

#[derive(Clone, Debug)]
enum Step {
    Acquire { name: usize, ttl: Ttl, ask: Ask, bound: bool, owner: u8, payload: bool },
    OtherPermits { name: usize },
    Renew { pick: Pick, ttl: Option<Ttl>, payload: bool, other_name: bool },
    Release { pick: Pick, keep: Option<Option<Ttl>>, other_name: bool },
    Break { name: usize },
    Guard { pick: Pick },
    Request { name: usize, reason: bool },
    Check { pick: Pick, other_name: bool },
    Look { name: usize },
    Pass,
    Begin { repeatable: bool },
    Savepoint,
    RollbackTo,
    Commit,
    Rollback,
    Reopen { terminated: bool },
    Discard { unlock_all: bool },
    Restart { immediate: bool },
}

fn step() -> impl Strategy<Value = Step> {
    let name = 0..PERMITS.len();
    let ttl = prop_oneof![Just(Ttl::Short), Just(Ttl::Long), Just(Ttl::Long)];
    // Mostly one of the last few.
    let pick = prop_oneof![4 => 0..2_usize, 2 => 0..5_usize, 1 => 0..20_usize];
    let ask = prop_oneof![
        6 => Just(Ask::Try), 1 => Just(Ask::Limit), 1 => Just(Ask::Hour),
        1 => Just(Ask::Null), 2 => Just(Ask::CallTry), 1 => Just(Ask::CallNull),
    ];
    let rarely = prop::bool::weighted(0.1);
    prop_oneof![
        30 => (name.clone(), ttl.clone(), ask, prop::bool::weighted(0.25), 0..3_u8, any::<bool>())
            .prop_map(|(name, ttl, ask, bound, owner, payload)| Step::Acquire { name, ttl, ask, bound, owner, payload }),
        1 => name.clone().prop_map(|name| Step::OtherPermits { name }),
        12 => (pick.clone(), prop::option::of(ttl.clone()), any::<bool>(), rarely)
            .prop_map(|(pick, ttl, payload, other_name)| Step::Renew { pick, ttl, payload, other_name }),
        10 => (pick.clone(), prop::option::weighted(0.4, prop::option::of(ttl)), rarely)
            .prop_map(|(pick, keep, other_name)| Step::Release { pick, keep, other_name }),
        5 => name.clone().prop_map(|name| Step::Break { name }),
        10 => pick.clone().prop_map(|pick| Step::Guard { pick }),
        4 => (name.clone(), any::<bool>()).prop_map(|(name, reason)| Step::Request { name, reason }),
        5 => (pick, rarely).prop_map(|(pick, other_name)| Step::Check { pick, other_name }),
        6 => name.prop_map(|name| Step::Look { name }),
        2 => Just(Step::Pass),
        14 => any::<bool>().prop_map(|repeatable| Step::Begin { repeatable }),
        4 => Just(Step::Savepoint),
        3 => Just(Step::RollbackTo),
        8 => Just(Step::Commit),
        4 => Just(Step::Rollback),
        2 => any::<bool>().prop_map(|terminated| Step::Reopen { terminated }),
        2 => any::<bool>().prop_map(|unlock_all| Step::Discard { unlock_all }),
        1 => any::<bool>().prop_map(|immediate| Step::Restart { immediate }),
    ]
}

/// A moment on the server, known to lie between two of ours.
#[derive(Clone, Copy, Debug)]
struct Moment {
    from: Instant,
    to: Instant,
}

impl Moment {
    fn after(self, length: Duration) -> Moment {
        Moment { from: self.from + length, to: self.to + length }
    }
}

/// A grant, or what `keep_for` left of it.
#[derive(Clone, Debug)]
struct Grant {
    name: usize,
    slot: usize,
    owner: String,
    payload: Option<String>,
    kept: bool,
    /// The session whose end is its own.
    bound: Option<u64>,
    ttl: Ttl,
    granted: Moment,
    ends: Moment,
    requested: Option<String>,
}

/// What a transaction has done and others don't see: grants by token (None: ended), and its locks on (name, slot).
#[derive(Clone, Debug, Default)]
struct Work {
    changes: BTreeMap<i64, Option<Grant>>,
    guards: Vec<(usize, usize)>,
    granted: Vec<(usize, usize)>,
}

#[derive(Debug, Default)]
struct Transaction {
    work: Work,
    savepoint: Option<Work>,
}

/// One of the three.
struct Party {
    session: Session,
    /// A new number for each session, and after each DISCARD ALL.
    life: u64,
    transaction: Option<Transaction>,
    /// Whether it has taken a bound lease: then it keeps a lock that tells that it is there.
    has_bound: bool,
}

/// Whether a schedule goes on.
enum Trouble {
    /// The answer isn't the model's.
    Wrong(String),
    /// The machine was so slow that a lease ended during a call.
    Slow,
}

type Outcome = Result<(), Trouble>;

struct World<'a> {
    server: &'a Server,
    /// A server that may be restarted.
    cluster: Option<&'a Cluster>,
    names: [String; PERMITS.len()],
    parties: Vec<Party>,
    watch: Session,
    lives: u64,
    /// By token.
    committed: BTreeMap<i64, Grant>,
    /// All ever granted, with their names.
    tokens: Vec<(i64, usize)>,
    /// When the step began.
    settled: Instant,
    /// What was called and answered.
    trace: Vec<String>,
    seen: &'a mut BTreeMap<&'static str, u64>,
}

fn wrong<T>(what: impl Into<String>) -> Result<T, Trouble> {
    Err(Trouble::Wrong(what.into()))
}

fn open(server: &Server) -> Session {
    let mut session = server.session("model");
    // What waits for ever would hang the test.
    session.run("set statement_timeout = '30s'");
    session
}

impl World<'_> {
    fn new<'a>(
        server: &'a Server,
        cluster: Option<&'a Cluster>,
        seen: &'a mut BTreeMap<&'static str, u64>,
    ) -> World<'a> {
        let parties = (0..SESSIONS as u64)
            .map(|life| Party { session: open(server), life, transaction: None, has_bound: false })
            .collect();
        World {
            server,
            cluster,
            names: std::array::from_fn(|_| unique("model")),
            parties,
            watch: server.session("model watch"),
            lives: SESSIONS as u64,
            committed: BTreeMap::new(),
            tokens: Vec::new(),
            settled: Instant::now(),
            trace: Vec::new(),
            seen,
        }
    }

    fn count(&mut self, what: &'static str) {
        *self.seen.entry(what).or_default() += 1;
    }

    fn new_life(&mut self, who: usize) {
        self.parties[who].life = self.lives;
        self.parties[who].has_bound = false;
        self.lives += 1;
    }

    /// All ends of leases that the model reckons with.
    fn ends(&self) -> impl Iterator<Item = Moment> {
        let uncommitted = self.parties.iter().filter_map(|party| party.transaction.as_ref()).flat_map(|transaction| {
            let before = transaction.savepoint.iter().flat_map(|work| work.changes.values());
            transaction.work.changes.values().chain(before).flatten()
        });
        self.committed.values().chain(uncommitted).map(|grant| grant.ends)
    }

    /// Waits until no lease ends soon.
    fn settle(&mut self) {
        loop {
            let now = Instant::now();
            self.settled = now;
            let soon = self.ends().filter(|end| now < end.to && end.from < now + MARGIN).map(|end| end.to).max();
            match soon {
                None => return,
                Some(end) => std::thread::sleep(end.saturating_duration_since(now) + Duration::from_millis(1)),
            }
        }
    }

    /// Runs a statement of a step, during which no lease must end.
    fn call(&mut self, who: usize, sql: &str) -> Result<(Result<Rows, SqlError>, Moment), Trouble> {
        let ends: Vec<Moment> = self.ends().filter(|end| end.to > self.settled).collect();
        let from = Instant::now();
        let result = self.parties[who].session.query(sql);
        let to = Instant::now();
        let answer = match &result {
            Ok(rows) => rows.iter().map(|row| row.get(0).unwrap_or("NULL")).collect::<Vec<_>>().join(", "),
            Err(error) => error.code.clone(),
        };
        self.trace.push(format!("{who}: {sql} -- {answer}"));
        if ends.iter().any(|end| end.from < to) {
            return Err(Trouble::Slow);
        }
        Ok((result, Moment { from, to }))
    }

    /// The same for one that must not fail.
    fn ask(&mut self, who: usize, sql: &str) -> Result<(Rows, Moment), Trouble> {
        let (result, at) = self.call(who, sql)?;
        match result {
            Ok(rows) => Ok((rows, at)),
            Err(error) => wrong(format!("{sql}\n{error:#?}")),
        }
    }

    fn lives_on(&self, grant: &Grant) -> bool {
        grant.bound.is_none_or(|life| self.parties.iter().any(|party| party.life == life))
    }

    /// Whether it keeps others out at this moment.
    fn stands(&self, grant: &Grant) -> bool {
        grant.ends.from > Instant::now() && self.lives_on(grant)
    }

    /// Whether somebody holds it.
    fn is_held(&self, grant: &Grant) -> bool {
        !grant.kept && self.stands(grant)
    }

    fn work(&self, who: usize) -> Option<&Work> {
        self.parties[who].transaction.as_ref().map(|transaction| &transaction.work)
    }

    fn others(&self, who: usize) -> impl Iterator<Item = &Work> {
        (0..SESSIONS).filter(move |&other| other != who).filter_map(|other| self.work(other))
    }

    /// What a session sees: the newest committed state, and its own changes.
    fn seen_by(&self, who: usize, token: i64) -> Option<&Grant> {
        match self.work(who).and_then(|work| work.changes.get(&token)) {
            Some(own) => own.as_ref(),
            None => self.committed.get(&token),
        }
    }

    /// All that stands of a name, as a session sees it.
    fn standing(&self, who: usize, name: usize) -> Vec<(i64, Grant)> {
        self.tokens
            .iter()
            .filter(|(_, of)| *of == name)
            .filter_map(|&(token, _)| Some((token, self.seen_by(who, token)?.clone())))
            .filter(|(_, grant)| self.stands(grant))
            .collect()
    }

    /// Whether another session has an uncommitted change of a committed grant.
    fn is_changed_by_others(&self, who: usize, token: i64) -> bool {
        self.committed.contains_key(&token) && self.others(who).any(|work| work.changes.contains_key(&token))
    }

    fn is_any_changed_by_others(&self, who: usize, name: usize) -> bool {
        self.tokens.iter().any(|&(token, of)| of == name && self.is_changed_by_others(who, token))
    }

    /// Whether nothing about a name is uncommitted or guarded.
    fn is_quiet(&self, name: usize) -> bool {
        (0..SESSIONS).filter_map(|who| self.work(who)).all(|work| {
            work.guards.iter().chain(&work.granted).all(|&(of, _)| of != name)
                && work.changes.keys().all(|token| !self.tokens.contains(&(*token, name)))
        })
    }

    /// The slots that a session may be granted, and whether it has to be granted one of them.
    fn free_slots(&self, who: usize, name: usize) -> (Vec<usize>, bool) {
        let standing = self.standing(who, name);
        let stands_in = |slot: usize| standing.iter().any(|(_, grant)| grant.slot == slot);
        let mut free = Vec::new();
        for slot in (0..PERMITS[name]).filter(|&slot| !stands_in(slot)) {
            let here = (name, slot);
            let is_locked = self.others(who).any(|work| work.guards.contains(&here) || work.granted.contains(&here));
            // It stands for all but the one who ended it; or it has ended, and its renewal may be committed.
            let is_taken =
                self.committed.iter().filter(|(_, grant)| (grant.name, grant.slot) == here).any(|(token, grant)| {
                    self.others(who)
                        .filter_map(|work| work.changes.get(token))
                        .any(|change| self.stands(grant) || change.as_ref().is_some_and(|change| self.stands(change)))
                });
            if !is_locked && !is_taken {
                free.push(slot);
            }
        }
        // Beside others' unfinished work on the same lease a try may be refused; but guards of permits that are held are
        // in the way of nobody else.
        let is_clear = self.others(who).all(|work| {
            work.granted.iter().all(|&(of, _)| of != name)
                && work.changes.keys().all(|token| !self.tokens.contains(&(*token, name)))
                && work.guards.iter().all(|&(of, slot)| of != name || stands_in(slot))
        });
        let must = is_clear && !free.is_empty();
        (free, must)
    }

    /// Notes a change: committed at once, or at the end of the transaction.
    fn change(&mut self, who: usize, token: i64, grant: Option<Grant>) {
        if let Some(transaction) = &mut self.parties[who].transaction {
            transaction.work.changes.insert(token, grant);
        } else {
            match grant {
                Some(grant) => self.committed.insert(token, grant),
                None => self.committed.remove(&token),
            };
        }
    }

    /// After an error: back to the savepoint, or out of the transaction.
    fn failed(&mut self, who: usize) -> Outcome {
        let Some(transaction) = &self.parties[who].transaction else { return Ok(()) };
        if transaction.savepoint.is_some() { self.rollback_to(who) } else { self.end(who, "rollback") }
    }

    fn rollback_to(&mut self, who: usize) -> Outcome {
        self.ask(who, "rollback to s")?;
        let transaction = self.parties[who].transaction.as_mut().expect("in a block");
        transaction.work = transaction.savepoint.clone().expect("a savepoint");
        Ok(())
    }

    fn end(&mut self, who: usize, how: &str) -> Outcome {
        self.ask(who, how)?;
        let transaction = self.parties[who].transaction.take().expect("in a block");
        if how == "commit" {
            for (token, grant) in transaction.work.changes {
                self.change(who, token, grant);
            }
        }
        Ok(())
    }

    /// A token to call with; None as long as there is none. Not one that another session has not committed.
    fn pick(&self, who: usize, pick: Pick) -> Option<(i64, usize)> {
        let known: Vec<(i64, usize)> = self
            .tokens
            .iter()
            .copied()
            .filter(|(token, _)| {
                !self.others(who).any(|work| work.changes.contains_key(token)) || { self.committed.contains_key(token) }
            })
            .collect();
        (!known.is_empty()).then(|| known[known.len() - 1 - pick % known.len()])
    }

    /// Compares the error of a call with a token that isn't held.
    fn lost(&mut self, who: usize, sql: &str, token: i64, name: usize, error: &SqlError) -> Outcome {
        let others = self.standing(who, name).iter().any(|(other, grant)| *other != token && self.is_held(grant));
        let due: &[&str] = match (others, PERMITS[name]) {
            (false, _) => &["55000"],
            (true, 1) => &["55006"],
            // Of several permits one may be free.
            (true, _) => &["55006", "55000"],
        };
        if !due.contains(&error.code.as_str()) {
            return wrong(format!("{sql}: {due:?} was due\n{error:#?}"));
        }
        self.count(if others { "lost to another" } else { "lost" });
        self.failed(who)
    }

    fn run(&mut self, who: usize, step: &Step) -> Outcome {
        let in_block = self.parties[who].transaction.is_some();
        // So that what the model says is as of the moment of the call.
        self.settle();
        match *step {
            Step::Acquire { name, ttl, ask, bound, owner, payload } => {
                self.acquire(who, name, ttl, ask, bound, owner, payload)
            }
            Step::OtherPermits { name } => {
                let standing = self.standing(who, name);
                if !self.is_quiet(name) || !standing.iter().any(|(_, grant)| self.is_held(grant)) {
                    return Ok(());
                }
                let sql = format!("select lease_acquire('{}', '1 hour', permits => 7)", self.names[name]);
                match self.call(who, &sql)?.0 {
                    Err(error) if error.code == "22023" => {
                        self.count("other permits");
                        self.failed(who)
                    }
                    other => wrong(format!("{sql}: 22023 was due: {other:?}")),
                }
            }
            Step::Renew { pick, ttl, payload, other_name } => self.renew(who, pick, ttl, payload, other_name),
            Step::Release { pick, keep, other_name } => self.release(who, pick, keep, other_name),
            Step::Break { name } => {
                if self.is_any_changed_by_others(who, name) {
                    return Ok(());
                }
                let standing = self.standing(who, name);
                let sql = format!("select lease_break('{}')", self.names[name]);
                let (rows, _) = self.ask(who, &sql)?;
                if rows[0].get(0) != Some(standing.len().to_string().as_str()) {
                    return wrong(format!("{sql}: {rows:?}, {} were due: {standing:#?}", standing.len()));
                }
                for (token, _) in standing {
                    self.count("broken");
                    self.change(who, token, None);
                }
                Ok(())
            }
            Step::Guard { pick } => self.guard(who, pick),
            Step::Request { name, reason } => {
                if self.is_any_changed_by_others(who, name) {
                    return Ok(());
                }
                let mut held = self.standing(who, name);
                held.retain(|(_, grant)| self.is_held(grant));
                let reason_sql = if reason { ", 'the reason'" } else { "" };
                let sql = format!("select lease_request('{}'{reason_sql})", self.names[name]);
                let (rows, _) = self.ask(who, &sql)?;
                if rows[0].get(0) != Some(if held.is_empty() { "f" } else { "t" }) {
                    return wrong(format!("{sql}: {rows:?}, held are {held:#?}"));
                }
                for (token, mut grant) in held {
                    self.count("requested");
                    grant.requested = Some(if reason { "the reason" } else { "" }.to_owned());
                    self.change(who, token, Some(grant));
                }
                Ok(())
            }
            Step::Check { pick, other_name } => {
                let Some((token, mut name)) = self.pick(who, pick) else { return Ok(()) };
                if other_name {
                    name = 1 - name;
                }
                let held = !other_name && self.seen_by(who, token).is_some_and(|grant| self.is_held(grant));
                let sql = format!("select lease_check('{}', {token})", self.names[name]);
                let (rows, _) = self.ask(who, &sql)?;
                self.count(if held { "checked and held" } else { "checked and lost" });
                if rows[0].get(0) == Some(if held { "t" } else { "f" }) {
                    Ok(())
                } else {
                    wrong(format!("{sql}: {rows:?}, {held} was due: {:#?}", self.seen_by(who, token)))
                }
            }
            Step::Look { name } => self.look(who, name),
            Step::Pass => {
                let last = self.ends().filter(|end| end.from < Instant::now() + SHORT * 2).map(|end| end.to).max();
                if let Some(last) = last {
                    std::thread::sleep(last.saturating_duration_since(Instant::now()) + Duration::from_millis(1));
                    self.trace.push("time passes".to_owned());
                    self.count("passed");
                }
                Ok(())
            }
            Step::Begin { repeatable } if !in_block => {
                let isolation = if repeatable { "repeatable read" } else { "read committed" };
                self.ask(who, &format!("begin isolation level {isolation}; select count(*) from pg_am"))?;
                self.parties[who].transaction = Some(Transaction::default());
                Ok(())
            }
            Step::Savepoint if in_block => {
                self.ask(who, "savepoint s")?;
                let transaction = self.parties[who].transaction.as_mut().expect("in a block");
                transaction.savepoint = Some(transaction.work.clone());
                Ok(())
            }
            Step::RollbackTo if self.parties[who].transaction.as_ref().is_some_and(|t| t.savepoint.is_some()) => {
                self.count("rolled back to");
                self.rollback_to(who)
            }
            Step::Commit if in_block => {
                self.count("committed");
                self.end(who, "commit")
            }
            Step::Rollback if in_block => {
                self.count("rolled back");
                self.end(who, "rollback")
            }
            Step::Reopen { terminated } => {
                let new = open(self.server);
                let old = std::mem::replace(&mut self.parties[who].session, new);
                let pid = old.pid;
                if terminated {
                    self.watch.run(&format!("select pg_terminate_backend({pid})"));
                }
                drop(old);
                self.watch.until_gone(pid);
                self.parties[who].transaction = None;
                self.new_life(who);
                self.trace.push(format!("{who}: a new session"));
                self.count("reopened");
                Ok(())
            }
            Step::Discard { unlock_all } if !in_block => {
                if unlock_all {
                    self.ask(who, "select pg_advisory_unlock_all()")?;
                } else {
                    self.ask(who, "discard all")?;
                    self.ask(who, "set statement_timeout = '30s'")?;
                }
                self.new_life(who);
                self.count("discarded");
                Ok(())
            }
            Step::Restart { immediate } => {
                let Some(cluster) = self.cluster else { return Ok(()) };
                if immediate {
                    // A crash may undo the last releases: not here.
                    self.watch.run(AS_FAR_AS_THE_DISK);
                    cluster.stop_immediate();
                    cluster.start();
                } else {
                    cluster.restart();
                }
                for who in 0..SESSIONS {
                    self.parties[who].session = open(self.server);
                    self.parties[who].transaction = None;
                    self.new_life(who);
                }
                self.watch = self.server.session("model watch");
                self.trace.push("restarted".to_owned());
                self.count("restarted");
                Ok(())
            }
            Step::Begin { .. }
            | Step::Savepoint
            | Step::RollbackTo
            | Step::Commit
            | Step::Rollback
            | Step::Discard { .. } => Ok(()),
        }
    }

    #[allow(clippy::too_many_arguments, reason = "the step's own")]
    fn acquire(
        &mut self,
        who: usize,
        name: usize,
        ttl: Ttl,
        ask: Ask,
        bound: bool,
        owner: u8,
        payload: bool,
    ) -> Outcome {
        let in_block = self.parties[who].transaction.is_some();
        let (free, must) = self.free_slots(who, name);
        let by_call = !in_block && matches!(ask, Ask::CallTry | Ask::CallNull);
        let timeout = match ask {
            Ask::Hour if must => "'1 hour'",
            Ask::Null | Ask::CallNull if must => "null",
            Ask::Limit => "'15 ms'",
            _ => "'0'",
        };
        let owner = format!("owner {owner}");
        let payload = payload.then(|| format!("{{\"by\": {who}}}"));
        let arguments = format!(
            "'{}', {}, {timeout}, '{owner}', {}, {}, {bound}",
            self.names[name],
            ttl.sql(),
            payload.as_ref().map_or("null".to_owned(), |payload| format!("'{payload}'")),
            PERMITS[name]
        );
        let sql = if by_call {
            format!("call lease_acquire_wait({arguments})")
        } else {
            format!(
                "select token, acquired, remaining, expires_at is null as forgotten, holder, \
                        retry_after, extract(epoch from retry_after) * 1000 as milliseconds \
                   from lease_acquire({arguments})"
            )
        };
        let (rows, at) = self.ask(who, &sql)?;
        let Some(token) = rows[0].get(0) else {
            if must {
                return wrong(format!("{sql}: refused, free are {free:?}"));
            }
            if !free.is_empty() {
                self.count("refused though one may be free");
                return Ok(());
            }
            self.count(if self.is_quiet(name) { "refused" } else { "refused beside uncommitted work" });
            return if by_call { Ok(()) } else { self.refusal(who, name, &sql, &rows, at) };
        };
        let token: i64 = token.parse().expect("a token");
        if free.is_empty() {
            return wrong(format!("{sql}: granted, nothing is free"));
        }
        if self.tokens.iter().any(|&(before, _)| before >= token) {
            return wrong(format!("{sql}: {token} is not higher than all before: {:?}", self.tokens));
        }
        if !by_call {
            let remaining = if ttl == Ttl::Short { "00:00:00.5" } else { "01:00:00" };
            let said: Vec<Option<&str>> = ["acquired", "remaining", "forgotten", "holder", "retry_after"]
                .map(|column| rows[0].get(column))
                .into();
            if said != [Some("t"), Some(remaining), Some("f"), Some(&owner), None] {
                return wrong(format!("{sql}: {rows:?}"));
            }
        }
        let (slot, _) = self.ask(who, &format!("select slot from _lease where token = {token}"))?;
        let slot: usize = match slot.first().and_then(|row| row.get(0)) {
            Some(slot) => slot.parse().expect("a number"),
            None => return wrong(format!("{sql}: {token} has no row")),
        };
        if !free.contains(&slot) {
            return wrong(format!("{sql}: slot {slot} is granted, free are {free:?}"));
        }
        self.count(if in_block { "granted in a block" } else { "granted" });
        self.tokens.push((token, name));
        let life = self.parties[who].life;
        self.parties[who].has_bound |= bound;
        let grant = Grant {
            name,
            slot,
            owner,
            payload,
            kept: false,
            bound: bound.then_some(life),
            ttl,
            granted: at,
            ends: at.after(ttl.length()),
            requested: None,
        };
        self.change(who, token, Some(grant));
        if let Some(transaction) = &mut self.parties[who].transaction {
            transaction.work.granted.push((name, slot));
        }
        Ok(())
    }

    /// What a refused try says: all about the holder that expires first, where nothing is uncommitted.
    fn refusal(&mut self, who: usize, name: usize, sql: &str, rows: &Rows, at: Moment) -> Outcome {
        if rows[0].get("acquired") != Some("f") || rows[0].get("retry_after").is_none() {
            return wrong(format!("{sql}: {rows:?}"));
        }
        if !self.is_quiet(name) {
            return Ok(());
        }
        let standing = self.standing(who, name);
        let (_, first) = standing.iter().min_by_key(|(_, grant)| grant.ends.from).expect("somebody is in the way");
        let holder = (!first.kept).then_some(first.owner.as_str());
        let milliseconds: f64 = rows[0].get("milliseconds").and_then(|text| text.parse().ok()).expect("a number");
        let least = first.ends.from.saturating_duration_since(at.to).as_secs_f64() * 1000.0;
        let most = first.ends.to.saturating_duration_since(at.from).as_secs_f64() * 1000.0;
        if rows[0].get("holder") != holder || milliseconds < least - 2.0 || milliseconds > most + 2.0 {
            return wrong(format!("{sql}: {rows:?}\nin the way is {first:#?}, for {least} to {most} ms"));
        }
        Ok(())
    }

    fn renew(&mut self, who: usize, pick: Pick, ttl: Option<Ttl>, payload: bool, other_name: bool) -> Outcome {
        let Some((token, mut name)) = self.pick(who, pick) else { return Ok(()) };
        if self.is_changed_by_others(who, token) {
            return Ok(());
        }
        let mut grant = self.seen_by(who, token).filter(|grant| self.is_held(grant)).cloned();
        if other_name {
            name = 1 - name;
            grant = None;
        }
        let sql = format!(
            "select remaining, release_requested, waiters, expires_at is null as forgotten \
               from lease_renew('{}', {token}, {}, {})",
            self.names[name],
            ttl.map_or("null", Ttl::sql),
            if payload { "'{\"renewed\": true}'" } else { "null" }
        );
        let (result, at) = self.call(who, &sql)?;
        match (result, grant) {
            (Ok(rows), Some(mut grant)) => {
                grant.ttl = ttl.unwrap_or(grant.ttl);
                grant.ends = at.after(grant.ttl.length());
                if payload {
                    grant.payload = Some("{\"renewed\": true}".to_owned());
                }
                let remaining = if grant.ttl == Ttl::Short { "00:00:00.5" } else { "01:00:00" };
                let said: Vec<Option<&str>> =
                    ["remaining", "release_requested", "waiters", "forgotten"].map(|column| rows[0].get(column)).into();
                if said != [Some(remaining), grant.requested.as_deref(), Some("0"), Some("f")] {
                    return wrong(format!("{sql}: {rows:?}\nof {grant:#?}"));
                }
                self.count("renewed");
                self.change(who, token, Some(grant));
                Ok(())
            }
            (Err(error), None) => self.lost(who, &sql, token, name, &error),
            (result, grant) => wrong(format!("{sql}: {result:?}\nof {grant:#?}")),
        }
    }

    fn release(&mut self, who: usize, pick: Pick, keep: Option<Option<Ttl>>, other_name: bool) -> Outcome {
        let Some((token, mut name)) = self.pick(who, pick) else { return Ok(()) };
        if self.is_changed_by_others(who, token) {
            return Ok(());
        }
        let mut grant = self.seen_by(who, token).filter(|grant| self.is_held(grant)).cloned();
        if other_name {
            name = 1 - name;
            grant = None;
        }
        // Not near the moment to which it would be kept.
        let kept_to = match (&grant, keep) {
            (Some(grant), Some(Some(keep))) => Some(grant.granted.after(keep.length())),
            _ => None,
        };
        let now = Instant::now();
        if kept_to.is_some_and(|end| end.from < now + MARGIN && now <= end.to) {
            return Ok(());
        }
        let keep_sql = keep.map_or("", |keep| {
            keep.map_or(", '0'", |keep| if keep == Ttl::Short { ", '500 ms'" } else { ", '1 hour'" })
        });
        let sql = format!("select lease_release('{}', {token}{keep_sql})", self.names[name]);
        let (rows, at) = self.ask(who, &sql)?;
        if kept_to.is_some_and(|end| end.from > at.from && end.from < at.to) {
            return Err(Trouble::Slow);
        }
        if rows[0].get(0) != Some(if grant.is_some() { "t" } else { "f" }) {
            return wrong(format!("{sql}: {rows:?} of {grant:#?}, which is {:#?}", self.seen_by(who, token)));
        }
        let Some(mut grant) = grant else {
            self.count("not released");
            return Ok(());
        };
        match kept_to {
            Some(end) if end.from > at.to => {
                self.count("kept");
                grant.kept = true;
                // Nobody holds it any more, so it ends with nobody's session.
                grant.bound = None;
                grant.ends = end;
                self.change(who, token, Some(grant));
            }
            _ => {
                self.count("released");
                self.change(who, token, None);
            }
        }
        Ok(())
    }

    fn guard(&mut self, who: usize, pick: Pick) -> Outcome {
        let Some((token, name)) = self.pick(who, pick) else { return Ok(()) };
        // It would wait for the end of a grant of the same permit.
        if self.others(who).any(|work| work.granted.iter().any(|&(of, _)| of == name)) {
            return Ok(());
        }
        let grant = self.seen_by(who, token).filter(|grant| self.is_held(grant)).cloned();
        let sql = format!("select lease_guard('{}', {token})", self.names[name]);
        match (self.call(who, &sql)?.0, grant) {
            (Ok(_), Some(grant)) => {
                self.count("guarded");
                if let Some(transaction) = &mut self.parties[who].transaction {
                    transaction.work.guards.push((name, grant.slot));
                }
                Ok(())
            }
            (Err(error), None) => self.lost(who, &sql, token, name, &error),
            (result, grant) => wrong(format!("{sql}: {result:?}\nof {grant:#?}")),
        }
    }

    fn look(&mut self, who: usize, name: usize) -> Outcome {
        let standing = self.standing(who, name);
        let mut due: Vec<String> = standing
            .iter()
            .filter(|(_, grant)| self.is_held(grant))
            .map(|(_, grant)| {
                let payload = grant.payload.as_ref().map_or(String::new(), |payload| format!(" {payload}"));
                format!("{}{payload} {}", grant.owner, PERMITS[name])
            })
            .collect();
        due.sort();
        let sql = format!("select concat_ws(' ', owner, payload, permits) from lease_holder('{}')", self.names[name]);
        let (rows, _) = self.ask(who, &sql)?;
        let mut said: Vec<String> = rows.iter().map(|row| row.get(0).expect("not null").to_owned()).collect();
        said.sort();
        if said != due {
            return wrong(format!("{sql}: {said:?}, due was {due:?}"));
        }
        // The view has what is committed; about a transaction's own changes the contract says nothing.
        if self.work(who).is_some_and(|work| !work.changes.is_empty()) {
            return Ok(());
        }
        let mut due: Vec<String> = standing
            .iter()
            .map(|(token, grant)| if grant.kept { "kept".to_owned() } else { format!("held {} {token}", grant.owner) })
            .collect();
        due.sort();
        let sql = format!(
            "select case state when 'kept' then state else concat_ws(' ', state, owner, token) end \
               from lock_holders where kind = 'lease' and name = '{}'",
            self.names[name]
        );
        let (rows, _) = self.ask(who, &sql)?;
        let mut said: Vec<String> = rows.iter().map(|row| row.get(0).expect("not null").to_owned()).collect();
        said.sort();
        self.count("looked");
        if said == due { Ok(()) } else { wrong(format!("{sql}: {said:?}, due was {due:?}")) }
    }

    /// After the last step: nothing uncommitted is left, nor a lock of a session that needs none.
    fn finish(&mut self) -> Outcome {
        for who in 0..SESSIONS {
            if self.parties[who].transaction.is_some() {
                self.end(who, "rollback")?;
            }
            if !self.parties[who].has_bound {
                let pid = self.parties[who].session.pid;
                let left = self.watch.locks_of(pid);
                if left != 0 {
                    return wrong(format!("session {who} is left with {left} locks"));
                }
            }
        }
        for name in 0..PERMITS.len() {
            for who in 0..SESSIONS {
                self.settle();
                self.look(who, name)?;
            }
        }
        Ok(())
    }
}

fn number_of(variable: &str, otherwise: u64) -> u64 {
    std::env::var(variable).ok().and_then(|text| text.parse().ok()).unwrap_or(otherwise)
}

fn schedule(
    server: &Server,
    cluster: Option<&Cluster>,
    steps: &[(usize, Step)],
    seen: &mut BTreeMap<&'static str, u64>,
) -> TestCaseResult {
    let mut world = World::new(server, cluster, seen);
    let mut outcome = Ok(());
    for (number, (who, step)) in steps.iter().enumerate() {
        outcome = world.run(*who, step);
        if let Err(Trouble::Wrong(what)) = outcome {
            outcome = wrong(format!("step {number}, session {who}, {step:?}:\n{what}"));
        }
        if outcome.is_err() {
            break;
        }
    }
    let outcome = outcome.and_then(|()| world.finish());
    match outcome {
        Ok(()) => Ok(()),
        Err(Trouble::Slow) => Err(TestCaseError::reject("the machine was too slow")),
        Err(Trouble::Wrong(what)) => {
            Err(TestCaseError::fail(format!("{what}\nwhat was called before:\n{}", world.trace.join("\n"))))
        }
    }
}

/// Runs so many schedules; a failure is made as short as can be.
fn schedules(
    server: &Server,
    cluster: Option<&Cluster>,
    seed: u64,
    cases: u32,
    seen: &mut BTreeMap<&'static str, u64>,
) {
    let config = Config {
        cases,
        max_global_rejects: cases * 10,
        max_shrink_iters: 200,
        failure_persistence: None,
        ..Config::default()
    };
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let mut runner = TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &bytes));
    let steps = prop::collection::vec((0..SESSIONS, step()), 30..90);
    let seen = std::cell::RefCell::new(seen);
    let result = runner.run(&steps, |steps| schedule(server, cluster, &steps, &mut seen.borrow_mut()));
    match result {
        Ok(()) => {}
        Err(TestError::Fail(why, steps)) => panic!("NAMED_LOCKS_SEED={seed}\n{steps:#?}\n{why}"),
        Err(TestError::Abort(why)) => panic!("NAMED_LOCKS_SEED={seed}: {why}"),
    }
}

/// That the schedules were worth something.
#[track_caller]
fn met(seen: &BTreeMap<&'static str, u64>, what: &[&str]) {
    println!("{seen:?}");
    for what in what {
        assert!(seen.get(what).is_some_and(|&count| count > 0), "`{what}` never came: {seen:?}");
    }
}

#[test]
fn random_schedules_of_three_sessions_answer_as_the_model_does() {
    let seed = number_of("NAMED_LOCKS_SEED", 20_250_103);
    let cases = number_of("NAMED_LOCKS_CASES", 30) as u32;
    let server = Server::shared().new_database("model", "UTF8");
    // Mostly they let time pass, so there are several side by side.
    let runners: Vec<_> = (0..4)
        .map(|number| {
            let server = server.clone();
            std::thread::spawn(move || {
                let mut seen = BTreeMap::new();
                schedules(&server, None, seed + number, cases, &mut seen);
                seen
            })
        })
        .collect();
    let mut seen = BTreeMap::new();
    for runner in runners {
        let own = runner.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        own.into_iter().for_each(|(what, count)| *seen.entry(what).or_default() += count);
    }
    met(
        &seen,
        &[
            "granted",
            "granted in a block",
            "refused",
            "refused beside uncommitted work",
            "other permits",
            "renewed",
            "lost",
            "lost to another",
            "released",
            "not released",
            "kept",
            "broken",
            "guarded",
            "requested",
            "checked and held",
            "checked and lost",
            "looked",
            "passed",
            "committed",
            "rolled back",
            "rolled back to",
            "reopened",
            "discarded",
        ],
    );
}

#[test]
fn random_schedules_over_restarts_answer_as_the_model_does() {
    let seed = number_of("NAMED_LOCKS_SEED", 20_250_104);
    let cluster = Cluster::new(&[]);
    let mut seen = BTreeMap::new();
    let cases = number_of("NAMED_LOCKS_CASES", 12) as u32;
    schedules(&cluster, Some(&cluster), seed, cases, &mut seen);
    met(&seen, &["granted", "refused", "renewed", "lost", "guarded", "checked and held", "looked", "restarted"]);
}
