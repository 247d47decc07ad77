//! The rules: what names, keys, modes, waits and holds mean. Plain Rust, no server, tested without one.

pub mod error;
pub mod graph;
pub mod holds;
pub mod interval;
pub mod key;
pub mod mode;
pub mod name;
