"""What the hook costs one model server that is alone on the card: tokens a second in a vGPU, over those without one.

    python -m benchmarks.servers.alone [--rounds 10] [--layers 32] [--tokens 64] [--eager]

A plain server (server.py), one in a vGPU, and one in a vGPU that can be swapped are on the card. They answer in turns,
so only one works at a time. Each request is a prompt and its first tokens. The rounds begin once the host memory of the
swapped vGPU is pinned.
"""

from __future__ import annotations

import argparse
import json
import os
from contextlib import ExitStack
from statistics import median
from typing import Any, Final

from benchmarks.node import Node
from benchmarks.servers.client import SERVER, Server, await_pins, plain_server, server_in_vgpu
from benchmarks.suite.report.stats import percentile
from vgpu.node.link import ControlLink

ARMS: Final = ("plain", "vgpu", "swapped")


def start(node: Node, name: str, arguments: list[str], mem: str) -> Server:
    if name == "plain":
        return plain_server(node, arguments)
    return server_in_vgpu(node, name, arguments, sm=45, mem=mem, swap=name == "swapped")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--cache-tokens", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--mem", default="28G")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--program", default=str(SERVER), help="a rehearsal's")
    parser.add_argument("--simulate", action="store_true")
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    arguments = [args.program, "--layers", str(args.layers), "--cache-tokens", str(args.cache_tokens), "--seed", "1"]
    arguments += ["--eager"] if args.eager else []
    rates: dict[str, list[float]] = {name: [] for name in ARMS}
    steps: dict[str, list[float]] = {name: [] for name in ARMS}
    tokens: list[Any] = []
    with Node(options=("--host-memory", "64G"), simulate=int(args.simulate)) as node, ExitStack() as stack:
        servers = [stack.enter_context(start(node, name, arguments, args.mem)) for name in ARMS]
        link = stack.enter_context(ControlLink(node.control_socket))
        for server in servers:
            owned = server.answer()["reserved_bytes"]
            tokens.append(server.ask(0, tokens=args.tokens)["tokens"])
        await_pins(link, owned)
        for _ in range(args.rounds):
            for server in servers:
                times = server.ask(0, tokens=args.tokens)["ms"]
                rates[server.name].append(1e3 * len(times) / sum(times))
                steps[server.name] += times[1:]
    plain = rates["plain"]
    result = {
        name: {
            "tokens_s": round(median(rates[name]), 2),
            "of_plain": round(median(a / b for a, b in zip(rates[name], plain, strict=True)), 4),
            "step_p50_ms": round(percentile(steps[name], 50), 3),
            "step_p99_ms": round(percentile(steps[name], 99), 3),
            "same_tokens": tokens[number] == tokens[0],
        }
        for number, name in enumerate(ARMS)
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
