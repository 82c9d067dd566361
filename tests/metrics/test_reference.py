"""docs/reference/metrics.md against the definitions, and against what is deployed."""

from __future__ import annotations

import re

from tests.metrics.reference import DOCUMENT, with_table

DEPLOYED = DOCUMENT.parents[2] / "deploy"


def test_the_table_is_the_definitions() -> None:
    """If this fails: python -m tests.metrics.reference."""
    text = DOCUMENT.read_text()
    assert text == with_table(text)


def test_every_alert_is_told_of() -> None:
    alerts = set(re.findall(r"alert: (\w+)", (DEPLOYED / "prometheus" / "rules.yml").read_text()))
    assert set(re.findall(r"^\| `(\w+)` \| (?:critical|warning|info) \|", DOCUMENT.read_text(), re.M)) == alerts
