"""The test bed of all measurements: a node of its own, one of its GPUs, and vGPUs on it that come and go."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

import trio

from vgpu.enums import LeaseChoice
from vgpu.harness.program import Workload, WorkloadReport, run_workload
from vgpu.node.link import ControlLink
from vgpu.protocol.messages import GpuStatus, OutsideProcess, VgpuStatus
from vgpu.spec import VgpuSpec
from vgpu.units import GIB, MIB

MEMORY_BYTES: Final = 2 * GIB
"""Of each vGPU: a context takes up to half a GiB of it."""

_POLL_S: Final = 0.003
_REMOVED_S: Final = 10.0

Result = TypeVar("Result")


def memory_bytes(gpu: GpuStatus) -> int:
    return min(MEMORY_BYTES, gpu.total_memory_bytes // 8 // MIB * MIB)


@dataclass(slots=True)
class Ground:
    """``others``: programs of others that were on the GPU, by pid."""

    control_socket: Path
    gpu: GpuStatus
    others: dict[int, OutsideProcess] = field(default_factory=dict)
    programs: list[WorkloadReport] = field(default_factory=list)
    """Ours, and those that have ended."""

    @classmethod
    async def chosen(cls, control_socket: Path) -> Ground:
        """On the GPU with most free memory."""

        def look() -> GpuStatus:
            with ControlLink(control_socket) as node:
                return max(node.gpus(), key=lambda gpu: gpu.total_memory_bytes - gpu.used_memory_bytes)

        return cls(control_socket, await trio.to_thread.run_sync(look))

    async def ask(self, question: Callable[[ControlLink], Result]) -> Result:
        """``VgpuError``: the node's own reason."""

        def asked() -> Result:
            with ControlLink(self.control_socket) as node:
                return question(node)

        return await trio.to_thread.run_sync(asked)

    async def note_others(self) -> None:
        """Note the programs of others that are on the GPU now."""
        index = self.gpu.index
        (gpu,) = [gpu for gpu in await self.ask(lambda node: node.gpus()) if gpu.index == index]
        self.gpu = gpu
        ours = {report.pid for report in self.programs}
        self.others |= {process.pid: process for process in gpu.outside if process.pid not in ours}

    def new_report(self) -> WorkloadReport:
        """The report of one more program of ours."""
        self.programs.append(WorkloadReport())
        return self.programs[-1]

    async def start(
        self, nursery: trio.Nursery, workloads: Sequence[Workload], environments: Sequence[Mapping[str, str]]
    ) -> list[tuple[WorkloadReport, trio.Process]]:
        """Start the programs. Returns once all of them have reported that they are ready."""
        reports = [self.new_report() for _ in workloads]
        started: dict[int, trio.Process] = {}

        async def one(i: int) -> None:
            started[i] = await nursery.start(run_workload, workloads[i], environments[i], reports[i], lambda: None)

        async with trio.open_nursery() as starting:
            for i in range(len(workloads)):
                starting.start_soon(one, i)
        return [(reports[i], started[i]) for i in range(len(workloads))]

    @asynccontextmanager
    async def vgpus(
        self, *percents: float, bursting: float = 0.0, lease: LeaseChoice = LeaseChoice.AUTO
    ) -> AsyncIterator[list[VgpuStatus]]:
        """One for each of ``percents``, removed afterwards. That of ``bursting`` percent has no limit of its own."""
        size = memory_bytes(self.gpu)
        specs = [
            VgpuSpec(
                sm_percent=percent,
                memory_bytes=size,
                burst=percent == bursting,
                lease=lease,
                name=f"verify-{percent:g}",
            )
            for percent in percents
        ]
        made = await self.ask(
            lambda node: [node.create(spec, str(self.gpu.index), lifetime="process") for spec in specs]
        )
        try:
            yield made
        finally:
            with trio.move_on_after(_REMOVED_S, shield=True):
                await self.ask(lambda node: [node.remove(vgpu.vgpu_id, force=True) for vgpu in made])

    async def readings(self, vgpus: Sequence[VgpuStatus]) -> list[VgpuStatus]:
        """The status of these vGPUs now."""
        now = {vgpu.vgpu_id: vgpu for vgpu in await self.ask(lambda node: node.list())}
        return [now[vgpu.vgpu_id] for vgpu in vgpus]


async def eventually(look: Callable[[], bool], within_s: float) -> bool:
    """Poll ``look`` until it is true. Returns whether it was true at last."""
    with trio.move_on_after(within_s):
        while True:
            if look():
                return True
            await trio.sleep(_POLL_S)
    return look()
