//! What the clients do, and what is seen of it.

use std::process;
use std::sync::{Barrier, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Error, Result, anyhow, ensure};
use serde::Deserialize;

use crate::clients::{self, Client, System};
use crate::report::{Hold, Report, Seen};

/// What to measure.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Spec {
    system: System,
    /// Where it is, as its client takes it.
    address: String,
    work: Work,
    clients: usize,
    seconds: f64,
    /// Seconds before the measuring begins.
    warm_up: f64,
    /// For how long a client has the hot name, in milliseconds: from, to.
    #[serde(default)]
    hold: (f64, f64),
}

/// What each client does again and again.
#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Work {
    /// Take and give back a name of its own.
    Pair,
    /// Renew a lease of its own.
    Renew,
    /// Try for a name that somebody has.
    Refused,
    /// Take and give back the one name that all want.
    Hot,
    /// The same, but whoever has given it back asks again only when another has it: each one that waits gets its turn.
    Alternate,
}

impl Work {
    fn is_exclusive(self) -> bool {
        matches!(self, Self::Hot | Self::Alternate)
    }
}

/// How often the hot name was granted.
static GRANTS: Mutex<u64> = Mutex::new(0);
static GRANTED: Condvar = Condvar::new();
/// Who has given it back waits no longer for the others: they may have come to their end.
const PATIENCE: Duration = Duration::from_millis(200);

const HELD: &str = "bench:held";
const HOT: &str = "bench:hot";

/// Runs all clients, each in a thread of its own.
pub fn run(spec: &Spec) -> Result<Report> {
    ensure!(spec.clients > 0, "no clients");
    let mut holder = clients::connect(spec.system, &spec.address)?;
    if matches!(spec.work, Work::Refused) {
        holder.acquire(HELD)?;
    }
    let ready = Barrier::new(spec.clients);
    let (ready, start) = (&ready, Instant::now());
    let seen: Vec<Seen> = thread::scope(|scope| {
        let one = |number| move || live(spec, number, ready, start).unwrap_or_else(|error| give_up(number, &error));
        let threads: Vec<_> = (0..spec.clients).map(|number| scope.spawn(one(number))).collect();
        threads.into_iter().map(|thread| thread.join().map_err(|_| anyhow!("a client panicked"))).collect::<Result<_>>()
    })?;
    if matches!(spec.work, Work::Refused) {
        holder.release(HELD)?;
    }
    Report::of(&seen, spec.work.is_exclusive())
}

/// A client's life.
fn live(spec: &Spec, number: usize, ready: &Barrier, start: Instant) -> Result<Seen> {
    let name = format!("bench:{number}");
    let mut client = clients::connect(spec.system, &spec.address)?;
    if matches!(spec.work, Work::Renew) {
        client.acquire(&name)?;
    }
    let mut turn = || {
        let asked = start.elapsed();
        match spec.work {
            Work::Pair => client.acquire(&name).and_then(|()| client.release(&name))?,
            Work::Renew => client.renew(&name)?,
            Work::Refused => ensure!(!client.try_acquire(HELD)?, "{HELD} was granted twice"),
            Work::Hot | Work::Alternate => return hold(&mut *client, spec, start),
        }
        let had = start.elapsed();
        Ok(Hold { asked, had, left: had })
    };
    ready.wait();
    let warm = Instant::now() + Duration::from_secs_f64(spec.warm_up);
    while Instant::now() < warm {
        turn()?;
    }
    ready.wait();
    let begin = start.elapsed();
    let end = begin + Duration::from_secs_f64(spec.seconds);
    let mut holds = Vec::new();
    while start.elapsed() < end {
        holds.push(turn()?);
    }
    if matches!(spec.work, Work::Renew) {
        client.release(&name)?;
    }
    Ok(Seen { begin, end, holds })
}

/// The others would wait for it for ever.
fn give_up(number: usize, error: &Error) -> ! {
    eprintln!("client {number}: {error:#}");
    process::exit(1)
}

/// One turn with the hot name.
fn hold(client: &mut dyn Client, spec: &Spec, start: Instant) -> Result<Hold> {
    let (least, most) = spec.hold;
    let asked = start.elapsed();
    client.acquire(HOT)?;
    let had = start.elapsed();
    let mine = granted();
    if most > 0.0 {
        thread::sleep(Duration::from_secs_f64((least + (most - least) * fastrand::f64()) / 1e3));
    }
    let left = start.elapsed();
    client.release(HOT)?;
    if matches!(spec.work, Work::Alternate) {
        let grants = GRANTS.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = GRANTED.wait_timeout_while(grants, PATIENCE, |grants| *grants == mine);
    }
    Ok(Hold { asked, had, left })
}

/// Tells that the hot name was granted; how often it was by now.
fn granted() -> u64 {
    let mut grants = GRANTS.lock().unwrap_or_else(PoisonError::into_inner);
    *grants += 1;
    GRANTED.notify_all();
    *grants
}
