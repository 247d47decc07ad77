//! Errors and notices to the client and the log, in the database's encoding and with their SQLSTATE.

use super::encoding;
use super::ffi;
use super::lock_manager::Failure;
use super::try_block::ServerError;
use crate::rules::error::Error;
use pgrx::pg_sys;
use pgrx::pg_sys::errcodes::PgSqlErrorCode;
use std::ffi::{CStr, c_char};

/// Why a call fails: by a rule of ours, or with an error of the server's.
#[derive(Debug)]
pub enum Problem {
    /// Ours.
    Rule(Box<Error>),
    /// The server's, to be thrown on as it is.
    Server(ServerError),
    /// `statement_timeout` has fired while a lock's timeout was reported.
    StatementTimeout,
}

impl Problem {
    /// Whether the server found a deadlock.
    pub fn is_deadlock(&self) -> bool {
        matches!(self, Self::Server(error) if error.sqlstate() == PgSqlErrorCode::ERRCODE_T_R_DEADLOCK_DETECTED)
    }
}

impl From<Error> for Problem {
    fn from(error: Error) -> Self {
        Problem::Rule(Box::new(error))
    }
}

impl From<ServerError> for Problem {
    fn from(error: ServerError) -> Self {
        Problem::Server(error)
    }
}

impl From<Failure> for Problem {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Server(error) => Problem::Server(error),
            Failure::StatementTimeout => Problem::StatementTimeout,
        }
    }
}

/// The answer of a call, or its error raised to the client. For the last line of a SQL function: nothing with a
/// destructor may be left in its frame.
#[inline(always)]
pub fn answer<T>(result: Result<T, Problem>) -> T {
    match result {
        Ok(answer) => answer,
        Err(problem) => raise(problem),
    }
}

#[cold]
fn raise(problem: Problem) -> ! {
    let parts = match problem {
        // SAFETY: the callers keep to the rule above.
        Problem::Server(error) => unsafe { error.rethrow() },
        Problem::StatementTimeout => Parts::new("57014", "canceling statement due to statement timeout", None, None),
        Problem::Rule(error) => Parts::of(&error),
    };
    parts.report(pg_sys::PGERROR as i32);
    unreachable!("an ERROR does not return")
}

/// Writes a line to the server's log.
pub fn log(message: &str) {
    Parts::new("00000", message, None, None).report(pg_sys::LOG as i32);
}

/// Warns the client.
pub fn warn(warning: &Error) {
    Parts::of(warning).report(pg_sys::WARNING as i32);
}

/// The parts of a report, as C strings in the current memory context: raising an error frees them.
struct Parts {
    sqlstate: i32,
    message: *const c_char,
    detail: *const c_char,
    hint: *const c_char,
}

impl Parts {
    fn of(error: &Error) -> Self {
        Self::new(error.sqlstate(), &error.to_string(), error.detail().as_deref(), Some(&error.hint()))
    }

    fn new(sqlstate: &str, message: &str, detail: Option<&str>, hint: Option<&str>) -> Self {
        Self {
            sqlstate: pack_sqlstate(sqlstate),
            message: palloc_string(message),
            detail: detail.map_or(std::ptr::null(), palloc_string),
            hint: hint.map_or(std::ptr::null(), palloc_string),
        }
    }

    fn report(self, level: i32) {
        const FORMAT: *const c_char = c"%s".as_ptr();
        // SAFETY: the calls that ereport() makes, in its order; nothing here has a destructor. A notice must not end in a
        // cancel, which would skip its callers' destructors; an ERROR sets the count to zero.
        unsafe {
            let holdoff = pg_sys::InterruptHoldoffCount;
            pg_sys::InterruptHoldoffCount = holdoff + 1;
            if ffi::errstart(level, std::ptr::null()) {
                ffi::errcode(self.sqlstate);
                ffi::errmsg(FORMAT, self.message);
                if !self.detail.is_null() {
                    ffi::errdetail(FORMAT, self.detail);
                }
                if !self.hint.is_null() {
                    ffi::errhint(FORMAT, self.hint);
                }
                ffi::errfinish(c"named_locks".as_ptr(), 0, c"named_locks".as_ptr());
            }
            pg_sys::InterruptHoldoffCount = holdoff;
        }
    }
}

/// `MAKE_SQLSTATE` of `utils/elog.h`: six bits for each character.
fn pack_sqlstate(sqlstate: &str) -> i32 {
    sqlstate.bytes().rev().fold(0, |packed, byte| packed << 6 | i32::from((byte - b'0') & 0x3F))
}

/// A text of ours as a C string in the current memory context, in the database's encoding.
pub fn palloc_string(text: &str) -> *const c_char {
    let mut bytes = encoding::from_utf8(text);
    bytes.retain(|&byte| byte != 0);
    bytes.push(0);
    // SAFETY: ends with its only NUL; the copy lives in the current memory context.
    unsafe { pg_sys::pstrdup(CStr::from_bytes_with_nul_unchecked(&bytes).as_ptr()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sqlstates_are_packed_as_the_server_packs_them() {
        assert_eq!(pack_sqlstate("55P03"), PgSqlErrorCode::ERRCODE_LOCK_NOT_AVAILABLE as i32);
        assert_eq!(pack_sqlstate("0A000"), PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED as i32);
        assert_eq!(pack_sqlstate("22001"), PgSqlErrorCode::ERRCODE_STRING_DATA_RIGHT_TRUNCATION as i32);
    }
}
