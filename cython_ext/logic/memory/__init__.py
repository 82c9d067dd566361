"""Decisions about memory: what a process owns, what an allocation costs, and what a free gives back."""
