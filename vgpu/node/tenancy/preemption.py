"""Suspends vGPUs for waiting requests of higher priority, and resumes these vGPUs when there is room again.

The GPU Servers' journals say which vGPUs are preempted, and for which request. So a node that restarts goes on with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from vgpu.errors import ErrorCode, VgpuError
from vgpu.loggers import get_logger
from vgpu.node.forwarding import Forwarder
from vgpu.node.survey import StatusCollector
from vgpu.placement.box import left, promised, request
from vgpu.protocol.messages import GpuStatus, Resume, Snapshot, Suspend, VgpuStatus
from vgpu.queueing.preempt import Card, Plan, Running, Size, choose
from vgpu.queueing.preempted import Preempted
from vgpu.spec import VgpuSpec

log = get_logger(__name__)

PRIORITIES: Final = {"low": 0, "normal": 1, "high": 2}
AT_WORK: Final = frozenset({"idle", "waiting", "running", "idle-suspended", "swapped"})
"""States in which a vGPU may be suspended."""


class Preemption:
    """One preemption runs at a time, so that no request gets more room than it needs. ``changed``: called after each
    act."""

    def __init__(self, survey: StatusCollector, forwarder: Forwarder, changed: Callable[[], None]) -> None:
        self._survey = survey
        self._forwarder = forwarder
        self._changed = changed
        self.in_progress: tuple[str, int] | None = None
        """The key of the request for which vGPUs are being suspended, and their GPU."""
        self.acts = 0
        """How many preemptions have ended: a snapshot from before one does not show the room that it made."""
        self._rests_until_s: dict[str, float] = {}
        """By vGPU: it is not suspended before that time on the monotonic clock."""
        self._resuming: set[str] = set()
        self.reasons: dict[str, str] = {}
        """Why preempted vGPUs are not back yet."""

    def kept(self, snapshot: Snapshot, specs: Mapping[str, VgpuSpec]) -> dict[str, int]:
        """By the key of a request that waits, the GPU that was made free for it and still has the room. ``specs``: of
        the requests that may be placed."""
        gpus = {gpu.index: gpu for gpu in snapshot.gpus}
        found = {}
        for vgpu in preempted(snapshot):
            assert vgpu.preempted is not None
            spec, gpu = specs.get(vgpu.preempted.key), gpus.get(vgpu.gpu_index)
            if spec is not None and gpu is not None and _room(gpu).covers(_asked(spec, gpu)):
                found[vgpu.preempted.key] = gpu.index
        if self.in_progress is not None and self.in_progress[0] in specs:
            found[self.in_progress[0]] = self.in_progress[1]
        return found

    def plan(self, spec: VgpuSpec, gpus: Iterable[GpuStatus], snapshot: Snapshot) -> Plan | None:
        """The vGPUs to suspend for a request; None: that would not help, or it has room."""
        now_s = time.monotonic()
        self._rests_until_s = {vgpu_id: until for vgpu_id, until in self._rests_until_s.items() if until > now_s}
        cards = [
            Card(
                gpu.index,
                _asked(spec, gpu),
                _room(gpu),
                tuple(
                    _running(vgpu, gpu)
                    for vgpu in snapshot.vgpus
                    if vgpu.gpu_index == gpu.index and vgpu.vgpu_id not in self._rests_until_s and _may_stop(vgpu)
                ),
            )
            for gpu in gpus
        ]
        return choose(PRIORITIES[spec.priority], cards)

    async def suspend(self, plan: Plan, key: str, mark: Preempted, rest_s: float) -> None:
        """Suspend the vGPUs of the plan. A vGPU that refuses goes on, and is left alone for ``rest_s``. The caller has
        set ``in_progress``."""
        try:
            for victim in plan.victims:
                suspend = Suspend(vgpu=victim.vgpu_id, preempted=mark)
                try:
                    vgpu = await self._forwarder.find(victim.vgpu_id, 0)
                    self._survey.note(await self._forwarder.to_vgpu(vgpu, suspend, vgpu.owner_uid, VgpuStatus))
                except VgpuError as error:
                    self._rests_until_s[victim.vgpu_id] = time.monotonic() + rest_s
                    log.warning("a vGPU is not preempted", vgpu=victim.vgpu_id, request=key, reason=error.message)
                    return
        finally:
            self.in_progress = None
            self.acts += 1
            self._changed()

    def begins_to_resume(self, vgpu: VgpuStatus, gpu: GpuStatus | None, open_to: bool) -> bool:
        """Whether to resume a preempted vGPU now, by ``resume``. ``open_to``: its GPU is kept for no other request."""
        if vgpu.vgpu_id in self._resuming:
            return False
        if gpu is None:
            self.reasons[vgpu.vgpu_id] = f"GPU {vgpu.gpu_index} takes no vGPUs now"
        elif not open_to:
            self.reasons[vgpu.vgpu_id] = f"GPU {gpu.index} is kept for another request"
        elif not _room(gpu).covers(_asked(vgpu.spec, gpu)):
            self.reasons[vgpu.vgpu_id] = f"GPU {gpu.index} has no room for it"
        else:
            self._resuming.add(vgpu.vgpu_id)
            return True
        return False

    async def resume(self, vgpu: VgpuStatus, rest_s: float) -> None:
        """Resume it. It is not preempted again for ``rest_s``, so that it gets on with its work."""
        try:
            self._survey.note(
                await self._forwarder.to_vgpu(vgpu, Resume(vgpu=vgpu.vgpu_id), vgpu.owner_uid, VgpuStatus)
            )
        except VgpuError as error:
            self.reasons[vgpu.vgpu_id] = error.message
        else:
            self._rests_until_s[vgpu.vgpu_id] = time.monotonic() + rest_s
            self.reasons.pop(vgpu.vgpu_id, None)
            self._changed()
        finally:
            self._resuming.discard(vgpu.vgpu_id)

    def refuse_early(self, vgpu: VgpuStatus, kept: Mapping[int, str]) -> None:
        """``VgpuError`` (no-room): its owner resumes it while its GPU is kept for a request that waits."""
        if vgpu.state == "suspended" and kept.get(vgpu.gpu_index, vgpu.vgpu_id) != vgpu.vgpu_id:
            hint = "the node resumes it when there is room: vgpuctl queue" if vgpu.preempted else "see: vgpuctl queue"
            because = f", and {vgpu.vgpu_id} was preempted" if vgpu.preempted else ""
            text = f"GPU {vgpu.gpu_index} is kept for a request that waits{because}"
            raise VgpuError(ErrorCode.NO_ROOM, text, hint)


def preempted(snapshot: Snapshot) -> list[VgpuStatus]:
    """The vGPUs that the node has suspended, and has to resume."""
    return [vgpu for vgpu in snapshot.vgpus if vgpu.state == "suspended" and vgpu.preempted is not None]


def _may_stop(vgpu: VgpuStatus) -> bool:
    """An engine counts on the vGPU of its claim, and the vGPUs of a group run together."""
    spec = vgpu.spec
    return (
        vgpu.state in AT_WORK
        and vgpu.mode == "temporal"
        and vgpu.claim is None
        and spec.group is None
        and spec.oversubscribe is None
        and vgpu.leaving_to is None
    )


def _running(vgpu: VgpuStatus, gpu: GpuStatus) -> Running:
    frees = Size(0, 0)
    if not vgpu.spec.overcommit:
        given = promised(vgpu, gpu)
        frees = Size(given.time_ppm, given.memory_bytes)
    return Running(vgpu.vgpu_id, PRIORITIES[vgpu.spec.priority], frees, vgpu.memory_used_bytes, vgpu.created_unix_s)


def _asked(spec: VgpuSpec, gpu: GpuStatus) -> Size:
    asked = request(spec, gpu)
    return Size(asked.time_ppm, asked.memory_bytes)


def _room(gpu: GpuStatus) -> Size:
    room = left(gpu)
    return Size(room.time_ppm, room.memory_bytes)
