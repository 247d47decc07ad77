//! One deadline over several waits.

use super::ffi;
use super::lock_manager;
use crate::rules::interval::Wait;
use std::time::{Duration, Instant};

/// When a wait ends by itself.
#[derive(Clone, Copy, Debug)]
pub struct Deadline(Option<Instant>);

impl Deadline {
    /// Of a wait that begins now.
    pub fn of(wait: Wait) -> Self {
        let millis = wait.millis(lock_manager::lock_timeout());
        Self((millis > 0).then(|| Instant::now() + Duration::from_millis(millis as u64)))
    }

    /// What is left, in microseconds: i64::MAX where it never passes, None where it has.
    pub fn micros_left(self) -> Option<i64> {
        let Some(deadline) = self.0 else { return Some(i64::MAX) };
        let left = deadline.saturating_duration_since(Instant::now()).as_micros() as i64;
        (left > 0).then_some(left)
    }

    /// What is left as a wait for a lock; None where it has passed.
    pub fn left(self) -> Option<Wait> {
        let left = self.micros_left()?;
        Some(if self.0.is_none() { Wait::Forever } else { Wait::Millis((left as u64).div_ceil(1_000) as i32) })
    }

    /// When it passes by the server's clock, in microseconds; None where it never does, or has.
    pub fn at(self) -> Option<i64> {
        self.0.and_then(|_| Some(ffi::now() + self.micros_left()?))
    }
}
