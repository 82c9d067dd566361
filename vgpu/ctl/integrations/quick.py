"""Commands that engines and jobs wait for, without typer and pydantic: hooks of Slurm, and ``container run`` with the
options of ``VALUED`` alone. All others take the usual way (``vgpu/ctl/main.py``)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from client_hook.errors import CannotStart
from vgpu.api.options import Options, fields_of
from vgpu.ctl.exit_codes import report, say
from vgpu.errors import VgpuError

VALUED: Final = {"--sm": "sm", "--mem": "mem", "--name": "name", "--gpu": "gpu", "--engine": "engine"}
DETACHED: Final = frozenset({"-d", "--detach"})
OTHERS: Final = frozenset(f"--{name.replace('_', '-')}" for name in Options.__annotations__) | {"--help", "-h"}
"""Options of ``container run`` that this module leaves to typer."""


def main(words: Sequence[str]) -> int | None:
    """The exit code; None: this command line is not for this module."""
    if words[:1] == ["slurm"] and len(words) == 2 and not words[1].startswith("-"):
        from vgpu.integrations import slurm

        return slurm.main(words[1:])
    if words[:2] == ["container", "run"] and "_VGPUCTL_COMPLETE" not in os.environ:
        return container_run(words[2:])
    return None


def container_run(words: Sequence[str]) -> int | None:
    divided = parsed(words)
    if divided is None:
        return None
    own, engines_words = divided
    from vgpu.integrations import runner

    gpu, engine, detach = own.pop("gpu", "auto"), own.pop("engine", ""), bool(own.pop("detach", ""))
    try:
        return runner.run(fields_of(Options, **own), gpu, engine, engines_words, detach=detach)
    except VgpuError as error:
        return int(report(error))
    except CannotStart as error:
        say(error.message, error.hint)
        return error.exit_code


def parsed(words: Sequence[str]) -> tuple[dict[str, str], list[str]] | None:
    """This command's options, and the engine's words, which begin at the first word that is no option of this command.
    None: other options are among them, a value is missing, or there are no engine's words."""
    own: dict[str, str] = {}
    rest = list(words)
    while rest:
        name, joined, value = rest[0].partition("=")
        if name in OTHERS:
            return None
        if name in DETACHED and not joined:
            own["detach"] = "yes"
        elif name in VALUED:
            if not joined:
                if len(rest) < 2:
                    return None
                value = rest.pop(1)
            own[VALUED[name]] = value
        else:
            break
        rest.pop(0)
    rest = rest[1:] if rest[:1] == ["--"] else rest
    return (own, rest) if rest else None
