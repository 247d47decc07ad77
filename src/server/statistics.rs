//! What happens to locks and leases, counted by database and domain in shared memory, for `lock_stats`.
//!
//! Counting an uncontended grant has to cost next to nothing. So a session remembers where the counters of the domain stand
//! that it used last, and those of others that it has used: then a grant is one addition, in one of several places, that
//! processes at work at the same time do not share as a rule.
//!
//! The table is bounded. Its entries are memory of that kind for ever: those that a reset has emptied are used again, and
//! none is given back. So a session that is late to learn of a reset adds to an entry, never to anything else.

use super::ffi;
use super::process_local::ProcessLocal;
use super::registry::{MAX_POOLED, NO_POINTER, address_in, allocate_in, free, with_lock};
use super::report::Problem;
use crate::rules::name::MAX_NAME_BYTES;
use crate::rules::statistics::{Counts, End, LeaseCounts, MAX_DOMAINS, Pending};
use pgrx::pg_sys;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;
use xxhash_rust::xxh3::xxh3_64_with_seed;

const BUCKETS: usize = 256;
/// In so many places grants are added up, each for the processes of some numbers.
const SHARDS: usize = 8;
const WORDS_IN_A_CACHE_LINE: usize = 8;

/// All counters. In the shared area, zeroed and then [`prepare`]d.
#[repr(C)]
pub struct Table {
    /// Guards all but the counters.
    lock: pg_sys::LWLock,
    since: i64,
    /// How many entries are in use.
    count: u32,
    /// Entries that are not, in a list.
    spare: pg_sys::dsa_pointer,
    /// Lists of entries, by the hash of database and domain.
    buckets: [pg_sys::dsa_pointer; BUCKETS],
    /// Another one after each reset. Read at every grant, so what is written often is kept away from it.
    generation: AtomicU64,
    _apart: [u64; WORDS_IN_A_CACHE_LINE],
    /// What has happened in domains that have no entry.
    other: Counters,
}

/// One domain of a database.
#[repr(C)]
struct Entry {
    next: pg_sys::dsa_pointer,
    database: u32,
    domain_length: u32,
    domain: [u8; MAX_NAME_BYTES],
    counters: Counters,
}
const _: () = assert!(size_of::<Entry>() <= MAX_POOLED);

/// What is counted of a domain. Only grants come so often that many processes would fight for one counter.
#[repr(C)]
struct Counters {
    waits: AtomicU64,
    timeouts: AtomicU64,
    deadlocks: AtomicU64,
    wait_micros: AtomicU64,
    max_wait_micros: AtomicU64,
    leases_granted: AtomicU64,
    leases_taken_over: AtomicU64,
    leases_expired: AtomicU64,
    grants: [Shard; SHARDS],
}

/// One of the places where grants are added up, in a cache line of its own.
#[repr(C)]
struct Shard {
    grants: AtomicU64,
    _apart: [u64; WORDS_IN_A_CACHE_LINE - 1],
}

impl Counters {
    fn add_wait(&self, micros: u64, end: End) {
        self.waits.fetch_add(1, Ordering::Relaxed);
        self.wait_micros.fetch_add(micros, Ordering::Relaxed);
        // After those: a reader must not find more timeouts than waits, nor a longest wait that is longer than all.
        self.max_wait_micros.fetch_max(micros, Ordering::Release);
        match end {
            End::TimedOut => self.timeouts.fetch_add(1, Ordering::Release),
            End::Deadlock => self.deadlocks.fetch_add(1, Ordering::Release),
            End::Granted | End::BrokenOff => 0,
        };
    }

    fn add_leases(&self, counts: LeaseCounts) {
        self.leases_granted.fetch_add(counts.granted, Ordering::Relaxed);
        self.leases_taken_over.fetch_add(counts.taken_over, Ordering::Release);
        self.leases_expired.fetch_add(counts.expired, Ordering::Relaxed);
    }

    fn read(&self) -> Counts {
        let (timeouts, deadlocks) = (self.timeouts.load(Ordering::Acquire), self.deadlocks.load(Ordering::Acquire));
        let max_wait_micros = self.max_wait_micros.load(Ordering::Acquire);
        let taken_over = self.leases_taken_over.load(Ordering::Acquire);
        Counts {
            grants: self.grants.iter().map(|shard| shard.grants.load(Ordering::Relaxed)).sum(),
            waits: self.waits.load(Ordering::Relaxed),
            timeouts,
            deadlocks,
            wait_micros: self.wait_micros.load(Ordering::Relaxed),
            max_wait_micros,
            leases: LeaseCounts {
                granted: self.leases_granted.load(Ordering::Relaxed),
                taken_over,
                expired: self.leases_expired.load(Ordering::Relaxed),
            },
        }
    }

