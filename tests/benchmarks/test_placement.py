"""The placement benchmark on a small trace and a small fleet: its logic, no result."""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.placement import __main__ as placement
from benchmarks.placement import mixes, trace
from vgpu.share import PPM

ROOT = Path(__file__).parents[2]
COLUMNS = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec"


def written(folder: Path, name: str, text: str) -> None:
    with gzip.open(folder / f"openb_{name}.csv.gz", "wt") as file:
        file.write(text)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twelve nodes; a list whose tasks ask for more than these have."""
    rows = [f"n{i},32000,131072,{2 if i % 2 else 4},{'T4' if i % 2 else 'V100'}" for i in range(12)]
    written(tmp_path, "node_list_gpu_node", "\n".join(["sn,cpu_milli,memory_mib,gpu,model", *rows]))
    chance = random.Random(3)
    for name in trace.LISTS:
        tasks = [
            f"p{i},{chance.choice([1000, 4000, 12000])},4096,{chance.choice([0, 1, 1, 1, 2])},"
            f"{chance.choice([250, 500, 1000])},{chance.choice(['', '', 'T4', 'T4|V100'])}"
            for i in range(80)
        ]
        tasks = [line.replace(",2,250,", ",2,1000,").replace(",2,500,", ",2,1000,") for line in tasks]
        written(tmp_path, f"pod_list_{name}", "\n".join([COLUMNS, *tasks]))
    return tmp_path


def test_tasks_arrive_until_they_ask_for_a_third_more_than_there_is(folder: Path) -> None:
    listed, cluster = trace.tasks(folder, "default"), trace.nodes(folder)
    nodes, arriving = trace.arrivals(cluster, listed, 1)
    gpus = sum(len(room.gpus) for room in cluster)
    asked = sum(task.gpus * task.time_ppm for task in arriving) / PPM
    assert 1.3 * gpus - 8 < asked <= 1.3 * gpus + 8
    assert sorted(map(id, nodes)) == sorted(map(id, cluster))
    assert {task.gpus for task in listed} == {0, 1, 2}
    assert all(task.time_ppm == (0 if task.gpus == 0 else task.time_ppm) for task in listed)
    assert frozenset({"T4", "V100"}) in {task.models for task in listed}
    again = trace.arrivals(cluster, listed, 1)
    assert again == (nodes, arriving)


@pytest.mark.parametrize("rule", placement.ON_LISTS)
def test_each_rule_fills_the_cluster(folder: Path, rule: str) -> None:
    assert 70 < placement.allocated(folder, "default", rule, 42) <= 100


def test_what_fgd_knows_is_the_most_frequent_part(folder: Path) -> None:
    listed = trace.tasks(folder, "default")
    known = {size for size, _ in trace.popular(listed).sizes}
    assert 0 < len(known) <= len(set(listed))
    assert all(size.host_bytes == 0 for size in known)


@pytest.mark.parametrize("rule", list(mixes.RULES))
def test_mixes_fill_time_and_memory(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "GPUS_OF_MIXES", 30)
    time, memory = placement.in_use("mixed", rule, 1)
    assert 40 < time <= 100
    assert 40 < memory <= 100


def test_decisions_at_scale_are_counted() -> None:
    found = placement.scale(20, decisions=200)
    assert found["gpus"] == 20
    assert 100 < found["vgpus"] <= 400
    assert found["decisions_per_second"] > 0


def test_its_answer_as_json(folder: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.placement", "--trace", str(folder), "--seeds", "1", "--json"]
    ran = subprocess.run([*command, "--only", "lists"], cwd=ROOT, capture_output=True, text=True, check=True)
    lists = json.loads(ran.stdout)["lists"]
    assert set(lists) == set(trace.LISTS)
    assert all(set(row) == set(placement.ON_LISTS) for row in lists.values())
