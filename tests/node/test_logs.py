"""Logs: their form in each place, how they stay small under their writers, and how they are read and put in order."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpu.errors import VgpuError
from vgpu.logs import CANNOT_SERVE, Form, chosen_form, chosen_level, is_journal, rendered
from vgpu.node.logfiles import trim, why_not_served
from vgpu.node.loglines import Line, Tail, Wanted, merged, parsed, parsed_all

ROOT = Path(__file__).parents[2]
NOW = datetime(2026, 5, 1, 10, 20, 30, 400, tzinfo=UTC)
FIELDS = st.dictionaries(
    st.sampled_from(["pid", "reason", "text", "seconds"]),
    st.integers() | st.text() | st.none() | st.floats(allow_nan=False),
    max_size=4,
)


# --- their form -----------------------------------------------------------------------------------------------------


@given(
    st.text(), st.sampled_from(["debug", "info", "warning", "error"]), FIELDS, st.sampled_from(["", "vgpu-0a1b2c3d"])
)
def test_what_is_written_as_json_is_read_again(event: str, level: str, fields: dict[str, Any], vgpu: str) -> None:
    said = {"event": event, "level": level, "process": "server", "gpu": 0, **({"vgpu": vgpu} if vgpu else {}), **fields}
    line = rendered(Form.JSON, said, NOW)
    assert "\n" not in line
    assert list(json.loads(line))[:3] == ["time", "level", "process"]
    assert parsed(line, "gpu 0") == Line(NOW.timestamp(), level, "gpu 0", event, vgpu, fields)


@given(st.text(), FIELDS)
def test_the_journal_gets_one_line_with_its_priority_and_no_time(event: str, fields: dict[str, Any]) -> None:
    line = rendered(Form.JOURNAL, {"event": event, "level": "warning", "process": "node", **fields}, NOW)
    assert line.startswith("<4>")
    assert "\n" not in line
    assert "2026" not in line or "2026" in event + repr(fields)
    assert "process=node" in line


def test_words_of_the_journals_lines() -> None:
    said = {"event": "it ended", "level": "error", "process": "node", "reason": 'no "room"', "gpu": 1, "none": ""}
    assert rendered(Form.JOURNAL, said, NOW) == '<3>it ended process=node reason="no \\"room\\"" gpu=1 none=""'


def test_which_form_is_chosen() -> None:
    assert chosen_form({"VGPU_LOG": "journal"}) is Form.JOURNAL
    assert chosen_form({}) is (Form.TEXT if os.isatty(2) else Form.JSON)
    with pytest.raises(VgpuError, match="VGPU_LOG=xml"):
        chosen_form({"VGPU_LOG": "xml"})
    assert chosen_level({"VGPU_LOG_LEVEL": "WARNING"}) == "warning"
    assert chosen_level({}) == "info"
    with pytest.raises(VgpuError, match="no level"):
        chosen_level({"VGPU_LOG_LEVEL": "loud"})


def test_the_journal_is_known_by_its_stream(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file:
        there = os.fstat(file.fileno())
        assert is_journal(f"{there.st_dev}:{there.st_ino}", file.fileno())
        assert not is_journal(f"{there.st_dev}:{there.st_ino + 1}", file.fileno())
    for stream in ("", "1", "a:b", "8:"):
        assert not is_journal(stream, 2)


PROGRAM = """
import sys
from vgpu.logs import tell, to_stderr
tell("warning", "without structlog", "broker", vgpu="vgpu-1")
assert "structlog" not in sys.modules, "a broker has no memory for it"
import structlog
to_stderr("server", gpu=3)
log = structlog.get_logger("x")
log.info("hidden")
log.warning("told", gpu="other", reason="a b")
try:
    1 / 0
except ZeroDivisionError:
    log.exception("failed")
