"""Texts of the dialogs: everything about one vGPU, and what the keys do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from rich.table import Table
from rich.text import Text

from vgpu.ctl.vgpus import facts
from vgpu.protocol.messages import VgpuDetail
from vgpu.top.draw import Glyphs

KEYS: Final = (
    ("↑ ↓  j k", "select a vGPU; Page Up, Page Down, Home and End, too"),
    ("Enter, Space", "show its programs, or hide them"),
    ("s  >  and  <", "sort by the next column, or the one before"),
    ("S", "the other way round; a click on a title does both"),
    ("b", "group rows by user, by state, by GPU, then not"),
    ("/", "only rows with these words: name, id, user, state, mode, group, priority"),
    ("g", "the next GPU alone, then all again"),
    ("v", "histories of what vGPUs hold, of what they use, or of memory"),
    ("Escape", "all rows again"),
    ("p", "pause: what is shown stays, histories go on"),
    ("+  -", "less often, more often"),
    ("i", "inspect: everything about it, with warnings, notes and advice"),
    ("r", "resize, in the words of vgpuctl set"),
    ("x", "remove it; asks first"),
    ("z", "suspend it, or resume it"),
    ("m", "migrate it to another GPU; asks which"),
    ("t", "dark or light"),
    ("q", "quit"),
)
COLUMNS: Final = (
    ("HELD/SHARE", "part of the time it held the GPU in the last second, of what it is promised; limits after a dash"),
    ("", "The end of each bar is the whole GPU. The notch is the guarantee; beyond it the vGPU uses what others leave"),
    ("MEMORY", "used, of its limit. The end of the bar is the GPU's memory; the notch is the limit"),
    ("COMMAND", "its first program, with arguments"),
    ("BUSY", "part of the time with its work on the GPU"),
    ("TOKENS/S", "leases begun per second"),
    ("WAITING", "for how long it has wanted the GPU without having it"),
    ("LAG", "+: GPU time that it is owed; −: debt, for work that ran past a lease"),
    ("SLO", "part of the decode steps and prefills that were in time (--slo)"),
    ("REFUSED", "allocations refused at its limit"),
)


def help_text(glyphs: Glyphs) -> Table:
    rows = [("Keys", ""), *KEYS, ("", ""), ("Columns", ""), *COLUMNS]
    return _table(rows, glyphs)


def detail_text(detail: VgpuDetail, glyphs: Glyphs) -> Table:
    rows = [(name, said if isinstance(said, str) else said.text) for name, said in facts(detail).items()]
    for kind, sentences in detail.remarks.items():
        rows += [("", ""), *((kind, sentence) for sentence in sentences)] if sentences else []
    return _table(rows, glyphs)


def _table(rows: Iterable[tuple[str, str]], glyphs: Glyphs) -> Table:
    """Names at the left; their texts wrap beside them."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, said in rows:
        table.add_row(Text(glyphs.said(name)), Text(glyphs.said(said)))
    return table
