"""Threads that are cancelled in the hook, and children that share their parent's memory: nothing waits for them."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.hook.stage import MS, PATIENCE_S, Stage, StagedVgpu, eventually
from vgpu.workload.kernels import PTX


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the compiled programs and the kernels that they load."""
    folder = tmp_path_factory.mktemp("programs")
    for name in ("cancelled", "cloned"):
        source = Path(__file__).with_name(f"{name}.c")
        subprocess.run(["gcc", "-w", "-O1", "-o", folder / name, source, "-ldl", "-lpthread"], check=True)
    (folder / "kernels.ptx").write_text(PTX)
    return folder


@contextmanager
def ended(stage: Stage, vgpu: StagedVgpu, programs: Path, name: str, *arguments: object) -> Iterator[str]:
    """What the program says at its end, while it still is there."""
    command = [programs / name, programs / "kernels.ptx", *map(str, arguments)]
    process = subprocess.Popen(
        command, env=stage.environment(vgpu), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    patience = threading.Timer(PATIENCE_S, process.kill)  # a program that hangs says nothing more
    patience.start()
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process.stdout.readline().strip()
        process.communicate("\n")
        assert process.returncode == 0
    finally:
        patience.cancel()
        process.kill()
        process.communicate()


def assert_books_add_up(vgpu: StagedVgpu) -> None:
    """Nothing is reserved or owned, nothing is submitted, and the lock of the ledger is free."""
    eventually(lambda: not vgpu.slot().undrained, "its last work has drained")
    eventually(lambda: not vgpu.slot().want, "it wants no lease any more")
    slot = vgpu.slot()
    assert slot.reserved_bytes == 0
    assert sum(slot.committed_bytes) == 0
    vgpu.activity.reap_slot(63)  # free already: takes the lock, and finds nothing to do


@pytest.mark.parametrize("deed", ["launch", "memory", "both"])
@pytest.mark.parametrize("finite", [True, False], ids=["leases-that-end", "open-lease"])
def test_a_cancelled_thread_leaves_nothing_locked(stage: Stage, programs: Path, deed: str, finite: bool) -> None:
    vgpu = stage.vgpu()
    if finite:
        with vgpu.granting(3 * MS), ended(stage, vgpu, programs, "cancelled", 60, deed) as said:
            assert said == "cancelled 60"
            assert_books_add_up(vgpu)
        return
    vgpu.open()
    with ended(stage, vgpu, programs, "cancelled", 60, deed) as said:
        assert said == "cancelled 60"
        vgpu.withdraw()
        assert_books_add_up(vgpu)


def test_a_thread_that_is_cancelled_while_it_waits_for_a_lease_ends(stage: Stage, programs: Path) -> None:
    """No lease comes at all until the last of them has been cancelled."""
    vgpu = stage.vgpu()
    with ended(stage, vgpu, programs, "cancelled", 5, "wait") as said:
        assert said == "cancelled 5"
        with vgpu.granting(3 * MS):
            assert_books_add_up(vgpu)


@pytest.mark.parametrize("children", [60, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("beside", [0, 2])
@pytest.mark.parametrize("finite", [True, False], ids=["leases-that-end", "open-lease"])
def test_children_that_share_memory_launch(
    stage: Stage, programs: Path, children: int, beside: int, finite: bool
) -> None:
    """One after another, beside threads of the parent that launch, or none."""
    vgpu = stage.vgpu()
    if finite:
        with vgpu.granting(3 * MS), ended(stage, vgpu, programs, "cloned", children, 1, beside) as said:
            assert said == f"children {children}"
            assert_books_add_up(vgpu)
        return
    vgpu.open()
    with ended(stage, vgpu, programs, "cloned", children, 1, beside) as said:
        assert said == f"children {children}"
        vgpu.withdraw()
        assert_books_add_up(vgpu)
