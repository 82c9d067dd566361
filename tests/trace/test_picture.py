"""The picture is drawn, whatever was recorded; its words are tested, its looks are not."""

from __future__ import annotations

import io
import struct

import pytest
from hypothesis import given, settings

from tests.trace.recordings import IDS, empty, recordings, turns
from vgpu.trace.picture import draw, summary, title
from vgpu.trace.recording import Recording
from vgpu.trace.spans import activity, hand_overs


def size_of(made: Recording) -> tuple[int, int]:
    """Width and height in pixels of what was drawn."""
    file = io.BytesIO()
    draw(made, file)
    data = file.getvalue()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", data[16:24])
    return width, height


@pytest.mark.parametrize("made", [turns(), turns(0), turns(count=1), empty(), empty("spatial"), empty(length_ns=0)])
def test_a_picture_of_anything(made: Recording) -> None:
    width, height = size_of(made)
    assert width > 1000
    assert height > 500


@settings(max_examples=5)
@given(recordings())
def test_a_picture_of_what_makes_no_sense(made: Recording) -> None:
    size_of(made)


def test_title_and_summary() -> None:
    made = turns()
    made.lost = 3
    assert title(made, IDS[:2]) == "GPU 0, NVIDIA H200, temporal mode: thirty 30 %, vgpu-0000bbbb 70 %"
    assert title(empty("spatial"), IDS[:1]).endswith("spatial mode: thirty 30 % on 30 % of the SMs")
    said = summary(made, IDS[:2], hand_overs(made), activity(made))
    assert said == (
        "0.1 s, thirty held 29.0 %, vgpu-0000bbbb held 69.0 %, GPU had work 98.0 %, "
        "19 hand-overs, gap 100 µs (median), 3 events lost"
    )
    made.gpu = made.gpu.model_copy(update={"simulated": True})
    assert "simulated" in title(made, [])
