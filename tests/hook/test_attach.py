"""Attaching: what a process gets at cuInit, and the one line it gets when it cannot be had."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cython_ext.readings import PageMode, SlotState
from tests.hook.stage import GIB, Stage, StagedVgpu, eventually
from vgpu.protocol.peer import start_time

INIT = """
import ctypes
print(ctypes.CDLL("libcuda.so.1").cuInit(0))
"""
NO_DEVICE = 100
OPERATING_SYSTEM = 304
MPS_CONNECTION_FAILED = 805


def refused(stage: Stage, environment: dict[str, str]) -> tuple[int, str]:
    """CUresult of cuInit, and the one line on stderr."""
    ran = stage.run(INIT, environment)
    (line,) = ran.stderr.splitlines()
    assert line.startswith("vgpu: ")
    return int(ran.stdout), line


def test_attaches(stage: Stage) -> None:
    vgpu = stage.vgpu()
    program = stage.start(INIT + "input()", stage.environment(vgpu))
    assert stage.heard(program) == "0"
    slot = vgpu.slot()
    assert (slot.state, slot.pid) == (SlotState.ACTIVE, program.pid)
    request = vgpu.requests[0]
    assert (request["op"], request["role"], request["version"], request["slot"]) == ("attach", "process", 1, -1)
    open_files = {str(f.readlink()) for f in Path(f"/proc/{program.pid}/fd").iterdir()}
    assert not [f for f in open_files if "memfd" in f or "socket" in f]
    stage.tell(program)
    eventually(lambda: vgpu.slot().state == SlotState.DEAD, "the relay saw the process end")


def test_each_broker_hears_of_all_vgpus_of_a_process_that_has_several() -> None:
    stage = Stage(gpus=2)
    try:
        one, other = stage.vgpu(0), stage.vgpu(1)
        assert stage.run(INIT, stage.environment(one, other)).stdout == "0\n"
        assert stage.run(INIT, stage.environment(one)).stdout == "0\n"
        both = f"{one.vgpu_id},{other.vgpu_id}"
        assert [vgpu["vgpus"] for vgpu in one.requests] == [both, ""]
        assert [vgpu["vgpus"] for vgpu in other.requests] == [both]
    finally:
        stage.close()


def test_who_asks_again_after_one_of_its_vgpus_was_refused_has_one_slot_in_the_other() -> None:
    """Programs call cuInit as often as they like: a library each, or one in a loop until it succeeds."""
    stage = Stage(gpus=2)
    try:
        one, other = stage.vgpu(0), stage.vgpu(1)
        other.refusal = "not now"
        program = stage.start(
            """
            import ctypes, sys
            cuda = ctypes.CDLL("libcuda.so.1")
            for line in sys.stdin:
                print(*{cuda.cuInit(0) for _ in range(5)}, flush=True)
            """,
            stage.environment(one, other),
        )
        stage.tell(program)
        assert stage.heard(program) == str(NO_DEVICE)
        assert one.slot().state == SlotState.ACTIVE
        other.refusal = None
        stage.tell(program)
        assert stage.heard(program) == "0"
        assert [vgpu.slot().state for vgpu in (one, other)] == [SlotState.ACTIVE] * 2
    finally:
        stage.close()


CHANGES = """
import ctypes, os, sys
cuda = ctypes.CDLL("libcuda.so.1")
for line in sys.stdin:
    _, _, vgpu_id = line.strip().partition("=")
    if vgpu_id:
        os.environ["VGPU_ID"] = vgpu_id
    elif "VGPU_ID" in os.environ:
        del os.environ["VGPU_ID"]
    print(cuda.cuInit(0), flush=True)
