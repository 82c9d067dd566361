"""Admission: every packing comes with a proof, and the proof is checked."""

from __future__ import annotations

from itertools import chain, combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpu.packing.admission import PACKING_LIMIT, Demand, admit, fits, largest_guarantee, overcommitted, packing_ratio
from vgpu.packing.fractional import pack
from vgpu.share import PPM, Mode, Share

GIB = 2**30


def share(percent: float, sm_percent: float = 100) -> Share:
    return Share(round(percent * PPM / 100), PPM, round(sm_percent * 1000))


def spatial(*shares: tuple[float, float]) -> list[Share]:
    return [share(quota, sms) for sms, quota in shares]


populations = st.lists(st.tuples(st.integers(1, 100), st.integers(1, 1000)), min_size=1, max_size=8)


@given(populations)
def test_a_packing_is_feasible_and_nothing_less_would_do(population: list[tuple[int, int]]) -> None:
    widths = [1000 * s for s, _ in population]
    guarantees = [r / 1000 for _, r in population]
    packing = pack(widths, guarantees)
    for members, time in packing.sets:
        assert time >= 0
        assert sum(widths[i] for i in members) <= 100_000
    for i, guarantee in enumerate(guarantees):
        assert sum(time for members, time in packing.sets if i in members) >= guarantee - 1e-6
    assert packing.time == pytest.approx(sum(time for _, time in packing.sets), abs=1e-6)
    # The dual solution: no packing at all can be shorter than Σ price·r.
    every = chain.from_iterable(combinations(range(len(widths)), k) for k in range(1, len(widths) + 1))
    for members in every:
        if sum(widths[i] for i in members) <= 100_000:
            assert sum(packing.prices[i] for i in members) <= 1 + 1e-6
    assert all(price >= -1e-6 for price in packing.prices)
    assert sum(p * r for p, r in zip(packing.prices, guarantees, strict=True)) == pytest.approx(packing.time, abs=1e-6)


def test_sixty_four_partitions_are_packed() -> None:
    """Beyond any enumeration; at least the area, and less than each alone."""
    widths = [6061 + 1515 * (i % 13) for i in range(64)]
    guarantees = [0.05 + 0.01 * (i % 5) for i in range(64)]
    packing = pack(widths, guarantees)
    area = sum(w * r for w, r in zip(widths, guarantees, strict=True)) / 100_000
    assert area <= packing.time <= 1.1 * area
    for i, guarantee in enumerate(guarantees):
        assert sum(time for members, time in packing.sets if i in members) >= guarantee - 1e-6


@pytest.mark.parametrize(
    ("population", "ratio"),
    [
        ([(51, 50)] * 3, 1.5),
        ([(30, 100)] * 4, 4 / 3),
        ([(12, 40)] * 4 + [(24, 40)] * 2 + [(50, 60)] * 2, 1.0),
        ([(30, 100), (70, 100)], 1.0),
    ],
)
def test_known_packings(population: list[tuple[float, float]], ratio: float) -> None:
    assert packing_ratio(Mode.SPATIAL, spatial(*population)) == pytest.approx(ratio, abs=1e-5)


def test_temporal_guarantees_may_fill_the_gpu_to_the_last_millionth() -> None:
    present = [Demand(share(30)), Demand(share(30))]
    assert admit(Mode.TEMPORAL, 0, present, Demand(share(40))) is None
    refusal = admit(Mode.TEMPORAL, 0, present, Demand(share(40.0001)))
    assert refusal is not None
    assert refusal.largest_guarantee_ppm == 400_000
    assert "40%" in refusal.reason
    assert admit(Mode.TEMPORAL, 0, present, Demand(share(90)), overcommit=True) is None


def test_where_all_partitions_fit_at_once_there_is_nothing_to_pack() -> None:
    assert fits(Mode.SPATIAL, spatial((30, 100), (70, 100)))
    assert not fits(Mode.SPATIAL, spatial((30, 100), (71, 100)))
    assert fits(Mode.SPATIAL, spatial((51, 47), (51, 47)))
    assert not fits(Mode.SPATIAL, spatial((51, 48), (51, 48)))


def test_a_refusal_says_what_would_fit() -> None:
    present = [Demand(share(100, 30))] * 3
    refusal = admit(Mode.SPATIAL, 0, present, Demand(share(100, 30)))
    assert refusal is not None
    assert (refusal.largest_guarantee_ppm, refusal.largest_sm_mpercent) == (0, 10_000)
    assert "1.33 s of every second" in refusal.reason
    assert "71% each would fit" in refusal.reason
    refusal = admit(Mode.SPATIAL, 0, [Demand(share(50, 51))], Demand(share(60, 51)))
    assert refusal is not None
    assert refusal.largest_guarantee_ppm == 450_000
    assert "room for 51% of the SMs for 45% of the time, or 49% of the SMs all the time" in refusal.reason
    refusal = admit(Mode.SPATIAL, 0, spatial_demands((100, 30.303), (100, 69.696)), Demand(share(100, 5)))
    assert refusal is not None
    assert "room for nothing; with the same quota" in refusal.reason


