"""Rules that size a vGPU by its demand, replayed on traces."""
