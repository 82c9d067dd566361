"""The relay of a broker: it merges the wants of a vGPU's processes into one."""
