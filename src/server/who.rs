//! Who holds and who waits: the lock manager's table, the registry's names and the sessions' activity put together.

use super::activity::{self, Activity};
use super::arguments::ServerText;
use super::clock;
use super::ffi;
use super::lease::{self, See};
use super::lock_table::{self, LockTable, Row};
use super::registry::{Party, Published, QueueWait, Wanted};
use super::report::Problem;
use super::session::{self, describe, published};
use super::tables::Tables;
use crate::rules::error::{self, Error};
use crate::rules::graph::{self, Edge};
use crate::rules::holds::Scope;
use crate::rules::key::{Kind, Space, Tag};
use crate::rules::lease::{Bound, Grant};
use crate::rules::mode::Mode;
use crate::rules::name::{display, domain_of};
use pgrx::pg_sys;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::CStr;
use std::net::IpAddr;

/// One holder of a lock: one session or prepared transaction, in one scope and one mode.
#[derive(Clone, Debug)]
pub struct HolderRow {
    /// `session`, `transaction`, `semaphore`, `lease` or `advisory`; None where shared memory for it could not be had.
    pub kind: Option<&'static str>,
    /// The lock.
    pub tag: Tag,
    /// Its name, where known and visible.
    pub name: Option<Vec<u8>>,
    /// The mode.
    pub mode: Option<Mode>,
    /// How many holds; None where only the server counts.
    pub holds: Option<i32>,
    /// The process; None for a prepared transaction.
    pub pid: Option<i32>,
    /// The id of the prepared transaction.
    pub prepared: Option<u32>,
    /// The session.
    pub activity: Option<Activity>,
    /// Since when, in microseconds of the server's clock.
    pub acquired_at: Option<i64>,
    /// The limit in microseconds, and when it is reached.
    pub limit: Option<(i64, i64)>,
    /// How many sessions wait for the lock.
    pub waiters: i32,
    /// What there is to a lease only.
    pub lease: Option<Lease>,
}

/// A grant of a lease, as far as the caller may see it.
#[derive(Clone, Debug)]
pub struct Lease {
    /// The grant.
    pub grant: Grant,
    /// What is left of it, in microseconds.
    pub remaining: i64,
    /// Its fencing token.
    pub token: Option<i64>,
    /// Who holds it, in the database's encoding.
    pub owner: Option<Vec<u8>>,
    /// What others are to know.
    pub payload: Option<Vec<u8>>,
}

/// One session that waits for a lock.
#[derive(Clone, Debug)]
pub struct WaiterRow {
    /// `session`, `transaction`, `semaphore`, `lease` or `advisory`.
    pub kind: Option<&'static str>,
    /// Its name, where known and visible.
    pub name: Option<Vec<u8>>,
    /// The mode asked for.
    pub mode: Option<Mode>,
    /// The process.
    pub pid: i32,
    /// The session.
    pub activity: Option<Activity>,
    /// Since when.
    pub wait_started: Option<i64>,
    /// When the wait ends by itself.
    pub deadline: Option<i64>,
    /// Its place in the queue, from 1.
    pub queue_position: Option<i32>,
    /// Whom it waits for.
    pub blocked_by: Vec<i32>,
}

/// The domain of a name that may not be known.
pub fn domain(name: Option<&Vec<u8>>) -> Option<ServerText> {
    name.map(|name| ServerText::from_name(domain_of(name)))
}

/// The lock manager's table with everything known about its rows.
struct Picture {
    table: LockTable,
    names: HashMap<(Party, Tag), Published>,
    sessions: HashMap<i32, Activity>,
    may_see_all: bool,
    waiters: HashMap<Tag, i32>,
    queue_waits: Vec<QueueWait>,
    /// The processes whose session holds still stand, where a mode is held both ways.
    with_sentinel: HashSet<i32>,
}

