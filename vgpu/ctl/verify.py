"""vgpuctl verify: whether what vGPUs promise holds on this very GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vgpu.ctl.exit_codes import Exit
from vgpu.ctl.options import Output, OutputOption
from vgpu.errors import ErrorCode, VgpuError

if TYPE_CHECKING:
    from vgpu.verify.outcome import Outcome
    from vgpu.verify.plan import Plan
    from vgpu.verify.run import Findings, Show


def verify(
    quick: Annotated[bool, typer.Option("--quick", help="One minute instead of three.")] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="CHECK", help="This check alone, or those that begin so; may be repeated."),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A report with plots, as one HTML file.", show_default=False)
    ] = None,
    gpu: Annotated[
        int | None, typer.Option(metavar="INDEX", help="This GPU; else the one with most free memory.", min=0)
    ] = None,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Use a simulated GPU even if there is a real one.")
    ] = False,
    form: OutputOption = Output.TABLE,
) -> int:
    """Check on this GPU that shares, SMs and memory limits hold.

    Also what a kill leaves behind, and what the gate costs.

    On a node of its own. Every check is made without limits, too, and has to fail there. Exits with 1 if a promise is
    not kept, or a control does not fail.
    """
    from vgpu import extras
    from vgpu.ctl.demo import why_simulated
    from vgpu.ctl.present import output
    from vgpu.files import replaced
    from vgpu.verify.judge import chosen
    from vgpu.verify.plan import Plan

    try:
        checks = chosen(only or (), quick=quick)
    except ValueError as error:
        raise VgpuError(ErrorCode.INVALID, f"--only: {error}", "vgpuctl verify --only share") from error
    if report is not None:
        extras.need("verify --report", "web", "jinja2")
        with replaced(report):  # before anything is measured for nothing
            pass
    plan = Plan(why_simulated(simulate), quick, checks, None if simulate else gpu)
    with _progress(plan) as show:
        findings = _examined(plan, show)
    outcome = _outcome(plan, findings)
    if report is not None:
        from vgpu.verify.report import written

        with replaced(report) as file:
            file.write(written(outcome).encode())
    if form is Output.JSON:
        output.print_json(outcome.as_json())
    else:
        _print(outcome)
        if report is not None:
            print(f"{report}: the same with plots")
    return Exit.OK if outcome.proven else Exit.FAILURE


def _examined(plan: Plan, show: Show) -> Findings:
    import trio

    from vgpu.harness.signals import cause_of, ended_by_signals
    from vgpu.verify.run import examine

    try:
        return trio.run(ended_by_signals, examine, plan, show)
    except BaseExceptionGroup as group:
        raise cause_of(group) from None


def _outcome(plan: Plan, findings: Findings) -> Outcome:
    from vgpu.verify.facts import facts
    from vgpu.verify.outcome import Outcome

    return Outcome.of(plan, findings, facts(findings.gpu, sys.argv[1:]))


@contextmanager
def _progress(plan: Plan) -> Iterator[Callable[[str, float], None]]:
    """A bar on stderr, if that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda what, part: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeRemainingColumn(),
    )
    prefix = f"{plan.simulated}: " if plan.simulated else ""
    with Progress(*columns, console=Console(stderr=True, highlight=False), transient=True) as progress:
        task = progress.add_task(f"{prefix}starting a node", total=1.0)
        yield lambda what, part: progress.update(task, completed=part, description=f"{prefix}{what}")


def _print(outcome: Outcome) -> None:
    from vgpu.ctl.present import output
    from vgpu.verify.outcome import COLUMNS

    gpu = outcome.findings.gpu
    print(f"{'simulated GPU: ' if gpu.simulated else ''}{gpu.name}, {outcome.findings.seconds:.0f} s")
    print()
    output.print_wrapped_table(COLUMNS, outcome.rows())
    print()
    for sentence in outcome.sentences():
        print(*output.wrapped(sentence, 0), sep="\n")


def register(app: typer.Typer) -> None:
    app.command("verify")(verify)
