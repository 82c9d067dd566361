"""A process that is checkpointed goes on where it is restored, which may be on another GPU."""

from __future__ import annotations

import signal
import subprocess
from typing import Any

import pytest

from tests.sim.conftest import Node

SUCCESS, INVALID_VALUE, ILLEGAL_STATE = 0, 1, 401
LOCKED = 1
MIB = 1 << 20


def plain(uuid: str) -> str:
    return uuid.removeprefix("GPU-").replace("-", "")


class Wanderer:
    """A program with memory, a stream and events; ``where`` lets it work, and ``told`` is what it found."""

    def __init__(self, node: Node, **more: str) -> None:
        self.node = node
        self.popen: subprocess.Popen[str] = node.start("wanderer", **more)
        assert self.heard() == "ready"

    def heard(self) -> str:
        assert self.popen.stdout is not None
        return self.popen.stdout.readline().strip()

    def works(self) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write("\n")
        self.popen.stdin.flush()
        assert self.heard() == "told"

    def restored(self, *maps: str) -> dict[str, Any]:
        answer: dict[str, Any] = self.node.run("remap", str(self.popen.pid), *maps)
        return answer

    def told(self) -> list[list[Any]]:
        told: list[list[Any]] = self.node.answer(self.popen, "")["told"]
        return told

    def held(self) -> list[int]:
        """Bytes of it on each GPU."""
        found = []
        for index in range(len(self.node.uuids)):
            contexts = self.node.engine(index).contexts().values()
            found.append(sum(taken for pid, _, taken, *_ in contexts if pid == self.popen.pid))
        return found


@pytest.mark.parametrize("visible", [None, "0"])
def test_a_process_goes_on_where_it_is_restored(node: Node, visible: str | None) -> None:
    """And back, and where it was: with the memory, the streams and the events that it had, under the same ordinal."""
    first, second = node.uuids
    swap, same = f"{first}={second},{second}={first}", f"{first}={first},{second}={second}"
    program = Wanderer(node, **({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}))
    program.works()
    before = program.held()
    for given in (swap, swap, "", same, swap):
        assert program.restored(given) == {"codes": [SUCCESS], "state": LOCKED}
        program.works()
    assert program.held() == before[::-1]
    assert before[0] > 64 * MIB
    assert before[1] == 0
    told = program.told()
    used = told[0][4]
    places = [plain(uuid) for uuid in (first, second, first, first, first, second)]
    assert told == [[place, True, 0, True, used] for place in places]


def test_two_moves_before_it_has_noticed_one(node: Node) -> None:
    first, second = node.uuids
    swap = f"{first}={second},{second}={first}"
    program = Wanderer(node)
    program.works()
    program.popen.send_signal(signal.SIGSTOP)
    for _ in range(3):
        assert program.restored(swap)["codes"] == [SUCCESS]
    program.popen.send_signal(signal.SIGCONT)
    program.works()
    assert [len(node.engine(index).contexts()) for index in range(2)] == [0, 1], "nothing is left of where it was"
    assert [told[:2] for told in program.told()] == [[plain(first), True], [plain(second), True]]


def test_a_map_names_every_gpu_once_on_either_side(node: Node) -> None:
    """As answered by a real driver: https://github.com/NVIDIA/cuda-checkpoint/issues/35."""
    first, second = node.uuids
    stranger = "GPU-" + "00" * 16
    program = Wanderer(node)
    wrong = [
        f"{first}={second}",
        f"{first}={second},{second}={second}",
        f"{first}={second},{first}={first}",
        f"{first}={stranger},{second}={first}",
        f"{first}={second},{second}={first},{stranger}={stranger}",
    ]
    answer = program.restored(*wrong, f"{first}={second},{second}={first}", "")
    assert answer["codes"] == [INVALID_VALUE] * len(wrong) + [SUCCESS, ILLEGAL_STATE]
    program.works()
    assert program.told()[0][:2] == [plain(second), True]


def test_what_does_not_fit_there_stays_checkpointed(node: Node) -> None:
    first, second = node.uuids
    program = Wanderer(node)
    full = node.start("until_refused", str(256 * MIB), CUDA_VISIBLE_DEVICES="1")
    node.answer(full)
    held = Wanderer(node, CUDA_VISIBLE_DEVICES="1")
    engine = node.engine(1)
    [context] = engine.contexts()
    assert engine.take_memory(context, engine.memory_bytes - engine.memory_used_bytes)
    answer = program.restored(f"{first}={second},{second}={first}", "")
    assert answer["codes"] == [2, SUCCESS]
    program.works()
    assert program.told()[0][:2] == [plain(first), True]
    held.told()