    fn clear(&self) {
        let waits = [&self.waits, &self.timeouts, &self.deadlocks, &self.wait_micros, &self.max_wait_micros];
        let leases = [&self.leases_granted, &self.leases_taken_over, &self.leases_expired];
        let grants = self.grants.iter().map(|shard| &shard.grants);
        waits.into_iter().chain(leases).chain(grants).for_each(|counter| counter.store(0, Ordering::Relaxed));
    }
}

/// Where the table is, in this process.
#[derive(Clone, Copy, Debug)]
struct Shared {
    area: *mut pg_sys::dsa_area,
    table: *mut Table,
}

/// What this process knows of it.
struct Local {
    /// None: there is no shared memory, and nothing is counted.
    shared: Option<Shared>,
    shard: usize,
    /// When what follows was learned.
    generation: u64,
    /// The domain used last, and its counters.
    domain: Vec<u8>,
    counters: *const Counters,
    /// Other domains that have entries.
    known: BTreeMap<Vec<u8>, *const Counters>,
    /// There was no memory for another entry.
    is_full: bool,
    /// The domain that is being waited for, since when.
    waiting: Option<(Vec<u8>, Instant)>,
    /// What this transaction has done to leases.
    pending: Pending,
}

static LOCAL: ProcessLocal<RefCell<Local>> = ProcessLocal::ref_cell(Local {
    shared: None,
    shard: 0,
    generation: 0,
    domain: Vec::new(),
    counters: std::ptr::null(),
    known: BTreeMap::new(),
    is_full: false,
    waiting: None,
    pending: Pending::new(),
});

/// Makes an empty table of zeroed memory.
///
/// # Safety
/// Nobody else's yet.
pub unsafe fn prepare(table: *mut Table, tranche: i32) {
    // SAFETY: the caller's.
    unsafe {
        ffi::LWLockInitialize(&raw mut (*table).lock, tranche);
        (*table).since = ffi::now();
        // What a process knows before it has looked is of none.
        (*table).generation = AtomicU64::new(1);
    }
}

/// From now on this process counts in that table, which stays where it is.
pub fn attach(area: *mut pg_sys::dsa_area, table: *mut Table) {
    let mut local = LOCAL.borrow_mut();
    local.shared = Some(Shared { area, table });
    local.shard = ffi::my_process_number() % SHARDS;
}

/// Counts the grant of a lock in a domain.
#[inline(always)]
pub fn granted(domain: &[u8]) {
    let mut local = LOCAL.borrow_mut();
    let shard = local.shard;
    if let Some(counters) = local.counters(domain) {
        counters.grants[shard].grants.fetch_add(1, Ordering::Relaxed);
    }
}

/// A wait that counts when it has ended, also where it is ended by an error, or with the session.
#[must_use]
#[derive(Debug)]
pub struct Wait(());

impl Wait {
    /// In a domain, from now on. There is one at a time.
    pub fn begin(domain: &[u8]) -> Self {
        LOCAL.borrow_mut().waiting = Some((domain.to_vec(), Instant::now()));
        Self(())
    }

    /// It has ended: granted, not granted in time, or in an error.
    pub fn end(self, granted: Result<bool, &Problem>) {
        LOCAL.borrow_mut().end_wait(match granted {
            Ok(true) => End::Granted,
            Ok(false) => End::TimedOut,
            Err(problem) if problem.is_deadlock() => End::Deadlock,
            Err(_) => End::BrokenOff,
        });
    }
}

impl Drop for Wait {
    fn drop(&mut self) {
        LOCAL.borrow_mut().end_wait(End::BrokenOff);
    }
}

/// Counts the grant of a lease when this (sub)transaction is committed. `is_takeover`: the one before had expired, and
/// nobody had released it.
pub fn lease_granted(domain: &[u8], is_takeover: bool) {
    add_pending(domain, LeaseCounts { granted: 1, taken_over: is_takeover.into(), expired: 0 });
}

/// The same for a grant that had expired, where nobody had released it, and is cleared away.
pub fn lease_expired(domain: &[u8]) {
    add_pending(domain, LeaseCounts { expired: 1, ..LeaseCounts::default() });
}

