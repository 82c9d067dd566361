"""What the journal remembers, and that a write is all or nothing."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from shutil import copyfile
from typing import Any

import pytest

from gpuserver.core.admission.registry import GpuCapacity, Owner, Registry
from gpuserver.core.scheduler.leases import AccountState
from gpuserver.core.states.migration import AT_REST, MigrationState
from gpuserver.core.states.standby import NO_STANDBY, Standby
from gpuserver.runtime.journal import EPOCH_RESERVE, Journal, ServerRow, VgpuRow
from vgpu.enums import PriorityName
from vgpu.errors import ErrorCode, VgpuError
from vgpu.identity import Member, Process
from vgpu.queueing.preempted import Preempted
from vgpu.share import Mode
from vgpu.spec import VgpuSpec

BOOK = AccountState(lag_ns=-5, bucket_ns=6, held_ns=1 << 60, busy_ns=7, overuse_ns=8, tokens=9)


def rows(count: int) -> list[VgpuRow]:
    registry = Registry(GpuCapacity(140 << 30, 132), Mode.TEMPORAL)
    made = []
    for n in range(count):
        spec = VgpuSpec.parse(sm_percent=5, memory_bytes="1G", name=f"n{n}", ttl_ns="1h" if n % 2 else None)
        record = registry.create(f"v{n}", spec, Owner(1000 + n, n - 1), 10**18 + n)
        passage = (
            MigrationState(goes_on=True, leaving=1, home="GPU-1", programs=(Process(7, 8),)) if n % 3 == 1 else AT_REST
        )
        idle_suspended = (Process(7, 8), Process(9, 1)) if n % 3 == 2 else ()
        book = BOOK if n % 2 else None
        members = (Member(n, Process(7, 8), 1000, "a"), Member(63, Process(9, 1), alive=False)) if n % 2 else ()
        preempted = Preempted(7, "r", PriorityName.HIGH, 5.5) if n % 3 == 2 else None
        standby = Standby(("call", "tcp:8000"), 5.5, (1, (1 << 63) - 1)) if n % 3 == 2 else NO_STANDBY
        more = {
            "preempted": preempted,
            "standby": standby,
            "passage": passage,
            "idle_suspended": idle_suspended,
            "members": members,
        }
        made.append(VgpuRow.of(record, book, suspended=n % 3 == 2, **more))  # type: ignore[arg-type]
    return made


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "gpu.sqlite"


@pytest.fixture
def journal(path: Path) -> Iterator[Journal]:
    made = Journal(path)
    yield made
    made.close()


def begun(path: Path) -> tuple[ServerRow, list[VgpuRow]]:
    with closing(Journal(path)) as journal:
        return journal.begin()


def test_a_new_journal_is_empty(journal: Journal) -> None:
    assert journal.begin() == (ServerRow(1, 1, "", None), [])


def test_every_beginning_is_a_generation_of_its_own(path: Path) -> None:
    assert [begun(path)[0].generation for _ in range(3)] == [1, 2, 3]


def test_a_server_that_never_wrote_has_given_out_epochs_all_the_same(path: Path, journal: Journal) -> None:
    server, _ = journal.begin()
    journal.write(replace(server, next_epoch=77), rows(1))
    assert [begun(path)[0].next_epoch for _ in range(3)] == [77 + n * EPOCH_RESERVE for n in (1, 2, 3)]


def test_what_was_written_is_read_by_the_next_server(path: Path, journal: Journal) -> None:
    server, _ = journal.begin()
    wrote = replace(server, next_epoch=77, mode="spatial", period_ns=20_000_000, window_ns=6_000_000)
    journal.write(wrote, rows(3))
    assert begun(path) == (replace(wrote, generation=2, next_epoch=77 + EPOCH_RESERVE), rows(3))
    journal.write(wrote, rows(1))
    assert begun(path)[1] == rows(1)


def test_a_damaged_journal_is_named_and_moved_away_it_is_forgotten(path: Path) -> None:
    with closing(Journal(path)) as journal:
        server, _ = journal.begin()
        journal.write(server, rows(3))
    path.write_bytes(b"no database " * 1000)
    with pytest.raises(VgpuError, match=f"^the journal {path} is damaged: file is not a database") as refused:
        begun(path)
    assert refused.value.code is ErrorCode.INTERNAL
    assert refused.value.hint.endswith(f"vGPUs are forgotten: mv {path} {path}.damaged")
    path.rename(f"{path}.damaged")
    assert begun(path) == (ServerRow(1, 1, "", None), [])


def test_a_damaged_journal_lies_alone_when_it_is_to_be_moved_away(path: Path) -> None:
    """Its server was killed, and has left a log with all that it had written."""
    path.parent.mkdir()
    abandoned = Journal(path.with_name("abandoned"))
    server, _ = abandoned.begin()
    abandoned.write(server, rows(3))
    with closing(sqlite3.connect(path.with_name("abandoned"))) as raw, raw:
        raw.execute("PRAGMA writable_schema = ON")
        raw.execute("UPDATE sqlite_master SET sql = 'CREATE' WHERE name = 'vgpu'")
    for end in ("", "-wal", "-shm"):
        copyfile(path.with_name(f"abandoned{end}"), f"{path}{end}")
    abandoned.close()
    path.with_name("abandoned").unlink()
    with pytest.raises(VgpuError, match="is damaged: malformed database schema"):
        begun(path)
    assert list(path.parent.iterdir()) == [path]


def test_of_a_journal_that_was_moved_away_nothing_is_read_back_from_its_log(path: Path) -> None:
    abandoned = Journal(path)
    server, _ = abandoned.begin()
    abandoned.write(server, rows(3))
    log, left = path.with_name("gpu.sqlite-wal"), path.with_name("left")
    copyfile(log, left)
    abandoned.close()
    path.rename(f"{path}.damaged")
    left.rename(log)
    assert begun(path) == (ServerRow(1, 1, "", None), [])


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("vgpu SET spec = '{'", "Invalid JSON"),
        ("vgpu SET key = 'x'", "key: "),
        ("vgpu SET owner_uid = 'x'", "uid: "),
        ("vgpu SET created_unix_ns = 1.5", "created_unix_ns: "),
        ("server SET schema_version = 'x'", "schema_version: "),
        ("server SET generation = 'abc'", "generation: "),
        ("server SET next_epoch = x'00'", "next_epoch: "),
        ("server SET mode = 'bogus'", ""),
        ("server SET window_ns = 'x'", "--window: "),
    ],
)
def test_a_journal_of_which_a_row_is_damaged_is_named(path: Path, journal: Journal, damage: str, reason: str) -> None:
    server, _ = journal.begin()
    journal.write(server, rows(1))
    with closing(sqlite3.connect(path)) as raw, raw:
        raw.execute(f"UPDATE {damage}")
    with pytest.raises(VgpuError, match=f"the journal {path} is damaged: {reason}") as refused:
        begun(path)
    assert refused.value.code is ErrorCode.INTERNAL


def test_a_journal_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    path = tmp_path / "is-a-directory.sqlite"
    path.mkdir()
    with pytest.raises(VgpuError, match=f"the journal {path} cannot be read and written: unable to open") as refused:
        Journal(path)
    assert refused.value.hint == f"see: ls -l {path}; df -h {tmp_path}"


def test_a_journal_whose_directory_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    path = tmp_path / "state" / "gpu.sqlite"
    with pytest.raises(VgpuError, match=f"the journal {path} cannot be read and written: .*File exists"):
        Journal(path)


def test_a_write_that_fails_leaves_what_was(path: Path, journal: Journal) -> None:
    server, _ = journal.begin()
    journal.write(server, rows(2))
    twice = [*rows(2), replace(rows(2)[0], vgpu_id="other")]  # its key is taken
    with pytest.raises(sqlite3.IntegrityError):
        journal.write(replace(server, next_epoch=99), twice)
    row, remembered = begun(path)
    assert (row.next_epoch, remembered) == (server.next_epoch + EPOCH_RESERVE, rows(2))


def test_why_a_write_fails_is_told_where_sqlite_has_rolled_back_by_itself(path: Path, journal: Journal) -> None:
    server, _ = journal.begin()
    journal.write(server, rows(2))
    with closing(sqlite3.connect(path)) as raw, raw:
        raw.execute("CREATE TRIGGER full BEFORE INSERT ON vgpu BEGIN SELECT RAISE(ROLLBACK, 'disk full'); END")
    with pytest.raises(sqlite3.IntegrityError, match=r"^disk full$"):
        journal.write(server, rows(1))
    with closing(sqlite3.connect(path)) as raw, raw:
        raw.execute("DROP TRIGGER full")
    journal.write(server, rows(2))
    assert begun(path)[1] == rows(2)


def test_a_journal_of_the_first_schema_is_read_on(path: Path, journal: Journal) -> None:
    server, _ = journal.begin()
    journal.write(replace(server, next_epoch=77), rows(2))
    with closing(sqlite3.connect(path)) as raw, raw:
        raw.execute("ALTER TABLE server DROP COLUMN window_ns")
        raw.execute("ALTER TABLE vgpu DROP COLUMN suspended")
        raw.execute("ALTER TABLE vgpu DROP COLUMN passage")
        raw.execute("ALTER TABLE vgpu DROP COLUMN dozing")
        raw.execute("ALTER TABLE vgpu DROP COLUMN preempted")
        raw.execute("ALTER TABLE vgpu DROP COLUMN standby")
        raw.execute("UPDATE server SET schema_version = 1")
    known = [replace(row, passage=AT_REST) for row in rows(2)]
    assert begun(path) == (replace(server, generation=2, next_epoch=77 + EPOCH_RESERVE), known)


@pytest.mark.parametrize("column", ["mode", "window_ns"])
def test_a_journal_of_a_newer_release_is_left_alone(path: Path, column: str) -> None:
    """Whatever that release calls its columns."""
    with closing(Journal(path)) as journal:
        journal.begin()
    with closing(sqlite3.connect(path)) as raw, raw:
        raw.execute("UPDATE server SET schema_version = 99")
        raw.execute(f"ALTER TABLE server RENAME COLUMN {column} TO another")
    before = path.read_bytes()
    with pytest.raises(VgpuError) as refused:
        begun(path)
    assert refused.value.code is ErrorCode.VERSION
    assert refused.value.message == f"{path} was written by a newer release (schema 99, this one knows 8)"
    assert refused.value.hint == "install that release again, or a newer one"
    assert path.read_bytes() == before


UNFIT = [{"expires_unix_ns": 1 << 63}, {"created_unix_ns": 10**40}, {"owner": Owner(-(1 << 63) - 1)}]


@pytest.mark.parametrize("values", UNFIT, ids=str)
def test_a_row_that_cannot_be_written_keeps_its_old_one_and_no_other_from_being_written(
    journal: Journal, values: dict[str, Any]
) -> None:
    server, _ = journal.begin()
    before = rows(3)
    assert journal.write(server, before) == []
    changed = [replace(row, owner=Owner(77)) for row in before]
    assert journal.write(server, [changed[0], replace(changed[1], **values), changed[2]]) == ["v1"]
    assert sorted(journal.begin()[1], key=lambda row: row.vgpu_id) == [changed[0], before[1], changed[2]]
    assert journal.write(server, [changed[0], replace(rows(4)[3], **values)]) == ["v3"]
    assert journal.begin()[1] == [changed[0]]
