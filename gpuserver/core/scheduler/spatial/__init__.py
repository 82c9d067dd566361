"""Spatial mode: vGPUs hold parts of the SMs at the same time. ``rounds`` and ``round_choice`` choose, ``side_by_side``
grants, and ``card`` divides the SMs.
"""
