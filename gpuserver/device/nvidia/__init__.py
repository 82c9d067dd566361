"""NVIDIA's GPUs: ``nvml`` reads them, ``mps`` partitions their SMs, ``checkpoint`` suspends processes on them."""
