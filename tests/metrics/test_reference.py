"""docs/reference/metrics.md against the definitions, and against what is deployed."""

from __future__ import annotations

import json
import re

from tests.metrics.reference import DOCUMENT, with_table
from vgpu.metrics.definitions import METRICS
from vgpu.metrics.kinds import LABELS

DEPLOYED = DOCUMENT.parents[2] / "deploy"


def test_the_table_is_the_definitions() -> None:
    """If this fails: python -m tests.metrics.reference."""
    text = DOCUMENT.read_text()
    assert text == with_table(text)


def test_every_alert_is_told_of() -> None:
    alerts = set(re.findall(r"alert: (\w+)", (DEPLOYED / "prometheus" / "rules.yml").read_text()))
    assert set(re.findall(r"^\| `(\w+)` \| (?:critical|warning|info) \|", DOCUMENT.read_text(), re.M)) == alerts


def test_dashboards_ask_for_metrics_and_labels_that_there_are() -> None:
    """Whether the queries find something is a test with Prometheus."""
    known = {metric.name: {*LABELS[metric.of], *metric.labels, "instance"} for metric in METRICS}
    found = set()
    for path in sorted((DEPLOYED / "grafana").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", ()):
                for name, labels in re.findall(r"\b(vgpu_\w+)(?:\{([^}]*)\})?", target["expr"]):
                    metric = re.sub(r"_(bucket|sum|count)$", "", name)
                    assert metric in known, (path.name, panel["title"], name)
                    assert set(re.findall(r"(\w+)=~?", labels)) <= known[metric], (path.name, panel["title"])
                    found.add(metric)
    assert {"vgpu_user_promised_gpu_seconds_total", "vgpu_tokens_total"} <= found
