"""The environment of a vGPU process."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from client_hook.environment import (
    HOOK_NAME,
    Attachment,
    Changes,
    Simulation,
    activation,
    deactivation,
    fish_lines,
    hook_to_preload,
    is_hook,
    joined_preload,
    shell_lines,
    simulation_libraries,
)
from client_hook.errors import HookError

HOOK = Path("/opt/vgpu") / HOOK_NAME
REAL = Attachment(("vgpu-00000001",), Path("/run/vgpu"), HOOK)
SIMULATED = Attachment(("vgpu-00000002",), Path("/tmp/node"), HOOK, Simulation(Path("/tmp/sim"), Path("/opt/lib/sim")))

entries = st.text(st.characters(codec="ascii", categories=["L", "N"], include_characters="/._-"), min_size=1)
preloads = st.lists(entries | st.sampled_from([f"/old/{HOOK_NAME}", HOOK_NAME, str(HOOK)]))


@given(preloads, st.sampled_from([" ", ":", " : "]))
def test_every_other_library_stays_in_order_and_the_hook_is_there_once(listed: list[str], separator: str) -> None:
    joined = joined_preload(separator.join(listed), HOOK).split(":")
    assert joined == [*(e for e in listed if not is_hook(e)), str(HOOK)]


@given(preloads)
def test_adding_the_hook_twice_is_adding_it_once(listed: list[str]) -> None:
    once = joined_preload(":".join(listed), HOOK)
    assert joined_preload(once, HOOK) == once


@pytest.mark.parametrize("directory", ["/home/jo doe", "/a:b"])
def test_a_path_that_ld_so_would_cut_in_two_is_refused(directory: str) -> None:
    with pytest.raises(HookError, match="LD_PRELOAD cannot express"):
        joined_preload("", Path(directory) / HOOK_NAME)


def test_a_real_vgpu_changes_three_variables() -> None:
    changes = REAL.changes({"LD_PRELOAD": "/lib/jemalloc.so", "LD_LIBRARY_PATH": "/cuda/lib64"})
    assert changes == {
        "VGPU_ID": "vgpu-00000001",
        "VGPU_RUNTIME_DIR": "/run/vgpu",
        "LD_PRELOAD": f"/lib/jemalloc.so:{HOOK}",
    }


def test_several_vgpus_are_listed_with_commas() -> None:
    assert Attachment(("vgpu-1", "vgpu-2"), Path("/r"), HOOK).changes({})["VGPU_ID"] == "vgpu-1,vgpu-2"


def test_the_stand_in_driver_comes_before_a_real_one() -> None:
    environment = SIMULATED.environment({"LD_LIBRARY_PATH": "/cuda/lib64", "HOME": "/root"})
    assert environment["LD_LIBRARY_PATH"] == "/opt/lib/sim:/cuda/lib64"
    assert environment["VGPU_SIM_DIR"] == "/tmp/sim"
    assert environment["HOME"] == "/root"


def test_a_shell_that_held_a_simulated_vgpu_finds_the_real_driver_again() -> None:
    library_dir = Path("/venv/site-packages/cython_ext/lib/sim")
    simulated = Attachment(("vgpu-2",), Path("/tmp/n"), HOOK, Simulation(Path("/tmp/sim"), library_dir))
    for inherited in ({"LD_LIBRARY_PATH": "/cuda/lib64"}, {}):
        before = simulated.environment(inherited)
        after = REAL.environment(before)
        assert "VGPU_SIM_DIR" not in after
        assert after.get("LD_LIBRARY_PATH") == inherited.get("LD_LIBRARY_PATH")


def test_a_library_path_of_the_users_own_is_not_touched() -> None:
    assert "LD_LIBRARY_PATH" not in REAL.changes({"LD_LIBRARY_PATH": "/mine/sim"})


def test_no_second_copy_beside_one_in_ld_so_preload(tmp_path: Path) -> None:
    system = tmp_path / "ld.so.preload"
    system.write_text(f"# for GPUs\n/usr/lib/other.so /usr/local/lib/vgpu/{HOOK_NAME}\n")
    assert hook_to_preload(system) is None
    changes = Attachment(("vgpu-1",), Path("/r"), None).changes({"LD_PRELOAD": str(HOOK)})
    assert changes["LD_PRELOAD"] is None


def test_a_commented_entry_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = tmp_path / "ld.so.preload"
    system.write_text(f"# /usr/local/lib/vgpu/{HOOK_NAME}\n")
    monkeypatch.setattr("client_hook.environment.hook_library", lambda: HOOK)
    assert hook_to_preload(system) == HOOK


@given(st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"])))
def test_a_shell_reads_back_what_was_written(value: str) -> None:
    script = f'X=old; {shell_lines({"VALUE": value, "X": None})}\nprintf \'%s|%s\' "$VALUE" "${{X-unset}}"'
    told = subprocess.run(["/bin/sh", "-c", script], capture_output=True, check=True)
    assert told.stdout.decode() == f"{value}|unset"


@pytest.mark.parametrize("runtime", [{}, {"VGPU_RUNTIME_DIR": "/run/mine"}])
def test_deactivation_leaves_the_environment_of_before(runtime: dict[str, str]) -> None:
    before = {"PATH": "/bin", "LD_PRELOAD": "libasan.so", "LD_LIBRARY_PATH": "/opt/lib"} | runtime
    simulation = Simulation(Path("/run/vgpu/sim"), simulation_libraries())
    attachment = Attachment(("vgpu-0a1b2c3d",), Path("/run/mine"), Path("/opt/libvgpu_hook.so"), simulation)
    inside = applied(before, activation(attachment, before))
    again = applied(inside, activation(attachment, inside))
    assert again["VGPU_ID"] == "vgpu-0a1b2c3d"
    assert applied(again, deactivation(again)) == before


def applied(environment: dict[str, str], changes: Changes) -> dict[str, str]:
    return {name: value for name, value in (environment | changes).items() if value is not None}


def test_lines_for_fish() -> None:
    lines = fish_lines({"A": "it's \\ here", "B": None})
    assert lines == "set -gx A 'it\\'s \\\\ here';\nset -e B;"
