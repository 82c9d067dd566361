"""Several boxes without an engine: which nodes there are, how each is reached, and which gets a new vGPU.

``file``    the file of ``vgpuctl --nodes FILE``
``reach``   one node, over the HTTP API of its dashboard or over SSH
``choose``  the order in which nodes are asked for a new vGPU
"""
