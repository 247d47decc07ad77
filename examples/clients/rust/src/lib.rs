//! Named locks and leases from tokio-postgres: to be lifted into a project as it is.
//!
//! * [`with_lock`]: one of many processes at a time, for as long as its connection lives: short work, migrations
//! * [`xact_lock`]: the same, to the end of a transaction: the check and the writes that hang on it
//! * [`with_lease`]: work that outlives a connection, or goes through a transaction pooler; its writes by
//!   [`Lease::transaction`]
//!
//! What a caller should be ready for are the variants of [`Error`] but the last, which is all else: of that 40P01 (deadlock) may be
//! tried again; 42501 (not allowed), 22023 (an argument), 0A000 (a session lock behind a transaction pooler) and 25006
//! (a standby) are for people.
//!
//! Durations reach the server as text that it casts: `$2::text::interval`, as of `$2::interval` tokio-postgres would want
//! an interval of its own, for which it has no type. `None` stays NULL. A token is a bigint, and an `i64`.

use std::fmt;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until, timeout, timeout_at};
use tokio_postgres::{Client, Config, NoTls, Transaction};

/// What can come of asking for a lock or a lease.
#[derive(Debug)]
pub enum Error {
    /// Somebody else has the lock; `detail` says who.
    LockTimeout { name: String, detail: Option<String> },
    /// The connection is gone, and the lock with it, before it was given back.
    LockLost { name: String },
    /// Somebody else has the lease, and when it may be free.
    LeaseTaken { name: String, holder: Option<String>, retry_after: Duration },
    /// The lease has expired, was broken or is another's: write nothing more. No SQLSTATE if only our clock says so.
    LeaseLost { name: String, sqlstate: Option<String> },
    /// Any other error of the server or the connection.
    Database(tokio_postgres::Error),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::LockTimeout { name, .. } => write!(f, "lock {name} is not to be had"),
            Self::LockLost { name } => write!(f, "lock {name} is lost"),
            Self::LeaseTaken { name, holder, .. } => {
                write!(f, "lease {name} is held by {}", holder.as_deref().unwrap_or("somebody else"))
            }
            Self::LeaseLost { name, .. } => write!(f, "lease {name} is lost"),
            Self::Database(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Database(error) => Some(error),
            _ => None,
        }
    }
}

impl From<tokio_postgres::Error> for Error {
    fn from(error: tokio_postgres::Error) -> Self {
        Self::Database(error)
    }
}

/// Runs work while holding a lock.
///
/// A timeout of zero is one try; `None` waits as the server would. To end the waiting, drop the future: the statement is
/// cancelled, and the connection closed.
///
/// The lock is the connection's, which is opened for it (with a pool: take the client out of it) and given to the work. If the
/// connection is lost, so is the lock: the work is dropped where it awaits.
pub async fn with_lock<T, E: From<Error>>(
    config: &Config,
    name: &str,
    timeout: Option<Duration>,
    work: impl AsyncFnOnce(&mut Client) -> Result<T, E>,
) -> Result<T, E> {
    let mut session = Session::open(config).await?;
    let (client, connection) = session.parts();
    client
        .execute("SELECT named_lock_strict($1, $2::text::interval)", &[&name, &timeout.map(interval)])
        .await
        .map_err(|error| match error.as_db_error() {
            Some(answer) if answer.code().code() == "55P03" => {
                Error::LockTimeout { name: name.into(), detail: answer.detail().map(str::to_owned) }
            }
            _ => error.into(),
        })?;
    let lost = || Error::LockLost { name: name.into() };
    let result = tokio::select! {
        result = work(client) => result,
        _ = connection => return Err(lost().into()),
    };
    let unlocked = client.execute("SELECT named_unlock($1)", &[&name]).await;
    if result.is_ok() && unlocked.is_err() {
        return Err(lost().into());
    }
    result
}

/// Takes a lock to the end of the transaction; false if the timeout passed.
///
/// After false the transaction is alive and may do something else. Only true is to be trusted: check it.
pub async fn xact_lock(
    transaction: &Transaction<'_>,
    name: &str,
    timeout: Option<Duration>,
) -> Result<bool, tokio_postgres::Error> {
    let query = "SELECT named_xact_lock($1, $2::text::interval)";
    Ok(transaction.query_one(query, &[&name, &timeout.map(interval)]).await?.get(0))
}

/// Runs work while holding a lease.
///
/// `ttl` is how long others are kept out after this process was last heard of, `timeout` how long to wait for the lease
/// (zero: one try, `None`: as long as it takes).
///
/// It is renewed in the background at a third of the TTL, so that one renewal may fail. When it is lost, the work is dropped
/// where it awaits. What one that does not await still writes by [`Lease::transaction`] is refused. Nothing here stays with
/// one connection. If the future is dropped, the lease ends with its TTL.
pub async fn with_lease<T, E: From<Error>>(
    config: &Config,
    name: &str,
    ttl: Duration,
    timeout: Option<Duration>,
    work: impl AsyncFnOnce(&Lease) -> Result<T, E>,
) -> Result<T, E> {
    let mut sent = Instant::now(); // the server counts from a little later on
    let lease = Lease::acquire(config, name, ttl, timeout).await?;
    if sent.elapsed() > ttl / 3 {
        // It had to wait, and part of the TTL, as we count it, is over: count anew.
        sent = Instant::now();
        lease.renew(&mut None).await?;
    }
    let mut keeper = Keeper(tokio::spawn(keep(lease.clone(), sent)));
    let result = tokio::select! {
        result = work(&lease) => result,
        lost = &mut keeper.0 => Err(lost.unwrap_or_else(|_| lease.lost(None)).into()),
    };
    drop(keeper);
    lease.release().await;
    result
}

