"""The dispatcher's thread on real pages. What it decides is tested in test_lease_table.py; here, that it does it."""

from __future__ import annotations

import os
import random
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from threading import Thread

import pytest

from cython_ext.dispatch.dispatcher import Dispatcher
from cython_ext.pages.grantspage import GrantsPage
from cython_ext.pages.page import PageError
from cython_ext.pages.relaypage import RelayPage
from cython_ext.readings import EventKind, GrantsFlag
from cython_ext.testing.fake_peer import Voice
from tests.native.stage import MS, Listener, eventually, grants, readable
from tests.processes import ended


class Card:
    """A GPU with ``size`` vGPUs, whose relays the test speaks for."""

    def __init__(self, size: int) -> None:
        self.stack = ExitStack()
        self.relays = self.stack.enter_context(RelayPage.create())
        self.pages = [self.stack.enter_context(grants()) for _ in range(size)]
        self.dispatcher = self.stack.enter_context(Dispatcher(self.relays))
        self.voices = [Voice(self.relays, key) for key in range(size)]
        self.listener = Listener(self.dispatcher)
        for key, page in enumerate(self.pages):
            self.dispatcher.add(key, page)

    def want(self, *keys: int) -> None:
        for key in keys:
            self.voices[key].say(want=True)
            self.listener.wait(EventKind.WANTS, key)

    def close(self) -> None:
        self.voices.clear()
        self.stack.close()


@pytest.fixture
def card() -> Iterator[Card]:
    made = Card(4)
    try:
        yield made
    finally:
        made.close()


def test_leases_follow_each_other_as_their_holders_drain(card: Card) -> None:
    card.want(0, 1, 2)
    now_ns = time.monotonic_ns()
    card.dispatcher.publish(0, 1, now_ns, now_ns + 5 * MS)
    far_ns = now_ns + 3_600_000 * MS
    card.dispatcher.publish(1, 2, far_ns, far_ns + 5 * MS, after=[(0, 1)], go_by_ns=far_ns)
    card.dispatcher.publish(2, 3, far_ns, None, after=[(0, 1), (1, 2)], go_by_ns=far_ns)
    first = card.listener.wait(EventKind.WENT, 0, 1)
    assert first.end_ns == first.at_ns + 5 * MS
    assert card.dispatcher.outstanding(1) == [(2, False)]
    card.voices[0].say(want=True, drained_epoch=1)
    drained = card.listener.wait(EventKind.DRAINED, 0, 1)
    assert drained.wants
    second = card.listener.wait(EventKind.WENT, 1, 2)
    assert second.at_ns >= drained.at_ns
    assert second.end_ns == second.at_ns + 5 * MS  # an hour early, and as long as it was
    card.voices[1].say(want=False, returned_epoch=2)
    assert not card.listener.wait(EventKind.DRAINED, 1, 2).wants
    third = card.listener.wait(EventKind.WENT, 2, 3)
    assert third.end_ns is None
    assert card.pages[2].plan().open_epoch == 3
    stats = card.dispatcher.stats()
    assert (stats.gos, stats.forced, sum(stats.lateness_log2_ns)) == (3, 0, 3)


def test_an_allowance_counts_from_the_go_of_its_lease(card: Card) -> None:
    """Its page has it as a sum over all leases, which is what processes can compare."""
    page = card.pages[0]
    card.voices[0].say(want=True, busy_ns=5 * MS)
    card.listener.wait(EventKind.WANTS, 0)
    card.dispatcher.allow(0, 1, 20 * MS)  # before the lease: from now on
    assert page.allowed_ns == 25 * MS
    card.dispatcher.publish(0, 1, time.monotonic_ns(), None)
    card.listener.wait(EventKind.WENT, 0, 1)
    card.voices[0].say(want=True, busy_ns=9 * MS)
    eventually(lambda: card.dispatcher.observe(0).used_ns == 4 * MS)
    change = page.plan().change
    card.dispatcher.allow(0, 1, 30 * MS)
    assert page.allowed_ns == 35 * MS
    assert page.plan().change == change  # whoever waits for more looks by itself
    card.dispatcher.allow(0, 1, None)
    assert page.allowed_ns == 0
    assert page.plan().change != change  # threads on the fast path are to hear of it
    card.dispatcher.allow(0, 1, 0)
    assert page.allowed_ns > 0
    card.dispatcher.remove(0)
    card.dispatcher.add(0, page)
    assert page.allowed_ns == 0


