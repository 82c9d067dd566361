"""Usage in the node: it samples the survey, writes rows about once a minute, and answers ``Usage`` and ``Why``.

A node that cannot write keeps the rows of some hours in memory, and writes them when the disk takes them again. If it
is killed, at most ``WRITE_S`` seconds are lost, and count as not measured.
"""

from __future__ import annotations

import math
import os
import sqlite3
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Final, NoReturn

import trio

from vgpu.errors import ErrorCode, VgpuError
from vgpu.loggers import get_logger
from vgpu.node.database import NodeDatabase
from vgpu.node.survey import LOOK_S, StatusCollector
from vgpu.node.usage_store import Total, age, find, put, recent, totals
from vgpu.protocol.messages import VgpuStatus
from vgpu.protocol.usage import Usage, UsageReport, UserUsage
from vgpu.usage.account import Account, Label
from vgpu.usage.report import Part, report
from vgpu.usage.rows import Rows, Sums

log = get_logger(__name__)

SAMPLE_S: Final = 5.0
WRITE_S: Final = 60.0
AGE_S: Final = 600.0
"""Between two looks for rows that are old enough to be merged."""
MOST_STEPS: Final = 1000
PAUSE_S: Final = 0.1
"""Between two transactions that merge: others may write meanwhile."""
FRESH_S: Final = 1.0
"""A snapshot that another task asked for so lately serves as a sample."""


class UsageKeeper:
    """``run`` in a nursery; ``end`` when the loop is over. Any task may call the other methods."""

    def __init__(self, database: NodeDatabase, survey: StatusCollector) -> None:
        self._database = database
        self._survey = survey
        self._account = Account()
        self._totals: tuple[Total, ...] = ()

    async def run(self) -> NoReturn:
        """Sample, write, and merge what is old."""
        with suppress(VgpuError):
            self._totals = await self._database.read(totals)
        write_at, age_at = trio.current_time() + WRITE_S, trio.current_time()
        while True:
            await self.sample()
            if trio.current_time() >= write_at or self._has_a_new_user():
                write_at = trio.current_time() + WRITE_S
                await self.write()
            if trio.current_time() >= age_at:
                age_at = trio.current_time() + AGE_S
                await self._age()
            await trio.sleep(SAMPLE_S)

    async def sample(self) -> None:
        """One reading of all vGPUs."""
        snapshot, at_ns = await self._survey.lately(FRESH_S)
        self._account.read(snapshot.vgpus, at_ns, snapshot.at_unix_s)

    def _has_a_new_user(self) -> bool:
        """Whether there is a user without a counter: the first rows of one are written at once."""
        return not {key.owner_uid for key in self._account.rows} <= {total.owner_uid for total in self._totals}

    async def last_sample(self) -> None:
        """Before the servers end. A server that does not answer in time has no last reading."""
        with trio.move_on_after(LOOK_S):
            await self.sample()

    def hear(self, vgpu: VgpuStatus) -> None:
        """A GPU Server's answer to a change of this vGPU."""
        self._account.hear(vgpu, time.monotonic_ns(), time.time())

    def hear_last(self, vgpu: VgpuStatus) -> None:
        """The answer to its removal."""
        self._account.end(vgpu, time.monotonic_ns(), time.time())

    async def write(self) -> None:
        """Write what has been read since the last time. If the disk takes nothing, it waits for the next time."""
        rows, labels = self._account.take()
        try:
            self._totals = await self._database.write(partial(_put, rows, labels))
        except VgpuError:  # the database has said so
            self._account.put_back(rows, labels)
        except (sqlite3.Error, OverflowError):  # our own fault: these rows would never fit, and the node goes on
            log.exception("usage is not written", rows=len(rows))

    def end(self) -> None:
        """Write the rest, without a loop."""
        rows, labels = self._account.take()
        with suppress(VgpuError, sqlite3.Error, OverflowError):
            self._database.write_now(partial(_put, rows, labels))

    async def _age(self) -> None:
        with suppress(VgpuError):
            more = True
            try:
                while more:
                    more = await self._database.write(partial(age, now_unix_s=time.time()))
                    await trio.sleep(PAUSE_S)
            except (sqlite3.Error, OverflowError):
                log.exception("old usage is not merged")

    # --- answers

    async def report(self, asked: Usage, uid: int) -> UsageReport:
        """What was promised and used. Rows that are not written yet count too."""
        owner_uid = None if uid in {0, os.geteuid()} else uid
        since, until = asked.since_unix_s, time.time() if asked.until_unix_s is None else asked.until_unix_s
        if asked.step_s and (until - since) / asked.step_s > MOST_STEPS:
            text = f"step_s: {asked.step_s} s make more than {MOST_STEPS} steps since then"
            raise VgpuError(ErrorCode.INVALID, text, f"step_s={math.ceil((until - since) / MOST_STEPS)}")
        notes = []
        pending = list(self._pending(asked, until, owner_uid))
        written: Sequence[Part] = ()
        try:
            written = await self._database.read(lambda db: find(db, since, until, owner_uid, asked.step_s, asked.by))
        except VgpuError as error:
            notes.append(f"Only what this node has in memory is here: {error.message}.")
        if not notes and self._database.reason:
            notes.append(f"The node cannot write its history now: {self._database.reason}.")
        return UsageReport(
            since_unix_s=asked.since_unix_s,
            until_unix_s=until,
            step_s=asked.step_s,
            by=asked.by,
            rows=await trio.to_thread.run_sync(report, [*written, *pending], asked.by, since, asked.step_s),
            notes=tuple(notes),
        )

    def _pending(self, asked: Usage, until: float, owner_uid: int | None) -> Sequence[Part]:
        """As ``find``, of rows that are not written yet."""
        labels = self._account.labels
        unknown = Label(0, "", "", "")
        return [
            Part(
                max(0, key.start_unix_s - int(asked.since_unix_s)) // asked.step_s if asked.step_s else 0,
                key.owner_uid,
                key.vgpu_id,
                labels.get(key.vgpu_id, unknown).name,
                labels.get(key.vgpu_id, unknown).claim,
                sums,
            )
            for key, sums in self._account.rows.items()
            if key.start_unix_s + key.span_s > int(asked.since_unix_s) and key.start_unix_s < until
            if owner_uid is None or key.owner_uid == owner_uid
        ]

    async def recent(self, vgpu_id: str, since_unix_s: float) -> tuple[Sums, float | None]:
        """The sums of one vGPU since then, and when it used the GPU last; None: never, as far as is known."""
        sums, last = Sums(), None
        rows = {key: more for key, more in self._account.rows.items() if key.vgpu_id == vgpu_id}
        with suppress(VgpuError):
            sums, last = await self._database.read(partial(recent, vgpu_id=vgpu_id, since_unix_s=since_unix_s))
        for key, more in rows.items():
            end = key.start_unix_s + key.span_s
            sums = sums + more if end > since_unix_s else sums
            last = max(last or 0, end) if more.used_ns else last
        return sums, last

    def totals(self, uid: int) -> tuple[UserUsage, ...]:
        """What is written of each user and team. What is not written yet would be lost with the node, and a counter may
        not go back."""
        every = uid in {0, os.geteuid()}
        return tuple(UserUsage(**total._asdict()) for total in self._totals if every or total.owner_uid == uid)


def _put(rows: Rows, labels: dict[str, Label], db: sqlite3.Connection) -> tuple[Total, ...]:
    put(db, rows, labels)
    return totals(db)
