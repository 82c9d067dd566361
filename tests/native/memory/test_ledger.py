"""The limit ledger against a twin that is obviously right, against kill -9 at every instruction, and against liars."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cython_ext.readings import SHARED
from cython_ext.testing import bindings_memory as native
from tests.native.namespaces import fork_apart
from tests.native.tracing import killed_after_instructions
from tests.tiers import slow

SLOT_DEAD, SLOT_FREE = 3, 0
KINDS = range(native.MEMORY_KINDS)
LIMIT = 1000
forks = pytest.mark.parametrize("fork", [os.fork, fork_apart], ids=["one-namespace", "namespaces"])


def shared_page() -> native.Activity:
    page = native.Activity(mmap.mmap(-1, native.ACTIVITY_BYTES))
    page.init()
    return page


def own_page() -> native.Activity:
    page = native.Activity(bytearray(native.ACTIVITY_BYTES))
    page.init()
    return page


class LedgerTwin(RuleBasedStateMachine):
    """Every operation, in any order, with any numbers: the page and two dicts agree on verdict and sums."""

    def __init__(self) -> None:
        super().__init__()
        self.page = own_page()
        self.reserved = dict.fromkeys(range(4), 0)
        self.committed = {(slot, kind): 0 for slot in range(4) for kind in KINDS}
        self.peak = dict.fromkeys(range(4), 0)
        self.dead: set[int] = set()

    slots = st.integers(0, 3)
    kinds = st.sampled_from(KINDS)
    sizes = st.one_of(st.integers(0, 400), st.integers(0, 2**64 - 1), st.just(2**63))
    limits = st.sampled_from([LIMIT, LIMIT, 2**63, 2**64 - 1])

    def owned(self, slot: int) -> int:
        return self.reserved[slot] + sum(self.committed[slot, kind] for kind in KINDS)

    def total(self) -> int:
        return sum(map(self.owned, range(4)))

    @rule(slot=slots, kind=kinds, size=sizes, limit=limits, own=st.sampled_from([LIMIT // 3, 2**64 - 1]))
    def reserve(self, slot: int, kind: int, size: int, limit: int, own: int) -> None:
        fits = self.total() + size <= limit and self.owned(slot) + size <= own
        assert self.page.reserve(slot, kind, size, limit, own) == (native.LEDGER_OK if fits else native.LEDGER_REFUSED)
        if fits:
            self.reserved[slot] += size
            self.peak[slot] = max(self.peak[slot], self.owned(slot))
        else:
            assert self.page.slot(slot).refused_bytes == size

    @rule(slot=slots, kind=kinds, size=sizes)
    def commit(self, slot: int, kind: int, size: int) -> None:
        owns = size <= self.reserved[slot]
        assert self.page.commit(slot, kind, size) == (native.LEDGER_OK if owns else native.LEDGER_REFUSED)
        if owns:
            self.reserved[slot] -= size
            self.committed[slot, kind] += size

    @rule(slot=slots, kind=kinds, size=sizes)
    def cancel(self, slot: int, kind: int, size: int) -> None:
        owns = size <= self.reserved[slot]
        assert self.page.cancel(slot, kind, size) == (native.LEDGER_OK if owns else native.LEDGER_REFUSED)
        if owns:
            self.reserved[slot] -= size

    @rule(slot=slots, kind=kinds, size=sizes)
    def release(self, slot: int, kind: int, size: int) -> None:
        owns = size <= self.committed[slot, kind]
        assert self.page.release(slot, kind, size) == (native.LEDGER_OK if owns else native.LEDGER_REFUSED)
        if owns:
            self.committed[slot, kind] -= size

    @rule(slot=slots, kind=kinds, size=sizes)
    def share(self, slot: int, kind: int, size: int) -> None:
        owns = kind != SHARED and size <= self.committed[slot, kind]
        assert self.page.share(slot, kind, size) == (native.LEDGER_OK if owns else native.LEDGER_REFUSED)
        if owns:
            self.committed[slot, kind] -= size
            self.committed[slot, SHARED] += size

    @rule(slot=slots)
    def die(self, slot: int) -> None:
        self.page.set_state(slot, SLOT_DEAD)
        self.dead.add(slot)

    @rule(slot=slots)
    def reap(self, slot: int) -> None:
        verdict, freed = self.page.reap(slot)
        if slot not in self.dead:
            assert (verdict, freed) == (native.LEDGER_REFUSED, 0)
            return
        assert (verdict, freed) == (native.LEDGER_OK, self.owned(slot))
        self.dead.remove(slot)
        self.reserved[slot] = 0
        self.committed |= {(slot, kind): 0 for kind in KINDS}

    @rule(slot=slots)
    def keep_shared(self, slot: int) -> None:
        before = self.owned(slot)
        verdict, freed = self.page.reap(slot, keeps_shared=True)
        if slot not in self.dead:
            assert (verdict, freed) == (native.LEDGER_REFUSED, 0)
            return
        self.reserved[slot] = 0
        self.committed |= {(slot, kind): 0 for kind in KINDS if kind != SHARED}
        assert (verdict, freed) == (native.LEDGER_OK, before - self.owned(slot))

    @precondition(lambda self: self.total() > 0)
    @rule(slot=slots, size=st.integers(1, 50))
    def nothing_beyond_the_last_byte(self, slot: int, size: int) -> None:
        limit = min(self.total() + size - 1, 2**64 - 1)  # a limit has 64 bits
        assert self.page.reserve(slot, 0, size, limit) == native.LEDGER_REFUSED

    @invariant()
    def books_agree(self) -> None:
        assert self.page.charged_bytes == self.page.sum_bytes == self.total()
        assert self.page.check() == native.LEDGER_OK
        for slot in range(4):
            words = self.page.slot(slot)
            assert words.reserved_bytes == self.reserved[slot]
            assert words.committed_bytes == tuple(self.committed[slot, kind] for kind in KINDS)
            assert words.intent_kind == 0
            assert words.peak_bytes == self.peak[slot]


TestLedgerTwin = LedgerTwin.TestCase


def test_a_sum_beyond_64_bits_is_over_every_limit() -> None:
    page = own_page()
    assert page.reserve(0, 0, 2**63, 2**64 - 1) == native.LEDGER_OK
    assert page.reserve(1, 0, 2**63, 2**64 - 1) == native.LEDGER_REFUSED
    assert page.charged_bytes == 2**63


@pytest.mark.parametrize(
    ("slot", "kind"), [(native.MAX_PROCESSES, 0), (0, native.MEMORY_KINDS), (2**32 - 1, 2**32 - 1)]
)
def test_a_slot_or_kind_that_does_not_exist_changes_nothing(slot: int, kind: int) -> None:
    page = own_page()
    assert page.reserve(slot, kind, 1, LIMIT) == native.LEDGER_BROKEN
    assert page.commit(slot, kind, 0) == native.LEDGER_BROKEN
    assert page.cancel(slot, kind, 0) == native.LEDGER_BROKEN
    assert page.release(slot, kind, 0) == native.LEDGER_BROKEN
    assert page.share(slot, kind, 0) == native.LEDGER_BROKEN
    assert page.charged_bytes == page.sum_bytes == 0


@pytest.mark.parametrize(
    ("operation", "words_before", "words_after"),
    [
        ("reserve", (300, 200), (350, 200)),
        ("commit", (300, 200), (250, 250)),
        ("cancel", (300, 200), (250, 200)),
        ("release", (300, 200), (300, 150)),
    ],
)
def test_killed_after_any_instruction_an_operation_happened_or_did_not(
    operation: str, words_before: tuple[int, int], words_after: tuple[int, int]
) -> None:
    """Words are (reserved, committed) of one slot; a neighbour owns 77."""
    page = shared_page()
    seen: list[tuple[int, int]] = []
    repaired = 0
    kills = killed_after_instructions(lambda: page.stepped(operation, 1, 2, 50, LIMIT))
    while True:
        page.init()
        page.reserve(0, 0, 77, LIMIT)
        page.reserve(1, 2, sum(words_before), LIMIT)
        page.commit(1, 2, words_before[1])
        if next(kills, None) is None:
            break
        repaired += page.charged_bytes != page.sum_bytes or page.slot(1).intent_kind != 0
        assert page.check() == native.LEDGER_OK
        words = page.slot(1)
        seen.append((words.reserved_bytes, words.committed_bytes[2]))
        assert page.charged_bytes == page.sum_bytes == 77 + sum(seen[-1])
        assert page.slot(0).reserved_bytes == 77
    assert seen == sorted(seen, key=lambda words: words != words_before), "done, then undone by a later death"
    assert set(seen) == {words_before, words_after}
    assert repaired >= 1, "no death fell into the middle of the operation: this test proves nothing"


def test_killed_while_memory_becomes_shared_it_stays_charged_once() -> None:
    page = shared_page()
    seen: set[tuple[int, int, int]] = set()
    kills = killed_after_instructions(lambda: page.stepped("share", 1, 2, 50))
    while True:
        page.init()
        page.reserve(1, 2, 300, LIMIT)
        page.commit(1, 2, 200)
        if next(kills, None) is None:
            break
        assert page.charged_bytes <= 300, "the peak would be too high"
        assert page.check() == native.LEDGER_OK
        words = page.slot(1)
        seen.add((words.reserved_bytes, words.committed_bytes[2], words.committed_bytes[SHARED]))
        assert page.charged_bytes == page.sum_bytes == 300
    assert seen == {(100, 200, 0), (150, 150, 0), (100, 150, 50)}


def test_a_reaping_killed_anywhere_gives_back_once() -> None:
    """The broker dies while it reaps; the next broker reaps again if the slot is still dead."""
    page = shared_page()
    outcomes: set[int] = set()
    kills = killed_after_instructions(lambda: page.stepped("reap", 1), every=47)
    while True:
        page.init()
        page.reserve(0, 0, 77, LIMIT)
        for kind in (0, 2, 7):
            page.reserve(1, kind, 50, LIMIT)
            page.commit(1, kind, 40)
        page.set_state(1, SLOT_DEAD)
        if next(kills, None) is None:
            break
        page.next_broker()
        assert page.check() == native.LEDGER_OK
        left = page.sum_bytes - 77
        assert page.charged_bytes == 77 + left
        verdict, freed = page.reap(1)
        outcomes.add(verdict)
        assert freed == left
        assert page.slot(1).state == SLOT_FREE
        assert page.charged_bytes == page.sum_bytes == 77
    assert outcomes == {native.LEDGER_OK, native.LEDGER_REFUSED}


def forked(work: Callable[[], None], fork: Callable[[], int] = os.fork) -> int:
    pid = fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return pid


@forks
@pytest.mark.parametrize("deaths", [15, *slow(105)])
def test_processes_killed_at_random_leave_the_sum_exact(fork: Callable[[], int], deaths: int) -> None:
    """Three writers at a time under one lock, deaths by SIGKILL; a survivor keeps its bytes throughout."""
    page = shared_page()
    page.reserve(0, 0, 77, LIMIT)
    running: dict[int, int] = {}
    for death in range(deaths):
        for slot in range(1, 4):
            if slot not in running:
                running[slot] = forked(partial(page.churn, slot, slot, 100, LIMIT), fork)
        slot = 1 + death % 3
        while page.slot(slot).peak_bytes == 0:  # until the newest has begun
            time.sleep(0.0005)
        os.kill(running[slot], signal.SIGKILL)
        os.waitpid(running.pop(slot), 0)
        page.set_state(slot, SLOT_DEAD)
        verdict, freed = page.reap(slot)
        assert verdict == native.LEDGER_OK
        assert freed in (0, 100)
        assert page.slot(slot)[1:4] == (0, (0,) * 8, 0)
    for pid in running.values():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert page.check() == native.LEDGER_OK
    survivors = [page.slot(slot) for slot in range(1, 4)]
    owned = sum(words.reserved_bytes + sum(words.committed_bytes) for words in survivors)
    assert page.charged_bytes == page.sum_bytes == 77 + owned


@pytest.mark.parametrize("rounds", [100, *slow(900)])
def test_eight_processes_race_for_the_last_bytes_and_none_is_lost_or_made(rounds: int) -> None:
    """In each round all begin at once and take until there is nothing left."""
    page = shared_page()
    limit, sizes = 20_000, (1, 2, 3, 5, 7, 11, 13, 17)
    together = multiprocessing.get_context("fork").Barrier(len(sizes) + 1, timeout=60)

    def race(slot: int) -> None:
        assert page.live(slot) == native.ROBUST_LOCKED
        for _ in range(rounds):
            together.wait()
            taken = 0
            while page.reserve(slot, slot, sizes[slot], limit) == native.LEDGER_OK:
                taken += sizes[slot]
                assert page.commit(slot, slot, sizes[slot]) == native.LEDGER_OK
            together.wait()  # everybody has been refused ...
            together.wait()  # ... and the sums were looked at
            assert page.release(slot, slot, taken) == native.LEDGER_OK
            together.wait()

    pids = [forked(partial(race, slot)) for slot in range(len(sizes))]
    owned = set()
    for _ in range(rounds):
        together.wait()
        together.wait()
        # the process that takes single bytes fills it to the brim
        assert page.charged_bytes == page.sum_bytes == limit
        owned.add(tuple(sum(page.slot(slot).committed_bytes) for slot in range(len(sizes))))
        together.wait()
        together.wait()
        assert page.charged_bytes == page.sum_bytes == 0
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * len(sizes)
    assert page.check() == native.LEDGER_OK
    assert len(owned) > 1  # they did race: it did not always go the same way


def test_a_stopped_holder_does_not_hang_the_others() -> None:
    page = shared_page()

    def hold_and_stop() -> None:
        page.live(0)
        assert page.lock(0, 0) == native.ROBUST_LOCKED
        os.kill(os.getpid(), signal.SIGSTOP)
        page.unlock()

    pid = forked(hold_and_stop)
    os.waitpid(pid, os.WUNTRACED)
    assert page.reserve(1, 0, 1, LIMIT) == native.LEDGER_BROKEN
    os.kill(pid, signal.SIGCONT)
    assert os.waitpid(pid, 0)[1] == 0
    assert page.reserve(1, 0, 1, LIMIT) == native.LEDGER_OK


def set_lock_word(memory: bytearray, value: int) -> None:
    memory[native.LEDGER_OFFSET : native.LEDGER_OFFSET + 4] = value.to_bytes(4, "little")


words = st.integers(0, native.ACTIVITY_BYTES // 8 - 1)


@settings(max_examples=min(60, settings().max_examples))
@given(
    scribbles=st.lists(st.tuples(words, st.integers(0, 2**64 - 1)), max_size=40),
    pattern=st.integers(0, 255),
    slot=st.integers(0, native.MAX_PROCESSES - 1),
)
def test_a_page_of_lies_neither_crashes_nor_hangs_nor_overflows(
    scribbles: list[tuple[int, int]], pattern: int, slot: int
) -> None:
    memory = bytearray([pattern]) * native.ACTIVITY_BYTES
    page = native.Activity(memory)
    for word, value in scribbles:
        memory[8 * word : 8 * word + 8] = value.to_bytes(8, "little")
    set_lock_word(memory, 0x40000000)  # FUTEX_OWNER_DIED: the lies are recovered from
    verdicts = [
        page.reserve(slot, 3, 2**63, 2**64 - 1),
        page.commit(slot, 3, 2**63),
        page.release(slot, 3, 2**64 - 1),
        page.cancel(slot, 0, 1),
    ]
    assert set(verdicts) <= {native.LEDGER_OK, native.LEDGER_REFUSED}
    page.check()
    assert page.check() == native.LEDGER_OK
    page.set_state(slot, SLOT_DEAD)
    assert page.reap(slot)[0] == native.LEDGER_OK
    assert page.slot(slot)[1:4] == (0, (0,) * 8, 0)


def test_a_scribbled_lock_is_recovered_from() -> None:
    """It names no process that could be inside, and what it protects may be half done."""
    memory = bytearray(native.ACTIVITY_BYTES)
    page = native.Activity(memory)
    assert page.reserve(0, 0, 10, LIMIT) == native.LEDGER_OK
    page.charged_bytes = 500
    set_lock_word(memory, 0x3FFFFFFF)
    assert page.reserve(0, 0, 1, LIMIT) == native.LEDGER_OK
    assert page.charged_bytes == page.sum_bytes == 11
