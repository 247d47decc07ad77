//! Sleeping until somebody wakes this process, and waking others.

use super::ffi;
use super::try_block::{ServerError, try_block};
use pgrx::pg_sys;

/// `utils/wait_event.h`: an extension's wait, in pg_stat_activity.
const WAIT_EVENT: u32 = pg_sys::PG_WAIT_EXTENSION;

/// Sleeps until somebody wakes this process, at most so many microseconds. It may wake for no reason.
///
/// # Errors
/// The server's, when the statement is to be broken off.
pub fn sleep(micros: i64) -> Result<(), ServerError> {
    let millis = (micros.max(0) as u64).div_ceil(1_000) as std::ffi::c_long;
    let events = pg_sys::WL_LATCH_SET | pg_sys::WL_TIMEOUT | pg_sys::WL_EXIT_ON_PM_DEATH;
    // SAFETY: this process's latch.
    unsafe {
        try_block(|| {
            ffi::WaitLatch(pg_sys::MyLatch, events as i32, millis, WAIT_EVENT);
            ffi::ResetLatch(pg_sys::MyLatch);
            if pg_sys::InterruptPending != 0 {
                ffi::ProcessInterrupts();
            }
        })
    }
}

/// Wakes the process of that number (see [`ffi::my_process_number`]), or whoever has the number by now, whom it does not
/// harm.
pub fn set(process: usize) {
    // SAFETY: numbers are those of the server's array of processes, in its main shared memory; raises no error.
    unsafe { ffi::SetLatch(&raw mut (*(*pg_sys::ProcGlobal).allProcs.add(process)).procLatch) }
}
