"""The table of vGPUs: which columns there is room for, and what stands in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from rich.cells import cell_len

from vgpu.ctl.present.tables import attained, doing, token_rate, user_name
from vgpu.protocol.messages import ProcessReading, VgpuStatus
from vgpu.top.draw import Glyphs, Line, Span, bar, cut, cut_in_the_middle, fixed, spark, width_of
from vgpu.top.model import Choice, Row, group_of, share_of, state_word
from vgpu.units import GIB, KIB, MIB, TIB, counted, format_bytes

SPARK_SPAN_S: Final = 120
_STATE_STYLES: Final = {
    "running": "good",
    "serving": "good",
    "idle": "dim",
    "idle-suspended": "dim",
    "removing": "dim",
    "failed": "bad",
    "died": "bad",
    "outside": "bad",
}
_SHORTEST_BAR: Final = 4
_BAR_WIDTH: Final = 9
"""What a bar needs to be worth its room, with the space after it."""

Draw = Callable[[Row, float, int, Glyphs], Line]


@dataclass(frozen=True, slots=True)
class Column:
    """``order``: what it is sorted by; "": nothing. ``width``: cells that it needs, ``most`` that it can use. Where
    there is no room, the one of the smallest ``keep`` is left out first; likewise its bar, of ``bar_keep``."""

    title: str
    order: str
    width: int
    most: int
    keep: int
    draw: Draw
    right: bool = False
    bar_keep: int = 0


def plain(text: Callable[[VgpuStatus], str], style: Callable[[VgpuStatus], str] = lambda vgpu: "") -> Draw:
    return lambda row, now, width, glyphs: (Span(text(row.vgpu), style(row.vgpu)),)


def _held(row: Row, now: float, width: int, glyphs: Glyphs) -> Line:
    """The share that it holds, beside its guarantee and its limit. The bar ends at the whole GPU."""
    vgpu = row.vgpu
    text = share_text(vgpu, decimals=1)
    if len(text) > COLUMN_WIDTHS["held"]:
        text = share_text(vgpu, decimals=0)
    style = "warn" if vgpu.throttled else ""
    room = width - COLUMN_WIDTHS["held"] - 1
    if room < _SHORTEST_BAR:
        return (Span(text.rjust(width), style),)
    drawn = bar(share_of(vgpu), room, "held", glyphs, vgpu.guarantee_ratio)
    return (*drawn, Span(" "), Span(text, style))


def share_text(vgpu: VgpuStatus, decimals: int) -> str:
    """``29.8/30 %``, ``29.8/12–40 %``: held, guaranteed and at most."""

    def number(ratio: float) -> str:
        return f"{round(ratio * 100, decimals):g}"

    least, most = number(vgpu.guarantee_ratio), number(vgpu.limit_ratio)
    return f"{number(share_of(vgpu))}/{least if least == most else f'{least}–{most}'} %"


def _memory(row: Row, now: float, width: int, glyphs: Glyphs) -> Line:
    vgpu = row.vgpu
    text = memory_text(vgpu.memory_used_bytes, vgpu.memory_limit_bytes)
    part = vgpu.memory_used_bytes / vgpu.memory_limit_bytes if vgpu.memory_limit_bytes else 0.0
    style = "warn" if part > 0.97 else "dim" if vgpu.memory_away_bytes else ""
    room = width - COLUMN_WIDTHS["memory"] - 1
    if room < _SHORTEST_BAR:
        return (Span(text.rjust(width), style),)
    whole = max(row.gpu_memory_bytes, vgpu.memory_limit_bytes, 1)
    mark = vgpu.memory_limit_bytes / whole
    drawn = bar(vgpu.memory_used_bytes / whole, room, "memory", glyphs, mark)
    return (*drawn, Span(" "), Span(text, style))


def memory_text(used_bytes: int, limit_bytes: int) -> str:
    """``1.5/8 GiB``: both in the unit of the limit."""
    limit = format_bytes(limit_bytes)
    size = {"TiB": TIB, "GiB": GIB, "MiB": MIB, "KiB": KIB}.get(limit.split()[-1], 1)
    used = used_bytes / size
    return f"{used:.0f}/{limit}" if used >= 100 else f"{float(f'{used:.2g}' if used < 1 else f'{used:.1f}'):g}/{limit}"


def label(vgpu: VgpuStatus) -> str:
    """What a row is called: the vGPU's name, its id where it has no name."""
    return vgpu.name or vgpu.vgpu_id


