"""Text from a tenant, made harmless for a terminal, a log and a page: one line, and nothing that moves a cursor.

Pure. Text is cleaned where it enters (the messages of ``vgpu/protocol``), and again where it is displayed
(``vgpu/ctl/present/output.py``, ``vgpu/ctl/exit_codes.py``): a node of another version may not have cleaned it.
"""

from __future__ import annotations

import json
from typing import Final

COMMAND_LETTERS: Final = 64
"""As many as the activity page holds of a command. A longer one could fill lines of a terminal with other text."""
INSTEAD: Final = "?"


def printable(text: str, keep: str = "") -> str:
    """``text`` with a question mark for each control character, line break, bidirectional override or lone surrogate.
    ``keep``: those that stay."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() or letter in keep else INSTEAD for letter in text)


def command_name(text: str) -> str:
    """The name of a program, as its process states it: without runs of spaces, and of bounded length."""
    return " ".join(printable(text).split())[:COMMAND_LETTERS]


def printable_json(text: str) -> str:
    """The same JSON value with unprintable letters of its strings as escapes. Line breaks between tokens stay."""
    if text.isprintable():
        return text
    odd = (letter for letter in set(text) if not letter.isprintable() and letter != "\n")
    return text.translate({ord(letter): json.dumps(letter)[1:-1] for letter in odd})


def harmless(text: str) -> str:
    """``text`` of several lines, which are ours: a message on stderr."""
    return printable(text, "\n\t")
