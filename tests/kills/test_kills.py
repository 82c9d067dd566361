"""Some of what ``python -m tests.kills`` does in full."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Final

import pytest

from tests.kills.deaths import DEEDS, Deed, dies, dies_at_random, done, recorded
from tests.kills.fatal import Moment
from tests.kills.scene import Scene

MOMENTS: Final = 4
"""Of each deed; of those that make others move, which take a second and more, half as many. In every run: one."""
ALWAYS: Final = tuple(deed for deed in DEEDS if deed.vgpu != "swapped" or deed.name in {"linear", "return"})
"""Deeds of which one moment is tried in every run."""
FIRST, REST = slice(1), slice(1, None)


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    with Scene() as scene:
        yield scene


def test_it_dies_at_the_moment_that_was_asked_for(scene: Scene) -> None:
    moment = Moment("cuMemAlloc_v2", 2, after=True)
    with done(scene, Deed("plain", "linear"), **scene.fatal.environment) as doing, scene.fatal.armed(moment) as calls:
        doing.begin()
        assert not doing.finish()
    assert (calls["cuMemAlloc_v2"], calls["cuMemFree_v2"]) == (2, 0)


@pytest.mark.parametrize(
    ("deed", "part"),
    [
        *(pytest.param(deed, FIRST, id=f"{deed}, once") for deed in ALWAYS),
        *(
            pytest.param(deed, REST if deed in ALWAYS else slice(None), id=str(deed), marks=pytest.mark.slow)
            for deed in DEEDS
        ),
    ],
)
def test_whoever_dies_at_a_moment_leaves_nothing_and_harms_nobody(scene: Scene, deed: Deed, part: slice) -> None:
    moments = recorded(scene, deed)
    most = MOMENTS // 2 if deed.vgpu == "swapped" else MOMENTS
    for moment in Random(str(deed)).sample(moments, min(most, len(moments)))[part]:
        dies(scene, deed, moment)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_whoever_dies_whenever_leaves_nothing_and_harms_nobody(scene: Scene, seed: int) -> None:
    dies_at_random(scene, Random(seed))
