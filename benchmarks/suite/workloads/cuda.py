"""A workload in PyTorch, with CUDA events as marks, and as device timestamps CUPTI's activity records, or those that
its own graph notes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from benchmarks.suite.report.stats import Interval, Look
from benchmarks.suite.workloads.activity import Activity
from benchmarks.suite.workloads.models import BUILDERS

WARMUP_STEPS = 10


class TorchProgram:
    """``name`` of the catalogue on the first visible GPU, built and warmed up."""

    def __init__(self, name: str) -> None:
        self._activity: Activity | None = None
        self._step = BUILDERS[name](torch.device("cuda"))
        for _ in range(WARMUP_STEPS):
            self.step()
        torch.cuda.synchronize()

    def step(self) -> None:
        self._step()

    def mark(self, timed: bool = False) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=timed)
        event.record()
        return event

    def wait(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()

    def elapsed_ms(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        return float(first.elapsed_time(last))

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def look(self) -> Look:
        now = time.monotonic_ns()
        return Look(now, now)

    @contextmanager
    def stamped(self) -> Iterator[Callable[[], list[Interval]]]:
        notes = getattr(self._step, "notes", None)
        if notes is not None:
            with notes.recording() as intervals:
                yield intervals
            return
        if self._activity is None:
            self._activity = Activity()
        with self._activity.recording(torch.cuda.synchronize) as intervals:
            yield intervals
