//! The version of the library beside that of the extension's objects.
//!
//! They part when a package is upgraded: new sessions load the new library at once, while the objects stay the old ones
//! until ALTER EXTENSION … UPDATE, and sessions that had the old library keep it after that. Nothing looks at versions as
//! long as calls find what they work with; `docs/upgrading.md` says what may change.

use super::arguments::text_bytes;
use super::ffi;
use super::report::Problem;
use super::try_block::try_block;
use crate::rules::error::Error;
use crate::rules::version::{LIBRARY, compare};
use pgrx::pg_sys;
use std::cmp::Ordering;

/// Fails where a script of that version is too new for this library.
///
/// # Errors
/// [`Error::OldLibrary`].
pub fn check_script(version: &[u8]) -> Result<(), Problem> {
    let script = String::from_utf8_lossy(version).into_owned();
    match compare(&script, LIBRARY) {
        Some(Ordering::Less | Ordering::Equal) => Ok(()),
        _ => Err(Error::OldLibrary { library: LIBRARY, script }.into()),
    }
}

/// What is wrong where a table is not as this library knows it: [`Error::Tables`], or the server's error.
#[cold]
pub fn mismatch() -> Problem {
    match extension_version() {
        Ok(extension) => Error::Tables { library: LIBRARY, extension }.into(),
        Err(problem) => problem,
    }
}

/// `catalog/pg_extension.h`.
const NAME_ATTRIBUTE: pg_sys::AttrNumber = 2;
const COLUMNS: usize = 8;
const VERSION_COLUMN: usize = 5;

/// The version of the extension in this database; None without it.
fn extension_version() -> Result<Option<String>, Problem> {
    let mode = pg_sys::AccessShareLock as i32;
    // SAFETY: server calls; the catalogue has so many columns in each version that we build for, and the last two, which
    // may be NULL, come after the version.
    let version = unsafe {
        try_block(|| {
            let catalogue = ffi::table_open(pg_sys::ExtensionRelationId, mode);
            let mut key = pg_sys::ScanKeyData::default();
            let (equal, name) = (pg_sys::BTEqualStrategyNumber as u16, pg_sys::Datum::from(c"named_locks".as_ptr()));
            ffi::ScanKeyInit(&mut key, NAME_ATTRIBUTE, equal, pg_sys::F_NAMEEQ.into(), name);
            let (index, catalogue_snapshot) = (pg_sys::ExtensionNameIndexId.into(), std::ptr::null_mut());
            let scan = ffi::systable_beginscan(catalogue, index, true, catalogue_snapshot, 1, &raw mut key);
            let tuple = ffi::systable_getnext(scan);
            let version = (!tuple.is_null()).then(|| {
                let (mut values, mut nulls) = ([pg_sys::Datum::null(); COLUMNS], [true; COLUMNS]);
                ffi::heap_deform_tuple(tuple, (*catalogue).rd_att, values.as_mut_ptr(), nulls.as_mut_ptr());
                ffi::pg_detoast_datum_copy(values[VERSION_COLUMN].cast_mut_ptr())
            });
            ffi::systable_endscan(scan);
            ffi::table_close(catalogue, mode);
            version
        })
    }?;
    // SAFETY: a text, copied to memory of the call.
    Ok(version.map(|version| String::from_utf8_lossy(unsafe { text_bytes(version) }).into_owned()))
}
