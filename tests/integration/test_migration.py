"""vGPUs that move between the GPUs of a simulated node, with programs that run on: real processes, the real hook."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing, suppress

import pytest

from tests.integration.fixtures import nodes, started
from tests.integration.node import SimulatedNode, eventually
from tests.integration.worker import GIB, Worker, on_gpu, state
from vgpu.errors import ErrorCode, VgpuError
from vgpu.node.link import ControlLink
from vgpu.protocol.messages import EventReading, GpuStatus, VgpuStatus
from vgpu.spec import VgpuChanges

shared, node = nodes(2)
workers = started("workers")


def gpus(node: SimulatedNode) -> tuple[GpuStatus, ...]:
    with node.link() as link:
        return link.gpus()


def plain(uuid: str) -> str:
    return uuid.removeprefix("GPU-").replace("-", "")


def remembered(node: SimulatedNode, vgpu: VgpuStatus) -> list[int]:
    """The GPUs in whose journals it is."""
    found = []
    for gpu in gpus(node):
        with closing(sqlite3.connect(f"file:{node.paths.journal(gpu.uuid)}?mode=ro", uri=True)) as journal:
            rows = journal.execute("SELECT count(*) FROM vgpu WHERE vgpu_id = ?", (vgpu.vgpu_id,)).fetchone()
        found += [gpu.index] * rows[0]
    return found


def vgpuctl(node: SimulatedNode, *arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "vgpu.ctl", *arguments]
    return subprocess.run(argv, env=node.environment, capture_output=True, text=True, check=False)


def test_programs_go_on_on_the_other_gpu(node: SimulatedNode, workers: list[Worker]) -> None:
    """There and back: their memory with them, and every place where they can ask says the same GPU."""
    vgpu = node.create("0", sm_percent=80, memory_bytes="100G", name="wanderer")
    workers += [Worker(node, vgpu, 30 * GIB), Worker(node, vgpu, 40 * GIB)]
    for worker in workers:
        worker.goes_on()
    uuids = [gpu.uuid for gpu in gpus(node)]
    pids = sorted(worker.popen.pid for worker in workers)
    with node.link() as link:
        for to in (1, 0, 1):
            moved = link.migrate("wanderer", uuids[to] if to else "0")
            assert (moved.vgpu_id, moved.gpu_index, moved.name) == (vgpu.vgpu_id, to, "wanderer")
            assert (moved.owner_uid, moved.spec, moved.broker_pid) == (vgpu.owner_uid, vgpu.spec, vgpu.broker_pid)
            for worker in workers:
                worker.goes_on()
                assert worker.asked("uuid()") == plain(uuids[to])
                assert worker.asked("now()") == [1, uuids[to], 0, [100 * GIB, pids]]
                assert worker.asked("nvml(first)") == [100 * GIB, pids], "by a handle of where it was"
            assert sum(on_gpu(node, 1 - to).values()) == 0
            assert sum(on_gpu(node, to).values()) > 70 * GIB
            assert remembered(node, vgpu) == [to]
            here, there = gpus(node)[to], gpus(node)[1 - to]
            assert (here.vgpus, here.processes, here.guaranteed_memory_bytes) == (1, 2, 100 * GIB)
            assert (there.vgpus, there.processes, there.guaranteed_memory_bytes) == (0, 0, 0)
    assert state(node, vgpu) in {"running", "waiting"}


BUSY = """
import sys, threading
from ctypes import byref, c_float, c_size_t, c_uint64, c_void_p
from tests.hook.app import App
app = App()
context = c_void_p()
app.call("cuCtxGetCurrent", byref(context))
count = [0] * 4
def new(name, *arguments):
    made = c_void_p()
    app.call(name, byref(made), *arguments)
    return made
