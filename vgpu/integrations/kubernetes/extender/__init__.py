"""The scheduler extender: it chooses the GPU of a pod, for clusters without claims and for others' names of resources.

``asks``      what a pod asks for, under the names of aliyun's gpushare and of HAMi
``gpus``      the GPUs of a node, as the node's plugin publishes them
``assumed``   what is written at a pod: its GPU, its amounts, and whether the kubelet has allocated them
``book``      the decisions: which nodes fit, how well, and which GPU a pod gets
``messages``  what the scheduler sends and gets
``objects``   what is read and written at the API server
``process``   ``vgpuctl extender``: the book, the API server and HTTP together
``allocate``  the node's side: a device plugin that gives a container what the extender chose

A pod is *assumed* from the moment at which the extender has chosen its GPU. It is *assigned* once the kubelet has
allocated its devices. The annotations of pods are the only record of both.
"""
