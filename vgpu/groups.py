"""Unix groups by name. The name service may ask a directory server, which may take long. So the lookup runs in a
thread, has a time-out, and never runs while others wait for a lock."""

from __future__ import annotations

import grp
from typing import Final

import trio

from vgpu.errors import ErrorCode, VgpuError, cleaned

LOOKUP_S: Final = 2.0
_MOST_AT_ONCE: Final = 8
"""The most lookups at once. Each has a thread, and may hang."""


class Groups:
    """The group lookups of one process. Any of its tasks may call ``id_of``."""

    def __init__(self) -> None:
        self._room = trio.CapacityLimiter(_MOST_AT_ONCE)

    async def id_of(self, name: str) -> int:
        """The gid of group ``name``. Errors: ``invalid``: there is no such group; ``unavailable``: the name service
        does not answer in time."""
        with trio.move_on_after(LOOKUP_S):
            try:
                found = await trio.to_thread.run_sync(grp.getgrnam, name, abandon_on_cancel=True, limiter=self._room)
            except (KeyError, ValueError, OSError):
                raise VgpuError(
                    ErrorCode.INVALID, f"there is no group {cleaned(repr(name))} on this machine", "see: getent group"
                ) from None
            return found.gr_gid
        raise VgpuError(
            ErrorCode.UNAVAILABLE,
            f"the name service did not find group {cleaned(repr(name))} within {LOOKUP_S:g} s",
            "see: getent group; or leave out --share-group",
        )
