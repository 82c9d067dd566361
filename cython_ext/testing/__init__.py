"""Native code for tests and benchmarks only. A checkout builds it; a wheel does not contain it.

* ``bindings_logic``, ``bindings_memory``, ``bindings_wire``: the logic that runs inside applications, for Python.
* ``bindings_lease_table``: the lease table of the dispatcher, for Python.
* ``fake_peer``: emulated hooks and an emulated relay, which use the pages as the real ones do.

No product code imports this package.
"""
