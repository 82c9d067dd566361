"""The lines above and below the table: the node, its GPUs, what has happened."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from vgpu.ctl.present.tables import at_once, token_rate, whole_seconds_ns
from vgpu.protocol.messages import GpuStatus
from vgpu.top.columns import memory_text, state_style
from vgpu.top.draw import Glyphs, Line, Span, bar, chart, cut, fitting, spark, width_of
from vgpu.top.model import SPAN_S, Choice, Histories, History, Model, Remark
from vgpu.units import counted, format_bytes, format_duration, three_digits

TALL: Final = 3
"""Lines of a GPU where there is room."""
TALLEST: Final = 10
"""Lines of a chart, at most."""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What a node reports of itself when it first answers. ``started_unix_s``: by its uptime then."""

    host: str
    pid: int
    software: str
    simulated: bool
    started_unix_s: float


def node_line(
    node: NodeFacts, model: Model, choice: Choice, interval_s: float, now_unix_s: float, width: int, glyphs: Glyphs
) -> Line:
    """The node that is shown, and how current its readings are."""
    shown = model.shown
    parts: list[tuple[int, Line]] = [(9, (Span(" vgpuctl top", "title"),)), (5, (Span(node.host),))]
    if node.simulated:
        parts.append((8, (Span(" SIMULATED ", "badge"),)))
    if model.lost is not None:
        parts.append((9, (Span(f" NO ANSWER for {max(0, now_unix_s - model.lost.at_unix_s):.0f} s ", "alarm"),)))
    elif model.frozen:
        parts.append((9, (Span(" PAUSED ", "alarm"),)))
    if shown is not None:
        programs = sum(vgpu.processes for vgpu in shown.vgpus)
        parts.append((4, (Span(f"{counted(len(shown.vgpus), 'vGPU')}, {counted(programs, 'program')}"),)))
    parts.append((3, (Span(f"up {format_duration(whole_seconds_ns(now_unix_s - node.started_unix_s))}", "dim"),)))
    if choice.words or choice.gpu is not None:
        only = " ".join(filter(None, (f"GPU {choice.gpu}" if choice.gpu is not None else "", choice.words)))
        parts.append((7, (Span(f"only: {only}", "warn"),)))
    clock = time.strftime("%H:%M:%S", time.localtime(now_unix_s if shown is None else shown.at_unix_s))
    right = (Span(f"every {interval_s:g} s  ", "dim"), Span(f"{clock} "))
    line = fitting(parts, width - width_of(right) - 1)
    return (*line, Span(" " * max(1, width - width_of(line) - width_of(right))), *right)


