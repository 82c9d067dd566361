"""What a share means: the one place that states the formula.

It is the last part of the help of each command that takes a share (vgpu/ctl), and what gpuserver/core computes:
``registry.py::share_of`` the first two lines, ``temporal.py`` and ``spatial.py`` the rest. docs/policy.md has the
reasons.
"""

from __future__ import annotations

from typing import Final

MEANING: Final = """\
What a share means. Of the GPU's time, a vGPU is guaranteed r and gets l at most:

    temporal  r = sm × quota-request  l = sm × quota-limit  in turns
    spatial   r = quota-request       l = quota-limit       on sm % of the SMs

With --burst l is 1; in spatial mode its programs run on all SMs then, and those that burst, of one priority, run
together as MPS has it, whether or not their percentages fit.

In temporal mode vGPUs that need the GPU for half of their time or less hold it side by side, while no other wants it.

Used time moves its virtual time v by held / r, and a vGPU that is owed time goes first, the earliest deadline d before
others; a turn lasts until v meets d, about period × r / Σ r. The limit is a bucket: it fills with l × time and is
emptied by computing. Priority orders the vGPUs that are owed time, and adds nothing.

Source: Stoica, Abdel-Wahab: Earliest Eligible Virtual Deadline First (1995); where widths have to be packed, MaxWeight
scheduling (Tassiulas, Ephremides 1992).
"""
