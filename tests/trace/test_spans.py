"""What follows from a recording: activity, hand-overs, idle time."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given

from tests.trace.recordings import BEGIN, IDS, MS, empty, lease, recordings, turns
from vgpu.protocol.trace import BusyRecord, TraceChunk, WaitRecord
from vgpu.trace.recording import Recording
from vgpu.trace.spans import Span, activity, busy_of, hand_overs, idle_in, merged


def busy(vgpu_id: str, begin_ns: int, end_ns: int, slot: int = 0) -> BusyRecord:
    return BusyRecord(vgpu_id=vgpu_id, slot=slot, pid=1, begin_ns=BEGIN + begin_ns, end_ns=BEGIN + end_ns)


def test_parts_of_an_interval_are_one() -> None:
    assert merged([(5_000, 9_000), (0, 5_000), (9_500, 9_600), (20_000, 20_001)]) == [(0, 9_600), (20_000, 20_001)]


def test_work_that_waits_for_others_is_still_theirs() -> None:
    """B submitted while A ran: a GPU of one context at a time was A's until that had ended."""
    made = empty()
    made.busy += [busy(IDS[0], 0, 10 * MS), busy(IDS[1], 8 * MS, 20 * MS), busy(IDS[0], 9 * MS, 10 * MS)]
    assert activity(made) == [
        Span((IDS[0],), BEGIN, BEGIN + 10 * MS),
        Span((IDS[1],), BEGIN + 10 * MS, BEGIN + 20 * MS),
    ]


def test_side_by_side_they_work_at_the_same_time() -> None:
    made = empty("spatial")
    made.busy += [busy(IDS[0], 0, 10 * MS), busy(IDS[1], 8 * MS, 20 * MS)]
    both = (IDS[0], IDS[1])
    assert [(span.vgpus, span.begin_ns - BEGIN, span.end_ns - BEGIN) for span in activity(made)] == [
        ((IDS[0],), 0, 8 * MS),
        (both, 8 * MS, 10 * MS),
        ((IDS[1],), 10 * MS, 20 * MS),
    ]
    assert hand_overs(made) == []


def test_shared_leases_run_side_by_side_and_pass_nothing_on() -> None:
    made = empty()
    made.leases += [
        lease(IDS[0], 1, 0, None, None).model_copy(update={"shared": True}),
        lease(IDS[1], 2, 1 * MS, 20 * MS, 20 * MS),
    ]
    made.waits.append(WaitRecord(vgpu_id=IDS[1], begin_ns=BEGIN, end_ns=BEGIN + 1 * MS, ended="lease"))
    made.busy += [busy(IDS[0], 0, 10 * MS), busy(IDS[1], 8 * MS, 20 * MS)]
    assert [span.vgpus for span in activity(made)] == [(IDS[0],), (IDS[0], IDS[1]), (IDS[1],)]
    assert hand_overs(made) == []


@given(recordings())
def test_activity_is_in_order_without_overlaps_and_the_union_of_what_was_said(made: Recording) -> None:
    spans = activity(made)
    assert all(span.begin_ns < span.end_ns for span in spans)
    assert all(a.end_ns <= b.begin_ns for a, b in pairwise(spans))
    said = sum(end - begin for begin, end in merged((b.begin_ns, b.end_ns) for b in made.busy))
    shown = sum(span.end_ns - span.begin_ns for span in spans)
    assert said - 1_000 * len(made.busy) <= shown <= said


@pytest.mark.parametrize("gap_ns", [0, 100_000])
def test_the_gaps_of_a_pair(gap_ns: int) -> None:
    made = turns(gap_ns)
    passed = hand_overs(made)
    assert len(passed) == len(made.leases) - 1
    assert {one.gap_ns for one in passed} == {gap_ns}
    assert {(one.giver, one.taker) for one in passed} == {(IDS[0], IDS[1]), (IDS[1], IDS[0])}


def test_a_hand_over_is_to_one_that_waited_for_it() -> None:
    made = turns()
    made.waits = [wait for wait in made.waits if wait.vgpu_id == IDS[0]]
    assert {one.taker for one in hand_overs(made)} == {IDS[0]}


