"""The ledger's lock across processes, PID namespaces, brokers and older hooks: one is inside, no death wedges it."""

from __future__ import annotations

import mmap
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cython_ext.testing import bindings_memory as native
from tests.native.namespaces import fork_apart
from tests.native.tracing import killed_after_instructions

FOREVER = 60 * 10**9  # bounds a failing test, never reached by a passing one
SOON = 10**7  # for a lock that a living owner keeps; a dead one's is taken over before that
SLOT_DEAD, SLOT_FREE, SLOT_ACTIVE = 3, 0, 2
LOCKED, OWNER_DIED, TIMEOUT = native.ROBUST_LOCKED, native.ROBUST_OWNER_DIED, native.ROBUST_TIMEOUT
Fork = Callable[[], int]
forks = pytest.mark.parametrize("fork", [os.fork, fork_apart], ids=["one-namespace", "namespaces"])


@pytest.fixture
def page() -> native.Activity:
    return new_page()


def new_page() -> native.Activity:
    page = native.Activity(mmap.mmap(-1, native.ACTIVITY_BYTES))
    page.init()
    return page


class Child:
    """A process that lives in a slot and does what it is told: one letter, answered by one number."""

    def __init__(self, page: native.Activity, slot: int, fork: Fork = os.fork, older: bool = False) -> None:
        asked, self._ask = os.pipe()
        self._answer, answers = os.pipe()
        self.slot = slot
        self.killed = False
        self.pid = fork()
        if self.pid == 0:
            self._serve(page, older, asked, answers)
        os.close(asked)
        os.close(answers)
        assert self.told() == LOCKED, "its slot is alive"

    def _serve(self, page: native.Activity, older: bool, asked: int, answers: int) -> None:
        os.write(answers, bytes([page.older_live(self.slot) if older else page.live(self.slot)]))
        while letter := os.read(asked, 1):
            timeout = FOREVER if letter in b"W" else SOON
            result = 0
            if letter in b"WL":
                result = page.older_lock(timeout) if older else page.lock(timeout, self.slot)
            elif older:
                page.older_unlock()
            else:
                page.unlock()
            os.write(answers, bytes([result]))
        os._exit(0)

    def begin(self, letter: str) -> None:
        """W: wait for the lock; L: for a moment; U: release it."""
        os.write(self._ask, letter.encode())

    def told(self) -> int:
        return os.read(self._answer, 1)[0]

    def asked(self, letter: str) -> int:
        self.begin(letter)
        return self.told()

    def kill(self) -> None:
        """Idempotent."""
        if self.killed:
            return
        self.killed = True
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._ask)
        os.close(self._answer)


@contextmanager
def children(
    page: native.Activity, count: int, fork: Fork = os.fork, older: tuple[int, ...] = ()
) -> Iterator[list[Child]]:
    made: list[Child] = []
    try:
        made.extend(Child(page, slot, fork, slot in older) for slot in range(count))
        yield made
    finally:
        for child in made:
            child.kill()


def is_waited_for(page: native.Activity) -> bool:
    return page.lock_word & 0x80000000 != 0


def until_waited_for(page: native.Activity) -> None:
    while not is_waited_for(page):
        os.sched_yield()


@forks
def test_a_waiter_that_is_killed_takes_no_lock_from_its_owner(page: native.Activity, fork: Fork) -> None:
    """Both are process 1 of their namespace. The third comes in, to repair, once the owner has died."""
    with children(page, 3, fork) as (a, b, c):
        assert a.asked("L") == LOCKED
        b.begin("W")
        until_waited_for(page)
        b.kill()
        assert c.asked("L") == TIMEOUT
        a.kill()
        assert c.asked("W") == OWNER_DIED
        assert c.asked("U") == 0
        assert c.asked("L") == LOCKED


