//! Names, times and counts of what every session holds, in shared memory, for the views.
//!
//! A control struct in the server's main shared memory, made by whichever session comes first, leads to a dynamic shared
//! area. There every process has an [`Entry`], and in it slots that only this process writes: one for each lock it holds
//! or waits for, at the place that its [ledger](crate::rules::holds) gives the lock. A slot is written before the lock is
//! asked for and cleared after it is given back: the lock manager says what is held, the slot says by which name.
//!
//! Readers never stop a writer. Each slot has a sequence counter, odd while it is written; a reader tries again when the
//! counter moved. The entry's LWLock only guards memory that comes and goes: slots come in chunks, and names too long for
//! a slot in blocks beside them. All pieces are small enough for the area's pools: of larger ones it never gives a whole
//! segment back to the operating system.
//!
//! Who waits for a lease or a semaphore is here too, for the views and for those who wake the first in its queue; and
//! fencing tokens that were drawn and not yet handed out, and what is counted, see [`statistics`].

use super::ffi;
use super::latch;
use super::report;
use super::statistics;
use super::try_block::try_block;
use crate::rules::error::Error;
use crate::rules::holds::{Hold, IDLE_PLACES, Place, Scope};
use crate::rules::key::Tag;
use crate::rules::mode::Mode;
use crate::rules::name::MAX_NAME_BYTES;
use crate::rules::token::Stock;
use pgrx::pg_sys;
use std::cell::Cell;
use std::collections::HashSet;
use std::ffi::CStr;
use std::sync::atomic::{AtomicI32, AtomicI64, AtomicU32, AtomicU64, Ordering, fence};

/// With the version of the layout: change it with any of the structs below. Sessions with the library of before have a
/// registry of their own then: what keeps locks, leases and tokens apart must not rest on this one.
const CONTROL_NAME: &CStr = c"named_locks/5";
/// Frozen: asking for another size under a name already taken is an error.
const CONTROL_SIZE: usize = 128;
const CONTROL_MAGIC: u32 = 0x6E6C_0005;
const TRANCHE_NAME: &CStr = c"named_locks";

/// How many slots a chunk has.
const CHUNK_SLOTS: usize = IDLE_PLACES;
/// How many names a block of long names has.
const BLOCK_NAMES: usize = 8;
const CHUNK_BLOCKS: usize = CHUNK_SLOTS / BLOCK_NAMES;
/// The most different locks of a session that the registry is made for.
pub const MAX_PLACES: usize = 1_000_000;

/// Longer names stand in a block beside the chunk.
const INLINE_NAME: usize = 96;
/// A writer may be stopped in the middle of a slot: readers give it up then.
const MAX_READ_TRIES: u32 = 10_000;

const MODES: usize = Mode::ALL.len();
pub(super) const NO_POINTER: pg_sys::dsa_pointer = 0;

#[repr(C)]
struct Control {
    magic: u32,
    tranche: i32,
    area: pg_sys::dsa_handle,
    directory: pg_sys::dsa_pointer,
}
const _: () = assert!(size_of::<Control>() <= CONTROL_SIZE);

/// In the shared area, followed by [`ffi::max_processes`] entries.
#[repr(C)]
struct Directory {
    /// Guards the list of prepared transactions' names.
    prepared_lock: pg_sys::LWLock,
    prepared: pg_sys::dsa_pointer,
    prepared_count: u32,
    /// Clean the list when it has become so long.
    prepared_limit: u32,
    /// How many processes wait in queues of ours, as the first or behind it.
    queue_waiters: AtomicU32,
    /// By the lock's tag, as [`Witness::to_word`]: who has waited for a lock last.
    witnesses: [AtomicU64; WITNESSES],
    /// Guards the fencing tokens in stock.
    tokens_lock: pg_sys::LWLock,
    /// One for each database that has leases, as far as there are so many.
    tokens: [TokensInStock; TOKEN_STOCKS],
    statistics: statistics::Table,
}

const TOKEN_STOCKS: usize = 64;
const WITNESSES: usize = 256;

/// A slot as it was when its process was granted the lock exclusively after a wait, or began to wait for it so. As long as
/// it has not been written since, nobody else holds the lock but those whose names it was compared with, and nobody can
/// come by it without a wait: who waits compares names with this one, and need not look at all slots. Of a lock released
/// without telling us it goes on saying so until its session's next call. Then a clash of two names may be found by the
/// next who waits only; nobody gets a lock by it that they should not have.
#[derive(Clone, Copy)]
struct Witness {
    process: u16,
    place: u16,
    sequence: u32,
}

impl Witness {
    fn to_word(self) -> u64 {
        u64::from(self.process) << 48 | u64::from(self.place) << 32 | u64::from(self.sequence)
    }

    fn from_word(word: u64) -> Self {
        Self { process: (word >> 48) as u16, place: (word >> 32) as u16, sequence: word as u32 }
    }
}

/// Fencing tokens drawn from a sequence, of a database.
#[derive(Clone, Copy)]
#[repr(C)]
struct TokensInStock {
    database: u32,
    sequence: u32,
    stock: Stock,
}

/// One process's part.
#[repr(C)]
struct Entry {
    /// Guards `pid`, and the memory that `first` leads to.
    lock: pg_sys::LWLock,
    pid: AtomicI32,
    /// When this process's wait for a lock ends by itself; [`NO_DEADLINE`] without one.
    deadline: AtomicI64,
    /// The first chunk.
    first: AtomicU64,
    /// Above all places that this process has used since [`Registry::trim`]: readers look no further. Somebody who waits
    /// looks at every process's slots, which one by one would cost more than the wait.
    end: AtomicU32,
    /// 1 after there was no memory for a slot of this process, until [`Registry::trim`].
    is_incomplete: AtomicU32,
    /// Whether this process waits for a lease or a semaphore: [`NOT_WAITING`], [`QUEUED`] or [`HEAD`].
    queue_state: AtomicU32,
    /// The tag of the queue that it waits in, as words.
    queue: [AtomicU64; 2],
    /// The [`WaitNote`] that tells more of it; made at the first such wait.
    wait_note: AtomicU64,
}

