"""Pictures of the web dashboard, for docs/dashboard.md: ``python -m benchmarks.screenshots FOLDER``.

A node of two simulated GPUs, one in each mode, with programs in most of its vGPUs: desktop, dark, a phone, the dialog.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from benchmarks.dashboard import chromium, dashboard
from benchmarks.gpu.node import Node
from vgpu.ctl.programs import attachment
from vgpu.node.link import ControlLink
from vgpu.protocol.messages import VgpuStatus
from vgpu.spec import VgpuSpec

WANTED: Final[tuple[tuple[str, str, int, str, dict[str, Any], bool], ...]] = (
    ("0", "trainer", 40, "40G", {}, True),
    ("0", "notebook", 25, "24G", {}, True),
    ("0", "batch", 15, "16G", {"burst": True, "priority": "low"}, True),
    ("1", "serving", 50, "60G", {"priority": "high"}, True),
    ("1", "embedding", 30, "30G", {}, True),
    ("1", "spare", 10, "10G", {}, False),
)
SETTLE_MS: Final = 30_000
SHOTS: Final = (
    ("dashboard", {"width": 1440, "height": 1080}, "light", 1),
    ("dashboard-dark", {"width": 1440, "height": 1080}, "dark", 1),
    ("dashboard-phone", {"width": 360, "height": 780}, "light", 2),
)


def scene(node: Node) -> list[tuple[VgpuStatus, bool]]:
    with ControlLink(node.control_socket, timeout_s=60) as link:
        link.set_gpu("1", mode="spatial")
        made = []
        for gpu, name, percent, memory, more, works in WANTED:
            fields: dict[str, Any] = {"sm_percent": percent, "memory_bytes": memory, "name": name, **more}
            made.append((link.create(VgpuSpec.parse(**fields), gpu), works))
        return made


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "vgpu.workload", "--seconds", "300", "-o", "json"]
    with Node(simulate=2) as node, ExitStack() as owned:
        for vgpu, works in scene(node):
            if works:
                environment = attachment([vgpu]).environment(os.environ)
                program = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
                owned.callback(program.wait)
                owned.callback(program.kill)
        url, _ = owned.enter_context(dashboard(node))
        browser = owned.enter_context(chromium())
        for number, (name, size, scheme, scale) in enumerate(SHOTS):
            page = browser.new_page(viewport=size, color_scheme=scheme, device_scale_factor=scale)  # type: ignore[arg-type]
            page.goto(url)
            page.wait_for_selector(".vgpu")
            page.wait_for_timeout(SETTLE_MS if number == 0 else 8000)
            page.screenshot(path=folder / f"{name}.png")
            page.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
