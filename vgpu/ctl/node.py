"""vgpuctl serve, stop, status, version: the node itself."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from client_hook import interpreter
from vgpu.ctl import gpus, options, progress
from vgpu.ctl.exit_codes import Exit, say
from vgpu.ctl.options import Mode, Output, OutputOption, Unmanaged
from vgpu.errors import ErrorCode, VgpuError

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterable, Mapping

    from vgpu.config import Config
    from vgpu.node.link import ControlLink
    from vgpu.protocol.messages import NodeStatus

START_UP_S: Final = 30.0
"""The creation of a context on a cold driver takes seconds. A node that has not answered by then never will."""
SECOND_TRY_S: Final = 3.0
"""A GPU Server that failed may serve when it is started again."""
STOP_S: Final = 15.0


def software_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("st-vgpu")
    except PackageNotFoundError:
        return "unknown"


def node_command(
    simulate: int,
    mode: str,
    gpus: Iterable[int] = (),
    host_memory_bytes: int | None = None,
    *,
    period_ns: int | None = None,
    window_ns: int | None = None,
    others: Mapping[int, Mapping[str, str | int | None]] | None = None,
    limits: str = "{}",
    take: bool = False,
    unmanaged: str = "report",
) -> list[str]:
    """The argv of a supervisor for ``simulate`` simulated GPUs (0: the real ones); ``gpus``: only these indices;
    ``host_memory_bytes``: for what is swapped out; ``others``: fields of ``Sharing`` for GPUs that are shared in
    another way; ``limits``: of one user, as ``Limits.as_option`` writes them."""
    command = interpreter.command("vgpu.node", "--mode", mode)
    command += [] if unmanaged == "report" else ["--unmanaged", unmanaged]
    values = {"--host-memory": host_memory_bytes, "--period": period_ns, "--window": window_ns}
    for option, value in ({"--simulate": simulate or None} | values).items():
        command += [] if value is None else [option, str(value)]
    command += ["--take"] if take else []
    for index in gpus:
        command += ["--gpu", str(index)]
    command += ["--limits", limits] if limits != "{}" else []
    return command + (["--others", json.dumps(others)] if others else [])


def configured_command(config: Config, *, take: bool = False) -> list[str]:
    """The argv of a supervisor as ``config`` has it."""
    serve = config.serve
    others = {
        index: {
            "mode": gpu.mode or serve.mode,
            "period_ns": gpu.period_ns or serve.period_ns,
            "window_ns": gpu.window_ns or serve.window_ns,
        }
        for index, gpu in config.gpu.items()
    }
    return node_command(
        serve.simulate,
        serve.mode,
        serve.gpus or (),
        serve.host_memory_bytes,
        period_ns=serve.period_ns,
        window_ns=serve.window_ns,
        others=others,
        limits=config.limits.as_option(),
        take=take,
        unmanaged=serve.unmanaged,
    )


def serve(
    detach: Annotated[bool, typer.Option("-d", "--detach", help="Return once the node answers.")] = False,
    simulate: Annotated[int | None, typer.Option(metavar="N", help="Serve N simulated GPUs.", min=0, max=16)] = None,
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
) -> None:
    """Run the node: one GPU Server for each GPU. Ends with Ctrl-C, or vgpuctl stop.

    What the command line leaves open stands in the configuration file, if there is one: vgpuctl config.
    """
    from vgpu.config import load

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
    )
    command = configured_command(config, take=take)
    if not detach:
        sys.stdout.flush()
        os.execve(command[0], command, interpreter.environment(os.environ))
    import subprocess

    from vgpu.paths import NodePaths, unusable

    log = NodePaths.from_environment().node_log
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        file = log.open("ab")
    except OSError as error:
        raise unusable(log, error, "VGPU_STATE_DIR") from error
    with file as output:
        process = subprocess.Popen(
            command,
            env=interpreter.environment(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    with progress.waiting("the node starts"):
        status = wait_until_serving(process, log)
    if _all_failed(status):
        why = "; ".join(f"GPU {gpu.index}: {gpu.reason}" for gpu in status.gpus)
        hint = "once that is put right it serves them by itself; else: vgpuctl stop"
        raise VgpuError(ErrorCode.UNAVAILABLE, f"node {process.pid} runs, and serves no GPU: {why}", hint)
    print(f"node {process.pid} serves {gpus_of(status)}; log: {log}")
    gpus.say_unserved(status.gpus)


def wait_until_serving(process: subprocess.Popen[bytes], log: Path, control_socket: Path | None = None) -> NodeStatus:
    """The status of the node that ``process`` has become, once it serves a GPU or has failed to for ``SECOND_TRY_S``.
    ``VgpuError`` if it ends or is silent for ``START_UP_S``."""
    import time

    from vgpu.node.link import ControlLink

    deadline, answered = time.monotonic() + START_UP_S, 0.0
    while True:
        if process.poll() is not None:
            raise did_not_start(log, process.returncode)
        try:
            with ControlLink(control_socket) as node:
                if node.welcome.pid == process.pid:
                    status = node.status()
                    answered = answered or time.monotonic()
                    if not _all_failed(status) or time.monotonic() > answered + SECOND_TRY_S:
                        return status
        except VgpuError as error:
            if error.code not in {ErrorCode.UNREACHABLE, ErrorCode.UNAVAILABLE}:
                raise
        if time.monotonic() > deadline:
            process.terminate()
            raise VgpuError(ErrorCode.TIMEOUT, f"the node did not answer within {START_UP_S:g} s", f"less {log}")
        time.sleep(0.2 if answered else 0.02)


def _all_failed(status: NodeStatus) -> bool:
    return all(gpu.state == "failed" for gpu in status.gpus)


def did_not_start(log: Path, exit_code: int = Exit.FAILURE) -> VgpuError:
    """The error of a node that ended with ``exit_code`` before it answered: its last line in ``log``, and its hint if
    it had one. ``Exit.REFUSED``: another node runs, and ``vgpuctl`` exits as it does without ``--detach``."""
    # Python draws a frame of these around a group of exceptions.
    lines = [line.strip(" +-|") for line in log.read_text(errors="replace").splitlines()]
    said = [line for line in lines if line] or ["it said nothing"]
    hint = said.pop().removeprefix("→ ") if said[-1].startswith("→ ") else f"vgpuctl doctor, or less {log}"
    reason = said[-1]
    code = ErrorCode.EXISTS if exit_code == Exit.REFUSED else ErrorCode.UNAVAILABLE
    return VgpuError(code, f"the node did not start: {reason.removeprefix('vgpuctl: ')}", hint)


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
    from vgpu.ctl import output
    from vgpu.node.link import ControlLink

    with ControlLink() as node:
        found = node.status()
    if form is Output.JSON:
        output.print_json(found)
        return
    from vgpu.ctl import tables
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
    from vgpu.ctl import output
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
        app.command(name)(command)
