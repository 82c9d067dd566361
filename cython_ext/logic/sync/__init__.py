"""Locks in shared memory that survive the death of their holder, and the mutex of one process."""
