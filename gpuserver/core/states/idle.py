"""Idle suspend (``--idle-suspend``): when a vGPU without work is suspended, and when it is resumed. Pure.

The server suspends an idle vGPU by itself, not at a user's request. The vGPU keeps its guarantee, so the server can
always resume it. Two rules, which never hold at the same moment:

    suspend    it has programs, and none of them has used the GPU for ``patience_ns`` or wants it
    resume     a program wants the GPU, or has used it since; or it has no programs; or --idle-suspend was removed

Wanting is a level, not an edge: a waiting thread reports it again and again. So the outcome does not depend on when a
server decides, which server decides, or how often it tried before. Source: autosuspend of the Linux kernel's runtime
power management.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

AGAIN_LEAST_NS: Final = 250_000_000
AGAIN_MOST_NS: Final = 8_000_000_000


class Step(StrEnum):
    """What the server does about a vGPU."""

    STAY = "stay"
    SUSPEND = "suspend"
    RESUME = "resume"


@dataclass(frozen=True, slots=True)
class IdleState:
    """One vGPU."""

    patience_ns: int
    """Of --idle-suspend; 0 without it."""
    used_ns: int
    """When a program used or wanted the GPU last, as far as the server knows."""
    wants: bool = False
    programs: bool = True
    suspended: bool = False
    """It is suspended because it was idle …"""
    suspended_ns: int = 0
    """… since then."""
    quiesced: bool = False
    """Its programs are quiesced, for this reason or another."""
    failures: int = 0
    """Failed attempts to suspend or resume it, in a row."""
    tried_ns: int = 0
    """The last attempt."""

    @property
    def again_ns(self) -> int:
        """When the server may try again. It retries a resume soon, and never gives up. A suspend stops programs for a
        moment, so the server retries it after ``patience_ns``, then less and less often."""
        if not self.failures:
            return 0
        if self.suspended:
            return retry_ns(self.failures, self.tried_ns)
        return self.tried_ns + self.patience_ns * _times(self.failures)


def _times(failures: int) -> int:
    return 1 << min(failures - 1, 6)


def retry_ns(failures: int, tried_ns: int) -> int:
    """When the server may try again to resume a vGPU, after so many failed attempts in a row, the last at
    ``tried_ns``."""
    return tried_ns + min(AGAIN_MOST_NS, AGAIN_LEAST_NS * _times(failures))


def decide(vgpu: IdleState, now_ns: int) -> Step:
    """The next step at ``now_ns``, on the clock of ``used_ns``."""
    if now_ns < vgpu.again_ns:
        return Step.STAY
    if vgpu.suspended:
        used = vgpu.wants or vgpu.used_ns > vgpu.suspended_ns
        return Step.RESUME if used or not (vgpu.programs and vgpu.patience_ns) else Step.STAY
    idle = vgpu.patience_ns and now_ns - vgpu.used_ns >= vgpu.patience_ns
    ready = vgpu.programs and not vgpu.wants and not vgpu.quiesced
    return Step.SUSPEND if idle and ready else Step.STAY
