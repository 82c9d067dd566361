"""The relay, with a dispatcher at its other end: what processes do to their slots is what the scheduler hears."""

from __future__ import annotations

import mmap
import time
from threading import Event as Flag
from threading import Thread

import pytest

from cython_ext.dispatch.dispatcher import Dispatcher
from cython_ext.pages.page import PageError
from cython_ext.pages.relaypage import RelayPage
from cython_ext.readings import EventKind
from cython_ext.relay.relay import Relay
from cython_ext.testing.fake_peer import Process
from tests.native.stage import KEY, MS, Listener, Stage, eventually, grants

RING_BURST, RING_REFILL_NS = 256, MS // 2  # cython_ext/relay/relay.pyx
RETURNED_EPOCH = slice(36, 40)  # of an activity page: cython_ext/pages/layout.pxd


def test_a_want_arrives_and_the_lease_is_seen_by_the_process(stage: Stage) -> None:
    process, _ = stage.process()
    assert process.usable() == 0
    process.want()
    stage.listener.wait(EventKind.WANTS, KEY)
    stage.lease(1)
    assert process.wait_lease()[0] == 1
    entry = stage.relays.entry(KEY)
    assert (entry.want, entry.processes) == (True, 1)


def test_an_idle_process_returns_its_lease(stage: Stage) -> None:
    process, _ = stage.process()
    process.want()
    stage.listener.wait(EventKind.WANTS, KEY)
    stage.lease(1)
    assert process.wait_lease()[0] == 1
    process.submit(1)
    process.idle()
    drained = stage.listener.wait(EventKind.DRAINED, KEY, 1)
    assert not drained.wants
    assert process.usable() == 0
    assert stage.activity.returned_epoch == 1
    process.want()
    stage.listener.wait(EventKind.WANTS, KEY)
    stage.lease(2)
    assert process.wait_lease()[0] == 2


def test_the_first_work_under_the_newest_lease_is_told(stage: Stage) -> None:
    first, _ = stage.process()
    second, _ = stage.process()
    first.submit(4)
    second.submit(7)
    between_ns = time.monotonic_ns()
    first.submit(7)
    first.want()
    stage.listener.wait(EventKind.WANTS, KEY)
    eventually(lambda: stage.relays.entry(KEY).submitted_epoch == 7)
    entry = stage.relays.entry(KEY)
    assert 0 < entry.submitted_ns < between_ns


def test_a_vgpu_is_idle_only_when_its_last_process_is(stage: Stage) -> None:
    first, _ = stage.process()
    second, _ = stage.process()
    first.want()
    second.want()
    stage.listener.wait(EventKind.WANTS, KEY)
    stage.lease(1)
    first.wait_lease()
    first.submit(1)
    second.submit(1)
    first.idle()
    eventually(lambda: stage.relay.stats().wakes >= 3)
    assert stage.relays.entry(KEY).want
    assert stage.dispatcher.outstanding(KEY) == [(1, True)]
    second.idle()
    assert not stage.listener.wait(EventKind.DRAINED, KEY, 1).wants


def test_a_lease_has_drained_when_its_slowest_process_has(stage: Stage) -> None:
    quick, _ = stage.process()
    slow, _ = stage.process()
    quick.want()
    slow.want()
    stage.listener.wait(EventKind.WANTS, KEY)
    stage.lease(1)
    quick.wait_lease()
    quick.submit(1)
    slow.submit(1)
    stage.dispatcher.withdraw(KEY, 1)  # it went, so it ends now
    quick.drain(1, busy_ns=1000)
    eventually(lambda: stage.relays.entry(KEY).busy_ns == 1000)
    assert stage.dispatcher.outstanding(KEY) == [(1, True)]
    slow.drain(1, busy_ns=500)
    drained = stage.listener.wait(EventKind.DRAINED, KEY, 1)
    assert drained.wants
    assert stage.relays.entry(KEY).busy_ns == 1500