"""


@pytest.mark.parametrize("journal", [True, False])
def test_a_process_says_who_it_is_in_every_line(journal: bool) -> None:
    reading, writing = os.pipe()
    there = os.fstat(writing)
    environment = os.environ | {"VGPU_LOG_LEVEL": "warning", "PYTHONPATH": str(ROOT)}
    environment.pop("VGPU_LOG", None)
    if journal:
        environment["JOURNAL_STREAM"] = f"{there.st_dev}:{there.st_ino}"
    with os.fdopen(reading) as said:
        subprocess.run([sys.executable, "-c", PROGRAM], env=environment, stderr=writing, check=True)
        os.close(writing)
        lines = said.read().splitlines()
    if journal:
        assert lines[:2] == [
            "<4>without structlog process=broker vgpu=vgpu-1",
            '<4>told gpu=3 reason="a b" process=server',
        ]
        assert lines[2].startswith("<3>failed")
        assert len(lines) == 3
    else:
        broker, told, failed = map(json.loads, lines)
        assert (broker["process"], broker["vgpu"]) == ("broker", "vgpu-1")
        assert (told["process"], told["gpu"], told["level"], told["event"]) == ("server", 3, "warning", "told")
        assert "ZeroDivisionError" in failed["exception"]


# --- their size -----------------------------------------------------------------------------------------------------


def test_a_full_log_is_begun_anew_under_its_writers(tmp_path: Path) -> None:
    path = tmp_path / "gpu-0.log"
    writers = [os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND) for _ in range(2)]
    sizes, number = [], 0
    for _ in range(100):
        for writer in writers:
            os.write(writer, f"line {number}\n".encode())
            number += 1
        trim(path, 300)
        sizes.append(path.stat().st_size)
    assert max(sizes) < 320
    lines = [*(tmp_path / "gpu-0.log.1").read_text().splitlines(), *path.read_text().splitlines()]
    assert lines == [f"line {n}" for n in range(number - len(lines), number)], "the end of it, whole and in order"
    assert {file.name for file in tmp_path.iterdir()} == {"gpu-0.log", "gpu-0.log.1"}
    for writer in writers:
        os.close(writer)


def test_a_log_that_is_small_or_not_there_is_left_alone(tmp_path: Path) -> None:
    assert not trim(tmp_path / "none.log")
    (tmp_path / "node.log").write_text("x")
    assert not trim(tmp_path / "node.log")


def test_a_log_that_cannot_be_kept_does_not_grow_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "node.log"
    path.write_text("x" * 500)
    (tmp_path / "node.log.1").mkdir()
    (tmp_path / "node.log.1" / "in the way").touch()
    with pytest.raises(OSError, match="node"):
        trim(path, 300)
    assert path.stat().st_size == 0


# --- reading them ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["Traceback:", "{", "[1]", '{"time": 3}', '{"time": "x", "level": "a", "event": 1}', "\0"]
)
def test_what_is_no_event_of_ours_follows_the_one_before(text: str) -> None:
    assert parsed(text, "node", 7.0) == Line(7.0, "", "node", text)


LOGS = st.lists(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["info", "error", ""])), max_size=8), max_size=3)


@given(LOGS)
def test_several_logs_are_one_by_time_and_each_keeps_its_order(logs: list[list[tuple[int, str]]]) -> None:
    each = [[Line(at, level, str(n), str(i)) for i, (at, level) in enumerate(log)] for n, log in enumerate(logs)]
    whole = merged(each)
    for number, log in enumerate(each):
        assert [line for line in whole if line.source == str(number)] == log
    if all(log == sorted(log) for log in logs):
        assert [line.at_unix_s for line in whole] == sorted(line.at_unix_s for log in each for line in log)


@given(st.lists(st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=8), max_size=6), st.data())
def test_a_log_that_comes_in_pieces_is_read_as_in_one(texts: list[str], data: st.DataObject) -> None:
    whole = "".join(f"{text}\n" for text in texts).encode()
    tail, lines, at = Tail("node"), [], 0
    while at < len(whole):
        end = data.draw(st.integers(at + 1, len(whole)))
        lines += tail.take(whole[at:end])
        at = end
    assert lines == list(parsed_all(texts, "node"))
    assert tail.end() == []


def test_what_is_wanted() -> None:
    trouble, chatter, trace = (
        Line(5, "error", "gpu 0", "e", "vgpu-0a"),
        Line(5, "info", "node", "i"),
        Line(5, "", "x", ""),
    )
    lines = [trouble, chatter, trace]
    assert list(filter(Wanted(level="warning"), lines)) == [trouble, trace]
    assert list(filter(Wanted(vgpu="vgpu-0"), lines)) == [trouble]
    assert list(filter(Wanted(since_unix_s=6), lines)) == []


def test_why_a_server_could_not_serve_is_its_last_word(tmp_path: Path) -> None:
    path = tmp_path / "gpu-0.log"
    assert why_not_served(path) == ""
    said = rendered(Form.JSON, {"event": CANNOT_SERVE, "level": "error", "reason": "x; mv y z"}, NOW) + "\n"
    for before in ("", "a library's word\n" * 2000, "é" * 9000 + "\n"):
        path.write_text(before + said)
        assert why_not_served(path) == "x; mv y z"
    path.write_text(said + rendered(Form.JSON, {"event": "stopped", "level": "info"}, NOW) + "\n")
    assert why_not_served(path) == ""