def test_no_wait_is_unbounded(card: Card) -> None:
    card.want(0, 1)
    now_ns = time.monotonic_ns()
    card.dispatcher.publish(0, 1, now_ns, now_ns + MS)
    go_by_ns = now_ns + 20 * MS
    card.dispatcher.publish(1, 2, now_ns + MS, now_ns + 2 * MS, after=[(0, 1)], go_by_ns=go_by_ns)
    assert card.listener.wait(EventKind.WENT, 1, 2).at_ns >= go_by_ns
    assert card.dispatcher.outstanding(0) == [(1, True)]  # it never drained
    assert card.dispatcher.stats().forced == 1


def test_waiting_for_a_holder_that_does_not_drain_costs_nothing(card: Card) -> None:
    card.want(0, 1)
    now_ns = time.monotonic_ns()
    card.dispatcher.publish(0, 1, now_ns, now_ns + MS)
    card.dispatcher.publish(1, 2, now_ns + MS, None, after=[(0, 1)], go_by_ns=now_ns + 3_600_000 * MS)
    eventually(lambda: time.monotonic_ns() > now_ns + 10 * MS)
    wakes = card.dispatcher.stats().wakes
    for _ in range(3):  # three heartbeats, and little else
        beat_ns = card.pages[0].alive_ns
        eventually(lambda seen=beat_ns: card.pages[0].alive_ns > seen)  # type: ignore[misc]
    assert card.dispatcher.stats().wakes - wakes < 20


@pytest.mark.parametrize("behind", [True, False])
def test_a_pinned_lease_goes_at_its_start_or_a_little_before_behind_another(card: Card, behind: bool) -> None:
    card.want(0, 1)
    now_ns = time.monotonic_ns()
    card.dispatcher.publish(0, 1, now_ns, None)
    start_ns = now_ns + 30 * MS
    after = [(0, 1)] if behind else []
    card.dispatcher.publish(1, 2, start_ns, start_ns + MS, after=after, go_by_ns=start_ns + MS, early=False)
    card.voices[0].say(want=True, drained_epoch=1)
    went = card.listener.wait(EventKind.WENT, 1, 2)
    assert went.at_ns >= start_ns - 0.7 * MS * behind
    assert went.end_ns == max(went.at_ns, start_ns) + MS


def test_a_revoked_lease_leaves_the_fast_path_and_ends(card: Card) -> None:
    card.want(0)
    now_ns = time.monotonic_ns()
    card.dispatcher.publish(0, 1, now_ns, None)
    assert card.pages[0].plan().open_epoch == 1
    end_ns = time.monotonic_ns() + MS
    assert card.dispatcher.publish(0, 1, now_ns, end_ns, window_ns=250_000)
    plan = card.pages[0].plan()
    assert (plan.open_epoch, plan.go_epoch) == (0, 1)
    assert plan.current
    assert (plan.current.epoch, plan.current.end_ns) == (1, end_ns)
    assert card.pages[0].window_ns == 250_000
    assert card.dispatcher.publish(0, 1, now_ns, None)
    assert card.pages[0].plan().open_epoch == 1


def test_a_standing_lease_goes_when_it_is_wanted(card: Card) -> None:
    now_ns = time.monotonic_ns()
    assert card.dispatcher.publish(3, 1, now_ns, None, on_want=True)
    card.want(0)
    assert card.dispatcher.outstanding(3) == [(1, False)]
    plan = card.pages[3].plan()
    assert plan.current
    assert (plan.current.on_go, plan.current.go_by_ns) == (True, None)
    card.voices[3].say(want=True)
    went = card.listener.wait(EventKind.WENT, 3, 1)
    assert went.at_ns > now_ns


