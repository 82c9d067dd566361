"""Graphs that allocate, built node by node by the programs of tests."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p

MIB = 1 << 20
RESERVED = 2


class AllocationNode(ctypes.Structure):
    _fields_ = [
        ("type", c_int),
        ("handle_types", c_int),
        ("location_type", c_int),
        ("location", c_int),
        ("security", c_void_p),
        ("most_bytes", c_size_t),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 54),
        ("accesses", c_void_p),
        ("access_count", c_size_t),
        ("size", c_size_t),
        ("address", c_uint64),
    ]


class Built:
    """A graph whose nodes follow each other. ``call``: of the driver, by name; raises where that refuses."""

    def __init__(self, call: Callable[..., object]) -> None:
        self.call = call
        self.graph = c_void_p()
        self.last: list[c_void_p] = []
        call("cuGraphCreate", byref(self.graph), c_uint(0))

    def _behind(self, name: str, *arguments: object) -> None:
        node = c_void_p()
        before = (c_void_p * 1)(*self.last)
        self.call(name, byref(node), self.graph, before, c_size_t(len(self.last)), *arguments)
        self.last = [node]

    def take(self, size: int) -> int:
        node = AllocationNode(type=1, location_type=1, size=size)
        self._behind("cuGraphAddMemAllocNode", byref(node))
        return int(node.address)

    def give(self, address: int) -> None:
        self._behind("cuGraphAddMemFreeNode", c_uint64(address))

    def executable(self) -> c_void_p:
        made = c_void_p()
        self.call("cuGraphInstantiateWithFlags", byref(made), self.graph, c_uint64(0))
        return made

    def taken(self) -> int:
        """MiB that the device keeps for graphs."""
        value = c_uint64()
        self.call("cuDeviceGetGraphMemAttribute", c_int(0), c_int(RESERVED), byref(value))
        return value.value // MIB
