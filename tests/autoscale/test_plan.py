"""All vGPUs of a node: rooms are kept, promises are kept, and what has no room moves or needs a replica."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from vgpu.autoscale import Command, Move, Plan, Reading, Replica, Resize, Room

GIB = 1 << 30
READING_S = 2.0


def reading(vgpu: str = "a", gpu: int = 0, size: float = 20, demand: float = 15, **fields: object) -> Reading:
    """A vGPU of 20..60 with such a demand."""
    known = Reading(
        vgpu=vgpu,
        gpu=gpu,
        sm_percent=size,
        memory_bytes=8 * GIB,
        busy=min(demand, size) / 100,
        throttled=float(demand > size),
        sm_range=(20, 60),
    )
    return replace(known, **fields)  # type: ignore[arg-type]


def after(plan: Plan, readings: list[Reading], rooms: list[Room], rounds: int, start: int = 0) -> list[Command]:
    """All commands of so many equal rounds. None is carried out."""
    return [one for at in range(start, start + rounds) for one in plan.step(at * READING_S, readings, rooms)]


def test_it_grows_into_what_its_gpu_has_left() -> None:
    [command] = Plan().step(0, [reading(demand=50)], [Room(0, 100, 0)])
    assert isinstance(command, Resize)
    assert command.sm_percent == 60
    assert "--sm 20 to 60: its programs need 62.8 % of the GPU or more" in command.reason
    [part] = Plan().step(0, [reading(demand=50)], [Room(0, 5, 0)])
    assert isinstance(part, Resize)
    assert part.sm_percent == 25


def test_what_one_gives_up_another_has_in_the_same_round() -> None:
    plan = Plan()
    idle, busy = reading("idle", size=60, demand=0), reading("busy", size=40, demand=60)
    commands = after(plan, [idle, busy], [Room(0, 0, 0)], 6)
    assert [type(one) for one in commands[-2:]] == [Resize, Resize]
    assert [one.vgpu for one in commands[-2:]] == ["idle", "busy"]


def test_without_room_it_moves_once_it_has_wanted_to_grow_for_some_seconds() -> None:
    plan, rooms = Plan(), [Room(0, 1, 0), Room(1, 70, 16 * GIB), Room(2, 90, 16 * GIB), Room(3, 100, GIB)]
    rooms.append(Room(4, 100, 80 * GIB, takes_vgpus=False))  # it is drained
    assert after(plan, [reading(demand=50)], rooms, 3) == []
    [command] = after(plan, [reading(demand=50)], rooms, 1, 3)
    assert isinstance(command, Move)
    assert command.gpu == 2
    plan.refused(command, 6)
    assert [type(one) for one in after(plan, [reading(demand=50)], rooms, 20, 4)] == [Replica]
    assert plan.replicas == {"a": 1}


def test_one_that_may_not_move_needs_a_replica() -> None:
    rooms = [Room(0, 1, 0), Room(1, 90, 16 * GIB)]
    [command] = after(Plan(), [reading(demand=50, movable=False)], rooms, 4)
    assert isinstance(command, Replica)


def test_beyond_its_upper_bound_it_needs_a_replica_until_the_demand_falls() -> None:
    plan, rooms = Plan(), [Room(0, 40, 0), Room(1, 100, 80 * GIB)]
    [command] = after(plan, [reading(size=60, demand=80)], rooms, 10)
    assert command == Replica("a", 1, command.reason)
    assert "upper bound" in command.reason
    later = after(plan, [reading(size=60, demand=40)], rooms, 12, 10)
    assert [one for one in later if isinstance(one, Replica)] == [
        Replica("a", 0, "needs no further replica: its size suffices")
    ]


def test_a_refusal_is_followed_by_a_pause() -> None:
    plan = Plan()
    [command] = plan.step(0, [reading(demand=50)], [Room(0, 100, 0)])
    plan.refused(command, 0)
    assert after(plan, [reading(demand=50)], [Room(0, 100, 0)], 4, 1) == []
    assert len(after(plan, [reading(demand=50)], [Room(0, 100, 0)], 1, 5)) == 1


def test_a_vgpu_that_is_gone_is_forgotten() -> None:
    plan = Plan()
    after(plan, [reading(size=60, demand=80)], [Room(0, 0, 0)], 5)
    plan.keep(["b"])
    assert plan.replicas == {}


# --- all that any demands may do

LOADS = st.lists(st.lists(st.floats(0, 100), min_size=4, max_size=4), min_size=1, max_size=40)
CARD = 32 * GIB


class World:
    """Two GPUs. The vGPUs a, b and c have bounds, and ``fixed`` has not. All commands are carried out."""

    def __init__(self) -> None:
        known = reading(memory_range=(4 * GIB, 16 * GIB), size=20, memory_bytes=4 * GIB)
        self.vgpus = {name: replace(known, vgpu=name) for name in "abc"}
        self.vgpus["d"] = replace(known, vgpu="d", gpu=1)
        self.fixed = {0: (30.0, 8 * GIB), 1: (60.0, 8 * GIB)}

    def rooms(self) -> list[Room]:
        def left(gpu: int) -> Room:
            own = [vgpu for vgpu in self.vgpus.values() if vgpu.gpu == gpu]
            sm, memory = self.fixed[gpu]
            return Room(
                gpu, 100 - sm - sum(v.sm_percent for v in own), CARD - memory - sum(v.memory_bytes for v in own)
            )

        return [left(gpu) for gpu in self.fixed]

    def seen(self, demands: list[float]) -> list[Reading]:
        return [
            replace(
                vgpu,
                busy=min(demand, vgpu.sm_percent) / 100,
                throttled=float(demand > vgpu.sm_percent),
                memory_used_bytes=min(vgpu.memory_bytes, int(demand * 16 * GIB / 100)),
            )
            for vgpu, demand in zip(self.vgpus.values(), demands, strict=True)
        ]

    def carry_out(self, command: Command) -> None:
        vgpu = self.vgpus[command.vgpu]
        if isinstance(command, Resize):
            sm, memory = command.sm_percent, command.memory_bytes
            self.vgpus[command.vgpu] = replace(
                vgpu,
                sm_percent=vgpu.sm_percent if sm is None else sm,
                memory_bytes=vgpu.memory_bytes if memory is None else memory,
            )
        elif isinstance(command, Move):
            self.vgpus[command.vgpu] = replace(vgpu, gpu=command.gpu)
        for room in self.rooms():  # after each command, for the GPU Server admits each
            assert room.sm_percent > -0.001
            assert room.memory_bytes >= 0


@given(LOADS)
@settings(max_examples=200)
def test_bounds_guarantees_and_promises_hold_for_any_demand(loads: list[list[float]]) -> None:
    world, plan = World(), Plan()
    for at, demands in enumerate(loads):
        seen = world.seen(demands)
        for command in plan.step(at * READING_S, seen, world.rooms()):
            world.carry_out(command)
        for vgpu in world.vgpus.values():
            assert 20 <= vgpu.sm_percent <= 60
            assert 4 * GIB <= vgpu.memory_bytes <= 16 * GIB
        assert all(
            world.vgpus[one.vgpu].memory_bytes >= one.memory_used_bytes for one in seen
        )  # nothing in use is taken away


@given(st.lists(st.floats(0, 100), min_size=4, max_size=4))
@settings(max_examples=50)
def test_constant_demands_end_in_constant_sizes_and_places(demands: list[float]) -> None:
    world, plan = World(), Plan()
    changed_at = 0
    for at in range(300):
        for command in plan.step(at * READING_S, world.seen(demands), world.rooms()):
            world.carry_out(command)
            changed_at = at
    assert changed_at < 200
