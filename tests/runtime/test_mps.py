"""The MPS daemon's commands, against a stand-in on the PATH that keeps the real one's manners."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

from gpuserver.device.base import MpsDirectories, PartitionerStatus
from gpuserver.device.nvidia.mps import CONTROL, PID_FILE, NvidiaMpsDaemon
from gpuserver.device.simulated.mps import SimulatedMpsDaemon
from gpuserver.runtime.mps import MpsWatch
from tests.integration.node import eventually
from tests.processes import ended
from vgpu.enums import PriorityName
from vgpu.errors import ErrorCode, VgpuError
from vgpu.identity import Process

STAND_IN = """#!/bin/sh
echo "$CUDA_VISIBLE_DEVICES|$*" >> "{log}"
daemon="$CUDA_MPS_PIPE_DIRECTORY/control"
case "$1" in
-d)
    if [ "$2" = -M ] && [ -e "{log}.no-multi-user" ]; then echo "unknown option -M" >&2; exit 1; fi
    if [ -e "{log}.broken" ]; then echo "cannot allocate" >&2; exit 1; fi
    if [ -e "$CUDA_MPS_PIPE_DIRECTORY/control_lock" ]; then echo "is already running" >&2; exit 1; fi
    touch "$daemon" ;;
"")
    read -r command
    [ -e "$daemon" ] || {{ echo "Cannot find MPS control daemon process"; exit 1; }}
    if [ "$command" = quit ]; then rm "$daemon"; fi
    if [ -e "{log}.servers" ]; then cat "{log}.servers"; fi ;;
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

    @contextmanager
    def server(self) -> Iterator[subprocess.Popen[bytes]]:
        """A server that the daemon tells of while it lives."""
        servers = Path(f"{self.log}.servers")
        with subprocess.Popen(["sleep", "60"]) as process, ended(process):
            servers.write_text(f"{process.pid}\n")
            yield process
        servers.unlink()

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


def test_what_a_killed_daemon_left_behind_does_not_keep_the_next_one_out(machine: Machine) -> None:
    machine.directories.pipe.mkdir(parents=True)
    (machine.directories.pipe / "control_lock").touch()
    machine.daemon().start()
    assert machine.running
    assert len(machine.starts) == 2


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


def test_the_simulated_daemon_lives_until_it_is_stopped_or_killed(tmp_path: Path) -> None:
    daemon = SimulatedMpsDaemon(MpsDirectories(tmp_path / "pipe", tmp_path / "log"))
    assert daemon.status(serving=False).daemon is None
    daemon.start()
    first = daemon.status(serving=False).daemon
    assert first is not None
    daemon.start()  # it is kept
    assert daemon.status(serving=False).daemon == first
    os.kill(first.pid, signal.SIGKILL)
    eventually(lambda: daemon.status(serving=False).daemon is None, "the daemon's end")
    daemon.start()
    second = daemon.status(serving=False).daemon
    assert second not in {None, first}
    daemon.stop()
    daemon.stop()
    assert daemon.status(serving=False).daemon is None
    assert second is not None
    eventually(lambda: not Path(f"/proc/{second.pid}/cmdline").read_bytes(), "the end of a daemon without a marker")


def test_a_look_tells_of_daemon_and_servers(machine: Machine) -> None:
    daemon = machine.daemon()
    daemon.start()
    assert daemon.status(serving=True).daemon is None  # the stand-in wrote no pid yet
    pid_file = machine.directories.pipe / PID_FILE
    pid_file.write_text(f"{os.getpid()}\n")
    asked = machine.log.read_text().count("\n")
    assert daemon.status(serving=False).servers == frozenset()
    assert machine.log.read_text().count("\n") == asked  # without processes nobody is asked
    with machine.server() as server:
        look = daemon.status(serving=True)
        assert look.daemon is not None
        assert (look.daemon.pid, [process.pid for process in look.servers]) == (os.getpid(), [server.pid])
        asked = machine.log.read_text().count("\n")
        assert daemon.status(serving=True) == look
        assert machine.log.read_text().count("\n") == asked  # who is known is not asked for again
    assert daemon.status(serving=True).servers == frozenset()


@pytest.mark.parametrize("text", ["", "rubbish", "4194305"])
def test_a_pid_file_that_names_nobody(machine: Machine, text: str) -> None:
    machine.daemon().start()
    (machine.directories.pipe / PID_FILE).write_text(text)
    assert machine.daemon().status(serving=True).daemon is None


class Mortal:
    """A daemon as ``MpsWatch`` sees it."""

    most_processes = 48

    def __init__(self) -> None:
        self.directories = MpsDirectories(Path("/pipe"), Path("/log"))
        self.now = PartitionerStatus(Process(10, 1), frozenset({Process(11, 1)}))
        self.broken = False

    def client_priority(self, priority: PriorityName) -> str:
        return "0"

    def start(self) -> None:
        if self.broken:
            raise VgpuError(ErrorCode.MODE, "no device")
        self.now = PartitionerStatus(Process(20, 2))

    def stop(self) -> None:
        self.now = PartitionerStatus(None)

    def status(self, *, serving: bool) -> PartitionerStatus:
        return self.now


def test_who_has_ended_with_the_daemon_is_counted() -> None:
    daemon, attached, told = Mortal(), [3, 0], list[str]()
    watch = MpsWatch(daemon, lambda: attached.pop(0), lambda kind, text: told.append(text))

    async def looks() -> None:
        await watch.check()
        daemon.stop()
        await watch.check()

    trio.run(looks)
    assert "3 processes of this GPU may get errors" in told[0]


def watched(daemon: Mortal, attached: int, *happenings: Callable[[], None]) -> tuple[MpsWatch, list[str]]:
    """A look, then each happening with a look behind it; what was told."""
    told: list[str] = []
    watch = MpsWatch(daemon, lambda: attached, lambda kind, text: told.append(f"{kind}: {text}"))

    async def looks() -> None:
        await watch.check()
        for happens in happenings:
            happens()
            await watch.check()

    trio.run(looks)
    return watch, told


def test_a_dead_daemon_is_reported_and_another_is_started() -> None:
    daemon = Mortal()
    watch, told = watched(daemon, 3, daemon.stop, lambda: None)
    assert (watch.pid, watch.restarts, watch.reason) == (20, 1, "")
    assert told == [
        "mps-lost: the MPS daemon (pid 10) is gone: 3 processes of this GPU may get errors from CUDA",
        "mps-restarted: another MPS daemon runs (pid 20): new processes work",
    ]


def test_a_daemon_that_cannot_be_started_is_tried_again_and_told_of_once() -> None:
    daemon = Mortal()
    daemon.broken = True

    def mend() -> None:
        daemon.broken = False

    watch, told = watched(daemon, 0, daemon.stop, lambda: None, mend)
    assert [line.partition(":")[0] for line in told] == ["mps-lost", "mps-failed", "mps-restarted"]
    assert (watch.pid, watch.reason) == (20, "")


@pytest.mark.parametrize(("attached", "events"), [(2, 1), (0, 0)])
def test_a_dead_server_is_reported_where_it_took_somebody_along(attached: int, events: int) -> None:
    daemon = Mortal()

    def dies() -> None:
        daemon.now = PartitionerStatus(Process(10, 1))

    watch, told = watched(daemon, attached, dies)
    assert len(told) == events
    assert watch.restarts == 0
