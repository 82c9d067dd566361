"""Who a process is, in the kernel's words."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Process:
    """``start_time``: clock ticks since boot; together with ``pid`` a name that is never reused. 0: gone already."""

    pid: int
    start_time: int


@dataclass(frozen=True, slots=True)
class Peer:
    """The other end of a Unix socket when it connected. ``groups``: all of its groups, the primary one included."""

    process: Process
    uid: int
    groups: frozenset[int]
