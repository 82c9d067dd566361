"""Shares on a real GPU: each workload exclusive, alone at 30 %, and in pairs 30/70, in one session.

    python -m benchmarks.gpu.shares --out shares.json [--works gemm resnet elementwise] [--seconds 10] [--repeat 1]

Starts a node of its own, runs ``benchmarks.gpu.torch_work`` unmodified through ``vgpuctl run`` and prints one table.
Pairs run over the same window of wall time; a share alone is judged by device timestamps, a pair by throughput.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.node import Node

WORKS = ("gemm", "resnet", "elementwise")


@dataclass(frozen=True)
class Sharer:
    sm: float | None  # None: no vGPU at all
    work: str


def measure(node: Node | None, sharers: list[Sharer], seconds: float, timestamps: bool) -> list[dict[str, Any]]:
    """Run the sharers over one common window; their JSON results in order."""
    processes = []
    for sharer in sharers:
        command = [
            sys.executable,
            "-m",
            "benchmarks.gpu.torch_work",
            "--work",
            sharer.work,
            "--seconds",
            str(seconds),
            "--sync",
        ]
        if timestamps:
            command.append("--timestamps")
        environment = dict(os.environ)
        if sharer.sm is not None:
            assert node is not None
            command = [*node.vgpuctl, "run", "--sm", str(sharer.sm), "--mem", "40G", "--", *command]
            environment = node.environment
        processes.append(
            subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    for process in processes:
        assert process.stdout is not None
        if process.stdout.readline().strip() != "READY":
            raise SystemExit(f"a sharer did not start:\n{process.communicate()[1][-3000:]}")
    start_at = time.monotonic() + 1.0
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(f"{start_at}\n")
        process.stdin.flush()
    results = []
    for process in processes:
        out, err = process.communicate(timeout=240)
        if process.returncode != 0 or not out.strip():
            raise SystemExit(f"sharer failed with {process.returncode}:\n{err[-3000:]}")
        results.append(json.loads(out.strip().splitlines()[-1]))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--works", nargs="+", default=list(WORKS))
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    rows: list[dict[str, Any]] = []

    def row(label: str, work: str, results: list[dict[str, Any]], exclusive: float) -> None:
        total = sum(r["unit_per_second"] for r in results)
        rows.append({"label": label, "work": work, "results": results, "exclusive": exclusive})
        parts = "  ".join(
            f"{r['unit_per_second']:8.1f} ({100 * r['unit_per_second'] / total:5.2f} %)"
            + (f" busy {100 * r['busy_ratio']:5.2f} %" if r["busy_ratio"] is not None else "")
            + (f" p99 {r['p99_ms']:.1f} ms" if r["p99_ms"] else "")
            for r in results
        )
        whole = f"total {total:8.1f} {results[0]['unit']} = {100 * total / exclusive:6.2f} % of exclusive"
        print(f"{work:12} {label:10} {whole}   {parts}", flush=True)
        if args.out:
            args.out.write_text(json.dumps(rows, indent=1))

    with Node(mode="temporal") as node:
        for work in args.works:
            for _ in range(args.repeat):
                base = measure(None, [Sharer(None, work)], args.seconds, timestamps=False)
                exclusive = base[0]["unit_per_second"]
                row("exclusive", work, base, exclusive)
                row("alone 30", work, measure(node, [Sharer(30, work)], args.seconds, timestamps=True), exclusive)
                row(
                    "pair 30/70",
                    work,
                    measure(node, [Sharer(30, work), Sharer(70, work)], args.seconds, timestamps=False),
                    exclusive,
                )


if __name__ == "__main__":
    main()
