"""The baton as the relay passes it on: real threads, real words (what it decides: test_baton.py)."""

from __future__ import annotations

import mmap
import threading
import time

import pytest

from cython_ext.readings import EventKind, PageMode
from cython_ext.relay.relay import Relay
from cython_ext.testing.fake_peer import Process
from tests.native.stage import KEY, MS, Stage, eventually

BATON_OFFSET = 48
PATIENCE_NS = 100 * MS  # logic/gate/baton.pxd: then the next one goes beside whoever has not drained


@pytest.fixture
def spatial(stage: Stage) -> Stage:
    stage.grants.mode = PageMode.SPATIAL
    stage.activity.ring()
    eventually(lambda: stage.activity.baton != 0)
    return stage


def joined(stage: Stage) -> Process:
    process, _ = stage.process()
    process.know_baton()
    return process


def both_working(stage: Stage) -> tuple[Process, Process]:
    """Two processes that want, under an open-ended lease."""
    first, second = joined(stage), joined(stage)
    first.want()
    eventually(first.has_baton)
    second.want()
    stage.listener.wait(EventKind.WANTS, KEY)
    stage.lease(1)
    assert first.wait_lease()[0] == 1
    return first, second


def gets_it(process: Process) -> bool:
    """As a gate that waits: who does not look, and does not use a turn, is passed over."""
    process.look()
    return process.has_baton()


def submits(process: Process) -> bool:
    process.look()
    return process.submit_with_baton(1)


def test_nobody_has_it_before_somebody_wants(spatial: Stage) -> None:
    first = joined(spatial)
    assert not first.has_baton()
    first.want()
    eventually(first.has_baton)


def test_it_is_passed_on_only_once_the_first_has_drained(spatial: Stage) -> None:
    both = both_working(spatial)
    works: list[Process] = []

    def one_submits() -> bool:
        works.extend(process for process in both if not works and submits(process))
        return bool(works)

    eventually(one_submits)
    (holder,) = works
    (other,) = set(both) - set(works)
    kept_ns = 0

    def turn_is_over() -> bool:
        nonlocal kept_ns
        other.look()  # who does not is taken for asleep
        now_ns = time.monotonic_ns()
        if holder.has_baton():
            kept_ns = now_ns
        return kept_ns < now_ns

    eventually(turn_is_over)  # its work is not
    assert not other.has_baton() or time.monotonic_ns() > kept_ns + PATIENCE_NS
    holder.finish()
    eventually(lambda: gets_it(other))


def test_a_process_that_wants_no_more_leaves_it_to_the_other_for_good(spatial: Stage) -> None:
    first, second = both_working(spatial)
    first.idle()
    wakes = spatial.relay.stats().wakes
    first.ring()
    eventually(lambda: spatial.relay.stats().wakes > wakes)
    eventually(lambda: submits(second))
    word = spatial.activity.baton
    time.sleep(0.05)  # five turns
    assert spatial.activity.baton == word


def test_two_that_obey_it_never_work_at_the_same_time(spatial: Stage) -> None:
    both_working(spatial)
    working, overlaps, turns = set(), [], [0, 0]
    over = threading.Event()
    lock = threading.Lock()

    def work(index: int, process: Process) -> None:
        while not over.is_set():
            process.look()
            if not process.submit_with_baton(1):
                time.sleep(0.0002)
                continue
            with lock:
                working.add(index)
                overlaps.extend(working - {index})
                turns[index] += 1
            process.work(MS)
            with lock:
                working.discard(index)
            process.finish()

    both = both_working_processes(spatial)
    threads = [threading.Thread(target=work, args=(i, p)) for i, p in enumerate(both)]
    for thread in threads:
        thread.start()
    eventually(lambda: min(turns) > 20)
    over.set()
    for thread in threads:
        thread.join()
    assert not overlaps


def both_working_processes(stage: Stage) -> list[Process]:
    return [Process(stage.activity, stage.grants, slot.index) for slot in stage.activity.slots()]


def test_who_writes_the_word_does_not_keep_it(spatial: Stage) -> None:
    first, second = both_working(spatial)
    eventually(lambda: first.has_baton() or second.has_baton())
    with mmap.mmap(spatial.activity.fileno(), 0) as page:
        page[BATON_OFFSET : BATON_OFFSET + 4] = (0xABCD00 | 7).to_bytes(4, "little")
        first.ring()
        eventually(lambda: spatial.activity.baton != 0xABCD07)


def test_the_next_relay_goes_on_where_the_page_says(spatial: Stage) -> None:
    first, second = both_working(spatial)
    eventually(lambda: submits(first) or submits(second))
    spatial.relay.close()
    before = spatial.activity.baton >> 8
    slots = [slot.index for slot in spatial.activity.slots()]
    with Relay(spatial.activity, spatial.grants, spatial.relays, KEY, slots):
        assert spatial.activity.baton >> 8 > before
        assert not first.has_baton()  # whoever has work is waited for
        assert not second.has_baton()
        first.finish()
        second.finish()
        eventually(lambda: first.has_baton() or second.has_baton())


