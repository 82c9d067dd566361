"""The journal of one GPU: vGPUs and their books in SQLite, so that they outlive the GPU Server.

Calls block on the disk; the runtime makes them in a thread, one at a time. A change is on disk before the client gets
the answer ("created"). The server writes books once a second, so a crash loses at most a second of charges.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal, Self

from pydantic import BaseModel, TypeAdapter, ValidationError

from gpuserver.core.admission.origin import KEPT, Origin
from gpuserver.core.admission.registry import Owner, VgpuRecord
from gpuserver.core.scheduler.leases import AccountState, VgpuIndex
from gpuserver.core.states.migration import AT_REST, MigrationState
from gpuserver.core.states.standby import NO_STANDBY, Standby
from vgpu.bounds import LEAST, MOST_STORED
from vgpu.errors import ErrorCode, VgpuError
from vgpu.identity import Member, Process
from vgpu.loggers import get_logger
from vgpu.protocol.stream import file_at
from vgpu.queueing.preempted import Preempted
from vgpu.spec import VgpuSpec, explain
from vgpu.trust import replaceable_part

SCHEMA_VERSION: Final = 8
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS server (
    only_row INTEGER PRIMARY KEY CHECK (only_row = 0),
    schema_version INTEGER NOT NULL,
    generation INTEGER NOT NULL,
    next_epoch INTEGER NOT NULL,
    mode TEXT NOT NULL,
    period_ns INTEGER,
    window_ns INTEGER,
    draining INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS vgpu (
    vgpu_id TEXT PRIMARY KEY,
    key INTEGER NOT NULL UNIQUE,
    spec TEXT NOT NULL,
    owner_uid INTEGER NOT NULL,
    share_gid INTEGER NOT NULL,
    created_unix_ns INTEGER NOT NULL,
    expires_unix_ns INTEGER,
    book TEXT,
    suspended INTEGER NOT NULL DEFAULT 0,
    passage TEXT,
    dozing TEXT,
    members TEXT,
    origin TEXT,
    preempted TEXT,
    standby TEXT
);
"""
_COLUMNS: Final = (
    "vgpu_id, key, spec, owner_uid, share_gid, created_unix_ns, expires_unix_ns, book, suspended, passage, dozing, "
    "members, origin, preempted, standby"
)
"""By name: those of an older schema come last."""
EPOCH_RESERVE: Final = 1 << 24
"""More leases than are begun between two writes, also where the disk takes none for an hour: rounds of 48 vGPUs begin
4800 a second, and one alone waits for ever for a lease that has an epoch it is done with."""
_PLACES: Final = ", ".join("?" for _ in _COLUMNS.split(","))
_BOOK: Final = TypeAdapter(AccountState)
_PASSAGE: Final = TypeAdapter(MigrationState)
_ORIGIN: Final = TypeAdapter(Origin)
_PREEMPTED: Final = TypeAdapter(Preempted)
_STANDBY: Final = TypeAdapter(Standby)
_PROCESSES: Final = TypeAdapter(tuple[Process, ...])
_MEMBERS: Final = TypeAdapter(tuple[Member, ...])


@dataclass(frozen=True, slots=True)
class ServerRow:
    """``generation``: of the grants pages. ``next_epoch``: when this was written, no lease had had it or a later one.
    ``mode``: what was chosen ("" before the first choice). ``draining``: the GPU takes no new vGPUs."""

    generation: int
    next_epoch: int
    mode: str
    period_ns: int | None
    window_ns: int | None = None
    draining: bool = False


@dataclass(frozen=True, slots=True)
class VgpuRow:
    """One vGPU as the journal has it. ``suspended``: its programs are suspended. ``idle_suspended``: the programs that
    are suspended because the vGPU was idle; it comes back by itself. ``members``: the processes that its broker had
    admitted. ``preempted``: the request for which the node has suspended it. ``standby``: what resumes it by itself."""

    vgpu_id: str
    key: VgpuIndex
    spec: VgpuSpec
    owner: Owner
    created_unix_ns: int
    expires_unix_ns: int | None
    book: AccountState | None
    suspended: bool = False
    passage: MigrationState = AT_REST
    idle_suspended: tuple[Process, ...] = ()
    members: tuple[Member, ...] = ()
    origin: Origin = KEPT
    preempted: Preempted | None = None
    standby: Standby = NO_STANDBY

    @classmethod
    def of(
        cls,
        record: VgpuRecord,
        book: AccountState | None,
        *,
        suspended: bool = False,
        passage: MigrationState = AT_REST,
        idle_suspended: tuple[Process, ...] = (),
        members: tuple[Member, ...] = (),
        origin: Origin = KEPT,
        preempted: Preempted | None = None,
        standby: Standby = NO_STANDBY,
    ) -> Self:
        return cls(
            record.vgpu_id,
            record.key,
            record.spec,
            record.owner,
            record.created_unix_ns,
            record.expires_unix_ns,
            book,
            suspended,
            passage,
            idle_suspended,
            members,
            origin,
            preempted,
            standby,
        )


_VGPU: Final = TypeAdapter(VgpuRow)


log = get_logger(__name__)