def _label(row: Row, now: float, width: int, glyphs: Glyphs) -> Line:
    return (Span(cut_in_the_middle(glyphs.said(label(row.vgpu)), width, glyphs), "id"),)


def _history(row: Row, now: float, width: int, glyphs: Glyphs) -> Line:
    """The scale ends at the whole GPU, as that of the bars."""
    return (Span(spark(row.history.cells(width, now, SPARK_SPAN_S), glyphs, 1.0), "spark"),)


def lag_text(lag_ns: int) -> str:
    """``+12ms``: the vGPU is owed so much GPU time; ``−3ms``: it has had so much too much."""
    if abs(lag_ns) < 1000:
        return "0"
    return f"{'+' if lag_ns > 0 else '−'}{short_duration(abs(lag_ns))}"


def short_duration(duration_ns: int) -> str:
    """In its largest unit: ``12ms``, ``3.4s``, ``2m``."""
    for unit, size in (("h", 3600 * 10**9), ("m", 60 * 10**9), ("s", 10**9), ("ms", 10**6), ("µs", 10**3)):
        if duration_ns >= size:
            value = duration_ns / size
            return f"{value:.1f}{unit}" if value < 9.95 and unit not in ("ms", "µs") else f"{int(value)}{unit}"
    return f"{duration_ns}ns"


def state_style(word: str) -> str:
    return _STATE_STYLES.get(word, "warn")


COLUMN_WIDTHS: Final = {"held": 12, "memory": 13}
SPARK_TITLE: Final = f"{SPARK_SPAN_S // 60} MIN"
"""Behind the measure, as in ``HELD 2 MIN``."""
COLUMNS: Final = (
    Column("VGPU", "name", 13, 40, 99, _label),
    Column("ID", "vgpu", 13, 13, 33, plain(lambda vgpu: vgpu.vgpu_id if vgpu.name else "", lambda vgpu: "dim")),
    Column("USER", "user", 4, 12, 62, plain(lambda vgpu: user_name(vgpu.owner_uid))),
    Column("GPU", "gpu", 4, 4, 60, plain(lambda vgpu: str(vgpu.gpu_index)), right=True),
    Column("STATE", "state", 8, 14, 95, plain(state_word, lambda vgpu: state_style(state_word(vgpu)))),
    Column("SMS", "", 6, 6, 50, plain(lambda vgpu: f"{vgpu.sm_percent_granted:.3g} %"), right=True),
    Column("HELD/SHARE", "held", COLUMN_WIDTHS["held"], 33, 98, _held, right=True, bar_keep=74),
    Column("BUSY", "busy", 7, 7, 65, plain(lambda vgpu: f"{vgpu.busy_ratio * 100:.1f} %"), right=True),
    Column("TOKENS/S", "tokens", 8, 9, 96, plain(token_rate), right=True),
    Column(SPARK_TITLE, "", 12, 40, 73, _history),
    Column("MEMORY", "memory", COLUMN_WIDTHS["memory"], 29, 90, _memory, right=True, bar_keep=37),
    Column("PROCS", "procs", 6, 6, 40, plain(lambda vgpu: str(vgpu.processes)), right=True),
    Column(
        "WAITING",
        "waiting",
        8,
        8,
        45,
        plain(
            lambda vgpu: short_duration(vgpu.waiting_ns) if vgpu.waiting_ns else "",
            lambda vgpu: "warn" if vgpu.waiting_ns > 10**9 else "",
        ),
        right=True,
    ),
    Column(
        "LAG",
        "lag",
        7,
        7,
        30,
        plain(
            lambda vgpu: lag_text(vgpu.lag_ns),
            lambda vgpu: "warn" if vgpu.lag_ns < -(10**6) else "" if vgpu.wants else "dim",
        ),
        right=True,
    ),
    Column("SLO", "slo", 7, 7, 47, plain(attained), right=True),
    Column(
        "REFUSED",
        "refused",
        8,
        8,
        35,
        plain(lambda vgpu: str(vgpu.memory_refusals or ""), lambda vgpu: "bad"),
        right=True,
    ),
    Column("COMMAND", "", 16, 90, 55, lambda row, now, width, glyphs: (Span(row.command, "dim"),)),
)


