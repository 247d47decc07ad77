//! What the generated bindings lack, and every difference between PostgreSQL versions. The older versions are the ones that
//! conditions name, so that a new one is taken to be like the newest known.
//!
//! The functions of the `extern` block are called without the bindings' own error trap: each caller either knows that
//! the function raises no ERROR, or stands in a [`try_block`](super::try_block), which keeps all of an error.

use pgrx::pg_sys;
use std::ffi::{c_char, c_int, c_void};

pub type TimeoutId = c_int;

/// `timeout.h`: the timeout of a statement.
pub const STATEMENT_TIMEOUT: TimeoutId = 3;

/// `access/xact.h`: a pipeline has other statements in this transaction. From 14.7 on; before, the server doesn't tell.
pub const XACT_FLAGS_PIPELINING: c_int = 1 << 3;

/// `catalog/pg_db_role_setting.h`: the catalogue of settings by database and role.
pub const DB_ROLE_SETTING_RELATION: pg_sys::Oid = pg_sys::Oid::from_u32(2964);

unsafe extern "C-unwind" {
    // storage/lock.h, storage/proc.h
    pub fn LockAcquire(
        tag: *const pg_sys::LOCKTAG,
        mode: pg_sys::LOCKMODE,
        session: bool,
        dont_wait: bool,
    ) -> pg_sys::LockAcquireResult::Type;
    pub fn LockRelease(tag: *const pg_sys::LOCKTAG, mode: pg_sys::LOCKMODE, session: bool) -> bool;
    #[cfg(any(feature = "pg14", feature = "pg15", feature = "pg16"))]
    fn LockHeldByMe(tag: *const pg_sys::LOCKTAG, mode: pg_sys::LOCKMODE) -> bool;
    #[cfg(not(any(feature = "pg14", feature = "pg15", feature = "pg16")))]
    fn LockHeldByMe(tag: *const pg_sys::LOCKTAG, mode: pg_sys::LOCKMODE, or_stronger: bool) -> bool;
    pub fn LockErrorCleanup();
    pub fn LockWaiterCount(tag: *const pg_sys::LOCKTAG) -> c_int;

    // utils/timeout.h
    pub fn get_timeout_active(id: TimeoutId) -> bool;

    // utils/elog.h, miscadmin.h
    pub fn CopyErrorData() -> *mut pg_sys::ErrorData;
    pub fn FlushErrorState();
    pub fn FreeErrorData(error: *mut pg_sys::ErrorData);
    pub fn ReThrowError(error: *mut pg_sys::ErrorData) -> !;
    pub fn errstart(level: c_int, domain: *const c_char) -> bool;
    pub fn errcode(sqlstate: c_int) -> c_int;
    pub fn errmsg(format: *const c_char, ...) -> c_int;
    pub fn errdetail(format: *const c_char, ...) -> c_int;
    pub fn errhint(format: *const c_char, ...) -> c_int;
    pub fn errcontext_msg(format: *const c_char, ...) -> c_int;
    pub fn errfinish(file: *const c_char, line: c_int, function: *const c_char);
    pub fn ProcessInterrupts();

    // storage/lwlock.h, storage/shmem.h
    pub fn LWLockAcquire(lock: *mut pg_sys::LWLock, mode: pg_sys::LWLockMode::Type) -> bool;
    pub fn LWLockRelease(lock: *mut pg_sys::LWLock);
    pub fn LWLockReleaseAll();
    fn LWLockNewTrancheId() -> c_int;
    fn LWLockRegisterTranche(tranche: c_int, name: *const c_char);
    pub fn LWLockInitialize(lock: *mut pg_sys::LWLock, tranche: c_int);
    pub fn ShmemInitStruct(name: *const c_char, size: usize, found: *mut bool) -> *mut c_void;

    // utils/dsa.h
    #[cfg(any(feature = "pg14", feature = "pg15", feature = "pg16"))]
    #[link_name = "dsa_create"]
    fn dsa_create_area(tranche: c_int) -> *mut pg_sys::dsa_area;
    #[cfg(not(any(feature = "pg14", feature = "pg15", feature = "pg16")))]
    fn dsa_create_ext(tranche: c_int, init_segment: usize, max_segment: usize) -> *mut pg_sys::dsa_area;
    pub fn dsa_attach(handle: pg_sys::dsa_handle) -> *mut pg_sys::dsa_area;
    pub fn dsa_get_handle(area: *mut pg_sys::dsa_area) -> pg_sys::dsa_handle;
    pub fn dsa_pin(area: *mut pg_sys::dsa_area);
    pub fn dsa_pin_mapping(area: *mut pg_sys::dsa_area);
    pub fn dsa_allocate_extended(area: *mut pg_sys::dsa_area, size: usize, flags: c_int) -> pg_sys::dsa_pointer;
    pub fn dsa_trim(area: *mut pg_sys::dsa_area);
    pub fn dsa_free(area: *mut pg_sys::dsa_area, pointer: pg_sys::dsa_pointer);
    pub fn dsa_get_address(area: *mut pg_sys::dsa_area, pointer: pg_sys::dsa_pointer) -> *mut c_void;

    // utils/portal.h, access/xact.h
    pub fn IsTransactionState() -> bool;
    pub fn IsTransactionBlock() -> bool;
    pub fn GetCurrentSubTransactionId() -> pg_sys::SubTransactionId;
    pub fn ForgetPortalSnapshots();
    fn GetCurrentTimestamp() -> pg_sys::TimestampTz;
    pub fn GetPortalByName(name: *const c_char) -> pg_sys::Portal;
    pub fn GetCurrentStatementStartTimestamp() -> pg_sys::TimestampTz;
    pub fn RecoveryInProgress() -> bool;

    // utils/inval.h
    pub fn AcceptInvalidationMessages();

    // utils/snapmgr.h
    pub fn GetLatestSnapshot() -> pg_sys::Snapshot;
    pub fn RegisterSnapshot(snapshot: pg_sys::Snapshot) -> pg_sys::Snapshot;
    pub fn UnregisterSnapshot(snapshot: pg_sys::Snapshot);

    // executor/spi.h
    pub fn SPI_connect() -> c_int;
    pub fn SPI_execute_with_args(
        sql: *const c_char,
        count: c_int,
        types: *mut pg_sys::Oid,
        values: *mut pg_sys::Datum,
        nulls: *const c_char,
        read_only: bool,
        row_count: std::ffi::c_long,
    ) -> c_int;
    pub fn SPI_finish() -> c_int;

    // utils/lsyscache.h
    pub fn get_func_namespace(function: pg_sys::Oid) -> pg_sys::Oid;
    pub fn get_relname_relid(name: *const c_char, namespace: pg_sys::Oid) -> pg_sys::Oid;

    // access/table.h, access/genam.h, access/heapam.h, access/htup_details.h, access/skey.h, executor/tuptable.h
    pub fn table_open(relation: pg_sys::Oid, mode: pg_sys::LOCKMODE) -> pg_sys::Relation;
    pub fn table_close(relation: pg_sys::Relation, mode: pg_sys::LOCKMODE);
    pub fn relation_open(relation: pg_sys::Oid, mode: pg_sys::LOCKMODE) -> pg_sys::Relation;
    pub fn relation_close(relation: pg_sys::Relation, mode: pg_sys::LOCKMODE);
    pub fn index_open(relation: pg_sys::Oid, mode: pg_sys::LOCKMODE) -> pg_sys::Relation;
    pub fn index_close(relation: pg_sys::Relation, mode: pg_sys::LOCKMODE);
    #[cfg(any(feature = "pg14", feature = "pg15", feature = "pg16", feature = "pg17"))]
    #[link_name = "index_beginscan"]
    fn index_beginscan_of_version(
        table: pg_sys::Relation,
        index: pg_sys::Relation,
        snapshot: pg_sys::Snapshot,
        keys: c_int,
        order_bys: c_int,
    ) -> pg_sys::IndexScanDesc;
    #[cfg(not(any(feature = "pg14", feature = "pg15", feature = "pg16", feature = "pg17")))]
    #[link_name = "index_beginscan"]
    fn index_beginscan_of_version(
        table: pg_sys::Relation,
        index: pg_sys::Relation,
        snapshot: pg_sys::Snapshot,
        instrument: *mut pg_sys::IndexScanInstrumentation,
        keys: c_int,
        order_bys: c_int,
    ) -> pg_sys::IndexScanDesc;
    pub fn index_rescan(
        scan: pg_sys::IndexScanDesc,
        keys: pg_sys::ScanKey,
        key_count: c_int,
        order_bys: pg_sys::ScanKey,
        order_by_count: c_int,
    );
    pub fn index_getnext_tid(
        scan: pg_sys::IndexScanDesc,
        direction: pg_sys::ScanDirection::Type,
    ) -> pg_sys::ItemPointer;
    pub fn index_fetch_heap(scan: pg_sys::IndexScanDesc, slot: *mut pg_sys::TupleTableSlot) -> bool;
    pub fn index_endscan(scan: pg_sys::IndexScanDesc);
    pub fn index_insert(
        index: pg_sys::Relation,
        values: *mut pg_sys::Datum,
        is_null: *mut bool,
        tid: pg_sys::ItemPointer,
        table: pg_sys::Relation,
        check_unique: pg_sys::IndexUniqueCheck::Type,
        index_unchanged: bool,
        info: *mut pg_sys::IndexInfo,
    ) -> bool;
    pub fn systable_beginscan(
        table: pg_sys::Relation,
        index: pg_sys::Oid,
        index_ok: bool,
        snapshot: pg_sys::Snapshot,
        key_count: c_int,
        keys: pg_sys::ScanKey,
    ) -> pg_sys::SysScanDesc;
    pub fn systable_getnext(scan: pg_sys::SysScanDesc) -> pg_sys::HeapTuple;
    pub fn systable_endscan(scan: pg_sys::SysScanDesc);
    #[cfg(any(feature = "pg14", feature = "pg15", feature = "pg16", feature = "pg17"))]
    fn RelationGetPrimaryKeyIndex(table: pg_sys::Relation) -> pg_sys::Oid;
    #[cfg(not(any(feature = "pg14", feature = "pg15", feature = "pg16", feature = "pg17")))]
    fn RelationGetPrimaryKeyIndex(table: pg_sys::Relation, deferrable_ok: bool) -> pg_sys::Oid;
    pub fn RelationGetIndexList(table: pg_sys::Relation) -> *mut pg_sys::List;
    pub fn BuildIndexInfo(index: pg_sys::Relation) -> *mut pg_sys::IndexInfo;
    pub fn ScanKeyInit(
        key: pg_sys::ScanKey,
        attribute: pg_sys::AttrNumber,
        strategy: pg_sys::StrategyNumber,
        procedure: pg_sys::RegProcedure,
        argument: pg_sys::Datum,
    );
    pub fn MakeSingleTupleTableSlot(
        description: pg_sys::TupleDesc,
        operations: *const pg_sys::TupleTableSlotOps,
    ) -> *mut pg_sys::TupleTableSlot;
    pub fn ExecDropSingleTupleTableSlot(slot: *mut pg_sys::TupleTableSlot);
    pub fn ExecFetchSlotHeapTuple(
        slot: *mut pg_sys::TupleTableSlot,
        materialize: bool,
        should_free: *mut bool,
    ) -> pg_sys::HeapTuple;
    pub fn pfree(pointer: *mut c_void);
    pub fn heap_copytuple(tuple: pg_sys::HeapTuple) -> pg_sys::HeapTuple;
    pub fn heap_freetuple(tuple: pg_sys::HeapTuple);
    pub fn heap_form_tuple(
        description: pg_sys::TupleDesc,
        values: *mut pg_sys::Datum,
        is_null: *mut bool,
    ) -> pg_sys::HeapTuple;
    pub fn heap_deform_tuple(
        tuple: pg_sys::HeapTuple,
        description: pg_sys::TupleDesc,
        values: *mut pg_sys::Datum,
        is_null: *mut bool,
    );
    pub fn heap_insert(
        table: pg_sys::Relation,
        tuple: pg_sys::HeapTuple,
        command: pg_sys::CommandId,
        options: c_int,
        bulk: pg_sys::BulkInsertState,
    );
    #[cfg(any(feature = "pg14", feature = "pg15"))]
    #[link_name = "heap_update"]
    fn heap_update_of_version(
        table: pg_sys::Relation,
        tid: pg_sys::ItemPointer,
        tuple: pg_sys::HeapTuple,
        command: pg_sys::CommandId,
        crosscheck: pg_sys::Snapshot,
        wait: bool,
        failure: *mut pg_sys::TM_FailureData,
        lock_mode: *mut pg_sys::LockTupleMode::Type,
    ) -> pg_sys::TM_Result::Type;
    #[cfg(not(any(feature = "pg14", feature = "pg15")))]
    #[link_name = "heap_update"]
    fn heap_update_of_version(
        table: pg_sys::Relation,
        tid: pg_sys::ItemPointer,
        tuple: pg_sys::HeapTuple,
        command: pg_sys::CommandId,
        crosscheck: pg_sys::Snapshot,
        wait: bool,
        failure: *mut pg_sys::TM_FailureData,
        lock_mode: *mut pg_sys::LockTupleMode::Type,
        update_indexes: *mut pg_sys::TU_UpdateIndexes::Type,
    ) -> pg_sys::TM_Result::Type;
    #[link_name = "heap_delete"]
    fn heap_delete_of_version(
        table: pg_sys::Relation,
        tid: pg_sys::ItemPointer,
        command: pg_sys::CommandId,
        crosscheck: pg_sys::Snapshot,
        wait: bool,
        failure: *mut pg_sys::TM_FailureData,
        changing_partition: bool,
    ) -> pg_sys::TM_Result::Type;
    pub fn GetCurrentCommandId(used: bool) -> pg_sys::CommandId;
    pub fn CommandCounterIncrement();

    // commands/sequence.h, storage/bufmgr.h, access/xlog.h
    pub fn nextval_internal(sequence: pg_sys::Oid, check_permissions: bool) -> i64;
    pub fn ReadBuffer(relation: pg_sys::Relation, block: pg_sys::BlockNumber) -> pg_sys::Buffer;
    pub fn LockBuffer(buffer: pg_sys::Buffer, mode: c_int);
    pub fn BufferGetLSNAtomic(buffer: pg_sys::Buffer) -> pg_sys::XLogRecPtr;
    pub fn UnlockReleaseBuffer(buffer: pg_sys::Buffer);
    pub fn XLogFlush(record: pg_sys::XLogRecPtr);
    #[cfg(not(feature = "pg14"))]
    fn GetWALInsertionTimeLine() -> pg_sys::TimeLineID;

    // fmgr.h, miscadmin.h
    pub fn OidFunctionCall2Coll(
        function: pg_sys::Oid,
        collation: pg_sys::Oid,
        argument1: pg_sys::Datum,
        argument2: pg_sys::Datum,
    ) -> pg_sys::Datum;
    pub fn GetUserIdAndSecContext(user: *mut pg_sys::Oid, context: *mut c_int);
    pub fn SetUserIdAndSecContext(user: pg_sys::Oid, context: c_int);

    // storage/latch.h
    pub fn SetLatch(latch: *mut pg_sys::Latch);
    pub fn ResetLatch(latch: *mut pg_sys::Latch);
    pub fn WaitLatch(latch: *mut pg_sys::Latch, events: c_int, timeout: std::ffi::c_long, wait_event: u32) -> c_int;

    // mb/pg_wchar.h
    pub fn GetDatabaseEncoding() -> c_int;
    pub fn pg_unicode_to_server(character: u32, buffer: *mut u8);

    // fmgr.h
    pub fn pg_detoast_datum(datum: *mut pg_sys::varlena) -> *mut pg_sys::varlena;
    pub fn pg_detoast_datum_packed(datum: *mut pg_sys::varlena) -> *mut pg_sys::varlena;
    pub fn pg_detoast_datum_copy(datum: *mut pg_sys::varlena) -> *mut pg_sys::varlena;

    // catalog/pg_db_role_setting.h
    pub fn ApplySetting(
        snapshot: pg_sys::Snapshot,
        database: pg_sys::Oid,
        role: pg_sys::Oid,
        relation: pg_sys::Relation,
        source: pg_sys::GucSource::Type,
    );
}

