"""The help's formula is the one that is computed: its own lines are evaluated here."""

from __future__ import annotations

import re

import pytest

from gpuserver.core.admission.registry import share_of
from vgpu.packing.partition import partition
from vgpu.share import MEANING, PPM, Priority
from vgpu.spec import VgpuSpec

FORMULAS = {
    mode: (r, limit)
    for mode, r, limit in re.findall(r"^ +(temporal|spatial) +r = (.+?)  +l = (.+?)  ", MEANING, re.MULTILINE)
}


def said(formula: str, sm: float, request: float, limit: float) -> float:
    """The product of what ``formula`` names."""
    words = {"sm": sm, "quota-request": request, "quota-limit": limit}
    product = 1.0
    for word in formula.split(" × "):
        product *= words[word] / 100
    return product


@pytest.mark.parametrize("mode", ["temporal", "spatial"])
@pytest.mark.parametrize(
    ("sm", "request_percent", "limit"),
    [(30, 100, 100), (30, 50, 80), (12, 40, 40), (100, 10, 90), (7.5, 33, 100), (22.7, 1, 1)],
)
def test_the_share_is_what_the_help_says(mode: str, sm: float, request_percent: float, limit: float) -> None:
    spec = VgpuSpec.parse(
        sm_percent=sm, memory_bytes="1G", quota_request_percent=request_percent, quota_limit_percent=limit
    )
    share = share_of(spec, partition(sm, 132) if mode == "spatial" else None)
    r, at_most = (said(formula, sm, request_percent, limit) for formula in FORMULAS[mode])
    assert share.guarantee_ppm == pytest.approx(r * PPM, abs=1)
    assert share.limit_ppm == pytest.approx(at_most * PPM, abs=1)
    assert share.priority is Priority.NORMAL


@pytest.mark.parametrize("mode", ["temporal", "spatial"])
def test_with_burst_the_limit_is_one(mode: str) -> None:
    assert "With --burst l is 1" in MEANING
    spec = VgpuSpec.parse(sm_percent=30, memory_bytes="1G", burst=True, quota_limit_percent=50)
    share = share_of(spec, partition(30, 132) if mode == "spatial" else None)
    assert (share.limit_ppm, share.bursts) == (PPM, True)