def test_busy_time_is_bounded_by_the_clock_whatever_a_process_writes(stage: Stage) -> None:
    """Else the sum would stand at its end, and the limits of this vGPU and of the next under its key would not bind."""
    began_ns = time.monotonic_ns()
    liar, _ = stage.process()
    liar.want()
    stage.listener.wait(EventKind.WANTS, KEY)
    stage.lease(1)
    liar.wait_lease()
    liar.submit(1)
    stage.dispatcher.withdraw(KEY, 1)
    liar.drain(1, busy_ns=2**64 - 1)
    stage.listener.wait(EventKind.DRAINED, KEY, 1)
    before_ns = stage.relays.entry(KEY).busy_ns
    assert before_ns <= time.monotonic_ns() - began_ns
    honest, _ = stage.process()
    time.sleep(0.01)
    honest.drain(1, busy_ns=2 * MS)
    eventually(lambda: stage.relays.entry(KEY).busy_ns >= before_ns + 2 * MS)


def in_force(stage: Stage, process: Process, length_ns: int) -> None:
    process.want()
    stage.listener.wait(EventKind.WANTS, KEY)
    stage.lease(1)
    assert process.wait_lease()[0] == 1
    process.submit(1)
    stage.dispatcher.publish(KEY, 1, 0, time.monotonic_ns() + length_ns)


def test_a_lease_has_not_drained_while_a_process_works_that_has_drained_none_yet(stage: Stage) -> None:
    newcomer, _ = stage.process()
    other, _ = stage.process()
    newcomer.want()
    other.want()
    stage.listener.wait(EventKind.WANTS, KEY)
    stage.lease(5)
    assert other.wait_lease()[0] == 5
    newcomer.submit(5)
    other.submit(5)
    stage.dispatcher.withdraw(KEY, 5)
    other.drain(5)
    stage.lease(6)
    assert other.wait_lease()[0] == 6
    other.submit(6)
    stage.dispatcher.withdraw(KEY, 6)
    wakes = stage.relay.stats().wakes
    other.ring()
    eventually(lambda: stage.relay.stats().wakes > wakes)
    assert stage.relays.entry(KEY).drained_epoch == 0
    assert stage.dispatcher.outstanding(KEY) == [(5, True), (6, True)]
    newcomer.drain(6)
    other.drain(6)
    stage.listener.wait(EventKind.DRAINED, KEY, 6)


