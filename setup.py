"""Builds the native code: extension modules for Python, and libraries that contain no Python at all.

Two kinds of artefact come out of ``cython_ext/``:

* every ``*.pyx`` in ``cython_ext`` and the folders of ``MODULES`` becomes an extension module for Python's Limited API,
  so that one wheel serves every version from ``LEAST_PYTHON`` on. Those of ``cython_ext/testing`` do, too, in a
  checkout; no wheel contains them;
* each folder named in ``LIBRARIES`` becomes one plain shared library (no ABI tag in its name) under
  ``cython_ext/lib/``. Its ``.pyx`` files hold nothing but ``noexcept nogil`` functions, so the linker can drop
  the module initialisers, and with them every reference to libpython. ``-z defs`` proves it: a Python symbol
  left behind fails the link instead of killing the first ``/bin/sh`` it is preloaded into.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
NATIVE = Path("cython_ext")
CYTHONIZED = Path("build/cython")
MODULES = [NATIVE, NATIVE / "pages", NATIVE / "dispatch", NATIVE / "relay"]
TESTING = NATIVE / "testing"  # its modules serve tests and benchmarks only
DIRECTIVES = ["boundscheck=False", "wraparound=False", "cdivision=True", "initializedcheck=False"]
LEAST_PYTHON = (3, 11)  # of the Limited API: the first whose has the buffer protocol
# Cython writes its loops with a signed bound over unsigned counters, and keeps inline functions nobody calls.
COMMON_CFLAGS = ["-O2", "-g1", "-Wno-sign-compare", "-Wno-unused-function", "-include", str(NATIVE / "old_glibc.h")]
CFLAGS = [*COMMON_CFLAGS, "-fvisibility=hidden", "-ffunction-sections", "-fdata-sections", "-Wall"]
# By file name: before glibc 2.34 dlopen and pthread_create lived there, and a newer linker would not name them.
OLD_LIBRARIES = ["-l:libdl.so.2", "-l:libpthread.so.0"]
# Bsymbolic: what a library calls of itself stays inside, as in the real driver. A preloaded hook sees a call once.
LDFLAGS = ["-Wl,--gc-sections", "-Wl,-Bsymbolic", "-Wl,-z,defs", "-Wl,-z,now", "-Wl,--no-undefined-version"]


@dataclass(frozen=True)
class Library:
    """A shared library without Python: where its sources are and what it is called."""

    target: str  # relative to cython_ext/lib
    folder: str  # relative to cython_ext; all *.pyx below it are linked together
    libs: list[str] = field(default_factory=list)
    cflags: list[str] = field(default_factory=list)

    @property
    def sources(self) -> list[Path]:
        return sorted((NATIVE / self.folder).rglob("*.pyx"))


LIBRARIES = [
    # preloaded, so its thread-local words have a fixed place: no call stands before them
    Library("libvgpu_hook.so", "hook", OLD_LIBRARIES, ["-ftls-model=initial-exec"]),
    Library("sim/libcuda.so.1", "sim/cuda", [*OLD_LIBRARIES, "-lm"]),
    Library("sim/libnvidia-ml.so.1", "sim/nvml", [*OLD_LIBRARIES, "-lm"]),
]


def newest(*patterns: str) -> float:
    """When the native code was last changed, as far as it is in files that match ``patterns``; seconds."""
    return max(file.stat().st_mtime for pattern in patterns for file in NATIVE.rglob(pattern))


class BuildNative(build_ext):
    """build_ext that also links the libraries, on all cores. What is newer than all native code stays as it is."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()
        if not self.inplace:
            testing = ".".join(TESTING.parts)
            self.extensions = [module for module in self.extensions if module.name.rpartition(".")[0] != testing]

    def run(self) -> None:
        if self.editable_mode:
            # It compiles into an empty folder. What lies in the source tree, newer than what it is made of, will do.
            for module in NATIVE.rglob("*.abi3.so"):
                self.mkpath(str(Path(self.build_lib) / module.parent))
                self.copy_file(str(module), str(Path(self.build_lib) / module))
        super().run()
        if self.inplace:
            # Python prefers a module built for it alone, so one of an earlier build would stand before the new one.
            for stale in NATIVE.rglob("*.cpython-*.so"):
                stale.unlink()
            # A module whose source moved or went would still be imported, and packed.
            for module in NATIVE.rglob("*.abi3.so"):
                if not module.with_name(module.name.partition(".")[0] + ".pyx").exists():
                    module.unlink()
        lib_root = Path("." if self.inplace else self.build_lib) / NATIVE / "lib"
        changed_s = max(newest("*.pyx", "*.pxd", "*.h", "*.map"), Path(__file__).stat().st_mtime)
        for library in LIBRARIES:
            target = lib_root / library.target
            if self.force or not target.exists() or target.stat().st_mtime < changed_s:
                self.link_library(library, target)
        if not self.inplace and not self.editable_mode and shutil.which("strip"):
            # A third of what is installed would be lines for debuggers. A checkout keeps them.
            files = [str(file) for file in (Path(self.build_lib) / NATIVE).rglob("*.so*")]
            self.spawn(["strip", "--strip-debug", *files])

    def link_library(self, library: Library, target: Path) -> None:
        with ThreadPoolExecutor(self.parallel) as pool:
            objects = list(pool.map(lambda source: self.compile_c(source, library.cflags), library.sources))
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

    def compile_c(self, source: Path, cflags: list[str]) -> str:
        """The object file of one source of a library."""
        include_dirs = [*self.compiler.include_dirs, str(NATIVE)]
        c_file = str(CYTHONIZED / source.with_suffix(".c"))
        options = [*CFLAGS, *cflags]
        (compiled,) = self.compiler.compile([c_file], self.build_temp, None, include_dirs, extra_postargs=options)
        return str(compiled)

    def get_outputs(self) -> list[str]:
        lib_root = Path(self.build_lib) / NATIVE / "lib"
        return super().get_outputs() + [str(lib_root / library.target) for library in LIBRARIES]


