"""What the hook does between an application's launches, call by call, against a driver that writes its calls down."""

from __future__ import annotations

import itertools
import subprocess
import time
from pathlib import Path

import pytest

from tests.hook.stage import MS, Stage, eventually

PROGRAM = """
import ctypes, sys
from ctypes import byref, c_int, c_uint, c_void_p

class Attribute(ctypes.Structure):
    _fields_ = [("id", c_int), ("pad", c_int), ("value", c_int * 16)]

class Config(ctypes.Structure):
    _fields_ = [
        ("shape", c_uint * 7),
        ("stream", c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("count", c_uint),
    ]

cuda = ctypes.CDLL("libcuda.so.1")
assert cuda.cuInit(0) == 0
overlaps = Attribute(6)
overlaps.value[0] = 1

def launch(stream, kernel=77, programmatic=False):
    config = Config((1, 1, 1, 32, 1, 1, 0), stream, ctypes.pointer(overlaps), int(programmatic))
    assert cuda.cuLaunchKernelEx(byref(config), c_void_p(kernel), None, None) == 0
"""


@pytest.fixture(scope="session")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the driver that writes its calls down."""
    directory = tmp_path_factory.mktemp("recorder")
    source = Path(__file__).with_name("recorder.c")
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", directory / "libcuda.so.1", source], check=True
    )
    return directory


def calls(stage: Stage, recorder: Path, tmp_path: Path, body: str) -> list[str]:
    """The driver's calls, in order, under finite leases of a contended GPU."""
    vgpu = stage.vgpu()
    record = tmp_path / "record"
    environment = stage.environment(vgpu, LD_LIBRARY_PATH=str(recorder), RECORD=str(record))
    with vgpu.granting(50 * MS):
        ran = stage.run(PROGRAM + body, environment)
    assert ran.returncode == 0, ran.stderr
    return record.read_text().split()


def test_own_calls_are_relaxed_for_captures(stage: Stage, recorder: Path, tmp_path: Path) -> None:
    seen = calls(stage, recorder, tmp_path, "for i in range(1000): launch(0x100)")
    own = [c for c in seen if c[0].lower() in "rqs"]
    assert own
    assert [c for c in own if c[0].islower()] == []
    assert sum(c[0] == "l" for c in seen) == 1000  # and the application's mode is its own again


@pytest.mark.parametrize("stream", ["0x100", "2"], ids=["stream", "per-thread"])
def test_no_marker_before_a_launch_that_overlaps_with_its_predecessor(
    stage: Stage, recorder: Path, tmp_path: Path, stream: str
) -> None:
    """An event between the two would make the second wait for the first. The first launches of a kernel are timed, and
    that launches overlap in a thread's own stream, where none is marked by another, is known from the first that does.
    """
    seen = calls(
        stage,
        recorder,
        tmp_path,
        f"for i in range(40): launch({stream})\nlaunch({stream}, programmatic=True)\n"
        f"for i in range(2000): launch({stream}, programmatic=i % 3 != 0)",
    )
    _, *pairs = [(a, b) for a, b in itertools.pairwise(seen) if b[0].lower() == "p"]
    assert len(pairs) == 1333
    assert f"R{int(stream, 16):x}" not in {a for a, _ in pairs}
    assert any(c[0] == "R" for c in seen)  # before the others there are markers


@pytest.mark.parametrize(("busy", "spared"), [({}, True), ({"BUSY": "1000"}, False)], ids=["idle", "busy"])
def test_who_always_finds_the_gpu_idle_is_seldom_asked_for_it(
    stage: Stage, recorder: Path, tmp_path: Path, busy: dict[str, str], spared: bool
) -> None:
    """Kernels of 200 ns, far apart. Where the driver says from the thousandth on that something runs all the same, it
    is asked at each again."""
    vgpu = stage.vgpu()
    record = tmp_path / "record"
    environment = stage.environment(vgpu, LD_LIBRARY_PATH=str(recorder), RECORD=str(record), LASTS="200", **busy)
    body = """
import time
for i in range(4000):
    launch(0x100)
    began = time.monotonic_ns()
    while time.monotonic_ns() < began + 10_000:
        pass
"""
    with vgpu.granting(60_000 * MS):
        ran = stage.run(PROGRAM + body, environment)
    assert ran.returncode == 0, ran.stderr
    seen = record.read_text().split()
    launches = [at for at, call in enumerate(seen) if call[0] == "l"]
    asked = sum(call.startswith("S") for call in seen[launches[2000] : launches[3999]])
    assert (asked < 1500) == spared, asked  # of 2000; a thread that sleeps meanwhile finds the GPU in another state


