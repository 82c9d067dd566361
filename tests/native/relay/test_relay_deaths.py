"""The relay and the deaths of processes: real ones, really killed."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from cython_ext.readings import EventKind, SlotState
from cython_ext.relay.relay import Relay
from tests.native.stage import KEY, Stage, eventually, readable

CHILD = """
import sys
from cython_ext.pages.activitypage import ActivityPage
from cython_ext.pages.grantspage import GrantsPage
from cython_ext.testing.fake_peer import Process
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
    with Relay(stage.activity, stage.grants, stage.relays, KEY, [child.slot]) as successor:
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
    with Relay(stage.activity, stage.grants, stage.relays, KEY, [child.slot]) as successor:
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
