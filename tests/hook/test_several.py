"""One process with a vGPU on each of two GPUs: every launch is let through by the vGPU of the GPU that it goes to."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cython_ext.pages.storepage import StorePage
from cython_ext.readings import GrantsFlag, Where
from tests.hook.programs import PROLOGUE, drained
from tests.hook.stage import MS, Stage, eventually
from tests.hook.test_markers import PROGRAM, recorder  # noqa: F401  (a fixture)

MIB = 1 << 20
TWO = """
import time
class Device:
    "A GPU by its number: its context, a stream of each kind, and a kernel."
    def __init__(self, index):
        self.context, self.module = c_void_p(), c_void_p()
        app.call("cuDevicePrimaryCtxRetain", byref(self.context), index)
        self.turn_to()
        app.call("cuModuleLoadData", byref(self.module), PTX.encode())
        app.module = self.module
        self.streams = {"own": app.new_stream(1), "legacy": c_void_p(LEGACY), "null": c_void_p(0),
                        "per-thread": c_void_p(PER_THREAD)}
        self.kernels = {name: app.kernel(0.02, stream) for name, stream in self.streams.items()}

    def turn_to(self):
        app.call("cuCtxSetCurrent", self.context)

    def launch(self, name, count):
        self.turn_to()
        for _ in range(count):
            self.kernels[name].launch()

from vgpu.workload.kernels import PTX
devices = [Device(0), Device(1)]
"""

COMMANDS = """
def launch(device, name, count):
    devices[int(device)].launch(name, int(count))

def in_turns(name, count):
    for _ in range(int(count)):
        for device in devices:
            device.launch(name, 1)

class LaunchParams(ctypes.Structure):
    _fields_ = [("function", c_void_p), ("grid", c_uint * 3), ("block", c_uint * 3), ("shared", c_uint),
                ("stream", c_void_p), ("parameters", c_void_p)]

def across(current, target, kind, count):
    "Into a stream of a GPU that is not the current one's, as copies, fills and contextless kernels may go."
    device = devices[int(target)]
    device.turn_to()
    block = app.allocate(4 << 20)
    devices[int(current)].turn_to()
    for _ in range(int(count)):
        if kind == "kernel":
            device.kernels["own"].launch()
        else:
            app.call("cuMemsetD8Async", c_uint64(block), 0, c_size_t(4 << 20), device.streams["own"])
    now = c_void_p()
    app.call("cuCtxGetCurrent", byref(now))
    assert now.value == devices[int(current)].context.value

def together():
    "One kernel on each GPU, which may wait for each other."
    each = []
    for device in devices:
        function, gx, gy, gz, bx, by, bz, shared, stream, parameters, _ = device.kernels["own"].arguments
        at = ctypes.cast(parameters, c_void_p)
        each.append(LaunchParams(function, (c_uint * 3)(1, 1, 1), (c_uint * 3)(bx, by, bz), shared, stream, at))
    devices[0].turn_to()
    launches = (LaunchParams * 2)(*each)
    result = app.result("cuLaunchCooperativeKernelMultiDevice", byref(launches), c_uint(2), c_uint(0))
    current = c_void_p()
    app.call("cuCtxGetCurrent", byref(current))
    print("context is the same" if current.value == devices[0].context.value else "another context", result, flush=True)

def together_beside():
    threading.Thread(target=together, daemon=True).start()

def beside(*arguments):
    threading.Thread(target=launch, args=arguments, daemon=True).start()

def allocate(device):
    devices[int(device)].turn_to()
    return app.allocate(5 << 20)

def reset(device):
    app.call("cuDevicePrimaryCtxReset_v2", int(device))

def synchronize():
    for device in devices:
        device.turn_to()
        app.synchronize()

print("ready", flush=True)
for line in sys.stdin:
    name, *arguments = line.split()
    print(globals()[name](*arguments), flush=True)