def test_a_stream_is_marked_before_another_is_turned_to(stage: Stage, recorder: Path, tmp_path: Path) -> None:
    seen = calls(stage, recorder, tmp_path, "for i in range(100): launch(0x100 + (i // 10 % 2) * 0x100)")
    launches = [at for at, call in enumerate(seen) if call[0] == "l"]
    turns = [(a, b) for a, b in itertools.pairwise(launches) if seen[a] != seen[b]]
    assert len(turns) == 9
    for a, b in turns:
        stream = seen[a][1:]
        assert {f"R{stream}", f"S{stream}"} & set(seen[a:b]), seen[a : b + 1]  # marked, or found drained


def test_a_stream_is_marked_before_another_is_turned_to_however_many_there_are(
    stage: Stage, recorder: Path, tmp_path: Path
) -> None:
    """More than are known one by one: who comes into another's place turns from it as well."""
    vgpu = stage.vgpu()
    record = tmp_path / "record"
    environment = stage.environment(vgpu, LD_LIBRARY_PATH=str(recorder), RECORD=str(record), BUSY="1")
    with vgpu.granting(60_000 * MS):
        ran = stage.run(PROGRAM + "for i in range(600): launch(0x100 + i)", environment)
    assert ran.returncode == 0, ran.stderr
    seen = record.read_text().split()
    launches = [at for at, call in enumerate(seen) if call[0] == "l"]
    assert len(launches) == 600
    assert [seen[a] for a, b in itertools.pairwise(launches) if f"R{seen[a][1:]}" not in seen[a:b]] == []


def test_unmeasured_work_is_not_forgotten_with_the_place_of_its_stream(
    stage: Stage, recorder: Path, tmp_path: Path
) -> None:
    vgpu = stage.vgpu()
    vgpu.open()
    record = tmp_path / "record"
    environment = stage.environment(vgpu, LD_LIBRARY_PATH=str(recorder), RECORD=str(record), BUSY="1")
    ran = stage.run(PROGRAM + "for i in range(540): launch(0x100 + i)", environment)
    assert ran.returncode == 0, ran.stderr
    seen = record.read_text().split()
    assert {f"R{0x100 + i:x}" for i in range(511, 539)} <= set(seen)


def through_while_held(stage: Stage, recorder: Path, tmp_path: Path, asked: int) -> int:
    """Two streams take turns; how many of 600 launches go to the driver while the GPU finishes nothing, until it was
    asked about so many events. They are predicted to take 20 us each, so the window lets hundreds through."""
    vgpu = stage.vgpu()
    vgpu.window_ns = 12 * MS
    vgpu.lease(time.monotonic_ns(), time.monotonic_ns() + MS)  # for its page to say so
    eventually(lambda: vgpu.grants.window_ns == vgpu.window_ns, "it does")
    record, known = tmp_path / "record", 400
    held = {"LD_LIBRARY_PATH": str(recorder), "RECORD": str(record), "HOLD": str(known), "ASKED": str(asked)}
    with vgpu.granting(60_000 * MS):
        body = f"for i in range({known + 600}): launch(0x100 + i % 2 * 0x100)"
        ran = stage.run(PROGRAM + body, stage.environment(vgpu, **held))
    assert ran.returncode == 0, ran.stderr
    seen = record.read_text().split()
    launches = [at for at, call in enumerate(seen) if call[0] == "l"]
    assert len(launches) == known + 600
    last_held = max(at for at, call in enumerate(seen) if call == "Q258")
    return sum(launches[known - 1] < at < last_held for at in launches)


