"""A vGPU has a broker that works, whatever its brokers do. They are played by programs that do nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio

from gpuserver.runtime.lifecycle import brokers
from gpuserver.runtime.lifecycle.brokers import Brokers
from gpuserver.runtime.vgpus import NO_PROCESS, Vgpu
from vgpu.identity import Process
from vgpu.limits import DEFAULT_LIMITS
from vgpu.paths import NodePaths
from vgpu.protocol.peer import start_time


class Played:
    """A vGPU whose brokers say nothing; ``started``: their pids. Each new broker runs ``program``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
        self.started: list[int] = []
        self.program: tuple[str, ...] = ("/bin/sleep", "600")
        self.vgpu = cast(
            Vgpu,
            SimpleNamespace(
                record=SimpleNamespace(vgpu_id="vgpu-00000000"),
                activity=object(),
                broker=NO_PROCESS,
                keeper_scope=None,
                mountable=False,
                registered=trio.Event(),
                removed=trio.Event(),
                failure="",
                listens=False,
                left=trio.Event(),
            ),
        )
        monkeypatch.setattr(brokers, "start_broker", self._start_broker)
        monkeypatch.setattr(brokers, "RETURN_S", 0.05)
        state = SimpleNamespace(
            settings=SimpleNamespace(paths=NodePaths(directory, directory), limits=DEFAULT_LIMITS),
            facts=SimpleNamespace(index=0),
            record_event=lambda *_: None,
            at_shares=[],
        )
        unused = cast(Any, None)
        self.brokers = Brokers(cast(Any, state), stores=unused, reports=unused, memory=unused)

    async def _start_broker(self, *_: object) -> tuple[Process, int]:
        self.started.append(os.posix_spawn(self.program[0], self.program, {}))  # noqa: ASYNC221 - it is short
        return Process(self.started[-1], start_time(self.started[-1])), -1

    async def until(self, condition: Callable[[], bool]) -> None:
        with trio.fail_after(30):
            while not condition():  # noqa: ASYNC110 - a process that ended tells nobody here
                await trio.sleep(0.01)

    async def end(self) -> None:
        self.vgpu.removed.set()
        with suppress(ProcessLookupError):  # it may have been taken for another one that never registers
            os.kill(self.started[-1], signal.SIGKILL)
        await self.vgpu.left.wait()


def test_one_that_never_registers_is_replaced_also_after_one_that_had(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def scene() -> None:
        played = Played(monkeypatch, tmp_path)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(played.brokers.keep, played.vgpu)
            await played.until(lambda: len(played.started) == 1)
            played.vgpu.registered.set()
            os.kill(played.started[0], signal.SIGKILL)
            await played.until(lambda: len(played.started) >= 3)
            await played.end()

    trio.run(scene)


def test_one_whose_brokers_die_at_their_start_has_failed_and_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No loop of starts, and another try in a minute, or as soon as it is removed."""

    async def scene() -> None:
        played = Played(monkeypatch, tmp_path)

        played.program = ("/bin/true",)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(played.brokers.keep, played.vgpu)
            await played.until(lambda: bool(played.vgpu.failure))
            assert len(played.started) == brokers.MOST_FAILS
            assert played.vgpu.failure == (
                "its broker has ended 3 times before it could admit a process; why: vgpuctl logs vgpu-00000000; "
                "remove it: vgpuctl rm -f vgpu-00000000"
            )
            await played.end()

    trio.run(scene)
