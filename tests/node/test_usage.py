"""Usage in the node: each user finds the own rows, a disk that takes nothing costs nothing but history."""

from __future__ import annotations

import os
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.ctl.fake_node import gpu_reading, vgpu_reading
from vgpu.errors import ErrorCode, VgpuError
from vgpu.node.database import NodeDatabase
from vgpu.node.survey import StatusCollector
from vgpu.node.usage import UsageKeeper
from vgpu.node.why import explained
from vgpu.protocol.messages import Snapshot, VgpuDetail, VgpuStatus
from vgpu.protocol.usage import Usage, Why
from vgpu.protocol.versions import USAGE_SINCE

S = 1_000_000_000
STRANGER = 54_321


class Played(StatusCollector):
    """A survey that finds ``vgpus``, ``at_s`` seconds after its beginning."""

    def __init__(self) -> None:
        super().__init__({}, simulated=True)
        self.vgpus: tuple[VgpuStatus, ...] = ()
        self.at_s = 0.0
        self.began = time.time() - 1000

    async def lately(self, most_s: float) -> tuple[Snapshot, int]:
        snapshot = Snapshot(at_unix_s=self.began + self.at_s, gpus=(gpu_reading(),), vgpus=self.vgpus)
        return snapshot, round(self.at_s * S)


class Scene:
    def __init__(self, path: Path) -> None:
        self.survey = Played()
        self.database = NodeDatabase(path, again_s=0.0)
        self.keeper = UsageKeeper(self.database, self.survey)

    async def sample(self, at_s: float, **busy_s: float) -> None:
        """Of each owner one vGPU, ``u1000=3.0``: with three seconds of busy time."""
        self.survey.at_s = at_s
        self.survey.vgpus = tuple(
            vgpu_reading(vgpu_id=f"vgpu-{int(owner[1:]):08x}", owner_uid=int(owner[1:]), busy_ns=round(busy * S))
            for owner, busy in busy_s.items()
        )
        await self.keeper.sample()


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path / "node.db")


def used_s(found: Any) -> dict[int, float]:
    return {row.owner_uid: round(row.used_gpu_hours * 3600, 1) for row in found.rows}


def test_a_user_finds_the_own_rows_and_root_all_written_or_not(scene: Scene) -> None:
    async def run() -> None:
        await scene.sample(0, u1000=0, u54321=0)
        await scene.sample(10, u1000=2, u54321=1)
        await scene.keeper.write()
        await scene.sample(20, u1000=4, u54321=1.5)
        assert used_s(await scene.keeper.report(Usage(), 0)) == {1000: 4.0, STRANGER: 1.5}
        assert used_s(await scene.keeper.report(Usage(), STRANGER)) == {STRANGER: 1.5}
        assert used_s(await scene.keeper.report(Usage(), 77)) == {}
        assert used_s(await scene.keeper.report(Usage(), os.geteuid())).keys() == {1000, STRANGER}
        assert [total.owner_uid for total in scene.keeper.totals(STRANGER)] == [STRANGER]
        assert [total.used_ns for total in scene.keeper.totals(0)] == [2 * S, 1 * S]  # written
        later = Usage(since_unix_s=time.time() + 60)
        assert (await scene.keeper.report(later, 0)).rows == ()

    trio.run(run)


def test_a_disk_that_takes_nothing_keeps_rows_in_memory_until_it_does(scene: Scene) -> None:
    async def run() -> None:
        await scene.sample(0, u1000=0)
        await scene.sample(10, u1000=2)
        scene.database.path.mkdir()
        await scene.keeper.write()
        await scene.sample(20, u1000=3)
        found = await scene.keeper.report(Usage(), 0)
        assert used_s(found) == {1000: 3.0}
        assert found.notes[0].startswith("Only what this node has in memory is here")
        scene.database.path.rmdir()
        await scene.keeper.write()
        found = await scene.keeper.report(Usage(), 0)
        assert (used_s(found), found.notes) == ({1000: 3.0}, ())
        assert scene.keeper.totals(0)[0].used_ns == 3 * S

    trio.run(run)


def test_the_next_node_goes_on_with_the_counters(scene: Scene) -> None:
    async def run() -> None:
        await scene.sample(0, u1000=0)
        await scene.sample(10, u1000=2)

    trio.run(run)
    scene.keeper.end()
    scene.database.close()
    following = Scene(scene.database.path)

    async def go_on() -> None:
        with trio.move_on_after(0.2):
            await following.keeper.run()
        assert following.keeper.totals(0)[0].used_ns == 2 * S

    trio.run(go_on)


def test_rows_that_the_file_can_never_take_do_not_end_the_node(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise sqlite3.IntegrityError("planted")

    monkeypatch.setattr("vgpu.node.usage.put", refuse)

    async def run() -> None:
        await scene.sample(0, u1000=0)
        await scene.sample(10, u1000=2)
        await scene.keeper.write()
        assert (await scene.keeper.report(Usage(), 0)).rows == ()

    trio.run(run)
    scene.keeper.end()


def test_steps_of_rows_that_are_not_written_yet(scene: Scene) -> None:
    async def run() -> None:
        for at, busy in ((0, 0), (100, 10), (200, 20), (300, 30)):
            await scene.sample(at, u1000=busy)
        with pytest.raises(VgpuError, match="more than 1000 steps"):
            await scene.keeper.report(Usage(step_s=60), 0)
        asked = Usage(since_unix_s=scene.survey.began, step_s=120, by="vgpu")
        before = await scene.keeper.report(asked, 0)
        await scene.keeper.write()
        after = await scene.keeper.report(asked, 0)
        assert before.rows == after.rows
        assert len(before.rows) >= 2
        assert sum(row.used_gpu_hours for row in after.rows) * 3600 == pytest.approx(30, abs=0.01)

    trio.run(run)


@pytest.mark.parametrize("request_", [Usage(), Why(vgpu="web")])
def test_an_older_node_is_not_asked(request_: Usage | Why) -> None:
    with pytest.raises(VgpuError, match="older release, which has no") as refused:
        request_.said_to(USAGE_SINCE - 1)
    assert refused.value.code is ErrorCode.VERSION
    assert request_.said_to(USAGE_SINCE)["op"] == request_.op


def test_a_strangers_why_has_no_history(scene: Scene) -> None:
    async def run() -> None:
        for at, busy in ((0, 0), (60, 18), (110, 33)):
            await scene.sample(at, u1000=busy)
        snapshot, _ = await scene.survey.lately(0)
        [vgpu] = snapshot.vgpus
        detail = VgpuDetail(vgpu=vgpu, processes=(), gpu=snapshot.gpus[0], notes=())
        own = await explained(detail, snapshot, scene.keeper, 1000)
        assert own.figures["measured_seconds"] == 110
        assert (await explained(detail, snapshot, scene.keeper, STRANGER)).figures["measured_seconds"] == 0

    trio.run(run)
