"""Spatial mode on a real GPU: what MPS grants, what several processes of a vGPU take together, and what breaks.

What neighbours see of a dead daemon or a fault is the driver's affair; it is printed (``pytest -s``), and what is
asserted is that they end, and that those who come after them work. The same on simulated MPS:
``tests/integration/test_spatial.py``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.node import Node
from tests.gpu.conftest import Place
from vgpu.packing.partition import partition

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]
ILLEGAL_ADDRESS = 700


@pytest.fixture
def fresh(place: Place) -> Iterator[Node]:
    """A node whose daemon may be killed."""
    place.close()
    with Node(mode="spatial") as node:
        yield node


def create(node: Node, *options: str) -> str:
    return node.run("create", "--mem", "8G", *options).strip()


def work(node: Node, vgpu_id: str, seconds: float, mode: str = "compute") -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "vgpu.workload", "--mode", mode, "--seconds", str(seconds), "-o", "json"]
    return subprocess.Popen(
        [*node.vgpuctl, "exec", vgpu_id, "--", *command],
        env=node.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def last(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The last thing that a workload says; ``unsaid`` if it died without a word."""
    out, err = process.communicate(timeout=120)
    said = out.strip().splitlines()
    found: dict[str, Any] = json.loads(said[-1]) if said else {"event": "unsaid", "error": err[-500:]}
    return found | {"exit": process.returncode}


def started(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["event"] == "started"


def gpu(node: Node) -> dict[str, Any]:
    (reading,) = json.loads(node.run("gpu", "ls", "-o", "json"))[:1]
    found: dict[str, Any] = reading
    return found


def soon(look: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 30
    while not look():
        assert time.monotonic() < deadline, f"{what} did not happen within 30 s"
        time.sleep(0.1)


def works(node: Node, vgpu_id: str) -> None:
    """A process that starts now runs; MPS may need its time to let the next one in."""
    deadline = time.monotonic() + 30
    while True:
        result = last(work(node, vgpu_id, 0.2))
        if result["event"] == "result":
            return
        print(f"not yet: {result.get('error', result)}")
        assert time.monotonic() < deadline, result
        time.sleep(0.5)


def stray(node: Node, vgpu_id: str) -> int:
    command = [*node.vgpuctl, "exec", vgpu_id, "--", sys.executable, "-m", "tests.stray"]
    ran = subprocess.run(command, env=node.environment, capture_output=True, text=True, timeout=120, check=True)
    return int(ran.stdout)


@pytest.mark.parametrize("percent", [1, 5, 10, 22.7, 23, 25, 30, 33, 50, 75, 100])
def test_sms_granted_are_those_planned(spatial_node: Node, percent: float) -> None:
    total = gpu(spatial_node)["sm_count"]
    planned = partition(percent, total).granted_sms
    vgpu_id = create(spatial_node, "--sm", str(percent))
    try:
        seen = last(work(spatial_node, vgpu_id, 0.1))["sm_count"]
    finally:
        spatial_node.run("rm", "-f", vgpu_id)
    print(f"--sm {percent}: asks {percent * total / 100:.1f} of {total} SMs, planned {planned}, granted {seen}")
    assert abs(seen - planned) <= 2


def test_processes_of_one_vgpu_take_turns(spatial_node: Node) -> None:
    """%globaltimer intervals of kernels of two processes: hardly any two overlap, and both get the same."""
    vgpu_id = create(spatial_node, "--sm", "30")
    try:
        results = [last(process) for process in [work(spatial_node, vgpu_id, 4, "timestamps") for _ in range(2)]]
    finally:
        spatial_node.run("rm", "-f", vgpu_id)
    first, second = (sorted(map(tuple, result["intervals_ns"])) for result in results)
    begin, end = max(first[0][0], second[0][0]), min(first[-1][1], second[-1][1])
    both = [[(a, b) for a, b in intervals if begin <= a and b <= end] for intervals in (first, second)]
    starts = [a for a, _ in both[1]]
    overlap_ns = 0
    for a, b in both[0]:
        at = max(0, bisect_right(starts, a) - 1)
        while at < len(both[1]) and both[1][at][0] < b:
            overlap_ns += max(0, min(b, both[1][at][1]) - max(a, both[1][at][0]))
            at += 1
    busy_ns = [sum(b - a for a, b in intervals) for intervals in both]
    part = busy_ns[0] / sum(busy_ns)
    print(
        f"over {(end - begin) / 1e9:.2f} s: {part:.1%} and {1 - part:.1%} of the kernels' time, together "
        f"{sum(busy_ns) / (end - begin):.1%} of the wall time, both at once {overlap_ns / (end - begin):.2%}"
    )
    assert overlap_ns < 0.02 * (end - begin)
    assert abs(part - 0.5) < 0.05


@pytest.mark.parametrize("victim", ["daemon", "server"])
def test_a_killed_daemon_or_server_is_recovered_from(fresh: Node, victim: str) -> None:
    vgpu_ids = [create(fresh, "--sm", "30") for _ in range(2)]
    workers = [work(fresh, vgpu_id, 20) for vgpu_id in vgpu_ids]
    for worker in workers:
        started(worker)
    soon(lambda: gpu(fresh)["mps_pid"], "the first look at the daemon")
    time.sleep(1.5)  # the server is learned of at the next look
    daemon = gpu(fresh)["mps_pid"]
    servers = [int(pid) for pid in Path(f"/proc/{daemon}/task/{daemon}/children").read_text().split()]
    print(f"daemon {daemon}, its children {servers}")
    for pid in [daemon] if victim == "daemon" else servers:
        os.kill(pid, signal.SIGKILL)
    if victim == "daemon":
        soon(lambda: gpu(fresh)["mps_restarts"], "another daemon")
        print(f"the next daemon: {gpu(fresh)['mps_pid']}")
    for worker in workers:
        print(f"a process that was there: {last(worker)}")
    works(fresh, vgpu_ids[0])
    told = [
        line for log in fresh.directory.rglob("gpu*.log") for line in log.read_text().splitlines() if "mps-" in line
    ]
    print("events in the log:", *told, sep="\n")
    assert told


def test_a_fatal_fault_under_mps(fresh: Node) -> None:
    victim, neighbour = create(fresh, "--sm", "30"), create(fresh, "--sm", "30")
    worker = work(fresh, neighbour, 20)
    started(worker)
    assert stray(fresh, victim) == ILLEGAL_ADDRESS
    seen = last(worker)
    print(f"the neighbour: {seen}")
    assert seen["event"] == "error"
    works(fresh, victim)
    works(fresh, neighbour)


def test_a_fatal_fault_in_temporal_mode_stays_with_its_process(node: Node) -> None:
    victim, neighbour = create(node, "--sm", "30"), create(node, "--sm", "30")
    worker = work(node, neighbour, 6)
    started(worker)
    assert stray(node, victim) == ILLEGAL_ADDRESS
    seen = last(worker)
    print(f"the neighbour: {seen['event']}, {seen['kernels']} kernels")
    assert seen["event"] == "result"
    for vgpu_id in (victim, neighbour):
        node.run("rm", "-f", vgpu_id)
