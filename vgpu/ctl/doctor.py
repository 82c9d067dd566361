"""vgpuctl doctor: what is missing on this machine, and what to type."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import typer

from vgpu.ctl.exits import Exit
from vgpu.ctl.options import Output, OutputOption

if TYPE_CHECKING:
    from client_hook.doctor import Finding

_STYLES: Final = {"ok": "green", "note": "yellow", "missing": "bold red"}


def doctor(form: OutputOption = Output.TABLE) -> int:
    """What is missing on this machine, and what to type. Exits with 1 if something is."""
    from client_hook import doctor as machine
    from vgpu.ctl import output
    from vgpu.ctl.hook import user_installation
    from vgpu.paths import NodePaths

    paths = NodePaths.from_environment()
    facts = machine.probe(paths.runtime, paths.state, user_installation())
    findings = [*machine.diagnose(facts), *_node_findings()]
    missing = [finding for finding in findings if finding.verdict is machine.Verdict.MISSING]
    if form is Output.JSON:
        output.print_json({"ok": not missing, "findings": [_as_dict(finding) for finding in findings]})
    else:
        _print(findings)
        print()
        print(f"{len(missing)} to put right." if missing else "Nothing is missing.")
    return Exit.FAILURE if missing else Exit.OK


def _node_findings() -> Iterator[Finding]:
    from client_hook.doctor import Finding, Verdict
    from vgpu.ctl.node import gpus_of, software_version
    from vgpu.errors import VgpuError
    from vgpu.node.link import ControlLink
    from vgpu.units import counted

    try:
        with ControlLink(timeout_s=3) as node:
            status = node.status()
    except VgpuError as error:
        yield Finding("node", Verdict.NOTE, error.message, error.hint)
        return
    yield Finding("node", Verdict.OK, f"running, pid {status.pid}, {gpus_of(status)}, {counted(status.vgpus, 'vGPU')}")
    if status.software != software_version():
        found = f"the node runs {status.software}, vgpuctl is {software_version()}"
        yield Finding("version", Verdict.NOTE, found, "vgpuctl stop && vgpuctl serve --detach")
    for gpu in status.gpus:
        if gpu.state != "serving":
            yield Finding(
                f"GPU {gpu.index}", Verdict.MISSING, f"{gpu.state}: {gpu.reason}", f"see {status.state_dir}/logs"
            )


def _as_dict(finding: Finding) -> dict[str, str]:
    return {"check": finding.check, "verdict": finding.verdict, "found": finding.found, "fix": finding.fix}


def _print(findings: list[Finding]) -> None:
    from vgpu.ctl.output import GAP, Cell, Column, Row, print_table, wrapped

    indent = len("missing") + max(len(finding.check) for finding in findings) + 2 * len(GAP)
    rows: list[Row] = []
    for finding in findings:
        first, *more = wrapped(finding.found, indent)
        rows.append((Cell(finding.verdict, _STYLES[finding.verdict]), finding.check, first))
        rows += [("", "", line) for line in more]
        rows += [("", "", Cell(line, "dim")) for line in wrapped(f"→ {finding.fix}" if finding.fix else "", indent)]
    print_table((Column("STATE"), Column("CHECK"), Column("FOUND")), rows)


def register(app: typer.Typer) -> None:
    app.command("doctor")(doctor)
