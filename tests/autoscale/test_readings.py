"""What snapshots show of vGPUs with bounds."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ctl.fake_node import vgpu_reading
from tests.placement.test_box import gpu
from vgpu.autoscale import Room
from vgpu.autoscale.readings import readings_of, rooms_of
from vgpu.protocol.messages import Snapshot, VgpuStatus
from vgpu.spec import VgpuSpec

GIB = 1 << 30
SPEC = VgpuSpec.parse(sm_percent="20..60", memory_bytes="8G")


def scaled(**changes: Any) -> VgpuStatus:
    return vgpu_reading(**({"spec": SPEC, "throttled_ratio": 0.5, "busy_ratio": 0.3, "busy_ns": 10**9} | changes))


def snapshot(*vgpus: VgpuStatus) -> Snapshot:
    return Snapshot(
        at_unix_s=0, gpus=(gpu(0, 0.25, 0.5), gpu(1, state="restarting"), gpu(2, mode="spatial")), vgpus=vgpus
    )


def test_only_vgpus_with_bounds_and_a_known_demand_are_read() -> None:
    others = [
        vgpu_reading(vgpu_id="vgpu-00000001"),
        scaled(vgpu_id="vgpu-00000010", state="suspended"),
        scaled(vgpu_id="vgpu-00000011", state="restarting"),
        scaled(vgpu_id="vgpu-00000012", state="swapped"),
        scaled(vgpu_id="vgpu-00000002", leaving_to=1),
        scaled(vgpu_id="vgpu-00000003"),
    ]
    [found] = readings_of(None, snapshot(*others, scaled()), 0.0, {"vgpu-00000003"})
    assert found.vgpu == scaled().vgpu_id
    assert (found.sm_percent, found.sm_range, found.memory_range) == (20, (20, 60), None)
    assert (found.busy, found.throttled) == (0.3, 0.5)


@pytest.mark.parametrize(
    ("busy_ns", "gpu_index", "busy"),
    [
        (10**9 + 5 * 10**8, 0, 0.25),
        (10**8, 0, 0.3),  # another GPU Server, whose journal was a moment old
        (10**12, 0, 0.3),
        (10**9 + 5 * 10**8, 1, 0.3),  # it has moved
    ],
)
def test_the_busy_part_is_that_since_the_last_reading_where_that_is_known(
    busy_ns: int, gpu_index: int, busy: float
) -> None:
    [found] = readings_of(snapshot(scaled()), snapshot(scaled(busy_ns=busy_ns, gpu_index=gpu_index)), 2.0)
    assert found.busy == pytest.approx(busy)


def test_a_vgpu_of_a_group_stays_on_its_gpu() -> None:
    grouped = scaled(spec=VgpuSpec.parse(sm_percent="20..60", group="job"))
    assert [one.movable for one in readings_of(None, snapshot(scaled(), grouped), 0.0)] == [True, False]


def test_only_gpus_that_serve_turns_have_room() -> None:
    total = gpu(0).total_memory_bytes
    assert rooms_of(snapshot()) == [Room(0, 75.0, total // 2)]
