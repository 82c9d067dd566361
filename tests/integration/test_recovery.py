"""Whatever of ours is killed comes back, and the processes go on. Real processes, real SIGKILL, simulated GPUs."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import psutil
import pytest

from tests.integration.node import SimulatedNode, eventually
from tests.integration.process import Child, attach_request, knock
from vgpu.ctl.programs import attachment
from vgpu.errors import VgpuError
from vgpu.protocol.messages import VgpuStatus
from vgpu.spec import VgpuChanges

GIB = 1 << 30


@pytest.fixture
def node() -> Iterator[SimulatedNode]:
    with SimulatedNode() as running:
        yield running


@pytest.fixture
def pair(node: SimulatedNode) -> tuple[VgpuStatus, list[Child]]:
    """A vGPU with a process that takes turns with another vGPU's."""
    vgpus = [node.create(sm_percent=30, memory_bytes="4G", name="first"), node.create(sm_percent=70, memory_bytes="4G")]
    children = [node.attach(vgpu.vgpu_id) for vgpu in vgpus]
    for child in children:
        goes_on(child)
    return vgpus[0], children


def other_works(node: SimulatedNode, vgpu: VgpuStatus) -> None:
    """The other vGPU's process uses the GPU, under one lease that has no end while it is alone."""

    def used_ns() -> int:
        with node.link() as link:
            return next(other.busy_ns for other in link.list() if other.vgpu_id != vgpu.vgpu_id)

    before = used_ns()
    eventually(lambda: used_ns() > before + 50_000_000, "the other one's work")


def goes_on(child: Child) -> None:
    """It is granted leases that it did not have before."""
    seen = len(child.epochs)
    eventually(lambda: len(child.epochs) >= seen + 3, "three more leases")
    assert child.popen.poll() is None


def test_a_killed_broker_is_replaced_and_its_processes_notice_nothing(
    node: SimulatedNode, pair: tuple[VgpuStatus, list[Child]]
) -> None:
    vgpu, children = pair
    assert vgpu.broker_pid is not None
    os.kill(vgpu.broker_pid, signal.SIGKILL)
    fresh = eventually(
        lambda: (now := node.reading(vgpu.vgpu_id)) and now.broker_pid not in {None, vgpu.broker_pid} and now,
        "another broker",
    )
    for child in children:
        goes_on(child)
        assert len(child.replies) == 1, "nobody had to attach again"
    # The new broker has found the process: it takes another slot for the next one, and notices the death of both.
    eventually(lambda: fresh.state != "starting" or node.reading(vgpu.vgpu_id), "its socket")
    second = eventually(lambda: quietly_attach(node, vgpu.vgpu_id), "a second process in the new broker")
    assert second.replies[0]["slot"] == 1
    for child in (children[0], second):
        child.kill()
    eventually(lambda: (now := node.reading(vgpu.vgpu_id)) and now.processes == 0, "both deaths being noticed")


