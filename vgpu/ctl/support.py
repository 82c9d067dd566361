"""vgpuctl support bundle: what a maintainer needs to know of this node, in one file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vgpu.ctl import options

if TYPE_CHECKING:
    from vgpu.support.bundle import Made
    from vgpu.support.parts import Node
    from vgpu.support.redaction import Redactor

support_app = typer.Typer(
    invoke_without_command=True,
    callback=options.tells_what_it_holds,
    help="What a maintainer needs, when something is wrong.",
)


@support_app.command("bundle")
def bundle(
    out: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Where to; else vgpu-support-TIME.tar.gz, here."),
    ] = None,
    redact: Annotated[
        bool, typer.Option(help="Names and homes of users, and the machine's name, are replaced.")
    ] = True,
    trace: Annotated[bool, typer.Option(help="A recording of one second, too.")] = True,
) -> None:
    """Collect what a maintainer needs into one file.

    Versions, findings, readings, events, logs and a short recording. What fails is noted.
    """
    from datetime import datetime

    from vgpu.paths import NodePaths
    from vgpu.support.bundle import write
    from vgpu.support.parts import Node, parts

    paths = NodePaths.from_environment()
    node = Node(paths)
    path = out or Path(f"vgpu-support-{datetime.now():%Y%m%d-%H%M%S}.tar.gz")
    hide = _redactor(node) if redact else str
    with _progress() as show:
        made = write(path, parts(node, paths, trace=trace), hide, redacted=redact, show=show)
    _print(path, made, redact=redact)


def _redactor(node: Node) -> Redactor:
    import os
    import pwd
    import socket

    from vgpu.support.redaction import Person, Redactor, are_people

    accounts = [Person(entry.pw_name, entry.pw_uid, entry.pw_dir) for entry in pwd.getpwall()]
    own = Person(os.environ.get("USER", "root"), os.getuid(), str(Path.home()))
    return Redactor([*are_people(accounts, {os.getuid(), *node.owners()}), own], [socket.gethostname()])


@contextmanager
def _progress() -> Iterator[Callable[[str], object]]:
    """On stderr, if that is a terminal: what is read just now."""
    if not sys.stderr.isatty():
        yield lambda name: None
        return
    from rich.console import Console

    with Console(stderr=True, highlight=False).status("looking") as status:
        yield lambda name: status.update(name)


def _print(path: Path, made: Made, *, redact: bool) -> None:
    from vgpu.ctl.exit_codes import say
    from vgpu.ctl.present import output
    from vgpu.units import format_bytes

    columns = (output.Column("FILE"), output.Column("SIZE", right=True))
    output.print_table(columns, [(name, format_bytes(size)) for name, size in made.files])
    for name, why in made.missing:
        say(f"without {name}: {why}")
    print()
    names = "user names and homes are replaced" if redact else "with user names and paths as they are"
    print(f"{path}: {format_bytes(made.size)}, {names}; check it before you send it")


def register(app: typer.Typer) -> None:
    app.add_typer(support_app, name="support")
