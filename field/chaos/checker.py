"""The checker: reads the histories of a run and what the database says at its end, and tells what cannot be.

It goes by what the documentation promises, and by what a client can know. A hold is certain from the moment that the client has
the answer until the moment before it gives it back. If its session was ended, until the moment before that was done to
it; a lease, whatever becomes of the session, until its TTL after the moment before it was asked for or renewed. Where
the certain holds of two clients meet, there were two holders; the converse is not true, for what nobody has
been told does not count.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from chaos.history import Event

SECOND = 1_000_000_000
# Intervals are cut to microseconds on their way.
ROUNDING = 1_000_000

CANCELLED = "57014"
# What a statement may fail with: it was cancelled, or the lease is another's or over.
ERRORS = (CANCELLED, "55006", "55000")

ENDS_ALL_SESSIONS = ("kill backend", "restart server")


@dataclass
class Row:
    """A line of the ledger: written in the transaction that set the resource's counter to `value`."""

    write: str
    resource: str
    value: int
    token: int | None = None


@dataclass
class Witness:
    """What the database says after the run."""

    ledger: list[Row] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)
    leftovers: list[str] = field(default_factory=list)


@dataclass
class Findings:
    """What was found, and the figures of the run."""

    violations: list[str] = field(default_factory=list)
    grants: Counter[str] = field(default_factory=Counter)
    refusals: int = 0
    cancelled: int = 0
    troubles: Counter[str] = field(default_factory=Counter)
    sessions_lost: int = 0
    by_hold_limit: int = 0
    writes: Counter[str] = field(default_factory=Counter)
    unknown_but_written: int = 0


@dataclass
class Session:
    """A connection, from a client's point of view."""

    name: str
    who: str
    route: str
    pid: int | None
    opened: int
    lost: int | None = None
    text: str = ""


@dataclass
class Attempt:
    """One try to get something, and what became of it."""

    name: str
    who: str
    session: Session
    form: str
    names: list[str]
    tried: int
    mode: str = "exclusive"
    capacity: int = 1
    seconds: float | None = None
    bound: bool = False
    granted: int | None = None
    resources: list[str] = field(default_factory=list)
    pid: int | None = None
    token: int | None = None
    renewals: list[Event] = field(default_factory=list)
    release: int | None = None
    keep: float = 0.0
    released: int | None = None
    gave: bool = True

    @property
    def is_lease(self) -> bool:
        """Whether it is a row with a time to live, rather than a lock of the session or transaction."""
        return self.form.startswith("lease")

    @property
    def in_transaction(self) -> bool:
        """Whether it ends with the transaction."""
        return "xact" in self.form


@dataclass
class Write:
    """One write, and what became of it."""

    name: str
    attempt: Attempt
    changes: dict[str, int]
    token: int | None
    begun: int
    guarded: int | None = None
    commit: int | None = None
    outcome: str | None = None
    ended: int | None = None


@dataclass
class Hold:
    """When somebody certainly had something."""

    attempt: Attempt
    begin: int
    end: int


def check(events: Iterable[Event], witness: Witness) -> Findings:
    """All that is to be said about a run."""
    return Checker(events, witness).findings