class _Found(BaseModel):
    """The server's row as it lies on the disk: SQLite keeps whatever was written, of any type."""

    schema_version: int
    generation: int
    next_epoch: int
    mode: Literal["", "temporal", "spatial"]
    period_ns: int | None
    window_ns: int | None
    draining: bool


class Journal:
    """One file. Errors of the beginning: ``VgpuError``, version for a file of a newer release, internal for one that
    cannot be read or written; of ``write``: ``sqlite3.Error``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with _readable(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            # Used from whichever thread trio lends, never from two at once.
            self._database = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        with _readable(path), self._closed_if_not():
            self._refuse_newer()
            self._prepare()
            self._file = file_at(path)

    def _refuse_newer(self) -> None:
        """``VgpuError`` (version): a newer release wrote the file. It stays as it is, for that release."""
        with closing(self._database.execute("SELECT 1 FROM sqlite_master WHERE name = 'server'")) as tables:
            if tables.fetchone() is None:
                return
        with closing(self._database.execute("SELECT schema_version FROM server")) as rows:
            version = (rows.fetchone() or (None,))[0]
        if isinstance(version, int) and version > SCHEMA_VERSION:
            raise VgpuError(
                ErrorCode.VERSION,
                f"{self._path} was written by a newer release (schema {version}, this one knows {SCHEMA_VERSION})",
                "install that release again, or a newer one",
            )

    def _prepare(self) -> None:
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute("PRAGMA synchronous = NORMAL")
        self._database.executescript(_SCHEMA)
        with closing(self._database.execute("PRAGMA table_info(server)")) as columns:
            known = {column[1] for column in columns}
        if "window_ns" not in known:  # written by schema 1
            self._database.execute("ALTER TABLE server ADD COLUMN window_ns INTEGER")
        if "draining" not in known:  # by schema 6
            self._database.execute("ALTER TABLE server ADD COLUMN draining INTEGER NOT NULL DEFAULT 0")
        with closing(self._database.execute("PRAGMA table_info(vgpu)")) as columns:
            known = {column[1] for column in columns}
        if "suspended" not in known:  # by schema 2
            self._database.execute("ALTER TABLE vgpu ADD COLUMN suspended INTEGER NOT NULL DEFAULT 0")
        if "passage" not in known:  # by schema 3
            self._database.execute("ALTER TABLE vgpu ADD COLUMN passage TEXT")
        if "dozing" not in known:  # by schema 4
            self._database.execute("ALTER TABLE vgpu ADD COLUMN dozing TEXT")
        if "members" not in known:  # by schema 5
            self._database.execute("ALTER TABLE vgpu ADD COLUMN members TEXT")
        if "origin" not in known:  # by schema 5
            self._database.execute("ALTER TABLE vgpu ADD COLUMN origin TEXT")
        if "preempted" not in known:  # by schema 6
            self._database.execute("ALTER TABLE vgpu ADD COLUMN preempted TEXT")
        if "standby" not in known:  # by schema 7
            self._database.execute("ALTER TABLE vgpu ADD COLUMN standby TEXT")

    def close(self) -> None:
        self._database.close()

    def begin(self) -> tuple[ServerRow, list[VgpuRow]]:
        """The journal's content for a server that begins now. Its own generation, and epochs that no page has had, are
        on disk already: the server may be killed before it writes again, or never be able to write."""
        with _readable(self._path), self._closed_if_not():
            return self._begin()

    @contextmanager
    def _closed_if_not(self) -> Iterator[None]:
        """Close the database after an error. The error may ask the user to move the file away, and closing removes
        SQLite's other files beside it."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _begin(self) -> tuple[ServerRow, list[VgpuRow]]:
        row = self._read_server()
        if row is None:
            row = ServerRow(1, 1, "", None)
        else:
            row = replace(row, generation=row.generation + 1, next_epoch=row.next_epoch + EPOCH_RESERVE)
        self.write_server(row)
        return row, self._read_vgpus()

    def _read_server(self) -> ServerRow | None:
        with closing(self._database.execute(f"SELECT {', '.join(_Found.model_fields)} FROM server")) as rows:
            values = rows.fetchone()
        if values is None:
            return None
        found = _Found.model_validate(dict(zip(_Found.model_fields, values, strict=True)))
        return ServerRow(**found.model_dump(exclude={"schema_version"}))

    def _read_vgpus(self) -> list[VgpuRow]:
        with closing(self._database.execute(f"SELECT {_COLUMNS} FROM vgpu ORDER BY created_unix_ns")) as rows:
            return [
                _VGPU.validate_python(
                    {
                        "vgpu_id": vgpu_id,
                        "key": key,
                        "spec": VgpuSpec.model_validate_json(spec),
                        "owner": {"uid": uid, "share_gid": gid},
                        "created_unix_ns": created,
                        "expires_unix_ns": expires,
                        "book": None if book is None else _BOOK.validate_json(book),
                        "suspended": suspended,
                        "passage": AT_REST if passage is None else _PASSAGE.validate_json(passage),
                        "idle_suspended": () if idle_suspended is None else _PROCESSES.validate_json(idle_suspended),
                        "members": () if members is None else _MEMBERS.validate_json(members),
                        "origin": KEPT if origin is None else _ORIGIN.validate_json(origin),
                        "preempted": None if preempted is None else _PREEMPTED.validate_json(preempted),
                        "standby": NO_STANDBY if standby is None else _STANDBY.validate_json(standby),
                    }
                )
                for (
                    vgpu_id,
                    key,
                    spec,
                    uid,
                    gid,
                    created,
                    expires,
                    book,
                    suspended,
                    passage,
                    idle_suspended,
                    members,
                    origin,
                    preempted,
                    standby,
                ) in rows
            ]

    def _stay_in_place(self) -> None:
        """SQLite writes into a file that was removed without an error, and all is lost at its end. Then another is
        made: ``write`` has the whole state. ``OSError``: another file is there, or none can be made."""
        found = file_at(self._path)
        if found == self._file:
            return
        if found != (0, 0):
            raise FileExistsError(f"another file was put in the place of the journal {self._path}")
        log.error("the journal was removed, and is made again", journal=str(self._path))
        if (part := replaceable_part(self._path.parent)) is not None:
            raise PermissionError(f"another user can replace {part}, in which the journal was")
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = sqlite3.connect(self._path, check_same_thread=False, isolation_level=None)
        self._database.close()
        self._database = fresh
        self._prepare()
        self._file = file_at(self._path)

    def write_server(self, row: ServerRow) -> None:
        self._database.execute(
            "INSERT OR REPLACE INTO server VALUES (0, ?, ?, ?, ?, ?, ?, ?)",
            (SCHEMA_VERSION, row.generation, row.next_epoch, row.mode, row.period_ns, row.window_ns, row.draining),
        )

    def write(self, server: ServerRow, vgpus: Iterable[VgpuRow]) -> list[str]:
        """The whole state, as one transaction: a reader sees all of it or what was before. A vGPU whose row SQLite
        cannot hold keeps the row that it had, and keeps no other from being written; their ids."""
        rows, unfit = [], []
        for row in vgpus:
            try:
                rows.append(_fit(row))
            except (ValueError, TypeError, OverflowError, RecursionError):  # pydantic's errors are ValueErrors
                unfit.append(row.vgpu_id)
        self._stay_in_place()
        self._database.execute("BEGIN IMMEDIATE")
        try:
            self.write_server(server)
            kept = ", ".join("?" for _ in unfit)
            self._database.execute(f"DELETE FROM vgpu WHERE vgpu_id NOT IN ({kept})", unfit)
            # A key is one vGPU's: of two that claim it, the one that can be written has it.
            self._database.executemany("DELETE FROM vgpu WHERE key = ?", [(row[1],) for row in rows])
            self._database.executemany(f"INSERT INTO vgpu ({_COLUMNS}) VALUES ({_PLACES})", rows)
            self._database.execute("COMMIT")
        except BaseException:
            if self._database.in_transaction:  # of a full disk SQLite has rolled back by itself
                self._database.execute("ROLLBACK")
            raise
        return unfit


