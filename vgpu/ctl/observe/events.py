"""vgpuctl events: what has happened on this node, and what happens."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Final

import typer

from vgpu import retired
from vgpu.ctl.exit_codes import say
from vgpu.ctl.options import Output, OutputOption
from vgpu.ctl.present import output
from vgpu.ctl.present.output import Cell
from vgpu.ctl.present.tables import with_names
from vgpu.ctl.time_options import SinceOption, clock_time, parse_since
from vgpu.errors import ErrorCode, VgpuError
from vgpu.event_types import EventType

if TYPE_CHECKING:
    from vgpu.protocol.messages import EventReading, Notice, VgpuStatus

Names = Mapping[str, str]
"""The vGPUs' names, by id."""
MOST: Final = 2000
"""What one answer of the node may hold."""
_STYLES: Final = {
    "created": "green",
    "resumed": "green",
    "swapped-in": "dim",
    "swapped-out": "dim",
    "changed": "cyan",
    "mode": "cyan",
    "migrated": "cyan",
    "suspended": "cyan",
    "removed": "magenta",
    "expired": "magenta",
    "attached": "",
    "ended": "",
    "detached": "dim",
}
"""Of the usual kinds. All other kinds stand out."""
_TROUBLE: Final = "yellow"
_FAILURE: Final = "bold red"
_FAILURES: Final = frozenset(
    {"broker-restarted", "server-restarted", "mps-lost", "mps-failed", "killed-on-resume", "not-resumed"}
)
_DESCRIBING: Final = frozenset({"created", "changed"})
"""The events whose fields describe a vGPU."""
_WIDTHS: Final = (19, 3, 13, 16)


def event_type(text: str) -> EventType:
    """The kind of that name, or of the one that it had before. typer.BadParameter: there is none."""
    if text in retired.EVENTS:
        say(retired.instead(text, retired.EVENTS[text]))
    try:
        return EventType(retired.EVENTS.get(text, text))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(map(repr, map(str, EventType)))}") from None


def events(
    vgpu: Annotated[
        str, typer.Argument(metavar="VGPU", help="Only this one's; also one that is gone.", show_default=False)
    ] = "",
    since: SinceOption = None,
    lines: Annotated[int, typer.Option("-n", "--lines", metavar="N", help="The last N of them.", min=0, max=MOST)] = 50,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Then each as it happens, until Ctrl-C.")] = False,
    kind: Annotated[
        list[EventType] | None,
        typer.Option("--kind", metavar="KIND", parser=event_type, help="Only this kind; may be repeated."),
    ] = None,
    form: OutputOption = Output.TABLE,
) -> None:
    """What happened on this node, and by which user. With -f, JSON is one object per line."""
    since_unix_s, kinds = parse_since(since), tuple(kind or ())
    if not follow:
        past = _past(vgpu, since_unix_s, lines, kinds)
        if form is Output.JSON:
            output.print_json(past)
        else:
            _print(past, _names_now())
        return
    # Ctrl-C is how one is expected to end it.
    with suppress(KeyboardInterrupt):
        _follow(vgpu, since_unix_s, lines, kinds, as_json=form is Output.JSON)


def _past(vgpu: str, since_unix_s: float, lines: int, kinds: tuple[str, ...]) -> tuple[EventReading, ...]:
    from vgpu.node.link import ControlLink

    try:
        with ControlLink() as node:
            return node.events(vgpu, since_unix_s=since_unix_s, most=max(1, lines), kinds=kinds)[-lines or MOST :]
    except VgpuError as error:
        if error.code is not ErrorCode.UNREACHABLE:
            raise
        return _written(error, vgpu, since_unix_s, lines, kinds)


def _names_now() -> Names:
    from vgpu.node.link import ControlLink

    with suppress(VgpuError), ControlLink() as node:
        return _names(node.list())
    return {}


def _names(vgpus: Sequence[VgpuStatus]) -> Names:
    return {vgpu.vgpu_id: vgpu.name for vgpu in vgpus if vgpu.name}


def _written(
    error: VgpuError, vgpu: str, since_unix_s: float, lines: int, kinds: tuple[str, ...]
) -> tuple[EventReading, ...]:
    """Without a node: the events that the last node has written. Raises ``error`` if there are none to be read."""
    from vgpu.node.events import KEPT, EventFile, History
    from vgpu.paths import NodePaths

    paths = NodePaths.from_environment()
    file = EventFile(paths.events)
    history = History(2 * KEPT)
    try:
        past = [*file.read(), *EventFile(paths.program_events).read()]
    except OSError:
        raise error from None
    for event in sorted(past, key=lambda event: event.at_unix_s):
        history.add(event)
    if not len(history):
        raise error
    say(f"{error.message}; these were written by the last one, in {file.path}")
    found = history.find(history.meant(vgpu, ()) if vgpu else "", since_unix_s, max(1, lines), kinds)
    return found[-lines or MOST :]


