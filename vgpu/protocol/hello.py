"""How every link begins, and what its messages have in common. Apart from ``messages``, so that brokers stay small."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict

from vgpu.bounds import Bounded, BoundedRequest

PROTOCOL_VERSION = 3
"""Raised with every message that one end says unasked, so that it is said only to an end that knows it. 2: ``Look``.
3: ``Noted``."""
OLDEST_VERSION = 1


class Request(BoundedRequest):
    """Base of all that is asked for: unknown fields are an error of the sender."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: int = 0


class Reading(Bounded):
    """Base of all that is told: a newer node may tell more than this end knows."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Hello(Request):
    """First message of whoever connects. ``role``: what kind of conversation follows."""

    op: Literal["hello"] = "hello"
    version: int = PROTOCOL_VERSION
    oldest_version: int = OLDEST_VERSION
    role: Literal["control", "broker", "server"] = "control"


class Welcome(Reading):
    """Answer to ``Hello``: ``version`` is what both understand. Identity comes from the kernel, so none is stated."""

    version: int
    software: str  # version of st-vgpu at the other end
    pid: int
