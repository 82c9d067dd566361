"""The simulated GPU: its engine (``*.pxd``), and the two driver libraries built from ``cuda/`` and ``nvml/``."""
