from typing import NamedTuple

from typing_extensions import Buffer

FOREVER_NS: int
LEASE_OPEN: int
LEASE_ON_GO: int
UNKNOWN_NS: int
GATE_SUBMIT: int
GATE_WAIT_BACKLOG: int
GATE_WAIT_LEASE: int
GATE_LOOK_NS: int
MARKERS: int
WINDOW_LEAST_NS: int
GRANTS_BYTES: int

LaunchKey = tuple[int, int, int, int, int, int, int]

def reached(now: int, wanted: int) -> bool: ...

class LeaseRecord(NamedTuple):
    epoch: int = 0
    flags: int = 0
    start_ns: int = 0
    end_ns: int = 0
    go_by_ns: int = 0

class PlanRecord(NamedTuple):
    current: LeaseRecord = ...
    next: LeaseRecord = ...

class GateVerdict(NamedTuple):
    action: int
    epoch: int
    until_ns: int

class Grants:
    def __init__(self, memory: Buffer) -> None: ...
    def publish(self, record: PlanRecord) -> None: ...
    def publish_counting(self, first: int, count: int) -> None: ...
    def stepped_publish(self, record: PlanRecord) -> None: ...
    def stepped_read(self) -> PlanRecord | None: ...
    def read(self) -> PlanRecord | None: ...

def gate_decide(
    record: PlanRecord,
    *,
    now_ns: int,
    window_ns: int,
    backlog_ns: int = 0,
    predicted_ns: int = ...,
    unknown_in_flight: int = 0,
    go_epoch: int = 0,
    returned_epoch: int = 0,
    drained_epoch: int = 0,
    last_epoch: int = 0,
    contended: bool = False,
) -> GateVerdict: ...

class Durations:
    entries: int
    generation: int
    def __init__(self, size_bytes: int) -> None: ...
    def launch(self, key: LaunchKey) -> tuple[int, bool]: ...
    def estimate_ns(self, key: LaunchKey) -> int | None: ...
    def learn(self, key: LaunchKey, generation: int, sample_ns: int) -> None: ...
    def forget(self, handle: int = 0) -> None: ...

class Backlog:
    end_ns: int
    busy_ns: int
    longest_ns: int
    idle_ns: int
    refill_ns: int
    drained_ns: int
    scale: float
    unknown: int
    busy: bool
    def begin(self, usable_ns: int) -> None: ...
    def finish(self, returned_ns: int) -> None: ...
    def submit(self, now_ns: int, predicted_ns: int, assumed_ns: int = 0) -> None: ...
    def mark(self, tag: int) -> bool: ...
    def oldest(self) -> int | None: ...
    def seen_busy(self, now_ns: int) -> None: ...
    def completed(self, now_ns: int) -> bool: ...
    def drained(self, now_ns: int) -> None: ...
    def discard(self, discard: bool) -> None: ...
    def backlog_ns(self, now_ns: int) -> int: ...

def overrun_tolerated_ns(most_ns: int, longest_ns: int) -> int: ...
def window_adapt(window_ns: int, most_ns: int, overrun_ns: int, target_ns: int, mispredicted: bool = False) -> int: ...
