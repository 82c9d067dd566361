"""The measurements, one check after the other, each with its control."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import trio

from vgpu.ctl.options import Mode
from vgpu.enums import LeaseChoice
from vgpu.errors import ErrorCode, VgpuError
from vgpu.harness.node import private_node
from vgpu.harness.signals import cause_of
from vgpu.protocol.messages import GpuStatus, OutsideProcess
from vgpu.verify.ground import Ground
from vgpu.verify.judge import ALONE, KILL, LAUNCH, LIGHT, MEMORY, PLANTED_DELAY_NS, SMS, TOGETHER
from vgpu.verify.kills import endings
from vgpu.verify.light import requests_per_s
from vgpu.verify.limits import launch_run, memory_run, sm_runs
from vgpu.verify.measured import Evidence, LightRun, ShareRun
from vgpu.verify.plan import NODE_S, Plan
from vgpu.verify.shares import share_run

_TICK_S: Final = 0.1

Show = Callable[[str, float], None]
"""Called a few times a second, with the current step and the part of the whole that is over (0–1)."""


@dataclass(frozen=True, slots=True)
class Findings:
    """``others``: programs that were on the GPU besides; figures are of what they left. ``seconds``: it took."""

    gpu: GpuStatus
    others: tuple[OutsideProcess, ...]
    evidence: Evidence
    seconds: float


@dataclass(slots=True)
class _Progress:
    """The time that has passed, compared with the estimate."""

    whole_s: float
    before_s: float = 0.0
    current_s: float = NODE_S
    what: str = "starting a node"
    since_s: float = field(default_factory=time.monotonic)

    def next(self, what: str, seconds: float) -> None:
        self.before_s += self.current_s
        self.current_s, self.what, self.since_s = seconds, what, time.monotonic()

    async def show(self, show: Show) -> None:
        while True:
            within_s = min(time.monotonic() - self.since_s, self.current_s)
            show(self.what, (self.before_s + within_s) / self.whole_s)
            await trio.sleep(_TICK_S)


async def examine(plan: Plan, show: Show) -> Findings:
    """Carries ``plan`` out on a node of its own. If a measurement fails, the evidence has its reason.

    ``VgpuError`` if there is no node. Cancelled, it ends everything it has started.
    """
    began_s = time.monotonic()
    seconds = plan.seconds()
    progress = _Progress(NODE_S + sum(seconds.values()))
    evidence = Evidence()
    gpus = () if plan.gpu is None else (plan.gpu,)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(progress.show, show)
        async with private_node(bool(plan.simulated), Mode.TEMPORAL, "verify", gpus) as control_socket:
            ground = await Ground.chosen(control_socket)
            bench = _Bench(plan, ground, evidence)
            for name in plan.checks:
                progress.next(name, seconds[name])
                await ground.note_others()
                await bench.measure(name)
        nursery.cancel_scope.cancel()
    return Findings(ground.gpu, tuple(ground.others.values()), evidence, time.monotonic() - began_s)


@dataclass(slots=True)
class _Bench:
    plan: Plan
    ground: Ground
    evidence: Evidence
    alone: ShareRun | None = None
    """One program without limits: the control of all that are alone."""

    async def measure(self, name: str) -> None:
        try:
            if name in ALONE:
                await self._alone(name)
            elif name in TOGETHER:
                await self._together(name)
            elif name == LIGHT:
                await self._light()
            elif name == MEMORY:
                self.evidence.memory = await memory_run(self.ground, limited=self.plan.limited)
                self.evidence.unlimited_memory = await memory_run(self.ground, limited=False)
            elif name == KILL:
                await self._kills()
            elif name == LAUNCH:
                await self._launches()
            elif name == SMS:
                runs, without = await sm_runs(self.ground)
                self.evidence.sms = runs if self.plan.limited else [without]
                self.evidence.unlimited_sms = without
        except (VgpuError, BaseExceptionGroup) as raised:
            error = cause_of(raised)
            if not isinstance(error, VgpuError):
                raise
            into = self.evidence.not_checked if error.code is ErrorCode.MODE else self.evidence.failed
            into[name] = error.message

    async def _alone(self, name: str) -> None:
        lengths, ground = self.plan.lengths, self.ground
        if self.alone is None:
            self.alone = await share_run(ground, [100.0], lengths.control_ns, lengths, limited=False)
        run = await share_run(ground, [ALONE[name]], lengths.alone_ns, lengths, limited=self.plan.limited)
        self.evidence.shares[name], self.evidence.unlimited_shares[name] = run, self.alone

    async def _together(self, name: str) -> None:
        lengths, ground = self.plan.lengths, self.ground
        run = await share_run(ground, TOGETHER[name], lengths.together_ns, lengths, limited=self.plan.limited)
        without = await share_run(ground, TOGETHER[name], lengths.control_ns, lengths, limited=False)
        self.evidence.shares[name], self.evidence.unlimited_shares[name] = run, without

    async def _light(self) -> None:
        lengths, ground = self.plan.lengths, self.ground
        in_turns = await requests_per_s(ground, lengths, lease=LeaseChoice.EXCLUSIVE)
        without = await requests_per_s(ground, lengths, lease=None)
        shared = await requests_per_s(ground, lengths, lease=LeaseChoice.AUTO) if self.plan.limited else in_turns
        self.evidence.light, self.evidence.light_in_turns = LightRun(shared, without), LightRun(in_turns, without)

    async def _kills(self) -> None:
        lengths, limited = self.plan.lengths, self.plan.limited
        killed = await endings(self.ground, lengths.kills, signal.SIGKILL, lengths.patience_s, limited=limited)
        (stopped,) = await endings(self.ground, 1, signal.SIGSTOP, lengths.patience_s, limited=limited)
        self.evidence.killed, self.evidence.stopped = killed, stopped

    async def _launches(self) -> None:
        lengths, limited = self.plan.lengths, self.plan.limited
        run = await launch_run(self.ground, lengths.launches_s, 0, limited=limited)
        delayed = await launch_run(self.ground, lengths.delayed_s, PLANTED_DELAY_NS, limited=True)
        self.evidence.launches, self.evidence.delayed_launches = run, delayed
