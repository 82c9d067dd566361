"""Sharers behind a common start: processes that are started once and then work together, or some of them, in windows.

    plain      no vGPU: alone it is the exclusive baseline, several of them are what hardware time slicing makes of them
    mps        no vGPU either, but all through one MPS daemon that limits nothing, or each to a part of the SMs
    temporal, spatial   a vGPU on a node of that mode

Sharers that have nothing to do keep their context and do not compete; so baselines and vGPUs can take turns within
seconds, and a row costs its window instead of the start of a few PyTorch processes.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, Final, Self

from benchmarks.node import Node, plain_environment
from benchmarks.suite.books import Books, watch
from benchmarks.suite.nvml import Utilisation
from benchmarks.suite.workloads.sharer import Window
from gpuserver.device.base import MpsDirectories
from gpuserver.device.nvidia.mps import NvidiaMpsDaemon
from gpuserver.device.simulated.mps import SimulatedMpsDaemon
from vgpu.errors import VgpuError
from vgpu.node.link import ControlLink
from vgpu.packing.partition import partition

SHARER: Final = "benchmarks.suite.workloads.sharer"
MEMORY: Final = "12G"
READY_S: Final = 180.0
ANSWER_S: Final = 60.0
END_S: Final = 20.0
CUT_SHORT_S: Final = 3.0
WATCH_S: Final = 0.02
SEEDS_APART: Final = 1000
NONE: Final[Mapping[str, str]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Pace:
    """Around each window. ``settle_s``: for new shares to take effect and buckets to fill. ``lead_s``: work that does
    not count, before and after; as long as two steps of 30 ms take at 10 %. ``profiler_s``: to start a profiler."""

    settle_s: float = 0.5
    lead_s: float = 0.7
    profiler_s: float = 0.4


REAL: Final = Pace()
REHEARSED: Final = Pace(0.2, 1.0, 0.0)


class SharerFailed(RuntimeError):
    """A sharer did not start, answer or end well; the message has all that it said on stderr."""


class Sharer:
    """A process that answers line by line. ``name`` is for people, and of its vGPU if it has one (``node``)."""

    def __init__(
        self, name: str, command: Sequence[str], environment: dict[str, str], node: Node | None, share: float = 0.0
    ) -> None:
        self.name, self.node, self.share = name, node, share
        self._complaints: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            text=True,
            start_new_session=True,
        )
        self._said: queue.Queue[str] = queue.Queue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    @property
    def pid(self) -> int:
        """Of what was started: the workload, or the vgpuctl that runs it."""
        return self._process.pid

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as said:
            for line in said:
                self._said.put(line.rstrip("\n"))
        self._said.put("")  # the end

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except OSError:
            raise self.failure("has ended") from None

    def answer(self, word: str, timeout_s: float) -> str:
        """What follows ``word`` in its next line. SharerFailed if there is none in time, or another."""
        try:
            line = self._said.get(timeout=timeout_s)
        except queue.Empty:
            raise self.failure(f"did not say {word} within {timeout_s:.0f} s") from None
        first, _, rest = line.partition(" ")
        if first != word:
            raise self.failure(f"ended, or said {line!r}, instead of {word}")
        return rest

    def failure(self, what: str) -> SharerFailed:
        self._complaints.seek(0)
        return SharerFailed(f"{self.name} {what}\n{self._complaints.read().decode(errors='replace')}")

    def ended(self) -> bool:
        """Whether it has, or is about to: ``vgpuctl run`` removes the vGPU before it ends."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        return self._process.returncode is not None

    def dismiss(self) -> None:
        """It ends when its input does."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()

    def end(self, deadline: float) -> None:
        """Waits for that until ``deadline`` (monotonic), then kills it with all its children."""
        try:
            self._process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            print(f"{self.name} did not end and is killed", file=sys.stderr)
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            if self.node is not None:
                with suppress(subprocess.SubprocessError):
                    self.node.run("rm", "-f", self.name)
        self._listener.join(END_S)
        self._complaints.close()


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one window: each sharer's own result, joined by what the node's books say of its vGPU, and NVML's view."""

    results: tuple[dict[str, Any], ...]
    figures: dict[str, float] = field(default_factory=dict)