def test_a_gap_ends_with_the_first_work_and_begins_with_the_last() -> None:
    made = empty()
    made.leases += [lease(IDS[0], 1, 0, 10 * MS, 11 * MS), lease(IDS[1], 2, 11 * MS, 20 * MS, 20 * MS)]
    made.waits.append(WaitRecord(vgpu_id=IDS[1], begin_ns=BEGIN, end_ns=BEGIN + 11 * MS, ended="lease"))
    (unknown,) = hand_overs(made)
    assert unknown.gap_ns == 0  # by the leases alone
    made.busy += [busy(IDS[0], 0, 9 * MS), busy(IDS[1], 12 * MS, 20 * MS)]
    (known,) = hand_overs(made)
    assert (known.begin_ns - BEGIN, known.end_ns - BEGIN, known.gap_ns) == (9 * MS, 12 * MS, 3 * MS)
    made.busy[-1] = busy(IDS[1], 25 * MS, 26 * MS)
    assert hand_overs(made) == []  # it did nothing in its lease


@given(recordings())
def test_hand_overs_are_within_reason(made: Recording) -> None:
    for one in hand_overs(made):
        assert one.giver != one.taker
        assert made.begin_ns <= one.begin_ns <= one.end_ns


def test_idle_time_inside_leases() -> None:
    made = empty()
    made.leases += [lease(IDS[0], 1, 0, 10 * MS, 10 * MS), lease(IDS[0], 2, 20 * MS, 30 * MS, None)]
    assert idle_in(made, IDS[0]) == []  # nobody told anything
    made.busy += [busy(IDS[0], 1 * MS, 4 * MS), busy(IDS[0], 4 * MS + 10_000, 12 * MS), busy(IDS[0], 20 * MS, 95 * MS)]
    assert [(a - BEGIN, b - BEGIN) for a, b in idle_in(made, IDS[0])] == [(0, MS), (95 * MS, 100 * MS)]


@given(recordings())
def test_idle_and_busy_exclude_each_other(made: Recording) -> None:
    for vgpu_id in IDS:
        worked = busy_of(made).get(vgpu_id, [])
        for begin, end in idle_in(made, vgpu_id):
            assert begin < end
            assert all(b <= begin or a >= end for a, b in worked)


def test_held_time_counts_once() -> None:
    made = turns()
    assert made.held_ratio(IDS[0]) == pytest.approx(0.29)
    assert made.held_ratio(IDS[1]) == pytest.approx(0.69)
    made.leases += made.leases
    assert made.held_ratio(IDS[1]) == pytest.approx(0.69)


def test_a_recording_is_its_chunks() -> None:
    whole = turns()
    vgpus, records = tuple(whole.vgpus.values()), tuple(whole.leases + whole.waits + whole.busy)
    half = len(records) // 2
    running = lease(IDS[0], 99, 90 * MS, None, None)
    chunks = [
        TraceChunk(gpu=whole.gpu, begin_ns=BEGIN, until_ns=BEGIN, vgpus=vgpus),
        TraceChunk(gpu=whole.gpu, begin_ns=BEGIN, until_ns=BEGIN + 5, records=records[:half], under_way=(running,)),
        TraceChunk(gpu=whole.gpu, begin_ns=BEGIN, until_ns=whole.end_ns, records=records[half:], lost=3, done=True),
    ]
    made = Recording.beginning_with(chunks[0])
    assert (made.length_ns, made.whole) == (0, False)
    made.add(chunks[1])
    assert (made.length_ns, made.whole) == (5, False)
    made.add(TraceChunk.model_validate(chunks[2].model_dump(mode="json")))  # as it comes over the wire
    made.close()
    assert (made.leases, made.waits, made.busy) == (whole.leases, whole.waits, whole.busy)
    assert (made.lost, made.whole, made.end_ns) == (3, True, whole.end_ns)
    assert Recording.beginning_with(TraceChunk.model_validate_json(made.chunk().model_dump_json())) == made
    torn = Recording.beginning_with(chunks[1])
    torn.close()
    torn.close()
    assert torn.leases.count(running) == 1
