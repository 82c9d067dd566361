"""``node.db``: what a node keeps besides its vGPUs, in SQLite. GPU Servers' journals are the only truth about vGPUs.
If this file is lost, only queue and history are.

``MIGRATIONS`` makes the tables: each entry is one SQL script, and ``PRAGMA user_version`` counts those that have run.
A new table is one more named script at the end; a script that a release has is never changed.

A node that cannot use the file goes on without it. It writes one line to its log, and tries again later.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar

import trio

from vgpu.errors import ErrorCode, VgpuError
from vgpu.loggers import get_logger

log = get_logger(__name__)

USAGE: Final = """
CREATE TABLE usage (
    span_s INTEGER NOT NULL,
    start_unix_s INTEGER NOT NULL,
    owner_uid INTEGER NOT NULL,
    vgpu_id TEXT NOT NULL,
    measured_ns INTEGER NOT NULL,
    promised_ns INTEGER NOT NULL,
    used_ns INTEGER NOT NULL,
    wasted_ns INTEGER NOT NULL,
    limited_ns INTEGER NOT NULL,
    waiting_ns INTEGER NOT NULL,
    attached_ns INTEGER NOT NULL,
    memory_promised_kib_s INTEGER NOT NULL,
    memory_used_kib_s INTEGER NOT NULL,
    refusals INTEGER NOT NULL,
    swaps INTEGER NOT NULL,
    PRIMARY KEY (span_s, start_unix_s, owner_uid, vgpu_id)
) WITHOUT ROWID;
CREATE TABLE usage_vgpu (
    vgpu_id TEXT PRIMARY KEY,
    owner_uid INTEGER NOT NULL,
    name TEXT NOT NULL,
    claim TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE usage_total (
    owner_uid INTEGER NOT NULL,
    team TEXT NOT NULL,
    promised_ns INTEGER NOT NULL,
    used_ns INTEGER NOT NULL,
    wasted_ns INTEGER NOT NULL,
    memory_promised_kib_s INTEGER NOT NULL,
    memory_used_kib_s INTEGER NOT NULL,
    PRIMARY KEY (owner_uid, team)
) WITHOUT ROWID;
"""
"""Rows of ``vgpu.usage.rows``, the names of their vGPUs, and what all rows of each user and team have summed to."""

QUEUE: Final = """
CREATE TABLE waiting (
    request_id TEXT NOT NULL,
    owner_uid INTEGER NOT NULL,
    since_unix_s REAL NOT NULL,
    PRIMARY KEY (request_id, owner_uid)
) WITHOUT ROWID;
"""
"""Since when the requests in the queue wait (``vgpu.node.tenancy.queue``)."""

MIGRATIONS: Final[tuple[str, ...]] = (USAGE, QUEUE)

AGAIN_S: Final = 30.0
"""Between two attempts to use a file that cannot be used."""
BUSY_S: Final = 5.0
"""How long a transaction waits for one of another process."""
DAMAGED: Final = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
OUR_FAULTS: Final = (sqlite3.IntegrityError, sqlite3.ProgrammingError, sqlite3.DataError)
"""Errors of a statement, which another disk would not heal."""
Result = TypeVar("Result")


class _Unusable(Exception):
    """The file is damaged, or a newer release wrote it."""


class NodeDatabase:
    """``read`` and ``write`` from any task: each runs its function in one transaction, in a worker thread, one after
    the other. ``warn`` gets a sentence when a file was moved aside."""

    def __init__(
        self,
        path: Path,
        migrations: Sequence[str] = MIGRATIONS,
        *,
        warn: Callable[[str], None] = lambda text: None,
        again_s: float = AGAIN_S,
    ) -> None:
        self.path = path
        self._migrations = tuple(migrations)
        self._warn = warn
        self._again_s = again_s
        self._lock = trio.Lock()
        self._connection: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None
        """Device and inode of the file that was opened last. Another file in its place has other ones."""
        self._reason = ""
        """Why the file cannot be used; "": it can."""
        self._failed_at = 0.0
        self._warnings: list[str] = []

    @property
    def reason(self) -> str:
        """Why the last write failed; "": it did not."""
        return self._reason

    async def write(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        """The result of ``work``, committed. ``VgpuError`` (unavailable): nothing of it is in the file."""
        return await self._run(self.write_now, work)

    async def read(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        """The result of ``work``, which changes nothing. A full disk does not prevent it."""
        return await self._run(self.read_now, work)

    async def _run(
        self,
        transact: Callable[[Callable[[sqlite3.Connection], Result]], Result],
        work: Callable[[sqlite3.Connection], Result],
    ) -> Result:
        async with self._lock:
            try:
                return await trio.to_thread.run_sync(transact, work)
            finally:
                warnings, self._warnings = self._warnings, []
                for text in warnings:
                    self._warn(text)

    # --- without a loop, and in the worker thread

    def write_now(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        """``write`` of a process whose loop has ended, or has not begun."""
        if self._reason and time.monotonic() - self._failed_at < self._again_s:
            raise self._unavailable()
        try:
            result = self._transact("BEGIN IMMEDIATE", work)
        except OUR_FAULTS:
            raise
        except (sqlite3.DatabaseError, OSError) as error:
            if not self._reason:
                log.error("history is not kept", file=str(self.path), reason=str(error))
            self._reason = str(error) or type(error).__name__
            self._failed_at = time.monotonic()
            raise self._unavailable() from error
        if self._reason:
            log.warning("history is kept again", file=str(self.path))
            self._reason = ""
        return result

    def read_now(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        try:
            return self._transact("BEGIN", work)
        except (sqlite3.DatabaseError, OSError) as error:
            raise VgpuError(
                ErrorCode.UNAVAILABLE, f"the node's history cannot be read: {error}", f"the file is {self.path}"
            ) from error

    def close(self) -> None:
        """The next transaction opens the file again."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(sqlite3.Error):
                connection.close()

    def _unavailable(self) -> VgpuError:
        return VgpuError(
            ErrorCode.UNAVAILABLE,
            f"the node's history cannot be written: {self._reason}",
            f"make room for {self.path}; the node tries again by itself",
        )

    def _transact(self, begin: str, work: Callable[[sqlite3.Connection], Result]) -> Result:
        try:
            return self._once(begin, work)
        except sqlite3.DatabaseError as error:
            self.close()
            if not _is_damage(error):
                raise
            self._move_aside(str(error))
            return self._once(begin, work)

    def _once(self, begin: str, work: Callable[[sqlite3.Connection], Result]) -> Result:
        connection = self._opened()
        connection.execute(begin)
        try:
            result = work(connection)
            connection.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
            raise
        return result

    def _opened(self) -> sqlite3.Connection:
        if self._connection is not None and self._file == _identity(self.path):
            return self._connection
        self.close()
        try:
            self._connection = self._open()
        except _Unusable as error:
            self._move_aside(str(error))
            self._connection = self._open()
        return self._connection

    def _open(self) -> sqlite3.Connection:
        os.close(os.open(self.path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
        self.path.chmod(0o600)
        self._file = _identity(self.path)
        connection = sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute("PRAGMA journal_size_limit = 4194304")
            if (found := connection.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
                raise _Unusable(f"it is damaged: {found}")
            self._migrate(connection)
        except sqlite3.DatabaseError as error:
            connection.close()
            if _is_damage(error):
                raise _Unusable(f"it is damaged: {error}") from error
            raise
        except BaseException:
            connection.close()
            raise
        return connection

    def _migrate(self, connection: sqlite3.Connection) -> None:
        """Each script runs in one transaction with its number, so a node that dies leaves the one or the other."""
        while (version := _version(connection)) != len(self._migrations):
            if version > len(self._migrations):
                known = len(self._migrations)
                raise _Unusable(f"a newer release wrote it: version {version}, and this one knows {known}")
            script = f"BEGIN IMMEDIATE; {self._migrations[version]}; PRAGMA user_version = {version + 1}; COMMIT"
            try:
                connection.executescript(script)
            except sqlite3.OperationalError:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                if _version(connection) == version:  # else another process was faster
                    raise

    def _move_aside(self, reason: str) -> None:
        """Keep the file for a person, the newest such file only, and make room for an empty one. The log goes first:
        with no database it is nothing, and beside a new one SQLite would read it. Another process may have been faster:
        then the file at this path is a new one already."""
        if _identity(self.path) != self._file:
            return
        aside = self.path.with_name(f"{self.path.name}.damaged-{time.strftime('%Y%m%dT%H%M%S')}")
        for older in self.path.parent.glob(f"{self.path.name}.damaged-*"):
            older.unlink(missing_ok=True)
        for part in ("-wal", ""):
            with suppress(FileNotFoundError):
                self.path.with_name(self.path.name + part).rename(aside.with_name(aside.name + part))
        self.path.with_name(self.path.name + "-shm").unlink(missing_ok=True)
        log.error("history is lost, a new file begins", file=str(self.path), kept=str(aside), reason=reason)
        self._warnings.append(f"the node's history begins again: {self.path.name} was unusable, and is kept as {aside}")


def _is_damage(error: sqlite3.DatabaseError) -> bool:
    code: int = getattr(error, "sqlite_errorcode", 0)
    return code & 0xFF in DAMAGED


def _version(connection: sqlite3.Connection) -> int:
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    return version


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino
