"""One error for everything that can be explained to a person: a code for programs, a reason, and what to type next."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Final


class ErrorCode(StrEnum):
    """Why a request was refused. The words are stable: scripts and exit codes depend on them."""

    INVALID = "invalid"  # the request itself makes no sense, wherever it is sent
    NOT_FOUND = "not-found"  # no such vGPU or GPU
    AMBIGUOUS = "ambiguous"  # a prefix or name that fits several vGPUs
    EXISTS = "exists"  # the name is taken
    NOT_YOURS = "not-yours"  # another user's vGPU
    NO_ROOM = "no-room"  # admission: it does not fit any GPU that was allowed
    QUOTA = "quota"  # more than the quota of the user, the group or the kind of claim allows
    IN_USE = "in-use"  # processes are attached
    FULL = "full"  # a vGPU with all process slots taken, or a queue with all its places
    REMOVED = "removed"  # the vGPU is being removed
    MODE = "mode"  # not possible in the GPU's mode
    UNREACHABLE = "unreachable"  # no process answers on the socket
    TIMEOUT = "timeout"  # a process listens, but did not answer in time
    VERSION = "version"  # the two ends do not understand each other
    PROTOCOL = "protocol"  # a peer broke the rules of a link
    UNAVAILABLE = "unavailable"  # known, but down at this moment (being restarted)
    MISSING = "missing"  # an optional package that this needs is not installed
    INTERNAL = "internal"  # our own fault


class VgpuError(Exception):
    """A refusal or failure with its reason.

    ``message``: what is at fault, what was needed, what was found; one line. ``hint``: what to type next ("" if there
    is nothing to type). Both travel in replies, so that the caller at the far end can print them unchanged.
    """

    def __init__(self, code: ErrorCode, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message


MOST_COMPLAINTS: Final = 3
MOST_LETTERS: Final = 200
"""Of one complaint, or of another text that quotes a peer."""


def cleaned(text: str, most: int = MOST_LETTERS) -> str:
    """A peer's text, fit to be shown and logged: at most ``most`` letters on one line, without control characters."""
    shown = "".join(c if c.isprintable() else "�" for c in text[: most + 1])
    return shown if len(shown) <= most else f"{shown[: most - 1]}…"


def in_plain_words(complaint: str) -> str:
    """A complaint of pydantic, or of typer on its behalf, in our words."""
    for theirs, ours in _PLAIN:
        complaint = re.sub(theirs, ours, complaint)
    return complaint


_PLAIN: Final = (
    ("Value error, ", ""),
    ("Input should be ", "should be "),
    ("Field required", "is missing"),
    (r"a valid integer(, (unable to|got a) [\w ]+)?", "a whole number"),
    (r"a valid number(, unable to [\w ]+)?", "a number"),
    (r"a valid boolean(, unable to [\w ]+)?", "true or false"),
    ("a valid (tuple|list)", "a list"),
    ("a valid string", "a text"),
    ("a valid dictionary( or [^;.]+)?", "keys and values"),
    (r"should be less than or equal to (9223372036854775807|18446744073709551615)", "is too large"),
    ("String should have at most ([0-9]+) characters?", r"is longer than \1 characters"),
    ("greater than or equal to ", "at least "),
    ("less than or equal to ", "at most "),
)


def not_yours(vgpu_id: str, owner_uid: int, uid: int) -> VgpuError:
    """The refusal of user ``uid``, which neither owns the vGPU nor is root."""
    return VgpuError(
        ErrorCode.NOT_YOURS,
        f"{vgpu_id} belongs to uid {owner_uid}, and you are uid {uid}",
        "vgpuctl create makes one of your own",
    )
