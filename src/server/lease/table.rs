//! The rows of leases, read and written without SQL.
//!
//! By SQL each call would plan, execute and change its role, several times what the row itself costs, and a read for a
//! write would take the statement's snapshot. Here every read takes the newest one, and a deletion can be told not to wait
//! for another's unfinished change.
//!
//! A grant always inserts a row. Its place in the index never changes after that, so that changes can stay in their page.
//! An order to a holder is a row of its own, beside the grant's: who gives it must not keep the holder waiting.

use crate::rules::lease::{Bound, Grant, Moment, Term};
use crate::server::arguments::{Varlena, text_bytes};
use crate::server::report::Problem;
use crate::server::tables::Tables;
use crate::server::try_block::try_block;
use crate::server::{activity, encoding, ffi, session, version};
use pgrx::pg_sys;
use xxhash_rust::xxh3::xxh3_64;

/// The columns, in the order of `sql/leases.sql`.
mod column {
    pub const KEY: usize = 0;
    pub const TOKEN: usize = 1;
    pub const SLOT: usize = 2;
    pub const PERMITS: usize = 3;
    pub const ROLE: usize = 4;
    pub const BOUND_PID: usize = 5;
    pub const BOUND_SESSION: usize = 6;
    pub const KEPT: usize = 7;
    pub const TTL: usize = 8;
    pub const ACQUIRED_AT: usize = 9;
    pub const EXPIRES_AT: usize = 10;
    pub const BOOT: usize = 11;
    pub const ACQUIRED_BOOT: usize = 12;
    pub const EXPIRES_BOOT: usize = 13;
    pub const NAME: usize = 14;
    pub const OWNER: usize = 15;
    pub const REQUESTED: usize = 16;
    pub const PAYLOAD: usize = 17;
    pub const FOR_TOKEN: usize = 18;
    pub const COUNT: usize = 19;
}

/// The index's columns, and how they are compared.
const KEY_ATTRIBUTE: i16 = 1;
const TOKEN_ATTRIBUTE: i16 = 2;

/// Which versions of rows a read sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum See {
    /// The newest committed ones, and this transaction's own.
    Committed,
    /// Those of transactions under way too; without texts.
    Uncommitted,
}

/// A row, in memory of this call.
#[derive(Debug)]
pub struct Row {
    tuple: pg_sys::HeapTuple,
    /// The lease's key.
    pub key: u64,
    /// The grant; of an order, what it was copied from, with a token of the order's own.
    pub grant: Grant,
    /// Of an order: the token of the grant that it is about.
    pub for_token: Option<i64>,
    /// The lease's name, as UTF-8.
    pub name: Vec<u8>,
    /// Who holds it, in the database's encoding.
    pub owner: Vec<u8>,
    /// Of an order: the reason for which the lease is asked for, in the database's encoding.
    pub requested: Option<Vec<u8>>,
    /// The payload, as the server keeps a jsonb; None if none, or if it was not asked for.
    pub payload: Option<Vec<u8>>,
    /// Another transaction, under way, has put this version there.
    pub is_uncommitted: bool,
    /// Another transaction, under way, puts a new version in place of this one.
    pub is_being_updated: bool,
}

impl Drop for Row {
    fn drop(&mut self) {
        // SAFETY: a copy of our own, in a memory context that outlives the call; freeing raises no error.
        unsafe { ffi::heap_freetuple(self.tuple) }
    }
}

/// A new row.
#[derive(Debug)]
pub struct NewRow<'a> {
    /// The lease's key.
    pub key: u64,
    /// The grant, or an order's copy of it.
    pub grant: Grant,
    /// Of an order: the token of the grant that it is about.
    pub for_token: Option<i64>,
    /// The lease's name, as UTF-8.
    pub name: &'a [u8],
    /// Who holds it, in the database's encoding.
    pub owner: &'a [u8],
    /// Of an order: the reason.
    pub requested: Option<&'a [u8]>,
    /// The payload.
    pub payload: Option<Varlena>,
}

/// What becomes of a row; what is None stays.
#[derive(Clone, Copy, Debug, Default)]
pub struct Change {
    /// How long the grant lasts from now on.
    pub term: Option<Term>,
    /// It is released, and kept from others.
    pub kept: bool,
    /// The payload.
    pub payload: Option<Varlena>,
}