/// The server's clock, in microseconds.
pub fn now() -> pg_sys::TimestampTz {
    // SAFETY: reads the clock, and raises no error.
    unsafe { GetCurrentTimestamp() }
}

/// Whether this session holds the lock in just that mode.
///
/// # Safety
/// `tag` points to a lock tag.
pub unsafe fn lock_held_by_me(tag: *const pg_sys::LOCKTAG, mode: pg_sys::LOCKMODE) -> bool {
    // SAFETY: the caller's; looking up the session's own table raises no ERROR.
    #[cfg(any(feature = "pg14", feature = "pg15", feature = "pg16"))]
    return unsafe { LockHeldByMe(tag, mode) };
    // SAFETY: as above.
    #[cfg(not(any(feature = "pg14", feature = "pg15", feature = "pg16")))]
    return unsafe { LockHeldByMe(tag, mode, false) };
}

/// The OID of the database that this session is in.
pub fn my_database() -> u32 {
    // SAFETY: a plain global.
    unsafe { pg_sys::MyDatabaseId }.to_u32()
}

/// This process's number among those that can hold locks: from 0, below [`max_processes`].
pub fn my_process_number() -> usize {
    // SAFETY: MyProc is set in every process that runs SQL.
    #[cfg(any(feature = "pg14", feature = "pg15", feature = "pg16"))]
    return unsafe { (*pg_sys::MyProc).pgprocno as usize };
    // SAFETY: a plain global.
    #[cfg(not(any(feature = "pg14", feature = "pg15", feature = "pg16")))]
    return unsafe { pg_sys::MyProcNumber as usize };
}

