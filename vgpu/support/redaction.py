"""Removes what must not leave this machine: names of people, their homes and their commands. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final

COMMAND_LETTERS: Final = 15
"""As many as the kernel has for the name of a program."""
_FIRST_PERSON: Final = 1000
_NOBODY: Final = 65534
_TOLD: Final = re.compile(r"(VGPU|CUDA)_\w+|LD_PRELOAD")
_SECRET: Final = re.compile(r"token|secret|passw|key|credential", re.IGNORECASE)
_ASSIGNMENT: Final = re.compile(r"^(\s*([\w.\"-]+)\s*=\s*)(\S.*)$", re.MULTILINE)
_ANY_HOME: Final = re.compile(r"(/home|/export/home|/Users)/((?:[^/\s\"':,;\\]|\\\\|\\(?![\"\\]))+)")
"""A backslash before a quotation mark belongs to JSON, and stays: without it the line would not be readable."""
_ATTACHED: Final = re.compile(r"\b(process \d+) \((.*?)\)(?= attached)")
_ODD: Final = re.compile(r"[^\w.+-]")
_SMI_PROCESS: Final = re.compile(r"^(\s+Name\s+: )(.+)$", re.MULTILINE)
_WORDS: Final = frozenset(
    ("root", "vgpu", "gpu", "node", "server", "broker", "hook", "info", "user", "host", "name", "mode", "state", "test")
)
"""Names that are words of this software or of many texts. A file would not be readable if they were replaced."""


@dataclass(frozen=True, slots=True)
class Person:
    """An account of this machine."""

    name: str
    uid: int
    home: str


class Redactor:
    """Replaces the names and homes of ``people``, and the names of the machine, wherever they stand."""

    def __init__(self, people: Iterable[Person], hosts: Iterable[str] = ()) -> None:
        homes, names = {}, {}
        for person in people:
            alias = f"user{person.uid}"
            if person.home.count("/") > 1 or (person.uid == 0 and person.home == "/root"):
                homes[person.home.rstrip("/")] = f"~{alias}"
            if person.name not in _WORDS:
                names[person.name] = alias
        for host in hosts:
            for part in (host, host.partition(".")[0]):
                if len(part) > 1 and part not in _WORDS | {"localhost"}:
                    names[part] = "host"
        self._homes, self._names = homes, names
        self._home = _any_of(homes, r"(?<![\w.-])", r"(?![\w.-])")
        self._name = _any_of(names, r"(?<!\w)", r"(?!\w)")

    def __call__(self, text: str) -> str:
        if self._home:
            text = self._home.sub(lambda found: self._homes[found[0]], text)
        text = _ANY_HOME.sub(lambda found: f"{found[1]}/{self._names.get(found[2], 'user')}", text)
        return self._name.sub(lambda found: self._names[found[0]], text) if self._name else text


def _any_of(words: Mapping[str, str], before: str, after: str) -> re.Pattern[str] | None:
    if not words:
        return None
    longest_first = sorted(words, key=len, reverse=True)
    return re.compile(before + "(?:" + "|".join(map(re.escape, longest_first)) + ")" + after)


def are_people(accounts: Iterable[Person], uids: Iterable[int]) -> list[Person]:
    """The accounts of people: those of ``uids``, which use the node, and all others that are no service's."""
    seen = set(uids)
    return [one for one in accounts if one.uid in seen or _FIRST_PERSON <= one.uid < _NOBODY]


def short_command(command: str) -> str:
    """The name of a program: no path, no arguments."""
    first = command.split()[0] if command.split() else ""
    return _ODD.sub("", PurePosixPath(first).name)[:COMMAND_LETTERS]


def without_commands(text: str) -> str:
    """A text of events or logs, with the names of programs instead of what they were started with."""
    return _ATTACHED.sub(lambda found: f"{found[1]} ({short_command(found[2])})", text)


def without_process_names(text: str) -> str:
    """The output of ``nvidia-smi -q``, likewise."""
    return _SMI_PROCESS.sub(lambda found: found[1] + short_command(found[2]), text)


def told_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of an environment that concern vGPUs, without secrets."""
    shown = {name: value for name, value in sorted(environment.items()) if _TOLD.fullmatch(name)}
    return {name: "(hidden)" if _SECRET.search(name) else value for name, value in shown.items()}


def without_secrets(configuration: str) -> str:
    """The text of a configuration file."""
    return _ASSIGNMENT.sub(
        lambda found: found[1] + '"(hidden)"' if _SECRET.search(found[2]) else found[0], configuration
    )
