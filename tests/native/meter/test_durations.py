"""Learned durations against a dict of lists."""

from __future__ import annotations

import ctypes
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cython_ext.testing import bindings_logic as native
from cython_ext.testing.bindings_logic import UNKNOWN_NS

Key = tuple[int, int, int, int, int, int, int, int]

ROOMY = 1 << 20
dims = st.integers(0, 3)
keys: st.SearchStrategy[Key] = st.tuples(st.integers(1, 4), dims, dims, dims, dims, dims, dims, st.integers(0, 2))


def anywhere(key: Key) -> Key:
    """The same launch, whatever was before it."""
    return (*key[:7], 0)


def as_float(value: int) -> int:
    """Samples are kept as 32-bit floats."""
    return int(ctypes.c_float(value).value)


class DurationsTwin(RuleBasedStateMachine):
    """In a table with room for all its keys."""

    def __init__(self) -> None:
        super().__init__()
        self.table = native.Durations(ROOMY)
        self.samples: dict[Key, list[int]] = {}
        self.launches: dict[Key, int] = {}
        self.under_way: list[tuple[Key, int]] = []

    def estimate(self, key: Key) -> int:
        newest = self.samples.get(key, [])[-8:]
        if not newest:
            return UNKNOWN_NS
        return max(newest) if len(newest) < 3 else int((sum(newest) - max(newest)) / (len(newest) - 1))

    def longest(self, key: Key) -> int:
        """The highest estimate so far; one that is not reached again fades, by a 256th with each sample."""
        samples, longest = self.samples[key], 0
        for count in range(3, len(samples) + 1):
            newest = samples[max(0, count - 8) : count]
            estimate = int((sum(newest) - max(newest)) / (len(newest) - 1))
            longest = max(estimate, longest - longest // 256)
        return longest

    @rule(key=keys)
    def launch(self, key: Key) -> None:
        self.samples.setdefault(key, [])
        count = self.launches[key] = self.launches.get(key, 0) + 1
        every = 64 if len(self.samples[key]) >= 3 else 8
        predicted = self.estimate(key) if self.samples[key] else self.estimate(anywhere(key))
        assert self.table.launch(key) == (predicted, count <= 3 or count % every == 0)
        self.under_way.append((key, self.table.generation))

    @rule(key=keys, times=st.integers(2, 70))
    def launch_often(self, key: Key, times: int) -> None:
        for _ in range(times):
            self.launch(key)

    @rule(sample=st.integers(0, 10**10), data=st.data())
    def learn(self, sample: int, data: st.DataObject) -> None:
        if not self.under_way:
            return
        key, generation = self.under_way.pop(data.draw(st.integers(0, len(self.under_way) - 1)))
        self.table.learn(key, generation, sample)
        if generation == self.table.generation:
            for learns in {key, anywhere(key)}:
                self.samples.setdefault(learns, []).append(as_float(sample))

    @rule(handle=st.integers(0, 4))
    def forget(self, handle: int) -> None:
        self.table.forget(handle)
        for key in [key for key in self.samples if handle in (0, key[0])]:
            del self.samples[key]
            self.launches.pop(key, None)

    @invariant()
    def estimates_agree(self) -> None:
        for key in self.samples:
            assert self.table.estimate_ns(key) == self.estimate(key)
            known = key if self.samples[key] else anywhere(key)
            assert self.table.longest_ns(key) == (self.longest(known) if known in self.samples else 0)


TestDurationsTwin = DurationsTwin.TestCase


def test_a_table_too_small_for_one_set_is_refused() -> None:
    with pytest.raises(ValueError, match="do not hold"):
        native.Durations(64)


def test_a_full_table_gives_up_what_was_launched_longest_ago() -> None:
    table = native.Durations(1024)  # one set
    ways = table.entries
    for handle in range(1, ways + 1):
        table.launch((handle, 0, 0, 0, 0, 0, 0, 0))
        table.learn((handle, 0, 0, 0, 0, 0, 0, 0), table.generation, 1000 * handle)
    table.launch((1, 0, 0, 0, 0, 0, 0, 0))
    assert table.launch((99, 0, 0, 0, 0, 0, 0, 0)) == (UNKNOWN_NS, True)
    assert table.estimate_ns((2, 0, 0, 0, 0, 0, 0, 0)) is None
    assert [table.estimate_ns((handle, 0, 0, 0, 0, 0, 0, 0)) for handle in (1, 3, ways)] == [1000, 3000, 1000 * ways]
    table.learn((2, 0, 0, 0, 0, 0, 0, 0), table.generation, 5)
    assert table.estimate_ns((2, 0, 0, 0, 0, 0, 0, 0)) is None, "a sample does not bring a key back"


@given(st.integers(0, 2**32 - 1))
def test_any_number_of_keys_is_bounded_and_recent_ones_are_known(seed: int) -> None:
    source = random.Random(seed)
    table = native.Durations(1 << 14)
    for _ in range(1000):
        x, y, z = (source.getrandbits(32) for _ in range(3))
        key = (source.getrandbits(64) or 1, x, y, z, z, y, x, source.getrandbits(64))
        table.launch(key)
        table.learn(key, table.generation, 77)
        assert table.estimate_ns(key) == 77


@pytest.mark.parametrize("sample", [-1, 2**62, 10**9 * 86_401])
def test_a_sample_from_a_broken_clock_is_dropped(sample: int) -> None:
    table = native.Durations(ROOMY)
    key = (1, 1, 1, 1, 1, 1, 1, 0)
    table.launch(key)
    table.learn(key, table.generation, sample)
    assert table.estimate_ns(key) == UNKNOWN_NS


def test_one_outlier_does_not_move_the_estimate_and_a_change_does() -> None:
    table = native.Durations(ROOMY)
    key = (1, 1, 1, 1, 1, 1, 1, 0)
    table.launch(key)

    def learn(*samples: int) -> int | None:
        for sample in samples:
            table.learn(key, table.generation, sample)
        return table.estimate_ns(key)

    assert learn(100, 100, 100) == 100
    assert learn(100_000) == 100
    assert learn(*[3000] * 8) == 3000
    assert learn(100) == 3000 - (3000 - 100) // 7 - 1
    assert learn(*[100] * 7) == 100


def test_what_a_kernel_took_of_late_is_remembered_while_it_takes_less() -> None:
    """Ten times as long for eight launches, then short for fifty, and for good; one that was late is none of these."""
    table = native.Durations(ROOMY)
    key = (1, 1, 1, 1, 1, 1, 1, 0)
    table.launch(key)

    def learn(*samples: int) -> int:
        for sample in samples:
            table.learn(key, table.generation, sample)
        return table.longest_ns(key) or 0

    assert learn(100_000, 1000) == 0, "the first may have been a cold one"
    assert learn(*[1000] * 7, 100_000, *[1000] * 8) == 1000
    assert learn(*[10_000] * 8) == 10_000
    assert 8_000 < learn(*[1000] * 50) < 9_000
    assert table.estimate_ns(key) == 1000
    assert learn(*[1000] * 1000) == 1000


def test_one_kernel_in_two_places_has_two_lengths() -> None:
    table = native.Durations(ROOMY)
    kernel, first, second = (1, 8, 1, 1, 32, 1, 1, 0), (2, 8, 1, 1, 32, 1, 1, 0), (3, 8, 1, 1, 32, 1, 1, 0)
    after = {key: (*kernel[:7], native.Durations.hash(key)) for key in (first, second)}
    for key, lasts in (after[first], 100), (after[second], 900):
        for _ in range(8):
            table.launch(key)
            table.learn(key, table.generation, lasts)
    assert [table.launch(key)[0] for key in after.values()] == [100, 900]
    unheard_of = (*kernel[:7], 12345)
    assert table.launch(unheard_of) == (900, True), "the newest eight, in whatever place"


def test_what_was_launched_tells_by_kernel_and_width_and_not_by_what_was_before_it() -> None:
    key = (1, 2, 3, 4, 5, 6, 7, 8)
    told = native.Durations.hash(key)
    assert native.Durations.hash((*key[:7], 99)) == told
    for i in range(7):
        assert native.Durations.hash((*key[:i], key[i] + 1, *key[i + 1 :])) != told  # type: ignore[arg-type]
