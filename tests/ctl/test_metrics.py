"""vgpuctl metrics: printed, written into a file, served."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.ctl.fake_node import FakeNode
from tests.metrics.meterings import busy
from vgpu.ctl.exit_codes import Exit
from vgpu.ctl.main import run
from vgpu.ctl.observe import metrics as command


def test_printed_once(node: FakeNode, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    node.answers["meter"] = lambda request: busy(2).model_dump(mode="json")
    assert run(["metrics"]) == Exit.OK
    told = capfdbinary.readouterr()
    assert told.out.startswith(b"# HELP vgpu_node_up ")
    assert b'vgpu_tokens_total{gpu="0",name="job-1"' in told.out
    assert told.err == b""


def test_of_a_node_that_is_down_that_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    monkeypatch.setenv("VGPU_RUNTIME_DIR", str(tmp_path))
    kept = tmp_path / "vgpu.prom"
    kept.write_text('vgpu_node_up 1\nvgpu_tokens_total{vgpu="old"} 17\n')
    assert run(["metrics", "-o", str(kept)]) == Exit.NODE_DOWN
    said = capfdbinary.readouterr().err
    assert b"no process answers" in said
    assert "→ vgpuctl serve --detach".encode() in said
    assert "\nvgpu_node_up 0.0\n" in kept.read_text()
    assert "tokens" not in kept.read_text()  # what it said before must not look current
    assert list(tmp_path.iterdir()) == [kept]


def test_what_cannot_be_meant_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VGPU_RUNTIME_DIR", str(tmp_path))
    assert run(["metrics", "--listen", "9835", "-o", str(tmp_path / "file")]) == Exit.USAGE
    assert run(["metrics", "--listen", "somewhere"]) == Exit.USAGE
    assert "'somewhere' is not an address" in capsys.readouterr().err
    assert run(["metrics", "--listen", "192.0.2.1:9835"]) == Exit.USAGE  # an address of no machine
    assert "cannot listen at 192.0.2.1:9835" in capsys.readouterr().err
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert run(["metrics", "--listen", str(port)]) == Exit.REFUSED
    told = capsys.readouterr().err
    assert f"cannot listen at 127.0.0.1:{port}: Address already in use" in told
    assert f"--listen 127.0.0.1:{port + 1}" in told


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
def test_served_until_a_signal_also_with_a_scraper_that_keeps_its_connection(
    node: FakeNode, tmp_path: Path, ending: signal.Signals
) -> None:
    node.answers["meter"] = lambda request: busy(2).model_dump(mode="json")
    command = [sys.executable, "-m", "vgpu.ctl", "metrics", "--listen", "127.0.0.1:0"]
    environment = os.environ | {"VGPU_RUNTIME_DIR": str(tmp_path), "PYTHONWARNINGS": "error"}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as exporter:
        try:
            assert exporter.stdout is not None
            said = exporter.stdout.readline()
            assert said.startswith("metrics at http://127.0.0.1:")
            with httpx.Client(base_url=said.split()[-1].removesuffix("/metrics"), timeout=30) as scraper:
                assert "\nvgpu_node_up 1.0\n" in scraper.get("/metrics").text
                assert scraper.get("/", follow_redirects=True).text.startswith("# HELP")
                exporter.send_signal(ending)
                assert exporter.wait(30) == 0
            assert exporter.stderr is not None
            assert exporter.stderr.read() == ""
        finally:
            exporter.kill()


def test_the_configuration_file_says_where_it_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "config.toml"
    file.write_text('[metrics]\nlisten = "192.0.2.1:9836"\n')
    monkeypatch.setenv("VGPU_CONFIG", str(file))
    found: list[str] = []
    monkeypatch.setattr(command, "_serve", lambda listen, limits: found.append(listen) or 0)
    assert run(["metrics", "--serve"]) == 0
    assert run(["metrics", "--serve", "--listen", "127.0.0.1:1"]) == 0
    file.write_text("")
    assert run(["metrics", "--serve"]) == 0
    assert found == ["192.0.2.1:9836", "127.0.0.1:1", command.EXAMPLE]
