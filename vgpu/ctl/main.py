"""``vgpuctl``, and the one place where an error becomes a line on stderr and an exit code.

``vgpu.ctl.commands`` has the commands. Modules that are slow to import (pydantic models, rich, the demo) are imported
inside the commands that need them: the answer to ``vgpuctl ls`` or a shell's completion must not wait for them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from client_hook.errors import CannotStart, HookError
from vgpu.ctl import options
from vgpu.ctl.commands import LAUNCHING, ONE_THREAD
from vgpu.ctl.exit_codes import Exit, report, say
from vgpu.ctl.mistakes import command_path
from vgpu.ctl.present import stdio
from vgpu.ctl.present.help_sections import SYNONYMS, Overview
from vgpu.errors import ErrorCode, VgpuError, in_plain_words
from vgpu.protocol import building

BEGIN = """To begin:

    vgpuctl demo                             two programs, 30 and 70 %
    vgpuctl serve --detach                   the node; no GPU: --simulate 1
    vgpuctl run --sm 30 --mem 8G -- COMMAND  a program in a vGPU of its own
    vgpuctl ls -w                            who uses what, live"""

app = typer.Typer(
    name="vgpuctl",
    cls=Overview,
    help="Share NVIDIA GPUs: hold each program to its part of compute, time and memory.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    epilog=options.explained(BEGIN),
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def everywhere(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Same as the command version.")] = False,
    nodes: Annotated[
        str,
        typer.Option(
            "--nodes",
            metavar="FILE",
            help="ls, create, top, and others with NODE/VGPU, over the nodes of FILE.",
            show_default=False,
        ),
    ] = "",
) -> None:
    if nodes:
        raise VgpuError(ErrorCode.INVALID, "--nodes FILE comes before all other options", f"vgpuctl --nodes {nodes} ls")
    if version:
        from vgpu.ctl.node import version as print_version

        print_version()
        raise typer.Exit
    if ctx.invoked_subcommand == "dashboard":
        ctx.default_map = listening("dashboard")
    options.tells_what_it_holds(ctx)


def listening(section: str) -> dict[str, dict[str, str]] | None:
    """What takes the place of defaults of the command's options, where the configuration file says something."""
    from vgpu.config import load

    given = getattr(load().config, section).model_dump(exclude_none=True)
    return {section: given} if given else None


_UsageError: type[Exception] = typer.BadParameter.__bases__[0]
"""The base of everything that can be wrong with a command line; typer names only this one of its subclasses."""


def _ran(arguments: Sequence[str]) -> object:
    if arguments and arguments[0].partition("=")[0] == "--nodes":
        from vgpu.ctl.placement import nodes

        if given := nodes.given(arguments):
            return nodes.run(*given)
    return app(list(arguments), prog_name="vgpuctl", standalone_mode=False)


def run(arguments: Sequence[str]) -> int:
    """Executes one command line. Returns the exit code. Errors go to stderr, and are never raised."""
    launches = bool(arguments) and arguments[0] in LAUNCHING
    try:
        result = _ran(arguments)
        sys.stdout.flush()
    except _UsageError as error:
        path = command_path(typer.main.get_command(app), list(arguments))
        command = getattr(getattr(error, "ctx", None), "command_path", path)
        message = in_plain_words(error.format_message())  # type: ignore[attr-defined]
        say(message[:1].lower() + message[1:].rstrip("."), f"{command} --help", command)
        return Exit.LAUNCH if launches else Exit.USAGE
    except typer.Abort:
        return Exit.FAILURE
    except VgpuError as error:
        code = report(error)
        return Exit.LAUNCH if launches else code
    except CannotStart as error:
        say(error.message, error.hint)
        return error.exit_code
    except HookError as error:
        say(error.message, error.hint)
        return Exit.LAUNCH if launches else Exit.FAILURE
    except BrokenPipeError:  # the reader (head, less) has seen enough
        stdio.silence()
        return Exit.FAILURE
    except OSError as error:
        if not stdio.refuses():
            raise
        stdio.silence()
        say(f"cannot write to stdout: {error.strerror}")
        return Exit.LAUNCH if launches else Exit.FAILURE
    return int(result or 0)  # type: ignore[call-overload,no-any-return]


def main() -> int:
    stdio.open_closed_ones()
    building.deferred = any(SYNONYMS.get(word, word) in ONE_THREAD for word in sys.argv[1:2])
    return run(sys.argv[1:])