def test_a_standing_lease_for_a_free_gpu_waits_for_whoever_holds_and_is_in_nobodys_way(card: Card) -> None:
    card.want(0)
    now_ns = time.monotonic_ns()
    assert card.dispatcher.publish(0, 1, now_ns, None)
    assert card.dispatcher.publish(3, 2, now_ns, None, on_want=True, alone=True)
    card.want(3)
    assert card.dispatcher.outstanding(3) == [(2, False)]
    card.voices[0].say(want=False, drained_epoch=1)  # it goes back, and nobody else wants
    card.listener.wait(EventKind.WENT, 3, 2)
    card.want(0)
    far_ns = now_ns + 3_600_000 * MS
    assert card.dispatcher.publish(0, 3, now_ns, None, go_by_ns=far_ns)  # without knowing of the other
    assert card.dispatcher.outstanding(0) == [(3, False)]
    assert card.dispatcher.publish(3, 2, now_ns, None)  # now it is known, and nothing holds the other back
    assert card.dispatcher.outstanding(0) == [(3, True)]


def free_epochs(card: Card) -> list[int]:
    return [page.plan().free_epoch for page in card.pages]


def test_every_page_says_which_lease_may_be_taken_while_the_gpu_is_free(card: Card) -> None:
    now_ns = time.monotonic_ns()
    for key in range(3):
        assert card.dispatcher.publish(key, key + 1, now_ns, None, on_want=True, alone=True)
    assert card.dispatcher.publish(3, 4, now_ns, None, on_want=True)
    assert free_epochs(card) == [1, 2, 3, 0]
    changes = [page.plan().change for page in card.pages]
    card.want(1)
    assert free_epochs(card) == [0, 0, 0, 0]
    card.voices[1].say(want=False, returned_epoch=2)
    card.listener.wait(EventKind.DRAINED, 1, 2)
    assert free_epochs(card) == [1, 0, 3, 0]
    assert [page.plan().change for page in card.pages[::2]] == changes[::2]  # nobody was woken for it
    card.voices[3].say(want=True)
    card.listener.wait(EventKind.WENT, 3, 4)
    assert free_epochs(card) == [0, 0, 0, 0]
    card.voices[3].say(want=False, returned_epoch=4)
    card.listener.wait(EventKind.DRAINED, 3, 4)
    assert card.dispatcher.publish(2, 5, now_ns, None)  # granted, and waits for nobody
    assert free_epochs(card) == [0, 0, 0, 0]


def test_a_lease_that_was_taken_counts_from_the_first_work_on(card: Card) -> None:
    now_ns = time.monotonic_ns()
    assert card.dispatcher.publish(0, 1, now_ns, now_ns + MS, on_want=True, alone=True)
    taken_ns = time.monotonic_ns()
    card.voices[0].say(want=True, submitted_epoch=1, submitted_ns=taken_ns)
    went = card.listener.wait(EventKind.WENT, 0, 1)
    heard_ns = card.listener.wait(EventKind.WANTS, 0).at_ns
    assert went.end_ns == went.at_ns + MS
    assert went.at_ns >= heard_ns - MS  # a word from long ago is not believed
    assert went.at_ns == taken_ns or time.monotonic_ns() - taken_ns > MS


def test_only_a_standing_lease_can_be_for_a_free_gpu(card: Card) -> None:
    with pytest.raises(ValueError, match="alone"):
        card.dispatcher.publish(0, 1, time.monotonic_ns(), None, alone=True)


def test_a_lease_that_nobody_wants_any_more_does_not_hold_the_gpu(card: Card) -> None:
    card.want(0, 1)
    now_ns = time.monotonic_ns()
    card.dispatcher.publish(0, 1, now_ns, now_ns + 3_600_000 * MS)
    card.dispatcher.publish(1, 2, now_ns, None, after=[(0, 1)], go_by_ns=now_ns + 7_200_000 * MS)
    card.voices[0].say(want=False)
    assert not card.listener.wait(EventKind.DRAINED, 0, 1).wants
    card.listener.wait(EventKind.WENT, 1, 2)


def test_an_idle_vgpu_that_only_waited_is_reported(card: Card) -> None:
    card.want(2)
    card.voices[2].say(want=False)
    card.listener.wait(EventKind.IDLE, 2)


