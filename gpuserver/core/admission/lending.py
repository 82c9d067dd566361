"""What of the card is promised to nobody is lent to those who may own more than they were promised. Pure.

Each has what it has and an equal part of what is left; whose allocation waits for room goes first. Nobody's part grows
by what another one gives up before the next look, when what that one was just allocating has been seen: of what is
spare, all that somebody may still take by a limit of before is not lent anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

UNBOUNDED: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class Borrower:
    """``promised_bytes`` of the card are kept for it, and it has ``borrowed_bytes`` beyond them. ``limit_bytes``: what
    it was last told that it may have in all; 0: nothing yet. ``grows``: not while it stands still or is away.
    ``asks_bytes``: an allocation waits for so much more. ``more_bytes``: what it may own besides, wherever that is."""

    vgpu_id: str
    promised_bytes: int
    borrowed_bytes: int
    limit_bytes: int
    grows: bool = True
    asks_bytes: int = 0
    more_bytes: int = UNBOUNDED

    @property
    def own_bytes(self) -> int:
        return self.promised_bytes + self.borrowed_bytes

    @property
    def known_bytes(self) -> int:
        return self.limit_bytes or max(1, self.own_bytes)


def divide(borrowers: Sequence[Borrower], spare_bytes: int) -> dict[str, int]:
    """What each may have on the card from now on, by vGPU id; at least 1, as 0 means no limit to who reads it."""
    left = max(0, spare_bytes - sum(b.borrowed_bytes for b in borrowers))
    growing = [b for b in borrowers if b.grows]
    asked: dict[str, int] = {}
    for b in growing:
        asked[b.vgpu_id] = min(left, b.asks_bytes)
        left -= asked[b.vgpu_id]
    part = left // max(1, len(growing))
    budget = spare_bytes - sum(max(0, max(b.known_bytes, b.own_bytes) - b.promised_bytes) for b in borrowers)
    limits: dict[str, int] = {}
    for b in borrowers:
        more = min(part + asked[b.vgpu_id], b.more_bytes) if b.grows else 0
        wanted = max(1, b.own_bytes + more)
        grown = min(max(0, wanted - b.known_bytes), max(0, budget))
        budget -= grown
        limits[b.vgpu_id] = min(wanted, b.known_bytes + grown)
    return limits