def gpu_lines(
    gpus: Sequence[GpuStatus],
    histories: Mapping[int, Histories],
    measure: str,
    now_unix_s: float,
    width: int,
    most: int,
    glyphs: Glyphs,
    spare: int = 0,
) -> list[Line]:
    """All GPUs in at most ``most`` lines: several each, or one each, or as many of them as fit. ``measure``: of their
    histories. ``spare``: lines that no other part of the screen needs; charts use them."""

    def history(gpu: GpuStatus) -> History:
        return histories.get(gpu.index, Histories()).of(measure)

    if len(gpus) * TALL <= most:
        height = min(TALLEST, 1 + spare // max(1, len(gpus)))
        tall = (_tall(gpu, history(gpu), measure, now_unix_s, width, glyphs, height) for gpu in gpus)
        return [line for lines in tall for line in lines]
    if len(gpus) <= most:
        return [_flat(gpu, history(gpu), now_unix_s, width, glyphs) for gpu in gpus]
    first = [_flat(gpu, history(gpu), now_unix_s, width, glyphs) for gpu in gpus[: most - 1]]
    return [*first, (Span(f"  {counted(len(gpus) - len(first), 'more GPU')}: g shows them one by one", "dim"),)]


def _tall(
    gpu: GpuStatus, history: History, measure: str, now_unix_s: float, width: int, glyphs: Glyphs, height: int
) -> list[Line]:
    name = gpu.name if not gpu.simulated or "sim" in gpu.name.lower() else f"{gpu.name} (simulated)"
    parts: list[tuple[int, Line]] = [
        (9, (Span(f" GPU {gpu.index}", "title"),)),
        (6, (Span(name),)),
        (5, (_mode(gpu),)),
        (8, _state(gpu)),
        (4, (Span(promised_text(gpu.guaranteed_ratio), "dim"),)),
    ]
    if beside := at_once(gpu.held_ratio):
        parts.append((5, (Span(beside),)))
    if gpu.outside:
        used = format_bytes(sum(process.memory_bytes for process in gpu.outside))
        parts.append((7, (Span(f"{counted(len(gpu.outside), 'program')} in no vGPU: {used}", "bad"),)))
    parts.append((3, (Span(sensors(gpu), "dim"),)))
    bars = _bars(gpu, width - 2, glyphs)
    said = "open token" if gpu.open_ended else f"{token_rate(gpu)} tokens/s"
    last = f" {measure}, {_LAST}"
    room = width - 1 - TOKENS_WIDTH - 3 - len(last)
    drawn = chart(history.cells(room, now_unix_s), height, glyphs) if room >= 10 else [""]
    lines = []
    for at, text in enumerate(drawn):
        begins, ends = (said, last) if at == len(drawn) - 1 else ("", "")
        parts_of_line = (Span(f" {begins:<{TOKENS_WIDTH}}  "), Span(text, "spark"), Span(ends if text else "", "dim"))
        lines.append(cut(parts_of_line, width, glyphs))
    return [fitting(parts, width), (Span(" "), *bars), *lines]


def promised_text(ratio: float) -> str:
    """``80 % promised``; beyond the whole GPU shares are weights, and no percentage holds."""
    if ratio <= 1.0005:
        return f"{three_digits(min(1.0, ratio) * 100)} % promised"
    return f"{ratio:.1f} times promised: shares are weights"


def room_text(gpu: GpuStatus) -> str:
    """What a further vGPU can have of it."""
    memory = format_bytes(max(0, gpu.total_memory_bytes - gpu.guaranteed_memory_bytes))
    return f"{three_digits(max(0.0, 1 - gpu.guaranteed_ratio) * 100)} % and {memory} are free"


TOKENS_WIDTH: Final = 15
_LAST: Final = f"{SPAN_S // 60} min"


def _mode(gpu: GpuStatus) -> Span:
    if gpu.mode == "spatial" and gpu.mps_reason:
        return Span("no MPS", "bad")
    return Span(gpu.mode)


def _state(gpu: GpuStatus) -> Line:
    reason = f": {gpu.reason}" if gpu.reason and gpu.state != "serving" else ""
    return (Span(f"{gpu.state}{reason}", state_style(gpu.state)),)


def sensors(gpu: GpuStatus) -> str:
    """The readings of the card's own sensors, as far as it has them."""
    parts = [
        f"{gpu.utilization_ratio * 100:.0f} % utilised" if gpu.utilization_ratio is not None else "",
        f"{gpu.power_w:.0f} W" if gpu.power_w is not None else "",
        f"{gpu.temperature_c:.0f} °C" if gpu.temperature_c is not None else "",
        f"{gpu.sm_clock_mhz:.0f} MHz" if gpu.sm_clock_mhz is not None else "",
    ]
    return "  ".join(filter(None, parts)) or "utilisation, power: not reported"


def _bars(gpu: GpuStatus, width: int, glyphs: Glyphs) -> Line:
    """Held, busy, memory: three bars of one length."""
    part = gpu.used_memory_bytes / gpu.total_memory_bytes if gpu.total_memory_bytes else 0.0
    parts = (
        ("held", gpu.held_ratio, "held", f"{min(1.0, gpu.held_ratio) * 100:5.1f} %"),
        ("busy", gpu.busy_ratio, "busy", f"{min(1.0, gpu.busy_ratio) * 100:5.1f} %"),
        ("mem", part, "memory", f"{memory_text(gpu.used_memory_bytes, gpu.total_memory_bytes):>13}"),
    )
    texts = sum(len(name) + 2 + len(text) for name, _, _, text in parts) + 2 * (len(parts) - 1)
    length = max(0, (width - texts) // len(parts))
    spans: list[Span] = []
    for name, ratio, style, text in parts:
        spans += [Span("  ")] if spans else []
        spans += [Span(f"{name} ", "dim"), *bar(ratio, length, style, glyphs), Span(f" {text}")]
    return cut(spans, width, glyphs)


def _flat(gpu: GpuStatus, history: History, now_unix_s: float, width: int, glyphs: Glyphs) -> Line:
    rate_text = "open" if gpu.open_ended else f"{token_rate(gpu)}/s"
    used = memory_text(gpu.used_memory_bytes, gpu.total_memory_bytes)
    parts: list[tuple[int, Line]] = [(9, (Span(f" GPU {gpu.index}", "title"),)), (4, (_mode(gpu),))]
    if gpu.state != "serving":
        parts.append((8, _state(gpu)))
    if width < 100:
        parts += [
            (7, (Span(f"{rate_text:>7}"),)),
            (6, (Span("held ", "dim"), Span(f"{min(1.0, gpu.held_ratio) * 100:3.0f} %"))),
            (5, (Span("busy ", "dim"), Span(f"{min(1.0, gpu.busy_ratio) * 100:3.0f} %"))),
            (5, (Span("mem ", "dim"), Span(used))),
        ]
        return fitting(parts, width)
    parts.append((7, (Span("tokens ", "dim"), Span(f"{rate_text:>8}"))))
    if width >= 140:
        parts.append((4, (Span(spark(history.cells(20, now_unix_s), glyphs, 1.0), "spark"),)))
    left = fitting(parts, width)
    return cut((*left, Span("  "), *_bars(gpu, width - width_of(left) - 2, glyphs)), width, glyphs)


def remark_line(remark: Remark, width: int, glyphs: Glyphs) -> Line:
    """Something that has happened."""
    style = _REMARK_STYLES.get(remark.kind, "")
    at = time.strftime("%H:%M:%S", time.localtime(remark.at_unix_s))
    return cut(
        (Span(f" {at} ", "dim"), Span(f"{remark.kind} ", style or "title"), Span(remark.text, style)), width, glyphs
    )


_REMARK_STYLES: Final = {
    "node": "warn",
    "done": "good",
    "error": "bad",
    "failed": "bad",
    "refused": "warn",
    "outside": "warn",
    "unmanaged": "bad",
    "drift": "warn",
    "broker-restarted": "warn",
    "server-restarted": "warn",
    "not-suspended": "warn",
    "not-resumed": "warn",
    "killed-on-resume": "warn",
}


def remark_lines(remarks: Sequence[Remark], most: int, width: int, glyphs: Glyphs) -> list[Line]:
    """The last ``most``, the newest at the bottom; always ``most`` lines, so that nothing jumps."""
    last = [remark_line(remark, width, glyphs) for remark in remarks[-most:]]
    if not last:
        last = [(Span(" nothing has happened yet", "dim"),)]
    return [*last, *[() for _ in range(most - len(last))]]
