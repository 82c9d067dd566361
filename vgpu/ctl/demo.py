"""vgpuctl demo: two vGPUs, 30 and 70 %, shown and measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from vgpu.ctl.exit_codes import Exit
from vgpu.ctl.options import Mode, Output, OutputOption

if TYPE_CHECKING:
    from vgpu.demo.report import Report
    from vgpu.demo.run import Plan, Scene


def demo(
    duration: Annotated[str, typer.Option(metavar="TIME", help="How long both programs are measured.")] = "15s",
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Use a simulated GPU even if there is a real one.")
    ] = False,
    mode: Annotated[Mode, typer.Option(help="How the two share the GPU.")] = Mode.TEMPORAL,
    no_limits: Annotated[
        bool, typer.Option("--no-limits", help="The same programs without vGPUs, to compare.")
    ] = False,
    form: OutputOption = Output.TABLE,
) -> int:
    """Two vGPUs of 30 and 70 %, measured by the work they finish. Exits with 1 if one misses by over 3 points."""
    from vgpu.ctl.present import output
    from vgpu.demo.run import Plan
    from vgpu.demo.view import shown
    from vgpu.errors import ErrorCode, VgpuError
    from vgpu.units import parse_duration_ns

    try:
        duration_ns = parse_duration_ns(duration)
    except ValueError as error:
        raise VgpuError(ErrorCode.INVALID, f"--duration: {error}") from error
    if duration_ns < 2 * 10**9:
        raise VgpuError(ErrorCode.INVALID, "--duration: less than 2s says nothing about a share", "--duration 10s")
    plan = Plan(duration_ns, why_simulated(simulate), mode, gated=not no_limits)
    with shown(quiet=form is Output.JSON) as show:
        report = _demonstrate(plan, show)
    if form is Output.JSON:
        output.print_json(report.as_json())
    else:
        _print(report)
    return Exit.FAILURE if report.missed else Exit.OK


def why_simulated(asked: bool) -> str:
    """In words; "" if the real GPU is to be used."""
    from client_hook.doctor import probe_driver

    if asked:
        return "A simulated GPU, as asked for"
    driver = probe_driver()
    usable = not driver.cuda_error and driver.cuda_devices > 0 and not driver.nvml_error
    return "" if usable else "No GPU here, so a simulated one"


def _demonstrate(plan: Plan, show: Callable[[Scene], None]) -> Report:
    import trio

    from vgpu.demo.run import demonstrate
    from vgpu.harness.signals import cause_of, ended_by_signals

    try:
        return trio.run(ended_by_signals, demonstrate, plan, show)
    except BaseExceptionGroup as group:
        raise cause_of(group) from None


def _print(report: Report) -> None:
    from vgpu.ctl.present import output
    from vgpu.demo.report import COLUMNS

    kind = "simulated GPU: " if report.simulated else ""
    print(f"{kind}{report.gpu}, {'without limits' if report.mode == 'ungated' else report.mode + ' mode'}")
    print()
    output.print_table(COLUMNS, report.rows())
    print()
    for sentence in report.verdict():
        print(sentence)


def register(app: typer.Typer) -> None:
    app.command("demo")(demo)
