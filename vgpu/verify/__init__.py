"""``vgpuctl verify``: whether what vGPUs promise holds on this very GPU, each check beside one that must fail.

``run`` measures, ``judge`` decides (pure), ``report`` writes it down for people that did not see it.
"""
