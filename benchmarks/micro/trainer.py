"""What hand-overs cost a host that needs a lead: two trainers of 30 and 70 % against one alone.

    python -m benchmarks.micro.trainer [--gpu] [--seconds 8] [--repeat 3]

Compiles ``trainer.c`` and runs it, exclusive and in pairs in turns, on a simulated GPU (or, with --gpu, on the real
one). Prints both parts and the total, as percent of the exclusive run beside it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.node import Node, plain_environment
from vgpu.workload.kernels import PTX


def compile_trainer(folder: Path) -> list[str]:
    program, code = folder / "trainer", folder / "kernels.ptx"
    subprocess.run(["cc", "-O2", "-o", program, Path(__file__).with_suffix(".c"), "-ldl"], check=True)
    code.write_text(PTX)
    return [str(program), str(code)]


def measure(node: Node, command: list[str], shares: list[int], seconds: float) -> list[float]:
    """Steps per second of each sharer over one common window; a share of 0 runs without a vGPU."""
    start_ns = time.monotonic_ns() + 3_000_000_000
    processes = []
    for share in shares:
        program = [*command, str(seconds), str(start_ns)]
        inside = [*node.vgpuctl, "run", "--sm", str(share), "--mem", "1G", "--", *program]
        processes.append(
            subprocess.Popen(
                inside if share else program,
                env=node.environment if share else plain_environment(node),
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    answers: list[dict[str, Any]] = [json.loads(p.communicate(timeout=120)[0].splitlines()[-1]) for p in processes]
    return [answer["per_second"] for answer in answers]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help="on the real GPU")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, Node(simulate=0 if args.gpu else 1, mode="temporal") as node:
        command = compile_trainer(Path(scratch))
        for _ in range(args.repeat):
            (exclusive,) = measure(node, command, [0], args.seconds)
            parts = measure(node, command, [30, 70], args.seconds)
            (gpu,) = json.loads(node.run("gpu", "ls", "-o", "json"))
            shares = "  ".join(f"{100 * part / sum(parts):5.2f} %" for part in parts)
            print(
                f"exclusive {exclusive:6.2f} steps/s   pair {shares}   total {100 * sum(parts) / exclusive:6.2f} %   "
                f"period {gpu['period_ns'] / 1e6:.0f} ms",
                flush=True,
            )


if __name__ == "__main__":
    main()
