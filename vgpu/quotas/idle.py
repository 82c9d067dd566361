"""Which vGPUs have been idle for too long. Pure: observations and the time in, warnings and reclaims out.

A vGPU is idle while no program launches anything, uses the GPU, or waits for it. The node warns first. It reclaims the
vGPU at the limit, and never earlier than the warning time after the warning.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

RETRY_S: Final = 60.0
"""Between two tries to reclaim a vGPU, where the first did not succeed."""


@dataclass(frozen=True, slots=True)
class Observed:
    """One vGPU now. ``work``: counters that grow with each use; ``active``: a program uses the GPU or waits for it.
    ``limit_s``: 0 means none; ``warning_s``: how long before the limit the node warns."""

    vgpu_id: str
    work: tuple[int, ...]
    active: bool
    limit_s: float
    warning_s: float


@dataclass(frozen=True, slots=True)
class Warn:
    """Warn the owner: unless a program uses the GPU, the vGPU is reclaimed in ``left_s``."""

    vgpu_id: str
    idle_s: float
    left_s: float


@dataclass(frozen=True, slots=True)
class Reclaim:
    """Reclaim the vGPU now."""

    vgpu_id: str
    idle_s: float


@dataclass(slots=True)
class _Idle:
    work: tuple[int, ...]
    since_s: float
    warned_s: float | None = None
    tried_s: float | None = None


class IdleWatch:
    """Observe all vGPUs now and then. A vGPU's measurement begins with its first observation."""

    def __init__(self) -> None:
        self._known: dict[str, _Idle] = {}

    def observe(self, now_s: float, vgpus: Iterable[Observed]) -> list[Warn | Reclaim]:
        """What is due at ``now_s`` (a clock that never goes back). A vGPU that is left out is forgotten."""
        before, self._known = self._known, {}
        found: list[Warn | Reclaim] = []
        for vgpu in vgpus:
            idle = before.get(vgpu.vgpu_id)
            if idle is None or vgpu.active or idle.work != vgpu.work or vgpu.limit_s <= 0:
                idle = _Idle(vgpu.work, now_s)
            self._known[vgpu.vgpu_id] = idle
            if vgpu.limit_s > 0:
                found += self._due(now_s, vgpu, idle)
        return found

    def warned(self) -> frozenset[str]:
        """The vGPUs that have been warned and not used since."""
        return frozenset(name for name, idle in self._known.items() if idle.warned_s is not None)

    @staticmethod
    def _due(now_s: float, vgpu: Observed, idle: _Idle) -> Iterator[Warn | Reclaim]:
        spent = now_s - idle.since_s
        if idle.warned_s is None:
            if spent >= vgpu.limit_s - vgpu.warning_s:
                idle.warned_s = now_s
                yield Warn(vgpu.vgpu_id, spent, max(vgpu.limit_s - spent, vgpu.warning_s))
            else:
                return
        if spent >= vgpu.limit_s and now_s - idle.warned_s >= vgpu.warning_s and _is_due(now_s, idle):
            idle.tried_s = now_s
            yield Reclaim(vgpu.vgpu_id, spent)


def _is_due(now_s: float, idle: _Idle) -> bool:
    return idle.tried_s is None or now_s - idle.tried_s >= RETRY_S
