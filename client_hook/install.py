"""Installs the hook where a plain ``export VGPU_ID=…`` finds it, and removes it again.

Per user: a copy under ``~/.local/lib/vgpu`` and one line in the start-up files of the shells, beside an environment.d
file for desktop sessions. System-wide: a copy under ``/usr/local/lib/vgpu`` and a line in ``/etc/ld.so.preload``.

Every process loads a broken entry in ``ld.so.preload``, even the rescue shell. So the installer first tries the copy on
``/bin/true``. Then it writes the file by one rename, and tries again. If that fails, it restores what was there before.
Copies lie outside any virtual environment. Reason: the deletion of an environment must not leave every process of a
user with a dangling preload.
"""

from __future__ import annotations

import errno
import os
import shlex
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from client_hook.environment import joined_preload, preload_file_entries
from client_hook.errors import HookError
from client_hook.path_rules import HOOK_NAME, is_hook

MARK: Final = "# st-vgpu hook, see vgpuctl hook"
_PROBE: Final = "/bin/true"
OTHER_USER: Final = 65534
"""The uid of the user ``nobody``: a file that this user can read is readable by every user."""
_LOGIN_FILES: Final = (".bash_profile", ".bash_login", ".profile")
_BASHRC: Final = ".bashrc"
_OTHER_FILES: Final = (".zshenv", ".zshrc")


@dataclass(frozen=True, slots=True)
class Installed:
    """What an installation consists of: the library, and every file that was written or changed."""

    library: Path
    files: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class UserInstallation:
    """The hook for one user. ``home`` and ``config`` are that user's home and XDG configuration directories."""

    home: Path
    config: Path

    @property
    def library(self) -> Path:
        return self.home / ".local/lib/vgpu" / HOOK_NAME

    @property
    def snippet(self) -> Path:
        """Read by shells; it checks for the library, since ld.so complains at every command about one that is gone."""
        return self.library.with_name("env.sh")

    @property
    def environment_file(self) -> Path:
        return self.config / "environment.d/60-vgpu.conf"

    def start_up_files(self) -> list[Path]:
        """The login file that this user's shells read (``~/.profile`` if there is none), and ``~/.bashrc``. Both may
        not exist yet. Other start-up files follow, if they exist."""
        login = next((f for f in self._existing(*_LOGIN_FILES)), self.home / ".profile")
        return [login, self.home / _BASHRC, *self._existing(*_OTHER_FILES)]

    def _existing(self, *names: str) -> Iterator[Path]:
        return (self.home / name for name in names if (self.home / name).exists())

    def install(self, built: Path) -> Installed:
        """Copies ``built`` and makes new shells preload it. Doing it again changes nothing.

        Raises :class:`HookError` if the hook does not load, or nothing can be written there.
        """
        joined_preload("", self.library)
        preflight(built)
        with _explained(self.home):
            _copy_library(built, self.library)
            _write(self.snippet, _snippet(self.library))
            _write(self.environment_file, f"{MARK}\nLD_PRELOAD=${{LD_PRELOAD:+$LD_PRELOAD:}}{self.library}\n")
            snippet = shlex.quote(str(self.snippet))
            line = f"if [ -r {snippet} ]; then . {snippet}; fi {MARK}"
            files = self.start_up_files()
            for file in files:
                _replace_line(file, line)
        return Installed(self.library, (self.snippet, self.environment_file, *files))

    def uninstall(self) -> Installed | None:
        """Undoes ``install``; None if there was nothing. First what points at the library goes, then the library."""
        candidates = [self.home / name for name in (*_LOGIN_FILES, _BASHRC, *_OTHER_FILES)]
        with _explained(self.home):
            changed = [file for file in candidates if _replace_line(file, None)]
            changed += [file for file in (self.environment_file, self.snippet) if _unlink(file)]
            removed = _unlink(self.library)
            _remove_empty(self.library.parent)
        return Installed(self.library, tuple(changed)) if removed or changed else None