def extensions() -> list[Extension]:
    headers = [str(p) for pattern in ("*.pxd", "*.h") for p in NATIVE.rglob(pattern)]
    return [
        Extension(
            ".".join(source.with_suffix("").parts),
            [str(source)],
            include_dirs=[str(NATIVE)],
            extra_compile_args=COMMON_CFLAGS,
            extra_link_args=["-Wl,--no-as-needed", *OLD_LIBRARIES, "-Wl,--as-needed"],
            define_macros=[("Py_LIMITED_API", "0x{:02X}{:02X}0000".format(*LEAST_PYTHON))],
            py_limited_api=True,
            depends=headers,
        )
        for source in sorted(source for folder in [*MODULES, TESTING] for source in folder.glob("*.pyx"))
    ]


def in_copies(work: Callable[[Extension], object], parts: list[Extension]) -> None:
    """``work`` on each of ``parts``, the last first, each in a copy of this process; one for each core at a time."""
    fork = multiprocessing.get_context("fork")
    waiting = [fork.Process(target=work, args=(part,), name=part.sources[0]) for part in parts]
    running: list[BaseProcess] = []
    while waiting or running:
        while waiting and len(running) < (os.cpu_count() or 1):
            running.append(waiting.pop())
            running[-1].start()
        connection.wait([process.sentinel for process in running])
        for process in [process for process in running if process.exitcode is not None]:
            running.remove(process)
            if process.exitcode:
                sys.exit(f"Cython failed on {process.name}")


def cythonized() -> list[Extension]:
    """The extension modules as C. The sources of the libraries become C, too, for ``compile_c``."""
    from Cython.Build import cythonize

    def to_c(*parts: Extension) -> list[Extension]:
        directives = {d.split("=")[0]: d.endswith("True") for d in DIRECTIVES} | {"language_level": 3}
        where = str(CYTHONIZED)
        return list(cythonize([*parts], compiler_directives=directives, build_dir=where, force=stale, quiet=True))

    modules = extensions()
    # Cython names them, as profiles of the hook show it: without the folders that are no packages.
    parts = [Extension("*", [str(source)]) for library in LIBRARIES for source in library.sources]
    # cythonize follows cimports only where it finds them on its path; a stale gate is worse than a slow build.
    stamp = CYTHONIZED / ".stamp"
    stale = not stamp.exists() or stamp.stat().st_mtime < newest("*.pyx", "*.pxd")
    if stale:
        # Cython spends seconds before its first file, and as long as on the file itself on the search for garbage.
        to_c(min(parts, key=lambda part: Path(part.sources[0]).stat().st_size))
        gc.disable()
        in_copies(to_c, [*parts, *modules])
        gc.enable()
        stale = False
    done = to_c(*parts, *modules)
    stamp.parent.mkdir(parents=True, exist_ok=True)
    stamp.touch()
    return done[len(parts) :]


for generator in sorted(NATIVE.glob("generate_*.py")):
    subprocess.run([sys.executable, str(generator)], check=True, cwd=ROOT)
setup(
    ext_modules=cythonized(),
    cmdclass={"build_ext": BuildNative},
    options={"bdist_wheel": {"py_limited_api": "cp{}{}".format(*LEAST_PYTHON)}},
)