def test_a_process_without_a_baton_is_none_of_its_business(spatial: Stage) -> None:
    old, _ = spatial.process()
    old.want()
    old.submit(1)
    new = joined(spatial)
    new.want()
    eventually(new.has_baton)


def test_in_temporal_mode_it_goes_round_for_two_while_leases_have_an_end(stage: Stage) -> None:
    first, second = joined(stage), joined(stage)
    first.want()
    second.want()
    stage.listener.wait(EventKind.WANTS, KEY)
    stage.lease(1, length_ns=2_000 * MS)
    first.wait_lease()
    eventually(lambda: stage.activity.baton != 0)
    eventually(lambda: first.has_baton() != second.has_baton())
    stage.dispatcher.publish(KEY, 1, 0, None)  # nobody else wants any more
    first.ring()
    eventually(lambda: stage.activity.baton == 0)
    assert first.has_baton()
    assert second.has_baton()


def test_in_temporal_mode_one_process_needs_none(stage: Stage) -> None:
    only = joined(stage)
    only.want()
    stage.listener.wait(EventKind.WANTS, KEY)
    stage.lease(1, length_ns=2_000 * MS)
    only.wait_lease()
    only.ring()
    wakes = stage.relay.stats().wakes
    only.ring()
    eventually(lambda: stage.relay.stats().wakes > wakes)
    assert stage.activity.baton == 0


def test_a_baton_that_goes_round_no_more_is_not_left_in_a_dead_ones_hands(stage: Stage) -> None:
    """Its relay and its holder died together: nobody would give back what the page says."""
    first, second = joined(stage), joined(stage)
    first.want()
    second.want()
    stage.listener.wait(EventKind.WANTS, KEY)
    stage.lease(1, length_ns=2_000 * MS)
    first.wait_lease()
    eventually(lambda: first.has_baton() != second.has_baton())
    stage.relay.close()
    other, living = (second, 1) if first.has_baton() else (first, 0)
    with Relay(stage.activity, stage.grants, stage.relays, KEY, [living]):
        eventually(other.has_baton)
        assert stage.activity.baton == 0


def stuck(stage: Stage) -> tuple[Process, Process]:
    """Two processes in turns, under a lease that has ended; the first has work that does not end."""
    first, second = joined(stage), joined(stage)
    first.want()
    second.want()
    stage.listener.wait(EventKind.WANTS, KEY)
    stage.lease(1, 60_000 * MS)
    assert first.wait_lease()[0] == 1
    eventually(lambda: stage.activity.baton & 0xFF != 0)
    if not first.has_baton():
        first, second = second, first
    assert submits(first)
    stage.dispatcher.withdraw(KEY, 1)
    return first, second


def test_a_process_that_is_stopped_with_work_keeps_its_siblings_waiting_for_the_patience_alone(stage: Stage) -> None:
    first, second = stuck(stage)
    first.see_busy()
    assert stage.listener.wait(EventKind.DRAINED, KEY, 1).wants  # of the second
    stage.lease(2, 60_000 * MS)
    assert second.wait_lease()[0] == 2
    eventually(lambda: gets_it(second))
    assert second.submit_with_baton(2)
    second.idle()
    assert not stage.listener.wait(EventKind.DRAINED, KEY, 2).wants  # nobody is waited for who stands still
    first.see_busy()
    stage.listener.wait(EventKind.WANTS, KEY)


def test_a_process_whose_kernel_takes_long_is_waited_for(stage: Stage) -> None:
    first, second = stuck(stage)
    first.see_busy(for_ns=60_000 * MS)
    eventually(lambda: gets_it(second))
    time.sleep(0.15)
    assert stage.relays.entry(KEY).drained_epoch == 0  # by its prediction it takes a minute
    for sign_of_life in (first.see_busy, first.be_locked_out):
        until = time.monotonic() + 0.3
        while time.monotonic() < until:
            sign_of_life()
            time.sleep(0.01)
        assert stage.relays.entry(KEY).drained_epoch == 0  # its thread says that it goes on
    first.finish()
    first.drain(1)
    assert stage.listener.wait(EventKind.DRAINED, KEY, 1).wants


def test_a_process_stopped_with_work_of_unknown_length_is_waited_for_much_longer(stage: Stage) -> None:
    """The GPU goes on with it."""
    first, second = stuck(stage)
    first.leave_unpredicted()
    first.see_busy()
    eventually(lambda: gets_it(second))
    time.sleep(0.5)
    assert stage.relays.entry(KEY).drained_epoch == 0
    first.finish()
    first.drain(1)
    assert stage.listener.wait(EventKind.DRAINED, KEY, 1).wants
