//! Waiting without a snapshot, so that CREATE INDEX CONCURRENTLY and VACUUM need not wait for the waiter.

use super::ffi;
use super::report::Problem;
use super::try_block::{ServerError, try_block};
use crate::rules::error::Error;
use pgrx::pg_sys;

/// Runs `wait` with no snapshot held by this session, in a procedure CALLed outside of a transaction block. `lock` is what
/// errors call what is waited for.
///
/// # Errors
/// [`Error::NotSnapshotFree`] where that cannot be; whatever `wait` fails with.
pub fn without_snapshot<R>(
    fcinfo: pg_sys::FunctionCallInfo,
    lock: impl FnOnce() -> String,
    wait: impl FnOnce() -> Result<R, Problem>,
) -> Result<R, Problem> {
    give_up_snapshots(fcinfo).map_err(|why| Error::NotSnapshotFree { lock: lock(), why })?;
    let result = wait();
    if !matches!(result, Err(Problem::Server(_))) {
        // What follows in the statement, and an error's DETAIL, need one again.
        // SAFETY: a portal is active: the one that runs the CALL.
        unsafe { pg_sys::EnsurePortalSnapshotExists() };
    }
    result
}

/// Gives up the snapshots that the CALL itself has brought; fails where others remain.
fn give_up_snapshots(fcinfo: pg_sys::FunctionCallInfo) -> Result<(), &'static str> {
    // SAFETY: the server's call information and globals; the calls are those of a COMMIT in a procedure, without one.
    unsafe {
        let context = (*fcinfo).context.cast::<pg_sys::CallContext>();
        if context.is_null() || (*context).type_ != pg_sys::NodeTag::T_CallContext || (*context).atomic {
            return Err("in a transaction block or a function");
        }
        if pg_sys::MyXactFlags & ffi::XACT_FLAGS_PIPELINING != 0 {
            return Err("in a pipeline after other statements");
        }
        if pg_sys::GetTopTransactionIdIfAny() != pg_sys::InvalidTransactionId {
            return Err("in a transaction that has written");
        }
        if let Err(error) = try_block(|| ffi::ForgetPortalSnapshots()) {
            error.put_away();
            return Err("while the calling statement holds one");
        }
        // A CALL with an INOUT argument has registered one in its portal too.
        let portal = pg_sys::ActivePortal;
        if !portal.is_null() && !(*portal).holdSnapshot.is_null() {
            if !(*portal).resowner.is_null() {
                pg_sys::UnregisterSnapshotFromOwner((*portal).holdSnapshot, (*portal).resowner);
            }
            (*portal).holdSnapshot = std::ptr::null_mut();
        }
        pg_sys::InvalidateCatalogSnapshot();
        if (*pg_sys::MyProc).xmin != pg_sys::InvalidTransactionId {
            pg_sys::EnsurePortalSnapshotExists();
            return Err("while a cursor or a repeatable read transaction holds one");
        }
    }
    Ok(())
}

/// Lets go of the snapshot that looking at the catalogue has left, if no other is held: none is held while waiting then.
pub fn give_up_catalog_snapshot() {
    // SAFETY: one server call, which raises no error.
    unsafe { pg_sys::InvalidateCatalogSnapshotConditionally() }
}

/// As long as it lives, no row that is found by the newest snapshots can be removed and its place be used for another. A
/// statement's own snapshot sees to that too; where it has been given up, this takes one.
pub struct RowsKept(Option<pg_sys::Snapshot>);

impl RowsKept {
    /// From now on.
    ///
    /// # Errors
    /// The server's.
    pub fn new() -> Result<Self, ServerError> {
        // SAFETY: server calls.
        unsafe {
            if pg_sys::ActiveSnapshotSet() {
                return Ok(Self(None));
            }
            try_block(|| ffi::RegisterSnapshot(ffi::GetLatestSnapshot())).map(|snapshot| Self(Some(snapshot)))
        }
    }
}

impl Drop for RowsKept {
    fn drop(&mut self) {
        if let Some(snapshot) = self.0 {
            // SAFETY: registered above, with the resource owner that is current; raises no error.
            unsafe { ffi::UnregisterSnapshot(snapshot) }
        }
    }
}
