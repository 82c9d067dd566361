"""When a CUDA graph was at work, by two tiny kernels in it that note %globaltimer: at its beginning and at its end.

CUPTI's record of a graph costs the graph: the H200 was at work all the time with steps of 1.045 ms, and under CUPTI for
99.25 % of it, with steps of 1.090 ms.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import torch
import triton
import triton.language as tl

from benchmarks.suite.report.stats import Interval, Look, intervals_noted

SLOTS: Final = 1 << 18
"""Two for each replay; older notes are overwritten."""
LOOKS: Final = 20


@triton.jit  # type: ignore[untyped-decorator]
def note_time(ring, SLOTS: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.atomic_add(ring, 1)
    tl.store(ring + 1 + at % SLOTS, tl.extra.cuda.globaltimer())


class Notes:
    """``note()`` goes into the stream that is current, or into its capture."""

    def __init__(self, device: torch.device) -> None:
        self._ring = torch.zeros(1 + SLOTS, dtype=torch.int64, device=device)
        self._once = torch.zeros(2, dtype=torch.int64, device=device)
        self.note()  # compiles
        self._look()

    def note(self) -> None:
        note_time[(1,)](self._ring, SLOTS=SLOTS, num_warps=1)

    def _look(self) -> Look:
        """Both clocks at one moment, as nearly as can be told."""
        looks = []
        for _ in range(LOOKS):
            torch.cuda.synchronize()
            before = time.monotonic_ns()
            note_time[(1,)](self._once, SLOTS=1, num_warps=1)
            torch.cuda.synchronize()
            after = time.monotonic_ns()
            looks.append((after - before, Look(int(self._once[1]), (before + after) // 2)))
        return min(looks)[1]

    @contextmanager
    def recording(self) -> Iterator[Callable[[], list[Interval]]]:
        """Yields what gives all intervals, CLOCK_MONOTONIC ns, after the block. RuntimeError: there were too many."""
        first = self._look()
        self._ring.zero_()
        torch.cuda.synchronize()
        found: list[Interval] = []
        yield lambda: found
        torch.cuda.synchronize()
        last = self._look()
        words = self._ring.tolist()
        found += intervals_noted(words[0], words[1:], first, last)
