"""Nodes that start with the first ``run`` or ``create`` and end after their last vGPU; real processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.processes import ended
from vgpu import paths as places
from vgpu.ctl.exit_codes import Exit
from vgpu.errors import ErrorCode, VgpuError
from vgpu.node import ondemand
from vgpu.paths import NodePaths

ROOT = Path(__file__).parents[2]
CLIENTS = 6
ROUNDS = 20
PATIENCE_S = 60.0
STARTED = "no node answered; started one"


@dataclass(frozen=True)
class Place:
    """Where a node may start, with its configuration."""

    directory: Path

    def environment(self, setting: str) -> dict[str, str]:
        own = {
            "VGPU_RUNTIME_DIR": str(self.directory / "run"),
            "VGPU_STATE_DIR": str(self.directory / "state"),
            "VGPU_CONFIG": str(self.directory / "config.toml"),
            "PYTHONPATH": str(ROOT),
            ondemand.SETTING: setting,
        }
        return {name: value for name, value in os.environ.items() if name != "VGPU_ID"} | own

    def begin(self, *arguments: str, setting: str = "600") -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "vgpu.ctl", *arguments],
            env=self.environment(setting),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def vgpuctl(self, *arguments: str, setting: str = "600") -> tuple[int, str, str]:
        process = self.begin(*arguments, setting=setting)
        out, error = process.communicate(timeout=PATIENCE_S)
        return process.returncode, out, error

    @property
    def log(self) -> str:
        return NodePaths(self.directory / "run", self.directory / "state").node_log.read_text()

    def pid(self) -> int:
        """Of the node that answers."""
        code, out, error = self.vgpuctl("status")
        assert code == 0, error
        return int(re.findall(r"pid (\d+)", out)[0])


@pytest.fixture
def place() -> Iterator[Place]:
    """Its path is short, as those of sockets have to be."""
    with tempfile.TemporaryDirectory(prefix="vgpu-", dir="/tmp") as directory:
        made = Place(Path(directory))
        (made.directory / "config.toml").write_text("[serve]\nsimulate = 1\n")
        yield made
        made.vgpuctl("stop", setting="off")


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_many_clients_at_once_get_one_node(place: Place) -> None:
    clients = [place.begin("create", "--sm", "10", "--mem", "1G") for _ in range(CLIENTS)]
    said = [client.communicate(timeout=PATIENCE_S) for client in clients]
    assert [client.returncode for client in clients] == [0] * CLIENTS, said
    assert sorted(place.vgpuctl("ls", "-q")[1].split()) == sorted(out.strip() for out, _ in said)
    assert sum(STARTED in error for _, error in said) == 1
    assert place.log.count("node serves") == 1


def test_a_python_program_gets_a_node_too(place: Place) -> None:
    code = "import os, vgpu\nwith vgpu.create(sm=30, mem='1G') as v: print(v.id, v.environ()['VGPU_ID'])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=place.environment("600"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    first, second = done.stdout.split()
    assert first == second
    assert STARTED in done.stderr


def test_the_node_ends_after_its_last_vgpu_and_the_next_run_starts_another(place: Place) -> None:
    code, out, error = place.vgpuctl("run", "--sm", "30", "--mem", "1G", "sh", "-c", "echo $VGPU_ID", setting="1")
    assert (code, out[:5]) == (0, "vgpu-")
    assert "started one, which ends 1 s after its last vGPU" in error
    socket = place.directory / "run" / "control.sock"
    until(lambda: not socket.exists())
    until(lambda: "the node ends" in place.log)
    assert STARTED in place.vgpuctl("create", "--sm", "30", "--mem", "1G")[2]
    pid = place.pid()
    assert STARTED not in place.vgpuctl("create", "--sm", "30", "--mem", "1G")[2]
    assert place.pid() == pid
    assert place.vgpuctl("stop")[0] == 0
    assert ended(pid)


def test_a_node_with_a_vgpu_stays(place: Place) -> None:
    assert place.vgpuctl("create", "--sm", "30", "--mem", "1G", setting="0.5")[0] == 0
    pid = place.pid()
    time.sleep(2)  # four times as long as it stays without one
    assert place.pid() == pid


def test_other_commands_start_no_node(place: Place) -> None:
    for command in (["ls"], ["status"], ["rm", "x"], ["gpu", "ls"], ["ps"]):
        code, _, error = place.vgpuctl(*command)
        assert code == Exit.NODE_DOWN, command
        assert "start one with: vgpuctl serve --detach" in error
    code, _, error = place.vgpuctl("create", "--sm", "30", setting="off")
    assert code == Exit.NODE_DOWN
    assert "start one with: vgpuctl serve --detach" in error


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_client_at_the_moment_of_the_nodes_end_has_its_vgpu(place: Place) -> None:
    socket = place.directory / "run" / "control.sock"
    for number in range(ROUNDS):
        code, out, error = place.vgpuctl("create", "--sm", "30", "--mem", "1G", setting="0.3")
        assert code == 0, (number, error, place.log)
        assert place.vgpuctl("rm", out.strip())[0] == 0
        if number % 2:
            until(lambda: not socket.exists())  # it ends, and holds its lock
        else:
            time.sleep(number * 0.03)


# --- where a node may start ------------------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of a machine with a driver, and without a node of its own."""
    root = tmp_path / "root"
    (root / "dev").mkdir(parents=True)
    (root / "dev" / "nvidiactl").touch()
    monkeypatch.setattr(places, "SYSTEM_RUNTIME", root / "run/vgpu")
    monkeypatch.setenv("VGPU_CONFIG", str(tmp_path / "config.toml"))
    (tmp_path / "config.toml").touch()
    return root


