"""Kubernetes without a cluster: the kubelet's side is ours, over its real sockets; the API server is emulated."""
