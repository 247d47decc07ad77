//! What the generated bindings lack, and every difference between PostgreSQL versions.
//!
//! The functions of the `extern` block are called without the bindings' own error trap: each caller either knows that
//! the function raises no ERROR, or stands in a [`try_block`](super::try_block), which keeps all of an error.

use pgrx::pg_sys;
use std::ffi::{c_char, c_int, c_void};

pub type TimeoutId = c_int;

/// `timeout.h`: the timeout of a statement.
pub const STATEMENT_TIMEOUT: TimeoutId = 3;

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
    #[cfg(any(feature = "pg17", feature = "pg18"))]
    fn LockHeldByMe(tag: *const pg_sys::LOCKTAG, mode: pg_sys::LOCKMODE, or_stronger: bool) -> bool;
    pub fn LockErrorCleanup();

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
    pub fn LWLockNewTrancheId() -> c_int;
    pub fn LWLockRegisterTranche(tranche: c_int, name: *const c_char);
    pub fn LWLockInitialize(lock: *mut pg_sys::LWLock, tranche: c_int);
    pub fn ShmemInitStruct(name: *const c_char, size: usize, found: *mut bool) -> *mut c_void;

    // utils/dsa.h
    #[cfg(any(feature = "pg14", feature = "pg15", feature = "pg16"))]
    #[link_name = "dsa_create"]
    fn dsa_create_area(tranche: c_int) -> *mut pg_sys::dsa_area;
    #[cfg(any(feature = "pg17", feature = "pg18"))]
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
    pub fn GetCurrentSubTransactionId() -> pg_sys::SubTransactionId;
    pub fn ForgetPortalSnapshots();
    fn GetCurrentTimestamp() -> pg_sys::TimestampTz;
    pub fn GetPortalByName(name: *const c_char) -> pg_sys::Portal;
    pub fn GetCurrentStatementStartTimestamp() -> pg_sys::TimestampTz;
    pub fn RecoveryInProgress() -> bool;

    // mb/pg_wchar.h
    pub fn GetDatabaseEncoding() -> c_int;
    pub fn pg_unicode_to_server(character: u32, buffer: *mut u8);

    // fmgr.h
    pub fn pg_detoast_datum_packed(datum: *mut pg_sys::varlena) -> *mut pg_sys::varlena;

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
    #[cfg(any(feature = "pg17", feature = "pg18"))]
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
    #[cfg(any(feature = "pg17", feature = "pg18"))]
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
    #[cfg(any(feature = "pg17", feature = "pg18"))]
    return (row.vxid.procNumber, row.vxid.localTransactionId);
}

/// This session's virtual transaction.
pub fn my_virtual_transaction() -> (i32, u32) {
    // SAFETY: MyProc is set in every process that runs SQL.
    #[cfg(any(feature = "pg14", feature = "pg15", feature = "pg16"))]
    return unsafe { (pg_sys::MyBackendId, (*pg_sys::MyProc).lxid) };
    // SAFETY: as above.
    #[cfg(any(feature = "pg17", feature = "pg18"))]
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
    #[cfg(any(feature = "pg16", feature = "pg17", feature = "pg18"))]
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

/// Makes a dynamic shared area.
///
/// # Safety
/// In a [`try_block`](super::try_block); `tranche` is a registered LWLock tranche.
pub unsafe fn dsa_create(tranche: c_int) -> *mut pg_sys::dsa_area {
    // SAFETY: the caller's.
    #[cfg(any(feature = "pg14", feature = "pg15", feature = "pg16"))]
    return unsafe { dsa_create_area(tranche) };
    // SAFETY: the caller's; the sizes are those of the dsa_create macro in utils/dsa.h.
    #[cfg(any(feature = "pg17", feature = "pg18"))]
    return unsafe { dsa_create_ext(tranche, 1 << 20, 1 << 40) };
}