impl Picture {
    /// All, or all that a tag covers.
    fn read(only: Option<Tag>) -> Self {
        let mut table = lock_table::read();
        table.rows.retain(|row| {
            only.is_none_or(|only| only.covers(row.tag) || row.tag.space() == Space::Internal)
                && row.tag.space() != Space::Foreign
        });
        let mut names = HashMap::new();
        for published in published(only.map_or(Wanted::All, Wanted::Covered)) {
            names.insert((published.by, published.tag), published);
        }
        // A slot is published before its lock is asked for and cleared after it is given back: what no slot speaks of any
        // more, though the table had it, was given back in between.
        let is_unknown = |row: &Row| {
            matches!(row.tag.space(), Space::Named | Space::Slot) && !names.contains_key(&(party(row), row.tag))
        };
        if table.rows.iter().any(is_unknown) {
            let complete = session::complete_processes();
            table.rows.retain(|row| !is_unknown(row) || row.pid.is_none_or(|pid| !complete.contains(&pid)));
        }
        // Some have no memory for slots. Of their locks the table knows.
        if table.rows.iter().any(is_unknown) {
            let now: HashSet<(Party, Tag)> = lock_table::read().rows.iter().map(|row| (party(row), row.tag)).collect();
            table.rows.retain(|row| !is_unknown(row) || now.contains(&(party(row), row.tag)));
        }
        let mut waiters = HashMap::new();
        for row in table.rows.iter().filter(|row| row.waits_for.is_some()) {
            *waiters.entry(row.tag).or_insert(0) += 1;
        }
        let is_sentinel = |row: &&Row| row.tag.is(Kind::Sentinel) && row.hold_mask != 0;
        let with_sentinel = table.rows.iter().filter(is_sentinel).filter_map(|row| row.pid).collect();
        Self {
            table,
            names,
            sessions: activity::read(),
            may_see_all: activity::may_see_all(),
            waiters,
            queue_waits: session::queue_waits(),
            with_sentinel,
        }
    }

    fn published(&self, row: &Row) -> Option<&Published> {
        self.names.get(&(party(row), row.tag))
    }

    /// Whether the caller may see names of a session, in that database (0: in all).
    fn may_see(&self, pid: Option<i32>, database: u32) -> bool {
        let is_foreign_database = database != 0 && database != ffi::my_database();
        self.may_see_all || !is_foreign_database && self.activity(pid).is_some_and(|activity| activity.is_visible)
    }

    fn activity(&self, pid: Option<i32>) -> Option<&Activity> {
        self.sessions.get(&pid?)
    }

    /// The lock's name, if the caller may see it.
    fn name(&self, row: &Row) -> Option<Vec<u8>> {
        let name = &self.published(row)?.name;
        (!name.is_empty() && self.may_see(row.pid, row.tag.database)).then(|| name.clone())
    }

    /// The rows that a row of the lock table stands for: one for each mode, and one for each scope in it.
    fn holders(&self, row: &Row) -> Vec<HolderRow> {
        let mut holders = Vec::new();
        let published = self.published(row);
        for lockmode in (1..=pg_sys::MaxLockMode as i32).filter(|lockmode| row.hold_mask & (1 << lockmode) != 0) {
            let mode = Mode::from_lockmode(lockmode);
            let holder = HolderRow {
                kind: None,
                tag: row.tag,
                name: self.name(row),
                mode,
                holds: None,
                pid: row.pid,
                prepared: if row.pid.is_none() {
                    self.table.prepared_transaction(row.virtual_transaction)
                } else {
                    None
                },
                activity: self.activity(row.pid).cloned(),
                acquired_at: None,
                limit: None,
                waiters: match row.tag.semaphore() {
                    Some(semaphore) => count_waits(&self.queue_waits, semaphore),
                    None => self.waiters.get(&row.tag).copied().unwrap_or(0),
                },
                lease: None,
            };
            let counts = |scope: Scope| match (published, mode) {
                (Some(published), Some(mode)) => published.counts[scope as usize][mode as usize],
                _ => 0,
            };
            let since = |scope: Scope| published.map(|published| published.since[scope as usize]).filter(|&at| at > 0);
            let by_session = counts(Scope::Session);
            let by_transaction = counts(Scope::Transaction);
            let (kind, holds) = match row.tag.space() {
                Space::Native => (Some("advisory"), None),
                Space::Slot => (Some("semaphore"), Some(1)),
                _ => (None, None),
            };
            if kind.is_some() {
                holders.push(HolderRow {
                    kind,
                    holds,
                    acquired_at: since(Scope::Session).or(since(Scope::Transaction)),
                    limit: published.and_then(|published| published.limit),
                    ..holder
                });
                continue;
            }
            if by_session > 0 && (by_transaction == 0 || row.pid.is_some_and(|pid| self.with_sentinel.contains(&pid))) {
                holders.push(HolderRow {
                    kind: Some("session"),
                    holds: Some(by_session as i32),
                    acquired_at: since(Scope::Session),
                    limit: published.and_then(|published| published.limit),
                    ..holder.clone()
                });
            }
            if by_transaction > 0 {
                holders.push(HolderRow {
                    kind: Some("transaction"),
                    holds: Some(by_transaction as i32),
                    acquired_at: since(Scope::Transaction),
                    ..holder.clone()
                });
            }
            if by_session == 0 && by_transaction == 0 {
                // Nothing is known but what the lock manager says; a prepared transaction's lock is a transaction's.
                holders.push(HolderRow { kind: row.pid.is_none().then_some("transaction"), ..holder });
            }
        }
        holders
    }
}