/// A lease that is held, as far as is known here.
#[derive(Clone)]
pub struct Lease {
    pub name: String,
    pub token: i64,
    ttl: Duration,
    config: Config,
}

impl Lease {
    async fn acquire(config: &Config, name: &str, ttl: Duration, timeout: Option<Duration>) -> Result<Self, Error> {
        let query = "SELECT acquired, token, holder, extract(epoch FROM retry_after)::float8
              FROM lease_acquire($1, $2::text::interval, $3::text::interval)";
        let mut session = Session::open(config).await?;
        let (client, _) = session.parts();
        let row = client.query_one(query, &[&name, &interval(ttl), &timeout.map(interval)]).await?;
        if row.get(0) {
            return Ok(Self { name: name.into(), token: row.get(1), ttl, config: config.clone() });
        }
        // The token is NULL then.
        let retry_after = Duration::from_secs_f64(row.get(3));
        Err(Error::LeaseTaken { name: name.into(), holder: row.get(2), retry_after })
    }

    /// Runs work in a transaction that commits only while the lease is held.
    pub async fn transaction<T, E: From<Error>>(
        &self,
        work: impl AsyncFnOnce(&Transaction<'_>) -> Result<T, E>,
    ) -> Result<T, E> {
        let mut session = Session::open(&self.config).await?;
        let (client, _) = session.parts();
        let transaction = client.transaction().await.map_err(Error::from)?;
        transaction
            .execute("SELECT lease_guard($1, $2)", &[&self.name, &self.token])
            .await
            .map_err(|error| self.error(error))?;
        let result = work(&transaction).await?; // an error rolls it back
        transaction.commit().await.map_err(Error::from)?;
        Ok(result)
    }

    async fn renew(&self, session: &mut Option<Session>) -> Result<(), Error> {
        let session = match session {
            Some(session) => session,
            None => session.insert(Session::open(&self.config).await?),
        };
        let (client, _) = session.parts();
        let renewal = client.execute("SELECT lease_renew($1, $2)", &[&self.name, &self.token]).await;
        renewal.map(drop).map_err(|error| self.error(error))
    }

    /// If this fails it expires by itself.
    async fn release(&self) {
        if let Ok(mut session) = Session::open(&self.config).await {
            let (client, _) = session.parts();
            let _ = client.execute("SELECT lease_release($1, $2)", &[&self.name, &self.token]).await;
        }
    }

    fn error(&self, error: tokio_postgres::Error) -> Error {
        match error.code().map(|state| state.code()) {
            Some(state @ ("55000" | "55006")) => self.lost(Some(state)),
            _ => error.into(),
        }
    }

    fn lost(&self, sqlstate: Option<&str>) -> Error {
        Error::LeaseLost { name: self.name.clone(), sqlstate: sqlstate.map(str::to_owned) }
    }
}

/// Renews the lease until it is lost.
async fn keep(lease: Lease, mut sent: Instant) -> Error {
    let mut session = None;
    let mut next = sent + lease.ttl / 3;
    loop {
        sleep_until(next).await;
        let now = Instant::now();
        // A renewal that hangs ends at the deadline too.
        match timeout_at(sent + lease.ttl, lease.renew(&mut session)).await {
            Ok(Ok(())) => {
                sent = now;
                next = now + lease.ttl / 3;
            }
            Ok(Err(lost @ Error::LeaseLost { .. })) => return lost,
            Ok(Err(_)) if now < sent + lease.ttl => {
                // A connection lost, a server starting: the TTL is not over yet.
                session = None;
                next = now + lease.ttl / 10;
            }
            _ => return lease.lost(None),
        }
    }
}

/// The task that renews, which ends with this.
struct Keeper(JoinHandle<Error>);

impl Drop for Keeper {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A connection. When it is dropped, the statement under way is cancelled: the server looks for its client only when a wait is over.
struct Session {
    // Always there, until it is dropped.
    parts: Option<(Client, JoinHandle<Result<(), tokio_postgres::Error>>)>,
}

impl Session {
    async fn open(config: &Config) -> Result<Self, Error> {
        let (client, connection) = config.connect(NoTls).await?;
        Ok(Self { parts: Some((client, tokio::spawn(connection))) })
    }

    /// The client, and what ends with the connection.
    fn parts(&mut self) -> (&mut Client, &mut JoinHandle<Result<(), tokio_postgres::Error>>) {
        let (client, connection) = self.parts.as_mut().expect("dropped");
        (client, connection)
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let Some((client, mut connection)) = self.parts.take() else { return };
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        let cancel = client.cancel_token();
        drop(client); // the connection ends when its statement is over
        runtime.spawn(async move {
            // A cancel may come before the statement has begun: so it is sent again.
            while timeout(Duration::from_millis(50), &mut connection).await.is_err() {
                let _ = cancel.cancel_query(NoTls).await;
            }
        });
    }
}

fn interval(duration: Duration) -> String {
    format!("{} milliseconds", duration.as_millis())
}
