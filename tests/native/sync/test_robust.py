"""``Slot.alive``: the kernel announces the death of the thread that holds it, and no wait is unbounded."""

from __future__ import annotations

import mmap
import os
import signal
import threading
from collections.abc import Callable

import pytest

from cython_ext.testing import bindings_memory as native
from tests.native.namespaces import fork_apart
from tests.native.tracing import killed_after_instructions

FOREVER = 60 * 10**9  # bounds a failing test, never reached by a passing one


@pytest.fixture
def page() -> native.Activity:
    page = native.Activity(mmap.mmap(-1, native.ACTIVITY_BYTES))
    page.init()
    return page


def child_that_holds(page: native.Activity, fork: Callable[[], int] = os.fork) -> tuple[int, int]:
    """A child that holds ``alive`` of slot 3 and waits to be killed: its pid, and the descriptor to close when done."""
    ready, say = os.pipe()
    pid = fork()
    if pid == 0:
        os.write(say, bytes([page.hold_alive(3)]))
        signal.pause()
    os.close(say)
    assert os.read(ready, 1) == bytes([native.ROBUST_LOCKED])
    return pid, ready


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_alive_is_held_until_its_process_dies(page: native.Activity) -> None:
    assert page.watch_alive(3, 0) == native.ROBUST_FREE
    pid, ready = child_that_holds(page)
    assert page.watch_alive(3, 0) == native.ROBUST_TIMEOUT
    assert page.hold_alive(3) == native.ROBUST_TIMEOUT, "held by somebody else"
    kill(pid)
    os.close(ready)
    assert page.watch_alive(3, FOREVER) == native.ROBUST_OWNER_DIED
    assert page.watch_alive(4, FOREVER) == native.ROBUST_FREE


def test_alive_can_be_let_go_and_held_again(page: native.Activity) -> None:
    """As often as one likes, and its thread's end is then no death."""

    def live() -> None:
        for _ in range(3):
            assert page.hold_alive(3) == native.ROBUST_LOCKED
            assert page.watch_alive(3, 0) == native.ROBUST_TIMEOUT
            page.drop_alive(4)
            assert page.watch_alive(3, 0) == native.ROBUST_TIMEOUT, "another slot is not ours to drop"
            page.drop_alive(3)
            assert page.watch_alive(3, 0) == native.ROBUST_FREE

    thread = threading.Thread(target=live)
    thread.start()
    thread.join()
    assert page.watch_alive(3, 0) == native.ROBUST_FREE


def test_a_watcher_asleep_is_woken_by_the_death(page: native.Activity) -> None:
    pid, ready = child_that_holds(page)
    seen: list[int] = []
    watcher = threading.Thread(target=lambda: seen.append(page.watch_alive(3, FOREVER)))
    watcher.start()
    kill(pid)
    watcher.join()
    os.close(ready)
    assert seen == [native.ROBUST_OWNER_DIED]


def test_alive_outlives_other_locks_of_its_thread(page: native.Activity) -> None:
    """Sections on the ledger neither take ``alive`` off the robust list nor hide it from the kernel."""
    ready, say = os.pipe()
    pid = os.fork()
    if pid == 0:
        page.hold_alive(3)
        for _ in range(10):
            page.reserve(3, 0, 1, 1000)
        os.write(say, b"!")
        signal.pause()
    os.close(say)
    assert os.read(ready, 1) == b"!"
    os.close(ready)
    kill(pid)
    assert page.watch_alive(3, FOREVER) == native.ROBUST_OWNER_DIED


def test_the_end_of_a_thread_counts_as_death(page: native.Activity) -> None:
    thread = threading.Thread(target=lambda: page.hold_alive(5))
    thread.start()
    thread.join()
    assert page.watch_alive(5, FOREVER) == native.ROBUST_OWNER_DIED


def test_a_process_that_comes_too_late_names_no_word_to_the_kernel(page: native.Activity) -> None:
    """Its TID may be that of the owner, in another PID namespace. It dies after any instruction of its try."""
    pid, ready = child_that_holds(page, fork_apart)
    for _ in killed_after_instructions(lambda: page.stepped("hold", 3), fork=fork_apart):
        assert page.watch_alive(3, 0) == native.ROBUST_TIMEOUT
    kill(pid)
    os.close(ready)
    assert page.watch_alive(3, FOREVER) == native.ROBUST_OWNER_DIED
