//! What the server tells us of: the ends of transactions, subtransactions and the session.

use super::lease::lazy_release;
use super::report::answer;
use super::session;
use super::statistics;
use pgrx::pg_sys;
use std::ffi::{c_int, c_void};

/// Registers them, once in a session.
pub fn register() {
    let nothing = std::ptr::null_mut();
    // SAFETY: functions that live as long as the process, with the server's signatures.
    unsafe {
        pg_sys::RegisterXactCallback(Some(on_transaction), nothing);
        pg_sys::RegisterSubXactCallback(Some(on_subtransaction), nothing);
        pg_sys::RegisterResourceReleaseCallback(Some(on_resource_release), nothing);
        pg_sys::before_shmem_exit(Some(on_exit), pg_sys::Datum::null());
    }
}

/// The server calls this twice for each statement that is a transaction of its own, and nearly always there is nothing to
/// do: that ends here, before the guard for panics, of which there are none.
unsafe extern "C-unwind" fn on_transaction(event: pg_sys::XactEvent::Type, _arg: *mut c_void) {
    if event == pg_sys::XactEvent::XACT_EVENT_PRE_PREPARE || lazy_release::is_noted() || statistics::is_pending() {
        // SAFETY: our own function.
        unsafe { on_transaction_event(event) }
    }
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn on_transaction_event(event: pg_sys::XactEvent::Type) {
    match event {
        // Errors are still allowed here; at XACT_EVENT_PREPARE they are not.
        pg_sys::XactEvent::XACT_EVENT_PRE_PREPARE => {
            let mut result = Ok(());
            session::in_callback(|session| result = session.on_prepare());
            answer(result);
        }
        pg_sys::XactEvent::XACT_EVENT_PRE_COMMIT => lazy_release::on_pre_commit(),
        pg_sys::XactEvent::XACT_EVENT_COMMIT => on_transaction_end(true),
        pg_sys::XactEvent::XACT_EVENT_ABORT => on_transaction_end(false),
        _ => {}
    }
}

fn on_transaction_end(is_commit: bool) {
    lazy_release::on_transaction_end();
    statistics::on_transaction_end(is_commit);
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn on_subtransaction(
    event: pg_sys::SubXactEvent::Type,
    subtransaction: pg_sys::SubTransactionId,
    parent: pg_sys::SubTransactionId,
    _arg: *mut c_void,
) {
    match event {
        pg_sys::SubXactEvent::SUBXACT_EVENT_COMMIT_SUB => {
            session::in_callback(|session| session.on_subcommit(subtransaction, parent));
            statistics::on_subcommit(subtransaction, parent);
        }
        pg_sys::SubXactEvent::SUBXACT_EVENT_ABORT_SUB => {
            session::in_callback(|session| session.on_subabort(subtransaction));
            statistics::on_subabort(subtransaction);
        }
        _ => {}
    }
}

/// The server calls this three times at the end of each portal and each (sub)transaction: as above.
unsafe extern "C-unwind" fn on_resource_release(
    phase: pg_sys::ResourceReleasePhase::Type,
    is_commit: bool,
    is_top_level: bool,
    _arg: *mut c_void,
) {
    if phase == pg_sys::ResourceReleasePhase::RESOURCE_RELEASE_AFTER_LOCKS && !session::is_at_rest() {
        // SAFETY: our own function.
        unsafe { on_locks_released(is_commit, is_top_level) }
    }
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn on_locks_released(is_commit: bool, is_top_level: bool) {
    session::in_callback(|session| session.on_locks_released(is_commit, is_top_level));
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn on_exit(_code: c_int, _arg: pg_sys::Datum) {
    statistics::on_exit();
    session::in_callback(session::Session::on_exit);
}
