//! Drawing fencing tokens from their sequence, so that none comes twice whatever happens to the server.

use crate::rules::holds::Scope;
use crate::rules::interval::Wait;
use crate::rules::key::Tag;
use crate::rules::mode::Mode;
use crate::rules::token::{self, Stock};
use crate::server::ffi;
use crate::server::lock_manager::{self, Outcome};
use crate::server::process_local::ProcessLocal;
use crate::server::report::Problem;
use crate::server::session;
use crate::server::tables::Tables;
use crate::server::try_block::{ServerError, try_block};
use pgrx::pg_sys;
use std::cell::Cell;

/// The token sequence that this process has seen to be on the server's timeline. A server that writes stays on its
/// timeline as long as it runs.
static ON_TIMELINE: ProcessLocal<Cell<pg_sys::Oid>> = ProcessLocal::cell(pg_sys::InvalidOid);

/// A token higher than any that was ever handed out, safe on disk as used.
///
/// A draw from the sequence costs a flush of the WAL that whoever draws meanwhile would wait for too. So one draw is for
/// many tokens, kept in shared memory; and the next is made while half of them are left.
///
/// # Errors
/// The server's.
pub fn draw(tables: &Tables) -> Result<i64, Problem> {
    // Before the draw: whoever records the timeline has raised the sequence before.
    if is_on_timeline(tables)?
        && let Some((token, is_low)) = take(tables)?
    {
        if is_low {
            restock(tables)?;
        }
        return Ok(token);
    }
    draw_first(tables)
}

fn take(tables: &Tables) -> Result<Option<(i64, bool)>, Problem> {
    let sequence = read_sequence(tables.token)?.last;
    Ok(session::with_tokens(tables.token, |stock| stock.take(sequence, ffi::now())).flatten())
}

/// Where there is nothing in stock, or on another timeline.
#[cold]
fn draw_first(tables: &Tables) -> Result<i64, Problem> {
    loop {
        lock_manager::check_interrupts()?;
        let gate = Gate::enter()?;
        // Somebody may have come before.
        let in_stock = if is_on_timeline(tables)? { take(tables)? } else { None };
        if let Some((token, _)) = in_stock {
            gate.leave();
            return Ok(token);
        }
        let (drawn, is_in_stock) = draw_many(tables)?;
        gate.leave();
        if !is_in_stock {
            return Ok(drawn); // no memory for a stock
        }
    }
}

#[cold]
fn restock(tables: &Tables) -> Result<(), Problem> {
    let gate = Gate::enter()?;
    draw_many(tables)?;
    gate.leave();
    Ok(())
}

/// The right to move the sequence.
struct Gate(Tag);

impl Gate {
    fn enter() -> Result<Self, Problem> {
        let tag = Tag::token_floor(ffi::my_database());
        if lock_manager::try_acquire(tag, Mode::Exclusive, Scope::Transaction)? == Outcome::NotAvailable {
            // Whoever has it waits for nobody.
            lock_manager::wait(
                tag,
                Mode::Exclusive,
                Scope::Transaction,
                Wait::Forever,
                "the fencing tokens' sequence",
            )?;
        }
        Ok(Self(tag))
    }

    /// After an error, the end of the transaction sees to it.
    fn leave(self) {
        lock_manager::release(self.0, Mode::Exclusive, Scope::Transaction);
    }
}

/// With the gate: draws from the sequence, which is raised where it has to be. What was drawn goes into the stock, if there
/// is memory for one.
fn draw_many(tables: &Tables) -> Result<(i64, bool), Problem> {
    let sequence = read_sequence(tables.token)?.last;
    session::with_tokens(tables.token, |stock| stock.check(sequence));
    let mut drawn = next_value(tables)?;
    let (stored, current) = (read_sequence(tables.timeline)?.last, i64::from(ffi::timeline()));
    let wall = ffi::now();
    let (floor, is_behind) =
        session::with_tokens(tables.token, |stock| (stock.floor(), stock.lags(wall))).unwrap_or_default();
    if stored != current || is_behind || token::lags(drawn, wall) || drawn < floor {
        // In this order: if the server goes down in between, it is done once more.
        set_sequence(tables.token, token::raised(drawn, stored, current, wall).max(floor))?;
        if stored != current {
            set_sequence(tables.timeline, current)?;
        }
        drawn = next_value(tables)?;
        session::with_tokens(tables.token, Stock::clear);
    }
    // Those in stock may be handed out while this draw is made safe.
    session::with_tokens(tables.token, |stock| stock.note(drawn));
    make_safe(tables)?;
    let added = session::with_tokens(tables.token, |stock| stock.add(drawn));
    Ok((drawn, added.is_some()))
}