"""


class TestVgpuIdChanges:
    """Between two calls of cuInit, as in a notebook that tries again."""

    @pytest.fixture
    def stage(self) -> Iterator[Stage]:
        stage = Stage(gpus=3)
        yield stage
        stage.close()

    def asks(self, stage: Stage, program: subprocess.Popen[str], *vgpu_ids: str) -> int:
        """What cuInit answers under these ids."""
        stage.tell(program, "=" + ",".join(vgpu_ids))
        return int(stage.heard(program))

    def test_where_nobody_had_admitted_it_the_new_one_counts(self, stage: Stage) -> None:
        vgpu = stage.vgpu()
        program = stage.start(CHANGES, stage.environment(vgpu))
        for wrong in ("vgpu-0000beef", f"vgpu-0000beef,{vgpu.vgpu_id}", "mine", "x" * 300):
            assert self.asks(stage, program, wrong) != 0
        assert self.asks(stage, program, vgpu.vgpu_id) == 0
        assert [request["vgpus"] for request in vgpu.requests] == [""]
        assert vgpu.slot().state == SlotState.ACTIVE

    @pytest.mark.parametrize("then", ["other", "other,one", "one", "one,third", ""])
    def test_who_was_admitted_under_a_list_is_told_to_start_anew_under_another(self, stage: Stage, then: str) -> None:
        """Its slot in the first would stay, and its gate be overwritten under the thread that runs there."""
        vgpus = {name: stage.vgpu(gpu) for gpu, name in enumerate(("one", "other", "third"))}
        one, other, third = vgpus.values()
        other.refusal = "not now"
        program = stage.start(CHANGES, stage.environment(one, other))
        assert self.asks(stage, program, one.vgpu_id, other.vgpu_id) == NO_DEVICE
        other.refusal = None
        ids = [vgpus[name].vgpu_id for name in then.split(",") if name]
        assert [self.asks(stage, program, *ids) for _ in range(2)] == [NO_DEVICE] * 2
        assert (third.slots(), other.slots()) == ([], [])
        assert one.slot().state == SlotState.ACTIVE
        assert self.asks(stage, program, one.vgpu_id, other.vgpu_id) == 0
        assert [vgpu.slot().state for vgpu in (one, other)] == [SlotState.ACTIVE] * 2
        assert self.asks(stage, program, third.vgpu_id) == 0, "it is for programs that it starts from now on"
        _, told = program.communicate()
        _, *lines = told.splitlines()
        assert len(lines) == 2
        assert all(one.vgpu_id in line and "start it again" in line for line in lines), told

    def test_nor_where_it_was_the_driver_that_failed(self, stage: Stage, tmp_path: Path) -> None:
        vgpu, other = stage.vgpu(mode=PageMode.SPATIAL), stage.vgpu(gpu=1)
        vgpu.reply_changes = {"mps_pipe_directory": str(tmp_path), "mps_active_thread_percentage": "30.31"}
        program = stage.start(CHANGES, stage.environment(vgpu))
        assert self.asks(stage, program, vgpu.vgpu_id) == MPS_CONNECTION_FAILED
        assert self.asks(stage, program, other.vgpu_id) == NO_DEVICE
        assert self.asks(stage, program) == NO_DEVICE
        assert other.slots() == []


def test_nvml_asks_again_where_the_id_is_another() -> None:
    stage = Stage(gpus=2)
    try:
        vgpu = stage.vgpu()
        ran = stage.run(
            f"""
