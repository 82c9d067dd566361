"""vgpuctl jupyter install: a kernel of Jupyter that has a vGPU."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Annotated

import typer

from vgpu.ctl import options
from vgpu.ctl.exit_codes import say

jupyter_app = typer.Typer(
    invoke_without_command=True, callback=options.tells_what_it_holds, help="Notebooks in vGPUs of their own."
)


@jupyter_app.command("install")
def install(
    sm: Annotated[str, typer.Option(metavar="PERCENT", help="Percent of the GPU's compute for each kernel.")],
    mem: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Device memory for each kernel; else the same part as --sm.")
    ] = None,
    gpu: Annotated[str, typer.Option(metavar="GPU", help="auto, an index or a UUID.")] = "auto",
    name: Annotated[str, typer.Option(metavar="NAME", help="The kernel's name in Jupyter.")] = "vgpu",
    python: Annotated[str, typer.Option(metavar="PATH", help="The kernel's interpreter; else vgpuctl's own.")] = "",
) -> None:
    """Install a kernel for this user. Each start makes a vGPU, and its end removes it."""
    from vgpu.integrations import kernelspec
    from vgpu.spec import VgpuSpec

    VgpuSpec.parse(sm_percent=sm, memory_bytes=mem, name=name)
    print(kernelspec.install(name, sm, mem, gpu, python))
    for message, hint in lacking(here=not python):
        say(message, hint)


def lacking(*, here: bool) -> Iterator[tuple[str, str]]:
    """What the kernel needs and this environment has not, and the line for pip. ``here``: the kernel runs in it, too.
    Jupyter itself reports such a lack as a kernel that does not start."""
    if not find_spec("jupyter_client"):
        yield (
            "Jupyter is not installed beside this vgpuctl, and no other Jupyter can start the kernel",
            "pip install jupyterlab",
        )
    if here and not find_spec("ipykernel"):
        yield "the kernel's interpreter has no ipykernel", "pip install ipykernel, or name another with --python"
    if not find_spec("anyio"):
        yield "the kernel needs anyio", 'pip install "st-vgpu[aio]"'


def register(app: typer.Typer) -> None:
    app.add_typer(jupyter_app, name="jupyter")
