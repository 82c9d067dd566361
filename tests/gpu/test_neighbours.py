"""What a program of a vGPU sees of its neighbours, and its children of the hook's variables, on a real GPU."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest

from benchmarks.node import Node

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

OWNER = """
    import sys
    from vgpu.workload.driver import Gpu
    from vgpu.workload.kernels import PTX
    gpu = Gpu(PTX)
    print("attached", flush=True)
    sys.stdin.read()
"""
LISTS = """
    import ctypes, json
    from ctypes import byref, c_uint, c_uint64, c_void_p, create_string_buffer
    nvml = ctypes.CDLL("libnvidia-ml.so.1")
    assert nvml.nvmlInit_v2() == 0
    device = c_void_p()
    assert nvml.nvmlDeviceGetHandleByIndex_v2(0, byref(device)) == 0
    found = {}
    for name, function in (("v1", ""), ("v2", "_v2"), ("v3", "_v3")):
        count, room = c_uint(64), create_string_buffer(64 * 64)
        code = getattr(nvml, "nvmlDeviceGetComputeRunningProcesses" + function)(device, byref(count), room)
        found[name] = count.value if code == 0 else -code
    class Details(ctypes.Structure):
        _fields_ = [("version", c_uint), ("mode", c_uint), ("count", c_uint), ("entries", c_void_p)]
    room = create_string_buffer(64 * 32)
    details = Details(24 | 1 << 24, 0, 64, ctypes.cast(room, c_void_p))
    code = nvml.nvmlDeviceGetRunningProcessDetailList(device, byref(details))
    found["details"] = details.count if code == 0 else -code
    class Utilization(ctypes.Structure):
        _fields_ = [("version", c_uint), ("count", c_uint), ("since", c_uint64), ("entries", c_void_p)]
    room = create_string_buffer(64 * 64)
    utilization = Utilization(24 | 1 << 24, 64, 0, ctypes.cast(room, c_void_p))
    code = nvml.nvmlDeviceGetProcessesUtilizationInfo(device, byref(utilization))
    found["utilization"] = utilization.count if code == 0 else 0
    print(json.dumps(found))
"""
CHILDREN = """
    import ctypes, json, os, subprocess, sys
    before = dict(os.environ)
    cu = ctypes.CDLL("libcuda.so.1")
    context, device = ctypes.c_void_p(), ctypes.c_int()
    assert cu.cuInit(0) == 0
    assert cu.cuDeviceGet(ctypes.byref(device), 0) == 0
    assert cu.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
    told = subprocess.run(["env", "-0"], capture_output=True).stdout.decode().split("\\0")
    after = dict(line.split("=", 1) for line in told if line)
    changed = {name: after.get(name) for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    print(json.dumps(changed))
"""


def test_no_function_of_nvml_lists_a_neighbour(node: Node) -> None:
    """By the public functions. nvidia-smi prints its table from a private one (docs/internals/driver-functions.md)."""
    neighbour = subprocess.Popen(
        [*node.vgpuctl, "run", "--sm", "20", "--mem", "4G", "--", sys.executable, "-c", textwrap.dedent(OWNER)],
        env=node.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert neighbour.stdout is not None
        assert neighbour.stdout.readline() == "attached\n"
        listing = textwrap.dedent(LISTS)
        outside = subprocess.run([sys.executable, "-c", listing], capture_output=True, text=True, check=False)
        assert outside.returncode == 0, outside.stderr
        everywhere = json.loads(outside.stdout)
        assert all(everywhere[name] for name in ("v1", "v2", "v3", "details")), everywhere
        command = [*node.vgpuctl, "run", "--sm", "20", "--mem", "4G", "--", sys.executable, "-c", listing]
        inside = subprocess.run(command, env=node.environment, capture_output=True, text=True, check=False)
        assert inside.returncode == 0, inside.stderr
        assert not any(json.loads(inside.stdout).values()), inside.stdout
    finally:
        neighbour.kill()
        neighbour.communicate()


@pytest.mark.parametrize("mode", ["node", "spatial_node"])
@pytest.mark.parametrize("visible", [None, "0"])
def test_children_find_the_users_variables(request: pytest.FixtureRequest, mode: str, visible: str | None) -> None:
    place: Node = request.getfixturevalue(mode)
    environment = {name: value for name, value in place.environment.items() if name != "CUDA_VISIBLE_DEVICES"}
    environment |= {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    command = [*place.vgpuctl, "run", "--sm", "20", "--mem", "4G", "--", sys.executable, "-c"]
    command.append(textwrap.dedent(CHILDREN))
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert ran.returncode == 0, ran.stderr
    changed = json.loads(ran.stdout.splitlines()[-1])
    assert not {name for name in changed if name.startswith("CUDA_")}, changed
