"""What a node starts while it runs imports nothing from the directory in which the node was started."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from client_hook import interpreter
from tests.integration.node import SimulatedNode
from tests.integration.worker import Worker
from tests.interpreter.places import plant, ran


def test_suspend_imports_nothing_from_where_the_node_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = tmp_path / "here"
    planted.mkdir()
    monkeypatch.chdir(planted)
    node = SimulatedNode()
    node.environment["PYTHONPATH"] += f":{planted}"
    with node:
        vgpu = node.create(sm_percent=30, memory_bytes="1G")
        program = Worker(node, vgpu, 1 << 20)
        try:
            program.goes_on()
            plant(planted, "ctypes", "json", "msgpack", "trio", "pydantic", "sitecustomize", "vgpu")
            with node.link() as link:
                assert link.suspend(vgpu.vgpu_id).state == "suspended"
                assert link.resume(vgpu.vgpu_id).state != "suspended"
            node.create(sm_percent=30, memory_bytes="1G")
            server = Path(f"/proc/{node.server_pid()}/environ").read_bytes()
            assert b"PYTHONPATH" not in server
            assert ran(planted) == []
        finally:
            program.end()


def test_the_simulated_daemon_of_mps_does_neither(tmp_path: Path) -> None:
    planted = plant(tmp_path, "json", "ctypes", "pathlib")
    command = interpreter.command("gpuserver.device.simulated.mps_process")
    done = subprocess.run(command, cwd=planted, capture_output=True, text=True, check=False)
    assert "IndexError" in done.stderr
    assert ran(planted) == []
