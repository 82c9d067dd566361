"""Lines as they are drawn: never wider than the terminal, readable in both themes, ASCII where there is no more."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ctl.fake_node import gpu_reading, process_reading, vgpu_reading
from vgpu.ctl.observe.top import speaks_utf8
from vgpu.ctl.present import tables
from vgpu.protocol.messages import OutsideProcess, ProcessReading, Steps
from vgpu.spec import VgpuSpec
from vgpu.top.colours import DARK, LIGHT, STYLES, Palette, is_light, selected_style, styles
from vgpu.top.columns import (
    COLUMNS,
    head_line,
    lag_text,
    layout,
    memory_text,
    process_line,
    row_line,
    share_text,
    short_duration,
)
from vgpu.top.draw import (
    ASCII,
    UNICODE,
    Glyphs,
    Span,
    bar,
    chart,
    cut,
    cut_in_the_middle,
    fitting,
    fixed,
    spark,
    width_of,
)
from vgpu.top.model import MEASURES, Choice, History, Model, Remark, Row
from vgpu.top.panels import TALL, TALLEST, NodeFacts, gpu_lines, node_line, remark_lines

ratios = st.floats(-0.5, 2.0)
widths = st.integers(60, 260)
both = pytest.mark.parametrize("glyphs", [UNICODE, ASCII], ids=["unicode", "ascii"])


def text(line: tuple[Span, ...]) -> str:
    return "".join(span.text for span in line)


@given(ratios, st.integers(1, 60), st.none() | ratios)
def test_a_bar_is_as_long_as_its_width(ratio: float, width: int, mark: float | None) -> None:
    for glyphs in (UNICODE, ASCII):
        assert len(text(bar(ratio, width, "held", glyphs, mark))) == width


def test_bars() -> None:
    assert text(bar(0.5, 8, "held", UNICODE)) == "━━━━────"
    assert text(bar(0.55, 8, "held", UNICODE)) == "━━━━╾───"
    assert text(bar(0.001, 8, "held", UNICODE)) == "╾───────"
    assert text(bar(0.0, 8, "held", UNICODE)) == "────────"
    assert text(bar(3.0, 8, "held", ASCII)) == "========"
    assert text(bar(0.25, 8, "held", UNICODE, mark=0.5)) == "━━──┼───"
    beyond = bar(0.75, 8, "held", UNICODE, mark=0.5)
    assert text(beyond) == "━━━━╋━──"
    assert [span.style for span in beyond] == ["held", "mark", "beyond", "track"]


def test_charts() -> None:
    """A column of lines: full below the value, a level in its line, blank above."""
    cells = [None, 0.0, 0.25, 0.5, 0.75, 1.0]
    assert chart(cells, 1, UNICODE) == [spark(cells, UNICODE, 1.0)]
    assert chart(cells, 2, UNICODE) == ["    ▅█", " ▁▅███"]
    assert chart(cells, 4, UNICODE) == ["     █", "    ██", "   ███", " ▁████"]
    assert chart([1.0], 3, ASCII) == ["#", "#", "#"]


def test_lines_that_nothing_else_needs_are_for_charts() -> None:
    gpus = [gpu_reading(index=index) for index in range(2)]
    heights = [len(gpu_lines(gpus, {}, "busy", 0.0, 120, 20, UNICODE, spare)) for spare in (0, 1, 2, 9, 100)]
    assert heights == [6, 6, 8, 14, 2 * (TALL - 1 + TALLEST)]
    last = text(gpu_lines(gpus, {}, "busy", 0.0, 120, 20, UNICODE, 4)[-1])
    assert last.endswith("busy, 5 min")


def test_the_history_of_a_row_says_what_it_shows() -> None:
    made = layout(200, [vgpu_reading()])
    for measure in MEASURES:
        assert f"{measure.upper()} 2 MIN" in text(head_line(made, Choice(measure=measure), UNICODE, ()))


def test_what_was_in_time_is_shown_while_there_are_targets() -> None:
    steps = Steps(tpot_attained=90, tpot_missed=5, ttft_attained=9, ttft_missed=1)
    vgpu = vgpu_reading(spec=VgpuSpec.parse(sm_percent=30, slo="tpot=30ms"), steps=steps)
    assert (tables.attained(vgpu), tables.missed(vgpu)) == ("94.3 %", 6)
    assert tables.targets(vgpu)["latency"].startswith("tpot=30ms; 94.7 % of 95 decode steps in time")
    without = vgpu.model_copy(update={"spec": VgpuSpec(sm_percent=30)})
    assert (tables.attained(without), tables.missed(without), tables.targets(without)) == ("", 0, {})


def test_sparklines() -> None:
    assert spark([None, 0.0, 5.0, 10.0], UNICODE, most=10.0) == " ▁▅█"
    assert spark([0.0, 0.0], UNICODE) == "▁▁"
    assert spark([4.0, 4.0], UNICODE) == "▇▇"
    assert spark([None, 10.0], ASCII, most=10.0) == " #"


@given(st.text(max_size=30), st.integers(0, 20))
def test_cut_text_fits(said: str, width: int) -> None:
    clean = UNICODE.said(said)
    assert width_of([Span(fixed(clean, width))]) == width
    assert width_of(cut([Span(clean), Span(clean)], width, UNICODE)) <= width


def test_what_fits_least_is_left_out_first() -> None:
    parts = [(9, (Span("node"),)), (1, (Span("detail"),)), (5, (Span("more"),))]
    assert text(fitting(parts, 40)) == "node  detail  more"
    assert text(fitting(parts, 12)) == "node  more"
    assert text(fitting(parts, 5)) == "node"


def test_nothing_that_moves_a_cursor_reaches_the_terminal() -> None:
    assert UNICODE.said("a\x1b[2Jb\nc") == "a?[2Jb?c"
    assert ASCII.said("12–40 % … µs 漢") == "12-40 % ~ us ?"


@given(widths, st.lists(st.tuples(st.floats(0, 1.2), st.floats(0, 1)), min_size=1, max_size=4), st.booleans())
def test_rows_and_titles_are_as_wide_as_the_terminal_at_most(
    width: int, told: list[tuple[float, float]], spatial: bool
) -> None:
    vgpus = [
        vgpu_reading(
            vgpu_id=f"vgpu-{i:08x}",
            name="a-rather-long-name-for-a-vgpu"[: 1 + 9 * i],
            gpu_index=i % 2,
            mode="spatial" if spatial else "temporal",
            held_ratio=held,
            guarantee_ratio=min(held, 0.123),
            limit_ratio=max(busy, 0.125),
            busy_ratio=busy,
        )
        for i, (held, busy) in enumerate(told)
    ]
    made = layout(width, vgpus)
    assert width_of(head_line(made, Choice(order="tokens"), UNICODE, ())) <= width
    for glyphs in (UNICODE, ASCII):
        for vgpu in vgpus:
            line = row_line(Row(vgpu, History(), None), made, 1_700_000_000.0, glyphs, selected=True)
            assert width_of(line) <= width
    kept = {column.title for column, _ in made.columns}
    assert {"VGPU", "STATE", "HELD/SHARE", "TOKENS/S"} <= kept
    assert made.columns[0][0].title == "VGPU"
    assert {
        name
        for span in row_line(Row(vgpus[0], History(), None), made, 0.0, UNICODE, selected=False)
        for name in [span.style]
    } <= set(STYLES)


def test_what_is_there_at_which_width() -> None:
    vgpus = [vgpu_reading(name="train"), vgpu_reading(vgpu_id="vgpu-2", gpu_index=1)]
    narrow, usual, wide = (layout(width, vgpus) for width in (60, 120, 240))
    assert [column.title for column, _ in narrow.columns] == ["VGPU", "STATE", "HELD/SHARE", "TOKENS/S", "MEMORY"]
    assert [column.title for column, _ in wide.columns] == [column.title for column in COLUMNS if column.title != "SMS"]
    assert {column.title: size for column, size in usual.columns}["HELD/SHARE"] >= 21  # with its bar
    assert layout(240, [vgpu_reading(name=None)]).orders == tuple(
        order for order in wide.orders if order not in ("vgpu", "gpu")
    )
    found = usual.at(2)
    assert found is not None
    assert found.title == "VGPU"
    assert usual.at(500) is None


@pytest.mark.parametrize("width", [80, 100, 200])
def test_a_name_and_a_limit_of_memory_are_seen_whole(width: int) -> None:
    vgpu = vgpu_reading(name="trainer", memory_used_bytes=480 << 20, memory_limit_bytes=57_549 << 20)
    made = layout(width, [vgpu])
    line = text(row_line(Row(vgpu, History(), None), made, 0.0, UNICODE, selected=False))
    assert line[2:].startswith("trainer ")
    assert "0.47/56.2 GiB" in line


@pytest.mark.parametrize(("width", "least"), [(60, 13), (80, 19), (120, 26), (200, 26)])
def test_a_wider_terminal_shows_more_of_a_name(width: int, least: int) -> None:
    names = [f"{user}-llama-7b-inference-{i}" for i, user in enumerate(("alice", "carol"))]
    vgpus = [vgpu_reading(vgpu_id=f"vgpu-{i}", name=name) for i, name in enumerate(names)]
    made = layout(width, vgpus)
    assert made.columns[0][1] >= min(least, max(map(len, names)))
    shown = [text(row_line(Row(v, History(), None), made, 0.0, UNICODE, selected=False))[2:].split()[0] for v in vgpus]
    assert shown[0] != shown[1]
    assert [label[0] for label in shown] == ["a", "c"]
    assert [label[-2:] for label in shown] == ["-0", "-1"]  # cut in the middle


def test_the_bar_stays_longer_than_the_history() -> None:
    vgpu = vgpu_reading(name="mallory-llama-7b-inference", held_ratio=0.5, guarantee_ratio=0.25)
    made = layout(80, [vgpu])
    assert "LAST 2 MIN" not in [column.title for column, _ in made.columns]
    assert "┼" in text(row_line(Row(vgpu, History(), None), made, 0.0, ASCII, selected=False)).replace("|", "┼")


def test_an_id_is_the_label_where_there_is_no_name() -> None:
    vgpu = vgpu_reading(name=None)
    made = layout(160, [vgpu])
    assert "ID" not in [column.title for column, _ in made.columns]
    assert text(row_line(Row(vgpu, History(), None), made, 0.0, UNICODE, selected=False))[2:].startswith(vgpu.vgpu_id)


@given(st.text("abc-漢", max_size=30), st.integers(1, 20))
def test_text_cut_in_the_middle_fits(said: str, width: int) -> None:
    assert width_of([Span(cut_in_the_middle(said, width))]) <= width
    assert cut_in_the_middle("infer-service-1", 9) == "infe…ce-1"


def test_all_bars_have_one_scale() -> None:
    """A bar of 20 cells is the whole GPU; the notch is the promise."""
    vgpus = [
        vgpu_reading(
            held_ratio=part, guarantee_ratio=part, limit_ratio=part, memory_used_bytes=0, memory_limit_bytes=size
        )
        for part, size in ((0.3, 14 << 30), (0.7, 70 << 30))
    ]
    bars = {column.order: column.draw for column in COLUMNS}
    for vgpu, share, memory in zip(vgpus, (6, 14), (2, 10), strict=True):
        row = Row(vgpu, History(), None, "", 140 << 30)
        held = text(bars["held"](row, 0.0, 12 + 1 + 20, UNICODE))[:20]
        assert held == "━" * share + "┼" + "─" * (19 - share)
        used = text(bars["memory"](row, 0.0, 13 + 1 + 20, UNICODE))[:20]
        assert used == "─" * memory + "┼" + "─" * (19 - memory)


def test_no_sum_is_over_100_percent() -> None:
    gpu = gpu_reading(mode="spatial", held_ratio=2.0, busy_ratio=1.4, guaranteed_ratio=1.3)
    for width, most in ((80, 1), (120, 1), (160, 3)):
        told = "\n".join(map(text, gpu_lines([gpu], {}, "held", 0.0, width, most, UNICODE)))
        assert not re.search(r"\b(1[0-9][1-9]|1[1-9][0-9]|[2-9]\d\d)(\.\d)? %", told), told
    assert "2.0 vGPUs at once" in told
    assert "1.3 times promised" in told
    assert tables.gpu_held(2.0) == "100 %, 2.0 vGPUs at once"


def test_a_row_says_what_is_held_of_what_share() -> None:
    vgpu = vgpu_reading(held_ratio=0.298, guarantee_ratio=0.12, limit_ratio=0.4)
    assert share_text(vgpu, 1) == "29.8/12–40 %"
    assert share_text(vgpu_reading(held_ratio=0.1, guarantee_ratio=0.3, limit_ratio=0.3), 1) == "10/30 %"
    assert memory_text(3 << 29, 8 << 30) == "1.5/8 GiB"
    assert memory_text(137 << 30, 141 << 30) == "137/141 GiB"
    assert memory_text(10 << 20, 8 << 30) == "0.0098/8 GiB"
    assert [lag_text(lag) for lag in (0, 12_300_000, -3_000_000_000)] == ["0", "+12ms", "−3.0s"]
    assert [short_duration(ns) for ns in (5, 75_000, 999_999_999, 61 * 10**9)] == ["5ns", "75µs", "999ms", "1.0m"]
    line = row_line(Row(vgpu, History(), None), layout(100, [vgpu]), 0.0, UNICODE, selected=False)
    assert "29.8/12–40 %" in text(line)


@given(st.integers(30, 200))
def test_programs_fit_too(width: int) -> None:
    process = ProcessReading.model_validate(process_reading(command="python \x1b[31m train.py " + "x" * 300))
    line = process_line(process, "running", width, UNICODE)
    assert width_of(line) <= width
    assert "12345" in text(line)


@given(widths, st.integers(1, 9), st.integers(1, 12))
def test_gpus_have_the_lines_there_are(width: int, count: int, most: int) -> None:
    gpus = [gpu_reading(index=index, used_memory_bytes=index << 34) for index in range(count)]
    lines = gpu_lines(gpus, {}, "held", 1_700_000_000.0, width, most, UNICODE)
    assert 1 <= len(lines) <= most
    assert all(width_of(line) <= width for line in lines)
    shown = text(tuple(span for line in lines for span in line))
    if count <= most:
        assert all(f"GPU {index}" in shown for index in range(count))
    else:
        assert "more GPU" in shown


def test_a_gpu_says_what_is_told_and_what_is_not() -> None:
    def said(**changes: object) -> str:
        return "\n".join(map(text, gpu_lines([gpu_reading(**changes)], {}, "held", 0.0, 160, 3, UNICODE)))

    assert "utilisation, power: not reported" in said()
    told = said(utilization_ratio=0.98, power_w=612.3, temperature_c=64.0, sm_clock_mhz=1980.0)
    assert "98 % utilised  612 W  64 °C  1980 MHz" in told
    assert "not reported" not in told
    assert "restarting: it ended with code 9" in said(state="restarting", reason="it ended with code 9")
    assert "no MPS" in said(mode="spatial", mps_reason="the daemon died")
    outside = (OutsideProcess(gpu_index=0, pid=1, uid=-1, command="", memory_bytes=3 << 30),)
    assert "1 program in no vGPU: 3 GiB" in said(outside=outside)


def test_the_first_line_says_how_current_it_is() -> None:
    node = NodeFacts("host", 1, "1.0", True, 0.0)
    model = Model()

    def said(width: int = 120) -> str:
        line = node_line(node, model, Choice(words="train", gpu=1), 1.0, 100.0, width, UNICODE)
        assert width_of(line) <= width
        return text(line)

    assert "SIMULATED" in said()
    assert "only: GPU 1 train" in said()
    model.freeze(True)
    assert "PAUSED" in said(60)
    model.lose(93.0, "the node closed the link")
    assert "NO ANSWER for 7 s" in said(60)


def test_remarks_keep_their_room() -> None:
    assert len(remark_lines([], 3, 80, UNICODE)) == 3
    told = [Remark(0.0, "died", f"process {i}" + "x" * 200) for i in range(9)]
    lines = remark_lines(told, 3, 80, UNICODE)
    assert [width_of(line) for line in lines] == [80, 80, 80]
    assert "process 8" in text(lines[-1])


# --- colours


def luminance(colour: str) -> float:
    """Relative, as in WCAG 2.1."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("palette", [DARK, LIGHT], ids=["dark", "light"])
