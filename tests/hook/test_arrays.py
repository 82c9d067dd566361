"""CUDA arrays, from the application's side: charged for what the driver says they need, and given back."""

from __future__ import annotations

import pytest

from tests.hook.stage import GIB, Stage
from tests.hook.talk import Talk

KIB, MIB = 1 << 10, 1 << 20
OUT_OF_MEMORY = 2

ARRAYS = """
MIB = 1 << 20

class Flat(ctypes.Structure):
    _fields_ = [("width", c_size_t), ("height", c_size_t), ("format", ctypes.c_int), ("channels", c_uint)]

class Shape(ctypes.Structure):
    _fields_ = [("width", c_size_t), ("height", c_size_t), ("depth", c_size_t), ("format", ctypes.c_int),
                ("channels", c_uint), ("flags", c_uint)]

FLOAT, DEFERRED = 0x20, 0x80

def create(width, height=0, depth=0, flags=0, levels=0):
    "(CUresult, handle)"
    array, shape = c_void_p(), Shape(width, height, depth, FLOAT, 1, flags)
    if levels:
        return app.result("cuMipmappedArrayCreate", byref(array), byref(shape), c_uint(levels)), array
    return app.result("cuArray3DCreate_v2", byref(array), byref(shape)), array

def flat(width, height):
    array = c_void_p()
    return app.result("cuArrayCreate_v2", byref(array), byref(Flat(width, height, FLOAT, 1))), array
"""


def talk(stage: Stage, body: str, limit: int = 8 * GIB) -> Talk:
    return Talk(stage, stage.vgpu(memory_bytes=limit), ARRAYS + body)


@pytest.mark.parametrize(
    ("make", "destroy", "size"),
    [
        ("flat(1000, 1000)", "cuArrayDestroy", 3968 * KIB),
        ("create(1000)", "cuArrayDestroy", 64 * KIB),
        ("create(100, 100, 100)", "cuArrayDestroy", 3968 * KIB),
        ("create(1024, 1024, levels=2)", "cuMipmappedArrayDestroy", 5 * MIB),
        ("create(1000, 1000, flags=DEFERRED)", "cuArrayDestroy", 0),
        ("create(1000, 1000, flags=DEFERRED, levels=3)", "cuMipmappedArrayDestroy", 0),
    ],
)
def test_an_array_costs_what_it_needs_until_it_is_destroyed(stage: Stage, make: str, destroy: str, size: int) -> None:
    said = talk(stage, f'code, array = {make}\nsay(code)\napp.call("{destroy}", array)\nsay()')
    (code,), slot = said.next()
    assert code == 0
    assert slot.committed_bytes[4] == slot.charged_bytes == size
    assert said.next()[1].charged_bytes == 0


@pytest.mark.parametrize("make", ["flat(1024, 1025)", "create(1024, 1025)", "create(1024, 1024, levels=2)"])
def test_one_that_does_not_fit_is_refused(stage: Stage, make: str) -> None:
    said = talk(stage, f"say({make}[0])\nsay(flat(1024, 1024)[0], flat(1, 1)[0])", 4 * MIB)
    (code,), slot = said.next()
    assert (code, slot.charged_bytes, slot.refusals, slot.reserved_bytes) == (OUT_OF_MEMORY, 0, 1, 0)
    codes, slot = said.next()
    assert (codes, slot.charged_bytes) == ([0, OUT_OF_MEMORY], 4 * MIB)


def test_the_driver_refuses_and_nothing_stays_charged(stage: Stage) -> None:
    said = talk(
        stage,
        """
none = app.result("cuArray3DCreate_v2", byref(c_void_p()), None)
unknown = app.result("cuArrayDestroy", None)
say(none, unknown, create(0)[0], create(10, levels=0)[0], create(1 << 40, 1)[0])
""",
        limit=1 << 50,
    )
    codes, slot = said.next()
    assert codes[3] == 0
    assert 0 not in [*codes[:3], codes[4]]
    assert (slot.charged_bytes, slot.reserved_bytes) == (64 * KIB, 0)


def test_a_context_takes_its_arrays_along(stage: Stage) -> None:
    said = talk(
        stage,
        """
context = c_void_p()
app.call("cuCtxCreate_v2", byref(context), c_uint(0), app.device)
assert create(1024, 1024)[0] == create(1024, levels=1)[0] == 0
say()
app.call("cuCtxDestroy_v2", context)
say()
""",
    )
    assert [said.next()[1].charged_bytes for _ in range(2)] == [4 * MIB + 64 * KIB, 0]
