//! Everything that can be wrong with a call, each with its SQLSTATE, what to do about it, and where to read on.

use super::interval::Wait;
use super::key::MAX_PERMITS;
use super::mode::Mode;
use super::name::MAX_NAME_BYTES;
use super::tree::MAX_PARTS;
use super::version::compare;
use std::cmp::Ordering;

/// At most so many holders or holds are listed in an error's DETAIL.
const MAX_LISTED: usize = 5;

/// The advice of an older library, also where `sql/library.sql` gives it.
const CONNECT_AGAIN: &str = "Install the library of that version, then connect again; where a setting such as \
                             shared_preload_libraries loads it, restart the server.";

/// The page of the documentation that has an anchor for each kind of error, in the folder where that is installed.
const PAGE: &str = "reference/errors.md";

/// Why a call fails; of two kinds the client is only warned. [`message`](std::fmt::Display), [`detail`](Error::detail) and
/// [`hint`](Error::hint) are for people, [`sqlstate`](Error::sqlstate) is for programs.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{argument} must not be null")]
    Null { argument: &'static str },
    #[error("name of a lock must not be empty")]
    EmptyName,
    #[error("name of a lock is too long: {bytes} bytes")]
    NameTooLong { bytes: usize },
    #[error("timeout must be between 0 and 24 days")]
    Timeout,
    #[error("hold_limit must be between 100 ms and 10 years")]
    HoldLimit,
    #[error("mode \"{mode}\" is not for native advisory locks")]
    ModeNotNative { mode: Mode },
    #[error("{lock} has the key of another name in use")]
    KeyClash { lock: String, other: Option<String> },
    #[error("cannot take {lock} during recovery")]
    InRecovery { lock: String },
    #[error("cannot take or release locks in a parallel worker")]
    ParallelWorker,
    #[error("session locks are switched off here: cannot take {lock}")]
    SessionLocksOff { lock: String },
    #[error("too many locks in this session: cannot take {lock}")]
    TooManyLocks { lock: String, limit: usize },
    #[error("could not obtain {lock}{}", waited(.wait))]
    NotObtained { lock: String, wait: Waited, holders: Vec<Holder> },
    #[error("could not make a timer for hold_limit: {error}")]
    NoTimer { error: String },
    #[error("mode is unknown to this version of the library")]
    UnknownMode,
    #[error("{lock} is not held by this session")]
    NotHeld { lock: String, mode: Option<Mode>, holders: Vec<Holder>, own: Vec<String> },
    #[error("{lock} is held by this transaction, not by the session")]
    HeldByTransaction { lock: String },
    #[error("cannot convert {lock}: the session holds it {holds} times")]
    NotOneHold { lock: String, holds: u64 },
    #[error("{lock} is held by trees of this session, not by itself")]
    HeldByTree { lock: String },
    #[error("too many names in one call: more than {most}")]
    TooManyNames { most: usize },
    #[error("max_locks must be at least 1")]
    MaxLocks,
    #[error("path \"{path}\" has an empty part")]
    EmptyPart { path: String },
    #[error("path has too many parts: {parts}")]
    TooManyParts { parts: usize },
    #[error("cannot wait for {lock} without a snapshot {why}")]
    NotSnapshotFree { lock: String, why: &'static str },
    #[error("{argument} is too long: {bytes} bytes")]
    TextTooLong { argument: &'static str, bytes: usize },
    #[error("ttl must be between 100 ms and 10 years")]
    Ttl,
    #[error("keep_for must be between 0 and 10 years")]
    KeepFor,
    #[error("permits must be between 1 and {MAX_PERMITS}")]
    Permits,
    #[error("slot must be between 1 and {MAX_PERMITS}")]
    Slot,
    #[error("{lease} is in use with permits => {permits}, not {asked}")]
    PermitsDiffer { lease: String, permits: u16, asked: u16 },
    #[error("could not acquire {lease}{}", waited(.wait))]
    LeaseNotObtained { lease: String, wait: Waited, holder: Option<LeaseHolder> },
    #[error("{lease} is held by another")]
    LeaseTaken { lease: String, token: i64, holder: LeaseHolder },
    #[error("{lease} is not held with token {token}")]
    LeaseEnded { lease: String, token: i64, expired_for: Option<i64> },
    #[error("permission denied to {what} {lease}")]
    NotYourLease { lease: String, what: &'static str },
    #[error("cannot {what} {lease} during recovery")]
    LeaseInRecovery { lease: String, what: &'static str },
    #[error("cannot {what} {lease} in a read-only transaction")]
    LeaseReadOnly { lease: String, what: &'static str },
    #[error("cannot prepare a transaction that has changed a lease")]
    PreparedLease,
    #[error("permission denied for domain \"{domain}\": cannot lock {lock}")]
    DomainDenied { lock: String, domain: String },
    #[error("{what} of {lock} is over the max_hold of its domain ({} s)", *.max_hold as f64 / 1e6)]
    OverMaxHold { lock: String, what: &'static str, max_hold: i64 },
    #[error("domain \"{domain}\" has a colon")]
    DomainWithColon { domain: String },
    #[error("max_wait must be between 0 and 24 days")]
    MaxWait,
    #[error("max_hold must be between 100 ms and 10 years")]
    MaxHold,
    #[error("permission denied to change the rules for domains")]
    NotDomainOwner,
    #[error("role of the domain does not exist")]
    NoSuchRole,
    #[error("function was not called by a trigger")]
    NotByTrigger,
    #[error("the tables of the extension are not those that this version of its library works with")]
    Tables { library: &'static str, extension: Option<String> },
    #[error("library of named_locks is too old for version {script} of the extension")]
    OldLibrary { library: &'static str, script: String },
    #[error("{lock} was held longer than its hold_limit of {millis} ms")]
    HoldLimitOverrun { lock: String, millis: i64 },
    #[error("{lock} is a session lock, and named_locks.session_locks is \"warn\" here")]
    SessionLocksWarn { lock: String },
    #[error("no shared memory for the names of locks: locks work, but views do not show their names")]
    NoNames,
}

/// What is the same for all errors of a kind.
struct Kind {
    sqlstate: &'static str,
    /// The anchor of its paragraph in the documentation; stable, as it is in logs and bookmarks.
    anchor: &'static str,
    /// What to do.
    advice: &'static str,
}

/// How long a call that did not get its lock has waited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waited {
    /// Not at all: one try.
    Try,
    /// For the call's own timeout, in milliseconds.
    Timeout(i32),
    /// For the server's `lock_timeout`, in milliseconds.
    LockTimeout(i32),
    /// For as long as the rule for the name's domain lets, in milliseconds.
    MaxWait(i32),
}

impl Waited {
    /// Of a wait that ran out; `lock_timeout` is the server's setting in milliseconds.
    pub fn of(wait: Wait, lock_timeout: i32) -> Self {
        match wait {
            Wait::Try => Waited::Try,
            Wait::Millis(millis) => Waited::Timeout(millis),
            Wait::Server | Wait::Forever => Waited::LockTimeout(lock_timeout),
            Wait::Capped(millis) | Wait::Limited(millis) => Waited::MaxWait(millis),
        }
    }
}

fn waited(wait: &Waited) -> String {
    match wait {
        Waited::Try => " at once".to_owned(),
        Waited::Timeout(millis) => format!(" within {millis} ms"),
        Waited::LockTimeout(millis) => format!(" within lock_timeout ({millis} ms)"),
        Waited::MaxWait(millis) => format!(" within the max_wait of its domain ({millis} ms)"),
    }
}

/// Someone who holds a lock, as an error's DETAIL tells it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Holder {
    /// The process; None for a prepared transaction.
    pub pid: Option<i32>,
    /// The holding session's application_name.
    pub application_name: Option<String>,
    /// Its client's address; None for a Unix socket, or without the right to see it.
    pub client_addr: Option<String>,
    /// What it does, as in pg_stat_activity; None without the right to see it.
    pub state: Option<String>,
    /// In which mode it holds the lock.
    pub mode: String,
    /// Since when.
    pub since: Option<String>,
}

impl Holder {
    fn describe(&self) -> String {
        let mut text = match self.pid {
            Some(pid) => format!("process {pid}"),
            None => "a prepared transaction".to_owned(),
        };
        let mut facts = Vec::new();
        if let Some(name) = self.application_name.as_deref().filter(|name| !name.is_empty()) {
            facts.push(format!("application \"{name}\""));
        }
        facts.extend(self.client_addr.as_ref().map(|addr| format!("client {addr}")));
        facts.extend(self.state.clone());
        if !facts.is_empty() {
            text.push_str(&format!(" ({})", facts.join(", ")));
        }
        text.push_str(&format!(" in mode {}", self.mode));
        if let Some(since) = &self.since {
            text.push_str(&format!(" since {since}"));
        }
        text
    }
}

/// Who holds a lease, as an error's DETAIL tells it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseHolder {
    /// As it calls itself; None without the right to know.
    pub owner: Option<String>,
    /// What its payload says of it.
    pub about: Option<String>,
    /// Since when.
    pub since: String,
    /// For how long it has the lease if it does not renew it, in microseconds.
    pub remaining: i64,
}

impl LeaseHolder {
    fn describe(&self) -> String {
        let owner = self.owner.as_ref().map(|owner| format!(" by \"{owner}\"")).unwrap_or_default();
        let about = self.about.as_ref().map(|about| format!(" ({about})")).unwrap_or_default();
        let (since, remaining) = (&self.since, seconds(self.remaining));
        format!("Held{owner}{about} since {since}, and for another {remaining} if not renewed.")
    }
}

/// Microseconds as text.
fn seconds(micros: i64) -> String {
    format!("{}.{:03} s", micros / 1_000_000, micros / 1_000 % 1_000)
}

fn list(items: impl ExactSizeIterator<Item = String>) -> String {
    let more = items.len().saturating_sub(MAX_LISTED);
    let mut text = items.take(MAX_LISTED).collect::<Vec<_>>().join("; ");
    if more > 0 {
        text.push_str(&format!("; and {more} more"));
    }
    text
}

fn held_by(holders: &[Holder]) -> String {
    if holders.is_empty() {
        return "Nobody holds it.".to_owned();
    }
    format!("Held by {}.", list(holders.iter().map(Holder::describe)))
}

impl Error {
    /// All that is known of each kind of error but for its texts about the case at hand.
    fn kind(&self) -> Kind {
        let (sqlstate, anchor, advice) = match self {
            Error::Null { .. } => {
                ("22004", "null-argument", "Give a value. An argument that is left out has its default.")
            }
            Error::EmptyName => ("22023", "empty-name", "A name has 1 to 1,024 bytes."),
            Error::NameTooLong { .. } => ("22001", "name-too-long", "Use a shorter name, or a hash of this one."),
            Error::Timeout => (
                "22023",
                "timeout-out-of-range",
                "Give a shorter one, 0 for one try, or NULL to wait as the server would.",
            ),
            Error::HoldLimit => (
                "22023",
                "hold-limit-out-of-range",
                "Give one in between, or NULL to hold the lock for as long as the session lasts.",
            ),
            Error::ModeNotNative { .. } => ("22023", "mode-not-native", "Use exclusive or share."),
            Error::UnknownMode => (
                "22023",
                "unknown-mode",
                "Use exclusive, share, intent share, intent exclusive or share intent exclusive.",
            ),
            Error::KeyClash { .. } => (
                "54000",
                "key-clash",
                "Two names with the same hash cannot be locked at once. Use a longer or another name for one of them.",
            ),
            Error::InRecovery { .. } => (
                "25006",
                "lock-on-standby",
                "Connect to the primary. Under named_locks.allow_on_standby locks exclude this standby's sessions only.",
            ),
            Error::ParallelWorker => {
                ("25000", "parallel-worker", "Mark functions that call these functions PARALLEL UNSAFE.")
            }
            Error::SessionLocksOff { .. } => (
                "0A000",
                "session-locks-off",
                "Use named_xact_lock(), or a lease that is not bound: behind a transaction pooler a session lock stays on the \
                 server's connection.",
            ),
            Error::SessionLocksWarn { .. } => (
                "01000",
                "session-locks-warn",
                "Behind a transaction pooler, use named_xact_lock(), or a lease that is not bound.",
            ),
            Error::TooManyLocks { .. } => (
                "53400",
                "too-many-locks",
                "Release locks, take one coarser lock, or let an administrator raise the setting.",
            ),
            Error::NotObtained { holders, .. } => (
                "55P03",
                "lock-not-obtained",
                // Without a session to end.
                if !holders.is_empty() && holders.iter().all(|holder| holder.pid.is_none()) {
                    "Wait longer, or end the prepared transaction; the view lock_holders has its gid for ROLLBACK PREPARED."
                } else {
                    "Wait longer, or look at the view lock_holders; pg_terminate_backend() ends a session that holds it."
                },
            ),
            Error::NoTimer { .. } => (
                "53000",
                "no-timer",
                "Leave hold_limit out, or raise the limit of pending signals for the server (ulimit -i).",
            ),
            Error::NoNames => (
                "53200",
                "no-names",
                "Make room where the server keeps its dynamic shared memory, such as /dev/shm, and connect again.",
            ),
            Error::HoldLimitOverrun { .. } => (
                "57P01",
                "hold-limit-overrun",
                "Connect again: all that the session held is free. Work that takes longer needs a longer hold_limit.",
            ),
            Error::NotHeld { .. } => (
                "55000",
                "lock-not-held",
                "A lock is released by the session that took it. Behind a pooler the next statement may run in another \
                 session.",
            ),
            Error::HeldByTransaction { .. } => {
                ("55000", "held-by-transaction", "It is released at the end of the transaction.")
            }
            Error::HeldByTree { .. } => (
                "55000",
                "held-by-tree",
                "named_unlock_tree() gives back a tree, named_lock_convert() changes its mode, by the path that was locked.",
            ),
            Error::NotOneHold { .. } => {
                ("55000", "not-one-hold", "A conversion needs exactly one session hold of the name.")
            }
            Error::TooManyNames { .. } => {
                ("54000", "too-many-names", "Take one coarser lock, or fewer names at a time.")
            }
            Error::MaxLocks => ("22023", "max-locks-out-of-range", "Leave max_locks out to lock one name."),
            Error::EmptyPart { .. } => {
                ("22023", "empty-path-part", "The parts of a path stand between single slashes: tenant/42/orders.")
            }
            Error::TooManyParts { .. } => {
                ("22023", "too-many-path-parts", "Lock a path further up: that shuts out all below it.")
            }
            Error::NotSnapshotFree { .. } => (
                "25001",
                "not-snapshot-free",
                "CALL it on its own, outside a transaction block, or use the function that waits with a snapshot: \
                 named_lock() or lease_acquire().",
            ),
            Error::TextTooLong { .. } => {
                ("22001", "text-too-long", "Use a shorter text; the payload of a lease has room for more.")
            }
            Error::Ttl => {
                ("22023", "ttl-out-of-range", "Give the time to live after each renewal, and renew at a third of it.")
            }
            Error::KeepFor => ("22023", "keep-for-out-of-range", "Leave keep_for out to free the lease at once."),
            Error::Permits => ("22023", "permits-out-of-range", "Give how many may have it at a time."),
            Error::Slot => ("22023", "slot-out-of-range", "Give the number that named_semaphore() has returned."),
            Error::PermitsDiffer { .. } => {
                ("22023", "permits-differ", "All who share a lease have to give the same number of permits.")
            }
            Error::LeaseNotObtained { .. } => {
                ("55P03", "lease-not-obtained", "Wait longer, or look at the view lock_holders.")
            }
            Error::LeaseTaken { .. } => (
                "55006",
                "lease-taken",
                "Stop what the lease stands for: another may be at it. Then acquire the lease anew.",
            ),
            Error::LeaseEnded { .. } => (
                "55000",
                "lease-ended",
                "Stop what the lease stands for: another may be at it. Then acquire the lease anew.",
            ),
            Error::NotYourLease { .. } => (
                "42501",
                "not-your-lease",
                "A lease is changed by members of the role that acquired it; members of pg_signal_backend may break it.",
            ),
            Error::LeaseInRecovery { .. } => ("25006", "lease-on-standby", "Connect to the primary."),
            Error::LeaseReadOnly { .. } => {
                ("25006", "lease-read-only", "A lease is a row: use a transaction that is READ WRITE.")
            }
            Error::PreparedLease => (
                "0A000",
                "prepared-lease",
                "Commit the change of the lease first; lease_guard() may be part of a prepared transaction.",
            ),
            Error::DomainDenied { .. } => (
                "42501",
                "domain-denied",
                "The view lock_domains says members of which role may lock names in the domain.",
            ),
            Error::OverMaxHold { .. } => (
                "22023",
                "over-max-hold",
                "The view lock_domains has the limits; the extension's owner may change them.",
            ),
            Error::DomainWithColon { .. } => {
                ("22023", "domain-with-colon", "The domain of a name is what stands before its first colon.")
            }
            Error::MaxWait => ("22023", "max-wait-out-of-range", "Leave max_wait out to let calls wait for ever."),
            Error::MaxHold => {
                ("22023", "max-hold-out-of-range", "Leave max_hold out to let locks and leases be held for ever.")
            }
            Error::NotDomainOwner => ("42501", "not-domain-owner", "Only the extension's owner and superusers may."),
            Error::NoSuchRole => {
                ("42704", "no-such-role", "Give a role that exists, or leave role out to let everybody use the domain.")
            }
            Error::NotByTrigger => {
                ("39P01", "not-by-trigger", "Change the rules for domains by lock_domain_set() and lock_domain_drop().")
            }
            Error::Tables { library, extension } => {
                let stands = extension.as_deref().and_then(|extension| compare(extension, library));
                let advice = match stands {
                    Some(Ordering::Less) => "Run ALTER EXTENSION named_locks UPDATE.",
                    Some(Ordering::Greater) => CONNECT_AGAIN,
                    _ => "Take back what was done to the tables, or drop the extension and create it anew.",
                };
                ("55000", "wrong-tables", advice)
            }
            Error::OldLibrary { .. } => ("55000", "library-too-old", CONNECT_AGAIN),
        };
        Kind { sqlstate, anchor, advice }
    }

    /// The five characters by which programs know the error.
    pub fn sqlstate(&self) -> &'static str {
        self.kind().sqlstate
    }

    /// What to do about it, and on a line of its own, where to read on.
    pub fn hint(&self) -> String {
        let Kind { anchor, advice, .. } = self.kind();
        format!("{advice}\nDocumentation: {PAGE}#{anchor}")
    }

    /// More of what happened.
    pub fn detail(&self) -> Option<String> {
        match self {
            Error::NameTooLong { .. } => Some(format!("A name has at most {MAX_NAME_BYTES} bytes of UTF-8.")),
            Error::TextTooLong { argument, .. } => {
                Some(format!("The {argument} may have at most {MAX_NAME_BYTES} bytes."))
            }
            Error::TooManyLocks { limit, .. } => Some(format!(
                "named_locks.max_locks_per_session is {limit}. Session locks that this statement had taken are released."
            )),
            Error::NotObtained { holders, wait, .. } => Some(match (holders.is_empty(), wait) {
                // Nobody in its way holds it: someone was ahead in the queue, or has just let go.
                (true, Waited::Try) => "Others wait for it, or held it until just now.".to_owned(),
                (true, _) => "It was held until just now.".to_owned(),
                _ => held_by(holders),
            }),
            Error::NotHeld { mode, holders, own, .. } => {
                let own = if own.is_empty() {
                    "This session holds no session lock.".to_owned()
                } else {
                    format!("This session holds {}.", list(own.iter().cloned()))
                };
                Some(match mode {
                    Some(mode) => format!("Asked for was mode {mode}. {} {own}", held_by(holders)),
                    None => format!("{} {own}", held_by(holders)),
                })
            }
            Error::TooManyParts { .. } => Some(format!("A path has at most {MAX_PARTS} parts.")),
            Error::KeyClash { other: Some(other), .. } => Some(format!("The other name is \"{other}\".")),
            Error::SessionLocksOff { .. } => Some("named_locks.session_locks is off for this role.".to_owned()),
            Error::LeaseNotObtained { holder, .. } => Some(match holder {
                Some(holder) => holder.describe(),
                None => "Others wait for it, or it is being taken or guarded by a transaction under way.".to_owned(),
            }),
            Error::LeaseTaken { token, holder, .. } => {
                Some(format!("{} Token {token} is not valid any more.", holder.describe()))
            }
            Error::LeaseEnded { expired_for, .. } => Some(match expired_for {
                Some(micros) => format!("It expired {} ago.", seconds(*micros)),
                None => "It was released or broken, has expired, or was never granted with this token.".to_owned(),
            }),
            Error::Tables { library, extension } => Some(match extension {
                Some(extension) => {
                    format!("The library is of version {library}, the extension in this database of {extension}.")
                }
                None => format!("The library is of version {library}, and this database is without the extension."),
            }),
            Error::OldLibrary { library, .. } => {
                Some(format!("The library that this session works with is of version {library}."))
            }
            _ => None,
        }
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use std::collections::HashSet;

    fn holder(pid: i32) -> Holder {
        Holder {
            pid: Some(pid),
            application_name: Some("cron-a".into()),
            client_addr: Some("10.0.0.7".into()),
            state: Some("idle".into()),
            mode: "exclusive".into(),
            since: Some("2026-11-29 14:00:00+00".into()),
        }
    }

    fn lease_holder() -> LeaseHolder {
        LeaseHolder {
            owner: Some("node-b".into()),
            about: Some("address 10.0.0.7:5000".into()),
            since: "2026-11-29 14:00:00+00".into(),
            remaining: 12_345_678,
        }
    }

    /// One error of each kind, as the reference shows them.
    pub fn samples() -> Vec<Error> {
        let lock = || "named lock \"report:daily\"".to_owned();
        let lease = || "lease \"leader:app\"".to_owned();
        let token = 7_861_425_340_672_063_489;
        vec![
            Error::Null { argument: "name" },
            Error::EmptyName,
            Error::NameTooLong { bytes: 1025 },
            Error::Timeout,
            Error::HoldLimit,
            Error::ModeNotNative { mode: Mode::IntentShare },
            Error::KeyClash { lock: "named lock \"M0plytOy\"".into(), other: Some("order-36325".into()) },
            Error::InRecovery { lock: lock() },
            Error::ParallelWorker,
            Error::SessionLocksOff { lock: lock() },
            Error::TooManyLocks { lock: lock(), limit: 1000 },
            Error::NotObtained { lock: lock(), wait: Waited::Timeout(200), holders: vec![holder(42)] },
            Error::NoTimer { error: "Resource temporarily unavailable (os error 11)".into() },
            Error::UnknownMode,
            Error::NotHeld { lock: lock(), mode: None, holders: vec![holder(42)], own: Vec::new() },
            Error::HeldByTransaction { lock: lock() },
            Error::NotOneHold { lock: lock(), holds: 2 },
            Error::HeldByTree { lock: "named lock \"tenant/42\"".into() },
            Error::TooManyNames { most: 10_000 },
            Error::MaxLocks,
            Error::EmptyPart { path: "tenant//orders".into() },
            Error::TooManyParts { parts: 33 },
            Error::NotSnapshotFree { lock: lock(), why: "in a transaction block or a function" },
            Error::TextTooLong { argument: "owner", bytes: 1025 },
            Error::Ttl,
            Error::KeepFor,
            Error::Permits,
            Error::Slot,
            Error::PermitsDiffer { lease: "lease \"api:geocoder\"".into(), permits: 3, asked: 4 },
            Error::LeaseNotObtained { lease: lease(), wait: Waited::LockTimeout(5000), holder: Some(lease_holder()) },
            Error::LeaseTaken { lease: lease(), token, holder: lease_holder() },
            Error::LeaseEnded { lease: lease(), token, expired_for: Some(1_500_000) },
            Error::NotYourLease { lease: lease(), what: "renew" },
            Error::LeaseInRecovery { lease: lease(), what: "acquire" },
            Error::LeaseReadOnly { lease: lease(), what: "acquire" },
            Error::PreparedLease,
            Error::DomainDenied { lock: "named lock \"deploy:app\"".into(), domain: "deploy".into() },
            Error::OverMaxHold { lock: "named lock \"deploy:app\"".into(), what: "hold_limit", max_hold: 300_000_000 },
            Error::DomainWithColon { domain: "deploy:app".into() },
            Error::MaxWait,
            Error::MaxHold,
            Error::NotDomainOwner,
            Error::NoSuchRole,
            Error::NotByTrigger,
            Error::Tables { library: "2.0.0", extension: Some("1.0.0".into()) },
            Error::OldLibrary { library: "1.0.0", script: "1.1.0".into() },
            Error::HoldLimitOverrun { lock: lock(), millis: 30_000 },
            Error::SessionLocksWarn { lock: lock() },
            Error::NoNames,
        ]
    }

    /// `samples` has all kinds, and each has an anchor of its own.
    #[test]
    fn each_kind_has_an_anchor() {
        let kinds: HashSet<_> = samples().iter().map(std::mem::discriminant).collect();
        // Each kind's message stands before it.
        let all = include_str!("error.rs").lines().filter(|line| line.starts_with("    #[error(")).count();
        assert_eq!(kinds.len(), all);
        let anchors: HashSet<_> = samples().iter().map(|error| error.kind().anchor).collect();
        assert_eq!(anchors.len(), all);
        for anchor in anchors {
            assert!(anchor.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'-'), "{anchor}");
        }
    }

    #[test]
    fn a_hint_is_short_and_says_where_to_read_on() {
        for error in samples() {
            let hint = error.hint();
            let (advice, page) = hint.split_once('\n').expect("two lines");
            assert!(advice.ends_with('.') && advice.len() <= 140, "{advice}");
            assert_eq!(page, format!("Documentation: reference/errors.md#{}", error.kind().anchor));
        }
    }

    #[test]
    fn a_timeout_names_the_holder() {
        let error = Error::NotObtained {
            lock: "named lock \"report\"".into(),
            wait: Waited::Timeout(200),
            holders: vec![holder(42)],
        };
        assert_eq!(error.to_string(), "could not obtain named lock \"report\" within 200 ms");
        assert_eq!(
            error.detail().unwrap(),
            "Held by process 42 (application \"cron-a\", client 10.0.0.7, idle) in mode exclusive \
             since 2026-11-29 14:00:00+00."
        );
    }

    #[test]
    fn a_holder_of_another_role_shows_little() {
        let hidden = Holder { pid: Some(7), mode: "share".into(), ..Holder::default() };
        assert_eq!(hidden.describe(), "process 7 in mode share");
        let prepared = Holder { mode: "exclusive".into(), ..Holder::default() };
        assert_eq!(prepared.describe(), "a prepared transaction in mode exclusive");
    }

    #[test]
    fn who_can_be_ended_is_advised_of() {
        let prepared = Holder { mode: "share".into(), ..Holder::default() };
        for (holders, advice) in [
            (vec![prepared.clone()], "ROLLBACK PREPARED"),
            (vec![prepared, holder(42)], "pg_terminate_backend"),
            (vec![], "pg_terminate_backend"),
        ] {
            let error = Error::NotObtained { lock: "named lock \"x\"".into(), wait: Waited::Timeout(1), holders };
            assert!(error.hint().contains(advice), "{}", error.hint());
        }
    }

    #[test]
    fn a_lost_lease_names_the_holder() {
        let error = Error::LeaseTaken { lease: "lease \"leader\"".into(), token: 42, holder: lease_holder() };
        assert_eq!(error.to_string(), "lease \"leader\" is held by another");
        assert_eq!(
            error.detail().unwrap(),
            "Held by \"node-b\" (address 10.0.0.7:5000) since 2026-11-29 14:00:00+00, and for another 12.345 s if not renewed. \
             Token 42 is not valid any more."
        );
        assert_eq!(error.sqlstate(), "55006");
        let error = Error::LeaseEnded { lease: "lease \"leader\"".into(), token: 42, expired_for: Some(1_500_000) };
        assert_eq!(error.detail().unwrap(), "It expired 1.500 s ago.");
    }

    #[test]
    fn tables_of_another_version_say_who_is_older() {
        let advice = |extension: Option<&str>| {
            Error::Tables { library: "1.0.0", extension: extension.map(str::to_owned) }.kind().advice
        };
        assert_eq!(advice(Some("0.1.0")), "Run ALTER EXTENSION named_locks UPDATE.");
        assert_eq!(advice(Some("1.0.1")), CONNECT_AGAIN);
        for other in [Some("1.0.0"), Some("unknown"), None] {
            assert!(advice(other).starts_with("Take back"), "{other:?}");
        }
    }

    /// Of a library that is too old to be asked, the script itself says so.
    #[test]
    fn the_scripts_give_the_hint_of_an_older_library() {
        let hint = Error::OldLibrary { library: "0.1.0", script: "1.0.0".into() }.hint().replace('\n', "\\n");
        assert!(include_str!("../../sql/library.sql").contains(&format!("HINT = E'{hint}';")), "{hint}");
    }

    #[test]
    fn long_lists_are_cut_with_a_count() {
        let text = held_by(&(1..=8).map(holder).collect::<Vec<_>>());
        assert_eq!(text.matches("process").count(), MAX_LISTED);
        assert!(text.ends_with("; and 3 more."), "{text}");
    }
}