/// All holders of named and native locks and of slots of semaphores, and of this database's leases.
///
/// # Errors
/// The server's, where the leases cannot be read.
pub fn all_holders(tables: &Tables) -> Result<Vec<HolderRow>, Problem> {
    let leases = lease::read_all(tables)?;
    let picture = Picture::read(None);
    let mut holders = holder_rows(&picture);
    holders.extend(lease_rows(&picture, leases));
    Ok(holders)
}

fn lease_rows(picture: &Picture, leases: Vec<lease::Row>) -> Vec<HolderRow> {
    let now = clock::now();
    let database = ffi::my_database();
    // SAFETY: a question about this process's state, which raises no error.
    let in_recovery = unsafe { ffi::RecoveryInProgress() };
    let sentinels: HashSet<Tag> =
        picture.table.rows.iter().filter(|row| row.hold_mask != 0).map(|row| row.tag).collect();
    let is_there = |bound: Bound| in_recovery || sentinels.contains(&Tag::sentinel(bound.pid, bound.session, database));
    let broken: HashSet<(u64, i64)> =
        leases.iter().filter(|row| row.is_break()).filter_map(|order| Some((order.key, order.for_token?))).collect();
    leases
        .into_iter()
        .filter(|row| row.for_token.is_none() && !broken.contains(&(row.key, row.grant.token)))
        .filter_map(|mut row| {
            let grant = row.grant;
            let remaining = grant.term.remaining(now);
            let bound = grant.bound.filter(|_| !grant.kept);
            if remaining <= 0 || bound.is_some_and(|bound| !is_there(bound)) {
                return None;
            }
            let is_of_caller = row.is_of_caller();
            let is_visible = is_of_caller || picture.may_see_all;
            let pid = bound.map(|bound| bound.pid).filter(|_| !in_recovery);
            let key = row.key;
            let is_single = grant.permits == 1;
            let tag = if is_single { Tag::lease(key, database) } else { Tag::permit(key, grant.slot, database) };
            Some(HolderRow {
                kind: Some("lease"),
                tag,
                name: is_visible.then(|| std::mem::take(&mut row.name)),
                mode: None,
                holds: None,
                pid,
                prepared: None,
                activity: picture.activity(pid).cloned(),
                acquired_at: Some(grant.term.acquired.wall),
                limit: None,
                waiters: count_waits(&picture.queue_waits, Tag::lease_queue(key, database)),
                lease: Some(Lease {
                    grant,
                    remaining,
                    token: is_of_caller.then_some(grant.token),
                    owner: is_visible.then(|| std::mem::take(&mut row.owner)),
                    payload: row.payload.take().filter(|_| is_visible),
                }),
            })
        })
        .collect()
}

/// How many other sessions wait for a lease of this database.
pub fn lease_waiters(key: u64) -> i32 {
    // SAFETY: a plain global.
    let me = unsafe { pg_sys::MyProcPid };
    let mut waits = session::queue_waits();
    waits.retain(|wait| wait.pid != me);
    count_waits(&waits, Tag::lease_queue(key, ffi::my_database()))
}

fn count_waits(waits: &[QueueWait], queue: Tag) -> i32 {
    waits.iter().filter(|wait| wait.queue == queue).count() as i32
}

