"""The order of requests that wait for room. Pure.

``order``  which request is tried next, and the GPUs that are kept for requests that have waited for long
"""
