"""Which vGPU holds the GPU, when, and for how long (docs/scheduling.md).

``interface``: what the runtime sees. ``leases``: events and commands. ``policy``: the constants. ``base``: both modes.
``account``, ``active_lease``, ``accounts``: what each vGPU was granted and used. ``kinds``: light and heavy vGPUs.
``virtual_time``, ``round_time``: what each is owed. ``quanta``: how long a lease is. ``limits``: when a vGPU may go on.
``run_queue``: vGPUs that want the GPU; ``gangs``, ``gang_rules``: groups over several GPUs, which the queue asks.
``events``: reports are recorded. ``publisher``: commands leave. ``standby``: leases that begin by themselves.
``temporal``: ``eevdf`` chooses, ``turns`` and ``shared_leases`` grant, ``sharing`` and ``allowances`` hold back.
``spatial``: ``side_by_side``, ``rounds``, ``round_choice``, and the ``card`` whose SMs they divide.
"""
