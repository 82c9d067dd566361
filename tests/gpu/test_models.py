"""A model whose weights four replicas share on a real card: its memory, its tokens, its pace, and the owner's death.

Run: ``REQUIRE_GPU=1 pytest -s -m gpu tests/gpu/test_models.py`` where torch, transformers, accelerate and safetensors
are installed. It prints what the driver shows of imported memory, and tokens per second.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from benchmarks.node import Node, plain_environment
from tests.gpu.test_frameworks import needs
from vgpu.node.link import ControlLink
from vgpu.protocol.messages import VgpuStatus

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(500)]
ROOT = Path(__file__).parents[2]
GIB = 1 << 30
REPLICAS = 4
ROUNDS = 3
PATIENCE_S = 60.0


def python_path() -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}


def test_what_the_driver_shows_of_imported_memory() -> None:
    """Read-only access, and NVML's figures: a report, since the GPU Server is right with each of them."""
    program = [sys.executable, "-m", "tests.gpu.imports"]
    environment = plain_environment(None) | python_path()
    ran = subprocess.run(program, env=environment, capture_output=True, text=True, check=False, timeout=120)
    print(ran.stdout)
    assert ran.returncode == 0, ran.stderr
    said = {line[0]: line[1:] for line in map(json.loads, ran.stdout.splitlines())}
    assert said["first: content without the owner"] == ["abcdefgh"]


class Program:
    """A process of the tests in a vGPU of its own, that is talked to by lines of JSON."""

    def __init__(self, node: Node, vgpu: str, argv: list[str], environment: dict[str, str]) -> None:
        self.vgpu = vgpu
        pipe = subprocess.PIPE
        self.popen = subprocess.Popen(
            [*node.vgpuctl, "exec", vgpu, "--", *argv], env=environment, stdin=pipe, stdout=pipe, text=True
        )

    def heard(self) -> Any:
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        assert line, f"{self.vgpu} ended: {self.popen.wait()}"
        return json.loads(line)

    def tell(self, line: str) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(f"{line}\n")
        self.popen.stdin.flush()

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self.popen.kill()
        self.popen.communicate()


class Scene:
    def __init__(self, node: Node, folder: Path) -> None:
        self.node, self.folder = node, folder
        self.environment = node.environment | python_path() | {"VGPU_MODELS_DIR": str(node.directory / "models")}
        program = [sys.executable, "-m", "tests.gpu.model_replica", "make", str(folder)]
        made = subprocess.run(program, env=self.environment, capture_output=True, text=True, check=False, timeout=300)
        assert made.returncode == 0, made.stderr
        self.model_bytes = int(json.loads(made.stdout.splitlines()[-1])["bytes"])

    def create(self, name: str, sm: int, mem: str) -> str:
        return self.node.run("create", "--sm", str(sm), "--mem", mem, "--name", name).split()[-1]

    def owner(self, stack: ExitStack) -> Program:
        self.create("weights", 1, f"{(self.model_bytes >> 30) + 2}G")
        files = sorted(map(str, self.folder.glob("*.safetensors")))
        argv = [sys.executable, "-m", "vgpu.ctl", "models", "serve", "m", *files]
        return stack.enter_context(Program(self.node, "weights", argv, self.environment))

    def replicas(self, stack: ExitStack, kind: str) -> list[Program]:
        found = []
        where = "m" if kind == "shared" else str(self.folder)
        for number in range(REPLICAS):
            self.create(f"{kind}-{number}", 24, "6G")
            argv = [sys.executable, "-m", "tests.gpu.model_replica", kind, where]
            found.append(stack.enter_context(Program(self.node, f"{kind}-{number}", argv, self.environment)))
        return found

    def vgpus(self) -> dict[str, VgpuStatus]:
        with ControlLink(self.node.control_socket) as link:
            return {vgpu.name: vgpu for vgpu in link.list()}

    def eventually(self, look: Callable[[dict[str, VgpuStatus]], bool], what: str) -> dict[str, VgpuStatus]:
        until = time.monotonic() + PATIENCE_S
        while not look(now := self.vgpus()):
            shown = {n: (v.memory_used_bytes >> 20, v.memory_implicit_bytes >> 20) for n, v in now.items()}
            assert time.monotonic() < until, f"{what}: {shown}"
            time.sleep(0.2)
        return now

    def clear(self) -> None:
        for name in self.vgpus():
            self.node.run("rm", "-f", name)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    for library in ("torch", "transformers", "accelerate", "safetensors"):
        needs(library, library)
    with Node() as node:
        yield Scene(node, tmp_path_factory.mktemp("model"))


