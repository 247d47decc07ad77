//! The lock manager: take a lock with a bounded wait, give it back, ask whether it is held.

use super::encoding;
use super::ffi;
use super::try_block::{ServerError, try_block};
use crate::rules::holds::Scope;
use crate::rules::interval::Wait;
use crate::rules::key::Tag;
use crate::rules::mode::Mode;
use pgrx::pg_sys;
use pgrx::pg_sys::errcodes::PgSqlErrorCode;
use std::ffi::{CString, c_void};

/// How a try or a wait for a lock came out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Held now.
    Granted,
    /// Not held: not free, or the wait ran out.
    NotAvailable,
}

/// Why a wait for a lock ended in an error.
#[derive(Debug)]
pub enum Failure {
    /// The server's own error: deadlock, cancel, out of memory.
    Server(ServerError),
    /// `statement_timeout` has fired, but the server reported the lock's timeout first.
    StatementTimeout,
}

impl From<ServerError> for Failure {
    fn from(error: ServerError) -> Self {
        Failure::Server(error)
    }
}

fn locktag(tag: Tag) -> pg_sys::LOCKTAG {
    pg_sys::LOCKTAG {
        locktag_field1: tag.database,
        locktag_field2: tag.high,
        locktag_field3: tag.low,
        locktag_field4: tag.class,
        locktag_type: pg_sys::LockTagType::LOCKTAG_ADVISORY as u8,
        locktag_lockmethodid: pg_sys::USER_LOCKMETHOD as u8,
    }
}

/// Takes the lock if nobody is in the way or ahead in its queue.
///
/// # Errors
/// The server's, such as a full lock table; nothing is held then.
pub fn try_acquire(tag: Tag, mode: Mode, scope: Scope) -> Result<Outcome, ServerError> {
    let tag = locktag(tag);
    // SAFETY: one server call with plain arguments.
    let result = unsafe { try_block(|| ffi::LockAcquire(&tag, mode.lockmode(), scope == Scope::Session, true)) }?;
    Ok(if result == pg_sys::LockAcquireResult::LOCKACQUIRE_NOT_AVAIL {
        Outcome::NotAvailable
    } else {
        Outcome::Granted
    })
}

/// Waits for the lock in its queue. `description` names it in the CONTEXT of errors. Not held in this mode before.
///
/// The server can grant a lock while it delivers a timeout or a cancel, and a session lock survives that error. So the
/// answer here is what the lock manager says after everything that was pending has been delivered.
///
/// # Errors
/// The server's; nothing more is held then than before.
pub fn wait(tag: Tag, mode: Mode, scope: Scope, wait: Wait, description: &str) -> Result<Outcome, Failure> {
    let locktag = locktag(tag);
    let lockmode = mode.lockmode();
    let is_session = scope == Scope::Session;
    let context = WaitContext::new(description, mode);
    // SAFETY: plain globals of this single-threaded process, and a question about one of its timeouts.
    let (lock_timeout, statement_timeout) =
        unsafe { (pg_sys::LockTimeout, ffi::get_timeout_active(ffi::STATEMENT_TIMEOUT)) };
    // SAFETY: server calls with plain arguments, and globals; the callback's argument outlives the block.
    let result = unsafe {
        let mut callback = pg_sys::ErrorContextCallback {
            previous: pg_sys::error_context_stack,
            callback: Some(add_wait_context),
            arg: (&raw const context).cast_mut().cast(),
        };
        try_block(|| {
            pg_sys::error_context_stack = &raw mut callback;
            pg_sys::LockTimeout = match wait {
                Wait::Try => 1, // one that has to go through the queue
                wait => wait.millis(lock_timeout),
            };
            ffi::LockAcquire(&locktag, lockmode, is_session, false);
            if pg_sys::InterruptPending != 0 {
                ffi::ProcessInterrupts();
            }
        })
    };
    // SAFETY: a plain global.
    unsafe { pg_sys::LockTimeout = lock_timeout };
    let Err(error) = result else { return Ok(Outcome::Granted) };

    // SAFETY: leaves the lock's queue, or enters a grant that came with the error, as the end of a transaction would.
    unsafe { ffi::LockErrorCleanup() };
    let is_held = held(tag, mode);
    let swallowed = match error.sqlstate() {
        PgSqlErrorCode::ERRCODE_LOCK_NOT_AVAILABLE => true,
        // A try that would have to wait for someone who waits for this session: not free.
        PgSqlErrorCode::ERRCODE_T_R_DEADLOCK_DETECTED => wait == Wait::Try,
        _ => false,
    };
    // SAFETY: a question about one of this process's timeouts.
    let statement_overran =
        swallowed && statement_timeout && unsafe { !ffi::get_timeout_active(ffi::STATEMENT_TIMEOUT) };
    if !swallowed || statement_overran {
        if is_held {
            release(tag, mode, scope);
        }
        return Err(if swallowed {
            error.put_away();
            Failure::StatementTimeout
        } else {
            Failure::Server(error)
        });
    }
    error.put_away();
    // The error came first: whatever else was pending is still to be looked at.
    // SAFETY: a plain global.
    unsafe { pg_sys::InterruptPending = 1 };
    Ok(if is_held { Outcome::Granted } else { Outcome::NotAvailable })
}

