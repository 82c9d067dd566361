"""vgpuctl logs: the logs of the node, of its GPU Servers and of their brokers, by time."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from vgpu.ctl.exit_codes import say
from vgpu.ctl.options import Output, OutputOption
from vgpu.ctl.present import output
from vgpu.ctl.present.output import Cell
from vgpu.ctl.time_options import SinceOption, clock_time, parse_since
from vgpu.errors import ErrorCode, VgpuError
from vgpu.printable import harmless, printable

if TYPE_CHECKING:
    from vgpu.node.loglines import Line, Tail, Wanted

LOOK_S: Final = 0.2
READ_BYTES: Final = 16 << 20
"""Of each log, from its end. This is the whole log, because the node keeps it small."""
_STYLES: Final = {"debug": "dim", "info": "", "warning": "yellow", "error": "bold red", "critical": "bold red", "": ""}


class Level(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a node's logs are. ``elsewhere``: in words, where its own are if not here."""

    folder: Path
    elsewhere: str = ""
    hint: str = ""


def logs(
    subject: Annotated[
        list[str] | None,
        typer.Argument(metavar="[node | gpu N | VGPU]", help="The node's own, those of a GPU, what is about a vGPU."),
    ] = None,
    lines: Annotated[int, typer.Option("-n", "--lines", metavar="N", help="The last N of them.", min=0)] = 100,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Then each as it comes, until Ctrl-C.")] = False,
    since: SinceOption = None,
    level: Annotated[Level, typer.Option(help="This level and above.")] = Level.DEBUG,
    form: OutputOption = Output.TABLE,
) -> None:
    """Logs of the node and its GPU Servers, by time. With -f, JSON is one object per line."""
    from vgpu.node.loglines import Wanted, merged

    source, vgpu = _chosen(subject or [])
    wanted = Wanted(parse_since(since), level.value, vgpu)
    place = _place()
    if place.elsewhere and source in ("", "node"):
        say(place.elsewhere, place.hint)
    files = _files(place.folder, source)
    if not files and not (follow or place.elsewhere):
        which = f" of {source}" if source else ""
        raise VgpuError(ErrorCode.NOT_FOUND, f"there are no logs{which} in {place.folder}", "vgpuctl status")
    reader = Reader(place.folder, source)
    past = merged([[line for line in log if wanted(line)] for log in reader.past()])
    past = past[-lines:] if lines else []
    if form is Output.JSON and not follow:
        output.print_json_text(json.dumps([line.as_json() for line in past], indent=2, ensure_ascii=False))
        return
    show = _line_of_json if form is Output.JSON else _printer()
    for line in past:
        show(line)
    if files and not past and not follow:
        say("no line of the logs fits", "vgpuctl logs has all; vgpuctl ls, vgpuctl events name vGPUs")
    if follow:
        with suppress(KeyboardInterrupt):
            _follow(reader, wanted, show)


def _chosen(subject: Sequence[str]) -> tuple[str, str]:
    """What the arguments name: a source ("": all), and the id of a vGPU ("": any)."""
    match list(subject):
        case []:
            return "", ""
        case ["node"]:
            return "node", ""
        case ["gpu", index] if index.isdecimal():
            return f"gpu {int(index)}", ""
        case [vgpu] if vgpu != "gpu":
            return "", _id_of(vgpu)
        case other:
            raise VgpuError(
                ErrorCode.INVALID,
                f"{' '.join(other)!r} has no logs",
                "vgpuctl logs, logs node, logs gpu 0, or logs VGPU",
            )


def _id_of(reference: str) -> str:
    """The id of a vGPU that exists, or that events name. Else ``reference``, as the beginning of an id in the logs."""
    from vgpu.node.link import ControlLink
    from vgpu.node.routing import find_vgpu

    with suppress(VgpuError), ControlLink(timeout_s=3) as node:
        try:
            return find_vgpu(reference, node.list(), os.geteuid()).vgpu_id
        except VgpuError as error:
            if error.code is ErrorCode.AMBIGUOUS:
                raise
        past = node.events(reference, most=1)
        if past:
            return past[0].vgpu_id
    return reference if reference.startswith("vgpu-") else f"vgpu-{reference}"


# --- where they are -------------------------------------------------------------------------------------------------


def _place() -> Place:
    """The logs of the node that answers; else of the node that would run here."""
    from vgpu.node.link import ControlLink
    from vgpu.paths import NodePaths

    paths = NodePaths.from_environment()
    with suppress(VgpuError), ControlLink(timeout_s=3) as node:
        folder = Path(node.status().state_dir) / "logs"
        return Place(folder, *elsewhere(node.welcome.pid, folder))
    return Place(paths.logs)


def elsewhere(pid: int, folder: Path, proc: Path = Path("/proc")) -> tuple[str, str]:
    """Where process ``pid`` writes to, and what to type, if that is none of the files in ``folder``. "": it is one of
    them, or /proc does not show it."""
    try:
        target = str((proc / str(pid) / "fd/2").readlink())
    except OSError:
        return "", ""
    if target.startswith(f"{folder}/"):
        return "", ""
    if target.startswith("socket:"):
        unit = _unit(pid, proc)
        command = f"journalctl -u {unit}" if unit else f"journalctl _PID={pid}"
        return "the node's own log is in the journal; here are those of its GPU Servers", command
    where = "its terminal" if target.startswith(("/dev/pts/", "/dev/tty")) else target
    return f"the node's own log is on {where}; here are those of its GPU Servers", ""


