"""A workload in unmodified PyTorch, with CUDA events as marks and CUPTI's activity records as device timestamps."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_CONFIG", str(Path(__file__).with_name("kineto.conf")))  # read when torch is loaded

import torch

from benchmarks.gpu.stats import Interval
from benchmarks.gpu.works.models import BUILDERS

WARMUP_STEPS = 10


class TorchProgram:
    """``name`` of the catalogue on the first visible GPU, built and warmed up."""

    def __init__(self, name: str) -> None:
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

    @contextmanager
    def stamped(self) -> Iterator[Callable[[], list[Interval]]]:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            yield lambda: kernels(profiler)
            torch.cuda.synchronize()


def kernels(profiler: Any) -> list[Interval]:
    """(start, end) of everything the device did, in CLOCK_MONOTONIC ns; the profiler's clock is CLOCK_REALTIME."""
    offset_ns = time.monotonic_ns() - time.time_ns()
    return [
        (start_ns, start_ns + event.duration_ns())
        for event in profiler.profiler.kineto_results.events()
        # A range that somebody named, as optimizers do, is no work.
        if event.device_type() == torch.autograd.DeviceType.CUDA and not event.is_user_annotation()
        for start_ns in (event.start_ns() + offset_ns,)
    ]
