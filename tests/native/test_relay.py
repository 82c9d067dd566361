"""The relay, with a dispatcher at its other end: what processes do to their slots is what the scheduler hears."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from threading import Event as Flag
from threading import Thread

import pytest

from cython_ext.dispatcher import Dispatcher
from cython_ext.page import PageError
from cython_ext.pages import ActivityPage, GrantsPage, RelayPage
from cython_ext.readings import EventKind, SlotState
from cython_ext.rehearsal import Process
from cython_ext.relay import Relay
from tests.native.stage import MS, Listener, eventually, grants, readable

KEY = 5


@dataclass
class Stage:
    """One vGPU: its pages, its relay, and the dispatcher that hears it."""

    grants: GrantsPage
    activity: ActivityPage
    relays: RelayPage
    dispatcher: Dispatcher
    relay: Relay
    listener: Listener

    def process(self) -> tuple[Process, int]:
        """A process that lives inside this one, so nobody watches over its mutex."""
        slot = self.activity.reserve_slot(os.getpid(), 1)
        process = Process(self.activity, self.grants, slot)
        self.relay.watch(slot)
        process.pretend_active()
        return process, slot

    def lease(self, epoch: int, length_ns: int | None = None) -> None:
        now_ns = time.monotonic_ns()
        assert self.dispatcher.publish(KEY, epoch, now_ns, None if length_ns is None else now_ns + length_ns)


@pytest.fixture
def stage() -> Iterator[Stage]:
    with (
        grants() as page,
        ActivityPage.create(generation=1) as activity,
        RelayPage.create() as relays,
        Dispatcher(relays) as dispatcher,
        Relay(activity, page, relays, KEY) as relay,
    ):
        dispatcher.add(KEY, page)
        yield Stage(page, activity, relays, dispatcher, relay, Listener(dispatcher))


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
    stage.lease(1, length_ns=MS)
    process.submit(1)
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
    stage.lease(1, length_ns=10 * MS)
    process.look()
    assert stage.listener.wait(EventKind.DRAINED, KEY, 1).wants
    assert stage.relay.stats().hushed == 0


def test_who_sleeps_beside_a_working_sibling_keeps_no_lease(stage: Stage) -> None:
    worker, _ = stage.process()
    sleeper, slot = stage.process()
    sleeper.want()
    worker.want()
    stage.listener.wait(EventKind.WANTS, KEY)
    stage.lease(1, length_ns=10 * MS)
    worker.wait_lease()
    worker.submit(1)
    ends_ns = stage.grants.plan().current.end_ns
    eventually(lambda: time.monotonic_ns() > ends_ns)
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


CHILD = """
import sys
from cython_ext.pages import ActivityPage, GrantsPage
from cython_ext.rehearsal import Process
activity, grants, slot = (int(word) for word in sys.argv[1:4])
process = Process(ActivityPage.map(activity), GrantsPage.map_readonly(grants), slot)
process.activate()
process.want()
print("wants", flush=True)
epoch, _ = process.wait_lease()
process.submit(epoch)
process.ring()
print("works", flush=True)
sys.stdin.readline()
process.release()
"""


class Child:
    """A real process in a slot of the stage."""

    def __init__(self, stage: Stage) -> None:
        self.slot = stage.activity.reserve_slot(1, 1)
        stage.relay.watch(self.slot)
        descriptors = (stage.activity.fileno(), stage.grants.fileno())
        self.popen = subprocess.Popen(
            [sys.executable, "-c", CHILD, *map(str, descriptors), str(self.slot)],
            pass_fds=descriptors,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def says(self, what: bytes) -> None:
        assert self.popen.stdout
        assert self.popen.stdout.readline().strip() == what

    def close(self) -> None:
        self.popen.kill()
        self.popen.communicate()


@pytest.fixture
def child(stage: Stage) -> Iterator[Child]:
    started = Child(stage)
    try:
        yield started
    finally:
        started.close()


def working(stage: Stage, child: Child, epoch: int = 1) -> None:
    child.says(b"wants")
    stage.listener.wait(EventKind.WANTS, KEY)
    stage.lease(epoch)
    child.says(b"works")


def test_a_killed_process_gives_its_lease_back(stage: Stage, child: Child) -> None:
    working(stage, child)
    child.popen.kill()
    assert not stage.listener.wait(EventKind.DRAINED, KEY, 1).wants
    readable(stage.relay.fileno())
    (death,) = stage.relay.deaths()
    assert (death.slot, death.clean) == (child.slot, False)
    reading = stage.activity.read_slot(child.slot)
    assert (reading.state, reading.want, reading.undrained) == (SlotState.DEAD, False, False)
    assert stage.relay.deaths() == []
    assert stage.activity.reap_slot(child.slot) == 0


def test_a_death_does_not_end_the_lease_of_a_sibling(stage: Stage, child: Child) -> None:
    working(stage, child)
    sibling, _ = stage.process()
    sibling.want()
    sibling.submit(1)
    child.popen.kill()
    readable(stage.relay.fileno())
    assert [death.slot for death in stage.relay.deaths()] == [child.slot]
    eventually(lambda: stage.relays.entry(KEY).processes == 1)
    assert stage.dispatcher.outstanding(KEY) == [(1, True)]


def test_a_process_that_leaves_cleanly_is_told_apart(stage: Stage, child: Child) -> None:
    working(stage, child)
    assert child.popen.stdin
    child.popen.stdin.write(b"\n")
    child.popen.stdin.flush()
    readable(stage.relay.fileno())
    (death,) = stage.relay.deaths()
    assert (death.slot, death.clean) == (child.slot, True)
    child.popen.wait()


def test_a_stopped_process_does_not_look_dead(stage: Stage, child: Child) -> None:
    working(stage, child)
    child.popen.send_signal(19)
    sibling, slot = stage.process()
    sibling.want()
    eventually(lambda: stage.relays.entry(KEY).processes == 2)
    assert stage.relay.deaths() == []
    assert stage.activity.read_slot(child.slot).state is SlotState.ACTIVE
    assert slot != child.slot


def test_a_new_broker_watches_those_who_lived_through_the_change(stage: Stage, child: Child) -> None:
    working(stage, child)
    stage.relay.close()
    with Relay(stage.activity, stage.grants, stage.relays, KEY) as successor:
        successor.watch(child.slot)
        eventually(lambda: stage.relays.entry(KEY).processes == 1)
        assert stage.dispatcher.outstanding(KEY) == [(1, True)]
        child.popen.kill()
        readable(successor.fileno())
        assert [death.slot for death in successor.deaths()] == [child.slot]
        assert not stage.listener.wait(EventKind.DRAINED, KEY, 1).wants


def test_a_new_broker_hears_of_a_death_that_nobody_saw(stage: Stage, child: Child) -> None:
    working(stage, child)
    stage.relay.close()
    child.close()
    with Relay(stage.activity, stage.grants, stage.relays, KEY) as successor:
        successor.watch(child.slot)
        readable(successor.fileno())
        assert [death.slot for death in successor.deaths()] == [child.slot]


def test_an_immortal_mutex_hurts_its_slot_only(stage: Stage, child: Child) -> None:
    working(stage, child)
    forged, slot = stage.process()
    forged.want()
    forged.submit(1)
    with mmap.mmap(stage.activity.fileno(), 0) as raw:
        start = raw.find(os.getpid().to_bytes(4, "little"), 192 + 512 * slot) + 12  # the word behind pid and start_time
        raw[start : start + 4] = (0x3FFFFFFE).to_bytes(4, "little")
        forged.ring()
        child.popen.kill()
        readable(stage.relay.fileno())
        assert [death.slot for death in stage.relay.deaths()] == [child.slot]
        assert stage.dispatcher.outstanding(KEY) == [(1, True)]
        stage.relay.mark_dead(slot)  # the broker's pidfd knows better
        stage.listener.wait(EventKind.DRAINED, KEY, 1)
        assert stage.relay.deaths() == []
        assert stage.activity.read_slot(slot).state is SlotState.DEAD


def test_a_slot_is_watched_anew_for_its_next_process(stage: Stage, child: Child) -> None:
    working(stage, child)
    child.close()
    readable(stage.relay.fileno())
    assert len(stage.relay.deaths()) == 1
    stage.activity.reap_slot(child.slot)
    second = Child(stage)
    try:
        assert second.slot == child.slot
        working(stage, second, epoch=2)
    finally:
        second.close()
    readable(stage.relay.fileno())
    assert [death.slot for death in stage.relay.deaths()] == [child.slot]


def test_a_storm_of_doorbells_is_slowed_down(stage: Stage) -> None:
    process, _ = stage.process()
    until = time.monotonic() + 0.3
    while time.monotonic() < until:
        process.ring()
    stats = stage.relay.stats()
    assert stats.throttled > 0
    assert stats.wakes < 3000
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
        Relay(stage.activity, stage.grants, stage.relays, 256)
