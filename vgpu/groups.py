"""Unix groups by name, and the names and groups of users. The name service may ask a directory server, which may take
long. So a lookup runs in a thread, has a time-out, and never runs while others wait for a lock."""

from __future__ import annotations

import grp
import os
import pwd
from contextlib import suppress
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

    async def user(self, uid: int) -> tuple[str, frozenset[str]]:
        """The name of user ``uid`` ("" without one) and the names of its groups. ``VgpuError`` (unavailable): the name
        service does not answer in time."""
        with trio.move_on_after(LOOKUP_S):
            return await trio.to_thread.run_sync(_user, uid, abandon_on_cancel=True, limiter=self._room)
        raise VgpuError(
            ErrorCode.UNAVAILABLE,
            f"the name service did not find uid {uid} within {LOOKUP_S:g} s, and a quota needs its groups",
            f"see: getent passwd {uid}",
        )


def _user(uid: int) -> tuple[str, frozenset[str]]:
    try:
        entry = pwd.getpwuid(uid)
        gids = os.getgrouplist(entry.pw_name, entry.pw_gid)
    except (KeyError, OSError):
        return "", frozenset()
    names = set()
    for gid in gids:
        names.add(str(gid))
        with suppress(KeyError, OSError):
            names.add(grp.getgrgid(gid).gr_name)
    return entry.pw_name, frozenset(names)
