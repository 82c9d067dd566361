"""``python -P -m tests.cluster.kubernetes.protos`` writes the descriptors of the kubelet's services."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from vgpu.integrations.kubernetes import wire

FOLDER = wire.DESCRIPTORS.parent


def compiled(folder: Path) -> bytes:
    """By the protoc of grpcio-tools."""
    out = folder / "out.binpb"
    names = sorted(path.name for path in FOLDER.glob("*.proto"))
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{FOLDER}", f"--descriptor_set_out={out}", *names]
    subprocess.run(command, check=True)
    return out.read_bytes()


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        wire.DESCRIPTORS.write_bytes(compiled(Path(folder)))
