"""One target under Atheris: ``python -m tests.fuzz.one TARGET LIBFUZZER-OPTIONS…``."""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["vgpu", "gpuserver", "msgpack"]):
    from tests.fuzz.targets import TARGETS


def main() -> None:
    name = sys.argv.pop(1)
    atheris.Setup(sys.argv, TARGETS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
