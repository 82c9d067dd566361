"""Structured logs of the long-lived processes: one line per event on stderr, in one form for all of them.

===========  ===========================================================================================================
``json``     into files and pipes: an object with ``time``, ``level``, ``process``, ``event`` and what belongs to it.
             Processes that a node starts write this form always: their logs are files, which ``vgpuctl logs`` reads
``text``     on a terminal
``journal``  where stderr is the journal's: ``<N>`` (the priority, see sd-daemon(3)) and the event, without a time,
             since the journal has its own
===========  ===========================================================================================================

``VGPU_LOG`` chooses another form than the one that fits. ``VGPU_LOG_LEVEL`` (debug, info, warning, error) chooses which
events are logged. Only processes that configure structlog import it. A broker does not: it writes a handful of lines in
its life, by ``tell``, and structlog takes 7 MB. There may be 64 brokers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from vgpu.errors import ErrorCode, VgpuError
from vgpu.printable import printable, printable_json

if TYPE_CHECKING:
    from structlog.typing import EventDict, Processor

Label = str | int


class Form(StrEnum):
    JSON = "json"
    TEXT = "text"
    JOURNAL = "journal"


LEVELS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}
"""As everywhere in Python; structlog's filters take the numbers."""
PRIORITIES: Final = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}
"""The journal's: syslog(3)."""
_STDERR: Final = 2
_FIRST: Final = ("time", "level", "process", "gpu", "vgpu", "event", "text")


def to_stderr(process: str, **labels: Label) -> None:
    """Configure structlog for this process. ``process``: its kind (node, server, …); ``labels``: which one, as in
    ``gpu=0``. Each line has both. ``VgpuError`` (invalid): ``VGPU_LOG`` or ``VGPU_LOG_LEVEL`` is no such word."""
    import structlog

    form, level = chosen_form(), chosen_level()
    named: EventDict = {"process": process, **labels}
    processors: list[Processor] = [
        lambda logger, method, event: {**event, **named},
        structlog.processors.add_log_level,
        structlog.processors.format_exc_info,
    ]
    if form is Form.TEXT:
        clock = structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False)
        processors += [clock, _cleaned, structlog.dev.ConsoleRenderer()]
    else:
        processors += [lambda logger, method, event: rendered(form, event, datetime.now(UTC))]
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=lambda *_: _Stderr(),
        cache_logger_on_first_use=True,
    )


def _cleaned(logger: object, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Make ``event`` fit for a terminal, since a tenant wrote some of the text."""
    return {name: printable(value) if isinstance(value, str) else value for name, value in event.items()}


def tell(level: str, event: str, process: str, **fields: Any) -> None:
    """Log one line without structlog."""
    with suppress(VgpuError):
        if LEVELS[level] < LEVELS[chosen_level()]:
            return
        form = chosen_form()
        said = {"process": process, "level": level, "event": event, **fields}
        _Stderr().msg(rendered(Form.JOURNAL if form is Form.TEXT else form, said, datetime.now(UTC)))


def chosen_form(environment: Mapping[str, str] = os.environ) -> Form:
    """The form of ``VGPU_LOG``, or else the one that fits. ``VgpuError`` (invalid): ``VGPU_LOG`` names no form."""
    said = environment.get("VGPU_LOG", "")
    if said:
        if said not in list(Form):
            raise VgpuError(ErrorCode.INVALID, f"VGPU_LOG={said} is no form of logs", "VGPU_LOG=json, text or journal")
        return Form(said)
    if is_journal(environment.get("JOURNAL_STREAM", "")):
        return Form.JOURNAL
    return Form.TEXT if os.isatty(_STDERR) else Form.JSON


def chosen_level(environment: Mapping[str, str] = os.environ) -> str:
    said = environment.get("VGPU_LOG_LEVEL", "").lower() or "info"
    if said not in LEVELS:
        raise VgpuError(ErrorCode.INVALID, f"VGPU_LOG_LEVEL={said} is no level", f"one of: {', '.join(LEVELS)}")
    return said


def is_journal(stream: str, descriptor: int = _STDERR) -> bool:
    """Whether ``stream`` (``JOURNAL_STREAM``, as in ``8:1234``: device and inode) names ``descriptor``. A process may
    inherit the variable, and have another stderr by then."""
    device, _, inode = stream.partition(":")
    try:
        there = os.fstat(descriptor)
        return (int(device), int(inode)) == (there.st_dev, there.st_ino)
    except (ValueError, OSError):
        return False


def rendered(form: Form, event: Mapping[str, Any], now: datetime) -> str:
    """One line: ``event`` in ``json`` or ``journal`` form."""
    said = dict(event)
    level = str(said.get("level", "info"))
    if form is Form.JSON:
        said["time"] = now.isoformat(timespec="microseconds").replace("+00:00", "Z")
        first = {name: said.pop(name) for name in _FIRST if name in said}
        return printable_json(json.dumps(first | said, default=repr, ensure_ascii=False))
    text = str(said.pop("event", ""))
    said.pop("level", None)
    pairs = " ".join(f"{name}={_word(value)}" for name, value in said.items())
    line = printable(f"{text} {pairs}".rstrip().replace("\n", "\\n"))
    return f"<{PRIORITIES.get(level, 6)}>{line}"


def _word(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return json.dumps(text, ensure_ascii=False) if not text or any(c in text for c in ' "=\n') else text


class _Stderr:
    """Writes each line by one system call, so that lines of several processes in one file stay whole. A line that
    cannot be written (a full disk, a reader that left) is lost. That is no reason to stop sharing a GPU."""

    def msg(self, line: str) -> None:
        with suppress(OSError):
            os.write(_STDERR, f"{line}\n".encode(errors="backslashreplace"))

    log = debug = info = warning = error = critical = exception = fatal = failure = warn = msg
