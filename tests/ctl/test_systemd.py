"""The units: systemd has nothing against them, and they start this installation."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vgpu.ctl.main import run
from vgpu.ctl.systemd import Unit, program, quoted, text
from vgpu.errors import VgpuError

NAMES = {f"{unit}.service": (unit, False) for unit in Unit} | {"vgpu-user.service": (Unit.NODE, True)}
SHIPPED = Path(__file__).parents[2] / "deploy" / "systemd"


def test_every_unit_that_is_shipped_can_be_shown() -> None:
    assert {file.name for file in SHIPPED.iterdir()} == set(NAMES)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_has_nothing_against_them(tmp_path: Path) -> None:
    for name, (unit, user) in NAMES.items():
        (tmp_path / name).write_text(text(unit, user=user))
    command = ["systemd-analyze", "verify", "--man=no", *(str(tmp_path / name) for name in NAMES)]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    # Other units of this machine that ours come after may be complained about; those are not ours.
    ours = [line for line in checked.stderr.splitlines() if "vgpu" in line]
    assert (checked.returncode, ours) == (0, [])


def test_they_start_this_installation() -> None:
    assert f"ExecStart={' '.join(program())} serve\n" in text(Unit.NODE, user=False)
    assert Path(program()[0]).parent == Path(sys.executable).parent
    assert "/usr/bin/vgpuctl" not in "".join(text(unit, user=user) for unit, user in NAMES.values())


def test_programs_outlive_a_restart_of_the_node() -> None:
    for user in (False, True):
        unit = text(Unit.NODE, user=user)
        assert "\nKillMode=process\n" in unit
        assert "\nRuntimeDirectoryPreserve=yes\n" in unit


@pytest.mark.parametrize(
    ("argument", "word"),
    [("/a/b", "/a/b"), ("/a b", '"/a b"'), ("/100%", "/100%%"), ("/$HOME", "/$$HOME"), ('/"\\', '"/\\"\\\\"')],
)
def test_words_are_what_systemd_reads(argument: str, word: str) -> None:
    assert quoted(argument) == word


def test_install_puts_the_users_unit_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert run(["systemd", "install", "--user"]) == 0
    installed = tmp_path / "systemd" / "user" / "vgpu.service"
    assert installed.read_text() == text(Unit.NODE, user=True)
    assert "systemctl --user enable --now vgpu" in capsys.readouterr().out
    assert run(["systemd", "show", "--user"]) == 0
    assert capsys.readouterr().out == installed.read_text()


def test_there_is_one_unit_for_users() -> None:
    with pytest.raises(VgpuError, match="vgpu-metrics is a unit of the machine"):
        text(Unit.METRICS, user=True)