def brokers_of(vgpu_id: str) -> list[int]:
    """The processes that have the vGPU's id on their command line."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if vgpu_id in process.cmdline():
                found.append(process.pid)
    return found


def quietly_attach(node: SimulatedNode, vgpu_id: str) -> Child | None:
    try:
        reply, descriptors = knock(node.paths.broker_socket(vgpu_id), attach_request(role="observer"))
    except (OSError, EOFError):
        return None
    for descriptor in descriptors:
        os.close(descriptor)
    assert reply["ok"]
    return node.attach(vgpu_id, use=False)


def test_a_killed_server_comes_back_with_its_vgpus(node: SimulatedNode, pair: tuple[VgpuStatus, list[Child]]) -> None:
    vgpu, children = pair
    before = node.reading(vgpu.vgpu_id)
    assert before is not None
    old = node.server_pid()
    os.kill(old, signal.SIGKILL)
    eventually(lambda: all(len(child.replies) == 2 for child in children), "both processes' second attach")
    for child in children:
        first, second = child.replies
        assert second["slot"] == first["slot"]
        assert second["generation"] == first["generation"] + 1
        goes_on(child)
    after = node.reading(vgpu.vgpu_id)
    assert after is not None
    assert (after.name, after.broker_pid, after.processes) == ("first", before.broker_pid, 1)
    assert after.created_unix_s == before.created_unix_s
    with node.link() as link:
        assert [gpu.restarts for gpu in link.gpus()] == [1]


@pytest.mark.slow
def test_a_vgpu_is_there_while_its_server_restarts(node: SimulatedNode) -> None:
    """Listed all the time; and what changes it waits for the server, instead of saying that there is none."""
    vgpu = node.create(sm_percent=30, memory_bytes="1G", name="kept")
    with node.link() as link:

        def gone() -> bool:
            [seen] = link.list()
            assert seen.vgpu_id == vgpu.vgpu_id
            return seen.state == "restarting" and "its server ended" in seen.reason

        os.kill(node.server_pid(), signal.SIGKILL)
        eventually(gone, "the death being noticed")
        assert link.set("kept", VgpuChanges(sm_percent=40.0)).spec.sm_percent == 40.0
        assert [gpu.restarts for gpu in link.gpus()] == [1]
        # One that the node has not heard of before its server dies is found all the same.
        server = node.server_pid()
        new = node.create(sm_percent=10, memory_bytes="1G")
        os.kill(server, signal.SIGKILL)
        assert link.remove(new.vgpu_id).vgpu_id == new.vgpu_id


@pytest.mark.slow
def test_epochs_never_go_back_over_a_restart(node: SimulatedNode, pair: tuple[VgpuStatus, list[Child]]) -> None:
    _, children = pair
    os.kill(node.server_pid(), signal.SIGKILL)
    eventually(lambda: all(len(child.replies) == 2 for child in children), "both processes' second attach")
    for child in children:
        goes_on(child)
        assert child.epochs == sorted(child.epochs)


@pytest.mark.slow
def test_a_lease_is_a_new_one_though_the_journal_is_not_written(node: SimulatedNode) -> None:
    """Every write fails, but for the first word of a server that begins. A process has done with epochs that the next
    server may not give out again: it would take no work for them, and alone on its GPU wait for ever."""
    child = node.attach(node.create(sm_percent=100, memory_bytes="1G").vgpu_id)
    with node.link() as link:
        uuid = link.gpus()[0].uuid
    with closing(sqlite3.connect(node.paths.journal(uuid))) as journal:
        journal.execute("CREATE TRIGGER full BEFORE DELETE ON vgpu BEGIN SELECT RAISE(ABORT, 'the disk is full'); END")
    for servers in (2, 3, 4):
        os.kill(node.server_pid(), signal.SIGKILL)
        eventually(lambda n=servers: len(child.replies) == n, "the attach to the next server")
        eventually(lambda n=servers: len(child.epochs) >= n, "a lease of it")
    assert child.epochs == sorted(set(child.epochs))


@pytest.mark.slow
def test_books_survive_a_restart(node: SimulatedNode, pair: tuple[VgpuStatus, list[Child]]) -> None:
    vgpu, children = pair
    eventually(lambda: (now := node.reading(vgpu.vgpu_id)) and now.tokens > 40, "some tokens in the books")

    def journalled() -> bool:
        with node.link() as link:
            uuid = link.gpus()[0].uuid
        with closing(sqlite3.connect(f"file:{node.paths.journal(uuid)}?mode=ro", uri=True)) as journal:
            rows = journal.execute("SELECT json_extract(book, '$.tokens') FROM vgpu").fetchall()
        return all(tokens is not None and tokens > 20 for (tokens,) in rows)

    eventually(journalled, "the books in the journal")
    os.kill(node.server_pid(), signal.SIGKILL)
    eventually(lambda: len(children[0].replies) == 2, "the second attach")
    now = node.reading(vgpu.vgpu_id)
    assert now is not None
    assert now.tokens > 20


def test_a_killed_supervisor_leaves_everything_running(
    node: SimulatedNode, pair: tuple[VgpuStatus, list[Child]]
) -> None:
    vgpu, children = pair
    server = node.server_pid()
    node.kill_node()
    for child in children:
        goes_on(child)
    with pytest.raises(VgpuError, match="vgpuctl serve"):
        node.link()
    node.start()
    assert node.server_pid() == server, "the next supervisor finds the server and keeps it"
    for child in children:
        goes_on(child)
        assert len(child.replies) == 1
    # ... and looks after it like its own.
    os.kill(server, signal.SIGKILL)
    eventually(lambda: all(len(child.replies) == 2 for child in children), "the server's restart")
    goes_on(children[0])
    assert node.reading(vgpu.vgpu_id) is not None


@pytest.mark.slow
def test_everything_of_ours_is_killed_at_once(node: SimulatedNode, pair: tuple[VgpuStatus, list[Child]]) -> None:
    """Nobody is left who has the activity page: the processes get a new one, at their old broker's address."""
    vgpu, children = pair
    with node.link() as link:
        brokers = [now.broker_pid for now in link.list() if now.broker_pid]
        server = link.gpus()[0].server_pid
    assert server is not None
    os.kill(node.supervisor.pid, signal.SIGSTOP)
    for pid in (server, *brokers, node.supervisor.pid):
        os.kill(pid, signal.SIGKILL)
    node.supervisor.wait()
    node.start()
    with node.link() as link:
        assert {now.vgpu_id for now in link.list()} >= {vgpu.vgpu_id}
    fresh = eventually(lambda: quietly_attach(node, vgpu.vgpu_id), "a broker")
    assert fresh.replies[0]["generation"] == children[0].replies[0]["generation"] + 1


