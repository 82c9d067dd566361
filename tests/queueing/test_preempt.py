"""Which vGPUs are suspended for a request: only lower ones, on one GPU, and never more than needed."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from vgpu.queueing.order import Room, Waiting, ordered
from vgpu.queueing.preempt import Card, Plan, Running, Size, choose

SIZES = st.builds(Size, st.integers(0, 10), st.integers(0, 10))
RUNNING = st.builds(
    Running,
    vgpu_id=st.uuids().map(str),
    priority=st.integers(0, 2),
    frees=SIZES,
    copied_bytes=st.integers(0, 5),
    created_unix_s=st.integers(0, 5).map(float),
)
RUNNING_ONES = st.lists(RUNNING, max_size=6).map(tuple)


@st.composite
def cards(draw: st.DrawFn) -> list[Card]:
    count = draw(st.integers(1, 3))
    return [Card(gpu, draw(SIZES), draw(SIZES), draw(RUNNING_ONES)) for gpu in range(count)]


def suffices(card: Card, chosen: tuple[Running, ...]) -> bool:
    room = card.room
    for one in chosen:
        room = room.plus(one.frees)
    return room.covers(card.asked)


@given(st.integers(0, 2), cards())
def test_only_lower_ones_on_one_gpu_and_no_proper_subset_would_do(priority: int, found: list[Card]) -> None:
    plan = choose(priority, found)
    if plan is None:
        return
    card = found[plan.gpu]
    assert set(plan.victims) <= set(card.running)
    assert all(one.priority < priority for one in plan.victims)
    assert suffices(card, plan.victims)
    for size in range(len(plan.victims)):
        assert not any(suffices(card, subset) for subset in combinations(plan.victims, size))


@given(st.integers(0, 2), cards())
def test_none_is_chosen_only_where_it_is_not_needed_or_does_not_help(priority: int, found: list[Card]) -> None:
    if choose(priority, found) is not None:
        assert not any(suffices(card, ()) for card in found)
    elif not any(suffices(card, ()) for card in found):
        for card in found:
            assert not suffices(card, tuple(one for one in card.running if one.priority < priority))


def running(name: str, priority: int = 0, copied: int = 0, created: float = 0, time: int = 5) -> Running:
    return Running(name, priority, Size(time, time), copied, created)


def names(plan: Plan | None) -> list[str]:
    assert plan is not None
    return [one.vgpu_id for one in plan.victims]


def test_the_lowest_priority_then_the_least_memory_then_the_youngest() -> None:
    asked, full = Size(5, 5), Size(0, 0)
    low, normal = running("low", 0, copied=9), running("normal", 1)
    assert names(choose(2, [Card(0, asked, full, (normal, low))])) == ["low"]
    small, large = running("small", copied=1), running("large", copied=2)
    assert names(choose(2, [Card(0, asked, full, (large, small))])) == ["small"]
    old, young = running("old", created=1), running("young", created=2)
    assert names(choose(2, [Card(0, asked, full, (old, young))])) == ["young"]
    # One that frees enough alone makes the smaller ones before it needless.
    whole = running("whole", copied=3, time=9)
    assert names(choose(2, [Card(0, Size(9, 9), full, (running("little", time=2), whole))])) == ["whole"]
    assert names(choose(2, [Card(0, asked, full, (large,)), Card(1, asked, full, (small,))])) == ["small"]


def test_a_gpu_that_was_made_free_is_kept_and_its_request_goes_first() -> None:
    waiting = [Waiting("before", "a", 0, {0: 0.5, 1: 0.5}), Waiting("high", "b", 9, {0: 0.5, 1: 0.5}, priority=2)]
    rooms = {0: Room(0.5, 0.5), 1: Room(0.0, 0.0)}
    order = ordered(10, waiting, {"b": 1.0}, rooms, 600, preempting={"high": 0})
    assert [one.request.request_id for one in order.candidates] == ["high", "before"]
    assert order.kept == {0: "high"}
    assert order.candidates[1].gpus == (1,)
