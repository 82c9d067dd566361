"""Devices, contexts and the process: what a program has before it has work."""