def _fit(row: VgpuRow) -> tuple[str | int | None, ...]:
    """The columns of a row. ``OverflowError``, ``ValueError``: SQLite cannot hold one of them."""
    columns = (
        row.vgpu_id,
        row.key,
        row.spec.model_dump_json(exclude_defaults=True),
        row.owner.uid,
        row.owner.share_gid,
        row.created_unix_ns,
        row.expires_unix_ns,
        None if row.book is None else _BOOK.dump_json(row.book).decode(),
        row.suspended,
        None if row.passage == AT_REST else _PASSAGE.dump_json(row.passage).decode(),
        _PROCESSES.dump_json(row.idle_suspended).decode() if row.idle_suspended else None,
        _MEMBERS.dump_json(row.members).decode() if row.members else None,
        None if row.origin == KEPT else _ORIGIN.dump_json(row.origin).decode(),
        None if row.preempted is None else _PREEMPTED.dump_json(row.preempted).decode(),
        None if row.standby == NO_STANDBY else _STANDBY.dump_json(row.standby).decode(),
    )
    for value in columns:
        if isinstance(value, int) and not LEAST <= value <= MOST_STORED:
            raise OverflowError(f"{row.vgpu_id}: {value} does not fit 64 bits")
        if isinstance(value, str):
            value.encode()
    return columns


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """What is wrong with the file, by its name, and what to type."""
    try:
        yield
    except (sqlite3.OperationalError, OSError) as error:  # the disk's reasons, mostly; the file may be whole
        text = f"the journal {path} cannot be read and written: {error}"
        raise VgpuError(ErrorCode.INTERNAL, text, f"see: ls -l {path}; df -h {path.parent}") from error
    except (sqlite3.DatabaseError, ValueError) as error:  # pydantic's among the latter, and text that is none
        reason = explain(error) if isinstance(error, ValidationError) else error
        hint = f"without it the GPU is served, and its vGPUs are forgotten: mv {path} {path}.damaged"
        raise VgpuError(ErrorCode.INTERNAL, f"the journal {path} is damaged: {reason}", hint) from error
