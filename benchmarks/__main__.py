"""``python -m benchmarks``: what can be measured on a machine without a GPU. Prints tables, asserts nothing."""

from __future__ import annotations

import runpy
import sys

SUITES = ("benchmarks.native", "benchmarks.contention", "benchmarks.launch")


def main() -> None:
    for suite in sys.argv[1:] or SUITES:
        print(f"== {suite}", flush=True)
        sys.argv = [suite]  # its own options are for python -m SUITE
        runpy.run_module(suite, run_name="__main__")


if __name__ == "__main__":
    main()
