"""Model servers that share one card: the first token of a suspended one, and of one in whose place another one is.

    python -m benchmarks.servers [--servers 6] [--rounds 5] [--host-memory 200G] [--filler 100G] [--neighbour]

Each server (server.py) owns weights of 16 GB and a cache of 8 GB in expandable segments. Its decode steps are a
captured graph. It knows of no vGPU. In each round every server gets one request, in turn:

    suspended   all vGPUs are suspended (``vgpuctl suspend --resume-on call``): the request resumes its vGPU
    turns       none is suspended, and the card has no room for all: the vGPU that was used the longest ago leaves

A server's weights are of a seed of its own. In even rounds the request is a new prompt; in odd rounds the server goes
on with its last answer, from its cache. It is right if its tokens are those that it gave first, and if sums of all its
weights are the same at the end. The first server's tokens are compared with a plain program's, too, and that program's
with its own: a server that is not exact by itself shows nothing. ``--filler``: memory of the card that is promised to
another vGPU, as in 100G. ``--neighbour``: a program in another vGPU computes all the while. ``first_seconds`` is of the
first move of each vGPU in this mode, ``seconds`` of all later ones.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any

from benchmarks.node import Node
from benchmarks.servers.client import REQUESTS, SERVER, Server, await_pins, plain_server, server_in_vgpu
from benchmarks.suite.report.stats import percentile
from vgpu.node.link import ControlLink


def plain(node: Node, arguments: list[str]) -> dict[str, Any]:
    """Tokens and times of the first server without a vGPU."""
    with plain_server(node, [*arguments, "--seed", "1"]) as server:
        owned = server.answer()["reserved_bytes"]
        answers, again = server.all_answers(), server.all_answers()
    steps = [ms for answer in again for ms in answer["ms"][1:]]
    return {
        "bytes": owned,
        "tokens": [answer["tokens"] for answer in answers],
        "wrong_answers": sum(one["tokens"] != other["tokens"] for one, other in zip(answers, again, strict=True)),
        "first_ms": median(answer["ms"][0] for answer in again[::2]),
        "step_ms": median(steps),
    }


class Scene:
    def __init__(self, node: Node, servers: list[Server], rounds: int) -> None:
        self.node, self.servers, self.rounds = node, servers, rounds

    def suspend(self, server: Server) -> None:
        self.node.run("suspend", server.name, "--resume-on", "call")

    def measure(self, mode: str) -> dict[str, Any]:
        wrong, steps = list[str](), list[float]()
        first: dict[str, list[float]] = {server.name: [] for server in self.servers}
        for server in self.servers if mode == "suspended" else ():
            self.suspend(server)
        for turn in range(self.rounds):
            for server in self.servers:
                seed = turn // 2 % REQUESTS
                answer = server.ask(seed, turn)
                if answer["tokens"] != server.expected[2 * seed + turn % 2]:
                    wrong.append(f"{server.name}, round {turn}")
                first[server.name].append(answer["ms"][0])
                steps += answer["ms"][1:]
                if mode == "suspended":
                    self.suspend(server)
                print(f"{mode} {turn} {server.name} {answer['ms'][0]:.0f} ms", file=sys.stderr, flush=True)
        every = [ms for mine in first.values() for ms in mine]
        return {
            "first_p50_ms": round(percentile(every, 50), 1),
            "first_p99_ms": round(percentile(every, 99), 1),
            "first_p50_ms_by_server": {name: round(percentile(mine, 50), 1) for name, mine in first.items()},
            "first_ms": first,
            "wrong_answers": wrong,
            "wrong_weights": [server.name for server in self.servers if server.check() != server.sums],
            "step_ms": median(steps),
        }


def moves(link: ControlLink, after_unix_s: float) -> dict[str, Any]:
    events = [event for event in link.events(kinds=("swapped-out", "swapped-in")) if event.at_unix_s > after_unix_s]
    found: dict[str, Any] = {}
    for kind in ("swapped-out", "swapped-in"):
        seconds = dict[str, list[float]]()
        for event in events:
            if event.kind == kind:
                seconds.setdefault(event.vgpu_id, []).append(float(event.fields["seconds"]))
        mine = [event.fields for event in events if event.kind == kind]
        if mine:
            first = [each[0] for each in seconds.values()]
            later = [one for each in seconds.values() for one in each[1:]]
            found[kind] = {
                "count": len(mine),
                "first_seconds": [round(one, 3) for one in first],
                "seconds": round(median(later or first), 3),
                "bytes": median(float(fields["memory_bytes"]) for fields in mine),
                "clean_bytes": median(float(fields.get("clean_bytes", 0)) for fields in mine),
            }
    return found


@contextmanager
def explained(link: ControlLink) -> Iterator[None]:
    """If a server ends, say what the node has noted."""
    try:
        yield
    except RuntimeError:
        for event in link.events():
            print(f"{event.at_unix_s:.2f} {event.kind}: {event.text}", file=sys.stderr)
        for vgpu in link.list():
            print(
                f"{vgpu.name}: {vgpu.memory_used_bytes >> 20} MiB, away {vgpu.memory_away_bytes >> 20}", file=sys.stderr
            )
        raise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--host-memory", default="200G")
    parser.add_argument("--filler", default="")
    parser.add_argument("--neighbour", action="store_true")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--cache-tokens", type=int, default=6400)
    parser.add_argument("--modes", default="turns,suspended")
    parser.add_argument("--mem", default="28G")
    parser.add_argument("--program", default=str(SERVER), help="a rehearsal's")
    parser.add_argument("--simulate", action="store_true")
    args = parser.parse_args()
    arguments = [args.program, "--layers", str(args.layers), "--cache-tokens", str(args.cache_tokens)]
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    node = Node(options=("--host-memory", args.host_memory), simulate=int(args.simulate))
    with node, ExitStack() as stack:
        result: dict[str, Any] = {"plain": plain(node, arguments)}
        expected = result["plain"].pop("tokens")
        print(json.dumps(result), flush=True)
        link = stack.enter_context(ControlLink(node.control_socket))
        stack.enter_context(explained(link))
        if args.filler:
            node.run("create", "--sm", "1", "--mem", args.filler, "--name", "filler")
        neighbour = None
        if args.neighbour:
            command = [*node.vgpuctl, "run", "--sm", "4", "--mem", "2G", "--burst", "--", sys.executable]
            command += ["-m", "vgpu.workload", "--seconds", "3600", "-o", "json"]
            neighbour = subprocess.Popen(command, env=node.environment, stdout=subprocess.DEVNULL)
            stack.callback(neighbour.wait)
            stack.callback(neighbour.terminate)
        servers, began = [], time.monotonic()
        for number in range(1, args.servers + 1):
            own = [*arguments, "--seed", str(number)]
            servers.append(server_in_vgpu(node, f"s{number}", own, sm=96 // args.servers, mem=args.mem))
            stack.enter_context(servers[-1])
        for server in servers:
            server.answer()
            print(f"{server.name} serves after {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
        for server in servers:
            server.expected = [answer["tokens"] for answer in server.all_answers()]
            server.sums = server.check()
            print(f"{server.name} has answered after {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
        scene = Scene(node, servers, args.rounds)
        result["differs_from_plain"] = sum(a != b for a, b in zip(servers[0].expected, expected, strict=True))
        result["pinned_after_s"] = round(await_pins(link, result["plain"]["bytes"]), 1)
        print(f"measured from {time.monotonic() - began:.1f} s on", file=sys.stderr, flush=True)
        for mode in args.modes.split(","):
            began = time.time()
            result[mode] = scene.measure(mode)
            result[mode]["moves"] = moves(link, began)
            if neighbour is not None and neighbour.poll() is not None:
                sys.exit(f"the neighbour ended with {neighbour.returncode}: there is nothing to learn from this run")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
