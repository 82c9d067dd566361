"""What covers the table for a moment: questions and explanations."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from rich.console import RenderableType
from rich.text import Text
from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Input, Static

_BOX = """
    {name} {{ align: center middle; background: $background 60%; }}
    {name} > .box {{
        width: 90%; max-width: {width}; height: auto; max-height: 90%; padding: 1 2;
        border: round $primary; background: $panel; color: $foreground;
        scrollbar-size-vertical: 1;
    }}
    {name}.ascii > .box {{ border: ascii $primary; scrollbar-size: 0 0; }}
"""


class TextScreen(ModalScreen[None]):
    """A text of any length."""

    DEFAULT_CSS: ClassVar[str] = _BOX.format(name="TextScreen", width=110)
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,enter,i,question_mark", "dismiss", "close"),
        Binding("j", "down", show=False),
        Binding("k", "up", show=False),
    ]

    def __init__(self, title: str, body: RenderableType) -> None:
        super().__init__()
        self._title, self._body = title, body

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="box") as box:
            box.border_title = self._title
            yield Static(self._body, id="told")

    def action_down(self) -> None:
        self.query_one(VerticalScroll).scroll_down(animate=False)

    def action_up(self) -> None:
        self.query_one(VerticalScroll).scroll_up(animate=False)

    def on_click(self, event: events.Click) -> None:
        if event.widget is self:
            self.dismiss()


class Confirm(ModalScreen[bool]):
    """Yes or no."""

    DEFAULT_CSS: ClassVar[str] = _BOX.format(name="Confirm", width=76)
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "yes"),
        Binding("n,escape,q", "answer(False)", "no"),
    ]

    def __init__(self, title: str, question: str) -> None:
        super().__init__()
        self._title, self._question = title, question

    def compose(self) -> ComposeResult:
        with Vertical(classes="box") as box:
            box.border_title = self._title
            yield Static(Text(f"{self._question}\n\ny  yes      n  no"), id="question")

    def action_answer(self, answer: bool) -> None:
        self.dismiss(answer)


class Ask(ModalScreen[None]):
    """A line of text. It stays, with the reason, until what was typed is accepted (``done``) or Escape is pressed."""

    DEFAULT_CSS: ClassVar[str] = (
        _BOX.format(name="Ask", width=90)
        + """
    Ask Input, Ask Input:focus { border: none; height: 1; padding: 0 1; background: $background; margin: 1 0; }
    Ask #reason { color: $error; height: auto; }
    """
    )
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss", "leave it")]

    def __init__(self, title: str, explained: str, example: str, submit: Callable[[Ask, str], None]) -> None:
        super().__init__()
        self._title, self._explained, self._example, self._submit = title, explained, example, submit

    def compose(self) -> ComposeResult:
        with Vertical(classes="box") as box:
            box.border_title = self._title
            yield Static(Text(self._explained))
            yield Input(placeholder=self._example, select_on_focus=False)
            yield Static("", id="reason")

    def on_mount(self) -> None:
        self.query_one(Input).focus()

    @on(Input.Submitted)
    def _submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self.query_one("#reason", Static).update("")
        self._submit(self, event.value)

    def refuse(self, reason: str) -> None:
        self.query_one("#reason", Static).update(Text(reason))
