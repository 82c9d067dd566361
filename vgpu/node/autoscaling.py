"""The node's loop for vGPUs that have bounds: it reads, asks ``vgpu.autoscale``, and carries out the commands.

The commands take the way of a client's ``set`` and ``migrate``, in the name of the vGPU's owner, so a GPU Server admits
or refuses each. The bounds are in the vGPU's specification, in its GPU Server's journal. What the node has read is only
in memory: the next node reads anew.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Final, NoReturn

import trio
from pydantic import ValidationError

from vgpu.autoscale import Command, Move, Plan, Replica, Resize
from vgpu.autoscale.readings import readings_of, rooms_of
from vgpu.autoscale.reclaim import reclaimed
from vgpu.errors import VgpuError
from vgpu.event_types import EventType
from vgpu.loggers import get_logger
from vgpu.node.survey import StatusCollector
from vgpu.protocol.messages import EventReading, Migrate, Scaling, Set, Snapshot, VgpuStatus
from vgpu.protocol.stream import LINK_ENDED
from vgpu.spec import VgpuChanges

log = get_logger(__name__)

READING_S: Final = 2.0
CarryOut = Callable[[VgpuStatus, Set | Migrate], Awaitable[VgpuStatus]]


class Autoscaling:
    """``run`` in a nursery. ``wake`` when a vGPU may have got bounds: while none has, the loop reads nothing."""

    def __init__(self, survey: StatusCollector, carry_out: CarryOut, publish: Callable[[EventReading], object]) -> None:
        self._survey = survey
        self._carry_out = carry_out
        self._publish = publish
        self._plan = Plan()
        self._awake = trio.Event()
        self._moving: set[str] = set()
        self._not_resized: set[str] = set()
        """vGPUs whose last change of size was refused: the event is published once."""

    def wake(self) -> None:
        self._awake.set()

    async def make_room(self, gpu: int, sm_percent: float, memory_bytes: int) -> bool:
        """Take from vGPUs of the GPU what they have beyond their lower bounds, so that so much more can be promised
        there. False: that would not suffice, and nothing is taken; or one of them kept it."""
        now = await self._survey.snapshot()
        room = next((room for room in rooms_of(now) if room.gpu == gpu), None)
        grown = [one for one in readings_of(None, now, 0.0, self._moving) if one.gpu == gpu]
        commands = reclaimed(grown, room, sm_percent, memory_bytes) if room is not None and grown else None
        known = {vgpu.vgpu_id: vgpu for vgpu in now.vgpus}
        return bool(commands) and all([await self._resize(known[one.vgpu], one) for one in commands or ()])

    async def run(self) -> NoReturn:
        async with trio.open_nursery() as nursery:
            while True:
                await self._awake.wait()
                self._awake = trio.Event()
                await self._scale(nursery)

    async def _scale(self, nursery: trio.Nursery) -> None:
        """Read and act, until no vGPU has bounds."""
        before: Snapshot | None = None
        before_s = trio.current_time()
        while True:
            now, now_s = await self._survey.snapshot(), trio.current_time()
            scaling = [vgpu.vgpu_id for vgpu in now.vgpus if vgpu.spec.scales]
            self._plan.keep(scaling)
            if scaling:
                try:
                    await self._act(before, now, now_s - before_s, now_s, nursery)
                except Exception:  # our own fault; the node goes on without this round
                    log.exception("autoscaling failed")
            self._survey.replicas = self._plan.replicas
            if not scaling and all(gpu.state != "restarting" for gpu in now.gpus):
                return
            before, before_s = now, now_s
            await trio.sleep_until(now_s + READING_S)

    async def _act(
        self, before: Snapshot | None, now: Snapshot, passed_s: float, now_s: float, nursery: trio.Nursery
    ) -> None:
        readings = readings_of(before, now, passed_s, self._moving)
        known = {vgpu.vgpu_id: vgpu for vgpu in now.vgpus}
        for command in self._plan.step(now_s, readings, rooms_of(now)):
            vgpu = known[command.vgpu]
            if isinstance(command, Resize):
                await self._resize(vgpu, command)
            elif isinstance(command, Move):
                self._moving.add(vgpu.vgpu_id)
                nursery.start_soon(self._move, vgpu, command)
            else:
                self._note(EventType.REPLICA_WANTED, vgpu, command, command.reason, wanted=command.wanted)

    async def _resize(self, vgpu: VgpuStatus, command: Resize) -> bool:
        spec, sm, memory = vgpu.spec, command.sm_percent, command.memory_bytes
        changes = VgpuChanges(
            sm_percent=sm,
            sm_range_percent=None if sm is None else spec.sm_range_percent,
            memory_bytes=memory,
            memory_range_bytes=None if memory is None else spec.memory_range_bytes,
        )
        scaling = Scaling(reason=command.reason, sm_percent=spec.sm_percent, memory_bytes=spec.memory_bytes)
        done = await self._done(vgpu, command, Set(vgpu=vgpu.vgpu_id, changes=changes, scaling=scaling))
        if done:
            self._not_resized.discard(vgpu.vgpu_id)
        return done

    async def _move(self, vgpu: VgpuStatus, command: Move) -> None:
        self._note(EventType.SCALED, vgpu, command, command.reason, to_gpu=command.gpu)
        try:
            await self._done(vgpu, command, Migrate(vgpu=vgpu.vgpu_id, gpu=str(command.gpu)))
        except Exception:
            log.exception("autoscaling failed", vgpu=vgpu.vgpu_id)
        finally:
            self._moving.discard(vgpu.vgpu_id)

    async def _done(self, vgpu: VgpuStatus, command: Command, request: Set | Migrate) -> bool:
        try:
            await self._carry_out(vgpu, request)
        except (VgpuError, ValidationError, *LINK_ENDED) as error:
            self._plan.refused(command, trio.current_time())
            reason = str(error) or type(error).__name__
            log.info("not scaled", vgpu=vgpu.vgpu_id, wanted=command.reason, reason=reason)
            if isinstance(command, Move) or vgpu.vgpu_id not in self._not_resized:
                self._note(EventType.NOT_SCALED, vgpu, command, f"is not scaled: {reason}")
            if isinstance(command, Resize):
                self._not_resized.add(vgpu.vgpu_id)
            return False
        return True

    def _note(self, kind: EventType, vgpu: VgpuStatus, command: Command, text: str, **fields: int | str) -> None:
        if isinstance(command, Replica):
            log.info(kind, vgpu=vgpu.vgpu_id, text=text)
        self._publish(
            EventReading(
                at_unix_s=time.time(),
                kind=kind,
                gpu_index=vgpu.gpu_index,
                vgpu_id=vgpu.vgpu_id,
                text=f"{vgpu.vgpu_id} {text}",
                fields=fields,
            )
        )
