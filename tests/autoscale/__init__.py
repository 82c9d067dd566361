"""Tests of vgpu.autoscale."""