import os, pynvml
pynvml.nvmlInit()
print([pynvml.nvmlDeviceGetCount() for _ in range(2)])
os.environ["VGPU_ID"] = "{vgpu.vgpu_id}"
print([pynvml.nvmlDeviceGetCount() for _ in range(2)])
""",
            stage.environment(vgpu, VGPU_ID="vgpu-0000beef"),
        )
        assert ran.stdout.splitlines() == ["[2, 2]", "[1, 1]"], ran.stderr
        assert len(ran.stderr.splitlines()) == 1
        assert len(vgpu.requests) == 1
    finally:
        stage.close()


def test_inert_without_an_id(stage: Stage) -> None:
    vgpu = stage.vgpu()
    environment = stage.environment(vgpu)
    del environment["VGPU_ID"]
    ran = stage.run(INIT, environment)
    assert (ran.stdout, ran.stderr) == ("0\n", "")
    assert vgpu.requests == []


def test_a_program_that_hides_its_gpus_gets_none(stage: Stage) -> None:
    vgpu = stage.vgpu()
    ran = stage.run(INIT, stage.environment(vgpu, CUDA_VISIBLE_DEVICES=""))
    assert (int(ran.stdout), ran.stderr) == (NO_DEVICE, "")
    assert vgpu.requests == []


def test_unknown_id(stage: Stage) -> None:
    vgpu = stage.vgpu()
    (stage.runtime / "control.sock").touch()
    code, line = refused(stage, stage.environment(vgpu, VGPU_ID="vgpu-00000bad"))
    assert code == NO_DEVICE
    assert "vgpu-00000bad" in line
    assert "vgpuctl ls" in line


@pytest.mark.parametrize("vgpu_id", ["mine", "vgpu-../../x", "vgpu-0BADF00D", "vgpu-0badf00d1", ",", "x" * 300])
def test_what_is_no_id(stage: Stage, vgpu_id: str) -> None:
    code, _ = refused(stage, stage.environment(stage.vgpu(), VGPU_ID=vgpu_id))
    assert code == NO_DEVICE


@pytest.mark.parametrize("dead", ["no socket", "nobody listens"])
def test_server_down(stage: Stage, dead: str) -> None:
    vgpu = stage.vgpu()
    environment = stage.environment(vgpu)
    vgpu.close()
    stage.vgpus.remove(vgpu)
    if dead == "no socket":
        (vgpu.directory / "broker.sock").unlink()
    code, line = refused(stage, environment)
    assert code == OPERATING_SYSTEM
    assert "vgpuctl serve" in line


def test_another_users(stage: Stage) -> None:
    vgpu = stage.vgpu()
    vgpu.refusal = "it belongs to alice (uid 1007): vgpuctl create makes one of your own"
    code, line = refused(stage, stage.environment(vgpu))
    assert code == NO_DEVICE
    assert line == f"vgpu: {vgpu.vgpu_id}: {vgpu.refusal}"


@pytest.mark.parametrize(
    "changes",
    [{"slot": 64}, {"slot": -1}, {"generation": None}, {"gpu_uuid": "x" * 60}, {"now_ns": 0}, {"now_ns": 1 << 62}],
)
def test_answers_that_make_no_sense(stage: Stage, changes: dict[str, object]) -> None:
    vgpu = stage.vgpu()
    vgpu.reply_changes = changes
    code, _ = refused(stage, stage.environment(vgpu))
    assert code in (NO_DEVICE, OPERATING_SYSTEM)


def test_an_answer_may_be_late(stage: Stage) -> None:
    """Whoever was held up, broker or program: their clocks are one all the same."""
    vgpu = stage.vgpu()
    vgpu.reply_late_s = 1.5
    ran = stage.run(INIT, stage.environment(vgpu))
    assert ran.stdout.split() == ["0"], ran.stderr


DEVICES = """
import ctypes, os
from ctypes import byref, c_int, create_string_buffer
cuda = ctypes.CDLL("libcuda.so.1")
assert cuda.cuInit(0) == 0
count = c_int()
cuda.cuDeviceGetCount(byref(count))
for i in range(count.value):
    uuid, total = create_string_buffer(16), ctypes.c_size_t()
    assert cuda.cuDeviceGetUuid_v2(uuid, i) == 0
    assert cuda.cuDeviceTotalMem_v2(byref(total), i) == 0
    print(uuid.raw.hex(), total.value >> 30)
