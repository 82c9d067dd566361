"""Processes of several PID namespaces on one simulated GPU, forks, and a state that any of them has scribbled over."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from cython_ext.simengine import Engine
from tests.sim.conftest import Node

UNSHARE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")

namespaces = pytest.mark.skipif(
    subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode != 0,
    reason="no PID namespaces for this user",
)


def child_of(process: subprocess.Popen[str]) -> int:
    """The program that ``unshare`` runs, by the pid that it has here."""
    return int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def tell(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdin is not None
    process.stdin.write(text)
    process.stdin.flush()


@namespaces
def test_programs_that_are_all_process_1_share_a_gpu(node: Node) -> None:
    programs = [node.start("share", "5", within=UNSHARE) for _ in range(3)]
    for program in programs:
        assert line(program) == "ready\n"
    for program in programs:
        tell(program, "go\n")
    node.wait_until(lambda engine: len(engine.contexts()) == 3)
    assert {pid for pid, *_ in node.engine().contexts().values()} == {child_of(program) for program in programs}
    begun = node.engine().time_ns
    node.wait_until(lambda engine: engine.time_ns > begun + 1_000_000_000)
    finished = [node.answer(program, "stop\n")["finished"] for program in programs]
    assert min(finished) > 0, "how much each had depends on the host, which runs them in turns, too"


@namespaces
def test_one_namespace_sees_nothing_of_another_but_its_memory(node: Node) -> None:
    holder = node.start("hold", str(1 << 30), within=UNSHARE)
    assert line(holder) == "ready\n"
    listing = "tests.sim.listing"
    outside = node.answer(node.start(module=listing))
    inside = node.answer(node.start(module=listing, within=UNSHARE))
    used = (1 << 30) + node.engine().context_bytes
    assert outside == {"used": used, "processes": [[child_of(holder), used]]}
    assert inside == {"used": used, "processes": []}


@namespaces
def test_a_killed_program_of_another_namespace_gives_everything_back(node: Node) -> None:
    victim = node.start("hold", str(6 << 30), within=UNSHARE)
    neighbour = node.start("hold", str(1 << 30), within=UNSHARE)
    assert line(victim) == line(neighbour) == "ready\n"
    os.kill(child_of(victim), signal.SIGKILL)
    node.wait_until(lambda engine: len(engine.contexts()) == 1)
    assert node.engine().memory_used_bytes == (1 << 30) + node.engine().context_bytes
    assert node.run("until_refused", str(1 << 30))["taken"] == 6 << 30


@namespaces
def test_a_death_inside_the_lock_is_seen_from_another_namespace(node: Node) -> None:
    survivor = node.start("hold", str(1 << 30), within=UNSHARE)
    assert line(survivor) == "ready\n"
    for deaths in range(1, 4):
        node.start("die_inside", within=UNSHARE).wait()
        node.engine().refresh()
        assert node.engine().recoveries == deaths
    assert len(node.engine().contexts()) == 1
    assert survivor.poll() is None


@namespaces
def test_a_gpu_goes_on_while_process_1_of_another_namespace_is_stopped_inside_the_lock(node: Node) -> None:
    program = node.start("continued_inside", within=UNSHARE)
    assert line(program) == "inside\n"
    pid = child_of(program)
    os.kill(pid, signal.SIGSTOP)
    assert node.run("basics")["free"] == 0
    for _ in range(6000):
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
            break
        time.sleep(0.01)
    else:
        raise AssertionError("it is not stopped again")
    os.kill(pid, signal.SIGCONT)
    assert line(program) == "left\n"


@namespaces
def test_a_program_of_another_namespace_is_checkpointed_by_the_pid_seen_here(node: Node) -> None:
    program = node.start("wanderer", within=UNSHARE)
    assert line(program) == "ready\n"
    swap = f"{node.uuids[0]}={node.uuids[1]},{node.uuids[1]}={node.uuids[0]}"
    assert node.run("remap", str(child_of(program)), swap) == {"codes": [0], "state": 1}  # locked
    tell(program, "\n")
    assert line(program) == "told\n"
    [[uuid, intact, *_]] = node.answer(program, "")["told"]
    assert (uuid, intact) == (node.uuids[1].removeprefix("GPU-").replace("-", ""), True)


def test_a_child_does_not_keep_its_dead_parents_context(node: Node) -> None:
    parent = node.start("hold_with_child", str(1 << 30))
    child = int(line(parent))
    try:
        assert line(parent) == "ready\n"
        parent.kill()
        parent.wait()
        node.wait_until(lambda engine: not engine.contexts())
        os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_program_that_becomes_another_gives_everything_back(node: Node) -> None:
    program = node.start("become", str(6 << 30))
    assert line(program) == "ready\n"
    node.wait_until(lambda engine: not engine.contexts())
    assert program.poll() is None
    assert node.answer(program, "")["taken"] == 7 << 30


def test_a_program_that_closes_every_descriptor_harms_only_itself(node: Node) -> None:
    neighbour = node.start("hold", str(1 << 30))
    assert line(neighbour) == "ready\n"
    answer = node.run("close_all")
    assert answer["result"] in {0, 709}
    node.wait_until(lambda engine: len(engine.contexts()) == 1)
    assert neighbour.poll() is None


HEADER = 256  # magic, version and sizes: a file without these is not mapped


@pytest.mark.parametrize("seed", range(6))
def test_a_scribbled_state_crashes_no_reader(node: Node, seed: int) -> None:
    """NVML in this very process: as in the GPU Server."""
    chance = random.Random(seed)
    holder = node.start("hold", str(1 << 30))
    assert line(holder) == "ready\n"
    reader = node.start(module="tests.sim.listing", COUNT="50")
    assert line(reader) == "ready\n"
    path = node.folder / "gpu0"
    size = path.stat().st_size
    noise = [b"\xff" * 4096, b"\x01" * 4096, bytes(4096), chance.randbytes(4096)][seed % 4]
    with path.open("r+b") as file:
        begin = HEADER if seed < 4 else 0
        for at in range(begin, min(size, begin + (1 << 20)), 4096):
            file.seek(at)
            file.write(noise if seed != 5 else chance.randbytes(4096))
    holder.kill()
    assert reader.communicate("go\n", timeout=90)[0]
    assert reader.returncode == 0


def test_a_gpu_from_before_a_boot_goes_on(node: Node) -> None:
    """CLOCK_MONOTONIC began anew, and the file lies where it survived."""
    engine = node.engine()
    engine.advance(engine.time_ns + 10**15)
    engine.refresh()
    assert node.run("basics")["free"] == 0


def test_there_is_a_participant_for_each_engine_and_none_after_it(node: Node) -> None:
    for _ in range(1100):  # more than there are at a time
        Engine(node.folder).refresh()