/// How many processes can run SQL at once.
pub fn max_processes() -> usize {
    // SAFETY: a plain global, fixed at server start.
    unsafe { pg_sys::MaxBackends as usize }
}

/// The virtual transaction that a lock table's row belongs to.
pub fn virtual_transaction(row: &pg_sys::LockInstanceData) -> (i32, u32) {
    #[cfg(any(feature = "pg14", feature = "pg15", feature = "pg16"))]
    return (row.backend, row.lxid);
    #[cfg(not(any(feature = "pg14", feature = "pg15", feature = "pg16")))]
    return (row.vxid.procNumber, row.vxid.localTransactionId);
}

/// This session's virtual transaction.
pub fn my_virtual_transaction() -> (i32, u32) {
    // SAFETY: MyProc is set in every process that runs SQL.
    #[cfg(any(feature = "pg14", feature = "pg15", feature = "pg16"))]
    return unsafe { (pg_sys::MyBackendId, (*pg_sys::MyProc).lxid) };
    // SAFETY: as above.
    #[cfg(not(any(feature = "pg14", feature = "pg15", feature = "pg16")))]
    return unsafe { (pg_sys::MyProcNumber, (*pg_sys::MyProc).vxid.lxid) };
}

/// The entry with that number, from 0, of this session's copy of the server's activity; None past the end.
///
/// # Safety
/// The result is valid until the copy is cleared.
pub unsafe fn backend_status(number: i32) -> Option<*const pg_sys::PgBackendStatus> {
    // SAFETY: numbers from 1 to the count that pgstat_fetch_stat_numbackends gave are valid.
    #[cfg(any(feature = "pg14", feature = "pg15"))]
    let entry = unsafe { pg_sys::pgstat_fetch_stat_local_beentry(number + 1) };
    // SAFETY: as above.
    #[cfg(not(any(feature = "pg14", feature = "pg15")))]
    let entry = unsafe { pg_sys::pgstat_get_local_beentry_by_index(number + 1) };
    // SAFETY: not null, so an entry of the copy.
    (!entry.is_null()).then(|| unsafe { &raw const (*entry).backendStatus })
}

