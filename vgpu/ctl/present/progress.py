"""A progress bar for a command that takes longer than a moment: on stderr, if that is a terminal."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, NamedTuple

PATIENCE_S: Final = 1.0
"""A command that ends sooner shows no bar."""
LOOK_S: Final = 0.25


class Part(NamedTuple):
    """How far it is. ``ratio``: 0–1; None: not known. ``said``: the same in words."""

    ratio: float | None
    said: str


Look = Callable[[], Part | None]


@contextmanager
def waiting(text: str, sample: Look | None = None) -> Iterator[None]:
    """Show ``text`` with a bar, for as long as it takes. ``sample``: returns how far it is; a thread calls it four
    times a second. Without it, or if it returns None, the bar shows the time so far."""
    if not sys.stderr.isatty():
        yield
        return
    done = threading.Event()
    thread = threading.Thread(target=_show, args=(text, sample, done), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _show(text: str, sample: Look | None, done: threading.Event) -> None:
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
            part = sample() if sample is not None else None
            if part is None:
                part = Part(None, f"{time.monotonic() - began_s:.0f} s")
            total = None if part.ratio is None else 1.0
            progress.update(task, total=total, completed=min(part.ratio or 0.0, 1.0), said=part.said)


def timed(seconds: float, passed_s: Callable[[], float]) -> Look:
    """The progress of something that lasts ``seconds``."""
    return lambda: Part(passed_s() / seconds, f"{min(passed_s(), seconds):.0f} of {seconds:.0f} s")


class Move:
    """How much of a vGPU's memory has moved off the card or back, as NVML counts it for its programs. Call it."""

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
        if total <= 0 or moved <= 0:  # not begun, or the driver does not report it
            return None
        return Part(moved / total, f"{format_bytes(min(moved, total))} of {format_bytes(total)}")
