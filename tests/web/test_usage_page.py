"""Days of usage on the page, in a browser: bars of planted rows, ranges, and a phone."""

from __future__ import annotations

import os
import re
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.integration.node import SimulatedNode, eventually
from tests.web import browsing
from tests.web.conftest import Dashboard
from vgpu.node.usage_store import put
from vgpu.usage.account import Label
from vgpu.usage.rows import DAY_S, HOUR_S, MINUTE_S, Key, Rows, Sums

pytestmark = browsing.MARKS
S = 1_000_000_000
VGPUS = {
    "vgpu-000000a1": ("train", 0.5, 0.9),
    "vgpu-000000a2": ("notebook", 0.25, 0.1),
    "vgpu-000000a3": ("", 0.2, 1.4),
}
"""Name, promise, and the part of the promise that was used."""


def planted(now: int) -> tuple[Rows, dict[str, Label]]:
    """Thirty days by the hour, the last of them by the minute."""
    rows: Rows = {}
    day = now // HOUR_S * HOUR_S - 24 * HOUR_S
    starts = [(HOUR_S, day - HOUR_S * n) for n in range(29 * 24)]
    starts += [(MINUTE_S, start) for start in range(day, now, MINUTE_S)]
    for index, (vgpu_id, (_, promise, part)) in enumerate(VGPUS.items()):
        for span, start in starts:
            if (start // HOUR_S + 7 * index) % 24 < 9 - index:
                continue
            promised = round(promise * span * S)
            used = round(promised * part * (0.6 + 0.4 * (start // HOUR_S % 5) / 4))
            rows[Key(span, start, 0 if index < 2 else 65_000, vgpu_id)] = Sums(
                measured_ns=span * S,
                promised_ns=promised,
                used_ns=used,
                wasted_ns=max(0, promised - used),
                memory_promised_kib_s=span * (8 << 20),
                memory_used_kib_s=span * (3 << 20),
            )
    names = {v: Label(0 if n != "" else 65_000, n, "", "") for v, (n, _, _) in VGPUS.items()}
    return rows, names


@pytest.fixture(scope="module")
def history(node: SimulatedNode) -> None:
    path = node.paths.state / "node.db"
    eventually(path.exists, "the node's database")
    with closing(sqlite3.connect(path, timeout=30)) as db, db:
        put(db, *planted(int(time.time())))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing.launched() as browser:
        yield browser


@pytest.fixture(scope="module")
def complaints() -> list[str]:
    return []


@pytest.fixture(scope="module")
def page(browser: Browser, dashboard: Dashboard, complaints: list[str], history: None) -> Iterator[Page]:
    with browsing.opened(browser, dashboard, complaints) as page:
        yield page


def test_usage_takes_the_place_of_the_gpus(page: Page) -> None:
    expect(page.locator(".gpu h2").first).to_be_visible()
    page.keyboard.press("h")
    expect(page.locator("#usage")).to_be_visible()
    expect(page.locator("#gpus")).to_be_hidden()
    expect(page.locator("#usage-list li")).to_have_count(2)
    expect(page.locator("#usage-list .who b")).to_have_text(["root", re.compile("65000|nogroup")])
    expect(page.locator("#usage-chart g")).to_have_count(24)


def test_ranges_have_their_bars_and_the_sums_of_the_api(page: Page, dashboard: Dashboard) -> None:
    for range_, bars, days in (("7 d", 28, 7), ("30 d", 30, 30)):
        page.get_by_role("button", name=range_, exact=True).click()
        expect(page.get_by_role("button", name=range_, exact=True)).to_have_attribute("aria-pressed", "true")
        expect(page.locator("#usage-chart g")).to_have_count(bars)
        with dashboard.client() as client:
            rows = client.get("usage", params={"since_unix_s": time.time() - days * DAY_S}).json()["rows"]
        promised = sum(row["promised_gpu_hours"] for row in rows)
        shown = float(page.locator("#usage-figures dd b").first.inner_text())
        assert abs(shown - promised) < 0.06 * promised + 5


def test_each_vgpu_has_its_own_bars_also_one_that_is_gone(page: Page) -> None:
    page.get_by_role("button", name="by vGPU").click()
    names = page.locator("#usage-list .who b")
    expect(names.filter(has_text=re.compile("^train$"))).to_be_visible()
    expect(names.filter(has_text=re.compile("^vgpu-000000a3$"))).to_be_visible()
    beyond = page.locator("#usage-list li", has_text="vgpu-000000a3").locator("rect.beyond")
    assert beyond.count() > 10
    wasted = page.locator("#usage-list li", has_text="notebook").locator("rect.wasted")
    assert wasted.count() > 10


def test_it_fits_a_phone_and_a_large_window(page: Page, tmp_path: Path) -> None:
    folder = Path(os.environ.get("VGPU_SCREENSHOTS", tmp_path))
    for name, size in (("desk", {"width": 1440, "height": 900}), ("phone", browsing.PHONE)):
        page.set_viewport_size(size)  # type: ignore[arg-type]
        page.screenshot(path=folder / f"usage-{name}.png")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
    page.set_viewport_size({"width": 1400, "height": 900})


def test_the_gpus_come_back_and_nothing_complained(page: Page, complaints: list[str]) -> None:
    page.keyboard.press("h")
    expect(page.locator("#gpus")).to_be_visible()
    expect(page.locator("#usage")).to_be_hidden()
    assert complaints == []
