from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hook.stage import Stage, StagedVgpu


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    stage.close()


@pytest.fixture
def vgpu(stage: Stage) -> StagedVgpu:
    return stage.vgpu()
