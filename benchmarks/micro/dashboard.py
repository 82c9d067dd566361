"""The web dashboard with 64 vGPUs: what its page costs the browser, and the dashboard itself.

    python -m benchmarks.micro.dashboard [--vgpus 64] [--working 8] [--seconds 10]

Real node, brokers, programs and dashboard; only the GPU is simulated. Headless Chromium draws in software, on the cores
that everything else runs on. *draw*: a snapshot's way into the page (script); *frame*: the longest time that the page's
main thread was busy at one go; CPU in percent of one core, of the page's process (its script, layout and painting), of
Chromium's process that rasters and composes, and of the dashboard.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psutil

from benchmarks.micro.contention import contending, made
from benchmarks.node import Node
from benchmarks.suite.report.stats import percentile

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM: Final = Path("/usr/bin/chromium")
ARGUMENTS: Final = (
    *("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"),
    "--disable-sync",
)
OBSERVE: Final = """
window.busy = [];
const seen = (list) => window.busy.push(...list.getEntries().map((entry) => entry.duration));
new PerformanceObserver(seen).observe({type: "longtask"});
"""


@contextmanager
def dashboard(node: Node) -> Iterator[tuple[str, int]]:
    """``vgpuctl dashboard`` of the node: the address that it prints, and its pid."""
    command = [*node.vgpuctl, "dashboard", "--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, env=node.environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.stdout.readline().strip(), process.pid
        process.terminate()


@contextmanager
def chromium() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


def cpu_s(browser: Browser, dashboard_pid: int) -> dict[str, float]:
    """CPU seconds so far, by kind of process."""
    session = browser.new_browser_cdp_session()
    found: dict[str, float] = {"page": 0.0, "raster": 0.0}
    for process in session.send("SystemInfo.getProcessInfo")["processInfo"]:
        kind = {"renderer": "page", "GPU": "raster"}.get(process["type"])
        if kind is not None:
            found[kind] += process["cpuTime"]
    session.detach()
    times = psutil.Process(dashboard_pid).cpu_times()
    return found | {"dashboard": times.user + times.system}


def measured(browser: Browser, page: Page, dashboard_pid: int, seconds: float) -> dict[str, Any]:
    page.evaluate("performance.clearMeasures(); window.busy = []")
    before, began_s = cpu_s(browser, dashboard_pid), time.monotonic()
    page.wait_for_timeout(seconds * 1000)
    after, passed_s = cpu_s(browser, dashboard_pid), time.monotonic() - began_s
    draws = [ms for ms in page.evaluate("performance.getEntriesByName('draw', 'measure').map((e) => e.duration)") if ms]
    busy = page.evaluate("window.busy")
    return {
        "snapshots": len(draws),
        "draw_p50_ms": percentile(draws, 50),
        "draw_max_ms": max(draws),
        "frames_over_50_ms": len(busy),
        "longest_frame_ms": max(busy, default=0.0),
        **{f"{kind}_percent": 100 * (after[kind] - before[kind]) / passed_s for kind in before},
    }


def main(arguments: argparse.Namespace) -> None:
    with Node(simulate=1) as node:
        vgpus = made(node, arguments.vgpus)
        working = vgpus[: arguments.working]
        with (
            contending(node, working, 4 * arguments.seconds) if working else nullcontext(),
            dashboard(node) as (url, pid),
            chromium() as browser,
        ):
            page = browser.new_page(viewport={"width": 1400, "height": 900})
            page.add_init_script(OBSERVE)
            page.goto(url)
            page.wait_for_selector(f".gpu .vgpu:nth-child({len(vgpus)})", state="attached")
            timeline = page.get_by_role("button", name="Timeline")
            for shown in (True, False):
                if (timeline.get_attribute("aria-expanded") == "true") != shown:
                    timeline.click()
                page.wait_for_timeout(3000)
                figures = measured(browser, page, pid, arguments.seconds)
                print(f"{len(vgpus)} vGPUs, {len(working)} at work, timeline {'shown' if shown else 'closed'}")
                for name, value in figures.items():
                    print(f"  {name:20} {value:8.1f}", flush=True)


def parsed(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.micro.dashboard")
    parser.add_argument("--vgpus", type=int, default=64)
    parser.add_argument("--working", type=int, default=8, help="of these with a program that wants all the time")
    parser.add_argument("--seconds", type=float, default=10)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parsed(sys.argv[1:]))