impl Change {
    /// Whether the grant lasts no shorter for it.
    pub fn prolongs(&self, before: &Term) -> bool {
        !self.kept && self.term.is_none_or(|term| term.expires.wall >= before.expires.wall)
    }
}

/// How a write came out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Written {
    /// Done.
    Done,
    /// The row is not what it was when it was read: read again.
    Changed,
    /// Another transaction, under way, has changed it.
    Busy,
}

/// The open table.
#[derive(Clone, Copy)]
struct Open {
    table: pg_sys::Relation,
    /// The index by key and token.
    index: pg_sys::Oid,
}

/// A row as the scan finds it. Without a destructor, as everything within a [`try_block`].
#[derive(Clone, Copy)]
struct Found {
    tuple: pg_sys::HeapTuple,
    values: [pg_sys::Datum; column::COUNT],
    nulls: [bool; column::COUNT],
    payload: Varlena,
    /// What was made out of values that are compressed or stored elsewhere.
    copies: [Varlena; TEXTS.len()],
    is_uncommitted: bool,
    is_being_updated: bool,
}

const TEXTS: [usize; 3] = [column::NAME, column::OWNER, column::REQUESTED];

/// Works on the open table, in a [`try_block`].
///
/// # Safety
/// As for [`try_block`].
unsafe fn with_table<R>(
    tables: &Tables,
    mode: u32,
    work: impl FnOnce(Open) -> Result<R, WrongShape>,
) -> Result<R, Problem> {
    session::check_not_parallel()?;
    let mode = mode as pg_sys::LOCKMODE;
    // SAFETY: the caller's; what is opened here is closed here, or at the end of the transaction that an error ends.
    let result = unsafe {
        try_block(|| {
            let table = ffi::table_open(tables.lease, mode);
            // Of the open table: REINDEX CONCURRENTLY puts another in its place.
            let index = ffi::primary_key_index(table);
            let is_ours = (*(*table).rd_att).natts as usize == column::COUNT && index != pg_sys::InvalidOid;
            let result = if is_ours { work(Open { table, index }) } else { Err(WrongShape) };
            // A writer's lock lasts to the end of its transaction.
            let mode = if mode == pg_sys::AccessShareLock as i32 { mode } else { pg_sys::NoLock as i32 };
            ffi::table_close(table, mode);
            result
        })
    }?;
    result.map_err(|WrongShape| version::mismatch())
}

/// The table has other columns than this library knows.
struct WrongShape;

/// Works with the newest snapshot. Only what looks for rows needs one: to take it costs more the more sessions there are.
///
/// # Safety
/// In a [`try_block`].
unsafe fn with_newest_snapshot<R>(work: impl FnOnce(pg_sys::Snapshot) -> R) -> R {
    // SAFETY: the caller's; after an error the end of the (sub)transaction lets go of it.
    unsafe {
        let snapshot = ffi::RegisterSnapshot(ffi::GetLatestSnapshot());
        let result = work(snapshot);
        ffi::UnregisterSnapshot(snapshot);
        result
    }
}

/// The rows of a lease, or the one with that token.
///
/// # Errors
/// [`version::mismatch`], the server's.
pub fn read(tables: &Tables, key: u64, token: Option<i64>, see: See, payloads: bool) -> Result<Vec<Row>, Problem> {
    let keys = [(KEY_ATTRIBUTE, pg_sys::BTEqualStrategyNumber, key as i64)];
    let with_token = [keys[0], (TOKEN_ATTRIBUTE, pg_sys::BTEqualStrategyNumber, token.unwrap_or_default())];
    read_rows(tables, if token.is_some() { &with_token } else { &keys }, see, payloads)
}

/// All committed rows, payloads and all.
///
/// # Errors
/// [`version::mismatch`], the server's.
pub fn read_all(tables: &Tables) -> Result<Vec<Row>, Problem> {
    read_rows(tables, &[], See::Committed, true)
}

type Key = (i16, u32, i64);

