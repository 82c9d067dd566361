"""The model of ``vgpuctl top``: readings in, rows out. It uses no clock, socket or terminal.

A row is found by the id of its vGPU, never by its place, so that sorting and selection survive every update.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from vgpu.ctl.present.tables import missed, user_name, with_names
from vgpu.protocol.messages import EventReading, GpuStatus, ProcessReading, Snapshot, VgpuStatus

SPAN_S: Final = 300
"""How far back a history goes: one number for each second of it."""
REMARKS: Final = 50
NAMES: Final = 4096
"""Names are kept for so many vGPUs, those that are gone included."""
_ID: Final = re.compile(r"vgpu-[0-9a-f]{8}\b")


class History:
    """A rate over the last ``SPAN_S`` seconds, as the mean of each second."""

    def __init__(self) -> None:
        self._seconds: deque[tuple[int, float, int]] = deque(maxlen=SPAN_S)  # second, sum, count; no count: a gap

    def __len__(self) -> int:
        return len(self._seconds)

    def add(self, at_unix_s: float, value: float) -> None:
        self._put(at_unix_s, value, 1)

    def interrupt(self, at_unix_s: float) -> None:
        """From then on nothing is known, until something is added."""
        self._put(at_unix_s, 0.0, 0)

    def _put(self, at_unix_s: float, value: float, count: int) -> None:
        second = int(at_unix_s)
        if self._seconds and second <= self._seconds[-1][0]:  # a clock that was set back counts as stopped
            last, total, seen = self._seconds.pop()
            second, value, count = last, total + value, seen + count
        self._seconds.append((second, value, count))
        while self._seconds[0][0] <= second - SPAN_S:
            self._seconds.popleft()

    def cells(self, count: int, now_unix_s: float, span_s: int = SPAN_S) -> list[float | None]:
        """The last ``span_s`` seconds in ``count`` parts, oldest first; None: not known.

        A part is a whole number of seconds and begins at a multiple of that. So past parts stay as they are while time
        goes on. A part in which nothing was added is as the one before it.
        """
        part_s = max(1, -(-span_s // count))
        first = int(now_unix_s) // part_s - count + 1
        sums: list[list[float] | None] = [None] * count
        before: float | None = None
        for second, value, seen in self._seconds:
            at = second // part_s - first
            if at < 0:
                before = value / seen if seen else None
            elif at < count:
                part = sums[at]
                sums[at] = [value, seen] if part is None or not part[1] else [part[0] + value, part[1] + seen]
        cells: list[float | None] = []
        for part in sums:
            if part is not None:
                before = part[0] / part[1] if part[1] else None
            cells.append(before)
        return cells


MEASURES: Final = ("held", "busy", "memory")
"""What a history shows, each as a part of the GPU."""


class Histories:
    """Of one vGPU or GPU: each of ``MEASURES``."""

    def __init__(self) -> None:
        self._of = {measure: History() for measure in MEASURES}

    def add(self, at_unix_s: float, held: float, busy: float, memory: float) -> None:
        """Parts of the GPU: 0 to 1."""
        for history, value in zip(self._of.values(), (held, busy, memory), strict=True):
            history.add(at_unix_s, min(1.0, value))

    def interrupt(self, at_unix_s: float) -> None:
        for history in self._of.values():
            history.interrupt(at_unix_s)

    def of(self, measure: str) -> History:
        return self._of[measure]


def share_of(vgpu: VgpuStatus) -> float:
    """The share that it holds. For a token without an end, and for a shared one, it is the GPU time used, because other
    vGPUs lose no more than that."""
    return vgpu.busy_ratio if vgpu.open_ended or vgpu.shares else vgpu.held_ratio


@dataclass(frozen=True, slots=True)
class Order:
    """What rows are sorted by. ``up``: smallest first unless reversed, as texts are."""

    name: str
    of: Callable[[VgpuStatus], Any]
    up: bool = False


ORDERS: Final = (
    Order("vgpu", lambda vgpu: vgpu.vgpu_id, up=True),
    Order("name", lambda vgpu: (not vgpu.name, (vgpu.name or "").casefold()), up=True),
    Order("user", lambda vgpu: user_name(vgpu.owner_uid).casefold(), up=True),
    Order("gpu", lambda vgpu: vgpu.gpu_index, up=True),
    Order("state", lambda vgpu: state_word(vgpu), up=True),
    Order("held", lambda vgpu: vgpu.held_ratio),
    Order("busy", lambda vgpu: vgpu.busy_ratio),
    Order("tokens", lambda vgpu: vgpu.tokens_per_second),
    Order("memory", lambda vgpu: vgpu.memory_used_bytes),
    Order("procs", lambda vgpu: vgpu.processes),
    Order("waiting", lambda vgpu: vgpu.waiting_ns),
    Order("lag", lambda vgpu: vgpu.lag_ns),
    Order("slo", missed),
    Order("refused", lambda vgpu: vgpu.memory_refusals),
)
ORDER_NAMES: Final = tuple(order.name for order in ORDERS)
GROUPS: Final = ("", "user", "state", "gpu")


@dataclass(frozen=True, slots=True)
class Choice:
    """The user's choice of what to see. ``measure``: of histories, one of ``MEASURES``. ``order``: one of
    ``ORDER_NAMES``. ``words``: all of them must occur in a row.
    ``gpu``: only this one's vGPUs. ``group``: one of ``GROUPS``; rows of one group stand together below a heading.
    ``selected``, ``expanded``: ids of vGPUs."""

    order: str = "gpu"
    reverse: bool = False
    words: str = ""
    gpu: int | None = None
    group: str = ""
    selected: str | None = None
    expanded: frozenset[str] = frozenset()
    measure: str = MEASURES[0]

    def next_measure(self) -> Choice:
        """Histories of the next measure."""
        return replace(self, measure=MEASURES[(MEASURES.index(self.measure) + 1) % len(MEASURES)])

    def ordered_by(self, name: str) -> Choice:
        """By another column; by the same one: the other way round."""
        return replace(self, order=name, reverse=name == self.order and not self.reverse)

    def next_order(self, step: int, names: Sequence[str] = ORDER_NAMES) -> Choice:
        """By the column ``step`` further to the right, of ``names``."""
        at = names.index(self.order) if self.order in names else -1 if step > 0 else 0
        return replace(self, order=names[(at + step) % len(names)], reverse=False)

    def moved(self, ids: Sequence[str], step: int) -> Choice:
        """The selection ``step`` rows further down, as far as there are rows."""
        if not ids:
            return replace(self, selected=None)
        at = ids.index(self.selected) + step if self.selected in ids else 0
        return replace(self, selected=ids[min(max(at, 0), len(ids) - 1)])

    def settled(self, before: Sequence[str], after: Sequence[str]) -> Choice:
        """The same choice of rows ``after`` an update. Where the selected one is gone, the one that is in its place
        now, or the last."""
        if self.selected in after:
            return self
        if not after:
            return replace(self, selected=None)
        at = before.index(self.selected) if self.selected in before else 0
        return replace(self, selected=after[min(at, len(after) - 1)])

    def toggled(self) -> Choice:
        """The selected row's programs shown, or no longer."""
        return self if self.selected is None else replace(self, expanded=self.expanded ^ {self.selected})

    def next_group(self) -> Choice:
        """Grouped by the next property, after the last one not at all."""
        return replace(self, group=GROUPS[(GROUPS.index(self.group) + 1) % len(GROUPS)])

    def next_gpu(self, indices: Sequence[int]) -> Choice:
        """From all GPUs to the first one alone, to the next one, and to all again."""
        if len(indices) < 2:
            return replace(self, gpu=None)
        following: list[int | None] = [*indices, None]
        at = following.index(self.gpu) if self.gpu in following else len(following) - 1
        return replace(self, gpu=following[(at + 1) % len(following)])


