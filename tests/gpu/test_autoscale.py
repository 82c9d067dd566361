"""A vGPU of 20..60 % on a real GPU, whose program's demand rises and falls. The same simulated:
tests/integration/test_autoscaling.py. Run: ``REQUIRE_GPU=1 pytest -s -m gpu tests/gpu/test_autoscale.py``."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.node import Node, plain_environment
from tests.gpu.scaled import HIGH, LOW, course, without_vgpus
from vgpu.node.link import ControlLink

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]


def test_the_same_program_without_vgpus(node: Node) -> None:
    """The baselines: alone, and beside a busy program in the driver's time slices."""
    alone = {percent: without_vgpus(node, percent) for percent in (LOW, HIGH)}
    busy = [sys.executable, "-m", "vgpu.workload", "--seconds", "60"]
    with subprocess.Popen(busy, env=plain_environment(None), stdout=subprocess.DEVNULL) as neighbour:
        try:
            beside = {percent: without_vgpus(node, percent) for percent in (LOW, HIGH)}
        finally:
            neighbour.kill()
    print(f"without vGPUs, p95 in ms by percent of demand: alone {alone}, beside a busy program {beside}")


def test_the_size_follows_a_demand_that_doubles_and_falls(node: Node) -> None:
    found = course(node)
    print(found)


def test_it_follows_beside_a_vgpu_that_is_busy(node: Node) -> None:
    """The other one keeps its 40 % meanwhile, so the size grows to 60 % at most."""
    other = node.run("create", "--sm", "40", "--mem", "4G").strip()
    busy = ["exec", other, "--", sys.executable, "-m", "vgpu.workload", "--seconds", "600"]
    with subprocess.Popen([*node.vgpuctl, *busy], env=node.environment, stdout=subprocess.DEVNULL) as neighbour:
        try:
            found = course(node)
            with ControlLink(node.control_socket) as link:
                beside = link.inspect(other).vgpu
        finally:
            neighbour.kill()
    print(f"{found}; the other vGPU: {beside.busy_ratio:.1%} of the time, of {beside.limit_ratio:.0%}")
    node.run("rm", "-f", other)
    assert beside.limit_ratio == pytest.approx(0.4)
