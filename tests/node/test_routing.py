"""Which vGPU is meant, and which GPU is tried first."""

from __future__ import annotations

from typing import Any

import pytest

from vgpu.errors import ErrorCode, VgpuError
from vgpu.node.readings import unknown_gpu
from vgpu.node.routing import candidates, find_gpu, find_vgpu, merge_migrating
from vgpu.protocol.messages import GpuStatus, VgpuStatus
from vgpu.spec import VgpuSpec


def gpu(index: int, **fields: Any) -> GpuStatus:
    usual = {"state": "serving", "uuid": f"GPU-{index}abc", "total_memory_bytes": 100}
    return unknown_gpu(index, simulated=True).model_copy(update=usual | fields)


def vgpu(vgpu_id: str, name: str | None = None, owner_uid: int = 0) -> VgpuStatus:
    return VgpuStatus.model_construct(vgpu_id=vgpu_id, name=name, owner_uid=owner_uid)


SPEC = VgpuSpec.parse(sm_percent="10", memory_bytes="64M")
VGPUS = [vgpu("vgpu-ab000000"), vgpu("vgpu-ab100000", "train"), vgpu("vgpu-cd000000", "ab0")]


@pytest.mark.parametrize(
    ("reference", "found"),
    [("vgpu-ab000000", 0), ("ab00", 0), ("vgpu-ab1", 1), ("train", 1), ("c", 2), ("ab0", 2), ("vgpu-ab0", 0)],
)
def test_ids_prefixes_and_names(reference: str, found: int) -> None:
    assert find_vgpu(reference, VGPUS) is VGPUS[found]


@pytest.mark.parametrize(
    ("reference", "code"), [("ab", "ambiguous"), ("x", "not-found"), ("", "not-found"), ("tra", "not-found")]
)
def test_references_that_name_nothing_or_too_much(reference: str, code: str) -> None:
    with pytest.raises(VgpuError) as refused:
        find_vgpu(reference, VGPUS)
    assert refused.value.code == code


def test_a_name_that_two_have_is_not_the_firsts() -> None:
    """A GPU that was not served when the name was given has kept one of that name."""
    twins = [vgpu("vgpu-1", "train"), vgpu("vgpu-2", "train")]
    with pytest.raises(VgpuError, match=r"'train' fits 2 vGPUs \(vgpu-1, vgpu-2\)") as refused:
        find_vgpu("train", twins)
    assert refused.value.code is ErrorCode.AMBIGUOUS
    assert find_vgpu("vgpu-2", twins) is twins[1]


SHARED = [
    vgpu("vgpu-ab000000", "train", 1),
    vgpu("vgpu-cd000000", "train", 2),
    vgpu("vgpu-cd100000", "ab000000", 2),  # a name of before names that look like ids were refused
    vgpu("vgpu-ef000000", "ab0", 2),
    vgpu("vgpu-ee000000", "web", 2),
]


@pytest.mark.parametrize(
    ("reference", "uid", "found"),
    [
        *(("train", 1, 0), ("train", 2, 1), ("ab000000", 1, 0), ("ab000000", 2, 0), ("vgpu-ab000000", 2, 0)),
        *(("ab0", 1, 0), ("ab0", 2, 3), ("web", 1, 4), ("web", 0, 4), ("vgpu-ee", 0, 4), ("e", 1, None)),
        *(("train", 0, None), ("ab0", 0, None), ("cd", 2, None), ("cd0", 1, 1)),
    ],
)
def test_ids_come_first_then_what_is_the_users_own(reference: str, uid: int, found: int | None) -> None:
    if found is not None:
        assert find_vgpu(reference, SHARED, uid) is SHARED[found]
        return
    with pytest.raises(VgpuError, match=r"fits 2 vGPUs \(vgpu-") as refused:
        find_vgpu(reference, SHARED, uid)
    assert refused.value.code is ErrorCode.AMBIGUOUS


def test_most_room_goes_by_what_is_scarcer() -> None:
    gpus = [
        gpu(0, guaranteed_ratio=0.5),
        gpu(1, guaranteed_memory_bytes=90),
        gpu(2, guaranteed_ratio=0.2, guaranteed_memory_bytes=30),
        gpu(3, guaranteed_ratio=0.2, guaranteed_memory_bytes=30),
        gpu(4, state="restarting"),
    ]
    assert [g.index for g in candidates("auto", gpus, [], SPEC)] == [2, 3, 0, 1]
    with pytest.raises(VgpuError) as refused:
        candidates("AUTO", [gpus[4]], [], SPEC)
    assert refused.value.code is ErrorCode.UNAVAILABLE


@pytest.mark.parametrize(("choice", "index"), [("1", 1), ("GPU-1abc", 1), ("gpu-0ABC", 0), ("1a", 1)])
def test_a_gpu_by_index_or_uuid(choice: str, index: int) -> None:
    assert find_gpu(choice, [gpu(0), gpu(1)]).index == index


def test_a_gpu_that_is_not_there_or_not_served() -> None:
    with pytest.raises(VgpuError, match="this node has GPU 0, 1"):
        find_gpu("7", [gpu(0), gpu(1)])
    with pytest.raises(VgpuError) as refused:
        find_gpu("GPU-", [gpu(0), gpu(1)])
    assert refused.value.code is ErrorCode.NOT_FOUND
    with pytest.raises(VgpuError) as refused:
        find_gpu("aa", [gpu(0, uuid="GPU-aa1"), gpu(1, uuid="GPU-aa2")])
    assert refused.value.code is ErrorCode.AMBIGUOUS
    with pytest.raises(VgpuError, match="not served: broken"):
        candidates("0", [gpu(0, state="failed", reason="broken")], [], SPEC)


def test_one_that_moves_is_told_of_once_by_who_has_it() -> None:
    usual = {"vgpu_id": "vgpu-1", "name": None, "state": "moving", "leaving_to": None}
    here = VgpuStatus.model_construct(**usual)
    leaving = VgpuStatus.model_construct(**usual | {"leaving_to": 1})
    stale = VgpuStatus.model_construct(**usual | {"state": "restarting"})
    other = VgpuStatus.model_construct(**usual | {"vgpu_id": "vgpu-2", "state": "idle"})
    for unsure in (leaving, stale):
        assert merge_migrating([unsure, other, here]) == (other, here)
        assert merge_migrating([here, unsure]) == (here,)
        assert merge_migrating([unsure, other]) == (unsure, other)
    assert merge_migrating([stale, leaving]) == (stale,)