const NOT_WAITING: u32 = 0;
/// In the lock manager's queue, which wakes it.
const QUEUED: u32 = 1;
/// The first in the queue, to be waked by [`Registry::wake`].
const HEAD: u32 = 2;

/// What a process says of the lease or the semaphore that it waits for. Under its entry's lock.
#[repr(C)]
struct WaitNote {
    name_length: u32,
    since: i64,
    deadline: i64,
    name: [u8; MAX_NAME_BYTES],
}

/// A chunk of slots.
#[repr(C)]
struct Chunk {
    next: AtomicU64,
    /// For each [`BLOCK_NAMES`] slots, a [`Block`] or nothing.
    blocks: [AtomicU64; CHUNK_BLOCKS],
    slots: [Slot; CHUNK_SLOTS],
}

/// Room for long names.
type Block = [[u8; MAX_NAME_BYTES]; BLOCK_NAMES];

/// `utils/mmgr/dsa.c`: larger pieces get pages of their own.
pub(super) const MAX_POOLED: usize = 8192;
const _: () = assert!(size_of::<Chunk>() <= MAX_POOLED && size_of::<Block>() <= MAX_POOLED);

/// Shown as NULL.
const NO_DEADLINE: i64 = i64::MAX;

#[repr(C)]
struct Slot {
    sequence: AtomicU32,
    body: Body,
}

/// What a slot says. All zero: nothing. Any bytes are a valid value, so that a reader may copy one that is being written.
#[derive(Clone, Copy)]
#[repr(C)]
struct Body {
    in_use: u8,
    /// 1 + the [`Scope`] in which the lock is being waited for; 0 otherwise.
    waits_as: u8,
    name_length: u16,
    tag: Tag,
    counts: [[u32; MODES]; 2],
    since: [i64; 2],
    limit_micros: i64,
    expires_at: i64,
    name: [u8; INLINE_NAME],
}

/// A prepared transaction's lock: which virtual transaction took it, by which name.
#[repr(C)]
struct PreparedName {
    next: pg_sys::dsa_pointer,
    virtual_transaction: (i32, u32),
    tag: Tag,
    counts: [u32; MODES],
    since: i64,
    name_length: u16,
    name: [u8; MAX_NAME_BYTES],
}

/// What some session says of a lock it holds or waits for.
#[derive(Clone, Debug)]
pub struct Published {
    /// The process; for a prepared transaction the virtual transaction that it was.
    pub by: Party,
    /// The lock.
    pub tag: Tag,
    /// Its name; empty for a native lock.
    pub name: Vec<u8>,
    /// Holds by [`Scope`] and [`Mode`], the one being waited for included.
    pub counts: [[u32; MODES]; 2],
    /// Since when, by [`Scope`], in microseconds of the server's clock; 0 where there are none.
    pub since: [i64; 2],
    /// The earliest limit in microseconds and when it is reached.
    pub limit: Option<(i64, i64)>,
    /// In which scope it is waited for.
    pub waits_as: Option<Scope>,
    /// When that wait ends by itself.
    pub deadline: Option<i64>,
}

/// What some process says of the lease or the semaphore that it waits for.
#[derive(Clone, Debug)]
pub struct QueueWait {
    /// The process.
    pub pid: i32,
    /// The tag of the queue.
    pub queue: Tag,
    /// The lease's or the semaphore's name.
    pub name: Vec<u8>,
    /// Since when, in microseconds of the server's clock.
    pub since: i64,
    /// When the wait ends by itself.
    pub deadline: Option<i64>,
    /// Whether it is the first in the queue.
    pub is_head: bool,
}

/// What a reader looks for.
#[derive(Clone, Copy, Debug)]
pub enum Wanted<'a> {
    /// Everything.
    All,
    /// All that a tag [covers](Tag::covers).
    Covered(Tag),
    /// The same, as far as it is by another name, and by any.
    OtherName(Tag, &'a [u8]),
}

impl Wanted<'_> {
    fn tag(self, tag: Tag) -> bool {
        match self {
            Self::All => true,
            Self::Covered(by) | Self::OtherName(by, _) => by.covers(tag),
        }
    }

    fn name(self, name: &[u8]) -> bool {
        match self {
            Self::All | Self::Covered(_) => true,
            Self::OtherName(_, known) => !name.is_empty() && name != known,
        }
    }
}

/// Who publishes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Party {
    /// A process.
    Process(i32),
    /// A prepared transaction, by its virtual transaction.
    Prepared(i32, u32),
}

/// A chunk of this process, mapped.
#[derive(Debug)]
struct OwnChunk {
    chunk: *mut Chunk,
    blocks: [*mut Block; CHUNK_BLOCKS],
}

/// This process's access to the registry.
#[derive(Debug)]
pub struct Registry {
    area: *mut pg_sys::dsa_area,
    directory: *mut Directory,
    directory_pointer: pg_sys::dsa_pointer,
    entry: *mut Entry,
    chunks: Vec<OwnChunk>,
    /// There was no memory: do not ask again before something is given back.
    is_full: Cell<bool>,
}

