"""A soak of one minute for each of two seeds: random requests, programs, deaths, pauses and hostile peers."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.soak.__main__ import soak
from tests.soak.model import Expected, World


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_node_agrees_with_the_model_after_each_quiet_moment(seed: int) -> None:
    assert soak(1.0, seed, gpus=2, stretch=20, quiet=True) == 0


@given(st.integers(0, 1 << 30))
def test_the_model_chooses_only_what_is_possible(seed: int) -> None:
    random, world = Random(seed), World(2)
    for step in range(30):
        action = world.choose(random)
        if action.kind == "create" and world.fits(0, action.number):
            world.created(Expected(f"vgpu-{step:08x}", world.next_name(), 0, action.number, 1 << 28))
        elif action.kind == "remove":
            world.removed(action.vgpu)
        elif action.kind in {"suspend", "resume"}:
            vgpu = world.vgpus[action.vgpu]
            assert vgpu.suspended == (action.kind == "resume")
            vgpu.suspended = not vgpu.suspended
        elif action.vgpu:
            assert action.vgpu in world.vgpus
    assert world.promised(1) == 0
