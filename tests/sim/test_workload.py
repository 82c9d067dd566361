"""The workload on a simulated GPU: it counts what the GPU did."""

from __future__ import annotations

import ctypes
import itertools
import json
import math
import signal
import subprocess
import sys
from typing import Any

import pytest

from tests.integration.node import ROOT
from tests.sim.conftest import Node
from vgpu.workload.__main__ import in_words
from vgpu.workload.symboltable import address_of

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


def test_without_a_driver_it_names_the_command() -> None:
    """Outside of vGPUs a machine with simulated GPUs alone has no libcuda."""
    code = (
        "import sys, ctypes; from vgpu.workload import __main__, driver; sys.argv[1:] = ['--seconds', '1']; "
        "driver.ctypes.CDLL = lambda name: ctypes.PyDLL('/no/' + name); sys.exit(__main__.main())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1] == "  → in a vGPU: vgpuctl run --sm 30 --mem 8G python -m vgpu.workload"


def test_what_it_says_of_its_share_is_not_what_it_waited(node: Node) -> None:
    """Two programs at a time: each has about half, and says so. A sum of waits would be near 100 % for both, each time.
    A busy host may measure a kernel while the other program has the GPU, so one good try of several is enough."""
    sums = []
    for _ in range(5):
        programs = [node.start("--seconds", "2", "-o", "json", module="vgpu.workload") for _ in range(2)]
        results = [json.loads(program.communicate(timeout=90)[0].splitlines()[-1]) for program in programs]
        assert all(result["gpu_time_ns"] == result["kernels"] * result["kernel_ns"] for result in results)
        sums.append(sum(result["gpu_time_ns"] / (result["seconds"] * 1e9) for result in results))
        if sums[-1] < 1.5:
            return
    raise AssertionError(sums)


def test_lines_for_a_person_say_share_and_rate() -> None:
    told = {"seconds": 2.0, "kernels": 1000, "kernel_ns": 600_000}
    assert in_words("progress", told) == "2 s: 30.0 % of the GPU's time, 500 kernels/s"
    assert in_words("result", told) == "in all, 2.0 s: 30.0 % of the GPU's time, 500 kernels/s"
    told = {"gpu": "H200", "sm_count": 132, "kernel_ns": 500_000}
    assert in_words("started", told) == "H200, 132 SMs: alone this would be 2000 kernels/s"
    assert in_words("memory", {"bytes_allocated": 3 * MIB, "refusals": 1}) == "3 MiB allocated, refused 1 times"


def test_ctrl_c_ends_it_with_the_result(node: Node) -> None:
    process = node.start("--seconds", "600", "--report-every", "0.1", module="vgpu.workload")
    assert process.stdout is not None
    assert next(line for line in process.stdout if "%" in line).endswith("kernels/s\n")
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=90)
    assert process.returncode == 130
    assert output.splitlines()[-1].startswith("in all, ")
    assert not errors


def test_a_symbol_table_says_where_its_library_defines_a_function() -> None:
    ctypes.CDLL("libm.so.6")
    nextafter = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_double, ctypes.c_double)(address_of("libm.so", "nextafter"))
    assert nextafter(1.0, 2.0) == math.nextafter(1.0, 2.0)
    with pytest.raises(LookupError, match="defines no cosine"):
        address_of("libm.so", "cosine")
    with pytest.raises(LookupError, match="is not loaded"):
        address_of("libnothing", "cos")
