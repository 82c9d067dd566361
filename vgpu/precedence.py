"""What keeps a server or broker prompt. On a busy machine a dispatcher or relay that is woken and does not run at once
leaves the GPU idle at every hand-over; and nothing of a process that collects its garbage answers meanwhile.
"""

from __future__ import annotations

import ctypes
import gc
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

NICE: Final = -10
AUTOGROUP: Final = "/proc/{pid}/autogroup"


def go_first() -> None:
    """Ask for the CPU before others; only root may. Threads inherit it, and so do children in the same session.

    Where the kernel groups processes by session (sched_autogroup), niceness orders those of one session alone, and
    sessions by their own. So who leads a session says it for that, too. See sched(7), "The autogroup feature".
    """
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, NICE)
    with suppress(OSError):
        Path(AUTOGROUP.format(pid="self")).write_text(str(NICE))


def keep_all() -> None:
    """What is there by now stays until the process ends, so no collection need walk it: of what a GPU Server or an
    exporter imports, that takes 20 to 30 ms, now and then. What importing needed besides goes back to the system: of a
    broker's 42 MB 3.5 (malloc_trim(3), of glibc; other C libraries keep less)."""
    gc.collect()
    gc.freeze()
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
