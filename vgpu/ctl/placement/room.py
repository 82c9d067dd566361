"""create --wait and run --wait: wait for room in the node's queue."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, Final
from uuid import uuid4

import typer
from typer.core import TyperCommand

from vgpu.ctl.exit_codes import say
from vgpu.ctl.new_vgpus import node_for_vgpu
from vgpu.errors import ErrorCode, VgpuError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vgpu.node.link import ControlLink
    from vgpu.protocol.messages import VgpuStatus
    from vgpu.protocol.tenancy import QueueReading

WAIT: Final = "--wait"
FOREVER: Final = "forever"
METAVAR: Final = "[TIME]"
ASK_S: Final = 1.0
"""Between two questions for the position of a request that waits."""
COME_BACK_S: Final = 50.0
"""How long a client tries to reach a node that ended while it waited. The node remembers its place a little longer."""

WaitOption = Annotated[
    str | None,
    typer.Option(
        WAIT, metavar=METAVAR, help="Where there is no room, wait for it: for so long, as in 10m, or without an end."
    ),
]


def is_time(word: str) -> bool:
    from vgpu.units import parse_duration_ns

    try:
        parse_duration_ns(word)
    except ValueError:
        return False
    return True


def whole(words: list[str]) -> list[str]:
    """``--wait`` without a time is ``--wait forever``."""
    found = []
    for word, following in pairwise([*words, ""]):
        found.append(word)
        if word == WAIT and not is_time(following) and following != FOREVER:
            found.append(FOREVER)
    return found


def waits_for_room(command: TyperCommand) -> bool:
    """Whether the command's ``--wait`` is the one of this module. ``ray-worker`` has another."""
    return any(WAIT in one.opts and getattr(one, "metavar", "") == METAVAR for one in command.params)


class WaitingCommand(TyperCommand):
    """A command with ``--wait [TIME]``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, whole(args))


def limit_ns(wait: str | None) -> int | None:
    """The most that the request waits; None: it does not. ``VgpuError`` (invalid): that is no time."""
    from vgpu.spec import LONGEST_DURATION_NS
    from vgpu.units import parse_duration_ns

    if wait is None:
        return None
    if wait == FOREVER:
        return LONGEST_DURATION_NS
    try:
        found = parse_duration_ns(wait)
    except ValueError as error:
        raise VgpuError(ErrorCode.INVALID, f"--wait: {error}") from error
    if not 0 < found <= LONGEST_DURATION_NS:
        raise VgpuError(ErrorCode.INVALID, f"--wait: {wait} is no time: write 10m, or leave it out")
    return found


@contextmanager
def made_when_there_is_room(longest_ns: int, **asked: Any) -> Iterator[tuple[ControlLink, VgpuStatus]]:
    """A new vGPU from the node's queue, and the link on which it was made. ``asked``: as ``ControlLink.create``. The
    position is printed on stderr. A node that is restarted meanwhile keeps the place."""
    request_id, deadline = uuid4().hex, time.monotonic() + longest_ns / 1e9
    lost_at: float | None = None
    while True:
        left_ns = max(1, min(longest_ns, int((deadline - time.monotonic()) * 1e9)))
        try:
            with node_for_vgpu() as node:
                with _position(request_id):
                    vgpu = node.create(request_id=request_id, queue_ns=left_ns, **asked)
                yield node, vgpu
                return
        except VgpuError as error:
            if error.code not in {ErrorCode.UNREACHABLE, ErrorCode.UNAVAILABLE}:
                raise
            lost_at = lost_at or time.monotonic()
            if time.monotonic() > min(lost_at + COME_BACK_S, deadline):
                raise
            time.sleep(0.2)


@contextmanager
def _position(request_id: str) -> Iterator[None]:
    """Prints where the request is in the queue, and why it waits, whenever one of them changes."""
    done = threading.Event()

    def follow() -> None:
        said = ""
        while not done.wait(ASK_S):
            with suppress(VgpuError):
                now = sentence(request_id, asked())
                if now and now != said:
                    said = now
                    say(now)

    def asked() -> Sequence[QueueReading]:
        from vgpu.node.link import ControlLink

        with ControlLink(timeout_s=5) as node:
            return node.queue()

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()


def sentence(request_id: str, waiting: Sequence[QueueReading]) -> str:
    """The position of the request, and the reason; "": it does not wait."""
    for one in waiting:
        if one.request_id == request_id:
            return f"waits for room, number {one.position} of {len(waiting)}" + (
                f": {one.reason}" if one.reason else ""
            )
    return ""
