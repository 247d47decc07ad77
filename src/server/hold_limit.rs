//! Ends the session when a hold limit is overrun.
//!
//! One timer of the operating system's for all of a session's locks, set to the earliest limit. When it runs out, the
//! process gets SIGTERM, as from pg_terminate_backend(): idle, busy or waiting, the session ends at once. The server's own
//! timers would not do: every ERROR disarms them all, and in an aborted transaction block nothing of ours is called
//! that could arm them again.

use super::ffi;
use super::process_local::ProcessLocal;
use super::report;
use super::session;
use crate::rules::error::Error;
use crate::rules::holds::Limit;
use pgrx::pg_sys;
use std::cell::Cell;
use std::mem::MaybeUninit;

static TIMER: ProcessLocal<Cell<Option<libc::timer_t>>> = ProcessLocal::cell(None);
static EARLIEST: ProcessLocal<Cell<Option<Limit>>> = ProcessLocal::cell(None);
static PREVIOUS_LOG_HOOK: ProcessLocal<Cell<pg_sys::emit_log_hook_type>> = ProcessLocal::cell(None);

/// The shortest time a timer can be set to: 0 would stop it.
const MIN_MICROS: i64 = 1;

/// Makes the timer, so that [`set`] cannot fail. For before a lock with a limit is asked for.
///
/// # Errors
/// [`Error::NoTimer`].
pub fn prepare() -> Result<(), Error> {
    if TIMER.get().is_none() {
        TIMER.set(Some(make().map_err(|error| Error::NoTimer { error: error.to_string() })?));
    }
    Ok(())
}

/// Sets the timer to a limit, or stops it.
pub fn set(earliest: Option<Limit>) {
    let Some(timer) = TIMER.get() else { return };
    if EARLIEST.replace(earliest) == earliest {
        return;
    }
    let micros = earliest.map_or(0, |limit| (limit.expires_at - ffi::now()).max(MIN_MICROS));
    // SAFETY: a timer of this process, and a time that is not negative.
    unsafe {
        let mut time: libc::itimerspec = std::mem::zeroed();
        time.it_value.tv_sec = micros / 1_000_000;
        time.it_value.tv_nsec = micros % 1_000_000 * 1_000;
        libc::timer_settime(timer, 0, &time, std::ptr::null_mut());
    }
}

/// Whether the timer is set to a limit.
pub fn is_set() -> bool {
    EARLIEST.get().is_some()
}

/// Whether a limit has been overrun: the session is coming to its end.
pub fn overran() -> bool {
    let (Some(timer), Some(_)) = (TIMER.get(), EARLIEST.get()) else { return false };
    let mut left = MaybeUninit::<libc::itimerspec>::zeroed();
    // SAFETY: a timer of this process, and memory for the answer: nothing is left when it has run out.
    unsafe {
        libc::timer_gettime(timer, left.as_mut_ptr()) == 0 && {
            let left = left.assume_init().it_value;
            left.tv_sec == 0 && left.tv_nsec == 0
        }
    }
}

#[cold]
fn make() -> std::io::Result<libc::timer_t> {
    let mut timer = MaybeUninit::<libc::timer_t>::uninit();
    // SAFETY: an event that is a signal to this process; memory for the answer.
    let made = unsafe {
        let mut event: libc::sigevent = std::mem::zeroed();
        event.sigev_notify = libc::SIGEV_SIGNAL;
        event.sigev_signo = libc::SIGTERM;
        libc::timer_create(libc::CLOCK_MONOTONIC, &mut event, timer.as_mut_ptr())
    };
    if made != 0 {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: the call above has succeeded; the hook calls the one before it.
    unsafe {
        PREVIOUS_LOG_HOOK.set(pg_sys::emit_log_hook);
        pg_sys::emit_log_hook = Some(on_report);
        Ok(timer.assume_init())
    }
}

/// The end of the session wants a reason: the server's own message speaks of an administrator.
#[pgrx::pg_guard]
unsafe extern "C-unwind" fn on_report(error: *mut pg_sys::ErrorData) {
    // SAFETY: the server's error, in whose memory context we are.
    unsafe {
        if (*error).elevel as u32 == pg_sys::FATAL
            && (*error).detail.is_null()
            && let Some(overrun) = session::overrun()
        {
            (*error).detail = report::palloc_string(&format!("The {overrun}.")).cast_mut();
            (*error).hint = report::palloc_string(&overrun.hint()).cast_mut();
        }
        if let Some(previous) = PREVIOUS_LOG_HOOK.get() {
            previous(error);
        }
    }
}
