"""A browser without a window, and a page of the dashboard in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest
from playwright.sync_api import Browser, Page, ViewportSize, expect, sync_playwright

from tests.integration.node import PATIENCE_S
from tests.web.conftest import Dashboard

CHROMIUM: Final = Path("/usr/bin/chromium")
ARGUMENTS: Final = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PHONE: Final[ViewportSize] = {"width": 360, "height": 740}
MARKS: Final = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM.exists(), reason="Chromium is not installed: apt-get install chromium"),
]


@contextmanager
def launched() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@contextmanager
def opened(browser: Browser, dashboard: Dashboard, complaints: list[str]) -> Iterator[Page]:
    """``complaints`` gets the errors of scripts and of the content policy, and requests to other hosts."""
    context = browser.new_context(viewport={"width": 1400, "height": 900}, reduced_motion="reduce")
    context.set_default_timeout(PATIENCE_S * 1000)
    expect.set_options(timeout=PATIENCE_S * 1000)
    page = context.new_page()
    page.on(
        "console",
        lambda said: complaints.append(f"{said.text} {said.location['url']}") if said.type == "error" else None,
    )
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on(
        "request", lambda request: None if request.url.startswith(dashboard.url) else complaints.append(request.url)
    )
    page.goto(dashboard.printed)
    yield page
    context.close()
