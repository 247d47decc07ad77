//! PostgreSQL: native advisory locks, named locks, leases, and what one writes by hand.

use std::error::Error;
use std::thread;
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use postgres::types::{IsNull, ToSql, Type, private::BytesMut, to_sql_checked};
use postgres::{NoTls, Row, Statement};

use super::{Client, System};

const WAIT: Interval = Interval { seconds: 60 };
const TTL: Interval = Interval { seconds: 60 };
/// Before the next try for a lease by hand, in milliseconds: from, to.
const RETRY_MS: (f64, f64) = (5.0, 15.0);

/// SQL's interval, which the client library leaves to others.
#[derive(Debug)]
struct Interval {
    seconds: i64,
}

impl ToSql for Interval {
    fn to_sql(&self, _: &Type, out: &mut BytesMut) -> Result<IsNull, Box<dyn Error + Sync + Send>> {
        out.extend_from_slice(&(self.seconds * 1_000_000).to_be_bytes());
        out.extend_from_slice(&[0; 8]); // days and months
        Ok(IsNull::No)
    }

    fn accepts(ty: &Type) -> bool {
        *ty == Type::INTERVAL
    }

    to_sql_checked!();
}

/// A lock of the session or of a transaction.
pub struct Lock {
    client: postgres::Client,
    lock: Statement,
    /// None: the transaction's end gives it back.
    unlock: Option<Statement>,
}

impl Lock {
    /// A session's locks.
    pub fn session(system: System, address: &str) -> Result<Self> {
        let native_unlock = "SELECT pg_advisory_unlock(hashtextextended($1, 0))";
        let (lock, unlock) = match system {
            System::RoundTrips => ("SELECT $1::text", "SELECT $1::text"),
            System::Named => ("SELECT named_lock($1, $2)", "SELECT named_unlock($1)"),
            System::Polling => ("SELECT polling_lock($1, $2)", native_unlock),
            _ => ("SELECT pg_advisory_lock(hashtextextended($1, 0))", native_unlock),
        };
        let mut client = postgres::Client::connect(address, NoTls)?;
        Ok(Self { lock: client.prepare(lock)?, unlock: Some(client.prepare(unlock)?), client })
    }

    /// A transaction's locks.
    pub fn transaction(system: System, address: &str) -> Result<Self> {
        let lock = match system {
            System::NamedTransaction => "SELECT named_xact_lock($1, $2)",
            System::RoundTripsTransaction => "SELECT $1::text",
            _ => "SELECT pg_advisory_xact_lock(hashtextextended($1, 0))",
        };
        let mut client = postgres::Client::connect(address, NoTls)?;
        Ok(Self { lock: client.prepare(lock)?, unlock: None, client })
    }
}

impl Client for Lock {
    fn acquire(&mut self, name: &str) -> Result<()> {
        if self.unlock.is_none() {
            self.client.batch_execute("BEGIN")?;
        }
        // Native locks have no timeout.
        let arguments: [&(dyn ToSql + Sync); 2] = [&name, &WAIT];
        let row = self.client.query_one(&self.lock, &arguments[..self.lock.params().len()])?;
        ensure!(is_yes(&row), "{name} was not granted in time");
        Ok(())
    }

    fn release(&mut self, name: &str) -> Result<()> {
        match &self.unlock {
            Some(unlock) => {
                let row = self.client.query_one(unlock, &[&name])?;
                ensure!(is_yes(&row), "{name} was not held");
            }
            None => self.client.batch_execute("COMMIT")?,
        }
        Ok(())
    }
}

/// Whether the answer is none of those that say no: pg_advisory_lock() has none, named_unlock() tells how many are left.
fn is_yes(row: &Row) -> bool {
    match *row.columns()[0].type_() {
        Type::BOOL => row.get(0),
        Type::INT4 => row.get::<_, i32>(0) == 0,
        _ => true,
    }
}

/// What a durable statement costs at the least, and one that writes nothing.
pub struct Commit {
    client: postgres::Client,
    commit: Statement,
    nothing: Statement,
}

impl Commit {
    /// A connection.
    pub fn new(address: &str) -> Result<Self> {
        let mut client = postgres::Client::connect(address, NoTls)?;
        let commit = client.prepare("SELECT pg_logical_emit_message(true, 'bench', $1::text)")?;
        Ok(Self { commit, nothing: client.prepare("SELECT $1::text")?, client })
    }
}

impl Client for Commit {
    fn acquire(&mut self, name: &str) -> Result<()> {
        self.renew(name)
    }

    fn try_acquire(&mut self, name: &str) -> Result<bool> {
        self.release(name).map(|()| false)
    }

