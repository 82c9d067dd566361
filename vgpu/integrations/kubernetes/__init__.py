"""Kubernetes: a claim of a pod is a vGPU of its node. ``process.py`` is what the DaemonSet runs."""
