"""Real PyTorch under the real hook on a real GPU. Run: ``REQUIRE_GPU=1 pytest -m gpu tests/gpu``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks.node import Node

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]
GIB = 2**30


def python(node: Node, code: str, *options: str) -> list[str]:
    return [*node.vgpuctl, "run", *options, "--", sys.executable, "-c", textwrap.dedent(code)]


def run(node: Node, code: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        python(node, code, *options),
        env={**node.environment, **environment},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def last_json(result: subprocess.CompletedProcess[str]) -> Any:
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize("backend", ["native", "expandable_segments:True", "backend:cudaMallocAsync"])
def test_torch_meets_its_memory_limit_and_goes_on(node: Node, backend: str) -> None:
    code = """
        import json, torch
        free, total = torch.cuda.mem_get_info()
        torch.empty(2**30, dtype=torch.uint8, device="cuda")
        refused = False
        try:
            torch.empty(9 * 2**30, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError:
            refused = True
        held = []
        try:
            while True:
                held.append(torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            pass
        got = len(held) * 256 * 2**20
        del held
        torch.cuda.empty_cache()
        x = torch.ones(1000, device="cuda").sum().item()
        print(json.dumps({"free": free, "total": total, "refused": refused, "got": got, "x": x,
                          "device_total": torch.cuda.get_device_properties(0).total_memory}))
    """
    environment = {} if backend == "native" else {"PYTORCH_ALLOC_CONF": backend}
    seen = last_json(run(node, code, "--sm", "30", "--mem", "8G", **environment))
    assert seen["refused"]
    assert seen["x"] == 1000
    assert seen["total"] == 8 * GIB
    assert seen["device_total"] == 8 * GIB
    assert seen["free"] <= 8 * GIB
    assert 6 * GIB <= seen["got"] <= 8 * GIB


def test_nvidia_smi_shows_the_vgpu(node: Node) -> None:
    query = [
        *node.vgpuctl,
        "run",
        "--sm",
        "30",
        "--mem",
        "8G",
        "--",
        "nvidia-smi",
        "--query-gpu=memory.total,name",
        "--format=csv,noheader",
    ]
    result = subprocess.run(query, env=node.environment, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("8192 MiB"), result.stdout


BUSY = """
    import time, torch
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    for _ in range(10): a @ a
    torch.cuda.synchronize()
    print("READY", flush=True)
    stop = time.monotonic() + {seconds}
    steps = 0
    events = []
    while time.monotonic() < stop:
        a @ a
        e = torch.cuda.Event(); e.record(); events.append(e)
        if len(events) > 64:
            events.pop(0).synchronize(); steps += 1
    torch.cuda.synchronize()
    print(steps, flush=True)
"""


def start(node: Node, code: str, *options: str) -> subprocess.Popen[str]:
    """Start and wait until it says READY."""
    process = subprocess.Popen(python(node, code, *options), env=node.environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "READY"
    return process


class Sibling:
    """A process that works without a pause; ``steps`` is what it got done in the end."""

    def __init__(self, node: Node, seconds: float, *options: str) -> None:
        self.process = start(node, BUSY.format(seconds=seconds), *options)

    def steps(self) -> int:
        out, _ = self.process.communicate(timeout=200)
        assert self.process.returncode == 0
        return int(out.strip().splitlines()[-1])


def test_graph_capture_with_a_second_thread_and_a_sibling(node: Node) -> None:
    code = """
        import json, threading, torch
        stop = threading.Event()
        def work():
            with torch.cuda.stream(torch.cuda.Stream()):
                b = torch.randn(1024, 1024, device="cuda")
                while not stop.is_set():
                    b = (b @ b).tanh()
                    torch.cuda.current_stream().synchronize()
        thread = threading.Thread(target=work); thread.start()
        x = torch.ones(1 << 20, device="cuda")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3): y = x * 2 + 1
        torch.cuda.current_stream().wait_stream(side)
        sums = []
        for i in range(20):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                y = x * 2 + i
            for _ in range(10): graph.replay()
            sums.append(y.mean().item())
        stop.set(); thread.join()
        print(json.dumps(sums))
    """
    sibling = Sibling(node, 25, "--sm", "50", "--mem", "20G")
    sums = last_json(run(node, code, "--sm", "30", "--mem", "8G"))
    assert sums == [2.0 + i for i in range(20)]
    assert sibling.steps() > 0


def test_global_capture_survives_the_hook_thread(node: Node) -> None:
    """The hook's own event queries must not kill a GLOBAL-mode capture (they are made in RELAXED mode)."""
    code = """
        import json, time, torch
        x = torch.ones(1 << 20, device="cuda")
        for _ in range(200): x = x * 1.0
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="global"):
            for i in range(50):
                y = x * 2
                time.sleep(0.005)
        graph.replay()
        print(json.dumps(y.mean().item()))
    """
    sibling = Sibling(node, 20, "--sm", "50", "--mem", "20G")
    assert last_json(run(node, code, "--sm", "30", "--mem", "8G")) == 2.0
    assert sibling.steps() > 0


@pytest.mark.parametrize("how", ["sleep", "SIGSTOP", "SIGKILL"])
def test_a_holder_that_stops_gives_way(node: Node, how: str) -> None:
    """A sleeping, stopped or killed sharer must not hold its neighbour: it gets at least the share it owns."""
    seconds = 8.0
    alone = Sibling(node, seconds, "--sm", "70", "--mem", "20G").steps()
    seconds_of_other = 3.0 if how == "sleep" else 60.0
    code = BUSY.format(seconds=seconds_of_other) + "\n    time.sleep(60)\n"
    other = start(node, code, "--sm", "30", "--mem", "20G")
    victim = hooked_pid(node, other.pid)
    sibling = Sibling(node, seconds, "--sm", "70", "--mem", "20G")
    time.sleep(2)
    if how == "SIGSTOP":
        os.kill(victim, signal.SIGSTOP)
    if how == "SIGKILL":
        os.kill(victim, signal.SIGKILL)
    steps = sibling.steps()
    if how == "SIGSTOP":
        os.kill(victim, signal.SIGCONT)
    if how != "SIGKILL":
        os.kill(victim, signal.SIGKILL)
    other.communicate(timeout=60)
    assert steps > 0.9 * alone, f"{steps} steps beside a {how} holder, {alone} without one"


def hooked_pid(node: Node, launcher: int) -> int:
    """The pid of the process that holds a slot and descends from ``launcher``."""
    rows: Sequence[dict[str, Any]] = json.loads(node.run("ps", "-o", "json"))
    import psutil

    family = {launcher, *(child.pid for child in psutil.Process(launcher).children(recursive=True))}
    return next(int(row["pid"]) for row in rows if int(row["pid"]) in family)


def test_two_spatial_processes_run_at_the_same_time(spatial_node: Node) -> None:
    """``--sm 30``: 38–40 SMs each, and %globaltimer intervals of two processes overlap."""
    command = [sys.executable, "-m", "vgpu.workload", "--mode", "timestamps", "--seconds", "4", "-o", "json"]
    processes = [
        subprocess.Popen(
            [*spatial_node.vgpuctl, "run", "--sm", "30", "--mem", "8G", "--", *command],
            env=spatial_node.environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    results = [json.loads(p.communicate(timeout=120)[0].strip().splitlines()[-1]) for p in processes]
    assert all(38 <= r["sm_count"] <= 40 for r in results), [r["sm_count"] for r in results]
    a, b = (r["intervals_ns"] for r in results)
    overlaps = sum(1 for x in a if any(x[0] < y[1] and y[0] < x[1] for y in b))
    assert overlaps > 0.2 * min(len(a), len(b))
