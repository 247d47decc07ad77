//! The rules for domains, as this session knows them.
//!
//! All are read at once and kept until somebody changes them: a name costs a look into a map in memory, and not even that
//! where there are no rules.

use super::activity;
use super::arguments::{Arguments, interval_of, text_bytes};
use super::encoding;
use super::ffi;
use super::process_local::ProcessLocal;
use super::report::Problem;
use super::session;
use super::tables::Tables;
use super::try_block::try_block;
use super::version;
use crate::rules::domain::Rule;
use crate::rules::error::Error;
use crate::rules::interval::{Interval, Wait, hold_limit_micros};
use crate::rules::name::{Name, display};
use pgrx::pg_sys;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ffi::{CStr, c_char};

/// The columns of the table, in the order of `sql/domains.sql`.
mod column {
    pub const DOMAIN: usize = 0;
    pub const ROLE: usize = 1;
    pub const MAX_WAIT: usize = 2;
    pub const MAX_HOLD: usize = 3;
    pub const COUNT: usize = 4;
}

/// By domain.
type Rules = HashMap<Vec<u8>, Rule>;

/// What is known of the rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Known {
    /// Nothing, or something has changed since they were read.
    Nothing,
    /// There are none.
    None,
    /// They are in [`RULES`].
    Some,
}

static KNOWN: ProcessLocal<Cell<Known>> = ProcessLocal::cell(Known::Nothing);
static RULES: ProcessLocal<RefCell<Option<Rules>>> = ProcessLocal::ref_cell(None);
/// The table that they were read from.
static TABLE: ProcessLocal<Cell<pg_sys::Oid>> = ProcessLocal::cell(pg_sys::InvalidOid);
static CHANGES: ProcessLocal<Cell<u64>> = ProcessLocal::cell(0);

/// The rule for the domain of a name that a call is to lock, if there is one; `lock` is what errors call it.
///
/// # Errors
/// [`Error::DomainDenied`] where the caller may not; the server's.
#[inline(always)]
pub fn rule(
    tables: impl FnOnce() -> Result<Tables, Problem>,
    domain: &[u8],
    lock: impl FnOnce() -> String,
) -> Result<Option<Rule>, Problem> {
    match find(tables, domain)? {
        Some(rule) if !may_use(&rule) => Err(Error::DomainDenied { lock: lock(), domain: display(domain) }.into()),
        rule => Ok(rule),
    }
}

/// Whether the caller may lock names in a domain with that rule.
pub fn may_use(rule: &Rule) -> bool {
    rule.role.is_none_or(|role| activity::may_act_as(role.into()))
}

/// The rule for a domain, whoever asks. `tables` is asked for where the rules have to be read.
///
/// # Errors
/// The server's.
#[inline(always)]
pub fn find(tables: impl FnOnce() -> Result<Tables, Problem>, domain: &[u8]) -> Result<Option<Rule>, Problem> {
    if there_are_none()? { Ok(None) } else { look_up(tables, domain) }
}

/// Whether there are no rules for any domain, as far as is known without reading them.
///
/// # Errors
/// The server's.
#[inline(always)]
pub fn there_are_none() -> Result<bool, Problem> {
    session::check_not_parallel()?;
    // Within a transaction block the server learns of changes when it locks a table, which a call like this does not.
    // SAFETY: a question about this process's state; and a server call, as at the lock of a table.
    unsafe {
        if ffi::IsTransactionBlock() {
            try_block(|| ffi::AcceptInvalidationMessages())?;
        }
    }
    Ok(KNOWN.get() == Known::None)
}

#[cold]
fn look_up(tables: impl FnOnce() -> Result<Tables, Problem>, domain: &[u8]) -> Result<Option<Rule>, Problem> {
    if KNOWN.get() == Known::Nothing {
        load(&tables()?)?;
    }
    Ok(RULES.borrow().as_ref().and_then(|rules| rules.get(domain).copied()))
}

fn load(tables: &Tables) -> Result<(), Problem> {
    watch_changes();
    TABLE.set(tables.lock_domain);
    let changes = CHANGES.get();
    let rules = read(tables.lock_domain)?;
    let known = if rules.is_empty() { Known::None } else { Known::Some };
    *RULES.borrow_mut() = Some(rules);
    if CHANGES.get() == changes {
        KNOWN.set(known);
    }
    Ok(())
}

/// A row as the scan finds it; the text and the intervals are in memory of the call.
#[derive(Clone, Copy)]
struct Found {
    values: [pg_sys::Datum; column::COUNT],
    nulls: [bool; column::COUNT],
}

