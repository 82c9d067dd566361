"""vgpuctl ray and ray-worker: workers of Ray in vGPUs of their own."""

from __future__ import annotations

from typing import Annotated, Any, Final

import typer

from client_hook.errors import HookError
from vgpu.ctl import options
from vgpu.ctl.exit_codes import say
from vgpu.ctl.options import Wanted
from vgpu.ctl.programs import COMMAND, LaunchingCommand, check_program
from vgpu.errors import VgpuError

IDLE_SUSPEND: Final = "5m"

ray_app = typer.Typer(
    invoke_without_command=True, callback=options.tells_what_it_holds, help="Tasks and actors of Ray in vGPUs."
)


@ray_app.command("resources")
def resources() -> None:
    """Print what ray start --resources is to be on this machine."""
    import json

    from vgpu.node.link import ControlLink
    from vgpu.ray import MEMORY, MIB, SM

    with ControlLink() as node:
        gpus = node.gpus()
    found = {SM: 100 * len(gpus), MEMORY: sum(gpu.total_memory_bytes // MIB for gpu in gpus)}
    print(json.dumps(found | {f"{SM}_{gpu.index}": 100 for gpu in gpus}))


@options.describes_vgpu
def worker(
    wanted: Wanted,
    ctx: typer.Context,
    wait: Annotated[
        float, typer.Option("--wait", min=0, metavar="SECONDS", help="How long to wait where there is no room.")
    ] = 40.0,
    num_gpus: Annotated[
        bool, typer.Option("--num-gpus", help="The part of a GPU, and the GPU, are those that Ray assigns.")
    ] = False,
) -> None:
    """Become a worker of Ray in a vGPU that ends with it. Ray has this as py_executable, by vgpu.ray.

    Its task fails with the reason if no vGPU can be made. By default an idle vGPU is suspended after 5 minutes.
    """
    from vgpu.ray import room, start

    command = ctx.meta[COMMAND]
    try:
        check_program(ctx)
        if num_gpus:
            start.become_undecided(command, wanted.spec, wait)
        start.become(command, wanted.spec, wanted.gpu, wait)
    except (VgpuError, HookError) as error:
        if not room.worker_id(command):
            raise
        say(error.message, error.hint)
        start.become_refused(command, str(error))


class WorkerCommand(LaunchingCommand):
    """Its vGPU has a size without ``--sm`` where Ray gives it, and ``--idle-suspend`` by default."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = args[: args.index("--")] if "--" in args else args
        if not any(word.startswith("--idle-suspend") or "managed" in word for word in own):
            args = ["--idle-suspend", IDLE_SUSPEND, *args]
        if "--num-gpus" in own:
            args = ["--sm", "100", *args]
        return super().parse_args(ctx, args)


def register(app: typer.Typer) -> None:
    app.command("ray-worker", cls=WorkerCommand)(worker)
    app.add_typer(ray_app, name="ray")
