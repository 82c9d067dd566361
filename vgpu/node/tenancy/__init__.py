"""Which user gets a vGPU: admission at the node, quotas, the reclaim of idle vGPUs, and the queue."""
