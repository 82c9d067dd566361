"""The last moments of a lease: it is closed near its end, and who waits for it goes at its tail."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from cython_ext.readings import EventKind
from tests.hook.queueing import Program
from tests.hook.stage import MS, PATIENCE_S, Stage, StagedVgpu, eventually

LEASE_NS = 20 * MS


@pytest.mark.parametrize("make", [Stage.vgpu, Stage.spatial_vgpu])
def test_who_waits_goes_at_the_tail_of_the_lease_before_and_that_takes_no_more_work(
    stage: Stage, make: Callable[[Stage], StagedVgpu]
) -> None:
    """Kernels of 0.5 ms, lease after lease. A busy machine may miss a tail, and then GO comes after the drain as ever:
    so not each lease is looked at for that, but some have to show it."""
    vgpu, waiting = make(stage), make(stage)
    program = Program(stage, vgpu)
    program.ask("beside launch 200000")
    at_its_tail = 0
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        vgpu.await_want()
        now = time.monotonic_ns()
        epoch = vgpu.lease(now, now + LEASE_NS)
        following = waiting.lease(now + LEASE_NS, now + 10_000 * MS, after=((vgpu.key, epoch),))
        went = drained = None
        for event in stage.events(EventKind.WENT, EventKind.DRAINED):
            if (event.kind, event.epoch) == (EventKind.WENT, following):
                went = event
            elif (event.kind, event.epoch) == (EventKind.DRAINED, epoch):
                drained = event
            if went and drained:
                break
        assert went
        assert drained
        stage.dispatcher.withdraw(waiting.key, following)
        slot = vgpu.slot()
        assert slot.last_epoch <= epoch, "what was launched since waits for the next lease"
        if slot.last_epoch != epoch:
            continue  # slept through
        if slot.tail_epoch == epoch and went.at_ns < drained.at_ns:
            at_its_tail += 1
            assert drained.at_ns - went.at_ns < LEASE_NS
        if at_its_tail == 3:
            return
    raise AssertionError("no three leases were seen at their tails")


@pytest.mark.parametrize("before_ns", [MS // 4, 0], ids=["near its end", "at its end"])
@pytest.mark.parametrize("forever", [False, True], ids=["in an hour", "never"])
def test_a_lease_whose_end_moves_away_after_it_was_closed_is_given_back(
    stage: Stage, forever: bool, before_ns: int
) -> None:
    """What it might still be used for nobody knows; it must not stay in force with nobody using it."""
    vgpu = stage.vgpu()
    program = Program(stage, vgpu)
    program.ask("beside launch 200000")
    given_back = 0
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        vgpu.await_want()
        end = time.monotonic_ns() + LEASE_NS
        epoch = vgpu.lease(end - LEASE_NS, end)
        time.sleep(max(0.0, (end - before_ns - time.monotonic_ns()) / 1e9))
        moved = None if forever else end + 3_600_000 * MS
        if not stage.dispatcher.publish(vgpu.key, epoch, time.monotonic_ns(), moved):
            continue  # it had drained already, and that was known
        launches = vgpu.slot().launches

        def over_or_used(epoch: int = epoch, launches: int = launches) -> bool:
            return not stage.dispatcher.outstanding(vgpu.key) or vgpu.slot().launches > launches + 60

        eventually(over_or_used, "it is given back, or it was not closed yet and is used")
        if not stage.dispatcher.outstanding(vgpu.key):
            eventually(lambda: vgpu.slot().want, "it wants the next lease")
            given_back += 1
        else:
            vgpu.end(epoch, time.monotonic_ns())
            eventually(lambda: not stage.dispatcher.outstanding(vgpu.key), "it is over")
        if given_back == 2:
            return
    raise AssertionError("no two leases were closed at that moment")
