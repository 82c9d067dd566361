"""A program that loads the GPU, in a process of its own, and what it says about itself."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import trio

from vgpu.demo.measure import Sample, Series
from vgpu.errors import ErrorCode, VgpuError


@dataclass(slots=True)
class Told:
    """What a workload has said so far."""

    series: Series = field(default_factory=Series)
    started: bool = False
    memory_refusals: int = 0
    bytes_allocated: int = 0

    def hear(self, said: Mapping[str, Any]) -> None:
        """Takes one of its lines in. ``VgpuError`` if it is a complaint."""
        match said["event"]:
            case "started":
                self.started = True
            case "memory":
                self.memory_refusals = said["refusals"]
                self.bytes_allocated = said["bytes_allocated"]
            case "progress":
                self.series.add(Sample(said["at_ns"], said["work"]))
            case "error":
                raise VgpuError(ErrorCode.INTERNAL, f"the workload failed: {said['error']}")


@dataclass(frozen=True, slots=True)
class Workload:
    """``seconds`` of compute kernels from ``start_at_ns`` on (0: at once), holding up to ``hold_bytes`` of memory."""

    seconds: float
    start_at_ns: int = 0
    hold_bytes: int = 0

    def command(self) -> list[str]:
        return [
            *(sys.executable, "-P", "-m", "vgpu.workload", "--mode", "compute", "-o", "json"),
            *("--seconds", str(self.seconds), "--start-at-ns", str(self.start_at_ns), "--bytes", str(self.hold_bytes)),
        ]


async def run_workload(
    workload: Workload, environment: Mapping[str, str], told: Told, changed: Callable[[], None]
) -> None:
    """Runs ``workload`` to its end, filling ``told``. Cancelled, it ends the process and waits for that.

    Raises ``VgpuError`` with the program's own words if it fails.
    """
    async with trio.open_nursery() as nursery:
        start = partial(
            trio.run_process,
            workload.command(),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            capture_stdout=False,
            check=False,
            # Ctrl-C in the terminal is for the demonstration, which ends its processes itself.
            start_new_session=True,
        )
        process: trio.Process = await nursery.start(start)
        assert process.stdout is not None
        assert process.stderr is not None
        complaints: list[str] = []
        nursery.start_soon(_collect, process.stderr, complaints)
        async for line in lines(process.stdout):
            told.hear(json.loads(line))
            changed()
    if process.returncode != 0:
        reason = complaints[0] if complaints else f"exit code {process.returncode}"
        raise VgpuError(ErrorCode.INTERNAL, f"the workload failed: {reason}")


async def _collect(stream: trio.abc.ReceiveStream, into: list[str]) -> None:
    into += [line async for line in lines(stream)]


async def lines(stream: trio.abc.ReceiveStream) -> AsyncIterator[str]:
    """The lines of ``stream``, without their ends; an unfinished last one too."""
    rest = b""
    async for data in stream:
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            yield line.decode(errors="replace")
    if rest:
        yield rest.decode(errors="replace")
