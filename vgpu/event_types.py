"""The kinds of events. This module does not import pydantic, so vgpuctl's options need not wait for that import."""

from __future__ import annotations

from enum import StrEnum


class EventType(StrEnum):
    """Each is explained in docs/howto/operations.md."""

    CREATED = "created"
    CHANGED = "changed"
    SCALED = "scaled"
    NOT_SCALED = "not-scaled"
    REPLICA_WANTED = "replica-wanted"
    REMOVED = "removed"
    EXPIRED = "expired"
    ATTACHED = "attached"
    ENDED = "ended"
    DETACHED = "detached"
    SUSPENDED = "suspended"
    RESUMED = "resumed"
    PREEMPTED = "preempted"
    NOT_SUSPENDED = "not-suspended"
    NOT_RESUMED = "not-resumed"
    MIGRATED = "migrated"
    KILLED_ON_RESUME = "killed-on-resume"
    SWAPPED_OUT = "swapped-out"
    SWAPPED_IN = "swapped-in"
    STUCK = "stuck"
    NO_ROOM = "no-room"
    REFUSED = "refused"
    DRIFT = "drift"
    OUTSIDE = "outside"
    UNMANAGED = "unmanaged"
    GRANTED = "granted"
    MODE = "mode"
    BROKER_RESTARTED = "broker-restarted"
    SERVER_RESTARTED = "server-restarted"
    LINK_CLOSED = "link-closed"
    FOREIGN = "foreign"
    MPS_LOST = "mps-lost"
    MPS_FAILED = "mps-failed"
    MPS_RESTARTED = "mps-restarted"
    DRAINED = "drained"
    UNDRAINED = "undrained"
    IDLE = "idle"
    RECLAIMED = "reclaimed"
    NOT_RECLAIMED = "not-reclaimed"
    HISTORY_LOST = "history-lost"


OF_PROGRAMS = frozenset(
    {
        EventType.ATTACHED,
        EventType.ENDED,
        EventType.DETACHED,
        EventType.SWAPPED_OUT,
        EventType.SWAPPED_IN,
        EventType.STUCK,
        EventType.NO_ROOM,
        EventType.REFUSED,
        EventType.DRIFT,
        EventType.OUTSIDE,
        EventType.UNMANAGED,
        EventType.GRANTED,
        EventType.BROKER_RESTARTED,
        EventType.LINK_CLOSED,
        EventType.FOREIGN,
    }
)
"""Kinds that programs, and peers of a broker, cause as often as they like. A person or the node causes the others."""
