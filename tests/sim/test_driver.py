"""The simulated driver as one process sees it: what works, and what is refused as a real driver refuses it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.sim.conftest import LIBRARIES, Node

SUCCESS, INVALID_VALUE, OUT_OF_MEMORY, NOT_INITIALIZED = 0, 1, 2, 3
NOT_READY, ILLEGAL_ADDRESS, NOT_SUPPORTED = 600, 700, 801
CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED, CAPTURE_UNJOINED, CAPTURE_IMPLICIT, CAPTURED_EVENT = 900, 901, 904, 906, 907
MIB = 1 << 20
MEMORY = "tests.sim.memory_programs"


@pytest.mark.parametrize("library", ["libcuda.so.1", "libnvidia-ml.so.1"])
def test_the_libraries_hold_no_python_and_load_anywhere(library: str) -> None:
    symbols = subprocess.run(["nm", "-D", LIBRARIES / library], capture_output=True, text=True, check=True).stdout
    assert not [line for line in symbols.splitlines() if " Py" in line or " _Py" in line]
    exported = {line.split()[-1] for line in symbols.splitlines() if " T " in line}
    assert exported
    assert all(name.startswith(("cu", "nvml")) for name in exported)
    environment = os.environ | {"LD_PRELOAD": str(LIBRARIES / library)}
    subprocess.run(["/bin/true"], env=environment, check=True)


def test_memory_copies_kernels_and_events(node: Node) -> None:
    answer = node.run("basics")
    assert answer["copied"]
    assert (answer["pending"], answer["done"]) == (NOT_READY, SUCCESS)
    assert answer["elapsed_ns"] >= 3_000_000
    assert (answer["bad_free"], answer["free"]) == (INVALID_VALUE, SUCCESS)


def test_a_copy_of_two_pinned_parts_is_refused(node: Node) -> None:
    """The manual says so. With such copies, no swapped program went on after a swap on an H200."""
    answer = node.run("pinned_parts")
    assert answer == {"one": SUCCESS, "two": INVALID_VALUE, "beyond": INVALID_VALUE, "pageable": SUCCESS}


def test_an_event_of_a_context_is_behind_all_its_streams_and_nothing_later(node: Node) -> None:
    answer = node.run("context_event")
    assert (answer["pending"], answer["done"]) == (NOT_READY, SUCCESS)
    assert (answer["refused"], answer["end"]) == (CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED)


def test_waiting_costs_no_processor_time(node: Node) -> None:
    answer = node.run("idle_wait", "3000")
    assert answer["wall_s"] >= 3
    assert answer["cpu_s"] < 0.2 * answer["wall_s"]  # awake it would be all of it


def test_memory_is_refused_at_capacity_and_the_process_goes_on(node: Node) -> None:
    answer = node.run("until_refused", str(256 * MIB))
    capacity = (8 << 30) - node.engine().context_bytes
    assert answer["refusal"] == OUT_OF_MEMORY
    assert answer["taken"] == capacity // (256 * MIB) * (256 * MIB)
    assert answer["free"] == capacity - answer["taken"]
    assert answer["total"] == 8 << 30
    assert answer["work"] == SUCCESS


def test_a_capture_forbids_what_a_real_one_forbids(node: Node) -> None:
    """Measured on an H200: only GLOBAL captures reach other threads, RELAXED threads may do everything."""
    unsafe = {"event_query", "stream_query", "alloc", "synchronize"}
    for case, (answer, end) in node.run("captures").items():
        mode, thread_mode, call = case.split()
        refused = call in unsafe and mode == "0" and thread_mode == "0"
        expected = (CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED) if refused else (SUCCESS, SUCCESS)
        assert (answer, end) == expected, case


def test_the_legacy_stream_breaks_captures_of_blocking_streams_only(node: Node) -> None:
    assert node.run("legacy_capture") == {
        "blocking": [CAPTURE_IMPLICIT, CAPTURE_INVALIDATED],
        "non_blocking": [SUCCESS, SUCCESS],
    }


def test_a_capture_over_two_streams_becomes_one_graph(node: Node) -> None:
    answer = node.run("forked_capture", "yes")
    assert (answer["end"], answer["nodes"], answer["edges"]) == (SUCCESS, 2, 1)
    assert answer["ns"] >= 6_000_000


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("no", {"end": CAPTURE_UNJOINED, "query": SUCCESS}),
        ("query", {"end": CAPTURE_INVALIDATED, "query": CAPTURED_EVENT}),
    ],
)
def test_a_capture_that_ends_badly(node: Node, what: str, expected: dict[str, int]) -> None:
    assert node.run("forked_capture", what) == expected


def test_refusals_are_those_of_an_h200(node: Node) -> None:
    assert node.run("refusals") == {
        "foreign_event": 400,
        "untimed": 400,
        "no_such_kernel": 500,
        "bad_ptx": 200,
        "huge_block": INVALID_VALUE,
        "no_parameters": INVALID_VALUE,
        "second_parameter": [20, 4],
        "device": 101,
        "destroyed_stream": 201,
    }


def test_virtual_memory(node: Node) -> None:
    assert node.run("virtual_memory", module=MEMORY) == {
        "charged": 2 * MIB,
        "unmapped": INVALID_VALUE,
        "no_access": INVALID_VALUE,
        "twice": True,
        "survives": 42,
        "range": [2 * MIB, 2 * MIB],
        "ipc": INVALID_VALUE,
        "early_free": INVALID_VALUE,
        "left": 0,
        "free": SUCCESS,
    }


@pytest.mark.parametrize("how", ["memset", "kernel"])
def test_unmapping_under_queued_work_kills_the_context(node: Node, how: str) -> None:
    answer = node.run("unmap_under_work", how, module=MEMORY)
    assert (answer["sync"], answer["after"]) == (ILLEGAL_ADDRESS, ILLEGAL_ADDRESS)


@pytest.mark.parametrize("how", ["nothing", "synchronised"])
def test_unmapping_what_no_work_touches_is_harmless(node: Node, how: str) -> None:
    answer = node.run("unmap_under_work", how, module=MEMORY)
    assert (answer["sync"], answer["after"]) == (SUCCESS, SUCCESS)


def test_pools_keep_memory_up_to_their_threshold(node: Node) -> None:
    had, freed = [64 * MIB, 40 * MIB], [64 * MIB, 0]
    assert node.run("pools", module=MEMORY) == {"trimmed": [had, freed, [0, 0]], "kept": [had, freed, freed]}


def test_what_graphs_allocate_is_taken_when_they_are_uploaded_and_given_back_by_a_trim(node: Node) -> None:
    assert node.run("graph_memory", module=MEMORY) == {
        "before it ran": INVALID_VALUE,
        "the one that stays": SUCCESS,
        "the one that was freed": INVALID_VALUE,
        "again before that is freed": INVALID_VALUE,
        "again": SUCCESS,
        "a second time executable": INVALID_VALUE,
        "after a trim": SUCCESS,
        "taken": [0, 0, 128, 128, 0, 128, 128, 0],
    }


def test_allocations_under_a_capture_become_nodes(node: Node) -> None:
    assert node.run("captured_memory", module=MEMORY) == {"nodes": 3, "launches": [SUCCESS] * 3, "clone": NOT_SUPPORTED}


def test_procedures_are_found_by_version_and_stream_kind(node: Node) -> None:
    answer = node.run("lookups")
    assert answer == {
        "wrong": {},
        "empty": 500,
        "unknown": [500, None, 1],
        "too_old": [500, None, 2],
        "no_status": SUCCESS,
    }


def test_host_words_and_host_functions_work_without_a_caller(node: Node) -> None:
    assert node.run("words") == {
        "held": [0, NOT_READY, False],
        "called": True,
        "done": 77,
        "query": SUCCESS,
    }


def test_the_legacy_stream_takes_turns_with_blocking_streams(node: Node) -> None:
    (first, legacy, second, free) = node.run("default_streams")["intervals"]
    assert first[1] <= legacy[0]
    assert legacy[1] <= second[0]
    assert free[0] < legacy[1]
    assert all(end - start == 2_000_000 for start, end in (first, legacy, second, free))


def test_a_forked_child_is_refused(node: Node) -> None:
    assert node.run("after_fork") == {"child": 11 * NOT_INITIALIZED, "parent": SUCCESS}


def test_visible_devices(node: Node) -> None:
    plain = [uuid.removeprefix("GPU-").replace("-", "") for uuid in node.uuids]
    assert node.run("devices")["uuids"] == plain
    assert node.run("devices", CUDA_VISIBLE_DEVICES="1,0")["uuids"] == plain[::-1]
    assert node.run("devices", CUDA_VISIBLE_DEVICES=node.uuids[1].upper())["uuids"] == plain[1:]
    assert node.run("devices", CUDA_VISIBLE_DEVICES="0,7,1")["uuids"] == plain[:1]
    assert node.run("devices", CUDA_VISIBLE_DEVICES="")["init"] == 100
    assert all("Simulated" in name for name in node.run("devices")["names"])


def test_without_a_node_there_is_no_device(node: Node, tmp_path: Path) -> None:
    answer = node.run("devices", VGPU_SIM_DIR=str(tmp_path / "nowhere"))
    assert (answer["init"], answer["error"]) == (100, "CUDA_ERROR_NO_DEVICE")
