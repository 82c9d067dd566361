"""When a suspended vGPU that waits for triggers is resumed, and why. Pure.

A trigger is a CUDA call of one of its programs, a connection to a port, or a time. The request that suspends the vGPU
names the triggers; for an idle-suspended vGPU its specification names the ports. The first trigger resumes the vGPU.
Each is a level, not an edge: a thread that waits in a call waits on, a connection that was not there before is there
until one of its ends closes it, a time stays past. So neither a restart of the server nor a failed attempt loses a
trigger.

Where a call or a connection is a trigger, so is a program that starts: its first call waits to be let in. So is a
program that ends: its last calls of the driver would wait for ever.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from gpuserver.core.states.idle import retry_ns
from vgpu.protocol.triggers import CALL, ports_of

UNIX_S: Final = 1_000_000_000


class Cause(StrEnum):
    """Why a vGPU was resumed."""

    REQUEST = "request"
    CALL = "call"
    CONNECTION = "connection"
    TIME = "time"
    START = "start"
    END = "end"


@dataclass(frozen=True, slots=True)
class Standby:
    """What a suspended vGPU waits for. The journal has it."""

    triggers: tuple[str, ...] = ()
    at_unix_s: float | None = None
    known: tuple[int, ...] = ()
    """The connections to its ports that were there when it was suspended (``sockets.Socket.mark``)."""

    @property
    def ports(self) -> tuple[int, ...]:
        return ports_of(self.triggers)


NO_STANDBY: Final = Standby()
"""It waits for a request alone."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What the server sees of a suspended vGPU."""

    now_unix_s: float
    calls: bool = False
    """A thread of a program waits in a CUDA call."""
    starts: bool = False
    """A new program waits to be let in."""
    ends: bool = False
    """A program has begun to end."""
    port: int = 0
    """To it there is a connection that was not there before; 0: there is none."""
    failures: int = 0
    """Failed attempts to resume it, in a row."""
    tried_ns: int = 0
    """The last attempt."""


def cause_of(standby: Standby, seen: Seen) -> Cause | None:
    """Why it is to be resumed now; None: it stays suspended."""
    if seen.port in standby.ports and seen.port:
        return Cause.CONNECTION
    if CALL in standby.triggers and seen.calls:
        return Cause.CALL
    if standby.at_unix_s is not None and seen.now_unix_s >= standby.at_unix_s:
        return Cause.TIME
    if standby.triggers and seen.starts:
        return Cause.START
    return Cause.END if standby.triggers and seen.ends else None


def decide(standby: Standby, seen: Seen, now_ns: int) -> Cause | None:
    """As ``cause_of``, not sooner after a failed attempt than another may be made."""
    if seen.failures and now_ns < retry_ns(seen.failures, seen.tried_ns):
        return None
    return cause_of(standby, seen)


def marks(connections: Iterable[int]) -> tuple[int, ...]:
    """As ``Standby.known`` has them."""
    return tuple(sorted(set(connections)))