/// Those who wait for leases and semaphores: the first in each queue sleeps, the others are in the lock manager's queue
/// behind it.
fn queue_waiter_rows(picture: &Picture, tables: &Tables) -> Result<Vec<WaiterRow>, Problem> {
    let mut rows = Vec::new();
    for wait in &picture.queue_waits {
        let activity = picture.activity(Some(wait.pid));
        let is_semaphore = wait.queue.is_semaphore();
        let (queue_position, blocked_by) = if wait.is_head {
            (Some(1), in_the_way(picture, tables, wait)?)
        } else {
            let in_queue = |row: &Row| row.tag == wait.queue && row.pid == Some(wait.pid) && row.waits_for.is_some();
            if !picture.table.rows.iter().any(in_queue) {
                continue; // not there yet, or not any more
            }
            (lock_table::queue_position(wait.pid).map(|position| position + 1), lock_table::blocking_pids(wait.pid))
        };
        rows.push(WaiterRow {
            kind: Some(if is_semaphore { "semaphore" } else { "lease" }),
            name: picture.may_see(Some(wait.pid), wait.queue.database).then(|| wait.name.clone()),
            mode: is_semaphore.then_some(Mode::Exclusive),
            pid: wait.pid,
            activity: activity.cloned(),
            wait_started: Some(wait.since),
            deadline: wait.deadline,
            queue_position,
            blocked_by,
        });
    }
    Ok(rows)
}

/// Whom the first in a queue waits for: those who hold slots of the semaphore; those who guard or are granted the lease,
/// and sessions it is bound to. 0 is a prepared transaction. A lease that is not bound is nobody's process.
fn in_the_way(picture: &Picture, tables: &Tables, wait: &QueueWait) -> Result<Vec<i32>, Problem> {
    let queue = wait.queue;
    let is_granted = |row: &&Row| {
        let is_of_lease = (row.tag.is(Kind::Lease) || row.tag.is(Kind::Permit))
            && Tag::lease_queue(row.tag.key(), row.tag.database) == queue;
        (is_of_lease || queue.covers(row.tag)) && row.tag != queue && row.hold_mask != 0
    };
    let mut pids: Vec<i32> = picture.table.rows.iter().filter(is_granted).map(|row| row.pid.unwrap_or(0)).collect();
    if queue.database == ffi::my_database() && !queue.is_semaphore() {
        let rows = lease::read(tables, queue.key(), None, See::Committed, false)?;
        pids.extend(lease_rows(picture, rows).iter().filter_map(|holder| holder.pid));
    }
    pids.sort_unstable();
    pids.dedup();
    pids.retain(|&pid| pid != wait.pid);
    Ok(pids)
}

fn holder_rows(picture: &Picture) -> Vec<HolderRow> {
    picture
        .table
        .rows
        .iter()
        .filter(|row| row.tag.space() != Space::Internal)
        .flat_map(|row| picture.holders(row))
        .collect()
}

/// All sessions that wait for a named or a native lock, a lease or a semaphore.
///
/// # Errors
/// The server's, where the leases cannot be read.
pub fn all_waiters(tables: &Tables) -> Result<Vec<WaiterRow>, Problem> {
    let picture = Picture::read(None);
    let waiting = picture.table.rows.iter().filter(|row| row.tag.space() != Space::Internal);
    let mut rows: Vec<WaiterRow> = waiting
        .filter_map(|row| {
            let (pid, lockmode) = (row.pid?, row.waits_for?);
            let published = picture.published(row);
            let kind = match (row.tag.space(), published.and_then(|published| published.waits_as)) {
                (Space::Native, _) => Some("advisory"),
                (_, Some(Scope::Session)) => Some("session"),
                (_, Some(Scope::Transaction)) => Some("transaction"),
                (_, None) => None,
            };
            Some(WaiterRow {
                kind,
                name: picture.name(row),
                mode: Mode::from_lockmode(lockmode),
                pid,
                activity: picture.activity(row.pid).cloned(),
                wait_started: (row.wait_start > 0).then_some(row.wait_start),
                deadline: published.and_then(|published| published.deadline),
                queue_position: lock_table::queue_position(pid),
                blocked_by: lock_table::blocking_pids(pid),
            })
        })
        .collect();
    rows.extend(queue_waiter_rows(&picture, tables)?);
    Ok(rows)
}