class Ground:
    """What sharers stand on: nodes and an MPS daemon of our own, started when they are first needed.

    ``gpu``: the one to measure, by NVML's index. Nodes serve it alone.
    """

    def __init__(self, simulated: bool, gpu: int = 0) -> None:
        self.simulated, self.gpu = simulated, gpu
        self.pace = REHEARSED if simulated else REAL
        self._owned = ExitStack()
        self._nodes: dict[str, Node] = {}
        self._one_node = self._owned.enter_context(ExitStack())
        self._mps: dict[str, str] | None = None
        self._bypass: Path | None = None
        self._numbers = count(1)

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        """``--gpu`` and ``--simulate``: what one is made of."""
        parser.add_argument("--gpu", type=int, default=0, metavar="INDEX", help="as NVML counts them; default: 0")
        parser.add_argument("--simulate", action="store_true", help="stand-ins on the simulated GPU")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._owned.close()

    def node(self, mode: str) -> Node:
        if mode not in self._nodes:
            if not self.simulated:
                self._one_node.close()  # a GPU has one GPU Server on a machine
                self._nodes.clear()
            node = Node(mode, (self.gpu + 1) * self.simulated, [self.gpu])
            self._nodes[mode] = (self._owned if self.simulated else self._one_node).enter_context(node)
        return self._nodes[mode]

    def plain(self) -> dict[str, str]:
        """The environment of a program without a vGPU."""
        if self.simulated:
            return plain_environment(self.node("temporal"), self.gpu)
        return plain_environment(None) | {"CUDA_VISIBLE_DEVICES": gpu_uuid(self.gpu)}

    def mps(self) -> dict[str, str]:
        """The environment of a program under an MPS daemon that belongs to nobody's vGPU."""
        if self._mps is None:
            folder = Path(self._owned.enter_context(tempfile.TemporaryDirectory(prefix="vgpu-mps-", dir="/tmp")))
            places = MpsDirectories(folder / "pipe", folder / "log")
            daemon = (
                SimulatedMpsDaemon(places)
                if self.simulated
                else NvidiaMpsDaemon(gpu_uuid(self.gpu), places, multi_user=False)
            )
            daemon.start()
            self._owned.callback(daemon.stop)
            self._mps = {"CUDA_MPS_PIPE_DIRECTORY": str(places.pipe), "CUDA_MPS_LOG_DIRECTORY": str(places.log)}
        return self.plain() | self._mps

    def bypass(self) -> Path:
        """``bypass.c``, compiled."""
        if self._bypass is None:
            folder = self._owned.enter_context(tempfile.TemporaryDirectory(prefix="vgpu-bypass-"))
            self._bypass = Path(folder, "bypass.so")
            source = Path(__file__).parent / "workloads" / "bypass.c"
            subprocess.run(
                ["cc", "-O2", "-shared", "-fPIC", "-o", self._bypass, source, "-ldl"], check=True, timeout=60
            )
        return self._bypass

    def sm_count(self) -> int:
        with ControlLink(self.node("spatial").control_socket) as link:
            return next(gpu.sm_count for gpu in link.gpus() if gpu.index == self.gpu)

    def number(self) -> int:
        return next(self._numbers)


def gpu_uuid(index: int) -> str:
    import pynvml

    pynvml.nvmlInit()
    return str(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(index)))


