from collections.abc import Iterable

from cython_ext.readings import Event, PlanReading

class PyLeaseTable:
    def add(self, key: int, now_ns: int) -> None: ...
    def remove(self, key: int, now_ns: int) -> None: ...
    def publish(
        self,
        key: int,
        epoch: int,
        start_ns: int,
        end_ns: int | None,
        after: Iterable[tuple[int, int]],
        go_by_ns: int,
        early: bool,
        on_want: bool,
        now_ns: int,
        alone: bool = False,
    ) -> bool: ...
    def withdraw(self, key: int, epoch: int, now_ns: int) -> bool: ...
    def report(
        self,
        key: int,
        now_ns: int,
        *,
        want: bool,
        returned_epoch: int = 0,
        drained_epoch: int = 0,
        tail_epoch: int = 0,
        split_drain_epoch: int = 0,
        drained_ns: int = 0,
        busy_ns: int = 0,
        submitted_epoch: int = 0,
        submitted_ns: int = 0,
    ) -> None: ...
    def step(self, now_ns: int) -> None: ...
    def deadline_ns(self) -> int | None: ...
    def events(self) -> tuple[list[Event], int]: ...
    @property
    def pressing(self) -> bool: ...
    def outstanding(self, key: int) -> list[tuple[int, bool]]: ...
    def plan(self, key: int) -> PlanReading: ...
