"""The page in a browser that nobody sees: what a person does with a vGPU, from its creation to its removal."""

from __future__ import annotations

import os
import pwd
import re
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.integration.node import SimulatedNode, eventually
from tests.web import browsing
from tests.web.conftest import Dashboard
from vgpu.spec import VgpuSpec

pytestmark = browsing.MARKS


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing.launched() as browser:
        yield browser


@pytest.fixture(scope="module")
def complaints() -> list[str]:
    """What the browser had to say: errors of scripts, of the content policy, and requests to other hosts."""
    return []


@pytest.fixture(scope="module")
def page(browser: Browser, dashboard: Dashboard, complaints: list[str]) -> Iterator[Page]:
    with browsing.opened(browser, dashboard, complaints) as page:
        yield page


def row(page: Page, name: str) -> Locator:
    return page.locator(".vgpu", has=page.get_by_text(name, exact=True))


def percent(locator: Locator) -> float:
    found = re.search(r"([\d.]+) %", locator.inner_text())
    assert found, locator.inner_text()
    return float(found[1])


@pytest.fixture(scope="module")
def program(node: SimulatedNode) -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()


def test_the_token_is_gone_from_the_address(page: Page, dashboard: Dashboard) -> None:
    assert page.url == dashboard.url
    expect(page.locator("#link-text")).to_have_text("live")
    expect(page.locator(".gpu h2")).to_have_text(["GPU 0", "GPU 1"])
    expect(page.locator(".gpu .pill.simulated").first).to_be_visible()
    expect(page.locator(".gpu .empty code").first).to_have_text("vgpuctl create --sm 30 --mem 8G")


def test_a_vgpu_is_created_with_the_keyboard(page: Page, node: SimulatedNode) -> None:
    page.keyboard.press("n")
    expect(page.get_by_label(re.compile("^Compute"))).to_be_focused()
    page.keyboard.type("30%")
    page.get_by_label(re.compile("^Memory such as")).fill("1G")
    page.get_by_label(re.compile("^Name optional")).fill("web-made")
    page.get_by_label("GPU", exact=True).select_option("0")
    expect(page.locator("#edit-command")).to_have_text("vgpuctl create --sm 30% --mem 1G --name web-made --gpu 0")
    page.keyboard.press("Tab")
    page.get_by_role("button", name="Create").press("Enter")
    expect(page.locator("#edit")).to_be_hidden()
    expect(row(page, "web-made").locator(".promised, .cell.share")).to_contain_text("of 30 %")
    with node.link() as link:
        assert [(vgpu.name, vgpu.guarantee_ratio) for vgpu in link.list()] == [("web-made", 0.3)]


def test_a_program_in_it_shows_its_tokens_and_its_share(
    page: Page, node: SimulatedNode, program: list[subprocess.Popen[bytes]]
) -> None:
    command = [sys.executable, "-m", "vgpu.ctl", "exec", "web-made", "--"]
    command += [sys.executable, "-m", "vgpu.workload", "--seconds", "600", "-o", "json"]
    program.append(node.popen(command, stdout=subprocess.DEVNULL))
    mine = row(page, "web-made")
    # Alone on its GPU it holds one token without an end, once it has begun.
    eventually(lambda: mine.locator(".cell.rate b").inner_text() == "open", "its token")
    eventually(lambda: abs(percent(mine.locator(".cell.share b")) - 30) < 6, "a share of 30 %")
    expect(mine.locator(".cell.procs")).to_contain_text("1")
    mine.get_by_role("button", expanded=False).click()
    expect(mine.locator("tbody td").first).to_have_text(re.compile(r"\d+"))
    expect(page.locator("#events .kind", has_text="attached")).to_be_visible()
    expect(page.locator("#events li", has_text=re.compile(r"created by (?!uid)[a-z]")).first).to_be_visible()


RATES_OF = """async (readings) => {
  const { Row } = await import("/static/row.js");
  const { vgpus } = await (await fetch("/api/v1/snapshot")).json();
  const row = new Row("vgpu-played", {});
  return readings.map((reading) => {
    row.draw({ ...vgpus[0], holds: true, ...reading }, 0, 0);
    return row.rate.textContent;
  });
}"""


