"""``vgpuctl top`` on a terminal: keys, mouse, and when it draws what."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ClassVar, Final, TypeVar

from textual import on
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.events import Resize
from textual.message import Message
from textual.screen import Screen
from textual.widgets import Footer, Input

from vgpu.ctl.commandlines import program_line
from vgpu.ctl.present.tables import promised
from vgpu.errors import VgpuError
from vgpu.node.link import ControlLink
from vgpu.protocol.messages import EventReading, ProcessReading, Snapshot, VgpuStatus
from vgpu.spec import VgpuChanges
from vgpu.top.colours import DARK, LIGHT, is_light, theme
from vgpu.top.columns import Layout, group_line, head_line, layout, process_line, programs_line, row_line
from vgpu.top.details import detail_text, help_text
from vgpu.top.dialogs import Ask, Confirm, TextScreen
from vgpu.top.draw import ASCII, UNICODE, Line, Span
from vgpu.top.feed import Feed, Lost, Met, News
from vgpu.top.model import ORDERS, Choice, Model, Row, group_of
from vgpu.top.panels import TALL, NodeFacts, gpu_lines, node_line, remark_lines, room_text
from vgpu.top.widgets import Brush, Lines, Table
from vgpu.units import format_bytes

T = TypeVar("T")
R = TypeVar("R")
INTERVALS_S: Final = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
COMMANDS_S: Final = 10.0
"""A column of commands is at most that old."""
_UPS: Final = frozenset(order.name for order in ORDERS if order.up)

Parse = Callable[[str, str], VgpuChanges]
"""What ``vgpuctl set VGPU …`` makes of the rest of its command line."""


class FeedNews(Message):
    """News from the feed's thread."""

    def __init__(self, news: News) -> None:
        super().__init__()
        self.news = news


AROUND: Final = 8
"""Lines of the screen besides GPUs, rows and remarks, and what dialogs and headings may need."""


