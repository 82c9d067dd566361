"""Sizes of vGPUs that follow their demand: readings and the time in, commands out. Pure.

``level``    the level of a demand, from readings that vary (a Kalman filter)
``size``     the size that one vGPU's demand needs, between its bounds
``plan``     all vGPUs of a node: which sizes change, which vGPU moves, which one needs a replica
``advise``   a size for a vGPU from what was observed of it, by the same thresholds

A vGPU's lower bound is its guarantee. It grows only into what its GPU has not promised to others. It gives up what it
does not use, so that others can grow or be created. ``vgpu.node.autoscaling`` reads and carries out.
"""

from vgpu.autoscale.plan import Command, Move, Plan, Reading, Replica, Resize, Room

__all__ = ["Command", "Move", "Plan", "Reading", "Replica", "Resize", "Room"]
