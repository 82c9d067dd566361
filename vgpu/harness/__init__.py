"""What ``vgpuctl demo`` and ``vgpuctl verify`` stand on: a node of their own, programs on it, and what these finish."""