class Stage:
    """The sharers of one block. A context manager: whatever happens, none of them outlives it."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self._sharers: list[Sharer] = []
        self._unready: list[Sharer] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        for sharer in self._sharers:
            sharer.dismiss()
        deadline = time.monotonic() + (END_S if kind is None else CUT_SHORT_S)  # who is in a window does not listen
        for sharer in self._sharers:
            sharer.end(deadline)

    def plain(self, work: str, program: str = SHARER) -> Sharer:
        return self._start(f"plain-{work}-{self._ground.number()}", self._command(work, program), self._ground.plain())

    def mps(self, work: str, sm_percent: float | None = None) -> Sharer:
        """``sm_percent``: capped to as many SMs as a vGPU of that size gets."""
        environment = self._ground.mps()
        if sm_percent is not None:
            granted = partition(sm_percent, self._ground.sm_count())
            environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = granted.percent_text
        return self._start(f"mps-{work}-{self._ground.number()}", self._command(work), environment)

    def vgpu(
        self,
        mode: str,
        work: str,
        sm_percent: float,
        *options: str,
        program: str = SHARER,
        memory: str = MEMORY,
        environment: Mapping[str, str] = NONE,
    ) -> Sharer:
        """In a vGPU of its own, made with ``--sm`` and further options of ``vgpuctl run``; ``environment``: added."""
        node = self._ground.node(mode)
        name = f"{mode}-{work}-{self._ground.number()}"
        place = ["--gpu", str(self._ground.gpu)]
        made = ["run", "--name", name, *place, "--sm", f"{sm_percent:g}", "--mem", memory, *options]
        command = [*node.vgpuctl, *made, "--", *self._command(work, program)]
        return self._start(name, command, {**node.environment, **environment}, node, sm_percent)

    def switched(self, work: str) -> Sharer:
        """In a vGPU of 100 %, whose program goes through the gate and past it in turns (``gate_toggle.py``)."""
        node = self._ground.node("temporal")
        name = f"switched-{work}-{self._ground.number()}"
        steps = ["--steps", "2" if self._ground.simulated else "50"]
        command = [*self._command(work, "benchmarks.suite.workloads.gate_toggle"), *steps]
        place = ["--gpu", str(self._ground.gpu)]
        made = [*node.vgpuctl, "run", "--name", name, *place, "--sm", "100", "--mem", MEMORY, "--", *command]
        return self._start(name, made, node.environment | {"LD_PRELOAD": str(self._ground.bypass())}, node)

    def _command(self, work: str, program: str = SHARER) -> list[str]:
        simulated = ["--simulated"] if self._ground.simulated else []
        return [sys.executable, "-m", program, "--work", work, *simulated]

    def _start(
        self, name: str, command: list[str], environment: dict[str, str], node: Node | None = None, share: float = 0.0
    ) -> Sharer:
        sharer = Sharer(name, command, environment, node, share)
        self._sharers.append(sharer)
        self._unready.append(sharer)
        return sharer

    def ready(self, stamps: bool = False) -> None:
        """Until all have warmed up. ``stamps``: their profilers too, whose first start takes longer."""
        deadline = time.monotonic() + READY_S
        fresh, self._unready = self._unready, []
        for sharer in fresh:
            sharer.answer("READY", max(0.0, deadline - time.monotonic()))
        if stamps:
            for sharer in fresh:
                sharer.tell(
                    json.dumps(asdict(Window(time.monotonic() + 5 * self._ground.pace.profiler_s, 0.1, stamps=True)))
                )
            for sharer in fresh:
                sharer.answer("RESULT", ANSWER_S)

    def split(self, sharers: Sequence[Sharer], percents: Sequence[float]) -> None:
        """Gives the sharers' vGPUs these shares: first those that shrink, so that all fit at every moment. Percents
        beyond the sharers are for vGPUs that are yet to be made."""
        changes = sorted(zip(sharers, percents, strict=False), key=lambda change: change[1] - change[0].share)
        for sharer, percent in changes:
            if percent != sharer.share and sharer.node is not None:
                sharer.node.run("set", sharer.name, "--sm", f"{percent:g}")
                sharer.share = percent

    def window(
        self,
        sharers: Sequence[Sharer],
        seconds: float,
        *,
        stamps: bool = False,
        kernels: bool = False,
        watch_waits: bool = False,
        samples: bool = False,
        requests_per_second: Sequence[float] = (),
        seed: int = 1,
    ) -> Outcome:
        """All of ``sharers`` over one window of wall time; ``requests_per_second``: for the first ones, 0 is a closed
        loop; ``seed`` says when those come, of each sharer at other times. ``samples``: all latencies. ``watch_waits``:
        for which part of the time each vGPU had work, but no lease; fifty looks a second.

        SharerFailed if one fails, answers too late, or began too late to be at work for the whole window.
        """
        pace = self._ground.pace
        start = time.monotonic() + pace.settle_s + pace.lead_s + pace.profiler_s * stamps
        rates = [*requests_per_second, *[0.0] * (len(sharers) - len(requests_per_second))]
        for index, (sharer, requests) in enumerate(zip(sharers, rates, strict=True)):
            window = Window(
                start,
                seconds,
                stamps or kernels,
                kernels,
                requests_per_second=requests,
                samples=samples,
                seed=seed + SEEDS_APART * index,
                lead_s=pace.lead_s,
            )
            sharer.tell(json.dumps(asdict(window)))
        with ExitStack() as owned:
            utilisation = None
            if not self._ground.simulated:
                utilisation = owned.enter_context(Utilisation(self._ground.gpu, start, start + seconds))
            books = [
                Books(sharer.name, owned.enter_context(ControlLink(sharer.node.control_socket)))
                for sharer in sharers
                if sharer.node is not None
            ]
            try:
                figures = watch(books, start, start + seconds, WATCH_S if watch_waits else 0.0)
            except VgpuError as error:  # no vGPU, since no program: what that said is more telling
                raise next((s.failure("has ended") for s in sharers if s.ended()), error) from error
        told = {book.name: book.figures() for book in books}
        deadline = time.monotonic() + ANSWER_S + 2 * seconds
        results = []
        for sharer in sharers:
            result = json.loads(sharer.answer("RESULT", max(0.0, deadline - time.monotonic())))
            if result["late_s"] > pace.lead_s:
                raise sharer.failure(f"began {result['late_s']:.1f} s late")
            results.append(result | told.get(sharer.name, {}))
        return Outcome(tuple(results), figures | ({} if utilisation is None else utilisation.figures()))
