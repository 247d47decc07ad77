//! Figures out of what the clients saw.

use std::time::Duration;

use anyhow::{Result, ensure};
use hdrhistogram::Histogram;
use serde::Serialize;

/// One turn of a client, by the one clock of the process; times since its start.
#[derive(Clone, Copy)]
pub struct Hold {
    pub asked: Duration,
    /// When the client had its answer.
    pub had: Duration,
    /// When it set out to give it back.
    pub left: Duration,
}

/// All turns of a client, and from when until when it was measured.
pub struct Seen {
    pub begin: Duration,
    pub end: Duration,
    pub holds: Vec<Hold>,
}

/// What all of them did.
#[derive(Serialize)]
pub struct Report {
    /// Turns that ended in the measured time, and by each client.
    pub turns: u64,
    pub turns_of: Vec<u64>,
    /// Turns per second.
    pub rate: f64,
    /// From asking to the answer.
    pub answer: Spread,
    /// Of the hot name: from the beginning of one client's release until another that was waiting has it.
    pub hand_over: Spread,
    /// Jain's index of the turns of each client: 1 if all have as many, 1/n if one has all.
    pub fairness: f64,
}

/// Microseconds.
#[derive(Serialize)]
pub struct Spread {
    pub count: u64,
    pub p50: f64,
    pub p99: f64,
    pub most: f64,
}

impl Report {
    /// Puts together what each client saw; `exclusive`: whether they all had the same name.
    pub fn of(seen: &[Seen], exclusive: bool) -> Result<Self> {
        let begin = seen.iter().map(|one| one.begin).max().unwrap_or_default();
        let end = seen.iter().map(|one| one.end).min().unwrap_or_default();
        ensure!(begin < end, "the clients were never at work all at once");
        let counted = |hold: &Hold| begin <= hold.had && hold.had <= end;
        let turns_of: Vec<u64> =
            seen.iter().map(|one| one.holds.iter().filter(|hold| counted(hold)).count() as u64).collect();
        let turns = turns_of.iter().sum();
        let answers = seen.iter().flat_map(|one| &one.holds).map(|hold| hold.had - hold.asked);
        Ok(Self {
            turns,
            rate: turns as f64 / (end - begin).as_secs_f64(),
            answer: Spread::of(answers)?,
            hand_over: Spread::of(if exclusive { hand_overs(seen)? } else { Vec::new() })?,
            fairness: fairness(&turns_of),
            turns_of,
        })
    }
}

impl Spread {
    fn of(times: impl IntoIterator<Item = Duration>) -> Result<Self> {
        // Nanoseconds, up to a minute, to three digits.
        let mut histogram = Histogram::<u64>::new_with_bounds(1, 60_000_000_000, 3)?;
        for time in times {
            histogram.saturating_record(time.as_nanos() as u64);
        }
        let at = |quantile| histogram.value_at_quantile(quantile) as f64 / 1e3;
        Ok(Self { count: histogram.len(), p50: at(0.5), p99: at(0.99), most: histogram.max() as f64 / 1e3 })
    }
}

/// How long it took from one client to another that was waiting by then.
fn hand_overs(seen: &[Seen]) -> Result<Vec<Duration>> {
    let mut holds: Vec<(usize, Hold)> =
        seen.iter().enumerate().flat_map(|(client, one)| one.holds.iter().map(move |hold| (client, *hold))).collect();
    holds.sort_by_key(|(_, hold)| hold.had);
    let mut times = Vec::new();
    for pair in holds.windows(2) {
        let [(giver, before), (taker, after)] = pair else { continue };
        ensure!(before.left <= after.had, "two clients had the hot name at once");
        if giver != taker && after.asked < before.left {
            times.push(after.had - before.left);
        }
    }
    Ok(times)
}

fn fairness(turns: &[u64]) -> f64 {
    let sum: f64 = turns.iter().map(|&one| one as f64).sum();
    let squares: f64 = turns.iter().map(|&one| (one as f64).powi(2)).sum();
    if squares > 0.0 { sum * sum / (turns.len() as f64 * squares) } else { 1.0 }
}
