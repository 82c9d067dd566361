"""The decisions of a GPU Server, without I/O: events and the time in, commands out.

``scheduler``: which vGPU holds the GPU, when, and for how long
``admission``: which vGPUs a GPU has room for, and their owners
``states``: a vGPU whose memory is in the host's, or that moves, or that is parked
``observe``: what happened, as figures, usage records and traces

What a GPU has room for is decided by ``vgpu/packing``; of that ``scheduler`` uses ``knapsack`` alone.
"""
