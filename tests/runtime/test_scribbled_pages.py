"""A tenant's activity page is any bytes at all: everything that the server reads from it still adds up, fits into every
message, and never names a process that the server does not know."""

from __future__ import annotations

import fcntl
import mmap
import os
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgpack
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from cython_ext.pages.activitypage import ActivityPage
from gpuserver.core.admission.registry import GpuCapacity, Owner, Registry
from gpuserver.core.observe.trace import Recorder
from gpuserver.core.observe.usage import TurnUse, Usage
from gpuserver.core.scheduler.leases import ServiceTotals
from gpuserver.device.base import GpuFacts, MemoryUse
from gpuserver.runtime.api.readings import (
    GpuPlace,
    process_reading,
    seen_of,
    statement_of,
    vgpu_reading,
    warnings_on,
)
from gpuserver.runtime.api.tracing import _Recording
from gpuserver.runtime.memory.watch import MemoryWatch
from gpuserver.runtime.rates import Rates
from gpuserver.runtime.vgpus import Vgpu, new_grants
from vgpu.identity import Member, Process
from vgpu.protocol.codec import encode
from vgpu.protocol.messages import ProcessList, VgpuList
from vgpu.share import Mode
from vgpu.spec import VgpuSpec

ROOT = Path(__file__).parents[2]
GIB = 1 << 30
MEMBERS = {slot: Member(slot, Process(4_000_000 + slot, 7), 1000) for slot in (0, 5, 63)}
FACTS = GpuFacts(index=0, uuid="GPU-1", name="any", total_memory_bytes=80 * GIB, sm_count=132)


@pytest.fixture(scope="module")
def page() -> Iterator[mmap.mmap]:
    with ActivityPage.create(1) as made:
        yield mmap.mmap(made.fileno(), 0)


def vgpu_of(page: mmap.mmap, **fields: Any) -> Vgpu:
    registry = Registry(GpuCapacity(FACTS.total_memory_bytes, FACTS.sm_count), Mode.TEMPORAL)
    spec = VgpuSpec.parse(sm_percent=30, memory_bytes="8G", **fields)
    record = registry.create("vgpu-00000001", spec, Owner(1000), 0)
    vgpu = Vgpu(record, 1, new_grants(record, FACTS, 1, 10**10), members=dict(MEMBERS))
    descriptor = os.memfd_create("copy", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, len(page))
    os.pwrite(descriptor, page[:], 0)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    vgpu.take_activity(descriptor)
    return vgpu


FILLS = st.one_of(
    st.sampled_from([b"\xff", b"\x7f", b"\x80", b"\x00\x00\x00\x80", b"\xff\xff\xff\xff\xff\xff\xff\x7f"]),
    st.binary(min_size=1, max_size=64),
)


@given(FILLS, st.integers(0, 2**32), st.sampled_from([None, "managed", "swap"]), st.integers(0, 80))
def test_any_bytes_at_all(page: mmap.mmap, fill: bytes, seed: int, oversubscribe: str | None, shown_gib: int) -> None:
    noise = random.Random(seed).randbytes(4096)
    page[:] = ((fill * 4096)[:4096] * (len(page) // 4096 + 1))[: len(page)]
    at = seed % (len(page) - 4096)
    page[at : at + 4096] = noise
    vgpu = vgpu_of(page, **({"oversubscribe": oversubscribe} if oversubscribe else {}))
    try:
        trio.run(look_at, vgpu, shown_gib * GIB)
    finally:
        vgpu.close()


async def look_at(vgpu: Vgpu, shown_bytes: int) -> None:
    """By every reader of the server."""
    told: list[tuple[Any, ...]] = []
    memory = MemoryWatch(cast(Any, None), lambda: [vgpu], cast(Any, None), lambda *what: told.append(what))
    memory.latest = MemoryUse(shown_bytes, {4_000_000: shown_bytes, 9: 1})
    for _ in range(3):
        memory._compare({vgpu.record.vgpu_id: vgpu.ledger}, time.monotonic_ns())
    processes = tuple(process_reading(vgpu, slot, 0, memory) for slot in vgpu.slots)
    assert [(one.slot, one.pid) for one in processes] == [(slot, one.process.pid) for slot, one in MEMBERS.items()]
    assert all(one.alive for one in processes)
    statement = statement_of(vgpu.record, SimpleNamespace(**vars_of_book()))  # type: ignore[arg-type]
    reading = vgpu_reading(
        vgpu, GpuPlace(0, "GPU-1", True, {}), statement, Rates(), 10**12, warnings_on(vgpu, [], "", "")
    )
    assert reading.processes == len(MEMBERS)
    for message in (ProcessList(processes=processes), VgpuList(vgpus=(reading,))):
        encode(message.model_dump(mode="json"))
    msgpack.packb([list(what[2:]) for what in told])
    assert 0 <= vgpu.kept_bytes <= FACTS.total_memory_bytes
    assert 0 <= vgpu.borrowed_bytes <= FACTS.total_memory_bytes
    assert 0 <= vgpu.room_bytes <= vgpu.record.memory_limit_bytes
    msgpack.packb([vgpu.new_refusals(), vgpu.new_refusals(), vgpu.refusals, vgpu.launches, vgpu.movable_bytes])
    vgpu.show_served(ServiceTotals(1, 1, 1))
    _ = (vgpu.share, vgpu.here_bytes, seen_of(vgpu, Usage(), Mode.TEMPORAL, 0, TurnUse()))
    for slot in MEMBERS:
        vgpu.count_past(slot)
    msgpack.packb([vgpu.retired.refusals, vgpu.retired.launches, vgpu.retired.refused_bytes])
    record(vgpu)


def vars_of_book() -> dict[str, int]:
    return dict.fromkeys(("lag_ns", "bucket_ns", "held_ns", "busy_ns", "overuse_ns", "tokens"), 0)


def record(vgpu: Vgpu) -> None:
    """A recording of the GPU, in which the others' vGPUs are as well."""
    tokens = SimpleNamespace(
        record=lambda recorder, work: None,
        forget_recorder=lambda recorder: None,
        snapshot=list,
        drain_events=lambda: None,
        period_ns=1,
    )
    state = SimpleNamespace(
        vgpus={vgpu.record.vgpu_id: vgpu}, facts=FACTS, tokens=tokens, mode=Mode.TEMPORAL, generation=1
    )
    state.settings = SimpleNamespace(simulated=True)
    recording = _Recording(cast(Any, state), 1, work=True)
    for _ in range(3):
        recording._read_up_to.clear()
        recording._look()
        encode(recording.chunk().model_dump(mode="json"))


def test_losses_never_outgrow_a_message() -> None:
    recorder = Recorder(10)
    for _ in range(5):
        recorder.miss(2**63 - 1)
    _, lost = recorder.take(10)
    encode({"lost": lost})


def test_no_server_asks_a_page_which_processes_there_are() -> None:
    """Counters of a slot whose process is known, and the numbers of slots in use, are all that is read otherwise."""
    found = {
        f"{path.name}: {line.strip()}"
        for folder in ("gpuserver", "vgpu")
        for path in (ROOT / folder).rglob("*.py")
        for line in path.read_text().splitlines()
        if re.search(r"\.slots\(\)|\.read_slot\(", line)
    }
    assert found == {
        "vgpus.py: reading = self.activity.read_slot(slot)",
        "runtime.py: self._admissions.set_aside(slot.index for slot in activity.slots())",
    }
