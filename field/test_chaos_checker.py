"""The checker of chaos sees each kind of violation, and none in what is merely unlucky."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest

from chaos.checker import SECOND, Row, Witness, check
from chaos.history import History, read_histories

if TYPE_CHECKING:
    from pathlib import Path

    from chaos.history import Event


class Story:
    """A history, told in seconds."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.witness = Witness()
        self._numbers = itertools.count(1)

    def note(self, at: float, who: str, what: str, until: float | None = None, **facts: Any) -> None:
        """An event."""
        if until is not None:
            facts["until"] = int(until * SECOND)
        self.events.append({"at": int(at * SECOND), "who": who, "what": what, **facts})

    def trouble(self, at: float, what: str, **facts: Any) -> None:
        """Something that the troublemaker does."""
        self.note(at, "trouble", what, until=at + 0.1, **facts)

    def session(self, who: str, route: str = "direct", pid: int = 1) -> str:
        """A new session."""
        session = f"{who}/s{next(self._numbers)}"
        self.note(0, who, "open", session=session, route=route, pid=pid)
        return session

    def granted(
        self,
        who: str,
        begin: float,
        end: float | None = None,
        name: str = "a",
        form: str = "named_lock",
        resources: tuple[str, ...] = (),
        session: str = "",
        pid: int = 1,
        token: int | None = None,
        **facts: Any,
    ) -> str:
        """Something asked for at `begin`, granted 0.1 s later and given back at `end`."""
        attempt = f"{who}/{next(self._numbers)}"
        session = session or self.session(who, pid=pid)
        self.note(begin, who, "try", attempt=attempt, session=session, form=form, names=[name], **facts)
        kind = "lease" if form.startswith("lease") else "lock"
        resources = resources or (f"{kind}:{name}",)
        self.note(begin + 0.1, who, "grant", attempt=attempt, resources=list(resources), pid=pid, token=token)
        if end is not None:
            self.note(end, who, "release", attempt=attempt)
            self.note(end + 0.1, who, "released", attempt=attempt)
        return attempt

    def lease(self, who: str, begin: float, end: float | None, token: int, ttl: float = 10.0, **facts: Any) -> str:
        """A lease."""
        return self.granted(who, begin, end, form="lease_acquire", token=token, seconds=ttl, **facts)

    def written(
        self,
        attempt: str,
        at: float,
        value: int,
        outcome: str | None = "acked",
        resource: str = "lock:a",
        token: int | None = None,
        in_database: bool = True,
    ) -> str:
        """A write begun at `at`, committed 0.1 s and answered 0.2 s later."""
        write, who = f"w{next(self._numbers)}", attempt.partition("/")[0]
        self.note(at, who, "write", write=write, attempt=attempt, changes={resource: value}, token=token)
        if outcome != "failed":
            self.note(at + 0.1, who, "commit", write=write)
        if outcome is not None:
            self.note(at + 0.2, who, "written", write=write, outcome=outcome)
        if in_database:
            self.witness.ledger.append(Row(write, resource, value, token))
            self.witness.counters[resource] = max(value, self.witness.counters.get(resource, 0))
        return write

    def violations(self) -> list[str]:
        """What the checker finds."""
        return check(self.events, self.witness).violations

    def is_clean(self) -> bool:
        """Whether it finds nothing."""
        assert self.violations() == []
        return True

    def shows(self, *words: str) -> bool:
        """Whether it finds one thing, told in these words."""
        [violation] = self.violations()
        assert all(word in violation for word in words), violation
        return True


@pytest.fixture
def story() -> Story:
    """An empty history."""
    return Story()


# Holders -------------------------------------------------------------------------------------------------------------


def test_one_after_the_other(story: Story) -> None:
    story.granted("A", 1, 2)
    story.granted("B", 1.9, 3)  # asked for before; the answer came after
    assert story.is_clean()


def test_two_holders(story: Story) -> None:
    story.granted("A", 1, 3)
    story.granted("B", 1.5, 2)
    assert story.shows("2 holders at once of lock:a", "A/", "B/")


