"""The number of descriptors that one of our processes may have, and what it does before none is left.

Each long-lived process raises its soft limit to the hard one (``raise_limit``). Programs that ``run`` and ``exec``
start keep the user's own limits, since ``vgpuctl`` raises nothing. A part of the descriptors is kept for the process's
own work: journal, logs, pidfds, files in /proc. Links and vGPUs are refused where only that part is left.

The kernel gives the lowest number that is free. So the number of a fresh descriptor shows how many are in use.
"""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from typing import Final

from vgpu.errors import ErrorCode, VgpuError

_HIGHEST: Final = 1 << 20
"""Some programs that we start, as NVIDIA's MPS daemon, try every number up to the limit."""
_ROOMY: Final = 256
"""From this limit on, a process keeps as many as asked for; below it a part in proportion."""


def raise_limit() -> int:
    """The soft limit from now on. It never becomes lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _HIGHEST if hard == resource.RLIM_INFINITY else min(hard, _HIGHEST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return limit()


def limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _HIGHEST if soft == resource.RLIM_INFINITY else soft


def is_kept(descriptor: int, kept: int) -> bool:
    """Whether ``descriptor``, which has just been opened, is one of the last ``kept``."""
    most = limit()
    return descriptor >= most - kept * min(most, _ROOMY) // _ROOMY


def are_left(needed: int, kept: int) -> bool:
    """Whether ``needed`` more can be opened beside the last ``kept``."""
    try:
        lowest = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    os.close(lowest)
    return not is_kept(lowest + needed, kept)


def require(needed: int, kept: int, process: str) -> None:
    """``VgpuError`` (unavailable): ``process`` has fewer left."""
    if not are_left(needed, kept):
        raise VgpuError(
            ErrorCode.UNAVAILABLE,
            f"{process} has no descriptors left: its limit is {limit()}",
            "remove vGPUs or end links; or raise the hard limit before serve: LimitNOFILE= in the unit, ulimit -Hn",
        )
