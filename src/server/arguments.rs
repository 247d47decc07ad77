//! Values between SQL and Rust that the bindings have no type for, or a slower one.

use super::encoding;
use super::ffi;
use super::process_local::ProcessLocal;
use crate::rules::error::Error;
use crate::rules::interval::Interval;
use crate::rules::mode::Mode;
use pgrx::callconv::{BoxRet, FcInfo};
use pgrx::datum::{Datum, FromDatum, IntoDatum, TimestampWithTimeZone};
use pgrx::pg_sys;
use std::cell::{Cell, RefCell};
use std::ffi::CStr;

/// The arguments of a call, by their number from 0, as the signatures in `sql/` have them.
///
/// The bindings can unpack arguments too, at a price that is felt beside an uncontended lock.
#[derive(Clone, Copy)]
pub struct Arguments<'a>(&'a [pg_sys::NullableDatum]);

impl<'a> Arguments<'a> {
    /// Of the call that a SQL function was made by.
    pub fn of(fcinfo: pg_sys::FunctionCallInfo) -> Self {
        // SAFETY: the server's call information, which has as many arguments as it says, and lives as long as the call.
        unsafe { Self(std::slice::from_raw_parts((&raw const (*fcinfo).args).cast(), (*fcinfo).nargs as usize)) }
    }

    /// A `text`, as UTF-8 (see [`encoding::to_utf8`]); None for NULL.
    #[inline(always)]
    pub fn text(self, number: usize) -> Option<&'a [u8]> {
        self.server_text(number).map(encoding::to_utf8)
    }

    /// A `text` in the database's encoding; None for NULL.
    #[inline(always)]
    pub fn server_text(self, number: usize) -> Option<&'a [u8]> {
        // SAFETY: a text, which lives as long as the call.
        self.datum(number).map(|datum| unsafe { text_bytes(detoasted(datum.cast_mut_ptr())) })
    }

    /// A `text[]`; None for NULL.
    pub fn texts(self, number: usize) -> Option<Texts<'a>> {
        self.datum(number).map(Texts::of)
    }

    /// A `jsonb`; None for NULL.
    pub fn jsonb(self, number: usize) -> Option<Varlena> {
        // SAFETY: a jsonb, which lives as long as the call.
        self.datum(number).map(|datum| unsafe { ffi::pg_detoast_datum(datum.cast_mut_ptr()) })
    }

    /// An `interval`; None for NULL.
    pub fn interval(self, number: usize) -> Option<Interval> {
        // SAFETY: points to an interval.
        self.datum(number).map(|datum| unsafe { interval_of(datum) })
    }

    /// A `named_lock_mode`; None for NULL.
    ///
    /// # Errors
    /// [`Error::UnknownMode`] where someone has added labels to the type.
    pub fn mode(self, number: usize) -> Result<Option<Mode>, Error> {
        self.oid(number).map(mode_of_label).transpose()
    }

    /// A `boolean`; None for NULL.
    pub fn boolean(self, number: usize) -> Option<bool> {
        self.datum(number).map(|datum| datum.value() != 0)
    }

    /// An `integer`; None for NULL.
    pub fn integer(self, number: usize) -> Option<i32> {
        self.datum(number).map(|datum| datum.value() as i32)
    }

    /// An `oid`; None for NULL.
    pub fn oid(self, number: usize) -> Option<pg_sys::Oid> {
        self.datum(number).map(|datum| pg_sys::Oid::from(datum.value() as u32))
    }

    /// A `bigint`; None for NULL.
    pub fn bigint(self, number: usize) -> Option<i64> {
        self.datum(number).map(|datum| datum.value() as i64)
    }

    /// How many the function is declared with.
    pub fn count(self) -> usize {
        self.0.len()
    }

    /// Whatever it is; None for NULL.
    pub fn datum(self, number: usize) -> Option<pg_sys::Datum> {
        let argument = self.0.get(number).expect("the function is declared with fewer arguments");
        (!argument.isnull).then_some(argument.value)
    }
}

