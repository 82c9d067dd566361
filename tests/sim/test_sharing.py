"""Several processes on one simulated GPU: turns, MPS, memory, and deaths at the worst moment."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.sim.conftest import Node
from vgpu.protocol.peer import start_time

DYING = 2


def together(node: Node, *environments: dict[str, str]) -> list[dict[str, int]]:
    """Run sharers at the same time for a second of the GPU's time; what each got done."""
    processes = [node.start("share", "5", **environment) for environment in environments]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    node.wait_until(lambda engine: len(engine.contexts()) == len(processes))
    begun = node.engine().time_ns
    node.wait_until(lambda engine: engine.time_ns > begun + 2_000_000_000)
    return [node.answer(process, "stop\n") for process in processes]


ATTEMPTS = 10
"""Of which one is not disturbed by what else this machine does: a sharer that is late to launch has had less."""


def test_two_processes_take_equal_turns(node: Node) -> None:
    for _ in range(ATTEMPTS):
        before = node.engine().kernel_ns
        first, second = (answer["finished"] for answer in together(node, {}, {}))
        assert node.engine().kernel_ns - before >= (first + second) * 5e6 * 0.99, "no work without time"
        if first == pytest.approx(second, rel=0.1):
            return
    pytest.fail(f"{first} and {second}")


def served_by(directory: Path, pid: int) -> dict[str, str]:
    """The environment of a process of the simulated MPS server for which process ``pid`` stands."""
    (directory / "simulated-mps").write_text(f"{pid} {start_time(pid)}")
    return {"CUDA_MPS_PIPE_DIRECTORY": str(directory)}


