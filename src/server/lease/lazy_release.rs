//! A transaction that has only released leases does not wait for the disk, nor for standbys, as under
//! `synchronous_commit = off`.
//!
//! Nobody is misled by a release that a crash undoes: the lease is held again, until its time to live ends it, as if its
//! holder had died just before. Whoever was granted it in between has committed after the release, and a commit that
//! reached the disk has taken all before it along. So of acquiring and releasing only the grant costs a flush.

use crate::server::process_local::ProcessLocal;
use pgrx::pg_sys;
use std::cell::Cell;

/// Where the WAL that this transaction has written ends, if releases are all that is in it; 0 otherwise.
static RELEASED: ProcessLocal<Cell<pg_sys::XLogRecPtr>> = ProcessLocal::cell(0);
/// The value of `synchronous_commit` that a commit under way has put aside.
static PUT_ASIDE: ProcessLocal<Cell<Option<i32>>> = ProcessLocal::cell(None);

/// Releases a lease by `write`, and notes whether the transaction has done anything else.
pub fn note<R>(write: impl FnOnce() -> R) -> R {
    // SAFETY: a question about this process's state. What writes rows or draws from sequences has a transaction id.
    let is_first = unsafe { pg_sys::GetTopTransactionIdIfAny() } == pg_sys::InvalidTransactionId;
    let is_only = is_first || RELEASED.get() != 0 && RELEASED.get() == end_of_wal();
    let result = write();
    RELEASED.set(if is_only { end_of_wal() } else { 0 });
    result
}

/// Whether this transaction has to be looked at when it ends.
pub fn is_noted() -> bool {
    RELEASED.get() != 0 || PUT_ASIDE.get().is_some()
}

/// The transaction is about to commit: all that it writes is written, but the commit.
pub fn on_pre_commit() {
    let released = RELEASED.replace(0);
    if released != 0 && released == end_of_wal() {
        // SAFETY: a setting's variable; put back when the transaction has ended.
        unsafe {
            PUT_ASIDE.set(Some(pg_sys::synchronous_commit));
            pg_sys::synchronous_commit = pg_sys::SyncCommitLevel::SYNCHRONOUS_COMMIT_OFF as i32;
        }
    }
}

/// The transaction has ended.
pub fn on_transaction_end() {
    RELEASED.set(0);
    if let Some(value) = PUT_ASIDE.take() {
        // SAFETY: as above.
        unsafe { pg_sys::synchronous_commit = value };
    }
}

/// Where the newest WAL record of this transaction ends.
fn end_of_wal() -> pg_sys::XLogRecPtr {
    // SAFETY: a plain global.
    unsafe { pg_sys::XactLastRecEnd }
}
