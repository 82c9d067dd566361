"""vgpuctl why: why a vGPU is as fast as it is, and what to do."""

from __future__ import annotations

import typer

from vgpu.ctl.options import Output, OutputOption, VgpuArgument


def why(vgpu: VgpuArgument, form: OutputOption = Output.TABLE) -> None:
    """Say why a vGPU is as fast as it is, and what to do."""
    from vgpu.ctl.present import output
    from vgpu.node.link import ControlLink

    with ControlLink() as node:
        found = node.why(vgpu)
    if form is Output.JSON:
        output.print_json(found)
        return
    for finding in found.findings:
        print("\n".join(output.wrapped(finding.text, 0)))
        if finding.command:
            print(f"    {finding.command}")


def register(app: typer.Typer) -> None:
    app.command("why")(why)
