"""A PyTorch job with a process on each of two real GPUs, in a group that is swapped, beside a lone swapped program on
GPU 1: the job leaves both GPUs for it and comes back to both, with every byte. Simulated:
tests/integration/test_swapped_groups.py. Run: ``REQUIRE_GPUS=2 pytest -s -m gpu tests/gpu/test_swapped_groups.py``; it
prints how long each answer and each move took."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from benchmarks.node import Node
from vgpu.node.link import ControlLink

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400), pytest.mark.usefixtures("two_gpus")]
OWNED_GIB = 20
PATIENCE_S = 60.0
ROUNDS = 3
PROGRAM = """
import json, sys, time, torch
seed, gib = int(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(seed)
blocks = [torch.randint(-2**31, 2**31 - 1, (1 << 28,), dtype=torch.int32, device="cuda") for _ in range(gib)]
a = torch.randn(2048, 2048, device="cuda", dtype=torch.float16)
expected = torch.matmul(a, a)
sums = [int(block.sum(dtype=torch.int64)) for block in blocks]
torch.cuda.synchronize()
print(json.dumps([True, 0.0]), flush=True)
for line in sys.stdin:
    began = time.monotonic()
    product = torch.matmul(a, a)
    torch.cuda.synchronize()
    first = time.monotonic() - began
    well = bool((product == expected).all()) and [int(b.sum(dtype=torch.int64)) for b in blocks] == sums
    print(json.dumps([well, first]), flush=True)
"""


@pytest.fixture
def node() -> Iterator[Node]:
    with Node(gpus=(0, 1), options=("--host-memory", "128G")) as node:
        yield node


class Program:
    """In a vGPU of its own that is swapped; it owns ``OWNED_GIB`` of random numbers."""

    def __init__(self, node: Node, gpu: int, name: str, seed: int, group: str = "") -> None:
        options = ["--sm", "40", "--mem", f"{OWNED_GIB + 6}G", "--oversubscribe", "swap", "--name", name]
        options += ["--gpu", str(gpu), *(["--group", group] if group else [])]
        self.name = name
        self.popen = subprocess.Popen(
            [*node.vgpuctl, "run", *options, "--", sys.executable, "-c", PROGRAM, str(seed), str(OWNED_GIB)],
            env=node.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def heard(self) -> float:
        """The seconds until its first kernel was done; all that it owns is as it was."""
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        assert line, f"{self.name} ended: {self.popen.wait()}"
        well, seconds = json.loads(line)
        assert well, self.name
        return float(seconds)

    def ask(self) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write("go\n")
        self.popen.stdin.flush()

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self.popen.kill()
        self.popen.communicate()


def away_gib(link: ControlLink) -> dict[str, int]:
    return {vgpu.name or "": vgpu.memory_away_bytes >> 30 for vgpu in link.list()}


def eventually(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def test_a_job_on_two_gpus_leaves_both_and_comes_back_to_both(node: Node) -> None:
    with ControlLink(node.control_socket) as link, ExitStack() as stack:
        total = link.gpus()[1].total_memory_bytes
        filler = (total >> 30) - OWNED_GIB - 14  # on GPU 1 alone: GPU 0 has room for all
        node.run("create", "--gpu", "1", "--sm", "5", "--mem", f"{filler}G", "--name", "filler")
        stack.callback(node.run, "rm", "filler")
        ranks = [stack.enter_context(Program(node, gpu, f"rank{gpu}", 1 + gpu, "job")) for gpu in (0, 1)]
        for rank in ranks:
            rank.heard()
        lone = stack.enter_context(Program(node, 1, "lone", 3))
        lone.heard()
        waits: dict[str, list[float]] = {"job": [], "lone": []}
        for _ in range(ROUNDS):
            eventually(lambda: min(away_gib(link)[rank.name] for rank in ranks) >= OWNED_GIB, "the job leaves")
            lone.ask()
            waits["lone"].append(round(lone.heard(), 2))
            for rank in ranks:
                rank.ask()
            waits["job"].append(round(max(rank.heard() for rank in ranks), 2))
            assert not any(away_gib(link)[rank.name] for rank in ranks)
            lone.ask()  # the job, which is idle, leaves for it
            waits["lone"].append(round(lone.heard(), 2))
        moves = [
            (event.kind, round(float(event.fields["seconds"]), 2))
            for event in link.events(kinds=("swapped-out", "swapped-in"))
        ]
        print(f"\nfirst answers, seconds: {waits}")
        print(f"moves, seconds: {moves}")
        assert len(moves) >= 2 * 2 * ROUNDS
