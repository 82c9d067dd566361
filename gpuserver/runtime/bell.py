"""What ends a pause early."""

from __future__ import annotations

from typing import Final

import trio

LEAST_S: Final = 0.002
"""Of a pause. Reason: a program of any user may ring, again and again."""


class Bell:
    """One task waits for it, again and again. If it rings between two waits, the next one ends at once."""

    def __init__(self) -> None:
        self._rung = trio.Event()

    def ring(self) -> None:
        self._rung.set()

    async def wait(self, seconds: float) -> bool:
        """Until it rings, or so long, and for ``LEAST_S`` in any case. Whether it has rung."""
        await trio.sleep(LEAST_S)
        with trio.move_on_after(max(0, seconds - LEAST_S)):
            await self._rung.wait()
        rung = self._rung.is_set()
        if rung:
            self._rung = trio.Event()
        return rung