def _unit(pid: int, proc: Path) -> str:
    """The systemd service that the process is part of, or ""."""
    try:
        parts = (proc / str(pid) / "cgroup").read_text().strip().split("/")
    except OSError:
        return ""
    return next((part for part in reversed(parts) if part.endswith(".service") and not part.startswith("user@")), "")


def _files(folder: Path, source: str) -> dict[str, Path]:
    """The logs that there are, by their source. ``VgpuError``: they are not ours to read."""
    try:
        found = {_source(path): path for path in sorted(folder.iterdir()) if path.name.endswith(".log")}
    except FileNotFoundError:
        return {}
    except PermissionError:
        raise VgpuError(ErrorCode.NOT_YOURS, f"the logs in {folder} are another user's", "sudo vgpuctl logs") from None
    return {name: path for name, path in found.items() if source in ("", name)}


def _source(path: Path) -> str:
    name, _, number = path.stem.partition("-")
    return f"{name} {number}" if number else name


# --- reading them ---------------------------------------------------------------------------------------------------


class Reader:
    """Call ``past`` first, then ``more`` repeatedly. A log that was emptied, replaced or created is read from its
    beginning."""

    def __init__(self, folder: Path, source: str = "") -> None:
        self._folder = folder
        self._source = source
        self._read_up_to: dict[str, tuple[int, int]] = {}  # inode, bytes
        self._tails: dict[str, Tail] = {}

    def past(self) -> Iterator[list[Line]]:
        from vgpu.node.loglines import Tail

        for source, path in _files(self._folder, self._source).items():
            tail = self._tails[source] = Tail(source)
            before = path.with_name(f"{path.name}.1")
            data = b"\n".join(filter(None, (self._last(before), self._last(path, source))))
            yield tail.take(data)

    def _last(self, path: Path, source: str = "") -> bytes:
        """The end of a file, from the beginning of a line on; "" of one that is not there."""
        import os

        with suppress(FileNotFoundError), path.open("rb") as file:
            there = os.fstat(file.fileno())
            file.seek(max(0, there.st_size - READ_BYTES))
            if file.tell():
                file.readline()
            data = file.read()
            if source:
                self._read_up_to[source] = (there.st_ino, file.tell())
            return data
        return b""

    def more(self) -> Iterator[list[Line]]:
        import os

        from vgpu.node.loglines import Tail

        for source, path in _files(self._folder, self._source).items():
            inode, position = self._read_up_to.get(source, (0, 0))
            with suppress(FileNotFoundError), path.open("rb") as file:
                there = os.fstat(file.fileno())
                tail = self._tails.setdefault(source, Tail(source))
                if there.st_ino != inode or there.st_size < position:
                    yield tail.end()
                    position = 0
                file.seek(position)
                data = file.read()
                self._read_up_to[source] = (there.st_ino, position + len(data))
                yield tail.take(data)


def _follow(reader: Reader, wanted: Wanted, show: Callable[[Line], None]) -> None:
    from vgpu.node.loglines import merged

    while True:
        for line in merged(reader.more()):
            if wanted(line):
                show(line)
        time.sleep(LOOK_S)


# --- how they are printed -------------------------------------------------------------------------------------------


def _line_of_json(line: Line) -> None:
    output.print_json_text(json.dumps(line.as_json(), ensure_ascii=False))


def _printer() -> Callable[[Line], None]:
    show = output.line_printer()
    return lambda line: show(log_cells(line))


def log_cells(line: Line) -> list[Cell]:
    return [Cell(printable(cell.text), cell.style) for cell in _cells(line)] + _trace(line)


def _cells(line: Line) -> list[Cell]:
    if not line.level:
        return [Cell(" " * 19), Cell(" " * 7), Cell(line.source.ljust(6), "dim"), Cell(line.text)]
    fields = dict(line.fields)
    text = str(fields.pop("text", ""))  # of an event: in words what its fields say once more
    said = f"{line.text}: {text}" if text else line.text
    if line.vgpu and line.vgpu not in said:
        said = f"{line.vgpu}: {said}"
    fields.pop("exception", "")
    pairs = "" if text else " ".join(f"{name}={value}" for name, value in fields.items())
    return [
        Cell(clock_time(line.at_unix_s), "dim"),
        Cell(line.level.ljust(7), _STYLES.get(line.level, "bold red")),
        Cell(line.source.ljust(6)),
        Cell(said, _STYLES.get(line.level, "")),
        *([Cell(pairs, "dim")] if pairs else []),
    ]


def _trace(line: Line) -> list[Cell]:
    """The only part of a log line that has several lines of its own."""
    trace = str(dict(line.fields).get("exception", "")) if line.level else ""
    return [Cell(f"\n{harmless(trace)}", "dim")] if trace else []


def register(app: typer.Typer) -> None:
    app.command("logs")(logs)
