"""A program that launches, fills, copies and frees as it is told, with a lease or ahead of one."""

from __future__ import annotations

import time

from cython_ext.readings import GrantsFlag
from tests.hook.programs import PROLOGUE, drained
from tests.hook.stage import MS, Stage, StagedVgpu, eventually

COMMANDS = """
import mmap, signal, time
streams = {"own": app.stream, "legacy": LEGACY, "per-thread": PER_THREAD}
kernels = {name: app.kernel(0.5, stream) for name, stream in streams.items()}
other = app.new_stream(1)
fine = app.kernel(0.002, other)
beside_kernel, filling, word, launching = app.kernel(0.5, other), app.event(), None, None
executable = c_void_p()
done, graph = app.event(), c_void_p()
block, filled = app.allocate(1 << 20), app.allocate(2 << 20)
kernel, stream, results = kernels["own"], app.stream, []

def warm():
    # long enough for the lease to count for something, and every kernel known
    for each in (*kernels.values(), beside_kernel):
        for _ in range(40):
            each.launch()
            app.synchronize()
    for name in streams:
        use(name)
        for _ in range(10):
            fill()
            app.synchronize()
    use("own")

def make_graph():
    # 300 kernels of 2 us, its length known
    app.call("cuStreamBeginCapture_v2", other, 2)
    for _ in range(300):
        fine.launch()
    app.call("cuStreamEndCapture", other, byref(graph))
    app.call("cuGraphInstantiateWithFlags", byref(executable), graph, c_uint64(0))
    graphs(20, True)

def graphs(count, one_by_one=False):
    for _ in range(int(count)):
        app.call("cuGraphLaunch", executable, app.stream)
        if one_by_one:
            app.synchronize()
    return 0

def fill():
    result = app.result("cuMemsetD8Async", c_uint64(filled), 1, c_size_t(2 << 20), stream)
    app.result("cuEventRecord", done, stream)
    return result

def fill_now():
    return app.result("cuMemsetD8_v2", filled, 1, 2 << 20) or "filled"

def read():
    return app.read(filled, 1)[0]

def use(name):
    global kernel, stream
    kernel, stream = kernels[name], streams[name]

def launch(count):
    result = 0
    for _ in range(int(count)):
        result = result or app.result("cuLaunchKernel", *kernel.arguments)
    app.result("cuEventRecord", done, stream)
    return result

def query():
    return app.result("cuEventQuery", done)

def beside(name, *arguments):
    # in a thread of its own, which is not waited for
    context = c_void_p()
    app.call("cuCtxGetCurrent", byref(context))
    def run():
        app.call("cuCtxSetCurrent", context)
        results.append(globals()[name](*arguments))
    threading.Thread(target=run, daemon=True).start()

def free():
    app.free(block)
    return "freed"

def records(count):
    # more than the driver's queue has places for: the last ones wait in there
    return [app.result("cuEventRecord", done, stream) for _ in range(int(count))][-1]

def hold_other(value):
    # "other" waits until the word has at least this value
    global word
    if word is None:
        word = c_uint.from_buffer(mmap.mmap(-1, 4096))
        app.call("cuMemHostRegister_v2", byref(word), c_size_t(4096), 2)
    address = c_uint64()
    app.call("cuMemHostGetDevicePointer_v2", byref(address), byref(word), 0)
    return app.result("cuStreamWaitValue32_v2", other, address, c_uint(int(value)), 0)

def let_other(value):
    word.value = int(value)

def fill_other():
    # more than the driver's queue has places for
    return max([app.result("cuEventRecord", filling, other) for _ in range(2000)])

def launch_other():
    global launching
    launching = threading.get_ident()
    return app.result("cuLaunchKernel", *beside_kernel.arguments)

def launch_unknown():
    # a grid that was never launched: a marker follows this launch at once
    function, blocks, *rest = kernel.arguments
    result = app.result("cuLaunchKernel", function, blocks // 2, *rest)
    app.result("cuEventRecord", done, stream)
    return result

def other_is_done():
    return app.result("cuStreamQuery", other)

def interrupt_launch():
    # the thread waits in the handler until another signal comes
    libc = ctypes.CDLL(None)
    libc.signal(10, ctypes.cast(libc.pause, c_void_p))
    libc.signal(12, ctypes.cast(libc.getpid, c_void_p))
    signal.pthread_kill(launching, 10)

def resume_launch():
    signal.pthread_kill(launching, 12)

def exit_on_alarm():
    # as programs do that POSIX forbids it
    libc = ctypes.CDLL(None)
    libc.signal(14, ctypes.cast(libc.exit, c_void_p))
    libc.alarm(1)

def seen():
    return results

def hold_and_release():
    # one reference more to the primary context, and one fewer: it lives on
    context = c_void_p()
    app.call("cuDevicePrimaryCtxRetain", byref(context), app.device)
    app.call("cuDevicePrimaryCtxRelease_v2", app.device)

def enter_guest():
    # a context of its own, beside the primary one
    global kernel, stream, done, guest, home, own_kernel, own_done
    guest, home, own_kernel, own_done = c_void_p(), c_void_p(), kernel, done
    app.call("cuCtxGetCurrent", byref(home))
    app.call("cuCtxCreate_v2", byref(guest), 0, app.device)
    app.call("cuModuleLoadData", byref(app.module), PTX.encode())
    stream = app.new_stream(1)
    kernel, done = app.kernel(0.5, stream), app.event()

def end_guest():
    global kernel, stream, done
    app.call("cuCtxDestroy_v2", guest)
    app.call("cuCtxSetCurrent", home)
    kernel, stream, done = own_kernel, app.stream, own_done

def rehearse():
    for _ in range(40):
        kernel.launch()
        app.call("cuStreamSynchronize", stream)

def leave():
    sys.exit(0)

def capture():
    app.call("cuStreamBeginCapture_v2", other, 2)

def captured():
    app.call("cuStreamEndCapture", other, byref(graph))

def synchronize():
    return app.result("cuCtxSynchronize")

for line in sys.stdin:
    name, *arguments = line.split()
    print(globals()[name](*arguments), flush=True)
"""