def test_a_rate_is_open_only_where_the_node_says_so(page: Page) -> None:
    """And not wherever a token is held and none has ended lately."""
    readings = [
        {"tokens_per_second": 0.0, "open_ended": True},
        {"tokens_per_second": 0.0, "open_ended": False},
        {"tokens_per_second": 24.96, "open_ended": False},
    ]
    assert page.evaluate(RATES_OF, readings) == ["open", "0.0", "25.0"]


def test_its_leases_are_on_the_timeline(page: Page) -> None:
    first = page.locator(".gpu").first
    button = first.get_by_role("button", name="Timeline")
    if button.get_attribute("aria-expanded") == "false":
        button.click()
    expect(first.locator("canvas")).to_have_attribute("aria-label", re.compile(r"Held: web-made \d"))
    drawn = "canvas => canvas.getContext('2d').getImageData(canvas.width - 400, 4, 380, 8).data.some(byte => byte > 0)"
    eventually(lambda: first.locator("canvas").evaluate(drawn), "a lease drawn")


def test_it_is_resized_and_gets_more(page: Page) -> None:
    mine = row(page, "web-made")
    mine.get_by_role("button", name="Resize web-made").click()
    page.get_by_label(re.compile("^Compute")).fill("60")
    expect(page.locator("#edit-command")).to_have_text("vgpuctl set web-made --sm 60")
    page.locator("#edit-go").click()
    expect(mine.locator(".cell.share")).to_contain_text("of 60 %")
    eventually(lambda: abs(percent(mine.locator(".cell.share b")) - 60) < 8, "a share of 60 %")


def test_what_is_refused_is_said_in_the_nodes_words_and_nothing_is_lost(page: Page) -> None:
    page.keyboard.press("n")
    page.get_by_label(re.compile("^Compute")).fill("70")
    page.get_by_label("GPU", exact=True).select_option("0")
    page.locator("#edit-go").click()
    expect(page.locator("#edit-refused")).to_contain_text("70% of the GPU's time asked for, 40% is left")
    expect(page.locator("#edit-refused code")).to_have_text("the largest that fits: --sm 40")
    expect(page.locator("#edit-sm_percent-wrong")).to_have_text("40 fits at most")
    expect(page.get_by_label("Compute")).to_have_attribute("aria-invalid", "true")
    expect(page.get_by_label(re.compile("^Compute"))).to_have_value("70")
    page.get_by_role("button", name="Use compute 40").press("Enter")
    expect(page.get_by_label(re.compile("^Compute"))).to_have_value("40")
    expect(page.locator("#edit-command")).to_have_text("vgpuctl create --sm 40 --gpu 0")
    page.get_by_label(re.compile("^Compute")).fill("170")
    page.get_by_label(re.compile("^Memory such as")).fill("8 apples")
    page.locator("#edit-go").click()
    said = "Compute: 170 is not between 1 and 100 percent; Memory: '8 apples' is not a size"
    expect(page.locator("#edit-refused p")).to_have_text(re.compile(said))
    expect(page.locator("#edit-refused code")).to_be_hidden()
    for field, why in (("sm_percent", "170 is not between"), ("memory_bytes", "'8 apples' is not a size")):
        expect(page.locator(f"#edit-{field}")).to_have_attribute("aria-invalid", "true")
        expect(page.locator(f"#edit-{field}-wrong")).to_contain_text(why)
    expect(page.locator("#edit-sm_percent")).to_be_focused()
    page.keyboard.type("3")
    expect(page.locator("#edit-sm_percent-wrong")).to_have_count(0)
    page.locator("#edit-sm_percent").fill("")
    page.locator("#edit-go").click()
    expect(page.locator("#edit-refused p")).to_have_text("Compute: type a number from 1 to 100.")
    expect(page.locator("#edit-marks")).to_contain_text("must be filled in")
    page.keyboard.press("Escape")
    expect(page.locator("#edit")).to_be_hidden()