fn is_on_timeline(tables: &Tables) -> Result<bool, Problem> {
    if ON_TIMELINE.get() != tables.token {
        if read_sequence(tables.timeline)?.last != i64::from(ffi::timeline()) {
            return Ok(false);
        }
        ON_TIMELINE.set(tables.token);
    }
    Ok(true)
}

fn next_value(tables: &Tables) -> Result<i64, ServerError> {
    let sequence = tables.token;
    // SAFETY: one server call with plain arguments.
    unsafe { try_block(|| ffi::nextval_internal(sequence, false)) }
}

/// Makes sure that a draw is on disk. The record of another session that has drawn ahead may not be, and is not flushed
/// with ours; the sequence's page knows the last record.
fn make_safe(tables: &Tables) -> Result<(), Problem> {
    let page = read_sequence(tables.token)?.page;
    // SAFETY: one server call with a position that exists.
    unsafe { try_block(|| ffi::XLogFlush(page)) }?;
    Ok(())
}

/// A sequence's state.
#[derive(Clone, Copy)]
struct State {
    /// The value drawn or set last; 0 if none was.
    last: i64,
    /// Up to where the WAL has to be on disk for that to last.
    page: pg_sys::XLogRecPtr,
}

/// `commands/sequence.h`: the one row of a sequence.
#[repr(C)]
struct SequenceRow {
    last_value: i64,
    log_count: i64,
    is_called: bool,
}

const BUFFER_LOCK_SHARE: i32 = 1;
const FIRST_BLOCK: pg_sys::BlockNumber = 0;

fn read_sequence(sequence: pg_sys::Oid) -> Result<State, ServerError> {
    // SAFETY: a sequence has one page with one row on it, which is looked at while the page is locked.
    unsafe {
        try_block(|| {
            let relation = ffi::relation_open(sequence, pg_sys::AccessShareLock as i32);
            let buffer = ffi::ReadBuffer(relation, FIRST_BLOCK);
            ffi::LockBuffer(buffer, BUFFER_LOCK_SHARE);
            let page = pg_sys::BufferBlocks.add((buffer as usize - 1) * pg_sys::BLCKSZ as usize).cast_const();
            let item = (*page.cast::<pg_sys::PageHeaderData>()).pd_linp.as_ptr();
            let tuple = page.add((*item).lp_off() as usize).cast::<pg_sys::HeapTupleHeaderData>();
            let row = tuple.cast::<u8>().add((*tuple).t_hoff as usize).cast::<SequenceRow>();
            let last = if (*row).is_called { (*row).last_value } else { 0 };
            let page = ffi::BufferGetLSNAtomic(buffer);
            ffi::UnlockReleaseBuffer(buffer);
            ffi::relation_close(relation, pg_sys::AccessShareLock as i32);
            State { last, page }
        })
    }
}

/// `setval()`, as the sequence's owner.
fn set_sequence(sequence: pg_sys::Oid, value: i64) -> Result<(), ServerError> {
    // SAFETY: SQL's own function with its arguments; the role is as before also after an error.
    unsafe {
        let (mut user, mut context) = (pg_sys::InvalidOid, 0);
        ffi::GetUserIdAndSecContext(&mut user, &mut context);
        let result = try_block(|| {
            let relation = ffi::relation_open(sequence, pg_sys::AccessShareLock as i32);
            let owner = (*(*relation).rd_rel).relowner;
            ffi::relation_close(relation, pg_sys::AccessShareLock as i32);
            ffi::SetUserIdAndSecContext(owner, context | pg_sys::SECURITY_LOCAL_USERID_CHANGE as i32);
            ffi::OidFunctionCall2Coll(
                pg_sys::F_SETVAL_REGCLASS_INT8.into(),
                pg_sys::InvalidOid,
                pg_sys::Datum::from(sequence),
                pg_sys::Datum::from(value),
            );
        });
        ffi::SetUserIdAndSecContext(user, context);
        result
    }
}
