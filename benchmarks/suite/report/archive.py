"""What ``benchmarks/results`` keeps of measurements: each line without the fields that no table reads, compressed.

    python -m benchmarks.suite.report.archive FOLDER [FOLDER ...] --into benchmarks/results/measurements.jsonl.xz

Adds what the folders have to what the file has already.
"""

from __future__ import annotations

import argparse
import json
import lzma
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from benchmarks.suite.report.records import FILE, text_of

UNREAD: Final = frozenset(
    {
        "slowest_steps",
        "pid",
        "start",
        "stamps",
        "lead_s",
        "late_s",
        "seed",
        "gate_wait_ratio",
        "throttled_ratio",
        "samples",
    }
)
"""Of a program's result: for a look at one window, soon after it."""
DIGITS: Final = 6
"""Of the seconds of a window, each of which has four figures. Tables show two digits."""


def kept(lines: Iterable[str]) -> Iterator[str]:
    """``lines``, each once, without what is not kept."""
    seen: set[str] = set()
    for line in lines:
        record = json.loads(line)
        for result in record.get("measurement", {}).get("results", ()):
            for name in UNREAD & result.keys():
                del result[name]
            for second in result.get("parts", ()):
                second.update({name: round(value, DIGITS) for name, value in second.items()})
        reduced = json.dumps(record)
        if reduced not in seen:
            seen.add(reduced)
            yield reduced


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.suite.report.archive",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--into", required=True, type=Path, metavar="FILE")
    options = parser.parse_args()
    before = [options.into] if options.into.exists() else []
    texts = [text_of(path) for path in (*before, *(folder / FILE for folder in options.folders))]
    whole = "".join(f"{line}\n" for line in kept(line for text in texts for line in text.splitlines()))
    options.into.write_bytes(lzma.compress(whole.encode(), preset=9 | lzma.PRESET_EXTREME))
    return 0


if __name__ == "__main__":
    sys.exit(main())
