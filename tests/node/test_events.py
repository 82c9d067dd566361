"""What a node keeps of what has happened: order, bounds and filters, and a file that is killed, torn, full or gone."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ctl.fake_node import vgpu_reading
from vgpu.errors import ErrorCode, VgpuError
from vgpu.node import events as module
from vgpu.node.events import EventFile, EventLog, History
from vgpu.protocol.messages import EventList, EventReading

IDS = [f"vgpu-{letter * 8}" for letter in "abc"]


def event(at: float = 1.0, kind: str = "created", vgpu: str = IDS[0], text: str = "x", **fields: Any) -> EventReading:
    return EventReading(at_unix_s=at, kind=kind, gpu_index=0, vgpu_id=vgpu, text=text, fields=fields)


EVENTS = st.lists(
    st.builds(
        event,
        at=st.floats(0, 10),
        kind=st.sampled_from(["created", "changed", "ended"]),
        vgpu=st.sampled_from(["", *IDS]),
        text=st.text(max_size=12),
        number=st.integers(-(2**40), 2**40) | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    ),
    unique_by=lambda one: (one.at_unix_s, one.vgpu_id, one.kind, one.text),
    max_size=30,
)


# --- in memory ------------------------------------------------------------------------------------------------------


@given(
    EVENTS,
    st.integers(1, 12),
    st.sampled_from(["", *IDS]),
    st.floats(0, 10),
    st.integers(1, 12),
    st.sampled_from([(), ("created",), ("died", "changed")]),
)
def test_what_is_found_is_the_end_of_what_was_told_and_fits(
    told: list[EventReading], room: int, vgpu: str, since: float, most: int, kinds: tuple[str, ...]
) -> None:
    history = History(room)
    for one in told:
        assert history.add(one)
        assert history.add(one) is None, "the same one twice"
    fitting = [
        one
        for one in told[-room:]
        if one.at_unix_s >= since and vgpu in ("", one.vgpu_id) and (not kinds or one.kind in kinds)
    ]
    assert list(history.find(vgpu, since, most, kinds)) == fitting[-most:]


def test_an_answer_never_outgrows_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER_BYTES", 5000)
    history = History()
    for number in range(100):
        history.add(event(at=number, text="t" * 900))
    found = history.find(most=2000)
    assert [one.at_unix_s for one in found] == [95, 96, 97, 98, 99]
    assert len(EventList(events=found).model_dump_json()) <= 5000 + 64


def test_what_there_was_no_room_for_any_more_is_past() -> None:
    history = History(2)
    for at in (1, 2):
        history.add(event(at))
    assert not History(3).is_past(event(0))
    assert history.is_past(event(0.5))
    assert not history.is_past(event(1.5))


def test_a_vgpu_is_meant_by_id_prefix_or_name_also_when_it_is_gone() -> None:
    history = History()
    history.add(event(1, vgpu="vgpu-11112222", name="old"))
    history.add(event(2, "changed", vgpu="vgpu-11112222", name="renamed"))
    history.add(event(3, "removed", vgpu="vgpu-11112222"))
    history.add(event(4, vgpu="vgpu-11113333", name="other"))
    there = [vgpu_reading(vgpu_id="vgpu-abcdabcd", name="mine"), vgpu_reading(vgpu_id="vgpu-11aaaaaa", name="renamed")]
    for reference, meant in {
        "vgpu-11112222": "vgpu-11112222",
        "11112": "vgpu-11112222",
        "vgpu-11113": "vgpu-11113333",
        "other": "vgpu-11113333",
        "mine": "vgpu-abcdabcd",
        "abc": "vgpu-abcdabcd",
        "renamed": "vgpu-11aaaaaa",  # whoever has the name now
        "11aa": "vgpu-11aaaaaa",
    }.items():
        assert history.meant(reference, there) == meant, reference
    assert history.meant("renamed", []) == "vgpu-11112222"
    for reference, code in {
        "1111": ErrorCode.AMBIGUOUS,
        "vgpu-9": ErrorCode.NOT_FOUND,
        "old": ErrorCode.NOT_FOUND,
        "": ErrorCode.NOT_FOUND,
    }.items():
        with pytest.raises(VgpuError) as refused:
            history.meant(reference, there)
        assert refused.value.code is code, reference


# --- on disk --------------------------------------------------------------------------------------------------------


@settings(max_examples=min(40, settings().max_examples))
@given(EVENTS, st.integers(200, 3000), st.data())
def test_whatever_was_written_before_a_kill_is_read_in_order(
    told: list[EventReading], most_bytes: int, data: st.DataObject
) -> None:
    """Killed anywhere: between two writes, in the middle of one, or around a rotation."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "events.jsonl")
        written: list[EventReading] = []
        for one in told:
            line = one.model_dump_json().encode() + b"\n"
            torn = data.draw(st.integers(0, len(line) - 2) | st.none())
            if torn is None:
                EventFile(path, most_bytes).append(line)  # another node each time
                written.append(one)
            else:
                with path.open("ab") as file:
                    file.write(line[:torn])
        read = EventFile(path, most_bytes).read()
        assert read == written[len(written) - len(read) :], "the end of what was written, in order, nothing torn"
        sizes = [file.stat().st_size for file in (path, EventFile(path).before) if file.exists()]
        assert len(read) == len(written) or sum(sizes) >= most_bytes, "only what is before two files is forgotten"
        assert EventFile(path, most_bytes).read(3) == read[-3:]


