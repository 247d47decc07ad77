//! Every test that needs a server.
//!
//! The levels of tests, how each is run and when to add one: CONTRIBUTING.md. What they are made of: [`support`].
//!
//! In-server tests are `#[pg_test]` functions inside a `#[pg_schema] mod tests`: their body is compiled into the library
//! and runs in one backend, and is rolled back. All others are clients: what they do is committed, and they run side by
//! side on one server ([`support::Server::shared`]), so each uses names of its own ([`support::unique`]).
//!
//! A test named `c12_…` is a case from the field of that number, or a neighbour of it.
//!
//! This module is compiled twice: with `cfg(test)` for the test program, and with the feature `pg_test` alone for the
//! library that the test server loads. There the clients are missing, so all that names them is under `cfg(test)`.
#![allow(clippy::result_large_err, reason = "an error that a test looks at is carried whole")]

#[cfg(test)]
mod bad_input;
#[cfg(test)]
mod clock;
#[cfg(test)]
mod crash;
#[cfg(test)]
mod docs;
#[cfg(test)]
mod domains;
#[cfg(test)]
mod field;
#[cfg(test)]
mod fuzz;
#[cfg(test)]
mod hold_limit;
mod in_server;
#[cfg(test)]
mod install;
#[cfg(test)]
mod isolation;
#[cfg(test)]
mod leases;
#[cfg(test)]
mod limits;
#[cfg(test)]
mod monitoring;
#[cfg(test)]
mod names;
#[cfg(test)]
mod pools;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod rights;
#[cfg(test)]
mod semaphores;
#[cfg(test)]
mod sets;
#[cfg(test)]
mod size;
#[cfg(test)]
mod standby;
#[cfg(test)]
mod statistics;
#[cfg(test)]
mod support;
#[cfg(test)]
mod tokens;
#[cfg(test)]
mod torture;
#[cfg(test)]
mod transactions;
#[cfg(test)]
mod trees;
#[cfg(test)]
mod upgrade;
#[cfg(test)]
mod versions;
#[cfg(test)]
mod views;
#[cfg(test)]
mod waiting;
#[cfg(test)]
mod without_snapshot;

/// pgrx calls this in the test program before each `#[pg_test]`.
#[cfg(test)]
pub fn setup(_options: Vec<&str>) {}

/// The settings of the test server, used once, when it starts.
#[cfg(test)]
#[must_use]
pub fn postgresql_conf_options() -> Vec<&'static str> {
    vec![
        // Room for many tests at a time, some with dozens of sessions.
        "max_connections = 1000",
        "max_prepared_transactions = 40",
        "fsync = off",
        "timezone = 'UTC'",
    ]
}

/// In-server tests.
#[cfg(feature = "pg_test")]
#[pgrx::pg_schema]
mod tests {
    use pgrx::prelude::*;

    /// Does nothing: running it starts the test server and installs the extension there.
    #[pg_test]
    fn boot() {}
}