/// The elements of a `text[]` in their order, whatever its dimensions. In memory of the current call.
#[derive(Clone, Copy)]
pub struct Texts<'a> {
    values: &'a [pg_sys::Datum],
    nulls: &'a [bool],
}

impl<'a> Texts<'a> {
    fn of(array: pg_sys::Datum) -> Self {
        let (mut values, mut nulls, mut length) = (std::ptr::null_mut(), std::ptr::null_mut(), 0);
        // SAFETY: a text[]: the length and the alignment are text's. The server makes arrays of that many elements.
        unsafe {
            let array = ffi::pg_detoast_datum(array.cast_mut_ptr()).cast();
            let alignment = pg_sys::TYPALIGN_INT as std::ffi::c_char;
            pg_sys::deconstruct_array(
                array,
                pg_sys::TEXTOID,
                -1,
                false,
                alignment,
                &mut values,
                &mut nulls,
                &mut length,
            );
            match length as usize {
                0 => Self { values: &[], nulls: &[] },
                length => Self {
                    values: std::slice::from_raw_parts(values, length),
                    nulls: std::slice::from_raw_parts(nulls, length),
                },
            }
        }
    }

    /// How many there are.
    pub fn len(self) -> usize {
        self.values.len()
    }

    /// One of them, in the database's encoding; None for NULL.
    pub fn server_text(self, number: usize) -> Option<&'a [u8]> {
        // SAFETY: a text within the array.
        (!self.nulls[number]).then(|| unsafe { text_bytes(self.values[number].cast_mut_ptr()) })
    }

    /// All, as UTF-8 (see [`encoding::to_utf8`]); None for NULL.
    pub fn iter(self) -> impl Iterator<Item = Option<&'a [u8]>> {
        (0..self.len()).map(move |number| self.server_text(number).map(encoding::to_utf8))
    }
}

/// An interval out of SQL's.
///
/// # Safety
/// The datum points to one.
pub unsafe fn interval_of(datum: pg_sys::Datum) -> Interval {
    // SAFETY: the caller's.
    let interval = unsafe { *datum.cast_mut_ptr::<pg_sys::Interval>() };
    Interval { months: interval.month, days: interval.day, micros: interval.time }
}

/// A value of the server's of any length, in memory of the current call.
pub type Varlena = *mut pg_sys::varlena;

/// A value that is neither compressed nor stored elsewhere: this one itself, as a rule.
///
/// # Safety
/// `value` points to one.
#[inline]
unsafe fn detoasted(value: Varlena) -> Varlena {
    use pgrx::varlena::{varatt_is_1b, varatt_is_1b_e, varatt_is_4b_u};
    // SAFETY: the caller's.
    unsafe {
        if varatt_is_4b_u(value) || (varatt_is_1b(value) && !varatt_is_1b_e(value)) {
            value
        } else {
            ffi::pg_detoast_datum_packed(value)
        }
    }
}

/// The bytes of a text that is neither compressed nor stored elsewhere.
///
/// # Safety
/// `text` points to one, which lives long enough.
pub unsafe fn text_bytes<'a>(text: Varlena) -> &'a [u8] {
    // SAFETY: the caller's.
    unsafe {
        std::slice::from_raw_parts(pgrx::varlena::vardata_any(text).cast(), pgrx::varlena::varsize_any_exhdr(text))
    }
}

/// The labels' OIDs met so far: a label's OID never comes to mean another mode.
static LABELS: ProcessLocal<Cell<[pg_sys::Oid; Mode::ALL.len()]>> =
    ProcessLocal::cell([pg_sys::Oid::INVALID; Mode::ALL.len()]);

fn mode_of_label(oid: pg_sys::Oid) -> Result<Mode, Error> {
    let known = LABELS.get();
    match known.iter().position(|&label| label == oid) {
        Some(number) => Ok(Mode::ALL[number]),
        None => mode_of_new_label(oid, known),
    }
}

#[cold]
fn mode_of_new_label(oid: pg_sys::Oid, mut known: [pg_sys::Oid; Mode::ALL.len()]) -> Result<Mode, Error> {
    let (label, _, _) = pgrx::enum_helper::lookup_enum_by_oid(oid);
    let mode = Mode::from_label(&label).ok_or(Error::UnknownMode)?;
    known[mode as usize] = oid;
    LABELS.set(known);
    Ok(mode)
}