@pytest.mark.slow
def test_an_orderly_stop_keeps_the_vgpus_for_the_next_node(
    node: SimulatedNode, pair: tuple[VgpuStatus, list[Child]]
) -> None:
    vgpu, children = pair
    idle = node.create(sm_percent=10, memory_bytes="1G", overcommit=True)
    assert idle.broker_pid is not None
    node.supervisor.terminate()
    assert node.supervisor.wait(30) == 0
    # The broker of the idle vGPU has nobody to stay for; the others wait for the next server.
    # ... and nobody starts another in its place.
    eventually(lambda: not brokers_of(idle.vgpu_id), "the end of the idle broker")
    assert Path(f"/proc/{vgpu.broker_pid}").exists()
    node.start()
    eventually(lambda: all(len(child.replies) == 2 for child in children), "the processes' second attach")
    for child in children:
        goes_on(child)
    with node.link() as link:
        assert {now.name for now in link.list()} == {"first", None}
        assert len(link.list()) == 3


@pytest.mark.slow
def test_after_an_orderly_stop_the_last_process_takes_the_broker_along(node: SimulatedNode) -> None:
    vgpu = node.create(sm_percent=30, memory_bytes="1G")
    child = node.attach(vgpu.vgpu_id)
    node.supervisor.terminate()
    assert node.supervisor.wait(30) == 0
    assert Path(f"/proc/{vgpu.broker_pid}").exists()
    child.kill()
    eventually(lambda: not brokers_of(vgpu.vgpu_id), "the end of the broker")


@pytest.mark.slow
def test_a_dead_holder_gives_its_lease_back(node: SimulatedNode, pair: tuple[VgpuStatus, list[Child]]) -> None:
    """Killed at any point of its turn, again and again: the other one always goes on."""
    vgpu, children = pair
    for _ in range(5):
        children[0].kill()
        other_works(node, vgpu)
        children[0] = node.attach(vgpu.vgpu_id)
        goes_on(children[0])
    eventually(lambda: (now := node.reading(vgpu.vgpu_id)) and now.processes == 1, "the dead being forgotten")


@pytest.mark.slow
def test_a_stopped_holder_gives_way(node: SimulatedNode, pair: tuple[VgpuStatus, list[Child]]) -> None:
    vgpu, children = pair
    os.kill(children[0].pid, signal.SIGSTOP)
    other_works(node, vgpu)
    os.kill(children[0].pid, signal.SIGCONT)
    goes_on(children[0])


def serves_anew(node: SimulatedNode, than_pid: int) -> bool:
    with node.link() as link:
        (gpu,) = link.gpus()
    return gpu.state == "serving" and gpu.server_pid not in {None, than_pid}


@pytest.mark.slow
@pytest.mark.parametrize("victims", ["server", "server broker"])
def test_programs_of_a_server_that_restarts_are_in_no_event_taken_for_outsiders(victims: str) -> None:
    """Until its broker is back nobody knows who is in a vGPU; if that died too, until its programs have knocked."""
    with SimulatedNode() as node:
        vgpu = node.create(sm_percent=30, memory_bytes="2G")
        command = [sys.executable, "-m", "vgpu.workload", "--seconds", "600"]
        environment = attachment([vgpu]).environment(node.environment)
        program = node.popen(command, env=environment, stdout=subprocess.DEVNULL)
        try:
            eventually(lambda: node.reading(vgpu.vgpu_id).memory_implicit_bytes, "its context is seen")
            with node.link() as watcher:
                notices = watcher.watch(snapshots=True, events=True, interval_ns=50_000_000)
                next(notices)
                killed = node.server_pid()
                for pid in [killed, vgpu.broker_pid] if "broker" in victims else [killed]:
                    os.kill(pid, signal.SIGKILL)
                outside, kinds = [], set()
                for notice in notices:
                    if notice.event is not None:
                        kinds.add(notice.event.kind)
                    if notice.snapshot is not None:
                        (gpu,) = notice.snapshot.gpus
                        outside += gpu.outside
                        known = [one for one in notice.snapshot.vgpus if one.processes == 1]
                        if gpu.state == "serving" and gpu.server_pid != killed and known and gpu.used_memory_bytes:
                            break
        finally:
            program.kill()
            program.wait()
    assert "outside" not in kinds
    assert outside == []


