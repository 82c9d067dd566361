"""Placement rules on public traces, on mixes of two resources, and at ten thousand GPUs."""
