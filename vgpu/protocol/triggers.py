"""Triggers: what resumes a suspended vGPU by itself, as it is typed. ``call``: a CUDA call of one of its programs;
``tcp:8000``: a connection to a port on which one of its processes listens. A time is a trigger, too.

This module imports no pydantic, so a small client need not wait for that.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Final

from vgpu.errors import ErrorCode, VgpuError, cleaned
from vgpu.units import parse_duration_ns

CALL: Final = "call"
TCP: Final = "tcp:"
OFF: Final = "off"
MOST_TRIGGERS: Final = 16
LAST_PORT: Final = 65535
_PORT: Final = re.compile(r"[1-9][0-9]{0,4}")


def canonical(text: str) -> str:
    """``text`` in the one form that requests and the journal have; ``ValueError`` if it is no trigger."""
    said = text.strip().lower()
    if said == CALL:
        return said
    number = said.removeprefix(TCP)
    if number != said and _PORT.fullmatch(number) and int(number) <= LAST_PORT:
        return said
    raise ValueError(f"{cleaned(text, 40)!r} is no trigger: write call, or tcp: and a port, as in tcp:8000")


def in_order(triggers: Iterable[str]) -> tuple[str, ...]:
    """Each once: ``call`` first, then by port. ``ValueError``: there are too many."""
    found = tuple(sorted(set(triggers), key=lambda trigger: port_of(trigger) or 0))
    if len(found) > MOST_TRIGGERS:
        raise ValueError(f"{len(found)} triggers are more than {MOST_TRIGGERS}")
    return found


def port_of(trigger: str) -> int | None:
    """None: it is no port."""
    return int(trigger.removeprefix(TCP)) if trigger.startswith(TCP) else None


def ports_of(triggers: Iterable[str]) -> tuple[int, ...]:
    return tuple(port for trigger in triggers if (port := port_of(trigger)) is not None)


def moment_of(text: str, now: datetime | None = None, option: str = "--resume-at") -> float:
    """Seconds since 1970. ``90m``: so long from now; ``08:30``: the next time it is that; a date, with a time or
    without. Local time. ``VgpuError`` (invalid): ``text`` is no time, or is past."""
    here = datetime.now() if now is None else now
    said = text.strip()
    try:
        when = _read(said, here)
    except (ValueError, OverflowError):
        raise VgpuError(
            ErrorCode.INVALID,
            f"{option}: {cleaned(text, 40)!r} is no time: write 90m, 08:30 or 2027-01-31T08:30",
            f"{option} 90m",
        ) from None
    if when.timestamp() <= here.timestamp():
        raise VgpuError(
            ErrorCode.INVALID, f"{option}: {cleaned(text, 40)} is past", f"write a time to come: {option} 90m"
        )
    return when.timestamp()


def _read(said: str, here: datetime) -> datetime:
    if "-" in said:
        return datetime.fromisoformat(said)
    if ":" in said:
        clock = datetime.strptime(said, "%H:%M:%S" if said.count(":") == 2 else "%H:%M").time()
        when = datetime.combine(here.date(), clock, here.tzinfo)
        return when if when > here else when + timedelta(days=1)
    duration_ns = parse_duration_ns(said)
    return datetime.fromtimestamp(here.timestamp() + duration_ns / 1e9, here.tzinfo)


def awaited(triggers: Iterable[str], at_unix_s: float | None) -> str:
    """For people: ``a CUDA call, a connection to port 8000 or 2027-01-31 08:30:00``; "": nothing but a request."""
    parts = ["a CUDA call" if trigger == CALL else f"a connection to port {port_of(trigger)}" for trigger in triggers]
    if at_unix_s is not None:
        parts.append(datetime.fromtimestamp(at_unix_s).strftime("%Y-%m-%d %H:%M:%S"))
    return " or ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