impl Registry {
    /// Joins the registry, and makes it if this is the first session to. None, after a warning, where there is no memory
    /// for it: locking goes on without names.
    pub fn join() -> Option<Self> {
        // SAFETY: server calls, and globals put back as they were.
        let joined = unsafe {
            let memory_context = pg_sys::CurrentMemoryContext;
            let joined = shared_memory_call(|| {
                pg_sys::CurrentMemoryContext = pg_sys::TopMemoryContext;
                join_under_lock()
            });
            pg_sys::CurrentMemoryContext = memory_context;
            joined
        };
        if let Some(joined) = joined {
            // SAFETY: this process's entry. Whoever had it before has left it empty, or else is cleared away.
            let entry = unsafe { &*joined.entry };
            // SAFETY: under the entry's lock.
            joined.with_entry_locked(|area| unsafe { entry.clear(area) });
            entry.deadline.store(NO_DEADLINE, Ordering::Relaxed);
            joined.end_queue_wait();
            joined.forget_witness();
            // SAFETY: a plain global.
            entry.pid.store(unsafe { pg_sys::MyProcPid }, Ordering::Relaxed);
            // SAFETY: the directory is there as long as the server, and mapped as long as this process.
            statistics::attach(joined.area, unsafe { &raw mut (*joined.directory).statistics });
            return Some(joined);
        }
        report::warn(&Error::NoNames);
        None
    }

    /// Writes the first hold of a lock at a place that was not in use before.
    #[inline(always)]
    pub fn open(&mut self, place: Place, tag: Tag, name: &[u8], mode: Mode, scope: Scope, now: i64) {
        let Some(slot) = self.slot(place) else { return };
        // SAFETY: this process's entry.
        let end = unsafe { &(*self.entry).end };
        if place >= end.load(Ordering::Relaxed) {
            end.store(place + 1, Ordering::Release);
        }
        let is_long = name.len() > INLINE_NAME;
        let long_name = if is_long { self.long_name(place) } else { None };
        write(slot, |body| {
            body.in_use = 1;
            body.waits_as = 0;
            body.name_length = name.len() as u16;
            body.tag = tag;
            body.counts = [[0; MODES]; 2];
            body.counts[scope as usize][mode as usize] = 1;
            body.since = [0; 2];
            body.since[scope as usize] = now;
            (body.limit_micros, body.expires_at) = (0, 0);
            match long_name {
                // SAFETY: room for the longest name, which readers look at as they do at the slot.
                Some(memory) => unsafe { std::ptr::copy_nonoverlapping(name.as_ptr(), memory, name.len()) },
                None if is_long => body.name_length = 0, // no memory: not shown
                None => body.name[..name.len()].copy_from_slice(name),
            }
        });
    }

    /// Writes what is held at a place, from the ledger. `now` is the time for a scope that had no hold before.
    pub fn publish(&mut self, place: Place, hold: &Hold, waits_as: Option<Scope>, now: i64) {
        let Some(slot) = self.slot(place) else { return };
        write(slot, |body| {
            body.waits_as = waits_as.map_or(0, |scope| 1 + scope as u8);
            body.counts = [[0; MODES]; 2];
            for run in hold.runs() {
                let count = &mut body.counts[run.owner.scope() as usize][run.mode as usize];
                *count = count.saturating_add(u32::try_from(run.count).unwrap_or(u32::MAX));
            }
            for (since, counts) in body.since.iter_mut().zip(&body.counts) {
                match counts.iter().any(|&count| count > 0) {
                    false => *since = 0,
                    true if *since == 0 => *since = now,
                    true => {}
                }
            }
            (body.limit_micros, body.expires_at) =
                hold.earliest_limit().map_or((0, 0), |limit| (limit.micros, limit.expires_at));
        });
    }

    /// The wait for a place's lock is over with a grant: it is held in that scope since `now`, if it was not before.
    pub fn granted(&mut self, place: Place, scope: Scope, holds: u64, now: i64) {
        let Some(slot) = self.slot(place) else { return };
        write(slot, |body| {
            body.waits_as = 0;
            if holds == 1 {
                body.since[scope as usize] = now;
            }
        });
    }

    /// This process waits exclusively for a place's lock, or holds it so after a wait: see [`Witness`].
    pub fn bear_witness(&mut self, place: Place) {
        if let Some(slot) = self.slot(place)
            && let Ok(process) = u16::try_from(ffi::my_process_number())
            && let Ok(place) = u16::try_from(place)
        {
            // SAFETY: this process's slot.
            let (sequence, tag) = unsafe { ((*slot).sequence.load(Ordering::Relaxed), (*slot).body.tag) };
            self.witness(tag).store(Witness { process, place, sequence }.to_word(), Ordering::Release);
        }
    }

    /// Whether somebody bears witness that those who hold a lock or wait for it mean that name.
    pub fn is_witnessed(&self, tag: Tag, name: &[u8]) -> bool {
        let witness = Witness::from_word(self.witness(tag).load(Ordering::Acquire));
        let Some(entry) = self.entries().nth(witness.process.into()) else { return false };
        let mut is_witnessed = false;
        with_lock(&raw const entry.lock, pg_sys::LWLockMode::LW_SHARED, || {
            let (number, slot) = locate(witness.place.into());
            let mut next = entry.first.load(Ordering::Acquire);
            for _ in 0..number {
                if next != NO_POINTER {
                    // SAFETY: a chunk of the entry, which stays under its lock.
                    next = unsafe { &*self.address::<Chunk>(next)? }.next.load(Ordering::Acquire);
                }
            }
            if next != NO_POINTER {
                // SAFETY: as above.
                let slot = unsafe { &(*self.address::<Chunk>(next)?).slots[slot] };
                let is_unchanged = || slot.sequence.load(Ordering::Acquire) == witness.sequence;
                // A long name is found by looking at all.
                is_witnessed = is_unchanged()
                    && read(slot, Wanted::Covered(tag), || None).is_some_and(|(_, its_name)| its_name == name)
                    && is_unchanged();
            }
            Some(())
        });
        is_witnessed
    }

