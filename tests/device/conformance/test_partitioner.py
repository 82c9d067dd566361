"""What each ``Partitioner`` promises: the simulated one, and NVIDIA's with a stand-in for its daemon."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuserver.device.base import Partitioner
from tests.device.conformance.places import PARTITIONERS
from vgpu.enums import PriorityName
from vgpu.errors import ErrorCode, VgpuError
from vgpu.protocol.peer import is_alive


@pytest.fixture(params=PARTITIONERS)
def partitioner(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Partitioner]:
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    made = PARTITIONERS[request.param](tmp_path)
    yield made
    made.stop()


def test_nothing_runs_before_the_start_and_after_the_end(partitioner: Partitioner) -> None:
    assert partitioner.status(serving=False).daemon is None
    partitioner.stop()
    partitioner.start()
    daemon = partitioner.status(serving=False).daemon
    assert daemon is not None
    assert is_alive(daemon)
    partitioner.stop()
    partitioner.stop()
    assert partitioner.status(serving=False).daemon is None


def test_a_daemon_that_runs_is_kept(partitioner: Partitioner) -> None:
    partitioner.start()
    first = partitioner.status(serving=False).daemon
    partitioner.start()
    assert partitioner.status(serving=True).daemon == first


def test_processes_of_other_users_reach_its_directories(partitioner: Partitioner) -> None:
    partitioner.start()
    for directory in (partitioner.directories.pipe, partitioner.directories.log):
        assert directory.stat().st_mode & 0o777 == 0o755


def test_it_has_places_for_processes(partitioner: Partitioner) -> None:
    assert partitioner.most_processes > 0


def test_a_low_priority_has_a_level_of_its_own(partitioner: Partitioner) -> None:
    low, normal = (partitioner.client_priority(each) for each in (PriorityName.LOW, PriorityName.NORMAL))
    assert low != normal


def test_a_start_that_fails_says_why(partitioner: Partitioner) -> None:
    def no_more(*_: object, **__: object) -> None:
        raise OSError("no more processes")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("subprocess.run", no_more)
        with pytest.raises(VgpuError) as caught:
            partitioner.start()
    assert caught.value.code is ErrorCode.MODE
    assert "no more processes" in str(caught.value)
