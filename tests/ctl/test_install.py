"""Installing the hook: for a user in a home of its own, for a system under a root of its own."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from client_hook import install
from client_hook.environment import preload_file_entries
from client_hook.errors import HookError
from client_hook.install import SystemInstallation, UserInstallation, preflight, preload_file_with
from client_hook.path_rules import HOOK_NAME, is_hook


@pytest.fixture
def user(tmp_path: Path) -> UserInstallation:
    home = tmp_path / "home"
    home.mkdir()
    (home / ".bashrc").write_text("alias ll='ls -l'")
    return UserInstallation(home, home / ".config")


def in_shell(user: UserInstallation, *shell: str, preload: str | None = None) -> tuple[str, str]:
    """LD_PRELOAD and stderr in a new shell of the user."""
    environment = {"HOME": str(user.home), "PATH": os.environ["PATH"]}
    if preload is not None:
        environment["LD_PRELOAD"] = preload
    told = subprocess.run(
        [*shell, "-c", "echo $LD_PRELOAD"], env=environment, capture_output=True, text=True, check=True
    )
    return told.stdout.strip(), told.stderr


def tree(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_new_shells_preload_the_hook(user: UserInstallation, loadable: Path) -> None:
    done = user.install(loadable)
    assert done.library.read_bytes() == loadable.read_bytes()
    assert in_shell(user, "bash", "--login") == (str(done.library), "")
    assert in_shell(user, "sh", "-l") == (str(done.library), "")


def test_a_terminal_preloads_the_hook_where_there_was_no_bashrc(user: UserInstallation, loadable: Path) -> None:
    (user.home / ".bashrc").unlink()
    library = user.install(loadable).library
    assert in_shell(user, "bash", "-i")[0] == str(library)
    assert user.uninstall() is not None
    assert tree(user.home) == {}


def test_another_preload_is_kept_and_ours_comes_once(user: UserInstallation, loadable: Path) -> None:
    library = user.install(loadable).library
    assert in_shell(user, "sh", "-l", preload=str(loadable))[0] == f"{loadable}:{library}"
    assert in_shell(user, "sh", "-l", preload=f"{library}:{loadable}")[0] == f"{library}:{loadable}"


def test_installing_again_changes_nothing(user: UserInstallation, loadable: Path) -> None:
    user.install(loadable)
    before = tree(user.home)
    user.install(loadable)
    assert tree(user.home) == before


def test_a_new_version_replaces_the_file_under_running_programs(user: UserInstallation, loadable: Path) -> None:
    library = user.install(loadable).library
    with library.open("rb") as mapped:
        newer = loadable.with_name("newer.so")
        newer.write_bytes(loadable.read_bytes() + b"\0")
        user.install(newer)
        assert mapped.read() == loadable.read_bytes()
    assert library.read_bytes() == newer.read_bytes()
    assert stat.S_IMODE(library.stat().st_mode) == 0o755


def test_uninstall_leaves_no_trace(user: UserInstallation, loadable: Path) -> None:
    (user.home / ".bashrc").write_text("alias ll='ls -l'\n")
    before = tree(user.home)
    user.install(loadable)
    assert tree(user.home) != before
    assert user.uninstall() is not None
    assert tree(user.home) == before
    assert user.uninstall() is None


def test_a_start_up_file_that_is_a_link_stays_one(user: UserInstallation, loadable: Path, tmp_path: Path) -> None:
    dotfile = tmp_path / "dotfiles-profile"
    dotfile.write_text("export EDITOR=vi\n")
    dotfile.chmod(0o600)
    (user.home / ".profile").symlink_to(dotfile)
    user.install(loadable)
    assert (user.home / ".profile").is_symlink()
    assert "export EDITOR=vi\n" in dotfile.read_text()
    assert install.MARK in dotfile.read_text()
    assert stat.S_IMODE(dotfile.stat().st_mode) == 0o600


def test_a_removed_library_makes_no_noise_in_shells(user: UserInstallation, loadable: Path) -> None:
    user.install(loadable).library.unlink()
    assert in_shell(user, "sh", "-l") == ("", "")


def test_a_hook_that_does_not_load_is_not_installed(user: UserInstallation, tmp_path: Path) -> None:
    broken = tmp_path / "broken.so"
    broken.write_text("not a library")
    before = tree(user.home)
    with pytest.raises(HookError, match="does not run with"):
        user.install(broken)
    assert tree(user.home) == before


def test_a_home_that_cannot_be_preloaded_from_is_refused(tmp_path: Path, loadable: Path) -> None:
    home = tmp_path / "jo doe"
    home.mkdir()
    with pytest.raises(HookError, match="LD_PRELOAD cannot express"):
        UserInstallation(home, home / ".config").install(loadable)
    assert tree(home) == {}


def test_preflight_passes_what_loads(loadable: Path) -> None:
    preflight(loadable)


# --- the system -----------------------------------------------------------------------------------------------------


@pytest.fixture
def system(tmp_path: Path) -> SystemInstallation:
    root = tmp_path / "root"
    (root / "etc").mkdir(parents=True)
    return SystemInstallation(root)


@pytest.mark.parametrize("before", [None, "/usr/lib/other.so\n", "# ours and theirs\n/a.so /b.so # both\n"])
def test_system_install_and_uninstall_restore_the_file(
    system: SystemInstallation, loadable: Path, before: str | None
) -> None:
    if before is not None:
        system.preload_file.write_text(before)
    system.install(loadable)
    assert system.library.read_bytes() == loadable.read_bytes()
    assert preload_file_entries(system.preload_file.read_text()) == [
        *preload_file_entries(before or ""),
        str(system.library),
    ]
    assert system.uninstall() is not None
    assert (system.preload_file.read_text() if system.preload_file.exists() else None) == before
    assert not system.library.exists()
    assert system.uninstall() is None


def test_a_machine_that_does_not_survive_the_hook_gets_its_file_back(
    system: SystemInstallation, loadable: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system.preload_file.write_text("/usr/lib/other.so\n")
    seen: list[str] = []

    def survives(library: Path | None) -> None:
        if library is None:  # the try after the rename
            seen.append(system.preload_file.read_text())
            raise HookError("/bin/true does not run")

    monkeypatch.setattr(install, "preflight", survives)
    with pytest.raises(HookError, match="does not run"):
        system.install(loadable)
    assert seen == [f"/usr/lib/other.so\n{system.library}\n"]
    assert system.preload_file.read_text() == "/usr/lib/other.so\n"


def test_without_permission_the_reason_and_the_command_are_told(
    system: SystemInstallation, loadable: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(system.library.parent))

    monkeypatch.setattr(Path, "mkdir", refused)
    with pytest.raises(HookError) as caught:
        system.install(loadable)
    assert caught.value.hint == "sudo vgpuctl hook install --system"
    assert str(system.library.parent) in caught.value.message


words = st.sampled_from(["/a.so", "/lib/b.so", f"/old/{HOOK_NAME}", "# note", " ", "\t", "\n", ":"])


@given(st.lists(words).map("".join))
def test_only_entries_of_the_hook_are_touched(text: str) -> None:
    hook = Path("/new") / HOOK_NAME
    others = [entry for entry in preload_file_entries(text) if not is_hook(entry)]
    with_hook = preload_file_with(text, hook)
    assert preload_file_entries(with_hook) == [*others, str(hook)]
    without = preload_file_with(with_hook, None)
    assert preload_file_entries(without) == others
    comments = [line.partition("#")[2] for line in text.splitlines() if "#" in line]
    assert [line.partition("#")[2] for line in without.splitlines() if "#" in line] == comments


# --- other users, and whole or not at all ---------------------------------------------------------------------------


def everything(root: Path) -> dict[str, tuple[int, bytes]]:
    """Modes and contents; of a link, where it leads."""
    return {
        str(path.relative_to(root)): (
            stat.S_IMODE(path.lstat().st_mode),
            bytes(path.readlink()) if path.is_symlink() else path.read_bytes() if path.is_file() else b"",
        )
        for path in root.rglob("*")
    }


@pytest.fixture
def strict() -> Iterator[None]:
    before = os.umask(0o077)
    yield
    os.umask(before)


@pytest.mark.usefixtures("strict")
def test_every_user_can_read_what_is_installed_for_all(system: SystemInstallation, loadable: Path) -> None:
    system.install(loadable)
    files = (system.library, system.preload_file)
    assert [stat.S_IMODE(file.stat().st_mode) for file in files] == [0o755, 0o644]
    for part in list(system.library.relative_to(system.root).parents)[:-1]:
        assert (system.root / part).stat().st_mode & 0o005 == 0o005, part
    system.library.chmod(0o700)
    system.library.parent.chmod(0o700)
    system.preload_file.chmod(0o600)
    system.install(loadable)  # puts right what an older version has left
    assert [stat.S_IMODE(file.stat().st_mode) for file in files] == [0o755, 0o644]
    assert stat.S_IMODE(system.library.parent.stat().st_mode) == 0o755


def test_a_library_that_another_user_cannot_reach_is_not_installed(system: SystemInstallation, loadable: Path) -> None:
    (system.root / "usr").mkdir(mode=0o700)
    before = everything(system.root)
    with pytest.raises(HookError, match=r"other users cannot reach .*/usr is closed to them"):
        system.install(loadable)
    assert everything(system.root) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give directories away")
@pytest.mark.parametrize("where", ["usr/local", "usr/local/lib/vgpu", "etc"])
def test_a_directory_that_is_not_roots_is_refused(system: SystemInstallation, loadable: Path, where: str) -> None:
    directory = system.root / where
    directory.mkdir(parents=True, exist_ok=True)
    before = everything(system.root)
    os.chown(directory, 65534, 0)
    with pytest.raises(HookError, match=f"{where} belongs to uid 65534"):
        system.install(loadable)
    os.chown(directory, 0, 0)
    directory.chmod(0o777)
    with pytest.raises(HookError, match=f"every user can write to .*{where}"):
        system.install(loadable)
    directory.chmod(0o755)
    assert everything(system.root) == before


@pytest.mark.parametrize("older", [None, b"an older hook"])
def test_an_installation_that_fails_leaves_nothing(
    system: SystemInstallation, loadable: Path, older: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/etc is read-only, say."""
    if older is not None:
        system.library.parent.mkdir(parents=True)
        system.library.write_bytes(older)
    before = everything(system.root)

    def refused(path: Path, text: str) -> None:
        raise OSError(30, "Read-only file system", str(path))

    monkeypatch.setattr(install, "_write", refused)
    with pytest.raises(HookError, match=r"cannot change .*ld.so.preload: Read-only file system") as told:
        system.install(loadable)
    assert told.value.hint.startswith("mount the file system of ")
    assert everything(system.root) == before


@pytest.mark.parametrize("text", ["", "# the distribution's\n/usr/lib/other.so\n"])
def test_a_link_stays_a_link(system: SystemInstallation, loadable: Path, text: str) -> None:
    (system.root / "etc/real.preload").write_text(text)
    system.preload_file.symlink_to("real.preload")
    before = everything(system.root)
    system.install(loadable)
    assert system.preload_file.is_symlink()
    system.uninstall()
    after = everything(system.root)
    assert {name: after[name] for name in before if name.startswith("etc")} == {
        name: before[name] for name in before if name.startswith("etc")
    }


def test_a_link_that_leads_nowhere_stays_one(system: SystemInstallation, loadable: Path) -> None:
    system.preload_file.symlink_to("real.preload")
    system.install(loadable)
    system.uninstall()
    assert system.preload_file.readlink() == Path("real.preload")
