"""The same programs in vGPUs and under the GPU's own time slicing, in turns: A B B A …, at one period or several.

    python -m benchmarks.experiments.turns --work bert-infer --sm 33 33 33 --rounds 12
    python -m benchmarks.experiments.turns --work decode-graph --sm 50 50 --periods 57ms 24ms 16ms 10ms --rounds 4

A host's speed drifts by half, so each round's rate is compared with time slicing of the same round. The first round
does not count. Latencies are the times between steps, of all programs and rounds. A second line per way of vGPUs says
what a unit of work was charged, and for which part of the time a vGPU was at its limit. ``--alone`` measures one
program of each way by itself, too: its own time slicing, and its own charge. ``--control`` adds a second set of
programs without vGPUs: what it differs from the first by is due to the host, not to vGPUs.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from typing import Final

from benchmarks.suite.report.stats import bootstrap, percentile
from benchmarks.suite.stage import Ground, Sharer, Stage
from benchmarks.suite.workloads.catalogue import WORKS
from vgpu.node.link import ControlLink
from vgpu.units import parse_duration_ns

SLICING: Final = "time slicing"
CONTROL: Final = "control"
USUAL: Final = "vGPUs"


class Found:
    """What one way got done: units per second by round, the first program's part of it, and all latencies."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.firsts: list[float] = []
        self.took_ms: list[float] = []
        self.charges_ms: list[float] = []
        self.throttled: list[float] = []

    def line(self, name: str, base: Found) -> str:
        ratios = [100 * mine / slicing for mine, slicing in zip(self.rates, base.rates, strict=True)]
        low, high = bootstrap(ratios, statistics.median)
        tails = ", ".join(f"p{percent} {percentile(self.took_ms, percent):.2f}" for percent in (50, 90, 99))
        return (
            f"{name:14} {statistics.median(self.rates):9.1f}/s  {statistics.median(ratios):6.1f} % ({low:.1f} to "
            f"{high:.1f}, least {min(ratios):.1f})  {tails} ms  first program {statistics.median(self.firsts):.2f} %"
        )

    def charge_line(self) -> str:
        return (
            f"{'':14} charged {statistics.median(self.charges_ms):.3f} ms a unit, at the limit for "
            f"{100 * statistics.median(self.throttled):.1f} % of the time"
        )


def measure(
    stage: Stage, gpu: int, ways: dict[str, list[Sharer]], periods: dict[str, int], rounds: int, seconds: float
) -> None:
    found = {way: Found() for way in ways}
    for turn in range(rounds + 1):
        for way in list(ways)[:: -1 if turn % 2 else 1]:
            node = ways[way][0].node
            if way in periods and node is not None:
                with ControlLink(node.control_socket) as link:
                    link.set_gpu(str(gpu), period_ns=periods[way])
            results = stage.window(ways[way], seconds, samples=True, watch_waits=node is not None).results
            if turn:
                rates = [result["units_per_second"] for result in results]
                found[way].rates.append(sum(rates))
                found[way].firsts.append(100 * rates[0] / sum(rates))
                found[way].took_ms += itertools.chain.from_iterable(result["samples_ms"] for result in results)
                if node is not None:
                    found[way].charges_ms.append(1e3 * sum(result["charged_ratio"] for result in results) / sum(rates))
                    found[way].throttled.append(statistics.mean(result["throttled_ratio"] for result in results))
    for way, one in found.items():
        print(one.line(way, found[SLICING]), flush=True)
        if one.charges_ms:
            print(one.charge_line(), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    Ground.add_options(parser)
    parser.add_argument("--work", choices=WORKS, required=True)
    parser.add_argument("--sm", type=float, nargs="+", required=True, metavar="PERCENT", help="of each program's vGPU")
    parser.add_argument("--periods", nargs="*", default=[], metavar="TIME", help="as of `vgpuctl gpu set --period`")
    parser.add_argument("--alone", action="store_true", help="measure one program of each way by itself, too")
    parser.add_argument("--control", action="store_true", help="a second set of programs without vGPUs, too")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=2.5, help="of each turn")
    options = parser.parse_args()
    with Ground(options.simulate, options.gpu) as ground, Stage(ground) as stage:
        plain = [stage.plain(options.work) for _ in options.sm]
        ours = [stage.vgpu("temporal", options.work, percent, memory="6G") for percent in options.sm]
        control = [stage.plain(options.work) for _ in options.sm] if options.control else []
        stage.ready()
        ways = {SLICING: plain, **dict.fromkeys(options.periods or [USUAL], ours)}
        if control:
            ways[CONTROL] = control
        periods = {period: parse_duration_ns(period) for period in options.periods}
        if options.alone:
            alone = {way: programs[:1] for way, programs in ways.items()}
            measure(stage, options.gpu, alone, periods, options.rounds, options.seconds)
        measure(stage, options.gpu, ways, periods, options.rounds, options.seconds)


if __name__ == "__main__":
    main()
