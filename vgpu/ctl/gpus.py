"""vgpuctl gpu ls and gpu set: the GPUs and how they are shared."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from vgpu.ctl import completion, options
from vgpu.ctl.exit_codes import say
from vgpu.ctl.options import Mode, Output, OutputOption
from vgpu.ctl.placement import moving
from vgpu.ctl.present import progress

if TYPE_CHECKING:
    from vgpu.protocol.messages import GpuStatus

gpu_app = typer.Typer(
    invoke_without_command=True,
    callback=options.tells_what_it_holds,
    help="The GPUs of this node, and how they are shared.",
)


@gpu_app.command("ls")
def ls(form: OutputOption = Output.TABLE) -> None:
    """List the GPUs of this node, their modes and how full they are."""
    from vgpu.ctl.present import output, tables
    from vgpu.node.link import ControlLink
    from vgpu.units import counted, format_bytes

    with ControlLink() as node:
        gpus = node.gpus()
    if form is Output.JSON:
        output.print_json(gpus)
        return
    output.print_table(tables.GPUS, map(tables.gpu_row, gpus))
    say_unserved(gpus)
    if sys.stdout.isatty():  # a program that reads the table expects nothing but its rows
        for gpu in gpus:
            why = f"{gpu.mode} mode: {gpu.mode_reason}" if gpu.mode_reason else ""
            if why or gpu.mps_reason:
                print(f"GPU {gpu.index}: {'; '.join(filter(None, (why, gpu.mps_reason)))}")
            if gpu.outside:
                used = format_bytes(sum(process.memory_bytes for process in gpu.outside))
                several = counted(len(gpu.outside), "process")
                print(f"GPU {gpu.index}: {several} in no vGPU: {used}, limited by nothing here: vgpuctl ps --all")
            if gpu.host_memory_bytes:
                away, kept = format_bytes(gpu.host_memory_used_bytes), format_bytes(gpu.host_memory_bytes)
                limit = format_bytes(gpu.host_memory_limit_bytes)
                print(f"GPU {gpu.index}: {away} swapped out; {kept} of the host's memory kept for it, {limit} at most")


def say_unserved(gpus: Iterable[GpuStatus]) -> None:
    """Print on stderr why GPUs are not served at this moment."""
    for gpu in gpus:
        if gpu.state != "serving":
            say(f"GPU {gpu.index} is not served: {gpu.reason}", f"vgpuctl logs gpu {gpu.index}")


MODES = """
The two modes of a GPU:

\b
             temporal                          spatial
--sm 30      30 % of the time, all SMs         30 % of the SMs, all the time
together     heavy ones in turns; light ones   side by side, by NVIDIA's MPS
             beside them (--lease auto)
a limit      holds within 1 point              in steps of 2 SMs, 8 at least
a fault      ends its own program              ends every program of the GPU
suspend,     yes                               no
migrate
best for     training, services, notebooks,    many services beside training;
             tenants kept apart from others    what needs few SMs

A vGPU is light if its programs need the GPU for half of their time or less, and wait for their work often.
Three streams of requests beside training on an H100: p50 11 ms, 11 without vGPUs; training has 67 %, 68 without vGPUs.
In spatial mode: 7 ms, 84 %.
`vgpuctl inspect` names the other mode where it measured that the vGPUs hold the GPU, but do not use it.
"""


@gpu_app.command("set", epilog=MODES)
def set_(
    gpu: Annotated[str, typer.Argument(metavar="GPU", help="Index or UUID.", autocompletion=completion.gpus)],
    mode: Annotated[
        Mode | None, typer.Option(help="How vGPUs share it; only while no program is attached.", show_default=False)
    ] = None,
    period: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="One round of turns (in turns of the whole GPU: the least), as in 40ms: long for throughput.",
        ),
    ] = None,
    window: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Most GPU time that a program may have in flight, as in 12ms: short to wait"
            " less for others, long for hosts that pause.",
        ),
    ] = None,
    quantum: options.Quantum = None,
    form: OutputOption = Output.TABLE,
) -> None:
    """Change how a GPU is shared."""
    from vgpu.ctl.present import output, tables
    from vgpu.errors import ErrorCode, VgpuError
    from vgpu.node.link import ControlLink
    from vgpu.spec import checked_period, checked_window
    from vgpu.units import parse_duration_ns

    period = options.renamed("--quantum", quantum, period)
    if mode is None and period is None and window is None:
        raise VgpuError(ErrorCode.INVALID, "nothing to change", "vgpuctl gpu set GPU --mode temporal --period 40ms")
    try:
        period_ns = None if period is None else checked_period(parse_duration_ns(period))
    except ValueError as error:
        raise VgpuError(ErrorCode.INVALID, f"--period: {error}") from error
    try:
        window_ns = None if window is None else checked_window(parse_duration_ns(window))
    except ValueError as error:
        raise VgpuError(ErrorCode.INVALID, f"--window: {error}") from error
    with ControlLink() as node, progress.waiting(f"GPU {gpu} changes"):
        changed = node.set_gpu(gpu, mode=mode.value if mode else None, period_ns=period_ns, window_ns=window_ns)
    if form is Output.JSON:
        output.print_json(changed)
    else:
        output.print_table(tables.GPUS, [tables.gpu_row(changed)])


moving.add_to(gpu_app)


def register(app: typer.Typer) -> None:
    app.add_typer(gpu_app, name="gpu")
