"""Admissions: who comes in, and that every slot is released exactly once, in whatever order the news arrives."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from vgpu.broker.core import (
    Admission,
    Admissions,
    IllegalMove,
    SlotState,
    company,
    foreign,
    gpu_full,
    is_foreign,
    may_attach,
)
from vgpu.broker.runtime import NOTED_S, WAIT_S
from vgpu.identity import Peer, Process
from vgpu.integrations.cgroups import NOWHERE, Place
from vgpu.protocol.broker import Adopt, Attach, Refused

VGPU = Adopt(
    vgpu_id="vgpu-00000001",
    key=0,
    generation=1,
    owner_uid=1000,
    share_gid=-1,
    mode="temporal",
    gpu_index=0,
    gpu_uuid="GPU-1",
    simulated=True,
    sm_percent=30,
)
NOW = 10**12


def peer(pid: int = 7, uid: int = 1000, groups: frozenset[int] = frozenset()) -> Peer:
    return Peer(Process(pid, 100 * pid), uid, groups)


def attach(**changes: Any) -> Attach:
    return Attach(**({"version": 1, "now_ns": NOW} | changes))


@pytest.mark.parametrize(
    ("who", "share_gid", "welcome"),
    [
        (peer(uid=1000), -1, True),
        (peer(uid=0), -1, True),
        (peer(uid=1001), -1, False),
        (peer(uid=1001, groups=frozenset({5})), -1, False),
        (peer(uid=1001, groups=frozenset({5, 6})), 6, True),
        (peer(uid=1001, groups=frozenset({5})), 6, False),
        (peer(uid=1001, groups=frozenset({0})), 0, True),
    ],
)
def test_owner_root_and_the_shared_group(who: Peer, share_gid: int, welcome: bool) -> None:
    assert may_attach(who, VGPU.model_copy(update={"share_gid": share_gid})) is welcome


PLACE = Place(("0123456789abcdef" * 4,), "1b7c4d8e-3f2a-4c5b-9d6e-7f8a9b0c1d2e")


@pytest.mark.parametrize(
    ("place", "pods", "is_refused"),
    [
        (PLACE, None, False),
        (NOWHERE, None, False),
        (PLACE, (PLACE.pod,), False),
        (PLACE, ("other", PLACE.pod), False),
        (PLACE, ("other",), True),
        (PLACE, (), True),
        (NOWHERE, (PLACE.pod,), True),
    ],
)
def test_a_vgpu_of_a_claim_is_for_the_pods_of_the_claim(
    place: Place, pods: tuple[str, ...] | None, is_refused: bool
) -> None:
    assert is_foreign(place, VGPU.model_copy(update={"pods": pods})) is is_refused


def test_the_refusal_of_a_foreign_process_names_its_place() -> None:
    said = "vgpu-00000001 is for the pods that have its claim, and this process runs in"
    assert foreign(PLACE, VGPU).error == f"{said} {PLACE}; let its pod claim a vGPU"
    assert foreign(NOWHERE, VGPU).error == f"{said} no pod; let its pod claim a vGPU"


SAID = {
    "version": "the hook speaks version {version}, vgpu-00000001 speaks 1; "
    "install the hook of the node's release: vgpuctl hook install",
    "not-yours": "vgpu-00000001 belongs to uid 1000, this process runs as uid 5; "
    "create one of your own: vgpuctl create",
    "mode": "this process has a time namespace of its own, so leases cannot be compared with its clock; "
    "start the container without one",
    "unavailable": "process 7 ended while it attached",
}


@pytest.mark.parametrize(
    ("request_", "who", "code"),
    [
        (attach(version=2), peer(), "version"),
        (attach(version=0), peer(uid=5), "version"),
        (attach(), peer(uid=5), "not-yours"),
        (attach(role="observer"), peer(uid=5), "not-yours"),
        (attach(now_ns=NOW + 31 * 10**9), peer(), "mode"),
        (attach(now_ns=NOW - 31 * 10**9), peer(), "mode"),
        (attach(), replace(peer(), process=Process(7, 0)), "unavailable"),
    ],
)
def test_refusals(request_: Attach, who: Peer, code: str) -> None:
    admissions = Admissions()
    refused = admissions.knock(request_, who, VGPU, NOW)
    assert isinstance(refused, Refused)
    assert refused.code == code
    assert refused.error == SAID[code].format(version=request_.version)
    assert len(admissions) == 0


@pytest.mark.parametrize("skew_ns", [30 * 10**9, -30 * 10**9, -NOW])
def test_a_visitor_may_have_waited(skew_ns: int) -> None:
    """For as long as 30 s; a hook that does not tell its time (0) is not asked."""
    assert Admissions().knock(attach(now_ns=NOW + skew_ns), peer(), VGPU, NOW) == Admission(0, known=False)


@pytest.mark.parametrize(
    ("claim", "believed"),
    [
        ("", ()),
        ("vgpu-00000001", ()),
        ("vgpu-00000001,vgpu-00000001", ()),
        ("vgpu-00000002,vgpu-00000001", ("vgpu-00000001", "vgpu-00000002")),
        ("vgpu-00000001,../../etc,vgpu-2", ()),
        ("vgpu-00000002,vgpu-00000003", ()),
    ],
    ids=["nothing", "itself", "itself twice", "another one", "no ids", "others alone"],
)
def test_what_a_process_says_of_its_vgpus(claim: str, believed: tuple[str, ...]) -> None:
    assert company(claim, VGPU.vgpu_id) == believed


def test_nobody_comes_into_a_vgpu_that_is_removed() -> None:
    admissions = Admissions()
    assert admissions.removed is False
    admissions.removed = True
    refused = admissions.knock(attach(), peer(), VGPU, NOW)
    assert isinstance(refused, Refused)
    assert refused.code == "removed"


def test_an_observer_takes_no_slot() -> None:
    admissions = Admissions(capacity=0)
    assert admissions.knock(attach(role="observer"), peer(), VGPU, NOW) == Admission(-1, known=False)


def test_a_slot_belongs_to_who_holds_it() -> None:
    admissions = Admissions()
    assert admissions.knock(attach(), peer(1), VGPU, NOW) == Admission(0, known=False)
    assert admissions.knock(attach(slot=0), peer(1), VGPU, NOW) == Admission(0, known=True)
    assert admissions.knock(attach(slot=0), peer(2), VGPU, NOW) == Admission(1, known=False)
    reused = replace(peer(1), process=Process(1, 999))
    assert admissions.knock(attach(slot=0), reused, VGPU, NOW) == Admission(2, known=False)
    admissions.died(0, Process(1, 100))
    assert admissions.knock(attach(slot=0), peer(1), VGPU, NOW) == Admission(3, known=False)


def test_a_process_has_one_slot() -> None:
    """However often it knocks: it has failed before it took that slot and gets the same one, or it is refused."""
    admissions = Admissions()
    assert admissions.knock(attach(), peer(1), VGPU, NOW) == Admission(0, known=False)
    assert admissions.knock(attach(), peer(1), VGPU, NOW, unused=True) == Admission(0, known=True)
    for asked in (-1, 5):
        refused = admissions.knock(attach(slot=asked), peer(1), VGPU, NOW)
        assert isinstance(refused, Refused)
        assert refused.error == (
            "process 1 is in vgpu-00000001 already, and a process attaches once; start the program again"
        )
    assert len(admissions) == 1
    admissions.died(0, Process(1, 100))  # its slot was found left: it is another program now
    assert admissions.knock(attach(), peer(1), VGPU, NOW) == Admission(1, known=False)


def test_who_was_let_in_may_become_another_user() -> None:
    admissions = Admissions()
    admissions.knock(attach(), peer(1), VGPU, NOW)
    assert admissions.knock(attach(slot=0), peer(1, uid=5), VGPU, NOW) == Admission(0, known=True)
    admissions.expect({Process(2, 200): 7})
    assert isinstance(admissions.knock(attach(slot=7, role="observer"), peer(2, uid=5), VGPU, NOW), Refused)
    assert admissions.knock(attach(slot=7), peer(2, uid=5), VGPU, NOW) == Admission(7, known=False)
    refused = admissions.knock(attach(slot=7), peer(3, uid=5), VGPU, NOW)
    assert isinstance(refused, Refused)
    assert refused.code == "not-yours"


def test_a_slot_that_no_list_names_is_kept_for_the_process_that_the_kernel_says_it_is() -> None:
    admissions = Admissions(capacity=3)
    admissions.adopt(0, Process(1, 100), dead=False)
    admissions.set_aside([0, 1, 2])
    assert admissions.aside == {1, 2}
    assert isinstance(admissions.knock(attach(), peer(5), VGPU, NOW), Refused)
    assert isinstance(admissions.knock(attach(slot=1), peer(5), VGPU, NOW), Refused), "the page names another one"
    assert admissions.knock(attach(slot=1), peer(2), VGPU, NOW, names=True) == Admission(1, known=False, found=True)
    admissions.give_up(2)
    assert admissions.knock(attach(), peer(5), VGPU, NOW) == Admission(2, known=False)
    assert list(admissions.held()) == [(0, Process(1, 100)), (1, Process(2, 200)), (2, Process(5, 500))]


def test_the_living_cannot_be_buried() -> None:
    admissions = Admissions()
    admissions.knock(attach(), peer(1), VGPU, NOW)
    with pytest.raises(IllegalMove, match="slot 0: process 1 was called gone before"):
        admissions.gone(0, Process(1, 100))
    with pytest.raises(IllegalMove, match="slot 0 is held already"):
        admissions.adopt(0, Process(2, 200), dead=False)
    assert admissions.process_in(0) == Process(1, 100)
    assert admissions.process_in(1) is None


def test_a_slot_beyond_the_page_is_not_given() -> None:
    admissions = Admissions(capacity=2)
    assert admissions.knock(attach(slot=2), peer(1), VGPU, NOW) == Admission(0, known=False)
    assert admissions.knock(attach(slot=-1), peer(2), VGPU, NOW) == Admission(1, known=False)


class Slots(RuleBasedStateMachine):
    """Twin: a list of (slot, process, state) histories. News is repeated, late, and about strangers."""

    admitted = Bundle("admitted")

    def __init__(self) -> None:
        super().__init__()
        self.admissions = Admissions(capacity=4)
        self.holders: dict[int, tuple[Process, SlotState]] = {}
        self.released: list[Process] = []
        self.pids = 0

    @rule(target=admitted, asked=st.integers(-1, 3))
    def come(self, asked: int) -> tuple[int, Process]:
        self.pids += 1
        newcomer = peer(self.pids)
        decision = self.admissions.knock(attach(slot=asked), newcomer, VGPU, NOW)
        free = [slot for slot in range(4) if slot not in self.holders]
        if not free:
            assert isinstance(decision, Refused)
            assert decision.code == "full"
            return (0, newcomer.process)
        slot = asked if asked in free else free[0]
        assert decision == Admission(slot, known=False)
        self.holders[slot] = (newcomer.process, SlotState.HELD)
        return slot, newcomer.process

    @rule(target=admitted, which=admitted)
    def come_back(self, which: tuple[int, Process]) -> tuple[int, Process]:
        slot, process = which
        decision = self.admissions.knock(attach(slot=slot), replace(peer(), process=process), VGPU, NOW)
        held = [number for number, holder in self.holders.items() if holder == (process, SlotState.HELD)]
        assert len(held) <= 1
        if held == [slot]:
            assert decision == Admission(slot, known=True)
            return which
        if held:
            assert isinstance(decision, Refused)
            return which
        if isinstance(decision, Refused):
            assert len(self.holders) == 4
            return which
        assert not decision.known
        self.holders[decision.slot] = (process, SlotState.HELD)
        return decision.slot, process

    @rule(which=admitted)
    def died(self, which: tuple[int, Process]) -> None:
        slot, process = which
        news = self.holders.get(slot) == (process, SlotState.HELD)
        assert self.admissions.died(slot, process) is news
        if news:
            self.holders[slot] = (process, SlotState.DEAD)

    @rule(which=admitted)
    def gone(self, which: tuple[int, Process]) -> None:
        slot, process = which
        if self.holders.get(slot) == (process, SlotState.HELD):
            with pytest.raises(IllegalMove):
                self.admissions.gone(slot, process)
            return
        waits = self.holders.get(slot) == (process, SlotState.DEAD)
        assert self.admissions.awaits_release(slot, process) is waits
        assert self.admissions.gone(slot, process) is waits
        if waits:
            del self.holders[slot]

    @rule()
    def another_broker_takes_over(self) -> None:
        self.admissions = Admissions(capacity=4)
        for slot, (process, state) in self.holders.items():
            self.admissions.adopt(slot, process, dead=state is SlotState.DEAD)

    @invariant()
    def agree(self) -> None:
        assert len(self.admissions) == len(self.holders)
        assert self.admissions.alive == sum(state is SlotState.HELD for _, state in self.holders.values())
        assert list(self.admissions.dead()) == sorted(
            (slot, process) for slot, (process, state) in self.holders.items() if state is SlotState.DEAD
        )
        assert all(self.admissions.process_in(slot) == process for slot, (process, _) in self.holders.items())


TestSlots = Slots.TestCase


@pytest.mark.parametrize(
    ("processes", "reason"),
    [
        (49, "GPU 0 has 48 processes already, the most of its MPS server; end one"),
        (48, "those that are left are kept for other vGPUs than vgpu-00000001; end one"),
    ],
)
def test_a_full_mps_server_says_whose_places_are_left(processes: int, reason: str) -> None:
    refused = gpu_full(VGPU.model_copy(update={"most_processes": 48}), processes)
    assert refused.code == "full"
    assert reason in refused.error


def test_a_hook_still_waits_when_the_broker_gives_up_on_its_pod() -> None:
    header = Path(__file__).parents[2] / "cython_ext/hook/connect.h"
    [patience_s] = re.findall(r"#define VGPU_PATIENCE_S (\d+)", header.read_text())
    assert int(patience_s) > WAIT_S + NOTED_S + 1