def test_under_simulated_mps_partitions_run_side_by_side(node: Node, tmp_path: Path) -> None:
    mps = served_by(tmp_path, os.getpid())
    environments = [mps | {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": percent} for percent in ("25", "75")]
    for _ in range(ATTEMPTS):
        small, large = together(node, *environments)
        assert (small["sms"], large["sms"]) == (32, 98)
        if large["finished"] / small["finished"] == pytest.approx(98 / 32, rel=0.15):
            return
    pytest.fail(f"{small} and {large}")


ILLEGAL_ADDRESS = 700
MPS_CONNECTION_FAILED = 805
MPS_SERVER_NOT_READY = 807
MPS_MAX_CLIENTS_REACHED = 808


def stray(node: Node, mps: dict[str, str]) -> int:
    """The CUresult of a program that starts, and then stores where there is no memory."""
    return int(node.answer(node.start(module="tests.stray", **mps)))


def test_an_mps_server_takes_so_many_processes_and_no_more(node: Node, tmp_path: Path) -> None:
    mps = served_by(tmp_path, os.getpid())
    server = start_time(os.getpid()) << 22 | os.getpid()
    engine = node.engine()
    for stranger in range(55):
        engine.open_context(1 << 20 | stranger, server=server)
    assert node.run("until_refused", str(1 << 30), **mps)["taken"] > 0
    for stranger in range(70):  # some of them are found to be dead meanwhile
        engine.open_context(1 << 21 | stranger, server=server)
    assert stray(node, mps) == MPS_MAX_CLIENTS_REACHED


def test_who_comes_to_a_dead_mps_daemon_is_refused(node: Node, tmp_path: Path) -> None:
    mps = served_by(tmp_path, os.getpid())
    (tmp_path / "simulated-mps").write_text("4194303 1")
    assert stray(node, mps) == MPS_CONNECTION_FAILED


def test_after_a_fault_an_mps_server_takes_nobody_until_those_it_hit_are_gone(node: Node, tmp_path: Path) -> None:
    mps = served_by(tmp_path, os.getpid())
    neighbour = node.start("hold", str(1 << 20), **mps)
    assert neighbour.stdout is not None
    assert neighbour.stdout.readline() == "ready\n"
    assert stray(node, mps) == ILLEGAL_ADDRESS
    assert stray(node, mps) == MPS_SERVER_NOT_READY
    neighbour.kill()
    neighbour.wait()
    assert stray(node, mps) == ILLEGAL_ADDRESS


def test_mps_holds_a_process_to_its_memory_whatever_it_asks_for(node: Node, tmp_path: Path) -> None:
    limited = served_by(tmp_path, os.getpid()) | {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=2048M"}
    assert node.run("until_refused", str(256 << 20), **limited)["taken"] <= 2 << 30
    assert node.run("until_refused", str(1 << 30))["taken"] > 2 << 30


@pytest.mark.parametrize(
    ("percent", "sms"),
    [
        ("1", 8),
        ("10", 12),
        ("22.7", 28),
        ("23", 30),
        ("25", 32),
        ("30", 38),
        ("33", 42),
        ("50", 66),
        ("75", 98),
        ("100", 132),
    ],
)
def test_mps_grants_what_an_h200_grants(monkeypatch: pytest.MonkeyPatch, percent: str, sms: int) -> None:
    from cython_ext.simengine import granted_sms

    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", percent)
    assert granted_sms(132) == sms


def ready(node: Node, *arguments: str) -> subprocess.Popen[str]:
    process = node.start(*arguments)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_a_killed_process_gives_back_gpu_and_memory(node: Node) -> None:
    victim = ready(node, "hold", str(6 << 30))
    # Not even reaped by its parent: a zombie holds nothing.
    victim.send_signal(signal.SIGKILL)
    node.wait_until(lambda engine: not engine.contexts())
    assert node.engine().memory_used_bytes == 0
    assert node.run("until_refused", str(1 << 30))["taken"] == 7 << 30


def test_memory_of_the_dead_is_found_by_who_needs_it(node: Node) -> None:
    victim = ready(node, "hold", str(7 << 30))
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    assert node.run("basics")["free"] == 0


def test_a_death_inside_the_lock_is_survived(node: Node) -> None:
    survivor = ready(node, "hold", str(1 << 30))
    for deaths in range(1, 4):
        process = node.start("die_inside")
        process.wait()
        assert process.returncode == -signal.SIGKILL
        node.engine().refresh()
        assert node.engine().recoveries == deaths
    node.wait_until(lambda engine: len(engine.contexts()) == 1)
    assert node.engine().memory_used_bytes == (1 << 30) + node.engine().context_bytes
    assert survivor.poll() is None


def test_a_gpu_goes_on_while_a_process_is_stopped_inside_the_lock(node: Node) -> None:
    """It leaves, and is stopped still, until somebody continues it."""
    rounds = 3
    stopped = node.start("stop_inside", str(rounds))
    assert stopped.stdin is not None
    assert stopped.stdout is not None
    for _ in range(rounds):
        assert os.WIFSTOPPED(os.waitpid(stopped.pid, os.WUNTRACED)[1])
        node.run("basics")
        assert os.WIFSTOPPED(os.waitpid(stopped.pid, os.WUNTRACED)[1])
        stopped.send_signal(signal.SIGCONT)
        assert stopped.stdout.readline() == "left\n"
        stopped.stdin.write("on\n")
        stopped.stdin.flush()
    assert stopped.wait() == 0


@pytest.mark.slow
def test_killing_at_any_moment_leaves_a_gpu_that_works(node: Node) -> None:
    survivor = ready(node, "share", "0.05")
    assert survivor.stdin is not None
    survivor.stdin.write("go\n")
    survivor.stdin.flush()
    for n in range(12):
        victim = ready(node, "share", "0.01")
        assert victim.stdin is not None
        victim.stdin.write("go\n")
        victim.stdin.flush()
        begun, progress = node.engine().time_ns, (n + 1) * 2_000_000
        node.wait_until(lambda engine, end=begun + progress: engine.time_ns > end)
        victim.kill()
        victim.wait()
        node.wait_until(lambda engine: len(engine.contexts()) == 1)
    assert node.answer(survivor, "stop\n")["finished"] > 0
    node.wait_until(lambda engine: not engine.contexts())
    assert node.engine().memory_used_bytes == 0


def test_nvml_sees_devices_processes_and_load(node: Node) -> None:
    holder = ready(node, "hold", str(1 << 30))
    node.wait_until(lambda engine: engine.utilisation_ratio == 1)
    script = """
import json, pynvml as n
n.nvmlInit()
h = n.nvmlDeviceGetHandleByIndex(0)
info = n.nvmlDeviceGetMemoryInfo(h)
second = n.nvmlDeviceGetHandleByUUID(n.nvmlDeviceGetUUID(n.nvmlDeviceGetHandleByIndex(1)))
try:
    n.nvmlDeviceGetProcessUtilization(second, 0)
    idle = "samples"
except n.NVMLError_NotFound:
    idle = "not found"
try:
    n.nvmlDeviceGetMigMode(h)
    mig = "yes"
except n.NVMLError_NotSupported:
    mig = "not supported"
print(json.dumps([n.nvmlDeviceGetCount(), n.nvmlDeviceGetName(h), n.nvmlDeviceGetUUID(h), info.total, info.used,
    [[p.pid, p.usedGpuMemory] for p in n.nvmlDeviceGetComputeRunningProcesses(h)],
    n.nvmlDeviceGetUtilizationRates(h).gpu, [[s.pid, s.smUtil] for s in n.nvmlDeviceGetProcessUtilization(h, 0)],
    n.nvmlDeviceGetIndex(second), idle, mig, n.nvmlDeviceGetMemoryInfo(h, n.nvmlMemory_v2).free]))
"""
    import json
    import sys

    output = subprocess.run(
        [sys.executable, "-c", script],
        env=node.environment(CUDA_VISIBLE_DEVICES="1"),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    used = (1 << 30) + node.engine().context_bytes
    assert json.loads(output) == [
        2,
        "Simulated H200",
        node.uuids[0],
        8 << 30,
        used,
        [[holder.pid, used]],
        100,
        [[holder.pid, 100]],
        1,
        "not found",
        "not supported",
        (8 << 30) - used,
    ]
