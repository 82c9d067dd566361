"""The futex mutex of one process."""

from __future__ import annotations

import array
import threading

from cython_ext.testing import bindings_memory as native


def test_threads_exclude_each_other_and_none_sleeps_for_ever() -> None:
    lock, counter = native.Lock(), array.array("Q", [0])
    threads = [threading.Thread(target=lock.add_under, args=(counter, 100_000)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counter[0] == 600_000
    assert lock.try_acquire()


def test_a_held_lock_is_not_had_until_released_or_reset() -> None:
    lock = native.Lock()
    assert lock.try_acquire()
    assert not lock.try_acquire()
    lock.release()
    assert lock.try_acquire()
    lock.reset()
    assert lock.try_acquire()
