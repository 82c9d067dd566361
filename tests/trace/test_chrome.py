"""The trace file against the format that Perfetto reads, over recordings that say anything."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trace.recordings import IDS, MS, empty, recordings, turns
from vgpu.trace.chrome import chrome_trace
from vgpu.trace.recording import Recording

REQUIRED = {"X": {"dur", "args", "cat"}, "C": {"args"}, "M": {"args"}, "i": {"s", "args"}}
METADATA = {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}
ROUNDING_US = 0.001
"""Whole nanoseconds as fractions of microseconds."""


def events(*made: Recording) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(json.dumps(chrome_trace(made)))["traceEvents"]
    return found


def tracks(found: list[dict[str, Any]], phase: str = "X") -> dict[tuple[int, int], list[dict[str, Any]]]:
    by_track = defaultdict(list)
    for event in found:
        if event["ph"] == phase:
            by_track[event["pid"], event["tid"]].append(event)
    return by_track


def named(found: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """The bars of all tracks of that name."""
    places = {(e["pid"], e["tid"]) for e in found if e["name"] == "thread_name" and e["args"]["name"] == name}
    return [e for place in sorted(places) for e in tracks(found)[place]]


@given(st.lists(recordings(), max_size=3, unique_by=lambda made: made.gpu.index))
def test_every_event_is_well_formed_within_the_window_and_in_order(made: list[Recording]) -> None:
    found = events(*made)
    longest_us = max((recording.length_ns / 1000 for recording in made), default=0)
    for event in found:
        assert {"ph", "pid", "tid", "ts", "name"} | REQUIRED[event["ph"]] <= event.keys()
        assert 0 <= event["ts"] <= longest_us
        if event["ph"] == "M":
            assert event["name"] in METADATA
        if event["ph"] == "X":
            assert event["dur"] > 0
            assert event["ts"] + event["dur"] <= longest_us + ROUNDING_US
        if event["ph"] == "C":
            assert all(isinstance(value, float | int) for value in event["args"].values())
    for track in tracks(found).values():
        assert all(a["ts"] + a["dur"] <= b["ts"] + ROUNDING_US for a, b in pairwise(track))
    for phase in ("i", "C"):
        for track in tracks(found, phase).values():
            assert all(a["ts"] <= b["ts"] for a, b in pairwise(track))


@given(st.lists(recordings(), max_size=3, unique_by=lambda made: made.gpu.index))
def test_every_track_has_one_name(made: list[Recording]) -> None:
    found = events(*made)
    names = [(e["pid"], e["tid"], e["name"]) for e in found if e["ph"] == "M"]
    assert len(names) == len(set(names))
    for event in found:
        assert (event["pid"], 0, "process_name") in names
        if event["ph"] in {"X", "i"}:
            assert (event["pid"], event["tid"], "thread_name") in names


def test_what_a_lease_tells() -> None:
    found = events(turns(100_000, 1))
    first, second = named(found, "leases")
    assert (first["ts"], first["dur"]) == (0, 2900)
    assert first["args"] == {
        "epoch": 1,
        "generation": 3,
        "granted_ns": 2_850_000,
        "held_ns": 2_900_000,
        "charged_ns": 2_900_000,
        "busy_ns": 2_900_000,
        "window_ns": 12 * MS,
        "ended": "ended",
        "tail_ns": 50_000,
    }
    (tail, _) = named(found, "tails: from a lease's end until it had drained")
    assert (tail["ts"], tail["dur"], tail["args"]) == (2850, 50, {"epoch": 1})
    (gap,) = named(found, "hand-over gaps")
    assert (gap["name"], gap["ts"], gap["dur"]) == (f"thirty → {IDS[1]}", 2900, 100)
    assert second["ts"] == 3000


def test_a_pair_shows_about_30_and_70_percent() -> None:
    made = turns()
    for name in ("leases", "GPU activity of process 4712", "GPU activity of process 4711"):
        for track, share in zip(("thirty", IDS[1]), (0.3, 0.7), strict=True):
            pids = {e["pid"] for e in events(made) if e["name"] == "process_name" and track in e["args"]["name"]}
            bars = [e for e in named(events(made), name) if e["pid"] in pids]
            if bars:
                assert sum(e["dur"] for e in bars) * 1000 / made.length_ns == pytest.approx(share, abs=0.02)


def test_a_hand_over_without_a_gap_is_an_instant() -> None:
    found = events(turns(0, 2))
    assert named(found, "hand-over gaps") == []
    assert sum(event["ph"] == "i" for event in found) == 3


def test_names_say_who_and_what() -> None:
    found = events(turns(), empty("spatial", 1))
    names = {e["args"]["name"] for e in found if e["name"] == "process_name"}
    assert names == {
        "GPU 0: NVIDIA H200, temporal mode",
        "thirty (vgpu-0000aaaa): 30 % of GPU 0",
        "vgpu-0000bbbb: 70 % of GPU 0",
        "GPU 1: NVIDIA H200, spatial mode",
    }


def test_the_file_says_what_is_missing_in_it() -> None:
    made = turns()
    made.lost, made.whole = 17, False
    told = chrome_trace([made, empty(index=1)])["otherData"]
    assert (told["lost_events"], told["whole"], len(told["gpus"]), len(told["vgpus"])) == (17, False, 2, 4)


def test_nothing_recorded_is_a_trace_too() -> None:
    assert chrome_trace([])["traceEvents"] == []
