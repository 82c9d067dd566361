"""A data-parallel job for tests/gpu/test_gangs.py: matrix products and an all-reduce, step after step, over two GPUs.

    python tests/gpu/gang_job.py processes RANK PORT SECONDS      one rank; it sees one device
    python tests/gpu/gang_job.py threads - - SECONDS              both ranks; this process sees two devices

Says READY, waits for a line, works for SECONDS, and prints as JSON how many steps it did in how many seconds, and
whether every sum was right. Stands alone: it is run by whichever Python has PyTorch.
"""

import json
import os
import sys
import time

SIZE, PRODUCTS, BUCKET = 4096, 16, 16 << 20


def products(torch, device):
    """Some milliseconds of work, as a layer's backward pass has it: (run it, its bucket to reduce)."""
    a = torch.randn(SIZE, SIZE, device=device, dtype=torch.bfloat16)
    b = torch.empty_like(a)
    bucket = torch.empty(BUCKET, device=device)

    def run(value):
        for _ in range(PRODUCTS):
            torch.mm(a, a, out=b)
        bucket.fill_(value)

    return run, bucket


def begin(warm):
    for _ in range(3):
        warm()
    print("READY", flush=True)
    sys.stdin.readline()
    return time.monotonic()


def ranks_as_processes(torch, rank, port, seconds):
    import torch.distributed as dist

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    device = torch.device("cuda", 0)
    dist.init_process_group("nccl", rank=rank, world_size=2, device_id=device)
    run, bucket = products(torch, device)
    steps, right = 0, True

    def step(last=0.0):
        run(rank + 1.0)
        bucket[-1] = last
        dist.all_reduce(bucket)
        return bucket[[0, -1]].tolist()

    began = begin(step)
    while True:
        # The last word is how the ranks agree on an end: one of them has seen the time.
        value, ended = step(float(time.monotonic() - began > seconds))
        steps += 1
        right &= value == 3.0
        if ended:
            break
    took = time.monotonic() - began
    dist.destroy_process_group()
    return steps, took, right


def ranks_as_threads_of_one_process(torch, seconds):
    devices = [torch.device("cuda", 0), torch.device("cuda", 1)]
    made = [products(torch, device) for device in devices]
    buckets = [bucket for _, bucket in made]
    steps, right = 0, True

    def step():
        for value, (run, _) in enumerate(made, 1):
            run(float(value))
        torch.cuda.nccl.all_reduce(buckets)
        return [bucket[0].item() for bucket in buckets]

    began = begin(step)
    while time.monotonic() - began < seconds:
        right &= step() == [3.0, 3.0]
        steps += 1
    return steps, time.monotonic() - began, right


def main():
    import torch

    how, rank, port, seconds = sys.argv[1:]
    if how == "processes":
        steps, took, right = ranks_as_processes(torch, int(rank), port, float(seconds))
    else:
        steps, took, right = ranks_as_threads_of_one_process(torch, float(seconds))
    print(json.dumps({"steps": steps, "seconds": took, "right": right}), flush=True)


if __name__ == "__main__":
    main()