def test_how_a_gpu_is_shared_changes_as_far_as_its_programs_let_it(page: Page, node: SimulatedNode) -> None:
    page.get_by_role("button", name="Change how GPU 0 is shared").click()
    expect(page.locator("#share-lead")).to_contain_text("A program runs on it")
    page.locator("#share-go").click()
    expect(page.locator("#share-refused")).to_contain_text("Nothing is to be changed")
    page.get_by_label("Mode").select_option("spatial")
    page.get_by_label(re.compile("^Period")).fill("7s")
    expect(page.locator("#share-command")).to_have_text("vgpuctl gpu set 0 --mode spatial --period 7s")
    page.locator("#share-go").click()
    expect(page.locator("#share-refused")).to_have_text(re.compile("Period: 7s is not between 5ms and 1s"))
    page.get_by_label(re.compile("^Period")).fill("80ms")
    page.get_by_label(re.compile("^Window")).fill("6ms")
    page.locator("#share-go").click()
    expect(page.locator("#share-refused")).to_contain_text("GPU 0 has 1 process attached")
    expect(page.locator("#share-refused code")).to_have_text("end them first: vgpuctl ps")
    page.get_by_label("Mode").select_option("temporal")
    page.locator("#share-go").click()
    expect(page.locator("#share")).to_be_hidden()
    with node.link() as link:
        changed = link.gpus()[0]
        link.set_gpu("0", period_ns=40_000_000, window_ns=12_000_000)
    assert (changed.mode, changed.window_ns) == ("temporal", 6_000_000)
    assert changed.period_ns >= 80_000_000


def test_a_gpu_without_programs_changes_its_mode(page: Page) -> None:
    mode = page.locator(".gpu").nth(1).locator("header .pill:not(.simulated)")
    for wanted in ("spatial", "temporal"):
        page.get_by_role("button", name="Change how GPU 1 is shared").click()
        expect(page.locator("#share-lead")).to_contain_text("No program runs on it")
        page.get_by_label("Mode").select_option(wanted)
        page.locator("#share-go").click()
        expect(page.locator("#toast")).to_contain_text(f"GPU 1: {wanted} mode")
        expect(mode).to_have_text(wanted)


def test_the_filter_finds_by_name(page: Page) -> None:
    page.keyboard.press("/")
    page.keyboard.type("nobody")
    expect(row(page, "web-made")).to_have_count(0)
    page.keyboard.press("Escape")
    expect(row(page, "web-made")).to_be_visible()


def test_colours_are_chosen_and_kept(page: Page) -> None:
    def ground() -> str:
        return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    light = ground()
    page.locator("#theme").click()
    page.locator("#theme").click()
    assert ground() != light
    page.reload()
    expect(row(page, "web-made")).to_be_visible()
    assert ground() != light
    page.locator("#theme").click()
    assert ground() == light


ADVICE = """async (text) => {
  const { advised } = await import("/static/advice.js");
  const did = [];
  const { vgpus, gpus } = await (await fetch("/api/v1/snapshot")).json();
  const page = {
    snapshot: () => ({ gpus }),
    dialogs: { resize: (vgpu, wanted) => did.push(["resize", vgpu.name, wanted]), remove: () => did.push(["remove"]) },
    sharing: { open: (gpu, wanted) => did.push(["share", gpu.index, wanted]) },
    act: (button, method, path) => did.push([method, path.replace(vgpus[0].vgpu_id, "ID")]),
  };
  const [words, buttons] = advised(text.replaceAll("ID", vgpus[0].vgpu_id), page, vgpus[0]);
  buttons.forEach((button) => button.click());
  return [words.replaceAll(vgpus[0].vgpu_id, "ID"), buttons.map((button) => button.textContent), did];
}"""


@pytest.mark.parametrize(
    ("text", "words", "buttons", "did"),
    [
        (
            "It used 12 %: vgpuctl set ID --sm 15 --mem 640M. In spatial mode: vgpuctl gpu set 0 --mode spatial, once",
            "It used 12 %. In spatial mode, once",
            ["Resize to compute 15 % and memory 640M…", "Change GPU 0 to spatial mode…"],
            [["resize", "web-made", {"sm_percent": "15", "memory_bytes": "640M"}], ["share", 0, {"mode": "spatial"}]],
        ),
        ("it sleeps: vgpuctl resume ID", "it sleeps", ["Resume"], [["POST", "vgpus/ID/resume"]]),
        ("of another: vgpuctl set vgpu-0 --sm 3", "of another: vgpuctl set vgpu-0 --sm 3", [], []),
        ("unknown: vgpuctl set ID --no-such 3", "unknown: vgpuctl set ID --no-such 3", [], []),
    ],
)
def test_what_the_page_advises_has_a_button(
    page: Page, text: str, words: str, buttons: list[str], did: list[object]
) -> None:
    assert page.evaluate(ADVICE, text) == [words, buttons, did]


