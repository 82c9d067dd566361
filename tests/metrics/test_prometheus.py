"""A Prometheus server, as Debian has it, scrapes a node at work: with the configuration, the rules and the dashboard
that are shipped, of which every query has to find something."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.node import PATIENCE_S, ROOT, SimulatedNode, eventually
from vgpu.ctl.programs import attachment
from vgpu.integrations.claims import Claim
from vgpu.metrics.definitions import METRICS
from vgpu.metrics.kinds import Kind
from vgpu.spec import VgpuSpec

DEPLOYED = ROOT / "deploy" / "prometheus"
DASHBOARDS = [json.loads(path.read_text()) for path in sorted((ROOT / "deploy" / "grafana").glob("*.json"))]
PANELS = [panel for dashboard in DASHBOARDS for panel in dashboard["panels"]]
VARIABLES = {
    "$__rate_interval": "1m",
    "$__range": "1m",
    "$instance": ".*",
    "$gpu": ".*",
    "$vgpu": ".*",
    "$team": ".*",
    "$price": "2.5",
}
SPATIAL_ONLY = {"vgpu_gpu_mps_up"}
SELECTOR = re.compile(r"(?<![\w:])((?:vgpu|gpu)[_:][\w:]*|up)(\{[^}]*\})?")

pytestmark = [
    pytest.mark.skipif(
        not (shutil.which("prometheus") and shutil.which("promtool")), reason="needs Debian's prometheus"
    ),
    pytest.mark.slow,
    pytest.mark.timeout(240),
]


@dataclass(frozen=True, slots=True)
class Scraped:
    """``browser``: the Prometheus server's API."""

    node: SimulatedNode
    exporter: httpx.Client
    browser: httpx.Client

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Series with their values just now."""
        answer = self.browser.get("/api/v1/query", params={"query": expression}).json()
        assert answer["status"] == "success", (expression, answer)
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found

    def find(self, expressions: set[str]) -> None:
        """Wait until each of them has found something."""
        missing = set(expressions)

        def complete() -> bool:
            missing.difference_update({one for one in missing if self.query(one)})
            return not missing

        try:
            eventually(complete, "every query's data", 2 * PATIENCE_S)  # usage is counted once a minute
        except AssertionError:
            pytest.fail("nothing is found by:\n" + "\n".join(sorted(missing)))


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    folder = tmp_path_factory.mktemp("prometheus")
    started: list[subprocess.Popen[str]] = []
    with SimulatedNode() as node:
        try:
            for name, percent in (("small", "30"), ("large", "70")):
                with node.link() as link:
                    spec = VgpuSpec.parse(name=name, sm_percent=percent, memory_bytes="2G", slo="tpot=1h")
                    vgpu = link.create(spec, claim=Claim("api", name))
                environment = attachment([vgpu]).environment(node.environment)
                work = [sys.executable, "-m", "vgpu.workload", "--mode", "compute", "--seconds", "200"]
                started.append(subprocess.Popen(work, env=environment, stdout=subprocess.DEVNULL, text=True))
            exporter = subprocess.Popen(
                [sys.executable, "-m", "vgpu.ctl", "metrics", "--listen", "127.0.0.1:0"],
                env=node.environment,
                stdout=subprocess.PIPE,
                text=True,
            )
            started.append(exporter)
            assert exporter.stdout is not None
            url = exporter.stdout.readline().split()[-1].removesuffix("/metrics")
            prometheus, address = start_prometheus(folder, url.removeprefix("http://"))
            started.append(prometheus)
            with httpx.Client(base_url=address, timeout=PATIENCE_S) as browser:
                eventually(lambda: is_ready(browser, prometheus), "Prometheus's start")
                with httpx.Client(base_url=url, timeout=PATIENCE_S) as direct:
                    yield Scraped(node, direct, browser)
        finally:
            for process in reversed(started):
                process.terminate()
            for process in started:
                process.wait(PATIENCE_S)
                if process.stdout is not None:
                    process.stdout.close()


def start_prometheus(folder: Path, exporter: str) -> tuple[subprocess.Popen[str], str]:
    """With what is deployed, but that it looks every second, and at ``exporter``."""
    shutil.copy(DEPLOYED / "rules.yml", folder)
    deployed = (DEPLOYED / "prometheus.yml").read_text()
    config = folder / "prometheus.yml"
    config.write_text(deployed.replace("_interval: 5s", "_interval: 1s").replace("127.0.0.1:9835", exporter))
    assert config.read_text().count("1s") == 2
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder}/data"]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log, text=True)
    return process, f"http://{address}"


def is_ready(browser: httpx.Client, prometheus: subprocess.Popen[str]) -> bool:
    assert prometheus.poll() is None, "Prometheus has ended"
    with suppress(httpx.TransportError):
        return browser.get("/-/ready").status_code == 200
    return False


def promtool(*arguments: str, text: str | None = None, cwd: Path = DEPLOYED) -> str:
    done = subprocess.run(
        ["promtool", *arguments], input=text, cwd=cwd, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def panels() -> Iterator[tuple[str, str]]:
    """Title and query, with the dashboards' variables filled in."""
    for panel in PANELS:
        for target in panel.get("targets", ()):
            expression = target["expr"]
            for variable, value in VARIABLES.items():
                expression = expression.replace(variable, value)
            assert "$" not in expression
            yield panel["title"], expression


