"""What swapping keeps of each vGPU that may leave the card, and of what the driver keeps of the card for itself."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Final

import trio

from gpuserver.core.states.residency import patience_ns
from gpuserver.core.states.together import NOT_SEEN, Seen

SHORT_BYTES: Final = 256 << 20
"""The driver keeps more for itself than the books know: so much less is given out after each time it had no room."""
SHORT_MOST_BYTES: Final = 4 << 30
SHORT_NS: Final = 60_000_000_000
"""... and half of it again after so long without."""


class Answer:
    """Of a vGPU that is to come: whether its programs have begun to."""

    def __init__(self) -> None:
        self._given = trio.Event()
        self._comes = False

    def give(self, comes: bool) -> None:
        self._comes = self._comes or comes
        self._given.set()

    @property
    def is_yes(self) -> bool:
        return self._comes

    async def comes(self) -> bool:
        await self._given.wait()
        return self._comes


@dataclass(slots=True)
class SwapState:
    """Of a vGPU, what ``Vgpu.swapped_out`` leaves open. ``settled``: it is known whether it is away. ``leaves``: it
    moves, and its memory is on the card until the move ends. ``comes``: since when it is on its way back, by a counter.
    ``room_ns``: since when an allocation waits for room; 0: none does. ``failures``: to move, in a row.
    ``offered_ns``: since when there is room for its allocation. ``refused``: the driver seemed to refuse it.
    ``seen``: what the server saw of its group. ``ready``: it could come at once. ``assembles``: it has no leases before
    the others of its group are there.
    """

    settled: bool = False
    moving: bool = False
    leaves: bool = False
    comes: int = 0
    wants_ns: int = 0
    wanted: bool = False
    room_ns: int = 0
    came_ns: int = 0
    left_ns: int = 0
    move_ns: int = 0
    failures: int = 0
    not_before_ns: int = 0
    offered_ns: int = 0
    refused: bool = False
    tidied_ns: int = 0
    hopeless: bool = False
    seen: Seen = NOT_SEEN
    ready: bool = False
    assembles: bool = False
    answer: Answer = field(default_factory=Answer)

    def defer(self) -> None:
        """It did not do what it was to."""
        self.failures += 1
        self.not_before_ns = time.monotonic_ns() + patience_ns(self.failures)


@dataclass(slots=True)
class Shortage:
    """What the driver keeps of the card beyond what the books know, as far as it was noticed."""

    bytes_: int = 0
    until_ns: int = 0

    def grow(self, now_ns: int, unused_bytes: int) -> None:
        """The driver had no room, where the books had ``unused_bytes`` more than was asked for."""
        more = max(self.bytes_, unused_bytes) + SHORT_BYTES
        self.bytes_, self.until_ns = min(more, SHORT_MOST_BYTES), now_ns + SHORT_NS

    def shrink(self, now_ns: int) -> None:
        """Time has passed."""
        if self.bytes_ and now_ns >= self.until_ns:
            self.bytes_ = self.bytes_ // 2 if self.bytes_ > SHORT_BYTES else 0
            self.until_ns = now_ns + SHORT_NS
