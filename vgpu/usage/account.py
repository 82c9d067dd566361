"""Usage from readings: each pair of readings of one vGPU is an interval, and each interval adds to rows. Pure.

What happened between two readings is known from the vGPU's counters. A GPU Server that was killed takes its busy time
from the journal, which is a second old: a step back of so little is no use. A counter that went back further has begun
again at zero. A gap of more than ``LONGEST_NS`` counts as not measured, and so does the time
before a node's first reading of a vGPU that was there already.

The promise of an interval is that of its first reading. So a change counts from the reading after it, and the node
takes in the answer to each change as a reading.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from vgpu.protocol.messages import VgpuStatus
from vgpu.share import PPM
from vgpu.usage.rows import MINUTE_S, TIERS, Key, Rows, Sums, add, capped, coarser

SECOND_NS: Final = 1_000_000_000
MOST_BYTES: Final = 1 << 42
MOST_COUNT: Final = 1 << 32
"""Of one reading, at most. Memory and refusals are what a tenant's page says, and sums of them have to fit a file."""
LONGEST_NS: Final = 120 * SECOND_NS
STEP_BACK_NS: Final = 5 * SECOND_NS
"""How far busy time goes back with a GPU Server that was killed: the journal has it once a second, or later."""
AT_LIMIT: Final = 0.95
"""A vGPU that was busy for this part of its limit in the last second is at its limit."""
MOST_PENDING: Final = 5_000
"""Rows that wait to be written. Beyond that, while no disk takes them, they merge into hours, and then into days."""


@dataclass(frozen=True, slots=True)
class Label:
    """What a row's vGPU was called. ``tenant``: of an engine's claim; "": there is none."""

    owner_uid: int
    name: str
    claim: str
    tenant: str


@dataclass(frozen=True, slots=True)
class _Read:
    at_ns: int
    vgpu: VgpuStatus


class Account:
    """``read`` each snapshot; ``take`` the rows since the last ``take``. ``at_ns``: on a clock that never goes back."""

    def __init__(self) -> None:
        self._last: dict[str, _Read] = {}
        self._gone: dict[str, int] = {}
        """When vGPUs were removed: a snapshot from before may still have them."""
        self._began: tuple[int, float] | None = None
        """When the last snapshot was read, on both clocks."""
        self.rows: Rows = {}
        """What ``take`` has not taken."""
        self.labels: dict[str, Label] = {}
        """Of the vGPUs in ``rows``."""

    def read(self, vgpus: Iterable[VgpuStatus], at_ns: int, at_unix_s: float) -> None:
        """All vGPUs of the node at one instant."""
        for vgpu in vgpus:
            self.hear(vgpu, at_ns, at_unix_s)
        self._began = at_ns, at_unix_s
        self._last = {key: last for key, last in self._last.items() if at_ns - last.at_ns <= LONGEST_NS}
        self._gone = {key: gone_ns for key, gone_ns in self._gone.items() if at_ns - gone_ns <= LONGEST_NS}

    def hear(self, vgpu: VgpuStatus, at_ns: int, at_unix_s: float) -> None:
        """One vGPU, as an answer to a request has it. A report that is not current counts for nothing."""
        if vgpu.state in {"restarting", "removing"} or vgpu.leaving_to is not None or vgpu.vgpu_id in self._gone:
            return
        last = self._last.get(vgpu.vgpu_id)
        if last is not None and at_ns <= last.at_ns:
            return
        self._last[vgpu.vgpu_id] = _Read(at_ns, vgpu)
        if last is None:
            age_ns = self._new_for_ns(vgpu, at_ns, at_unix_s)
            self._add(vgpu, _between(None, vgpu, age_ns), age_ns, at_unix_s)
        elif at_ns - last.at_ns <= LONGEST_NS:
            passed_ns = at_ns - last.at_ns
            self._add(vgpu, _between(last.vgpu, vgpu, passed_ns), passed_ns, at_unix_s)

    def end(self, vgpu: VgpuStatus, at_ns: int, at_unix_s: float) -> None:
        """The last reading of a vGPU that was removed."""
        self.hear(vgpu.model_copy(update={"state": "idle", "leaving_to": None}), at_ns, at_unix_s)
        self._last.pop(vgpu.vgpu_id, None)
        self._gone[vgpu.vgpu_id] = at_ns

    def take(self) -> tuple[Rows, dict[str, Label]]:
        """The rows so far. The next ones begin at zero."""
        taken = self.rows, self.labels
        self.rows, self.labels = {}, {}
        return taken

    def put_back(self, rows: Rows, labels: dict[str, Label]) -> None:
        """Rows that could not be written: they are taken once more."""
        add(self.rows, rows)
        self.labels = labels | self.labels
        for tier in TIERS[1:]:
            if len(self.rows) > MOST_PENDING:
                longer: Rows = {}
                for key, sums in self.rows.items():
                    add(longer, coarser({key: sums}, max(key.span_s, tier.span_s)))
                self.rows = capped(longer)
        kept = {key.vgpu_id for key in self.rows}
        self.labels = {vgpu_id: label for vgpu_id, label in self.labels.items() if vgpu_id in kept}

    def _new_for_ns(self, vgpu: VgpuStatus, at_ns: int, at_unix_s: float) -> int:
        """For how long a vGPU without an earlier reading has existed since the last snapshot. 0: it existed before."""
        if self._began is None or vgpu.created_unix_s < self._began[1]:
            return 0
        since_ns = round((at_unix_s - vgpu.created_unix_s) * SECOND_NS)
        return max(0, min(since_ns, at_ns - self._began[0], LONGEST_NS))

    def _add(self, vgpu: VgpuStatus, sums: Sums, passed_ns: int, at_unix_s: float) -> None:
        if not passed_ns:
            return
        claim = vgpu.claim
        self.labels[vgpu.vgpu_id] = Label(
            vgpu.owner_uid, vgpu.name or "", "" if claim is None else claim.name, "" if claim is None else claim.tenant
        )
        end_ns = round(at_unix_s * SECOND_NS)
        minutes = list(_minutes(end_ns - passed_ns, end_ns))
        for (start_s, _), part in zip(minutes, sums.split(weight for _, weight in minutes), strict=True):
            add(self.rows, {Key(MINUTE_S, start_s, vgpu.owner_uid, vgpu.vgpu_id): part})