def test_what_the_exporter_says_pleases_promtool(scraped: Scraped) -> None:
    text = scraped.exporter.get("/metrics").text
    assert "vgpu_tokens_total" in text
    assert promtool("check", "metrics", text=text) == ""


def test_the_rules_are_valid_and_alerts_fire_when_they_should() -> None:
    assert "SUCCESS" in promtool("check", "config", "prometheus.yml")
    assert "SUCCESS" in promtool("test", "rules", "rules_test.yml")


def test_every_panel_finds_something(scraped: Scraped) -> None:
    assert len(list(panels())) > 55
    scraped.find({expression for _, expression in panels()})


def test_every_panel_says_what_it_shows_and_in_which_unit() -> None:
    for panel in PANELS:
        if panel["type"] == "row":
            continue
        assert panel["description"].endswith("."), panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
        unit = panel["fieldConfig"]["defaults"].get("unit") or panel["fieldConfig"]["overrides"]
        assert unit or panel["options"]["yAxis"]["unit"], panel["title"]


def test_every_rule_finds_what_it_is_about(scraped: Scraped) -> None:
    """Recorded: their results. Alerts, which find nothing while all is well: each series that they look at."""
    groups = scraped.browser.get("/api/v1/rules").json()["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert all(rule["health"] != "err" for rule in rules)
    scraped.find({rule["name"] for rule in rules if rule["type"] == "recording"})
    looked_at = {found for rule in rules for found in SELECTOR.findall(rule["query"])}
    assert len(looked_at) > 15
    scraped.find({name + labels for name, labels in looked_at if name not in SPATIAL_ONLY})


def test_every_metric_arrives_with_its_type_and_help(scraped: Scraped) -> None:
    temporal = [metric for metric in METRICS if metric.name not in SPATIAL_ONLY]
    counted = {Kind.HISTOGRAM: "_count"}
    scraped.find({metric.name + counted.get(metric.kind, "") for metric in temporal})
    told = scraped.browser.get("/api/v1/metadata").json()["data"]
    for metric in temporal:
        # As OpenMetrics has it, Prometheus keeps what is said of a counter under the name without its ending.
        [description] = told.get(metric.name) or told[metric.family]
        assert description["type"] == metric.kind
        assert description["help"] == metric.help


def test_every_sharer_has_its_own_numbers(scraped: Scraped) -> None:
    scraped.find({"vgpu_guarantee_ratio", "vgpu_tokens_total > 0"})
    promised = {one["metric"]["name"]: float(one["value"][1]) for one in scraped.query("vgpu_guarantee_ratio")}
    assert promised == {"small": 0.3, "large": 0.7}
    busy = {one["metric"]["name"]: float(one["value"][1]) for one in scraped.query("vgpu_busy_seconds_total")}
    assert len(set(busy.values())) == 2
    pids = {one["metric"]["name"]: one["metric"]["pid"] for one in scraped.query("vgpu_process_info")}
    assert pids.keys() == {"small", "large"}


def test_without_the_node_nothing_looks_current(scraped: Scraped) -> None:
    """Last in this file: the node is gone afterwards."""
    scraped.find({"vgpu_node_up == 1", "vgpu_tokens_total"})
    assert scraped.exporter.get("/healthz").json()["status"] == "ok"
    scraped.node.supervisor.send_signal(signal.SIGTERM)
    scraped.node.supervisor.wait(PATIENCE_S)
    assert scraped.exporter.get("/healthz").status_code == 503
    eventually(lambda: bool(scraped.query("vgpu_node_up == 0")), "the scrape that finds no node")
    eventually(lambda: not scraped.query("vgpu_tokens_total"), "the end of what vGPUs said")
