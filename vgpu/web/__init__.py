"""The web dashboard and the HTTP API: a program that asks a node over its control socket, as ``vgpuctl`` does."""
