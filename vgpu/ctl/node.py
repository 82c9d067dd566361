"""vgpuctl serve, stop, status, version: the node itself."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from client_hook import interpreter, reach
from vgpu.ctl import gpus, options
from vgpu.ctl.exit_codes import say
from vgpu.ctl.mistakes import ServeCommand
from vgpu.ctl.options import Mode, Output, OutputOption, Unmanaged
from vgpu.ctl.present import progress
from vgpu.enums import PlacementName
from vgpu.errors import ErrorCode, VgpuError

if TYPE_CHECKING:
    from vgpu.node.link import ControlLink
    from vgpu.protocol.messages import NodeStatus

STOP_S: Final = 15.0


def software_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("st-vgpu")
    except PackageNotFoundError:
        return "unknown"


def serve(
    detach: Annotated[bool, typer.Option("-d", "--detach", help="Return once the node answers.")] = False,
    simulate: Annotated[
        int | None, typer.Option(metavar="[N]", help="Serve N simulated GPUs; 1 without N.", min=0, max=16)
    ] = None,
    mode: Annotated[Mode | None, typer.Option(help="How vGPUs share a GPU; else temporal.")] = None,
    gpu: Annotated[
        list[int] | None, typer.Option(metavar="INDEX", help="Serve this GPU alone; may be repeated.", min=0, max=255)
    ] = None,
    period: Annotated[str | None, typer.Option(metavar="TIME", help="One round of turns, as in 40ms.")] = None,
    quantum: options.Quantum = None,
    window: Annotated[str | None, typer.Option(metavar="TIME", help="Most GPU time in flight, as in 12ms.")] = None,
    host_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="The most host memory for what is swapped out, of all GPUs together; default: half of what there is.",
        ),
    ] = None,
    take: Annotated[
        bool, typer.Option("--take", help="As root: end another user's GPU Server where one serves a GPU already.")
    ] = False,
    unmanaged: Annotated[
        Unmanaged | None,
        typer.Option(help="What happens to a vGPU's program that uses the GPU past the hook; else report."),
    ] = None,
    placement: Annotated[
        PlacementName | None, typer.Option(help="Which GPU a new vGPU gets with --gpu auto; else spread.")
    ] = None,
) -> None:
    """Run the node: one GPU Server for each GPU. Ends with Ctrl-C, or vgpuctl stop.

    What the command line leaves open stands in the configuration file, if there is one: vgpuctl config.
    """
    from vgpu.config import load
    from vgpu.node.starting import configured_command

    loaded = load()
    for problem in loaded.retired() if loaded.path else ():
        say(problem.at(loaded.path or Path()))
    config = loaded.config.with_options(
        gpus=gpu or None,
        simulate=simulate,
        mode=mode.value if mode else None,
        period=options.renamed("--quantum", quantum, period),
        window=window,
        host_memory=host_memory,
        unmanaged=unmanaged.value if unmanaged else None,
        placement=placement.value if placement else None,
    )
    command = configured_command(config, take=take)
    if not detach:
        sys.stdout.flush()
        os.execve(command[0], command, interpreter.environment(os.environ))
    from vgpu.node import starting
    from vgpu.paths import NodePaths

    paths = NodePaths.from_environment()
    process, log = starting.start(command, paths), paths.node_log
    with progress.waiting("the node starts"):
        status = starting.wait_until_serving(process, log)
    if starting.all_failed(status):
        why = "; ".join(f"GPU {gpu.index}: {gpu.reason}" for gpu in status.gpus)
        hint = "once that is put right it serves them by itself; else: vgpuctl stop"
        raise VgpuError(ErrorCode.UNAVAILABLE, f"node {process.pid} runs, and serves no GPU: {why}", hint)
    print(f"node {process.pid} serves {gpus_of(status)}; log: {log}")
    gpus.say_unserved(status.gpus)
    if os.geteuid() == 0 and not reach.closed_directories(paths.runtime) and (closed := reach.closed_to_others()):
        say(f"other users cannot run this vgpuctl: {closed} is closed to them", reach.ELSEWHERE)


def stop() -> None:
    """Stop the node. Its vGPUs are remembered and come back with the next serve."""
    import signal

    from vgpu.node.link import ControlLink

    with ControlLink() as node:
        pid = node.welcome.pid
        watched = os.pidfd_open(pid)
        felt = _felt_by(node)
    try:
        signal.pidfd_send_signal(watched, signal.SIGTERM)
        with progress.waiting(f"node {pid} stops"):
            ended = _ended(watched, STOP_S)
        if not ended:
            raise VgpuError(ErrorCode.TIMEOUT, f"node {pid} is still there after {STOP_S:g} s", f"kill -9 {pid}")
    except PermissionError as error:
        raise VgpuError(ErrorCode.NOT_YOURS, f"node {pid} belongs to another user", "sudo vgpuctl stop") from error
    finally:
        os.close(watched)
    print(f"node {pid} stopped")
    for sentence in felt:
        print(sentence)
    if felt:
        print("  → vgpuctl serve --detach, as the user of that node; or end them")


def _felt_by(node: ControlLink) -> list[str]:
    """Sentences about the programs that a stop affects; none if the node cannot list them, which does not prevent the
    stop."""
    from vgpu.ctl.waiting import who_feels_it

    try:
        return who_feels_it(node.list(), node.processes().processes)
    except VgpuError:
        return []


def _ended(pidfd: int, within_s: float) -> bool:
    import select

    readable, _, _ = select.select([pidfd], [], [], within_s)
    return bool(readable)


def status(form: OutputOption = Output.TABLE) -> None:
    """Whether the node runs, and what it serves. Exits with 5 if it does not run."""
    from vgpu.ctl.present import output
    from vgpu.node.link import ControlLink

    with ControlLink() as node:
        found = node.status()
    if form is Output.JSON:
        output.print_json(found)
        return
    from vgpu.ctl.present import tables
    from vgpu.units import counted, format_duration

    up = format_duration(tables.whole_seconds_ns(found.uptime_ns / 1e9))
    output.print_facts(
        {
            "node": f"pid {found.pid}, st-vgpu {found.software}, up {up}",
            "serves": f"{gpus_of(found)}, {counted(found.vgpus, 'vGPU')}, {counted(found.processes, 'process')}",
            "sockets": found.runtime_dir,
            "state": found.state_dir,
        }
    )
    print()
    output.print_table(tables.GPUS, map(tables.gpu_row, found.gpus))
    gpus.say_unserved(found.gpus)


def gpus_of(status: NodeStatus) -> str:
    """Its GPUs in words: ``4 simulated GPUs``."""
    from vgpu.units import counted

    return counted(len(status.gpus), "simulated GPU" if status.simulated else "GPU")


def version(form: OutputOption = Output.TABLE) -> None:
    """Print the versions of vgpuctl, and of the node if one runs."""
    from vgpu.ctl.present import output
    from vgpu.node.link import ControlLink

    node_version = ""
    try:
        with ControlLink(timeout_s=3) as node:
            node_version = node.welcome.software
    except VgpuError:
        pass  # without a node, vgpuctl still prints its own version
    if form is Output.JSON:
        output.print_json({"vgpuctl": software_version(), "node": node_version or None})
    else:
        print(f"vgpuctl {software_version()}")
        print(f"node {node_version}" if node_version else "no node is running")


def register(app: typer.Typer) -> None:
    for name, command in {"serve": serve, "stop": stop, "status": status, "version": version}.items():
        app.command(name, cls=ServeCommand if name == "serve" else None)(command)
