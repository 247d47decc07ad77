//! Waiting for a lease or a slot of a semaphore: in order of arrival, and with no deadlock detection.
//!
//! The queue is a tag in the lock manager, which keeps the order. Who holds it is the first, and sleeps on its process
//! latch until what it waits for may be free: somebody wakes it, or a second has gone by. It gives the tag back when the
//! call is over; an error does by the (sub)transaction that it ends.

use super::deadline::Deadline;
use super::latch;
use super::lock_manager::{self, Outcome};
use super::report::Problem;
use super::session;
use super::snapshot;
use super::statistics;
use crate::rules::holds::Scope;
use crate::rules::interval::Wait;
use crate::rules::key::Tag;
use crate::rules::mode::Mode;
use crate::rules::name::domain_of;

/// The first in a queue looks after so many microseconds although nobody has waked it: 1 s.
pub const LOOK_AGAIN: i64 = 1_000_000;

/// A queue, and how to wait in it.
#[derive(Debug)]
pub struct Queue<'a> {
    /// Its tag.
    pub tag: Tag,
    /// What others are told that this session waits for.
    pub name: &'a [u8],
    /// The same for the CONTEXT of errors.
    pub description: String,
    /// Whether to go ahead of all others, who would wait for this session.
    pub is_passed: bool,
}

/// Tries in passing: nothing where somebody waits or is just being served. Several may try at once.
///
/// # Errors
/// Those of `look`, the server's.
pub fn pass<R>(tag: Tag, look: impl FnOnce() -> Result<Option<R>, Problem>) -> Result<Option<R>, Problem> {
    if lock_manager::try_acquire(tag, Mode::Share, Scope::Transaction)? == Outcome::NotAvailable {
        return Ok(None);
    }
    let result = look()?;
    lock_manager::release(tag, Mode::Share, Scope::Transaction);
    Ok(result)
}

/// Queues, and as the first in the queue looks again and again; None when the deadline has passed. `look` gives the
/// result, or in how many microseconds to look again at the latest.
///
/// # Errors
/// Those of `look`, the server's.
pub fn wait<R>(
    queue: &Queue<'_>,
    deadline: Deadline,
    look: impl FnMut() -> Result<Result<R, i64>, Problem>,
) -> Result<Option<R>, Problem> {
    let Some(left) = deadline.left() else { return Ok(None) };
    let counted = statistics::Wait::begin(domain_of(queue.name));
    let result = wait_in_turn(queue, deadline, left, look);
    counted.end(result.as_ref().map(Option::is_some));
    result
}

fn wait_in_turn<R>(
    queue: &Queue<'_>,
    deadline: Deadline,
    left: Wait,
    look: impl FnMut() -> Result<Result<R, i64>, Problem>,
) -> Result<Option<R>, Problem> {
    let waiting = Waiting::begin(queue, deadline);
    if queue.is_passed {
        return waiting.lead(deadline, look);
    }
    snapshot::give_up_catalog_snapshot();
    let outcome = lock_manager::wait(queue.tag, Mode::Exclusive, Scope::Transaction, left, &queue.description)?;
    if outcome == Outcome::NotAvailable {
        return Ok(None);
    }
    let result = waiting.lead(deadline, look)?;
    lock_manager::release(queue.tag, Mode::Exclusive, Scope::Transaction);
    Ok(result)
}

/// As long as it lives, others are told that this session waits.
struct Waiting;

impl Waiting {
    fn begin(queue: &Queue<'_>, deadline: Deadline) -> Self {
        session::begin_queue_wait(queue.tag, queue.name, deadline.at());
        Self
    }

    /// As the first in the queue.
    fn lead<R>(
        &self,
        deadline: Deadline,
        mut look: impl FnMut() -> Result<Result<R, i64>, Problem>,
    ) -> Result<Option<R>, Problem> {
        session::lead_queue_wait();
        loop {
            let look_again = match look()? {
                Ok(result) => return Ok(Some(result)),
                Err(micros) => micros,
            };
            let Some(left) = deadline.micros_left() else { return Ok(None) };
            snapshot::give_up_catalog_snapshot();
            latch::sleep(left.min(look_again).min(LOOK_AGAIN))?;
        }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        session::end_queue_wait();
    }
}