@pytest.mark.slow
def test_auto_mode_is_spatial_where_mps_starts_and_is_kept_over_a_restart() -> None:
    with SimulatedNode(mode="auto") as node:
        vgpu = node.create(sm_percent=30, memory_bytes="1G")
        assert vgpu.mode == "spatial"
        child = node.attach(vgpu.vgpu_id)
        with node.link() as link:
            assert link.gpus()[0].mode_reason.startswith("auto")
        killed = node.server_pid()
        os.kill(killed, signal.SIGKILL)
        eventually(lambda: len(child.replies) == 2, "the second attach")
        assert child.replies[1]["mode"] == "spatial"
        eventually(lambda: serves_anew(node, killed), "the node knows the next server")
        with node.link() as link:
            assert "processes that are attached" in link.gpus()[0].mode_reason


@pytest.mark.slow
def test_the_mode_is_kept_for_programs_whose_broker_died_with_the_server() -> None:
    """By ``serve`` the GPU would be in temporal mode: its MPS daemon would be stopped, and take them along."""
    with SimulatedNode() as node:
        with node.link() as link:
            link.set_gpu("0", mode="spatial")
        vgpu = node.create(sm_percent=30, memory_bytes="1G")
        child = node.attach(vgpu.vgpu_id, use=False)

        def journalled() -> bool:
            with node.link() as link:
                uuid = link.gpus()[0].uuid
            with closing(sqlite3.connect(f"file:{node.paths.journal(uuid)}?mode=ro", uri=True)) as journal:
                ((passage,),) = journal.execute("SELECT passage FROM vgpu").fetchall()
            return str(child.pid) in (passage or "")

        eventually(journalled, "its process in the journal")
        killed = node.server_pid()
        assert vgpu.broker_pid is not None
        for pid in (killed, vgpu.broker_pid):
            os.kill(pid, signal.SIGKILL)
        eventually(lambda: serves_anew(node, killed), "the node knows the next server")
        with node.link() as link:
            (gpu,) = link.gpus()
            assert gpu.mode == "spatial", gpu.mode_reason
            # Its broker is another one, whom nobody has told of it yet: it counts all the same.
            with pytest.raises(VgpuError, match="1 process attached"):
                link.set_gpu("0", mode="temporal")


def test_a_program_that_starts_while_server_and_broker_are_dead_waits_for_the_next_ones(node: SimulatedNode) -> None:
    vgpu = node.create(sm_percent=20, memory_bytes="1G")
    assert vgpu.broker_pid is not None
    server, supervisor = node.server_pid(), node.supervisor.pid
    os.kill(supervisor, signal.SIGSTOP)
    try:
        for pid in (server, vgpu.broker_pid):
            os.kill(pid, signal.SIGKILL)
        command = [sys.executable, "-m", "vgpu.workload", "--seconds", "0.05"]
        environment = attachment([vgpu]).environment(node.environment)
        program = node.popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        time.sleep(1.0)  # it asks meanwhile
    finally:
        os.kill(supervisor, signal.SIGCONT)
    _, said = program.communicate(timeout=60)
    assert (program.returncode, said) == (0, "")


@pytest.mark.timeout(300)
def test_removed_before_the_next_servers_page_came_a_program_finds_out(node: SimulatedNode) -> None:
    """Its grants page is of the server before, and says nothing of a removal; no broker is there to ask."""
    vgpu = node.create(sm_percent=20, memory_bytes="1G")
    environment = attachment([vgpu]).environment(node.environment)
    command = [sys.executable, "-m", "vgpu.workload", "--seconds", "600"]
    with node.popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as program:
        eventually(lambda: (found := node.reading(vgpu.vgpu_id)) and found.launches > 10, "it works")
        stopped = program.pid
        os.kill(stopped, signal.SIGSTOP)
        server = node.server_pid()
        os.kill(server, signal.SIGKILL)
        eventually(lambda: node.server_pid() != server and node.reading(vgpu.vgpu_id) is not None, "the next server")
        eventually(lambda: removed(node, vgpu.vgpu_id), "its removal")
        os.kill(stopped, signal.SIGCONT)
        _, said = program.communicate(timeout=120)
    assert program.returncode != 0
    assert f"{vgpu.vgpu_id} was removed while this program used it" in said


def removed(node: SimulatedNode, vgpu_id: str) -> bool:
    with suppress(VgpuError), node.link() as link:
        link.remove(vgpu_id, force=True)
    return node.reading(vgpu_id) is None and not node.paths.vgpu_dir(vgpu_id).exists()
