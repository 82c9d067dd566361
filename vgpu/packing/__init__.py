"""What a GPU has room for: memory by its sum, time by its sum, SMs by what can really be packed.

The functions are pure: no I/O and no clock, so GPU Servers, benchmarks and tests decide with the same code.

``admission``   whether one more vGPU fits a GPU; if not, why, and the largest vGPU that would
``partition``   how many SMs MPS grants for a percentage
``fractional``  packings of vGPUs on the SMs of one GPU, and φ, the least time that a packing takes
``knapsack``    the most valuable set of vGPUs whose SMs fit the GPU, and ``Work``, the bound of a search
``lending``     how memory that no vGPU was promised is divided among the vGPUs that may use it

A share (``vgpu/share.py``) is counted in parts per million of one GPU's time and in thousandths of a percent of its
SMs; memory is counted in bytes. docs/explanation/scheduling.md has the reasons ("Admission").

Temporal mode. Two vGPUs with half and 30 % of the time leave 20 % to a third:

>>> from vgpu.packing.admission import Demand, admit, fits, packing_ratio
>>> from vgpu.share import PPM, Mode, Share
>>> GIB = 2**30
>>> present = [Demand(Share(PPM * 50 // 100), 40 * GIB), Demand(Share(PPM * 30 // 100), 30 * GIB)]
>>> admit(Mode.TEMPORAL, 80 * GIB, present, Demand(Share(PPM * 20 // 100), 10 * GIB)) is None
True
>>> refusal = admit(Mode.TEMPORAL, 80 * GIB, present, Demand(Share(PPM * 25 // 100), 16 * GIB))
>>> refusal.reason
"16 GiB of memory asked for, 10 GiB of 80 GiB are left; 25% of the GPU's time asked for, 20% is left"
>>> refusal.largest_guarantee_ppm, refusal.largest_memory_bytes // GIB
(200000, 10)

Spatial mode. MPS grants whole steps of SMs, so a vGPU that asks for 30 % of an H200 gets 40 of its 132 SMs:

>>> from vgpu.packing.partition import partition
>>> granted = partition(30, sm_count=132)
>>> granted.granted_sms, granted.percent_text, granted.mpercent
(40, '30.31', 30303)

Three such vGPUs hold the GPU at the same time. Three vGPUs with 51 % of the SMs for half of the time do not fit,
although they cover only 76.5 % of the GPU: no two of them can run together.

>>> fits(Mode.SPATIAL, [Share(PPM, sm_mpercent=granted.mpercent)] * 3)
True
>>> wide = Share(PPM // 2, sm_mpercent=51_000)
>>> fits(Mode.SPATIAL, [wide, wide]), fits(Mode.SPATIAL, [wide, wide, wide])
(False, False)
>>> round(packing_ratio(Mode.SPATIAL, [wide, wide, wide]), 2)
1.5
>>> refusal = admit(Mode.SPATIAL, 80 * GIB, [Demand(wide)], Demand(wide))
>>> refusal.reason.partition("; ")[0]
'the guarantees together need 1.00 s of every second'
>>> refusal.largest_guarantee_ppm, refusal.largest_sm_mpercent
(450000, 49000)

So beside the first one, a vGPU fits with the same SMs for 45 % of the time, or with 49 % of the SMs all the time.
"""