fn read(table: pg_sys::Oid) -> Result<Rules, Problem> {
    let mut found = Vec::new();
    let mode = pg_sys::AccessShareLock as i32;
    // SAFETY: server calls; the vector is outside of the block, and grows between them.
    let is_ours = unsafe {
        try_block(|| {
            let relation = ffi::table_open(table, mode);
            let description = (*relation).rd_att;
            let is_ours = (*description).natts as usize == column::COUNT;
            if is_ours {
                let snapshot = ffi::RegisterSnapshot(ffi::GetLatestSnapshot());
                let no_keys = std::ptr::null_mut();
                let scan = ffi::systable_beginscan(relation, pg_sys::InvalidOid, false, snapshot, 0, no_keys);
                loop {
                    let tuple = ffi::systable_getnext(scan);
                    if tuple.is_null() {
                        break;
                    }
                    let mut row =
                        Found { values: [pg_sys::Datum::null(); column::COUNT], nulls: [true; column::COUNT] };
                    let copy = ffi::heap_copytuple(tuple);
                    ffi::heap_deform_tuple(copy, description, row.values.as_mut_ptr(), row.nulls.as_mut_ptr());
                    let domain = ffi::pg_detoast_datum_packed(row.values[column::DOMAIN].cast_mut_ptr());
                    row.values[column::DOMAIN] = pg_sys::Datum::from(domain);
                    found.push(row);
                }
                ffi::systable_endscan(scan);
                ffi::UnregisterSnapshot(snapshot);
            }
            ffi::table_close(relation, mode);
            is_ours
        })
    }?;
    if is_ours { Ok(found.iter().map(Found::rule).collect()) } else { Err(version::mismatch()) }
}

impl Found {
    fn rule(&self) -> (Vec<u8>, Rule) {
        // SAFETY: a text and intervals, copied to memory of this call.
        let (domain, max_wait, max_hold) = unsafe {
            let interval = |column: usize| (!self.nulls[column]).then(|| interval_of(self.values[column]));
            let domain = text_bytes(self.values[column::DOMAIN].cast_mut_ptr());
            (domain, interval(column::MAX_WAIT), interval(column::MAX_HOLD))
        };
        let rule = Rule {
            role: (!self.nulls[column::ROLE]).then(|| self.values[column::ROLE].value() as u32),
            // The table checks what is put into it.
            max_wait: max_wait.and_then(|max_wait| max_wait_millis(max_wait).ok()),
            max_hold: hold_limit_micros(max_hold).ok().flatten(),
        };
        (encoding::to_utf8(domain).to_vec(), rule)
    }
}

/// Milliseconds out of the argument `max_wait`.
fn max_wait_millis(max_wait: Interval) -> Result<i32, Error> {
    match Wait::from_timeout(Some(max_wait)) {
        Ok(Wait::Try) => Ok(0),
        Ok(Wait::Millis(millis)) => Ok(millis),
        _ => Err(Error::MaxWait),
    }
}

