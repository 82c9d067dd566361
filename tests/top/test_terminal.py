"""The real thing: ``vgpuctl top`` in a terminal (tmux), over a node with programs at work."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.integration.node import SimulatedNode, eventually
from vgpu.ctl.programs import attachment
from vgpu.protocol.messages import VgpuStatus

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("tmux") is None, reason="no tmux to show it in"),
]
WORK = [sys.executable, "-P", "-m", "vgpu.workload", "--mode", "compute", "--seconds", "600"]


@dataclass
class Terminal:
    """A terminal of 120 × 36 in which a shell runs ``vgpuctl top``, and then ``cat``. ``before``, ``after``: what the
    terminal's driver was set to."""

    node: SimulatedNode
    options: str = ""
    variables: dict[str, str] = field(default_factory=dict)
    name: str = field(default_factory=lambda: f"vgpu-test-{uuid.uuid4().hex[:8]}")

    def __enter__(self) -> Terminal:
        settings = {"LC_ALL": "C.UTF-8", "TERM": "xterm-256color"} | self.variables
        exports = " ".join(f"{name}={shlex.quote(value)}" for name, value in settings.items())
        before, after = self.node.directory / "before", self.node.directory / "after"
        script = (
            f"stty -a > {before}; {exports} {sys.executable} -m vgpu.ctl top {self.options}; echo ended with $?; "
            f"stty -a > {after}; cat"
        )
        self._tmux("new-session", "-d", "-x", "120", "-y", "36", f"/bin/sh -c {shlex.quote(script)}")
        return self

    def __exit__(self, *_: object) -> None:
        self._tmux("kill-server")

    def _tmux(self, *arguments: str) -> str:
        command = ["tmux", "-L", self.name, "-f", "/dev/null", "-u", *arguments]
        return subprocess.run(command, env=self.node.environment, check=True, capture_output=True, text=True).stdout

    def send(self, *keys: str) -> None:
        self._tmux("send-keys", *keys)

    @property
    def screen(self) -> str:
        return self._tmux("capture-pane", "-p")

    def told(self, variable: str) -> str:
        return self._tmux("display-message", "-p", f"#{{{variable}}}").strip()

    def until(self, pattern: str) -> re.Match[str]:
        """The first place on the screen where ``pattern`` is to be seen, once it is."""
        found: list[re.Match[str]] = []

        def look() -> bool:
            found[:] = re.finditer(pattern, self.screen, re.M)
            return bool(found)

        try:
            eventually(look, pattern)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.screen}") from None
        return found[0]


@dataclass
class Stage:
    node: SimulatedNode
    small: VgpuStatus
    large: VgpuStatus
    pid: int


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    """A node with two vGPUs, each with a program that takes all it gets."""
    with SimulatedNode() as node:
        small = node.create(sm_percent=20, memory_bytes=1 << 30, name="a-small")
        large = node.create(sm_percent=60, memory_bytes=1 << 30, name="b-large")
        programs = [
            node.popen(WORK, env=attachment([vgpu]).environment(node.environment), stdout=subprocess.DEVNULL)
            for vgpu in (small, large)
        ]
        yield Stage(node, small, large, programs[0].pid)


def test_a_person_looks_at_a_node(stage: Stage) -> None:
    with Terminal(stage.node) as terminal:
        for vgpu in (stage.small, stage.large):
            terminal.until(rf"{vgpu.name} .*running .* [1-9]\d*\.\d +[ ▁-█]*[▂-█]")  # a rate, and its history
        assert "SIMULATED" in terminal.screen
        assert "│" not in terminal.screen
        for _ in range(12):  # as many columns as there is room for
            if "VGPU▲" in terminal.screen:
                break
            terminal.send("s")
            terminal.until("[▲▼]")
        terminal.until(r"a-small[^$]*\n.*b-large")
        terminal.send("S")
        terminal.until(r"b-large.*\n.*a-small")
        terminal.send("End")
        terminal.until(r"^▌.a-small")
        terminal.send("Enter")
        terminal.until(rf"^▌▾a-small.*\n +└ +{stage.pid} ")
        terminal.send("r")
        terminal.until(r"Resize a-small \(vgpu-\w+\)")
        terminal.send("-l", "--", "--sm 30")
        terminal.send("Enter")
        terminal.until(r"a-small \(vgpu-\w+\) now has 30 %")
        terminal.send("q")
        terminal.until("^ended with 0$")
        restored = [terminal.told(flag) for flag in ("alternate_on", "cursor_flag", "mouse_any_flag")]
        assert restored == ["0", "1", "0"]
        before, after = (eventually(lambda file=file: read(stage, file), file) for file in ("before", "after"))  # type: ignore[misc]
        assert before == after


def read(stage: Stage, file: str) -> str:
    path = Path(stage.node.directory, file)
    return path.read_text() if path.exists() else ""


def test_a_terminal_without_utf8_or_colours_that_is_told_to_end(stage: Stage) -> None:
    with Terminal(stage.node, "-d 0.5", {"LC_ALL": "C", "NO_COLOR": "1"}) as terminal:
        terminal.until(r"b-large .*[=-]+.* [1-9]\d*\.\d")
        assert terminal.screen.isascii()
        coloured = re.findall(r"\x1b\[([\d;]*)m", terminal._tmux("capture-pane", "-p", "-e"))
        assert not [codes for codes in coloured if re.search(r"\b(3[0-8]|4[0-8]|9\d|10\d)\b", codes)]
        shell = int(terminal.told("pane_pid"))
        children = Path(f"/proc/{shell}/task/{shell}/children").read_text().split()
        for child in children:
            os.kill(int(child), signal.SIGTERM)
        terminal.until("^ended with 0$")
        assert terminal.told("alternate_on") == "0"