/// A `text` result: bytes in the database's encoding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerText(Vec<u8>);

impl ServerText {
    /// From a text of ours.
    pub fn from_utf8(text: &str) -> Self {
        Self(encoding::from_utf8(text))
    }

    /// From bytes in the database's encoding.
    pub fn from_bytes(text: Vec<u8>) -> Self {
        Self(text)
    }

    /// From a name of a lock or a part of one.
    pub fn from_name(name: &[u8]) -> Self {
        Self(encoding::name_to_server(name))
    }

    /// From text of the server's.
    ///
    /// # Safety
    /// `text` is null or a C string.
    pub unsafe fn from_server(text: *const std::ffi::c_char) -> Option<Self> {
        // SAFETY: the caller's.
        (!text.is_null()).then(|| Self(unsafe { CStr::from_ptr(text) }.to_bytes().to_vec()))
    }

    /// For an error's text; what is not UTF-8 is shown as it can be.
    pub fn lossy(&self) -> String {
        String::from_utf8_lossy(&self.0).into_owned()
    }
}

// SAFETY: maps to a type that SQL has.
pgrx::pgrx_sql_entity_graph::impl_sql_translatable!(ServerText, "text");

impl IntoDatum for ServerText {
    fn into_datum(self) -> Option<pg_sys::Datum> {
        // SAFETY: copies the bytes into a text in the current memory context.
        unsafe {
            Some(pg_sys::Datum::from(pg_sys::cstring_to_text_with_len(self.0.as_ptr().cast(), self.0.len() as i32)))
        }
    }

    fn type_oid() -> pg_sys::Oid {
        pg_sys::TEXTOID
    }
}

// SAFETY: returns the datum that into_datum makes.
unsafe impl BoxRet for ServerText {
    unsafe fn box_into<'fcx>(self, fcinfo: &mut FcInfo<'fcx>) -> Datum<'fcx> {
        // SAFETY: a text's datum.
        unsafe { fcinfo.return_raw_datum(self.into_datum().unwrap_or(pg_sys::Datum::null())) }
    }
}

/// A `jsonb` result, as the server keeps it: not parsed, so that no digit of its numbers is lost.
#[derive(Clone, Debug)]
pub struct Jsonb(pub Vec<u8>);

// SAFETY: maps to a type that SQL has.
pgrx::pgrx_sql_entity_graph::impl_sql_translatable!(Jsonb, "jsonb");

impl IntoDatum for Jsonb {
    fn into_datum(self) -> Option<pg_sys::Datum> {
        // SAFETY: a copy in the current memory context, of the same length.
        unsafe {
            let copy = pg_sys::palloc(self.0.len()).cast::<u8>();
            copy.copy_from_nonoverlapping(self.0.as_ptr(), self.0.len());
            Some(pg_sys::Datum::from(copy))
        }
    }

    fn type_oid() -> pg_sys::Oid {
        pg_sys::JSONBOID
    }
}

// SAFETY: returns the datum that into_datum makes.
unsafe impl BoxRet for Jsonb {
    unsafe fn box_into<'fcx>(self, fcinfo: &mut FcInfo<'fcx>) -> Datum<'fcx> {
        // SAFETY: a jsonb's datum.
        unsafe { fcinfo.return_raw_datum(self.into_datum().unwrap_or(pg_sys::Datum::null())) }
    }
}

/// A jsonb, as the server keeps it, as JSON in UTF-8.
pub fn json_text(jsonb: &[u8]) -> Vec<u8> {
    let jsonb = Jsonb(jsonb.to_vec()).into_datum();
    // SAFETY: SQL's own function, with its one argument; its result is a C string.
    let text = unsafe { pgrx::direct_function_call::<&CStr>(pg_sys::jsonb_out, &[jsonb]) };
    encoding::to_utf8(text.unwrap_or_default().to_bytes()).to_vec()
}

/// An `oid` result that may be 0: the bindings' own type makes NULL of that.
#[derive(Clone, Copy, Debug)]
pub struct OidOrZero(pub u32);

