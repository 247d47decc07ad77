//! PG_TRY for Rust that keeps the whole error.
//!
//! The bindings' own trap turns an ERROR into a Rust panic and drops its CONTEXT and what it has for the server log (who
//! was in a deadlock with which query). Here the error stays as the server made it, to be looked at, put away or thrown on.

use super::ffi;
use cee_scape::call_with_sigsetjmp;
use pgrx::pg_sys;
use pgrx::pg_sys::errcodes::PgSqlErrorCode;
use std::mem::MaybeUninit;

/// An ERROR that the server raised and [`try_block`] caught.
#[derive(Debug)]
pub struct ServerError(*mut pg_sys::ErrorData);

impl ServerError {
    /// Its SQLSTATE.
    pub fn sqlstate(&self) -> PgSqlErrorCode {
        // SAFETY: the error data that try_block has copied.
        unsafe { (*self.0).sqlerrcode }.into()
    }

    /// Frees it: the call goes on as if nothing had been raised.
    pub fn put_away(self) {
        // SAFETY: the error data that try_block has copied, not used after this.
        unsafe { ffi::FreeErrorData(self.0) }
    }

    /// Throws it on to whoever called the function we are in.
    ///
    /// # Safety
    /// No frame between here and the server has a destructor to run.
    pub unsafe fn rethrow(self) -> ! {
        // SAFETY: the error data that try_block has copied; the caller's for the frames. Raising an error sets the holdoff
        // counts to zero, throwing it on does not.
        unsafe {
            pg_sys::InterruptHoldoffCount = 0;
            pg_sys::QueryCancelHoldoffCount = 0;
            ffi::ReThrowError(self.0)
        }
    }
}

/// Calls `server_call` and catches an ERROR that it raises. Memory context, resource owner, error context, trap and
/// holdoff counts are as before then; locks, lightweight ones too, are not released.
///
/// # Safety
/// `server_call` only calls functions of the server, without the bindings' trap, and has nothing with a destructor alive
/// while it does.
pub unsafe fn try_block<R>(server_call: impl FnOnce() -> R) -> Result<R, ServerError> {
    let mut result = MaybeUninit::uninit();
    // SAFETY: plain globals of this single-threaded process.
    let (memory_context, owner, trap, error_context, holdoff, cancel_holdoff) = unsafe {
        (
            pg_sys::CurrentMemoryContext,
            pg_sys::CurrentResourceOwner,
            pg_sys::PG_exception_stack,
            pg_sys::error_context_stack,
            pg_sys::InterruptHoldoffCount,
            pg_sys::QueryCancelHoldoffCount,
        )
    };
    let jumped = call_with_sigsetjmp(false, |jump_buffer| {
        // SAFETY: the buffer lives until call_with_sigsetjmp returns, after which the old trap is set again.
        unsafe { pg_sys::PG_exception_stack = std::ptr::from_ref(jump_buffer).cast_mut().cast() };
        result.write(server_call());
        0
    });
    // SAFETY: what was saved above.
    unsafe {
        pg_sys::PG_exception_stack = trap;
        pg_sys::error_context_stack = error_context;
    }
    if jumped == 0 {
        // SAFETY: without a jump the closure has run to its end and written the result.
        return Ok(unsafe { result.assume_init() });
    }
    // SAFETY: the server is in error handling: copy the error to the caller's memory and leave it, as PG_CATCH does.
    unsafe {
        pg_sys::CurrentMemoryContext = memory_context;
        pg_sys::CurrentResourceOwner = owner;
        pg_sys::InterruptHoldoffCount = holdoff;
        pg_sys::QueryCancelHoldoffCount = cancel_holdoff;
        let error = ffi::CopyErrorData();
        ffi::FlushErrorState();
        Err(ServerError(error))
    }
}
