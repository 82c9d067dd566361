"""vgpuctl models: one copy of a model's weights for several programs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vgpu.ctl import options
from vgpu.ctl.options import Output, OutputOption

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vgpu.models.listing import ServedModel

models_app = typer.Typer(
    invoke_without_command=True,
    callback=options.tells_what_it_holds,
    help="One copy of a model's weights for several programs.",
)


@models_app.command("serve")
def serve(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What replicas call the model.", show_default=False)],
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="The model's safetensors files.", show_default=False)
    ],
) -> None:
    """Load a model, and lend it to programs of yours until Ctrl-C or SIGTERM.

    Run it in a vGPU, which is charged with the memory. In the replicas, vgpu.models.load("NAME") gives the tensors.
    """
    from vgpu.models.owner import serve as serve_model

    serve_model(name, files, lambda text: print(f"vgpuctl models: {text}", file=sys.stderr, flush=True))


@models_app.command("ls")
def ls(form: OutputOption = Output.TABLE) -> None:
    """List the models that you serve, with the vGPU that is charged and the replicas."""
    from vgpu.ctl.present import output
    from vgpu.models.listing import served

    found = served()
    if form is Output.JSON:
        output.print_json(found)
        return
    if not found:
        print("You serve no model.")
        return
    columns = (
        output.Column("MODEL"),
        output.Column("VGPU"),
        output.Column("PID", right=True),
        output.Column("MEMORY", right=True),
        output.Column("REPLICAS", right=True),
        output.Column("STATE", elastic=True),
    )
    output.print_table(columns, list(_rows(found)))


def _rows(found: list[ServedModel]) -> Iterator[tuple[str, ...]]:
    from vgpu.units import format_bytes

    for one in found:
        if one.error:
            yield one.name, "", "", "", "", one.error
            continue
        state = "read-only" if one.read_only else "replicas can write; a hash shows it"
        if one.changed:
            state = f"changed by a replica: {', '.join(one.changed)}"
        yield one.name, one.vgpu_id, str(one.pid), format_bytes(one.total_bytes), str(len(one.replicas)), state


def register(app: typer.Typer) -> None:
    app.add_typer(models_app, name="models")
