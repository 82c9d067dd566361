"""What a sharer runs: one interface for PyTorch on a real GPU and for its stand-in on a simulated one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from benchmarks.suite.report.stats import Interval, Look

Mark = Any
"""A point in the GPU's work: everything that was submitted before it."""


class Program(Protocol):
    """A workload, warmed up. ``step`` submits one step and does not wait for it."""

    def step(self) -> None: ...

    def mark(self, timed: bool = False) -> Mark:
        """``timed``: it knows when it was reached."""

    def wait(self, mark: Mark) -> None:
        """Until the GPU has reached ``mark``."""

    def elapsed_ms(self, first: Mark, last: Mark) -> float:
        """Between two timed marks that were reached, on the GPU's clock."""

    def synchronize(self) -> None: ...

    def look(self) -> Look:
        """The clock of ``stamped``'s timestamps, and CLOCK_MONOTONIC."""

    def stamped(self) -> AbstractContextManager[Callable[[], list[Interval]]]:
        """Notes device timestamps inside; afterwards the call returns every kernel's. They are CLOCK_MONOTONIC ns, but
        those of ``stamped`` on a real GPU, which are %globaltimer's."""
