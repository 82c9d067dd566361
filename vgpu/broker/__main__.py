"""``python -m vgpu.broker``: started by a GPU Server, one per vGPU."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import trio

from vgpu.broker.runtime import Broker
from vgpu.limits import Limits
from vgpu.openfiles import raise_limit
from vgpu.paths import UMASK
from vgpu.process_tuning import go_first, keep_all


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m vgpu.broker", description="Broker of one vGPU (started by its GPU Server)"
    )
    parser.add_argument("--vgpu", required=True, metavar="ID")
    parser.add_argument("--server", required=True, type=Path, help="socket of the GPU Server")
    parser.add_argument("--door", required=True, type=Path, help="socket to make for the vGPU's processes")
    parser.add_argument("--limits", default="{}", metavar="JSON", help="of what one user can take (vgpu/limits.py)")
    parser.add_argument("--alive", type=Path, help="socket to make by which the next GPU Server finds this broker")
    arguments = parser.parse_args()
    os.umask(UMASK)
    go_first()
    raise_limit()
    keep_all()
    limits = Limits.from_option(arguments.limits)
    trio.run(Broker(arguments.vgpu, arguments.server, arguments.door, arguments.alive, limits).run)


if __name__ == "__main__":
    main()