@dataclass(frozen=True, slots=True)
class Layout:
    """Columns with their widths, in order; ``gap`` cells between them, after a margin of ``MARGIN``."""

    columns: tuple[tuple[Column, int], ...]
    gap: int
    width: int

    def at(self, x: int) -> Column | None:
        """The column there, its gap before it included."""
        left = MARGIN
        for column, width in self.columns:
            if x < left + width:
                return column
            left += width + self.gap
        return None

    def right(self, column: Column, width: int) -> bool:
        """Whether it is aligned there: a bar begins at the left."""
        return column.right and not (column.bar_keep and width > column.width)

    @property
    def orders(self) -> tuple[str, ...]:
        """What can be sorted by, from left to right."""
        return tuple(column.order for column, _ in self.columns if column.order)


MARGIN: Final = 2


def layout(width: int, vgpus: Sequence[VgpuStatus]) -> Layout:
    """What fits ``width`` cells. Columns that would be empty for all are left out."""
    gap = 1 if width < 150 else 2
    names = max((cell_len(label(vgpu)) for vgpu in vgpus), default=0)
    users = max((len(user_name(vgpu.owner_uid)) for vgpu in vgpus), default=0)
    empty = {
        "ID": not any(vgpu.name for vgpu in vgpus),
        "COMMAND": not any(vgpu.processes for vgpu in vgpus),
        "GPU": len({vgpu.gpu_index for vgpu in vgpus}) < 2,
        "SMS": all(vgpu.mode == "temporal" for vgpu in vgpus),
    }
    shown = [_sized(column, names, users, width) for column in COLUMNS if not empty.get(column.title)]
    barred = {column.title for column in shown if column.bar_keep}

    def widths() -> list[int]:
        return [column.width + (_BAR_WIDTH if column.title in barred else 0) for column in shown]

    def left() -> int:
        return width - MARGIN - sum(widths()) - gap * (len(shown) - 1)

    while len(shown) > 1 and left() < 0:
        least = min(shown, key=lambda column: column.keep)
        bars = [column for column in shown if column.title in barred and column.bar_keep < least.keep]
        if bars:
            barred.remove(min(bars, key=lambda column: column.bar_keep).title)
        else:
            shown.remove(least)
    growing = [bool(not column.bar_keep or column.title in barred) for column in shown]
    return Layout(tuple(zip(shown, _grown(shown, widths(), growing, left()), strict=True)), gap, width)


