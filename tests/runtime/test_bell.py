"""A bell ends a pause early, and its ringing is never lost."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from gpuserver.runtime.bell import LEAST_S, Bell


def test_a_bell_that_rings_between_two_waits_ends_the_next_one_alone() -> None:
    async def scene() -> None:
        bell, began = Bell(), trio.current_time()
        bell.ring()
        bell.ring()
        assert await bell.wait(10)
        assert trio.current_time() == began + LEAST_S
        assert not await bell.wait(10)
        assert trio.current_time() == pytest.approx(began + 10 + LEAST_S)
        assert not await bell.wait(0)

    trio.run(scene, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_bell_that_rings_during_a_wait_ends_it() -> None:
    async def scene() -> None:
        bell, began = Bell(), trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(bell.wait, 10)
            await trio.sleep(3)
            bell.ring()
        assert trio.current_time() == began + 3

    trio.run(scene, clock=trio.testing.MockClock(autojump_threshold=0))
