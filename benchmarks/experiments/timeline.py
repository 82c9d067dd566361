"""A recording of a pair at work, for the picture in the documentation: what ``vgpuctl trace --png`` shows of this GPU.

    python -m benchmarks.experiments.timeline FOLDER [--work resnet50-train] [--split 30/70] [--mode temporal]
        [--seconds 5]
    python -m benchmarks.experiments.timeline FOLDER --draw         only the picture, of what is in FOLDER: needs no GPU

Starts a node and the pair, lets them work for a window without a recording and for one with, and writes to FOLDER:
``trace.json`` for ui.perfetto.dev; ``timeline.png``, where matplotlib is installed; ``recording.json``, from which it
can be drawn anywhere; ``summary.json``: what each did in both windows, its slowest steps and when they ended (on the
clock of ``begin_s``), and the CPU time that the GPU Server took. ``--simulate``: stand-ins on the simulated GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.node import Node
from benchmarks.suite.__main__ import percents
from benchmarks.suite.stage import Ground, Sharer, Stage
from benchmarks.suite.workloads.catalogue import WORKS
from vgpu.node.link import ControlLink
from vgpu.protocol.trace import TraceChunk
from vgpu.trace.chrome import chrome_trace
from vgpu.trace.collect import collect
from vgpu.trace.recording import Recording

MARGIN_S: Final = 0.6
"""The pair works so much longer than the recording, before it and after."""


def crowded(text: str) -> tuple[float, ...]:
    """In spatial mode two of 60 % take rounds."""
    return percents(text, most=500.0)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.experiments.timeline",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--work", choices=WORKS, default="resnet50-train", metavar="NAME", help=", ".join(WORKS))
    parser.add_argument("--split", type=crowded, default=(30.0, 70.0), metavar="A/B", help="shares, in percent")
    parser.add_argument("--mode", choices=("temporal", "spatial"), default="temporal")
    parser.add_argument("--seconds", type=float, default=5.0, help="length of the recording")
    Ground.add_options(parser)
    parser.add_argument("--draw", action="store_true", help="only draw what is in FOLDER")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    args.folder.mkdir(parents=True, exist_ok=True)
    if not args.draw:
        with Ground(args.simulate, args.gpu) as ground, Stage(ground) as stage:
            recording, summary = record(ground, stage, args.mode, args.work, args.split, args.seconds)
        keep(args.folder, recording, summary)
    elif not (args.folder / "recording.json").exists():
        print(f"there is no recording.json in {args.folder}", file=sys.stderr)
        return 1
    return draw(args.folder)


def record(
    ground: Ground, stage: Stage, mode: str, work: str, split: Sequence[float], seconds: float
) -> tuple[Recording, dict[str, Any]]:
    options = ["--overcommit"] if sum(split) > 100 else []
    sharers = [stage.vgpu(mode, work, percent, *options) for percent in split]
    stage.ready()
    for sharer, percent in zip(sharers, split, strict=True):
        short = f"{work}-{percent:g}-{sharer.name.rpartition('-')[2]}"  # it stands beside a row of the picture
        ground.node(mode).run("set", sharer.name, "--name", short)
        sharer.name = short
    node = ground.node(mode)
    _, without = watched(ground, node, stage, sharers, seconds, recorded=False)
    recordings, recorded = watched(ground, node, stage, sharers, seconds, recorded=True)
    summary = {"mode": mode, "work": work, "percents": list(split), "without": without, "recorded": recorded}
    return recordings[0], summary


def watched(
    ground: Ground, node: Node, stage: Stage, sharers: list[Sharer], seconds: float, *, recorded: bool
) -> tuple[list[Recording], dict[str, Any]]:
    """A window of all sharers, of which ``seconds`` in the middle are ``recorded``, or only watched."""
    with ControlLink(node.control_socket) as link:
        server = psutil.Process(next(gpu.server_pid for gpu in link.gpus() if gpu.index == ground.gpu))
    recordings: list[Recording] = []
    took_s: list[float] = []

    def look() -> None:
        time.sleep(ground.pace.settle_s + ground.pace.lead_s + MARGIN_S)
        before = server.cpu_times()
        if recorded:
            recordings.extend(
                collect([str(ground.gpu)], int(seconds * 1e9), lambda passed_s: None, node.control_socket)[0]
            )
        else:
            time.sleep(seconds)
        after = server.cpu_times()
        took_s.append(after.user + after.system - before.user - before.system)

    looking = threading.Thread(target=look)
    looking.start()
    outcome = stage.window(sharers, seconds + 2 * MARGIN_S)
    looking.join()
    if not took_s:
        raise RuntimeError("nothing was recorded: see above")
    told = {name: [result[name] for result in outcome.results] for name in ("units_per_second", "slowest_steps")}
    return recordings, told | {"server_cpu_ratio": took_s[0] / seconds}


def keep(folder: Path, recording: Recording, summary: dict[str, Any]) -> None:
    (folder / "trace.json").write_text(json.dumps(chrome_trace([recording]), separators=(",", ":")))
    (folder / "recording.json").write_text(recording.chunk().model_dump_json())
    held = {recording.label(vgpu_id): recording.held_ratio(vgpu_id) for vgpu_id in recording.vgpus}
    summary |= {
        "begin_s": recording.begin_ns / 1e9,
        "gpu": recording.gpu.name,
        "held_ratio": held,
        "events": recording.events,
        "lost": recording.lost,
    }
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(summary, indent=1))


def draw(folder: Path) -> int:
    if find_spec("matplotlib") is None:
        print(
            "no picture: matplotlib is not installed. Where it is: "
            f"python -m benchmarks.experiments.timeline {folder} --draw",
            file=sys.stderr,
        )
        return 0
    from vgpu.trace.picture import draw as draw_picture

    chunk = TraceChunk.model_validate_json((folder / "recording.json").read_text())
    with (folder / "timeline.png").open("wb") as file:
        draw_picture(Recording.beginning_with(chunk), file)
    print(folder / "timeline.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
