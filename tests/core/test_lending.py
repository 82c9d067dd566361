"""What is lent of the card: never more than is spare, whatever was told before."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from vgpu.packing.lending import Borrower, divide

CARD = 100


def borrower(name: str, promised: int = 0, borrowed: int = 0, limit: int = 0, *, grows: bool = True) -> Borrower:
    return Borrower(name, promised, borrowed, limit, grows)


def test_what_is_left_is_divided_equally() -> None:
    assert divide([borrower("a", 10, 5), borrower("b", 20)], 65) == {"a": 45, "b": 50}


def test_who_stands_still_keeps_what_it_has() -> None:
    assert divide([borrower("a", 0, 5, grows=False), borrower("b")], 65) == {"a": 5, "b": 60}


def test_an_allocation_that_waits_goes_first() -> None:
    asks = replace(borrower("a"), asks_bytes=40)
    assert divide([asks, borrower("b")], 60) == {"a": 50, "b": 10}
    assert divide([replace(asks, asks_bytes=90), borrower("b")], 60) == {"a": 59, "b": 1}


def test_nobody_is_lent_more_than_he_may_own_besides() -> None:
    assert divide([replace(borrower("a", 0, 20), more_bytes=10), borrower("b")], 100) == {"a": 30, "b": 40}
    assert divide([replace(borrower("a", 0, 20), more_bytes=10, asks_bytes=90)], 100) == {"a": 30}


def test_nobody_grows_by_what_another_may_still_take() -> None:
    """It was told 60, and gives 50 back: what it is allocating just now is within those 60."""
    assert divide([borrower("a", 0, 10, 60), borrower("b", 0, 0, 1)], 60) == {"a": 35, "b": 1}
    assert divide([borrower("a", 0, 10, 35), borrower("b", 0, 0, 1)], 60) == {"a": 35, "b": 25}


borrowers = st.lists(
    st.builds(
        Borrower,
        st.sampled_from("abcd"),
        st.integers(0, 20),
        st.integers(0, 20),
        st.integers(0, 60),
        st.booleans(),
        st.integers(0, 60),
    ),
    max_size=4,
    unique_by=lambda b: b.vgpu_id,
)


@given(borrowers, st.integers(0, CARD))
def test_no_more_is_lent_than_is_spare_and_nobody_loses_what_it_has(found: list[Borrower], spare: int) -> None:
    limits = divide(found, spare)
    lent_before = sum(max(0, max(b.known_bytes, b.own_bytes) - b.promised_bytes) for b in found)
    # Who is told a smaller limit may have taken up to the one of before.
    lent = sum(max(0, max(limits[b.vgpu_id], b.known_bytes, b.own_bytes) - b.promised_bytes) for b in found)
    assert lent <= max(spare, lent_before)
    for b in found:
        assert limits[b.vgpu_id] >= min(b.own_bytes, b.known_bytes)
        assert limits[b.vgpu_id] >= 1
