"""Memory that programs make themselves leaves a real card and comes back: what the driver answers about it, and PyTorch
with captured graphs, and expandable segments or stream-ordered memory. Simulated: tests/hook/test_program_memory.py and
test_stream_ordered.py. Run: ``REQUIRE_GPU=1 pytest -s -m gpu tests/gpu/test_swapped_programs.py``."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from benchmarks.node import Node, plain_environment
from vgpu.node.link import ControlLink

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
OWNED_GIB = 20
PROGRAM = """
import json, sys, time, torch
seed, gib = int(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(seed)
blocks = [torch.randint(-2**31, 2**31 - 1, (1 << 28,), dtype=torch.int32, device="cuda") for _ in range(gib)]
a = torch.randn(2048, 2048, device="cuda", dtype=torch.float16)
out = torch.empty_like(a)
side = torch.cuda.Stream()
with torch.cuda.stream(side):
    torch.matmul(a, a, out=out)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    torch.matmul(a, a, out=out)
graph.replay()
torch.cuda.synchronize()
expected = out.clone()
sums = [int(block.sum(dtype=torch.int64)) for block in blocks]
native = torch.cuda.get_allocator_backend() == "native"
expandable = sum(s["total_size"] for s in torch.cuda.memory_snapshot() if s["is_expandable"]) if native else 0
print(json.dumps([expandable, torch.cuda.memory_reserved()]), flush=True)
for line in sys.stdin:
    began = time.monotonic()
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    first = time.monotonic() - began
    well = bool((out == expected).all()) and [int(b.sum(dtype=torch.int64)) for b in blocks] == sums
    print(json.dumps([well, first]), flush=True)
"""


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with Node(options=("--host-memory", "64G")) as node:
        yield node


def answers(argv: list[str], environment: dict[str, str]) -> list[object]:
    ran = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False, timeout=100)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]


def test_the_driver_answers_the_same_about_swapped_memory(node: Node) -> None:
    program = [sys.executable, "-m", "tests.gpu.vmm"]
    plain = answers(program, plain_environment(None))
    swap = ["run", "--sm", "50", "--mem", "8G", "--oversubscribe", "swap", "--"]
    swapped = answers([*node.vgpuctl, *swap, *program], node.environment)
    limited = answers([*node.vgpuctl, "run", "--sm", "50", "--mem", "8G", "--", *program], node.environment)
    for one, other, third in zip(plain, swapped, limited, strict=True):
        print(one, "" if one == other == third else f"DIFFERS swapped {other}, limited {third}")
    assert plain == limited
    assert plain == swapped


class Server:
    """A PyTorch program with memory of its own, in a vGPU that is swapped."""

    def __init__(self, node: Node, name: str, seed: int, allocator: str) -> None:
        self.name = name
        options = ["--sm", "40", "--mem", f"{OWNED_GIB + 6}G", "--oversubscribe", "swap", "--name", name]
        environment = node.environment | {"PYTORCH_CUDA_ALLOC_CONF": allocator}
        self.popen = subprocess.Popen(
            [*node.vgpuctl, "run", *options, "--", sys.executable, "-c", PROGRAM, str(seed), str(OWNED_GIB)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def line(self) -> list[float]:
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        assert line, f"{self.name} ended: {self.popen.wait()}"
        found: list[float] = json.loads(line)
        return found

    def ask(self) -> list[float]:
        assert self.popen.stdin is not None
        self.popen.stdin.write("go\n")
        self.popen.stdin.flush()
        return self.line()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.popen.kill()
        self.popen.communicate()


def pinned(link: ControlLink, seconds: float) -> None:
    """Wait until each vGPU that is swapped has host memory for all that it owns, or so long."""
    began = time.monotonic()
    missing = True
    while missing and time.monotonic() - began < seconds:
        swapped = [vgpu for vgpu in link.list() if vgpu.spec.oversubscribe]
        missing = any(vgpu.memory_pinned_bytes < OWNED_GIB << 30 for vgpu in swapped)
        (gpu,) = link.gpus()
        figures = [(vgpu.name, vgpu.memory_pinned_bytes >> 30, vgpu.memory_away_bytes >> 30) for vgpu in swapped]
        host = f"host {gpu.host_memory_bytes >> 30} GiB ready, {gpu.host_memory_used_bytes >> 30} used"
        print(f"{time.monotonic() - began:.0f} s: GiB pinned and away {figures}, {host}")
        time.sleep(1)


@pytest.mark.parametrize("allocator", ["expandable_segments:True", "backend:cudaMallocAsync"])
def test_pytorch_takes_turns(node: Node, allocator: str) -> None:
    with ControlLink(node.control_socket) as link, ExitStack() as stack:
        (gpu,) = link.gpus()
        filler = (gpu.total_memory_bytes >> 30) - OWNED_GIB - 14
        node.run("create", "--sm", "5", "--mem", f"{filler}G", "--name", "filler")
        stack.callback(node.run, "rm", "filler")
        servers = []
        for seed, name in enumerate(("first", "second"), 1):
            servers.append(stack.enter_context(Server(node, name, seed, allocator)))
            print(f"bytes in expandable segments, and reserved: {servers[-1].line()}")
            pinned(link, 30)
        waits = []
        for _ in range(5):
            for server in servers:
                well, first_s = server.ask()
                assert well, server.name
                waits.append(round(first_s, 2))
        moves = [
            (event.kind, round(float(event.fields["seconds"]), 2), round(float(event.fields["pinning_seconds"]), 2))
            for event in link.events(kinds=("swapped-out", "swapped-in"))
        ]
        print(f"first answer after a swap, seconds: {waits}")
        print(f"moves (seconds, of them pinning): {moves}")
        assert len(moves) >= 8


GROWING = """
import json, sys, torch
def block(gib):
    return torch.full((gib << 28,), 7, dtype=torch.int32, device="cuda")
blocks = [block(int(sys.argv[1]))]
torch.cuda.synchronize()
print(json.dumps([len(blocks)]), flush=True)
for line in sys.stdin:
    blocks += [block(1) for _ in range(int(line))]
    torch.cuda.synchronize()
    print(json.dumps([all(bool((b == 7).all()) for b in blocks), len(blocks)]), flush=True)
"""


def test_others_leave_for_a_program_that_grows_by_small_pieces_beyond_what_the_card_has(node: Node) -> None:
    """The driver keeps more of the card than the books know, so some piece is refused though there seems to be room."""

    def program(prefix: list[str], environment: dict[str, str], gib: int) -> subprocess.Popen[str]:
        environment = environment | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
        argv = [*prefix, sys.executable, "-c", GROWING, str(gib)]
        return subprocess.Popen(argv, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def answer(popen: subprocess.Popen[str], line: str = "") -> list[int]:
        assert popen.stdin is not None
        assert popen.stdout is not None
        if line:
            popen.stdin.write(f"{line}\n")
            popen.stdin.flush()
        found: list[int] = json.loads(popen.stdout.readline())
        return found

    with ControlLink(node.control_socket) as link, ExitStack() as stack:
        (gpu,) = link.gpus()
        outside = program([], plain_environment(None), (gpu.total_memory_bytes >> 30) - 42)
        stack.callback(outside.communicate)
        stack.callback(outside.kill)
        answer(outside)
        programs = []
        for name in ("stays", "grows"):
            run = ["run", "--sm", "40", "--mem", "30G", "--oversubscribe", "swap", "--name", name, "--"]
            programs.append(program([*node.vgpuctl, *run], node.environment, 16))
            stack.callback(programs[-1].communicate)
            stack.callback(programs[-1].kill)
            answer(programs[-1])
        stays, grows = programs
        assert answer(grows, "8") == [True, 9]
        assert answer(stays, "1") == [True, 2]
        assert answer(grows, "1") == [True, 10]
        moves = [event.kind for event in link.events(kinds=("swapped-out", "swapped-in"))]
        print(f"moves: {moves}")
        assert "swapped-out" in moves
