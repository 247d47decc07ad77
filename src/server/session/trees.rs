//! Trees of named locks: a path in the mode asked for, and the names above it in an intent mode.
//!
//! To the lock manager, the registry and the views these are holds of the session like others. The ledger knows them apart:
//! a tree is given back as a whole, and no other call gives back a part of it.

use super::sets::{Part, acquire_all, take_all};
use super::{
    Lock, Outcome, Problem, answer, check_may_lock, check_not_parallel, held_by_others, not_held, one_hold, owner,
    with_session,
};
use crate::rules::error::Error;
use crate::rules::holds::{Owner, Scope};
use crate::rules::interval::Wait;
use crate::rules::mode::Mode;
use crate::rules::name::display;
use crate::rules::tree::{Path, intent};

/// The locks of a path in a mode, from the root; the path itself is the last.
pub fn parts<'a>(path: Path<'a>, mode: Mode, scope: Scope) -> Vec<Part<'a>> {
    let (leaf, ancestor) = match scope {
        Scope::Session => (Owner::Leaf, Owner::Ancestor),
        Scope::Transaction => (owner(scope), owner(scope)),
    };
    let part = |name, mode, owner| Part { lock: Lock::named(name, false), mode, owner, hold_limit: None };
    let ancestors = path.ancestors().map(|name| part(name, intent(mode), ancestor));
    ancestors.chain([part(path.name(), mode, leaf)]).collect()
}

/// Takes the [`parts`] of a path, all or none; whether they are held now.
///
/// # Errors
/// As [`acquire`](super::acquire).
pub fn acquire(parts: &[Part<'_>], scope: Scope, wait: Wait) -> Result<bool, Problem> {
    acquire_all(parts, scope, wait, || leaf(parts).lock.describe())
}

/// Gives back the tree of a path that was locked last; how many of that path remain.
///
/// # Errors
/// [`Error::NotHeld`], [`Error::HeldByTransaction`].
pub fn release(path: Path<'_>) -> Result<u64, Problem> {
    check_not_parallel()?;
    let lock = Lock::named(path.name(), false);
    let remaining = with_session(|session| {
        let place = session.find_held(&lock)?;
        let mode = session.ledger.hold(place).last_mode(Owner::Leaf)?;
        session.release(place, mode, Owner::Leaf, 1);
        let remaining = session.ledger.hold(place).count_by(None, Owner::Leaf);
        for name in path.ancestors().rev() {
            if let Some(place) = session.find(&Lock::named(name, false)) {
                session.release(place, intent(mode), Owner::Ancestor, 1);
            }
        }
        session.settle();
        Some(remaining)
    });
    remaining.ok_or_else(|| match not_held(&lock, None) {
        error @ Error::HeldByTransaction { .. } => error.into(),
        _ => held_by_others(&lock, None, format!("tree \"{}\"", display(lock.name))).into(),
    })
}

/// What [`convert`] has to take for a new mode of a lock: the parts of its path, if it is that of a tree.
pub fn parts_to_convert<'a>(lock: &Lock<'a>, mode: Mode) -> Option<Vec<Part<'a>>> {
    let is_leaf = with_session(|session| {
        let place = session.find_held(lock)?;
        Some(session.ledger.hold(place).count_by(None, Owner::Leaf) > 0)
    });
    let path = Path::new(lock.name).ok().filter(|_| is_leaf == Some(true))?;
    Some(parts(path, mode, Scope::Session))
}

/// Changes the mode of the session's one tree of a path, in one step: whether it has the new mode now.
///
/// # Errors
/// [`Error::NotOneHold`], and as [`acquire`].
pub fn convert(parts: &[Part<'_>], wait: Wait) -> Result<bool, Problem> {
    let leaf = leaf(parts);
    check_may_lock(Scope::Session, || leaf.lock.describe())?;
    let (_, old, statement) = one_hold(&leaf.lock, Owner::Leaf)?;
    if old.mode == leaf.mode {
        return Ok(true);
    }
    // The limits stay what they are; and so do the ancestors where their intent does.
    let first = if intent(old.mode) == intent(leaf.mode) { parts.len() - 1 } else { 0 };
    let parts: Vec<Part<'_>> = parts[first..].iter().map(|part| Part { hold_limit: None, ..*part }).collect();
    if let Some(missing) = take_all(&parts, wait, statement)? {
        let request = super::Request { mode: missing.mode, scope: Scope::Session, wait, hold_limit: None };
        return answer(&missing.lock, &request, Outcome::NotAvailable);
    }
    with_session(|session| {
        for part in parts.iter().rev() {
            let old_mode = if part.owner == Owner::Leaf { old.mode } else { intent(old.mode) };
            let Some(place) = session.find(&part.lock) else { continue };
            if let Some(limit) = session.ledger.hold(place).last_limit(old_mode, part.owner) {
                session.ledger.limit_last(place, part.mode, part.owner, limit);
            }
            session.release(place, old_mode, part.owner, 1);
        }
        session.settle();
    });
    Ok(true)
}

fn leaf<'p, 'a>(parts: &'p [Part<'a>]) -> &'p Part<'a> {
    parts.last().expect("a path has a last part")
}