/// Keeps other extensions' and users' variables out of our prefix.
pub fn reserve_guc_prefix(prefix: &std::ffi::CStr) {
    // SAFETY: a C string.
    #[cfg(feature = "pg14")]
    unsafe {
        pg_sys::EmitWarningsOnPlaceholders(prefix.as_ptr())
    };
    // SAFETY: a C string.
    #[cfg(not(feature = "pg14"))]
    unsafe {
        pg_sys::MarkGUCPrefixReserved(prefix.as_ptr())
    };
}

/// The LWLock that guards the set-up of extensions' shared memory: number 21 of the individual locks in `lwlocknames`
/// of PostgreSQL 14 to 18.
pub fn addin_shmem_init_lock() -> *mut pg_sys::LWLock {
    const ADDIN_SHMEM_INIT_LOCK: usize = 21;
    // SAFETY: the array of individual locks is longer than that.
    unsafe { &raw mut (*pg_sys::MainLWLockArray.add(ADDIN_SHMEM_INIT_LOCK)).lock }
}

/// Makes sure that there is a tranche for LWLocks, 0 as long as there is none, and that this process knows its name.
///
/// # Safety
/// In a [`try_block`](super::try_block); `tranche` is not changed by another process meanwhile.
pub unsafe fn lwlock_tranche(tranche: *mut c_int, name: &'static std::ffi::CStr) {
    // SAFETY: the caller's; the name is not copied, and lives for ever.
    unsafe {
        if *tranche == 0 {
            *tranche = LWLockNewTrancheId();
        }
        LWLockRegisterTranche(*tranche, name.as_ptr());
    }
}

