"""What each policy prefers, on small cases."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpu.placement import POLICIES, Fleet, Gpu, Kind, Mix, Request, Room
from vgpu.placement.policies.fit import Fit
from vgpu.share import PPM, Mode

GIB = 1 << 30
CARD = 80 * GIB
KIND = Kind("H100", CARD)
EMPTY = Gpu(PPM, CARD)


def left(time: int, memory: int) -> Gpu:
    """Percent of both."""
    return Gpu(time * PPM // 100, memory * CARD // 100)


def chosen(name: str, gpus: list[Gpu], asked: Request, mix: Mix | None = None) -> int:
    """The GPU, each on a node of its own."""
    placed = Fleet(POLICIES[name], [Room(KIND, (gpu,)) for gpu in gpus], mix).place(asked)
    assert placed is not None
    return placed.node


def asking(time: int, memory: int) -> Request:
    return Request(time * PPM // 100, memory * CARD // 100)


def test_spread_takes_the_gpu_with_most_of_what_is_scarce() -> None:
    assert chosen("spread", [left(40, 40), left(50, 90), left(30, 100)], asking(10, 10)) == 1
    assert chosen("spread", [EMPTY, EMPTY], asking(10, 10)) == 0


def test_pack_takes_the_fullest_that_has_room() -> None:
    assert chosen("pack", [EMPTY, left(30, 30), left(5, 5), left(40, 40)], asking(10, 10)) == 1


@pytest.mark.parametrize("mode", list(Mode))
def test_fit_leaves_room_that_requests_of_late_can_use(mode: Mode) -> None:
    """Halves are asked for: a quarter on the GPU with three quarters strands nothing, on one with a half it does."""
    kind = Kind("H100", CARD, mode)

    def asking(percent: int) -> Request:
        if mode is Mode.SPATIAL:
            return Request(PPM, percent * CARD // 100, sm_mpercent=percent * 1000)
        return Request(percent * PPM // 100, percent * CARD // 100)

    for policy, wanted in (("pack", 1), ("fit", 0)):
        fleet = Fleet(POLICIES[policy], [Room(kind, (EMPTY,))] * 2, Mix([asking(50)]))
        for node, percent in enumerate((25, 50)):
            assert fleet.place(asking(percent), node=node)
        placed = fleet.place(asking(25))
        assert placed is not None
        assert placed.node == wanted


def test_fit_uses_up_time_and_memory_together() -> None:
    mix = Mix([asking(10, 40), asking(40, 10)])
    assert chosen("fit", [left(50, 80), left(80, 50)], asking(10, 40), mix) == 0
    assert chosen("fit", [left(50, 80), left(80, 50)], asking(40, 10), mix) == 1


def test_fit_keeps_processors_for_gpus() -> None:
    """The first node has GPUs and few processors, the second many: a task of many processors goes there."""
    few, many = Room(KIND, (EMPTY,) * 8, 64_000), Room(Kind("T4", CARD), (EMPTY,) * 2, 96_000)
    heavy, light = Request(PPM // 2, cores=30_000), Request(PPM // 2, cores=4000)
    placed = Fleet(POLICIES["fit"], [few, many], Mix({heavy: 1.0, light: 2.0})).place(heavy)
    assert placed is not None
    assert placed.node == 1


def test_fit_learns_what_is_asked_for() -> None:
    """Nothing was asked for, then halves only. The same quarter goes elsewhere."""
    rooms = [Room(KIND, (gpu,)) for gpu in (left(75, 75), left(50, 50), *[EMPTY] * 40)]
    fleet = Fleet(POLICIES["fit"], rooms)
    for _ in range(40):
        placed = fleet.place(asking(50, 50))
        assert placed is not None
        fleet.remove(placed)
    placed = fleet.place(asking(25, 25))
    assert placed is not None
    assert placed.node == 0


def test_mutex_keeps_one_label_apart() -> None:
    fleet = Fleet(POLICIES["mutex"], [Room(KIND, (EMPTY, EMPTY))])
    replica = Request(PPM // 10, label="web")
    first, second = fleet.place(replica), fleet.place(replica)
    assert first is not None
    assert second is not None
    assert {first.gpus, second.gpus} == {(0,), (1,)}
    assert fleet.place(replica) is None
    assert fleet.place(Request(PPM // 10, label="db")) is not None


def test_spatial_mode_packs_widths() -> None:
    """Three vGPUs with 51 % of the SMs for half of the time cover three quarters of a GPU, and two do not fit one."""
    spatial = Kind("H100", CARD, Mode.SPATIAL)
    fleet = Fleet(POLICIES["pack"], [Room(spatial, (EMPTY, EMPTY))])
    wide = Request(PPM // 2, sm_mpercent=51_000)
    placed = [fleet.place(wide) for _ in range(3)]
    assert [one and one.gpus for one in placed] == [(0,), (1,), None]
    narrow = fleet.place(Request(PPM, sm_mpercent=49_000))
    assert narrow is not None


@pytest.mark.parametrize("name", list(POLICIES))
def test_the_reasons_of_an_offer_are_named(name: str) -> None:
    [offer] = Fleet(POLICIES[name], [Room(KIND, (EMPTY,))]).offers(asking(10, 10))
    assert all(reason and isinstance(value, float) for reason, value in offer.reasons.items())


TWENTIETHS = st.integers(0, 20)
SIZES = st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20), st.integers(0, 2)), min_size=1, max_size=12)


@given(SIZES, TWENTIETHS, TWENTIETHS, st.integers(1, 20), TWENTIETHS)
def test_the_rank_without_an_option_is_the_rank(
    mix: list[tuple[int, int, int]], time: int, memory: int, asked_time: int, asked_memory: int
) -> None:
    """``Fleet`` ranks the most frequent placement from the two states of the GPU alone."""
    card = Kind("card", 20 * GIB)
    learned = Mix([Request(PPM // 20 * t, m * GIB, gpus=n) for t, m, n in mix])
    gpu, asked = Gpu(PPM // 20 * time, memory * GIB), Request(PPM // 20 * asked_time, asked_memory * GIB)
    [*options] = Room(card, (gpu,)).options(asked)
    for option in options:
        assert Fit().rank_alone(card, gpu, option.left[0], learned) == Fit().rank(option, learned)


@given(SIZES, st.lists(st.tuples(TWENTIETHS, TWENTIETHS), min_size=2, max_size=8))
def test_what_gpus_strand_adds_up_where_no_request_takes_several(
    mix: list[tuple[int, int, int]], gpus: list[tuple[int, int]]
) -> None:
    card = Kind("card", 20 * GIB)
    learned = Mix([Request(PPM // 20 * t, m * GIB) for t, m, _ in mix])
    rooms = [Gpu(PPM // 20 * t, m * GIB) for t, m in gpus]
    whole = learned.unusable(Room(card, tuple(sorted(rooms))))
    assert whole == pytest.approx(sum(learned.unusable(Room(card, (gpu,))) for gpu in rooms))
    learned._is_single = False
    learned._known.clear()
    assert whole == pytest.approx(learned.unusable(Room(card, tuple(sorted(rooms)))))
