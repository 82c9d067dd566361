"""How memory that no vGPU was promised is divided among the vGPUs that may own more than they were promised.

Each borrower keeps what it owns and gets an equal part of the rest. A borrower whose allocation waits is served first.

Invariant: memory is not lent twice. A borrower may still allocate up to its last limit, although the next division
gives it less. So the difference between that limit and what it owns is not lent to another one yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

UNBOUNDED: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class Borrower:
    """A vGPU that may own more memory on the card than it was promised."""

    vgpu_id: str
    promised_bytes: int
    """The card keeps these for it."""
    borrowed_bytes: int
    """What it owns on the card beyond ``promised_bytes``."""
    limit_bytes: int
    """The last limit that was published for it; 0: none yet."""
    grows: bool = True
    """False: it is quiesced or swapped out."""
    asks_bytes: int = 0
    """An allocation waits for this many more."""
    more_bytes: int = UNBOUNDED
    """What it may own beyond what it has on the card, wherever that is."""

    @property
    def own_bytes(self) -> int:
        return self.promised_bytes + self.borrowed_bytes

    @property
    def known_bytes(self) -> int:
        return self.limit_bytes or max(1, self.own_bytes)


def divide(borrowers: Sequence[Borrower], spare_bytes: int) -> dict[str, int]:
    """The limits on the card from now on, by vGPU id. Each is at least 1, because 0 means "no limit" to the hook."""
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
