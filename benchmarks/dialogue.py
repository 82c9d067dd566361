"""A program of a benchmark that takes a line of input, and answers with a line of JSON."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any, Self


class Dialogue:
    """Context manager; the program is killed at its end. ``RuntimeError``: the program has ended by itself."""

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str], name: str = "program") -> None:
        self.name = name
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(argv, env=dict(environment), stdin=pipe, stdout=pipe, text=True, bufsize=1)

    def send(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")

    def answer(self) -> dict[str, Any]:
        """The next line of its output."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended: exit code {self.process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
