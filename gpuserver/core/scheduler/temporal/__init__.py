"""Temporal mode: vGPUs hold the GPU one after the other, light ones side by side. ``eevdf`` chooses, ``turns`` and
``shared_leases`` grant, ``sharing`` and ``allowances`` hold back.
"""
