"""Which vGPU holds the GPU, when, and for how long (docs/explanation/scheduling.md).

``interface``: what the runtime sees. ``leases``: events and commands. ``policy``: the constants. ``base``: both modes.
``account``, ``active_lease``, ``accounts``: what each vGPU was granted and used. ``kinds``: light and heavy vGPUs.
``quanta``: how long a lease is. ``limits``: when a vGPU may go on.
``run_queue``: vGPUs that want the GPU; ``gangs``, ``gang_rules``: groups over several GPUs, which the queue asks.
``events``: reports are recorded. ``publisher``: commands leave. ``standby``: leases that begin by themselves.
``temporal`` and ``spatial``: the modes, each with its scheduler and its clock (what each vGPU is owed).
"""
