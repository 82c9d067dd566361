"""The logs of a node: ``node.log`` (of a node that was detached) and ``gpu-N.log`` (a GPU Server and its brokers).

They do not grow without bound. The node copies a full log to ``….1``, replaces the one that was there, and empties the
log. Its writers are several processes that may live for months. They notice nothing, since they append. A line that is
written just then may be lost. The node checks a log when its server starts, and every ``LOOK_S``.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

import trio

from vgpu.loggers import get_logger

log = get_logger(__name__)

FULL_BYTES: Final = 8 << 20
LOOK_S: Final = 30.0


def trim(path: Path, full_bytes: int = FULL_BYTES) -> bool:
    """Begin a full log anew. Returns whether it was full. ``OSError``: it could not be copied."""
    try:
        if path.stat().st_size < full_bytes:
            return False
    except FileNotFoundError:
        return False
    before, fresh = path.with_name(f"{path.name}.1"), path.with_name(f".{path.name}.new")
    try:
        shutil.copyfile(path, fresh)
        fresh.chmod(0o600)
        fresh.replace(before)
    except OSError:
        # A full disk is no reason to let the log grow on.
        with suppress(OSError):
            fresh.unlink(missing_ok=True)
        os.truncate(path, 0)
        raise
    os.truncate(path, 0)
    return True


async def keep_small(paths: Iterable[Path], look_s: float = LOOK_S) -> None:
    """Trim these logs, again and again, until it is cancelled."""
    files = tuple(paths)
    while True:
        for path in files:
            try:
                if await trio.to_thread.run_sync(trim, path):
                    log.info("log begun anew", file=str(path), before=f"{path}.1")
            except OSError as error:
                log.warning("a log was full and is not kept", file=str(path), reason=str(error))
        await trio.sleep(look_s)
