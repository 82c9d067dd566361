"""vgpuctl container: containers in vGPUs of their own, with the engine's own command line."""

from __future__ import annotations

import os
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand

from vgpu.ctl import completion, options
from vgpu.ctl.exit_codes import say
from vgpu.ctl.options import Output, OutputOption, Wanted
from vgpu.ctl.present import output
from vgpu.ctl.present.output import Cell
from vgpu.errors import ErrorCode, VgpuError
from vgpu.share import MEANING

_WORDS: Final = "vgpu.container"
container_app = typer.Typer(
    invoke_without_command=True, callback=options.tells_what_it_holds, help="Containers in vGPUs of their own."
)

COLUMNS: Final = (
    output.Column("VGPU"),
    output.Column("CONTAINER", elastic=True),
    output.Column("ENGINE"),
    output.Column("PROCESSES", right=True),
)

EngineOption = Annotated[
    str, typer.Option("--engine", metavar="ENGINE", help="docker, podman or a path; else the first that is installed.")
]


class ContainerCommand(TyperCommand):
    """A command line whose words are the engine's from the first one that is no option of this command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own, words = self._divided(args)
        if not words and not ctx.resilient_parsing and not {"-h", "--help"} & set(own):
            raise VgpuError(
                ErrorCode.INVALID, "which image? It is missing", "vgpuctl container run --sm 30 --mem 8G IMAGE COMMAND"
            )
        ctx.meta[_WORDS] = words
        return super().parse_args(ctx, own)

    def _divided(self, args: list[str]) -> tuple[list[str], list[str]]:
        known = [one for one in self.params if one.param_type_name == "option"]
        names = {name for one in known for name in (*one.opts, *one.secondary_opts)} | {"-h", "--help"}
        valued = {name for one in known if not getattr(one, "is_flag", False) for name in one.opts}
        at = 0
        while at < len(args) and args[at].partition("=")[0] in names:
            at += 2 if args[at] in valued else 1
        rest = args[at:]
        return args[:at], rest[1:] if rest[:1] == ["--"] else rest

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[ENGINE OPTION]... IMAGE [COMMAND]..."]


@options.describes_vgpu
def run(
    wanted: Wanted,
    ctx: typer.Context,
    engine: EngineOption = "",
    detach: Annotated[
        bool, typer.Option("-d", "--detach", help="Return once the container runs; the engine prints its id.")
    ] = False,
) -> int:
    """Run a container in a vGPU of its own. Exit code and signals are the engine's.

    Options of vgpuctl come first, then those of the engine's run. The vGPU stays for as long as the engine has the
    container, and goes with it.
    """
    from vgpu.integrations import runner

    spec = wanted.spec.model_dump(mode="json", exclude_none=True)
    return runner.run(spec, wanted.gpu, engine, ctx.meta[_WORDS], detach=detach)


@container_app.command("ls")
def ls(form: OutputOption = Output.TABLE) -> None:
    """List the vGPUs of containers. Your own whose container is gone are removed first."""
    from vgpu.integrations.keeper import engine_of, is_kept
    from vgpu.node.link import ControlLink

    with ControlLink() as node:
        found = [(vgpu, engine) for vgpu in node.list() if (engine := engine_of(vgpu)) is not None]
        rows: list[list[Cell]] = []
        kept = []
        for vgpu, engine in found:
            # The claim of another user names a program of that user: it is not run here.
            containers = engine.containers(vgpu.vgpu_id) if vgpu.owner_uid == os.getuid() else None
            if containers == [] and not is_kept(vgpu):
                node.remove(vgpu.vgpu_id, force=True)
                say(f"{vgpu.vgpu_id} is removed: {engine.name} does not have its container any more")
                continue
            kept.append(vgpu)
            shown = "?" if containers is None else ", ".join(containers) or "being made"
            rows.append([Cell(vgpu.vgpu_id), Cell(shown), Cell(engine.name), Cell(str(vgpu.processes))])
    if form is Output.JSON:
        output.print_json(kept)
    else:
        output.print_table(COLUMNS, rows)


@container_app.command("flags")
def flags(
    vgpu: Annotated[str, typer.Argument(metavar="VGPU", help="Id, prefix or name.", autocompletion=completion.vgpus)],
) -> None:
    """Print the flags with which docker run or podman run mounts a vGPU."""
    import shlex

    from vgpu.node.link import ControlLink

    with ControlLink() as node:
        print(" ".join(f"-v {shlex.quote(volume)}" for volume in node.inspect(vgpu).mounts))


def register(app: typer.Typer) -> None:
    container_app.command("run", cls=ContainerCommand, epilog=options.explained(MEANING))(run)
    app.add_typer(container_app, name="container")