def test_a_withdrawn_lease_is_gone_and_counts_as_drained(card: Card) -> None:
    card.want(0, 1)
    far_ns = time.monotonic_ns() + 3_600_000 * MS
    card.dispatcher.publish(0, 1, far_ns, far_ns + MS, early=False)
    card.dispatcher.publish(1, 2, far_ns, far_ns + MS, after=[(0, 1)], go_by_ns=far_ns)
    assert card.dispatcher.withdraw(0, 1)
    assert not card.dispatcher.withdraw(0, 1)
    assert card.pages[0].plan().current is None
    card.listener.wait(EventKind.WENT, 1, 2)
    assert not card.dispatcher.withdraw(1, 2)  # too late: it ends now
    plan = card.pages[1].plan()
    assert plan.current
    assert plan.current.end_ns is not None
    assert plan.current.end_ns <= time.monotonic_ns()


def test_a_removed_vgpu_counts_as_drained(card: Card) -> None:
    card.want(0, 1)
    now_ns = time.monotonic_ns()
    card.dispatcher.publish(0, 1, now_ns, None)
    far_ns = now_ns + 3_600_000 * MS
    card.dispatcher.publish(1, 2, far_ns, None, after=[(0, 1)], go_by_ns=far_ns)
    card.dispatcher.remove(0)
    card.listener.wait(EventKind.WENT, 1, 2)
    assert (card.pages[0].plan().current, card.pages[0].plan().open_epoch) == (None, 0)
    card.pages[0].close()
    assert not card.relays.entry(0).want
    with pytest.raises(KeyError):
        card.dispatcher.publish(0, 3, now_ns, None)


def test_a_key_that_is_used_again_hears_nothing_of_its_predecessor(card: Card) -> None:
    card.voices[0].say(want=True)
    eventually(lambda: card.dispatcher.wants(0))
    card.dispatcher.remove(0)
    with grants() as page:
        card.dispatcher.add(0, page)
        card.want(1)
        assert card.dispatcher.events() == []
        assert not card.dispatcher.wants(0)
        card.dispatcher.remove(0)


def test_a_want_from_before_the_add_is_heard(card: Card) -> None:
    voice = Voice(card.relays, 9)
    voice.say(want=True, drained_epoch=77, returned_epoch=78)
    with grants() as page:
        card.dispatcher.add(9, page)
        card.listener.wait(EventKind.WANTS, 9)
        card.dispatcher.publish(9, 5, time.monotonic_ns(), None)
        assert card.dispatcher.outstanding(9) == [(5, True)]
        card.dispatcher.remove(9)


def test_reports_from_another_time_end_nothing(card: Card) -> None:
    card.want(0)
    now_ns = time.monotonic_ns()
    card.dispatcher.publish(0, 10, now_ns, None)
    card.voices[0].say(want=True, drained_epoch=9, returned_epoch=8)
    card.want(1)  # what came before has been heard
    assert card.dispatcher.outstanding(0) == [(10, True)]
    card.voices[0].say(want=True, drained_epoch=10)
    card.listener.wait(EventKind.DRAINED, 0, 10)
    assert not card.dispatcher.publish(0, 10, now_ns, None)
    assert not card.dispatcher.publish(0, 9, now_ns, None)
    assert card.dispatcher.outstanding(0) == []


@pytest.mark.parametrize("drained_ns", [-(2**63), -1, 0, 1, 2**63 - 1])
def test_a_drain_lies_between_go_and_now_whatever_is_claimed(card: Card, drained_ns: int) -> None:
    card.want(0)
    card.dispatcher.publish(0, 1, time.monotonic_ns(), None)
    went = card.listener.wait(EventKind.WENT, 0, 1)
    card.voices[0].say(want=True, drained_epoch=1, drained_ns=drained_ns, longest_kernel_ns=-5, busy_ns=2**63)
    drained = card.listener.wait(EventKind.DRAINED, 0, 1)
    assert went.at_ns <= drained.at_ns <= time.monotonic_ns()
    assert (drained.idle_ns, drained.longest_kernel_ns) == (0, 0)


