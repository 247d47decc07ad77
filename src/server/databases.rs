//! Names of databases.

use pgrx::callconv::{BoxRet, FcInfo};
use pgrx::datum::{Datum, IntoDatum};
use pgrx::pg_sys;
use std::collections::HashMap;

/// A `name` result.
#[derive(Clone, Copy, Debug)]
pub struct DatabaseName(pg_sys::NameData);

/// The names met so far, by OID.
#[derive(Debug, Default)]
pub struct DatabaseNames(HashMap<u32, Option<DatabaseName>>);

impl DatabaseNames {
    /// The name of a database; None for 0, which is no database, and for one that is gone.
    pub fn name(&mut self, oid: u32) -> Option<DatabaseName> {
        *self.0.entry(oid).or_insert_with(|| look_up(oid))
    }
}

fn look_up(oid: u32) -> Option<DatabaseName> {
    if oid == 0 {
        return None;
    }
    // SAFETY: asks the catalogue's cache, in a transaction as every SQL function is; the answer is null or a C string.
    unsafe {
        let name = pg_sys::get_database_name(oid.into());
        (!name.is_null()).then(|| {
            let mut data = pg_sys::NameData { data: [0; pg_sys::NAMEDATALEN as usize] };
            pg_sys::namestrcpy(&mut data, name);
            DatabaseName(data)
        })
    }
}

// SAFETY: maps to a type that SQL has.
pgrx::pgrx_sql_entity_graph::impl_sql_translatable!(DatabaseName, "name");

impl IntoDatum for DatabaseName {
    fn into_datum(self) -> Option<pg_sys::Datum> {
        // SAFETY: a copy in the current memory context, as long as a name.
        unsafe {
            let copy = pg_sys::palloc(size_of::<pg_sys::NameData>()).cast::<pg_sys::NameData>();
            copy.write(self.0);
            Some(pg_sys::Datum::from(copy))
        }
    }

    fn type_oid() -> pg_sys::Oid {
        pg_sys::NAMEOID
    }
}

// SAFETY: returns the datum that into_datum makes.
unsafe impl BoxRet for DatabaseName {
    unsafe fn box_into<'fcx>(self, fcinfo: &mut FcInfo<'fcx>) -> Datum<'fcx> {
        // SAFETY: a name's datum.
        unsafe { fcinfo.return_raw_datum(self.into_datum().unwrap_or(pg_sys::Datum::null())) }
    }
}