class Checker:
    """One run's histories, put together."""

    def __init__(self, events: Iterable[Event], witness: Witness) -> None:
        self.findings = Findings()
        self.sessions: dict[str, Session] = {}
        self.attempts: dict[str, Attempt] = {}
        self.writes: dict[str, Write] = {}
        self.troubles: list[Event] = []
        for event in events:
            self._read(event)
        self.holds = [hold for attempt in self._granted() for hold in self._certain_holds(attempt)]
        self._check_holders()
        self._check_tokens()
        self._check_terms_of_leases()
        self._check_writes(witness)
        self._check_lost_sessions()
        for what in witness.leftovers:
            self._found(f"left over at the end: {what}")

    def _found(self, what: str) -> None:
        self.findings.violations.append(what)

    # Reading ---------------------------------------------------------------------------------------------------------

    def _read(self, event: Event) -> None:
        what = event["what"]
        if "session" in event:
            self._read_session(event)
        elif "write" in event:
            self._read_write(event)
        elif "attempt" in event:
            self._read_attempt(self.attempts[event["attempt"]], event)
        elif what == "broke":
            self._found(f"{event['who']} broke: {event['text']}")
        elif what == "seen twice":
            self._found(f"a view shows two holders: {event['text']}")
        else:
            self.troubles.append(event)
            self.findings.troubles[what] += 1

    def _read_session(self, event: Event) -> None:
        name, what = event["session"], event["what"]
        if what == "open":
            self.sessions[name] = Session(name, event["who"], event["route"], event["pid"], event["at"])
        elif what == "lost":
            self.sessions[name].lost, self.sessions[name].text = event["at"], event["text"]
            self.findings.sessions_lost += 1
        elif what == "error":
            self.findings.cancelled += event["sqlstate"] == CANCELLED
            if event["sqlstate"] not in ERRORS:
                self._found(f"error {event['sqlstate']}: {name}: {event['text']}")
        else:
            given = {key: event[key] for key in ("mode", "capacity", "seconds", "bound") if key in event}
            self.attempts[event["attempt"]] = Attempt(
                event["attempt"],
                event["who"],
                self.sessions[name],
                event["form"],
                event["names"],
                event["at"],
                **given,
            )

    def _read_attempt(self, attempt: Attempt, event: Event) -> None:
        what = event["what"]
        if what == "grant":
            attempt.granted, attempt.resources, attempt.pid = event["at"], event["resources"], event.get("pid")
            attempt.token = event.get("token")
            self.findings.grants[attempt.form] += 1
        elif what == "refuse":
            self.findings.refusals += 1
        elif what == "fail":
            self._expect_cancel(attempt, event)
        elif what == "held":
            if event["count"] != len(attempt.resources):
                self._found(f"half taken: {_tell(attempt)} holds {event['count']} of {len(attempt.resources)}")
        elif what == "saw":
            if event["values"][0] != event["values"][1]:
                self._found(f"changed while held in share mode: {_tell(attempt)} saw {event['values']}")
        elif what == "renew":
            attempt.renewals.append(event)
        elif what == "renewed":
            attempt.renewals[-1] = {**attempt.renewals[-1], "outcome": event["outcome"], "until": event["at"]}
        elif what == "release":
            attempt.release, attempt.keep = event["at"], event.get("keep") or 0.0
        elif what == "released":
            attempt.released, attempt.gave = event["at"], event.get("gave", True)
            if event.get("sqlstate"):
                self._expect_cancel(attempt, event)
        elif what == "idle" and event["locks"]:
            self._found(f"held on: after {_tell(attempt)} its session still has {event['locks']} locks")

    def _read_write(self, event: Event) -> None:
        what, name = event["what"], event["write"]
        if what == "write":
            attempt = self.attempts[event["attempt"]]
            self.writes[name] = Write(name, attempt, event["changes"], event.get("token"), event["at"])
            return
        write = self.writes[name]
        if what == "guarded":
            write.guarded = event["at"]
        elif what == "commit":
            write.commit = event["at"]
        elif what == "written":
            write.outcome, write.ended = event["outcome"], event["at"]

    def _expect_cancel(self, attempt: Attempt, event: Event) -> None:
        """Above all not 55000 at a release: a lock was lost, and its session was not told."""
        if event["sqlstate"] != CANCELLED:
            self._found(f"error {event['sqlstate']}: {event['what']} of {_tell(attempt)}: {event['text']}")

    # Holds -----------------------------------------------------------------------------------------------------------

    def _granted(self) -> Iterator[Attempt]:
        return (attempt for attempt in self.attempts.values() if attempt.granted is not None)

    def _certain_holds(self, attempt: Attempt) -> Iterator[Hold]:
        assert attempt.granted is not None
        if not attempt.is_lease:
            yield Hold(attempt, attempt.granted, self._end_of_lock(attempt))
            return
        end = self._end_of_lease(attempt)
        yield Hold(attempt, attempt.granted, end)
        if attempt.released is not None and attempt.gave:  # from here on nobody has it, as long as it is kept
            kept = attempt.tried + int(attempt.keep * SECOND) - ROUNDING
            yield Hold(attempt, end, min([kept, *self._breaks(attempt)]))

    def _end_of_lock(self, attempt: Attempt) -> int:
        if attempt.released is not None and attempt.release is not None:
            return attempt.release
        ends = [] if attempt.release is None else [attempt.release]
        ends += self._ends_of_session(attempt)
        return max(min(ends), attempt.granted or 0) if ends else attempt.granted or 0

    def _end_of_lease(self, attempt: Attempt) -> int:
        asked = [attempt.tried] + [event["at"] for event in attempt.renewals if event.get("outcome") == "acked"]
        ends = [max(asked) + int((attempt.seconds or 0.0) * SECOND) - ROUNDING]
        if attempt.release is not None:
            ends.append(attempt.release)
        ends += self._breaks(attempt)
        if attempt.bound:
            ends += self._ends_of_session(attempt)
        return max(min(ends), attempt.granted or 0)

    def _breaks(self, attempt: Attempt) -> list[int]:
        """The moments at which the lease may have been broken."""
        breaks = [trouble for trouble in self.troubles if trouble["what"] == "break lease"]
        return [
            trouble["at"]
            for trouble in breaks
            if trouble["name"] in attempt.names and trouble["until"] >= (attempt.granted or 0)
        ]

    def _ends_of_session(self, attempt: Attempt) -> Iterator[int]:
        """The moments at which the session or transaction may have ended, with all it held."""
        assert attempt.granted is not None
        for trouble in self.troubles:
            what = trouble["what"]
            by_pid = trouble.get("pid") is not None and trouble.get("pid") == attempt.pid
            if (
                (what in ENDS_ALL_SESSIONS and trouble["until"] >= attempt.granted)
                or (what == "terminate" and by_pid)
                or (what == "cancel" and by_pid and attempt.in_transaction)
                or (what == "restart pooler" and trouble["mode"] == attempt.session.route)
                or (what == "kill client" and trouble["client"] == attempt.who)
            ) and (attempt.session.lost is None or trouble["at"] <= attempt.session.lost):
                yield trouble["at"]
        if attempt.seconds is not None and not attempt.is_lease:
            yield attempt.tried + int(attempt.seconds * SECOND) - ROUNDING

    def _check_holders(self) -> None:
        """No two holders at once, no more than there are permits, and none at all but readers beside a reader."""
        by_resource: dict[tuple[str, int], list[Hold]] = defaultdict(list)
        for hold in self.holds:
            if hold.end > hold.begin:
                for resource in hold.attempt.resources:
                    by_resource[resource, _capacity(hold.attempt, resource)].append(hold)
                if hold.attempt.form == "named_semaphore":
                    by_resource[f"semaphore:{hold.attempt.names[0]}", hold.attempt.capacity].append(hold)
        # A write that the guard has let through: until it is committed nobody else is granted the lease.
        for write in self.writes.values():
            if write.outcome == "acked" and write.guarded is not None and write.commit is not None:
                for resource in write.attempt.resources:
                    hold = Hold(write.attempt, write.guarded, write.commit)
                    by_resource[resource, write.attempt.capacity].append(hold)
        for (resource, capacity), holds in by_resource.items():
            self._check_overlaps(resource, capacity, holds)

    def _check_overlaps(self, resource: str, capacity: int, holds: list[Hold]) -> None:
        ends: list[tuple[int, int]] = []
        active: dict[int, Attempt] = {}
        told: set[frozenset[str]] = set()
        for number, hold in enumerate(sorted(holds, key=lambda hold: hold.begin)):
            while ends and ends[0][0] <= hold.begin:
                del active[heapq.heappop(ends)[1]]
            heapq.heappush(ends, (hold.end, number))
            active[number] = hold.attempt
            # By name: a lease's hold and its guarded writes are one holder's.
            holders = {attempt.name: attempt for attempt in active.values()}
            is_shared = all(attempt.mode == "share" for attempt in holders.values())
            them = frozenset(holders)
            if len(holders) > capacity and not is_shared and them not in told:
                told.add(them)
                names = ", ".join(_tell(attempt) for attempt in holders.values())
                self._found(f"{len(holders)} holders at once of {resource} ({capacity} allowed): {names}")

    # Leases ----------------------------------------------------------------------------------------------------------

    def _check_tokens(self) -> None:
        """Later grants have higher tokens, for all names; and so have the grants of one lease in their order."""
        leases = [attempt for attempt in self._granted() if attempt.is_lease and attempt.token is not None]
        latest: Attempt | None = None
        before: Attempt | None = None
        for attempt in sorted(leases, key=lambda attempt: attempt.token or 0):
            if before is not None and before.token == attempt.token:
                self._found(f"one token twice: {_tell(before)}, {_tell(attempt)}")
            if latest is not None and (attempt.granted or 0) < latest.tried:
                self._found(f"tokens do not rise: {_tell(attempt)} was before {_tell(latest)}")
            if latest is None or attempt.tried > latest.tried:
                latest = attempt
            before = attempt
        highest: dict[str, Attempt] = {}
        for hold in sorted(self.holds, key=lambda hold: hold.begin):
            attempt = hold.attempt
            if not attempt.is_lease or attempt.capacity > 1 or hold.end <= hold.begin:
                continue
            [resource] = attempt.resources
            last = highest.setdefault(resource, attempt)
            if (attempt.token or 0) < (last.token or 0):
                self._found(f"tokens do not rise: {_tell(last)} had it before {_tell(attempt)}")
            else:
                highest[resource] = attempt

    def _check_terms_of_leases(self) -> None:
        """A lease is neither refused to its holder before its end, nor granted to it after that."""
        by_attempt: dict[str, list[Write]] = defaultdict(list)
        for write in self.writes.values():
            by_attempt[write.attempt.name].append(write)
        for attempt in self._granted():
            if not attempt.is_lease:
                continue
            end = self._end_of_lease(attempt)
            # Each use: before it, after it, outcome, whether it prolongs.
            uses = [(write.begun, write.ended, write.outcome, False) for write in by_attempt[attempt.name]]
            uses += [(event["at"], event.get("until"), event.get("outcome"), True) for event in attempt.renewals]
            last_end: float = (attempt.granted or 0) + int((attempt.seconds or 0.0) * SECOND) + ROUNDING
            for begun, ended, outcome, prolongs in sorted(uses, key=lambda use: use[0]):
                if outcome == "refused" and (ended or 0) < end:
                    self._found(
                        f"lost before its end: {_tell(attempt)}, {(end - (ended or 0)) / SECOND:.3f} s too early"
                    )
                if outcome == "acked" and begun > last_end:
                    self._found(f"good after its end: {_tell(attempt)}, {(begun - last_end) / SECOND:.3f} s too late")
                if prolongs and outcome == "acked":
                    last_end = (ended or 0) + int((attempt.seconds or 0.0) * SECOND) + ROUNDING
                elif prolongs and outcome != "refused":
                    last_end = math.inf  # whether and when it was renewed is not known

    # Writes ----------------------------------------------------------------------------------------------------------

    def _check_writes(self, witness: Witness) -> None:
        rows: dict[str, list[Row]] = defaultdict(list)
        chains: dict[str, list[tuple[int, Row]]] = defaultdict(list)
        for row in witness.ledger:
            rows[row.write].append(row)
            chains[row.resource].append((row.value, row))
        for write in self.writes.values():
            self._check_outcome(write, {row.resource: row.value for row in rows.pop(write.name, [])})
        for name in rows:
            self._found(f"a write that nobody made: {name}")
        for resource in sorted(chains.keys() | witness.counters.keys()):
            chain = sorted(chains[resource], key=lambda link: link[0])
            self._check_chain(resource, [row for _, row in chain], witness.counters.get(resource, 0))

    def _check_outcome(self, write: Write, found: dict[str, int]) -> None:
        outcome = write.outcome or ("unknown" if write.commit is not None else "failed")
        self.findings.writes[outcome] += 1
        if outcome == "unknown" and found:
            self.findings.unknown_but_written += 1
        if outcome == "acked" and found != write.changes:
            self._found(f"lost update: {write.name} was acknowledged, and of {write.changes} there is {found}")
        elif outcome in ("failed", "refused") and found:
            self._found(f"written all the same: {write.name} was {outcome}, and there is {found}")
        elif outcome == "unknown" and found and found != write.changes:
            self._found(f"half written: of {write.name} {write.changes} there is {found}")

    def _check_chain(self, resource: str, chain: list[Row], counter: int) -> None:
        """Each write has added one to what the one before it wrote: none was lost, none came of an old read."""
        if [row.value for row in chain] != list(range(1, len(chain) + 1)) or counter != len(chain):
            twice = [value for value, times in Counter(row.value for row in chain).items() if times > 1]
            self._found(
                f"lost update: {len(chain)} writes have brought {resource} to {counter}; written twice: {twice[:5]}"
            )
        latest, highest = -math.inf, 0
        for row in chain:
            write = self.writes.get(row.write)
            if write is None:
                continue
            if write.outcome == "acked" and (write.ended or 0) < latest:
                self._found(f"out of order: {row.write} ended before one began whose value is lower")
            latest = max(latest, write.begun)
            if write.attempt.is_lease:
                if row.token != write.attempt.token:
                    self._found(f"another's token: {row.write} has {row.token}, not {write.attempt.token}")
                if (row.token or 0) < highest:
                    self._found(f"a late write was let through: {row.write} with token {row.token} after {highest}")
                highest = max(highest, row.token or 0)

    # Sessions --------------------------------------------------------------------------------------------------------

    def _check_lost_sessions(self) -> None:
        """No session ends but by what was done to it."""
        limits: dict[str, list[int]] = defaultdict(list)
        for attempt in self._granted():
            if attempt.seconds is not None and not attempt.is_lease:
                limit = attempt.tried + int(attempt.seconds * SECOND)
                if attempt.released is None or attempt.released >= limit:
                    limits[attempt.session.name].append(limit)
        for session in self.sessions.values():
            if session.lost is None or self._was_ended(session):
                continue
            if any(limit <= session.lost for limit in limits[session.name]):
                self.findings.by_hold_limit += 1
            else:
                self._found(f"a session ended for no reason: {session.name}: {session.text}")

    def _was_ended(self, session: Session) -> bool:
        for trouble in self.troubles:
            what = trouble["what"]
            if (
                session.opened <= trouble["until"]
                and trouble["at"] <= (session.lost or 0)
                and (
                    what in ENDS_ALL_SESSIONS
                    or (what == "terminate" and session.pid in (trouble["pid"], None))
                    or (what == "restart pooler" and trouble["mode"] == session.route)
                )
            ):
                return True
        return False


def _capacity(attempt: Attempt, resource: str) -> int:
    """How many may have it; of a semaphore's slot it is one."""
    return 1 if "#" in resource else attempt.capacity


def _tell(attempt: Attempt) -> str:
    token = f", token {attempt.token}" if attempt.token is not None else ""
    return f"{attempt.name} ({attempt.form} of {', '.join(attempt.names)}{token})"
