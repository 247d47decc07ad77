//! Puts one system under one kind of load, and says how it did: `load SPEC`, both in JSON.
//!
//! One program for all systems: threads, clocks and counting are the same, and each system is called through its
//! well-kept Rust client with a connection per thread.

use anyhow::{Context, Result};

mod clients;
mod report;
mod work;

fn main() -> Result<()> {
    let text = std::env::args().nth(1).context("load SPEC: what to do, in JSON")?;
    let spec = serde_json::from_str(&text).with_context(|| format!("what to do: {text}"))?;
    println!("{}", serde_json::to_string(&work::run(&spec)?)?);
    Ok(())
}
