"""vgpuctl trace: what happens on a GPU over the next seconds, as a file for Perfetto and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vgpu import extras
from vgpu.ctl import completion
from vgpu.ctl.exit_codes import Exit, say
from vgpu.ctl.present import progress
from vgpu.errors import ErrorCode, VgpuError
from vgpu.files import replaced
from vgpu.printable import printable_json

if TYPE_CHECKING:
    from vgpu.trace.recording import Recording


def trace(
    seconds: Annotated[float, typer.Option("--seconds", metavar="S", help="How long to record: 0.1 to 300.")] = 5.0,
    out: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="The trace, for ui.perfetto.dev.")] = Path(
        "trace.json"
    ),
    png: Annotated[
        Path | None, typer.Option("--png", metavar="FILE", help="A picture of it, too.", show_default=False)
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu", metavar="GPU", help="Index or UUID; else all.", show_default=False, autocompletion=completion.gpus
        ),
    ] = None,
) -> int:
    """Record leases, waits, hand-overs and GPU activity. Ctrl-C ends it early, and keeps what there is."""
    duration_ns = _duration_ns(seconds)
    if png is not None and png.absolute() == out.absolute():
        raise VgpuError(ErrorCode.INVALID, f"-o and --png are the same file: {out}", f"--png {out.with_suffix('.png')}")
    for file in filter(None, (out, png)):
        with replaced(file):  # before anything is recorded for nothing
            pass
    from vgpu.trace.collect import collect

    passed = [0.0]
    with progress.waiting("recording", progress.timed(seconds, lambda: passed[-1])):
        recordings, errors = collect(_chosen(gpu), duration_ns, passed.append)
    _write(recordings, out)
    ended = _explained(errors)
    if png is not None:
        extras.need("trace --png", "plot")  # not earlier: the recording is kept
        _draw(recordings, png)
    return ended


def _duration_ns(seconds: float) -> int:
    from vgpu.protocol.messages import TRACE_LEAST_NS, TRACE_MOST_NS

    if not TRACE_LEAST_NS <= seconds * 1e9 <= TRACE_MOST_NS:  # what is no number is not between them either
        least, most = TRACE_LEAST_NS / 1e9, TRACE_MOST_NS / 1e9
        raise VgpuError(
            ErrorCode.INVALID, f"--seconds: {seconds:g} is not between {least:g} and {most:g}", "--seconds 5"
        )
    return int(seconds * 1e9)


def _chosen(gpu: str | None) -> list[str]:
    """The GPUs to record, by index: the one that is meant, or all that are served."""
    from vgpu.node.link import ControlLink
    from vgpu.node.routing import all_serving, serving

    with ControlLink() as node:
        gpus = node.gpus()
    found = all_serving(gpus) if gpu is None else [serving(gpu, gpus)]
    return sorted((str(one.index) for one in found), key=int)


def _write(recordings: Sequence[Recording], out: Path) -> None:
    import json

    from vgpu.trace.chrome import chrome_trace
    from vgpu.units import counted

    with progress.waiting(f"writing {out}"), replaced(out) as file:
        file.write(
            printable_json(json.dumps(chrome_trace(recordings), separators=(",", ":"), ensure_ascii=False)).encode()
        )
    for recording in recordings:
        what = f"GPU {recording.gpu.index}: {recording.length_ns / 1e9:.3g} s, {counted(recording.events, 'event')}"
        held = [f"{recording.label(v)} held {100 * recording.held_ratio(v):.1f} %" for v in recording.vgpus]
        print("; ".join([what, *held]))
        if recording.lost:
            say(
                f"GPU {recording.gpu.index}: {counted(recording.lost, 'event')} lost, since there were too many at once"
            )
    print(f"{out}: open it at https://ui.perfetto.dev")


def _draw(recordings: Sequence[Recording], png: Path) -> None:
    from vgpu.trace.picture import draw

    for recording in recordings:
        drawn = png if len(recordings) == 1 else png.with_stem(f"{png.stem}-gpu{recording.gpu.index}")
        with progress.waiting(f"drawing {drawn}"), replaced(drawn) as file:
            draw(recording, file)
        print(f"{drawn}: the same as a picture")


def _explained(errors: Mapping[str, VgpuError]) -> Exit:
    """Say why parts of it ended early, or are missing."""
    for gpu, error in errors.items():
        say(f"GPU {gpu}: its recording ended early: {error.message}", error.hint)
    return Exit.FAILURE if errors else Exit.OK


def register(app: typer.Typer) -> None:
    app.command("trace")(trace)
