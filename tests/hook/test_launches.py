"""Every form of a launch is held until a lease comes, is let through once, and is paid for."""

from __future__ import annotations

import pytest

from client_hook.symbols import intercepted
from cython_ext.readings import GrantsFlag
from tests.hook.programs import PROLOGUE
from tests.hook.stage import MS, Stage, eventually

LAUNCHES = """
class Config(ctypes.Structure):
    _fields_ = [("shape", c_uint * 7), ("stream", c_void_p), ("attributes", c_void_p), ("count", c_uint)]

name, ms = NAME, 50.0
kernel = app.kernel(ms, c_void_p(STREAM))
function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra = kernel.arguments
if name.startswith("cuLaunchCooperativeKernel"):
    arguments = function, gx, gy, gz, bx, by, bz, shared, stream, parameters
elif name.startswith("cuLaunchKernelEx"):
    config = Config((c_uint * 7)(gx, gy, gz, bx, by, bz, shared), stream, None, 0)
    arguments = byref(config), function, parameters, extra
elif name.startswith("cuGraphLaunch"):
    capturing, graph, executable = app.new_stream(1), c_void_p(), c_void_p()
    app.call("cuStreamBeginCapture_v2", capturing, 2)
    app.kernel(ms, capturing).launch()
    app.call("cuStreamEndCapture", capturing, byref(graph))
    app.call("cuGraphInstantiateWithFlags", byref(executable), graph, c_uint64(0))
    arguments = executable, stream
else:
    arguments = function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra
print("ready", flush=True)
print(app.result(name, *arguments), flush=True)
input()
"""
NAMES = ["cuLaunchKernel", "cuLaunchKernelEx", "cuLaunchCooperativeKernel", "cuGraphLaunch"]


@pytest.mark.parametrize("name", [*NAMES, *(f"{name}_ptsz" for name in NAMES)])
@pytest.mark.parametrize("stream", [0, 1, 2], ids=["null", "legacy", "per-thread"])
def test_it_waits_for_a_lease_and_is_paid_for(stage: Stage, name: str, stream: int) -> None:
    assert name in {symbol.name for symbol in intercepted()}
    vgpu = stage.vgpu()
    program = stage.start(f"NAME, STREAM = {name!r}, {stream}\n" + PROLOGUE + LAUNCHES, stage.environment(vgpu))
    assert stage.heard(program) == "ready"
    vgpu.await_want()
    assert (vgpu.slot().launches, vgpu.slot().undrained) == (0, False)
    vgpu.grants.flags = GrantsFlag.CONTENDED
    with vgpu.granting(60_000 * MS):
        assert stage.heard(program) == "0"
        eventually(lambda: vgpu.slot().launches == 1 and not vgpu.slot().undrained, "it was counted, and drained")
        assert vgpu.slot().busy_ns > MS  # of 50; its thread may have been kept from noting the start
