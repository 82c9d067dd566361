"""What the hook adds to a launch, and to cuMemAlloc with cuMemFree: nanoseconds, and instructions if there is valgrind.

Under a limit each launch is predicted, and idle gaps between launches are looked for, as nobody is charged for those:
that is measured, too, with a host that launches every 20 µs what takes the GPU less ("on an idle GPU": the worst case),
and with one that launches behind milliseconds of work ("behind a queue": who keeps the GPU busy).

A real driver is in the kernel for tens of microseconds of each allocation and each free, and the caches forget the hook
meanwhile. "Cold" is that on a simulated GPU: inside each call data, code and branches of others go through the caches.
"Behind stores": a driver's last store, to the GPU, may still be under way when the next launch begins.

    python -m benchmarks.micro.launch [--gpu]

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
from dataclasses import dataclass
from pathlib import Path

from benchmarks.node import Node

LIMIT_PERCENT = 50
COUNTED_BATCH = 500


@dataclass(frozen=True, slots=True)
class Turns:
    """What ``launch.c`` does: so many rounds, of ``batch`` launches, or allocations with their frees, each."""

    rounds: int
    batch: int
    what: str = ""

    @property
    def arguments(self) -> list[str]:
        return [str(self.rounds), str(self.batch), self.what]


LAUNCHES = Turns(10_000, 50)
LIMITED = Turns(400, 50, "paced")
QUEUED = Turns(100, 50, "queued")
ALLOCATIONS = Turns(2000, 10, "allocate")
COLD = Turns(4000, 1, "cold")
STORES = Turns(4000, 50, "stores")


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


def instructions(node: Node, vgpus: Sequence[str], program: Path, folder: Path, what: str = "") -> float:
    """Instructions a launch, in a process with those vGPUs: those of the thread that launches. (Those of the hook's
    thread depend on how long it all takes.)"""
    batch = ALLOCATIONS.batch if what == ALLOCATIONS.what else COUNTED_BATCH
    few, many = Turns(5_000 // batch, batch, what), Turns(30_000 // batch, batch, what)
    counted = []
    for turns in (few, many):
        profile = folder / f"callgrind.{turns.rounds}"
        valgrind = ["valgrind", "-q", "--tool=callgrind", "--separate-threads=yes", f"--callgrind-out-file={profile}"]
        subprocess.run(
            [*node.vgpuctl, "exec", ",".join(vgpus), "--", *valgrind, program, *turns.arguments],
            env=node.environment,
            check=True,
            capture_output=True,
        )
        counted.append(hook_instructions(Path(f"{profile}-01")))
    return (counted[1] - counted[0]) / ((many.rounds - few.rounds) * batch)


def in_turns(node: Node, program: Path, turns: Turns = LAUNCHES, percent: int = 100) -> dict[str, float]:
    """What the program says in a vGPU of ``percent``: ``gated_ns``, ``direct_ns`` and ``added_ns`` per launch, the 95 %
    interval of that, ``added_low_ns`` to ``added_high_ns``, and ``hooked``."""
    command = ["run", "--sm", str(percent), "--mem", "1G", "--", str(program), *turns.arguments]
    answer: dict[str, float] = json.loads(node.run(*command, timeout=300))
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help="on the real GPU")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, Node(simulate=0 if args.gpu else 2) as node:
        program = compile_launch(Path(scratch))
        cases = [
            ("one launch", LAUNCHES, 100),
            ("... under a limit, idle GPU", LIMITED, LIMIT_PERCENT),
            ("... behind a queue", QUEUED, LIMIT_PERCENT),
            ("cuMemAlloc, cuMemFree", ALLOCATIONS, 100),
        ]
        if not args.gpu:
            cases += [("... cold", COLD, 100), ("one launch, behind stores", STORES, 100)]
        print(f"{'':28}{'through the hook':>18}{'direct':>10}{'added':>10}{'95 % from':>12}{'to':>10}")
        for name, turns, percent in cases:
            answer = in_turns(node, program, turns, percent)
            row = f"{answer['gated_ns']:18.1f}{answer['direct_ns']:10.1f}{answer['added_ns']:10.1f}"
            interval = f"{answer['added_low_ns']:12.1f}{answer['added_high_ns']:10.1f}"
            print(f"{name + ', ns':28}{row}{interval}")
        if args.gpu or shutil.which("valgrind") is None:
            print("instructions: not counted (needs valgrind and the simulated GPU)")
            return
        rows = (
            ("one vGPU", 100, [0], ""),
            ("... under a limit, idle GPU", LIMIT_PERCENT, [0], LIMITED.what),
            ("two vGPUs", 100, [0, 1], ""),
            ("... default stream", 100, [0, 1], "default"),
            ("cuMemAlloc and cuMemFree", 100, [0], ALLOCATIONS.what),
        )
        print("instructions in the hook")
        for name, percent, gpus, what in rows:
            made = ["create", "--sm", str(percent), "--mem", "1G", "--gpu"]
            vgpus = [node.run(*made, str(gpu)).strip().splitlines()[-1] for gpu in gpus]
            print(f"  {name:26}{instructions(node, vgpus, program, Path(scratch), what):18.1f}", flush=True)
            node.run("rm", *vgpus)


if __name__ == "__main__":
    main()
