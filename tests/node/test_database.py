"""``node.db``: kills, damage, releases, full disks and a second process. A node never fails for want of its history."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import structlog.testing
import trio

from vgpu.errors import ErrorCode, VgpuError
from vgpu.node.database import MIGRATIONS, NodeDatabase

NUMBERS = "CREATE TABLE number (value INTEGER PRIMARY KEY, twice INTEGER NOT NULL)"
MORE = "CREATE TABLE more (value INTEGER); INSERT INTO more SELECT value FROM number"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "node.db"


@pytest.fixture
def warnings() -> list[str]:
    return []


@pytest.fixture
def database(path: Path, warnings: list[str]) -> Iterator[NodeDatabase]:
    made = NodeDatabase(path, (NUMBERS,), warn=warnings.append, again_s=0.0)
    yield made
    made.close()


def put(database: NodeDatabase, *values: int) -> None:
    def work(db: sqlite3.Connection) -> None:
        db.executemany("INSERT INTO number VALUES (?, ?)", [(value, 2 * value) for value in values])

    database.write_now(work)


def values(database: NodeDatabase) -> list[int]:
    found: list[tuple[int]] = database.read_now(lambda db: db.execute("SELECT value FROM number").fetchall())
    return sorted(value for (value,) in found)


def aside(path: Path) -> list[Path]:
    return [found for found in path.parent.glob("node.db.damaged-*") if not found.name.endswith("-wal")]


def test_the_file_is_the_nodes_own_and_a_write_is_there_for_the_next_node(path: Path, database: NodeDatabase) -> None:
    put(database, 1, 2)
    database.close()
    assert path.stat().st_mode & 0o777 == 0o600
    assert values(NodeDatabase(path, (NUMBERS,))) == [1, 2]


def test_every_script_of_this_release_runs_once_and_in_order(path: Path) -> None:
    for count in range(len(MIGRATIONS) + 1):
        database = NodeDatabase(path, MIGRATIONS[:count])
        assert database.write_now(lambda db: db.execute("PRAGMA user_version").fetchone()) == (count,)
        database.close()
    older = NodeDatabase(path.with_name("other.db"), (NUMBERS,))
    put(older, 3)
    older.close()
    newer = NodeDatabase(path.with_name("other.db"), (NUMBERS, MORE))
    assert newer.read_now(lambda db: db.execute("SELECT value FROM more").fetchall()) == [(3,)]


def test_a_script_that_fails_leaves_the_file_as_it_was(path: Path, database: NodeDatabase) -> None:
    put(database, 1)
    database.close()
    with pytest.raises(VgpuError, match="no such table"):
        NodeDatabase(path, (NUMBERS, "CREATE TABLE half (x); INSERT INTO absent VALUES (1)")).write_now(lambda _: None)
    assert values(database) == [1]
    half = "SELECT count(*) FROM sqlite_master WHERE name = 'half'"
    assert database.read_now(lambda db: db.execute(half).fetchone()) == (0,)


def test_a_function_that_raises_leaves_nothing_of_its_transaction(database: NodeDatabase) -> None:
    def work(db: sqlite3.Connection) -> None:
        db.execute("INSERT INTO number VALUES (1, 2)")
        raise KeyError("ours")

    with pytest.raises(KeyError):
        database.write_now(work)
    put(database, 2)
    with pytest.raises(sqlite3.IntegrityError):
        put(database, 3, 2)
    assert values(database) == [2]


@pytest.mark.parametrize("spoil", ["text", "page", "short", "wal"])
def test_a_damaged_file_is_kept_aside_and_an_empty_one_takes_its_place(
    path: Path, database: NodeDatabase, warnings: list[str], spoil: str
) -> None:
    put(database, *range(5000))
    database.close()
    whole = path.read_bytes()
    if spoil == "text":
        path.write_bytes(b"not a database at all\n" * 400)
    elif spoil == "page":
        path.write_bytes(whole[:4096] + b"\xa5" * 8192 + whole[12288:])
    elif spoil == "short":
        path.write_bytes(whole[:6000])
    else:  # a log of another database beside it: SQLite takes no frame of it
        path.with_name("node.db-wal").write_bytes(b"\xa5" * 40_000)
        assert values(database) == list(range(5000))
        return
    path.with_name("node.db.damaged-20200101T000000").write_text("older")
    with structlog.testing.capture_logs() as logs:
        put(database, 7)
    assert values(database) == [7]
    assert [entry["event"] for entry in logs] == ["history is lost, a new file begins"]
    assert len(aside(path)) == 1
    assert aside(path)[0].read_bytes() != b"older"


def test_damage_that_shows_while_the_file_is_open_ends_the_same_way(
    path: Path, database: NodeDatabase, warnings: list[str]
) -> None:
    put(database, *range(5000))
    database.read_now(lambda db: db.execute("SELECT count(*) FROM number"))
    with closing(sqlite3.connect(path)) as raw:
        raw.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xa5" * (path.stat().st_size - 4096))

    async def use() -> list[int]:
        await database.write(lambda db: db.execute("INSERT INTO number VALUES (9000, 0)"))
        return await database.read(lambda db: [value for (value,) in db.execute("SELECT value FROM number")])

    # What SQLite still has in its cache is whole; another connection changes the file, and the cache is dropped.
    with closing(sqlite3.connect(path, isolation_level=None)) as raw:
        raw.execute("PRAGMA user_version = 1")
    assert trio.run(use) == [9000]
    assert len(warnings) == 1
    assert len(aside(path)) == 1


def test_a_file_of_a_newer_release_is_kept_aside(path: Path, database: NodeDatabase, warnings: list[str]) -> None:
    newer = NodeDatabase(path, (NUMBERS, MORE))
    put(newer, 1)
    newer.close()

    async def use() -> None:
        await database.write(lambda _: None)

    trio.run(use)
    assert values(database) == []
    assert "begins again" in warnings[0]
    with closing(sqlite3.connect(aside(path)[0])) as kept:
        assert kept.execute("SELECT value FROM number").fetchall() == [(1,)]


def test_a_full_disk_is_reported_once_and_the_next_write_works_when_there_is_room(
    path: Path, database: NodeDatabase
) -> None:
    put(database, 1)
    pages = database.read_now(lambda db: db.execute("PRAGMA page_count").fetchone()[0])
    database.read_now(lambda db: db.execute(f"PRAGMA max_page_count = {pages}").fetchone())
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            with pytest.raises(VgpuError, match="full") as refused:
                database.write_now(_much(pages))
        assert refused.value.code is ErrorCode.UNAVAILABLE
        assert values(database) == [1]
        put(database, 2)  # the connection was closed, and with it went the bound
    assert [entry["event"] for entry in logs] == ["history is not kept", "history is kept again"]
    assert values(database) == [1, 2]


def _much(pages: int) -> Callable[[sqlite3.Connection], None]:
    def work(db: sqlite3.Connection) -> None:
        db.execute(f"PRAGMA max_page_count = {pages}").fetchone()
        db.executemany("INSERT INTO number VALUES (?, 0)", [(value,) for value in range(10, 20_000)])

    return work


def test_between_two_attempts_no_write_touches_the_disk(path: Path) -> None:
    path.mkdir()
    database = NodeDatabase(path, (NUMBERS,), again_s=3600.0)
    with pytest.raises(VgpuError, match="directory"):
        put(database, 1)
    path.rmdir()
    with pytest.raises(VgpuError, match="directory"):
        put(database, 1)
    assert not path.exists()
    assert values(database) == []  # a read tries at once


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_directory_without_write_permission(path: Path, database: NodeDatabase) -> None:
    path.parent.chmod(0o500)
    try:
        with pytest.raises(VgpuError, match="cannot be written"):
            put(database, 1)
    finally:
        path.parent.chmod(0o700)
    put(database, 1)
    assert values(database) == [1]


def test_a_file_that_was_removed_or_replaced_is_opened_anew(path: Path, database: NodeDatabase) -> None:
    put(database, 1)
    for name in ("node.db", "node.db-wal", "node.db-shm"):
        path.with_name(name).unlink(missing_ok=True)
    put(database, 2)
    assert values(database) == [2]


def test_writes_of_many_tasks_follow_each_other(path: Path, database: NodeDatabase) -> None:
    async def write(value: int) -> None:
        await database.write(lambda db: db.execute("INSERT INTO number VALUES (?, 0)", (value,)))

    async def all_of_them() -> None:
        async with trio.open_nursery() as nursery:
            for value in range(40):
                nursery.start_soon(write, value)

    trio.run(all_of_them)
    assert values(database) == list(range(40))


WRITER = """
import sys
from pathlib import Path
from vgpu.node.database import NodeDatabase
database = NodeDatabase(Path(sys.argv[1]), (sys.argv[2],))
value = int(sys.argv[3])
while True:
    def work(db):
        db.execute("INSERT INTO number VALUES (?, 0)", (value,))
        db.execute("UPDATE number SET twice = ? WHERE value = ?", (2 * value, value))
    database.write_now(work)
    print(value, flush=True)
    value += 2
"""


@pytest.mark.slow
def test_two_nodes_write_and_are_killed_and_nothing_is_half_there(path: Path) -> None:
    for attempt in range(6):
        nodes = [
            subprocess.Popen(
                [sys.executable, "-c", WRITER, str(path), NUMBERS, str(100_000 * attempt + parity)],
                stdout=subprocess.PIPE,
                text=True,
            )
            for parity in (0, 1)
        ]
        confirmed = []
        for node in nodes:
            assert node.stdout is not None
            confirmed += [int(node.stdout.readline()) for _ in range(5 * attempt + 1)]
        for node in nodes:
            node.send_signal(signal.SIGKILL)
        for node in nodes:
            rest, _ = node.communicate()
            confirmed += [int(line) for line in rest.splitlines()]
        database = NodeDatabase(path, (NUMBERS,))
        rows = database.read_now(lambda db: db.execute("SELECT value, twice FROM number").fetchall())
        database.close()
        assert set(confirmed) <= {value for value, _ in rows}
        assert all(twice == 2 * value for value, twice in rows)
    assert not aside(path)
