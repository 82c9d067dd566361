"""The MPS daemon's commands, against a stand-in on the PATH that keeps the real one's manners."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuserver.device.mps import CONTROL, MpsDirectories, NvidiaMpsDaemon, SimulatedMpsDaemon
from vgpu.errors import ErrorCode, VgpuError

STAND_IN = """#!/bin/sh
echo "$CUDA_VISIBLE_DEVICES|$*" >> "{log}"
daemon="$CUDA_MPS_PIPE_DIRECTORY/control"
case "$1" in
-d)
    if [ "$2" = -M ] && [ -e "{log}.no-multi-user" ]; then echo "unknown option -M" >&2; exit 1; fi
    if [ -e "{log}.broken" ]; then echo "cannot allocate" >&2; exit 1; fi
    touch "$daemon" ;;
"")
    read -r command
    [ -e "$daemon" ] || {{ echo "Cannot find MPS control daemon process"; exit 1; }}
    if [ "$command" = quit ]; then rm "$daemon"; fi ;;
esac
"""


class Machine:
    """A PATH with the stand-in on it, and what was asked of it."""

    def __init__(self, path: Path) -> None:
        self.log = path / "log"
        self.tool = path / CONTROL
        self.tool.write_text(STAND_IN.format(log=self.log))
        self.tool.chmod(0o755)
        self.directories = MpsDirectories(path / "mps" / "pipe", path / "mps" / "log")

    def daemon(self, *, multi_user: bool = False) -> NvidiaMpsDaemon:
        return NvidiaMpsDaemon("GPU-7", self.directories, multi_user=multi_user)

    @property
    def running(self) -> bool:
        return (self.directories.pipe / "control").exists()

    @property
    def starts(self) -> list[str]:
        return [line for line in self.log.read_text().splitlines() if "-d" in line] if self.log.exists() else []

    def has(self, fault: str) -> None:
        Path(f"{self.log}.{fault}").touch()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return Machine(tmp_path)


def test_start_and_stop(machine: Machine) -> None:
    daemon = machine.daemon()
    daemon.stop()  # nothing to stop
    daemon.start()
    assert machine.running
    assert machine.starts == ["GPU-7|-d"]
    assert machine.directories.pipe.stat().st_mode & 0o777 == 0o755
    daemon.stop()
    assert not machine.running


def test_a_daemon_that_runs_is_kept(machine: Machine) -> None:
    machine.daemon().start()
    machine.daemon().start()
    assert len(machine.starts) == 1


def test_root_serves_all_users_where_the_driver_can(machine: Machine) -> None:
    machine.daemon(multi_user=True).start()
    assert machine.starts == ["GPU-7|-d -M"]


def test_an_older_driver_is_started_without_multi_user(machine: Machine) -> None:
    machine.has("no-multi-user")
    machine.daemon(multi_user=True).start()
    assert machine.running
    assert machine.starts == ["GPU-7|-d -M", "GPU-7|-d"]


def test_a_daemon_that_does_not_start_says_why(machine: Machine) -> None:
    machine.has("broken")
    with pytest.raises(VgpuError, match="cannot allocate") as refused:
        machine.daemon().start()
    assert refused.value.code is ErrorCode.MODE


def test_without_mps_on_the_machine(machine: Machine) -> None:
    machine.tool.unlink()
    with pytest.raises(VgpuError, match="not on the PATH"):
        machine.daemon().start()
    machine.daemon().stop()


def test_the_simulated_daemon_is_a_marker(tmp_path: Path) -> None:
    daemon = SimulatedMpsDaemon(MpsDirectories(tmp_path / "pipe", tmp_path / "log"))
    daemon.start()
    daemon.start()
    assert (tmp_path / "pipe" / "simulated-mps").exists()
    daemon.stop()
    daemon.stop()
    assert not (tmp_path / "pipe" / "simulated-mps").exists()
