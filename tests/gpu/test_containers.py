"""PyTorch in a container on a real GPU: its root made by ``pivot_root``, with the mounts of its vGPU and an empty
environment. The engines themselves run with a simulated GPU: tests/cluster/test_engines.py.

A container's libraries of the driver come from the machine, as NVIDIA's own device of the engines brings them.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.node import Node, plain_environment
from tests.cluster import roots
from tests.gpu.conftest import Place
from tests.gpu.test_suspension import on_gpu
from vgpu.integrations.claims import Attach
from vgpu.node.link import ControlLink
from vgpu.packing.partition import partition
from vgpu.protocol.messages import VgpuStatus
from vgpu.spec import VgpuSpec

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
MIB = 1 << 20
WARM_S, WINDOW_S = 1.0, 12.0

PACE = """
    import json, sys, time, torch
    a = torch.randn(4096, 4096, device="cuda")
    free, total = torch.cuda.mem_get_info()
    done = [torch.cuda.Event() for _ in range(2)]
    print(json.dumps({"total": total, "sms": torch.cuda.get_device_properties(0).multi_processor_count}), flush=True)
    begin = float(sys.stdin.readline())
    end, counted, turn = begin + WINDOW_S, 0, 0
    while (now := time.monotonic()) < end:
        for _ in range(5):
            a @ a
        done[turn % 2].record()
        turn += 1
        if turn > 1:
            done[turn % 2].synchronize()
            counted += 5 * (begin <= time.monotonic() < end)
    torch.cuda.synchronize()
    print(json.dumps({"steps": counted}), flush=True)
""".replace("WINDOW_S", str(WINDOW_S))

CAPACITY = """
    import json, torch
    blocks = []
    torch.cuda.init()
    free, total = torch.cuda.mem_get_info()
    try:
        while True:
            blocks.append(torch.cuda.caching_allocator_alloc(64 << 20))
    except torch.OutOfMemoryError:
        pass
    print(json.dumps({"total": total, "blocks": len(blocks)}), flush=True)
"""

ROUNDS = """
    import torch
    block = torch.full((1 << 28,), 7, dtype=torch.int32, device="cuda")
    a = torch.randn(4096, 4096, device="cuda")
    while True:
        for _ in range(100):
            a @ a
        torch.cuda.synchronize()
        assert int(block[:: 1 << 20].sum()) == 7 * (len(block) >> 20)
        print("round", flush=True)
"""


def packages() -> Path:
    """The folder that has PyTorch."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        pytest.skip("torch is not installed: pip install torch")
    return Path(found.origin).parents[1]


def python(code: str) -> list[str]:
    """The machine's own interpreter: neither a variable nor a virtual environment of ours leads it to PyTorch."""
    interpreter = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    return [str(interpreter), "-c", f"import sys; sys.path.append({str(packages())!r})\n{textwrap.dedent(code)}"]


def from_the_machine(folder: Path) -> list[str]:
    """The volumes of an image with PyTorch and the driver: what ``roots`` shares lacks, and the loader's cache."""
    ctypes.CDLL("libcuda.so.1")
    loaded = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/libcuda.so" in line]
    cache = folder / "ld.so.cache"
    subprocess.run(["ldconfig", "-X", "-C", str(cache), str(Path(loaded[0]).parent)], check=True)
    needed = {packages().resolve(), Path(sys.base_prefix).resolve()}
    missing = [path for path in needed if path.parts[1] not in roots.SHARED]
    return [f"{cache}:/etc/ld.so.cache:ro", *(f"{path}:{path}:ro" for path in missing)]


def created(node: Node, sm: int, mem: str, attach: Attach = "mount") -> VgpuStatus:
    with ControlLink(node.control_socket) as link:
        return link.create(VgpuSpec.parse(sm_percent=str(sm), memory_bytes=mem), "auto", attach=attach)


