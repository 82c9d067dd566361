"""What the hook adds to a launch, and to cuMemAlloc with cuMemFree: nanoseconds, and instructions if there is valgrind.

Under a limit each launch is predicted, and idle gaps between launches are looked for, as nobody is charged for those:
that is measured, too, with a host that launches every 20 µs what takes the GPU less.

A real driver is in the kernel for tens of microseconds of each allocation and each free, and the caches forget the hook
meanwhile. "Cold" is that on a simulated GPU: inside each call data, code and branches of others go through the caches.

    python -m benchmarks.launch [--gpu]

Compiles ``launch.c`` and runs it in a 100 % vGPU of a node of its own, on a simulated GPU (or, with --gpu, on the
real one). Nanoseconds: hooked and direct launches in turns within one process, medians of paired differences.
Instructions: what callgrind counts inside libvgpu_hook.so, per launch; deterministic to a few percent, and the only
figure to trust on a busy machine. They are counted for a process with one vGPU, and for one with a vGPU on each of two
GPUs, where a launch into a default stream has to ask the driver for the context.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.node import Node

ROUNDS = 400
ALLOCATION_ROUNDS = 2000
COLD_ROUNDS = 4000  # of one pair each
LIMITED_ROUNDS = 40
LIMIT_PERCENT = 50
BATCH = 500  # launches a round of launch.c
PAIRS = 10  # ... allocations with their frees


def compile_launch(folder: Path) -> Path:
    program = folder / "launch"
    source = Path(__file__).with_name("launch.c")
    subprocess.run(["cc", "-O2", "-rdynamic", "-o", program, source, "-ldl"], check=True)
    return program


def hook_instructions(profile: Path) -> int:
    """Instructions counted inside libvgpu_hook.so: the sum of self costs of functions whose object it is."""
    total = 0
    names: dict[str, str] = {}
    inside = skip = False
    for line in profile.read_text().splitlines():
        if match := re.match(r"ob=\((\d+)\)(?: (.*))?", line):
            names.setdefault(match[1], match[2] or "")
            inside = names[match[1]].endswith("libvgpu_hook.so")
        elif match := re.match(r"cob=\((\d+)\)(?: (.*))?", line):
            names.setdefault(match[1], match[2] or "")
        elif line.startswith("calls="):
            skip = True  # the next line is the cost of the callee, counted where it belongs
        elif re.match(r"[+\-*0-9]", line):
            if inside and not skip:
                total += int(line.split()[1])
            skip = False
    return total


def instructions(node: Node, vgpus: Sequence[str], program: Path, folder: Path, *arguments: str) -> float:
    """Instructions a launch, in a process with those vGPUs: those of the thread that launches. (Those of the hook's
    thread depend on how long it all takes.)"""
    batch = PAIRS if "allocate" in arguments else BATCH
    few, many = 5_000 // batch, 30_000 // batch
    counted = []
    for rounds in (few, many):
        profile = folder / f"callgrind.{rounds}"
        valgrind = ["valgrind", "-q", "--tool=callgrind", "--separate-threads=yes", f"--callgrind-out-file={profile}"]
        subprocess.run(
            [*node.vgpuctl, "exec", ",".join(vgpus), "--", *valgrind, program, str(rounds), *arguments],
            env=node.environment,
            check=True,
            capture_output=True,
        )
        counted.append(hook_instructions(Path(f"{profile}-01")))
    return (counted[1] - counted[0]) / ((many - few) * batch)


def in_turns(node: Node, program: Path, rounds: int = ROUNDS, *arguments: str, percent: int = 100) -> dict[str, float]:
    """What the program says in a vGPU of ``percent``: ``gated_ns``, ``direct_ns`` and ``added_ns`` per launch, the 95 %
    interval of that, ``added_low_ns`` to ``added_high_ns``, and ``hooked``."""
    command = ["run", "--sm", str(percent), "--mem", "1G", "--", str(program), str(rounds), *arguments]
    answer: dict[str, float] = json.loads(node.run(*command, timeout=300))
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help="on the real GPU")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, Node(simulate=0 if args.gpu else 2) as node:
        program = compile_launch(Path(scratch))
        cases: list[tuple[str, int, str, int]] = [
            ("one launch", ROUNDS, "", 100),
            ("... under a limit", LIMITED_ROUNDS, "paced", LIMIT_PERCENT),
            ("cuMemAlloc, cuMemFree", ALLOCATION_ROUNDS, "allocate", 100),
        ]
        if not args.gpu:
            cases.append(("... cold", COLD_ROUNDS, "cold", 100))
        print(f"{'':28}{'through the hook':>18}{'direct':>10}{'added':>10}{'95 % from':>12}{'to':>10}")
        for name, rounds, what, percent in cases:
            answer = in_turns(node, program, rounds, *what.split(), percent=percent)
            row = f"{answer['gated_ns']:18.1f}{answer['direct_ns']:10.1f}{answer['added_ns']:10.1f}"
            interval = f"{answer['added_low_ns']:12.1f}{answer['added_high_ns']:10.1f}"
            print(f"{name + ', ns':28}{row}{interval}")
        if args.gpu or shutil.which("valgrind") is None:
            print("instructions: not counted (needs valgrind and the simulated GPU)")
            return
        rows: tuple[tuple[str, int, tuple[int, ...], tuple[str, ...]], ...] = (
            ("one vGPU", 100, (0,), ()),
            ("... under a limit", LIMIT_PERCENT, (0,), ("paced",)),
            ("two vGPUs", 100, (0, 1), ()),
            ("... default stream", 100, (0, 1), ("default",)),
            ("cuMemAlloc and cuMemFree", 100, (0,), ("allocate",)),
        )
        print("instructions in the hook")
        for name, percent, gpus, arguments in rows:
            made = ["create", "--sm", str(percent), "--mem", "1G", "--gpu"]
            vgpus = [node.run(*made, str(gpu)).strip().splitlines()[-1] for gpu in gpus]
            print(f"  {name:26}{instructions(node, vgpus, program, Path(scratch), *arguments):18.1f}", flush=True)
            node.run("rm", *vgpus)


if __name__ == "__main__":
    main()
