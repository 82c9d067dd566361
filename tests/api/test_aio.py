"""``vgpu.aio`` under asyncio and trio; a cancellation leaves nothing."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import anyio
import anyio.from_thread
import pytest

import vgpu
from tests.integration.node import SimulatedNode, eventually
from vgpu.aio import _Interruptible
from vgpu.api.link import Link

PRINT_ID = [sys.executable, "-c", "import os; print(os.environ['VGPU_ID'])"]
Run = Callable[[Callable[[], Awaitable[Any]]], Any]


@pytest.fixture(params=["asyncio", "trio"])
def run(request: pytest.FixtureRequest) -> Run:
    return lambda body: anyio.run(body, backend=request.param)


def empty() -> None:
    eventually(lambda: not vgpu.list(), "the vGPU's end")


def test_verbs(node: SimulatedNode, run: Run) -> None:
    async def body() -> None:
        async with vgpu.aio.create(sm=10, mem="1G", name="a") as v:
            assert (await v.run(PRINT_ID)).stdout.decode().strip() == v.id
            await v.resize(sm=20)
            assert (await v.stats()).guarantee_ratio == pytest.approx(0.2)
            await v.suspend(resume_at=timedelta(hours=1))
            assert (await v.stats()).reading["resume_at_unix_s"] > time.time() + 3000
            await v.resume()
            with pytest.raises(vgpu.VgpuError, match="listens on port 1,"):
                await v.suspend(resume_on=["call", "tcp:1"])
            assert [one.id for one in await vgpu.aio.list()] == [v.id]
            assert (await vgpu.aio.connect("a")).id == v.id
            async with await v.open_process(PRINT_ID, stdin=subprocess.DEVNULL) as process:
                assert await process.wait() == 0
        with pytest.raises(vgpu.VgpuError) as caught:
            await v.stats()
        assert caught.value.code is vgpu.ErrorCode.NOT_FOUND

    run(body)
    assert vgpu.list() == []


def test_side_by_side(node: SimulatedNode, run: Run) -> None:
    async def one() -> None:
        async with vgpu.aio.create(sm=5, mem="512M") as v:
            await v.run(PRINT_ID)

    async def body() -> None:
        async with anyio.create_task_group() as tasks:
            for _ in range(6):
                tasks.start_soon(one)

    run(body)
    assert vgpu.list() == []


def test_a_refusal_is_raised_as_it_is(node: SimulatedNode, run: Run) -> None:
    async def body() -> None:
        async with vgpu.aio.create(sm=5, mem="9000G"):
            raise AssertionError

    with pytest.raises(vgpu.VgpuError) as caught:
        run(body)
    assert caught.value.code is vgpu.ErrorCode.NO_ROOM


@pytest.mark.parametrize("step", range(1, 7))
def test_a_cancellation_at_any_message_leaves_nothing(
    node: SimulatedNode, run: Run, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hello, create and confirm: each is sent, and answered. The task is cancelled while its thread has come so far."""
    reached = 0
    scopes: list[anyio.CancelScope] = []

    def watched(method: Callable[..., Any]) -> Callable[..., Any]:
        def instead(*arguments: Any) -> Any:
            nonlocal reached
            result = method(*arguments)
            reached += 1
            if reached == step:
                anyio.from_thread.run_sync(scopes[0].cancel)
            return result

        return instead

    async def body() -> None:
        with anyio.CancelScope() as scope:
            scopes.append(scope)
            async with vgpu.aio.create(sm=5, mem="512M"):
                await anyio.sleep_forever()
        assert scope.cancelled_caught

    with monkeypatch.context() as patched:
        patched.setattr(Link, "_send_message", watched(Link._send_message))
        patched.setattr(Link, "_receive", watched(Link._receive))
        run(body)
    assert reached >= step
    empty()


def test_a_task_of_asyncio_that_is_cancelled_leaves_nothing(node: SimulatedNode) -> None:
    async def hold(made: asyncio.Event) -> None:
        async with vgpu.aio.create(sm=5, mem="512M"):
            made.set()
            await asyncio.sleep(3600)

    async def body() -> None:
        for wait_for_it in (False, True):
            made = asyncio.Event()
            task = asyncio.create_task(hold(made))
            await (made.wait() if wait_for_it else asyncio.sleep(0))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert wait_for_it == made.is_set()

    asyncio.run(body())
    empty()


def test_a_result_that_comes_with_the_cancellation_is_undone(
    node: SimulatedNode, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        with anyio.CancelScope() as scope:

            def made_and_cancelled(self: _Interruptible, *arguments: Any, **options: Any) -> Any:
                found = create(self, *arguments, **options)
                anyio.from_thread.run_sync(scope.cancel)
                return found

            create = vgpu.Node.create
            monkeypatch.setattr(_Interruptible, "create", made_and_cancelled, raising=False)
            async with vgpu.aio.create(sm=5, mem="512M"):
                raise AssertionError
        assert scope.cancelled_caught

    run(body)
    empty()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_killed_program_leaves_nothing(node: SimulatedNode, number: signal.Signals, backend: str) -> None:
    code = f"""
import anyio, vgpu
async def body():
    async with vgpu.aio.create(sm=5, mem="512M"):
        print("made", flush=True)
        await anyio.sleep_forever()
anyio.run(body, backend={backend!r})
"""
    program = node.popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert program.stdout is not None
    assert program.stdout.readline() == "made\n"
    program.send_signal(number)
    program.communicate()
    empty()