/// The level from which on messages of this process go to the log.
pub fn log_min_messages() -> *mut c_int {
    &raw mut pg_sys::log_min_messages
}

/// Makes a dynamic shared area.
///
/// # Safety
/// In a [`try_block`](super::try_block); `tranche` is a registered LWLock tranche.
pub unsafe fn dsa_create(tranche: c_int) -> *mut pg_sys::dsa_area {
    // SAFETY: the caller's.
    #[cfg(any(feature = "pg14", feature = "pg15", feature = "pg16"))]
    return unsafe { dsa_create_area(tranche) };
    // SAFETY: the caller's; the sizes are those of the dsa_create macro in utils/dsa.h.
    #[cfg(not(any(feature = "pg14", feature = "pg15", feature = "pg16")))]
    return unsafe { dsa_create_ext(tranche, 1 << 20, 1 << 40) };
}

/// The index of a table's primary key; 0 if it has none.
///
/// # Safety
/// In a [`try_block`](super::try_block); an open table.
pub unsafe fn primary_key_index(table: pg_sys::Relation) -> pg_sys::Oid {
    // SAFETY: the caller's.
    #[cfg(any(feature = "pg14", feature = "pg15", feature = "pg16", feature = "pg17"))]
    return unsafe { RelationGetPrimaryKeyIndex(table) };
    // SAFETY: the caller's.
    #[cfg(not(any(feature = "pg14", feature = "pg15", feature = "pg16", feature = "pg17")))]
    return unsafe { RelationGetPrimaryKeyIndex(table, false) };
}

