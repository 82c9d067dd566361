"""Programs under the hook that say what they see of their memory, and wait for a word before they go on."""

from __future__ import annotations

import json
from typing import Any

from cython_ext.readings import SlotReading
from tests.hook.stage import Stage, StagedVgpu

PROLOGUE = """
import ctypes, json, sys
from ctypes import byref, c_size_t, c_uint, c_uint64, c_void_p
from tests.hook.app import App, create_physical
app = App()
GIB = 1 << 30
def say(*values):
    print(json.dumps(values), flush=True)
    input()
"""

THREADS = """
import threading
def in_eight_threads(act):
    def work():
        gpu = ctypes.CDLL("libcuda.so.1")
        context = c_void_p()
        gpu.cuDevicePrimaryCtxRetain(byref(context), app.device)
        gpu.cuCtxSetCurrent(context)
        act(gpu)
    threads = [threading.Thread(target=work) for _ in range(8)]
    for t in threads: t.start()
    for t in threads: t.join()
"""


class Talk:
    """A program that says what it sees and waits for a word before it goes on."""

    def __init__(self, stage: Stage, vgpu: StagedVgpu, body: str, **environment: str) -> None:
        self.stage = stage
        self.vgpu = vgpu
        vgpu.open()
        self.process = stage.start(PROLOGUE + body, stage.environment(vgpu, **environment))

    def next(self) -> tuple[Any, SlotReading]:
        """What it said, and its slot as it was then."""
        said = json.loads(self.stage.heard(self.process))
        (slot,) = [slot for slot in self.vgpu.slots() if slot.pid == self.process.pid]
        self.stage.tell(self.process)
        return said, slot
