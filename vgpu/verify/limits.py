"""Single programs that test a limit: memory, the cost of a launch, the number of SMs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Final

import trio

from client_hook import interpreter
from vgpu.errors import ErrorCode, VgpuError
from vgpu.harness.program import WorkloadReport, environment_of, run_program
from vgpu.protocol.messages import ProcessReading, VgpuStatus
from vgpu.verify.ground import Ground
from vgpu.verify.judge import SM_PERCENTS
from vgpu.verify.measured import LaunchRun, MemoryRun, SmRun
from vgpu.workload.probes import PIECE_BYTES

BEYOND_PIECES: Final = 16
"""How much more than the limit a program without one asks for: enough to show that it gets it."""
MEMORY_PERCENT: Final = 30.0
_POLL_S: Final = 0.02
_MPS_S: Final = 8.0
_SMS_KNOWN_S: Final = 5.0


def _probe(name: str, *options: str) -> list[str]:
    return interpreter.command("vgpu.workload.probes", name, *options)


async def _result(ground: Ground, command: list[str], environment: Mapping[str, str]) -> WorkloadReport:
    report = ground.new_report()
    await run_program(command, environment, report, lambda: None)
    return report


async def memory_run(ground: Ground, *, limited: bool) -> MemoryRun:
    """A program that allocates until it is refused; ``limited`` False: somewhat more than the vGPU would have had."""
    async with ground.vgpus(MEMORY_PERCENT) as (vgpu,):
        limit = vgpu.memory_limit_bytes
        options = () if limited else ("--unlimited", "--most-pieces", str(limit // PIECE_BYTES + BEYOND_PIECES))
        said = (await _result(ground, _probe("memory", *options), environment_of(vgpu, limited=limited))).result
    return MemoryRun(
        limit_bytes=limit,
        total_bytes=said["total_bytes"],
        free_bytes=said["free_bytes"],
        pieces=said["pieces"],
        piece_bytes=said["piece_bytes"],
        left_bytes=said["left_bytes"],
        freed_bytes=said["freed_bytes"],
        refusal=said["refusal"],
    )


async def launch_run(ground: Ground, seconds: float, planted_ns: int, *, limited: bool) -> LaunchRun:
    """In a vGPU that has the GPU to itself."""
    async with ground.vgpus(100.0) as (vgpu,):
        command = _probe("launches", "--seconds", str(seconds), "--planted-ns", str(planted_ns))
        said = (await _result(ground, command, environment_of(vgpu, limited=limited))).result
    return LaunchRun(bool(said["hooked"]), tuple(said["gated_ns"]), tuple(said["direct_ns"]))


@asynccontextmanager
async def _idle(ground: Ground, environment: Mapping[str, str]) -> AsyncIterator[WorkloadReport]:
    """A program that has a context, and does nothing until the end."""
    report = ground.new_report()
    async with trio.open_nursery() as nursery:
        process = await nursery.start(run_program, _probe("idle"), environment, report, lambda: None)
        yield report
        await process.stdin.aclose()


async def sm_runs(ground: Ground) -> tuple[list[SmRun], SmRun]:
    """What MPS gives to programs of ``SM_PERCENTS``, and to one in no vGPU, beside what the second of them would get.
    The GPU is in spatial mode from then on.

    ``VgpuError``: there is no spatial mode here, and why.
    """
    await _into_spatial_mode(ground)
    runs = []
    for percent in SM_PERCENTS:
        async with ground.vgpus(percent) as (vgpu,), _idle(ground, environment_of(vgpu)):
            process = await _with_sms(ground, vgpu)
            runs.append(SmRun(percent, ground.gpu.sm_count, process.sm_planned, process.sm_count))
            if percent == SM_PERCENTS[1]:
                async with _idle(ground, environment_of(vgpu, limited=False)) as free:
                    without = SmRun(percent, ground.gpu.sm_count, process.sm_planned, int(free.about["sm_count"]))
    return runs, without


async def _into_spatial_mode(ground: Ground) -> None:
    index = str(ground.gpu.index)
    gpu = await ground.ask(lambda node: node.set_gpu(index, mode="spatial"))
    with trio.move_on_after(_MPS_S):
        while gpu.mps_pid is None:
            await trio.sleep(_POLL_S)
            (gpu,) = [gpu for gpu in await ground.ask(lambda node: node.gpus()) if str(gpu.index) == index]
    if gpu.mps_pid is None:
        raise VgpuError(ErrorCode.MODE, f"there is no MPS daemon: {gpu.mps_reason or 'it did not start'}")


async def _with_sms(ground: Ground, vgpu: VgpuStatus) -> ProcessReading:
    """The vGPU's one process, once its hook has reported the SMs that the driver states."""
    with trio.move_on_after(_SMS_KNOWN_S):
        while True:
            found = (await ground.ask(lambda node: node.processes(vgpu.vgpu_id))).processes
            if found and found[0].sm_count:
                return found[0]
            await trio.sleep(_POLL_S)
    raise VgpuError(ErrorCode.TIMEOUT, f"the driver did not report the SMs of a program within {_SMS_KNOWN_S:g} s")