def test_two_holders_by_way_of_a_set_and_a_tree(story: Story) -> None:
    story.granted("A", 1, 3, form="named_lock_all", resources=("lock:a", "lock:b"))
    story.granted("B", 1.5, 2, form="named_xact_lock_tree", resources=("lock:b", "lock:c"))
    assert story.shows("2 holders at once of lock:b")


def test_readers_together_but_no_writer_beside_them(story: Story) -> None:
    story.granted("A", 1, 3, mode="share")
    story.granted("B", 1, 3, mode="share")
    assert story.is_clean()
    story.granted("C", 2, 4)
    assert story.shows("3 holders at once")


def test_more_than_a_semaphore_admits(story: Story) -> None:
    for slot, who in enumerate("ABC", 1):
        assert story.is_clean()
        story.granted(who, 1, 3, form="named_semaphore", resources=(f"semaphore:a#{slot}",), capacity=2)
    assert story.shows("3 holders at once of semaphore:a (2 allowed)")


def test_one_slot_twice(story: Story) -> None:
    for who in "AB":
        story.granted(who, 1, 3, form="named_semaphore", resources=("semaphore:a#1",), capacity=2)
    assert story.shows("2 holders at once of semaphore:a#1 (1 allowed)")


@pytest.mark.parametrize(
    ("what", "facts"),
    [
        ("terminate", {"pid": 7}),
        ("kill backend", {"pid": 8}),
        ("restart server", {}),
        ("kill client", {"client": "A"}),
    ],
)
def test_a_session_holds_until_it_is_ended(story: Story, what: str, facts: dict[str, Any]) -> None:
    story.granted("A", 1, pid=7)
    story.trouble(3, what, **facts)
    story.granted("B", 3, 4)
    assert story.is_clean()
    story.granted("C", 2, 2.5)
    assert story.shows("2 holders at once of lock:a", "A/", "C/")


def test_a_pooled_session_holds_until_the_pooler_ends(story: Story) -> None:
    story.granted("A", 1, session=story.session("A", "session"))
    story.trouble(3, "restart pooler", mode="session")
    story.granted("B", 3, 4)
    assert story.is_clean()
    story.granted("C", 2, 2.5)
    assert story.shows("2 holders at once of lock:a")


def test_a_hold_limit_is_not_over_before(story: Story) -> None:
    story.granted("A", 1, seconds=2)
    story.granted("B", 2.95, 4)
    assert story.is_clean()
    story.granted("C", 2.8, 2.95)
    assert story.shows("2 holders at once of lock:a")


def test_a_cancelled_transaction_holds_nothing_any_more(story: Story) -> None:
    story.granted("A", 1, form="named_xact_lock", pid=7)
    story.trouble(2, "cancel", pid=7)
    story.trouble(4, "kill client", client="A")
    story.granted("B", 2, 3)
    assert story.is_clean()


def test_the_others_trouble_ends_nothing(story: Story) -> None:
    story.granted("A", 1, pid=7)
    story.trouble(2, "terminate", pid=8)
    story.trouble(2, "kill client", client="B")
    story.trouble(2, "restart pooler", mode="session")
    story.trouble(2, "cancel", pid=7)
    story.trouble(9, "terminate", pid=7)
    story.granted("C", 3, 4)
    assert story.shows("2 holders at once of lock:a")


# Sets and what is left -----------------------------------------------------------------------------------------------


def test_half_a_set(story: Story) -> None:
    attempt = story.granted("A", 1, 3, form="named_lock_all", resources=("lock:a", "lock:b"))
    story.note(1.5, "A", "held", attempt=attempt, count=2)
    assert story.is_clean()
    story.note(1.5, "A", "held", attempt=attempt, count=1)
    assert story.shows("half taken", "holds 1 of 2")


def test_something_held_after_all(story: Story) -> None:
    session = story.session("A")
    story.note(1, "A", "try", attempt="A/1", session=session, form="named_lock_all", names=["a", "b"])
    story.note(2, "A", "refuse", attempt="A/1")
    story.note(3, "A", "idle", attempt="A/1", locks=0)
    assert story.is_clean()
    story.note(3, "A", "idle", attempt="A/1", locks=1)
    assert story.shows("held on", "still has 1 locks")


