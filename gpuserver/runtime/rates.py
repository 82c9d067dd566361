"""Rates of vGPUs over the last second, from samples of their accounts."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from gpuserver.core.scheduler.leases import AccountSnapshot, ServiceTotals, VgpuIndex

SAMPLE_S: Final = 0.2
"""Between two samples."""
_WINDOW_NS: Final = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Rates:
    """Of one vGPU over the last second: leases begun per second, and parts of the time. ``throttled_ratio``: the part
    of the samples in which it was at its limit."""

    tokens_per_second: float = 0.0
    held_ratio: float = 0.0
    busy_ratio: float = 0.0
    throttled_ratio: float = 0.0


class RateWindow:
    """Samples of the accounts over the last second, and the rates that follow from them."""

    def __init__(self) -> None:
        self._samples: deque[tuple[int, dict[VgpuIndex, ServiceTotals], frozenset[VgpuIndex]]] = deque()

    def add(
        self, now_ns: int, served: dict[VgpuIndex, ServiceTotals], at_limit: frozenset[VgpuIndex] = frozenset()
    ) -> None:
        self._samples.append((now_ns, served, at_limit))
        while len(self._samples) > 2 and self._samples[1][0] <= now_ns - _WINDOW_NS:
            self._samples.popleft()

    def rates(self, now_ns: int, statement: AccountSnapshot) -> Rates:
        """From the oldest sample within the window that knows the vGPU up to ``statement``, taken at ``now_ns``."""
        for at_ns, served, _ in self._samples:
            before = served.get(statement.vgpu)
            passed_ns = now_ns - at_ns
            # A key that was given to another vGPU starts again from zero.
            if before is None or passed_ns <= 0 or before.held_ns > statement.held_ns:
                continue
            return Rates(
                tokens_per_second=max(0, statement.tokens - before.tokens) * 1e9 / passed_ns,
                held_ratio=(statement.held_ns - before.held_ns) / passed_ns,
                busy_ratio=max(0, statement.busy_ns - before.busy_ns) / passed_ns,
                throttled_ratio=self._throttled_ratio(statement.vgpu),
            )
        return Rates()

    def _throttled_ratio(self, key: VgpuIndex) -> float:
        seen = [key in at_limit for _, served, at_limit in self._samples if key in served]
        return sum(seen) / len(seen) if seen else 0.0
