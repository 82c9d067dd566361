"""The errors of this package: one line, and what to type next."""

from __future__ import annotations


class HookError(Exception):
    """``message``: what was needed and what was found. ``hint``: what to type ("" where there is nothing to type)."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class CannotStart(HookError):
    """A program is not there (``exit_code`` 127) or cannot be executed (126); the codes are the shell's."""

    def __init__(self, exit_code: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = exit_code
