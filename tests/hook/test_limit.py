"""A limit under a lease without an end: what the hook lets through is what the server has allowed."""

from __future__ import annotations

from tests.hook.programs import Endless
from tests.hook.stage import MS, Stage, StagedVgpu, eventually

KERNEL_NS = MS // 2
SLACK_NS = 4 * KERNEL_NS
"""The launch that uses up the rest, one that the driver had already, and what the meter is off."""


def used_ns(vgpu: StagedVgpu) -> int:
    return sum(slot.busy_ns for slot in vgpu.slots())


def allow(vgpu: StagedVgpu, more_ns: int) -> int:
    """From now on; what the sum may come to."""
    vgpu.stage.dispatcher.allow(vgpu.key, 0, more_ns)
    return vgpu.grants.allowed_ns


def held(stage: Stage, vgpu: StagedVgpu, more_ns: int = 200 * MS) -> Endless:
    """A program whose kernel is known, and that has used up what it was allowed. Before its first kernels have run
    nobody knows how long they take: it may have queued too many, and owes that."""
    allow(vgpu, more_ns)
    vgpu.open()
    program = Endless(stage, vgpu)
    eventually(lambda: used_ns(vgpu) >= vgpu.grants.allowed_ns - SLACK_NS, "all that is allowed is used")
    eventually(program.is_held, "it is held")
    return program


def test_what_is_allowed_is_used_and_no_more(stage: Stage) -> None:
    vgpu = stage.vgpu()
    program = held(stage, vgpu)
    for more_ms in (30, 50, 100):
        before = used_ns(vgpu)
        allowed_ns = allow(vgpu, more_ms * MS)
        eventually(lambda: used_ns(vgpu) >= allowed_ns - SLACK_NS, f"{more_ms} ms more are used")  # noqa: B023
        assert program.is_held()
        assert used_ns(vgpu) <= max(before, allowed_ns) + SLACK_NS
    allow_all(vgpu)
    program.await_more()
    assert not program.is_held()


def allow_all(vgpu: StagedVgpu) -> None:
    vgpu.stage.dispatcher.allow(vgpu.key, 0, None)


def test_a_limit_that_comes_holds_threads_on_the_fast_path(stage: Stage) -> None:
    vgpu = stage.vgpu()
    vgpu.open()
    program = Endless(stage, vgpu)
    program.await_more()
    allow(vgpu, 20 * MS)
    eventually(program.is_held, "it is held")
    allow(vgpu, 1 << 50)
    program.await_more()


def test_two_processes_share_it(stage: Stage) -> None:
    vgpu = stage.vgpu()
    programs = [held(stage, vgpu), held(stage, vgpu)]
    before = [program.ask()[0] for program in programs]

    def both_have_launched() -> bool:
        """The two use 100 ms more. A process without a CPU may leave all of it to the other one."""
        allowed_ns = allow(vgpu, 100 * MS)
        eventually(lambda: used_ns(vgpu) >= allowed_ns - SLACK_NS, "both together use 100 ms")
        for program in programs:  # a process knows the other one's use from its last report
            eventually(program.is_held, "the limit holds it")
        return all(program.ask()[0] > launched for program, launched in zip(programs, before, strict=True))

    eventually(both_have_launched, "both processes have launched kernels")


def test_what_a_process_that_has_ended_used_stays_used(stage: Stage) -> None:
    vgpu = stage.vgpu()
    first = held(stage, vgpu)
    first.process.kill()
    first.process.wait()
    eventually(lambda: bool(vgpu.relay.deaths()), "its death is seen")
    second = Endless(stage, vgpu)
    assert second.is_held()
    assert second.ask()[0] * KERNEL_NS <= SLACK_NS