@dataclass(frozen=True, slots=True)
class SystemInstallation:
    """The hook for every process of the machine with the root directory ``root``."""

    root: Path = Path("/")

    @property
    def library(self) -> Path:
        return self.root / "usr/local/lib/vgpu" / HOOK_NAME

    @property
    def preload_file(self) -> Path:
        return self.root / "etc/ld.so.preload"

    def install(self, built: Path) -> Installed:
        """Copies ``built`` and adds it to ``ld.so.preload``. Doing it again changes nothing.

        Raises :class:`HookError`, with everything as it was, if a process does not survive the hook.
        """
        preflight(built)
        with _explained(self.library.parent, "sudo vgpuctl hook install --system"):
            self._check_owners()
            with self._undone():
                _make_public(self.library.parent)
                _copy_library(built, self.library)
                self.library.chmod(0o755)  # an identical copy stays, and others may not have been able to read it
                preflight(self.library)
                self._check_readable()
                self._put(preload_file_with(self._read(), self.library))
                preflight(None)
                if self.root == Path("/"):
                    preflight(None, OTHER_USER)
        return Installed(self.library, (self.preload_file,))

    def _check_owners(self) -> None:
        """Every process of the machine will load the library: only root may be able to replace it."""
        for file in (self.library, self.preload_file.resolve()):
            for part in (file, *file.parents):
                if part.exists() and part.is_relative_to(self.root):
                    found = part.stat()
                    if found.st_uid not in {0, os.geteuid()}:
                        raise HookError(
                            f"{part} belongs to uid {found.st_uid}, which could replace what every process loads",
                            f"chown root {part}",
                        )
                    if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
                        raise HookError(
                            f"every user can write to {part}, and so replace what every process loads",
                            f"chmod o-w {part}",
                        )

    def _check_readable(self) -> None:
        """Raise if some user cannot read the library. For such a user ld.so complains at each command, and goes on
        without the hook."""
        for part in self.library.parents:
            if part.is_relative_to(self.root) and part != self.root and not part.stat().st_mode & stat.S_IXOTH:
                raise HookError(
                    f"other users cannot reach {self.library}: {part} is closed to them", f"chmod o+x {part}"
                )
        if self.root == Path("/"):
            preflight(self.library, OTHER_USER)

    @contextmanager
    def _undone(self) -> Iterator[None]:
        """If anything goes wrong meanwhile, restore the preload file, the library and the directories."""
        library = self.library.read_bytes() if self.library.exists() else None
        mode = stat.S_IMODE(self.library.stat().st_mode) if library is not None else 0
        before = self._read()
        made = [part for part in (self.library.parent, *self.library.parent.parents) if not part.exists()]
        try:
            yield
        except BaseException:
            with suppress(OSError):
                if self._read() != before:
                    self._put(before)
            with suppress(OSError):
                if library is None:
                    self.library.unlink(missing_ok=True)
                else:
                    _publish(self.library, library, mode)
            for directory in made:
                with suppress(OSError):
                    directory.rmdir()
            raise

    def uninstall(self) -> Installed | None:
        """Removes our entry, and the file if nothing else is in it; None if there was nothing."""
        with _explained(self.preload_file, "sudo vgpuctl hook uninstall --system"):
            before = self._read()
            found = any(map(is_hook, preload_file_entries(before)))
            if found:
                self._put(preload_file_with(before, None))
            removed = _unlink(self.library)
            _remove_empty(self.library.parent)
        if not found and not removed:
            return None
        return Installed(self.library, (self.preload_file,) if found else ())

    def _read(self) -> str:
        try:
            return self.preload_file.read_text()
        except FileNotFoundError:
            return ""

    def _put(self, content: str) -> None:
        if content.strip() or self.preload_file.is_symlink():
            _write(self.preload_file, content)
            self.preload_file.chmod(stat.S_IMODE(self.preload_file.stat().st_mode) | 0o444)  # else ld.so ignores it
        else:
            _unlink(self.preload_file)


def preload_file_with(text: str, library: Path | None) -> str:
    """The content of an ``ld.so.preload`` with ``library`` as its only copy of the hook (None: without any), last.

    Other libraries and comments stay as they are.
    """
    lines = []
    for line in text.splitlines():
        named, sign, comment = line.partition("#")
        entries = preload_file_entries(named)
        if any(map(is_hook, entries)):
            line = " ".join(e for e in entries if not is_hook(e)) + (f" {sign}{comment}" if sign else "")
            if not line:
                continue
        lines.append(line)
    if library is not None:
        lines.append(str(library))
    return "".join(f"{line}\n" for line in lines)


