"""The meter, launch by launch, against what a reader of its page would expect: sums, distances, and no bias."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cython_ext.testing.bindings_logic import (
    METER_KEYS,
    STEADY_FACTOR,
    TIMED_APART_NS,
    TIMED_EVERY,
    TIMED_LONG,
    TIMED_RARELY,
    Durations,
    Meter,
    Usage,
)

Key = tuple[int, int, int, int, int, int, int, int]
UNLIMITED = 1 << 60
US = 1_000
YOUNG = 8


def kernel(handle: int, width: int = 1) -> Key:
    return (handle, width, 1, 1, 128, 1, 1, 0)


class Program:
    """One thread with its meter. Each launch ends before the next one, which comes ``apart_ns`` later. By default so
    few launches are timed that the meter does not stretch their distances."""

    def __init__(self, seed: int = 1, apart_ns: int = TIMED_APART_NS) -> None:
        self.apart_ns, self.now_ns = apart_ns, 0
        self.meter, self.usage, self.table = Meter(seed), Usage(), Durations(1 << 16)
        self.meter.grant(UNLIMITED)
        self.busy_ns = 0
        self.timed = 0

    def launch(self, key: Key, lasts_ns: int, *, timeable: bool = True) -> bool:
        """As the fast path and the gate make it. Whether it was timed."""
        tag = Meter.tag(key)
        self.now_ns += self.apart_ns
        self.usage.meter()
        self.busy_ns += lasts_ns
        if self.meter.takes(tag) or self.meter.takes(tag, owing=True):
            return False
        self.table.launch(key)
        known = self.table.mean_ns(key)
        assert known is not None
        assumed_ns, weight = self.meter.times(tag, int(known[0]), known[1], self.now_ns, self.table.steady(key))
        if weight == 0:
            return False
        if not timeable:
            self.meter.carries(tag, weight)
            return False
        self.table.learn(key, self.table.generation, lasts_ns)
        self.usage.amends(lasts_ns, assumed_ns, weight)
        self.usage.settle(self.meter.spent_ns, 2 * self.busy_ns, False)
        self.timed += 1
        return True

    def used_ns(self) -> int:
        """The GPU was busy for twice as long as they took: gaps that nobody saw."""
        self.usage.meter()
        self.usage.settle(self.meter.spent_ns, 2 * self.busy_ns, False)
        return self.usage.used_ns + self.usage.counted_ns


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 3)), max_size=400), st.integers(1, 1 << 62))
def test_the_sum_is_that_of_all_launches(launches: list[tuple[int, int]], seed: int) -> None:
    """Kernels that always take as long: once one of each is timed, not a nanosecond is missing."""
    program = Program(seed)
    for handle, width in launches:
        program.launch(kernel(handle, width), handle * 1000 + width)
    for handle, width in set(launches):
        while not program.launch(kernel(handle, width), handle * 1000 + width):
            pass
    assert program.used_ns() == program.busy_ns


@pytest.mark.parametrize("steady", [False, True])
@pytest.mark.parametrize("lasts_ns", [5 * US, 500 * US])
@pytest.mark.parametrize("seed", [1, 77, 1 << 60])
def test_between_two_timed_launches_are_half_to_one_and_a_half_of_the_usual_number(
    seed: int, lasts_ns: int, steady: bool
) -> None:
    program, distances, since = Program(seed), [], 0
    for i in range(20_000):
        since += 1
        if program.launch(kernel(1), lasts_ns * (1 if steady or i % 4 else 9)):
            distances.append(since)
            since = 0
    usual = (TIMED_LONG if lasts_ns > 100 * US else TIMED_EVERY) * (STEADY_FACTOR if steady else 1)
    later = distances[4 * YOUNG :]
    assert min(later) > usual // 2
    assert max(later) <= usual * 3 // 2
    assert len(set(later)) > 2


@pytest.mark.parametrize(("apart_us", "least", "most"), [(5, 128, 384), (20, 64, 384), (200, 16, 48)])
def test_a_thread_that_launches_fast_has_a_smaller_part_of_its_launches_timed(
    apart_us: int, least: int, most: int
) -> None:
    """One in 32 of a launch each 5 µs would be a timed launch each 160 µs. One in 2 ms is enough, and at least one in
    256 of each key. What they stand for stays the same."""
    program, distances, since = Program(3, apart_us * US), [], 0
    for i in range(200_000):
        since += 1
        if program.launch(kernel(1), 5 * US if i % 4 else 45 * US):
            distances.append(since)
            since = 0
    later = distances[20:]
    assert least <= min(later) <= max(later) <= most
    assert program.used_ns() / program.busy_ns == pytest.approx(1, abs=0.1)


def test_many_keys_share_the_timed_launches_of_a_thread() -> None:
    program, timed = Program(5, 10 * US), 0
    keys = [kernel(handle) for handle in range(1, 21)]
    for i in range(200_000):
        timed += program.launch(keys[i % 20], 10 * US if i % 3 else 40 * US) and i > 50_000
    assert 150_000 / TIMED_RARELY * 0.8 < timed < 2 * 150_000 * 10 * US / TIMED_APART_NS


def test_a_thread_that_becomes_slow_is_timed_as_often_as_before() -> None:
    program = Program(3, 5 * US)
    for i in range(20_000):
        program.launch(kernel(1), 5 * US if i % 4 else 45 * US)
    program.apart_ns, before = 1_000 * US, program.timed
    for i in range(6_000):
        program.launch(kernel(1), 5 * US if i % 4 else 45 * US)
    assert program.timed - before > 6_000 / TIMED_EVERY * 0.6


@pytest.mark.parametrize(("period", "error"), [(2, 0.03), (4, 0.04), (7, 0.06), (64, 0.2), (128, 0.3)])
@pytest.mark.parametrize("long_us", [100, 1000])
def test_a_rhythm_hides_nothing(period: int, error: float, long_us: int) -> None:
    """One launch in ``period`` is long. A meter that timed each 64th launch would see all of them, or none; one that
    goes by the mean alone sees 70 % of one in seven, since a key that seems to be short is timed less often. ``error``:
    three times what chance makes of so few long launches that are timed."""
    program = Program(7)
    for i in range(400_000):
        program.launch(kernel(1), long_us * US if i % period == 0 else 5 * US)
    assert program.used_ns() / program.busy_ns == pytest.approx(1, abs=error)


def test_rare_long_kernels_are_counted_one_by_one() -> None:
    """One in a thousand, of another key: nothing of the sum is left to chance."""
    program = Program(3)
    random.seed(1)
    for _ in range(50_000):
        rare = random.random() < 0.001
        program.launch(kernel(2) if rare else kernel(1), 50_000 * US if rare else 5 * US)
    assert program.used_ns() == program.busy_ns


def test_what_cannot_be_timed_is_what_the_next_timed_launch_stands_for() -> None:
    """After its first samples a kernel becomes twice as long, while for a while none of its launches can be timed."""
    program = Program(5)
    for _ in range(2000):
        program.launch(kernel(1), 10 * US)
    known, timed = program.used_ns(), program.timed
    assert known == program.busy_ns
    for _ in range(600):
        program.launch(kernel(1), 20 * US, timeable=False)
    assert program.timed == timed
    while program.timed == timed:
        program.launch(kernel(1), 20 * US)
    assert program.used_ns() == pytest.approx(program.busy_ns, abs=1.5 * 256 * 10 * US)


def three_of_one_pair() -> list[Key]:
    return [key for key in map(kernel, range(1, 20_000)) if Meter.tag(key) >> 57 == 5][:3]


def test_keys_that_take_each_others_place_are_timed_no_more_often() -> None:
    program, keys = Program(), three_of_one_pair()
    for i in range(30_000):
        program.launch(keys[i % 3], 10_000 * (i % 3 + 1))
    assert program.timed < 30_000 / 40
    assert program.used_ns() == pytest.approx(program.busy_ns, rel=1e-3)


def test_tags_fill_the_table_evenly() -> None:
    """Handles are addresses, often a page apart."""
    for step in (8, 64, 4096, 1 << 20):
        pairs = {Meter.tag(kernel(0x7F00_0000_0000 + i * step)) >> 57 for i in range(METER_KEYS // 2)}
        assert len(pairs) > METER_KEYS // 5
    pairs = {Meter.tag(kernel(0x7F00_0000_0000, i + 1)) >> 57 for i in range(METER_KEYS // 2)}
    assert len(pairs) > METER_KEYS // 5


@given(st.integers(0, 5_000), st.lists(st.integers(1, 900), min_size=1, max_size=60))
def test_no_launch_takes_more_than_is_left(allowance_ns: int, lengths: list[int]) -> None:
    program = Program()
    meter = program.meter
    for handle in range(1, 61):
        for _ in range(2):
            program.launch(kernel(handle), lengths[handle % len(lengths)])
    meter.recall(allowance_ns)
    assert meter.left_ns == allowance_ns
    spent = meter.spent_ns
    for handle in range(1, 61):
        before = meter.left_ns
        if meter.takes(Meter.tag(kernel(handle))):
            assert meter.left_ns == before - lengths[handle % len(lengths)] >= 0
        else:
            assert meter.left_ns == before
    assert meter.spent_ns - spent == allowance_ns - meter.left_ns <= allowance_ns


def test_what_is_promised_is_what_is_left_of_a_limited_allowance() -> None:
    meter = Meter()
    meter.grant(UNLIMITED)
    assert meter.promised_ns == 0
    meter.recall(500)
    assert meter.promised_ns == 500
    meter.times(9, 700, 3, 0)
    assert (meter.promised_ns, meter.left_ns, meter.spent_ns) == (0, -200, 700)
    meter.turns(1)
    assert (meter.left_ns, meter.spent_ns) == (0, 0)
    assert not meter.takes(9)


def test_a_key_that_nobody_needs_to_know_is_never_timed() -> None:
    meter = Meter()
    meter.grant(UNLIMITED)
    meter.times(9, 700, 3, 0)
    meter.never_times(9)
    assert all(meter.takes(9) for _ in range(10 * TIMED_EVERY))


settlements = st.lists(
    st.tuples(st.integers(0, 1000), st.integers(0, 1000), st.booleans(), st.booleans(), st.integers(-200, 200)),
    max_size=60,
)


@given(settlements)
def test_used_is_neither_more_than_was_submitted_nor_than_the_gpu_was_seen_busy(
    steps: list[tuple[int, int, bool, bool, int]],
) -> None:
    usage, spent, busy, before = Usage(), 0, 0, 0
    submitted = 0
    for more_spent, more_busy, drained, metered, missing in steps:
        if metered:
            usage.meter()
        if not usage.metered:
            submitted += more_busy
        spent += more_spent
        busy += more_busy
        submitted += more_spent + max(missing, 0)
        usage.amends(1000 + missing, 1000, 1)
        usage.settle(spent, busy, drained)
        assert usage.used_ns >= before
        assert usage.used_ns <= min(submitted, busy)
        assert not (drained and usage.metered)
        before = usage.used_ns


@given(st.lists(st.integers(0, 1000), max_size=40))
def test_under_leases_with_an_end_all_that_is_seen_counts(busy: list[int]) -> None:
    usage, total = Usage(), 0
    for more in busy:
        total += more
        usage.settle(0, total, True)
        assert usage.used_ns == total


def test_what_a_sample_tells_of_launches_that_have_drained_counts() -> None:
    """A kernel that was assumed to take 10 ns took 100, and the next two the same: nobody knew before the third."""
    usage = Usage()
    for busy_ns, spent_ns in ((100, 10), (200, 20), (300, 30)):
        usage.meter()
        usage.settle(spent_ns, busy_ns, drained=True)
    assert usage.used_ns == 30
    usage.amends(100, 10, weight=3)
    usage.meter()
    usage.settle(30, 300, drained=True)
    assert usage.used_ns == 300
    usage.amends(60, 100, weight=2)  # and where it took less, what follows pays for it
    usage.meter()
    usage.settle(130, 400, drained=True)
    assert usage.used_ns == 320


def test_work_is_used_when_it_is_seen_to_run_not_when_it_is_submitted() -> None:
    usage = Usage()
    usage.meter()
    usage.settle(spent_ns=900, busy_ns=100, drained=False)
    assert (usage.used_ns, usage.counted_ns) == (100, 800)
    assert usage.room_ns(allowed_ns=1000, others_ns=30, promised_ns=20) == 50
    usage.settle(spent_ns=900, busy_ns=1100, drained=False)
    assert (usage.used_ns, usage.counted_ns) == (900, 0)


def test_of_what_ran_side_by_side_no_more_than_a_little_is_kept() -> None:
    """Two streams, each busy all the time: the GPU is used for as long as it is busy."""
    usage, second = Usage(), 1_000_000_000
    usage.meter()
    usage.settle(2 * second, second, drained=True)
    assert usage.used_ns == second
    assert usage.counted_ns <= second // 5


def test_what_never_runs_takes_no_room_for_ever() -> None:
    """Two streams ran side by side, and a hundred threads have launched once. The GPU has nothing to do, and the bucket
    is full: a launch that waited for room would wait for ever."""
    usage = Usage()
    usage.meter()
    usage.settle(spent_ns=400_000_000, busy_ns=200_000_000, drained=False)
    assert usage.room_ns(allowed_ns=340_000_000, others_ns=0, promised_ns=0) < 0  # it may yet run
    usage.settle(spent_ns=400_000_000, busy_ns=200_000_000, drained=True)
    assert usage.room_ns(allowed_ns=340_000_000, others_ns=0, promised_ns=200_000_000) == 140_000_000


def test_a_meter_that_was_far_off_forgives_little() -> None:
    """A key whose launches took 30 ms takes 10 µs from now on: 60 of them are counted before one is timed."""
    usage, spent = Usage(), 60 * 30_000_000
    usage.meter()
    usage.settle(spent, 600_000, drained=True)
    assert usage.used_ns == 600_000
    usage.amends(10_000, 30_000_000, weight=60)
    usage.meter()
    usage.settle(spent + 1_000_000_000, 2_000_000_000, drained=True)
    assert usage.used_ns > 700_000_000


def test_a_kernel_that_becomes_far_longer_is_doubted_and_timed_at_once() -> None:
    program = Program(5)
    for _ in range(2000):
        program.launch(kernel(1), 10 * US)
    assert not program.usage.doubtful(1_000_000)  # nothing is at work for longer than anything may be late
    assert program.usage.doubtful(30_000_000)
    program.table.doubt()
    program.meter.doubts()
    assert program.launch(kernel(1), 30_000 * US)
    assert program.table.mean_ns(kernel(1)) == (30_000 * US, 1)
    assert program.used_ns() == program.busy_ns


def test_what_is_counted_explains_a_gpu_at_work() -> None:
    usage = Usage()
    usage.meter()
    usage.settle(spent_ns=40_000_000, busy_ns=0, drained=False)
    assert not usage.doubtful(70_000_000)
    assert usage.doubtful(90_000_000)
    usage.settle(spent_ns=40_000_000, busy_ns=90_000_000, drained=True)
    assert not usage.doubtful(90_000_000)  # under leases with an end each launch is timed as it goes


def test_work_counts_once_where_a_lease_loses_its_end_and_gets_one_again() -> None:
    """A lease with an end, 12 ms of its work in flight; then without an end, 20 ms; then with one again, 10 ms."""
    usage, ms = Usage(), 1_000_000
    usage.settle(0, 8 * ms, False)
    assert usage.used_ns == 8 * ms
    usage.meter(12 * ms)
    usage.settle(20 * ms, 30 * ms, False)
    assert usage.used_ns == 30 * ms
    usage.tracks(10 * ms)
    usage.settle(20 * ms, 50 * ms, True)
    assert usage.used_ns == 50 * ms
    usage.tracks(5 * ms)
    usage.settle(20 * ms, 55 * ms, True)
    assert usage.used_ns == 55 * ms, "the books count it, where nothing metered is before it"