def test_a_row_names_its_user_and_its_command(page: Page) -> None:
    user = pwd.getpwuid(os.getuid()).pw_name
    mine = row(page, "web-made")
    eventually(lambda: mine.locator(".by").inner_text().startswith(f"{user} · "), "the user and the command")
    assert "vgpu.workload" in mine.locator(".by").inner_text()
    expect(page.locator("#host")).to_have_text(socket.gethostname())
    page.locator("#filter").fill(user)
    expect(mine).to_be_visible()
    page.locator("#filter").fill("")


def test_all_bars_have_one_scale(page: Page) -> None:
    """The notch of 60 % stands at six tenths of the bar, and the bar is the whole GPU."""
    bar = row(page, "web-made").locator(".cell.share .bullet")
    place = "bar => bar.querySelector('.tick').getBoundingClientRect().left - bar.getBoundingClientRect().left"
    width = bar.evaluate("bar => bar.getBoundingClientRect().width")
    assert abs(bar.evaluate(place) / width - 0.6) < 0.02


SUMS = """async () => {
  const { whole, atOnce } = await import("/static/format.js");
  return [whole(2.0), atOnce(2.0), whole(0.5), atOnce(1.0)];
}"""


def test_no_sum_is_over_100_percent(page: Page) -> None:
    assert page.evaluate(SUMS) == ["100 %", "2.0 vGPUs at once", "50.0 %", ""]


def test_forty_rows_are_sorted_grouped_and_fit_the_window(page: Page, node: SimulatedNode) -> None:
    before = page.viewport_size
    assert before is not None
    with node.link() as link:
        made = [
            link.create(VgpuSpec.parse(sm_percent=1, memory_bytes="64M", name=f"crowd-{i:02}"), str(i % 2)).vgpu_id
            for i in range(39)
        ]
        expect(page.locator(".vgpu")).to_have_count(40)
        expect(page.locator("body")).to_have_attribute("data-rows", "compact")
        page.set_viewport_size({"width": 1440, "height": 900})
        page.reload()  # without opened details
        expect(page.locator(".vgpu")).to_have_count(40)
        overflow = "document.documentElement.scrollHeight - innerHeight"
        eventually(lambda: page.evaluate(overflow) <= 0, "40 vGPUs fit 1440 by 900")
        labels = page.locator(".gpu").first.locator(".vgpu .who b")
        page.locator("#order").select_option("name")
        eventually(lambda: labels.all_inner_texts()[:2] == ["crowd-00", "crowd-02"], "sorted by name")
        page.keyboard.press("Escape")
        page.locator("#order").evaluate("select => select.blur()")
        page.keyboard.press("s")
        expect(page.locator("#order")).to_have_value("user")
        page.keyboard.press("g")
        user = pwd.getpwuid(os.getuid()).pw_name
        expect(page.locator(".group b")).to_have_text([user, user])
        page.keyboard.press("g")
        expect(page.locator(".group b").last).to_have_text("idle")
        page.keyboard.press("c")
        expect(page.locator("body")).to_have_attribute("data-rows", "full")
        page.locator("#group").select_option("nothing")
        page.locator("#order").select_option("age")
        page.set_viewport_size(browsing.PHONE)  # type: ignore[arg-type]
        page.keyboard.press("c")
        expect(page.locator("body")).to_have_attribute("data-rows", "compact")
        assert page.evaluate("document.documentElement.scrollWidth") <= browsing.PHONE["width"]
        page.set_viewport_size(before)
        for vgpu_id in made:
            link.remove(vgpu_id)
    expect(page.locator(".vgpu")).to_have_count(1)
    page.evaluate("localStorage.clear()")
    page.reload()
    expect(page.locator("body")).to_have_attribute("data-rows", "full")


