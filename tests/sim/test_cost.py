"""The cost expressions in PTX comments, against Python's own arithmetic."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cython_ext.simengine import annotation, evaluate
from vgpu.workload.kernels import PTX

ATOMS = st.one_of(
    st.integers(0, 10**6).map(str),
    st.sampled_from(["blocks", "threads", "sms", "p0", "p1", "p2"]),
)


def combined(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    pair = st.tuples(inner, inner)
    return st.one_of(
        st.tuples(inner, st.sampled_from("+-*"), inner).map("".join).map("({})".format),
        pair.map(lambda p: f"min({p[0]},{p[1]})"),
        pair.map(lambda p: f"max({p[0]},{p[1]})"),
        inner.map("ceil({})".format),
        inner.map("{}/7".format),
    )


@given(
    st.recursive(ATOMS, combined, max_leaves=12),
    st.integers(1, 10**5),
    st.integers(1, 1024),
    st.lists(st.integers(0, 2**40), min_size=3, max_size=3),
)
def test_an_expression_is_worth_what_python_says(text: str, blocks: int, threads: int, values: list[int]) -> None:
    names = {"blocks": float(blocks), "threads": float(threads), "sms": 132.0, "min": min, "max": max}
    names |= {f"p{i}": float(v) for i, v in enumerate(values)} | {"ceil": lambda x: float(math.ceil(x))}
    expected = eval(re.sub(r"\b(\d+)\b", r"\1.0", text), {}, names)
    found = evaluate(text, blocks=blocks, threads=threads, parameters=values)
    assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("text", ["", "1+", "(1", "1)", "p3", "p", "two", "min(1)", "max(1,2", "1+2x", "1..2+"])
def test_what_is_no_expression_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a cost expression"):
        evaluate(text, parameters=(1, 2, 3))


def test_annotations_belong_to_their_kernel_and_key() -> None:
    ptx = "// sim: one ns=5 sms=2\n// sim: one_more ns=7\n"
    assert annotation(ptx, "one", "ns") == "5"
    assert annotation(ptx, "one", "sms") == "2"
    assert annotation(ptx, "one_more", "ns") == "7"
    assert annotation(ptx, "one_more", "sms") is None
    assert annotation(ptx, "on", "ns") is None


def test_every_kernel_of_the_workload_says_what_it_costs() -> None:
    for kernel in re.findall(r"\.entry (\w+)", PTX):
        assert annotation(PTX, kernel, "ns") is not None
        assert annotation(PTX, kernel, "sms") is not None
