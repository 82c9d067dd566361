"""A thread that is in the driver while its program stands still, checkpointed, wants the GPU: its hook says so."""

from __future__ import annotations

from cython_ext.readings import GrantsFlag
from tests.hook.stage import Stage, StagedVgpu, eventually

WAITER = """
# A thread waits in the driver for a word that the main one writes; no launch, so nobody wants anything.
import sys, threading
from ctypes import CDLL, byref, c_uint, c_uint64, c_void_p, cast
from tests.hook.app import App
libc = CDLL(None)
libc.__cxa_atexit(cast(libc.pause, c_void_p), None, None)  # after the hook's exit handler, as the driver's own
app = App()
page, context = c_void_p(), c_void_p()
app.call("cuCtxGetCurrent", byref(context))
app.call("cuMemHostAlloc", byref(page), 4096, 0)
app.call("cuStreamWaitValue32_v2", app.stream, c_uint64(page.value), 5, 0)
def wait():
    app.call("cuCtxSetCurrent", context)
    app.synchronize()
    print("over", flush=True)
threading.Thread(target=wait).start()
print("ready", flush=True)
sys.stdin.readline()
c_uint.from_address(page.value).value = 5
sys.stdin.readline()
"""


def set_flags(vgpu: StagedVgpu, flags: GrantsFlag) -> None:
    vgpu.grants.flags = vgpu.grants.flags & ~(GrantsFlag.STILL | GrantsFlag.AWAY) | flags
    vgpu.grants.wake()


def test_a_thread_in_the_driver_wants_while_its_program_stands_still(stage: Stage) -> None:
    vgpu = stage.vgpu()
    process = stage.start(WAITER, stage.environment(vgpu))
    assert stage.heard(process) == "ready"
    assert not vgpu.slot().want
    set_flags(vgpu, GrantsFlag.STILL)
    eventually(lambda: vgpu.slot().want, "it wants")
    vgpu.await_want()
    set_flags(vgpu, GrantsFlag(0))
    eventually(lambda: not vgpu.slot().want, "it goes on, and wants nothing")
    set_flags(vgpu, GrantsFlag.STILL)
    eventually(lambda: vgpu.slot().want, "it wants")
    stage.tell(process)
    assert stage.heard(process) == "over"
    eventually(lambda: not vgpu.slot().want, "nobody is in the driver")
    stage.tell(process)


def test_a_program_that_ends_says_so_and_one_that_is_swapped_does_not_want(stage: Stage) -> None:
    """What the driver does at its exit waits, too. Of a vGPU that is swapped it answers."""
    vgpu = stage.vgpu()
    process = stage.start(WAITER, stage.environment(vgpu))
    assert stage.heard(process) == "ready"
    set_flags(vgpu, GrantsFlag.STILL | GrantsFlag.AWAY)
    stage.tell(process)
    assert stage.heard(process) == "over"
    assert not vgpu.slot().want
    assert not vgpu.activity.ends
    set_flags(vgpu, GrantsFlag.STILL)
    stage.tell(process)
    eventually(lambda: vgpu.activity.ends, "it is about to end")
