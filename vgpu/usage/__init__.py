"""What vGPUs were promised and what they used: readings in, rows out (``account``), rows that age (``rows``), and why a
vGPU is as fast as it is (``why``). Pure; ``vgpu/node/usage.py`` samples and writes."""
