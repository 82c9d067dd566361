"""What a hook notes of the GPU while somebody records: never otherwise, and as its books have it."""

from __future__ import annotations

from itertools import pairwise

from cython_ext.readings import GrantsFlag, SlotState, TraceKind, TraceReading
from tests.hook.queueing import Program
from tests.hook.stage import MS, Stage, StagedVgpu, eventually

RECORDED = GrantsFlag.CONTENDED | GrantsFlag.TRACED


def of(kind: TraceKind, noted: list[TraceReading]) -> list[TraceReading]:
    return [reading for reading in noted if reading.kind == kind]


def drains(vgpu: StagedVgpu, after: int) -> set[int]:
    """The leases that it noted as drained."""
    noted, _, _ = vgpu.activity.traced(vgpu.slot().index, after)
    return {reading.epoch for reading in of(TraceKind.DRAIN, noted)}


def test_nothing_while_nobody_records(stage: Stage, vgpu: StagedVgpu) -> None:
    program = Program(stage, vgpu)
    program.ask("beside launch 40")
    before = vgpu.slot().busy_ns
    with vgpu.granting(20 * MS):
        eventually(lambda: vgpu.slot().busy_ns > before + 10 * MS, "it works")
    assert vgpu.activity.traced(vgpu.slot().index) == ([], 0, 0)


def test_what_it_notes_are_its_leases_and_its_books(stage: Stage, vgpu: StagedVgpu) -> None:
    program = Program(stage, vgpu)
    vgpu.grants.flags = RECORDED
    before, launches = vgpu.slot().busy_ns, vgpu.slot().launches
    program.ask("beside launch 400")
    with vgpu.granting(20 * MS):
        eventually(lambda: vgpu.slot().launches == launches + 400, "all of it is launched")
        assert len(drains(vgpu, 0)) >= 3
        eventually(program.is_done, "all of it has run")
        eventually(lambda: not vgpu.slot().undrained, "the hook has seen that")
    noted, _, lost = vgpu.activity.traced(vgpu.slot().index, 0)
    assert lost == 0
    assert {reading.kind for reading in noted} <= set(TraceKind)
    busy = of(TraceKind.BUSY, noted)
    assert all(reading.begin_ns < reading.end_ns for reading in busy)
    assert all(a.end_ns <= b.begin_ns for a, b in pairwise(busy))
    assert sum(reading.end_ns - reading.begin_ns for reading in busy) == vgpu.slot().busy_ns - before
    assert all(reading.window_ns <= 12 * MS for reading in of(TraceKind.DRAIN, noted))
    for launch in of(TraceKind.LAUNCH, noted):
        assert launch.end_ns - launch.begin_ns == launch.lasted_ns > 0
        assert not launch.is_graph


def test_alone_on_an_open_lease_it_tells_of_long_work_in_parts(stage: Stage, vgpu: StagedVgpu) -> None:
    program = Program(stage, vgpu)
    vgpu.grants.flags = RECORDED
    vgpu.open()
    program.ask("beside launch 400")

    def parts() -> list[TraceReading]:
        return of(TraceKind.BUSY, vgpu.activity.traced(vgpu.slot().index, 0)[0])

    eventually(lambda: len(parts()) >= 3, "it tells what it knows before all has run")
    assert all(a.end_ns <= b.begin_ns for a, b in pairwise(parts()))


def test_in_a_new_activity_page_it_goes_on(stage: Stage, vgpu: StagedVgpu) -> None:
    program = Program(stage, vgpu)
    vgpu.lose_everything()
    vgpu.grants.flags = RECORDED
    vgpu.grants.window_ns = 12 * MS
    eventually(lambda: len(vgpu.slots()) == 1 and vgpu.slot().state == SlotState.ACTIVE, "it is in the new page")
    program.ask("beside launch 40")
    with vgpu.granting(20 * MS):
        eventually(lambda: bool(drains(vgpu, 0)), "a lease is over")
