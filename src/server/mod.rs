//! The server: one small wrapper for each of its facilities that we use. The only place with `unsafe` in it.
//!
//! Two rules hold here. Nothing with a destructor is alive across a call that may raise an ERROR outside of
//! [`try_block`]; and no borrow of the session's state is held while the lock manager may wait, because a terminated
//! session runs its exit callbacks from there.
#![allow(unsafe_code)]

pub mod activity;
pub mod arguments;
pub mod callbacks;
pub mod clock;
pub mod databases;
pub mod deadline;
pub mod domains;
pub mod encoding;
pub mod ffi;
pub mod hold_limit;
pub mod latch;
pub mod lease;
pub mod lock_manager;
pub mod lock_table;
pub mod process_local;
pub mod queue;
pub mod registry;
pub mod report;
pub mod session;
pub mod settings;
pub mod snapshot;
pub mod statistics;
pub mod tables;
pub mod try_block;
pub mod version;
pub mod who;