class Top(App[None]):
    """``path``: the node's control socket. ``utf8``: whether the terminal shows more than ASCII."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #head { margin-top: 1; }
    #remarks { margin-top: 1; }
    #filter, #filter:focus { display: none; border: none; height: 1; padding: 0 1; background: $panel; }
    #filter.open { display: block; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,ctrl+c,ctrl+q", "quit", "quit", key_display="q"),
        Binding("question_mark,h", "help", "help", key_display="?"),
        Binding("enter,space", "expand", "open", key_display="Enter"),
        Binding("i", "inspect", "inspect"),
        Binding("r", "resize", "resize"),
        Binding("x", "remove", "remove"),
        Binding("s,greater_than_sign", "order(1)", "sort", key_display="s"),
        Binding("b", "group", "group"),
        Binding("slash", "filter", "filter", key_display="/"),
        Binding("z", "suspend", "suspend"),
        Binding("m", "migrate", "migrate"),
        Binding("g", "gpu", "GPU"),
        Binding("v", "measure", "history"),
        Binding("p", "pause", "pause"),
        Binding("S", "reverse", "reverse", key_display="S"),
        Binding("less_than_sign", "order(-1)", show=False),
        Binding("plus,equals_sign", "interval(1)", show=False),
        Binding("minus", "interval(-1)", show=False),
        Binding("t", "theme", show=False),
        Binding("escape", "everything", show=False),
        Binding("down,j", "move(1)", show=False),
        Binding("up,k", "move(-1)", show=False),
        Binding("pagedown", "move(10)", show=False),
        Binding("pageup", "move(-10)", show=False),
        Binding("home", "move(-1000000)", show=False),
        Binding("end,G", "move(1000000)", show=False),
    ]

    def __init__(self, path: Path, node: NodeFacts, interval_s: float, parse: Parse, *, utf8: bool = True) -> None:
        colourless = bool(os.environ.get("NO_COLOR"))
        if not colourless:
            os.environ.pop("NO_COLOR", None)  # set and empty means nothing, but not to the library
        super().__init__(ansi_color=colourless or None)
        self.model = Model()
        self.choice = Choice()
        self.interval_s = interval_s
        self._path = path
        self._node = node
        self._parse = parse
        self._colourless = colourless
        self._glyphs = UNICODE if utf8 else ASCII
        self._palette = LIGHT if is_light(os.environ.get("COLORFGBG", "")) else DARK
        self._brush = self._new_brush()
        self._rows: list[Row] = []
        self._layout: Layout = layout(80, [])
        self._asking = False
        self._asked_s = 0.0
        self._numbers: dict[str, int] = {}
        self._feed = Feed(path, interval_s, self._pass_on)

    def _new_brush(self) -> Brush:
        return Brush(None if self._colourless else self._palette, self._glyphs)

    def compose(self) -> ComposeResult:
        def brush() -> Brush:
            return self._brush

        yield Lines(brush, id="node", raised=True)
        yield Lines(brush, id="gpus")
        yield Lines(brush, id="head", raised=True)
        yield Table(brush, id="table")
        yield Input(id="filter", placeholder="words that a row must have; Enter keeps, Escape drops")
        yield Lines(brush, id="remarks")
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        for palette in (DARK, LIGHT):
            self.register_theme(theme(palette))
        self.theme = self._palette.name
        self.set_class(self._glyphs.ascii, "ascii")
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self.exit)
        self.query_one(Table).focus()
        self.redraw()
        self._feed.start()

    def on_unmount(self) -> None:
        self._feed.close()

    # --- news from the feed

    def _pass_on(self, news: News) -> None:
        """From the feed's thread to this one."""
        with suppress(RuntimeError):  # it comes after the end
            self.post_message(FeedNews(news))

    @on(FeedNews)
    def _take_news(self, message: FeedNews) -> None:
        match message.news:
            case Snapshot() as snapshot:
                self.model.take(snapshot)
                self._ask_for_programs()
            case EventReading() as event:
                self.model.add_event(event)
            case Met() as met:
                self._meet(met)
            case Lost(error=error):
                self.model.lose(time.time(), f"{error.message}; asked again and again")
        self.redraw()

    def _meet(self, met: Met) -> None:
        status, now = met.status, time.time()
        known = self._node.pid
        self._node = replace(
            self._node,
            pid=status.pid,
            software=status.software,
            simulated=status.simulated,
            started_unix_s=now - status.uptime_ns / 1e9,
        )
        said = {(remark.at_unix_s, remark.kind) for remark in self.model.remarks}
        for event in met.events:
            if (event.at_unix_s, event.kind) not in said:
                self.model.add_event(event)
        if self.model.lost is not None:
            again = (
                "it answers again" if status.pid == known else f"it was restarted: process {status.pid}, was {known}"
            )
            self.model.remark(now, "node", again)
        self.model.lost = None

    def _ask_for_programs(self) -> None:
        """The programs of all vGPUs: at each reading if they are shown, else when their number changes or
        ``COMMANDS_S`` have passed."""
        if self.model.shown is None or self._asking:
            return
        now_s, numbers = time.monotonic(), {v.vgpu_id: v.processes for v in self.model.shown.vgpus if v.processes}
        due = numbers != self._numbers or now_s - self._asked_s >= COMMANDS_S
        if self.choice.expanded or (numbers and due):
            self._asking, self._asked_s, self._numbers = True, now_s, numbers
            self._ask(described, self._know, self._ask_again)

    def _know(self, found: Sequence[ProcessReading]) -> None:
        self._asking = False
        self.model.know(found)
        self.redraw()

    def _ask_again(self, error: VgpuError) -> None:
        self._asking = False  # with the next readings; the feed reports it if there are none

    def _ask(
        self, question: Callable[[ControlLink], T], then: Callable[[T], None], failed: Callable[[VgpuError], None]
    ) -> None:
        """Asks the node in a thread of its own, without waiting for it. ``then`` and ``failed`` run in this thread."""

        def ask() -> None:
            with suppress(RuntimeError):  # the answer comes after the end
                try:
                    with ControlLink(self._path) as link:
                        answer = question(link)
                except VgpuError as error:
                    self.call_later(failed, error)
                else:
                    self.call_later(then, answer)

        threading.Thread(target=ask, daemon=True).start()

    # --- what is shown

    def redraw(self) -> None:
        """Everything that has changed."""
        if not self.is_running or not self.screen_stack:  # while it ends, widgets go before the screens
            return
        width, height = self.size
        now = time.time() if self.model.shown is None else self.model.shown.at_unix_s
        before = [row.vgpu.vgpu_id for row in self._rows]
        self._rows = self.model.rows(self.choice)
        self.choice = self.choice.settled(before, [row.vgpu.vgpu_id for row in self._rows])
        glyphs = self._glyphs
        gpus = [gpu for gpu in self.model.gpus if self.choice.gpu in (None, gpu.index)]
        node = node_line(self._node, self.model, self.choice, self.interval_s, time.time(), width, glyphs)
        self.query_one("#node", Lines).show([node])
        several = 1 if height < 24 else 3 if height < 45 else 5
        most = max(1, (height - 8) // 3)
        rows = sum(1 + len(row.processes or ()) for row in self._rows)
        spare = max(0, height - AROUND - several - rows - TALL * len(gpus))
        histories, measure = self.model.gpu_histories, self.choice.measure
        self.query_one("#gpus", Lines).show(gpu_lines(gpus, histories, measure, now, width, most, glyphs, spare))
        table = self.query_one(Table)
        inner = table.scrollable_content_region.width or width
        self._layout = layout(inner, [row.vgpu for row in self._rows])
        self.query_one("#head", Lines).show([head_line(self._layout, self.choice, glyphs, _UPS)])
        table.show(list(self._table(now, inner)), self.choice.selected)
        self.query_one("#remarks", Lines).show(remark_lines(self.model.named_remarks(several), several, width, glyphs))

    def _table(self, now: float, width: int) -> Iterable[tuple[str, Line]]:
        if not self._rows and self.model.shown is not None:
            said = (
                "no vGPU is like that: Escape shows all"
                if self.model.shown.vgpus
                else "no vGPU yet: vgpuctl create --help"
            )
            yield "", (Span(f"  {said}", "dim"),)
        heading = ""
        for row in self._rows:
            key = row.vgpu.vgpu_id
            if (group := group_of(row.vgpu, self.choice.group)) != heading:
                heading = group
                same = [one for one in self._rows if group_of(one.vgpu, self.choice.group) == group]
                yield "", group_line(same, self.choice.group, width, self._glyphs)
            yield key, row_line(row, self._layout, now, self._glyphs, selected=key == self.choice.selected)
            if row.processes is None:
                continue
            for process in row.processes:
                yield key, process_line(process, row.vgpu.state, width, self._glyphs)
            if not row.processes:
                yield key, programs_line(row, width, self._glyphs)

    @on(Resize)
    def _resized(self) -> None:
        self.call_after_refresh(self.redraw)

    # --- keys and mouse

    def choose(self, choice: Choice) -> None:
        self.choice = choice
        self.redraw()

    def action_move(self, step: int) -> None:
        self.choose(self.choice.moved([row.vgpu.vgpu_id for row in self._rows], step))

    def action_expand(self) -> None:
        self.choose(self.choice.toggled())
        self._ask_for_programs()
        self.query_one(Table).follow()

    def action_order(self, step: int) -> None:
        self.choose(self.choice.next_order(step, self._layout.orders))

    def action_measure(self) -> None:
        self.choose(self.choice.next_measure())

    def action_reverse(self) -> None:
        self.choose(replace(self.choice, reverse=not self.choice.reverse))

    def action_group(self) -> None:
        self.choose(self.choice.next_group())

    def action_gpu(self) -> None:
        self.choose(self.choice.next_gpu([gpu.index for gpu in self.model.gpus]))

    def action_everything(self) -> None:
        self._close_filter("")
        self.choose(replace(self.choice, gpu=None))

    def action_pause(self) -> None:
        self.model.freeze(not self.model.frozen)
        self.redraw()

    def action_interval(self, step: int) -> None:
        nearest = min(range(len(INTERVALS_S)), key=lambda i: abs(INTERVALS_S[i] - self.interval_s))
        self.interval_s = INTERVALS_S[min(max(nearest + step, 0), len(INTERVALS_S) - 1)]
        self._feed.set_interval(self.interval_s)
        self.redraw()

    def action_theme(self) -> None:
        if not self._colourless:
            self._palette = LIGHT if self._palette is DARK else DARK
            self.theme = self._palette.name
            self._brush = self._new_brush()
            self.refresh(layout=True)
            for lines in self.query(Lines):
                lines.refresh()
            self.query_one(Table).refresh()

    @on(Table.Pressed)
    def _pressed(self, pressed: Table.Pressed) -> None:
        if not pressed.key:
            return
        if pressed.again:
            self.action_expand()
        else:
            self.choose(replace(self.choice, selected=pressed.key))

    @on(Lines.Clicked, "#head")
    def _head_clicked(self, clicked: Lines.Clicked) -> None:
        column = self._layout.at(clicked.x)
        if column is not None and column.order:
            self.choose(self.choice.ordered_by(column.order))

    # --- the filter

    def action_filter(self) -> None:
        field = self.query_one("#filter", Input)
        field.value = self.choice.words
        field.add_class("open")
        field.focus()

    @on(Input.Changed, "#filter")
    def _filter_changed(self, event: Input.Changed) -> None:
        if event.input.has_class("open"):
            self.choose(replace(self.choice, words=event.value))

    @on(Input.Submitted, "#filter")
    def _filter_kept(self, event: Input.Submitted) -> None:
        self._close_filter(event.value)

    def _close_filter(self, words: str) -> None:
        self.query_one("#filter", Input).remove_class("open")
        self.query_one(Table).focus()
        self.choose(replace(self.choice, words=words))

    # --- what is done to a vGPU

    @property
    def _selected(self) -> VgpuStatus | None:
        return next((row.vgpu for row in self._rows if row.vgpu.vgpu_id == self.choice.selected), None)

    def action_help(self) -> None:
        self._push(TextScreen("vgpuctl top", help_text(self._glyphs)))

    def _push(self, screen: Screen[R], then: Callable[[R | None], None] | None = None) -> None:
        screen.set_class(self._glyphs.ascii, "ascii")
        self.push_screen(screen, then)

    def action_inspect(self) -> None:
        if (vgpu := self._selected) is not None:
            self._ask(
                lambda link: link.inspect(vgpu.vgpu_id),
                lambda detail: self._push(TextScreen(_named(vgpu), detail_text(detail, self._glyphs))),
                self._failed,
            )

    def _failed(self, error: VgpuError) -> None:
        self._say("error", str(error))

    def _say(self, kind: str, text: str) -> None:
        self.model.remark(time.time(), kind, text)
        self.redraw()

    def action_resize(self) -> None:
        if (vgpu := self._selected) is not None:
            spec = vgpu.spec
            share = f"--sm {spec.sm_percent:g}" if spec.sm_percent is not None else f"--fraction {spec.fraction:g}"
            memory = format_bytes(vgpu.memory_limit_bytes)
            explained = (
                f"It has {share}, and {memory} of memory at most. What shall change, in the words of vgpuctl set?"
            )
            example = "--sm 50 --mem 16G"
            self._push(Ask(f"Resize {_named(vgpu)}", explained, example, partial(self._resize, vgpu.vgpu_id)))

    def _resize(self, vgpu_id: str, ask: Ask, text: str) -> None:
        def refuse(error: VgpuError) -> None:
            ask.refuse(str(error))

        def done(changed: VgpuStatus) -> None:
            if ask.is_current:
                ask.dismiss()
            self._say(
                "done", f"{_named(changed)} now has {promised(changed)}, {format_bytes(changed.memory_limit_bytes)}"
            )
            for warning in changed.warnings:
                self._say("warning", f"{vgpu_id}: {warning}")

        try:
            changes = self._parse(vgpu_id, text)
        except VgpuError as error:
            refuse(error)
            return
        self._ask(lambda link: link.set(vgpu_id, changes), done, refuse)

    def action_suspend(self) -> None:
        """Suspends the selected vGPU, or resumes it."""
        if (vgpu := self._selected) is not None:
            asleep = vgpu.state in {"suspended", "idle-suspended"}
            self._ask(
                lambda link: (link.resume if asleep else link.suspend)(vgpu.vgpu_id),
                lambda changed: self._say("done", f"{_named(changed)} is {'resumed' if asleep else 'suspended'}"),
                self._failed,
            )

    def action_migrate(self) -> None:
        if (vgpu := self._selected) is None:
            return
        others = [gpu for gpu in self.model.gpus if gpu.index != vgpu.gpu_index]
        if not others:
            self._say("error", "this node has one GPU: there is no other to migrate to")
            return
        free = "\n".join(f"GPU {gpu.index}: {room_text(gpu)}" for gpu in others)
        explained = f"Its programs move with it and stand still meanwhile. Which GPU shall it move to?\n\n{free}"
        self._push(
            Ask(f"Migrate {_named(vgpu)}", explained, str(others[0].index), partial(self._migrate, vgpu.vgpu_id))
        )

    def _migrate(self, vgpu_id: str, ask: Ask, text: str) -> None:
        def done(moved: VgpuStatus) -> None:
            if ask.is_current:
                ask.dismiss()
            self._say("done", f"{_named(moved)} is on GPU {moved.gpu_index}")

        gpu = text.strip()
        if not gpu:
            ask.refuse("type the number of a GPU")
            return
        self._ask(lambda link: link.migrate(vgpu_id, gpu), done, lambda error: ask.refuse(str(error)))

    def action_remove(self) -> None:
        if (vgpu := self._selected) is None:
            return
        programs = {0: "", 1: "\n\nA program runs in it: its next GPU call fails."}.get(
            vgpu.processes, f"\n\n{vgpu.processes} programs run in it: the next GPU call of each fails."
        )
        self._push(Confirm("Remove", f"Remove {_named(vgpu)}?{programs}"), partial(self._remove, vgpu))

    def _remove(self, vgpu: VgpuStatus, sure: bool | None) -> None:
        if sure:
            # The user has agreed to end the programs that were there. If one came to an empty vGPU since, the node
            # refuses.
            self._ask(
                lambda link: link.remove(vgpu.vgpu_id, force=vgpu.processes > 0),
                lambda gone: self._say("done", f"{_named(gone)} is removed"),
                self._failed,
            )


def _named(vgpu: VgpuStatus) -> str:
    return f"{vgpu.name} ({vgpu.vgpu_id})" if vgpu.name else vgpu.vgpu_id


def described(link: ControlLink) -> list[ProcessReading]:
    """The programs of all vGPUs, with their arguments where this machine shows them."""
    return [
        process.model_copy(update={"command": program_line(process.pid, process.command)})
        for process in link.processes().processes
    ]
