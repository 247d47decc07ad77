"""The checks of notes find what is wrong."""

from __future__ import annotations

from notes import Grant, Span, not_rising, overlaps


def grant(asked: float, answered: float, token: int) -> Grant:
    return Grant(asked, answered, "client", "name", token, 0)


def test_tokens_of_grants_one_after_the_other_rise() -> None:
    assert not not_rising([grant(1, 2, 10), grant(3, 4, 11), grant(5, 6, 20)])
    assert len(not_rising([grant(1, 2, 11), grant(3, 4, 10), grant(5, 6, 12)])) == 1
    assert len(not_rising([grant(5, 6, 12), grant(1, 2, 20), grant(3, 4, 13)])) == 2


def test_grants_at_the_same_time_may_have_any_order_and_no_token_twice() -> None:
    assert not not_rising([grant(1, 4, 10), grant(2, 3, 11)])
    assert not not_rising([grant(1, 4, 11), grant(2, 3, 10)])
    assert len(not_rising([grant(1, 4, 10), grant(2, 3, 10)])) == 1


def test_overlaps() -> None:
    assert not overlaps([Span(2, 3, "b"), Span(1, 2, "a"), Span(3, 9, "c")])
    # Also with one that ends long after the next has begun and ended.
    assert len(overlaps([Span(1, 9, "a"), Span(2, 3, "b"), Span(4, 5, "c")])) == 2
