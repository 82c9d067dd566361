"""Memory of cuMemCreate that one process exports and others import: charged once, to the process that made it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from cython_ext.readings import SHARED
from cython_ext.simengine import Engine
from tests.hook.stage import GIB, Stage, StagedVgpu, eventually
from tests.hook.talk import Talk
from tests.hook.test_swap import swappable

SIZE = 40 << 20
WORK = f"""
import os, socket
SIZE = {SIZE}
class Access(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("device", ctypes.c_int), ("flags", ctypes.c_int)]
def mapped(handle, size=SIZE, flags=3):
    address = c_uint64()
    app.call("cuMemAddressReserve", byref(address), c_size_t(size), c_size_t(0), c_uint64(0), c_uint64(0))
    app.call("cuMemMap", address, c_size_t(size), c_size_t(0), c_uint64(handle), c_uint64(0))
    access = Access(1, 0, flags)
    app.call("cuMemSetAccess", address, c_size_t(size), byref(access), c_size_t(1))
    return address.value
def exported(handle):
    descriptor = ctypes.c_int(-1)
    app.call("cuMemExportToShareableHandle", byref(descriptor), c_uint64(handle), 1, c_uint64(0))
    return descriptor.value
def imported(descriptor):
    handle = c_uint64()
    code = app.result("cuMemImportFromShareableHandle", byref(handle), c_void_p(descriptor), 1)
    return code, handle.value
def fill(address, byte):
    app.call("cuMemsetD8_v2", c_uint64(address), byte, c_size_t(SIZE))
    app.synchronize()
"""
OWNER = """
code, handle = create_physical(app, SIZE, handle_types=1)
address = mapped(handle)
fill(address, 7)
listener = socket.socket(socket.AF_UNIX)
listener.bind(PATH)
listener.listen()
descriptor = exported(handle)
say(code)
for _ in range(COUNT):
    link, _ = listener.accept()
    socket.send_fds(link, [b"x"], [descriptor])
say()
"""
IMPORTER = """
link = socket.socket(socket.AF_UNIX)
link.connect(PATH)
descriptor = socket.recv_fds(link, 1, 1)[1][0]
code, handle = imported(descriptor)
os.close(descriptor)
say(code)
address = mapped(handle, flags=1)
say(app.read(address + SIZE - 4, 4).hex(), app.memory_info())
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "s")


def owner(stage: Stage, vgpu: StagedVgpu, path: str, count: int = 1) -> Talk:
    return Talk(stage, vgpu, WORK + f"PATH, COUNT = {path!r}, {count}\n" + OWNER)


def importer(stage: Stage, vgpu: StagedVgpu, path: str, more: str = "") -> Talk:
    return Talk(stage, vgpu, WORK + f"PATH = {path!r}\n" + IMPORTER + more)


def used(stage: Stage) -> int:
    """On the card, without contexts."""
    engine = Engine(stage.gpus)
    engine.refresh()
    return engine.memory_used_bytes - engine.context_bytes * len(engine.contexts())


def test_the_owner_is_charged_and_the_importer_is_not(stage: Stage, path: str) -> None:
    first, second = stage.vgpu(memory_bytes=GIB), stage.vgpu(memory_bytes=32 << 20)
    gives = owner(stage, first, path)
    assert gives.next()[0] == [0]
    takes = importer(
        stage,
        second,
        path,
        """
app.call("cuMemRelease", c_uint64(handle))
say()                                                           # released, and still mapped
app.call("cuMemUnmap", c_uint64(address), c_size_t(SIZE))
say()
""",
    )
    (code,), slot = takes.next()
    assert (code, slot.charged_bytes) == (0, 0)
    (content, info), slot = takes.next()
    assert (content, info) == ("07" * 4, [32 << 20, 32 << 20])
    assert (slot.charged_bytes, slot.imported_bytes) == (0, SIZE)
    (slot,) = first.slots()
    assert (slot.charged_bytes, slot.committed_bytes[SHARED], slot.imported_bytes) == (SIZE, SIZE, 0)
    assert used(stage) == SIZE
    assert takes.next()[1].imported_bytes == SIZE
    assert takes.next()[1].imported_bytes == 0


def test_the_memory_goes_with_the_last_that_holds_it(stage: Stage, path: str) -> None:
    first, second = stage.vgpu(memory_bytes=GIB), stage.vgpu(memory_bytes=GIB)
    gives = owner(stage, first, path, 2)
    gives.next()
    takers = [importer(stage, second, path, "say(app.read(address, 2).hex())\nos.kill(os.getpid(), 9)") for _ in "12"]
    for taker in takers:
        taker.next()
        taker.stage.heard(taker.process)
    gives.process.send_signal(signal.SIGKILL)
    gives.process.wait()
    for taker in takers:
        stage.tell(taker.process)
        assert taker.stage.heard(taker.process).strip() == '["0707"]'
    assert used(stage) == SIZE
    for taker in takers:
        eventually(lambda: used(stage) == SIZE, "it is charged once")
        stage.tell(taker.process)
        taker.process.wait()
    eventually(lambda: used(stage) == 0, "it is gone")


def test_what_no_process_exported_cannot_be_imported(stage: Stage) -> None:
    talk = Talk(stage, stage.vgpu(), WORK + 'say(imported(os.memfd_create("x"))[0], imported(1000)[0])')
    (other, none), slot = talk.next()
    assert (other, none, slot.imported_bytes) == (1, 1, 0)


def test_an_owner_may_import_its_own_memory(stage: Stage) -> None:
    talk = Talk(
        stage,
        stage.vgpu(memory_bytes=GIB),
        WORK
        + """
code, handle = create_physical(app, SIZE, handle_types=1)
again = imported(exported(handle))[1]
first, second = mapped(handle), mapped(again)
fill(first, 9)
say(app.read(second, 2).hex())
for address in (first, second):
    app.call("cuMemUnmap", c_uint64(address), c_size_t(SIZE))
app.call("cuMemRelease", c_uint64(handle))
say(app.read(mapped(again), 2).hex())
""",
    )
    (content,), slot = talk.next()
    assert (content, slot.charged_bytes) == ("0909", SIZE)
    assert talk.next()[0] == ["0909"]


def test_memory_of_a_swapped_vgpu_can_be_shared_and_imported(stage: Stage, path: str) -> None:
    first, second = swappable(stage, GIB), stage.vgpu(memory_bytes=GIB)
    gives = owner(stage, first, path)
    assert gives.next()[0] == [0]
    takes = importer(stage, second, path)
    takes.next()
    (content, _), slot = takes.next()
    assert (content, slot.imported_bytes) == ("07" * 4, SIZE)
    (slot,) = first.slots()
    assert (slot.charged_bytes, slot.committed_bytes[SHARED]) == (SIZE, SIZE)


def test_to_export_memory_is_charged_once_at_every_moment(stage: Stage, path: str) -> None:
    """Also in a vGPU that has room for it only once."""
    vgpu = stage.vgpu(memory_bytes=SIZE)
    assert owner(stage, vgpu, path).next()[0] == [0]
    (slot,) = vgpu.slots()
    assert (slot.committed_bytes[SHARED], slot.charged_bytes, slot.peak_bytes) == (SIZE, SIZE, SIZE)
