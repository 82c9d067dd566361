"""Two PyTorch servers that start at the same moment on one GPU, and take 90 % of what they see. Simulated:
tests/integration/test_servers_at_start.py.

Run: ``REQUIRE_GPU=1 pytest -s -m gpu tests/gpu/test_servers_at_start.py``.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks.node import Node

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(500)]
STARTS = 20
MEM_GIB = 60
SERVER = """
import json, sys, torch
sys.stdin.readline()
before, total = torch.cuda.mem_get_info()
weights = torch.ones(4 << 30, dtype=torch.float16, device="cuda")    # 8 GiB
peak = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")        # a forward pass of the largest batch
del peak
torch.cuda.empty_cache()
after, _ = torch.cuda.mem_get_info()
cache = int(0.9 * total) - (before - after)
made = torch.empty(cache, dtype=torch.uint8, device="cuda").fill_(1)
print(json.dumps([total, before - after, cache, int(made[-1]), float(weights[-1])]), flush=True)
sys.stdin.readline()
"""


def test_each_gets_the_same_cache_in_twenty_of_twenty_starts() -> None:
    with Node() as node:
        for name in ("one", "two"):
            node.run("create", "--sm", "45", "--mem", f"{MEM_GIB}G", "--name", name)
        seen = []
        for number in range(STARTS):
            servers = [
                subprocess.Popen(
                    [*node.vgpuctl, "exec", name, "--", sys.executable, "-c", SERVER],
                    env=node.environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
                for name in ("one", "two")
            ]
            for server in servers:
                assert server.stdin is not None
                server.stdin.write("go\n")
                server.stdin.flush()
            answers = []
            for server in servers:
                assert server.stdout is not None
                answers.append(json.loads(server.stdout.readline()))
            for server in servers:
                server.communicate("end\n", timeout=60)  # both had their caches at the same time
            for total, used, cache, last, weight in answers:
                assert (total, last, weight) == (MEM_GIB << 30, 1, 1.0), f"start {number}"
                assert cache == int(0.9 * total) - used
            seen += [answer[2] for answer in answers]
    print(f"{STARTS} starts of two: the cache has {min(seen) / 2**30:.2f} to {max(seen) / 2**30:.2f} GiB")
    assert len(set(seen)) == 1
