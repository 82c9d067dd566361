"""The order of requests that wait for room. Pure.

``order``      which request is tried next, and the GPUs that are kept for requests that have waited for long
``preempt``    which vGPUs are suspended for a request of higher priority
``preempted``  what is known of such a vGPU
``rules``      the section ``[queue]`` of the configuration
"""