fn add_pending(domain: &[u8], counts: LeaseCounts) {
    // SAFETY: a question about this process's state.
    let subtransaction = unsafe { ffi::GetCurrentSubTransactionId() };
    LOCAL.borrow_mut().pending.add(subtransaction, domain, counts);
}

/// Whether this transaction has done anything that counts when it is committed.
pub fn is_pending() -> bool {
    LOCAL.try_borrow().is_ok_and(|local| !local.pending.is_empty())
}

/// A subtransaction has been committed.
pub fn on_subcommit(subtransaction: u32, parent: u32) {
    LOCAL.borrow_mut().pending.commit_subtransaction(subtransaction, parent);
}

/// A subtransaction has been rolled back.
pub fn on_subabort(subtransaction: u32) {
    LOCAL.borrow_mut().pending.abort_subtransaction(subtransaction);
}

/// The transaction has ended.
pub fn on_transaction_end(is_commit: bool) {
    let mut local = LOCAL.borrow_mut();
    for (domain, counts) in local.pending.end_transaction() {
        if is_commit && let Some(counters) = local.counters(&domain) {
            counters.add_leases(counts);
        }
    }
}

/// The process ends, perhaps out of a wait.
pub fn on_exit() {
    if let Ok(mut local) = LOCAL.try_borrow_mut() {
        local.end_wait(End::BrokenOff);
    }
}

/// A row of `lock_stats`.
#[derive(Clone, Debug)]
pub struct Row {
    /// The OID of a database and a domain of it; None: all that have no row of their own.
    pub domain: Option<(u32, Vec<u8>)>,
    /// What has happened.
    pub counts: Counts,
}

/// What has been counted, and since when by the server's clock.
pub fn read() -> (Vec<Row>, i64) {
    let (mut rows, mut since) = (Vec::new(), 0);
    let Some(shared) = LOCAL.borrow().shared else { return (rows, since) };
    shared.with_lock(pg_sys::LWLockMode::LW_SHARED, || {
        // SAFETY: what is not atomic in the table and its entries changes under the exclusive lock only.
        let table = unsafe { &*shared.table };
        since = table.since;
        for &first in &table.buckets {
            let mut next = first;
            while next != NO_POINTER {
                // SAFETY: as above.
                let entry = unsafe { &*address_in::<Entry>(shared.area, next)? };
                let domain = Some((entry.database, entry.domain().to_vec()));
                rows.push(Row { domain, counts: entry.counters.read() });
                next = entry.next;
            }
        }
        let counts = table.other.read();
        if counts != Counts::default() {
            rows.push(Row { domain: None, counts });
        }
        Some(())
    });
    (rows, since)
}

/// Begins anew, without any domain.
pub fn reset() {
    let Some(Shared { area, table }) = LOCAL.borrow().shared else { return };
    let start_anew = || {
        // SAFETY: under the exclusive lock; lists lead to entries.
        unsafe {
            (*table).generation.fetch_add(1, Ordering::Relaxed);
            (*table).since = ffi::now();
            (*table).other.clear();
            for bucket in 0..BUCKETS {
                while (*table).buckets[bucket] != NO_POINTER {
                    let pointer = (*table).buckets[bucket];
                    let entry = address_in::<Entry>(area, pointer)?;
                    (*table).buckets[bucket] = (*entry).next;
                    (*table).count -= 1;
                    (*entry).next = (*table).spare;
                    (*table).spare = pointer;
                }
            }
        }
        Some(())
    };
    Shared { area, table }.with_lock(pg_sys::LWLockMode::LW_EXCLUSIVE, start_anew);
}

impl Local {
    /// Where a domain is counted.
    #[inline(always)]
    fn counters(&mut self, domain: &[u8]) -> Option<&Counters> {
        let shared = self.shared?;
        // SAFETY: the table is there as long as the server.
        let generation = unsafe { &(*shared.table).generation }.load(Ordering::Relaxed);
        // The C library's comparison of nothing with nothing can take very long.
        let is_same = self.domain.len() == domain.len() && (domain.is_empty() || self.domain == domain);
        if self.generation != generation || !is_same {
            self.find(shared, generation, domain);
        }
        // SAFETY: found in that table; entries are never given back.
        Some(unsafe { &*self.counters })
    }