def test_something_left_at_the_end(story: Story) -> None:
    story.witness.leftovers.append("held: a")
    assert story.shows("left over", "held: a")


def test_two_holders_in_a_view(story: Story) -> None:
    story.note(1, "trouble", "seen twice", text="session a")
    assert story.shows("a view shows two holders")


# Leases --------------------------------------------------------------------------------------------------------------


def test_a_lease_is_held_to_its_end(story: Story) -> None:
    story.lease("A", 1, None, 1)
    story.trouble(2, "restart server")  # it outlives that
    story.lease("B", 10.95, 12, 2)
    assert story.is_clean()
    story.lease("C", 5, 6, 2)
    assert "2 holders at once of lease:a" in story.violations()[0]


def test_a_renewed_lease_is_held_for_longer(story: Story) -> None:
    attempt = story.lease("A", 1, None, 1)
    story.note(9, "A", "renew", attempt=attempt)
    story.note(9.1, "A", "renewed", attempt=attempt, outcome="acked")
    story.lease("B", 12, 13, 2)
    assert story.shows("2 holders at once of lease:a")


def test_a_renewal_without_an_answer_does_not_count(story: Story) -> None:
    attempt = story.lease("A", 1, None, 1)
    story.note(9, "A", "renew", attempt=attempt)
    story.note(9.1, "A", "renewed", attempt=attempt, outcome="unknown")
    story.lease("B", 12, 13, 2)
    assert story.is_clean()


def test_a_broken_lease_is_over(story: Story) -> None:
    story.lease("A", 1, None, 1)
    story.trouble(4, "break lease", name="a")
    story.lease("B", 4, 5, 2)
    assert story.is_clean()
    story.trouble(6, "break lease", name="b")
    story.lease("C", 6, None, 3)
    story.lease("D", 7, None, 4)
    assert story.shows("2 holders at once of lease:a", "C/", "D/")


def test_a_kept_lease_is_nobodys(story: Story) -> None:
    attempt = story.lease("A", 1, None, 1)
    story.note(2, "A", "release", attempt=attempt, keep=5)
    story.note(2.1, "A", "released", attempt=attempt, gave=True)
    story.lease("B", 5.95, 7, 3)
    assert story.is_clean()
    story.lease("C", 3, 4, 2)
    assert story.shows("2 holders at once of lease:a", "A/", "C/")


def test_what_was_over_is_not_kept(story: Story) -> None:
    attempt = story.lease("A", 1, None, 1)
    story.note(2, "A", "release", attempt=attempt, keep=5)
    story.note(2.1, "A", "released", attempt=attempt, gave=False)
    story.lease("B", 3, 4, 2)
    assert story.is_clean()


def test_a_bound_lease_ends_with_its_session(story: Story) -> None:
    story.lease("A", 1, None, 1, bound=True, pid=7)
    story.trouble(3, "terminate", pid=7)
    story.lease("B", 3, 4, 2)
    assert story.is_clean()


def test_an_unbound_lease_does_not_end_with_its_session(story: Story) -> None:
    story.lease("A", 1, None, 1, pid=7)
    story.trouble(3, "terminate", pid=7)
    story.lease("B", 3, 4, 2)
    assert story.shows("2 holders at once of lease:a")


def test_more_than_the_permits(story: Story) -> None:
    story.lease("A", 1, 5, 1, capacity=2)
    story.lease("B", 1, 5, 2, capacity=2)
    assert story.is_clean()
    story.lease("C", 2, 5, 3, capacity=2)
    assert story.shows("3 holders at once of lease:a (2 allowed)")


def test_a_grant_during_a_guarded_write(story: Story) -> None:
    attempt = story.lease("A", 1, None, 1, ttl=2)
    write = story.written(attempt, 2.8, 1, token=1, resource="lease:a")
    story.note(2.9, "A", "guarded", write=write)
    story.note(8, "A", "commit", write=write)
    story.lease("B", 8, 9, 2)
    assert story.is_clean()
    story.lease("C", 4, 5, 2)
    assert "2 holders at once of lease:a" in story.violations()[0]


