"""``vgpuctl`` with bounds and ``vgpuctl advise``, on a simulated node."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.integration.node import SimulatedNode, eventually
from tests.integration.test_autoscaling import Loaded


def vgpuctl(node: SimulatedNode, *arguments: str, code: int = 0) -> str:
    """Its output; what it said on stderr, if it failed as expected."""
    command = [sys.executable, "-m", "vgpu.ctl", *arguments]
    done = subprocess.run(command, env=node.environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == code, done.stderr
    return done.stderr if code else done.stdout


def advice(node: SimulatedNode, *arguments: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(vgpuctl(node, "advise", "-o", "json", *arguments))["vgpus"]
    return found


@pytest.mark.slow
def test_the_present_size_and_its_bounds_are_shown(node: SimulatedNode) -> None:
    vgpuctl(node, "create", "--name", "api", "--sm", "20..60", "--mem", "2G..4G")
    assert "20 % of 20..60" in vgpuctl(node, "ls")
    assert "--sm 20..60 --mem 2G..4G" in vgpuctl(node, "inspect", "api")
    assert "--sm 20..60 --mem 2G..4G" in vgpuctl(node, "events", "api")
    [spec] = [vgpu["spec"] for vgpu in json.loads(vgpuctl(node, "ls", "-o", "json"))]
    assert (spec["sm_percent"], spec["sm_range_percent"]) == (20, [20, 60])
    assert "40 %" in vgpuctl(node, "set", "api", "--sm", "40")
    assert "of 20..60" not in vgpuctl(node, "ls")
    assert "40 % of 30..50" in vgpuctl(node, "set", "api", "--sm", "30..50")  # later the node shrinks what is idle


@pytest.mark.parametrize(
    ("typed", "complaint"),
    [
        (("--sm", "60..20"), "write the lower bound first"),
        (("--sm", "20..60", "--burst"), "--sm with two bounds and --burst exclude each other"),
        (("--sm", "20..60", "--mem", "1G", "--mem-limit", "2G"), "--mem-limit exclude each other"),
        (("--sm", "20..60", "--quota-limit", "50"), "--quota-limit exclude each other"),
        (("--sm", "20", "--mem", "8G.."), "--mem"),
    ],
)
def test_bounds_that_make_no_sense_are_refused(node: SimulatedNode, typed: tuple[str, ...], complaint: str) -> None:
    assert complaint in vgpuctl(node, "create", *typed, code=2)


def test_without_work_there_is_no_advice(node: SimulatedNode) -> None:
    vgpuctl(node, "create", "--name", "idle", "--sm", "30", "--mem", "2G")
    [found] = advice(node)
    assert found["present"] == found["advised"] == {"sm_percent": 30, "memory_bytes": 2 << 30}
    assert "too little" in found["why"]
    assert "as it is" in vgpuctl(node, "advise")
    assert "no vGPU" in vgpuctl(node, "advise", "other", code=3)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_advice_follows_what_was_used_and_is_applied(node: SimulatedNode) -> None:
    small = node.create(sm_percent="60", memory_bytes="8G", name="small")
    limited = node.create(sm_percent="5", memory_bytes="8G", name="all")
    Loaded(node, small, 2)
    Loaded(node, limited, 10)

    def known() -> bool:
        return all("too little" not in one["why"] for one in advice(node))

    eventually(known, "half a minute of work", 180)
    found = {one["name"]: one for one in advice(node, "--apply")}
    assert all(one["applied"] for one in found.values())
    assert found["small"]["advised"]["sm_percent"] < 40
    assert found["small"]["frees"]["sm_percent"] > 20
    assert found["all"]["advised"]["sm_percent"] > 5
    assert "its limit" in found["all"]["why"]
    sizes = {vgpu["name"]: vgpu["spec"]["sm_percent"] for vgpu in json.loads(vgpuctl(node, "ls", "-o", "json"))}
    assert sizes == {name: one["advised"]["sm_percent"] for name, one in found.items()}