"""


class TestDevices:
    @pytest.fixture
    def stage(self) -> Stage:
        return Stage(gpus=4)

    def seen(self, stage: Stage, *vgpus: StagedVgpu, **changes: str) -> list[tuple[str, int]]:
        try:
            ran = stage.run(DEVICES, stage.environment(*vgpus, **changes))
            assert ran.returncode == 0, ran.stderr
            lines = [line.split() for line in ran.stdout.splitlines()]
            return [(uuid, int(total)) for uuid, total in lines]
        finally:
            stage.close()

    def named(self, vgpu: StagedVgpu) -> tuple[str, int]:
        return re.sub("[^0-9a-f]", "", vgpu.gpu_uuid.removeprefix("GPU-")), vgpu.memory_bytes // GIB

    def test_one(self, stage: Stage) -> None:
        vgpu = stage.vgpu(gpu=2)
        assert self.seen(stage, vgpu) == [self.named(vgpu)]

    def test_several_in_the_order_of_the_ids(self, stage: Stage) -> None:
        a, b = stage.vgpu(gpu=3, memory_bytes=3 * GIB), stage.vgpu(gpu=1, memory_bytes=5 * GIB)
        assert self.seen(stage, a, b) == [self.named(a), self.named(b)]

    def test_own_list_counts_the_vgpus(self, stage: Stage) -> None:
        a, b = stage.vgpu(gpu=3, memory_bytes=3 * GIB), stage.vgpu(gpu=1, memory_bytes=5 * GIB)
        assert self.seen(stage, a, b, CUDA_VISIBLE_DEVICES="1") == [self.named(b)]

    def test_own_list_by_uuid(self, stage: Stage) -> None:
        a, b = stage.vgpu(gpu=3), stage.vgpu(gpu=1)
        assert self.seen(stage, a, b, CUDA_VISIBLE_DEVICES=f"{b.gpu_uuid},0") == [self.named(b), self.named(a)]

    def test_own_list_that_selects_nothing(self, stage: Stage) -> None:
        try:
            code, line = refused(stage, stage.environment(stage.vgpu(gpu=3), CUDA_VISIBLE_DEVICES="3"))
        finally:
            stage.close()
        assert code == NO_DEVICE
        assert "CUDA_VISIBLE_DEVICES=3" in line

    def test_two_on_one_gpu(self, stage: Stage) -> None:
        try:
            code, _ = refused(stage, stage.environment(stage.vgpu(gpu=0), stage.vgpu(gpu=0)))
        finally:
            stage.close()
        assert code == NO_DEVICE

    def test_spatial_mode_has_one_daemon(self, stage: Stage) -> None:
        try:
            vgpus = stage.vgpu(gpu=0, mode=PageMode.SPATIAL), stage.vgpu(gpu=1)
            code, line = refused(stage, stage.environment(*vgpus))
        finally:
            stage.close()
        assert code == NO_DEVICE
        assert "spatial" in line


FORK = """
import ctypes, os
cuda = ctypes.CDLL("libcuda.so.1")
assert cuda.cuInit(0) == 0
child = os.fork()
if child == 0:
    maps = open("/proc/self/maps").read()
    assert "memfd" not in maps, maps
    cuda.cuInit(0)
    print("child attached", flush=True)
    os._exit(0)
