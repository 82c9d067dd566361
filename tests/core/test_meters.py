"""Waits and hand-overs as the dispatcher's reports tell them, against a reader that looks back over all of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cython_ext.readings import Event, EventKind
from gpuserver.core.observe.meters import HANDOVERS_NS, WAITS_NS, Meters, Tally
from gpuserver.core.scheduler.leases import Lease
from vgpu.protocol.meters import Histogram

MS = 1_000_000


def event(kind: EventKind, key: int, at_ns: int, epoch: int = 0, *, wants: bool = False) -> Event:
    return Event(kind, key, epoch, at_ns, None, 0, wants, 0, 0, 0)


def total(histogram: Histogram) -> tuple[int, int]:
    return sum(histogram.counts), histogram.sum_ns


@given(st.lists(st.integers(-5, 400)), st.lists(st.integers(1, 300), min_size=1, unique=True).map(sorted))
def test_a_tally_counts_each_up_to_the_first_bound_that_holds_it(lasted: list[int], bounds: list[int]) -> None:
    tally = Tally(tuple(bounds))
    for value in lasted:
        tally.add(value)
    found = tally.histogram()
    below = [sum(value <= bound for value in lasted) for bound in bounds]
    assert [sum(found.counts[: i + 1]) for i in range(len(bounds))] == below
    assert sum(found.counts) == len(lasted)
    assert found.sum_ns == sum(max(0, value) for value in lasted)


@pytest.mark.parametrize("bounds", [WAITS_NS, HANDOVERS_NS])
def test_bounds_grow(bounds: tuple[int, ...]) -> None:
    assert list(bounds) == sorted(set(bounds))


def pair() -> Meters:
    made = Meters()
    made.enter(0)
    made.enter(1)
    return made


def test_a_hand_over_is_from_the_drain_to_go() -> None:
    made = pair()
    made.saw(event(EventKind.WANTS, 0, 0))
    made.published(Lease(0, 1, 0, 10 * MS))
    made.saw(event(EventKind.WENT, 0, 50_000, 1))
    made.saw(event(EventKind.WANTS, 1, 2 * MS))
    made.published(Lease(1, 2, 10 * MS, 20 * MS, after=((0, 1),)))
    made.saw(event(EventKind.DRAINED, 0, 10_100_000, 1, wants=True))
    made.saw(event(EventKind.WENT, 1, 10_180_000, 2))
    assert total(made.handovers.histogram()) == (1, 80_000)
    assert total(made.waits(0)) == (1, 50_000)
    assert total(made.waits(1)) == (1, 8_180_000)
    # And back, at the tail: GO comes before the drain.
    made.published(Lease(0, 3, 20 * MS, 30 * MS, after=((1, 2),)))
    made.saw(event(EventKind.WENT, 0, 19_900_000, 3))
    made.saw(event(EventKind.DRAINED, 1, 20_000_000, 2, wants=True))
    assert total(made.handovers.histogram()) == (2, 80_000)
    assert total(made.waits(0)) == (2, 50_000 + 9_800_000)


def test_time_in_which_nobody_waited_or_the_lease_had_not_begun_is_no_hand_over() -> None:
    made = pair()
    made.published(Lease(0, 1, 0, 10 * MS))
    made.saw(event(EventKind.WENT, 0, 0, 1))
    made.published(Lease(1, 2, 12 * MS, 20 * MS, after=((0, 1),)))
    made.saw(event(EventKind.DRAINED, 0, 10 * MS, 1))
    made.saw(event(EventKind.WANTS, 1, 11 * MS))
    made.saw(event(EventKind.WENT, 1, 12_000_300, 2))
    assert total(made.handovers.histogram()) == (1, 300)


def test_whoever_follows_itself_hands_nothing_over_and_does_not_wait() -> None:
    made = pair()
    made.saw(event(EventKind.WANTS, 0, 0))
    made.published(Lease(0, 1, 0, MS))
    made.saw(event(EventKind.WENT, 0, 0, 1))
    made.published(Lease(0, 2, MS, 2 * MS, after=((0, 1),)))
    made.saw(event(EventKind.WENT, 0, MS, 2))
    made.saw(event(EventKind.DRAINED, 0, MS, 1, wants=True))
    made.saw(event(EventKind.DRAINED, 0, 2 * MS, 2, wants=True))
    assert total(made.waits(0)) == (1, 0)
    assert total(made.handovers.histogram()) == (0, 0)


def test_epochs_go_round() -> None:
    made = pair()
    last = (1 << 32) - 1
    made.saw(event(EventKind.WENT, 0, 0, last))
    made.saw(event(EventKind.WENT, 0, 1, 1))
    made.saw(event(EventKind.DRAINED, 0, 2, 1, wants=True))  # and so the older one
    made.saw(event(EventKind.WENT, 0, 7, 2))
    assert total(made.waits(0)) == (1, 5)


def test_what_was_lost_is_counted_by_nobody_and_what_comes_after_is() -> None:
    made = pair()
    made.saw(event(EventKind.WANTS, 0, 0))
    made.miss()
    made.saw(event(EventKind.WENT, 0, 100, 1))
    made.saw(event(EventKind.DRAINED, 0, 200, 1, wants=True))
    made.enter(0)  # another mode
    made.wants(0, 300)
    made.saw(event(EventKind.WENT, 0, 310, 2))
    assert total(made.waits(0)) == (1, 10)
    made.forget(0)
    made.enter(0)
    assert total(made.waits(0)) == (0, 0)


@dataclass
class World:
    """Reports as a dispatcher may make them, with all that came before each."""

    events: list[Event] = field(default_factory=list)
    held: dict[int, list[int]] = field(default_factory=lambda: {0: [], 1: [], 2: []})
    wants: set[int] = field(default_factory=set)
    epoch: int = (1 << 32) - 20

    def add(self, choice: int, key: int, passes_ns: int) -> None:
        at_ns = passes_ns + (self.events[-1].at_ns if self.events else 0)
        if choice == 0 and key not in self.wants:
            self.wants.add(key)
            self.events.append(event(EventKind.WANTS, key, at_ns))
        elif choice == 1 and key in self.wants and not self.held[key]:
            self.wants.discard(key)
            self.events.append(event(EventKind.IDLE, key, at_ns))
        elif choice == 2 and len(self.held[key]) < 2:
            self.epoch = self.epoch % ((1 << 32) - 1) + 1
            self.held[key].append(self.epoch)
            self.events.append(event(EventKind.WENT, key, at_ns, self.epoch))
        elif choice >= 3 and self.held[key]:
            wants = choice == 3
            self.events.append(event(EventKind.DRAINED, key, at_ns, self.held[key].pop(0), wants=wants))
            (self.wants.add if wants else self.wants.discard)(key)


def waits_of(key: int, events: list[Event]) -> list[int]:
    """Looking back from each GO: over everything since the vGPU last had a lease, to the first word that it wants."""
    found = []
    mine = [e for e in events if e.vgpu == key]
    for i, went in enumerate(mine):
        if went.kind is not EventKind.WENT:
            continue
        held, since = 0, None
        for earlier in mine[:i]:
            held += (earlier.kind is EventKind.WENT) - (earlier.kind is EventKind.DRAINED)
            if held or earlier.kind is EventKind.IDLE or (earlier.kind is EventKind.DRAINED and not earlier.wants):
                since = None
            elif since is None:
                since = earlier.at_ns
        if since is not None:
            found.append(went.at_ns - since)
    return found


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2), st.integers(0, 30 * MS)), max_size=60))
def test_every_wait_is_counted_once(steps: list[tuple[int, int, int]]) -> None:
    world, made = World(), Meters()
    for key in world.held:
        made.enter(key)
    for step in steps:
        world.add(*step)
    for seen in world.events:
        made.saw(seen)
    for key in world.held:
        expected = waits_of(key, world.events)
        assert total(made.waits(key)) == (len(expected), sum(expected))
