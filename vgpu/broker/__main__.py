"""``python -m vgpu.broker``: started by a GPU Server, one per vGPU."""

from __future__ import annotations

import argparse
from pathlib import Path

import trio

from vgpu.broker.runtime import Broker
from vgpu.precedence import go_first, keep_all


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m vgpu.broker", description="Broker of one vGPU (started by its GPU Server)"
    )
    parser.add_argument("--vgpu", required=True, metavar="ID")
    parser.add_argument("--server", required=True, type=Path, help="socket of the GPU Server")
    parser.add_argument("--door", required=True, type=Path, help="socket to make for the vGPU's processes")
    parser.add_argument("--alive", type=Path, help="socket to make by which the next GPU Server finds this broker")
    arguments = parser.parse_args()
    go_first()
    keep_all()
    trio.run(Broker(arguments.vgpu, arguments.server, arguments.door, arguments.alive).run)


if __name__ == "__main__":
    main()
