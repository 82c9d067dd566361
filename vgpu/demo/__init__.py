"""``vgpuctl demo``: two vGPUs beside each other, measured by the work their programs finish."""