/// Gives back one hold; false if it was not held with that scope.
pub fn release(tag: Tag, mode: Mode, scope: Scope) -> bool {
    let tag = locktag(tag);
    // SAFETY: a valid method and mode, for which the function raises no ERROR; and two plain globals.
    unsafe {
        // The server would warn of a lock that is not held; the caller finds out by the answer.
        let log = ffi::log_min_messages();
        let levels = (*log, pg_sys::client_min_messages);
        (*log, pg_sys::client_min_messages) = (pg_sys::PANIC as i32, pg_sys::PGERROR as i32);
        let was_held = ffi::LockRelease(&tag, mode.lockmode(), scope == Scope::Session);
        (*log, pg_sys::client_min_messages) = levels;
        was_held
    }
}

/// Lets a cancel or the end of the session happen now if one is pending.
///
/// # Errors
/// The server's.
pub fn check_interrupts() -> Result<(), ServerError> {
    // SAFETY: a plain global, and one server call.
    unsafe { if pg_sys::InterruptPending != 0 { try_block(|| ffi::ProcessInterrupts()) } else { Ok(()) } }
}

/// Whether this session holds the lock in just this mode, by itself or by its transaction.
pub fn held(tag: Tag, mode: Mode) -> bool {
    let tag = locktag(tag);
    // SAFETY: a pointer to a lock tag.
    unsafe { ffi::lock_held_by_me(&tag, mode.lockmode()) }
}

/// How many sessions hold a lock or wait for it, each counted once for each mode. Takes nothing, is in nobody's way.
pub fn requests(tag: Tag) -> u32 {
    let tag = locktag(tag);
    // SAFETY: a tag with a valid method, for which the function raises no ERROR.
    unsafe { ffi::LockWaiterCount(&tag) as u32 }
}

/// The server's `lock_timeout` in milliseconds.
pub fn lock_timeout() -> i32 {
    // SAFETY: a plain global.
    unsafe { pg_sys::LockTimeout }
}

/// The line of CONTEXT that an error raised during a wait gets.
struct WaitContext(CString);

impl WaitContext {
    fn new(description: &str, mode: Mode) -> Self {
        let line = format!("while waiting for {description} in mode {mode}");
        Self(CString::new(encoding::from_utf8(&line)).unwrap_or_default())
    }
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn add_wait_context(context: *mut c_void) {
    // SAFETY: set up by wait(), which is still on the stack.
    unsafe {
        let context = &*context.cast::<WaitContext>();
        ffi::errcontext_msg(c"%s".as_ptr(), context.0.as_ptr());
    }
}
