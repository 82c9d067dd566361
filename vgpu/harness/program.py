"""A program that loads the GPU, in a process of its own, and its reports about itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import trio

from client_hook import interpreter
from client_hook.environment import joined_preload
from vgpu.ctl.programs import attachment
from vgpu.errors import ErrorCode, VgpuError
from vgpu.harness.measure import Sample, Series
from vgpu.protocol.messages import VgpuStatus


@dataclass(slots=True)
class WorkloadReport:
    """The reports of a workload so far. ``about``, ``result``: its first and last ones, empty before them. ``pid``: 0
    before it runs."""

    series: Series = field(default_factory=Series)
    about: dict[str, Any] = field(default_factory=dict)
    result: dict[str, Any] = field(default_factory=dict)
    memory_refusals: int = 0
    bytes_allocated: int = 0
    pid: int = 0

    @property
    def started(self) -> bool:
        return bool(self.about)

    def take(self, said: Mapping[str, Any]) -> None:
        """Takes one line of the workload. ``VgpuError`` if the line is an error."""
        match said["event"]:
            case "started":
                self.about = dict(said)
            case "memory":
                self.memory_refusals = said["refusals"]
                self.bytes_allocated = said["bytes_allocated"]
            case "progress":
                self.series.add(Sample(said["at_ns"], said["work"]))
            case "result":
                self.result = dict(said)
            case "error":
                raise VgpuError(ErrorCode.INTERNAL, f"the workload failed: {said['error']}")


@dataclass(frozen=True, slots=True)
class Workload:
    """``seconds`` of kernels from ``start_at_ns`` on (0: at once), holding up to ``hold_bytes`` of memory.

    ``waits``: once it is ready it waits for ``begin``.
    ``stamped``: its kernels store when they ran, on the clock of the GPU.
    ``host_ms``: it waits for each kernel, and then pauses so long, as a program does that its host holds up.
    """

    seconds: float
    start_at_ns: int = 0
    hold_bytes: int = 0
    waits: bool = False
    stamped: bool = False
    report_every_s: float = 1.0
    host_ms: float = 0.0

    def command(self) -> list[str]:
        return [
            *interpreter.command("vgpu.workload", "-o", "json"),
            *("--mode", "timestamps" if self.stamped else "compute", "--seconds", str(self.seconds)),
            *("--start-at-ns", str(self.start_at_ns), "--bytes", str(self.hold_bytes)),
            *("--report-every", str(self.report_every_s), *(("--wait",) if self.waits else ())),
            *(("--host-ms", str(self.host_ms)) if self.host_ms else ()),
        ]


def environment_of(vgpu: VgpuStatus, *, limited: bool = True) -> dict[str, str]:
    """For a program of ``vgpu``; ``limited`` False: the same program on the same GPU, outside of any vGPU."""
    environment = attachment([vgpu]).environment(interpreter.environment(os.environ))
    if not limited:
        del environment["VGPU_ID"]
        environment["LD_PRELOAD"] = joined_preload(environment.get("LD_PRELOAD", ""), None)
        if not vgpu.simulated:
            environment["CUDA_VISIBLE_DEVICES"] = vgpu.gpu_uuid
    return environment


async def begin(process: trio.Process, at_ns: int) -> None:
    """Sends a workload that ``waits`` the time to begin, on CLOCK_MONOTONIC."""
    assert process.stdin is not None
    await process.stdin.send_all(f"{at_ns}\n".encode())


async def run_workload(
    workload: Workload,
    environment: Mapping[str, str],
    report: WorkloadReport,
    changed: Callable[[], None],
    task_status: trio.TaskStatus[trio.Process] = trio.TASK_STATUS_IGNORED,
) -> None:
    """``run_program`` for ``workload``."""
    await run_program(workload.command(), environment, report, changed, task_status)


async def run_program(
    command: list[str],
    environment: Mapping[str, str],
    report: WorkloadReport,
    changed: Callable[[], None],
    task_status: trio.TaskStatus[trio.Process] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Runs ``command`` to its end, and fills ``report``. The program counts as started once it has reported so. A
    cancellation ends the process and waits for its end. A program that is killed (signal 9) counts as no failure.

    Raises ``VgpuError`` with the program's own words if it fails.
    """
    said_started = False
    async with trio.open_nursery() as nursery:
        start = partial(
            trio.run_process,
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            capture_stdout=False,
            check=False,
            # Ctrl-C in the terminal is only for this process, which ends its children itself.
            start_new_session=True,
        )
        process: trio.Process = await nursery.start(start)
        report.pid = process.pid
        assert process.stdout is not None
        assert process.stderr is not None
        complaints: list[str] = []
        nursery.start_soon(_collect, process.stderr, complaints)
        async for line in lines(process.stdout):
            report.take(json.loads(line))
            if report.started and not said_started:
                said_started = True
                task_status.started(process)
            changed()
    if process.returncode not in {0, -signal.SIGKILL}:
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