def _sized(column: Column, names: int, users: int, width: int) -> Column:
    """The column of names has three tenths of the terminal if the longest name needs them; users what they need."""
    if column.title == "VGPU":
        needed = min(names, column.most)
        return replace(column, width=min(max(needed, 4), max(column.width, width * 3 // 10 - 5)), most=needed)
    if column.title == "USER":
        needed = min(max(column.width, users), column.most)
        return replace(column, width=needed, most=needed)
    return column


def _grown(columns: Sequence[Column], widths: Sequence[int], growing: Sequence[bool], left: int) -> list[int]:
    """``left`` cells more: to the names first, then one by one to each of those that can use them."""
    grown = list(widths)
    if columns and left > 0:
        more = min(max(columns[0].most - grown[0], 0), left)
        grown[0] += more
        left -= more
    while left > 0:
        able = [i for i, column in enumerate(columns) if growing[i] and grown[i] < column.most][:left]
        if not able:
            break
        for i in able:
            grown[i] += 1
        left -= len(able)
    return grown


def head_line(made: Layout, choice: Choice, glyphs: Glyphs, ups: Iterable[str]) -> Line:
    """Titles. The title of the sorted column has an arrow. ``ups``: orders that begin with the smallest by default."""
    spans = [Span(" " * MARGIN)]
    upward = (choice.order in set(ups)) != choice.reverse
    for i, (column, width) in enumerate(made.columns):
        chosen = column.order == choice.order
        title = f"{choice.measure.upper()} {SPARK_TITLE}" if column.title == SPARK_TITLE else column.title
        title = title[: width - 1] + (glyphs.up if upward else glyphs.down) if chosen else title[:width]
        spans += [Span(" " * made.gap)] if i else []
        spans.append(Span(fixed(title, width, glyphs, right=made.right(column, width)), "sorted" if chosen else "head"))
    return tuple(spans)


def row_line(row: Row, made: Layout, now_unix_s: float, glyphs: Glyphs, *, selected: bool) -> Line:
    """A vGPU."""
    opened = row.processes is not None
    sign = glyphs.pointer if selected else " "
    spans = [
        Span(sign, "pointer"),
        Span(glyphs.opened if opened else glyphs.closed if row.vgpu.processes else " ", "dim"),
    ]
    for i, (column, width) in enumerate(made.columns):
        spans += [Span(" " * made.gap)] if i else []
        drawn = column.draw(row, now_unix_s, width, glyphs)
        length = width_of(drawn)
        space = Span(" " * max(0, width - length))
        if length > width:
            drawn = cut(drawn, width, glyphs)
        spans += [space, *drawn] if made.right(column, width) else [*drawn, space]
    return tuple(spans)


def process_line(process: ProcessReading, vgpu_state: str, width: int, glyphs: Glyphs) -> Line:
    """A program of an expanded vGPU in ``vgpu_state``."""
    word = doing(process, vgpu_state)
    memory = format_bytes(process.memory_bytes + process.memory_implicit_bytes)
    facts = [
        Span(f"   {glyphs.branch} ", "dim"),
        Span(f"{process.pid:>7}  "),
        Span(f"{word:<9}", state_style(word)),
        Span(f"{memory:>9}  "),
        Span(f"{short_duration(process.busy_ns):>5} on the GPU  ", "dim"),
    ]
    if width >= 100:
        waited = short_duration(process.gate_wait_ns) if process.gate_wait_ns else "0s"
        facts.append(Span(f"{waited:>5} waited  {process.launches:>9} launches  ", "dim"))
    if process.memory_refusals:
        facts.append(Span(f"{process.memory_refusals} refused  ", "bad"))
    facts.append(Span(process.command))
    return cut(facts, width, glyphs)


def programs_line(row: Row, width: int, glyphs: Glyphs) -> Line:
    """In the place of programs that there are none of, or not yet."""
    said = "no program is attached" if row.vgpu.processes == 0 else f"asking for {row.vgpu.processes} programs …"
    return cut((Span(f"   {glyphs.branch} {said}", "dim"),), width, glyphs)


def group_line(rows: Sequence[Row], group: str, width: int, glyphs: Glyphs) -> Line:
    """The heading above the rows of one group."""
    vgpus = [row.vgpu for row in rows]
    programs = sum(vgpu.processes for vgpu in vgpus)
    used, limit = sum(vgpu.memory_used_bytes for vgpu in vgpus), sum(vgpu.memory_limit_bytes for vgpu in vgpus)
    said = f"{counted(len(vgpus), 'vGPU')}, {counted(programs, 'program')}, {memory_text(used, limit)}"
    named = " ".join(group_of(vgpus[0], group).split())
    return cut((Span(f" {named}", "title"), Span(f"  {said}", "dim")), width, glyphs)