    /// What whoever had this process's number before bears witness of.
    fn forget_witness(&self) {
        // SAFETY: the directory is there as long as the server.
        for witness in unsafe { &(*self.directory).witnesses } {
            let word = witness.load(Ordering::Relaxed);
            if usize::from(Witness::from_word(word).process) == ffi::my_process_number() {
                // Unless it is somebody else's by now.
                let _ = witness.compare_exchange(word, 0, Ordering::Relaxed, Ordering::Relaxed);
            }
        }
    }

    fn witness(&self, tag: Tag) -> &AtomicU64 {
        // SAFETY: the directory is there as long as the server.
        unsafe { &(&(*self.directory).witnesses)[tag.to_words()[0] as usize % WITNESSES] }
    }

    /// Sets when the wait that this process begins ends by itself.
    pub fn set_deadline(&self, deadline: Option<i64>) {
        // SAFETY: this process's entry.
        unsafe { (*self.entry).deadline.store(deadline.unwrap_or(NO_DEADLINE), Ordering::Relaxed) };
    }

    /// Clears a place.
    #[inline(always)]
    pub fn clear(&mut self, place: Place) {
        let Some(slot) = self.slot(place) else { return };
        write(slot, |body| {
            body.in_use = 0;
            body.waits_as = 0;
        });
        self.is_full.set(false);
    }

