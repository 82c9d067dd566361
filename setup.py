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


def c_file(source: Path) -> Path:
    """Where Cython writes what ``source`` becomes."""
    return CYTHONIZED / source.with_suffix(".c")


def is_newer(file: Path, changed_s: float) -> bool:
    return file.exists() and file.stat().st_mtime >= changed_s


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
        changed_s = max(newest("*.pyx", "*.pxd", "*.h", "*.map", "*.ptx"), Path(__file__).stat().st_mtime)
        for library in LIBRARIES:
            target = lib_root / library.target
            if self.force or not is_newer(target, changed_s):
                self.link_library(library, target)
        if not self.inplace and not self.editable_mode and shutil.which("strip"):
            # Half of what is installed would be lines and symbols for debuggers. A checkout keeps them.
            files = [str(file) for file in (Path(self.build_lib) / NATIVE).rglob("*.so*")]
            self.spawn(["strip", "--strip-unneeded", *files])

    def link_library(self, library: Library, target: Path) -> None:
        all_to_c(dict.fromkeys(library.sources))
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
        sources, options = [str(c_file(source))], [*CFLAGS, *cflags]
        (compiled,) = self.compiler.compile(sources, self.build_temp, None, include_dirs, extra_postargs=options)
        return str(compiled)

    def get_outputs(self) -> list[str]:
        lib_root = Path(self.build_lib) / NATIVE / "lib"
        return super().get_outputs() + [str(lib_root / library.target) for library in LIBRARIES]


def extensions() -> list[Extension]:
    """The extension modules, as C."""
    sources = sorted(source for folder in [*MODULES, TESTING] for source in folder.glob("*.pyx"))
    names = {source: ".".join(source.with_suffix("").parts) for source in sources}
    all_to_c({**names})
    headers = [str(p) for pattern in ("*.pxd", "*.h") for p in NATIVE.rglob(pattern)]
    return [
        Extension(
            name,
            [str(c_file(source))],
            include_dirs=[str(NATIVE)],
            extra_compile_args=COMMON_CFLAGS,
            extra_link_args=["-Wl,--no-as-needed", *OLD_LIBRARIES, "-Wl,--as-needed"],
            define_macros=[("Py_LIMITED_API", "0x{:02X}{:02X}0000".format(*LEAST_PYTHON))],
            py_limited_api=True,
            depends=headers,
        )
        for source, name in names.items()
    ]


def to_c(source: Path, name: str | None) -> None:
    """``name`` of an extension module; None: as Cython finds it, by the folders that are packages."""
    from Cython.Compiler.Main import compile as cython

    directives = {d.split("=")[0]: d.endswith("True") for d in DIRECTIVES}
    output = c_file(source)
    output.parent.mkdir(parents=True, exist_ok=True)
    part = output.with_name(f"part-{output.name}")
    part.unlink(missing_ok=True)
    done = cython(
        str(source),
        full_module_name=name,
        output_file=str(part),
        language_level=3,
        compiler_directives=directives,
        include_path=[str(ROOT)],  # pip builds without this folder on Python's path
    )
    if done.num_errors:
        sys.exit(1)
    part.replace(output)  # at once: half of a file would be newer than its source, too


def all_to_c(names: dict[Path, str | None]) -> None:
    """Those that are older than any native code become C. Cython follows cimports only where it finds them on its path,
    and a stale gate is worse than a slow build.

    All but the smallest do in copies of this process, the largest first, one for each core at a time. Reason: Cython
    spends a second before its first file, and half of its time on the search for garbage."""
    changed_s = newest("*.pyx", "*.pxd")
    stale = [source for source in names if not is_newer(c_file(source), changed_s)]
    stale.sort(key=lambda source: source.stat().st_size)
    for source in stale[:1]:
        to_c(source, names[source])
    fork = multiprocessing.get_context("fork")
    waiting = [fork.Process(target=to_c, args=(source, names[source]), name=str(source)) for source in stale[1:]]
    running: list[BaseProcess] = []
    gc.disable()
    while waiting or running:
        while waiting and len(running) < (os.cpu_count() or 1):
            running.append(waiting.pop())
            running[-1].start()
        connection.wait([process.sentinel for process in running])
        for process in [process for process in running if process.exitcode is not None]:
            running.remove(process)
            if process.exitcode:
                sys.exit(f"Cython failed on {process.name}")
    gc.enable()


if __name__ == "__main__":
    for generator in sorted(NATIVE.glob("generate_*.py")):
        subprocess.run([sys.executable, str(generator)], check=True, cwd=ROOT)
    setup(
        ext_modules=extensions(),
        cmdclass={"build_ext": BuildNative},
        options={"bdist_wheel": {"py_limited_api": "cp{}{}".format(*LEAST_PYTHON)}},
    )
