"""When a vGPU is light, and for how long a heavy one stays what it is."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from gpuserver.core.scheduler.kinds import HEAVY_BURST_NS, HEAVY_PPM, LIGHT_BURST_NS, LIGHT_PPM, STAY_MOST_NS, Kind
from gpuserver.core.scheduler.leases import Measured
from gpuserver.core.scheduler.policy import MILLISECOND, SECOND
from vgpu.share import PPM


def seen(demand_ppm: int, burst_ns: int = 0) -> Measured:
    return Measured(0, demand_ppm, burst_ns)


def test_nothing_is_light_before_it_is_measured() -> None:
    kind = Kind()
    assert not kind.measured(seen(0), 0)
    assert not kind.light
    assert kind.measured(seen(LIGHT_PPM), SECOND)
    assert kind.light


def test_between_the_thresholds_it_stays_what_it_is() -> None:
    light, heavy = Kind(), Kind()
    light.measured(seen(LIGHT_PPM), 0)
    for kind in (light, heavy):
        assert not kind.measured(seen(LIGHT_PPM + 1), SECOND)
        assert not kind.measured(seen(HEAVY_PPM), 2 * SECOND)
    assert light.light
    assert not heavy.light


def test_long_bursts_are_heavy_whatever_the_demand_is() -> None:
    kind = Kind()
    assert not kind.measured(seen(LIGHT_PPM // 2, HEAVY_BURST_NS + 1), 0)
    assert kind.measured(seen(LIGHT_PPM // 2, LIGHT_BURST_NS), SECOND)
    assert not kind.measured(seen(LIGHT_PPM // 2, HEAVY_BURST_NS), 2 * SECOND)
    assert kind.light
    assert kind.measured(seen(LIGHT_PPM // 2, HEAVY_BURST_NS + 1), 3 * SECOND)
    assert not kind.light


def test_bursts_are_short_until_they_are_long() -> None:
    kind = Kind()
    brief = []
    for burst_ns in (0, LIGHT_BURST_NS + 1, LIGHT_BURST_NS, HEAVY_BURST_NS, HEAVY_BURST_NS + 1, HEAVY_BURST_NS, 1, 0):
        kind.measured(seen(PPM, burst_ns), 0)
        brief.append(kind.brief)
    assert brief == [False, False, True, True, False, False, True, False]


def stays(kind: Kind, at_ns: int) -> int:
    """How long it is heavy if its demand is high for a moment and low from then on, in ns."""
    assert kind.measured(seen(HEAVY_PPM + 1), at_ns)
    begun_ns = at_ns
    while not kind.measured(seen(1), at_ns):
        at_ns += 10 * MILLISECOND
    return at_ns - begun_ns


def test_it_stays_heavy_for_longer_each_time_until_it_was_light_for_a_minute() -> None:
    kind, at_ns = Kind(), 0
    kind.measured(seen(1), 0)
    stayed = []
    for _ in range(8):
        stayed.append(stays(kind, at_ns))
        at_ns += stayed[-1] + SECOND
    assert [stay // SECOND for stay in stayed] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert stays(kind, at_ns + STAY_MOST_NS) == SECOND


def test_after_a_minute_as_a_light_one_the_stay_is_short_again() -> None:
    for passed_ns, stay_ns in ((STAY_MOST_NS - 1, 8 * SECOND), (STAY_MOST_NS, SECOND)):
        kind = Kind(light=True, since_ns=SECOND, stayed_ns=4 * SECOND)
        kind.turn_heavy(SECOND + passed_ns)
        assert (kind.light, kind.stayed_ns) == (False, stay_ns)
        assert kind.heavy_until_ns == SECOND + passed_ns + stay_ns


def test_only_a_measurement_without_sharers_says_what_it_needs_alone() -> None:
    kind = Kind()
    kind.measured(seen(LIGHT_PPM), 0)
    assert (kind.demand_ppm, kind.alone_ppm) == (LIGHT_PPM, 0)
    kind.measured(seen(HEAVY_PPM), SECOND, alone=True)
    kind.measured(seen(LIGHT_PPM), 2 * SECOND)
    assert (kind.demand_ppm, kind.alone_ppm) == (LIGHT_PPM, HEAVY_PPM)


def test_a_restored_one_is_heavy_for_the_rest_of_its_stay() -> None:
    kind = Kind()
    kind.restore(False, 3 * SECOND, 4 * SECOND, 10 * SECOND)
    assert not kind.measured(seen(1), 13 * SECOND - 1)
    assert kind.measured(seen(1), 13 * SECOND)
    kind.turn_heavy(14 * SECOND)
    assert kind.stayed_ns == 8 * SECOND


@given(st.lists(st.tuples(st.integers(0, 1_000_000), st.integers(1, 3000)), max_size=60))
def test_it_changes_at_most_once_a_second_each_way(measures: list[tuple[int, int]]) -> None:
    kind, at_ns = Kind(), 0
    turned_heavy: list[int] = []
    for demand_ppm, passed_ms in measures:
        at_ns += passed_ms * MILLISECOND
        was_light = kind.light
        assert kind.measured(seen(demand_ppm), at_ns) is (kind.light is not was_light)
        if was_light and not kind.light:
            assert demand_ppm > HEAVY_PPM
            turned_heavy.append(at_ns)
        if kind.light and not was_light:
            assert 0 < demand_ppm <= LIGHT_PPM
    assert all(after - before >= SECOND for before, after in pairwise(turned_heavy))


@given(st.lists(st.integers(0, 1_000_000), max_size=20))
def test_a_journal_keeps_it(demands: list[int]) -> None:
    kind = Kind()
    for second, demand_ppm in enumerate(demands):
        kind.measured(seen(demand_ppm), second * SECOND)
    now_ns = len(demands) * SECOND
    restored = Kind()
    restored.restore(kind.light, max(0, kind.heavy_until_ns - now_ns), kind.stayed_ns, now_ns)
    for demand_ppm in (HEAVY_PPM + 1, 1, 1, HEAVY_PPM + 1, 1):
        now_ns += SECOND
        kind.measured(seen(demand_ppm), now_ns)
        restored.measured(seen(demand_ppm), now_ns)
        assert restored.light is kind.light
