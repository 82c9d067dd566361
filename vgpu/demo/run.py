"""The demonstration itself: one program alone, then two beside each other in vGPUs of 30 and 70 %."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import trio

from vgpu.ctl.options import Mode
from vgpu.demo.report import Report, Sharer
from vgpu.harness.measure import Sample, Series, common_window, shares
from vgpu.harness.node import private_node
from vgpu.harness.program import Workload, WorkloadReport, environment_of, run_workload
from vgpu.node.link import ControlLink
from vgpu.protocol.messages import GpuStatus, VgpuStatus
from vgpu.spec import VgpuSpec
from vgpu.units import MIB

SHARES_PERCENT: Final = (30.0, 70.0)
WARM_UP_NS: Final = 10**9
"""Clocks rise, caches fill and both programs surely run before counting begins."""
TAIL_NS: Final = 1_500_000_000
"""Programs report once a second and run on beyond the window, so that no program is measured alone at its end."""
READ_EVERY_S: Final = 0.25
LEAD_NS: Final = {True: 1_500_000_000, False: 5 * 10**9}
"""From starting the programs to their first kernel, by whether the GPU is simulated: a real driver compiles first."""
REFUSED_BYTES: Final = 256 * MIB
"""How much more than its memory the first program asks for."""


@dataclass(frozen=True, slots=True)
class Plan:
    """``duration_ns``: the window in which both are measured. ``gated`` False: the same programs without the hook.

    ``simulated`` says in words why the GPU is a simulated one; "" for a real one.
    """

    duration_ns: int
    simulated: str
    mode: Mode
    gated: bool

    @property
    def alone_ns(self) -> int:
        return min(max(self.duration_ns // 3, 3 * 10**9), 10 * 10**9)


@dataclass(slots=True)
class Scene:
    """Everything there is to see at one moment."""

    plan: Plan
    phase: str = "starting a node"
    gpu: GpuStatus | None = None
    alone: WorkloadReport = field(default_factory=WorkloadReport)
    vgpus: tuple[VgpuStatus, ...] = ()
    reports: tuple[WorkloadReport, ...] = ()
    start_ns: int = 0
    """When the program or programs of this phase begin to be counted; 0 before that is fixed."""
    end_ns: int = 0


async def demonstrate(plan: Plan, show: Callable[[Scene], None]) -> Report:
    """Carries ``plan`` out on a node of its own. ``show`` is called whenever there is something new to see.

    ``VgpuError`` if node or programs fail. Cancelled, it ends everything it has started.
    """
    scene = Scene(plan)
    show(scene)
    async with private_node(bool(plan.simulated), plan.mode) as control_socket:
        stage = _Stage(control_socket, scene, show)
        await stage.set_up()
        rate_alone = await stage.measure_alone()
        return await stage.measure_together(rate_alone)


@dataclass(slots=True)
class _Stage:
    control_socket: Path
    scene: Scene
    show: Callable[[Scene], None]

    async def set_up(self) -> None:
        """Two vGPUs, on the same GPU, which share half of its memory as they share its compute."""
        scene = self.scene
        scene.phase = "making two vGPUs"
        self._changed()
        scene.vgpus, scene.gpu = await trio.to_thread.run_sync(self._create)
        self._changed()

    def _create(self) -> tuple[tuple[VgpuStatus, ...], GpuStatus]:
        with ControlLink(self.control_socket) as node:
            gpu = max(node.gpus(), key=lambda gpu: gpu.total_memory_bytes - gpu.used_memory_bytes)
            made = []
            for percent in SHARES_PERCENT:
                memory_bytes = int(gpu.total_memory_bytes * percent / 200) // MIB * MIB
                spec = VgpuSpec(sm_percent=percent, memory_bytes=memory_bytes, name=f"demo-{percent:.0f}")
                made.append(node.create(spec, str(gpu.index), lifetime="process"))
        return tuple(made), gpu

    async def measure_alone(self) -> float:
        """Work per second of one program that has the GPU to itself, without hook or limits."""
        plan, scene = self.scene.plan, self.scene
        scene.phase = "one program alone, without limits"
        scene.start_ns = time.monotonic_ns() + WARM_UP_NS
        scene.end_ns = scene.start_ns + plan.alone_ns
        workload = Workload(seconds=(WARM_UP_NS + plan.alone_ns + TAIL_NS) / 1e9)
        await run_workload(workload, environment_of(self.scene.vgpus[0], limited=False), scene.alone, self._changed)
        start_ns = scene.alone.series.samples[0].at_ns
        return scene.alone.series.rate(start_ns, start_ns + plan.alone_ns)

    async def measure_together(self, rate_alone: float) -> Report:
        """Both programs over the same window."""
        scene, plan = self.scene, self.scene.plan
        scene.phase = "two programs" if plan.gated else "two programs, without limits"
        begin_ns = time.monotonic_ns() + LEAD_NS[bool(plan.simulated)]
        scene.start_ns = begin_ns + WARM_UP_NS
        scene.end_ns = scene.start_ns + plan.duration_ns
        scene.reports = tuple(WorkloadReport() for _ in scene.vgpus)
        tokens = [Series() for _ in scene.vgpus]
        seconds = (WARM_UP_NS + plan.duration_ns + TAIL_NS) / 1e9
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._keep_current, tokens)
            async with trio.open_nursery() as programs:
                for i, report in enumerate(scene.reports):
                    workload = Workload(seconds, begin_ns, self._appetite_bytes(i))
                    environment = environment_of(scene.vgpus[i], limited=plan.gated)
                    programs.start_soon(run_workload, workload, environment, report, self._changed)
            nursery.cancel_scope.cancel()
        return self._report(rate_alone, tokens)

    async def _keep_current(self, tokens: list[Series]) -> None:
        """Reads the vGPUs every ``READ_EVERY_S`` into the scene, and their token counts into ``tokens``."""
        while True:
            readings = await trio.to_thread.run_sync(self._read, abandon_on_cancel=True)
            now_ns = time.monotonic_ns()
            self.scene.vgpus = tuple(readings[vgpu.vgpu_id] for vgpu in self.scene.vgpus)
            for series, vgpu in zip(tokens, self.scene.vgpus, strict=True):
                series.add(Sample(now_ns, vgpu.tokens))
            self._changed()
            await trio.sleep(READ_EVERY_S)

    def _read(self) -> dict[str, VgpuStatus]:
        with ControlLink(self.control_socket) as node:
            return {vgpu.vgpu_id: vgpu for vgpu in node.list()}

    def _changed(self) -> None:
        self.show(self.scene)

    def _appetite_bytes(self, i: int) -> int:
        """The first asks for more than it owns, and holds what it got; the others hold half of theirs."""
        limit = self.scene.vgpus[i].memory_limit_bytes
        return limit + REFUSED_BYTES if i == 0 else limit // 2

    def _report(self, rate_alone: float, tokens: Sequence[Series]) -> Report:
        scene, plan = self.scene, self.scene.plan
        assert scene.gpu is not None
        start_ns, end_ns = common_window([report.series for report in scene.reports], plan.duration_ns)
        rates = [report.series.rate(start_ns, end_ns) for report in scene.reports]
        return Report(
            simulated=scene.gpu.simulated,
            gpu=scene.gpu.name,
            mode=scene.gpu.mode if plan.gated else "ungated",
            total_ratio=round(sum(rates) / rate_alone, 4),
            vgpus=tuple(
                Sharer(
                    id=vgpu.vgpu_id,
                    sm_percent=percent,
                    requested_ratio=percent / sum(SHARES_PERCENT),
                    achieved_ratio=round(achieved, 4),
                    tokens_per_second=round(counted.rate(start_ns, end_ns), 2),
                    memory_limit_bytes=vgpu.memory_limit_bytes,
                    memory_refusals=report.memory_refusals,
                )
                for vgpu, percent, achieved, counted, report in zip(
                    scene.vgpus, SHARES_PERCENT, shares(rates), tokens, scene.reports, strict=True
                )
            ),
        )
