"""The robust lock: the kernel announces a dead owner to whoever waits, and nobody waits for ever."""

from __future__ import annotations

import mmap
import os
import signal
import threading

import pytest

from cython_ext import nativememory as native

FOREVER = 60 * 10**9  # bounds a failing test, never reached by a passing one


@pytest.fixture
def page() -> native.Activity:
    page = native.Activity(mmap.mmap(-1, native.ACTIVITY_BYTES))
    page.init()
    return page


def child_that(page: native.Activity, action: str) -> tuple[int, int]:
    """A child that did ``action`` and now waits to be killed: its pid, and the descriptor to close when done."""
    ready, say = os.pipe()
    pid = os.fork()
    if pid == 0:
        result = page.hold_alive(3) if action == "hold" else page.lock(0)
        os.write(say, bytes([result]))
        signal.pause()
    os.close(say)
    assert os.read(ready, 1) == bytes([native.ROBUST_LOCKED])
    return pid, ready


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_alive_is_held_until_its_process_dies(page: native.Activity) -> None:
    assert page.watch_alive(3, 0) == native.ROBUST_FREE
    pid, ready = child_that(page, "hold")
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
    pid, ready = child_that(page, "hold")
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


def test_a_waiter_gets_the_lock_of_a_dead_owner(page: native.Activity) -> None:
    pid, ready = child_that(page, "lock")
    assert page.lock(0) == native.ROBUST_TIMEOUT
    got: list[int] = []

    def wait() -> None:
        got.append(page.lock(FOREVER))
        page.unlock()

    waiters = [threading.Thread(target=wait) for _ in range(3)]
    for waiter in waiters:
        waiter.start()
    kill(pid)
    os.close(ready)
    for waiter in waiters:
        waiter.join()
    assert sorted(got) == [native.ROBUST_LOCKED] * 2 + [native.ROBUST_OWNER_DIED]


def test_a_waiter_that_dies_takes_nothing_with_it(page: native.Activity) -> None:
    assert page.lock(0) == native.ROBUST_LOCKED
    pid = os.fork()
    if pid == 0:
        page.lock(FOREVER)
        os._exit(1)
    kill(pid)
    page.unlock()
    assert page.lock(0) == native.ROBUST_LOCKED
    page.unlock()


def test_a_forked_child_locks_under_its_own_name(page: native.Activity) -> None:
    """The parent has cached its TID; were the child to use it, the kernel would not recognise the child as owner."""
    assert page.lock(0) == native.ROBUST_LOCKED
    page.unlock()
    pid, ready = child_that(page, "lock")
    kill(pid)
    os.close(ready)
    assert page.lock(FOREVER) == native.ROBUST_OWNER_DIED
    page.unlock()
