"""What is written for Prometheus: readable, without doubles, byte for byte what prometheus_client would write."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import cycle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import parser
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.openmetrics import parser as openmetrics_parser
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.samples import Sample

from tests.ctl.fake_node import gpu_reading, process_reading, vgpu_reading
from tests.metrics.meterings import COUNTS, busy, histogram, meterings, seen
from vgpu.metrics.definitions import LONGEST_COMMAND, METRICS, readable
from vgpu.metrics.exposition import exposition, subjects_of
from vgpu.metrics.kinds import LABELS, Kind, Metric, Seen
from vgpu.protocol.messages import MetricsSnapshot, OutsideProcess, ProcessReading, Snapshot
from vgpu.protocol.meters import GpuMeters, Histogram, VgpuMeters

Series = tuple[str, tuple[tuple[str, str], ...]]


class Twin:
    """The same as families of prometheus_client, put together the plain way."""

    def __init__(self, seen: Seen) -> None:
        self._seen = seen

    def collect(self) -> Iterator[Family]:
        subjects = subjects_of(self._seen)
        for metric in METRICS:
            family = Family(metric.family, metric.help, metric.kind, metric.unit)
            for subject in subjects[metric.of]:
                if subject.fresh or metric.lasting:
                    plain = (_unescaped(value) for value in subject.labels)
                    labels = dict(zip(LABELS[metric.of], plain, strict=True))
                    family.samples.extend(_samples(metric, labels, metric.take(subject.what)))
            if family.samples:
                yield family


def _unescaped(value: str) -> str:
    return re.sub(r"\\(.)", lambda found: "\n" if found[1] == "n" else found[1], value)


def _samples(metric: Metric[Any], labels: dict[str, str], taken: Any) -> Iterator[Sample]:
    if isinstance(taken, Histogram):
        total = 0
        for bound, count in zip([*(bound / 1e9 for bound in taken.bounds_ns), "+Inf"], taken.counts, strict=True):
            total += count
            yield Sample(f"{metric.name}_bucket", {**labels, "le": str(bound)}, total)
        yield Sample(f"{metric.name}_count", labels, total)
        yield Sample(f"{metric.name}_sum", labels, taken.sum_ns / 1e9)
    elif isinstance(taken, int | float):
        yield Sample(metric.name, labels, taken)
    elif taken is not None:
        for own, value in taken:
            yield Sample(metric.name, labels | dict(zip(metric.labels, own, strict=True)), value)


def parsed(text: bytes) -> dict[Series, float]:
    """Every sample of the text; fails where one is there twice, or what it belongs to is."""
    families = list(parser.text_string_to_metric_families(text.decode()))
    assert max(Counter(family.name for family in families).values()) == 1
    found: dict[Series, float] = {}
    for family in families:
        for sample in family.samples:
            key = sample.name, tuple(sorted(sample.labels.items()))
            assert key not in found
            found[key] = sample.value
    return found


def value(samples: dict[Series, float], called: str, /, **labels: str) -> list[float]:
    """Of the series with these labels, whatever others they have."""
    return [found for (name, own), found in samples.items() if name == called and labels.items() <= dict(own).items()]


@given(metering=st.none() | meterings())
def test_any_metering_is_written_as_prometheus_client_would(metering: MetricsSnapshot | None) -> None:
    what = seen(metering)
    text, open_text = exposition(what), exposition(what, openmetrics=True)
    assert text == generate_latest(Twin(what))  # type: ignore[arg-type]
    assert open_text == generate_openmetrics(Twin(what))
    known = {metric.name for metric in METRICS}
    assert all({name, name.rpartition("_")[0]} & known for name, _ in parsed(text))  # and none is there twice
    list(openmetrics_parser.text_string_to_metric_families(open_text.decode()))


def test_a_vgpu_has_its_owners_name_where_the_owner_has_one() -> None:
    vgpus = [vgpu_reading(vgpu_id=f"vgpu-0000000{i}", owner_uid=uid) for i, uid in enumerate((0, 4_000_000_000))]
    metering = busy(1).model_copy(update={"snapshot": snapshot(vgpus=vgpus)})
    labels = [dict(own) for (called, own) in parsed(exposition(seen(metering))) if called == "vgpu_info"]
    assert [one["user"] for one in labels] == ["root", "4000000000"]


@given(name=st.text(min_size=1), command=st.text())
def test_labels_are_read_as_they_were_meant(name: str, command: str) -> None:
    process = ProcessReading.model_validate(process_reading(command=command))
    metering = busy(1).model_copy(
        update={"snapshot": snapshot(vgpus=[vgpu_reading(name=name)]), "processes": (process,)}
    )
    labels = [dict(own) for (called, own) in parsed(exposition(seen(metering))) if called == "vgpu_process_info"]
    assert [(one["name"], one["command"]) for one in labels] == [
        (metering.snapshot.vgpus[0].name, readable(process.command))
    ]
    assert len(readable(command)) <= LONGEST_COMMAND
    assert readable(command).isprintable()


GROWING = ("tokens", "held_ns", "busy_ns", "overuse_ns", "memory_refusals", "launches", "swaps_out", "swaps_in")
GROWING_PROCESS = ("busy_ns", "overrun_ns", "launches", "graph_launches", "gate_waits", "gate_wait_ns", "copies")


@given(metering=meterings(), steps=st.lists(COUNTS, min_size=1, max_size=9))
def test_counters_only_grow_while_a_server_lives(metering: MetricsSnapshot, steps: list[int]) -> None:
    """A later metering of the same servers has no counter that is less, to the last digit that is written."""
    step = cycle(steps)

    def grown(model: Any, fields: Iterable[str]) -> Any:
        return model.model_copy(update={name: getattr(model, name) + next(step) for name in fields})

    def more(taken: Histogram) -> Histogram:
        counts = tuple(count + next(step) for count in taken.counts)
        return taken.model_copy(update={"counts": counts, "sum_ns": taken.sum_ns + next(step)})

    before = metering.snapshot
    then = MetricsSnapshot(
        snapshot=before.model_copy(
            update={
                "gpus": tuple(grown(gpu, ("restarts", "mps_restarts")) for gpu in before.gpus),
                "vgpus": tuple(grown(vgpu, GROWING) for vgpu in before.vgpus),
            }
        ),
        processes=tuple(grown(process, GROWING_PROCESS) for process in metering.processes),
        gpus=tuple(
            one.model_copy(update={"handovers": more(one.handovers), "loop_lag": more(one.loop_lag)})
            for one in metering.gpus
        ),
        vgpus=tuple(one.model_copy(update={"waits": more(one.waits)}) for one in metering.vgpus),
    )
    first, second = parsed(exposition(seen(metering))), parsed(exposition(seen(then)))
    assert first.keys() == second.keys()
    counting = {metric.name for metric in METRICS if metric.kind is not Kind.GAUGE}
    for (name, labels), amount in first.items():
        if {name, name.rpartition("_")[0]} & counting:
            assert second[name, labels] >= amount


def snapshot(gpus: Iterable[Any] = (), vgpus: Iterable[Any] = ()) -> Snapshot:
    return Snapshot(at_unix_s=1.0, gpus=tuple(gpus) or (gpu_reading(),), vgpus=tuple(vgpus))


def test_a_node_that_is_down_says_so_and_nothing_else() -> None:
    samples = parsed(exposition(seen(None)))
    assert samples == {
        ("vgpu_node_up", ()): 0.0,
        ("vgpu_exporter_info", (("version", "0.1.0"),)): 1.0,
        ("vgpu_exporter_scrape_seconds", ()): 0.25,
    }


@pytest.mark.parametrize("state", ["restarting", "failed"])
def test_what_a_silent_server_said_last_is_not_told_as_if_it_were_current(state: str) -> None:
    fine, silent = gpu_reading(index=0), gpu_reading(index=1, state=state, restarts=3)
    vgpus = [vgpu_reading(), vgpu_reading(vgpu_id="vgpu-22222222", gpu_index=1, state="restarting", tokens=17)]
    metering = MetricsSnapshot(
        snapshot=snapshot([fine, silent], vgpus),
        processes=tuple(
            ProcessReading.model_validate(process_reading(vgpu_id=vgpu.vgpu_id, gpu_index=vgpu.gpu_index))
            for vgpu in vgpus
        ),
        gpus=tuple(GpuMeters(gpu_index=i, handovers=histogram(), loop_lag=histogram()) for i in (0, 1)),
        vgpus=tuple(VgpuMeters(vgpu_id=one.vgpu_id, gpu_index=one.gpu_index, waits=histogram()) for one in vgpus),
    )
    samples = parsed(exposition(seen(metering)))
    assert value(samples, "vgpu_gpu_up", gpu="0") == [1.0]
    assert value(samples, "vgpu_gpu_up", gpu="1") == [0.0]
    lasting = {metric.name for metric in METRICS if metric.lasting}
    told = {name for name, labels in samples if dict(labels).get("gpu") == "1"}
    assert told == {
        *("vgpu_gpu_up", "vgpu_gpu_info", "vgpu_gpu_state", "vgpu_gpu_server_restarts_total"),
        *("vgpu_info", "vgpu_state", "vgpu_created_timestamp_seconds"),
    }
    assert told <= lasting
    assert value(samples, "vgpu_state", gpu="1", state="restarting") == [1.0]
    assert value(samples, "vgpu_tokens_total", gpu="0") == [1234.0]


def test_every_sharer_has_its_own_numbers() -> None:
    vgpus = [
        vgpu_reading(vgpu_id="vgpu-00000001", name="small", held_ns=3 * 10**9, memory_used_bytes=1 << 30),
        vgpu_reading(vgpu_id="vgpu-00000002", held_ns=7 * 10**9, lag_ns=-5 * 10**8, memory_used_bytes=2 << 30),
    ]
    outside = tuple(OutsideProcess(gpu_index=0, pid=i, uid=0, command="", memory_bytes=100) for i in (1, 2))
    metering = MetricsSnapshot(
        snapshot=snapshot([gpu_reading(outside=outside)], vgpus), processes=(), gpus=(), vgpus=()
    )
    samples = parsed(exposition(seen(metering)))
    assert value(samples, "vgpu_token_seconds_total", name="small", vgpu="vgpu-00000001") == [3.0]
    assert value(samples, "vgpu_token_seconds_total", name="vgpu-00000002") == [7.0]  # without a name, by its id
    assert value(samples, "vgpu_memory_used_bytes") == [float(1 << 30), float(2 << 30)]
    assert value(samples, "vgpu_debt_seconds") == [0.0, 0.5]
    assert value(samples, "vgpu_lag_seconds") == [0.0, -0.5]
    assert value(samples, "vgpu_gpu_outside_memory_bytes") == [200.0]
    assert value(samples, "vgpu_gpu_mps_up") == []  # temporal mode has no daemon
    assert value(samples, "vgpu_gpu_power_watts") == []  # the driver did not tell


def test_a_histogram_is_cumulative() -> None:
    waits = Histogram(bounds_ns=(1_000_000, 20_000_000), counts=(5, 0, 2), sum_ns=3_000_000_000)
    metering = busy(1).model_copy(update={"vgpus": (VgpuMeters(vgpu_id="vgpu-00000000", gpu_index=0, waits=waits),)})
    samples = parsed(exposition(seen(metering)))
    assert {le: value(samples, "vgpu_wait_seconds_bucket", le=le) for le in ("0.001", "0.02", "+Inf")} == {
        "0.001": [5.0],
        "0.02": [5.0],
        "+Inf": [7.0],
    }
    assert value(samples, "vgpu_wait_seconds_count") == [7.0]
    assert value(samples, "vgpu_wait_seconds_sum") == [3.0]


def test_a_live_process_goes_before_a_dead_one_with_its_pid() -> None:
    both = [process_reading(slot=0, alive=True, launches=7), process_reading(slot=1, alive=False, launches=9)]
    metering = MetricsSnapshot(
        snapshot=snapshot(vgpus=[vgpu_reading()]),
        processes=tuple(map(ProcessReading.model_validate, both)),
        gpus=(),
        vgpus=(),
    )
    assert value(parsed(exposition(seen(metering))), "vgpu_process_launches_total") == [7.0]


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_names_keep_to_the_rules(metric: Metric[Any]) -> None:
    assert metric.name.startswith("vgpu_")
    assert (metric.kind is Kind.COUNTER) == metric.name.endswith("_total")
    assert metric.help.endswith(".")
    assert not set(metric.labels) & set(LABELS[metric.of])
    assert not any(word in metric.name for word in ("percent", "_ns", "_ms", "mhz", "client"))
