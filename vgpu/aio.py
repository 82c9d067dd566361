"""The Python API for asyncio and trio: the verbs of ``vgpu`` as coroutines, on anyio.

Each request runs in a thread. A task that is cancelled hangs up its link, so the node gives the request up, and then
waits for the thread. So a cancellation leaves no vGPU and no thread behind.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from subprocess import CompletedProcess
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, Unpack

from vgpu import extras
from vgpu.api import handle, programs
from vgpu.api.link import Link, open_link
from vgpu.api.node import Node
from vgpu.api.options import Changes, Options, Percent, Size
from vgpu.api.stats import Stats
from vgpu.api.triggers import Moment
from vgpu.errors import ErrorCode, VgpuError

extras.need("vgpu.aio", "aio")
import anyio  # noqa: E402
import anyio.lowlevel  # noqa: E402
import anyio.to_thread  # noqa: E402

if TYPE_CHECKING:
    from anyio.abc import Process

T = TypeVar("T")


class Vgpu:
    """A vGPU of a node. Every coroutine raises ``VgpuError``, as the method of ``vgpu.Vgpu`` with its name."""

    def __init__(self, blocking: handle.Vgpu, path: Path | None) -> None:
        self._blocking = blocking
        self._path = path

    @property
    def id(self) -> str:
        return self._blocking.id

    @property
    def name(self) -> str | None:
        return self._blocking.name

    def __repr__(self) -> str:
        return repr(self._blocking)

    def environ(self, inherited: Mapping[str, str] | None = None) -> dict[str, str]:
        """The environment of a program in this vGPU."""
        return self._blocking.environ(inherited)

    async def run(
        self, command: str | Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> CompletedProcess[bytes]:
        """``anyio.run_process`` in this vGPU. A cancellation ends the program."""
        prepared = programs.prepared(self._blocking.reading, command, env)
        return await anyio.run_process(command, env=prepared, **options)

    async def open_process(
        self, command: str | Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> Process:
        """``anyio.open_process`` in this vGPU."""
        prepared = programs.prepared(self._blocking.reading, command, env)
        return await anyio.open_process(command, env=prepared, **options)

    async def stats(self) -> Stats:
        return await self._call(lambda vgpu: vgpu.stats())

    async def mounts(self) -> list[str]:
        return await self._call(lambda vgpu: vgpu.mounts())

    async def resize(self, *, sm: Percent | None = None, mem: Size | None = None, **changes: Unpack[Changes]) -> None:
        await self._call(lambda vgpu: vgpu.resize(sm=sm, mem=mem, **changes))

    async def suspend(self, *, resume_on: str | Sequence[str] = (), resume_at: Moment | None = None) -> None:
        await self._call(lambda vgpu: vgpu.suspend(resume_on=resume_on, resume_at=resume_at))

    async def resume(self) -> None:
        await self._call(lambda vgpu: vgpu.resume())

    async def migrate(self, gpu: int | str) -> None:
        await self._call(lambda vgpu: vgpu.migrate(gpu))

    async def remove(self, *, force: bool = False) -> None:
        await self._call(lambda vgpu: vgpu.remove(force=force))

    async def _call(self, act: Callable[[handle.Vgpu], T]) -> T:
        def ask(node: _Interruptible) -> T:
            vgpu = handle.Vgpu(self._blocking.reading, node.open_link)
            result = act(vgpu)
            self._blocking.reading = vgpu.reading
            return result

        return await _Call(self._path, ask).run()


@asynccontextmanager
async def create(
    spec: Any = None,
    *,
    sm: Percent | None = None,
    mem: Size | None = None,
    name: str | None = None,
    gpu: int | str = "auto",
    owner: str | int | None = None,
    keep: bool = False,
    attach: Literal["owner", "mount"] = "owner",
    node: Node | None = None,
    **options: Unpack[Options],
) -> AsyncIterator[Vgpu]:
    """A new vGPU for the block, removed at its end unless ``keep``. Options and errors: as ``vgpu.create``."""
    path = None if node is None else node.path

    def make(interruptible: _Interruptible) -> handle.Vgpu:
        return interruptible.create(
            spec, sm=sm, mem=mem, name=name, gpu=gpu, owner=owner, keep=keep, attach=attach, **options
        )

    def undo(made: handle.Vgpu) -> None:
        handle.discard(made.id, path)

    made = await _Call(path, make, undo).run()
    try:
        yield Vgpu(made, path)
    finally:
        if not keep:
            with anyio.CancelScope(shield=True):
                # In a thread by itself: the node bounds a removal, and it is not given up.
                leave = handle.Vgpu(made.reading, lambda: open_link(path), removed_at_exit=True)
                await anyio.to_thread.run_sync(leave.__exit__, None, None, None)


async def connect(vgpu: str, *, node: Node | None = None) -> Vgpu:
    """As ``vgpu.connect``."""
    path = None if node is None else node.path
    return Vgpu(await _Call(path, lambda interruptible: interruptible.connect(vgpu)).run(), path)


async def list_vgpus(*, node: Node | None = None) -> list[Vgpu]:
    """As ``vgpu.list``; also called ``vgpu.aio.list``."""
    path = None if node is None else node.path
    return [Vgpu(one, path) for one in await _Call(path, lambda interruptible: interruptible.list()).run()]


class _Interruptible(Node):
    """A node whose links end at ``hang_up``, from any thread."""

    def __init__(self, path: Path | None) -> None:
        super().__init__(path)
        self._lock = threading.Lock()
        self._link: Link | None = None
        self._is_over = False

    def open_link(self, *, for_new: bool = False) -> Link:
        link = super().open_link(for_new=for_new)
        with self._lock:
            self._link = link
            if not self._is_over:
                return link
        link.close()
        raise VgpuError(ErrorCode.UNREACHABLE, "the request was cancelled")

    def hang_up(self) -> None:
        with self._lock:
            self._is_over = True
            if self._link is not None:
                self._link.hang_up()


class _Call(Generic[T]):
    """One call of the blocking API in a thread. ``undo``: for a result that no caller gets, after a cancellation."""

    def __init__(
        self,
        path: Path | None,
        act: Callable[[_Interruptible], T],
        undo: Callable[[T], None] | None = None,
    ) -> None:
        self._node = _Interruptible(path)
        self._act = act
        self._undo = undo
        self._results: list[T] = []
        self._error: Exception | None = None

    async def run(self) -> T:
        try:
            # The thread is waited for in a task of its own: asyncio's Task.cancel() passes no shield.
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._hang_up_when_cancelled)
                tasks.start_soon(self._in_thread, tasks.cancel_scope)
            await anyio.lowlevel.checkpoint_if_cancelled()
        except BaseException:
            if self._undo is not None and self._results:
                with anyio.CancelScope(shield=True):
                    await anyio.to_thread.run_sync(self._undo, self._results[0])
            raise
        if self._error is not None:
            raise self._error
        return self._results[0]

    async def _hang_up_when_cancelled(self) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            self._node.hang_up()

    async def _in_thread(self, tasks: anyio.CancelScope) -> None:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._attempt)
        tasks.cancel()

    def _attempt(self) -> None:
        try:
            self._results.append(self._act(self._node))
        except Exception as error:
            self._error = error


def __getattr__(name: str) -> object:
    if name == "list":  # the builtin's name stays free in this module
        return list_vgpus
    raise AttributeError(f"module 'vgpu.aio' has no attribute {name!r}")
