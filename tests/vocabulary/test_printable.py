"""A tenant's text is one line that no terminal, log or JSON reader takes for something else."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpu.ctl.exit_codes import say
from vgpu.ctl.observe.logs import log_cells
from vgpu.ctl.present.output import Cell, Column, laid_out, line_printer, print_facts, print_json
from vgpu.errors import ErrorCode
from vgpu.logs import Form, rendered
from vgpu.node.loglines import Line
from vgpu.printable import COMMAND_LETTERS, command_name, printable, printable_json
from vgpu.protocol.broker import Attach, Attached
from vgpu.protocol.messages import EventReading, Failure

HOSTILE = "x\x1b]0;owned\x07\x9b2J\u202e\r\n2026-01-01 gpu 0 removed by uid 0\x7f"
"""Title, C1 control sequence, right-to-left override, a faked line, delete."""
LETTERS = st.text(st.characters(codec=None))


@given(LETTERS)
def test_text_is_one_printable_line(text: str) -> None:
    assert printable(text).isprintable()
    assert len(printable(text)) == len(text)
    assert command_name(text).isprintable()
    assert len(command_name(text)) <= COMMAND_LETTERS


@given(st.dictionaries(LETTERS, LETTERS), st.sampled_from([None, 2]))
def test_json_means_the_same_and_is_printable(value: dict[str, str], indent: int | None) -> None:
    text = printable_json(json.dumps(value, ensure_ascii=False, indent=indent))
    assert text.replace("\n", "").isprintable()
    assert json.loads(text) == value


def test_spaces_cannot_push_text_onto_a_line_of_its_own() -> None:
    assert command_name("python" + " " * 300 + "12:00 gpu 0 removed") == "python 12:00 gpu 0 removed"


def test_messages_are_clean_however_they_are_made() -> None:
    assert Attach(version=1, command=HOSTILE).command.isprintable()
    assert Attached(slot=0, pid=1, start_time=2, command=HOSTILE).command.isprintable()
    event = EventReading(
        at_unix_s=0, kind=HOSTILE, gpu_index=0, vgpu_id=HOSTILE, text=HOSTILE, fields={HOSTILE: HOSTILE, "n": 1}
    )
    for made in (event, EventReading.model_validate(event.model_dump())):
        told = [made.kind, made.vgpu_id, made.text, *made.fields, *map(str, made.fields.values())]
        assert all(text.isprintable() for text in told)
    failure = Failure(id=1, code=ErrorCode.INVALID, error=HOSTILE, hint=HOSTILE)
    assert failure.error.isprintable()
    assert failure.hint.isprintable()


def test_what_is_displayed_is_clean_even_if_the_node_did_not_clean_it(capsys: pytest.CaptureFixture[str]) -> None:
    [_, [cell]] = laid_out([Column("A")], [[HOSTILE]], None)
    assert cell.text.isprintable()
    line_printer()([Cell("a"), Cell(HOSTILE)])
    print_facts({"a": HOSTILE})
    print_json({"a": HOSTILE})
    said = capsys.readouterr().out
    assert said.replace("\n", "").isprintable()
    say(HOSTILE, HOSTILE)
    said = capsys.readouterr().err
    assert said.replace("\n", "").isprintable()


def test_logs_are_clean_as_they_are_written_and_as_they_are_read() -> None:
    from datetime import UTC, datetime

    event = {"event": HOSTILE, "level": "info", "process": "server", "command": HOSTILE}
    for form in (Form.JSON, Form.JOURNAL):
        assert rendered(form, event, datetime.now(UTC)).isprintable()
    line = Line(
        at_unix_s=0.0, source="gpu 0", level="info", text=HOSTILE, fields={"text": HOSTILE, "exception": "a\nb"}
    )
    *cells, trace = log_cells(line)
    assert all(cell.text.isprintable() for cell in cells)
    assert trace.text == "\na\nb"
