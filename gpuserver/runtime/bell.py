"""What ends a pause early."""

from __future__ import annotations

import trio


class Bell:
    """One task waits for it, again and again. If it rings between two waits, the next one ends at once."""

    def __init__(self) -> None:
        self._rung = trio.Event()

    def ring(self) -> None:
        self._rung.set()

    async def wait(self, seconds: float) -> None:
        """Until it rings, or so long."""
        with trio.move_on_after(seconds):
            await self._rung.wait()
        if self._rung.is_set():
            self._rung = trio.Event()