DESTRUCTOR = """
import ctypes
destructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: app.library.{call})
ctypes.CDLL(None).__cxa_atexit(destructor, None, None)
"""


class Program:
    """It does what it is told, and answers when that is done. ``destructor``: a call of the driver that it makes when
    it ends, as what was registered before the driver was loaded does."""

    def __init__(
        self, stage: Stage, vgpu: StagedVgpu, first: str = "warm", *, destructor: str = "", **environment: str
    ) -> None:
        before = DESTRUCTOR.format(call=destructor) if destructor else ""
        self.stage, self.vgpu = stage, vgpu
        vgpu.grants.flags = GrantsFlag.CONTENDED
        vgpu.window_ns = vgpu.grants.window_ns = 12 * MS
        self.process = stage.start(before + PROLOGUE + COMMANDS, stage.environment(vgpu, **environment))
        stage.tell(self.process, first)
        with vgpu.granting(60_000 * MS):
            assert stage.heard(self.process) == "None"
            eventually(lambda: not vgpu.slot().want, "it has nothing to do, and gives the rest back")
            eventually(lambda: not stage.dispatcher.wants(vgpu.key), "that is known")
        self.epoch = vgpu.slot().last_epoch

    def rehearse(self) -> None:
        """Its kernel's length is known afterwards."""
        self.stage.tell(self.process, "rehearse")
        with self.vgpu.granting(60_000 * MS):
            assert self.stage.heard(self.process) == "None"
            eventually(lambda: not self.vgpu.slot().want, "it has nothing to do, and gives the rest back")
            eventually(lambda: not self.stage.dispatcher.wants(self.vgpu.key), "that is known")
        self.epoch = self.vgpu.slot().last_epoch

    def queues_and_runs(self) -> None:
        """Ahead of a lease, and under it."""
        assert self.ask("launch 1") == "0"
        self.stays_queued()
        self.epoch = self.lease(60_000 * MS)
        eventually(self.is_done, "it runs")
        assert not drained(self.stage, self.vgpu, self.epoch).wants

    def waits_in_the_gate(self) -> None:
        """Until there is a lease."""
        self.ask("beside launch 1")
        self.vgpu.await_want()
        time.sleep(0.05)
        assert self.ask("seen") == "[]"
        self.lease(60_000 * MS)
        eventually(lambda: self.ask("seen") == "[0]", "it is launched")

    def lease(self, length_ns: int) -> int:
        self.vgpu.await_want()
        return self.vgpu.lease(time.monotonic_ns(), time.monotonic_ns() + length_ns)

    def ask(self, command: str) -> str:
        self.stage.tell(self.process, command)
        return self.stage.heard(self.process)

    def is_done(self) -> bool:
        return self.ask("query") == "0"

    def stays_queued(self) -> None:
        """(Nothing can be awaited: nothing is to happen.)"""
        time.sleep(0.05)
        assert not self.is_done()
        slot = self.vgpu.slot()
        assert (slot.want, slot.undrained, slot.last_epoch) == (True, False, self.epoch)
