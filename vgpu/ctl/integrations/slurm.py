"""vgpuctl slurm: the hooks of Slurm. ``vgpu/ctl/entry.py`` runs them without this module, which is for help alone."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer


class Hook(StrEnum):
    PROLOG = "prolog"
    TASK_PROLOG = "task-prolog"
    EPILOG = "epilog"
    CONFIG = "config"


def slurm(hook: Annotated[Hook, typer.Argument(help="config prints the lines for slurm.conf and gres.conf.")]) -> int:
    """The hooks of Slurm: a job's shards are its vGPU."""
    from vgpu.integrations.slurm import main

    return main([hook.value])


def register(app: typer.Typer) -> None:
    app.command("slurm")(slurm)