def work(n):
    app.call("cuCtxSetCurrent", context)
    first, second = app.new_stream(1), app.new_stream(n % 2)
    before, after = new("cuEventCreate", 0), new("cuEventCreate", 0)
    kernels = [app.kernel(0.3, first), app.kernel(0.2, second), app.kernel(0.1)]
    graph, block, ms = c_void_p(), app.allocate(8 << 20), c_float()
    app.call("cuStreamBeginCapture_v2", first, 1)
    kernels[0].launch()
    app.call("cuStreamEndCapture", first, byref(graph))
    executable = new("cuGraphInstantiateWithFlags", graph, c_uint64(0))
    app.call("cuMemsetD8_v2", c_uint64(block), n, c_size_t(4096))
    while True:
        app.call("cuEventRecord", before, first)
        kernels[0].launch()
        app.call("cuGraphLaunch", executable, first)
        app.call("cuEventRecord", after, first)
        app.call("cuStreamWaitEvent", second, after, 0)
        taken = c_uint64()
        app.call("cuMemAllocAsync", byref(taken), c_size_t(4 << 20), second)
        kernels[1].launch()
        app.call("cuMemFreeAsync", taken, second)
        if n % 2:
            kernels[2].launch()
        app.call(*([("cuCtxSynchronize",), ("cuStreamSynchronize", second)][n % 2]))
        app.call("cuEventElapsedTime", byref(ms), before, after)
        assert ms.value > 0.5
        assert app.read(block, 4096) == bytes([n]) * 4096
        count[n] += 1
for n in range(4):
    threading.Thread(target=work, args=(n,), daemon=True).start()
print("started", flush=True)
for _ in sys.stdin:
    print(*count, flush=True)
"""


@pytest.mark.slow
def test_whatever_a_program_is_doing(node: SimulatedNode) -> None:
    """Four threads with streams that wait for each other, graphs, pools and clocks on the GPU, beside another."""
    vgpus = [node.create(str(gpu), sm_percent=50, memory_bytes="20G") for gpu in (0, 1)]
    programs = [node.program(vgpu, BUSY) for vgpu in vgpus]

    def counts(program: subprocess.Popen[str]) -> list[int]:
        assert program.stdin is not None
        assert program.stdout is not None
        program.stdin.write("\n")
        program.stdin.flush()
        return [int(count) for count in program.stdout.readline().split()]

    def works(program: subprocess.Popen[str], before: list[int]) -> bool:
        return all(now > then for now, then in zip(counts(program), before, strict=True))

    try:
        for program in programs:
            assert program.stdout is not None
            assert program.stdout.readline() == "started\n"
        for to in ("1", "0", "1", "0"):
            for program in programs:
                before = counts(program)
                eventually(lambda program=program, before=before: works(program, before), "all its threads go on")
            with node.link() as link:
                link.migrate(vgpus[0].vgpu_id, to)
    finally:
        for program in programs:
            program.kill()
            program.communicate()


def test_its_limits_hold_there(node: SimulatedNode, workers: list[Worker]) -> None:
    """Its memory's limit, and its share of time beside others: leases are the other GPU's."""
    vgpu = node.create("0", sm_percent=30, memory_bytes="20G")
    other = node.create("1", sm_percent=70, memory_bytes="20G")
    workers += [Worker(node, vgpu, 10 * GIB), Worker(node, other, GIB)]
    with node.link() as link:
        before = link.migrate(vgpu.vgpu_id, "1")
        assert workers[0].asked(f"allocation({8 * GIB})") == 0
        assert workers[0].asked(f"allocation({4 * GIB})") == 2
        for worker in workers:
            worker.goes_on()

        def has_leases() -> bool:
            after = node.reading(vgpu.vgpu_id)
            return after is not None and after.tokens > before.tokens

        eventually(has_leases, "a lease of it has ended there")
        assert eventually(
            lambda: (now := node.reading(vgpu.vgpu_id)) and now.memory_used_bytes > 18 * GIB and now.held_ratio < 0.6,
            "it takes turns there",
        )
        link.set(vgpu.vgpu_id, VgpuChanges.parse(memory_bytes="40G"))
        eventually(lambda: workers[0].asked(f"allocation({4 * GIB})") == 0, "it has more")


@pytest.mark.slow
def test_new_programs_begin_where_it_is(node: SimulatedNode, workers: list[Worker]) -> None:
    """Those of ``exec``, and those that a program starts which has been there since before."""
    vgpu = node.create("0", sm_percent=50, memory_bytes="20G")
    workers.append(Worker(node, vgpu, GIB))
    uuids = [plain(gpu.uuid) for gpu in gpus(node)]
    assert workers[0].asked("child()") == uuids[0]
    with node.link() as link:
        link.migrate(vgpu.vgpu_id, "1")
    assert workers[0].asked("child()") == uuids[1]
    body = "import sys; from tests.integration.worker import PROGRAM; sys.argv[1:] = [str(1 << 30)]; exec(PROGRAM)"
    ran = subprocess.run(
        [sys.executable, "-m", "vgpu.ctl", "exec", vgpu.vgpu_id, "--", sys.executable, "-c", body],
        env=node.environment,
        input="uuid()\n",
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stdout.split() == ["started", f'"{uuids[1]}"'], ran.stderr


def test_who_only_looks_sees_where_it_is(node: SimulatedNode) -> None:
    """NVML without cuInit: an observer."""
    vgpu = node.create("0", sm_percent=50, memory_bytes="20G")
    body = """
