"""When pydantic builds the models of messages: as they are imported, or each at its first use.

Building all of them takes 60 ms, and a command such as ``vgpuctl ls`` uses three. Before pydantic 2.14 two threads must
not build one model at its first use, so a process that may have threads builds them as it imports them.
"""

from __future__ import annotations

deferred = False
"""Whether the models that are imported from now on are built at their first use."""
