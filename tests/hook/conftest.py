from collections.abc import Iterator

import pytest

from tests.hook.stage import Stage, StagedVgpu


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.close()


@pytest.fixture
def vgpu(stage: Stage) -> StagedVgpu:
    return stage.vgpu()