@forks
def test_a_sleeping_waiter_gets_the_lock_of_a_dead_owner(page: native.Activity, fork: Fork) -> None:
    with children(page, 3, fork) as (a, b, c):
        assert a.asked("L") == LOCKED
        b.begin("W")
        c.begin("W")
        until_waited_for(page)
        a.kill()
        # whichever was first leaves it whole for the other
        first, second = (b, c) if page_is_of(page, b) else (c, b)
        assert first.told() == OWNER_DIED
        assert first.asked("U") == 0
        assert second.told() == LOCKED


def page_is_of(page: native.Activity, child: Child) -> bool:
    """Wait until a living process has the lock; whether it is the child."""
    while page.lock_word & 0xFF in (0, 1):
        os.sched_yield()
    return page.lock_word & 0xFF == child.slot + 1


def test_a_stopped_owner_keeps_the_lock(page: native.Activity) -> None:
    with children(page, 2, fork_apart) as (a, b):
        assert a.asked("L") == LOCKED
        os.kill(a.pid, signal.SIGSTOP)
        os.waitpid(a.pid, os.WUNTRACED)
        assert b.asked("L") == TIMEOUT
        os.kill(a.pid, signal.SIGCONT)
        assert a.asked("U") == 0
        assert b.asked("L") == LOCKED


def test_threads_of_one_process_exclude_each_other(page: native.Activity) -> None:
    page.live(5)
    assert page.lock(0, 5) == LOCKED
    got: list[int] = []
    inside = 0

    def wait() -> None:
        nonlocal inside
        got.append(page.lock(FOREVER, 5))
        inside += 1
        assert inside == 1
        inside -= 1
        page.unlock()

    waiters = [threading.Thread(target=wait) for _ in range(3)]
    for waiter in waiters:
        waiter.start()
    assert page.lock(SOON, 5) == TIMEOUT
    page.unlock()
    for waiter in waiters:
        waiter.join()
    assert got == [LOCKED] * 3


def test_an_owner_whose_slot_was_given_away_is_dead(page: native.Activity) -> None:
    """Its successor in the slot lives, under a name of its own, and does not get its lock by that."""
    with children(page, 1) as (a,):
        assert a.asked("L") == LOCKED
        a.kill()
        with children(page, 2) as (heir, other):
            assert heir.slot == a.slot
            assert other.asked("W") == OWNER_DIED


def test_a_new_broker_clears_what_its_predecessor_died_in(page: native.Activity) -> None:
    with children(page, 1) as (a,):
        assert page.lock_as_broker(0) == LOCKED
        assert a.asked("L") == TIMEOUT, "a broker lives until the next one comes"
        page.next_broker()
        assert a.asked("W") == OWNER_DIED
        assert page.lock_as_broker(SOON) == TIMEOUT
        assert a.asked("U") == 0
        assert page.lock_as_broker(0) == LOCKED


@given(word=st.integers(0, 2**32 - 1))
def test_a_scribbled_word_names_no_living_owner(word: int) -> None:
    page = new_page()
    page.live(1)
    page.lock_word = word
    assert page.lock(FOREVER, 0) in (LOCKED, OWNER_DIED)
    page.unlock()
    assert page.lock_word & 0x3FFFFFFF == 0


def test_an_owner_that_was_robbed_releases_nothing_of_its_robber(page: native.Activity) -> None:
    """A tenant can pretend that an owner is dead; what follows stays a lock."""
    with children(page, 2) as (a, b):
        assert a.asked("L") == LOCKED
        page.set_state(a.slot, SLOT_DEAD)
        assert b.asked("W") == OWNER_DIED
        assert a.asked("U") == 0
        page.set_state(a.slot, SLOT_ACTIVE)
        assert a.asked("L") == TIMEOUT
        assert b.asked("U") == 0
        assert a.asked("L") == LOCKED


@forks
@pytest.mark.parametrize("older", [(0,), (1,), (0, 1)])
def test_older_hooks_and_newer_ones_exclude_each_other(
    page: native.Activity, fork: Fork, older: tuple[int, ...]
) -> None:
    with children(page, 2, fork, older) as (a, b):
        for first, second in ((a, b), (b, a)):
            assert first.asked("L") == LOCKED
            assert second.asked("L") == TIMEOUT
            assert first.asked("U") == 0


