"""Suspending and resuming a program on a real GPU, by the driver's checkpoints. The same simulated, with servers that
die meanwhile: tests/integration/test_suspension.py."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pynvml
import pytest

from benchmarks.node import Node

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
GIB = 1 << 30

PROGRAM = """
import sys, time, torch
block = torch.full((int(sys.argv[1]) << 28,), 7, dtype=torch.int32, device="cuda")
a = torch.randn(4096, 4096, device="cuda")
print("started", flush=True)
rounds = 0
while True:
    b = a @ a
    torch.cuda.synchronize()
    rounds += 1
    if rounds % 100 == 0:
        assert int(block[:: 1 << 20].sum()) == 7 * (len(block) >> 20)
        print(rounds, flush=True)
"""


def on_gpu(pid: int) -> int:
    pynvml.nvmlInit()
    found = [
        process.usedGpuMemory or 0
        for index in range(pynvml.nvmlDeviceGetCount())
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByIndex(index))
        if process.pid == pid
    ]
    return sum(found)


@pytest.mark.parametrize("gib", [1, 20])
def test_a_training_loop_stands_still_without_its_memory_and_goes_on(node: Node, gib: int) -> None:
    vgpu_id = node.run("create", "--sm", "50", "--mem", f"{gib + 4}G").strip()
    program = subprocess.Popen(
        [*node.vgpuctl, "exec", vgpu_id, "--", sys.executable, "-c", PROGRAM, str(gib)],
        env=node.environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert program.stdout is not None
        assert program.stdout.readline() == "started\n"
        program.stdout.readline()
        assert on_gpu(program.pid) > gib * GIB
        began = time.monotonic()
        assert json.loads(node.run("suspend", vgpu_id, "-o", "json"))["state"] == "suspended"
        suspended = time.monotonic()
        assert on_gpu(program.pid) == 0
        node.run("resume", vgpu_id)
        resumed = time.monotonic()
        print(f"{gib} GiB: suspend {suspended - began:.2f} s, resume {resumed - suspended:.2f} s")
        before = int(program.stdout.readline())
        assert int(program.stdout.readline()) > before
    finally:
        program.kill()
        program.communicate()
        node.run("rm", "-f", vgpu_id)
