"""What a client can ask for: the statement, what its answer covers, and how to give it back.

`xact` is "" for the form that holds for the session, or "xact_" for that of the transaction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from random import Random

LOCKS = ["a", "b", "c", "d", "e", "f"]
SHARED = ["a", "b"]  # the others are never held in share mode: readers would keep writers out for long
LEAVES = ["site/1/x", "site/1/y", "site/2/x", "site/2/y"]
ROOT = "site"
TREES = [*LEAVES, *LEAVES, "site/1", "site/2", ROOT]
SEMAPHORES = {"a": 2, "b": 3}
LEASES = ["a", "b", "c", "d", "e"]
COUNTING_LEASE, PERMITS = "many", 2

TTL = 1.0  # seconds
HOLD_LIMIT = 0.6


def all_resources() -> list[str]:
    """All that has a counter."""
    slots = [f"semaphore:{name}#{slot + 1}" for name, permits in SEMAPHORES.items() for slot in range(permits)]
    return [f"lock:{name}" for name in LOCKS + LEAVES] + [f"lease:{name}" for name in LEASES] + slots


@dataclass(frozen=True)
class Ask:
    """What to ask for, how to give it back, and what the answer covers."""

    form: str
    names: list[str]
    take: str
    parameters: Sequence[Any]
    covers: Callable[[list[tuple[Any, ...]]], list[str]]
    give: str = ""
    mode: str = "exclusive"
    capacity: int = 1
    limit: float | None = None


def timeout(dice: Random) -> str:
    """How long to wait."""
    return dice.choice(["0", "300 ms", "300 ms", "2 s"])


def ask_lock(dice: Random, xact: str) -> Ask:
    """One name."""
    name = dice.choice([*LOCKS, ROOT])
    covered = LEAVES if name == ROOT else [name]  # whoever locks a path needs its root too
    shared = name in SHARED and dice.random() < 0.6
    limit = HOLD_LIMIT if not xact and dice.random() < 0.2 else None
    hold_limit = f", hold_limit => '{limit} s'" if limit else ""
    mode = "share" if shared else "exclusive"
    return Ask(
        f"named_{xact}lock",
        [name],
        f"SELECT named_{xact}lock(%s, %s, %s{hold_limit}), pg_backend_pid()",
        [name, timeout(dice), mode],
        lambda rows: [f"lock:{name}" for name in covered] if rows[0][0] else [],
        give="SELECT named_unlock(%s)",
        mode=mode,
        limit=limit,
    )


def ask_wait(dice: Random, _xact: str = "") -> Ask:
    """One name, without a snapshot while waiting."""
    name = dice.choice(LOCKS)
    return Ask(
        "named_lock_wait",
        [name],
        "CALL named_lock_wait(%s, %s)",
        [name, timeout(dice)],
        lambda rows: [f"lock:{name}"] if rows[0][0] else [],
        give="SELECT named_unlock(%s)",
    )


def ask_all(dice: Random, xact: str) -> Ask:
    """Some names, all of them or none."""
    names = dice.sample(LOCKS, dice.randint(2, 3))
    return Ask(
        f"named_{xact}lock_all",
        names,
        f"SELECT named_{xact}lock_all(%s, %s), pg_backend_pid()",
        [names, timeout(dice)],
        lambda rows: [f"lock:{name}" for name in names] if rows[0][0] else [],
        give="SELECT named_unlock_all()",
    )


def ask_any(dice: Random, xact: str) -> Ask:
    """Up to two of some names."""
    names = dice.sample(LOCKS, 4)
    return Ask(
        f"named_{xact}lock_any",
        names,
        f"SELECT name, pg_backend_pid() FROM named_{xact}lock_any(%s, 2) AS name",
        [names],
        lambda rows: [f"lock:{name}" for name, _ in rows],
        give="SELECT named_unlock_all()",
    )


def ask_tree(dice: Random, xact: str) -> Ask:
    """A path and all below it."""
    path = dice.choice(TREES)
    return Ask(
        f"named_{xact}lock_tree",
        [path],
        f"SELECT named_{xact}lock_tree(%s, %s), pg_backend_pid()",
        [path, timeout(dice)],
        lambda rows: [f"lock:{leaf}" for leaf in LEAVES if f"{leaf}/".startswith(f"{path}/")] if rows[0][0] else [],
        give="SELECT named_unlock_tree(%s)",
    )


def ask_semaphore(dice: Random, _xact: str = "") -> Ask:
    """A slot."""
    name, permits = dice.choice(list(SEMAPHORES.items()))
    return Ask(
        "named_semaphore",
        [name],
        "SELECT named_semaphore(%s, %s, %s), pg_backend_pid()",
        [name, permits, timeout(dice)],
        lambda rows: [f"semaphore:{name}#{rows[0][0]}"] if rows[0][0] else [],
        give="SELECT named_semaphore_release(%s, %s)",
        capacity=permits,
    )


BY_TRANSACTION = [ask_lock, ask_lock, ask_all, ask_any, ask_tree]
BY_SESSION = [*BY_TRANSACTION, ask_wait, ask_semaphore, ask_semaphore]
