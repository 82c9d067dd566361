"""A journal that cannot be written: who asks for something is told, and nothing is made that a restart would forget."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from tests.integration.node import SimulatedNode, eventually
from tests.interpreter.places import site_packages, virtual_environment
from vgpu.errors import ErrorCode, VgpuError
from vgpu.spec import VgpuChanges


@pytest.fixture
def node() -> Iterator[SimulatedNode]:
    with SimulatedNode() as running:
        yield running


@contextmanager
def full(node: SimulatedNode) -> Iterator[None]:
    """Every write of GPU 0's journal fails meanwhile."""
    with node.link() as link, closing(sqlite3.connect(node.paths.journal(link.gpus()[0].uuid))) as journal:
        journal.execute("CREATE TRIGGER full BEFORE INSERT ON server BEGIN SELECT RAISE(ABORT, 'disk full'); END")
        yield
        journal.execute("DROP TRIGGER full")


def test_a_vgpu_that_cannot_be_written_down_is_not_made(node: SimulatedNode) -> None:
    with full(node), pytest.raises(VgpuError, match=r"^the journal of GPU 0 cannot be written") as refused:
        node.create(sm_percent=30, memory_bytes="4G", name="mine")
    assert (refused.value.code, refused.value.hint) == (
        ErrorCode.INTERNAL,
        f"see: vgpuctl doctor; df -h {node.paths.state}",
    )
    with node.link() as link:
        assert link.list() == ()
        (gpu,) = link.gpus()
    assert gpu.guaranteed_memory_bytes == 0
    assert node.create(sm_percent=100, memory_bytes="4G", name="mine").name == "mine"


LATE_BROKERS = """
import os, sys, time
while "vgpu.broker.template" in sys.orig_argv and not os.path.exists({!r}):
    time.sleep(0.01)
"""


@pytest.mark.slow
def test_a_vgpu_that_waits_for_its_broker_is_not_written_down_yet(tmp_path: Path) -> None:
    """The journal is written once a second. If it cannot be once the broker is there, nobody is to find the vGPU."""
    python = virtual_environment(tmp_path / "venv", "import late_brokers")
    late = LATE_BROKERS.format(str(tmp_path / "now"))
    (site_packages(tmp_path / "venv") / "late_brokers.py").write_text(late)
    node = SimulatedNode()
    node.argv[0] = str(python)
    with node, ThreadPoolExecutor() as pool:
        with node.link() as link:
            path = node.paths.journal(link.gpus()[0].uuid)
        making = pool.submit(node.create, sm_percent=30, memory_bytes="4G")
        with node.link() as link, closing(sqlite3.connect(path)) as journal:

            def said(question: str) -> int:
                return int(journal.execute(question).fetchone()[0])

            eventually(link.list, "it is being made")
            for _ in range(2):  # a write may have begun before
                known = said("PRAGMA data_version")
                eventually(lambda known=known: said("PRAGMA data_version") != known, "the journal is written")
            assert said("SELECT count(*) FROM vgpu") == 0
            with full(node):
                (tmp_path / "now").touch()
                with pytest.raises(VgpuError, match="cannot be written"):
                    making.result()
                assert said("SELECT count(*) FROM vgpu") == 0
        made = node.create(sm_percent=30, memory_bytes="4G")
        with closing(sqlite3.connect(path)) as journal:
            assert journal.execute("SELECT vgpu_id FROM vgpu").fetchall() == [(made.vgpu_id,)]


@pytest.mark.slow
def test_what_is_in_effect_though_it_is_not_written_is_said_to_be(node: SimulatedNode) -> None:
    changed, removed = (node.create(sm_percent=30, memory_bytes="1G") for _ in range(2))
    with full(node), node.link() as link:
        with pytest.raises(VgpuError, match=f"{changed.vgpu_id} is changed, but the journal of GPU 0 cannot"):
            link.set(changed.vgpu_id, VgpuChanges(sm_percent=40))
        with pytest.raises(VgpuError, match=f"{removed.vgpu_id} is removed, but the journal"):
            link.remove(removed.vgpu_id)
        with pytest.raises(VgpuError, match="GPU 0 is changed, but the journal"):
            link.set_gpu("0", period_ns=50_000_000)
        (left,) = link.list()
        assert (left.vgpu_id, left.spec.sm_percent) == (changed.vgpu_id, 40)

    def written() -> bool:
        with node.link() as link:
            uuid = link.gpus()[0].uuid
        with closing(sqlite3.connect(f"file:{node.paths.journal(uuid)}?mode=ro", uri=True)) as journal:
            rows = journal.execute("SELECT vgpu_id, json_extract(spec, '$.sm_percent') FROM vgpu").fetchall()
        return rows == [(changed.vgpu_id, 40.0)]

    eventually(written, "both in the journal once it takes them")


@pytest.mark.slow
def test_a_damaged_journal_is_the_reason_and_moved_away_its_gpu_is_served(node: SimulatedNode) -> None:
    node.create(sm_percent=30, memory_bytes="1G")
    with node.link() as link:
        (gpu,) = link.gpus()
    journal = node.paths.journal(gpu.uuid)
    pid = node.server_pid()
    os.kill(pid, signal.SIGSTOP)  # it writes once a second
    journal.write_bytes(b"no database " * 1000)
    journal.with_name(f"{journal.name}-wal").unlink()  # of which SQLite would heal it
    os.kill(pid, signal.SIGKILL)

    def reason() -> str:
        with node.link() as link:
            return link.gpus()[0].reason

    told = eventually(lambda: "damaged" in (said := reason()) and said, "the reason")
    assert told.startswith("its server ended, see ")
    assert f": the journal {journal} is damaged: file is not a database; " in told
    subprocess.run(told.rpartition("forgotten: ")[2].split(), check=True)
    eventually(lambda: reason() == "", "its server serves")
    with node.link() as link:
        assert link.list() == ()
