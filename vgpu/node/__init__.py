"""The node: supervisor of the GPU Servers, and the link by which everybody else talks to it."""