fn read_rows(tables: &Tables, keys: &[Key], see: See, payloads: bool) -> Result<Vec<Row>, Problem> {
    let mut found = Vec::new();
    // SAFETY: server calls; the vector is outside of the block, and grows between them.
    unsafe {
        with_table(tables, pg_sys::AccessShareLock, |open| {
            match see {
                See::Committed => with_newest_snapshot(|snapshot| {
                    Scan::each(open, snapshot, keys, |scan| found.push(scan.row(open, true, payloads)));
                }),
                See::Uncommitted => {
                    let mut dirty = pg_sys::SnapshotData {
                        snapshot_type: pg_sys::SnapshotType::SNAPSHOT_DIRTY,
                        ..pg_sys::SnapshotData::default()
                    };
                    // Written with each row that the scan comes to.
                    let snapshot = &raw mut dirty;
                    Scan::each(open, snapshot, keys, |scan| {
                        let mut row = scan.row(open, false, payloads);
                        let tuple = &*(*row.tuple).t_data;
                        // A deleted row leads nowhere, an updated one to its next version.
                        let is_updated = !item_pointers_equal(&tuple.t_ctid, &(*row.tuple).t_self);
                        row.is_uncommitted = (*snapshot).xmin != pg_sys::InvalidTransactionId;
                        row.is_being_updated = (*snapshot).xmax != pg_sys::InvalidTransactionId && is_updated;
                        found.push(row);
                    });
                }
            }
            Ok(())
        })
    }?;
    Ok(found.iter().map(Row::of).collect())
}

/// A scan by the index.
struct Scan {
    index: pg_sys::Relation,
    scan: pg_sys::IndexScanDesc,
    slot: *mut pg_sys::TupleTableSlot,
}

const MAX_KEYS: usize = 2;

impl Scan {
    /// # Safety
    /// In a [`try_block`], as all of this.
    unsafe fn begin(open: Open, snapshot: pg_sys::Snapshot, keys: &[Key]) -> Self {
        // SAFETY: the caller's; the scan copies its keys.
        unsafe {
            let mut scan_keys = [pg_sys::ScanKeyData::default(); MAX_KEYS];
            for (scan_key, &(attribute, strategy, value)) in scan_keys.iter_mut().zip(keys) {
                let procedure = match strategy {
                    pg_sys::BTLessStrategyNumber => pg_sys::F_INT8LT,
                    pg_sys::BTGreaterStrategyNumber => pg_sys::F_INT8GT,
                    _ => pg_sys::F_INT8EQ,
                };
                ffi::ScanKeyInit(scan_key, attribute, strategy as u16, procedure.into(), pg_sys::Datum::from(value));
            }
            let index = ffi::index_open(open.index, pg_sys::AccessShareLock as i32);
            let scan = ffi::index_beginscan(open.table, index, snapshot, keys.len() as i32);
            ffi::index_rescan(scan, scan_keys.as_mut_ptr(), keys.len() as i32, std::ptr::null_mut(), 0);
            let slot = ffi::MakeSingleTupleTableSlot((*open.table).rd_att, &raw const pg_sys::TTSOpsBufferHeapTuple);
            Self { index, scan, slot }
        }
    }

    /// Works on each visible row.
    ///
    /// # Safety
    /// In a [`try_block`].
    unsafe fn each(open: Open, snapshot: pg_sys::Snapshot, keys: &[Key], mut work: impl FnMut(&Self)) {
        // SAFETY: the caller's.
        unsafe {
            let mut scan = Self::begin(open, snapshot, keys);
            while scan.next() {
                work(&scan);
            }
            scan.end();
        }
    }

    /// Goes to the next visible row.
    ///
    /// # Safety
    /// In a [`try_block`].
    unsafe fn next(&mut self) -> bool {
        // SAFETY: the caller's.
        unsafe {
            loop {
                match self.next_entry() {
                    None => return false,
                    Some(true) => return true,
                    Some(false) => {}
                }
            }
        }
    }

