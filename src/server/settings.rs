//! The settings. All may be set by superusers only, for a role or a database too.

use super::ffi;
use super::process_local::ProcessLocal;
use super::registry::MAX_PLACES;
use pgrx::guc::{GucContext, GucFlags, GucRegistry, GucSetting, GucValue};
use pgrx::pg_sys;
use std::cell::Cell;
use std::ffi::CStr;

/// What `named_locks.session_locks` says of calls that take a session lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, pgrx::PostgresGucEnum)]
pub enum SessionLocks {
    /// They are welcome.
    #[name = c"on"]
    On,
    /// They work, with a warning.
    #[name = c"warn"]
    Warn,
    /// They are refused: for roles behind a transaction pooler.
    #[name = c"off"]
    Off,
}

static SESSION_LOCKS: GucSetting<SessionLocks> = GucSetting::<SessionLocks>::new(SessionLocks::On);
static MAX_LOCKS_PER_SESSION: GucSetting<i32> = GucSetting::<i32>::new(1_000);
static ALLOW_ON_STANDBY: GucSetting<bool> = GucSetting::<bool>::new(false);

const NAMES: [&CStr; 3] =
    [c"named_locks.session_locks", c"named_locks.max_locks_per_session", c"named_locks.allow_on_standby"];

/// A value was given to one of the names before the library was loaded.
static HAD_PLACEHOLDER: ProcessLocal<Cell<bool>> = ProcessLocal::cell(false);

/// Defines the settings, when the library is loaded.
pub fn define() {
    // SAFETY: a plain global: while it is set there is no client yet that could have given a value.
    let before_clients = unsafe { pg_sys::process_shared_preload_libraries_in_progress };
    HAD_PLACEHOLDER.set(!before_clients && NAMES.iter().any(|name| is_known(name)));
    GucRegistry::define_enum_guc(
        NAMES[0],
        c"Whether session locks may be taken.",
        c"Set to warn or off for roles that connect through a transaction pooler.",
        &SESSION_LOCKS,
        GucContext::Suset,
        GucFlags::default(),
    );
    GucRegistry::define_int_guc(
        NAMES[1],
        c"How many different locks a session may hold.",
        c"Session and transaction locks together.",
        &MAX_LOCKS_PER_SESSION,
        1,
        MAX_PLACES as i32,
        GucContext::Suset,
        GucFlags::default(),
    );
    GucRegistry::define_bool_guc(
        NAMES[2],
        c"Whether locks may be taken on a standby.",
        c"They exclude only sessions of that standby.",
        &ALLOW_ON_STANDBY,
        GucContext::Suset,
        GucFlags::default(),
    );
    ffi::reserve_guc_prefix(c"named_locks");
}

/// `named_locks.session_locks`: what to do with calls that take a session lock.
pub fn session_locks() -> SessionLocks {
    settle();
    value(&SESSION_LOCKS)
}

/// `named_locks.max_locks_per_session`: how many different locks a session may hold, of either kind.
pub fn max_locks_per_session() -> usize {
    settle();
    value(&MAX_LOCKS_PER_SESSION) as usize
}

/// `named_locks.allow_on_standby`: whether locks may be taken in recovery.
pub fn allow_on_standby() -> bool {
    settle();
    value(&ALLOW_ON_STANDBY)
}

/// A setting's value. The bindings would look first which thread asks.
#[inline]
fn value<T: GucValue>(setting: &GucSetting<T>) -> T {
    // SAFETY: what the server keeps there, read by the one thread of the process that runs our code.
    unsafe { T::from_raw(*setting.as_ptr()) }
}

fn is_known(name: &CStr) -> bool {
    // SAFETY: a C string; with missing_ok a name that is not known is no error.
    unsafe { !pg_sys::GetConfigOption(name.as_ptr(), true, false).is_null() }
}

/// Before the library is loaded anyone may give our settings a value, at connection start too, where it covers the one
/// that an administrator gave the role: the server then drops it for lack of rights, and the administrator's is lost.
/// So where there was such a value, the configuration files' and the role's values are applied once more.
#[inline]
fn settle() {
    if HAD_PLACEHOLDER.get() {
        apply_once_more();
    }
}

#[cold]
fn apply_once_more() {
    // SAFETY: in a transaction, as every SQL function is: what the server does at connection start, by the same calls.
    unsafe {
        if pg_sys::InitializingParallelWorker || pg_sys::ParallelWorkerNumber >= 0 {
            return;
        }
        HAD_PLACEHOLDER.set(false);
        pg_sys::ProcessConfigFile(pg_sys::GucContext::PGC_SIGHUP);
        let database = pg_sys::MyDatabaseId;
        let role = pg_sys::GetAuthenticatedUserId();
        let relation = pg_sys::table_open(ffi::DB_ROLE_SETTING_RELATION, pg_sys::AccessShareLock as i32);
        let snapshot = pg_sys::RegisterSnapshot(pg_sys::GetCatalogSnapshot(ffi::DB_ROLE_SETTING_RELATION));
        use pg_sys::GucSource::{PGC_S_DATABASE, PGC_S_DATABASE_USER, PGC_S_GLOBAL, PGC_S_USER};
        ffi::ApplySetting(snapshot, database, role, relation, PGC_S_DATABASE_USER);
        ffi::ApplySetting(snapshot, pg_sys::InvalidOid, role, relation, PGC_S_USER);
        ffi::ApplySetting(snapshot, database, pg_sys::InvalidOid, relation, PGC_S_DATABASE);
        ffi::ApplySetting(snapshot, pg_sys::InvalidOid, pg_sys::InvalidOid, relation, PGC_S_GLOBAL);
        pg_sys::UnregisterSnapshot(snapshot);
        pg_sys::table_close(relation, pg_sys::AccessShareLock as i32);
    }
}
