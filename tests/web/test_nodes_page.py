"""All nodes of a file on a page, in a browser: one that answers, and one that does not."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import expect

from tests.integration.node import SimulatedNode
from tests.web import browsing
from tests.web.conftest import Dashboard, serving

pytestmark = browsing.MARKS


def test_the_page_has_the_nodes_of_the_file(node: SimulatedNode, dashboard: Dashboard, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(dashboard.token)
    file = tmp_path / "nodes.toml"
    down = '[node.beta]\nurl = "http://127.0.0.1:9"\ntoken_file = "token"\n'
    file.write_text(f'[node.alpha]\nurl = "{dashboard.url}"\ntoken_file = "token"\n{down}')
    made = node.create("1", sm_percent=20, memory_bytes="2G", name="on-alpha")
    complaints: list[str] = []
    with serving(node, "--nodes", str(file)) as several, several.client() as client:
        seen = {one["name"]: one for one in client.get("nodes").json()}
        assert [vgpu["vgpu_id"] for vgpu in seen["alpha"]["snapshot"]["vgpus"]] == [made.vgpu_id]
        assert seen["beta"]["snapshot"] is None
        assert "does not answer" in seen["beta"]["error"]
        with browsing.launched() as browser, browsing.opened(browser, several, complaints) as page:
            page.goto(f"{several.url}nodes")
            alpha = page.locator("[data-node=alpha]")
            expect(alpha.get_by_text("on-alpha")).to_be_visible()
            expect(alpha.locator("table").first.locator("tbody tr")).to_have_count(2)
            expect(page.locator("[data-node=beta] .remark")).to_contain_text("It does not answer")
            expect(page.locator("#link-text")).to_have_text("2 nodes, 1 without an answer")
            page.screenshot(path=tmp_path / "nodes.png")
            page.set_viewport_size(browsing.PHONE)
            assert page.evaluate("document.documentElement.scrollWidth") <= browsing.PHONE["width"]
            page.screenshot(path=tmp_path / "phone.png")
    with node.link() as link:
        link.remove(made.vgpu_id)
    assert complaints == []


def test_without_a_file_there_is_no_such_page(dashboard: Dashboard) -> None:
    with dashboard.client() as client:
        assert client.get("nodes").status_code == 404
