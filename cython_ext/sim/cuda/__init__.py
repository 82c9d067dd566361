"""The simulated ``libcuda.so.1``: all of these sources linked into one library without Python."""
