"""What the GPU Server knows of hardware: NVML through pynvml, and the MPS daemon."""
