//! MariaDB: GET_LOCK() and RELEASE_LOCK().

use anyhow::{Result, ensure};
use mysql::prelude::Queryable;
use mysql::{Conn, Statement};

use super::Client;

const WAIT_SECONDS: u32 = 60;

/// A session's locks.
pub struct Lock {
    conn: Conn,
    lock: Statement,
    unlock: Statement,
}

impl Lock {
    /// At a URL.
    pub fn new(address: &str) -> Result<Self> {
        let mut conn = Conn::new(address)?;
        let lock = conn.prep("SELECT GET_LOCK(?, ?)")?;
        let unlock = conn.prep("SELECT RELEASE_LOCK(?)")?;
        Ok(Self { conn, lock, unlock })
    }
}

impl Client for Lock {
    fn acquire(&mut self, name: &str) -> Result<()> {
        let granted: Option<Option<i64>> = self.conn.exec_first(&self.lock, (name, WAIT_SECONDS))?;
        ensure!(granted == Some(Some(1)), "GET_LOCK: {granted:?}");
        Ok(())
    }

    fn release(&mut self, name: &str) -> Result<()> {
        let released: Option<Option<i64>> = self.conn.exec_first(&self.unlock, (name,))?;
        ensure!(released == Some(Some(1)), "RELEASE_LOCK: {released:?}");
        Ok(())
    }
}
