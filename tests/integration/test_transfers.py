"""Programs that launch no kernel are held to their share, too."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.integration.node import SimulatedNode, eventually

MIB = 1 << 20
RUN = [sys.executable, "-m", "vgpu.ctl", "run"]


def program(node: SimulatedNode, share: int, *arguments: str) -> subprocess.Popen[str]:
    argv = [*RUN, "--sm", str(share), "--mem", "4G", "--", sys.executable, "-m", "tests.integration.transfers"]
    return node.popen([*argv, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "size"),
    [("fill", 512 * MIB), ("copy", 256 * MIB), ("fill", 32 * MIB)],
)
def test_a_program_of_nothing_else_gets_its_part_beside_another(what: str, size: int) -> None:
    """30 % and 70 %, both without a pause: neither gets more, and together they fill the GPU, but for hand-overs and a
    machine that has two loaded cores for everything."""
    with SimulatedNode() as node:

        def as_promised() -> bool:
            """In four seconds in which this machine lets both of them ask for what they are to get."""
            both = [program(node, share, what, "4", str(size)) for share in (30, 70)]
            for each in both:
                assert each.stdout is not None
                assert each.stdout.readline() == "ready\n"
            for each in both:
                assert each.stdin is not None
                each.stdin.write("go\n")
                each.stdin.flush()
            small, large = (float(each.communicate(timeout=60)[0]) for each in both)
            return small < 0.36 and large < 0.76 and small + large > 0.5

        eventually(as_promised, "neither gets more, and together they fill the GPU")
