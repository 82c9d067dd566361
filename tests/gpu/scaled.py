"""A program whose demand doubles and falls, in a vGPU whose size follows: the course of it. On a GPU or a simulated
one."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.node import Node, plain_environment
from vgpu.node.link import ControlLink

LEAST, MOST = 20, 60
LOW, HIGH = 14, 40
"""Demands in percent of the GPU: below the lower bound of the share, and more than twice as much."""
PATIENCE_S: Final = 180.0
GOOD: Final = 3
"""So many seconds in a row have to be good."""


@dataclass(frozen=True, slots=True)
class Course:
    """``before_ms``, ``worst_ms``, ``after_ms``: 95th percentiles of the latency at the low demand, at worst after
    it rose, and once the size had followed. ``grown_percent``, ``shrunk_percent``: sizes. ``recovered_s``,
    ``shrunk_s``: from the change of the demand."""

    before_ms: float
    worst_ms: float
    after_ms: float
    grown_percent: float
    recovered_s: float
    shrunk_percent: float
    shrunk_s: float
    sizes: tuple[float, ...]

    def __str__(self) -> str:
        return (
            f"p95 {self.before_ms:g} ms at {LOW} %; the demand rises to {HIGH} %: {self.worst_ms:g} ms at worst, "
            f"{self.after_ms:g} ms after {self.recovered_s:.0f} s with {self.grown_percent:g} %; it falls to 1 %: "
            f"{self.shrunk_percent:g} % after {self.shrunk_s:.0f} s; sizes {', '.join(f'{s:g}' for s in self.sizes)}"
        )


class Program:
    """``tests.gpu.requests`` in a vGPU of its own."""

    def __init__(self, node: Node) -> None:
        made = node.run("create", "--sm", f"{LEAST}..{MOST}", "--mem", "4G").strip()
        self.vgpu = made
        command = [*node.vgpuctl, "exec", made, "--", sys.executable, "-m", "tests.gpu.requests"]
        pipe = subprocess.PIPE
        self._popen = subprocess.Popen(command, env=node.environment, stdin=pipe, stdout=pipe, text=True)
        self._node = node
        self.reports: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._popen.stdout is not None
        self.reports += (json.loads(line) for line in self._popen.stdout)

    def demand(self, percent: int) -> None:
        assert self._popen.stdin is not None
        self._popen.stdin.write(f"{percent}\n")
        self._popen.stdin.flush()

    def size(self) -> float:
        with ControlLink(self._node.control_socket) as link:
            return link.inspect(self.vgpu).vgpu.spec.compute_ratio * 100

    def latest(self, percent: int) -> list[float]:
        """The latencies of the last seconds with that demand. A second in which requests were given up is infinite."""
        own = [one for one in list(self.reports) if one.get("percent") == percent and one["p95_ms"] is not None]
        return [float("inf") if one["given_up"] else one["p95_ms"] for one in own]

    def until(self, holds: Callable[[], bool], what: str) -> float:
        """Seconds until ``holds``."""
        began = time.monotonic()
        while not holds():
            assert self._popen.poll() is None, "the program has ended"
            assert time.monotonic() < began + PATIENCE_S, f"{what}: not within {PATIENCE_S:g} s; {self.reports[-10:]}"
            time.sleep(0.2)
        return time.monotonic() - began

    def close(self) -> None:
        self._popen.kill()
        self._popen.wait()
        self._reader.join()
        for end in (self._popen.stdin, self._popen.stdout):
            if end is not None:
                end.close()
        self._node.run("rm", "-f", self.vgpu)


def without_vgpus(node: Node, percent: int) -> float:
    """The 95th percentile of the latency in milliseconds of the same program in no vGPU: the worst of three seconds."""
    command, pipe = [sys.executable, "-m", "tests.gpu.requests"], subprocess.PIPE
    environment = plain_environment(node if node.simulated else None)
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        program.stdin.write(f"{percent}\n")
        program.stdin.flush()
        found: list[float] = []
        for line in program.stdout:
            report = json.loads(line)
            if report.get("percent") == percent and report["p95_ms"] is not None:
                found.append(float("inf") if report["given_up"] else report["p95_ms"])
            if len(found) == 2 * GOOD:
                break
        program.kill()
    return max(found[-GOOD:])


def course(node: Node) -> Course:
    """``AssertionError``: the size did not follow the demand within the bounds."""
    program, sizes = Program(node), [float(LEAST)]

    def noted() -> float:
        size = program.size()
        if size != sizes[-1]:
            sizes.append(size)
        assert LEAST <= size <= MOST
        return size

    try:
        program.until(lambda: bool(program.reports), "the program begins")
        program.demand(LOW)
        program.until(lambda: len(program.latest(LOW)) >= 2 * GOOD and noted() > 0, "requests at the low demand")
        before = max(program.latest(LOW)[-GOOD:])
        program.demand(HIGH)

        def recovered() -> bool:
            last = program.latest(HIGH)[-GOOD:]
            return noted() > HIGH and len(last) == GOOD and max(last) <= 2 * before

        recovered_s = program.until(recovered, "the latency recovers")
        after, grown = max(program.latest(HIGH)[-GOOD:]), noted()
        finite = [latency for latency in program.latest(HIGH) if latency != float("inf")]
        program.demand(1)
        shrunk_s = program.until(lambda: noted() == LEAST, "the size falls to the lower bound")
        return Course(before, max(finite), after, grown, recovered_s, noted(), shrunk_s, tuple(sizes))
    finally:
        program.close()
