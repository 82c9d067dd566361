"""Programs under the hook for the tests of the gate, and what the dispatcher hears of them."""

from __future__ import annotations

import time
from collections.abc import Callable

from cython_ext.readings import Event, EventKind
from tests.hook.stage import Stage, StagedVgpu, eventually

PROLOGUE = """
import ctypes, sys, threading
from ctypes import byref, c_size_t, c_uint, c_uint64, c_void_p
from tests.hook.app import App, LEGACY, PER_THREAD
from vgpu.workload.kernels import PTX
app = App()
"""

ENDLESS = """
# Launches for ever; answers every line of input with the number of launches so far, or the error that ended them.
count, error = 0, 0
kernel = app.kernel({ms})
def work():
    global count, error
    app.call("cuCtxSetCurrent", context)
    while not error:
        error = app.result("cuLaunchKernel", *kernel.arguments)
        count += 1
context = c_void_p()
app.call("cuDevicePrimaryCtxRetain", byref(context), app.device)
threading.Thread(target=work, daemon=True).start()
print("ready", flush=True)
for line in sys.stdin:
    print(count, error, flush=True)
"""


class Endless:
    """A program that launches kernels of ``ms`` without end."""

    def __init__(self, stage: Stage, vgpu: StagedVgpu, ms: float = 0.5) -> None:
        self.stage = stage
        self.process = stage.start(PROLOGUE + ENDLESS.format(ms=ms), stage.environment(vgpu))
        assert stage.heard(self.process) == "ready"

    def ask(self) -> tuple[int, int]:
        """(launches so far, error that ended them)."""
        self.stage.tell(self.process)
        count, error = self.stage.heard(self.process).split()
        return int(count), int(error)

    def await_start(self) -> None:
        eventually(lambda: self.ask()[0] > 0, "it launches")

    def await_more(self) -> None:
        before = self.ask()[0]
        eventually(lambda: self.ask()[0] > before + 10, "it launches")

    def is_held(self) -> bool:
        """Whether it submits nothing for a while. (Nothing can be awaited: nothing is to happen.)"""
        before = self.ask()[0]
        time.sleep(0.2)
        # One launch may have been through already: where the driver's queue was full, it waits there.
        return self.ask()[0] - before <= 1


def next_event(stage: Stage, matches: Callable[[Event], bool], what: str) -> Event:
    found: list[Event] = []

    def look() -> bool:
        found.extend(e for e in stage.dispatcher.events() if matches(e))
        return bool(found)

    eventually(look, what)
    return found[0]


def drained(stage: Stage, vgpu: StagedVgpu, epoch: int) -> Event:
    return next_event(
        stage,
        lambda e: e.kind == EventKind.DRAINED and (e.vgpu, e.epoch) == (vgpu.key, epoch),
        f"lease {epoch} drained",
    )


def used_lease(stage: Stage, vgpu: StagedVgpu, length_ns: int) -> Event:
    """Give it a lease that it works under, which on a busy machine may take another one or two: those it slept through.
    How that lease went, which has drained."""
    while True:
        vgpu.await_want()
        start_ns = time.monotonic_ns()
        epoch = vgpu.lease(start_ns, start_ns + length_ns)
        told = {}
        for event in stage.events(EventKind.WENT, EventKind.DRAINED):
            if (event.vgpu, event.epoch) == (vgpu.key, epoch):
                told[event.kind] = event
            if EventKind.DRAINED in told:
                break
        if vgpu.slot().last_epoch == epoch:
            eventually(lambda: vgpu.slot().drained_epoch == epoch, "the slot says so, too")  # noqa: B023 - now
            return told[EventKind.WENT]
