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


ENDING = """
# Threads whose last act is a call of the driver: a destructor of the program's, behind ours.
import sys, threading
from ctypes import CDLL, byref, c_uint, c_uint64, c_void_p, cast, create_string_buffer
from tests.hook.app import App
libc = CDLL(None)
app = App()
page, context = c_void_p(), c_void_p()
app.call("cuCtxGetCurrent", byref(context))

def at_end(function):
    key = c_uint()
    assert libc.pthread_key_create(byref(key), cast(function, c_void_p)) == 0
    return key

def ends_with(**acts):
    "A thread that is known to the hook, and does these to itself at its end."
    def run():
        app.call("cuCtxSetCurrent", context)
        for key, value in acts.values():
            libc.pthread_setspecific(key, c_void_p(value))
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
"""


def test_a_thread_that_calls_at_its_very_end_takes_no_other_threads_record(stage: Stage) -> None:
    """Else it would be counted out of the driver when the other one ends, and once more when it comes back."""
    vgpu = stage.vgpu()
    program = """
app.call("cuMemHostAlloc", byref(page), 4096, 0)
app.call("cuStreamWaitValue32_v2", app.stream, c_uint64(page.value), 5, 0)
semaphores = [create_string_buffer(64) for _ in range(2)]
for semaphore in semaphores:
    libc.sem_init(semaphore, 0, 0)
ready, go = (cast(s, c_void_p).value for s in semaphores)
ends_with(one=(at_end(libc.sem_post), ready), two=(at_end(libc.sem_wait), go),
          three=(at_end(app.library.cuStreamSynchronize), app.stream.value))
libc.sem_wait(c_void_p(ready))
leave = threading.Event()
def other():
    app.call("cuCtxSetCurrent", context)
    libc.sem_post(c_void_p(go))
    leave.wait()
thread = threading.Thread(target=other)
thread.start()
print("ready", flush=True)
sys.stdin.readline()
leave.set()
thread.join()
c_uint.from_address(page.value).value = 5
sys.stdin.readline()
"""
    process = stage.start(ENDING + program, stage.environment(vgpu))
    assert stage.heard(process) == "ready"
    set_flags(vgpu, GrantsFlag.STILL)
    eventually(lambda: vgpu.slot().want, "the first thread is in the driver")
    stage.tell(process)
    eventually(lambda: not vgpu.slot().want, "nobody is")
    stage.tell(process)


def test_threads_that_call_at_their_very_end_leave_nothing_behind(stage: Stage) -> None:
    """A record each, which the hook thread would look at for ever. They lie in memory that a fork wipes."""
    program = """
import re
def wiped_kib():
    with open("/proc/self/smaps") as file:
        mappings = file.read().split("VmFlags:")
    pairs = zip(mappings, mappings[1:])
    return sum(int(re.search(r"Size: +(\\d+)", m)[1]) for m, flags in pairs if " wf" in flags.split("\\n")[0])
last = at_end(app.library.cuStreamQuery)
ends_with(one=(last, app.stream.value))
before = wiped_kib()
for _ in range(500):
    ends_with(one=(last, app.stream.value))
print(wiped_kib() - before <= 24, before > 0, flush=True)  # a thread may begin before the last one has ended
"""
    ran = stage.run(ENDING + program, stage.environment(stage.vgpu()))
    assert ran.stdout == "True True\n", ran.stderr
