"""Old public words: each works for one release and says what it is called now, and none stands anywhere else."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Annotated

import pytest
import typer
from pydantic import TypeAdapter

from vgpu import retired
from vgpu.config import Config, Problem, parse
from vgpu.config import retired as retired_in
from vgpu.ctl.main import run
from vgpu.ctl.observe.events import event_type
from vgpu.event_types import EventType
from vgpu.protocol.messages import EventReading, VgpuStatus

ROOT = Path(__file__).parents[2]
CLASSES = """
    Happening VgpuReading GpuReading Departure Survey Silence Metering Board Desk Turn Face Hold Went Statement
    Book Served Membership Competition Deadlines Muster Mustered Outlook Passage VgpuKey Outsider Trifles
    Foreseen Sleeper Dozing Bench MpsLook MpsDaemon
"""
"""Retired names of classes (the glossary): where one stands in code, another word is meant."""

MODULES = """
    choices shipped exits since overview surroundings precedence dozing bench belief excess ahead foresight doors
    conversation endings books touch thread desks deskpages board boardevents membership competition deadlines
    happenings nativelogic nativememory nativewire rehearsal stage
"""
"""Retired names of files and folders of the product."""


def test_a_retired_option_does_what_the_new_one_does_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["gpu", "set", "0", "--quantum", "2h"]) != 0
    said = capsys.readouterr().err
    assert "--quantum is called --period now" in said
    assert "--period: 2h is not between 5ms and 1s" in said
    assert run(["gpu", "set", "0", "--quantum", "40ms", "--period", "40ms"]) != 0
    assert "are the same option" in capsys.readouterr().err


def test_a_retired_key_of_the_file_does_what_the_new_one_does_and_says_so() -> None:
    text = '[serve]\n\nquantum = "40ms"\n[gpu.1]\nquantum = "20ms"\n'
    config = parse(text)
    assert isinstance(config, Config)
    assert (config.serve.period_ns, config.gpu[1].period_ns) == (40_000_000, 20_000_000)
    said = "quantum is called period now; quantum goes with release 0.2"
    assert retired_in(text) == [Problem(3, said), Problem(5, said)]
    wrong = parse('[serve]\n\nquantum = "2h"\n')
    assert wrong == [Problem(3, "serve.period: 2h is not between 5ms and 1s")]
    both = parse('[serve]\nperiod = "40ms"\nquantum = "40ms"\n')
    assert isinstance(both, list)
    assert "has no 'quantum'" in both[0].message


def test_a_retired_kind_of_event_finds_what_the_new_one_does_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert event_type("stranded") is EventType.KILLED_ON_RESUME
    assert "stranded is called killed-on-resume now" in capsys.readouterr().err
    with pytest.raises(typer.BadParameter, match="'doze' is not one of 'created', 'changed'"):
        event_type("doze")
    old = {"at_unix_s": 1.0, "kind": "stranded", "gpu_index": 0, "text": "killed"}
    assert EventReading.model_validate(old).kind == "killed-on-resume"


def test_an_older_servers_state_has_its_new_name() -> None:
    state = VgpuStatus.model_fields["state"]
    field = TypeAdapter(Annotated[state.annotation, *state.metadata])
    assert field.validate_python("dozing") == field.validate_python("idle-suspended") == "idle-suspended"


def code() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "vgpu", "gpuserver", "cython_ext", "client_hook"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("this is no git checkout")
    names = (name for name in listed.stdout.split() if name.endswith((".py", ".pyx", ".pxd", ".pyi")))
    return [ROOT / name for name in names if (ROOT / name).exists()]


def test_no_retired_word_is_left() -> None:
    options = "|".join(map(re.escape, retired.OPTIONS))
    values = "|".join(retired.STATES.keys() | retired.EVENTS.keys())
    definitions = re.compile(
        rf"\"({values})\"|(?:class|cdef struct) ({'|'.join(CLASSES.split())})\b|[\"'` ]({options})\b"
    )
    allowed = {
        ROOT / "vgpu/retired.py",
        Path(__file__).resolve(),
        ROOT / "gpuserver/__main__.py",
        ROOT / "vgpu/node/__main__.py",
    }
    allowed.add(ROOT / "gpuserver/runtime/journal.py")  # a column of the database keeps its name
    allowed |= {ROOT / "vgpu/ctl" / name for name in ("options.py", "gpus.py", "node.py")}  # the alias itself
    assert [
        (path, found[0]) for path in code() if path not in allowed for found in definitions.finditer(path.read_text())
    ] == []


def test_no_file_or_folder_has_a_retired_name() -> None:
    retired_names = set(MODULES.split())
    assert [path for path in code() if retired_names & {path.stem, *path.relative_to(ROOT).parts}] == []