class Programs:
    """The programs of a test, in containers and outside; ``close`` ends them all."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._image = from_the_machine(folder)
        self._started: list[subprocess.Popen[str]] = []

    def begin(self, command: list[str], environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        self._started.append(process)
        return process

    def contained(self, node: Node, vgpu: VgpuStatus, code: str) -> subprocess.Popen[str]:
        """A program in a container of the vGPU."""
        with ControlLink(node.control_socket) as link:
            volumes = link.inspect(vgpu.vgpu_id).mounts
        root = self._folder / f"root{len(self._started)}"
        root.mkdir()
        return self.begin(roots.command(root, [*self._image, *volumes], python(code)))

    def outside(self, node: Node, vgpu: VgpuStatus, code: str) -> subprocess.Popen[str]:
        """A program in the vGPU and in no container."""
        return self.begin([*node.vgpuctl, "exec", vgpu.vgpu_id, "--", *python(code)], node.environment)

    def alone(self) -> int:
        """The steps of a program without a vGPU."""
        process = self.begin(python(PACE), plain_environment(None))
        ready(process)
        (steps,) = paced(process)
        return steps

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.communicate()


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    if why := roots.is_possible():
        pytest.fail(why)
    made = Programs(tmp_path)
    yield made
    made.close()


def line(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    said = process.stdout.readline()
    if not said:
        pytest.fail(process.communicate(timeout=60)[1])
    return json.loads(said)


def paced(*processes: subprocess.Popen[str]) -> list[int]:
    """The steps of each in one common window."""
    begin = time.monotonic() + WARM_S
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(f"{begin}\n")
        process.stdin.flush()
    return [int(line(process)["steps"]) for process in processes]


def ready(*processes: subprocess.Popen[str]) -> list[Any]:
    return [line(process) for process in processes]


def removed(node: Node, *vgpus: VgpuStatus) -> None:
    for vgpu in vgpus:
        node.run("rm", "-f", vgpu.vgpu_id)


def test_two_containers_have_their_shares(node: Node, programs: Programs) -> None:
    whole = programs.alone()
    cases: list[tuple[str, Attach]] = [("containers", "mount"), ("no containers", "owner")]
    for where, attach in cases:
        vgpus = [created(node, sm, "8G", attach) for sm in (30, 70)]
        begin = programs.contained if attach == "mount" else programs.outside
        both = [begin(node, vgpu, PACE) for vgpu in vgpus]
        assert [found["total"] for found in ready(*both)] == [8192 * MIB] * 2
        steps = paced(*both)
        removed(node, *vgpus)
        parts = [each / sum(steps) for each in steps]
        shown = ", ".join(f"{part:.2%}" for part in parts)
        print(f"{where}: {shown}; together {sum(steps) / whole:.1%} of a program without a vGPU")
        assert abs(parts[0] - 0.3) < 0.01


def test_a_container_alone_is_held_to_its_share_without_a_variable(node: Node, programs: Programs) -> None:
    """The program begins after ``env -i``: nothing but mounts holds it."""
    whole = programs.alone()
    vgpu = created(node, 30, "8G")
    program = programs.contained(node, vgpu, PACE)
    ready(program)
    (held,) = paced(program)
    removed(node, vgpu)
    print(f"a container with 30 %: {held / whole:.2%} of the pace without a vGPU")
    assert abs(held / whole - 0.3) < 0.01


def test_the_memory_of_a_container_is_exact(node: Node, programs: Programs) -> None:
    vgpu, outer = created(node, 30, "8G"), created(node, 30, "8G", "owner")
    inside = line(programs.contained(node, vgpu, CAPACITY))
    outside = line(programs.outside(node, outer, CAPACITY))
    removed(node, vgpu, outer)
    print(f"blocks of 64 MiB in a container {inside['blocks']}, in none {outside['blocks']}, of 8 GiB")
    assert inside == outside
    assert inside["total"] == 8192 * MIB
    assert 7 << 4 <= inside["blocks"] <= 8 << 4


def test_a_program_that_enters_a_container_has_its_limit(node: Node, programs: Programs) -> None:
    """As ``docker exec`` does, with no variable of the container."""
    vgpu = created(node, 30, "8G")
    first = programs.contained(node, vgpu, "import sys; print(0, flush=True); sys.stdin.readline()")
    line(first)
    [pid] = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()
    entered = ["nsenter", "-t", pid, "-m", "-p", "-r", "-w", "/usr/bin/env", "-i"]
    found = line(programs.begin([*entered, *python(CAPACITY)]))
    removed(node, vgpu)
    assert found["total"] == 8192 * MIB
    assert 7 << 4 <= found["blocks"] <= 8 << 4


def test_a_container_reaches_mps_by_its_mounts(place: Place, programs: Programs) -> None:
    node = place.node("spatial")
    (gpu,) = json.loads(node.run("gpu", "ls", "-o", "json"))[:1]
    vgpus = [created(node, sm, "8G") for sm in (30, 70)]
    both = [programs.contained(node, vgpu, PACE) for vgpu in vgpus]
    found = ready(*both)
    steps = paced(*both)
    removed(node, *vgpus)
    planned = [partition(sm, gpu["sm_count"]).granted_sms for sm in (30, 70)]
    print(f"SMs {[each['sms'] for each in found]}, planned {planned} of {gpu['sm_count']}; steps {steps}")
    assert [each["total"] for each in found] == [8192 * MIB] * 2
    for each, wanted in zip(found, planned, strict=True):
        assert abs(each["sms"] - wanted) <= 2


def test_a_containers_program_is_suspended_from_outside(node: Node, programs: Programs) -> None:
    vgpu = created(node, 50, "8G")
    program = programs.contained(node, vgpu, ROUNDS)
    assert program.stdout is not None
    assert program.stdout.readline() == "round\n"
    with ControlLink(node.control_socket) as link:
        (process,) = link.processes().processes
    assert on_gpu(process.pid) > 1 << 30
    began = time.monotonic()
    node.run("suspend", vgpu.vgpu_id)
    suspended = time.monotonic()
    assert on_gpu(process.pid) == 0
    node.run("resume", vgpu.vgpu_id)
    print(f"suspend {suspended - began:.2f} s, resume {time.monotonic() - suspended:.2f} s, 1 GiB and PyTorch")
    for _ in range(3):
        assert program.stdout.readline() == "round\n"
    removed(node, vgpu)