// SAFETY: maps to a type that SQL has.
pgrx::pgrx_sql_entity_graph::impl_sql_translatable!(OidOrZero, "oid");

impl IntoDatum for OidOrZero {
    fn into_datum(self) -> Option<pg_sys::Datum> {
        Some(pg_sys::Datum::from(self.0))
    }

    fn type_oid() -> pg_sys::Oid {
        pg_sys::OIDOID
    }
}

// SAFETY: returns the number's datum.
unsafe impl BoxRet for OidOrZero {
    unsafe fn box_into<'fcx>(self, fcinfo: &mut FcInfo<'fcx>) -> Datum<'fcx> {
        // SAFETY: an OID's datum.
        unsafe { fcinfo.return_raw_datum(pg_sys::Datum::from(self.0)) }
    }
}

/// A time of the server's clock in microseconds.
pub fn timestamp(micros: i64) -> TimestampWithTimeZone {
    // SAFETY: the datum of a timestamptz is its microseconds.
    unsafe { TimestampWithTimeZone::from_datum(pg_sys::Datum::from(micros), false) }.expect("not null")
}

/// An interval of so many microseconds.
pub fn interval(micros: i64) -> pgrx::datum::Interval {
    pgrx::datum::Interval::from_micros(micros)
}

/// The row that a function with several OUT arguments, or a procedure with an INOUT one, returns.
pub struct Row(pg_sys::Datum);

impl Row {
    /// Makes the row that a call is declared to return. `values` are as many as it has columns; None is NULL.
    pub fn new<const COLUMNS: usize>(
        fcinfo: pg_sys::FunctionCallInfo,
        values: [Option<pg_sys::Datum>; COLUMNS],
    ) -> Self {
        let mut nulls = values.map(|value| value.is_none());
        let mut values = values.map(|value| value.unwrap_or(pg_sys::Datum::null()));
        let description = row_description(fcinfo);
        // SAFETY: as many values as the description has columns.
        unsafe {
            assert_eq!((*description).natts as usize, COLUMNS, "declared with as many columns");
            let tuple = pg_sys::heap_form_tuple(description, values.as_mut_ptr(), nulls.as_mut_ptr());
            Self(pg_sys::HeapTupleHeaderGetDatum((*tuple).t_data))
        }
    }
}

/// The rows that a function returns, made once for each that returns some: the columns of a function never change.
fn row_description(fcinfo: pg_sys::FunctionCallInfo) -> pg_sys::TupleDesc {
    static KNOWN: ProcessLocal<RefCell<Vec<(pg_sys::Oid, pg_sys::TupleDesc)>>> = ProcessLocal::ref_cell(Vec::new());
    // SAFETY: the server's call information; what it says is copied to memory of the process.
    unsafe {
        let function = (*(*fcinfo).flinfo).fn_oid;
        let known = KNOWN.borrow().iter().find(|known| known.0 == function).map(|known| known.1);
        if let Some(description) = known {
            return description;
        }
        let mut description = std::ptr::null_mut();
        let class = pg_sys::get_call_result_type(fcinfo, std::ptr::null_mut(), &mut description);
        assert_eq!(class, pg_sys::TypeFuncClass::TYPEFUNC_COMPOSITE, "declared to return a row");
        let context = pg_sys::CurrentMemoryContext;
        pg_sys::CurrentMemoryContext = pg_sys::TopMemoryContext;
        let description = pg_sys::BlessTupleDesc(pg_sys::CreateTupleDescCopy(description));
        pg_sys::CurrentMemoryContext = context;
        KNOWN.borrow_mut().push((function, description));
        description
    }
}

// SAFETY: maps to a type that SQL has.
pgrx::pgrx_sql_entity_graph::impl_sql_translatable!(Row, "record");

// SAFETY: returns the row's datum.
unsafe impl BoxRet for Row {
    unsafe fn box_into<'fcx>(self, fcinfo: &mut FcInfo<'fcx>) -> Datum<'fcx> {
        // SAFETY: a row's datum.
        unsafe { fcinfo.return_raw_datum(self.0) }
    }
}
