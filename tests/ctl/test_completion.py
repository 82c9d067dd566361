"""Completion in real shells: commands, options, and what the running node has; silence where there is none."""

from __future__ import annotations

import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.ctl.fake_node import FakeNode, gpu_reading, vgpu_reading
from vgpu.ctl import completion

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0
VGPUS = [vgpu_reading(name="trainer"), vgpu_reading(vgpu_id="vgpu-0b000000"), vgpu_reading(vgpu_id="vgpu-99999999")]


PATIENT = f"""\
import runpy
from vgpu.ctl import completion
completion.PATIENCE_S = {PATIENCE_S}
runpy.run_module("vgpu.ctl", run_name="__main__", alter_sys=True)
"""
"""``python -m vgpu.ctl`` that waits for a node on a busy machine. A person's shell rather offers nothing."""


@pytest.fixture
def serving(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> FakeNode:
    monkeypatch.setattr(completion, "PATIENCE_S", PATIENCE_S)
    listed = {"vgpus": [vgpu.model_dump(mode="json") for vgpu in VGPUS]}
    node.answers["list"] = lambda _: listed
    node.answers["gpus"] = lambda _: {"gpus": [gpu_reading(index=i).model_dump(mode="json") for i in (0, 1, 10)]}
    return node


@pytest.fixture
def shell_environment(tmp_path: Path) -> dict[str, str]:
    """``vgpuctl`` on the path is the one of this tree; the shells read nobody's settings."""
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "vgpuctl"
    (tmp_path / "patient.py").write_text(PATIENT)
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -P "{tmp_path}/patient.py" "$@"\n')
    script.chmod(0o755)
    path = f"{script.parent}:{os.environ['PATH']}"
    return os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "TERM": "dumb"}


def test_names_come_before_ids_and_say_what_they_are(serving: FakeNode) -> None:
    assert completion.vgpus("")[0] == ("trainer", "vgpu-0a1b2c3d, 30 % of GPU 0, running")
    assert [value for value, _ in completion.vgpus("vgpu-0")] == ["vgpu-0a1b2c3d", "vgpu-0b000000"]


def test_gpus_by_index_and_once_begun_by_uuid(serving: FakeNode) -> None:
    assert [value for value, _ in completion.gpus("1")] == ["1", "10"]
    assert {value for value, _ in completion.gpus("gpu-5")} == {"GPU-5d1e7a55-0000-0000-0000-000000000000"}
    assert [value for value, _ in completion.gpus_or_auto("")] == ["auto", "0", "1", "10"]


def test_nothing_where_no_node_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VGPU_RUNTIME_DIR", str(tmp_path))
    assert completion.vgpus("") == []


def test_nothing_where_the_node_says_something_else_or_hangs_up(node: FakeNode) -> None:
    node.answers["list"] = lambda _: {"else": 1}
    assert completion.vgpus("") == []
    node.answers["gpus"] = lambda _: iter([{"event": None}])
    assert completion.gpus("") == []


def test_completing_imports_nothing_that_is_slow() -> None:
    """A process of its own: this one has imported everything."""
    code = (
        "import sys; from vgpu.ctl import main, completion; completion.ask('list', 'vgpus');"
        "print(*{'pydantic', 'trio', 'rich', 'textual', 'fastapi'} & set(sys.modules))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "VGPU_RUNTIME_DIR": "/nonexistent"}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert (ran.stdout.strip(), ran.stderr) == ("", "")


def bash(words: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    script = (
        'eval "$(_VGPUCTL_COMPLETE=source_bash vgpuctl)"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1));'
        '_vgpuctl_completion vgpuctl; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    command = ["bash", "--norc", "-c", script, "bash", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True)


@pytest.mark.slow
def test_bash(serving: FakeNode, shell_environment: dict[str, str]) -> None:
    ids = bash(["vgpuctl", "inspect", "vgpu-0"], shell_environment).stdout.split()
    assert ids == ["vgpu-0a1b2c3d", "vgpu-0b000000"]
    assert bash(["vgpuctl", "create", "--gpu", "1"], shell_environment).stdout.split() == ["1", "10"]
    assert "--quota-limit" in bash(["vgpuctl", "create", "--quota"], shell_environment).stdout.split()


def test_bash_is_silent_without_a_node(shell_environment: dict[str, str], tmp_path: Path) -> None:
    alone = shell_environment | {"VGPU_RUNTIME_DIR": str(tmp_path / "none")}
    done = bash(["vgpuctl", "inspect", ""], alone)
    assert (done.stdout.strip(), done.stderr) == ("", "")


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish(serving: FakeNode, shell_environment: dict[str, str]) -> None:
    asked = 'complete -C "vgpuctl rm tr"; complete -C "vgpuctl gpu set 1"'
    script = f"_VGPUCTL_COMPLETE=source_fish vgpuctl | source; {asked}"
    command = ["fish", "--no-config", "-c", script]
    done = subprocess.run(command, env=shell_environment, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert [line.split("\t")[0] for line in done.stdout.splitlines()] == ["trainer", "1", "10"]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh(serving: FakeNode, shell_environment: dict[str, str]) -> None:
    """On a terminal, as a person presses Tab: its completion works nowhere else."""
    pid, terminal = pty.fork()
    if pid == 0:  # pragma: no cover - becomes zsh
        os.execvpe("zsh", ["zsh", "-f", "-i"], shell_environment)
    try:
        told = b""

        def until(text: bytes) -> None:
            nonlocal told
            deadline = time.monotonic() + PATIENCE_S
            while text not in told:
                assert select.select([terminal], [], [], max(0, deadline - time.monotonic()))[0], told
                told += os.read(terminal, 1 << 16)
            told = told.partition(text)[2]

        os.write(terminal, b"PS1='$ '; autoload -Uz compinit && compinit -u -D\n")
        os.write(terminal, b'eval "$(_VGPUCTL_COMPLETE=source_zsh vgpuctl)"; echo load""ed\n')
        until(b"\nloaded")
        os.write(terminal, b"vgpuctl inspect tr\t")
        until(b"inspect trainer")
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(terminal)
