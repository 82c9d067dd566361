"""The readings of one scrape, as text for Prometheus: format 0.0.4, or OpenMetrics 1.0.

prometheus_client chooses the format and formats numbers. This module puts the lines together, and each series' labels
once. Reason: the client's own encoder takes 7 µs a line, and a node with 64 vGPUs has seven thousand. The tests compare
every byte with that encoder (``tests/metrics/test_exposition.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any, Final, NamedTuple

from prometheus_client import utils

from vgpu.ctl.present.tables import user_name
from vgpu.metrics.definitions import METRICS, readable
from vgpu.metrics.kinds import LABELS, Gpu, Metric, Of, Seen, Vgpu
from vgpu.protocol.messages import MetricsSnapshot, ProcessReading
from vgpu.protocol.meters import Histogram
from vgpu.protocol.usage import UserUsage

_ESCAPED: Final = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
_LETTERS: Final = {1.0: "1.0", 0.0: "0.0"}


class Subject(NamedTuple):
    """A subject of metrics: its labels' values, in the order of ``LABELS``, escaped; and what they are taken from."""

    labels: tuple[str, ...]
    what: Any
    fresh: bool


def exposition(seen: Seen, *, openmetrics: bool = False) -> bytes:
    """All metrics that have a value, each with its description."""
    subjects = subjects_of(seen)
    lines: list[str] = []
    for metric in METRICS:
        series = list(_series(metric, subjects[metric.of]))
        if series:
            lines += _heading(metric, openmetrics=openmetrics)
            lines += series
    if openmetrics:
        lines.append("# EOF\n")
    return "".join(lines).encode("utf-8", "replace")


def subjects_of(seen: Seen) -> dict[Of, list[Subject]]:
    """The subjects, each once. A vGPU without a name goes by its id. Of two processes with one pid, the live one
    counts."""
    found: dict[Of, list[Subject]] = {of: [] for of in Of}
    found[Of.NODE] = found[Of.EXPORTER] = [Subject((), seen, True)]
    if seen.metering is not None:
        gpus = _gpus(seen.metering)
        vgpus = _vgpus(seen.metering, gpus)
        found[Of.GPU] = list(gpus.values())
        found[Of.VGPU] = list(vgpus.values())
        found[Of.USER] = list(_users(seen.metering.users).values())
        found[Of.PROCESS] = list(_processes(seen.metering.processes, vgpus).values())
    return found


def _users(totals: Iterable[UserUsage]) -> dict[tuple[str, str, str], Subject]:
    """By their labels: a team may have the name of its user, and two teams may be readable as one."""
    found: dict[tuple[str, str, str], Subject] = {}
    for total in totals:
        labels = _user_labels(total)
        if labels in found:
            known: UserUsage = found[labels].what
            amounts = set(UserUsage.model_fields) - {"owner_uid", "team"}
            total = known.model_copy(update={name: getattr(known, name) + getattr(total, name) for name in amounts})
        found[labels] = Subject(_escaped(labels), total, True)
    return found


def _user_labels(total: UserUsage) -> tuple[str, str, str]:
    """The team of a user for whom no engine asked is the user."""
    user = user_name(total.owner_uid)
    return str(total.owner_uid), user, readable(total.team) or user


def _gpus(metering: MetricsSnapshot) -> dict[int, Subject]:
    meters = {part.gpu_index: part for part in metering.gpus}
    found = {}
    for reading in metering.snapshot.gpus:
        fresh = reading.state == "serving"
        what = Gpu(reading, meters.get(reading.index), fresh)
        found[reading.index] = Subject((str(reading.index),), what, fresh)
    return found


def _vgpus(metering: MetricsSnapshot, gpus: dict[int, Subject]) -> dict[tuple[int, str], Subject]:
    meters = {(part.gpu_index, part.vgpu_id): part for part in metering.vgpus}
    users = {uid: user_name(uid) for uid in {reading.owner_uid for reading in metering.snapshot.vgpus}}
    found = {}
    for reading in metering.snapshot.vgpus:
        key = reading.gpu_index, reading.vgpu_id
        fresh = reading.state != "restarting" and reading.gpu_index in gpus and gpus[reading.gpu_index].fresh
        labels = str(reading.gpu_index), reading.vgpu_id, reading.name or reading.vgpu_id, str(reading.owner_uid)
        found[key] = Subject(_escaped(labels), Vgpu(reading, meters.get(key), users[reading.owner_uid]), fresh)
    return found


def _processes(
    readings: Iterable[ProcessReading], vgpus: dict[tuple[int, str], Subject]
) -> dict[tuple[int, str, int], Subject]:
    found: dict[tuple[int, str, int], Subject] = {}
    for reading in sorted(readings, key=lambda process: process.alive):
        vgpu = vgpus.get((reading.gpu_index, reading.vgpu_id))
        if vgpu is not None:  # else it was made or removed between the two questions
            key = reading.gpu_index, reading.vgpu_id, reading.pid
            found[key] = Subject((*vgpu.labels, str(reading.pid)), reading, vgpu.fresh)
    return found


def _heading(metric: Metric[Any], *, openmetrics: bool) -> Iterator[str]:
    name = metric.family if openmetrics else metric.name
    yield f"# HELP {name} {metric.help}\n"
    yield f"# TYPE {name} {metric.kind}\n"
    if openmetrics and metric.unit:
        yield f"# UNIT {name} {metric.unit}\n"


def _series(metric: Metric[Any], subjects: Sequence[Subject]) -> Iterator[str]:
    name, lasting = metric.name, metric.lasting
    label = _labelling((*LABELS[metric.of], *metric.labels))
    for labels, what, fresh in subjects:
        if not (fresh or lasting):
            continue
        taken = metric.take(what)
        match taken:
            case None:
                pass
            case float() | int():
                yield f"{name}{label(labels)} {_number(taken)}\n"
            case Histogram():
                yield from _distribution(name, (*LABELS[metric.of], *metric.labels), labels, taken)
            case _:
                for own, value in taken:
                    yield f"{name}{label((*labels, *_escaped(own)))} {_number(value)}\n"


def _distribution(name: str, names: tuple[str, ...], labels: tuple[str, ...], taken: Histogram) -> Iterator[str]:
    label, total = _labelling((*names, "le")), 0
    for bound, count in zip(_bounds(taken.bounds_ns), taken.counts, strict=True):
        total += count
        yield f"{name}_bucket{label((*labels, bound))} {_number(total)}\n"
    text = _labelling(names)(labels)
    yield f"{name}_count{text} {_number(total)}\n"
    yield f"{name}_sum{text} {_number(taken.sum_ns / 1_000_000_000)}\n"


def _number(value: float) -> str:
    return _LETTERS.get(value) or str(utils.floatToGoString(value))  # type: ignore[no-untyped-call]


@lru_cache(maxsize=64)
def _bounds(bounds_ns: tuple[int, ...]) -> tuple[str, ...]:
    return (*(_number(bound / 1e9) for bound in bounds_ns), "+Inf")


@lru_cache(maxsize=256)
def _labelling(names: tuple[str, ...]) -> Callable[[tuple[str, ...]], str]:
    """Of escaped values, in the order of ``names``, the text between a series' name and its value."""
    if not names:
        return lambda values: ""
    order = sorted(range(len(names)), key=names.__getitem__)
    template = "{" + ",".join(f'{names[i]}="%s"' for i in order) + "}"
    if len(names) == 1:
        return template.__mod__
    pick = itemgetter(*order)
    return lambda values: template % pick(values)


def _escaped(values: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(value.translate(_ESCAPED) for value in values)
