"""What each ``Device`` promises: the card of every profile, and NVML on the simulated driver."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from gpuserver.device.base import Activity
from tests.device.conformance.places import CARDS, MILLISECOND, Card
from vgpu.errors import ErrorCode, VgpuError

GIB = 1 << 30
HERE, PARENT = os.getpid(), os.getppid()


@pytest.fixture(params=CARDS)
def card(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Card]:
    with CARDS[request.param](tmp_path) as made:
        yield made


def test_a_device_says_which_it_is(card: Card) -> None:
    facts = card.device.facts
    assert facts == card.device.facts
    assert facts.index == 0
    assert re.fullmatch(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", facts.uuid)
    assert facts.name
    assert facts.total_memory_bytes == card.engine.memory_bytes
    assert facts.sm_count >= 8


def test_a_device_that_partitions_also_preempts(card: Card) -> None:
    found = card.device.capabilities
    assert found.compute_capability is not None
    assert found.compute_capability >= (6, 0)
    assert found.preempts >= found.partitions


def test_memory_in_use_is_that_of_the_processes(card: Card) -> None:
    assert card.device.memory_use().by_pid == {}
    first = card.process(HERE, 1 * GIB)
    card.process(HERE, 2 * GIB)
    other = card.process(PARENT, 3 * GIB)
    use = card.device.memory_use()
    assert set(use.by_pid) == {HERE, PARENT}
    assert 3 * GIB <= use.by_pid[HERE] <= 4 * GIB, "two contexts of one process, and what they cost"
    assert 3 * GIB <= use.by_pid[PARENT] <= 4 * GIB
    assert sum(use.by_pid.values()) == use.used_bytes <= card.device.facts.total_memory_bytes
    card.engine.close_context(other)
    assert set(card.device.memory_use().by_pid) == {HERE}
    card.engine.give_memory(first, 1 * GIB)
    assert use.by_pid[HERE] - card.device.memory_use().by_pid[HERE] == 1 * GIB


def test_a_dead_process_is_listed_until_its_memory_is_back(card: Card) -> None:
    busy, idle = card.process(HERE, GIB), card.process(PARENT, GIB)
    card.work(busy, 600_000 * MILLISECOND)
    card.engine.kill_context(busy, 600_000 * MILLISECOND)
    card.engine.kill_context(idle, MILLISECOND)
    card.wait(20 * MILLISECOND)
    use = card.device.memory_use()
    assert set(use.by_pid) == {HERE}
    assert use.by_pid[HERE] >= GIB


def test_utilization_is_the_part_of_the_time_with_kernels(card: Card) -> None:
    assert card.device.activity().utilization_ratio == 0
    card.work(card.process(HERE, GIB), 600_000 * MILLISECOND)
    card.wait(700 * MILLISECOND)
    busy = card.device.activity().utilization_ratio
    assert busy is not None
    assert 0 < busy <= 1


def test_activity_is_in_its_units(card: Card) -> None:
    activity = card.device.activity()
    for field in fields(Activity):
        value = getattr(activity, field.name)
        assert value is None or (type(value) is float and value >= 0), field.name
        assert not field.name.endswith("_ratio") or value is None or value <= 1


def test_a_closed_device_has_no_readings(card: Card) -> None:
    card.close()
    with pytest.raises(VgpuError) as caught:
        card.device.memory_use()
    assert caught.value.code is ErrorCode.UNAVAILABLE
    assert card.device.activity() == Activity()
