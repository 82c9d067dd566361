"""vgpuctl simulate: what so many GPUs would hold, by each placement policy. It needs no node."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vgpu.ctl.options import Output, OutputOption
from vgpu.ctl.present import progress
from vgpu.enums import PlacementName
from vgpu.errors import ErrorCode, VgpuError

if TYPE_CHECKING:
    from vgpu.placement.simulate import Filled, Sizes

MOST_GPUS = 20_000


def simulate(
    gpus: Annotated[int, typer.Option(metavar="N", help="How many GPUs.", min=1, max=MOST_GPUS)] = 8,
    memory: Annotated[str, typer.Option(metavar="SIZE", help="Memory of each.")] = "80G",
    demand: Annotated[
        str,
        typer.Option(
            metavar="MIX|FILE", help="mixed, small, openb, or a file of lines such as 30,8G,5 (sm,mem,weight)."
        ),
    ] = "mixed",
    seed: Annotated[int, typer.Option(metavar="N", help="The same number draws the same requests.")] = 1,
    form: OutputOption = Output.TABLE,
) -> None:
    """Compare what placement policies leave unused."""
    from vgpu.placement.policies import POLICIES
    from vgpu.placement.simulate import drawn, fill, offered
    from vgpu.units import parse_bytes

    try:
        memory_bytes = parse_bytes(memory)
    except ValueError as error:
        raise VgpuError(ErrorCode.INVALID, f"--memory: {error}", "--memory 80G") from error
    if memory_bytes < 1 << 20:
        raise VgpuError(ErrorCode.INVALID, f"--memory: {memory} is less than 1 MiB", "--memory 80G")
    sizes = _sizes(demand, memory_bytes)
    requests = list(offered(drawn(sizes, seed), gpus, memory_bytes))
    with progress.waiting("the GPUs fill"):
        found = {str(name): fill(POLICIES[name], gpus, memory_bytes, requests) for name in PlacementName}
    _show(found, form)


def _sizes(demand: str, memory_bytes: int) -> Sizes:
    from vgpu.placement.simulate import MIXES, sizes_of

    if demand in MIXES:
        return sizes_of(demand, memory_bytes)
    try:
        text = Path(demand).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        known = ", ".join(MIXES)
        reason = error.strerror if isinstance(error, OSError) else "the file is no text"
        raise VgpuError(ErrorCode.INVALID, f"--demand {demand}: {reason}", f"a file, or one of {known}") from error
    found: dict[tuple[int, int], int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.startswith("#"):
            size, weight = _size(line, f"{demand}, line {number}", memory_bytes)
            found[size] = found.get(size, 0) + weight
    if not found:
        raise VgpuError(ErrorCode.INVALID, f"--demand {demand}: the file has no request", "a line such as 30,8G,5")
    return found


def _size(line: str, where: str, memory_bytes: int) -> tuple[tuple[int, int], int]:
    """What one line asks for, and its weight."""
    from vgpu.share import PPM
    from vgpu.spec import VgpuSpec

    hint = "sm,mem,weight: 30,8G,5"
    words = [word.strip() for word in line.split(",")]
    if not 2 <= len(words) <= 3 or not (words[2:] or ["1"])[0].isdecimal():
        raise VgpuError(ErrorCode.INVALID, f"{where}: {line.strip()!r} is no request", hint)
    spec = VgpuSpec.parse(sm_percent=words[0], memory_bytes=words[1])
    size = int(spec.compute_ratio * PPM), spec.memory_on(memory_bytes)
    if size[1] > memory_bytes:
        raise VgpuError(ErrorCode.INVALID, f"{where}: {words[1]} of memory is more than a GPU has", "--memory SIZE")
    return size, int((words[2:] or ["1"])[0])


def _show(found: Mapping[str, Filled], form: Output) -> None:
    from dataclasses import asdict

    from vgpu.ctl.present import output
    from vgpu.ctl.present.output import Column

    if form is Output.JSON:
        output.print_json({name: asdict(filled) for name, filled in found.items()})
        return
    columns = [
        Column("PLACEMENT"),
        *(Column(title, right=True) for title in ("VGPUS", "REFUSED", "TIME", "MEMORY", "STRANDED")),
    ]
    output.print_table(
        columns,
        (
            (
                name,
                str(filled.placed),
                str(filled.refused),
                f"{filled.time_ratio:.1%}",
                f"{filled.memory_ratio:.1%}",
                f"{filled.stranded_gpus:.2f} GPUs",
            )
            for name, filled in found.items()
        ),
    )


def register(app: typer.Typer) -> None:
    app.command("simulate")(simulate)
