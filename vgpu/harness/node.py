"""A node that belongs to one command: directories, supervisor and vGPUs of its own, all gone afterwards."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Final

import trio

from client_hook import interpreter
from client_hook.namespaces import ALLOW
from vgpu.ctl.options import Mode
from vgpu.errors import ErrorCode, VgpuError
from vgpu.node.link import ControlLink
from vgpu.node.starting import START_UP_S, did_not_start, node_command
from vgpu.paths import NodePaths

_STOP_S: Final = 10.0
_LONGEST_BASE: Final = 40


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a private node lives; ``output`` is open on ``log``."""

    runtime: Path
    state: Path
    log: Path
    output: IO[bytes]


@contextmanager
def _place(purpose: str) -> Iterator[_Place]:
    # The path of a socket has 107 characters at most, and TMPDIR is that long on some build machines.
    base = tempfile.gettempdir() if len(tempfile.gettempdir()) <= _LONGEST_BASE else "/tmp"
    with tempfile.TemporaryDirectory(prefix=f"vgpu-{purpose}-", dir=base, ignore_cleanup_errors=True) as directory:
        runtime, state, log = Path(directory, "run"), Path(directory, "state"), Path(directory, "node.log")
        runtime.mkdir()
        state.mkdir()
        with log.open("wb") as output:
            yield _Place(runtime, state, log, output)


@asynccontextmanager
async def private_node(
    simulated: bool, mode: Mode, purpose: str = "demo", gpus: Iterable[int] = ()
) -> AsyncIterator[Path]:
    """Starts a node beside any other on this machine and yields its control socket, once it answers there.
    ``purpose``: a part of its directory's name; ``gpus``: the indices of those to serve, else all.

    On leaving, in whatever way, the node is asked to end, then made to, and its directories are removed.
    """
    with _place(purpose) as place:
        run = partial(
            trio.run_process,
            node_command(1 if simulated else 0, mode, gpus),
            env=interpreter.environment(os.environ)
            | {"VGPU_RUNTIME_DIR": str(place.runtime), "VGPU_STATE_DIR": str(place.state)}
            | {ALLOW: "1"},  # its programs are children of this command, and so in the same namespace
            stdin=subprocess.DEVNULL,
            stdout=place.output,
            stderr=place.output,
            check=False,
            deliver_cancel=_end,
            start_new_session=True,
        )
        control_socket = NodePaths(place.runtime, place.state).control_socket
        async with trio.open_nursery() as nursery:
            process: trio.Process = await nursery.start(run)
            await _answering(control_socket, process, place.log)
            yield control_socket
            nursery.cancel_scope.cancel()


async def _end(process: trio.Process) -> None:
    """Ask the node to end, so that it ends its servers and brokers; a node that is killed leaves them behind."""
    process.terminate()
    with trio.move_on_after(_STOP_S):
        await process.wait()
        return
    process.kill()


async def _answering(control_socket: Path, process: trio.Process, log: Path) -> None:
    with trio.move_on_after(START_UP_S):
        while process.returncode is None:
            try:
                await trio.to_thread.run_sync(_greet, control_socket)
                return
            except VgpuError as error:
                if error.code not in {ErrorCode.UNREACHABLE, ErrorCode.UNAVAILABLE}:
                    raise
            await trio.sleep(0.05)
        raise did_not_start(log)
    raise VgpuError(ErrorCode.TIMEOUT, f"the node did not answer within {START_UP_S:g} s", "vgpuctl doctor")


def _greet(control_socket: Path) -> None:
    with ControlLink(control_socket):
        pass
