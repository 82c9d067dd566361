"""What the GPU Server knows of hardware.

``base``       what each vendor provides, as Protocols: a device, a partitioner of its SMs, a checkpointer of processes
``vendors``    the one table of vendors
``nvidia``     NVML, the MPS daemon and the driver's checkpoint calls
``simulated``  a card without hardware, the cards that it can stand for, and the simulated MPS daemon
``claim``      one GPU Server for each GPU of the machine
``pidfd``      which process a signal or a checkpoint reaches

A new vendor is one folder beside ``nvidia`` and one entry in ``vendors``, which ``gpuserver/__main__.py`` chooses.
tests/device/conformance holds each implementation against the Protocols. The hook (``cython_ext/hook``) knows CUDA
alone: programs of another driver need a hook of their own.
"""
