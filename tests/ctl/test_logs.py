"""vgpuctl logs: which lines of which files, how they look, and a log that is followed while it is begun anew."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ctl.fake_node import FakeNode, node_status, vgpu_reading
from vgpu.ctl.exit_codes import Exit
from vgpu.ctl.main import run
from vgpu.ctl.observe import logs as command
from vgpu.ctl.observe.logs import Reader, elsewhere
from vgpu.node.logfiles import trim


def line(second: int, event: str, level: str = "info", process: str = "server", **fields: object) -> str:
    told = {"time": f"2026-05-01T10:00:{second:02}.5Z", "level": level, "process": process, "event": event}
    return json.dumps(told | fields) + "\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The logs of a node that has ended."""
    monkeypatch.setenv("VGPU_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("VGPU_STATE_DIR", str(tmp_path))
    folder = tmp_path / "logs"
    folder.mkdir()
    (folder / "node.log").write_text(line(1, "node serves", process="node") + line(9, "stopped", process="node"))
    (folder / "gpu-0.log.1").write_text(line(0, "begun"))
    (folder / "gpu-0.log").write_text(
        line(2, "created", vgpu="vgpu-0a1b2c3d", text="vgpu-0a1b2c3d created by uid 0")
        + line(3, "link failed", "error", pid=7, exception="Traceback\n  boom")
        + "Segmentation fault\n"
        + line(5, "no link", "warning", "broker", vgpu="vgpu-0a1b2c3d", reason="gone \x1b[31m")
    )
    (folder / "gpu-1.log").write_text(line(4, "serving"))
    return folder


def texts(said: str) -> list[str]:
    return [one["text"] for one in json.loads(said)]


def test_all_logs_by_time(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["logs", "-o", "json"]) == 0
    assert texts(capsys.readouterr().out) == [
        "begun", "node serves", "created", "link failed", "Segmentation fault", "serving", "no link", "stopped",
    ]  # fmt: skip
    assert run(["logs"]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "created: vgpu-0a1b2c3d created by uid 0" in shown
    assert "pid=7" in shown
    assert "  boom" in shown
    assert "vgpu-0a1b2c3d: no link" in shown


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (["node"], ["node serves", "stopped"]),
        (["gpu", "1"], ["serving"]),
        (["gpu", "0", "-n", "1"], ["no link"]),
        (["vgpu-0a1b2c3d"], ["created", "no link"]),
        (["0a1b"], ["created", "no link"]),
        (["--level", "warning"], ["link failed", "Segmentation fault", "no link"]),
        (["--since", "2026-05-01T10:00:05+00:00"], ["no link", "stopped"]),
        (["-n", "0"], []),
    ],
)
def test_what_is_chosen(folder: Path, capsys: pytest.CaptureFixture[str], options: list[str], shown: list[str]) -> None:
    assert run(["logs", *options, "-o", "json"]) == 0
    assert texts(capsys.readouterr().out) == shown


def test_what_has_no_logs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["gpu"], ["gpu", "x"], ["a", "b"]):
        assert run(["logs", *words]) == Exit.USAGE
    assert run(["logs", "gpu", "7"]) == Exit.NOT_FOUND
    assert "no logs of gpu 7" in capsys.readouterr().err


def test_nothing_that_fits_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["logs", "nobody"]) == 0
    told = capsys.readouterr()
    assert not told.out
    assert "no line of the logs fits" in told.err


def test_a_name_is_that_of_a_vgpu_of_the_node(node: FakeNode, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    node.answers["list"] = lambda _: {"vgpus": [vgpu_reading(name="trainer").model_dump(mode="json")]}
    node.answers["status"] = lambda _: node_status(state_dir=str(folder.parent)).model_dump(mode="json")
    assert run(["logs", "trainer", "-o", "json"]) == 0
    assert texts(capsys.readouterr().out) == ["created", "no link"]


def test_followed_while_it_is_begun_anew(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "gpu-0.log"

    def append(text: str) -> Callable[[], object]:
        def act() -> None:
            with path.open("a") as file:
                file.write(text)

        return act

    whole = line(12, "whole")
    steps = [
        append(line(10, "first")),
        append(line(11, "second") + whole[:30]),
        append(whole[30:]),
        lambda: trim(path, 1),
        append(line(13, "anew")),
        lambda: (folder / "gpu-5.log").write_text(line(14, "another")),
    ]

    def sleep(_: float) -> None:
        if not steps:
            raise KeyboardInterrupt
        steps.pop(0)()

    monkeypatch.setattr(command.time, "sleep", sleep)
    assert run(["logs", "-f", "-n", "1", "-o", "json"]) == 0
    shown = [json.loads(text)["text"] for text in capsys.readouterr().out.splitlines()]
    assert shown == ["stopped", "first", "second", "whole", "anew", "another"]


def test_no_more_than_the_end_of_a_log_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "READ_BYTES", 100)
    [lines] = Reader(folder, "node").past()
    assert [one.text for one in lines] == ["stopped"]


def test_where_the_nodes_own_log_is(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    process = tmp_path / "7"
    (process / "fd").mkdir(parents=True)
    stderr = process / "fd" / "2"
    (process / "cgroup").write_text("0::/system.slice/vgpu.service\n")
    for target, told, hint in (
        (f"{logs}/node.log", "", ""),
        ("socket:[4711]", "in the journal", "journalctl -u vgpu.service"),
        ("/dev/pts/3", "its terminal", ""),
        ("/var/log/vgpu", "/var/log/vgpu", ""),
    ):
        stderr.unlink(missing_ok=True)
        stderr.symlink_to(target)
        found = elsewhere(7, logs, tmp_path)
        assert told in found[0]
        assert found[1] == hint
        assert bool(found[0]) == bool(told)
    stderr.unlink()
    stderr.symlink_to("socket:[4711]")
    (process / "cgroup").write_text("0::/user.slice/user@0.service/app.slice\n")
    assert elsewhere(7, logs, tmp_path)[1] == "journalctl _PID=7"
    assert elsewhere(8, logs, tmp_path) == ("", "")
