"""Where a new vGPU goes: on one box, in a cluster of ten thousand GPUs, and in the simulator.

The functions are pure: no I/O and no clock.

``state``     what a request asks for, what a node has left, and the node after a placement
``mix``       the sizes that were asked for lately, and what of a node those sizes could not use
``policies``  rules that rank placements; one file and one entry each
``fleet``     many nodes: it groups equal ones, so a decision costs as much as there are different ones

A box with two GPUs. 40 % of the time and 8 GiB are asked for; ``pack`` takes the fuller GPU, ``spread`` the other:

>>> from vgpu.placement import POLICIES, Fleet, Gpu, Kind, Request, Room
>>> GIB = 2**30
>>> box = Kind("H200", memory_bytes=140 * GIB)
>>> gpus = (Gpu(1_000_000, 140 * GIB), Gpu(500_000, 70 * GIB))
>>> wanted = Request(time_ppm=400_000, memory_bytes=8 * GIB)
>>> for name in ("pack", "spread"):
...     fleet = Fleet(POLICIES[name], [Room(box, gpus)])
...     print(name, fleet.place(wanted).gpus)
pack (1,)
spread (0,)

What does not fit is refused with the reason:

>>> full, large = Fleet(POLICIES["fit"], [Room(box, gpus[1:])]), Request(time_ppm=600_000)
>>> full.place(large) or full.why(large)
'60 % of a GPU asked for; the emptiest of 1 has 50 %'
"""

from vgpu.placement.fleet import Fleet, Offer, Placement
from vgpu.placement.mix import Mix
from vgpu.placement.policies import POLICIES, Policy
from vgpu.placement.state import Gpu, Kind, Request, Room

__all__ = ["POLICIES", "Fleet", "Gpu", "Kind", "Mix", "Offer", "Placement", "Policy", "Request", "Room"]
