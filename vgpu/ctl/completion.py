"""Shell completion for vGPUs and GPUs: those of the node that runs, or nothing, without a message.

A person waits for it at every press of a key. So this module does not import pydantic, which takes longer than all the
rest, and waits only briefly for a busy node.
"""

from __future__ import annotations

import socket
from typing import Any, Final

PATIENCE_S: Final = 1.0
_CHUNK: Final = 1 << 16


def vgpus(incomplete: str) -> list[tuple[str, str]]:
    """Ids and names that begin with ``incomplete``, each with a short description."""
    found = []
    for vgpu in ask("list", "vgpus"):
        spec = vgpu.get("spec") or {}
        share = f"{spec['sm_percent']:g} %" if spec.get("sm_percent") else "a part"
        name, place = vgpu.get("name"), f"{share} of GPU {vgpu.get('gpu_index')}, {vgpu.get('state')}"
        # Names first: a user that gave a name wants to read it.
        found += [(name, f"{vgpu['vgpu_id']}, {place}")] if name else []
        found.append((vgpu["vgpu_id"], f"{name}, {place}" if name else place))
    return [one for one in found if one[0].startswith(incomplete)]


def gpus(incomplete: str) -> list[tuple[str, str]]:
    """Indices of GPUs that begin with ``incomplete``; UUIDs once one has been begun."""
    key = "uuid" if incomplete and not incomplete.isdigit() else "index"
    found = [(str(gpu[key]), f"{gpu.get('name')}, {gpu.get('mode')} mode") for gpu in ask("gpus", "gpus")]
    return [one for one in found if one[0].lower().startswith(incomplete.lower())]


def gpus_or_auto(incomplete: str) -> list[tuple[str, str]]:
    auto = [("auto", "by the node's placement")] if "auto".startswith(incomplete) else []
    return auto + gpus(incomplete)


def ask(op: str, field: str) -> list[dict[str, Any]]:
    """What the node lists; nothing if it does not run, is slow, or answers something else. Raises nothing."""
    try:
        return _ask(op, field)
    except Exception:  # a shell that completes is no place to report any error
        return []


def _ask(op: str, field: str) -> list[dict[str, Any]]:
    from vgpu.paths import NodePaths
    from vgpu.protocol.codec import MAX_ANSWER_BYTES, Decoder, encode
    from vgpu.trust import listener_uid, replaceable_part, trusts

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.settimeout(PATIENCE_S)
        path = NodePaths.from_environment().control_socket
        link.connect(str(path))
        if replaceable_part(path.parent) is not None or not trusts(listener_uid(link)):
            return []
        link.sendall(encode({"op": "hello", "id": 0}) + encode({"op": op, "id": 1}))
        decoder = Decoder(MAX_ANSWER_BYTES)
        while data := link.recv(_CHUNK):
            decoder.feed(data)
            for message in decoder:
                if message.get("id") == 1:
                    return list(message["result"][field])
    return []
