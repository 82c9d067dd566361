"""Rules that prepend and append paths: the pure function, and the hook in real processes against it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from client_hook.environment import hook_library
from client_hook.path_rules import LISTS, applied, joined

HOOK = str(hook_library())
ENTRIES = st.lists(st.sampled_from(["", "/a", "/b", "/b/c", "/usr/bin", "d"]), max_size=5).map(":".join)
PRELOADS = st.lists(st.sampled_from(["", "/none/a.so", "/none/b.so", HOOK]), max_size=4).flatmap(
    lambda parts: st.sampled_from([":", " ", "\t"]).map(lambda by: by.join(parts))
)


@pytest.mark.parametrize(
    ("before", "now", "after", "made"),
    [
        ("/new", "/usr/bin:/bin", "", "/new:/usr/bin:/bin"),
        ("", "/usr/bin", "/new:/newer", "/usr/bin:/new:/newer"),
        ("/b", "/a:/b", "/a", "/b:/a"),
        ("/b", "", "/a", "/b:/a"),
        ("/b", "/a::/c", "", "/b:/a::/c"),  # an empty entry is the current directory
    ],
)
def test_a_rule_joins_a_list(before: str, now: str, after: str, made: str) -> None:
    assert joined(before, now, after) == made


def test_the_hook_stays_last() -> None:
    assert joined("/a.so", f"/b.so {HOOK}", "/c.so", preload=True) == f"/a.so:/b.so:/c.so:{HOOK}"
    assert joined("", HOOK, f"/c.so:{HOOK}", preload=True) == f"/c.so:{HOOK}"


@given(ENTRIES, ENTRIES, ENTRIES)
def test_a_rule_that_is_applied_again_changes_nothing(before: str, now: str, after: str) -> None:
    once = joined(before, now, after)
    assert joined(before, once, after) == once


def seen(environment: dict[str, str]) -> dict[str, str]:
    """The lists that a program finds which loads the hook."""
    code = f"import json, os; print(json.dumps({{n: os.environ[n] for n in {LISTS} if n in os.environ}}))"
    # Not through a shell: it would set PATH itself.
    argv = [sys.executable, "-I", "-S", "-c", code]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_the_hook_does_as_the_function_does(data: st.DataObject) -> None:
    environment = {"LD_PRELOAD": HOOK}
    for name in LISTS:
        values = PRELOADS if name == "LD_PRELOAD" else ENTRIES
        for rule in (f"VGPU_PREPEND_{name}", f"VGPU_APPEND_{name}"):
            if data.draw(st.booleans(), rule):
                environment[rule] = data.draw(values, rule)
        if name != "LD_PRELOAD" and data.draw(st.booleans(), name):
            environment[name] = data.draw(values, name)
    wanted = {name: value for name, value in applied(environment).items() if name in LISTS}
    assert seen(environment) == wanted


def test_a_program_without_a_rule_finds_its_lists_as_they_are() -> None:
    environment = {"LD_PRELOAD": f" {HOOK}", "PATH": "/a::/a"}
    assert seen(environment) == environment


def test_programs_of_a_program_get_no_entry_twice() -> None:
    environment = {"LD_PRELOAD": HOOK, "PATH": os.environ["PATH"], "VGPU_APPEND_PATH": "/x", "VGPU_PREPEND_PATH": "/y"}
    argv = ["sh", "-c", "sh -c 'echo $PATH'"]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"/y:{environment['PATH']}:/x\n"
