//! Between the database's encoding and UTF-8, in which names are hashed and kept.

use super::ffi;
use super::try_block::try_block;
use crate::rules::name::display;
use pgrx::pg_sys;
use std::ffi::{CStr, c_char};

const UTF8: i32 = pg_sys::pg_enc::PG_UTF8 as i32;
const SQL_ASCII: i32 = pg_sys::pg_enc::PG_SQL_ASCII as i32;
/// `mb/pg_wchar.h`: no character of a server encoding is longer, with the terminating NUL.
const MAX_CHARACTER: usize = 16 + 1;

fn server_encoding() -> i32 {
    // SAFETY: reads this process's state, and raises no error.
    unsafe { ffi::GetDatabaseEncoding() }
}

/// Text of the database as UTF-8; as it is in a database in SQL_ASCII, which knows no encoding.
///
/// The result lives as long as `text` and the current memory context. Raises the server's own error where a character
/// has no equivalent in UTF-8.
#[inline(always)]
pub fn to_utf8(text: &[u8]) -> &[u8] {
    if matches!(server_encoding(), UTF8 | SQL_ASCII) || text.is_ascii() {
        return text;
    }
    // SAFETY: the result is `text` itself or a C string in the current memory context.
    unsafe {
        let converted = pg_sys::pg_server_to_any(text.as_ptr().cast::<c_char>(), text.len() as i32, UTF8);
        if std::ptr::eq(converted.cast::<u8>(), text.as_ptr()) { text } else { CStr::from_ptr(converted).to_bytes() }
    }
}

/// A text of ours in the database's encoding. What has no equivalent there becomes `?`. Reads no catalogue.
pub fn from_utf8(text: &str) -> Vec<u8> {
    if matches!(server_encoding(), UTF8 | SQL_ASCII) || text.is_ascii() {
        return text.as_bytes().to_vec();
    }
    let mut converted = Vec::with_capacity(text.len());
    for character in text.chars() {
        let mut buffer = [0u8; MAX_CHARACTER];
        // SAFETY: one server call, into a buffer of the length it asks for.
        let result = unsafe { try_block(|| ffi::pg_unicode_to_server(character.into(), buffer.as_mut_ptr())) };
        match (result, CStr::from_bytes_until_nul(&buffer)) {
            (Ok(()), Ok(character)) => converted.extend_from_slice(character.to_bytes()),
            (Err(error), _) => {
                error.put_away();
                converted.push(b'?');
            }
            (Ok(()), Err(_)) => converted.push(b'?'),
        }
    }
    converted
}

/// A name, kept as UTF-8, as the database shows it; bytes that are no text there as `\xNN`.
pub fn name_to_server(name: &[u8]) -> Vec<u8> {
    if server_encoding() == SQL_ASCII { name.to_vec() } else { from_utf8(&display(name)) }
}
