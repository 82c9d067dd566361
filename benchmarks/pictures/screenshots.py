"""Pictures of the web dashboard, for docs/howto/dashboard.md.

    python -m benchmarks.pictures.screenshots FOLDER [NUMBER ...] [forms]

Pictures are PNG; ``benchmarks.pictures.webp`` makes of them what ``docs/images`` has.

Without a NUMBER: a node of two simulated GPUs, one in each mode, with programs in most of its vGPUs. Each NUMBER: a
node of one simulated GPU with so many vGPUs, on a desktop in both colours, on a phone, and by ``vgpuctl top``.
``forms``: each dialog with what it refuses, a vGPU's details, and one with a long name.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.micro.dashboard import chromium, dashboard
from benchmarks.node import Node
from vgpu.ctl.observe.top import parse_changes
from vgpu.ctl.programs import attachment
from vgpu.node.link import ControlLink
from vgpu.protocol.messages import VgpuStatus
from vgpu.spec import VgpuSpec
from vgpu.top.app import Top
from vgpu.top.panels import NodeFacts

if TYPE_CHECKING:
    from playwright.sync_api import Page

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
CROWD_SHOTS: Final[tuple[tuple[str, Any, Any, int], ...]] = (
    ("", {"width": 1440, "height": 900}, "light", 1),
    ("-dark", {"width": 1440, "height": 900}, "dark", 1),
    ("-phone", {"width": 390, "height": 844}, "light", 2),
)
TERMINALS: Final = (("-80", (80, 24)), ("", (140, 57)))
TERMINAL_S: Final = 8.0
JOBS: Final = ("resnet50-training", "llama-7b-inference", "whisper-batch", "notebook")
PEOPLE: Final = ("alice", "carol", "erin", "grace", "ivan", "judy", "mallory", "niaj", "olivia", "peggy")
CROWD_PROGRAMS: Final = 8
LONG_NAME: Final = "experiment-2026-11-28-resnet50-with-augmentation-run-0042"
FORMS_MS: Final = 6000


def crowd(node: Node, number: int) -> list[tuple[VgpuStatus, bool]]:
    """``number`` vGPUs that have four fifths of one GPU in equal parts; the first ones have programs."""
    with ControlLink(node.control_socket, timeout_s=60) as link:
        made = []
        for i in range(number):
            name = f"{PEOPLE[i % len(PEOPLE)]}-{JOBS[i // len(PEOPLE) % len(JOBS)]}"
            spec = VgpuSpec.parse(sm_percent=80 / number, memory_bytes=f"{100 // number}G", name=name, burst=i % 5 == 1)
            made.append((link.create(spec, "0"), i < CROWD_PROGRAMS))
        return made


def scene(node: Node) -> list[tuple[VgpuStatus, bool]]:
    with ControlLink(node.control_socket, timeout_s=60) as link:
        link.set_gpu("1", mode="spatial")
        made = []
        for gpu, name, percent, memory, more, works in WANTED:
            fields: dict[str, Any] = {"sm_percent": percent, "memory_bytes": memory, "name": name, **more}
            made.append((link.create(VgpuSpec.parse(**fields), gpu), works))
        return made


def dialogs(page: Page) -> Iterator[str]:
    """Opens one dialog after the other. Yields the name of the picture of what is to be seen then."""

    def press(name: str, key: str) -> None:
        page.keyboard.press("Escape")
        page.locator(".vgpu", has_text=name).first.locator(".toggle").focus()
        page.keyboard.press(key)

    def refused(button: str) -> None:
        page.locator(button).click()
        page.locator("dialog[open] .refused").wait_for()

    press("trainer", "n")
    yield "create"
    refused("#edit-go")
    yield "create-empty"
    page.get_by_label("Compute").fill("90")
    refused("#edit-go")
    yield "create-no-room"
    page.get_by_label("Compute").fill("10")
    page.get_by_label("Memory such as").fill("eight")
    page.locator("#edit-more summary").click()
    page.get_by_label("Remove after").fill("soon")
    refused("#edit-go")
    yield "create-wrong"
    press("trainer", "r")
    yield "resize"
    page.get_by_label("Compute").fill("95")
    refused("#edit-go")
    yield "resize-no-room"
    press("trainer", "m")
    yield "move"
    refused("#move-go")
    yield "move-refused"
    press("trainer", "x")
    yield "remove"
    refused("#remove-go")
    yield "remove-refused"
    press("notebook", "u")
    page.locator(".vgpu", has_text="notebook").first.get_by_text("suspended").first.wait_for()
    yield "suspended"
    press("notebook", "u")
    press("trainer", "Enter")
    page.locator(".vgpu", has_text="trainer").first.scroll_into_view_if_needed()
    yield "details"
    press("trainer", "Enter")
    press(LONG_NAME, "Enter")
    page.locator(".vgpu", has_text=LONG_NAME).first.scroll_into_view_if_needed()
    yield "long-name"
    press(LONG_NAME, "x")
    yield "long-name-remove"
    page.keyboard.press("Escape")
    press(LONG_NAME, "Enter")


def forms(folder: Path) -> None:
    with Node(simulate=2) as node, ExitStack() as owned:
        vgpus = scene(node)
        with ControlLink(node.control_socket, timeout_s=60) as link:
            spec = VgpuSpec.parse(sm_percent=5, memory_bytes="4G", name=LONG_NAME)
            vgpus.append((link.create(spec, "0"), True))
        work(owned, vgpus)
        url, _ = owned.enter_context(dashboard(node))
        browser = owned.enter_context(chromium())
        for name, size, scheme, scale in CROWD_SHOTS:
            page = browser.new_page(viewport=size, color_scheme=scheme, device_scale_factor=scale)
            page.goto(url)
            page.wait_for_selector(".vgpu")
            page.wait_for_timeout(FORMS_MS)
            for shown in dialogs(page):
                page.wait_for_timeout(500)
                page.screenshot(path=folder / f"form-{shown}{name}.png")
            page.close()


def main(folder: Path, words: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    numbers = [int(word) for word in words if word.isdecimal()]
    if "forms" in words:
        forms(folder)
    for number in numbers:
        with Node(simulate=1) as node:
            shots = [(f"dashboard-{number}{name}", *shot) for name, *shot in CROWD_SHOTS]
            terminals = {f"top-{number}{name}": size for name, size in TERMINALS}
            taken(node, crowd(node, number), folder, shots, terminals)
    if not words:
        with Node(simulate=2) as node:
            taken(node, scene(node), folder, SHOTS)


async def terminal(node: Node, size: tuple[int, int]) -> str:
    """``vgpuctl top`` of the node in a terminal of that size, as an SVG."""
    facts = NodeFacts(socket.gethostname(), 0, "", True, time.time() - 3600)
    app = Top(node.control_socket, facts, 1.0, parse_changes)
    async with app.run_test(size=size) as pilot:
        await pilot.pause(TERMINAL_S)
        return app.export_screenshot()


def work(owned: ExitStack, vgpus: Iterable[tuple[VgpuStatus, bool]]) -> None:
    """Starts a program in each vGPU that works; it ends with ``owned``."""
    command = ["python", "-m", "vgpu.workload", "--seconds", "300", "-o", "json"]
    for vgpu, works in vgpus:
        if works:
            path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # no picture shows a folder
            environment = attachment([vgpu]).environment({**os.environ, "PATH": path})
            program = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
            owned.callback(program.wait)
            owned.callback(program.kill)


def taken(
    node: Node,
    vgpus: list[tuple[VgpuStatus, bool]],
    folder: Path,
    shots: Iterable[Any],
    terminals: Mapping[str, tuple[int, int]] | None = None,
) -> None:
    with ExitStack() as owned:
        work(owned, vgpus)
        url, _ = owned.enter_context(dashboard(node))
        drawn = {name: asyncio.run(terminal(node, size)) for name, size in (terminals or {}).items()}
        browser = owned.enter_context(chromium())
        for name, picture in drawn.items():
            page = browser.new_page(device_scale_factor=1, viewport={"width": 1600, "height": 900})
            page.set_content(picture)
            page.locator("svg").first.screenshot(path=folder / f"{name}.png")
            page.close()
        for number, (name, size, scheme, scale) in enumerate(shots):
            page = browser.new_page(viewport=size, color_scheme=scheme, device_scale_factor=scale)
            page.goto(url)
            page.wait_for_selector(".vgpu")
            page.wait_for_timeout(SETTLE_MS if number == 0 else 8000)
            page.screenshot(path=folder / f"{name}.png")
            page.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
