"""vgpuctl top: a node in a terminal, or as text."""

from __future__ import annotations

import os
import shlex
import socket
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from vgpu.ctl.options import Output, OutputOption
from vgpu.errors import ErrorCode, VgpuError, in_plain_words

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from vgpu.protocol.messages import NodeStatus, Snapshot
    from vgpu.spec import VgpuChanges

SHORTEST_S: Final = 0.1
LONGEST_S: Final = 3600.0
_UsageError: Final[type[Exception]] = typer.BadParameter.__bases__[0]
"""The base of everything that can be wrong with a command line, as in ``vgpu.ctl.main``."""


def top(
    once: Annotated[bool, typer.Option("--once", help="One reading as text, and end.")] = False,
    count: Annotated[
        int | None, typer.Option("-n", "--count", metavar="COUNT", help="So many readings as text.", min=1)
    ] = None,
    delay: Annotated[
        float, typer.Option("-d", "--delay", metavar="SECONDS", help="From one reading to the next: 0.1 to 3600.")
    ] = 1.0,
    form: OutputOption = Output.TABLE,
) -> None:
    """Watch GPUs, vGPUs and their programs. ? in it lists the keys; piped, it prints one reading."""
    if not SHORTEST_S <= delay <= LONGEST_S:  # what is no number is not between them either
        raise VgpuError(
            ErrorCode.INVALID, f"--delay: {delay:g} is not between {SHORTEST_S:g} and {LONGEST_S:g}", "-d 1"
        )
    if once and count is not None and count != 1:
        raise VgpuError(ErrorCode.INVALID, f"--once is one reading, and --count says {count}", "leave out one of them")
    if (
        once
        or count is not None
        or form is Output.JSON
        or not all(each.isatty() for each in (sys.stdin, sys.stdout, sys.stderr))
    ):
        _print(count or 1, delay, form)
    else:
        _show(delay)


def _show(delay_s: float) -> None:
    from vgpu import extras

    extras.need("top", "top")
    from vgpu.node.link import ControlLink
    from vgpu.paths import NodePaths
    from vgpu.top.app import Top

    path = NodePaths.from_environment().control_socket
    with ControlLink(path) as node:  # without a node, the user gets the usual error
        status = node.status()
    shown = Top(path, _facts(status), delay_s, parse_changes, utf8=speaks_utf8(os.environ))
    shown.run()
    if shown.return_code:
        raise typer.Exit(shown.return_code)


def _facts(status: NodeStatus) -> Any:
    from vgpu.top.panels import NodeFacts

    started_unix_s = time.time() - status.uptime_ns / 1e9
    return NodeFacts(socket.gethostname(), status.pid, status.software, status.simulated, started_unix_s)


def speaks_utf8(environment: Mapping[str, str]) -> bool:
    """Whether the terminal is said to show more than ASCII."""
    locale = next(filter(None, map(environment.get, ("LC_ALL", "LC_CTYPE", "LANG"))), "")
    return "utf-8" in locale.lower() or "utf8" in locale.lower()


def _print(count: int, delay_s: float, form: Output) -> None:
    from vgpu.ctl.present import output

    for i, snapshot in enumerate(_snapshots(count, delay_s)):
        if form is Output.JSON:
            if count == 1:
                output.print_json(snapshot)
            else:
                print(snapshot.model_dump_json(), flush=True)
            continue
        from vgpu.top.plain import print_snapshot

        if i:
            print()
        print_snapshot(snapshot, socket.gethostname())
        sys.stdout.flush()


def _snapshots(count: int, delay_s: float) -> Iterator[Snapshot]:
    from vgpu.node.link import ControlLink

    with ControlLink() as node:
        for notice in node.watch(interval_ns=int(delay_s * 1e9)):
            if notice.snapshot is not None:
                yield notice.snapshot
                count -= 1
                if not count:
                    return


def parse_changes(vgpu_id: str, text: str) -> VgpuChanges:
    """What ``vgpuctl set VGPU_ID TEXT`` would change. ``VgpuError`` (invalid), in that command's words."""
    from vgpu.ctl import vgpus

    probe = typer.Typer()
    probe.command("set", add_help_option=False)(vgpus.set_)
    command = typer.main.get_command(probe)
    try:
        given = command.make_context("set", [vgpu_id, *shlex.split(text)]).params
    except ValueError as error:  # a quotation mark too few
        raise VgpuError(ErrorCode.INVALID, str(error)) from error
    except _UsageError as error:
        said = in_plain_words(error.format_message()).rstrip(".")  # type: ignore[attr-defined]
        raise VgpuError(ErrorCode.INVALID, said[:1].lower() + said[1:]) from error
    return vgpus.changes_of(**{name: value for name, value in given.items() if name not in ("vgpu", "form")})


def register(app: typer.Typer) -> None:
    app.command("top")(top)
