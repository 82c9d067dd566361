"""Kernels: modules that hold them, and launches."""