    /// Goes to the next entry of the index (or the next version that it leads to); whether its row is visible. An entry
    /// that leads to nothing but dead versions is marked, so that the index can use its room again.
    ///
    /// # Safety
    /// In a [`try_block`].
    unsafe fn next_entry(&mut self) -> Option<bool> {
        // SAFETY: the caller's; a row that is not visible leaves the slot as it was.
        unsafe {
            let is_at_chain = (*self.scan).xs_heap_continue;
            if !is_at_chain && ffi::index_getnext_tid(self.scan, pg_sys::ScanDirection::ForwardScanDirection).is_null()
            {
                return None;
            }
            Some(ffi::index_fetch_heap(self.scan, self.slot))
        }
    }

    /// After an entry without a visible row: this process's next row goes there, if there is room.
    ///
    /// # Safety
    /// In a [`try_block`].
    unsafe fn use_room(&self, open: Open) {
        // SAFETY: the caller's; the scan's place in the table.
        unsafe {
            let (block, storage) = ((*self.scan).xs_heaptid.ip_blkid, (*open.table).rd_smgr);
            if !storage.is_null() {
                (*storage).smgr_targblock = u32::from(block.bi_hi) << 16 | u32::from(block.bi_lo);
            }
        }
    }

    /// The row it has come to, copied. Texts stored elsewhere are there only for a row that has been committed.
    ///
    /// # Safety
    /// In a [`try_block`], after a visible row.
    unsafe fn row(&self, open: Open, texts: bool, payloads: bool) -> Found {
        // SAFETY: the caller's; as many values as the table has columns.
        unsafe {
            let tuple = ffi::heap_copytuple(ffi::ExecFetchSlotHeapTuple(self.slot, false, std::ptr::null_mut()));
            let mut found = Found {
                tuple,
                values: [pg_sys::Datum::null(); column::COUNT],
                nulls: [true; column::COUNT],
                payload: std::ptr::null_mut(),
                copies: [std::ptr::null_mut(); TEXTS.len()],
                is_uncommitted: false,
                is_being_updated: false,
            };
            ffi::heap_deform_tuple(tuple, (*open.table).rd_att, found.values.as_mut_ptr(), found.nulls.as_mut_ptr());
            for (text, copy) in TEXTS.into_iter().zip(&mut found.copies) {
                if !texts {
                    found.nulls[text] = true;
                } else if !found.nulls[text] {
                    let stored = found.values[text].cast_mut_ptr();
                    let packed = ffi::pg_detoast_datum_packed(stored);
                    found.values[text] = pg_sys::Datum::from(packed);
                    if packed != stored {
                        *copy = packed;
                    }
                }
            }
            if payloads && !found.nulls[column::PAYLOAD] {
                found.payload = ffi::pg_detoast_datum_copy(found.values[column::PAYLOAD].cast_mut_ptr());
            }
            found
        }
    }

    /// # Safety
    /// In a [`try_block`].
    unsafe fn end(self) {
        // SAFETY: the caller's.
        unsafe {
            ffi::index_endscan(self.scan);
            ffi::ExecDropSingleTupleTableSlot(self.slot);
            ffi::index_close(self.index, pg_sys::AccessShareLock as i32);
        }
    }
}

impl Row {
    fn of(found: &Found) -> Self {
        let row = Self::copied_from(found);
        for copy in found.copies.into_iter().chain([found.payload]).filter(|copy| !copy.is_null()) {
            // SAFETY: made for this row by the scan, and copied; freeing raises no error.
            unsafe { ffi::pfree(copy.cast()) };
        }
        row
    }