"""


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage(gpus=2)
    yield stage
    stage.close()


class Program:
    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.vgpus = [stage.vgpu(gpu) for gpu in (0, 1)]
        self.process = stage.start(PROLOGUE + TWO + COMMANDS, stage.environment(*self.vgpus))
        assert stage.heard(self.process) == "ready"

    def ask(self, command: str) -> str:
        self.stage.tell(self.process, command)
        return self.stage.heard(self.process)

    def counted(self) -> list[int]:
        return [vgpu.slot().launches for vgpu in self.vgpus]


@pytest.mark.parametrize("name", ["own", "legacy", "null", "per-thread"])
def test_each_launch_is_counted_where_it_goes(stage: Stage, name: str) -> None:
    program = Program(stage)
    for vgpu in program.vgpus:
        vgpu.open()
    program.ask(f"launch 0 {name} 100")
    program.ask(f"launch 1 {name} 200")
    program.ask(f"in_turns {name} 50")
    program.ask(f"launch 0 {name} 7")
    eventually(lambda: program.counted() == [157, 250], "all are counted")
    program.ask(f"beside 1 {name} 1000")
    eventually(lambda: program.counted() == [157, 1250], "a thread's that has ended, too")


@pytest.mark.parametrize("kind", ["kernel", "fill"])
def test_what_goes_into_a_stream_of_another_gpu_is_let_through_by_that_ones_vgpu(stage: Stage, kind: str) -> None:
    program = Program(stage)
    first, second = program.vgpus
    first.open()
    program.ask(f"across 1 0 {kind} 10")
    eventually(lambda: program.counted() == [10, 0], "the first GPU's vGPU let them through")
    assert not second.slot().want
    eventually(lambda: not first.slot().undrained, "their drain is seen")
    with second.granting(60_000 * MS):  # finite: measured and marked
        program.ask(f"across 0 1 {kind} 200")
        eventually(lambda: program.counted() == [10, 200], "the second's did")
        eventually(lambda: not second.slot().undrained, "their drain is seen")


def test_a_primary_context_takes_the_memory_of_its_gpu_along_and_no_other(stage: Stage) -> None:
    program = Program(stage)
    for device in (0, 1, 1):
        program.ask(f"allocate {device}")
    assert [vgpu.slot().charged_bytes for vgpu in program.vgpus] == [6 * MIB, 12 * MIB]
    program.ask("reset 1")
    assert [vgpu.slot().charged_bytes for vgpu in program.vgpus] == [6 * MIB, 0]
    program.ask("reset 0")
    assert [vgpu.slot().charged_bytes for vgpu in program.vgpus] == [0, 0]


@pytest.mark.parametrize("name", ["own", "legacy", "per-thread"])
def test_one_without_a_lease_holds_its_launches_alone(stage: Stage, name: str) -> None:
    program = Program(stage)
    first, second = program.vgpus
    first.open()
    second.open()
    program.ask(f"in_turns {name} 50")
    drained(stage, first, first.revoke(time.monotonic_ns() + MS))
    program.ask(f"beside 0 {name} 1")
    first.await_want()
    program.ask(f"launch 1 {name} 100")
    eventually(lambda: program.counted() == [50, 150], "the other's went through, and its own did not")
    first.open()
    eventually(lambda: program.counted() == [51, 150], "with a lease it goes")


def test_a_launch_on_both_waits_for_both(stage: Stage) -> None:
    program = Program(stage)
    first, second = program.vgpus
    first.open()
    assert program.ask("together_beside") == "None"
    second.await_want()
    assert program.counted()[1] == 0
    second.open()
    assert stage.heard(program.process) == "context is the same 0"
    eventually(lambda: program.counted() == [1, 1], "both are counted")
    for vgpu in program.vgpus:
        eventually(lambda: not vgpu.slot().undrained, "its drain was seen")  # noqa: B023


def test_a_drain_is_seen_in_each(stage: Stage) -> None:
    program = Program(stage)
    for vgpu in program.vgpus:
        vgpu.open()
    for name in ("own", "legacy", "per-thread"):
        program.ask(f"in_turns {name} 20")
        for vgpu in program.vgpus:
            eventually(lambda: not vgpu.slot().undrained, f"its drain was seen: {name}")  # noqa: B023


@pytest.mark.parametrize("stream", ["0x100", "0"])
def test_the_driver_is_not_asked_for_the_device_at_each_launch(
    stage: Stage,
    recorder: Path,  # noqa: F811
    tmp_path: Path,
    stream: str,
) -> None:
    vgpus = [stage.vgpu(gpu) for gpu in (0, 1)]
    for vgpu in vgpus:
        vgpu.open()
    record = tmp_path / "record"
    environment = stage.environment(*vgpus, LD_LIBRARY_PATH=str(recorder), RECORD=str(record))
    ran = stage.run(PROGRAM + f"for _ in range(1000): launch({stream})", environment)
    assert ran.returncode == 0, ran.stderr
    seen = [word[0].upper() for word in record.read_text().split()]
    assert seen.count("L") == 1000
    assert seen.count("D") < 1000 / 3  # the meter times a kernel without a sample that often, and here none ever ends


REACHING = """
SIZE = 4 << 20
devices = [Device(0), Device(1)]
devices[0].turn_to()
block = app.allocate(SIZE)
app.call("cuMemsetD8_v2", c_uint64(block), 7, c_size_t(SIZE))
app.synchronize()
devices[1].turn_to()
app.call("cuCtxEnablePeerAccess", devices[0].context, 0)
other = app.allocate(SIZE)
print("ready", flush=True)
sys.stdin.readline()
app.call("cuMemcpyPeer", c_uint64(other), devices[1].context, c_uint64(block), devices[0].context, c_size_t(SIZE))
print(sorted(set(app.read(other, SIZE))), sorted(set(app.read(block, SIZE))), flush=True)
"""


def test_memory_that_other_gpus_reach_into_stays_on_the_card(stage: Stage) -> None:
    """--oversubscribe swap: it would be moved under the copies, and the kernels, of a GPU that asks another vGPU."""
    first, second = stage.vgpu(0), stage.vgpu(1)
    first.grants.flags = first.grants.flags | GrantsFlag.SWAPPABLE
    first.store = StorePage.create(64)
    first.store.grow(64)
    first.open()
    second.open()
    process = stage.start(PROLOGUE + TWO + REACHING, stage.environment(first, second))
    assert stage.heard(process) == "ready"
    first.withdraw()
    first.grants.flags = first.grants.flags & ~GrantsFlag.PRESENT | GrantsFlag.STILL | GrantsFlag.AWAY
    eventually(lambda: first.slot().where == Where.AWAY, "it takes no lease any more")
    assert (first.slot().committed_bytes[0], first.slot().away_bytes) == (4 * MIB, 0)
    stage.tell(process)
    assert stage.heard(process) == "[7] [7]"
