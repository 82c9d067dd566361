"""The worked example in the docstring of ``vgpu.packing`` is true, and runs without the GPU Server's code."""

from __future__ import annotations

import doctest
import subprocess
import sys

import vgpu.packing


def test_the_worked_example_holds() -> None:
    found = doctest.testmod(vgpu.packing)
    assert found.attempted > 10
    assert not found.failed


def test_clients_and_placement_can_import_it_alone() -> None:
    modules = "admission", "fractional", "knapsack", "lending", "partition"
    program = "import sys, " + ", ".join(f"vgpu.packing.{module}" for module in modules)
    program += "; print(*{'gpuserver', 'trio', 'pydantic', 'cython_ext'} & {m.partition('.')[0] for m in sys.modules})"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == ""
