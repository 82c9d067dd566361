"""Nothing is promised twice, and nothing is refused that fits."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpu.packing.admission import fits
from vgpu.placement import POLICIES, Fleet, Gpu, Kind, Mix, Placement, Request, Room
from vgpu.share import CARD_MPERCENT, PPM, Mode, Share

CARD = 80
KINDS = {mode: {model: Kind(model, CARD, mode) for model in ("A", "B")} for mode in Mode}
EMPTY = Gpu(PPM, CARD)


def nodes(mode: Mode) -> st.SearchStrategy[list[Room]]:
    return st.lists(
        st.builds(
            lambda model, gpus, cores: Room(KINDS[mode][model], (EMPTY,) * gpus, cores, cores),
            st.sampled_from(["A", "B"]),
            st.integers(1, 3),
            st.integers(0, 8000),
        ),
        min_size=1,
        max_size=5,
    )


REQUESTS = st.builds(
    Request,
    time_ppm=st.sampled_from([PPM // 10, PPM // 4, PPM // 3, PPM // 2, PPM]),
    memory_bytes=st.integers(0, CARD),
    sm_mpercent=st.sampled_from([20_000, 30_000, 50_000, CARD_MPERCENT]),
    gpus=st.integers(0, 3),
    cores=st.integers(0, 4000),
    host_bytes=st.integers(0, 4000),
    models=st.sampled_from([frozenset(), frozenset("A"), frozenset("AB")]),
    label=st.sampled_from(["", "x", "y"]),
)


class Books:
    """What each GPU was promised, counted anew."""

    def __init__(self, rooms: Sequence[Room]) -> None:
        self.rooms = rooms
        self.placed: list[Placement] = []

    def on(self, node: int, gpu: int) -> list[Request]:
        return [each.asked for each in self.placed if each.node == node and gpu in each.gpus]

    def has_room(self, node: int, gpu: int, asked: Request) -> bool:
        everyone = [*self.on(node, gpu), asked]
        if sum(each.memory_bytes for each in everyone) > CARD:
            return False
        return self.packs(node, everyone)

    def packs(self, node: int, everyone: Sequence[Request]) -> bool:
        if self.rooms[node].kind.mode is Mode.TEMPORAL:
            return sum(each.area_ppm for each in everyone) <= PPM
        return fits(Mode.SPATIAL, [Share(each.time_ppm, sm_mpercent=each.sm_mpercent) for each in everyone])

    def fits(self, asked: Request, *, labels: bool) -> bool:
        """Whether any node takes it; ``labels``: on a GPU that has no vGPU of its label."""
        for node, room in enumerate(self.rooms):
            here = [each.asked for each in self.placed if each.node == node]
            able = [
                gpu
                for gpu in range(len(room.gpus))
                if self.has_room(node, gpu, asked)
                and not (labels and asked.label and any(one.label == asked.label for one in self.on(node, gpu)))
            ]
            if (
                sum(each.cores for each in here) + asked.cores <= room.cores
                and sum(each.host_bytes for each in here) + asked.host_bytes <= room.host_bytes
                and (not asked.models or room.kind.model in asked.models)
                and len(able) >= asked.gpus
            ):
                return True
        return False

    def check(self) -> None:
        for node, room in enumerate(self.rooms):
            here = [each.asked for each in self.placed if each.node == node]
            assert sum(each.cores for each in here) <= room.cores
            assert sum(each.host_bytes for each in here) <= room.host_bytes
            for gpu in range(len(room.gpus)):
                present = self.on(node, gpu)
                assert sum(each.memory_bytes for each in present) <= CARD
                assert self.packs(node, present)


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("name", list(POLICIES))
@given(data=st.data())
def test_nothing_is_promised_twice_nor_refused_while_it_fits(mode: Mode, name: str, data: Any) -> None:
    rooms = data.draw(nodes(mode))
    fleet, books = Fleet(POLICIES[name], rooms), Books(rooms)
    for asked in data.draw(st.lists(REQUESTS, max_size=12)):
        fit = books.fits(asked, labels=name == "mutex")
        placed = fleet.place(asked)
        if placed is None:
            assert not fit
            assert fleet.why(asked)
            continue
        assert fit
        assert len(set(placed.gpus)) == asked.gpus
        books.placed.append(placed)
        books.check()
        if data.draw(st.booleans()):
            gone = books.placed.pop(data.draw(st.integers(0, len(books.placed) - 1)))
            fleet.remove(gone)
    for placed in books.placed:
        fleet.remove(placed)
    assert [fleet.room(node) for node in range(len(rooms))] == rooms


@pytest.mark.parametrize("name", list(POLICIES))
@given(data=st.data())
def test_an_offer_says_why_and_places_nothing(name: str, data: Any) -> None:
    rooms = data.draw(nodes(Mode.TEMPORAL))
    fleet = Fleet(POLICIES[name], rooms, Mix(data.draw(st.lists(REQUESTS, min_size=1, max_size=5))))
    for asked in data.draw(st.lists(REQUESTS, min_size=1, max_size=5)):
        before = [fleet.room(node) for node in range(len(rooms))]
        offers = fleet.offers(asked)
        assert before == [fleet.room(node) for node in range(len(rooms))]
        assert [offer.rank for offer in offers] == sorted((offer.rank for offer in offers), reverse=True)
        for offer in offers:
            assert offer.rank == pytest.approx(sum(offer.reasons.values()))
        placed = fleet.place(asked)
        assert (placed is None) == (not offers)
        if placed is not None:
            assert placed.node in [offer.node for offer in offers]


@given(data=st.data())
def test_a_request_goes_to_the_node_that_is_named(data: Any) -> None:
    rooms = data.draw(nodes(Mode.SPATIAL))
    fleet = Fleet(POLICIES["spread"], rooms)
    for asked in data.draw(st.lists(REQUESTS, max_size=5)):
        node = data.draw(st.integers(0, len(rooms) - 1))
        takes = fleet.room(node).takes(asked)
        placed = fleet.place(asked, node=node)
        assert (placed is not None) == takes
        assert placed is None or placed.node == node


def test_a_request_that_comes_again_changes_no_mix() -> None:
    fleet = Fleet(POLICIES["fit"], [Room(KINDS[Mode.TEMPORAL]["A"], (EMPTY,))])
    for _ in range(4):
        assert fleet.place(Request(PPM // 10))
    mix = fleet.mix
    for _ in range(100):
        assert fleet.place(Request(PPM), again=True) is None
    assert fleet.mix is mix


def test_equal_nodes_are_one_group_whatever_object_their_kind_is() -> None:
    fleet = Fleet(POLICIES["fit"], [Room(Kind("A", CARD), (EMPTY,)) for _ in range(50)])
    assert len({id(fleet.room(node).kind) for node in range(50)}) == 1


@given(data=st.data())
def test_what_it_keeps_of_earlier_ranks_changes_no_decision(data: Any) -> None:
    """A fleet that has seen many requests, and one that is made with what is left: the same node."""
    rooms = data.draw(nodes(Mode.TEMPORAL))
    mix = Mix(data.draw(st.lists(REQUESTS, min_size=1, max_size=5)))
    fleet, placed = Fleet(POLICIES["fit"], rooms, mix), []
    for asked in data.draw(st.lists(REQUESTS, max_size=10)):
        fresh = Fleet(POLICIES["fit"], [fleet.room(node) for node in range(len(rooms))], mix).place(asked)
        found = fleet.place(asked)
        assert (found is None) == (fresh is None)
        if found is not None and fresh is not None:
            assert found.node == fresh.node
            placed.append(found)
            if data.draw(st.booleans()):
                fleet.remove(placed.pop(0))


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("asked", [Request(PPM // 2), Request(PPM // 2, label="x"), Request(0, gpus=0, cores=1)])
def test_a_placement_is_taken_back_once(mode: Mode, asked: Request) -> None:
    fleet = Fleet(POLICIES["spread"], [Room(KINDS[mode]["A"], (EMPTY,), 10)])
    placed = fleet.place(asked)
    assert placed is not None
    fleet.remove(placed)
    with pytest.raises(ValueError, match="was taken back already"):
        fleet.remove(placed)
    assert fleet.room(0) == Room(KINDS[mode]["A"], (EMPTY,), 10)


def test_it_forgets_old_ranks_and_decides_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> list[tuple[int, tuple[int, ...]] | None]:
        fleet, chance = Fleet(POLICIES["fit"], [Room(KINDS[Mode.TEMPORAL]["A"], (EMPTY,) * 2)] * 20), random.Random(1)
        found = [fleet.place(Request(chance.randrange(1, 40) * 10_000, chance.randrange(1, 40))) for _ in range(300)]
        return [one and (one.node, one.gpus) for one in found]

    wanted = run()
    for name, value in (("MOST_RANKINGS", 3), ("MOST_CHANGES", 7), ("MOST_KNOWN", 5)):
        monkeypatch.setattr(f"vgpu.placement.fleet.{name}", value)
    assert run() == wanted


def test_why_nothing_fits() -> None:
    fleet = Fleet(POLICIES["mutex"], [Room(KINDS[Mode.TEMPORAL]["A"], (EMPTY,), 4000, 4000)])
    assert fleet.place(Request(PPM // 2, CARD // 2, label="web"))
    why = {
        Request(PPM * 6 // 10): "60 % of a GPU asked for; the emptiest of 1 has 50 %",
        Request(PPM // 10, CARD): "of memory asked for; the most on one GPU is",
        Request(PPM // 10, models=frozenset("C")): "no node has a GPU of C",
        Request(PPM // 10, cores=5000): "no node has that with its memory and processors",
        Request(PPM // 10, label="web"): "mutex allows none of the GPUs that have room",
        Request(PPM // 10, gpus=2): "2 GPUs with 10 % each asked for",
    }
    for asked, reason in why.items():
        assert fleet.place(asked) is None
        assert reason in fleet.why(asked)


def test_why_nothing_fits_in_spatial_mode() -> None:
    fleet = Fleet(POLICIES["pack"], [Room(KINDS[Mode.SPATIAL]["A"], (EMPTY,))])
    assert fleet.place(Request(PPM // 2, sm_mpercent=51_000))
    assert "75 % of a GPU asked for; the emptiest of 1 has 74.5 %" in fleet.why(Request(PPM, sm_mpercent=75_000))
    assert "and with SMs that fit" in fleet.why(Request(PPM * 9 // 10, sm_mpercent=60_000))
