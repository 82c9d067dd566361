"""The programs that share the GPU in a measurement."""
