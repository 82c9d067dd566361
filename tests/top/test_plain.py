"""Piped, it is text: one reading, or as many as asked for."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from rich.text import Text

from tests.ctl.fake_node import gpu_reading
from tests.top.played_node import PlayedNode
from vgpu.ctl.commandlines import program_line
from vgpu.ctl.exit_codes import Exit
from vgpu.ctl.main import run
from vgpu.printable import command_name
from vgpu.protocol.messages import Snapshot, Watch


def test_piped_it_is_two_tables_of_one_reading(played: PlayedNode, capsys: pytest.CaptureFixture[str]) -> None:
    played.gpus = (gpu_reading(utilization_ratio=0.98, power_w=612.3, temperature_c=64.0), gpu_reading(index=1))
    assert run(["top"]) == Exit.OK
    told = capsys.readouterr().out
    first, _, gpu_titles, *gpus = told.splitlines()[:5]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  \S+: 2 GPUs, 3 vGPUs, 4 programs", first)
    assert gpu_titles.split()[:4] == ["GPU", "NAME", "MODE", "STATE"]
    assert gpus[0].split()[-6:] == ["98", "%", "612", "W", "64", "°C"]
    assert gpus[1].endswith("2")  # what is not told is empty
    rows = {line.split()[0]: line for line in told.splitlines() if line.startswith("vgpu-")}
    assert list(rows) == ["vgpu-00000001", "vgpu-00000002", "vgpu-00000003"]
    assert "infer" in rows["vgpu-00000002"]
    assert " 50.0 " in rows["vgpu-00000002"]
    assert "\x1b" not in told


def test_a_rate_is_open_only_where_the_node_says_so(played: PlayedNode, capsys: pytest.CaptureFixture[str]) -> None:
    """A lease that outlasts its second has an end as a rule, and is none that nobody else wants."""
    played.gpus = (gpu_reading(tokens_per_second=0.0, open_ended=True), gpu_reading(index=1, tokens_per_second=0.0))
    long, alone, _ = (vgpu.model_copy(update={"tokens_per_second": 0.0, "holds": True}) for vgpu in played.vgpus)
    played.vgpus = long, alone.model_copy(update={"open_ended": True})
    assert run(["top"]) == Exit.OK
    told = capsys.readouterr().out.splitlines()
    gpus = [line for line in told if "NVIDIA" in line]
    vgpus = [line for line in told if line.startswith("vgpu-")]
    assert [" open " in line for line in gpus] == [True, False]
    assert [" open " in line for line in vgpus] == [False, True]
    assert " 0.0 " in vgpus[0]


def test_it_fits_a_terminal(
    played: PlayedNode, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    played.gpus = (gpu_reading(simulated=True, held_ratio=0.987, busy_ratio=0.987, used_memory_bytes=100 << 30),)
    sizes = {"memory_used_bytes": 480 << 20, "memory_limit_bytes": 57_549 << 20, "busy_ratio": 0.987}
    played.vgpus = tuple(
        vgpu.model_copy(update=sizes | {"name": "trainer-of-all", "state": "suspended", "simulated": True})
        for vgpu in played.vgpus
    )
    monkeypatch.setattr("vgpu.ctl.present.output.sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["top", "--once"]) == Exit.OK
    told = [Text.from_ansi(line).plain.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert max(map(len, told)) <= 80
    assert "0.469 / 56.2 GiB" in told[-1]
    assert {"HELD", "TOKENS/S", "MEMORY"} <= set(told[2].split()) & set(told[-4].split())


def test_a_reading_for_programs(played: PlayedNode, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["top", "-o", "json"]) == Exit.OK
    told = Snapshot.model_validate_json(capsys.readouterr().out)
    assert told.vgpus == played.vgpus


def test_several_readings_are_as_far_apart_as_asked_for(played: PlayedNode, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        played.tell_vgpus(*played.vgpus)
    assert run(["top", "-n", "3", "-d", "0.25", "-o", "json"]) == Exit.OK
    lines = capsys.readouterr().out.splitlines()
    assert [len(json.loads(line)["vgpus"]) for line in lines] == [3, 3, 3]
    (asked,) = (request for request in played.asked if isinstance(request, Watch))
    assert (asked.interval_ns, asked.snapshots) == (250_000_000, True)


def test_several_readings_as_text(played: PlayedNode, capsys: pytest.CaptureFixture[str]) -> None:
    played.tell_vgpus(played.vgpus[0])
    assert run(["top", "-n", "2"]) == Exit.OK
    told = capsys.readouterr().out
    assert told.count("TOKENS/S") == 4
    assert "1 vGPU," in told


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["-d", "0"], "--delay: 0 is not between 0.1 and 3600"),
        (["-d", "nan"], "--delay: nan is not between"),
        (["-n", "0"], "--count"),
        (["--once", "-n", "3"], "--once is one reading, and --count says 3"),
    ],
)
def test_what_makes_no_sense(arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["top", *arguments]) == Exit.USAGE
    assert why in capsys.readouterr().err


def test_without_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("VGPU_RUNTIME_DIR", str(tmp_path))
    assert run(["top", "--once"]) == Exit.NODE_DOWN
    assert "no node answers" in capsys.readouterr().err


def test_a_program_line_has_no_folders_and_all_arguments(tmp_path: Path) -> None:
    folder = tmp_path / "7"
    folder.mkdir()
    (folder / "cmdline").write_bytes(b"/opt/env/bin/python\0train.py\0--data\0/data/images\0")
    command = command_name("/opt/env/bin/python")
    assert program_line(7, command, tmp_path) == "python train.py --data /data/images"
    assert program_line(8, command, tmp_path) == "python"
    assert program_line(7, "another", tmp_path) == "another"
