"""vgpuctl jupyter install: a kernel of Jupyter that has a vGPU."""

from __future__ import annotations

from typing import Annotated

import typer

from vgpu.ctl import options

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


def register(app: typer.Typer) -> None:
    app.add_typer(jupyter_app, name="jupyter")
