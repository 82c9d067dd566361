"""What a program of a vGPU sees of its neighbours, and its children of the hook's variables, on a real GPU."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest

from benchmarks.gpu.node import Node

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

OWNER = """
    import sys
    from vgpu.workload.driver import Gpu
    from vgpu.workload.kernels import PTX
    gpu = Gpu(PTX)
    print("attached", flush=True)
    sys.stdin.read()
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


def test_nvidia_smi_shows_no_neighbour(node: Node) -> None:
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
        everywhere = subprocess.run(["nvidia-smi"], capture_output=True, text=True, check=True).stdout
        assert "python" in everywhere, "without a vGPU the neighbour is shown"
        for arguments in (
            [],
            ["-q", "-d", "PIDS"],
            ["--query-compute-apps=pid", "--format=csv,noheader"],
            ["pmon", "-c", "1"],
        ):
            command = [*node.vgpuctl, "run", "--sm", "20", "--mem", "4G", "--", "nvidia-smi", *arguments]
            seen = subprocess.run(
                command, env=node.environment, capture_output=True, text=True, check=False, timeout=60
            )
            assert seen.returncode == 0, seen.stderr
            assert "python" not in seen.stdout, seen.stdout
            shown = [line for line in seen.stdout.splitlines() if line.strip().isdigit()]
            assert not shown, seen.stdout
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
