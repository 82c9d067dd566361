"""Reclaims vGPUs that are idle for longer than their owner's quota allows: first a warning, then the reclaim."""

from __future__ import annotations

import time
from typing import Final, NoReturn

import trio

from vgpu.errors import VgpuError
from vgpu.event_types import EventType
from vgpu.loggers import get_logger
from vgpu.node.feed import EventFeed
from vgpu.node.forwarding import Forwarder
from vgpu.node.survey import StatusCollector
from vgpu.node.tenancy.quotas import NodeQuotas
from vgpu.protocol.messages import EventReading, Remove, Suspend, VgpuStatus
from vgpu.quotas.idle import IdleWatch, Observed, Reclaim, Warn
from vgpu.quotas.quota import Allowance
from vgpu.units import format_duration

log = get_logger(__name__)

SHORTEST_S: Final = 0.5
LONGEST_S: Final = 30.0
"""Between two observations: a twentieth of the shortest limit, within these."""
AT_REST: Final = frozenset({"suspended", "removing"})
"""States in which there is nothing to suspend."""


class Reclaimer:
    """``run`` in a nursery. It does nothing while no quota has an idle limit."""

    def __init__(self, survey: StatusCollector, forwarder: Forwarder, feed: EventFeed, quotas: NodeQuotas) -> None:
        self._survey = survey
        self._forwarder = forwarder
        self._feed = feed
        self._quotas = quotas
        self._watch = IdleWatch()
        self._warnings: dict[str, str] = {}

    async def run(self) -> NoReturn:
        while True:
            pause_s = LONGEST_S / 10
            if self._quotas.has_idle_limits:
                try:
                    pause_s = await self._observe()
                except Exception:  # our own fault; the node goes on
                    log.exception("idle vGPUs are not observed")
            await trio.sleep(pause_s)

    def warning(self, vgpu_id: str) -> str:
        """The sentence about a vGPU that will be reclaimed; "" for any other."""
        return self._warnings.get(vgpu_id, "")

    async def _observe(self) -> float:
        """Observe all vGPUs once, and do what is due. Returns when to observe again, in seconds."""
        vgpus = {vgpu.vgpu_id: vgpu for vgpu in (await self._survey.snapshot()).vgpus if vgpu.state != "restarting"}
        allowances: dict[str, Allowance] = {}
        for vgpu in vgpus.values():
            try:
                allowances[vgpu.vgpu_id] = await self._quotas.allowance(vgpu.owner_uid)
            except VgpuError as error:  # the name service is slow: observe this vGPU again later
                log.info("the idle limit of a vGPU is not known", vgpu=vgpu.vgpu_id, reason=error.message)
        seen = [_observed(vgpus[vgpu_id], allowance) for vgpu_id, allowance in allowances.items()]
        for due in self._watch.observe(trio.current_time(), seen):
            await self._do(due, vgpus[due.vgpu_id], allowances[due.vgpu_id])
        warned = self._watch.warned()
        self._warnings = {vgpu_id: text for vgpu_id, text in self._warnings.items() if vgpu_id in warned}
        limits = [one.limit_s for one in seen if one.limit_s > 0]
        return min(LONGEST_S, max(SHORTEST_S, min(limits) / 20)) if limits else LONGEST_S

    async def _do(self, due: Warn | Reclaim, vgpu: VgpuStatus, allowance: Allowance) -> None:
        section = allowance.sections.get("idle_limit_ns", "everyone")
        removes = allowance.quota.idle_action != "suspend"
        idle = format_duration(int(due.idle_s) * 10**9) if due.idle_s >= 1 else "0s"
        if isinstance(due, Warn):
            left = format_duration(max(1, round(due.left_s)) * 10**9)
            done = "removed, with its programs," if removes else "suspended"
            text = (
                f"{vgpu.vgpu_id} is idle since {idle}: it is {done} in {left} unless a program uses the GPU "
                f"(quota of {section})"
            )
            self._warnings[vgpu.vgpu_id] = text
            self._publish(EventType.IDLE, vgpu, text)
            return
        if not removes and vgpu.state in AT_REST:
            return
        request = Remove(vgpu=vgpu.vgpu_id, force=True) if removes else Suspend(vgpu=vgpu.vgpu_id)
        try:
            await self._forwarder.to_vgpu(vgpu, request, vgpu.owner_uid, VgpuStatus)
        except VgpuError as error:
            text = f"{vgpu.vgpu_id} is idle and cannot be {'removed' if removes else 'suspended'}: {error.message}"
            self._publish(EventType.NOT_RECLAIMED, vgpu, text)
            return
        done = "removed" if removes else f"suspended; vgpuctl resume {vgpu.vgpu_id} brings it back"
        text = f"{vgpu.vgpu_id} was idle for {idle}, the limit by the quota of {section}: {done}"
        self._publish(EventType.RECLAIMED, vgpu, text)

    def _publish(self, kind: EventType, vgpu: VgpuStatus, text: str) -> None:
        self._feed.publish(
            EventReading(
                at_unix_s=time.time(),
                kind=kind,
                gpu_index=vgpu.gpu_index,
                vgpu_id=vgpu.vgpu_id,
                text=text,
                fields={"uid": vgpu.owner_uid},
            )
        )


def _observed(vgpu: VgpuStatus, allowance: Allowance) -> Observed:
    return Observed(
        vgpu.vgpu_id,
        (vgpu.launches, vgpu.tokens, vgpu.busy_ns),
        vgpu.wants or vgpu.busy_ratio > 0 or vgpu.state in {"starting", "moving"} or vgpu.preempted is not None,
        (allowance.quota.idle_limit_ns or 0) / 1e9,
        allowance.warning_ns / 1e9,
    )
