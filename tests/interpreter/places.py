"""Places from which an interpreter of ours might import what it should not, and installations that it must find."""

from __future__ import annotations

import shutil
import site
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
MARK = "imported from here"


def plant(folder: Path, *modules: str) -> Path:
    """Modules that leave a file beside them and end their interpreter when they are imported."""
    folder.mkdir(parents=True, exist_ok=True)
    for module in modules:
        text = f"open(__file__ + '.ran', 'w').write({MARK!r})\nraise SystemExit({MARK!r})\n"
        (folder / f"{module}.py").write_text(text)
    return folder


def ran(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.rglob("*.ran"))


def site_packages(prefix: Path) -> Path:
    return prefix / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"


def dependencies() -> list[str]:
    """Where the packages of this interpreter lie that are not ours."""
    return site.getsitepackages()


def virtual_environment(folder: Path, *lines: str) -> Path:
    """The interpreter of a virtual environment that has st-vgpu and what it needs; ``lines``: run at each start."""
    venv.EnvBuilder(symlinks=True, with_pip=False).create(folder)
    real = [f"import site; site.addsitedir({path!r})" for path in dependencies()]
    (site_packages(folder) / "linked.pth").write_text("\n".join([*real, *lines]) + "\n")
    return folder / "bin" / "python"


def user_site(folder: Path) -> Path:
    """``pip install --user``: packages below ``folder``, which lies below a home or is PYTHONUSERBASE."""
    place = site_packages(folder)
    place.mkdir(parents=True)
    for package in ("gpuserver", "vgpu", "client_hook", "cython_ext"):
        if package in {"client_hook", "vgpu"}:
            shutil.copytree(ROOT / package, place / package, ignore=shutil.ignore_patterns("static", "__pycache__"))
        else:
            (place / package).symlink_to(ROOT / package)
    real = [path for path in dependencies() if path.startswith(sys.prefix) and Path(path).is_dir()]  # Debian names more
    for path in real:
        for entry in Path(path).iterdir():
            if not entry.name.startswith(("__", "st_vgpu", "pip", "setuptools")) and entry.suffix != ".pth":
                (place / entry.name).symlink_to(entry)
    return place
