"""What happens when, and when a scheduler hears of it: the clock of a simulated GPU, and the way to its server."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Self

from gpuserver.core.scheduler.leases import Command, Event, Observed, Report, Tick

Watch = Callable[[Sequence[Event], int, list[Command]], None]
"""Called after each decision: what the scheduler heard, when, and what it said."""


class Agenda:
    """What is to be done when; what is due at the same time, in the order in which it was said."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.heap: list[tuple[int, int, Callable[[], None]]] = []
        self.sequence = 0

    def at(self, when_ns: int, do: Callable[[], None]) -> None:
        self.sequence += 1
        heapq.heappush(self.heap, (max(when_ns, self.now_ns), self.sequence, do))


class Timeline(Agenda, ABC):
    """Discrete events around ``scheduler``; its word takes ``down_ns``, and reports take ``up_ns``.

    ``together``: they come as the real dispatcher's do, all that were made before the scheduler looks. Otherwise each
    comes alone, and is decided upon.
    """

    def __init__(self, scheduler: Any, *, up_ns: int, down_ns: int, watch: Watch | None, together: bool) -> None:
        super().__init__()
        self.scheduler = scheduler
        self.up_ns, self.down_ns = up_ns, down_ns
        self.watch = watch
        self.together = together
        self.commands: list[tuple[int, Command]] = []
        self.reports: list[Report] = []
        """Made, and not heard of."""
        self.looks_ns: int | None = None
        self.tick_ns: int | None = None

    @abstractmethod
    def _execute(self, command: Command) -> None:
        """The dispatcher has a command."""

    @abstractmethod
    def _knows(self, event: Event) -> bool:
        """Whether it is not about a vGPU that is gone."""

    def run(self, until_ns: int) -> Self:
        while self.heap and self.heap[0][0] <= until_ns:
            self.now_ns, _, do = heapq.heappop(self.heap)
            do()
        self.now_ns = until_ns
        return self

    def tell(self, report: Report, hush_ns: int = 0) -> None:
        """The dispatcher's report, on its way to the scheduler. Where reports come together, it lets that look only
        after ``hush_ns``."""
        if not self.together:
            self.at(self.now_ns + self.up_ns, lambda: self._deliver(report))
            return
        self.reports.append(report)
        looks_ns = self.now_ns + hush_ns + self.up_ns
        if not isinstance(report, Observed) and (self.looks_ns is None or looks_ns < self.looks_ns):
            self.looks_ns = looks_ns
            self.at(looks_ns, self._look)

    def _look(self) -> None:
        if self.looks_ns is not None and self.looks_ns <= self.now_ns:
            self._deliver_all()

    def _deliver_all(self) -> None:
        reports, self.reports = [report for report in self.reports if self._knows(report)], []
        self.looks_ns = None
        if reports:
            self._heard(reports, self.scheduler.handle_all(reports, self.now_ns))

    def _deliver(self, event: Event) -> None:
        if self.together:
            self._deliver_all()
        if self._knows(event):
            self._heard([event], self.scheduler.handle(event, self.now_ns))

    def _heard(self, events: Sequence[Event], commands: list[Command]) -> None:
        self.scheduler.check()
        if self.watch is not None:
            self.watch(events, self.now_ns, commands)
        for command in commands:
            self.commands.append((self.now_ns, command))
            self.at(self.now_ns + self.down_ns, lambda c=command: self._execute(c))  # type: ignore[misc]
        due = self.scheduler.next_deadline_ns()
        if due is not None and (self.tick_ns is None or due < self.tick_ns or self.tick_ns <= self.now_ns):
            self.tick_ns = max(due, self.now_ns + 1)
            self.at(self.tick_ns, self._tick)

    def _tick(self) -> None:
        if self.tick_ns == self.now_ns:
            self.tick_ns = None
            self._deliver(Tick())
