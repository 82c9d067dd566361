"""A real kernel in a vGPU of its own, by the lines of the quick start."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ipykernel")
manager = pytest.importorskip("jupyter_client.manager")

import vgpu  # noqa: E402
from tests.api.test_documented import blocks  # noqa: E402
from tests.integration.node import ROOT, SimulatedNode, eventually  # noqa: E402
from vgpu.integrations.jupyter import VgpuProvisioner, name_of  # noqa: E402


@pytest.mark.parametrize(
    ("path", "name"),
    [("/a/b.ipynb", "b"), ("", None), ("/a/---.ipynb", None), ("é.ipynb", None), (f"{'x' * 99}.ipynb", "x" * 63)],
)
def test_a_vgpu_is_named_after_its_notebook(path: str, name: str | None) -> None:
    assert name_of({"JPY_SESSION_NAME": path}) == name
    assert name_of({}) is None


def test_the_second_kernel_of_a_notebook_has_no_name(node: SimulatedNode) -> None:
    provisioner = VgpuProvisioner(sm="10", mem="1G")
    with provisioner._create("draft") as first, provisioner._create("draft") as second:
        assert (first.name, second.name) == ("draft", None)
    with pytest.raises(vgpu.VgpuError, match="101"):
        VgpuProvisioner(sm="101")._create("draft")


VGPUCTL = Path(sys.executable).with_name("vgpuctl")


@pytest.mark.filterwarnings("default")
def test_a_kernel_has_a_vgpu_until_its_end(
    node: SimulatedNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    [typed] = [line for line in blocks("quickstart-jupyter.md", "console")[0].splitlines() if "jupyter install" in line]
    command = [str(VGPUCTL), *typed.split()[2:], "--python", sys.executable]
    subprocess.run(command, cwd=ROOT, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    async def body() -> None:
        kernel = manager.AsyncKernelManager(kernel_name="vgpu")
        await kernel.start_kernel(cwd=str(tmp_path), env=os.environ | {"JPY_SESSION_NAME": "/a/My 1st (draft).ipynb"})
        client = kernel.client()
        client.start_channels()
        try:
            await client.wait_for_ready(timeout=90)
            (made,) = await vgpu.aio.list()
            assert (await made.stats()).memory_limit_bytes == 4 << 30
            assert made.name == "My-1st-draft"
            said: list[str] = []
            code = "import os; print(os.environ['VGPU_ID'])"
            await client.execute_interactive(
                code, timeout=90, output_hook=lambda message: said.append(message["content"].get("text", ""))
            )
            assert made.id in "".join(said)
            said.clear()
            await client.execute_interactive(
                blocks("quickstart-jupyter.md", "ipython")[0],
                timeout=90,
                output_hook=lambda message: said.append(message["content"].get("text", "")),
            )
            assert "20% promised" in "".join(said)
            assert "30% promised" in "".join(said)
            await kernel.restart_kernel(now=True)
            assert [one.id for one in await vgpu.aio.list()] == [made.id]
        finally:
            client.stop_channels()
            await kernel.shutdown_kernel(now=True)

    asyncio.run(body())
    eventually(lambda: not vgpu.list(), "the vGPU's end")
