//! etcd: a key that is made if there is none, bound to a lease.

use anyhow::{Context, Result, bail, ensure};
use etcd_client::{
    Compare, CompareOp, EventType, LeaseKeepAliveStream, LeaseKeeper, PutOptions, Txn, TxnOp, WatchOptions,
};
use tokio::runtime::{Builder, Runtime};

use super::Client;

const TTL_SECONDS: i64 = 60;

/// A lock as etcd's own recipes have it.
pub struct Lease {
    runtime: Runtime,
    client: etcd_client::Client,
    lease: Option<i64>,
    keep_alive: Option<(LeaseKeeper, LeaseKeepAliveStream)>,
}

impl Lease {
    /// At an address, HOST:PORT.
    pub fn new(address: &str) -> Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let client = runtime.block_on(etcd_client::Client::connect([address], None))?;
        Ok(Self { runtime, client, lease: None, keep_alive: None })
    }

    /// The lease of the one name this client has or waits for.
    fn lease(&mut self) -> Result<i64> {
        match self.lease {
            Some(lease) => Ok(lease),
            None => {
                let lease = self.runtime.block_on(self.client.lease_grant(TTL_SECONDS, None))?.id();
                self.lease = Some(lease);
                Ok(lease)
            }
        }
    }

    /// None if it is granted, else the revision at which somebody has the name.
    fn put(&mut self, name: &str) -> Result<Option<i64>> {
        let lease = self.lease()?;
        let txn = Txn::new().when([Compare::create_revision(name, CompareOp::Equal, 0)]).and_then([TxnOp::put(
            name,
            "bench",
            Some(PutOptions::new().with_lease(lease)),
        )]);
        let answer = self.runtime.block_on(self.client.txn(txn))?;
        let revision = answer.header().context("an answer without its revision")?.revision();
        Ok((!answer.succeeded()).then_some(revision))
    }

    /// Waits until the name is deleted after a revision.
    fn watch(&mut self, name: &str, revision: i64) -> Result<()> {
        let options = WatchOptions::new().with_start_revision(revision + 1);
        self.runtime.block_on(async {
            let mut watch = self.client.watch(name, Some(options)).await?;
            while let Some(answer) = watch.message().await? {
                if answer.events().iter().any(|event| event.event_type() == EventType::Delete) {
                    return Ok(());
                }
            }
            bail!("the watch has ended")
        })
    }
}

impl Client for Lease {
    fn acquire(&mut self, name: &str) -> Result<()> {
        while let Some(revision) = self.put(name)? {
            self.watch(name, revision)?;
        }
        Ok(())
    }

    fn try_acquire(&mut self, name: &str) -> Result<bool> {
        Ok(self.put(name)?.is_none())
    }

    /// Revoking deletes the key as well, in one step.
    fn release(&mut self, name: &str) -> Result<()> {
        let lease = self.lease.take().with_context(|| format!("{name} is not held"))?;
        self.keep_alive = None;
        self.runtime.block_on(self.client.lease_revoke(lease))?;
        Ok(())
    }

    fn renew(&mut self, name: &str) -> Result<()> {
        let lease = self.lease.with_context(|| format!("{name} is not held"))?;
        if self.keep_alive.is_none() {
            self.keep_alive = Some(self.runtime.block_on(self.client.lease_keep_alive(lease))?);
        }
        let Some((keeper, answers)) = &mut self.keep_alive else { unreachable!("it was just made") };
        let answer = self.runtime.block_on(async {
            keeper.keep_alive().await?;
            answers.message().await
        })?;
        ensure!(answer.is_some_and(|answer| answer.ttl() > 0), "{name} was not held any more");
        Ok(())
    }
}
