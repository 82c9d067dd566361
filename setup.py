"""Builds the native code: extension modules for Python, and libraries that contain no Python at all.

Two kinds of artefact come out of ``cython_ext/``:

* every ``cython_ext/*.pyx`` becomes an ordinary extension module;
* each folder named in ``LIBRARIES`` becomes one plain shared library (no ABI tag in its name) under
  ``cython_ext/lib/``. Its ``.pyx`` files hold nothing but ``noexcept nogil`` functions, so the linker can drop
  the module initialisers, and with them every reference to libpython. ``-z defs`` proves it: a Python symbol
  left behind fails the link instead of killing the first ``/bin/sh`` it is preloaded into.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
NATIVE = Path("cython_ext")
DIRECTIVES = ["boundscheck=False", "wraparound=False", "cdivision=True", "initializedcheck=False"]
CFLAGS = [
    "-O2",
    "-g1",
    "-fvisibility=hidden",
    "-ffunction-sections",
    "-fdata-sections",
    "-Wall",
    "-Wno-unused-function",
]
LDFLAGS = ["-Wl,--gc-sections", "-Wl,-z,defs", "-Wl,-z,now", "-Wl,--no-undefined-version"]


@dataclass(frozen=True)
class Library:
    """A shared library without Python: where its sources are and what it is called."""

    target: str  # relative to cython_ext/lib
    folder: str  # relative to cython_ext; all *.pyx below it are linked together
    libs: list[str] = field(default_factory=list)

    @property
    def sources(self) -> list[Path]:
        return sorted((NATIVE / self.folder).glob("*.pyx"))


LIBRARIES = [
    # by file name: before glibc 2.34 dlopen and pthread_create lived there, and a newer linker would not name them
    Library("libvgpu_hook.so", "hook", ["-l:libdl.so.2", "-l:libpthread.so.0"]),
    Library("sim/libcuda.so.1", "sim/cuda", ["-lpthread", "-lm"]),
    Library("sim/libnvidia-ml.so.1", "sim/nvml", ["-lpthread", "-lm"]),
]


class BuildNative(build_ext):
    """build_ext that also links the libraries, and lets generators run first."""

    def run(self) -> None:
        for generator in sorted(NATIVE.glob("generate_*.py")):
            subprocess.run([sys.executable, str(generator)], check=True, cwd=ROOT)
        super().run()
        lib_root = Path("." if self.inplace else self.build_lib) / NATIVE / "lib"
        for library in LIBRARIES:
            if library.sources:
                self.link_library(library, lib_root / library.target)

    def link_library(self, library: Library, target: Path) -> None:
        objects = []
        for source in library.sources:
            c_file = Path(self.build_temp) / source.with_suffix(".c")
            self.compile_pyx(source, c_file)
            objects += self.compiler.compile(
                [str(c_file)],
                output_dir=self.build_temp,
                include_dirs=[*self.compiler.include_dirs, str(NATIVE)],
                extra_postargs=CFLAGS,
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        script = NATIVE / library.folder / "exports.map"
        self.spawn(
            [
                *self.compiler.linker_so[:1],
                "-shared",
                "-o",
                str(target),
                f"-Wl,-soname,{target.name}",
                *LDFLAGS,
                f"-Wl,--version-script={script}",
                *objects,
                "-Wl,--no-as-needed",
                *library.libs,
                "-Wl,--as-needed",
            ]
        )

    def compile_pyx(self, source: Path, c_file: Path) -> None:
        newest = max(p.stat().st_mtime for p in NATIVE.rglob("*.p[yx][xdi]"))
        if c_file.exists() and c_file.stat().st_mtime > newest and not self.force:
            return
        c_file.parent.mkdir(parents=True, exist_ok=True)
        directives = [arg for d in DIRECTIVES for arg in ("-X", d)]
        self.spawn([sys.executable, "-m", "cython", "-3", *directives, "-o", str(c_file), str(source)])

    def get_outputs(self) -> list[str]:
        lib_root = Path(self.build_lib) / NATIVE / "lib"
        return super().get_outputs() + [str(lib_root / lib.target) for lib in LIBRARIES if lib.sources]


def extensions() -> list[Extension]:
    headers = [str(p) for pattern in ("*.pxd", "*.h", "logic/*.pxd", "sim/*.pxd") for p in NATIVE.glob(pattern)]
    return [
        Extension(
            f"cython_ext.{source.stem}",
            [str(source)],
            include_dirs=[str(NATIVE)],
            extra_compile_args=["-O2", "-g1", "-Wno-unused-function"],
            extra_link_args=["-lpthread"],
            depends=headers,
        )
        for source in sorted(NATIVE.glob("*.pyx"))
    ]


def cythonized() -> list[Extension]:
    sources = extensions()
    if not sources:
        return []
    from Cython.Build import cythonize

    directives = {d.split("=")[0]: d.endswith("True") for d in DIRECTIVES} | {"language_level": 3}
    # cythonize follows cimports only where it finds them on its path; a stale gate is worse than a slow build.
    stamp = Path("build/cython/.stamp")
    newest = max(p.stat().st_mtime for p in NATIVE.rglob("*.p[yx][xd]"))
    stale = not stamp.exists() or stamp.stat().st_mtime < newest
    modules = list(cythonize(sources, compiler_directives=directives, build_dir="build/cython", force=stale))
    stamp.parent.mkdir(parents=True, exist_ok=True)
    stamp.touch()
    return modules


setup(ext_modules=cythonized(), cmdclass={"build_ext": BuildNative})
