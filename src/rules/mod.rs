//! The rules: what names, keys, modes, waits, holds, leases and tokens mean. Plain Rust, no server, tested without one.

pub mod domain;
pub mod error;
pub mod graph;
pub mod holds;
pub mod interval;
pub mod key;
pub mod lease;
pub mod mode;
pub mod name;
pub mod payload;
pub mod statistics;
pub mod token;
pub mod tree;
pub mod version;
