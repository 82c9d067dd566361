"""Two NCCL jobs of two ranks each, crossing on two real GPUs. Run:
``REQUIRE_GPUS=2 pytest -s -m gpu tests/gpu/test_gangs.py``; it prints what each job got of what it gets alone."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from benchmarks.node import Node

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300), pytest.mark.usefixtures("two_gpus")]
PROGRAM = Path(__file__).with_name("gang_job.py")
SECONDS = 10.0
PATIENCE_S = 120


@pytest.fixture
def node() -> Iterator[Node]:
    with Node(mode="temporal", gpus=(0, 1)) as node:
        yield node


@dataclass
class Job:
    """One vGPU on each of two GPUs, and the job's processes in them."""

    node: Node
    name: str
    share: int
    together: bool
    options: tuple[str, ...]
    vgpus: list[str] = field(default_factory=list)
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def prepare(self) -> None:
        options = [*self.options, *([] if self.together else ["--group", self.name])]
        for gpu in "01":
            made = self.node.run("create", "--gpu", gpu, "--sm", str(self.share), "--mem", "30G", *options)
            self.vgpus.append(made.strip())
        if self.together:
            self._start(",".join(self.vgpus), "threads", "-", "-")
        else:
            port = free_port()
            for rank, vgpu in enumerate(self.vgpus):
                self._start(vgpu, "processes", str(rank), port)
        for process in self.processes:
            assert process.stdout is not None
            assert any(line == "READY\n" for line in process.stdout), "it ended before its first step"

    def _start(self, vgpus: str, *arguments: str) -> None:
        argv = [*self.node.vgpuctl, "exec", vgpus, "--", sys.executable, str(PROGRAM), *arguments, str(SECONDS)]
        environment = self.node.environment | {"NCCL_NVLS_ENABLE": "0"}
        self.processes.append(
            subprocess.Popen(argv, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )

    def go(self) -> None:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()

    def steps_per_second(self) -> float:
        """Once it has come to its end, with every sum right."""
        results = []
        for process in self.processes:
            out, _ = process.communicate(timeout=PATIENCE_S)
            assert process.returncode == 0
            results.append(json.loads(out.strip().splitlines()[-1]))
        assert all(result["right"] for result in results)
        return float(results[0]["steps"] / results[0]["seconds"])

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()
        if self.vgpus:
            self.node.run("rm", "-f", *self.vgpus)


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def run(node: Node, shares: tuple[int, ...], *options: str, together: bool) -> list[float]:
    """Steps per second of jobs with these shares, at the same time. ``options``: of each of their vGPUs."""
    with ExitStack() as stack:
        jobs = [Job(node, f"job{i}", share, together, options) for i, share in enumerate(shares)]
        for job in jobs:
            stack.callback(job.end)
            job.prepare()
        for job in jobs:
            job.go()
        return [job.steps_per_second() for job in jobs]


@pytest.mark.parametrize("shares", [(50, 50), (30, 70)], ids=["50 and 50", "30 and 70"])
@pytest.mark.parametrize("together", [False, True], ids=["a group of processes", "one process with two vGPUs"])
@pytest.mark.parametrize("options", [("--burst",), ()], ids=["burst", "hard limits"])
def test_two_jobs_cross_on_two_gpus(
    node: Node, shares: tuple[int, int], together: bool, options: tuple[str, ...]
) -> None:
    [alone] = run(node, (100,), "--burst", together=together)
    rates = run(node, shares, *options, together=together)
    of_alone = [rate / alone for rate in rates]
    print(f"\n{shares}: alone {alone:.1f} steps/s; {of_alone[0]:.1%} + {of_alone[1]:.1%} = {sum(of_alone):.1%} of it")
    assert abs(rates[0] / sum(rates) - shares[0] / 100) < 0.1
    assert sum(of_alone) > 0.6