def test_a_launch_waits_for_the_marker_that_has_to_come_before_it(stage: Stage, recorder: Path, tmp_path: Path) -> None:
    assert 0 < through_while_held(stage, recorder, tmp_path, 120) <= 128


def test_a_launch_does_not_wait_for_ever_for_a_marker(stage: Stage, recorder: Path, tmp_path: Path) -> None:
    """What is before it may wait for the launch itself."""
    assert through_while_held(stage, recorder, tmp_path, 10**9) > 128


def test_launches_of_the_first_kind_are_gated_too(stage: Stage, recorder: Path, tmp_path: Path) -> None:
    """Not in the header any more; the driver has them for old programs."""
    vgpu = stage.vgpu()
    environment = stage.environment(vgpu, LD_LIBRARY_PATH=str(recorder), RECORD=str(tmp_path / "record"))
    body = """
f = c_void_p(77)
print("ready", flush=True)
assert (cuda.cuLaunch(f), cuda.cuLaunchGrid(f, 2, 3), cuda.cuLaunchGridAsync(f, 2, 3, c_void_p(0x100))) == (0, 0, 0)
print("launched", flush=True)
input()
"""
    program = stage.start(PROGRAM + body, environment)
    assert stage.heard(program) == "ready"
    vgpu.await_want()
    assert vgpu.slot().launches == 0
    vgpu.open()
    assert stage.heard(program) == "launched"
    eventually(lambda: vgpu.slot().launches == 3, "they are counted")


NEWER = {
    "cuMemcpyWithAttributesAsync": "c_uint64(1 << 40), c_uint64(2 << 40), c_size_t(2 << 20), None, c_void_p(0x100)",
    "cuMemcpy3DWithAttributesAsync": "(c_uint64 * 14)(1, 1 << 40, 0, 0, 0, 1, 2 << 40, 0, 0, 0, 2 << 20, 1, 1), "
    "c_uint64(0), c_void_p(0x100)",
    "cuFabricCpyBatchAsync": "c_size_t(2), (c_uint64 * 16)(1, 1, 0, 2, 0, 0, 1 << 20, 0, 1, 1, 0, 2, 0, 0, 1 << 20), "
    "c_uint64(0), c_void_p(0x100)",
}


@pytest.mark.parametrize("name", NEWER)
def test_what_drivers_after_13_0_have_is_gated_too(stage: Stage, recorder: Path, tmp_path: Path, name: str) -> None:
    vgpu = stage.vgpu()
    environment = stage.environment(vgpu, LD_LIBRARY_PATH=str(recorder), RECORD=str(tmp_path / "record"))
    body = f"""
from ctypes import c_size_t, c_uint64
assert cuda.{name}({NEWER[name]}) == 0
print("copied", flush=True)
input()
"""
    program = stage.start(PROGRAM + body, environment)
    vgpu.await_want()
    assert vgpu.slot().launches == 0
    vgpu.open()
    assert stage.heard(program) == "copied"
    eventually(lambda: vgpu.slot().launches == 1, "it is counted")


def test_what_a_recapture_records_waits_for_no_lease(stage: Stage, recorder: Path, tmp_path: Path) -> None:
    vgpu = stage.vgpu()
    environment = stage.environment(vgpu, LD_LIBRARY_PATH=str(recorder), RECORD=str(tmp_path / "record"))
    body = """
stream = c_void_p(0x100)
assert cuda.cuStreamBeginRecaptureToGraph(stream, 0, c_void_p(1), None, None) == 0
launch(0x100)
assert cuda.cuStreamEndCapture(stream, byref(c_void_p())) == 0
"""
    ran = stage.run(PROGRAM + body, environment)  # nobody has granted anything
    assert (ran.returncode, ran.stderr) == (0, "")
    assert (tmp_path / "record").read_text().split() == ["l100"]


