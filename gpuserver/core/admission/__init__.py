"""The vGPUs of one GPU, and the request that each was made for. ``vgpu/packing`` decides whether one more fits."""
