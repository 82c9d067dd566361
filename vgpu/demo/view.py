"""What a person sees while the demonstration runs: a live table on a terminal, one line per phase elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from vgpu.ctl.present.output import GAP, Cell, Column, Row, console, table_text
from vgpu.ctl.present.progress import Part, waiting
from vgpu.ctl.present.tables import percent, used_of, vgpu_token_rate
from vgpu.demo.run import SHARES_PERCENT, Scene
from vgpu.harness.measure import shares
from vgpu.units import format_bytes

if TYPE_CHECKING:
    from rich.text import Text

_BAR: Final = 20
COLUMNS: Final = (
    Column("VGPU"),
    Column("ASKED", right=True),
    Column("FINISHED IN THE LAST SECOND"),
    Column("TOKENS/S", right=True),
    Column("MEMORY", right=True),
)


@contextmanager
def shown(quiet: bool) -> Iterator[Callable[[Scene], None]]:
    """A function that shows a scene; ``quiet``: nothing on stdout. Where that is no terminal, stderr may be one."""
    if not quiet and sys.stdout.isatty():
        from rich.live import Live

        with Live(console=console(), refresh_per_second=4, transient=True) as live:
            yield lambda scene: live.update(drawn(scene, live.console.width))
        return
    said: set[str] = set()
    last: list[Scene] = []

    def show(scene: Scene) -> None:
        last[:] = [scene]
        if not quiet:
            _say_once(said, sentence(scene))

    with waiting("demo", lambda: _part(last[0]) if last else None):
        yield show


def _part(scene: Scene) -> Part:
    """How far the phase is that it is in."""
    length_ns, passed_ns = scene.end_ns - scene.start_ns, time.monotonic_ns() - scene.start_ns
    ratio = passed_ns / length_ns if scene.start_ns and passed_ns >= 0 else None
    return Part(ratio, f"{scene.phase} {_progress(scene)}")


def _say_once(seen: set[str], said: str) -> None:
    if said not in seen:
        seen.add(said)
        print(said, flush=True)


def sentence(scene: Scene) -> str:
    """What is going on."""
    if scene.gpu is None:
        return f"{scene.plan.simulated + ': ' if scene.plan.simulated else ''}{scene.phase}"
    return f"{scene.gpu.name}, {scene.gpu.mode} mode: {scene.phase}"


def drawn(scene: Scene, width: int) -> Text:
    """The scene on a terminal of ``width`` columns."""
    from rich.text import Text

    text = Text.assemble((sentence(scene), "bold"), (f"{GAP}{_progress(scene)}", "dim"))
    if scene.reports:
        text.append("\n\n")
        text.append_text(table_text(COLUMNS, rows(scene), width))
        text.append_text(_memory_remark(scene))
    return text


def rows(scene: Scene) -> list[Row]:
    """One per vGPU."""
    now = shares([report.series.recent_rate() for report in scene.reports])
    return [
        (
            vgpu.vgpu_id,
            f"{asked:g} %",
            Cell(f"{bar(share)} {percent(share):>6}", "green"),
            vgpu_token_rate(vgpu),
            used_of(vgpu.memory_used_bytes, vgpu.memory_limit_bytes),
        )
        for vgpu, asked, share in zip(scene.vgpus, SHARES_PERCENT, now, strict=True)
    ]


def bar(ratio: float) -> str:
    full = round(min(max(ratio, 0.0), 1.0) * _BAR)
    return "█" * full + "░" * (_BAR - full)


def _progress(scene: Scene) -> str:
    now_ns = min(time.monotonic_ns(), scene.end_ns)
    if now_ns < scene.start_ns or not scene.start_ns:
        return "..."
    return f"{(now_ns - scene.start_ns) / 1e9:.0f} of {(scene.end_ns - scene.start_ns) / 1e9:.0f} s"


def _memory_remark(scene: Scene) -> Text:
    from rich.text import Text

    remark = Text(style="yellow")
    for vgpu, report in zip(scene.vgpus, scene.reports, strict=True):
        if report.memory_refusals:
            limit = format_bytes(vgpu.memory_limit_bytes)
            remark.append(f"\n\n{vgpu.vgpu_id} asked for more than its {limit}: refused, and it goes on.")
    return remark
