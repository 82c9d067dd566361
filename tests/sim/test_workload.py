"""The workload on a simulated GPU: it counts what the GPU did."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from tests.sim.conftest import Node

MIB = 1 << 20


def lines(node: Node, *arguments: str, **environment: str) -> list[dict[str, Any]]:
    process = node.start(*arguments, "-o", "json", module="vgpu.workload", **environment)
    output, _ = process.communicate(timeout=90)
    return [json.loads(line) for line in output.splitlines()]


@pytest.mark.parametrize(("mode", "unit"), [("compute", "fma"), ("memory", "byte"), ("tiny", "kernel")])
def test_it_saturates_the_gpu_and_counts_finished_work(node: Node, mode: str, unit: str) -> None:
    started, *progress, result = lines(node, "--mode", mode, "--seconds", "2.5")
    assert (started["event"], result["event"]) == ("started", "result")
    assert {line["event"] for line in progress} == {"progress"}
    assert result["simulated"]
    assert (result["sm_count"], result["total_mem"]) == (132, 8 << 30)
    assert result["unit"] == unit
    assert result["work"] == result["kernels"] * (result["work"] // result["kernels"]) > 0
    assert result["work_per_second"] == pytest.approx(result["work"] / result["seconds"])
    # No more than the GPU can do; how close it comes depends on the machine that runs the test.
    limits = {"compute": 28.8e12, "memory": 3.06e12, "tiny": 1e9 / 1800}
    assert 0 < result["work_per_second"] <= 1.01 * limits[mode]


def test_it_asks_for_memory_until_refused_and_goes_on(node: Node) -> None:
    memory, _, *_, result = lines(node, "--mode", "alloc", "--seconds", "0.5")
    room = (8 << 30) - node.engine().context_bytes
    assert memory["event"] == "memory"
    assert (memory["refusals"], result["refusals"]) == (1, 1)
    assert result["bytes_allocated"] == room // (256 * MIB) * (256 * MIB) or result["bytes_allocated"] == (
        room - 2 * MIB
    ) // (256 * MIB) * (256 * MIB)
    assert result["kernels"] > 0


def test_a_wish_that_fits_is_not_refused(node: Node) -> None:
    *_, result = lines(node, "--seconds", "0.3", "--bytes", str(700 * MIB))
    assert (result["bytes_allocated"], result["refusals"]) == (700 * MIB, 0)


def test_time_stamps_are_the_kernels_own(node: Node) -> None:
    *_, result = lines(node, "--mode", "timestamps", "--seconds", "0.5")
    intervals = result["intervals_ns"]
    assert len(intervals) >= result["kernels"] > 0
    assert all(0 < end - start <= 1.01 * result["kernel_ns"] + 1000 for start, end in intervals)
    assert all(earlier[1] <= later[0] for earlier, later in itertools.pairwise(intervals))


def test_without_a_gpu_it_says_so(node: Node) -> None:
    (error,) = lines(node, VGPU_SIM_DIR="/nonexistent")
    assert error["event"] == "error"
    assert "NO_DEVICE" in error["error"]
