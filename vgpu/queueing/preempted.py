"""A vGPU that the node has suspended for a request of higher priority. The GPU Server keeps this in its journal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from vgpu.enums import PriorityName

_Uid = Annotated[int, Field(ge=0, lt=1 << 32)]
_UnixS = Annotated[float, Field(ge=0, le=1e18, allow_inf_nan=False)]
_RequestId = Annotated[str, Field(max_length=64, pattern=r"^[A-Za-z0-9._-]*$")]


@dataclass(frozen=True, slots=True)
class Preempted:
    """``by_uid``, ``request_id``: the request that asked for the room, and its user. ``since_unix_s``: since when the
    vGPU waits for room."""

    by_uid: _Uid
    request_id: _RequestId
    priority: PriorityName
    since_unix_s: _UnixS

    @property
    def key(self) -> str:
        """The key of the request in the queue."""
        return f"{self.by_uid}/{self.request_id}"

    @property
    def reason(self) -> str:
        """One sentence for people, without a full stop."""
        return (
            f"preempted for a request by uid {self.by_uid} with --priority {self.priority.value}; "
            "the node resumes it when there is room"
        )