def _follow(vgpu: str, since_unix_s: float, lines: int, kinds: tuple[str, ...], *, as_json: bool) -> None:
    from vgpu.node.link import ControlLink

    # The watch begins before past events are read, so that no event falls between the two. Its first notice is a
    # snapshot, which says that the watch has begun. Another one follows every hour, so that a node that hangs is
    # noticed some day.
    with ControlLink() as link:
        notices = link.watch(snapshots=True, events=True, interval_ns=3600 * 10**9)
        vgpus = _first_snapshot(notices)
        show = _line_of_json if as_json else _printer(_names(vgpus))
        with ControlLink() as node:
            past = node.events(vgpu, most=MOST)
        vgpu_id = _meant(vgpu, vgpus, past)
        fits = _filter(vgpu_id, since_unix_s, kinds)
        for event in [event for event in past if fits(event)][-lines or MOST :] if lines else ():
            show(event)
        for event in unseen(past, notices):
            if fits(event):
                show(event)


def _first_snapshot(notices: Iterator[Notice]) -> tuple[VgpuStatus, ...]:
    first = next(notices).snapshot
    if first is None:
        raise VgpuError(ErrorCode.PROTOCOL, "the node began with something else than a snapshot")
    return first.vgpus


def _meant(reference: str, vgpus: Sequence[VgpuStatus], past: Sequence[EventReading]) -> str:
    """The id of ``reference``, which the node has understood."""
    from vgpu.node.routing import find_vgpu

    if not reference:
        return ""
    try:
        return find_vgpu(reference, vgpus, os.geteuid()).vgpu_id
    except VgpuError:
        if not past:
            raise
        return past[-1].vgpu_id


def _filter(vgpu_id: str, since_unix_s: float, kinds: tuple[str, ...]) -> Callable[[EventReading], bool]:
    def fits(event: EventReading) -> bool:
        right = event.at_unix_s >= since_unix_s and vgpu_id in ("", event.vgpu_id)
        return right and (not kinds or event.kind in kinds)

    return fits


def unseen(past: Sequence[EventReading], notices: Iterator[Notice]) -> Iterator[EventReading]:
    """The events of ``notices`` that are not among ``past``, which was read after the notices had begun. Both have the
    same order, so all events from the first new one on are new. A node sends no event twice."""
    seen = {event.model_dump_json() for event in past}
    for notice in notices:
        if notice.event is None or (seen and notice.event.model_dump_json() in seen):
            continue
        seen.clear()
        yield notice.event


# --- how they are printed -------------------------------------------------------------------------------------------


def _line_of_json(event: EventReading) -> None:
    output.print_json_text(event.model_dump_json())


def _print(past: Sequence[EventReading], names: Names) -> None:
    show = _printer(names)
    for event in past:
        show(event)
    if not past and sys.stdout.isatty():
        say("nothing of that kind has happened", "vgpuctl events -f waits for it")


def _printer(names: Names) -> Callable[[EventReading], None]:
    """Prints lines with cells of the usual widths, so that later lines are aligned. On a terminal the lines have no
    year, to make them fit. An event shows the name that its vGPU had then."""
    show, called = output.line_printer(), dict(names)
    since_year = len("2026-") if sys.stdout.isatty() else 0
    widths = (_WIDTHS[0] - since_year, *_WIDTHS[1:])

    def put(words: Sequence[str], styles: Sequence[str]) -> None:
        cells = [Cell(word.ljust(width), style) for word, width, style in zip(words, widths, styles, strict=False)]
        show([*cells, Cell(words[-1], styles[-1])])

    def show_event(event: EventReading) -> None:
        if event.kind in _DESCRIBING and "name" in event.fields:
            called[event.vgpu_id] = str(event.fields["name"])
        time = clock_time(event.at_unix_s)[since_year:]
        what = what_happened(event, called.get(event.vgpu_id, ""))
        gpu = "–" if event.gpu_index < 0 else str(event.gpu_index)
        put((time, gpu, event.vgpu_id, event.kind, what), ("dim", "", "", _style(event.kind), ""))

    put(("TIME", "GPU", "VGPU", "KIND", "WHAT"), ("bold",) * 5)
    return show_event


def what_happened(event: EventReading, name: str) -> str:
    """The event's text without the id and the kind, which precede it: ``trainer: by root, --sm 30``."""
    from vgpu.spec import as_options

    text, described = event.text, as_options(event.fields) if event.kind in _DESCRIBING else ""
    if event.vgpu_id:
        text = text.removeprefix(f"{event.vgpu_id} ").removeprefix(f"{event.kind} ")
    return (f"{name}: " if name else "") + ", ".join(filter(None, (with_names(text), described)))


def _style(kind: str) -> str:
    return _FAILURE if kind in _FAILURES else _STYLES.get(kind, _TROUBLE)


def register(app: typer.Typer) -> None:
    app.command("events")(events)
