"""What the GPU Server knows of hardware.

``base``       what each vendor provides, as Protocols: a device, a partitioner of its SMs, a checkpointer of processes
``vendors``    the one table of vendors
``nvidia``     NVML, the MPS daemon and the driver's checkpoint calls
``simulated``  the simulated MPS daemon; a card without hardware (``card``, ``profiles``) for the conformance suite
``claim``      one GPU Server for each GPU of the machine
``pidfd``      which process a signal or a checkpoint reaches

A new vendor is one folder beside ``nvidia`` and one entry in ``vendors``. CONTRIBUTING.md ("Another vendor") lists the
places that know NVIDIA by name until now.
tests/device/conformance holds each implementation against the Protocols. The hook (``cython_ext/hook``) knows CUDA
alone: programs of another driver need a hook of their own.
"""
