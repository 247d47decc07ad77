//! Ends the session when a hold limit is overrun: one timer for all of its locks, set to the earliest limit.
//!
//! Raising an error disarms every timer of a session, so the timer is armed again at the end of each (sub)transaction,
//! at each call, and when an error is reported: in an aborted transaction block nothing else of ours is called.

use super::ffi;
use crate::rules::holds::Limit;
use pgrx::pg_sys;
use std::cell::Cell;
use std::ffi::CString;
use std::sync::atomic::{AtomicBool, Ordering};

thread_local! {
    static TIMER: Cell<Option<ffi::TimeoutId>> = const { Cell::new(None) };
    static EARLIEST: Cell<Option<Limit>> = const { Cell::new(None) };
    static PREVIOUS_LOG_HOOK: Cell<pg_sys::emit_log_hook_type> = const { Cell::new(None) };
}

/// Set in the signal handler.
static OVERRAN: AtomicBool = AtomicBool::new(false);

/// Sets the timer to a limit, or off.
pub fn set(earliest: Option<Limit>) {
    if EARLIEST.replace(earliest) != earliest {
        if let Some(timer) = TIMER.get() {
            // SAFETY: a timer that is registered.
            unsafe { ffi::disable_timeout(timer, false) };
        }
    }
    rearm();
}

/// Sets the timer again if something has disarmed it.
pub fn rearm() {
    let Some(limit) = EARLIEST.get() else { return };
    let timer = TIMER.get().unwrap_or_else(register);
    // SAFETY: a timer that is registered.
    unsafe {
        if !OVERRAN.load(Ordering::Relaxed) && !ffi::get_timeout_active(timer) {
            ffi::enable_timeout_at(timer, limit.expires_at);
        }
    }
}

/// Whether a limit has been overrun: the session is coming to its end.
pub fn overran() -> bool {
    OVERRAN.load(Ordering::Relaxed)
}

#[cold]
fn register() -> ffi::TimeoutId {
    // SAFETY: a handler that is fit for a signal; a hook that calls the one before it.
    let timer = unsafe {
        PREVIOUS_LOG_HOOK.set(pg_sys::emit_log_hook);
        pg_sys::emit_log_hook = Some(on_report);
        ffi::RegisterTimeout(ffi::USER_TIMEOUT, on_overrun)
    };
    TIMER.set(Some(timer));
    timer
}

/// In a signal handler: as pg_terminate_backend() would, ends this session at the next opportunity.
unsafe extern "C-unwind" fn on_overrun() {
    OVERRAN.store(true, Ordering::Relaxed);
    // SAFETY: fit for a signal handler.
    unsafe { libc::raise(libc::SIGTERM) };
}

/// When an error is about to be reported: the timers have been disarmed; and the end of the session wants a reason.
#[pgrx::pg_guard]
unsafe extern "C-unwind" fn on_report(error: *mut pg_sys::ErrorData) {
    // SAFETY: the server's error, in whose memory context we are.
    unsafe {
        match (*error).elevel as u32 {
            pg_sys::PGERROR => rearm(),
            pg_sys::FATAL if overran() && (*error).detail.is_null() => {
                let detail = CString::new("A lock of this session was held longer than its hold_limit.");
                (*error).detail = pg_sys::pstrdup(detail.unwrap_or_default().as_ptr());
            }
            _ => {}
        }
        if let Some(previous) = PREVIOUS_LOG_HOOK.get() {
            previous(error);
        }
    }
}
