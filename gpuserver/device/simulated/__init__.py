"""Devices without hardware: ``card`` in one process, ``mps`` for the simulated GPUs of a node."""
