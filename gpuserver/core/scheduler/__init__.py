"""Which vGPU holds the GPU, when, and for how long (docs/scheduling.md).

``leases``: events and commands. ``policy``: the constants. ``account``: one vGPU's virtual time, bucket and leases.
``run_queue``, ``base``: vGPUs that want the GPU; what both modes do. ``eevdf``, ``temporal``: temporal mode.
``kinds``, ``sharing``: light vGPUs side by side. ``rounds``: spatial mode. ``gangs``: groups over several GPUs.
"""