def allowed(root: Path, setting: str = "", *, contained: bool = False, runtime: Path | None = None) -> bool:
    environment = {ondemand.SETTING: setting} | ({"VGPU_RUNTIME_DIR": str(runtime)} if runtime else {})
    paths = NodePaths(runtime or root.parent / "own", root.parent / "state")
    return ondemand.may_start(paths, environment, root, lambda: contained)


def test_it_starts_where_there_is_a_driver_and_no_other_node(root: Path) -> None:
    assert allowed(root)
    assert not allowed(root, "off")
    (root / "dev" / "nvidiactl").unlink()
    assert not allowed(root)
    assert not allowed(root, "5")


def test_it_starts_in_no_container_unless_the_setting_says_so(root: Path) -> None:
    assert not allowed(root, contained=True)
    assert allowed(root, "5", contained=True)


def test_it_starts_beside_no_node_of_the_machine(root: Path) -> None:
    own = root.parent / "own"
    assert not allowed(root, runtime=own)
    assert allowed(root, "5", runtime=own)
    unit = root / "etc/systemd/system/vgpu.service"
    unit.parent.mkdir(parents=True)
    unit.touch()
    assert not allowed(root)
    assert not allowed(root, "5")
    assert allowed(root, "5", runtime=own)


@pytest.mark.parametrize("mark", [".dockerenv", "run/.containerenv", "proc/1/cgroup"])
def test_marks_of_a_container(tmp_path: Path, mark: str) -> None:
    assert not ondemand.in_container({}, tmp_path)
    (tmp_path / mark).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / mark).write_text("0::/kubepods/burstable/pod1\n")
    assert ondemand.in_container({}, tmp_path)


def test_a_pod_is_a_container(tmp_path: Path) -> None:
    assert ondemand.in_container({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, tmp_path)


@pytest.mark.parametrize("setting", ["on", "-1", "0", "nan"])
def test_a_setting_that_is_neither_is_refused(setting: str) -> None:
    with pytest.raises(VgpuError, match="neither off nor a number") as refused:
        ondemand.idle_s({ondemand.SETTING: setting})
    assert refused.value.code is ErrorCode.INVALID


def test_it_imports_neither_typer_nor_rich() -> None:
    code = "import sys, vgpu.node.ondemand; print(*{'typer', 'rich', 'trio'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