    fn renew(&mut self, name: &str) -> Result<()> {
        self.client.query_one(&self.commit, &[&name]).map(drop).map_err(Into::into)
    }

    fn release(&mut self, name: &str) -> Result<()> {
        self.client.query_one(&self.nothing, &[&name]).map(drop).map_err(Into::into)
    }
}

/// A lease: the extension's, or a row of `hand_lease`.
pub struct Lease {
    client: postgres::Client,
    acquire: Statement,
    /// None: there is no waiting but by tries.
    wait: Option<Statement>,
    /// What a client that is refused has to know, if it is not `acquire` that tells.
    look: Option<Statement>,
    renew: Statement,
    release: Statement,
    token: i64,
}

const HAND_ACQUIRE: &str = "
INSERT INTO hand_lease AS held (name, token, owner, expires_at)
VALUES ($1, nextval('hand_token'), 'bench', clock_timestamp() + $2::interval)
ON CONFLICT (name) DO UPDATE
SET token = excluded.token, owner = excluded.owner, expires_at = excluded.expires_at
WHERE held.expires_at < clock_timestamp()
RETURNING token";
const HAND_LOOK: &str =
    "SELECT token, owner, expires_at FROM hand_lease WHERE name = $1 AND expires_at >= clock_timestamp()";
const HAND_RENEW: &str = "
UPDATE hand_lease SET expires_at = clock_timestamp() + $3::interval
WHERE name = $1 AND token = $2 AND expires_at >= clock_timestamp()";
const HAND_RELEASE: &str = "DELETE FROM hand_lease WHERE name = $1 AND token = $2";
/// The setting is the transaction's, and read when that commits.
const HAND_RELEASE_LAZILY: &str = "
WITH lazily AS (SELECT set_config('synchronous_commit', 'off', true))
DELETE FROM hand_lease USING lazily WHERE name = $1 AND token = $2";

impl Lease {
    /// Ours, or the one by hand.
    pub fn new(system: System, address: &str) -> Result<Self> {
        let mut client = postgres::Client::connect(address, NoTls)?;
        let by_hand = match system {
            System::Hand => Some(HAND_RELEASE),
            System::HandLazy => Some(HAND_RELEASE_LAZILY),
            _ => None,
        };
        Ok(if let Some(release) = by_hand {
            Self {
                acquire: client.prepare(HAND_ACQUIRE)?,
                wait: None,
                look: Some(client.prepare(HAND_LOOK)?),
                renew: client.prepare(HAND_RENEW)?,
                release: client.prepare(release)?,
                client,
                token: 0,
            }
        } else {
            Self {
                acquire: client.prepare("SELECT (lease_acquire($1, $2, owner => 'bench')).token")?,
                wait: Some(client.prepare("CALL lease_acquire_wait($1, $2)")?),
                look: None,
                renew: client.prepare("SELECT (lease_renew($1, $2, $3)).release_requested")?,
                release: client.prepare("SELECT lease_release($1, $2)")?,
                client,
                token: 0,
            }
        })
    }

    fn take(&mut self, name: &str) -> Result<bool> {
        // By hand a refusal has no row, of ours it has no token.
        let row = self.client.query_opt(&self.acquire, &[&name, &TTL])?;
        let Some(token) = row.and_then(|row| row.get(0)) else { return Ok(false) };
        self.token = token;
        Ok(true)
    }
}

impl Client for Lease {
    fn acquire(&mut self, name: &str) -> Result<()> {
        while !self.take(name)? {
            if let Some(wait) = &self.wait {
                self.token = self.client.query_one(wait, &[&name, &TTL])?.get(0);
                break;
            }
            let (least, most) = RETRY_MS;
            thread::sleep(Duration::from_secs_f64((least + (most - least) * fastrand::f64()) / 1e3));
        }
        Ok(())
    }

    fn try_acquire(&mut self, name: &str) -> Result<bool> {
        match &self.look {
            Some(look) if self.client.query_opt(look, &[&name])?.is_some() => Ok(false),
            _ => self.take(name),
        }
    }

    fn renew(&mut self, name: &str) -> Result<()> {
        if self.client.execute(&self.renew, &[&name, &self.token, &TTL])? != 1 {
            bail!("{name} was not held any more");
        }
        Ok(())
    }

    fn release(&mut self, name: &str) -> Result<()> {
        let arguments: [&(dyn ToSql + Sync); 2] = [&name, &self.token];
        let released = if self.release.columns().is_empty() {
            self.client.execute(&self.release, &arguments)? == 1
        } else {
            self.client.query_one(&self.release, &arguments)?.get(0)
        };
        ensure!(released, "{name} was not held any more");
        Ok(())
    }
}