fn watch_changes() {
    static IS_WATCHED: ProcessLocal<Cell<bool>> = ProcessLocal::cell(false);
    if !IS_WATCHED.replace(true) {
        // SAFETY: a function that lives as long as the process, with the server's signature.
        unsafe { pg_sys::CacheRegisterRelcacheCallback(Some(on_relation_change), pg_sys::Datum::null()) };
    }
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn on_relation_change(_argument: pg_sys::Datum, relation: pg_sys::Oid) {
    if relation == pg_sys::InvalidOid || relation == TABLE.get() {
        KNOWN.set(Known::Nothing);
        CHANGES.set(CHANGES.get() + 1);
    }
}

/// Tells all sessions, when this transaction commits, that the rules have changed.
///
/// # Errors
/// [`Error::NotByTrigger`], [`version::mismatch`], the server's.
pub fn changed(fcinfo: pg_sys::FunctionCallInfo) -> Result<(), Problem> {
    // SAFETY: the server's call information.
    if !unsafe { pgrx::trigger_support::called_as_trigger(fcinfo) } {
        return Err(Error::NotByTrigger.into());
    }
    let tables = Tables::beside(fcinfo)?;
    // SAFETY: one server call, about a table that is there.
    unsafe { pg_sys::CacheInvalidateRelcacheByRelid(tables.lock_domain) };
    Ok(())
}

/// Makes the rules for a domain. `args`: `(domain, role, max_wait, max_hold)`.
///
/// # Errors
/// [`Error::NotDomainOwner`], those of the arguments, the server's.
pub fn set(fcinfo: pg_sys::FunctionCallInfo, domain: &[u8]) -> Result<(), Problem> {
    let args = Arguments::of(fcinfo);
    check_domain(domain)?;
    if args.oid(column::ROLE).is_some_and(|role| !activity::role_exists(role)) {
        return Err(Error::NoSuchRole.into());
    }
    if let Some(max_wait) = args.interval(column::MAX_WAIT) {
        max_wait_millis(max_wait)?;
    }
    if let Some(max_hold) = args.interval(column::MAX_HOLD) {
        // Infinity is no limit, which NULL says.
        hold_limit_micros(Some(max_hold)).ok().flatten().ok_or(Error::MaxHold)?;
    }
    let table = table_to_change(fcinfo)?;
    let insert = [
        b"INSERT INTO ",
        table,
        b" (domain, role, max_wait, max_hold) VALUES ($1, $2, $3, $4) \
          ON CONFLICT (domain) DO UPDATE SET role = excluded.role, max_wait = excluded.max_wait, \
                                             max_hold = excluded.max_hold\0",
    ]
    .concat();
    run(fcinfo, &insert)?;
    Ok(())
}

/// Drops the rules for a domain; whether there were any.
///
/// # Errors
/// [`Error::NotDomainOwner`], the server's.
pub fn drop_rule(fcinfo: pg_sys::FunctionCallInfo) -> Result<bool, Problem> {
    let table = table_to_change(fcinfo)?;
    let delete = [b"DELETE FROM ", table, b" WHERE domain OPERATOR(pg_catalog.=) $1\0"].concat();
    Ok(run(fcinfo, &delete)? > 0)
}

/// Runs a statement in SQL, ended by a NUL, whose parameters are the call's arguments, as far as it has them; how many rows
/// it has changed. Not by the bindings: they take only UTF-8, and a schema's name may be in another encoding.
fn run(fcinfo: pg_sys::FunctionCallInfo, sql: &[u8]) -> Result<u64, Problem> {
    const TYPES: [pg_sys::Oid; column::COUNT] =
        [pg_sys::TEXTOID, pg_sys::REGROLEOID, pg_sys::INTERVALOID, pg_sys::INTERVALOID];
    const NOT_NULL: c_char = b' ' as c_char;
    const NULL: c_char = b'n' as c_char;
    let args = Arguments::of(fcinfo);
    let count = args.count();
    let (mut types, mut values, mut nulls) = (TYPES, [pg_sys::Datum::null(); column::COUNT], [NULL; column::COUNT]);
    for number in 0..count {
        if let Some(value) = args.datum(number) {
            (values[number], nulls[number]) = (value, NOT_NULL);
        }
    }
    // SAFETY: server calls with as many values as types, all alive as long as the call. After an error the end of the
    // (sub)transaction clears away what SPI has.
    let (done, rows) = unsafe {
        try_block(|| {
            ffi::SPI_connect();
            let done = ffi::SPI_execute_with_args(
                sql.as_ptr().cast(),
                count as i32,
                types.as_mut_ptr(),
                values.as_mut_ptr(),
                nulls.as_ptr(),
                false,
                0,
            );
            let rows = pg_sys::SPI_processed;
            ffi::SPI_finish();
            (done, rows)
        })
    }?;
    if done > 0 { Ok(rows) } else { Err(version::mismatch()) }
}

fn check_domain(domain: &[u8]) -> Result<(), Error> {
    if domain.contains(&b':') {
        return Err(Error::DomainWithColon { domain: display(domain) });
    }
    match Name::new(domain) {
        Ok(_) | Err(Error::EmptyName) => Ok(()), // the domain of names without a colon
        Err(error) => Err(error),
    }
}

/// The table's name for SQL, in the database's encoding, if the caller may change it. It lives as long as the call.
fn table_to_change<'a>(fcinfo: pg_sys::FunctionCallInfo) -> Result<&'a [u8], Problem> {
    let tables = Tables::beside(fcinfo)?;
    // SAFETY: asks the catalogue's caches about a table that is there.
    unsafe {
        let relation = pg_sys::relation_open(tables.lock_domain, pg_sys::AccessShareLock as i32);
        let (owner, schema) = ((*(*relation).rd_rel).relowner, (*(*relation).rd_rel).relnamespace);
        let name = pg_sys::pstrdup((*(*relation).rd_rel).relname.data.as_ptr());
        pg_sys::relation_close(relation, pg_sys::AccessShareLock as i32);
        if !activity::may_act_as(owner) {
            return Err(Error::NotDomainOwner.into());
        }
        let name = pg_sys::quote_qualified_identifier(pg_sys::get_namespace_name(schema), name);
        Ok(CStr::from_ptr(name).to_bytes())
    }
}
