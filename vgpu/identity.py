"""The identity of a process, from the kernel."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Process:
    """``start_time``: clock ticks since boot; together with ``pid`` a name that is never reused. 0: gone already."""

    pid: int
    start_time: int


@dataclass(frozen=True, slots=True)
class Member:
    """A process that a broker has admitted, with its identity from the kernel. All members are the processes of a vGPU.

    ``uid``: under which it attached, −1 if that is not known. ``alive``: False from its death until the driver has
    released its memory. ``command``: its own word, for people. ``counts``: its hook counts the GPU time
    that it uses.
    """

    slot: int
    process: Process
    uid: int = -1
    command: str = ""
    alive: bool = True
    counts: bool = False


@dataclass(frozen=True, slots=True)
class Peer:
    """The other end of a Unix socket when it connected. ``groups``: all of its groups, the primary one included."""

    process: Process
    uid: int
    groups: frozenset[int]
