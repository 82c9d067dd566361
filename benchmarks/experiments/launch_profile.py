"""Where the time of a launch goes: in the hook's own code, in which of the driver's calls that the hook makes, in the
launch itself.

    python -m benchmarks.experiments.launch_profile [--what queued paced plain] [--gpu INDEX] [--lines] [--simulate]

``benchmarks/micro/launch.c`` in a vGPU of its own, as ``--part launch`` has it, with ``sampler.c`` preloaded, which
looks every 50 µs where the launching thread is (the looks themselves cost each launch some 100 ns). *queued*:
behind milliseconds of work, under a limit; *paced*: on an idle GPU, under a limit; *plain*: without a limit. Printed is
how much of the time the thread was where, and how many nanoseconds of a launch that is, in the mean of all launches
(medians are of rounds of fifty, so that a wait in one of fifty shows there or not). ``--lines``: the lines of our own
code, too. ``--simulate``: on the simulated GPU, which is no driver.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.micro.launch import LAUNCHES, LIMIT_PERCENT, LIMITED, QUEUED, Turns, compile_launch
from benchmarks.node import Node
from client_hook.environment import hook_library
from client_hook.path_rules import HOOK_NAME

WHATS: Final[dict[str, tuple[Turns, int]]] = {
    "queued": (Turns(8 * QUEUED.rounds, QUEUED.batch, QUEUED.what), LIMIT_PERCENT),
    "paced": (Turns(4 * LIMITED.rounds, LIMITED.batch, LIMITED.what), LIMIT_PERCENT),
    "plain": (LAUNCHES, 100),
}
WRAPPERS: Final = ("wrappers_", "cuLaunchKernel")


@dataclass(frozen=True, slots=True)
class Sample:
    """``offset`` into ``object`` (a file's name); ``places``: addresses in the hook on its stack, the last one first.
    Some are of calls that have long returned."""

    object: str
    offset: int
    places: tuple[int, ...]


def parse(lines: Iterable[str]) -> list[Sample]:
    samples = []
    for line in lines:
        name, offset, *places = line.split(" ")
        samples.append(Sample(name, int(offset, 16), tuple(int(place, 16) for place in places)))
    return samples


def symbols(library: Path, offsets: Iterable[int]) -> dict[int, list[str]]:
    """``function at file:line`` of each offset, innermost of what was inlined first. By addr2line, of binutils."""
    wanted = sorted(set(offsets))
    command = ["addr2line", "-f", "-i", "-s", "-a", "-e", str(library)]
    told = subprocess.run(command, input="\n".join(map(hex, wanted)), capture_output=True, text=True, check=True)
    found: dict[int, list[str]] = {}
    function = ""
    for line in told.stdout.splitlines():
        if line.startswith("0x"):
            names = found[int(line, 16)] = []
            function = ""
        elif not function:
            function = line
        else:
            names.append(f"{function} at {line.split(' ')[0]}")
            function = ""
    return found


def plain(name: str) -> str:
    """A function's name without what Cython and the compiler put around it."""
    function = name.split(" at ")[0].split(".")[0]
    words = function.removeprefix("__pyx_f_").lstrip("0123456789").split("_")
    return "_".join(words[:1] + [word.lstrip("0123456789") for word in words[1:]])


def live(chains: Sequence[list[str]]) -> Sequence[list[str]]:
    """Of the places on a stack, each with its functions, those that say how the thread came to where it is: where a
    wrapper has called the driver it is in the launch itself, whatever lies further in."""
    wrappers = [at for at, chain in enumerate(chains) if plain(chain[-1]).startswith(WRAPPERS)]
    if wrappers and plain(chains[wrappers[0]][0]).startswith("real_"):
        return chains[wrappers[0] :]
    return chains


def kinds(samples: Iterable[Sample], names: Mapping[int, list[str]], lines: bool = False) -> Counter[str]:
    """Where they were: ``own: FUNCTION``, or in which object, by the hook's functions from which they went there. With
    ``lines`` their lines, too."""

    def named(chain: Sequence[str]) -> list[str]:
        return [name if lines else plain(name) for name in chain]

    found: Counter[str] = Counter()
    for sample in samples:
        if sample.object == HOOK_NAME:
            found["own: " + named(names[sample.offset])[0 if lines else -1]] += 1
        elif sample.places:
            chain = [name for part in live([names[place] for place in sample.places]) for name in named(part)]
            found[f"in {sample.object} from {' < '.join(dict.fromkeys(chain))}"] += 1
        else:
            found[f"the program itself, in {sample.object}"] += 1
    return found


def sampled(node: Node, gpu: int, what: str, folder: Path) -> tuple[dict[str, float], list[Sample]]:
    """What the program says of its launches, and where it was while it made them through the hook."""
    turns, percent = WHATS[what]
    out = folder / f"{what}.txt"
    command = [*node.vgpuctl, "run", "--gpu", str(gpu), "--sm", str(percent), "--mem", "1G", "--"]
    environment = {**node.environment, "LD_PRELOAD": str(folder / "sampler.so"), "SAMPLES_OUT": str(out)}
    done = subprocess.run(
        [*command, folder / "launch", *turns.arguments], env=environment, capture_output=True, text=True, timeout=300
    )
    if done.returncode or not out.exists():
        raise SystemExit(f"{what}: launch ended with {done.returncode}: {done.stderr[-500:]}")
    return json.loads(done.stdout), parse(out.read_text().splitlines())


def report(what: str, answer: Mapping[str, float], samples: list[Sample], lines: bool) -> None:
    offsets = [sample.offset for sample in samples if sample.object == HOOK_NAME]
    offsets += [place for sample in samples for place in sample.places]
    names = symbols(hook_library(), offsets)
    print(
        f"\n{what}: {answer['gated_ns']:.0f} ns through the hook, {answer['direct_ns']:.0f} past it, "
        f"{answer['added_ns']:.0f} added, {answer['added_least_ns']:.0f} in the tenth with least; {len(samples)} looks"
    )
    mean_ns = answer["mean_gated_ns"]
    own = sum(sample.object == HOOK_NAME for sample in samples)
    for name, number in [*kinds(samples, names, lines).most_common(40), ("all of our own code", own)]:
        ratio = number / max(len(samples), 1)
        print(f"{100 * ratio:6.1f} % {mean_ns * ratio:8.0f} ns  {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", nargs="+", choices=WHATS, default=list(WHATS), metavar="NAME")
    parser.add_argument("--gpu", type=int, default=0, metavar="INDEX", help="as NVML counts them; default: 0")
    parser.add_argument("--lines", action="store_true", help="of our own code, too")
    parser.add_argument("--simulate", action="store_true")
    args = parser.parse_args()
    source = Path(__file__).with_name("sampler.c")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        subprocess.run(
            ["cc", "-O2", "-shared", "-fPIC", "-o", folder / "sampler.so", source, "-ldl", "-lrt"], check=True
        )
        compile_launch(folder)
        with Node(simulate=args.gpu + 1) if args.simulate else Node(gpus=[args.gpu]) as node:
            for what in args.what:
                report(what, *sampled(node, args.gpu, what, folder), args.lines)


if __name__ == "__main__":
    main()
