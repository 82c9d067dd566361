"""A small CUDA program without dependencies: loads a GPU in one of a few ways and counts what it got done.

It calls ``libcuda.so.1`` by ctypes and runs the same on a simulated GPU and on a real one.
"""
