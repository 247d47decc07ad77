//! Redis: SET NX PX with a random value, and scripts that compare it.

use std::thread;
use std::time::Duration;

use anyhow::{Result, ensure};
use redis::{Connection, IntoConnectionInfo, Script};

use super::Client;

const TTL_MS: u64 = 60_000;
/// Before the next try, in milliseconds: from, to. Clients' defaults are ten times as long and more.
const RETRY_MS: (f64, f64) = (5.0, 15.0);

const RELEASE: &str = r#"
if redis.call("get", KEYS[1]) == ARGV[1] then
    return redis.call("del", KEYS[1])
else
    return 0
end"#;
const RENEW: &str = r#"
if redis.call("get", KEYS[1]) == ARGV[1] then
    return redis.call("pexpire", KEYS[1], ARGV[2])
else
    return 0
end"#;

/// The lock as Redis' own documentation has it.
pub struct Lease {
    conn: Connection,
    release: Script,
    renew: Script,
    value: String,
}

impl Lease {
    /// At a URL.
    pub fn new(address: &str) -> Result<Self> {
        let info = address.into_connection_info()?;
        // As the clients of all others have it.
        let tcp = info.tcp_settings().clone().set_nodelay(true);
        let mut conn = redis::Client::open(info.set_tcp_settings(tcp))?.get_connection()?;
        let (release, renew) = (Script::new(RELEASE), Script::new(RENEW));
        for script in [&release, &renew] {
            script.prepare_invoke().load(&mut conn)?;
        }
        Ok(Self { conn, release, renew, value: String::new() })
    }
}

impl Client for Lease {
    fn acquire(&mut self, name: &str) -> Result<()> {
        while !self.try_acquire(name)? {
            let (least, most) = RETRY_MS;
            thread::sleep(Duration::from_secs_f64((least + (most - least) * fastrand::f64()) / 1e3));
        }
        Ok(())
    }

    fn try_acquire(&mut self, name: &str) -> Result<bool> {
        let value = format!("{:032x}", fastrand::u128(..));
        let mut set = redis::cmd("SET");
        set.arg(name).arg(&value).arg("NX").arg("PX").arg(TTL_MS);
        let granted: Option<String> = set.query(&mut self.conn)?;
        if granted.is_some() {
            self.value = value;
        }
        Ok(granted.is_some())
    }

    fn release(&mut self, name: &str) -> Result<()> {
        let deleted: i64 = self.release.key(name).arg(&self.value).invoke(&mut self.conn)?;
        ensure!(deleted == 1, "{name} was not held any more");
        Ok(())
    }

    fn renew(&mut self, name: &str) -> Result<()> {
        let renewed: i64 = self.renew.key(name).arg(&self.value).arg(TTL_MS).invoke(&mut self.conn)?;
        ensure!(renewed == 1, "{name} was not held any more");
        Ok(())
    }
}