@dataclass(frozen=True, slots=True)
class Row:
    """One vGPU. ``processes``: None unless it is expanded; empty while they are not known, and where there are none.
    ``command``: the command line of its first program. ``gpu_memory_bytes``: the memory
    of its GPU, the end of the scale of memory bars."""

    vgpu: VgpuStatus
    history: History
    processes: tuple[ProcessReading, ...] | None
    command: str = ""
    gpu_memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Remark:
    """Something that has happened. ``kind``: an event's, or "node", "done", "error"."""

    at_unix_s: float
    kind: str
    text: str


@dataclass(slots=True)
class Model:
    """Everything of a node that can be shown. ``shown``: the readings that are shown; while ``frozen`` they do not
    change, and only histories go on. ``lost``: since when the node does not answer, and why."""

    shown: Snapshot | None = None
    frozen: bool = False
    lost: Remark | None = None
    histories: dict[str, Histories] = field(default_factory=dict)
    gpu_histories: dict[int, Histories] = field(default_factory=dict)
    remarks: deque[Remark] = field(default_factory=lambda: deque(maxlen=REMARKS))
    _latest: Snapshot | None = None
    _names: dict[str, str] = field(default_factory=dict)
    _processes: dict[str, tuple[ProcessReading, ...]] = field(default_factory=dict)

    def take(self, snapshot: Snapshot) -> None:
        """The newest readings."""
        self.lost = None
        self._latest = snapshot
        for vgpu in snapshot.vgpus:
            if vgpu.name and self._names.get(vgpu.vgpu_id) != vgpu.name:
                self._names[vgpu.vgpu_id] = vgpu.name
                while len(self._names) > NAMES:
                    del self._names[next(iter(self._names))]
        sizes = {gpu.index: gpu.total_memory_bytes or 1 for gpu in snapshot.gpus}
        for vgpu in snapshot.vgpus:
            memory = vgpu.memory_used_bytes / sizes.get(vgpu.gpu_index, vgpu.memory_limit_bytes or 1)
            history = self.histories.setdefault(vgpu.vgpu_id, Histories())
            history.add(snapshot.at_unix_s, share_of(vgpu), vgpu.busy_ratio, memory)
        for gpu in snapshot.gpus:
            memory = gpu.used_memory_bytes / sizes[gpu.index]
            history = self.gpu_histories.setdefault(gpu.index, Histories())
            history.add(snapshot.at_unix_s, gpu.held_ratio, gpu.busy_ratio, memory)
        if not self.frozen:
            self.shown = snapshot
        self._forget()

    def _forget(self) -> None:
        assert self._latest is not None
        snapshots = [self._latest] if self.shown is None else [self._latest, self.shown]
        vgpus = {vgpu.vgpu_id for snapshot in snapshots for vgpu in snapshot.vgpus}
        gpus = {gpu.index for snapshot in snapshots for gpu in snapshot.gpus}
        self.histories = {vgpu_id: one for vgpu_id, one in self.histories.items() if vgpu_id in vgpus}
        self.gpu_histories = {index: one for index, one in self.gpu_histories.items() if index in gpus}
        self._processes = {vgpu_id: known for vgpu_id, known in self._processes.items() if vgpu_id in vgpus}

    def freeze(self, frozen: bool) -> None:
        self.frozen = frozen
        if not frozen and self._latest is not None:
            self.shown = self._latest

    def lose(self, at_unix_s: float, reason: str) -> None:
        """The node no longer answers. The last readings stay on the screen, with a remark about that."""
        if self.lost is None:
            self.lost = Remark(at_unix_s, "node", reason)
            self.remarks.append(self.lost)
            for history in (*self.histories.values(), *self.gpu_histories.values()):
                history.interrupt(at_unix_s)

    def add_event(self, event: EventReading) -> None:
        named = f"{event.vgpu_id}: " if event.vgpu_id and event.vgpu_id not in event.text else ""
        self.remark(event.at_unix_s, event.kind, with_names(f"{named}{event.text}"))

    def remark(self, at_unix_s: float, kind: str, text: str) -> None:
        self.remarks.append(Remark(at_unix_s, kind, text))

    def named_remarks(self, most: int) -> list[Remark]:
        """The last ``most``, with the names of vGPUs beside their ids."""
        return [replace(one, text=_ID.sub(self._called, one.text)) for one in list(self.remarks)[-most:]]

    def _called(self, found: re.Match[str]) -> str:
        name = self._names.get(found[0])
        return f"{name} ({found[0]})" if name and f"{name} (" not in found.string else found[0]

    def know(self, processes: Iterable[ProcessReading]) -> None:
        """Take the processes that are attached, of all vGPUs."""
        found: dict[str, list[ProcessReading]] = {}
        for process in processes:
            found.setdefault(process.vgpu_id, []).append(process)
        self._processes = {
            vgpu_id: tuple(sorted(attached, key=lambda one: (one.slot, one.pid))) for vgpu_id, attached in found.items()
        }

    @property
    def gpus(self) -> tuple[GpuStatus, ...]:
        return () if self.shown is None else tuple(sorted(self.shown.gpus, key=lambda gpu: gpu.index))

    def rows(self, choice: Choice) -> list[Row]:
        """What is chosen, in order. Where its column decides nothing by GPU, age and id, so that rows stay in place."""
        if self.shown is None:
            return []
        order = ORDERS[ORDER_NAMES.index(choice.order)]
        words = choice.words.casefold().split()
        chosen = [vgpu for vgpu in self.shown.vgpus if choice.gpu in (None, vgpu.gpu_index) and _has(vgpu, words)]
        chosen.sort(key=lambda vgpu: (vgpu.gpu_index, vgpu.created_unix_s, vgpu.vgpu_id))
        chosen.sort(key=order.of, reverse=order.up == choice.reverse)
        if choice.group:
            chosen.sort(key=lambda vgpu: group_of(vgpu, choice.group))
        sizes = {gpu.index: gpu.total_memory_bytes for gpu in self.shown.gpus}
        return [
            Row(
                vgpu,
                self.histories[vgpu.vgpu_id].of(choice.measure),
                self._processes.get(vgpu.vgpu_id, ()) if vgpu.vgpu_id in choice.expanded else None,
                _command(self._processes.get(vgpu.vgpu_id, ())) if vgpu.processes else "",
                sizes.get(vgpu.gpu_index, 0),
            )
            for vgpu in chosen
        ]


def _has(vgpu: VgpuStatus, words: Sequence[str]) -> bool:
    user = user_name(vgpu.owner_uid)
    said = " ".join(
        (vgpu.vgpu_id, vgpu.name or "", vgpu.state, vgpu.mode, vgpu.spec.group or "", vgpu.spec.priority, user)
    )
    return all(word in said.casefold() for word in words)


def _command(attached: Sequence[ProcessReading]) -> str:
    return attached[0].command if attached else ""


def state_word(vgpu: VgpuStatus) -> str:
    return "at limit" if vgpu.throttled else vgpu.state


def group_of(vgpu: VgpuStatus, group: str) -> str:
    """The heading above the rows of its kind. ``group``: one of ``GROUPS``."""
    match group:
        case "user":
            return user_name(vgpu.owner_uid)
        case "state":
            return state_word(vgpu)
        case "gpu":
            return f"GPU {vgpu.gpu_index:>3}"
    return ""
