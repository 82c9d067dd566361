"""The loop of the node for vGPUs with bounds: when it reads, what it asks for, and what it notes. On a clock of its
own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock

from tests.ctl.fake_node import vgpu_reading
from tests.placement.test_box import gpu
from vgpu.errors import ErrorCode, VgpuError
from vgpu.node.autoscaling import READING_S, Autoscaling
from vgpu.node.survey import StatusCollector
from vgpu.protocol.messages import EventReading, Migrate, Set, Snapshot, VgpuStatus
from vgpu.spec import VgpuSpec

Scene = Callable[["World", Autoscaling], Awaitable[None]]


class World:
    """A node with two GPUs, and one vGPU on GPU 0 that is always at its limit. ``refused``: whatever is asked for."""

    def __init__(self, sm: str = "20..60", room: float = 0.8, memory: str = "8G") -> None:
        self.spec = VgpuSpec.parse(sm_percent=sm, memory_bytes=memory)
        self.room = room
        self.refused = False
        self.replicas: dict[str, int] = {}
        self.reads = 0
        self.asked: list[Set | Migrate] = []
        self.events: list[EventReading] = []

    async def snapshot(self) -> Snapshot:
        self.reads += 1
        await trio.lowlevel.checkpoint()
        known: dict[str, Any] = {"spec": self.spec, "busy_ns": 0, "busy_ratio": self.spec.compute_ratio}
        vgpu = vgpu_reading(**known, throttled_ratio=1.0)
        return Snapshot(at_unix_s=0, gpus=(gpu(0, 1 - self.room), gpu(1)), vgpus=(vgpu,))

    async def carry_out(self, vgpu: VgpuStatus, request: Set | Migrate) -> VgpuStatus:
        self.asked.append(request)
        await trio.lowlevel.checkpoint()
        if self.refused:
            raise VgpuError(ErrorCode.NO_ROOM, "it does not fit")
        if isinstance(request, Set):
            assert request.scaling is not None
            assert request.scaling.holds_for(self.spec, request.changes)
            self.spec = request.changes.applied_to(self.spec)
        return vgpu

    def play(self, scene: Scene) -> None:
        async def run() -> None:
            loop = Autoscaling(cast(StatusCollector, self), self.carry_out, self.events.append)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(loop.run)
                await scene(self, loop)
                nursery.cancel_scope.cancel()

        trio.run(run, clock=MockClock(autojump_threshold=0))


def test_without_bounds_it_reads_once_for_each_awakening() -> None:
    async def scene(world: World, loop: Autoscaling) -> None:
        await trio.sleep(60)
        assert world.reads == 0
        loop.wake()
        await trio.sleep(60)
        assert world.reads == 1

    World("30").play(scene)


def test_with_bounds_it_reads_every_two_seconds_until_they_end() -> None:
    async def scene(world: World, loop: Autoscaling) -> None:
        loop.wake()
        await trio.sleep(10 * READING_S + 1)
        assert world.reads == 11
        assert world.spec.sm_percent == 60
        world.spec = VgpuSpec.parse(sm_percent="30")
        await trio.sleep(60)
        assert world.reads == 12

    World().play(scene)


def test_a_refused_size_is_noted_once_and_asked_for_again_later() -> None:
    async def scene(world: World, loop: Autoscaling) -> None:
        world.refused = True
        loop.wake()
        await trio.sleep(35)
        assert len(world.asked) == 4
        assert [event.kind for event in world.events] == ["not-scaled"]
        assert "it does not fit" in world.events[0].text

    World().play(scene)


def test_a_move_is_noted_before_it_and_a_replica_after_its_refusal() -> None:
    async def scene(world: World, loop: Autoscaling) -> None:
        world.refused = True
        loop.wake()
        await trio.sleep(40)
        assert [(type(one), getattr(one, "gpu", "")) for one in world.asked] == [(Migrate, "1")]
        assert [event.kind for event in world.events] == ["scaled", "not-scaled", "replica-wanted"]
        assert world.events[0].text.startswith("vgpu-0a1b2c3d moves to GPU 1: GPU 0 has no room for --sm")
        assert world.replicas == {"vgpu-0a1b2c3d": 1}

    World(room=0.0).play(scene)


def test_an_error_of_its_own_ends_one_round_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(world: World, loop: Autoscaling) -> None:
        monkeypatch.setattr("vgpu.node.autoscaling.rooms_of", lambda _: 1 / 0)
        loop.wake()
        await trio.sleep(5)
        monkeypatch.undo()
        await trio.sleep(5)
        assert world.asked

    World().play(scene)


def test_room_is_made_for_what_fits_and_for_nothing_else() -> None:
    async def scene(world: World, loop: Autoscaling) -> None:
        world.spec = world.spec.model_copy(update={"sm_percent": 60.0})
        assert not await loop.make_room(0, 81, 0)
        assert not await loop.make_room(1, 81, 0)
        assert not await loop.make_room(7, 1, 0)
        assert world.asked == []
        assert await loop.make_room(0, 75, 0)
        assert world.spec.sm_percent == 25

    World(room=0.4).play(scene)