    fn copied_from(found: &Found) -> Self {
        let number = |column: usize| found.values[column].value() as i64;
        let bytes = |column: usize| -> Option<Vec<u8>> {
            // SAFETY: a text, detoasted; it lives as long as the tuple.
            (!found.nulls[column]).then(|| unsafe { text_bytes(found.values[column].cast_mut_ptr()) }.to_vec())
        };
        let bound_pid = number(column::BOUND_PID) as i32;
        let acquired = Moment { wall: number(column::ACQUIRED_AT), uptime: number(column::ACQUIRED_BOOT) };
        let expires = Moment { wall: number(column::EXPIRES_AT), uptime: number(column::EXPIRES_BOOT) };
        Self {
            tuple: found.tuple,
            key: number(column::KEY) as u64,
            for_token: (!found.nulls[column::FOR_TOKEN]).then(|| number(column::FOR_TOKEN)),
            grant: Grant {
                token: number(column::TOKEN),
                slot: number(column::SLOT) as u16,
                permits: number(column::PERMITS) as u16,
                role: number(column::ROLE) as u32,
                bound: (bound_pid != 0)
                    .then(|| Bound { pid: bound_pid, session: number(column::BOUND_SESSION) as u32 }),
                kept: found.values[column::KEPT].value() != 0,
                term: Term { boot: number(column::BOOT), acquired, expires, ttl: number(column::TTL) },
            },
            name: encoding::to_utf8(&bytes(column::NAME).unwrap_or_default()).to_vec(),
            owner: bytes(column::OWNER).unwrap_or_default(),
            requested: bytes(column::REQUESTED),
            // SAFETY: a detoasted copy, in whose head its length stands.
            payload: (!found.payload.is_null()).then(|| unsafe {
                let length = pgrx::varlena::varsize_any(found.payload);
                std::slice::from_raw_parts(found.payload.cast::<u8>(), length).to_vec()
            }),
            is_uncommitted: found.is_uncommitted,
            is_being_updated: found.is_being_updated,
        }
    }

    /// Whether it is an order that ends a grant.
    pub fn is_break(&self) -> bool {
        self.for_token.is_some() && self.grant.kept
    }

    /// Whether it is an order that ends the grant of that token.
    pub fn breaks(&self, token: i64) -> bool {
        self.is_break() && self.for_token == Some(token)
    }

    /// Whether the caller is, or is a member of, the role that acquired it.
    pub fn is_of_caller(&self) -> bool {
        activity::may_act_as(self.grant.role.into())
    }
}

fn item_pointers_equal(one: &pg_sys::ItemPointerData, other: &pg_sys::ItemPointerData) -> bool {
    one.ip_blkid.bi_hi == other.ip_blkid.bi_hi
        && one.ip_blkid.bi_lo == other.ip_blkid.bi_lo
        && one.ip_posid == other.ip_posid
}

/// A text in the current memory context.
fn text_datum(bytes: &[u8]) -> pg_sys::Datum {
    // SAFETY: copies so many bytes.
    unsafe { pg_sys::Datum::from(pg_sys::cstring_to_text_with_len(bytes.as_ptr().cast(), bytes.len() as i32)) }
}

fn term_values(term: &Term) -> [(usize, pg_sys::Datum); 6] {
    [
        (column::TTL, term.ttl),
        (column::ACQUIRED_AT, term.acquired.wall),
        (column::EXPIRES_AT, term.expires.wall),
        (column::BOOT, term.boot),
        (column::ACQUIRED_BOOT, term.acquired.uptime),
        (column::EXPIRES_BOOT, term.expires.uptime),
    ]
    .map(|(column, value)| (column, pg_sys::Datum::from(value)))
}

/// Inserts a row.
///
/// # Errors
/// [`version::mismatch`], the server's.
pub fn insert(tables: &Tables, row: &NewRow<'_>) -> Result<(), Problem> {
    let grant = &row.grant;
    let bound = grant.bound.unwrap_or(Bound { pid: 0, session: 0 });
    let mut values = [pg_sys::Datum::null(); column::COUNT];
    let mut nulls = [false; column::COUNT];
    values[column::KEY] = pg_sys::Datum::from(row.key as i64);
    values[column::TOKEN] = pg_sys::Datum::from(grant.token);
    values[column::SLOT] = pg_sys::Datum::from(i32::from(grant.slot));
    values[column::PERMITS] = pg_sys::Datum::from(i32::from(grant.permits));
    values[column::ROLE] = pg_sys::Datum::from(grant.role);
    values[column::BOUND_PID] = pg_sys::Datum::from(bound.pid);
    values[column::BOUND_SESSION] = pg_sys::Datum::from(bound.session as i32);
    values[column::KEPT] = pg_sys::Datum::from(grant.kept);
    for (column, value) in term_values(&grant.term) {
        values[column] = value;
    }
    values[column::NAME] = text_datum(&encoding::name_to_server(row.name));
    values[column::OWNER] = text_datum(row.owner);
    nulls[column::REQUESTED] = row.requested.is_none();
    values[column::REQUESTED] = row.requested.map_or(pg_sys::Datum::null(), text_datum);
    nulls[column::FOR_TOKEN] = row.for_token.is_none();
    values[column::FOR_TOKEN] = row.for_token.map_or(pg_sys::Datum::null(), pg_sys::Datum::from);
    nulls[column::PAYLOAD] = row.payload.is_none();
    values[column::PAYLOAD] = row.payload.map_or(pg_sys::Datum::null(), pg_sys::Datum::from);
    // SAFETY: server calls; the row has the table's columns.
    unsafe {
        with_table(tables, pg_sys::RowExclusiveLock, |open| {
            let tuple = ffi::heap_form_tuple((*open.table).rd_att, values.as_mut_ptr(), nulls.as_mut_ptr());
            ffi::heap_insert(open.table, tuple, ffi::GetCurrentCommandId(true), 0, std::ptr::null_mut());
            enter_in_indexes(open, tuple, &values, &nulls, false)?;
            ffi::heap_freetuple(tuple);
            ffi::CommandCounterIncrement();
            Ok(())
        })
    }
}

