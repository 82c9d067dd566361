"""Frameworks in a vGPU of 8 GiB: all of it can be had, but for what their context takes, and then they run out of
memory in their own words, and go on. ``REQUIRE_GPU=1 pytest -s -m gpu tests/gpu/test_capacity.py`` prints figures."""

from __future__ import annotations

import pytest

from benchmarks.node import Node
from tests.gpu.test_end_to_end import GIB, last_json, run
from tests.gpu.test_frameworks import needs

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

MEMORY = """
    import ctypes, json, time
    def memory_info():
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        assert ctypes.CDLL("libcuda.so.1").cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
        return free.value, total.value
    def fill(take, error):
        '''Blocks of 256 MiB, and ever smaller ones for the rest. What it got in bytes, how often it was refused.'''
        held, got, refused = [], 0, 0
        for mib in (256, 64, 16, 2):
            while True:
                try:
                    held.append(take(mib << 20))
                except error:
                    refused += 1
                    break
                got += mib << 20
        return held, got, refused
    def say(**figures):
        print(json.dumps(figures))
    SETTLE_S = 2.5     # what contexts and modules take is read once a second
"""

TORCH = (
    MEMORY
    + """
    import torch
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    (a @ a).sum().backward()      # a warm-up step: modules, cuBLAS
    del a
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    time.sleep(SETTLE_S)
    free, total = memory_info()
    held, got, refused = fill(lambda size: torch.empty(size, dtype=torch.uint8, device="cuda"), torch.OutOfMemoryError)
    left, _ = memory_info()
    del held
    torch.cuda.empty_cache()
    goes_on = torch.ones(1000, device="cuda").sum().item() == 1000
    say(free=free, total=total, got=got, left=left, refused=refused, goes_on=goes_on)
"""
)

CUPY = (
    MEMORY
    + """
    import cupy as cp
    {pool}
    a = cp.random.random((4096, 4096), dtype=cp.float32)
    (a @ a).sum()
    del a
    cp.cuda.Device().synchronize()
    pool = cp.cuda.get_allocator().__self__
    pool.free_all_blocks()
    time.sleep(SETTLE_S)
    free, total = memory_info()
    held, got, refused = fill(lambda size: cp.empty(size, dtype=cp.uint8), cp.cuda.memory.OutOfMemoryError)
    left, _ = memory_info()
    del held
    pool.free_all_blocks()
    goes_on = float(cp.ones(1000).sum()) == 1000
    say(free=free, total=total, got=got, left=left, refused=refused, goes_on=goes_on)
"""
)

JAX = (
    MEMORY
    + """
    import jax, jax.numpy as jnp
    x = jax.random.normal(jax.random.key(0), (2048, 2048), dtype=jnp.bfloat16)
    jax.jit(lambda m: jnp.tanh(m @ m))(x).block_until_ready()
    del x
    time.sleep(SETTLE_S)
    free, total = memory_info()
    limit = jax.local_devices()[0].memory_stats()["bytes_limit"]
    zeros = jax.jit(lambda n: jnp.zeros(n, dtype=jnp.uint8), static_argnums=0)
    held, got, refused = fill(lambda size: zeros(size).block_until_ready(), jax.errors.JaxRuntimeError)
    left, _ = memory_info()
    del held
    goes_on = float(jnp.ones(1000).sum()) == 1000
    say(free=free, total=total, got=got, left=left, refused=refused, goes_on=goes_on, limit=limit)
"""
)


def filled(node: Node, code: str, **environment: str) -> dict[str, int]:
    seen: dict[str, int] = last_json(run(node, code, "--sm", "50", "--mem", "8G", **environment))
    print(seen)
    assert seen["total"] == 8 * GIB
    assert seen["refused"] >= 4
    assert seen["goes_on"]
    return seen


@pytest.mark.parametrize("backend", ["native", "expandable_segments:True", "backend:cudaMallocAsync"])
def test_torch_gets_all_of_it(node: Node, backend: str) -> None:
    seen = filled(node, TORCH, **({} if backend == "native" else {"PYTORCH_ALLOC_CONF": backend}))
    assert seen["got"] >= 0.99 * seen["free"]


@pytest.mark.parametrize("pool", ["", "cp.cuda.set_allocator(cp.cuda.MemoryAsyncPool().malloc)"])
def test_cupy_gets_all_of_it(node: Node, pool: str) -> None:
    needs("cupy", "cupy-cuda13x")
    seen = filled(node, CUPY.format(pool=pool))
    assert seen["got"] >= 0.99 * seen["free"]


def test_jax_gets_all_of_it(node: Node) -> None:
    """As it goes, without taking a part beforehand."""
    needs("jax", "jax[cuda13]")
    seen = filled(node, JAX, XLA_PYTHON_CLIENT_PREALLOCATE="false", XLA_PYTHON_CLIENT_MEM_FRACTION="1.0")
    assert seen["free"] - seen["left"] >= 0.99 * seen["free"] or seen["got"] >= 0.99 * seen["free"]


def test_jax_takes_its_part_of_the_vgpu_beforehand(node: Node) -> None:
    """Three quarters of what is free, of the vGPU, not of the card."""
    needs("jax", "jax[cuda13]")
    seen = filled(node, JAX)
    assert 0.6 * 8 * GIB < seen["limit"] < 0.76 * 8 * GIB
    assert seen["got"] >= 0.98 * seen["limit"]
