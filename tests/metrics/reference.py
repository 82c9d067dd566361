"""The table of metrics in ``docs/reference/metrics.md``. ``python -m tests.metrics.reference`` writes it anew."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from vgpu.metrics.definitions import METRICS
from vgpu.metrics.kinds import LABELS, Of

DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"
BEGIN, END = "<!-- made by tests/metrics/reference.py -->\n", "<!-- end of what is made -->\n"
TITLES = {
    Of.NODE: "Of the node",
    Of.GPU: "Of a GPU",
    Of.VGPU: "Of a vGPU",
    Of.PROCESS: "Of a process in a vGPU",
    Of.USER: "Of a user",
    Of.EXPORTER: "Of the exporter",
}


def table() -> str:
    return "".join(lines())


def lines() -> Iterator[str]:
    for of, title in TITLES.items():
        shared = ", ".join(f"`{name}`" for name in LABELS[of])
        yield f"\n### {title}\n\n"
        if shared:
            yield f"Labels: {shared}.\n\n"
        yield "| metric | type | says |\n| --- | --- | --- |\n"
        for metric in METRICS:
            if metric.of is of:
                own = f" Labels besides: {', '.join(f'`{name}`' for name in metric.labels)}." if metric.labels else ""
                yield f"| `{metric.name}` | {metric.kind} | {metric.help}{own} |\n"
    yield "\n"


def with_table(text: str) -> str:
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + table() + END + after


if __name__ == "__main__":
    DOCUMENT.write_text(with_table(DOCUMENT.read_text()))