def test_the_file_stays_small_and_private(tmp_path: Path) -> None:
    file = EventFile(tmp_path / "events.jsonl", 2000)
    for number in range(300):
        file.append(event(number).model_dump_json().encode() + b"\n")
    assert {path.name for path in tmp_path.iterdir()} <= {"events.jsonl", "events.jsonl.1"}
    for path in tmp_path.iterdir():
        assert path.stat().st_size < 2200
        assert path.stat().st_mode & 0o777 == 0o600
    assert [one.at_unix_s for one in file.read()][-1] == 299


@pytest.fixture
def said() -> Iterator[list[dict[str, Any]]]:
    with structlog.testing.capture_logs() as logs:
        yield logs


def test_a_disk_that_fails_is_reported_once_and_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[dict[str, Any]]
) -> None:
    monkeypatch.setattr(module, "log", structlog.get_logger())
    kept = EventLog(EventFile(tmp_path / "events.jsonl"))
    real, full = os.write, [True]

    def write(file: int, data: bytes) -> int:
        if full[0]:
            real(file, bytes(data)[:5])
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data)

    monkeypatch.setattr(os, "write", write)
    for number in range(3):
        assert kept.tell(event(number))
        kept.flush()
    assert [line["event"] for line in said] == ["events are not written"]
    full[0] = False
    kept.tell(event(3))
    kept.flush()
    assert [line["event"] for line in said] == ["events are not written", "events are written again"]
    assert said[-1]["missed"] == 3
    assert len(kept.history.find()) == 4
    assert [one.at_unix_s for one in EventFile(tmp_path / "events.jsonl").read()] == [3]


def test_events_are_written_beside_the_loop_and_restored(tmp_path: Path) -> None:
    async def run() -> None:
        kept = EventLog(EventFile(tmp_path / "events.jsonl"))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(kept.write)
            for number in range(20):
                kept.tell(event(number))
                await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()  # what is being written then, is
        kept.tell(event(20))
        kept.flush()

    trio.run(run)
    again = EventLog(EventFile(tmp_path / "events.jsonl"))
    again.restore()
    assert [one.at_unix_s for one in again.history.find()] == list(range(21))
    assert not again.tell(event(7)), "its server tells of it once more"
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["at_unix_s"] for line in lines] == list(range(21))


def test_a_file_that_cannot_be_read_is_no_reason_not_to_start(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").mkdir()
    kept = EventLog(EventFile(tmp_path / "events.jsonl"))
    kept.restore()
    assert len(kept.history) == 0


# --- what one user can push out -------------------------------------------------------------------------------------


def garbage(number: int, vgpu: str) -> EventReading:
    return event(at=100 + number, kind="link-closed", vgpu=vgpu, text=f"closed {number}")


def test_what_programs_cause_pushes_out_nothing_that_people_did_nor_what_others_programs_cause() -> None:
    history = History(50, of_programs=20)
    for number, vgpu in enumerate(IDS):
        history.add(event(at=number, vgpu=vgpu, text="created", by_uid=number))
        history.add(event(at=number, kind="attached", vgpu=vgpu, text="attached"))
    for number in range(1000):
        history.add(garbage(number, IDS[0]))
    found = history.find()
    assert sorted(one.vgpu_id for one in found if one.kind == "created") == IDS
    assert sorted(one.vgpu_id for one in found if one.kind == "attached") == IDS[1:]
    assert len(found) == 3 + 20
    assert history.is_past(garbage(5, IDS[0]))
    assert not history.is_past(garbage(999, IDS[0]))


def test_one_users_vgpus_share_what_the_user_may_fill() -> None:
    history = History(50, of_programs=20, most_of_one=10)
    history.add(event(at=0, vgpu=IDS[2], text="created", by_uid=2))
    for number in range(300):
        for vgpu in IDS[:2]:
            history.add(event(at=number, vgpu=vgpu, text=f"{number}", by_uid=1))
    found = history.find()
    assert [one.vgpu_id for one in found if one.vgpu_id == IDS[2]] == [IDS[2]]
    assert len(found) == 11


@given(st.lists(st.tuples(st.sampled_from(IDS), st.sampled_from(["created", "changed", "ended"])), max_size=80))
def test_no_bound_is_passed_and_order_stays(steps: list[tuple[str, str]]) -> None:
    history = History(12, of_programs=6, most_of_one=5)
    for number, (vgpu, kind) in enumerate(steps):
        history.add(event(at=number, kind=kind, vgpu=vgpu, text="x", by_uid=IDS.index(vgpu) % 2))
    found = history.find()
    assert [one.at_unix_s for one in found] == sorted(one.at_unix_s for one in found)
    assert sum(one.kind == "ended" for one in found) == min(6, sum(kind == "ended" for _, kind in steps))
    assert sum(one.kind != "ended" for one in found) <= 12
    assert len(history) == len(found) == len(history._keys)


def test_each_kind_of_event_has_its_file(tmp_path: Path) -> None:
    files = EventFile(tmp_path / "events.jsonl"), EventFile(tmp_path / "events-programs.jsonl")
    kept = EventLog(files[0], History(9, 9), files[1])
    told = [event(at=1), garbage(0, IDS[0]), event(at=300, kind="removed")]
    for one in told:
        kept.tell(one)
    kept.flush()
    assert [one.kind for one in files[0].read()] == ["created", "removed"]
    assert [one.kind for one in files[1].read()] == ["link-closed"]
    again = EventLog(files[0], History(9, 9), files[1])
    again.restore()
    assert list(again.history.find()) == told
