"""What happened on the GPU: meters for rates, usage records, traces, programs outside of vGPUs."""
