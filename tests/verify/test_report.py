"""The report: complete, without a network, and safe to open."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from tests.verify import findings
from vgpu.verify.measured import Evidence
from vgpu.verify.outcome import Outcome
from vgpu.verify.plan import Plan
from vgpu.verify.report import written
from vgpu.verify.run import Findings


class Page(HTMLParser):
    """Elements in the order in which they begin; every one that begins also ends."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.elements.append(tag)
        if tag != "meta":
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        self.elements.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def report(evidence: Evidence, name: str = "Simulated H200") -> str:
    found = Findings(findings.gpu(name=name), (), evidence, 51.0)
    facts = {"GPU": name, "date": "2026-11-24 06:00:00 UTC", "command": "vgpuctl verify --quick"}
    return written(Outcome.of(Plan("A simulated GPU, as asked for", quick=True), found, facts))


def test_everything_is_in_one_file() -> None:
    text = report(findings.good())
    page = Page(text)
    assert not {"script", "link", "img", "iframe", "object"} & set(page.elements)
    assert not re.search(r"https?:|url\(|@import", text)
    assert page.elements.count("svg") == 7
    assert "prefers-color-scheme: dark" in text
    assert not re.search(r"\b(nan|inf|None)\b", " ".join(page.text))


def test_it_says_what_was_promised_measured_and_without_limits() -> None:
    said = " ".join("".join(Page(report(findings.good())).text).split())
    assert "Yes. All 7 promises are kept" in said
    assert "A simulated GPU: Simulated H200" in said
    for part in ("29.9 % by its kernels' time stamps", "in no vGPU: 50.0 : 50.0 % of the work: fails, as it must"):
        assert part in said
    assert "vgpuctl verify --quick" in said


def test_a_broken_promise_is_not_to_be_overlooked() -> None:
    evidence = findings.good()
    evidence.memory = findings.memory(pieces=784)
    said = " ".join("".join(Page(report(evidence)).text).split())
    assert "No. Not kept: memory-limit." in said


@pytest.mark.parametrize("evidence", [Evidence(), Evidence(not_checked={"sm-count": "there is no MPS daemon"})])
def test_nothing_to_draw_is_no_error(evidence: Evidence) -> None:
    assert "svg" not in Page(report(evidence)).elements


@pytest.mark.parametrize("gone", ["shares", "killed", "launches"])
def test_what_could_not_be_measured_is_not_drawn_and_the_rest_is(gone: str) -> None:
    """On a starved host a measurement may have come to nothing."""
    evidence = findings.good()
    empty: dict[str, object] = {"shares": {}, "killed": type(evidence.killed)(), "launches": None}
    drawn = Page(report(evidence)).elements.count("svg")
    setattr(evidence, gone, empty[gone])
    assert 0 < Page(report(evidence)).elements.count("svg") < drawn


def test_names_are_text_and_never_markup() -> None:
    assert "<script>" not in report(findings.good(), "<script>alert(1)</script>")
