"""``vgpuctl top``: a node in a terminal. What is shown is decided by pure modules; ``app`` and ``feed`` do the rest."""