/// Enters a row in all indexes: the library's own, one that is being built in its place, and what an administrator adds.
///
/// # Safety
/// In a [`try_block`]; a tuple that is in the table, and its values.
unsafe fn enter_in_indexes(
    open: Open,
    tuple: pg_sys::HeapTuple,
    values: &[pg_sys::Datum; column::COUNT],
    nulls: &[bool; column::COUNT],
    is_update: bool,
) -> Result<(), WrongShape> {
    const MOST_COLUMNS: usize = pg_sys::INDEX_MAX_KEYS as usize;
    let mode = pg_sys::RowExclusiveLock as i32;
    // SAFETY: the caller's; the server's list of the table's indexes, and what it says of each.
    unsafe {
        let indexes = ffi::RelationGetIndexList(open.table);
        let count = if indexes.is_null() { 0 } else { (*indexes).length as usize };
        for number in 0..count {
            let index = ffi::index_open((*(*indexes).elements.add(number)).oid_value, mode);
            let info = ffi::BuildIndexInfo(index);
            if (*info).ii_ReadyForInserts {
                if !(*info).ii_Expressions.is_null() || !(*info).ii_Predicate.is_null() {
                    return Err(WrongShape);
                }
                let mut index_values = [pg_sys::Datum::null(); MOST_COLUMNS];
                let mut index_nulls = [true; MOST_COLUMNS];
                for column in 0..(*info).ii_NumIndexAttrs as usize {
                    let attribute = (*info).ii_IndexAttrNumbers[column] as usize;
                    (index_values[column], index_nulls[column]) = (values[attribute - 1], nulls[attribute - 1]);
                }
                let unique = if (*info).ii_Unique {
                    pg_sys::IndexUniqueCheck::UNIQUE_CHECK_YES
                } else {
                    pg_sys::IndexUniqueCheck::UNIQUE_CHECK_NO
                };
                let (values, nulls) = (index_values.as_mut_ptr(), index_nulls.as_mut_ptr());
                let tid = &raw mut (*tuple).t_self;
                ffi::index_insert(index, values, nulls, tid, open.table, unique, is_update, info);
            }
            ffi::index_close(index, mode);
        }
    }
    Ok(())
}

fn written(result: pg_sys::TM_Result::Type) -> Written {
    match result {
        pg_sys::TM_Result::TM_Ok => Written::Done,
        pg_sys::TM_Result::TM_BeingModified => Written::Busy,
        _ => Written::Changed,
    }
}

