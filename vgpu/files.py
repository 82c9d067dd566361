"""Files that users name for our output, written whole or not at all; and lock files."""

from __future__ import annotations

import fcntl
import io
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from vgpu.errors import ErrorCode, VgpuError


def exclusive(path: Path, refusal: VgpuError) -> IO[bytes]:
    """The file, locked for as long as it is open. Other users cannot open it, because a user that can read a file can
    lock it. Raises ``refusal`` if another process holds the lock for longer than a check of it takes."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    file = os.fdopen(descriptor, "r+b")
    try:
        os.fchmod(descriptor, 0o600)
        for pause_s in (*[0.05] * 10, None):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return file
            except BlockingIOError:
                if pause_s is None:
                    raise refusal from None
                time.sleep(pause_s)
        raise AssertionError("not reached")
    except BaseException:
        file.close()
        raise


@contextmanager
def replaced(path: Path, *, private: bool = False) -> Iterator[IO[bytes]]:
    """A file that replaces ``path`` once it is complete. A file that stays empty, or fails, changes nothing. A symbolic
    link at ``path`` stays, and leads to the new file. A device or a FIFO at ``path`` stays, too, and is written to.
    ``private``: no other user can read it. ``VgpuError`` (invalid): it cannot be written there."""
    try:
        if not _stays(path):
            with _in_place_of(Path(os.path.realpath(path)), private=private) as file:
                yield file
            return
        whole = io.BytesIO()
        yield whole
        if whole.tell() > 0:  # to open a FIFO in vain would end it for its reader
            with path.open("wb") as file:
                file.write(whole.getbuffer())
    except OSError as error:
        raise VgpuError(
            ErrorCode.INVALID, f"cannot write {path}: {error.strerror or error}", "name another file"
        ) from error


def _stays(path: Path) -> bool:
    """Whether something is there that is no regular file. ``OSError``: it cannot be written."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return False
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(None, "it is a directory")
    if not os.access(path, os.W_OK):
        raise PermissionError(None, "Permission denied")
    return not stat.S_ISREG(mode)


@contextmanager
def _in_place_of(path: Path, *, private: bool) -> Iterator[IO[bytes]]:
    fresh = path.with_name(f".{path.name}.{os.urandom(4).hex()}.new")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            filled = file.tell() > 0
            file.flush()
            os.fsync(descriptor)
        if filled:
            fresh.replace(path)
    finally:
        with suppress(OSError):
            fresh.unlink(missing_ok=True)
