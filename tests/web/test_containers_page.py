"""The containers of the page, in a browser and with an engine that runs nothing: from the start to the removal."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.integration.node import SimulatedNode, eventually
from tests.web import browsing
from tests.web.conftest import Dashboard, claimed
from tests.web.fake_engine import FakeEngine, frame

pytestmark = browsing.MARKS


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing.launched() as browser:
        yield browser


@pytest.fixture
def page(browser: Browser, served: Dashboard, engine: FakeEngine) -> Iterator[Page]:
    """Each test has a page of its own; the browser must not complain but for what was refused on purpose."""
    complaints: list[str] = []
    with browsing.opened(browser, served, complaints) as page:
        expect(page.locator("#containers")).to_be_visible()
        yield page
    known = re.compile(r"Failed to load resource: the server responded with a status of (40\d|50\d)")
    assert [text for text in complaints if not known.search(text)] == []


def container(page: Page, name: str) -> Locator:
    return page.locator(".container", has=page.get_by_text(name, exact=True))


def begin(page: Page, name: str) -> None:
    """With the keyboard alone."""
    page.keyboard.press("d")
    expect(page.get_by_label(re.compile("^Image"))).to_be_focused()
    page.keyboard.press("Tab")
    page.keyboard.type(name)
    page.keyboard.press("Enter")


def test_the_empty_list_says_what_to_do(page: Page) -> None:
    expect(page.locator("#containers-empty")).to_contain_text("Press d to start one")
    expect(page.locator("#containers-empty code")).to_have_text("vgpuctl container run --sm 30 --mem 8G IMAGE")
    page.keyboard.press("?")
    expect(page.locator("#containers-key")).to_be_visible()


def test_a_container_is_started_stopped_and_removed(page: Page, node: SimulatedNode, engine: FakeEngine) -> None:
    begin(page, "web-train")
    expect(page.locator("#begin")).to_be_hidden()
    mine = container(page, "web-train")
    expect(mine.locator(".state")).to_have_text("running")
    expect(mine.locator(".figures")).to_have_text("0.0 % of 30 %")
    expect(mine.get_by_role("button", name="Log of web-train")).to_be_focused()
    expect(page.locator(".vgpu .by", has_text="in a container")).to_be_visible()
    mine.get_by_role("link", name="in web-train").click()
    expect(page.locator(".vgpu .toggle")).to_be_focused()
    mine.get_by_role("button", name="Stop web-train").click()
    expect(mine.locator(".state")).to_have_text("exited")
    mine.get_by_role("button", name="Start web-train").press("Enter")
    expect(mine.locator(".state")).to_have_text("running")
    mine.get_by_role("button", name="Remove web-train").click()
    expect(page.locator("#discard-lead")).to_contain_text("It runs: its programs are killed.")
    expect(page.get_by_role("button", name="Cancel")).to_be_focused()
    page.locator("#discard-go").press("Enter")
    expect(mine).to_have_count(0)
    assert engine.containers == {}
    eventually(lambda: not claimed(node), "the vGPU goes with the container")


def test_what_is_refused_is_said_beside_its_field(page: Page, engine: FakeEngine) -> None:
    begin(page, "two words")
    expect(page.locator("#begin-refused p")).to_contain_text("'two words' is not a name")
    engine.images.remove("example/train:1")
    page.locator("#begin-name").fill("")
    page.locator("#begin-go").click()
    expect(page.locator("#begin-refused p")).to_contain_text("does not have the image example/train:1")
    expect(page.locator("#begin-refused code")).to_contain_text("docker pull example/train:1")
    page.get_by_label(re.compile("^Image")).select_option("beside")
    expect(page.locator("#begin-lead")).to_contain_text("10 % of a GPU, memory in the same part, spatial mode")
    expect(page.locator("#begin-what")).to_have_text("example/serve:1")
    page.locator("#begin-go").click()
    expect(page.locator("#begin-refused p")).to_have_text("No GPU is in spatial mode.")
    page.keyboard.press("Escape")
    expect(page.locator("#begin")).to_be_hidden()


def test_a_log_is_shown_as_it_comes(page: Page, engine: FakeEngine) -> None:
    mine = engine.add("mine", vgpu_dev__vgpu="vgpu-1")
    engine.logs[mine] = frame(1, b"\x1b[32mgreen\x1b[0m\r\n") + frame(2, b"<b>loud</b>\n")
    expect(container(page, "mine")).to_contain_text("vGPU gone")
    page.get_by_role("button", name="Log of mine").click()
    expect(page.locator("#log-text")).to_be_focused()
    expect(page.locator("#log-state")).to_have_text("live")
    assert page.locator("#log-text").text_content() == "green\n<b>loud</b>\n"
    expect(page.locator("#log-text .stderr")).to_have_text("<b>loud</b>")
    engine.more_log.set()
    expect(page.locator("#log-text")).to_contain_text("and on")
    expect(page.locator("#log-state")).to_have_text("mine has ended")
    page.keyboard.press("Escape")
    expect(page.locator("#log")).to_be_hidden()


def test_an_engine_that_goes_away_is_missed(page: Page, engine: FakeEngine) -> None:
    engine.add("mine", vgpu_dev__vgpu="vgpu-1")
    expect(container(page, "mine")).to_be_visible()
    away = engine.path.rename(engine.path.with_name("away"))
    try:
        expect(page.locator("#containers-failed")).to_contain_text("does not answer")
        expect(container(page, "mine")).to_be_visible()  # as it was
    finally:
        away.rename(engine.path)
    expect(page.locator("#containers-failed")).to_be_hidden()


@pytest.mark.parametrize("size", [browsing.PHONE, {"width": 1440, "height": 900}], ids=["phone", "desk"])
def test_nothing_is_wider_than_the_window_and_nothing_covers_anything(
    page: Page, engine: FakeEngine, size: dict[str, int]
) -> None:
    page.set_viewport_size(size)  # type: ignore[arg-type]
    engine.add("one", vgpu_dev__vgpu="vgpu-1")
    long = "a-name-that-is-as-long-as-a-name-of-a-container-may-be-and-then-some-more"
    engine.add(long, state="exited", vgpu_dev__vgpu="vgpu-2")
    expect(page.locator(".container")).to_have_count(2)
    assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
    boxes = "row => [...row.children].map(child => child.getBoundingClientRect()).filter(box => box.width)"
    boxes += ".map(({left, right, top, bottom}) => [left, right, top, bottom])"
    for row in page.locator(".container").all():
        found = row.evaluate(boxes)
        for i, (left, right, top, bottom) in enumerate(found):
            for other in found[i + 1 :]:
                apart = other[0] >= right - 1 or other[1] <= left + 1 or other[2] >= bottom - 1 or other[3] <= top + 1
                assert apart, found