    #[inline(never)]
    fn find(&mut self, shared: Shared, generation: u64, domain: &[u8]) {
        if self.generation != generation {
            self.known.clear();
            self.is_full = false;
            self.generation = generation;
        }
        self.counters = match self.known.get(domain) {
            Some(&counters) => counters,
            None => match shared.find(domain, &mut self.is_full) {
                Some(entry) => {
                    // SAFETY: an entry.
                    let counters = unsafe { &raw const (*entry).counters };
                    self.known.insert(domain.to_vec(), counters);
                    counters
                }
                // SAFETY: the table is there as long as the server.
                None => unsafe { &raw const (*shared.table).other },
            },
        };
        self.domain.clear();
        self.domain.extend_from_slice(domain);
    }

    fn end_wait(&mut self, end: End) {
        let Some((domain, since)) = self.waiting.take() else { return };
        let micros = since.elapsed().as_micros() as u64;
        if let Some(counters) = self.counters(&domain) {
            counters.add_wait(micros, end);
        }
    }
}

impl Entry {
    fn domain(&self) -> &[u8] {
        &self.domain[..self.domain_length as usize]
    }
}

/// What a look into the table came to.
enum Found {
    Entry(*const Entry),
    /// It is not there, nor is there room for it.
    Full,
    /// It is not there.
    Missing,
}

impl Shared {
    /// Works under the table's lock. `work` returns None when memory cannot be mapped, and all locks are gone.
    fn with_lock(self, mode: pg_sys::LWLockMode::Type, work: impl FnOnce() -> Option<()>) {
        // SAFETY: the table is there as long as the server.
        with_lock(unsafe { &raw const (*self.table).lock }, mode, work);
    }

    /// The entry of a domain of this database, made if there is none; None where there is no room, or no memory.
    fn find(self, domain: &[u8], is_full: &mut bool) -> Option<*const Entry> {
        let mut found = None;
        self.with_lock(pg_sys::LWLockMode::LW_SHARED, || {
            found = Some(self.look(domain)?);
            Some(())
        });
        match found? {
            Found::Entry(entry) => Some(entry),
            Found::Missing if !*is_full => {
                let entered = self.enter(domain);
                *is_full = entered.is_none();
                entered
            }
            Found::Full | Found::Missing => None,
        }
    }

    /// Under the lock: looks for the entry of a domain of this database. None where memory cannot be mapped.
    fn look(self, domain: &[u8]) -> Option<Found> {
        // SAFETY: what is not atomic in the table and its entries changes under the exclusive lock only.
        let table = unsafe { &*self.table };
        let database = ffi::my_database();
        let mut next = table.buckets[bucket(database, domain)];
        while next != NO_POINTER {
            // SAFETY: as above.
            let entry = unsafe { &*address_in::<Entry>(self.area, next)? };
            if entry.database == database && entry.domain() == domain {
                return Some(Found::Entry(entry));
            }
            next = entry.next;
        }
        Some(if table.count < MAX_DOMAINS { Found::Missing } else { Found::Full })
    }

    /// Makes an entry for a domain of this database, unless somebody else does meanwhile.
    fn enter(self, domain: &[u8]) -> Option<*const Entry> {
        let database = ffi::my_database();
        // Memory cannot be asked for under the lock.
        let mut fresh = allocate_in::<Entry>(self.area);
        let mut entered = None;
        self.with_lock(pg_sys::LWLockMode::LW_EXCLUSIVE, || {
            match self.look(domain)? {
                Found::Entry(entry) => entered = Some(entry),
                Found::Full => {}
                // SAFETY: under the exclusive lock; the new entry is in no list, or in that of spare ones.
                Found::Missing => unsafe {
                    let first = &raw mut (*self.table).buckets[bucket(database, domain)];
                    let (pointer, entry) = match (*self.table).spare {
                        NO_POINTER => match fresh.take() {
                            Some(fresh) => fresh,
                            None => return Some(()),
                        },
                        spare => {
                            let entry = address_in::<Entry>(self.area, spare)?;
                            (*self.table).spare = (*entry).next;
                            (spare, entry)
                        }
                    };
                    (*entry).counters.clear();
                    (*entry).database = database;
                    (*entry).domain_length = domain.len() as u32;
                    (&mut (*entry).domain)[..domain.len()].copy_from_slice(domain);
                    (*entry).next = *first;
                    *first = pointer;
                    (*self.table).count += 1;
                    entered = Some(entry.cast_const());
                },
            }
            Some(())
        });
        if let Some((pointer, _)) = fresh {
            // SAFETY: in no list.
            unsafe { free(self.area, pointer) };
        }
        entered
    }
}

fn bucket(database: u32, domain: &[u8]) -> usize {
    xxh3_64_with_seed(domain, database.into()) as usize % BUCKETS
}
