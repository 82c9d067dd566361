"""``python -m tests.top.cost [COLUMNS LINES SECONDS]``: what ``vgpuctl top`` takes of a core, with 64 vGPUs that all
change once a second, in a terminal (tmux) and over a node that is played."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.ctl.fake_node import gpu_reading, vgpu_reading
from tests.top.played_node import PlayedNode

VGPUS = 64
WARM_UP_S = 5.0


class Crowd(PlayedNode):
    def _watched(self, request: Any) -> Iterator[dict[str, Any]]:
        while True:
            self.gpus = (gpu_reading(tokens_per_second=random.uniform(0, 200)),)
            self.vgpus = tuple(
                vgpu_reading(
                    vgpu_id=f"vgpu-{i:08x}",
                    name=f"job-{i}",
                    guarantee_ratio=1 / VGPUS,
                    limit_ratio=1 / VGPUS,
                    held_ratio=random.uniform(0, 1 / VGPUS),
                    busy_ratio=random.uniform(0, 1 / VGPUS),
                    tokens_per_second=random.uniform(0, 30),
                    lag_ns=random.randrange(-(10**7), 10**7),
                    waiting_ns=random.randrange(10**8),
                )
                for i in range(VGPUS)
            )
            yield {"snapshot": self.snapshot().model_dump(mode="json")}
            time.sleep(request.interval_ns / 1e9)


def main(columns: str = "120", lines: str = "36", seconds: str = "30") -> None:
    with tempfile.TemporaryDirectory(prefix="vgpu-top-") as directory:
        Crowd(Path(directory))
        environment = os.environ | {"VGPU_RUNTIME_DIR": directory, "LC_ALL": "C.UTF-8", "TERM": "xterm-256color"}

        def tmux(*arguments: str) -> str:
            command = ["tmux", "-S", f"{directory}/tmux", "-f", "/dev/null", *arguments]
            return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout

        tmux("new-session", "-d", "-x", columns, "-y", lines, f"exec {sys.executable} -m vgpu.ctl top")
        pid = int(tmux("list-panes", "-F", "#{pane_pid}"))
        time.sleep(WARM_UP_S)
        before_s = cpu_s(pid)
        time.sleep(float(seconds))
        print(f"{columns} × {lines}: {100 * (cpu_s(pid) - before_s) / float(seconds):.1f} % of a core")
        tmux("kill-server")


def cpu_s(pid: int) -> float:
    """What a process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main(*sys.argv[1:])
