"""Which odd calls are made of each intercepted function, derived from the hook's own list; and what came of them.

    python -m tests.hook.odd.cases LIBCUDA LIBNVIDIA_ML       # one line a call, for a driver of this machine

Wrappers that only count (``bare``) hand everything on, and twins are the same code: they are left out.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from client_hook.symbol import Symbol
from client_hook.symbols import intercepted

SOURCE = Path(__file__).with_name("calls.c")
FRESH = re.compile(
    "cuMemcpy$|Destroy|Free|Release|Reset|Detach|Unload|Pop|Push|SetCurrent|Wait|Write|BatchMemOp|Capture|cuInit|CtxCreate|Trim"
)
"""After these nothing is as it was."""

HANDLES = {"stream": "s", "context": "c", "event": "e", "device": "d"}
ADDRESSES = {"target", "source", "address", "pointer"}


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    kinds: str
    """One letter for each argument, as in calls.c."""


def kind_of(type_: str, name: str, nvml: bool) -> str:
    """Of an argument that is right, as far as a right one is easily had."""
    if type_.endswith("*"):
        known = HANDLES.get(name) if type_ == "void*" else None
        return "o" if known is None or (known == "d") != nvml else known
    if name in ADDRESSES and type_ != "unsigned":
        return "m"
    if type_ == "size_t" or name in {"size", "width", "height"}:
        return "n"
    return "1" if name in {"count", "element"} else "0"


def cases_of(symbol: Symbol) -> Iterator[Case]:
    right = "".join(kind_of(type_, name, symbol.library == "nvml") for type_, name in symbol.parameters)
    odd = [right]
    odd += [right[:i] + "0" + right[i + 1 :] for i, kind in enumerate(right) if kind != "0"]
    odd += [right[:i] + "x" + right[i + 1 :] for i, kind in enumerate(right) if kind in "n1"]
    odd += [right[:i] + "o" + right[i + 1 :] for i, kind in enumerate(right) if kind in "scem"]
    odd.append("0" * len(right))
    for kinds in dict.fromkeys(odd):
        yield Case(symbol.name, kinds)


def all_cases() -> list[Case]:
    listed = [symbol for symbol in intercepted() if not symbol.bare and not symbol.per_thread]
    return [case for symbol in listed for case in cases_of(symbol)]


class Program:
    """``calls.c``, compiled into ``folder``."""

    def __init__(self, folder: Path, cases: list[Case]) -> None:
        self.cases = cases
        self.path = folder / "calls"
        rows = [f'{{"{c.name}", "{c.kinds}", {int(bool(FRESH.search(c.name)))}}},' for c in cases]
        (folder / "cases.h").write_text("\n".join(rows))
        subprocess.run(["gcc", "-O1", "-w", f"-I{folder}", "-o", str(self.path), str(SOURCE), "-ldl"], check=True)

    def results(
        self,
        environment: Mapping[str, str] | None,
        cuda: str,
        nvml: str,
        after_each: Callable[[], object] = lambda: None,
    ) -> dict[int, str]:
        """What came of each case, by its number. A process that ends without a word has died in its case.
        ``after_each`` process."""
        found: dict[int, str] = {}
        first = 0
        while first < len(self.cases):
            command = [str(self.path), cuda, nvml, str(first)]
            ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
            assert ran.returncode != 2, f"no driver, no GPU: {ran.stderr}"
            after_each()
            for line in ran.stdout.splitlines():
                number, _, result = line.partition(" ")
                found[int(number)] = result
            last = max((n for n in found if n >= first), default=first)
            found.setdefault(last, f"exit {ran.returncode}")
            first = last + 1
        return found


def asks_for_more(case: Case) -> bool:
    """For as much memory as can be: the limit refuses it before the driver looks at the rest."""
    return "Alloc" in case.name and "x" in case.kinds


OUT_OF_MEMORY = "2 "


def differences(cases: list[Case], found: Mapping[int, str], expected: Mapping[int, str]) -> list[str]:
    """Where a driver behind the hook did not do what it does without."""
    return [
        f"{case.name} {case.kinds}: {found[number]}, without: {expected[number]}"
        for number, case in enumerate(cases)
        if found[number] != expected[number] and not (asks_for_more(case) and found[number].startswith(OUT_OF_MEMORY))
    ]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        program = Program(Path(folder), all_cases())
        for number, result in program.results(None, sys.argv[1], sys.argv[2]).items():
            print(program.cases[number].name, program.cases[number].kinds, result)


if __name__ == "__main__":
    main()