    /// Tells that this process waits in a queue.
    pub fn begin_queue_wait(&self, queue: Tag, name: &[u8], since: i64, deadline: Option<i64>) {
        // SAFETY: this process's entry, and the directory.
        let (entry, directory) = unsafe { (&*self.entry, &*self.directory) };
        let note = match entry.wait_note.load(Ordering::Relaxed) {
            NO_POINTER => self.allocate::<WaitNote>(),
            pointer => self.address(pointer).map(|note| (pointer, note)),
        };
        self.with_entry_locked(|_| {
            if let Some((pointer, note)) = note {
                // SAFETY: this process's memory, under its lock; a name fits.
                unsafe {
                    (*note).name_length = name.len() as u32;
                    (&mut (*note).name)[..name.len()].copy_from_slice(name);
                    (*note).since = since;
                    (*note).deadline = deadline.unwrap_or(NO_DEADLINE);
                }
                entry.wait_note.store(pointer, Ordering::Relaxed);
            }
            for (word, value) in entry.queue.iter().zip(queue.to_words()) {
                word.store(value, Ordering::Relaxed);
            }
            Some(())
        });
        if entry.queue_state.swap(QUEUED, Ordering::Release) == NOT_WAITING {
            directory.queue_waiters.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Tells that this process is the first in the queue that it waits in.
    pub fn lead_queue_wait(&self) {
        // SAFETY: this process's entry.
        unsafe { (*self.entry).queue_state.store(HEAD, Ordering::Release) };
        // What is looked at after this cannot be missed: who changes it then sees that somebody waits.
        fence(Ordering::SeqCst);
    }

    /// Tells that this process does not wait in a queue any more.
    pub fn end_queue_wait(&self) {
        // SAFETY: this process's entry, and the directory.
        let (entry, directory) = unsafe { (&*self.entry, &*self.directory) };
        if entry.queue_state.swap(NOT_WAITING, Ordering::Relaxed) != NOT_WAITING {
            directory.queue_waiters.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Works on the fencing tokens that were drawn from a sequence. Where the extension was created anew, or restored over
    /// itself, the database has another sequence: its tokens have to be above those of the one before, as long as that is
    /// known here. Where there are more databases than places, some find theirs gone, which only costs draws.
    pub fn with_tokens<R>(&self, database: u32, sequence: u32, work: impl FnOnce(&mut Stock) -> R) -> Option<R> {
        let mut result = None;
        // SAFETY: the directory is there as long as the server; under its lock.
        unsafe {
            with_lock(&raw const (*self.directory).tokens_lock, pg_sys::LWLockMode::LW_EXCLUSIVE, || {
                let all = &mut (*self.directory).tokens;
                let find = |owner| all.iter().position(|tokens| tokens.database == owner);
                let known = find(database);
                let place = known.or_else(|| find(0)).unwrap_or(database as usize % TOKEN_STOCKS);
                let tokens = &mut all[place];
                if known.is_none() {
                    *tokens = TokensInStock { database, sequence, stock: Stock::default() };
                } else if tokens.sequence != sequence {
                    tokens.sequence = sequence;
                    tokens.stock.clear();
                }
                result = Some(work(&mut tokens.stock));
                Some(())
            });
        }
        result
    }

    fn has_queue_waiters(&self) -> bool {
        fence(Ordering::SeqCst);
        // SAFETY: the directory is there as long as the server.
        unsafe { &(*self.directory).queue_waiters }.load(Ordering::Relaxed) > 0
    }

    /// Wakes the first in a queue. For after something that it may wait for has come true.
    pub fn wake(&self, queue: Tag) {
        if !self.has_queue_waiters() {
            return;
        }
        for (number, entry) in self.entries().enumerate() {
            if entry.queue_state.load(Ordering::Acquire) == HEAD && entry.queue() == queue {
                latch::set(number);
            }
        }
    }

    /// Who waits in queues.
    pub fn read_queue_waits(&self) -> Vec<QueueWait> {
        let mut waits = Vec::new();
        if !self.has_queue_waiters() {
            return waits;
        }
        for entry in self.entries() {
            if entry.queue_state.load(Ordering::Acquire) == NOT_WAITING {
                continue;
            }
            with_lock(&raw const entry.lock, pg_sys::LWLockMode::LW_SHARED, || {
                let state = entry.queue_state.load(Ordering::Acquire);
                let pointer = entry.wait_note.load(Ordering::Relaxed);
                if state != NOT_WAITING && pointer != NO_POINTER {
                    // SAFETY: memory of the entry, under its lock.
                    let note = unsafe { &*self.address::<WaitNote>(pointer)? };
                    waits.push(QueueWait {
                        pid: entry.pid.load(Ordering::Relaxed),
                        queue: entry.queue(),
                        name: note.name[..note.name_length as usize].to_vec(),
                        since: note.since,
                        deadline: (note.deadline != NO_DEADLINE).then_some(note.deadline),
                        is_head: state == HEAD,
                    });
                }
                Some(())
            });
        }
        waits
    }

    /// The processes that have a slot for each lock of theirs: what they do not speak of they do not hold.
    pub fn complete_processes(&self) -> HashSet<i32> {
        self.entries()
            .filter(|entry| entry.is_incomplete.load(Ordering::Acquire) == 0)
            .map(|entry| entry.pid.load(Ordering::Relaxed))
            .filter(|&pid| pid != 0)
            .collect()
    }

    /// Gives back the memory that held the slots of many locks. For when nothing is held.
    pub fn trim(&mut self) {
        self.is_full.set(false);
        // SAFETY: this process's entry.
        let entry = unsafe { &*self.entry };
        entry.is_incomplete.store(0, Ordering::Release);
        entry.end.store(0, Ordering::Release);
        self.chunks.truncate(1);
        let Some(first) = self.chunks.first() else { return };
        // SAFETY: a chunk of this process.
        let next = unsafe { &(*first.chunk).next };
        self.with_entry_locked(|area| {
            // SAFETY: under the entry's lock.
            unsafe { free_chunks(area, next) }
        });
        self.trim_area();
    }

    /// Leaves the registry, at the end of the session.
    pub fn leave(self) {
        self.end_queue_wait();
        let entry = self.entry;
        self.with_entry_locked(|area| {
            // SAFETY: this process's entry, under its lock.
            unsafe { (*entry).clear(area) }
        });
        self.trim_area();
    }

    /// Gives segments without anything in them back to the operating system.
    fn trim_area(&self) {
        let area = self.area;
        // SAFETY: a server call with plain arguments.
        unsafe { shared_memory_call(|| ffi::dsa_trim(area)) };
    }

    /// What sessions and prepared transactions have published, so far as it is wanted.
    pub fn read(&self, wanted: Wanted<'_>) -> Vec<Published> {
        // A process lets go of segments that others have freed when it next calls into the area.
        self.address::<Directory>(self.directory_pointer);
        let mut published = Vec::new();
        for entry in self.entries() {
            if entry.pid.load(Ordering::Relaxed) != 0 && entry.end.load(Ordering::Acquire) != 0 {
                with_lock(&raw const entry.lock, pg_sys::LWLockMode::LW_SHARED, || {
                    self.read_entry(entry, wanted, &mut published)
                });
            }
        }
        // SAFETY: the directory is there as long as the server.
        let lock = unsafe { &raw const (*self.directory).prepared_lock };
        with_lock(lock, pg_sys::LWLockMode::LW_SHARED, || self.read_prepared(wanted, &mut published));
        published
    }

    /// Keeps the names of a transaction's locks that is about to be prepared, as far as there is memory for them.
    ///
    /// `is_held` asks the lock manager whether a virtual transaction, which may be prepared, holds a lock.
    pub fn keep_prepared<'a>(&self, holds: impl Iterator<Item = &'a Hold>, is_held: impl Fn((i32, u32), Tag) -> bool) {
        let directory = self.directory;
        // SAFETY: the directory is there as long as the server.
        let lock = unsafe { &raw const (*directory).prepared_lock };
        let by = ffi::my_virtual_transaction();
        for hold in holds {
            let counts = Mode::ALL.map(|mode| hold.count(Some(mode), Scope::Transaction) as u32);
            if counts.iter().all(|&count| count == 0) {
                continue;
            }
            let Some((pointer, node)) = self.allocate::<PreparedName>() else { return };
            // SAFETY: memory of our own until it is linked into the list, which is done under its lock.
            unsafe {
                (*node).virtual_transaction = by;
                (*node).tag = hold.tag();
                (*node).counts = counts;
                (*node).since = self.transaction_since(hold.tag());
                (*node).name_length = hold.name().len() as u16;
                (&mut (*node).name)[..hold.name().len()].copy_from_slice(hold.name());
            }
            with_lock(lock, pg_sys::LWLockMode::LW_EXCLUSIVE, || {
                // SAFETY: as above.
                unsafe {
                    if (*directory).prepared_count >= (*directory).prepared_limit {
                        self.drop_finished_prepared(&is_held)?;
                    }
                    (*node).next = (*directory).prepared;
                    (*directory).prepared = pointer;
                    (*directory).prepared_count += 1;
                }
                Some(())
            });
        }
    }

    /// Strikes out the names of prepared transactions that have come to their end.
    ///
    /// # Safety
    /// Under the exclusive lock of the list.
    unsafe fn drop_finished_prepared(&self, is_held: &impl Fn((i32, u32), Tag) -> bool) -> Option<()> {
        // SAFETY: the caller's: the list does not change under us; pointers in it lead to nodes.
        unsafe {
            let directory = self.directory;
            let mut link = &raw mut (*directory).prepared;
            while *link != NO_POINTER {
                let node = self.address::<PreparedName>(*link)?;
                if is_held((*node).virtual_transaction, (*node).tag) {
                    link = &raw mut (*node).next;
                } else {
                    let finished = *link;
                    *link = (*node).next;
                    free(self.area, finished)?;
                    (*directory).prepared_count -= 1;
                }
            }
            (*directory).prepared_limit = 2 * (*directory).prepared_count + MIN_PREPARED_LIMIT;
        }
        Some(())
    }

    fn transaction_since(&self, tag: Tag) -> i64 {
        // SAFETY: this process's own slots.
        let mut slots = self.chunks.iter().flat_map(|own| unsafe { &(*own.chunk).slots });
        slots
            .find(|slot| slot.body.in_use != 0 && slot.body.tag == tag)
            .map_or(0, |slot| slot.body.since[Scope::Transaction as usize])
    }

    /// None, with the lock gone, where memory cannot be mapped: what was read until then stands.
    fn read_entry(&self, entry: &Entry, wanted: Wanted<'_>, published: &mut Vec<Published>) -> Option<()> {
        let pid = entry.pid.load(Ordering::Relaxed);
        let deadline = entry.deadline.load(Ordering::Relaxed);
        let mut next = entry.first.load(Ordering::Acquire);
        let mut left = entry.end.load(Ordering::Acquire) as usize;
        while next != NO_POINTER && left > 0 {
            // SAFETY: a chunk of the entry, which stays under its lock.
            let chunk = unsafe { &*self.address::<Chunk>(next)? };
            next = chunk.next.load(Ordering::Acquire);
            let mut blocks = [std::ptr::null::<Block>(); CHUNK_BLOCKS];
            for (block, pointer) in blocks.iter_mut().zip(&chunk.blocks) {
                match pointer.load(Ordering::Acquire) {
                    NO_POINTER => {}
                    pointer => *block = self.address::<Block>(pointer)?,
                }
            }
            for (number, slot) in chunk.slots.iter().take(left).enumerate() {
                let Some((body, name)) = read(slot, wanted, || long_name_in(&blocks, number)) else { continue };
                let waits_as = match body.waits_as {
                    0 => None,
                    1 => Some(Scope::Session),
                    _ => Some(Scope::Transaction),
                };
                published.push(Published {
                    by: Party::Process(pid),
                    tag: body.tag,
                    name,
                    counts: body.counts,
                    since: body.since,
                    limit: (body.limit_micros > 0).then_some((body.limit_micros, body.expires_at)),
                    waits_as,
                    deadline: (waits_as.is_some() && deadline != NO_DEADLINE).then_some(deadline),
                });
            }
            left = left.saturating_sub(CHUNK_SLOTS);
        }
        Some(())
    }

    fn read_prepared(&self, wanted: Wanted<'_>, published: &mut Vec<Published>) -> Option<()> {
        // SAFETY: the list, under its lock.
        let mut next = unsafe { (*self.directory).prepared };
        while next != NO_POINTER {
            // SAFETY: a node of the list, under its lock.
            let node = unsafe { &*self.address::<PreparedName>(next)? };
            next = node.next;
            let name = &node.name[..usize::from(node.name_length)];
            if wanted.tag(node.tag) && wanted.name(name) {
                published.push(Published {
                    by: Party::Prepared(node.virtual_transaction.0, node.virtual_transaction.1),
                    tag: node.tag,
                    name: name.to_vec(),
                    counts: [[0; MODES], node.counts],
                    since: [0, node.since],
                    limit: None,
                    waits_as: None,
                    deadline: None,
                });
            }
        }
        Some(())
    }

    /// All processes' parts, by their numbers.
    fn entries(&self) -> impl Iterator<Item = &Entry> {
        // SAFETY: the directory is followed by so many entries.
        (0..ffi::max_processes()).map(|number| unsafe { &*entries(self.directory).add(number) })
    }

    /// This process's slot at a place; makes room for it if there is none. None without memory.
    #[inline(always)]
    fn slot(&mut self, place: Place) -> Option<*mut Slot> {
        let (number, slot) = locate(place);
        while self.chunks.len() <= number {
            if self.add_chunk().is_none() {
                // SAFETY: this process's entry.
                unsafe { (*self.entry).is_incomplete.store(1, Ordering::Release) };
                return None;
            }
        }
        // SAFETY: a chunk of this process.
        Some(unsafe { &raw mut (*self.chunks[number].chunk).slots[slot] })
    }

    #[cold]
    fn add_chunk(&mut self) -> Option<()> {
        let (pointer, chunk) = self.allocate::<Chunk>()?;
        // SAFETY: this process's entry, and a chunk of it.
        let link = unsafe { self.chunks.last().map_or(&(*self.entry).first, |last| &(*last.chunk).next) };
        link.store(pointer, Ordering::Release);
        self.chunks.push(OwnChunk { chunk, blocks: [std::ptr::null_mut(); CHUNK_BLOCKS] });
        Some(())
    }

    /// Where a place's long name stands; makes room if there is none. None without memory.
    #[cold]
    fn long_name(&mut self, place: Place) -> Option<*mut u8> {
        self.slot(place)?;
        let (number, slot) = locate(place);
        let block = slot / BLOCK_NAMES;
        if self.chunks[number].blocks[block].is_null() {
            let (pointer, memory) = self.allocate::<Block>()?;
            // SAFETY: a chunk of this process.
            unsafe { (*self.chunks[number].chunk).blocks[block].store(pointer, Ordering::Release) };
            self.chunks[number].blocks[block] = memory;
        }
        long_name_in(&self.chunks[number].blocks.map(|block| block.cast_const()), slot).map(|name| name.cast_mut())
    }

    /// Zeroed memory in the shared area; None where there is none. Not to be asked for under a lock of ours.
    fn allocate<T>(&self) -> Option<(pg_sys::dsa_pointer, *mut T)> {
        if self.is_full.get() {
            return None;
        }
        let allocated = allocate_in(self.area);
        self.is_full.set(allocated.is_none());
        allocated
    }

    /// Where a pointer into the shared area leads; None where its segment cannot be mapped.
    fn address<T>(&self, pointer: pg_sys::dsa_pointer) -> Option<*mut T> {
        address_in(self.area, pointer)
    }

    fn with_entry_locked(&self, change: impl FnOnce(*mut pg_sys::dsa_area) -> Option<()>) {
        // SAFETY: this process's entry.
        let lock = unsafe { &raw const (*self.entry).lock };
        with_lock(lock, pg_sys::LWLockMode::LW_EXCLUSIVE, || change(self.area));
    }
}

const MIN_PREPARED_LIMIT: u32 = 64;

impl Entry {
    /// The tag of the queue that its process waits in, if it does.
    fn queue(&self) -> Tag {
        Tag::from_words([0, 1].map(|word| self.queue[word].load(Ordering::Relaxed)))
    }

    /// Empties it; None, with its lock gone, where memory could not be reached, which is lost then.
    ///
    /// # Safety
    /// Under its exclusive lock.
    unsafe fn clear(&self, area: *mut pg_sys::dsa_area) -> Option<()> {
        self.pid.store(0, Ordering::Relaxed);
        self.is_incomplete.store(0, Ordering::Relaxed);
        self.end.store(0, Ordering::Relaxed);
        // SAFETY: the caller's; only this entry leads there.
        unsafe {
            match self.wait_note.swap(NO_POINTER, Ordering::Relaxed) {
                NO_POINTER => {}
                pointer => free(area, pointer)?,
            }
            free_chunks(area, &self.first)
        }
    }
}

/// Frees the chunks that a link leads to, and their blocks.
///
/// # Safety
/// Under the exclusive lock of the entry that they belong to.
unsafe fn free_chunks(area: *mut pg_sys::dsa_area, link: &AtomicU64) -> Option<()> {
    let mut next = link.swap(NO_POINTER, Ordering::Relaxed);
    while next != NO_POINTER {
        // SAFETY: allocated by the entry's process; nobody else can lead there any more.
        unsafe {
            let chunk = &*shared_memory_call(|| ffi::dsa_get_address(area, next))?.cast::<Chunk>();
            for block in &chunk.blocks {
                match block.load(Ordering::Relaxed) {
                    NO_POINTER => {}
                    pointer => free(area, pointer)?,
                }
            }
            let this = std::mem::replace(&mut next, chunk.next.load(Ordering::Relaxed));
            free(area, this)?;
        }
    }
    Some(())
}

/// Zeroed memory in the shared area; None where there is none. Not to be asked for under a lock of ours.
pub(super) fn allocate_in<T>(area: *mut pg_sys::dsa_area) -> Option<(pg_sys::dsa_pointer, *mut T)> {
    let flags = (pg_sys::DSA_ALLOC_NO_OOM | pg_sys::DSA_ALLOC_ZERO) as i32;
    // SAFETY: a server call with plain arguments.
    let pointer = unsafe { shared_memory_call(|| ffi::dsa_allocate_extended(area, size_of::<T>(), flags)) };
    let pointer = pointer.filter(|&pointer| pointer != NO_POINTER)?;
    Some((pointer, address_in(area, pointer)?))
}

/// Where a pointer into the shared area leads; None, with all locks of ours gone, where its segment cannot be mapped.
pub(super) fn address_in<T>(area: *mut pg_sys::dsa_area, pointer: pg_sys::dsa_pointer) -> Option<*mut T> {
    // SAFETY: a pointer that an allocation in this area gave.
    unsafe { shared_memory_call(|| ffi::dsa_get_address(area, pointer)) }.map(|address| address.cast())
}

/// Gives memory back to the shared area.
///
/// # Safety
/// Allocated there, and not reached by anyone after this.
pub(super) unsafe fn free(area: *mut pg_sys::dsa_area, pointer: pg_sys::dsa_pointer) -> Option<()> {
    // SAFETY: the caller's.
    unsafe { shared_memory_call(|| ffi::dsa_free(area, pointer)) }
}

/// # Safety
/// In a [`try_block`], with TopMemoryContext current.
unsafe fn join_under_lock() -> Registry {
    // SAFETY: the caller's. The set-up lock makes sure that one process makes the shared parts.
    unsafe {
        let lock = ffi::addin_shmem_init_lock();
        ffi::LWLockAcquire(lock, pg_sys::LWLockMode::LW_EXCLUSIVE);
        let mut found = false;
        let control = ffi::ShmemInitStruct(CONTROL_NAME.as_ptr(), CONTROL_SIZE, &mut found).cast::<Control>();
        let is_made = found && (*control).magic == CONTROL_MAGIC;
        if !found {
            std::ptr::write_bytes(control.cast::<u8>(), 0, CONTROL_SIZE);
        }
        ffi::lwlock_tranche(&raw mut (*control).tranche, TRANCHE_NAME);
        let area = if is_made { ffi::dsa_attach((*control).area) } else { ffi::dsa_create((*control).tranche) };
        ffi::dsa_pin_mapping(area);
        if !is_made {
            (*control).directory = make_directory(area, (*control).tranche);
            ffi::dsa_pin(area);
            (*control).area = ffi::dsa_get_handle(area);
            (*control).magic = CONTROL_MAGIC;
        }
        let directory = ffi::dsa_get_address(area, (*control).directory).cast::<Directory>();
        let entry = entries(directory).add(ffi::my_process_number());
        ffi::LWLockRelease(lock);

        Registry {
            area,
            directory,
            directory_pointer: (*control).directory,
            entry,
            chunks: Vec::new(),
            is_full: Cell::new(false),
        }
    }
}

/// # Safety
/// In a [`try_block`].
unsafe fn make_directory(area: *mut pg_sys::dsa_area, tranche: i32) -> pg_sys::dsa_pointer {
    let processes = ffi::max_processes();
    let size = size_of::<Directory>() + processes * size_of::<Entry>();
    // SAFETY: the caller's; the memory is zeroed, long enough, and nobody else's yet.
    unsafe {
        let pointer = ffi::dsa_allocate_extended(area, size, pg_sys::DSA_ALLOC_ZERO as i32);
        let directory = ffi::dsa_get_address(area, pointer).cast::<Directory>();
        ffi::LWLockInitialize(&raw mut (*directory).prepared_lock, tranche);
        ffi::LWLockInitialize(&raw mut (*directory).tokens_lock, tranche);
        (*directory).prepared_limit = MIN_PREPARED_LIMIT;
        statistics::prepare(&raw mut (*directory).statistics, tranche);
        for number in 0..processes {
            ffi::LWLockInitialize(&raw mut (*entries(directory).add(number)).lock, tranche);
        }
        pointer
    }
}

/// The entries behind a directory.
fn entries(directory: *mut Directory) -> *mut Entry {
    const _: () = assert!(align_of::<Entry>() <= align_of::<Directory>());
    // SAFETY: one past the directory, in the memory that make_directory has allocated.
    unsafe { directory.add(1).cast() }
}

/// Works under a lock. `work` returns None when a call of shared memory has failed, and all locks are gone.
pub(super) fn with_lock(
    lock: *const pg_sys::LWLock,
    mode: pg_sys::LWLockMode::Type,
    work: impl FnOnce() -> Option<()>,
) {
    // SAFETY: a lock in shared memory, released if it is still held.
    unsafe {
        let holdoff = pg_sys::InterruptHoldoffCount;
        ffi::LWLockAcquire(lock.cast_mut(), mode);
        match work() {
            Some(()) => ffi::LWLockRelease(lock.cast_mut()),
            None => pg_sys::InterruptHoldoffCount = holdoff,
        }
    }
}

/// A call of the server's shared memory. Even one that is asked not to raises an error when the operating system has no
/// memory, and leaves its locks to the end of the transaction: they are released here, the error is put away, and the
/// result is None.
///
/// # Safety
/// As for [`try_block`]; no lightweight lock of the server's is held.
unsafe fn shared_memory_call<R>(call: impl FnOnce() -> R) -> Option<R> {
    // SAFETY: the caller's; globals, put back as they were.
    unsafe {
        let (holdoff, owner) = (pg_sys::InterruptHoldoffCount, pg_sys::CurrentResourceOwner);
        // Mappings are for the life of the process, not of a transaction.
        pg_sys::CurrentResourceOwner = std::ptr::null_mut();
        let result = try_block(call);
        pg_sys::CurrentResourceOwner = owner;
        result
            .map_err(|error| {
                ffi::LWLockReleaseAll();
                pg_sys::InterruptHoldoffCount = holdoff;
                error.put_away();
            })
            .ok()
    }
}

/// The chunk of a place, and the slot within it.
fn locate(place: Place) -> (usize, usize) {
    (place as usize / CHUNK_SLOTS, place as usize % CHUNK_SLOTS)
}

/// Where a slot's long name stands in the blocks of its chunk.
fn long_name_in(blocks: &[*const Block; CHUNK_BLOCKS], slot: usize) -> Option<*const u8> {
    let block = blocks[slot / BLOCK_NAMES];
    // SAFETY: a block has so many names.
    (!block.is_null()).then(|| unsafe { (&raw const (*block)[slot % BLOCK_NAMES]).cast() })
}

/// Writes a slot of this process.
fn write(slot: *mut Slot, change: impl FnOnce(&mut Body)) {
    // SAFETY: only this process writes its slots; readers look at the sequence before and after.
    unsafe {
        let sequence = (*slot).sequence.load(Ordering::Relaxed);
        (*slot).sequence.store(sequence.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::Release);
        change(&mut (*slot).body);
        (*slot).sequence.store(sequence.wrapping_add(2), Ordering::Release);
    }
}

/// Copies a slot of any process and its name; None if it says nothing that is wanted. `long_name` tells where a name stands
/// that is too long for the slot.
fn read(slot: *const Slot, wanted: Wanted<'_>, long_name: impl Fn() -> Option<*const u8>) -> Option<(Body, Vec<u8>)> {
    for _ in 0..MAX_READ_TRIES {
        // SAFETY: the slot's memory stays; a copy torn by its writer is thrown away.
        unsafe {
            let before = (*slot).sequence.load(Ordering::Acquire);
            let in_use = std::ptr::read_volatile(&raw const (*slot).body.in_use);
            let tag = std::ptr::read_volatile(&raw const (*slot).body.tag);
            let copy = (in_use != 0 && wanted.tag(tag)).then(|| {
                let body = std::ptr::read_volatile(&raw const (*slot).body);
                let length = usize::from(body.name_length).min(MAX_NAME_BYTES);
                let mut long;
                let name = match long_name().filter(|_| length > INLINE_NAME) {
                    Some(name) => {
                        long = [0; MAX_NAME_BYTES];
                        std::ptr::copy_nonoverlapping(name, long.as_mut_ptr(), length);
                        &long[..length]
                    }
                    None => &body.name[..length.min(INLINE_NAME)],
                };
                wanted.name(name).then(|| (body, name.to_vec()))
            });
            fence(Ordering::Acquire);
            if before & 1 == 0 && (*slot).sequence.load(Ordering::Relaxed) == before {
                return copy.flatten();
            }
        }
        std::hint::spin_loop();
    }
    None
}
