"""The benchmarks of a real GPU: one command that measures, prints tables with their bars, and keeps everything.

    python -m benchmarks.suite [--part NAME ...] [--works NAME ...] [--splits 30/70 ...] [--ways NAME ...]
                             [--seconds S] [--repeat N] [--out FOLDER] [--estimate]
    python -m benchmarks.suite --merge FOLDER [FOLDER ...] [--since WHEN] [--card H200] [--out FOLDER]  median (worst)
    python -m benchmarks.suite --merge FOLDER [FOLDER ...] [--since WHEN] [--card H200] --missing 5     what lacks runs
    python -m benchmarks.suite --simulate --seconds 0.5                       a rehearsal on the simulated GPU

First it says how long it will take. Each window is written to FOLDER/measurements.jsonl before the next one begins, and
FOLDER/tables.md and tables.json are made anew, so a run that is killed has lost nothing; a second run into the same
folder adds to it. Exit code 1: a part of it failed, 0 otherwise, whether or not bars were met.

``--missing 5`` makes no tables: of each row (of those that --part, --works, --splits and --ways choose) it says how
many runs of it there are, and then with which commands those that lack some would get them, and how long that takes on
one GPU by the parts' own estimates. Rehearsals do not count. In tables they are left out beside runs on a GPU.
``--since``: runs that began before do not count, as in 2026-11-24T09; ``--card``: nor those on other GPUs.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from benchmarks.suite.parts import PARTS
from benchmarks.suite.parts.part import WAYS, Bench, Options, Part
from benchmarks.suite.report import missing, tables
from benchmarks.suite.report.records import REHEARSAL, Records, Run, Writer, counting, read
from benchmarks.suite.stage import Ground
from benchmarks.suite.workloads.catalogue import WORKS
from vgpu.ctl.present import progress


def percents(text: str, most: float = 100.0) -> tuple[float, ...]:
    """``30/70``; argparse's error where they add up to more than ``most``."""
    found = tuple(float(part) for part in text.split("/"))
    if not all(1 <= percent <= 99 for percent in found) or sum(found) > most:
        raise argparse.ArgumentTypeError(f"{text}: write percents from 1 to 99, as in 30 or 30/70 or 20/30/50")
    return found


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Of the command line, if no ``words`` are given."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.suite", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS), metavar="NAME", help=", ".join(PARTS))
    parser.add_argument("--works", nargs="+", choices=WORKS, default=[], metavar="NAME", help=", ".join(WORKS))
    parser.add_argument("--splits", nargs="+", type=percents, default=[], metavar="A/B", help="shares, in percent")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[], metavar="NAME", help=", ".join(WAYS))
    parser.add_argument("--seconds", type=float, help="length of a window (each part has its own)")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("bench-gpu"), metavar="FOLDER", help="default: bench-gpu")
    parser.add_argument("--estimate", action="store_true", help="say how long it would take, and end")
    Ground.add_options(parser)
    parser.add_argument("--merge", nargs="+", type=Path, metavar="FOLDER", help="only tables, of these runs together")
    parser.add_argument("--since", default="", metavar="WHEN", help="with --merge: only runs that began then or later")
    parser.add_argument("--card", default="", metavar="NAME", help="with --merge: only runs on GPUs of such a name")
    parser.add_argument(
        "--missing", type=int, metavar="N", help="with --merge: which rows have been run less than N times"
    )
    options = parser.parse_args(words)
    if not options.merge and (options.since or options.card or options.missing is not None):
        parser.error("--since, --card and --missing are about runs that there are: name them with --merge")
    return options


def main() -> int:
    args = arguments()
    parts = [PARTS[name] for name in dict.fromkeys(args.part)]
    chosen = {part.name: options_of(part, args) for part in parts}
    if args.merge:
        records = counting(read(args.merge), args.since, args.card)
        if args.missing is not None:
            tell_missing(parts, chosen, records, args.missing, args.seconds is not None)
            return 0
        made = tables_of(records)
        save(args.out, made, records)
        show(made)
        judge(made, records)
        return 0
    estimates = {part.name: part.estimate(chosen[part.name]) for part in parts}
    for name, seconds in estimates.items():
        print(f"{name:12} about {duration(seconds)}")
    print(f"{'in all':12} about {duration(sum(estimates.values()))}", flush=True)
    if args.estimate:
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing of ours outlives it
    run = Run(
        datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),  # others may begin in this second
        machine(args.simulate, args.gpu),
        shlex.join(["python", "-m", "benchmarks.suite", *sys.argv[1:]]),
    )
    print(", ".join(run.machine.values()), flush=True)
    writer = Writer(args.out, run)
    before = len(read([args.out]).failures)
    began = time.monotonic()

    def tell(line: str) -> None:
        print(f"[{duration(time.monotonic() - began)} of {duration(sum(estimates.values()))}] {line}", flush=True)

    def keep() -> Records:
        records = read([args.out])
        save(args.out, tables_of(records), records)
        return records

    measured = [""]
    look = progress_of(sum(estimates.values()), began, measured)
    with Ground(args.simulate, args.gpu) as ground, progress.waiting("measuring", look):
        for part in parts:
            measured.append(part.name)
            bench = Bench(part.name, run.run, chosen[part.name], ground, writer, tell, lambda _: keep())
            part.measure(bench)
            own = [made for made in tables_of(keep()) if made.name == part.name]
            if not own:
                tell(f"{part.name}: nothing of it was chosen, or nothing could be measured")
            show(own)
    records = keep()
    judge(tables_of(records), records)
    return int(len(records.failures) > before)


