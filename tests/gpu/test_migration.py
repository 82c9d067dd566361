"""A training loop that moves from one real GPU to another while it runs, by the driver's checkpoints (driver 580 or
newer). Run: ``REQUIRE_GPUS=2 pytest -s -m gpu tests/gpu/test_migration.py``. The same simulated, with servers that die
meanwhile: tests/integration/test_migration.py."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from benchmarks.node import Node
from tests.gpu.test_suspension import on_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600), pytest.mark.usefixtures("two_gpus")]
STEPS = 3000

PROGRAM = """
import os, sys
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
import torch
torch.use_deterministic_algorithms(True)
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.Tanh(), torch.nn.Linear(2048, 512)).cuda()
ballast = torch.full((int(sys.argv[2]) << 28,), 7, dtype=torch.int32, device="cuda")
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
inputs = torch.randn(1024, 512, device="cuda")
targets = inputs.roll(1, 1) * 0.5
for step in range(int(sys.argv[1])):
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    print(loss.item().hex(), flush=True)
assert int(ballast[:: 1 << 20].sum()) == 7 * (len(ballast) >> 20)
print("done", flush=True)
"""


@pytest.fixture
def node() -> Iterator[Node]:
    with Node(mode="temporal", gpus=(0, 1)) as node:
        yield node


def training(node: Node, vgpu_id: str, gib: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*node.vgpuctl, "exec", vgpu_id, "--", sys.executable, "-c", PROGRAM, str(STEPS), str(gib)],
        env=node.environment,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("gib", [1, 20])
def test_a_training_loop_learns_the_same_on_two_gpus_as_on_one(node: Node, gib: int) -> None:
    vgpu_id = node.run("create", "--gpu", "0", "--sm", "50", "--mem", f"{gib + 4}G").strip()
    still, _ = training(node, vgpu_id, gib).communicate()
    moves = training(node, vgpu_id, gib)
    try:
        assert moves.stdout is not None
        told = []
        for to in ("1", "0", "1"):
            told += [moves.stdout.readline() for _ in range(STEPS // 10)]
            began = time.monotonic()
            moved = json.loads(node.run("migrate", vgpu_id, "--gpu", to, "-o", "json", timeout=300))
            print(f"{gib} GiB to GPU {to}: {time.monotonic() - began:.2f} s")
            assert moved["gpu_index"] == int(to)
            assert on_gpu(moves.pid) > gib << 30
        rest, _ = moves.communicate()
        assert moves.returncode == 0
    finally:
        moves.kill()
        moves.wait()
        node.run("rm", "-f", vgpu_id)
    assert (*told, *rest.splitlines(keepends=True)) == tuple(still.splitlines(keepends=True))
