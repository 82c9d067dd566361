"""Server and broker die together: the activity page is lost; its processes move to the next one with what they own."""

from __future__ import annotations

import pytest

from cython_ext.readings import SlotState
from tests.hook.stage import GIB, Stage, eventually

PROGRAM = """
import ctypes, sys, threading
from tests.hook.app import App
app = App()
kernel = app.kernel(0.5)
context = ctypes.c_void_p()
app.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), app.device)
kept = app.allocate(3 * (1 << 30))
count = 0
def work():
    global count
    app.call("cuCtxSetCurrent", context)
    while True:
        app.call("cuLaunchKernel", *kernel.arguments)
        count += 1
threading.Thread(target=work, daemon=True).start()
print("ready", flush=True)
for line in sys.stdin:
    if line == "free\\n":
        app.free(kept)
    print(count, app.allocate(6 * (1 << 30)) is None, flush=True)
"""


@pytest.mark.parametrize("slot", [0, 5])
def test_a_lost_activity_page(stage: Stage, slot: int) -> None:
    """Its old slot, or another one, if a newcomer was quicker."""
    vgpu = stage.vgpu(memory_bytes=8 * GIB)
    program = stage.start(PROGRAM, stage.environment(vgpu))
    assert stage.heard(program) == "ready"

    def ask(word: str = "go") -> tuple[int, bool]:
        stage.tell(program, word)
        count, refused = stage.heard(program).split()
        return int(count), refused == "True"

    def await_more() -> None:
        before, _ = ask()
        eventually(lambda: ask()[0] > before + 10, "it launches")

    vgpu.open()
    await_more()
    vgpu.next_slot = slot
    vgpu.lose_everything()
    vgpu.open()
    eventually(lambda: bool(vgpu.slots()) and vgpu.slot().state == SlotState.ACTIVE, "it is in the new page")
    assert vgpu.requests[1]["slot"] == 0
    assert (vgpu.slot().index, vgpu.slot().pid) == (slot, program.pid)
    assert vgpu.slot().charged_bytes == 3 * GIB
    await_more()
    assert ask()[1], "the limit holds for what it owned and what it asks for together"
    assert not ask("free")[1]
    assert vgpu.slot().charged_bytes == 6 * GIB
    program.kill()
    eventually(lambda: vgpu.slot().state == SlotState.DEAD, "its death is announced in the new page")


ALLOCATING = """
import ctypes, sys, threading
from tests.hook.app import App
app = App()
context = ctypes.c_void_p()
app.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), app.device)
kept = app.allocate(3 * (1 << 30))
pairs = [0, 0, 0]
stopped = False
def work(at):
    app.call("cuCtxSetCurrent", context)
    while not stopped:
        app.free(app.allocate((4096, 2 << 20, 5 << 20)[at]))
        pairs[at] += 1
threads = [threading.Thread(target=work, args=(at,)) for at in range(3)]
for thread in threads: thread.start()
print("ready", flush=True)
for line in sys.stdin:
    if line == "stop\\n":
        stopped = True
        for thread in threads: thread.join()
    print(min(pairs), flush=True)
"""


def test_what_is_allocated_and_freed_while_the_page_is_lost_is_in_one_of_them(stage: Stage) -> None:
    """Three threads never pause; whichever page an operation falls on, what is left in the end is what was kept."""
    vgpu = stage.vgpu(memory_bytes=8 * GIB)
    program = stage.start(ALLOCATING, stage.environment(vgpu))
    assert stage.heard(program) == "ready"

    def pairs(word: str = "go") -> int:
        stage.tell(program, word)
        return int(stage.heard(program))

    for slot in (5, 0, 7):
        vgpu.open()
        enough = pairs() + 20
        eventually(lambda enough=enough: pairs() > enough, "each thread allocates and frees")  # type: ignore[misc]
        vgpu.next_slot = slot
        vgpu.lose_everything()
        vgpu.open()
        eventually(lambda: bool(vgpu.slots()) and vgpu.slot().state == SlotState.ACTIVE, "it is in the new page")
    pairs("stop")
    owned = vgpu.slot()
    assert (owned.index, owned.reserved_bytes, owned.charged_bytes) == (7, 0, 3 * GIB)