def test_a_vgpu_is_reached_by_keys_alone(page: Page) -> None:
    expect(row(page, "web-made")).to_be_visible()
    page.keyboard.press("ArrowDown")
    expect(row(page, "web-made").locator(".toggle")).to_be_focused()
    for key, dialog in (("r", "#edit"), ("m", "#move"), ("x", "#remove"), ("?", "#keys")):
        page.keyboard.press(key)
        expect(page.locator(dialog)).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.locator(dialog)).to_be_hidden()


LONGEST = [["123.4"], ["100 %"], ["100 %"], ["100 %", "of SMs × time"], ["53.9 / 140 GiB"], ["100 %"],
           ["700 W", "100 °C, 1980 MHz"]]  # fmt: skip
ROWS_OF_FIGURES = """([gpu, longest]) => {
  const figures = [...gpu.querySelectorAll(":scope > .figures > .figure")];
  figures.forEach((figure, i) => {
    figure.hidden = false;
    figure.querySelector("dd b").textContent = longest[i][0];
    figure.querySelector("dd span").textContent = longest[i][1] ?? "";
  });
  const places = [...figures, ...gpu.querySelectorAll(".line-of > *")].map((part) => part.getBoundingClientRect());
  const end = gpu.getBoundingClientRect().right;
  const rows = new Set(places.slice(0, figures.length).map((place) => place.top));
  return [rows.size, places.every((place) => place.right < end)];
}"""


def test_the_figures_of_a_gpu_stand_in_one_row(page: Page) -> None:
    """However long they are; and no button is cut off."""
    before = page.viewport_size
    assert before is not None
    gpu = page.locator(".gpu").first.element_handle()
    for width, rows in ((1760, 1), (1400, 1), (1280, 1), (1024, 1), (900, 2), (browsing.PHONE["width"], 3)):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate(ROWS_OF_FIGURES, [gpu, LONGEST]) == [rows, True], width
    page.set_viewport_size(before)
    page.reload()  # with figures of its own
    expect(row(page, "web-made")).to_be_visible()


def test_a_phone_needs_no_scrolling_to_the_side(page: Page) -> None:
    before = page.viewport_size
    assert before is not None
    page.set_viewport_size(browsing.PHONE)  # type: ignore[arg-type]
    expect(row(page, "web-made")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= browsing.PHONE["width"]
    page.set_viewport_size(before)


def test_a_node_that_goes_away_is_missed_and_found_again(page: Page, node: SimulatedNode) -> None:
    node.kill_node()
    expect(page.locator("#banner")).to_contain_text("vgpuctl serve --detach")
    expect(page.locator("#link-text")).to_contain_text("stale since")
    expect(row(page, "web-made")).to_be_visible()  # as it was
    node.start()
    expect(page.locator("#banner")).to_be_hidden()
    expect(page.locator("#link-text")).to_have_text("live")


def test_it_is_removed_once_its_program_is_not_in_the_way(page: Page) -> None:
    mine = row(page, "web-made")
    expect(mine.locator(".cell.procs")).to_contain_text("1")
    mine.get_by_role("button", expanded=False).click()
    mine.get_by_role("button", name="Remove…").click()
    page.locator("#remove-go").click()
    expect(page.locator("#remove-refused")).to_contain_text("vGPU web-made has 1 running process")
    expect(page.locator("#remove-force-wrong")).to_have_text("tick this to remove it now")
    expect(page.locator("#remove-force")).to_be_focused()
    page.get_by_label("Remove it although programs run in it").check()
    page.locator("#remove-go").click()
    expect(mine).to_have_count(0)
    expect(page.locator("#events .kind", has_text="removed").first).to_be_visible()


def test_the_browser_had_nothing_to_complain_of(complaints: list[str]) -> None:
    """But for what was refused on purpose, the node's absence, and details of a vGPU that has just gone."""
    refused = r"Failed to load resource: the server responded with a status of "
    known = re.compile(rf"{refused}(40[09]|50\d)|{refused}4(04|10) .*/api/v1/vgpus/vgpu-\w+$|net::ERR")
    assert [text for text in complaints if not known.search(text)] == []
