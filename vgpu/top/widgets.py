"""Lines on the screen. Everything is drawn line by line from spans, since sixty rows that change each second would cost
a table of widgets most of a core."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widget import Widget

from vgpu.top.colours import Palette, selected_style, styles
from vgpu.top.draw import Glyphs, Line


class Brush:
    """Lines as a terminal shows them: in these colours (None: without any), with these glyphs."""

    def __init__(self, palette: Palette | None, glyphs: Glyphs) -> None:
        self.palette = palette
        self.glyphs = glyphs
        self._styles = styles(palette)
        self._selected = selected_style(palette)
        self._base = Style() if palette is None else Style(color=palette.text, bgcolor=palette.background)

    def strip(self, line: Line, width: int, *, selected: bool = False, raised: bool = False) -> Strip:
        base = self._base
        if raised and self.palette is not None:
            base += Style(bgcolor=self.palette.raised)
        if selected:
            base += self._selected
        said = self.glyphs.said
        segments = [Segment(said(text), base + self._styles[style]) for text, style in line]
        return Strip(segments).adjust_cell_length(width, base)


class Lines(Widget):
    """Some lines, as high as there are."""

    class Clicked(Message):
        """``x``, ``y``: the cell, in ``widget``."""

        def __init__(self, widget: Lines, x: int, y: int) -> None:
            super().__init__()
            self.widget, self.x, self.y = widget, x, y

        @property
        def control(self) -> Lines:
            return self.widget

    DEFAULT_CSS: ClassVar[str] = "Lines { height: auto; width: 1fr; }"

    def __init__(self, brush: Callable[[], Brush], *, id: str, raised: bool = False) -> None:
        super().__init__(id=id)
        self._brush = brush
        self._raised = raised
        self._lines: tuple[Line, ...] = ()

    def show(self, lines: Sequence[Line]) -> None:
        if len(lines) != len(self._lines):
            self.styles.height = len(lines)
        if tuple(lines) != self._lines:
            self._lines = tuple(lines)
            self.refresh()

    def render_line(self, y: int) -> Strip:
        line = self._lines[y] if y < len(self._lines) else ()
        return self._brush().strip(line, self.size.width, raised=self._raised)

    def on_click(self, event: events.Click) -> None:
        self.post_message(self.Clicked(self, event.x, event.y))


class Table(ScrollView, can_focus=True, inherit_bindings=False):
    """Rows that scroll; each belongs to an id, several may to the same one. ``show`` keeps the selected one in view."""

    class Pressed(Message):
        """A row was clicked; ``again``: the one that was selected already."""

        def __init__(self, key: str, again: bool) -> None:
            super().__init__()
            self.key, self.again = key, again

    DEFAULT_CSS: ClassVar[str] = """
    Table { height: 1fr; width: 1fr; overflow-x: hidden; overflow-y: auto; scrollbar-size-vertical: 1; }
    .ascii Table { scrollbar-size: 0 0; }
    """

    def __init__(self, brush: Callable[[], Brush], *, id: str) -> None:
        super().__init__(id=id)
        self._brush = brush
        self._rows: tuple[tuple[str, Line], ...] = ()
        self._selected: str | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        """The id of each line."""
        return tuple(key for key, _ in self._rows)

    def show(self, rows: Sequence[tuple[str, Line]], selected: str | None) -> None:
        moved = selected != self._selected or len(rows) != len(self._rows)
        changed = moved or tuple(rows) != self._rows
        self._rows, self._selected = tuple(rows), selected
        if moved:
            self.virtual_size = Size(self.scrollable_content_region.width, len(self._rows))
            self.follow()
        if changed:
            self.refresh()

    def follow(self) -> None:
        """The selected row, with what belongs to it, into view."""
        at = [y for y, (key, _) in enumerate(self._rows) if key == self._selected]
        if at:
            width = max(1, self.scrollable_content_region.width)
            self.scroll_to_region(Region(0, at[0], width, len(at)), animate=False, force=True, x_axis=False)

    def on_resize(self) -> None:
        self.virtual_size = Size(self.scrollable_content_region.width, len(self._rows))
        self.follow()

    def render_line(self, y: int) -> Strip:
        at = y + self.scroll_offset.y
        width = self.scrollable_content_region.width
        if at >= len(self._rows):
            return self._brush().strip((), width)
        key, line = self._rows[at]
        first = at == 0 or self._rows[at - 1][0] != key
        return self._brush().strip(line, width, selected=key == self._selected and first)

    def on_click(self, event: events.Click) -> None:
        at = event.y + self.scroll_offset.y
        if at < len(self._rows):
            key = self._rows[at][0]
            self.post_message(self.Pressed(key, again=key == self._selected))
