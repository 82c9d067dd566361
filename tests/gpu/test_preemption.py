"""A request of higher priority gets the room of a program on a real GPU, which is suspended and comes back by itself.
The same simulated, with kills: tests/integration/test_preemption.py. Run: ``REQUIRE_GPU=1 pytest -s -m gpu
tests/gpu/test_preemption.py``."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.node import Node, plain_environment
from vgpu.node.link import ControlLink
from vgpu.queueing.rules import QueueRules
from vgpu.quotas.quota import Quotas

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
PROGRAM = """
import sys, time, torch
block = torch.full((1 << 28,), 7, dtype=torch.int32, device="cuda")
a = torch.randn(4096, 4096, device="cuda")
rounds, longest, last, end = 0, 0.0, time.time(), time.time() + float(sys.argv[1])
while time.time() < end:
    a @ a
    torch.cuda.synchronize()
    now = time.time()
    rounds, longest, last = rounds + 1, max(longest, now - last), now
print(rounds, longest, bool((block == 7).all()), flush=True)
"""


def started(node: Node, seconds: int, *words: str) -> subprocess.Popen[str]:
    argv = [*node.vgpuctl, "run", "--mem", "8G", *words, "--", sys.executable, "-c", PROGRAM, str(seconds)]
    return subprocess.Popen(argv, env=node.environment, stdout=subprocess.PIPE, text=True)


def test_the_same_program_alone_without_vgpus() -> None:
    """The baseline: the driver has no priorities between programs, and suspends none."""
    argv = [sys.executable, "-c", PROGRAM, "8"]
    done = subprocess.run(argv, env=plain_environment(None), capture_output=True, text=True, check=True)
    print(f"without vGPUs, 8 s alone: {done.stdout.split()}")


def test_a_program_makes_room_and_goes_on(node: Node) -> None:
    with ControlLink(node.control_socket) as link:
        link.set_quotas(Quotas(), QueueRules.model_validate({"preempt": "suspend", "preempt_after": "2s"}))
    low = started(node, 40, "--sm", "60", "--priority", "low", "--name", "low")
    with ControlLink(node.control_socket) as link:
        for notice in link.watch():
            if notice.snapshot is not None and any(vgpu.busy_ratio > 0.1 for vgpu in notice.snapshot.vgpus):
                break
    high = started(node, 8, "--sm", "70", "--priority", "high", "--name", "high", "--wait")
    of_high, of_low = high.communicate(timeout=120)[0].split(), low.communicate(timeout=120)[0].split()
    with ControlLink(node.control_socket) as link:
        kinds = [event.kind for event in link.events()]
        link.set_quotas(Quotas())
    print(f"high {of_high}, low {of_low}")
    assert kinds.index("suspended") < kinds.index("preempted") < kinds.index("resumed")
    assert of_high[2] == of_low[2] == "True"
    assert float(of_low[1]) > 8
    assert int(of_low[0]) > 0