os.waitpid(child, 0)
print("parent goes on", flush=True)
input()
"""


def test_a_forked_child_is_a_process_of_its_own(stage: Stage) -> None:
    vgpu = stage.vgpu()
    program = stage.start(FORK, stage.environment(vgpu))
    assert [stage.heard(program), stage.heard(program)] == ["child attached", "parent goes on"]
    states = {s.pid == program.pid: s.state for s in vgpu.slots()}
    assert len(vgpu.requests) == 2
    assert states[True] == SlotState.ACTIVE
    eventually(
        lambda: all(s.state == SlotState.DEAD for s in vgpu.slots() if s.pid != program.pid), "the child is gone"
    )
    assert [s.state for s in vgpu.slots() if s.pid == program.pid] == [SlotState.ACTIVE]


NVML = """
import pynvml
pynvml.nvmlInit()
count = pynvml.nvmlDeviceGetCount()
device = pynvml.nvmlDeviceGetHandleByIndex(0)
memory = pynvml.nvmlDeviceGetMemoryInfo(device)
newer = pynvml.nvmlDeviceGetMemoryInfo(device, version=pynvml.nvmlMemory_v2)
print(count, pynvml.nvmlDeviceGetUUID(device), memory.total, memory.used, newer.total, newer.used)
"""


def test_nvml_without_cuda_shows_the_vgpu() -> None:
    stage = Stage(gpus=2)
    try:
        vgpu = stage.vgpu(gpu=1)
        ran = stage.run(NVML, stage.environment(vgpu))
        assert ran.stdout.split() == ["1", vgpu.gpu_uuid, str(8 * GIB), "0", str(8 * GIB), "0"], ran.stderr
        assert [r["role"] for r in vgpu.requests] == ["observer"]
        assert vgpu.slots() == []
    finally:
        stage.close()


LISTS = """
import json, os, pynvml
from tests.hook.app import App
app = App()
kernel = app.kernel(5.0)
pynvml.nvmlInit()
device = pynvml.nvmlDeviceGetHandleByIndex(0)
print("ready", flush=True)
input()
busy = set()
while os.getpid() not in busy:
    kernel.launch()
    app.synchronize()
    try:
        busy = {sample.pid for sample in pynvml.nvmlDeviceGetProcessUtilization(device, 0)}
    except pynvml.NVMLError_NotFound:
        pass  # nobody has worked lately
print(json.dumps(sorted(busy)), flush=True)
input()
names = [f"nvmlDeviceGetComputeRunningProcesses{version}" for version in ("_v2", "_v3")]
listed = [[process.pid for process in getattr(pynvml, name)(device)] for name in names]
print(json.dumps([sorted(pids) for pids in listed]), flush=True)
input()
"""


def test_nvml_lists_the_processes_of_the_vgpu_alone(stage: Stage) -> None:
    ours, others = stage.vgpu(), stage.vgpu()
    programs = [stage.start(LISTS, stage.environment(vgpu)) for vgpu in (ours, ours, others)]
    for vgpu in (ours, others):
        vgpu.open()
    for program in programs:
        assert stage.heard(program) == "ready"
    groups = [{program.pid for program in programs[:2]}] * 2 + [{programs[2].pid}]
    for program in programs:
        stage.tell(program)
    for program, own in zip(programs, groups, strict=True):
        assert set(json.loads(stage.heard(program))) <= own
        stage.tell(program)
    for program, own in zip(programs, (programs[:2], programs[:2], programs[2:]), strict=True):
        assert json.loads(stage.heard(program)) == [sorted(other.pid for other in own)] * 2


@pytest.mark.parametrize("daemon", ["never there", "dead"])
def test_without_mps_a_spatial_process_does_not_start(stage: Stage, tmp_path: Path, daemon: str) -> None:
    """The driver itself would let it run on the whole GPU where no daemon ever was."""
    vgpu = stage.vgpu(mode=PageMode.SPATIAL)
    vgpu.reply_changes = {"mps_pipe_directory": str(tmp_path), "mps_active_thread_percentage": "30.31"}
    if daemon == "dead":
        (tmp_path / "simulated-mps").write_text("4194303 1")
    code, line = refused(stage, stage.environment(vgpu))
    assert code == MPS_CONNECTION_FAILED
    assert "without it nothing would limit this program" in line


def test_under_mps_it_tells_how_many_sms_it_got(stage: Stage, tmp_path: Path) -> None:
    vgpu = stage.vgpu(mode=PageMode.SPATIAL)
    vgpu.reply_changes = {"mps_pipe_directory": str(tmp_path), "mps_active_thread_percentage": "30.31"}
    (tmp_path / "simulated-mps").write_text(f"{os.getpid()} {start_time(os.getpid())}")
    program = stage.start(INIT + "input()", stage.environment(vgpu))
    assert stage.heard(program) == "0"
    eventually(lambda: vgpu.slot().sm_count == 40, "the SMs in the slot")