def test_a_holder_is_observed_without_ringing(card: Card) -> None:
    card.want(0)
    card.dispatcher.publish(0, 1, time.monotonic_ns(), None)
    assert card.dispatcher.observe(1) is None
    card.listener.wait(EventKind.WENT, 0, 1)
    total = card.dispatcher.stats().events
    card.voices[0].say(want=True, busy_ns=0, longest_kernel_ns=123, ring=False)
    eventually(lambda: card.dispatcher.stats().events > total)
    woken, _, _ = select.select([card.dispatcher.fileno()], [], [], 0)
    assert not woken  # nobody is, for a reading
    card.want(1)
    observed = card.listener.wait(EventKind.OBSERVED, 0, 1)
    assert observed.longest_kernel_ns == 123
    asked = card.dispatcher.observe(0)
    assert asked
    assert (asked.kind, asked.epoch, asked.longest_kernel_ns) == (EventKind.OBSERVED, 1, 123)
    assert asked.at_ns >= observed.at_ns


def test_events_that_do_not_fit_are_reported_as_lost(card: Card) -> None:
    reports = 0
    while card.dispatcher.stats().lost < 10:
        card.voices[0].say(want=reports % 2 == 0)
        reports += 1
        eventually(lambda seen=reports: card.dispatcher.stats().reports >= seen)  # type: ignore[misc]
    events = card.dispatcher.events()
    assert events[-1].kind is EventKind.LOST
    assert len(events) - 1 + events[-1].epoch == card.dispatcher.stats().events
    assert card.dispatcher.events() == []
    card.want(1)


def test_the_descriptor_is_readable_exactly_while_there_are_events(card: Card) -> None:
    assert select.select([card.dispatcher.fileno()], [], [], 0)[0] == []
    card.voices[0].say(want=True)
    card.voices[1].say(want=True)
    readable(card.dispatcher.fileno())
    eventually(lambda: card.dispatcher.wants(1))
    assert len(card.dispatcher.events()) == 2
    assert select.select([card.dispatcher.fileno()], [], [], 0)[0] == []


def test_the_server_shows_life_on_every_page(card: Card) -> None:
    before = [page.alive_ns for page in card.pages]
    eventually(lambda: all(page.alive_ns > seen for page, seen in zip(card.pages, before, strict=True)))


SLEEPER = """
import sys
from cython_ext.pages.activitypage import ActivityPage
from cython_ext.pages.grantspage import GrantsPage
from cython_ext.testing.fake_peer import Process
page = GrantsPage.map_readonly(int(sys.argv[1]))
activity = ActivityPage.create()
process = Process(activity, page, 0)
print("sleeps", flush=True)
print(*process.wait_lease(), flush=True)
"""


def test_go_reaches_another_process_while_python_is_busy(card: Card) -> None:
    """The server's Python may be deciding, collecting garbage or writing its journal: GO does not wait for it."""
    card.want(0)
    descriptor = card.pages[0].fileno()
    command = [sys.executable, "-c", SLEEPER, str(descriptor)]
    with subprocess.Popen(command, pass_fds=[descriptor], stdout=subprocess.PIPE) as sleeper, ended(sleeper):
        assert sleeper.stdout
        assert sleeper.stdout.readline() == b"sleeps\n"
        start_ns = time.monotonic_ns() + 20 * MS
        card.dispatcher.publish(0, 1, start_ns, None, after=(), go_by_ns=start_ns, early=False)
        while (after_ns := time.monotonic_ns()) < start_ns + 50 * MS:
            sum(range(3_000_000))  # one call into C that holds the GIL for long
        went = card.listener.wait(EventKind.WENT, 0, 1)
        assert start_ns <= went.at_ns < after_ns
        epoch, seen_ns = sleeper.stdout.readline().split()
        assert int(epoch) == 1
        assert int(seen_ns) >= start_ns


