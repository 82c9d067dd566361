"""Places in the queue that outlive the node: since when each request waits, in the node's database."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Mapping
from typing import Final, TypeAlias

import trio

from vgpu.errors import VgpuError
from vgpu.loggers import get_logger
from vgpu.node.database import NodeDatabase

log = get_logger(__name__)

COME_BACK_S: Final = 60.0
"""How long a restarted node remembers since when the requests of its predecessor have waited."""
Place: TypeAlias = tuple[str, int]
"""Request id and owner."""


class PlaceKeeper:
    """``read`` once, before the first ``keep``."""

    def __init__(self, database: NodeDatabase) -> None:
        self._database = database
        self._kept: dict[Place, float] = {}
        """What the database has."""
        self._seen: set[Place] = set()
        """Those that have waited since this node began."""
        self._forgets_at = math.inf

    def since(self, place: Place, otherwise: float) -> float:
        """Since when the request waits."""
        return self._kept.get(place, otherwise)

    @property
    def remembers(self) -> bool:
        """The clients of the node's predecessor may still come back."""
        return trio.current_time() < self._forgets_at

    @property
    def expected(self) -> set[Place]:
        """The requests whose clients have not come back yet, and may."""
        return self._kept.keys() - self._seen if self.remembers else set()

    async def read(self) -> None:
        try:
            rows = await self._database.read(
                lambda db: db.execute("SELECT request_id, owner_uid, since_unix_s FROM waiting").fetchall()
            )
        except VgpuError as error:
            log.warning("places in the queue are not known", reason=error.message)
            rows = []
        self._kept = {(str(request_id), int(uid)): float(since) for request_id, uid, since in rows}
        self._forgets_at = trio.current_time() + COME_BACK_S

    async def keep(self, now: Mapping[Place, float]) -> None:
        """Write the places of those that wait, and remove those of requests that left, or did not come back."""
        wanted = dict(now)
        if self.remembers:
            self._seen |= now.keys()
            left = self._seen - now.keys()
            wanted = {place: since for place, since in self._kept.items() if place not in left} | wanted
        if wanted == self._kept:
            return
        gone = self._kept.keys() - wanted.keys()
        new = {place: since for place, since in wanted.items() if self._kept.get(place) != since}

        def write(db: sqlite3.Connection) -> None:
            db.executemany("DELETE FROM waiting WHERE request_id = ? AND owner_uid = ?", gone)
            db.executemany(
                "INSERT OR REPLACE INTO waiting VALUES (?, ?, ?)", [(*place, since) for place, since in new.items()]
            )

        try:
            await self._database.write(write)
        except VgpuError:
            return  # the database has said it, and is tried again
        self._kept = wanted