def test_tokens_rise_across_names(story: Story) -> None:
    story.lease("A", 1, 2, 5)
    story.lease("B", 1.05, 2, 4, name="b")  # at the same time: either way
    assert story.is_clean()
    story.lease("C", 3, 4, 3, name="c")
    assert [violation.partition(":")[0] for violation in story.violations()] == ["tokens do not rise"] * 2  # than 4, 5


def test_tokens_rise_in_the_order_of_the_grants(story: Story) -> None:
    """Both have asked at the same time, but had it one after the other."""
    story.lease("A", 1, 2, 5)
    story.note(1, "B", "try", attempt="B/1", session=story.session("B"), form="lease_acquire", names=["a"], seconds=10)
    story.note(3, "B", "grant", attempt="B/1", resources=["lease:a"], token=4)
    assert story.shows("tokens do not rise", "A/", "B/")


def test_one_token_twice(story: Story) -> None:
    story.lease("A", 1, 2, 5)
    story.lease("B", 1.05, 2, 5, name="b")
    assert story.shows("one token twice")


def test_a_lease_lost_before_its_end(story: Story) -> None:
    attempt = story.lease("A", 1, None, 1)
    story.written(attempt, 11, 1, "refused", token=1, in_database=False)
    assert story.is_clean()
    attempt = story.lease("B", 20, None, 2)
    story.note(22, "B", "renew", attempt=attempt)
    story.note(22.1, "B", "renewed", attempt=attempt, outcome="refused")
    assert story.shows("lost before its end", "B/")


def test_a_lease_that_is_good_after_its_end(story: Story) -> None:
    attempt = story.lease("A", 1, None, 1)
    story.written(attempt, 10.9, 1, token=1, resource="lease:a")
    assert story.is_clean()
    story.written(attempt, 11.2, 2, token=1, resource="lease:a")
    assert story.shows("good after its end", "0.099 s too late")


# Writes --------------------------------------------------------------------------------------------------------------


def test_writes_one_by_one(story: Story) -> None:
    attempt = story.granted("A", 1, 9)
    story.written(attempt, 2, 1)
    story.written(attempt, 3, 2, "unknown")
    story.written(attempt, 4, 3, None)  # its writer was killed
    story.written(attempt, 5, 4, "unknown", in_database=False)
    story.written(attempt, 6, 4, "failed", in_database=False)
    story.written(attempt, 7, 4)
    assert story.is_clean()


def test_an_update_lost_to_another(story: Story) -> None:
    attempt = story.granted("A", 1, 9)
    story.written(attempt, 2, 1)
    story.written(attempt, 2.1, 1)
    assert story.shows("lost update", "2 writes", "written twice: [1]")


def test_a_counter_gone_back(story: Story) -> None:
    attempt = story.granted("A", 1, 9)
    story.written(attempt, 2, 1)
    story.witness.counters["lock:a"] = 0
    assert story.shows("lost update", "1 writes have brought lock:a to 0")


def test_an_acknowledged_write_that_is_not_there(story: Story) -> None:
    attempt = story.granted("A", 1, 9)
    story.written(attempt, 2, 1, in_database=False)
    assert story.shows("lost update", "was acknowledged")


def test_a_write_that_was_never_committed(story: Story) -> None:
    attempt = story.granted("A", 1, 9)
    story.written(attempt, 2, 1, "failed")
    assert story.shows("written all the same")


def test_a_refused_write(story: Story) -> None:
    attempt = story.lease("A", 1, None, 1, ttl=0.5)
    story.written(attempt, 2, 1, "refused", token=1, resource="lease:a")
    assert story.shows("written all the same")


def test_half_a_write(story: Story) -> None:
    attempt = story.granted("A", 1, 9)
    write = story.written(attempt, 2, 1, "unknown")
    story.events[-3]["changes"]["lock:b"] = 1
    assert story.shows("half written", write)


def test_a_write_of_nobody(story: Story) -> None:
    story.witness.ledger.append(Row("w", "lock:a", 1))
    story.witness.counters["lock:a"] = 1
    assert story.shows("a write that nobody made: w")


def test_a_write_of_what_was_read_long_ago(story: Story) -> None:
    attempt = story.granted("A", 1, 9)
    story.written(attempt, 5, 1)
    story.written(attempt, 2, 2)
    assert story.shows("out of order")


