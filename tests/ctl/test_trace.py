"""vgpuctl trace against a node that tells a recording: files, words, and what is said of bad input."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.ctl.fake_node import FakeNode, gpu_reading
from tests.trace.recordings import BEGIN, gpu, lease, turns
from vgpu import extras
from vgpu.ctl.exit_codes import Exit
from vgpu.ctl.main import run
from vgpu.errors import ErrorCode, VgpuError
from vgpu.protocol.messages import Trace
from vgpu.protocol.trace import TraceChunk
from vgpu.trace.collect import collect
from vgpu.trace.recording import Recording


def chunks(index: int = 0, lost: int = 0, whole: bool = True) -> Iterator[dict[str, Any]]:
    """A recording of turns, as a server tells it: the vGPUs, the records, the end."""
    made = turns()
    told = [
        TraceChunk(gpu=gpu(index=index), begin_ns=BEGIN, until_ns=BEGIN, vgpus=tuple(made.vgpus.values())),
        TraceChunk(
            gpu=gpu(index=index),
            begin_ns=BEGIN,
            until_ns=made.end_ns,
            records=tuple(made.leases + made.waits + made.busy),
            under_way=() if whole else (lease("vgpu-0000aaaa", 1000, 99_000_000, None, None),),
            lost=lost,
            done=whole,
        ),
    ]
    return iter([{"trace": chunk.model_dump(mode="json")} for chunk in told])


@pytest.fixture
def recorded(node: FakeNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNode:
    monkeypatch.chdir(tmp_path)
    node.answers["gpus"] = lambda request: {"gpus": [gpu_reading().model_dump(mode="json")]}
    node.answers["trace"] = lambda request: chunks()
    return node


def test_a_trace_file_and_a_picture(recorded: FakeNode, capsys: pytest.CaptureFixture[str]) -> None:
    Path("out.json").write_text("something older")
    assert run(["trace", "--seconds", "0.5", "-o", "out.json", "--png", "out.png", "--gpu", "0"]) == Exit.OK
    assert [(r.gpu, r.duration_ns) for r in recorded.asked if isinstance(r, Trace)] == [("0", 500_000_000)]
    trace = json.loads(Path("out.json").read_text())
    assert trace["otherData"]["whole"]
    assert sum(event["name"] == "lease" for event in trace["traceEvents"]) == 20
    assert Path("out.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(file.name for file in Path().iterdir()) == ["control.sock", "out.json", "out.png"]
    said = capsys.readouterr()
    assert "GPU 0: 0.1 s, 60 events; thirty held 29.0 %; vgpu-0000bbbb held 69.0 %" in said.out
    assert "out.json: open it at https://ui.perfetto.dev" in said.out
    assert said.err == ""


def test_all_gpus_that_are_served_each_with_a_picture(recorded: FakeNode) -> None:
    states = [(2, "serving"), (0, "serving"), (1, "restarting")]
    listed = [gpu_reading(index=index, state=state).model_dump(mode="json") for index, state in states]
    recorded.answers["gpus"] = lambda request: {"gpus": listed}
    recorded.answers["trace"] = lambda request: chunks(int(request.gpu))
    assert run(["trace", "--seconds", "1", "--png", "p.png"]) == Exit.OK
    pids = {event["pid"] // 1000 for event in json.loads(Path("trace.json").read_text())["traceEvents"]}
    assert pids == {1, 3}
    assert Path("p-gpu0.png").exists()
    assert Path("p-gpu2.png").exists()


def test_lost_events_are_told(recorded: FakeNode, capsys: pytest.CaptureFixture[str]) -> None:
    recorded.answers["trace"] = lambda request: chunks(lost=12)
    assert run(["trace"]) == Exit.OK
    assert "GPU 0: 12 events lost" in capsys.readouterr().err
    assert json.loads(Path("trace.json").read_text())["otherData"]["lost_events"] == 12


def test_a_server_that_ends_leaves_what_was_recorded(recorded: FakeNode, capsys: pytest.CaptureFixture[str]) -> None:
    recorded.answers["trace"] = lambda request: chunks(whole=False)
    assert run(["trace"]) == Exit.FAILURE
    told = json.loads(Path("trace.json").read_text())
    assert not told["otherData"]["whole"]
    assert any(event["args"].get("epoch") == 1000 for event in told["traceEvents"] if event["name"] == "lease")
    assert "GPU 0: its recording ended early" in capsys.readouterr().err


def test_ctrl_c_writes_what_was_recorded(recorded: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    told, over = threading.Event(), threading.Event()
    add = Recording.add

    def tell() -> Iterator[dict[str, Any]]:
        yield from chunks(whole=False)
        over.wait(30)

    def note(recording: Recording, chunk: TraceChunk) -> None:
        add(recording, chunk)
        if chunk.records:
            told.set()

    def interrupt(seconds: float) -> None:
        assert told.wait(30)
        raise KeyboardInterrupt

    monkeypatch.setattr(Recording, "add", note)
    recorded.answers["trace"] = lambda request: tell()
    monkeypatch.setattr("vgpu.trace.collect.collect", lambda gpus, length_ns, show: collect(gpus, length_ns, interrupt))
    assert run(["trace"]) == Exit.OK
    over.set()
    assert not json.loads(Path("trace.json").read_text())["otherData"]["whole"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--seconds", "0"], Exit.USAGE, "--seconds: 0 is not between 0.1 and 300"),
        (["--seconds", "301"], Exit.USAGE, "not between"),
        (["--seconds", "nan"], Exit.USAGE, "not between"),
        (["--seconds", "soon"], Exit.USAGE, "--seconds"),
        (["--gpu", "9"], Exit.NOT_FOUND, "there is no GPU '9'; this node has GPU 0"),
        (["-o", "nowhere/trace.json"], Exit.USAGE, "cannot write nowhere/trace.json: No such file or directory"),
        (["-o", "."], Exit.USAGE, "cannot write .: it is a directory"),
        (["--png", "nowhere/trace.png"], Exit.USAGE, "cannot write nowhere/trace.png"),
        (["-o", "same", "--png", "same"], Exit.USAGE, "the same file"),
    ],
)
def test_bad_input_is_refused_before_anything_is_recorded(
    recorded: FakeNode, capsys: pytest.CaptureFixture[str], arguments: list[str], code: Exit, words: str
) -> None:
    assert run(["trace", *arguments]) == code
    said = capsys.readouterr().err
    assert words in said
    assert "→" in said
    assert not [request for request in recorded.asked if isinstance(request, Trace)]
    assert [file.name for file in Path().iterdir()] == ["control.sock"]


def test_no_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VGPU_RUNTIME_DIR", str(tmp_path))
    assert run(["trace"]) == Exit.NODE_DOWN
    assert "vgpuctl serve --detach" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_no_gpu_is_served(recorded: FakeNode, capsys: pytest.CaptureFixture[str]) -> None:
    failed = gpu_reading(state="failed", reason="no driver").model_dump(mode="json")
    recorded.answers["gpus"] = lambda request: {"gpus": [failed]}
    assert run(["trace"]) == Exit.NODE_DOWN
    assert run(["trace", "--gpu", "0"]) == Exit.NODE_DOWN
    assert "no driver" in capsys.readouterr().err


def test_a_refused_recording_says_why(recorded: FakeNode, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(request: object) -> dict[str, Any]:
        raise VgpuError(ErrorCode.UNAVAILABLE, "GPU 0 is being recorded by 4 others", "try again")

    recorded.answers["trace"] = refuse
    assert run(["trace"]) == Exit.NODE_DOWN
    assert "recorded by 4 others" in capsys.readouterr().err
    assert not Path("trace.json").exists()


def test_without_matplotlib_it_says_what_to_install(
    recorded: FakeNode, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "matplotlib", raising=False)
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "matplotlib" else find_spec(name))
    assert run(["trace", "--png", "p.png"]) == Exit.FAILURE
    said = capsys.readouterr()
    assert "trace --png needs matplotlib, which is not installed" in said.err
    assert 'pip install "st-vgpu[plot]"' in said.err
    assert "trace.json: open it at" in said.out
    assert json.loads(Path("trace.json").read_text())["traceEvents"]  # what was recorded is not lost
    assert not Path("p.png").exists()
    assert run(["trace"]) == Exit.OK
