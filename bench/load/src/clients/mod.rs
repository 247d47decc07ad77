//! The systems, each behind the same few calls.

use anyhow::{Result, bail};
use serde::Deserialize;

mod etcd;
mod mysql;
mod postgres;
mod redis;

/// A connection that takes one name at a time.
pub trait Client {
    /// Takes a name, waiting until it can.
    fn acquire(&mut self, name: &str) -> Result<()>;

    /// Gives it back.
    fn release(&mut self, name: &str) -> Result<()>;

    /// One try to take a name; false if somebody has it.
    fn try_acquire(&mut self, _name: &str) -> Result<bool> {
        bail!("this one is not measured by tries")
    }

    /// Gives the lease that it has its whole time to live again.
    fn renew(&mut self, _name: &str) -> Result<()> {
        bail!("this one is not renewed")
    }
}

/// What is measured.
#[derive(Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum System {
    /// pg_advisory_lock() on the hash of a name.
    Native,
    /// named_lock().
    Named,
    /// pg_try_advisory_lock() in a loop with a sleep.
    Polling,
    /// Two statements that do nothing: what their round trips cost.
    RoundTrips,
    /// Native, held by a transaction.
    NativeTransaction,
    /// named_xact_lock().
    NamedTransaction,
    /// A transaction that does nothing.
    RoundTripsTransaction,
    /// lease_acquire().
    Lease,
    /// A table of leases, by hand.
    Hand,
    /// The same; the release does not wait for the disk.
    HandLazy,
    /// Statements that do nothing; all but the one that releases commit a record of a few bytes.
    RoundTripsDurable,
    /// GET_LOCK().
    Mariadb,
    /// SET NX PX.
    Redis,
    /// A key bound to a lease.
    Etcd,
}

/// A connection to such a system, its statements prepared.
pub fn connect(system: System, address: &str) -> Result<Box<dyn Client>> {
    Ok(match system {
        System::Native | System::Named | System::Polling | System::RoundTrips => {
            Box::new(postgres::Lock::session(system, address)?)
        }
        System::NativeTransaction | System::NamedTransaction | System::RoundTripsTransaction => {
            Box::new(postgres::Lock::transaction(system, address)?)
        }
        System::Lease | System::Hand | System::HandLazy => Box::new(postgres::Lease::new(system, address)?),
        System::RoundTripsDurable => Box::new(postgres::Commit::new(address)?),
        System::Mariadb => Box::new(mysql::Lock::new(address)?),
        System::Redis => Box::new(redis::Lease::new(address)?),
        System::Etcd => Box::new(etcd::Lease::new(address)?),
    })
}