def test_a_late_write_let_through(story: Story) -> None:
    late, current = story.lease("A", 1, 2, 1), story.lease("B", 3, 9, 2)
    story.written(current, 4, 1, token=2, resource="lease:a")
    story.written(late, 4.1, 2, token=1, resource="lease:a")
    assert story.shows("a late write was let through")


def test_a_write_under_anothers_token(story: Story) -> None:
    attempt = story.lease("A", 1, 2, 1)
    story.written(attempt, 1.5, 1, token=2, resource="lease:a")
    assert story.shows("another's token")


def test_a_change_under_a_share_lock(story: Story) -> None:
    attempt = story.granted("A", 1, 9, mode="share")
    story.note(2, "A", "saw", attempt=attempt, values=[{"lock:a": 1}, {"lock:a": 1}])
    assert story.is_clean()
    story.note(2, "A", "saw", attempt=attempt, values=[{"lock:a": 1}, {"lock:a": 2}])
    assert story.shows("changed while held in share mode")


# Sessions and errors -------------------------------------------------------------------------------------------------


def test_a_lock_lost_without_a_word(story: Story) -> None:
    attempt = story.granted("A", 1)
    story.note(2, "A", "release", attempt=attempt)
    story.note(2.1, "A", "released", attempt=attempt, sqlstate="55000", text="not held")
    assert story.shows("error 55000", "not held")


def test_a_statement_that_fails_as_none_should(story: Story) -> None:
    session = story.session("A")
    for sqlstate in ("57014", "55000", "55006"):
        story.note(1, "A", "error", session=session, sqlstate=sqlstate, text="as it goes")
    assert story.is_clean()
    story.note(1, "A", "error", session=session, sqlstate="53200", text="oh")
    assert story.shows("error 53200", "oh")


def test_an_attempt_that_fails_as_none_should(story: Story) -> None:
    session = story.session("A")
    story.note(1, "A", "try", attempt="A/1", session=session, form="named_lock", names=["a"])
    story.note(2, "A", "fail", attempt="A/1", sqlstate="57014", text="cancelled")
    assert story.is_clean()
    story.note(2, "A", "fail", attempt="A/1", sqlstate="55000", text="oh")
    assert story.shows("error 55000", "oh")


def test_a_client_that_breaks(story: Story) -> None:
    story.note(1, "A", "broke", text="Traceback")
    assert story.shows("A broke", "Traceback")


@pytest.mark.parametrize(
    ("route", "what", "facts"),
    [
        ("direct", "terminate", {"pid": 7}),
        ("direct", "kill backend", {"pid": 8}),
        ("session", "restart server", {}),
        ("session", "restart pooler", {"mode": "session"}),
    ],
)
def test_a_session_ends_for_a_reason(story: Story, route: str, what: str, facts: dict[str, Any]) -> None:
    session = story.session("A", route, pid=7)
    story.trouble(2, what, **facts)
    story.note(3, "A", "lost", session=session, sqlstate=None, text="closed")
    assert story.is_clean()
    other = story.session("B", "direct", pid=9)
    story.note(1, "B", "lost", session=other, sqlstate=None, text="closed")
    assert story.shows("a session ended for no reason", "B/")


def test_a_session_ends_by_its_hold_limit(story: Story) -> None:
    session = story.session("A")
    story.granted("A", 1, session=session, seconds=2)
    story.note(3.2, "A", "lost", session=session, sqlstate="57P01", text="hold limit")
    assert story.is_clean()
    session = story.session("B")
    story.granted("B", 4, session=session, seconds=2)
    story.note(5, "B", "lost", session=session, sqlstate="57P01", text="hold limit")
    assert story.shows("a session ended for no reason", "B/")


# The files -----------------------------------------------------------------------------------------------------------


def test_a_history_whose_writer_was_killed(tmp_path: Path) -> None:
    History(tmp_path, "A").note("broke", text="one")
    with (tmp_path / "A.jsonl").open("a") as file:
        file.write('{"at": 1, "who": "A", "wh')
    assert [event["text"] for event in read_histories(tmp_path)] == ["one"]