def _minutes(begin_ns: int, end_ns: int) -> Iterable[tuple[int, int]]:
    """The minutes that the interval touches, and how much of each it covers."""
    minute_ns = MINUTE_S * SECOND_NS
    at = begin_ns
    while at < end_ns:
        start = at // minute_ns * minute_ns
        following = min(end_ns, start + minute_ns)
        yield start // SECOND_NS, following - at
        at = following


def _between(last: VgpuStatus | None, now: VgpuStatus, passed_ns: int) -> Sums:
    """What the interval that ends with ``now`` adds. ``last`` None: the vGPU is new, its counters began at zero."""
    first = now if last is None else last
    promised_ns = passed_ns * _promise_ppm(first) // PPM
    used_ns = _used(0 if last is None else last.busy_ns, now.busy_ns, passed_ns) * _sms_ppm(now) // PPM
    refusals, swaps = (0, 0) if last is None else (last.memory_refusals, last.swaps_in)
    before = 0 if last is None else last.memory_used_bytes
    memory = (min(before, MOST_BYTES) + min(now.memory_used_bytes, MOST_BYTES)) // 2
    limited = is_limited(now)
    return Sums(
        measured_ns=passed_ns,
        promised_ns=promised_ns,
        used_ns=used_ns,
        wasted_ns=max(0, promised_ns - used_ns),
        limited_ns=passed_ns if limited else 0,
        waiting_ns=passed_ns if is_waiting(now) and not limited else 0,
        attached_ns=passed_ns if now.processes else 0,
        memory_promised_kib_s=_memory_promise(first) * passed_ns // (SECOND_NS << 10),
        memory_used_kib_s=memory * passed_ns // (SECOND_NS << 10),
        refusals=min(MOST_COUNT, max(0, now.memory_refusals - refusals)),  # those of live programs outlive the server
        swaps=min(MOST_COUNT, now.swaps_in - (swaps if now.swaps_in >= swaps else 0)),
    )


def is_limited(vgpu: VgpuStatus) -> bool:
    """At its limit just now, if it has one below the whole time."""
    return vgpu.limit_ratio < 1 and (vgpu.throttled or vgpu.busy_ratio >= AT_LIMIT * vgpu.limit_ratio > 0)


def is_waiting(vgpu: VgpuStatus) -> bool:
    """It wants the GPU, does not have it, and has had less of it than it asked for, in the last second."""
    return vgpu.wants and not vgpu.holds and vgpu.busy_ratio < AT_LIMIT * asked_ratio(vgpu)


def asked_ratio(vgpu: VgpuStatus) -> float:
    """The part of the time that its specification asks for. On a GPU that is overcommitted, the guarantee is less."""
    time = vgpu.spec.quota_request_ratio
    return time if vgpu.mode == "spatial" else vgpu.spec.compute_ratio * time


def _sms_ppm(vgpu: VgpuStatus) -> int:
    """The part of the GPU that it computes on: all of it in temporal mode."""
    return round(vgpu.sm_percent_granted * (PPM // 100))


def _promise_ppm(vgpu: VgpuStatus) -> int:
    return round(vgpu.guarantee_ratio * _sms_ppm(vgpu))


def _memory_promise(vgpu: VgpuStatus) -> int:
    """With ``--mem-limit``, only ``--mem`` of it is promised."""
    spec = vgpu.spec
    return vgpu.memory_limit_bytes if spec.memory_limit_bytes is None else spec.memory_bytes or vgpu.memory_limit_bytes


def _used(before: int, now: int, passed_ns: int) -> int:
    """The busy time between two readings."""
    if now >= before - STEP_BACK_NS:
        return max(0, now - before)
    return min(now, passed_ns)
