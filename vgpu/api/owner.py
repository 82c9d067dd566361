"""Users by name."""

from __future__ import annotations

import pwd

from vgpu.errors import ErrorCode, VgpuError, cleaned


def uid_of(user: str | int) -> int:
    """The uid of ``user``: a name, or the uid itself. ``VgpuError`` (invalid): this machine has no such user."""
    if isinstance(user, int) or user.isdecimal():
        return int(user)
    try:
        return pwd.getpwnam(user).pw_uid
    except (KeyError, ValueError):
        raise VgpuError(
            ErrorCode.INVALID, f"--owner: there is no user {cleaned(repr(user))} on this machine", "see: getent passwd"
        ) from None
