"""The simulated ``libnvidia-ml.so.1``."""
