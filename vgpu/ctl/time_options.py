"""Points of time as people write them: how long ago, or when."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Annotated

import typer

from vgpu.errors import ErrorCode, VgpuError
from vgpu.units import parse_duration_ns

SinceOption = Annotated[
    str | None,
    typer.Option(
        "--since", metavar="TIME", help="As in 10m, 14:30 or 2026-01-31T14:30; local time.", show_default=False
    ),
]


def parse_since(text: str | None, now: datetime | None = None, option: str = "--since") -> float:
    """Seconds since 1970; None: 0. ``10m``: that long ago; ``14:30``: the last time it was that; a date, with a time or
    without. ``VgpuError`` (invalid)."""
    if text is None:
        return 0.0
    here = datetime.now().astimezone() if now is None else now
    said = text.strip()
    try:
        return (here - timedelta(microseconds=parse_duration_ns(said) / 1000)).timestamp()
    except ValueError:
        pass
    except OverflowError:
        return 0.0
    try:
        if "-" in said:
            when = datetime.fromisoformat(said)
        else:
            clock = datetime.strptime(said, "%H:%M:%S" if said.count(":") == 2 else "%H:%M").time()
            when = datetime.combine(here.date(), clock, here.tzinfo)
            when -= timedelta(days=when > here)
    except ValueError:
        raise VgpuError(
            ErrorCode.INVALID,
            f"{option}: {text!r} is no time: write 10m, 14:30 or 2026-01-31T14:30",
            f"{option} 10m",
        ) from None
    return (when if when.tzinfo else when.astimezone()).timestamp()


def clock_time(unix_s: float) -> str:
    """Local time, to the second: nineteen letters."""
    return datetime.fromtimestamp(unix_s).strftime("%Y-%m-%d %H:%M:%S")
