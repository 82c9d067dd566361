"""The switch of ``benchmarks/suite/workloads/bypass.c``, found in each way in which CUDA libraries find a launch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks.suite.stage import Ground

PROGRAM = """
import ctypes, json
from ctypes import byref, c_int, c_uint64, c_void_p
from vgpu.workload.driver import Gpu, Kernel
from vgpu.workload.kernels import PTX

gpu = Gpu(PTX)
tiny = Kernel(gpu, "tiny", 1, 32, (c_uint64(0),))
address = gpu.library.cuGetProcAddress_v2
address.argtypes = (ctypes.c_char_p, c_void_p, c_int, c_uint64, c_void_p)

def asked(name, version, ask=address):
    found = c_void_p()
    assert ask(name, byref(found), version, 0, None) == 0
    return found.value

again = ctypes.CFUNCTYPE(c_int, *address.argtypes)(asked(b"cuGetProcAddress", 12000))
kind = ctypes.CFUNCTYPE(c_int, *gpu.library.cuLaunchKernel.argtypes)
ways = {
    "dlsym": gpu.library.cuLaunchKernel,
    "cuGetProcAddress": kind(asked(b"cuLaunchKernel", 7000)),
    "cuGetProcAddress of itself": kind(asked(b"cuLaunchKernel", 7000, again)),
}
own = ctypes.CDLL(None)
switch, counts = c_int.in_dll(own, "bypass_direct"), (c_uint64 * 2).in_dll(own, "bypass_launches")
said = {}
for name, launch in ways.items():
    before = list(counts)
    for direct in (0, 1, 1):
        switch.value = direct
        assert launch(*tiny.arguments) == 0
    switch.value = 0
    said[name] = [after - earlier for after, earlier in zip(counts, before)]
gpu.synchronize()
print(json.dumps(said))
"""


@pytest.mark.slow
def test_every_way_to_a_launch_leads_through_the_switch() -> None:
    with Ground(simulated=True) as ground:
        node = ground.node("temporal")
        done = subprocess.run(
            [*node.vgpuctl, "run", "--sm", "100", "--mem", "1G", "--name", "one", "--", sys.executable, "-c", PROGRAM],
            env=node.environment | {"LD_PRELOAD": str(ground.bypass())},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    ways = ("dlsym", "cuGetProcAddress", "cuGetProcAddress of itself")
    assert json.loads(done.stdout) == {way: [1, 2] for way in ways}


@pytest.mark.slow
def test_without_a_hook_both_ways_are_the_drivers() -> None:
    with Ground(simulated=True) as ground:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env=ground.plain() | {"LD_PRELOAD": str(ground.bypass())},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["dlsym"] == [1, 2]