def test_few_calls_of_our_own(stage: Stage, recorder: Path, tmp_path: Path) -> None:
    """A marker costs 0.1 us, a timed one 0.7: they are to be rare beside launches of 3 us."""
    seen = calls(stage, recorder, tmp_path, "for i in range(10000): launch(0x100)")
    assert sum(c[0] == "R" for c in seen) < 1000


def test_no_stream_is_asked_after_its_context_has_ended(stage: Stage, recorder: Path, tmp_path: Path) -> None:
    """Whichever context was the current one when it was launched into. The driver frees it, and a new one may lie there
    at once."""
    body = "for i in range(100): launch(0x100 + i % 2 * 0x1000)\n" + "assert cuda.cuCtxDestroy_v2(c_void_p(32)) == 0\n"
    seen = calls(stage, recorder, tmp_path, body + "for i in range(100): launch(0x100)")
    after = seen[seen.index("x20") + 1 :]
    assert [call for call in after if call[1:] == "1100"] == []
    assert "R100" in after
    assert "R1100" in seen


TWO_CONTEXTS = """
import time

def fill(first):
    cuda.stand_still(1)
    for i in range(128):
        launch(first + i % 2 * 0x100)
    cuda.stand_still(0)

fill(0x100)
time.sleep(0.05)             # its markers are found to have passed
{between}
fill(0x1000)
"""


@pytest.mark.parametrize("between", ["", "assert cuda.cuCtxDetach(c_void_p(16)) == 0  # it lives on"])
def test_markers_that_one_context_needs_no_more_give_way_to_those_of_another(
    stage: Stage, recorder: Path, tmp_path: Path, between: str
) -> None:
    """There are 256 event objects; the first context has had most of them."""
    vgpu = stage.vgpu()
    record = tmp_path / "record"
    environment = stage.environment(vgpu, LD_LIBRARY_PATH=str(recorder), RECORD=str(record))
    with vgpu.granting(60_000 * MS):
        ran = stage.run(PROGRAM + TWO_CONTEXTS.format(between=between), environment)
    assert ran.returncode == 0, ran.stderr
    seen = record.read_text().split()
    marked = [sum(call == f"R{stream:x}" for call in seen) for stream in (0x100, 0x1100)]
    assert min(marked) > 60, marked


BESIDE_A_LONG_ONE = """
import threading, time
long, short = {streams}

def launch_long():
    for _ in range(40):
        launch(long, 99)     # how long it takes is known
    ready.set()
    begin.wait()
    launch(long, 99)

ready, begin = threading.Event(), threading.Event()
other = threading.Thread(target=launch_long)
other.start()
ready.wait()
for _ in range(40):
    launch(short)
cuda.hold()
begin.set()
while not cuda.is_launching():
    time.sleep(0.001)
launch(short)
cuda.let_go()
other.join()
print("launched", flush=True)
input()
cuda.finish()
print("finished", flush=True)
input()
"""


@pytest.mark.parametrize("streams", ["2, 2", "2, 0x100", "0x100, 2", "0x100, 0x200"])
def test_a_launch_that_another_threads_marker_overtook_is_still_waited_for(
    stage: Stage, recorder: Path, tmp_path: Path, streams: str
) -> None:
    """It was let through, and had not reached the driver when the other thread turned from its stream to another. It
    keeps the GPU, and its vGPU pays for it."""
    vgpu = stage.vgpu()
    record = tmp_path / "record"
    environment = stage.environment(vgpu, LD_LIBRARY_PATH=str(recorder), RECORD=str(record))
    with vgpu.granting(60_000 * MS):
        program = stage.start(PROGRAM + BESIDE_A_LONG_ONE.format(streams=streams), environment)
        assert stage.heard(program) == "launched"
        busy_ns = vgpu.slot().busy_ns
        eventually(lambda: not vgpu.slot().undrained or vgpu.slot().busy_ns > busy_ns + 50 * MS, "it was looked for")
        assert vgpu.slot().undrained
        stage.tell(program)
        assert stage.heard(program) == "finished"
        eventually(lambda: not vgpu.slot().undrained, "its drain was seen")
