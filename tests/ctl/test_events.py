"""vgpuctl events: what is asked, how it looks, and how the past goes over into the present: no gap, nothing twice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.text import Text

from tests.ctl.fake_node import FakeNode, gpu_reading, vgpu_reading
from vgpu.ctl.exit_codes import Exit
from vgpu.ctl.main import run
from vgpu.ctl.observe.events import unseen
from vgpu.ctl.time_options import parse_since
from vgpu.errors import VgpuError
from vgpu.node.events import EventFile
from vgpu.protocol.messages import EventReading, Events, Notice, Snapshot

ID = "vgpu-0a1b2c3d"


def event(number: int, kind: str = "created", vgpu: str = ID) -> EventReading:
    return EventReading(
        at_unix_s=1_700_000_000.0 + number, kind=kind, gpu_index=0, vgpu_id=vgpu, text=f"it is {number}"
    )


def dumped(events: list[EventReading]) -> dict[str, Any]:
    return {"events": [one.model_dump(mode="json") for one in events]}


def notices(events: list[EventReading]) -> Iterator[dict[str, Any]]:
    snapshot = Snapshot(at_unix_s=1.0, gpus=(gpu_reading(),), vgpus=(vgpu_reading(name="mine"),))
    yield {"snapshot": snapshot.model_dump(mode="json")}
    for one in events:
        yield {"event": one.model_dump(mode="json")}


# --- the past -------------------------------------------------------------------------------------------------------


def test_the_options_are_what_is_asked(node: FakeNode, capsys: pytest.CaptureFixture[str]) -> None:
    node.answers["events"] = lambda _: dumped([event(1), event(2, "broker-restarted")])
    node.answers["list"] = lambda _: {"vgpus": []}
    kinds = ["--kind", "mode", "--kind", "drift"]
    assert run(["events", "mine", "-n", "7", "--since", "2023-11-14T00:00:00+00:00", *kinds]) == 0
    asked, _ = node.asked
    assert asked == Events(id=asked.id, vgpu="mine", most=7, since_unix_s=1699920000.0, kinds=("mode", "drift"))
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.split() == ["TIME", "GPU", "VGPU", "KIND", "WHAT"]
    assert first.split()[2:] == ["0", ID, "created", "it", "is", "1"]
    assert second.index("it is") == first.index("it is") == head.index("WHAT")


def test_what_says_who_it_is_and_how_it_is_now(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = {"by_uid": 0, "sm_percent": 40.0, "memory_bytes": 8 << 30, "ttl_ns": 90 * 10**9, "burst": True}
    told = [
        event(1).model_copy(update={"text": f"{ID} created by uid 0", "fields": {"by_uid": 0, "sm_percent": 30.0}}),
        event(2, "changed").model_copy(update={"text": f"{ID} changed by uid 0", "fields": spec}),
        event(3, "suspended").model_copy(update={"text": f"{ID} gave it back", "fields": {"memory_bytes": 1}}),
        event(4, "removed", "vgpu-ffffffff").model_copy(update={"text": "vgpu-ffffffff removed by uid 0"}),
    ]
    node.answers["events"] = lambda _: dumped(told)
    node.answers["list"] = lambda _: {"vgpus": [vgpu_reading(name="trainer").model_dump(mode="json")]}
    assert run(["events"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert [line[head.index("WHAT") :] for line in lines] == [
        "trainer: by root, --sm 30",
        "trainer: by root, --sm 40 --mem 8GiB --ttl 1m30s --burst",
        "trainer: gave it back",
        "by root",
    ]
    monkeypatch.setattr("vgpu.ctl.present.output.sys.stdout.isatty", lambda: True)
    assert run(["events"]) == 0
    assert len(Text.from_ansi(capsys.readouterr().out).plain.splitlines()[1].rstrip()) == 79


def test_a_kind_that_there_is_not_is_refused(node: FakeNode, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["events", "--kind", "died"]) == Exit.USAGE
    assert "'died' is not one of 'created', 'changed'" in capsys.readouterr().err
    assert not node.asked


def test_as_json_it_is_an_array(node: FakeNode, capsys: pytest.CaptureFixture[str]) -> None:
    node.answers["events"] = lambda _: dumped([event(1)])
    assert run(["events", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == [event(1).model_dump(mode="json")]


def test_without_a_node_what_it_has_written_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VGPU_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("VGPU_STATE_DIR", str(tmp_path))
    assert run(["events"]) == Exit.NODE_DOWN
    written = [event(number, vgpu=f"vgpu-{number:08}") for number in range(5)]
    EventFile(tmp_path / "events.jsonl").append(b"".join(one.model_dump_json().encode() + b"\n" for one in written))
    capsys.readouterr()
    assert run(["events", "-n", "2"]) == 0
    said = capsys.readouterr()
    assert [line.split()[-1] for line in said.out.splitlines()[1:]] == ["3", "4"]
    assert "no node answers" in said.err
    assert run(["events", "00000001", "-o", "json"]) == 0
    assert [one["vgpu_id"] for one in json.loads(capsys.readouterr().out)] == ["vgpu-00000001"]
    assert run(["events", "--follow"]) == Exit.NODE_DOWN


# --- what happens ---------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 3), max_size=12), st.data())
def test_the_past_goes_over_into_the_present(numbers: list[int], data: st.DataObject) -> None:
    """Whenever the node began to watch for us, and whenever after that it told of the past."""
    told = [event(index * 10 + number) for index, number in enumerate(numbers)]
    watching = data.draw(st.integers(0, len(told)))
    asked = data.draw(st.integers(watching, len(told)))
    past = told[max(0, data.draw(st.integers(0, watching))) : asked]
    assert past + list(unseen(past, iter(Notice(id=1, event=one) for one in told[watching:]))) == (past + told[asked:])


def test_what_happened_while_it_asked_is_shown_once(node: FakeNode, capsys: pytest.CaptureFixture[str]) -> None:
    node.answers["watch"] = lambda _: notices([event(3), event(4), event(5, "ended"), event(6, vgpu="vgpu-ffffffff")])
    node.answers["events"] = lambda _: dumped([event(1), event(2), event(3), event(4)])
    assert run(["events", "-f", "-n", "3", "-o", "json"]) == Exit.NODE_DOWN  # the fake one leaves in the end
    shown = [json.loads(line)["at_unix_s"] - 1_700_000_000 for line in capsys.readouterr().out.splitlines()]
    assert shown == [2, 3, 4, 5, 6]
    assert run(["events", "mine", "-f", "--kind", "ended", "--kind", "created", "-n", "0"]) == Exit.NODE_DOWN
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines[1:]] == ["5"]


# --- when -----------------------------------------------------------------------------------------------------------

NOW = datetime(2026, 5, 2, 14, 0, tzinfo=timezone(timedelta(hours=2)))


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("10m", NOW - timedelta(minutes=10)),
        ("1h30m", NOW - timedelta(minutes=90)),
        ("13:30", NOW.replace(hour=13, minute=30)),
        ("13:30:05", NOW.replace(hour=13, minute=30, second=5)),
        ("15:00", NOW.replace(day=1, hour=15)),  # it was that yesterday
        ("2026-05-01T10:00:00+00:00", datetime(2026, 5, 1, 10, tzinfo=UTC)),
        ("2026-05-01", datetime(2026, 5, 1).astimezone()),
        ("2026-05-01 10:20", datetime(2026, 5, 1, 10, 20).astimezone()),
    ],
)
def test_when(said: str, meant: datetime) -> None:
    assert parse_since(said, NOW) == meant.timestamp()


@pytest.mark.parametrize("said", ["yesterday", "10", "", "25:00", "2026-13-01", "1:2:3:4"])
def test_no_time(said: str) -> None:
    with pytest.raises(VgpuError, match="is no time"):
        parse_since(said, NOW)


def test_since_ever() -> None:
    assert parse_since(None) == parse_since("99999999999d", NOW) == 0.0