@forks
@pytest.mark.parametrize("killed", [0, 1])
def test_an_older_waiter_that_is_killed_takes_no_lock_from_a_newer_owner(
    page: native.Activity, fork: Fork, killed: int
) -> None:
    """Nor a newer waiter from an older owner: of a newer and an older hook, process 1 both."""
    with children(page, 3, fork, older=(killed,)) as three:
        waiter, owner, third = three[0], three[1], three[2]
        assert owner.asked("L") == LOCKED
        waiter.begin("W")
        if killed:
            until_waited_for(page)
        waiter.kill()
        assert third.asked("L") == TIMEOUT
        owner.kill()
        assert third.asked("W") == OWNER_DIED


def test_an_older_broker_may_be_inside(page: native.Activity) -> None:
    """It has taken the page over without saying that it names no TID. The next one does say so."""
    page.next_broker(older=True)
    with children(page, 1) as (a,):
        page.lock_word = 4711
        assert a.asked("L") == TIMEOUT
        page.next_broker()
        assert a.asked("W") == OWNER_DIED


@forks
def test_killed_after_any_instruction_a_process_leaves_a_lock_to_be_had(page: native.Activity, fork: Fork) -> None:
    """As a waiter for a living owner, which is not disturbed, and as an owner."""
    with children(page, 1, fork) as (owner,):
        for _ in killed_after_instructions(lambda: page.stepped("reserve", 1, 2, 50, 0), every=7, fork=fork):
            assert owner.asked("W") in (LOCKED, OWNER_DIED)
            assert owner.asked("U") == 0


class Contention(RuleBasedStateMachine):
    """Four processes, each in a PID namespace of its own where that is possible; any of them may die at any time. At
    most one is inside, and a dead one is not for long."""

    def __init__(self) -> None:
        super().__init__()
        self.page = new_page()
        self.children = [Child(self.page, slot, fork_apart) for slot in range(3)]
        self.inside: int | None = None
        self.died_inside = False
        self.waiting: set[int] = set()

    idle = st.integers(0, 2)

    @precondition(lambda self: self.inside is None)
    @rule(slot=idle)
    def enter(self, slot: int) -> None:
        if slot in self.waiting:
            return
        expected = OWNER_DIED if self.died_inside else LOCKED
        assert self.children[slot].asked("W") == expected
        self.inside, self.died_inside = slot, False

    @precondition(lambda self: self.inside is not None and not self.waiting)
    @rule()
    def leave(self) -> None:
        assert self.inside is not None
        assert self.children[self.inside].asked("U") == 0
        self.inside = None

    @precondition(lambda self: self.inside is not None)
    @rule(slot=idle)
    def wait_for_it(self, slot: int) -> None:
        if slot != self.inside and not self.waiting:
            self.children[slot].begin("W")
            self.waiting.add(slot)

    @precondition(lambda self: self.waiting)
    @rule()
    def kill_the_waiter(self) -> None:
        self.renew(self.waiting.pop())

    @precondition(lambda self: self.inside is not None)
    @rule()
    def kill_the_owner(self) -> None:
        assert self.inside is not None
        dead, self.inside, self.died_inside = self.inside, None, True
        self.renew(dead)
        for waiter in self.waiting:
            assert self.children[waiter].told() == OWNER_DIED
            self.inside, self.died_inside = waiter, False
        self.waiting.clear()

    def renew(self, slot: int) -> None:
        self.children[slot].kill()
        self.page.set_state(slot, SLOT_FREE)
        self.children[slot] = Child(self.page, slot, fork_apart)

    @invariant()
    def others_stay_outside(self) -> None:
        if self.inside is not None:
            for slot in {0, 1, 2} - {self.inside} - self.waiting:
                assert self.children[slot].asked("L") == TIMEOUT

    def teardown(self) -> None:
        for child in self.children:
            child.kill()


Contention.TestCase.settings = settings(max_examples=6, stateful_step_count=12)
TestContention = Contention.TestCase
