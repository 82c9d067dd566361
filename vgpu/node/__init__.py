"""The node: the supervisor of the GPU Servers, and the link by which all other programs reach it."""