/// Changes a row. Waits for a transaction that has an unfinished change of it, as the server waits for rows:
/// `lock_timeout` applies, deadlocks are found.
///
/// # Errors
/// [`version::mismatch`], the server's.
pub fn update(tables: &Tables, row: &Row, change: Change) -> Result<Written, Problem> {
    // SAFETY: server calls; the tuple is a copy of one of the table's.
    unsafe {
        with_table(tables, pg_sys::RowExclusiveLock, |open| {
            let description = (*open.table).rd_att;
            let mut values = [pg_sys::Datum::null(); column::COUNT];
            let mut nulls = [true; column::COUNT];
            ffi::heap_deform_tuple(row.tuple, description, values.as_mut_ptr(), nulls.as_mut_ptr());
            if let Some(term) = &change.term {
                for (column, value) in term_values(term) {
                    values[column] = value;
                }
            }
            if change.kept {
                values[column::KEPT] = pg_sys::Datum::from(true);
            }
            if let Some(payload) = change.payload {
                (values[column::PAYLOAD], nulls[column::PAYLOAD]) = (pg_sys::Datum::from(payload), false);
            }
            let tuple = ffi::heap_form_tuple(description, values.as_mut_ptr(), nulls.as_mut_ptr());
            let tid = &raw mut (*row.tuple).t_self;
            let command = ffi::GetCurrentCommandId(true);
            let outcome = written(ffi::heap_update(open.table, tid, tuple, command));
            if outcome == Written::Done {
                let is_heap_only = u32::from((*(*tuple).t_data).t_infomask2) & pg_sys::HEAP_ONLY_TUPLE != 0;
                if !is_heap_only {
                    enter_in_indexes(open, tuple, &values, &nulls, true)?;
                }
                ffi::CommandCounterIncrement();
            }
            ffi::heap_freetuple(tuple);
            Ok(outcome)
        })
    }
}

/// What to do about a transaction that has an unfinished change of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Others {
    /// Wait for it, as [`update`] does.
    Wait,
    /// Leave the row: [`Written::Busy`].
    Skip,
}

/// Deletes a row.
///
/// # Errors
/// [`version::mismatch`], the server's.
pub fn delete(tables: &Tables, row: &Row, others: Others) -> Result<Written, Problem> {
    let wait = others == Others::Wait;
    // SAFETY: server calls.
    unsafe {
        with_table(tables, pg_sys::RowExclusiveLock, |open| {
            let (tid, command) = (&raw mut (*row.tuple).t_self, ffi::GetCurrentCommandId(true));
            let outcome = written(ffi::heap_delete(open.table, tid, command, wait));
            if outcome == Written::Done {
                ffi::CommandCounterIncrement();
            }
            Ok(outcome)
        })
    }
}

/// Looks at a few entries of the index, which ones depends on `token`, deletes rows of which `has_ended` says so, and lets
/// the index have the room of dead ones, and this process's next row that of the last. With such a step at each grant
/// the table stays about as large as its live rows want it, however many names have been used. The rows that it has deleted.
///
/// # Errors
/// [`version::mismatch`], the server's.
pub fn sweep(
    tables: &Tables,
    token: i64,
    entries: usize,
    has_ended: impl Fn(&Row) -> Result<bool, Problem>,
) -> Result<Vec<Row>, Problem> {
    let start = xxh3_64(&token.to_ne_bytes()) as i64;
    let mut found = Vec::with_capacity(entries);
    // SAFETY: server calls; the vector is outside of the block and does not grow in it.
    unsafe {
        with_table(tables, pg_sys::RowExclusiveLock, |open| {
            let behind = [(KEY_ATTRIBUTE, pg_sys::BTGreaterStrategyNumber, start)];
            let before = [(KEY_ATTRIBUTE, pg_sys::BTLessStrategyNumber, start)];
            let mut left = entries;
            with_newest_snapshot(|snapshot| {
                for keys in [behind, before] {
                    if left == 0 {
                        break;
                    }
                    let mut scan = Scan::begin(open, snapshot, &keys);
                    // Or there would be no limit to how many of them it passes.
                    (*scan.scan).ignore_killed_tuples = false;
                    while left > 0 {
                        left -= 1;
                        match scan.next_entry() {
                            None => break,
                            Some(true) => found.push(scan.row(open, true, false)),
                            Some(false) => scan.use_room(open),
                        }
                    }
                    scan.end();
                }
            });
            Ok(())
        })
    }?;
    let mut deleted = Vec::new();
    for row in found.iter().map(Row::of) {
        // If somebody else is at it, they see to it.
        if has_ended(&row)? && delete(tables, &row, Others::Skip)? == Written::Done {
            deleted.push(row);
        }
    }
    Ok(deleted)
}
