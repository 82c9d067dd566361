"""A program under the real hook that works for ever, checks what it has in memory, and says how often it did."""

from __future__ import annotations

import json
import time
from typing import Any

from cython_ext.simengine import Engine
from tests.integration.node import SimulatedNode, eventually
from vgpu.protocol.messages import VgpuStatus

GIB = 1 << 30

PROGRAM = """
import json, subprocess, sys, threading
from ctypes import byref, c_char, c_size_t, c_uint64, c_void_p
import pynvml
from tests.hook.app import App
app = App()
pynvml.nvmlInit()
first = pynvml.nvmlDeviceGetHandleByIndex(0)
context = c_void_p()
app.call("cuCtxGetCurrent", byref(context))
block = app.allocate(int(sys.argv[1]))
app.call("cuMemsetD8_v2", c_uint64(block), 7, 4096)
kernel = app.kernel(1.0)
count = 0
def work():
    global count
    app.call("cuCtxSetCurrent", context)
    while True:
        kernel.launch()
        app.synchronize()
        assert app.read(block, 4096) == bytes([7]) * 4096
        count += 1
def uuid():
    raw = (c_char * 16)()
    app.call("cuDeviceGetUuid_v2", raw, app.device)
    return raw.raw.hex()
def nvml(handle):
    listed = [process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)]
    return [pynvml.nvmlDeviceGetMemoryInfo(handle).total, sorted(listed)]
def now():
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    index, uuid = pynvml.nvmlDeviceGetIndex(handle), pynvml.nvmlDeviceGetUUID(handle)
    return [pynvml.nvmlDeviceGetCount(), uuid, index, nvml(handle)]
def child():
    body = "from tests.hook.app import App; app = App(); from ctypes import *; raw = (c_char * 16)(); "
    body += "app.call('cuDeviceGetUuid_v2', raw, app.device); print(raw.raw.hex())"
    return subprocess.run([sys.executable, "-c", body], capture_output=True, text=True).stdout.strip()
def allocation(size):
    return app.result("cuMemAlloc_v2", byref(c_uint64()), c_size_t(size))
threading.Thread(target=work, daemon=True).start()
print("started", flush=True)
for line in sys.stdin:
    print(json.dumps(eval(line)) if line.strip() else count, flush=True)
"""


class Spoken:
    """A program that says "started", and then answers each line with one."""

    def __init__(self, node: SimulatedNode, vgpu: VgpuStatus, body: str, *arguments: str) -> None:
        self.popen = node.program(vgpu, body, *arguments)
        assert self.heard() == "started"

    def heard(self) -> str:
        assert self.popen.stdout is not None
        return self.popen.stdout.readline().strip()

    def say(self, line: str) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(f"{line}\n")
        self.popen.stdin.flush()

    def end(self) -> None:
        self.popen.kill()
        self.popen.communicate()


class Worker(Spoken):
    def __init__(self, node: SimulatedNode, vgpu: VgpuStatus, memory_bytes: int) -> None:
        super().__init__(node, vgpu, PROGRAM, str(memory_bytes))

    def asked(self, expression: str) -> Any:
        """What an expression is there."""
        self.say(expression)
        return json.loads(self.heard())

    @property
    def count(self) -> int:
        return int(self.asked(""))

    def goes_on(self) -> None:
        before = self.count
        eventually(lambda: self.count > before + 10, "it works")

    def stands_still(self) -> bool:
        before = self.count
        time.sleep(0.2)  # nothing is to happen
        return self.count == before


def on_gpu(node: SimulatedNode, gpu: int = 0) -> dict[int, int]:
    """Bytes by pid."""
    engine = Engine(node.paths.runtime / "sim", gpu)
    engine.refresh()
    return {pid: taken for pid, _, taken, *_ in engine.contexts().values()}


def state(node: SimulatedNode, vgpu: VgpuStatus) -> str:
    reading = node.reading(vgpu.vgpu_id)
    assert reading is not None
    return reading.state
