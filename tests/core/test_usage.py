"""What a vGPU used over its life, and the size that is named for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuserver.core.observe.usage import LEAST_SECONDS, TURNS_SECONDS, Seen, TurnUse, Usage, advise
from gpuserver.core.scheduler.leases import ServiceTotals

S = 1_000_000_000
GIB = 1 << 30
SEEN = Seen(
    vgpu="vgpu-00000001",
    seconds=100,
    busy_ratio=0.2,
    limit_ppm=500_000,
    temporal=True,
    memory_peak_bytes=2 * GIB,
    memory_limit_bytes=8 * GIB,
    memory_refusals=0,
)


def watched(parts: list[float], every_s: float = 1.0) -> Usage:
    usage, busy_ns = Usage(), 0
    usage.note(0, {0: ServiceTotals(0, 0, 0)})
    for i, part in enumerate(parts, 1):
        busy_ns += int(part * every_s * S)
        usage.note(int(i * every_s * S), {0: ServiceTotals(busy_ns, busy_ns, 1)})
    return usage


def in_turns(held: list[float], used: float | None, seconds: int = 40, every_s: float = 1.0) -> TurnUse:
    """``held``: parts of the time, by vGPU."""
    turn_use = TurnUse()
    for i in range(seconds + 1):
        served = {key: ServiceTotals(int(i * every_s * S * part), 0, i) for key, part in enumerate(held)}
        turn_use.note(S + int(i * every_s * S), served, used)
    return turn_use


@pytest.mark.parametrize(
    ("held", "used", "wasted"),
    [
        ([0.33, 0.33, 0.33], 0.27, (0.99, 0.27)),  # replicas of ResNet-50 on an H100
        ([0.1, 0.69], 0.9, None),  # a trainer that keeps its GPU busy, as far as it holds it
        ([0.5, 0.49], 0.97, None),
        ([0.99], 0.27, None),  # a vGPU alone keeps no other from the GPU
        ([0.1, 0.1], 0.05, None),  # nor do those that are idle
        ([0.5, 0.49], None, None),
        ([1.0, 1.0, 1.0], 0.6, None),  # shared leases keep nobody from the GPU
    ],
)
def test_turns_of_programs_that_wait_for_their_hosts_are_wasted(
    held: list[float], used: float | None, wasted: tuple[float, float] | None
) -> None:
    assert in_turns(held, used).wasted() == (None if wasted is None else pytest.approx(wasted))


def test_turns_are_judged_by_the_last_minute_once_there_is_half_of_one() -> None:
    assert in_turns([0.5, 0.5], 0.3, LEAST_SECONDS - 1).wasted() is None
    assert in_turns([0.5, 0.5], 0.3, 10 * LEAST_SECONDS, every_s=0.1).wasted() == pytest.approx((1.0, 0.3))
    turn_use = in_turns([0.5, 0.5], 0.3, 100)
    for i in range(101, 101 + TURNS_SECONDS):
        turn_use.note(S * (1 + i), {key: ServiceTotals(int(i * S * 0.5), 0, i) for key in (0, 1)}, 0.99)
    assert turn_use.wasted() is None


def test_there_is_no_sentence_without_news() -> None:
    """The reading of a vGPU shows for how many seconds it was watched; that is no advice."""
    early = replace(SEEN, seconds=LEAST_SECONDS - 1, memory_peak_bytes=0)
    said = advise(early)
    assert said is not None
    assert said.text == ""
    wasted = advise(replace(early, wasted=(0.99, 0.27)))
    assert wasted is not None
    assert wasted.text.startswith("The vGPUs of GPU 0 held it")
    memory = advise(replace(early, memory_peak_bytes=2 * GIB))
    assert memory is not None
    assert memory.text == "It had 2 GiB of 8 GiB at most: vgpuctl set vgpu-00000001 --mem 2304M"


def test_advice_names_the_other_mode_with_what_was_measured() -> None:
    said = advise(replace(SEEN, gpu_index=3, wasted=(0.99, 0.27)))
    assert said is not None
    assert said.text.endswith(
        ". The vGPUs of GPU 3 held it for 99 % of a minute, and kernels ran for 27 % (NVML). In spatial mode their "
        "programs run side by side: vgpuctl gpu set 3 --mode spatial, once no program is attached"
    )
    spatial = advise(replace(SEEN, temporal=False, wasted=(0.99, 0.27)))
    assert spatial is not None
    assert "NVML" not in spatial.text


@given(st.lists(st.floats(0, 1), max_size=200))
def test_the_figure_is_above_most_seconds_of_work_and_not_above_all(parts: list[float]) -> None:
    usage = watched(parts)
    worked = sorted(int(part * S) / S for part in parts if int(part * S) > 0)
    assert usage.seconds(0) == len(worked)
    found = usage.busy_ratio(0)
    if not worked:
        assert found == 0
        return
    assert sum(part <= found + 1e-9 for part in worked) >= 0.95 * len(worked)
    assert found <= worked[-1] + 0.01 + 1e-9


def test_it_is_looked_at_once_a_second_however_often_it_is_told() -> None:
    assert watched([0.5] * 50, every_s=0.2).seconds(0) == 10
    assert watched([0.5] * 50, every_s=0.2).busy_ratio(0) == pytest.approx(0.5, abs=0.011)


def test_a_key_that_is_used_again_starts_anew() -> None:
    usage = watched([1.0] * 40)
    usage.note(41 * S, {0: ServiceTotals(0, 0, 0)})
    assert usage.seconds(0) == 0
    usage.forget(0)
    assert (usage.seconds(0), usage.busy_ratio(0)) == (0, 0.0)


def test_a_smaller_size_with_room_to_spare() -> None:
    found = advise(SEEN)
    assert found is not None
    assert (found.sm_percent, found.memory_bytes) == (22, 9 * (GIB // 4))
    assert found.text == (
        "It used 20 % of the GPU's time or less in 95 of 100 seconds of work; it had 2 GiB of 8 GiB at most: "
        "vgpuctl set vgpu-00000001 --sm 22 --mem 2304M"
    )


def test_nothing_to_type_where_its_limit_may_be_what_held_it_back() -> None:
    found = advise(replace(SEEN, busy_ratio=0.49, memory_peak_bytes=8 * GIB, memory_refusals=3))
    assert found is not None
    assert (found.sm_percent, found.memory_bytes) == (None, None)
    assert "which is what it may: more might serve it better" in found.text
    assert "refused memory 3 times at its 8 GiB" in found.text
    once = advise(replace(SEEN, memory_refusals=1))
    assert once is not None
    assert "refused memory 1 time at its" in once.text
    assert "vgpuctl" not in found.text


def test_who_had_more_than_its_limit_is_now_is_not_told_that_this_will_do() -> None:
    found = advise(replace(SEEN, memory_peak_bytes=482 << 20, memory_limit_bytes=256 << 20))
    assert found is not None
    assert found.memory_bytes is None
    assert found.text.endswith(
        "of work; it had 482 MiB, more than the 256 MiB that it may have now: vgpuctl set vgpu-00000001 --sm 22"
    )


def test_a_whole_gpu_that_is_used_up_is_no_limit_and_needs_all_of_it() -> None:
    found = advise(replace(SEEN, busy_ratio=1.0, limit_ppm=1_000_000))
    assert found is not None
    assert found.sm_percent is None
    assert "more might" not in found.text


def test_too_little_seen_and_what_nobody_measures() -> None:
    assert advise(replace(SEEN, seconds=0, memory_peak_bytes=0)) is None
    early = advise(replace(SEEN, seconds=LEAST_SECONDS - 1))
    spatial = advise(replace(SEEN, temporal=False))
    assert early is not None
    assert early.sm_percent is None
    assert "needed" not in early.text
    assert early.memory_bytes is not None  # a peak is one from the first moment on
    assert spatial is not None
    assert spatial.sm_percent is None
    assert "how many SMs it needs is not measured" in spatial.text


@given(
    st.integers(0, 500), st.floats(0, 1), st.integers(1, 1_000_000), st.booleans(), st.integers(0, 16 * GIB),
    st.integers(GIB // 4, 16 * GIB), st.integers(0, 2),
)  # fmt: skip
def test_what_is_advised_holds_what_was_seen(
    seconds: int, busy: float, limit: int, temporal: bool, peak: int, most: int, refusals: int
) -> None:
    seen = Seen("v", seconds, busy, limit, temporal, peak, most, refusals)
    found = advise(seen)
    if found is None:
        assert not seconds
        assert not peak
        return
    if found.sm_percent is not None:
        assert seen.busy_ratio * 100 <= found.sm_percent < limit / 10_000
        assert temporal
    if found.memory_bytes is not None:
        assert seen.memory_peak_bytes <= found.memory_bytes <= most
        assert not refusals
