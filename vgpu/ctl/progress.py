"""Whoever waits longer than a moment sees what for, and how far it is: on stderr, where that is a terminal."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, NamedTuple

PATIENCE_S: Final = 1.0
"""What is done by then was not worth a word."""
LOOK_S: Final = 0.25


class Part(NamedTuple):
    """How far it is. ``ratio``: 0–1; None: nobody knows. ``said``: the same in words."""

    ratio: float | None
    said: str


Look = Callable[[], Part | None]


@contextmanager
def waiting(text: str, look: Look | None = None) -> Iterator[None]:
    """``text`` with a bar, for as long as it takes. ``look``: how far it is, asked four times a second in a thread
    of its own; without it, or where it says None, how long it has taken so far."""
    if not sys.stderr.isatty():
        yield
        return
    done = threading.Event()
    thread = threading.Thread(target=_show, args=(text, look, done), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _show(text: str, look: Look | None, done: threading.Event) -> None:
    began_s = time.monotonic()
    if done.wait(PATIENCE_S):
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    console = Console(stderr=True, highlight=False)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[said]}", markup=False),
    )
    # What is printed meanwhile goes above the bar; but not out of a pipe.
    with Progress(*columns, console=console, transient=True, redirect_stdout=sys.stdout.isatty()) as progress:
        task = progress.add_task(text, total=None, said="")
        while not done.wait(LOOK_S):
            part = look() if look is not None else None
            if part is None:
                part = Part(None, f"{time.monotonic() - began_s:.0f} s")
            total = None if part.ratio is None else 1.0
            progress.update(task, total=total, completed=min(part.ratio or 0.0, 1.0), said=part.said)


def timed(seconds: float, passed_s: Callable[[], float]) -> Look:
    """Of something that lasts ``seconds``."""
    return lambda: Part(passed_s() / seconds, f"{min(passed_s(), seconds):.0f} of {seconds:.0f} s")


class Move:
    """How far a vGPU's memory is on its way off the card or back, as NVML counts it for its programs. To be called."""

    def __init__(self, vgpu: str, *, away: bool) -> None:
        self._vgpu = vgpu
        self._away = away
        self._first_bytes: int | None = None

    def __call__(self) -> Part | None:
        from vgpu.errors import VgpuError
        from vgpu.node.link import ControlLink

        with suppress(VgpuError), ControlLink(timeout_s=1) as node:
            programs = node.processes(self._vgpu).processes
            own = sum(program.memory_bytes + program.memory_implicit_bytes for program in programs)
            return self.part(sum(program.memory_driver_bytes for program in programs), own)
        return None

    def part(self, on_card_bytes: int, own_bytes: int) -> Part | None:
        """``on_card_bytes``: now; ``own_bytes``: what the programs have, wherever it is."""
        from vgpu.units import format_bytes

        if self._first_bytes is None:
            self._first_bytes = on_card_bytes
        total = self._first_bytes if self._away else max(own_bytes - self._first_bytes, 0)
        moved = self._first_bytes - on_card_bytes if self._away else on_card_bytes - self._first_bytes
        if total <= 0 or moved <= 0:  # not begun, or the driver does not tell
            return None
        return Part(moved / total, f"{format_bytes(min(moved, total))} of {format_bytes(total)}")
