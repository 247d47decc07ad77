//! Where the extension's tables are: in the schema of its functions, whatever the search_path.

use super::ffi;
use super::process_local::ProcessLocal;
use super::report::Problem;
use super::try_block::try_block;
use super::version;
use pgrx::pg_sys;
use std::cell::Cell;
use std::ffi::CStr;

/// Where the extension's tables are.
#[derive(Clone, Copy, Debug)]
pub struct Tables {
    /// The leases.
    pub lease: pg_sys::Oid,
    /// The sequence of fencing tokens.
    pub token: pg_sys::Oid,
    /// The sequence whose value is the timeline of the last token.
    pub timeline: pg_sys::Oid,
    /// The rules for domains.
    pub lock_domain: pg_sys::Oid,
}

impl Tables {
    /// Those in the schema of the function that is being called.
    ///
    /// # Errors
    /// [`version::mismatch`] where there are none.
    pub fn beside(fcinfo: pg_sys::FunctionCallInfo) -> Result<Self, Problem> {
        // SAFETY: the server's call information.
        let function = unsafe { (*(*fcinfo).flinfo).fn_oid };
        match known(function).get() {
            Some((known, tables)) if known == function => Ok(tables),
            _ => Self::look_up(function),
        }
    }

    #[cold]
    fn look_up(function: pg_sys::Oid) -> Result<Self, Problem> {
        watch_catalogue();
        let changes = CATALOGUE_CHANGES.get();
        // SAFETY: looks the function and names up in the server's caches.
        let tables = unsafe {
            try_block(|| {
                let schema = ffi::get_func_namespace(function);
                let find = |name: &CStr| ffi::get_relname_relid(name.as_ptr(), schema);
                // Version 0.1.0 has them without the underscore.
                let find = |name: &CStr, old: &CStr| match find(name) {
                    pg_sys::InvalidOid => find(old),
                    table => table,
                };
                Self {
                    lease: find(c"_lease", c"lease"),
                    token: find(c"_lease_token", c"lease_token"),
                    timeline: find(c"_lease_timeline", c"lease_timeline"),
                    lock_domain: find(c"_lock_domain", c"lock_domain"),
                }
            })
        }?;
        let Self { lease, token, timeline, lock_domain } = tables;
        if [lease, token, timeline, lock_domain].contains(&pg_sys::InvalidOid) {
            return Err(version::mismatch());
        }
        if CATALOGUE_CHANGES.get() == changes {
            known(function).set(Some((function, tables)));
        }
        Ok(tables)
    }
}

/// The tables beside the functions called last; forgotten when a relation's name may have come to mean another.
static KNOWN: ProcessLocal<Cell<[Known; KNOWN_FUNCTIONS]>> = ProcessLocal::cell([None; KNOWN_FUNCTIONS]);
static CATALOGUE_CHANGES: ProcessLocal<Cell<u64>> = ProcessLocal::cell(0);

type Known = Option<(pg_sys::Oid, Tables)>;
/// The functions of one schema have their OIDs in a row.
const KNOWN_FUNCTIONS: usize = 16;

fn known(function: pg_sys::Oid) -> &'static Cell<Known> {
    let all: &Cell<[Known]> = &*KNOWN;
    &all.as_slice_of_cells()[function.to_u32() as usize % KNOWN_FUNCTIONS]
}

fn watch_catalogue() {
    static IS_WATCHED: ProcessLocal<Cell<bool>> = ProcessLocal::cell(false);
    if !IS_WATCHED.replace(true) {
        let names = pg_sys::SysCacheIdentifier::RELNAMENSP as i32;
        // SAFETY: a function that lives as long as the process, with the server's signature.
        unsafe { pg_sys::CacheRegisterSyscacheCallback(names, Some(on_catalogue_change), pg_sys::Datum::null()) };
    }
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn on_catalogue_change(_argument: pg_sys::Datum, _cache: i32, _hash: u32) {
    KNOWN.set([None; KNOWN_FUNCTIONS]);
    CATALOGUE_CHANGES.set(CATALOGUE_CHANGES.get() + 1);
}
