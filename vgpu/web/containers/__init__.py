"""Containers on the dashboard: those with a vGPU, by the HTTP API of their engine."""