def test_everything_is_readable(palette: Palette) -> None:
    """WCAG AA: 4.5 for text, 3 for what is drawn."""
    assert round(contrast("#ffffff", "#000000"), 2) == 21
    for name, style in styles(palette).items():
        assert style.color is not None
        colour = style.color.get_truecolor().hex
        if style.bgcolor is not None:
            assert contrast(colour, style.bgcolor.get_truecolor().hex) >= 4.5, name
            continue
        for background in (palette.background, palette.raised, palette.selected):
            if name == "track":
                assert contrast(colour, background) >= (3 if background != palette.selected else 2), name
            else:
                assert contrast(colour, background) >= 4.5, (name, background)


def test_without_colours_nothing_has_one() -> None:
    assert set(styles(None)) == set(styles(DARK)) == set(STYLES)
    assert all(
        style.color is None and style.bgcolor is None for style in (*styles(None).values(), selected_style(None))
    )
    assert selected_style(None).reverse


def test_the_background_is_what_the_terminal_says() -> None:
    assert [is_light(said) for said in ("0;15", "15;0", "0;default;15", "", "default")] == [
        True,
        False,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(
    ("environment", "utf8"),
    [
        ({"LANG": "de_DE.UTF-8"}, True),
        ({"LANG": "C.utf8"}, True),
        ({"LC_ALL": "C", "LANG": "de_DE.UTF-8"}, False),
        ({"LC_CTYPE": "C.UTF-8", "LANG": "C"}, True),
        ({"LANG": "en_US.ISO-8859-1"}, False),
        ({}, False),
    ],
)
def test_what_the_locale_says(environment: dict[str, str], utf8: bool) -> None:
    assert speaks_utf8(environment) == utf8


@both
def test_glyphs_are_one_cell_wide(glyphs: Glyphs) -> None:
    for sign in (*glyphs.levels, glyphs.full, glyphs.half, glyphs.track, glyphs.pointer, glyphs.up, glyphs.ellipsis):
        assert width_of([Span(sign)]) == 1
        assert not glyphs.ascii or sign.isascii()
