"""Work beside an open capture, on a real GPU: the hook sets markers in other streams meanwhile, without which nobody
sees a lease's work drain, and none of them ends the capture.

Run: ``REQUIRE_GPU=1 pytest -m gpu tests/gpu/test_captures.py``.
"""

from __future__ import annotations

import pytest

from benchmarks.node import Node
from tests.gpu.test_end_to_end import Sibling, last_json, run

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

CODE = """
    import ctypes, itertools, json, threading, time, torch
    from ctypes import byref, c_int, c_uint64, c_void_p
    driver = ctypes.CDLL("libcuda.so.1")
    def call(name, *arguments):
        return name, getattr(driver, name)(*arguments)
    def stream(flags):
        handle = c_void_p()
        assert driver.cuStreamCreate(byref(handle), flags) == 0
        return torch.cuda.ExternalStream(handle.value)
    def work(into):
        "For 0.2 s of the GPU's time: many leases."
        with torch.cuda.stream(into):
            for _ in range(1500):
                torch.mul(big, 2.0, out=result)
    big = torch.ones(1 << 26, device="cuda")
    result, small, captured = torch.empty_like(big), torch.ones(1000, device="cuda"), torch.zeros(1000, device="cuda")
    torch.mul(big, 2.0, out=result)
    torch.mul(small, 3.0, out=captured)
    torch.cuda.synchronize()
    failed = []
    others = "blocking", "non-blocking", "legacy"
    for flags, other, mode, threads in itertools.product((0, 1), others, (0, 1, 2), (0, 1)):
        if other == "legacy" and flags == 0:
            continue                             # the driver refuses that itself
        capture = stream(flags)
        beside = torch.cuda.default_stream() if other == "legacy" else stream(other == "non-blocking")
        graph, executable = c_void_p(), c_void_p()
        begun = call("cuStreamBeginCapture_v2", c_void_p(capture.cuda_stream), mode)
        with torch.cuda.stream(capture):
            torch.mul(small, 3.0, out=captured)
        if threads:
            thread = threading.Thread(target=work, args=(beside,))
            thread.start()
            thread.join()
        else:
            work(beside)
        ended = call("cuStreamEndCapture", c_void_p(capture.cuda_stream), byref(graph))
        made = call("cuGraphInstantiateWithFlags", byref(executable), graph, c_uint64(0))
        captured.zero_()
        torch.cuda.synchronize()
        launched = call("cuGraphLaunch", executable, c_void_p(capture.cuda_stream))
        torch.cuda.synchronize()
        right = ("value", int(captured.sum().item()) - 3000), ("beside", int(result[-1].item()) - 2)
        failed += [
            [flags, other, mode, threads, *step] for step in (begun, ended, made, launched, *right) if step[1]
        ]
    print(json.dumps(failed))
"""


def test_a_thread_works_beside_its_own_and_anothers_capture(node: Node) -> None:
    """In each kind of stream, under each capture mode, for many leases: it ends, and the captures are whole."""
    sibling = Sibling(node, 60, "--sm", "70", "--mem", "20G")
    assert last_json(run(node, CODE, "--sm", "30", "--mem", "8G")) == []
    assert sibling.steps() > 0
