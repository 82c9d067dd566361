"""What was measured, as it was measured: one line of JSON for each window, written before the next one begins.

Tables are made from these lines alone (``tables.py``), so a killed run loses nothing and runs can be merged.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, Final

FILE: Final = "measurements.jsonl"
REHEARSAL: Final = "a rehearsal on the simulated GPU: no figure counts"
"""Where a run names its GPU: it had none."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One window of wall time. Measurements of one ``run``, ``repeat`` and ``block`` are compared with each other.

    ``way``: how the GPU was shared (``stage.py`` has the words); ``row``: which of the block's situations it was, as
    in "30/70". ``asked``: what each sharer was promised, in percent, where it was. ``results``: what each said of
    itself, in the same order. ``figures``: what was measured from outside.
    """

    run: str
    part: str
    repeat: int
    block: str
    row: str
    way: str
    asked: tuple[float, ...] = ()
    results: tuple[dict[str, Any], ...] = ()
    figures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Run:
    """Where and when: the first line of a run. ``failures`` are not measurements, they follow as lines of their own."""

    run: str
    machine: dict[str, str]
    command: str

    @property
    def rehearsed(self) -> bool:
        return self.machine.get("gpu") == REHEARSAL

    @property
    def card(self) -> str:
        """The GPU's model as the driver names it, without its vendor: "H200", "H100 80GB HBM3"."""
        return self.machine.get("gpu", "").split(",")[0].removeprefix("NVIDIA ")


@dataclass(slots=True)
class Records:
    """Everything read from one or more files, in order."""

    runs: list[Run] = field(default_factory=list)
    measurements: list[Measurement] = field(default_factory=list)
    failures: list[dict[str, str]] = field(default_factory=list)


class Writer:
    """Appends to ``folder/measurements.jsonl``; every line is on the disk when the call returns."""

    def __init__(self, folder: Path, run: Run) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / FILE
        if self.path.exists():  # a line that a kill cut short would spoil ours
            whole = self.path.read_bytes()
            self.path.write_bytes(whole[: whole.rfind(b"\n") + 1])
        self._append({"run": asdict(run)})

    def measured(self, measurement: Measurement) -> None:
        self._append({"measurement": asdict(measurement)})

    def failed(self, part: str, block: str, reason: str) -> None:
        self._append({"failure": {"part": part, "block": block, "reason": reason}})

    def _append(self, line: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def parse(lines: Iterable[str]) -> Records:
    """The records in ``lines``; a last line that a kill cut short is left out. ValueError for any other nonsense."""
    records = Records()
    kept = [line for line in lines if line.strip()]
    for number, line in enumerate(kept, 1):
        try:
            said = json.loads(line)
        except ValueError:
            if number == len(kept):
                break
            raise ValueError(f"line {number} is no record: {line[:80]!r}") from None
        if "run" in said:
            records.runs.append(Run(**said["run"]))
        elif "measurement" in said:
            fields = said["measurement"]
            fields |= {"asked": tuple(fields["asked"]), "results": tuple(fields["results"])}
            records.measurements.append(Measurement(**fields))
        elif "failure" in said:
            records.failures.append(said["failure"])
    return records


def read(paths: Sequence[Path]) -> Records:
    """The records of all files. A folder stands for the file in it, and a file may be compressed (.xz).
    FileNotFoundError if one is not there.

    What is in several of them counts once. Runs that began in the same second, on two GPUs, are told apart.
    """
    whole = Records()
    seen: set[str] = set()
    for path in paths:
        lines = text_of(path / FILE if path.is_dir() else path).splitlines()
        records = parse(line for line in lines if line not in seen)
        seen.update(lines)
        taken = {run.run for run in whole.runs}
        names = {run.run: unused(run.run, taken) for run in records.runs}
        whole.runs += [replace(run, run=names[run.run]) for run in records.runs]
        whole.measurements += [replace(m, run=names.get(m.run, m.run)) for m in records.measurements]
        whole.failures += records.failures
    return whole


def text_of(path: Path) -> str:
    """The file's text; one that ends in .xz is compressed."""
    return lzma.open(path, "rt").read() if path.suffix == ".xz" else path.read_text()


def unused(name: str, taken: Collection[str]) -> str:
    """``name``, or with the first number behind it that nobody has."""
    return next(found for number in count(1) if (found := name if number == 1 else f"{name} #{number}") not in taken)


def counting(records: Records, since: str = "", card: str = "") -> Records:
    """Without the runs before ``since`` (as a run is called, or the beginning of that) and those on a GPU without
    ``card`` in its name, and without rehearsals beside runs on a GPU. Failures stay: they do not say of which run they
    are."""
    runs = [run for run in records.runs if run.run >= since and card in run.machine.get("gpu", "")]
    if not all(run.rehearsed for run in runs):
        runs = [run for run in runs if not run.rehearsed]
    kept = {run.run for run in runs}
    return Records(runs, [m for m in records.measurements if m.run in kept], records.failures)
