"""The order of a node's GPUs for a new vGPU."""

from __future__ import annotations

from typing import Any

import pytest

from vgpu.enums import PlacementName
from vgpu.node.readings import unknown_gpu
from vgpu.placement.box import promised, ranked
from vgpu.protocol.messages import GpuStatus, VgpuStatus
from vgpu.spec import VgpuSpec

GIB = 1 << 30
CARD = 80 * GIB


def gpu(index: int, time: float = 0.0, memory: float = 0.0, **fields: Any) -> GpuStatus:
    """``time``, ``memory``: the parts that are promised."""
    usual = {"state": "serving", "total_memory_bytes": CARD, "guaranteed_ratio": time, "mode": "temporal"}
    known = usual | {"guaranteed_memory_bytes": int(memory * CARD)} | fields
    return unknown_gpu(index, simulated=True).model_copy(update=known)


def vgpu(gpu_index: int, percent: float, **fields: str) -> VgpuStatus:
    """With so much of the time and of the memory."""
    spec = VgpuSpec.parse(fraction=str(percent / 100), sm_percent=str(percent), **fields)
    return VgpuStatus.model_construct(
        gpu_index=gpu_index, guarantee_ratio=percent / 100, sm_percent_granted=100.0, spec=spec
    )


def order(policy: str, gpus: list[GpuStatus], sm: str, mem: str, *vgpus: VgpuStatus, **fields: str) -> list[int]:
    spec = VgpuSpec.parse(sm_percent=sm, memory_bytes=mem, **fields)
    return [rank.gpu.index for rank in ranked(policy, gpus, vgpus, spec)]


def test_spread_and_pack_go_in_opposite_order() -> None:
    gpus = [gpu(0, 0.5, 0.5), gpu(1), gpu(2, 0.3, 0.3)]
    assert order("spread", gpus, "10", "8G") == [1, 2, 0]
    assert order("pack", gpus, "10", "8G") == [0, 2, 1]


def test_gpus_without_room_come_last_most_room_first() -> None:
    gpus = [gpu(0, 0.9), gpu(1, 0.7), gpu(2, 0.5)]
    assert order("pack", gpus, "40", "8G") == [2, 1, 0]


def test_of_equal_gpus_the_lower_index_is_first() -> None:
    for policy in PlacementName:
        assert order(policy, [gpu(1), gpu(0), gpu(2)], "10", "8G") == [0, 1, 2]


def test_fit_goes_by_what_the_vgpus_here_were_promised() -> None:
    """Halves are here. A quarter beside one leaves what no half can use; beside a quarter it leaves a half."""
    gpus = [gpu(0, 0.5, 0.5), gpu(1, 0.25, 0.25), gpu(2, 1.0, 1.0)]
    halves = [vgpu(0, 50), vgpu(2, 50), vgpu(2, 50)]
    assert order("pack", gpus, "25", "20G", *halves)[0] == 0
    assert order("fit", gpus, "25", "20G", *halves, vgpu(1, 25))[0] == 1


def test_in_spatial_mode_a_vgpu_counts_by_its_area() -> None:
    gpus = [gpu(0, 0.7, mode="spatial"), gpu(1, 0.4, mode="spatial")]
    assert order("pack", gpus, "51", "8G") == [1, 0]
    assert order("pack", gpus, "51", "8G", quota_request_percent="50") == [0, 1]


def test_memory_that_is_swapped_and_time_that_is_overcommitted_need_no_room() -> None:
    gpus = [gpu(0, 0.9, 0.9), gpu(1)]
    assert order("pack", gpus, "50", "40G") == [1, 0]
    assert order("pack", gpus, "5", "40G", oversubscribe="swap") == [0, 1]
    assert order("pack", gpus, "50", "4G", overcommit="true") == [0, 1]


def test_a_limit_of_memory_is_no_promise() -> None:
    grown = vgpu(0, 5, memory_limit_bytes="80G")
    assert promised(grown, gpu(0)).memory_bytes == CARD // 20


def test_reasons_say_why() -> None:
    spec = VgpuSpec.parse(sm_percent="30", memory_bytes="8G")
    first, second = ranked("fit", [gpu(0), gpu(1, 0.8)], [], spec)
    assert (first.gpu.index, next(iter(first.reasons))) == (0, "growth of what cannot be used")
    assert second.reasons == {}


@pytest.mark.parametrize("policy", list(PlacementName))
def test_a_card_of_unknown_size_is_no_error(policy: str) -> None:
    assert order(policy, [gpu(0, total_memory_bytes=0), gpu(1)], "10", "8G") == [1, 0]