@given(populations, st.integers(1, 100))
def test_the_largest_that_would_fit_fits_and_a_little_more_does_not(
    population: list[tuple[int, int]], width: int
) -> None:
    present = spatial(*((s, r / 10) for s, r in population))
    largest = largest_guarantee(present, share(100, width))
    new = Share(largest, PPM, 1000 * width)
    if largest == PPM:
        return
    if largest:
        assert fits(Mode.SPATIAL, [*present, new])
    more = Share(largest + 1100, PPM, 1000 * width)
    assert packing_ratio(Mode.SPATIAL, [*present, more]) > PACKING_LIMIT


def test_memory_is_a_sum_and_the_card_is_the_end() -> None:
    present = [Demand(share(10), 30 * GIB)]
    assert admit(Mode.TEMPORAL, 80 * GIB, present, Demand(share(10), 50 * GIB)) is None
    refusal = admit(Mode.TEMPORAL, 80 * GIB, present, Demand(share(10), 50 * GIB + 1))
    assert refusal is not None
    assert refusal.largest_memory_bytes == 50 * GIB
    assert "50 GiB of 80 GiB are left" in refusal.reason
    assert admit(Mode.TEMPORAL, 80 * GIB, present, Demand(share(10), 80 * GIB), swap=True) is None
    refusal = admit(Mode.TEMPORAL, 80 * GIB, present, Demand(share(10), 81 * GIB), swap=True)
    assert refusal is not None
    assert refusal.largest_memory_bytes == 80 * GIB


@pytest.mark.parametrize("mode", [Mode.TEMPORAL, Mode.SPATIAL])
def test_overcommitted_shares_keep_their_proportions_and_fit(mode: Mode) -> None:
    scaled = overcommitted(mode, [share(90, 60), share(60, 60), share(30, 60)])
    assert fits(mode, scaled)
    assert scaled[0].guarantee_ppm == pytest.approx(3 * scaled[2].guarantee_ppm, abs=5)
    unchanged = [share(20, 30), share(30, 30)]
    assert overcommitted(mode, unchanged) == unchanged


def test_a_full_gpu_has_nothing_left() -> None:
    full = [Demand(share(60), 50 * GIB), Demand(share(40), 31 * GIB)]
    refusal = admit(Mode.TEMPORAL, 80 * GIB, full, Demand(share(1)))
    assert refusal is not None
    assert refusal.largest_guarantee_ppm == 0
    refusal = admit(Mode.TEMPORAL, 80 * GIB, full, Demand(share(1), GIB))
    assert refusal is not None
    assert refusal.largest_memory_bytes == 0
    assert "0 GiB of 80 GiB are left" in refusal.reason
    refusal = admit(Mode.SPATIAL, 0, spatial_demands((60, 100), (40, 100)), Demand(share(100, 50)))
    assert refusal is not None
    assert refusal.largest_sm_mpercent == 0


def spatial_demands(*shares: tuple[float, float]) -> list[Demand]:
    return [Demand(s) for s in spatial(*shares)]


def test_the_equal_quota_of_a_refusal_does_not_depend_on_the_quotas_asked_for() -> None:
    refusal = admit(Mode.SPATIAL, 0, spatial_demands((60, 95)), Demand(share(50, 60)))
    assert refusal is not None
    assert refusal.largest_guarantee_ppm == 0
    assert "47% each would fit" in refusal.reason  # 0.95 of the time, in turns


def test_the_equal_quota_of_a_refusal_is_the_largest_whole_percentage() -> None:
    """Seven of which three fit at a time: 95 % of three sevenths are 40.7 %."""
    refusal = admit(Mode.SPATIAL, 0, spatial_demands(*[(30, 100)] * 6), Demand(share(100, 30)))
    assert refusal is not None
    assert "40% each would fit" in refusal.reason
    assert fits(Mode.SPATIAL, spatial(*[(30, 40)] * 7))
    assert not fits(Mode.SPATIAL, spatial(*[(30, 41)] * 7))


def test_beside_partitions_that_leave_its_sms_free_all_of_the_time_fits() -> None:
    assert largest_guarantee(spatial((30, 100)), share(100, 70)) == PPM


def test_the_largest_is_in_whole_tenths_of_a_percent_rounded_down() -> None:
    assert largest_guarantee(spatial((51, 49.93)), share(100, 51)) == 450_000  # 45.07 %
    assert largest_guarantee(spatial((51, 49.9)), share(100, 51)) == 451_000
    assert largest_guarantee(spatial((51, 95)), share(100, 51)) == 0


def test_the_largest_is_found_where_its_time_is_shared() -> None:
    assert largest_guarantee(spatial((50, 60), (50, 60)), share(100, 50)) == 700_000  # half of 60 + 60 + 70 is 95 %
    assert largest_guarantee(spatial((51, 50), (51, 50), (51, 50)), share(100, 49)) == 0  # it would, did the others fit


def test_temporal_overcommitment_divides_by_the_sum() -> None:
    assert packing_ratio(Mode.TEMPORAL, [share(90), share(60), share(30)]) == 1.8
    scaled = overcommitted(Mode.TEMPORAL, [share(90), share(60), share(30)])
    assert [s.guarantee_ppm for s in scaled] == [500_000, 333_333, 166_666]
    unchanged = [share(60), share(37)]  # fuller than partitions could be packed
    assert overcommitted(Mode.TEMPORAL, unchanged) == unchanged
    assert overcommitted(Mode.TEMPORAL, [share(100), share(100), Share(1)])[2].guarantee_ppm == 1
