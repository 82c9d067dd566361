"""Colours, readable (WCAG AA) on the backgrounds that are painted beneath them, whatever the terminal's own is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from rich.style import Style

if TYPE_CHECKING:
    from textual.theme import Theme


@dataclass(frozen=True, slots=True)
class Palette:
    """One colour per meaning, as #rrggbb. ``raised``: beneath titles and prompts; ``selected``: beneath that row."""

    name: str
    background: str
    raised: str
    selected: str
    text: str
    dim: str
    good: str
    warn: str
    bad: str
    accent: str
    violet: str
    track: str


DARK: Final = Palette(
    "vgpu-dark",
    background="#10141a",
    raised="#1b222c",
    selected="#1f3a57",
    text="#e8ebef",
    dim="#a3aebb",
    good="#66d98b",
    warn="#f0c24b",
    bad="#ff8f8f",
    accent="#79c0ff",
    violet="#c9a5ff",
    track="#6b7887",
)
LIGHT: Final = Palette(
    "vgpu-light",
    background="#ffffff",
    raised="#eef1f5",
    selected="#d5e7fb",
    text="#1a1f26",
    dim="#505a66",
    good="#0f6630",
    warn="#774b00",
    bad="#a8101f",
    accent="#0a55a3",
    violet="#6a34b8",
    track="#74808d",
)
STYLES: Final = (
    *("", "title", "head", "sorted", "id", "dim", "good", "warn", "bad", "badge", "alarm", "pointer"),
    *("held", "beyond", "busy", "memory", "mark", "track", "spark"),
)


def styles(palette: Palette | None) -> Mapping[str, Style]:
    """A rich style for each of ``STYLES``; without a palette such that need no colours."""
    if palette is None:
        plain = {name: Style() for name in STYLES}
        bold, reverse = Style(bold=True), Style(reverse=True)
        return plain | {"title": bold, "sorted": bold, "bad": bold, "badge": reverse, "alarm": reverse, "pointer": bold}
    p = palette
    return {
        "": Style(color=p.text),
        "title": Style(color=p.text, bold=True),
        "head": Style(color=p.dim),
        "sorted": Style(color=p.accent, bold=True),
        "id": Style(color=p.text),
        "dim": Style(color=p.dim),
        "good": Style(color=p.good),
        "warn": Style(color=p.warn),
        "bad": Style(color=p.bad, bold=True),
        "badge": Style(color=p.background, bgcolor=p.warn, bold=True),
        "alarm": Style(color=p.background, bgcolor=p.bad, bold=True),
        "pointer": Style(color=p.accent, bold=True),
        "held": Style(color=p.good),
        "beyond": Style(color=p.accent),
        "busy": Style(color=p.accent),
        "memory": Style(color=p.violet),
        "mark": Style(color=p.text),
        "track": Style(color=p.track),
        "spark": Style(color=p.accent),
    }


def selected_style(palette: Palette | None) -> Style:
    """Beneath the selected row."""
    return Style(reverse=True) if palette is None else Style(bgcolor=palette.selected)


def theme(palette: Palette) -> Theme:
    """The same for the library's own widgets: prompts, dialogs, the line of keys."""
    from textual.theme import Theme

    return Theme(
        name=palette.name,
        primary=palette.accent,
        secondary=palette.accent,
        accent=palette.accent,
        warning=palette.warn,
        error=palette.bad,
        success=palette.good,
        foreground=palette.text,
        background=palette.background,
        surface=palette.raised,
        panel=palette.raised,
        dark=palette is DARK,
        variables={
            "footer-background": palette.raised,
            "footer-foreground": palette.dim,
            "footer-key-foreground": palette.accent,
            "footer-description-foreground": palette.dim,
            "footer-item-background": palette.raised,
            "block-cursor-background": palette.accent,
            "block-cursor-foreground": palette.background,
            "input-cursor-background": palette.text,
            "input-cursor-foreground": palette.background,
            "scrollbar": palette.track,
            "scrollbar-background": palette.background,
            "border": palette.accent,
        },
    )


def is_light(colorfgbg: str) -> bool:
    """Whether ``COLORFGBG`` ("15;0"), which some terminals set, says that the background is light."""
    background = colorfgbg.rsplit(";", 1)[-1]
    return background.isdecimal() and int(background) in (7, *range(9, 16))