def progress_of(estimate_s: float, began_s: float, measured: Sequence[str]) -> progress.Look:
    """By the estimate; the last of ``measured`` is what is under way."""

    def look() -> progress.Part:
        passed_s = time.monotonic() - began_s
        ratio = passed_s / estimate_s if 0 < passed_s < estimate_s else None
        return progress.Part(ratio, f"{measured[-1]}, {duration(passed_s)} of about {duration(estimate_s)}")

    return look


def options_of(part: Part, args: argparse.Namespace) -> Options:
    seconds = args.seconds if args.seconds is not None else part.seconds
    return Options(seconds, args.repeat, tuple(args.works), tuple(args.splits), tuple(args.ways))


def tables_of(records: Records) -> list[tables.Table]:
    """A table for each part that measured something."""
    found = []
    for part in PARTS.values():
        if any(m.part == part.name for m in records.measurements):
            rows = part.found(records.measurements)
            found.append(tables.merged(part.name, part.title, part.columns, rows))
    return found


def tell_missing(
    parts: Sequence[Part], chosen: Mapping[str, Options], records: Records, wanted: int, seconds_chosen: bool
) -> None:
    """How often each row has been measured, and what is to be done until all have been ``wanted`` times."""
    on_gpus = {run.run: run for run in records.runs if not run.rehearsed}
    measured = [m for m in records.measurements if m.run in on_gpus]
    grid = [["part", "work", "row", "way", "runs", "lacks", "shortest windows, s", "last", "of", "on"]]
    due: list[missing.Errand] = []
    short = judged = 0
    for part in parts:
        told = missing.counts(part, chosen[part.name], measured, wanted)
        judged += sum(count.lacks is not None for count in told)
        short += sum(bool(count.lacks) for count in told)
        for count in told:
            lacks = "no bar" if count.lacks is None else str(count.lacks)
            window = f"{count.shortest_s:g}" if count.shortest_s else "–"
            last = on_gpus[max(count.runs)[0]] if count.runs else None
            of = [last.run[:16], last.machine.get("source", "")] if last else ["–", ""]
            cards = Counter(on_gpus[run].card for run, _ in sorted(count.runs))
            on = ", ".join(f"{number} {card}" for card, number in cards.items())
            grid.append([part.name, *count.labels, str(len(count.runs)), lacks, window, *of, on])
        due += missing.errands(part, chosen[part.name], told, seconds_chosen)
    print("\n".join(tables.aligned(grid)))
    print(f"\n{short} of {judged} rows that are judged have been measured less than {wanted} times")
    for errand in due:
        print(f"  about {duration(errand.seconds):>6}, {duration(errand.once_s):>5} for one  {errand.command}")
    print(f"in all about {duration(sum(errand.seconds for errand in due))} on one GPU", flush=True)


def save(folder: Path, made: Sequence[tables.Table], records: Records) -> None:
    """tables.md and tables.json in ``folder``; one of before stays whole until the new one is."""
    folder.mkdir(parents=True, exist_ok=True)
    runs = [f"{r.run}: {', '.join(r.machine.values())}; `{r.command}`" for r in records.runs]
    judged = [f"* {sentence}" for _, sentence in tables.verdicts(made)]
    failed = [f"* {failure['part']}, {failure['block']} failed" for failure in records.failures]
    paragraphs = ["\n".join(f"* {line}" for line in runs), *map(tables.markdown, made), "## Bars", "\n".join(judged)]
    for name, text in (
        ("tables.md", "\n\n".join([*paragraphs, *failed]) + "\n"),
        ("tables.json", json.dumps(tables.as_json(made, records), indent=1)),
    ):
        fresh = folder / (name + ".new")
        fresh.write_text(text)
        fresh.replace(folder / name)


def show(made: Iterable[tables.Table]) -> None:
    for table in made:
        print(f"\n{tables.text(table)}", flush=True)


def judge(made: Iterable[tables.Table], records: Records) -> None:
    """What was met, missed and failed."""
    judged = tables.verdicts(made)
    print(f"\n{sum(met for met, _ in judged)} of {len(judged)} bars met, by the worst of the repeats")
    for met, sentence in judged:
        if not met:
            print(f"  {sentence}")
    for failure in records.failures:
        print(f"  {failure['part']}: {failure['block']} failed")
    sys.stdout.flush()


def machine(simulated: bool, gpu: int) -> dict[str, str]:
    """What the figures depend on, as far as it can be asked for."""
    query = ["nvidia-smi", f"--id={gpu}", "--query-gpu=name,driver_version,power.limit", "--format=csv,noheader"]
    source = ["git", "rev-parse", "--short", "HEAD"]
    return {
        "gpu": REHEARSAL if simulated else _said(query) or "no GPU",
        "host": f"{os.cpu_count()} cores, Python {platform.python_version()}",
        "torch": next((f"torch {d.version}" for d in metadata.distributions(name="torch")), "no torch"),
        "source": _said(source) or "no git",
    }


def _said(command: list[str]) -> str:
    """The first line of what it prints; "" if it does not work."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return (done.stdout.strip().splitlines() or [""])[0]


def duration(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


if __name__ == "__main__":
    sys.exit(main())