/// Who waits for whom, all kinds of locks together, as a Mermaid flowchart.
///
/// # Errors
/// The server's, where the leases cannot be read.
pub fn graph(tables: &Tables) -> Result<String, Problem> {
    let picture = Picture::read(None);
    let mut edges = Vec::new();
    for waiter in queue_waiter_rows(&picture, tables)? {
        let lock = waiter.name.map_or_else(|| waiter.kind.unwrap_or("lease").to_owned(), |name| display(&name));
        edges.push(Edge { waiter: waiter.pid, blocked_by: waiter.blocked_by, lock });
    }
    for row in picture.table.rows.iter().filter(|row| !row.tag.is(Kind::Queue)) {
        if let (Some(pid), Some(_)) = (row.pid, row.waits_for) {
            let lock = match (row.tag.space(), picture.name(row)) {
                (_, Some(name)) => display(&name),
                (Space::Native, None) => describe(row.tag, &[]),
                (Space::Internal, None) => "lease".to_owned(),
                (_, None) => "named lock".to_owned(),
            };
            edges.push(Edge { waiter: pid, blocked_by: lock_table::blocking_pids(pid), lock });
        }
    }
    for &(pid, word) in &picture.table.other_waits {
        edges.push(Edge { waiter: pid, blocked_by: lock_table::blocking_pids(pid), lock: word.to_owned() });
    }
    edges.sort_by_key(|edge| edge.waiter);
    let labels: BTreeMap<i32, String> = picture
        .sessions
        .iter()
        .filter_map(|(&pid, activity)| Some((pid, activity.application_name.as_ref()?.lossy())))
        .collect();
    Ok(graph::mermaid(&edges, &labels))
}

/// Who holds a lock, or slots of a semaphore, for an error's DETAIL.
pub fn holders(tag: Tag) -> Vec<error::Holder> {
    let picture = Picture::read(Some(tag));
    holder_rows(&picture).iter().map(for_error).collect()
}

/// Who holds a lock against a mode that this session has asked for.
pub fn holders_against(tag: Tag, mode: Mode) -> Vec<error::Holder> {
    let picture = Picture::read(Some(tag));
    // SAFETY: a plain global.
    let me = unsafe { pg_sys::MyProcPid };
    holder_rows(&picture)
        .iter()
        .filter(|holder| holder.pid != Some(me) && holder.mode.is_none_or(|held| held.conflicts_with(mode)))
        .map(for_error)
        .collect()
}

/// Fails where some other session holds or waits for the same tag, or semaphore, by another name.
///
/// # Errors
/// [`Error::KeyClash`].
pub fn check_name(tag: Tag, name: &[u8]) -> Result<(), Error> {
    if tag.space() == Space::Native {
        return Ok(());
    }
    if tag.is_semaphore() {
        check_waiters_name(tag, name)?;
    } else if session::is_witnessed(tag, name) {
        return Ok(());
    }
    // SAFETY: a plain global.
    let me = Party::Process(unsafe { pg_sys::MyProcPid });
    let others = published(Wanted::OtherName(tag, name));
    let others: HashSet<Party> = others.iter().map(|other| other.by).filter(|&by| by != me).collect();
    if others.is_empty() {
        return Ok(());
    }
    // Published is not held: ask the lock manager, now that it matters.
    let picture = Picture::read(Some(tag));
    match picture.table.rows.iter().find(|row| tag.covers(row.tag) && others.contains(&party(row))) {
        Some(row) => {
            let other = picture.name(row).map(|name| display(&name));
            Err(Error::KeyClash { lock: describe(tag, name), other })
        }
        None => Ok(()),
    }
}

fn check_waiters_name(queue: Tag, name: &[u8]) -> Result<(), Error> {
    let waits = session::queue_waits();
    match waits.iter().find(|wait| wait.queue == queue && wait.name != name) {
        Some(wait) => {
            let may_see = Picture::read(Some(queue)).may_see(Some(wait.pid), queue.database);
            Err(Error::KeyClash { lock: describe(queue, name), other: may_see.then(|| display(&wait.name)) })
        }
        None => Ok(()),
    }
}

fn party(row: &Row) -> Party {
    match row.pid {
        Some(pid) => Party::Process(pid),
        None => Party::Prepared(row.virtual_transaction.0, row.virtual_transaction.1),
    }
}

fn for_error(holder: &HolderRow) -> error::Holder {
    let activity = holder.activity.as_ref();
    error::Holder {
        pid: holder.pid,
        application_name: activity.and_then(|activity| activity.application_name.as_ref()).map(ServerText::lossy),
        client_addr: activity.and_then(|activity| activity.client_addr).map(|addr: IpAddr| addr.to_string()),
        state: activity.and_then(|activity| activity.state).map(str::to_owned),
        mode: holder.mode.map_or_else(|| "unknown".to_owned(), |mode| mode.to_string()),
        since: holder.acquired_at.map(time_text),
    }
}

/// A time of the server's clock as text, in the session's time zone.
pub fn time_text(at: i64) -> String {
    // SAFETY: the server's own text of a time, in a buffer that its next call overwrites.
    unsafe { CStr::from_ptr(pg_sys::timestamptz_to_str(at)) }.to_string_lossy().into_owned()
}
