"""The lines of a node's logs, read and put into one order. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from vgpu.logs import LEVELS

_OURS: Final = frozenset({"time", "level", "process", "gpu", "vgpu", "event"})


@dataclass(frozen=True, slots=True)
class Line:
    """``level`` "": the line is no event of ours, but other output on stderr: a traceback, a library's message. Then
    its time is that of the line before. ``source``: what wrote it (node, gpu 0, …); ``vgpu``: "" or the vGPU that it is
    about."""

    at_unix_s: float
    level: str
    source: str
    text: str
    vgpu: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {
            "at_unix_s": self.at_unix_s,
            "level": self.level,
            "source": self.source,
            "vgpu_id": self.vgpu,
            "text": self.text,
            "fields": dict(self.fields),
        }


def parsed(text: str, source: str, after_unix_s: float = 0.0) -> Line:
    """One line of the log of ``source``; ``after_unix_s``: the time of the one before."""
    try:
        record = json.loads(text)
        at_unix_s = datetime.fromisoformat(record["time"]).timestamp()
        level, event = str(record["level"]), str(record["event"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return Line(after_unix_s, "", source, text)
    vgpu, fields = str(record.get("vgpu", "")), {name: value for name, value in record.items() if name not in _OURS}
    where = f"{source} broker" if record.get("process") == "broker" else source
    if "gpu" in record and where == "node":  # in the node's log, the field names the GPU that the line is about
        fields["gpu"] = record["gpu"]
    return Line(at_unix_s, level, where, event, vgpu, fields)


def parsed_all(lines: Iterable[str], source: str, after_unix_s: float = 0.0) -> Iterator[Line]:
    """The lines in their order, without empty ones."""
    for text in lines:
        if text.strip():
            line = parsed(text, source, after_unix_s)
            after_unix_s = line.at_unix_s
            yield line


def last_words(lines: Iterable[str]) -> str:
    """Why the GPU Server that wrote ``lines`` has ended, as far as they say. Its brokers write there, too."""
    # Python draws a frame of these around a group of exceptions.
    own = [line for line in parsed_all(lines, "gpu") if line.text.strip(" +-|") and line.source == "gpu"]
    if not own or own[-1].level in {"debug", "info", "warning"}:  # it was well when it was ended
        return ""
    return str(own[-1].fields.get("reason") or own[-1].text.strip(" +-|"))


def merged(logs: Iterable[Iterable[Line]]) -> list[Line]:
    """Several logs by time. Within each log the order stays as it was written."""
    dated: list[tuple[float, Line]] = []
    for log in logs:
        latest = 0.0
        for line in log:
            latest = max(latest, line.at_unix_s)
            dated.append((latest, line))
    return [line for _, line in sorted(dated, key=lambda pair: pair[0])]


@dataclass(frozen=True, slots=True)
class Wanted:
    """``vgpu``: an id, or a prefix of one. ``level``: this one and above. A line that is no event of ours is wanted at
    every level, since its level is unknown, but it belongs to no vGPU."""

    since_unix_s: float = 0.0
    level: str = "debug"
    vgpu: str = ""

    def __call__(self, line: Line) -> bool:
        bad_enough = not line.level or LEVELS.get(line.level, LEVELS["critical"]) >= LEVELS[self.level]
        about_it = not self.vgpu or line.vgpu.startswith(self.vgpu)
        return bad_enough and about_it and line.at_unix_s >= self.since_unix_s


@dataclass(slots=True)
class Tail:
    """A file that grows, as its bytes come: whole lines, and the beginning of one that is kept until its end comes."""

    source: str
    latest_unix_s: float = 0.0
    rest: bytes = b""

    def take(self, data: bytes) -> list[Line]:
        *whole, self.rest = (self.rest + data).split(b"\n")
        lines = list(parsed_all((text.decode(errors="replace") for text in whole), self.source, self.latest_unix_s))
        if lines:
            self.latest_unix_s = lines[-1].at_unix_s
        return lines

    def end(self) -> list[Line]:
        """What is left, as if its end had come."""
        return self.take(b"\n") if self.rest.strip() else []