def card_bytes() -> int:
    import pynvml

    pynvml.nvmlInit()
    return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used)


def rounds(replicas: list[Program]) -> tuple[set[tuple[int, ...]], list[float], int]:
    """All tokens that were seen, each round's tokens per second in sum, and the memory of their own."""
    tokens, paces, own = set(), [], 0
    for _ in range(ROUNDS):
        for replica in replicas:
            replica.tell("go")
        said = [replica.heard() for replica in replicas]
        tokens |= {tuple(one["tokens"]) for one in said}
        paces.append(round(sum(one["pace"] for one in said), 1))
        own = sum(one["own_bytes"] for one in said)
    return tokens, paces, own


def test_four_replicas_have_the_memory_of_one_model_and_the_tokens_of_four(scene: Scene) -> None:
    seen = {}
    for kind in ("separate", "shared"):
        before = card_bytes()
        with ExitStack() as stack:
            if kind == "shared":
                scene.owner(stack)
            replicas = scene.replicas(stack, kind)
            loads = [replica.heard()["load_seconds"] for replica in replicas]
            tokens, paces, own = rounds(replicas)
            now = scene.vgpus()
            used = sum(vgpu.memory_used_bytes for vgpu in now.values())
            implicit = sum(vgpu.memory_implicit_bytes for vgpu in now.values())
            seen[kind] = tokens, used, implicit, now
            print(
                f"{kind}: tokens/s {paces}, loads {loads} s; charged {used / GIB:.2f} GiB, of that implicit "
                f"{implicit / GIB:.2f}; PyTorch's own {own / GIB:.2f}; the card {(card_bytes() - before) / GIB:.2f}"
            )
            for name, vgpu in now.items():
                kinds = ("used", "implicit", "shared", "imported")
                print(f"  {name}:", *(f"{kind} {getattr(vgpu, f'memory_{kind}_bytes') / GIB:.2f}" for kind in kinds))
        scene.clear()
    assert seen["shared"][0] == seen["separate"][0]
    assert len(seen["shared"][0]) == 1
    model = scene.model_bytes
    saved = (seen["separate"][1] - seen["separate"][2]) - (seen["shared"][1] - seen["shared"][2])
    assert saved > (REPLICAS - 1) * model * 0.95
    vgpus = seen["shared"][3]
    assert model <= vgpus["weights"].memory_shared_bytes <= model * 1.01 + (4 << 20)
    for number in range(REPLICAS):
        replica = vgpus[f"shared-{number}"]
        assert replica.memory_imported_bytes == vgpus["weights"].memory_shared_bytes
        assert replica.memory_implicit_bytes < model, "imported memory is not charged as implicit"


def test_replicas_outlive_the_owner_and_a_write_ends_its_own_program_alone(scene: Scene) -> None:
    with ExitStack() as stack:
        owner = scene.owner(stack)
        replicas = scene.replicas(stack, "shared")
        for replica in replicas:
            replica.heard()
        expected, _, _ = rounds(replicas)
        shared = scene.vgpus()["weights"].memory_shared_bytes
        ls = json.loads(
            subprocess.check_output([*scene.node.vgpuctl, "models", "ls", "-o", "json"], env=scene.environment)
        )
        print(f"models ls: {ls}")
        os.kill(ls[0]["pid"], 9)
        owner.popen.wait()
        scene.eventually(lambda now: now["weights"].memory_used_bytes == shared, "only the weights stay charged")
        assert rounds(replicas)[0] == expected
        if ls[0]["read_only"]:
            writer = replicas.pop()
            writer.tell("write")
            assert writer.popen.wait() != 0
            assert rounds(replicas)[0] == expected
        now = scene.vgpus()
        print({name: (vgpu.memory_used_bytes >> 20, vgpu.memory_implicit_bytes >> 20) for name, vgpu in now.items()})
        for replica in replicas:
            replica.popen.kill()
        scene.eventually(lambda now: now["weights"].memory_used_bytes == 0, "nothing stays charged")
    scene.clear()
