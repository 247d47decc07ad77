//! State of this process. PostgreSQL runs all of a session's SQL in one thread.

use std::cell::{Cell, RefCell};

/// A value that every process has its own of. Cheaper to reach than a thread's.
pub struct ProcessLocal<T>(T);

// SAFETY: a process of the server has one thread that runs our code.
unsafe impl<T> Sync for ProcessLocal<T> {}

impl<T> ProcessLocal<Cell<T>> {
    /// With a first value.
    pub const fn cell(value: T) -> Self {
        Self(Cell::new(value))
    }
}

impl<T> ProcessLocal<RefCell<T>> {
    /// With a first value.
    pub const fn ref_cell(value: T) -> Self {
        Self(RefCell::new(value))
    }
}

impl<T> std::ops::Deref for ProcessLocal<T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.0
    }
}