@pytest.mark.parametrize("siblings", [0, 1])
def test_a_lease_at_its_tail_is_told_if_no_other_process_can_use_it(stage: Stage, siblings: int) -> None:
    process, _ = stage.process()
    for _ in range(siblings):
        stage.process()
    in_force(stage, process, MS // 2)
    wakes = stage.relay.stats().wakes
    process.close(1)
    eventually(lambda: stage.relays.entry(KEY).tail_epoch == 1 if siblings == 0 else stage.relay.stats().wakes > wakes)
    process.drain(1)
    stage.listener.wait(EventKind.DRAINED, KEY, 1)
    assert stage.relays.entry(KEY).tail_epoch == (0 if siblings else 1)


def test_a_lease_far_from_its_end_is_not_at_its_tail_but_who_has_closed_and_drained_it_is_done(stage: Stage) -> None:
    process, _ = stage.process()
    in_force(stage, process, 60_000 * MS)
    wakes = stage.relay.stats().wakes
    process.close(1)
    eventually(lambda: stage.relay.stats().wakes > wakes)
    assert stage.relays.entry(KEY).tail_epoch == 0
    assert stage.dispatcher.outstanding(KEY) == [(1, True)]
    process.drain(1)
    assert stage.listener.wait(EventKind.DRAINED, KEY, 1).wants, "its end was moved away while it was at its tail"


def test_a_lease_is_not_drained_before_its_end_because_nothing_runs_just_now(stage: Stage) -> None:
    process, _ = stage.process()
    process.want()
    stage.listener.wait(EventKind.WANTS, KEY)
    stage.lease(1)
    process.wait_lease()
    process.submit(1)
    process.drain(0)  # finished for the moment, still wanting
    wakes = stage.relay.stats().wakes
    process.ring()
    eventually(lambda: stage.relay.stats().wakes > wakes)
    assert stage.dispatcher.outstanding(KEY) == [(1, True)]


def test_an_extended_lease_is_in_force_again(stage: Stage) -> None:
    process, _ = stage.process()
    process.want()
    stage.listener.wait(EventKind.WANTS, KEY)
    stage.lease(1)
    process.submit(1)
    stage.dispatcher.publish(KEY, 1, 0, time.monotonic_ns() + MS)
    eventually(lambda: time.monotonic_ns() > (stage.grants.plan().current.end_ns or 0))  # type: ignore[union-attr]
    process.ring()
    stage.dispatcher.publish(KEY, 1, 0, None)
    process.drain(0)
    wakes = stage.relay.stats().wakes
    process.ring()
    eventually(lambda: stage.relay.stats().wakes > wakes)
    assert stage.dispatcher.outstanding(KEY) == [(1, True)]


def test_a_process_that_slept_through_its_lease_wants_no_more_until_it_wakes(stage: Stage) -> None:
    """Stopped in its gate: it rings no bell, neither when the lease begins nor when it is over."""
    process, slot = stage.process()
    process.want()
    stage.listener.wait(EventKind.WANTS, KEY)
    eventually(lambda: stage.relays.entry(KEY).want)
    stage.lease(1, length_ns=10 * MS)
    drained = stage.listener.wait(EventKind.DRAINED, KEY, 1)
    assert not drained.wants
    assert not stage.activity.read_slot(slot).want
    assert stage.relay.stats().hushed == 1
    process.want()
    stage.listener.wait(EventKind.WANTS, KEY)
    stage.lease(2)
    assert process.wait_lease()[0] == 2


def test_a_process_that_was_awake_but_missed_its_lease_still_wants(stage: Stage) -> None:
    process, _ = stage.process()
    process.want()
    stage.listener.wait(EventKind.WANTS, KEY)
    wakes = stage.relay.stats().wakes
    process.ring()  # the relay has noted what it has counted before the lease
    eventually(lambda: stage.relay.stats().wakes > wakes)
    stage.lease(1)
    process.look()
    time.sleep(0.01)  # shorter ones nobody is blamed for missing
    stage.dispatcher.withdraw(KEY, 1)
    assert stage.listener.wait(EventKind.DRAINED, KEY, 1).wants
    assert stage.relay.stats().hushed == 0


@pytest.mark.parametrize(("turn", "expected"), [(0, 0), (1, 2), (2, 2), (3, 3)])
def test_what_was_queued_ahead_is_released_for_a_process_that_is_held_up(
    stage: Stage, turn: int, expected: int
) -> None:
    """``turn``: 0 where nothing was queued, 1 where it waits for the lease, later where it waits for another."""
    process, slot = stage.process()
    process.want()
    stage.listener.wait(EventKind.WANTS, KEY)
    process.queue_ahead(turn)
    stage.lease(2, 60_000 * MS)
    assert process.wait_lease()[0] == 2
    wakes = stage.relay.stats().wakes
    eventually(lambda: stage.activity.slots()[slot].turn == expected and stage.relay.stats().wakes > wakes + 3)
    stage.dispatcher.withdraw(KEY, 2)
    stage.listener.wait(EventKind.DRAINED, KEY, 2)
    assert stage.activity.slots()[slot].turn == expected


def test_who_sleeps_beside_a_working_sibling_keeps_no_lease(stage: Stage) -> None:
    worker, _ = stage.process()
    sleeper, slot = stage.process()
    sleeper.want()
    worker.want()
    stage.listener.wait(EventKind.WANTS, KEY)
    stage.lease(1)
    worker.wait_lease()
    worker.submit(1)
    time.sleep(0.01)  # shorter ones nobody is blamed for missing
    stage.dispatcher.withdraw(KEY, 1)
    worker.drain(1)
    assert stage.listener.wait(EventKind.DRAINED, KEY, 1).wants
    assert not stage.activity.read_slot(slot).want
    stage.lease(2)
    worker.wait_lease()
    worker.submit(2)
    worker.idle()
    assert not stage.listener.wait(EventKind.DRAINED, KEY, 2).wants


def test_a_process_cannot_claim_more_than_the_plan_allows(stage: Stage) -> None:
    process, slot = stage.process()
    process.want()
    stage.listener.wait(EventKind.WANTS, KEY)
    stage.lease(7)
    process.wait_lease()
    process.submit(7)
    process.drain(0x7FFFFFFF)
    process.submit(7)
    wakes = stage.relay.stats().wakes
    process.ring()
    eventually(lambda: stage.relay.stats().wakes > wakes)
    entry = stage.relays.entry(KEY)
    assert entry.drained_epoch == 0
    assert stage.dispatcher.outstanding(KEY) == [(7, True)]
    assert stage.activity.read_slot(slot).drained_epoch == 0x7FFFFFFF


def test_leases_across_the_end_of_the_epoch_circle(stage: Stage) -> None:
    process, _ = stage.process()
    process.want()
    stage.listener.wait(EventKind.WANTS, KEY)
    for epoch in (2**32 - 2, 2**32 - 1, 1, 2):
        stage.lease(epoch)
        assert process.wait_lease()[0] == epoch
        process.submit(epoch)
        stage.dispatcher.withdraw(KEY, epoch)
        process.drain(epoch)
        assert stage.listener.wait(EventKind.DRAINED, KEY, epoch).wants


@pytest.mark.parametrize("epoch", [2**31, 2**31 + 6, 2**31 + 2**30, 2**32 - 2**21])
def test_a_lease_of_who_was_idle_for_half_a_circle_of_epochs_drains_when_its_work_has(stage: Stage, epoch: int) -> None:
    process, slot = stage.process()
    sibling, other = stage.process()
    sibling.drain(5)
    process.drain(5)
    process.want()
    stage.listener.wait(EventKind.WANTS, KEY)
    now_ns = time.monotonic_ns()
    assert stage.dispatcher.publish(KEY, epoch, now_ns, None)
    assert process.wait_lease()[0] == epoch
    process.submit(epoch)
    stage.dispatcher.withdraw(KEY, epoch)
    wakes = stage.relay.stats().wakes
    process.ring()
    eventually(lambda: stage.relay.stats().wakes > wakes)
    assert stage.relays.entry(KEY).drained_epoch != epoch
    assert stage.dispatcher.outstanding(KEY) == [(epoch, True)]
    process.drain(epoch)
    assert stage.listener.wait(EventKind.DRAINED, KEY, epoch).wants
    assert [stage.activity.read_slot(index).drained_epoch for index in (slot, other)] == [epoch, 5]


def test_a_return_is_forgotten_before_it_is_taken_for_a_new_one(stage: Stage) -> None:
    process, _ = stage.process()
    process.want()
    stage.listener.wait(EventKind.WANTS, KEY)
    stage.lease(3)
    process.wait_lease()
    process.idle()
    stage.listener.wait(EventKind.DRAINED, KEY, 3)
    eventually(lambda: stage.activity.returned_epoch == 0)


def test_either_the_process_or_the_relay_notices_when_both_change_their_mind(stage: Stage) -> None:
    """Dekker: a process that wakes while its lease is given back either keeps the lease or is known to want another."""
    process, _ = stage.process()
    done = Flag()

    def schedule() -> None:
        epoch = 0
        while not done.is_set():
            for event in stage.dispatcher.events():
                if event.kind is EventKind.WANTS or (event.kind is EventKind.DRAINED and event.wants):
                    epoch += 1
                    stage.lease(epoch)

    scheduler = Thread(target=schedule)
    scheduler.start()
    try:
        for step in range(3000):
            process.want()
            epoch, _ = process.wait_lease(20_000 * MS)
            assert epoch, f"step {step}: nobody noticed the want"
            process.submit(epoch)
            process.idle()
            process.work((step * 37) % 60 * 1000)  # wake again 0 … 60 µs later, while the return is under way
    finally:
        done.set()
        scheduler.join()
    assert stage.relay.stats().returns > 0


def test_a_storm_of_doorbells_is_slowed_down(stage: Stage) -> None:
    """A relay that hardly gets to run, on a machine that is busy, needs no slowing down."""
    process, _ = stage.process()
    before, began_ns = stage.relay.stats(), time.monotonic_ns()
    stats = before
    while not stats.throttled and time.monotonic_ns() < began_ns + 3000 * MS:
        for _ in range(1000):
            process.ring()
        stats = stage.relay.stats()
    process.ring()
    time.sleep(0.2)
    stats = stage.relay.stats()
    most = RING_BURST + (time.monotonic_ns() - began_ns) / RING_REFILL_NS
    assert stats.wakes - before.wakes <= most + 2
    assert stats.throttled or stats.wakes - before.wakes < most / 2
    process.want()
    stage.listener.wait(EventKind.WANTS, KEY)


def test_scribbles_over_the_whole_page_stay_inside_the_vgpu(stage: Stage) -> None:
    process, slot = stage.process()
    process.want()
    stage.listener.wait(EventKind.WANTS, KEY)
    stage.lease(1)
    for byte in (b"\xff", b"\x80", b"\x00", b"\x7f"):
        with mmap.mmap(stage.activity.fileno(), 0) as raw:
            raw[64:] = byte * (len(raw) - 64)
        stage.activity.ring()
        wakes = stage.relay.stats().wakes
        stage.activity.ring()
        eventually(lambda seen=wakes: stage.relay.stats().wakes > seen)  # type: ignore[misc]
    for event in [*stage.listener.heard, *stage.dispatcher.events()]:
        assert event.idle_ns >= 0
        assert event.longest_kernel_ns >= 0
        assert event.at_ns <= time.monotonic_ns()
    stage.relay.mark_dead(slot)


def test_a_new_server_is_told_everything(stage: Stage) -> None:
    process, _ = stage.process()
    process.want()
    stage.listener.wait(EventKind.WANTS, KEY)
    with grants(generation=2) as page, RelayPage.create() as relays, Dispatcher(relays) as dispatcher:
        dispatcher.add(9, page)
        stage.relay.rebind(page, relays, 9)
        listener = Listener(dispatcher)
        listener.wait(EventKind.WANTS, 9)
        now_ns = time.monotonic_ns()
        dispatcher.publish(9, 40, now_ns, None)
        process = Process(stage.activity, page, 0)
        assert process.wait_lease()[0] == 40
        process.idle()
        assert not listener.wait(EventKind.DRAINED, 9, 40).wants
        stage.relay.close()
        del process


def test_the_next_relay_gives_nothing_back_that_is_in_use(stage: Stage) -> None:
    """Its first look sees who was admitted before it, or it would say that nobody wants the lease."""
    first, one = stage.process()
    second, other = stage.process()
    second.want()
    stage.listener.wait(EventKind.WANTS, KEY)
    stage.lease(1)
    second.wait_lease()
    second.submit(1)
    stage.relay.close()
    with Relay(stage.activity, stage.grants, stage.relays, KEY, [one, other]) as successor:
        eventually(lambda: successor.stats().wakes > 0)
        eventually(lambda: stage.relays.entry(KEY).processes == 2)
        assert successor.stats().returns == 0
        assert stage.activity.returned_epoch == 0
        assert stage.relays.entry(KEY).want
        second.idle()
        assert not stage.listener.wait(EventKind.DRAINED, KEY, 1).wants
    del first


def test_a_return_that_a_killed_relay_told_nobody_of_is_taken_back(stage: Stage) -> None:
    """It stores the returned epoch, looks once more at the wants, then tells: killed in between, the server knows of no
    return, the lease has no end, and no gate uses it."""
    process, slot = stage.process()
    process.want()
    stage.listener.wait(EventKind.WANTS, KEY)
    stage.lease(1)
    assert process.wait_lease()[0] == 1
    stage.relay.close()
    with mmap.mmap(stage.activity.fileno(), 0) as raw:
        raw[RETURNED_EPOCH] = (1).to_bytes(4, "little")
    assert (process.usable(), stage.activity.returned_epoch) == (0, 1)
    with Relay(stage.activity, stage.grants, stage.relays, KEY, [slot]):
        assert process.wait_lease()[0] == 1
        assert stage.activity.returned_epoch == 0
        process.idle()
        assert not stage.listener.wait(EventKind.DRAINED, KEY, 1).wants


def test_a_want_is_told_again_to_a_server_that_has_begun_a_new_entry(stage: Stage) -> None:
    """A GPU's mode changes: its vGPUs are removed and added. Who attached and wanted just then is not forgotten."""
    process, _ = stage.process()
    process.want()
    stage.listener.wait(EventKind.WANTS, KEY)
    stage.dispatcher.remove(KEY)
    stage.dispatcher.add(KEY, stage.grants)
    stage.listener.wait(EventKind.WANTS, KEY)
    stage.lease(1)
    assert process.wait_lease()[0] == 1


def test_pages_in_use_are_not_closed(stage: Stage) -> None:
    with pytest.raises(PageError, match="in use"):
        stage.activity.close()
    stage.relay.close()
    stage.relay.close()
    assert stage.relay.closed
    stage.activity.close()
    with pytest.raises(RuntimeError, match="closed"):
        stage.relay.watch(0)


@pytest.mark.parametrize("slot", [-1, 64])
def test_slots_have_bounds(stage: Stage, slot: int) -> None:
    with pytest.raises(IndexError):
        stage.relay.watch(slot)
    with pytest.raises(IndexError):
        Relay(stage.activity, stage.grants, stage.relays, KEY, [slot])
    with pytest.raises(IndexError):
        Relay(stage.activity, stage.grants, stage.relays, 256)
