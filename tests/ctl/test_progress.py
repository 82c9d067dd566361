"""What takes long says so on stderr, where that is a terminal, and nowhere else."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.ctl.fake_node import FakeNode, gpu_reading, process_reading, vgpu_reading
from tests.processes import ended
from vgpu.ctl.present import progress
from vgpu.ctl.present.progress import Move, Part, timed

ROOT = Path(__file__).parents[2]
GIB = 1 << 30


class Pseudoterminal:
    """What a program writes to its stderr, which is a terminal."""

    def __init__(self) -> None:
        self._own, self.stderr = pty.openpty()
        self.said = ""
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._own, 4096)
            except OSError:  # nobody has its other end any more
                return
            with self._changed:
                self.said += data.decode(errors="replace")
                self._changed.notify_all()

    def until(self, pattern: str) -> None:
        with self._changed:
            found = self._changed.wait_for(lambda: re.search(pattern, self.said), timeout=30)
        assert found, self.said

    def close(self) -> None:
        os.close(self.stderr)
        self._thread.join()
        os.close(self._own)


@contextmanager
def on_a_terminal(*arguments: str) -> Iterator[tuple[Pseudoterminal, subprocess.Popen[str]]]:
    """``vgpuctl``, its stdout in a pipe."""
    terminal = Pseudoterminal()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm", "LC_ALL": "C.UTF-8", "COLUMNS": "100"}
    command = [sys.executable, "-m", "vgpu.ctl", *arguments]
    pipe = subprocess.PIPE
    with (
        subprocess.Popen(command, env=environment, stdout=pipe, stderr=terminal.stderr, text=True) as vgpuctl,
        ended(vgpuctl),
    ):
        yield terminal, vgpuctl
    terminal.close()


@pytest.fixture
def held(node: FakeNode) -> Iterator[threading.Event]:
    """A node whose suspensions take until this is set."""
    event = threading.Event()
    on_card = iter([8 * GIB, 2 * GIB])
    last = [8 * GIB]

    def suspended(request: Any) -> dict[str, Any]:
        assert event.wait(60)
        return vgpu_reading(state="suspended").model_dump(mode="json")

    def programs(request: Any) -> dict[str, Any]:
        last[0] = next(on_card, last[0])
        return {"processes": [process_reading(memory_driver_bytes=last[0])]}

    node.answers |= {"suspend": suspended, "processes": programs}
    yield event
    event.set()


def test_a_suspension_shows_how_much_has_moved_and_leaves_nothing_behind(held: threading.Event) -> None:
    with on_a_terminal("suspend", "vgpu-0a1b2c3d") as (terminal, vgpuctl):
        terminal.until(r"its memory goes to the host .*6 GiB of 8 GiB")
        held.set()
        told, _ = vgpuctl.communicate(timeout=30)
        assert vgpuctl.returncode == 0
        assert "suspended" in told
        assert "\x1b" not in told
    assert terminal.said.rstrip().endswith(("\x1b[2K", "\x1b[?25h"))  # the line is empty, and the cursor is back


def test_piped_nothing_is_said(held: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    monkeypatch.setattr(progress, "_show", lambda *_: started.append(_))
    with progress.waiting("something"):
        pass
    assert not started
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "vgpu.ctl", "suspend", "vgpu-0a1b2c3d"]
    timer = threading.Timer(progress.PATIENCE_S + 1, held.set)
    timer.start()
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_a_recording_shows_the_seconds(node: FakeNode) -> None:
    end = threading.Event()

    def traced(request: Any) -> Iterator[dict[str, Any]]:
        end.wait(60)
        yield {}

    node.answers |= {"gpus": lambda request: {"gpus": [gpu_reading().model_dump(mode="json")]}, "trace": traced}
    trace = Path(os.environ["VGPU_RUNTIME_DIR"], "trace.json")
    with on_a_terminal("trace", "--seconds", "60", "-o", str(trace)) as (terminal, vgpuctl):
        terminal.until(r"recording .* [12] of 60 s")
        end.set()
        vgpuctl.communicate(timeout=30)


def test_parts() -> None:
    assert timed(4.0, lambda: 1.0)() == Part(0.25, "1 of 4 s")
    away, back = Move("vgpu-1", away=True), Move("vgpu-1", away=False)
    assert away.part(8 * GIB, 8 * GIB) is None
    assert away.part(6 * GIB, 8 * GIB) == Part(0.25, "2 GiB of 8 GiB")
    assert away.part(9 * GIB, 8 * GIB) is None
    assert back.part(GIB, 9 * GIB) is None
    assert back.part(5 * GIB, 9 * GIB) == Part(0.5, "4 GiB of 8 GiB")
    assert Move("vgpu-1", away=True).part(0, 0) is None
