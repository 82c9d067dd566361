"""The wrappers that are made from the table hand every argument on as it came, and the answer back."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from client_hook.symbol import Symbol
from client_hook.symbols import intercepted
from tests.hook.stage import Stage

MADE = [s for s in intercepted() if s.before or s.after or s.bare]

CALLER = """
import ctypes, json, os, sys
WIDTHS = {"unsigned char": ctypes.c_ubyte, "unsigned short": ctypes.c_ushort, "unsigned": ctypes.c_uint,
          "int": ctypes.c_int, "size_t": ctypes.c_size_t, "unsigned long long": ctypes.c_ulonglong}
hook = ctypes.CDLL(os.environ["LD_PRELOAD"])
driver = ctypes.CDLL("libcuda.so.1")
seen = (ctypes.c_ulonglong * 16).in_dll(driver, "seen")
called = ctypes.c_char_p.in_dll(driver, "called")
answers = {}
for name, kinds in json.load(sys.stdin).items():
    types = [WIDTHS.get(kind, ctypes.c_void_p) for kind in kinds]
    # two bytes' worth of each; no address that anybody could read from
    given = [(0xA1 + i) * (257 if ctypes.sizeof(t) > 1 else 1) for i, t in enumerate(types)]
    code = getattr(hook, name)(*(t(v) for t, v in zip(types, given)))
    answers[name] = [code, (called.value or b"").decode(), given, list(seen)[:len(given)]]
print(json.dumps(answers))
"""


def stub(symbol: Symbol) -> str:
    """A driver's function that writes down what it is called with, and answers 77."""
    notes = "".join(f" seen[{i}] = (unsigned long long){name};" for i, (_, name) in enumerate(symbol.parameters))
    return f'int {symbol.name}({symbol.arguments}) {{ called = "{symbol.name}";{notes} return 77; }}'


@pytest.fixture(scope="module")
def noting_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("noting")
    source = directory / "driver.c"
    head = "#include <stddef.h>\nunsigned long long seen[16]; const char *called;\n"
    source.write_text(head + "\n".join(stub(s) for s in MADE))
    command = ["gcc", "-w", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", directory / "libcuda.so.1", source]
    subprocess.run(command, check=True)
    return directory


def test_every_argument_arrives_at_the_function_that_was_called(stage: Stage, noting_driver: Path) -> None:
    """Without a vGPU: what the gate does is another test's."""
    environment = stage.environment(stage.vgpu(), LD_LIBRARY_PATH=str(noting_driver))
    del environment["VGPU_ID"]
    ran = subprocess.run(
        [sys.executable, "-c", CALLER],
        input=json.dumps({s.name: [kind for kind, _ in s.parameters] for s in MADE}),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    answers = json.loads(ran.stdout)
    assert set(answers) == {s.name for s in MADE}
    for name, (code, called, given, seen) in answers.items():
        assert (code, called, seen) == (77, name, given), name
