"""How every link begins, and what its messages have in common.

This module is apart from ``messages``, so that brokers stay small.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict

from vgpu.bounds import Bounded, BoundedRequest
from vgpu.protocol import building
from vgpu.protocol.versions import OLDEST_VERSION, PROTOCOL_VERSION


class Request(BoundedRequest):
    """Base of all requests. Unknown fields are an error of the sender."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=building.deferred)

    id: int = 0

    def said_to(self, version: int) -> dict[str, Any]:
        """The message as an end of this version understands it."""
        return self.model_dump(mode="json")


class Reading(Bounded):
    """Base of all answers. A newer node may send more fields than this end knows."""

    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=building.deferred)


class Hello(Request):
    """First message of the end that connects. ``role``: which kind of messages follows."""

    op: Literal["hello"] = "hello"
    version: int = PROTOCOL_VERSION
    oldest_version: int = OLDEST_VERSION
    role: Literal["control", "broker", "server"] = "control"


class Welcome(Reading):
    """Answer to ``Hello``. ``version``: the one that both ends understand. It states no identity, because that comes
    from the kernel."""

    version: int
    software: str  # version of st-vgpu at the other end
    pid: int