def test_two_hundred_and_fifty_six_vgpus_take_turns() -> None:
    card = Card(256)
    try:
        for key in range(256):
            card.voices[key].say(want=True)
        for key in range(256):
            card.listener.wait(EventKind.WANTS, key)
        far_ns = time.monotonic_ns() + 3_600_000 * MS
        now_ns = time.monotonic_ns()
        card.dispatcher.publish(0, 1, now_ns, far_ns)
        for key in range(1, 256):
            card.dispatcher.publish(key, key + 1, far_ns, far_ns + MS, after=[(key - 1, key)], go_by_ns=far_ns)
        at_ns = 0
        for key in range(256):
            went = card.listener.wait(EventKind.WENT, key, key + 1)
            assert went.at_ns >= at_ns
            card.voices[key].say(want=True, drained_epoch=key + 1)
            at_ns = card.listener.wait(EventKind.DRAINED, key, key + 1).at_ns
        assert card.dispatcher.stats().gos == 256
        with pytest.raises(IndexError):
            card.dispatcher.add(256, card.pages[0])
    finally:
        card.close()


def test_every_accepted_lease_goes_and_drains_once_under_fire(card: Card) -> None:
    """Four Python threads publish, revoke and withdraw while relays answer: nothing is lost and nothing doubled."""
    card.want(0, 1, 2, 3)
    withdrawn: list[list[int]] = [[], [], [], []]

    def act(key: int) -> None:
        dice = random.Random(key)
        for step in range(400):
            epoch = 4 * step + key + 1
            now_ns = time.monotonic_ns()
            after = [(other, 4 * step + other - 3) for other in range(4) if other != key and step]
            start_ns = now_ns + dice.randrange(50_000)
            end_ns = None if dice.random() < 0.5 else now_ns + 300_000
            assert card.dispatcher.publish(key, epoch, start_ns, end_ns, after, now_ns + 500_000, dice.random() < 0.5)
            if dice.random() < 0.3:
                card.dispatcher.publish(key, epoch, start_ns, now_ns + 400_000)
            if dice.random() < 0.3 and card.dispatcher.withdraw(key, epoch):
                withdrawn[key].append(epoch)
                continue
            eventually(lambda e=epoch: card.dispatcher.outstanding(key) == [(e, True)])  # type: ignore[misc]
            card.voices[key].say(want=True, drained_epoch=epoch)
            eventually(lambda: card.dispatcher.outstanding(key) == [])

    threads = [Thread(target=act, args=(key,)) for key in range(4)]
    heard = []
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        heard += card.dispatcher.events()
    for thread in threads:
        thread.join()
    heard += card.dispatcher.events()
    for key in range(4):
        expected = [4 * step + key + 1 for step in range(400) if 4 * step + key + 1 not in withdrawn[key]]
        for kind in (EventKind.WENT, EventKind.DRAINED):
            assert [event.epoch for event in heard if (event.kind, event.vgpu) == (kind, key)] == expected


def test_mistakes_of_the_caller_are_named(card: Card) -> None:
    now_ns = time.monotonic_ns()
    publish = card.dispatcher.publish
    with pytest.raises(ValueError, match="not after its start"):
        publish(0, 1, now_ns, now_ns)
    with pytest.raises(ValueError, match="waits for more than 64"):
        publish(0, 1, now_ns, None, after=[(1, epoch) for epoch in range(1, 66)])
    with pytest.raises(KeyError, match="no vGPU 7"):
        publish(7, 1, now_ns, None)
    with pytest.raises(IndexError):
        publish(0, 1, now_ns, None, after=[(256, 1)])
    with pytest.raises(ValueError, match="is taken"):
        card.dispatcher.add(0, card.pages[0])
    with GrantsPage.map_readonly(card.pages[0].fileno()) as reader, pytest.raises(PageError, match="read-only"):
        card.dispatcher.add(8, reader)
    far_ns = now_ns + 3_600_000 * MS
    for epoch in range(1, 9):
        assert publish(0, epoch, far_ns, far_ns + MS, early=False)
    with pytest.raises(OverflowError, match="8 leases"):
        publish(0, 9, far_ns, None, early=False)
    assert len(card.dispatcher.outstanding(0)) == 8


def test_closing_lets_go_of_the_pages(card: Card) -> None:
    with pytest.raises(PageError, match="in use"):
        card.pages[0].close()
    card.pages[0].flags = GrantsFlag.CONTENDED  # the server's setters go on working
    descriptor = card.dispatcher.fileno()
    card.dispatcher.close()
    card.dispatcher.close()
    assert card.dispatcher.closed
    card.pages[0].close()
    with pytest.raises(RuntimeError, match="closed"):
        card.dispatcher.events()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
