"""The wheel: one for every Python, with all that people need and nothing else, made by what builds it alone.

Nothing is compiled here: what was built in place is laid where the build would have put it, newer than its sources.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("gpuserver", "vgpu", "client_hook", "cython_ext")
TESTING = "cython_ext/testing/"
MODULES = [
    source.relative_to(ROOT).with_suffix("")
    for folder in ("", "pages", "dispatch", "relay")
    for source in sorted((ROOT / "cython_ext" / folder).glob("*.pyx"))
]
"""The native modules, without suffix."""
NEWEST_GLIBC = (2, 28)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    native = folder / "lib" / "cython_ext"
    shutil.copytree(ROOT / "cython_ext" / "lib", native / "lib", copy_function=shutil.copyfile)
    for module in MODULES:
        (folder / "lib" / module).parent.mkdir(exist_ok=True)
        shutil.copyfile(ROOT / f"{module}.abi3.so", folder / "lib" / f"{module}.abi3.so")
    build = ["build", "--build-base", str(folder), "--build-lib", str(folder / "lib")]
    pack = ["bdist_wheel", "--bdist-dir", str(folder / "bdist"), "--dist-dir", str(folder / "dist")]
    command = [sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", str(folder), *build, *pack]
    packed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert packed.returncode == 0, packed.stderr
    assert not list(folder.rglob("*.o")), "a test that compiles takes minutes"
    [made] = (folder / "dist").iterdir()
    return made


@pytest.fixture(scope="module")
def contents(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("contents")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def files(folder: Path) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}


def sources(*folders: str) -> set[str]:
    """Files in folders of the repository, but for what is made there."""
    found = (file for folder in folders for file in (ROOT / folder).rglob("*") if file.is_file())
    kept = {str(file.relative_to(ROOT)) for file in found if "__pycache__" not in file.parts}
    return {file for file in kept if not re.search(r"\.so\b|^cython_ext/hook/generated/", file)}


def test_it_is_for_every_python_from_3_11_on(wheel: Path, contents: Path) -> None:
    assert re.fullmatch(r"st_vgpu-[\d.]+-cp311-abi3-linux_\w+\.whl", wheel.name)
    modules = {file for file in files(contents) if file.endswith(".so") and not file.startswith("cython_ext/lib/")}
    assert len(modules) >= 9
    assert modules == {f"{module}.abi3.so" for module in MODULES}


def test_it_holds_the_hook_and_the_simulated_gpu(contents: Path) -> None:
    libraries = {file for file in files(contents) if file.startswith("cython_ext/lib/")}
    assert libraries == {
        f"cython_ext/lib/{name}" for name in ("libvgpu_hook.so", "sim/libcuda.so.1", "sim/libnvidia-ml.so.1")
    }


def test_it_holds_nothing_but_the_packages(contents: Path) -> None:
    held = {file.partition("/")[0] for file in files(contents)}
    assert {name for name in held if not name.startswith("st_vgpu-")} == set(PACKAGES)
    assert not {file for file in files(contents) if file.endswith((".pyx", ".pxd", ".c", ".h", ".map"))}


def test_it_holds_every_file_that_a_package_reads(contents: Path) -> None:
    """Modules, and what lies beside them: pages and their assets, templates."""
    built_from = (".pyx", ".pxd", ".c", ".h", ".map", ".ptx", ".md")
    expected = {file for file in sources(*PACKAGES) if not file.endswith(built_from)}
    assert {file for file in expected - files(contents) if not file.startswith(TESTING)} == set()


def test_it_holds_no_test_only_binding(contents: Path) -> None:
    names = {source.stem for source in (ROOT / TESTING).glob("*.pyx")}
    assert names >= {"bindings_logic", "bindings_memory", "bindings_wire", "bindings_lease_table", "fake_peer"}
    assert not {file for file in files(contents) if file.startswith(TESTING) or Path(file).name.split(".")[0] in names}


def test_its_native_modules_are_imported_without_the_test_only_ones(contents: Path) -> None:
    names = [".".join(module.parts) for module in MODULES]
    program = (
        f"import importlib, sys; sys.path.insert(0, {str(contents)!r})\n"
        f"for name in {names!r}: print(importlib.import_module(name).__file__)"
    )
    ran = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert [Path(line).parent for line in ran.stdout.splitlines()] == [(contents / m).parent for m in MODULES]


def test_no_product_code_imports_a_test_only_binding() -> None:
    """The contract in ``.importlinter`` sees no import of a native module's names."""
    imports = re.compile(r"cython_ext\.testing\b|cython_ext\s+c?import\s+(?:\([^)]*|[^(\n]*)\btesting\b")
    code = {file for file in sources(*PACKAGES) if file.endswith((".py", ".pyi", ".pyx", ".pxd"))}
    importing = {file for file in code if imports.search((ROOT / file).read_text())}
    assert {file for file in importing if not file.startswith(TESTING)} == set()
    for statement in (
        "from cython_ext.testing.bindings_logic import EARLY_NS",
        "from cython_ext import readings, testing",
        "from cython_ext import (\n    readings,\n    testing,\n)",
        "import cython_ext.testing.fake_peer",
    ):
        assert imports.search(statement)


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_making_it_installs_what_builds_it_and_no_tools(tmp_path: Path) -> None:
    command = ["make", "--dry-run", "--no-print-directory", "wheel", f"VENV={tmp_path}"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert re.findall(r"pip install .*--group (\w+)", said) == ["build"]
    assert not re.search(r"--editable|setup\.py", said)


def test_native_code_is_found_where_the_folder_is_not_on_pythons_path(tmp_path: Path) -> None:
    """As pip builds it in a fresh clone."""
    program = f"""
import runpy, sys
from pathlib import Path
sys.path.append({sysconfig.get_path("purelib")!r})  # without its .pth files: one names this folder
setup = runpy.run_path("setup.py")
to_c = setup["to_c"]
to_c.__globals__["CYTHONIZED"] = Path({str(tmp_path)!r})
to_c(Path("cython_ext/hook/gate/doorbell.pyx"), None)
"""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "cython_ext/hook/gate/doorbell.c").exists()


def test_it_holds_what_is_put_on_a_machine(contents: Path) -> None:
    [shared] = contents.glob("*.data/data/share/st-vgpu")
    assert files(shared) == {file.removeprefix("deploy/") for file in sources("deploy")}


@pytest.mark.skipif(shutil.which("nm") is None, reason="binutils are not installed")
def test_it_loads_on_old_c_libraries(contents: Path) -> None:
    """What ``make wheel`` has auditwheel put into the wheel's name has to come true: manylinux_2_28 or older."""
    too_new = {}
    for library in [file for file in contents.rglob("*") if ".so" in file.name]:
        needed = subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True)
        versions = re.findall(r"(\w+)@GLIBC_([\d.]+)", needed.stdout)
        assert versions, library
        if names := [name for name, version in versions if tuple(map(int, version.split("."))) > NEWEST_GLIBC]:
            too_new[library.name] = names
    assert too_new == {}
