"""vgpuctl whose stdout or stderr leads nowhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.ctl.fake_node import FakeNode, vgpu_reading
from vgpu.ctl.exit_codes import Exit

ROOT = Path(__file__).parents[2]


def vgpuctl(line: str) -> subprocess.CompletedProcess[str]:
    command = ["/bin/sh", "-c", f"{sys.executable} -P -m vgpu.ctl {line}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.fixture
def made(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> FakeNode:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    answer = vgpu_reading(warnings=("a remark",)).model_dump(mode="json")
    node.answers["create"] = lambda asked: answer | {"request_id": getattr(asked, "request_id", "")}
    node.answers["list"] = lambda _: {"vgpus": [answer] * 50}
    return node


@pytest.mark.parametrize("command", ["ls", "ls -o json", "--help"])
@pytest.mark.parametrize(("to", "why"), [(">/dev/full", "No space left on device"), (">&-", "Bad file descriptor")])
def test_a_stdout_that_takes_nothing(made: FakeNode, command: str, to: str, why: str) -> None:
    done = vgpuctl(f"{command} {to}")
    assert (done.stderr, done.returncode) == (f"vgpuctl: cannot write to stdout: {why}\n", Exit.FAILURE)


@pytest.mark.parametrize("command", ["metrics", "dashboard"])
def test_servers_that_cannot_tell_where_they_listen(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VGPU_RUNTIME_DIR", str(tmp_path))
    done = vgpuctl(f"{command} --listen 127.0.0.1:0 >/dev/full")
    assert done.stderr.splitlines()[-1] == "vgpuctl: cannot write to stdout: No space left on device"
    assert (done.returncode, "Traceback" in done.stderr) == (Exit.FAILURE, False)


@pytest.mark.parametrize("to", [">/dev/full", ">&-", "<&- >&-", "| true"])
def test_a_vgpu_whose_id_cannot_be_written_is_not_confirmed(made: FakeNode, to: str) -> None:
    """The node takes it back: nobody knows of it."""
    done = vgpuctl(f"create --sm 30 {to}")
    assert not made.confirmed
    assert "Traceback" not in done.stderr
    assert vgpuctl("create --sm 30").stdout == "vgpu-0a1b2c3d\n"
    assert len(made.confirmed) == 1


def test_without_stderr_stdout_is_as_it_was(made: FakeNode) -> None:
    assert vgpuctl("create --sm 30 2>&-").stdout == "vgpu-0a1b2c3d\n"


def test_programs_find_closed_what_was_closed(made: FakeNode) -> None:
    """The descriptor that vgpuctl itself needs is none of theirs."""
    made.answers["remove"] = made.answers["create"]
    done = vgpuctl("run --sm 30 -- sh -c 'test -e /proc/$$/fd/1 || echo closed >&2' >&-")
    assert (done.stderr.splitlines()[-1], done.returncode) == ("closed", 0)