import pynvml, sys
pynvml.nvmlInit()
for _ in sys.stdin:
    print(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(0)), flush=True)
"""
    looks = node.program(vgpu, body)
    assert looks.stdin is not None
    assert looks.stdout is not None
    seen = []
    try:
        with node.link() as link:
            for to in ("0", "1", "0"):
                if to != str(link.inspect(vgpu.vgpu_id).gpu.index):
                    link.migrate(vgpu.vgpu_id, to)
                looks.stdin.write("\n")
                looks.stdin.flush()
                seen.append(looks.stdout.readline().strip())
    finally:
        looks.kill()
        looks.communicate()
    assert seen == [gpus(node)[to].uuid for to in (0, 1, 0)]


def test_a_suspended_one_stays_suspended(node: SimulatedNode, workers: list[Worker]) -> None:
    """And need not fit before it is resumed; its programs are then where it is, however often it moved."""
    vgpu = node.create("0", sm_percent=80, memory_bytes="100G")
    workers.append(Worker(node, vgpu, 30 * GIB))
    workers[0].goes_on()
    full = node.create("1", sm_percent=80, memory_bytes="100G")
    with node.link() as link:
        link.suspend(vgpu.vgpu_id)
        for to in (1, 0, 1):
            moved = link.migrate(vgpu.vgpu_id, str(to))
            assert (moved.state, moved.gpu_index) == ("suspended", to)
            assert remembered(node, vgpu) == [to]
        with pytest.raises(VgpuError) as refused:
            link.resume(vgpu.vgpu_id)
        assert refused.value.code is ErrorCode.NO_ROOM
        assert f"vgpuctl set {vgpu.vgpu_id} --sm 20 --mem " in refused.value.hint
        assert refused.value.hint.endswith(f", then vgpuctl resume {vgpu.vgpu_id}")
        assert workers[0].stands_still()
        link.remove(full.vgpu_id)
        assert link.resume(vgpu.vgpu_id).gpu_index == 1
        workers[0].goes_on()
        assert sum(on_gpu(node, 1).values()) > 30 * GIB
        assert link.suspend(vgpu.vgpu_id).state == "suspended"
        assert link.resume(vgpu.vgpu_id).state != "suspended"
        workers[0].goes_on()


def test_one_without_programs_simply_moves(node: SimulatedNode, workers: list[Worker]) -> None:
    vgpu = node.create("0", sm_percent=30, memory_bytes="8G")
    with node.link() as link:
        assert link.migrate(vgpu.vgpu_id, "1").state == "idle"
    workers.append(Worker(node, vgpu, GIB))
    workers[0].goes_on()
    assert on_gpu(node, 1)


@pytest.mark.slow
def test_what_is_refused_changes_nothing(node: SimulatedNode, workers: list[Worker]) -> None:
    vgpu = node.create("0", sm_percent=60, memory_bytes="80G", group="team")
    workers.append(Worker(node, vgpu, 8 * GIB))
    node.create("1", sm_percent=60, memory_bytes="80G", name="there")
    with node.link() as link:

        def refused(reference: str, to: str) -> VgpuError:
            with pytest.raises(VgpuError) as error:
                link.migrate(reference, to)
            workers[0].goes_on()
            assert remembered(node, vgpu) == [0]
            return error.value

        no_room = refused(vgpu.vgpu_id, "1")
        assert no_room.code is ErrorCode.NO_ROOM
        assert "80 GiB of memory asked for" in no_room.message
        assert no_room.hint.endswith(f", then vgpuctl migrate {vgpu.vgpu_id} --gpu 1")
        assert refused(vgpu.vgpu_id, "0").message == f"{vgpu.vgpu_id} is on GPU 0 already"
        assert refused(vgpu.vgpu_id, "7").code is ErrorCode.NOT_FOUND
        assert refused(vgpu.vgpu_id, "auto").code is ErrorCode.INVALID
        assert refused("nobody", "1").code is ErrorCode.NOT_FOUND
        link.remove("there")
        node.create("1", sm_percent=10, memory_bytes="1G", group="team", name="mate")
        assert "group 'team'" in refused(vgpu.vgpu_id, "1").message
        link.remove("mate")
        link.set_gpu("1", mode="spatial")
        assert refused(vgpu.vgpu_id, "1").code is ErrorCode.MODE
        spatial = node.create("1", sm_percent=10, memory_bytes="1G")
        assert refused(spatial.vgpu_id, "0").code is ErrorCode.MODE


def test_one_that_owns_more_than_it_is_promised_does_not_set_out_in_vain(
    node: SimulatedNode, workers: list[Worker]
) -> None:
    vgpu = node.create("0", sm_percent=30, memory_bytes="60G")
    workers.append(Worker(node, vgpu, 40 * GIB))
    node.create("1", sm_percent=30, memory_bytes="120G")
    with node.link() as link:
        for memory in ("60G", "20G"):
            link.set(vgpu.vgpu_id, VgpuChanges.parse(memory_bytes=memory))
            with pytest.raises(VgpuError) as refused:
                link.migrate(vgpu.vgpu_id, "1")
            assert refused.value.code is ErrorCode.NO_ROOM
            assert "--mem" not in refused.value.hint  # what fits there is less than it has
            workers[0].goes_on()
            assert remembered(node, vgpu) == [0]


def test_a_program_of_two_vgpus_holds_both_where_they_are(node: SimulatedNode) -> None:
    two = [node.create(str(gpu), sm_percent=30, memory_bytes="8G") for gpu in (0, 1)]
    body = "import sys; from tests.hook.app import App; App(); print('started', flush=True); sys.stdin.readline()"
    program = node.program(two, body)
    try:
        assert program.stdout is not None
        assert program.stdout.readline() == "started\n"
        with node.link() as link, pytest.raises(VgpuError) as refused:
            link.migrate(two[0].vgpu_id, "1")
        assert refused.value.code is ErrorCode.IN_USE
        assert two[1].vgpu_id in refused.value.message
    finally:
        program.kill()
        program.communicate()


def test_the_command(node: SimulatedNode) -> None:
    vgpu = node.create("0", sm_percent=30, memory_bytes="4G", name="mover")
    told = vgpuctl(node, "migrate", "mover", "--gpu", "1", "-o", "json")
    assert told.returncode == 0, told.stderr
    reading = json.loads(told.stdout)
    assert (reading["vgpu_id"], reading["gpu_index"], reading["state"]) == (vgpu.vgpu_id, 1, "idle")
    again = vgpuctl(node, "migrate", "mover", "--gpu", "1")
    assert (again.returncode, again.stderr) == (2, f"vgpuctl: {vgpu.vgpu_id} is on GPU 1 already\n")
    assert "mover" in vgpuctl(node, "migrate", "mover", "--gpu", "0").stdout


def test_whoever_watches_hears_of_it(node: SimulatedNode) -> None:
    vgpu = node.create("0", sm_percent=30, memory_bytes="4G")
    heard: list[EventReading] = []
    with node.link() as watching, node.link() as link:
        notices = watching.watch(events=True)
        next(notices)  # it is heard from now on

        def hear() -> None:
            heard.append(next(n.event for n in notices if n.event is not None and n.event.kind == "migrated"))

        thread = threading.Thread(target=hear)
        thread.start()
        link.migrate(vgpu.vgpu_id, "1")
        thread.join()
    assert heard[0].text == f"{vgpu.vgpu_id} migrated from GPU 0 to GPU 1: 0 programs"
    assert (heard[0].gpu_index, heard[0].vgpu_id) == (1, vgpu.vgpu_id)


def pid_of(node: SimulatedNode, who: str, vgpu: VgpuStatus, worker: Worker) -> int:
    match who:
        case "source":
            return node.server_pid(vgpu.gpu_index)
        case "target":
            return node.server_pid(1 - vgpu.gpu_index)
        case "broker":
            reading = eventually(
                lambda: (now := node.reading(vgpu.vgpu_id)) and now.broker_pid and now, "a broker runs"
            )
            assert reading.broker_pid
            return reading.broker_pid
        case "program":
            return worker.popen.pid
        case _:
            return node.supervisor.pid


def books(node: SimulatedNode, gpu: int) -> tuple[int, int, int]:
    reading = gpus(node)[gpu]
    return reading.vgpus, reading.processes, reading.guaranteed_memory_bytes


def finished(node: SimulatedNode, vgpu: VgpuStatus, to: int) -> bool:
    """``migrate`` again, or ``resume``, whichever the command says."""
    try:
        with node.link() as link:
            moved = link.migrate(vgpu.vgpu_id, str(to))
            if moved.state == "suspended":
                moved = link.resume(vgpu.vgpu_id)
    except VgpuError as error:
        if "vgpuctl resume" in error.hint:
            with suppress(VgpuError), node.link() as link:
                link.resume(vgpu.vgpu_id)
        return error.message.endswith("already") and state(node, vgpu) not in {"suspended", "moving", "restarting"}
    return moved.gpu_index == to and moved.state != "moving"


def asks(node: SimulatedNode, vgpu: VgpuStatus, to: int) -> threading.Thread:
    """Somebody who has it migrated, and may get no answer."""

    def ask() -> None:
        with suppress(VgpuError), node.link() as link:
            link.migrate(vgpu.vgpu_id, str(to))

    thread = threading.Thread(target=ask)
    thread.start()
    return thread


def asks_by_command(node: SimulatedNode, vgpu: VgpuStatus, to: int) -> subprocess.Popen[str]:
    """So does ``vgpuctl``, about when this returns: it takes a while to start."""
    argv = [sys.executable, "-m", "vgpu.ctl", "migrate", vgpu.vgpu_id, "--gpu", str(to)]
    pipe = subprocess.PIPE
    command = node.popen(argv, stderr=pipe, stdout=pipe)
    time.sleep(0.3)
    return command


ONE = ("source", "target", "broker", "program", "node", "vgpuctl")
SEVERAL = ("source broker", "target broker", "node source target broker")
ALWAYS, MOMENTS = (3,), (0, 2, 4, 6)
"""Twentieths of a second after it was asked for: in every run, and else."""
BOUNDED_S = 90.0
"""A server that dies again and again is started after 5 s, waits 10 s for a broker that may come back, and 12 s for a
new one; whoever asks meanwhile asks anew."""


@pytest.mark.parametrize(
    ("victims", "moments"),
    [
        *((victim, ALWAYS) for victim in ONE),
        *(pytest.param(victim, MOMENTS, marks=pytest.mark.slow) for victim in ONE),
        *(pytest.param(victims, ALWAYS + MOMENTS, marks=pytest.mark.slow) for victims in SEVERAL),
    ],
)
def test_killed_at_any_moment_it_is_in_one_place_and_can_be_finished(
    node: SimulatedNode, workers: list[Worker], victims: str, moments: tuple[int, ...]
) -> None:
    """The program that is killed is one of two. Whoever asks does so over a link, unless it is the one that dies."""
    vgpu = node.create("0", sm_percent=50, memory_bytes="20G")
    workers += [Worker(node, vgpu, 2 * GIB), Worker(node, vgpu, 3 * GIB)]
    at = 0
    for twentieths in moments:
        for worker in workers:
            worker.goes_on()
        to, now = 1 - at, eventually(lambda: node.reading(vgpu.vgpu_id), "the vGPU is known")
        pids = [pid_of(node, who, now, workers[0]) for who in victims.split() if who != "vgpuctl"]
        asking = asks_by_command(node, vgpu, to) if victims == "vgpuctl" else asks(node, vgpu, to)
        time.sleep(twentieths / 20)  # the moment is what varies
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if isinstance(asking, subprocess.Popen):
            asking.kill()
        if "program" in victims:
            workers.pop(0).end()
        if "node" in victims:
            node.supervisor.wait()
            node.start()
        if isinstance(asking, subprocess.Popen):
            asking.communicate()
        else:
            asking.join()
        eventually(lambda: node.reading(vgpu.vgpu_id), "the vGPU is known")
        eventually(lambda to=to: finished(node, vgpu, to), "it has moved", BOUNDED_S)
        at = to
        for worker in workers:
            worker.goes_on()
            assert worker.asked("uuid()") == plain(gpus(node)[at].uuid)
        eventually(lambda at=at: remembered(node, vgpu) == [at], "the other GPU has forgotten it")
        eventually(lambda at=at: books(node, at) == (1, len(workers), 20 * GIB), "it is in the books here")
        eventually(lambda at=at: books(node, 1 - at) == (0, 0, 0), "and in none there")
        assert sum(on_gpu(node, 1 - at).values()) == 0
        if "program" in victims:
            workers.insert(0, Worker(node, vgpu, 2 * GIB))
    reading = node.reading(vgpu.vgpu_id)
    assert reading is not None
    assert reading.memory_used_bytes > 5 * GIB
    assert reading.memory_used_bytes == reading.memory_implicit_bytes + 5 * GIB


@pytest.mark.slow
def test_it_is_there_at_every_moment(node: SimulatedNode) -> None:
    """Removed in the middle of its way it said "no vGPU", and went on to live on the other GPU."""
    vgpu = node.create("0", sm_percent=10, memory_bytes="1G")
    moved = threading.Event()
    found: list[str] = []

    def look() -> None:
        with node.link() as link:
            while not moved.is_set():
                if vgpu.vgpu_id not in [one.vgpu_id for one in link.list()]:
                    found.append("not listed")
                try:
                    link.inspect(vgpu.vgpu_id)
                except VgpuError as error:
                    if error.code is ErrorCode.NOT_FOUND:
                        found.append(f"not found: {error}")

    lookers = [threading.Thread(target=look) for _ in range(3)]
    for looker in lookers:
        looker.start()
    try:
        with node.link() as link:
            for i in range(30):
                eventually(lambda to=str(1 - i % 2): moves(link, vgpu.vgpu_id, to), "it moves")
    finally:
        moved.set()
        for looker in lookers:
            looker.join()
    assert found == []
    with node.link() as link:
        link.remove(vgpu.vgpu_id, force=True)
    assert node.reading(vgpu.vgpu_id) is None


def moves(link: ControlLink, vgpu_id: str, to: str) -> bool:
    """Whether it is there; where it came from may not have let it go yet."""
    try:
        return link.migrate(vgpu_id, to).gpu_index == int(to)
    except VgpuError as error:
        if error.code is not ErrorCode.UNAVAILABLE:
            raise
        return False
