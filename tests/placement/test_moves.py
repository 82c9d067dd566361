"""Plans of migrations: no GPU is ever over its capacity, and the plan does what it is for."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ctl.fake_node import gpu_reading, vgpu_reading
from vgpu.placement.box import left, request
from vgpu.placement.moves import MOST_MOVES, Plan, consolidate, drain, make_room
from vgpu.protocol.messages import GpuStatus, VgpuStatus
from vgpu.share import PPM
from vgpu.spec import VgpuSpec

GIB = 1 << 30
CARD = 80 * GIB


def vgpu(name: str, gpu: int, sm: float, gib: int, **changes: Any) -> VgpuStatus:
    spec = VgpuSpec.parse(sm_percent=sm, memory_bytes=gib * GIB, group=changes.pop("group", None))
    fields = {
        "mode": "temporal",
        "state": "idle",
        "memory_used_bytes": gib * GIB // 2,
        "memory_away_bytes": 0,
    } | changes
    return vgpu_reading(
        vgpu_id=f"vgpu-{name}",
        gpu_index=gpu,
        spec=spec,
        guarantee_ratio=sm / 100,
        sm_percent_granted=100.0,
        memory_limit_bytes=gib * GIB,
        **fields,
    )


def box(count: int, vgpus: list[VgpuStatus], **changes: Any) -> list[GpuStatus]:
    found = []
    for index in range(count):
        own = [one for one in vgpus if one.gpu_index == index]
        found.append(
            gpu_reading(
                index=index,
                mode="temporal",
                state="serving",
                total_memory_bytes=CARD,
                guaranteed_ratio=sum(one.guarantee_ratio for one in own),
                guaranteed_memory_bytes=sum(one.memory_limit_bytes for one in own),
                **changes,
            )
        )
    return found


def check(plan: Plan, gpus: list[GpuStatus], vgpus: list[VgpuStatus]) -> dict[str, int]:
    """Carries the plan out one move after the other; where each vGPU is afterwards."""
    at = {one.vgpu_id: one.gpu_index for one in vgpus}
    size = {one.vgpu_id: request(one.spec, gpus[0]) for one in vgpus}
    for move in plan.moves:
        assert at[move.vgpu_id] == move.source != move.target
        at[move.vgpu_id] = move.target
        on = [size[name] for name, gpu in at.items() if gpu == move.target]
        assert sum(one.time_ppm for one in on) <= PPM + len(on)
        assert sum(one.memory_bytes for one in on) <= CARD
    return at


def test_a_drained_gpus_vgpus_go_where_they_fit_and_the_reason_of_others_is_named() -> None:
    vgpus = [
        vgpu("00000001", 0, 60, 10),
        vgpu("00000002", 0, 30, 10),
        vgpu("00000003", 0, 5, 1, state="moving"),
        vgpu("00000004", 1, 50, 10),
    ]
    plan = drain("fit", 0, box(2, vgpus), vgpus)
    assert [(move.vgpu_id, move.target) for move in plan.moves] == [("vgpu-00000002", 1)]
    assert dict(plan.stay) == {
        "vgpu-00000001": "no other GPU has room for it",
        "vgpu-00000003": "it is moving",
    }


def test_vgpus_of_a_group_stay_apart_and_drained_or_spatial_gpus_get_none() -> None:
    vgpus = [vgpu("00000001", 0, 10, 1, group="ranks"), vgpu("00000002", 1, 10, 1, group="ranks")]
    assert drain("fit", 0, box(2, vgpus), vgpus).moves == ()
    assert [move.target for move in drain("fit", 0, box(3, vgpus), vgpus).moves] == [2]
    gpus = box(3, vgpus)
    gpus[2] = gpus[2].model_copy(update={"draining": True})
    assert drain("fit", 0, gpus, vgpus).moves == ()


def test_room_is_made_with_the_least_to_copy() -> None:
    vgpus = [
        vgpu("00000001", 0, 40, 40),
        vgpu("00000002", 0, 30, 2),
        vgpu("00000003", 1, 50, 40),
        vgpu("00000004", 1, 20, 30),
    ]
    wanted = VgpuSpec.parse(sm_percent=50, memory_bytes=20 * GIB)
    plan = make_room("fit", wanted, box(2, vgpus), vgpus)
    assert plan is not None
    assert [(move.vgpu_id, move.source, move.target) for move in plan.moves] == [("vgpu-00000002", 0, 1)]
    assert plan.copied_bytes == GIB
    small = make_room("fit", VgpuSpec.parse(sm_percent=20, memory_bytes=GIB), box(2, vgpus), vgpus)
    assert small is not None
    assert small.moves == ()
    assert make_room("fit", VgpuSpec.parse(sm_percent=90, memory_bytes=GIB), box(2, vgpus), vgpus) is None
    assert make_room("fit", VgpuSpec.parse(sm_percent=10, memory_bytes=100 * GIB), box(2, vgpus), vgpus) is None


def test_a_gpu_is_emptied_only_onto_gpus_in_use() -> None:
    vgpus = [vgpu("00000001", 0, 40, 10), vgpu("00000002", 1, 30, 8), vgpu("00000003", 1, 10, 1)]
    plan = consolidate("fit", box(3, vgpus), vgpus)
    assert plan is not None
    assert plan.gpu == 1
    assert {move.target for move in plan.moves} == {0}
    assert consolidate("fit", box(3, vgpus[:1]), vgpus[:1]) is None


LOADS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 60), st.integers(1, 50)), max_size=14)


@given(LOADS, st.integers(1, 100), st.integers(1, 80), st.sampled_from(["spread", "pack", "fit"]))
def test_every_plan_can_be_carried_out(drawn: list[tuple[int, int, int]], sm: int, gib: int, policy: str) -> None:
    vgpus: list[VgpuStatus] = []
    for gpu, percent, size in drawn:
        own = [one for one in vgpus if one.gpu_index == gpu]
        fits = sum(one.guarantee_ratio for one in own) + percent / 100 <= 1
        if fits and sum(one.memory_limit_bytes for one in own) + size * GIB <= CARD:
            vgpus.append(vgpu(f"{len(vgpus):08x}", gpu, percent, size))
    gpus = box(4, vgpus)
    drained = drain(policy, 0, gpus, vgpus)
    at = check(drained, gpus, vgpus)
    stays = {name for name, _ in drained.stay}
    assert {name for name, gpu in at.items() if gpu == 0} == stays
    wanted = VgpuSpec.parse(sm_percent=sm, memory_bytes=gib * GIB)
    plan = make_room(policy, wanted, gpus, vgpus)
    if plan is None:
        assert all(left(gpu).time_ppm < sm * 10_000 or left(gpu).memory_bytes < gib * GIB for gpu in gpus)
    else:
        at = check(plan, gpus, vgpus)
        on = [request(one.spec, gpus[0]) for one in vgpus if at[one.vgpu_id] == plan.gpu]
        assert sum(one.time_ppm for one in on) + sm * 10_000 <= PPM + len(on)
        assert sum(one.memory_bytes for one in on) + gib * GIB <= CARD
        assert len(plan.moves) <= MOST_MOVES
    emptied = consolidate(policy, gpus, vgpus)
    if emptied is not None:
        assert emptied.gpu not in check(emptied, gpus, vgpus).values()


@pytest.mark.parametrize("policy", ["spread", "pack", "fit"])
def test_an_empty_node_needs_no_plan(policy: str) -> None:
    assert consolidate(policy, box(2, []), []) is None
    assert drain(policy, 0, box(2, []), []) == Plan(0)