def preflight(library: Path | None, uid: int | None = None) -> None:
    """Runs ``/bin/true`` with ``library`` preloaded (None: with what the machine preloads by itself). ``uid``: as that
    user, if this one is root.

    Raises :class:`HookError` if it dies, or if it prints anything on stderr. Reason: ld.so reports there what it cannot
    load, and goes on without it.
    """
    environment = {"PATH": os.defpath} | ({"LD_PRELOAD": str(library)} if library else {})
    try:
        if uid is None or os.geteuid() != 0:
            probe = subprocess.run([_PROBE], env=environment, capture_output=True, timeout=10, check=False)
        else:
            probe = subprocess.run(
                [_PROBE],
                env=environment,
                capture_output=True,
                timeout=10,
                check=False,
                user=uid,
                group=uid,
                extra_groups=[],
            )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HookError(f"{_PROBE} does not run with the hook: {error}", _REPORT) from error
    if probe.returncode != 0 or probe.stderr:
        said = probe.stderr.decode(errors="replace").strip().splitlines()
        reason = said[0] if said else f"exit code {probe.returncode}"
        user = f" as uid {uid}" if uid is not None else ""
        raise HookError(f"{_PROBE} does not run{user} with {library or 'the preloaded libraries'}: {reason}", _REPORT)


_REPORT: Final = "vgpuctl doctor"


def _snippet(library: Path) -> str:
    path = shlex.quote(str(library))
    return f"""{MARK}
case ":${{LD_PRELOAD:-}}:" in
    *"/{HOOK_NAME}:"*) ;;
    *) if [ -r {path} ]; then export LD_PRELOAD="${{LD_PRELOAD:+$LD_PRELOAD:}}"{path}; fi ;;
esac
"""


def _copy_library(built: Path, target: Path) -> None:
    """Running processes keep the copy they have mapped; an identical copy stays as it is."""
    content = built.read_bytes()
    if not target.exists() or target.read_bytes() != content:
        _publish(target, content, 0o755)


def _write(path: Path, text: str) -> None:
    # A start-up file is often a link into a dotfiles repository: write what it points at, keep the link.
    path = path.resolve()
    _publish(path, text.encode(), stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o644)


def _publish(target: Path, content: bytes, mode: int) -> None:
    """Write the file whole or not at all: under another name first, then by one rename."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}-", delete=False) as copy:
        try:
            copy.write(content)
            copy.flush()
            os.fchmod(copy.fileno(), mode)
            os.fsync(copy.fileno())
            Path(copy.name).replace(target)
        except BaseException:
            Path(copy.name).unlink(missing_ok=True)
            raise


def _replace_line(file: Path, line: str | None) -> bool:
    """Makes ``line`` the only marked line of ``file`` (None: no marked line). True if the file changed."""
    before = file.read_text() if file.exists() else ""
    kept = [text for text in before.splitlines(keepends=True) if not text.rstrip().endswith(MARK)]
    if line is not None:
        if kept and not kept[-1].endswith("\n"):
            kept[-1] += "\n"
        kept.append(line + "\n")
    after = "".join(kept)
    if after == before:
        return False
    if after:
        _write(file, after)
    else:
        file.unlink()
    return True


def _make_public(directory: Path) -> None:
    """``directory`` and what is missing above it, for every user to read, whatever the umask."""
    missing = [part for part in (directory, *directory.parents) if not part.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for part in missing:
        part.chmod(0o755)
    directory.chmod(stat.S_IMODE(directory.stat().st_mode) | 0o755)


def _unlink(path: Path) -> bool:
    existed = path.exists()
    path.unlink(missing_ok=True)
    return existed


def _remove_empty(directory: Path) -> None:
    if directory.is_dir() and not any(directory.iterdir()):
        directory.rmdir()


@contextmanager
def _explained(where: Path, hint: str = "") -> Iterator[None]:
    """Turns an OSError below ``where`` into a HookError. ``hint``: how root does it."""
    try:
        yield
    except OSError as error:
        named = Path(os.fsdecode(error.filename)) if error.filename else where
        named = named.parent if named.name.startswith(".") else named  # not the temporary file in it
        if error.errno == errno.EROFS:
            hint = f"mount the file system of {named} writable, or do it where the machine's image is made"
        raise HookError(f"cannot change {named}: {error.strerror}", hint) from error