/// Begins a scan of a table by its index.
///
/// # Safety
/// In a [`try_block`](super::try_block); open relations that belong together, and a registered snapshot or one of another
/// kind.
pub unsafe fn index_beginscan(
    table: pg_sys::Relation,
    index: pg_sys::Relation,
    snapshot: pg_sys::Snapshot,
    keys: c_int,
) -> pg_sys::IndexScanDesc {
    // SAFETY: the caller's.
    #[cfg(any(feature = "pg14", feature = "pg15", feature = "pg16", feature = "pg17"))]
    return unsafe { index_beginscan_of_version(table, index, snapshot, keys, 0) };
    // SAFETY: the caller's; without instrumentation.
    #[cfg(not(any(feature = "pg14", feature = "pg15", feature = "pg16", feature = "pg17")))]
    return unsafe { index_beginscan_of_version(table, index, snapshot, std::ptr::null_mut(), keys, 0) };
}

/// Puts a new version of a row in place of the one at `tid`. Waits for whoever else is at it: the server has it no other way.
///
/// # Safety
/// In a [`try_block`](super::try_block); an open table, and a tuple of its description.
pub unsafe fn heap_update(
    table: pg_sys::Relation,
    tid: pg_sys::ItemPointer,
    tuple: pg_sys::HeapTuple,
    command: pg_sys::CommandId,
) -> pg_sys::TM_Result::Type {
    let mut failure = pg_sys::TM_FailureData::default();
    let mut lock_mode = 0;
    let no_snapshot = std::ptr::null_mut();
    // SAFETY: the caller's.
    #[cfg(any(feature = "pg14", feature = "pg15"))]
    return unsafe {
        heap_update_of_version(table, tid, tuple, command, no_snapshot, true, &mut failure, &mut lock_mode)
    };
    #[cfg(not(any(feature = "pg14", feature = "pg15")))]
    {
        let mut update_indexes = 0;
        // SAFETY: the caller's.
        unsafe {
            heap_update_of_version(
                table,
                tid,
                tuple,
                command,
                no_snapshot,
                true,
                &mut failure,
                &mut lock_mode,
                &mut update_indexes,
            )
        }
    }
}

/// Deletes the row at `tid`. With `wait`, waits for whoever else is at it.
///
/// # Safety
/// In a [`try_block`](super::try_block); an open table.
pub unsafe fn heap_delete(
    table: pg_sys::Relation,
    tid: pg_sys::ItemPointer,
    command: pg_sys::CommandId,
    wait: bool,
) -> pg_sys::TM_Result::Type {
    let mut failure = pg_sys::TM_FailureData::default();
    // SAFETY: the caller's; without a snapshot to check by, and not for another partition.
    unsafe { heap_delete_of_version(table, tid, command, std::ptr::null_mut(), wait, &mut failure, false) }
}

/// The timeline on which this server writes. Not for a server in recovery.
pub fn timeline() -> u32 {
    // SAFETY: set before the first statement that can write.
    #[cfg(feature = "pg14")]
    return unsafe { pg_sys::ThisTimeLineID };
    // SAFETY: reads shared memory, and raises no error.
    #[cfg(not(feature = "pg14"))]
    return unsafe { GetWALInsertionTimeLine() };
}
