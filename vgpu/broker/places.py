"""Places in a GPU's MPS server, which takes a limited number of processes. Pure.

The server keeps a part of the places for the vGPUs of the GPU, in proportion to their shares. Each vGPU gets at least
one of these, as far as there are enough. Any vGPU may use the other places, in the order of arrival. So one vGPU never
takes the places of all others. A place that is kept for no vGPU is never refused to a vGPU that could use it.
"""

from __future__ import annotations

from collections.abc import Mapping

from vgpu.limits import DEFAULT_LIMITS


def keep_places(
    most: int, shares: Mapping[int, float], kept_percent: int = DEFAULT_LIMITS.mps_places_kept_percent
) -> dict[int, int]:
    """By vGPU (its key), how many of ``most`` places are kept for it. ``shares``: parts of the GPU, 0 … 1, in the order
    in which the vGPUs came. The sum is at most ``most``. Each vGPU has at least one, if there are at most ``most``
    vGPUs."""
    first = dict.fromkeys(list(shares)[:most], 1)
    left = most - len(first)
    total = max(1.0, sum(shares.values()))
    found = {}
    for key, share in shares.items():
        more = min(left, max(0, int(most * kept_percent / 100 * share / total) - 1)) if key in first else 0
        left -= more
        found[key] = first.get(key, 0) + more
    return found


def has_place(key: int, used: Mapping[int, int], kept: Mapping[int, int], most: int) -> bool:
    """Whether one more process of vGPU ``key`` has a place. ``used``: processes of each vGPU, the newcomer among them;
    ``kept``: as ``keep_places`` says. Without ``kept`` (a server of an older release) the sum alone counts."""
    if sum(used.values()) > most:
        return False
    mine = used.get(key, 0)
    others = sum(max(used.get(one, 0), kept.get(one, 0)) for one in (used.keys() | kept.keys()) - {key})
    return mine <= kept.get(key, 0) or mine + others <= most
