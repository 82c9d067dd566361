#!/usr/bin/env bash
# What docs/reference/performance/servers.md claims, from a bare machine, in parts of up to ten minutes. With no PART: all.
#
#     benchmarks/servers/evidence.sh [FOLDER [PART...]]    one log per part in FOLDER (default: evidence); PART: those alone
#
# GPU=1 before it: that GPU. Parts without --host-memory need a host of 256 GiB. `llama` needs llama-cpp-python and gguf,
# built for this GPU: CMAKE_ARGS=-DGGML_CUDA=on pip install llama-cpp-python gguf
source "$(dirname "$0")/../suite/part.sh"
LINES_SHOWN=40

# Which of a move's time goes into mappings, and which into copies, is in the hook's log.
part moves 300 env VGPU_HOOK_LOG="$(realpath "$out")/hook.log" python3 -m benchmarks.servers --rounds 2 --modes suspended
for run in 1 2 3 4 5; do
    part "suspended-$run" 300 python3 -m benchmarks.servers --rounds 4 --modes suspended
done
part neighbour 300 python3 -m benchmarks.servers --servers 3 --rounds 4 --modes suspended --neighbour
part turns 300 python3 -m benchmarks.servers --rounds 4 --modes turns
part host-96 400 python3 -m benchmarks.servers --rounds 2 --modes turns --host-memory 96G --filler 58G
part llama 500 python3 -m benchmarks.servers --servers 2 --rounds 4 --modes suspended \
    --program benchmarks/servers/llama_server.py --layers 8 --cache-tokens 32768
part alone 400 python3 -m benchmarks.servers.alone --rounds 8 --tokens 32
part slo 200 python3 -m benchmarks.experiments.slo --rounds 2 --seconds 8
part hash 100 python3 -m benchmarks.experiments.piece_hash
part mappings 200 python3 -m benchmarks.experiments.physical_memory
part arrival 100 python3 -m benchmarks.experiments.chunk_arrival
part copies 100 python3 -m benchmarks.experiments.copy_sizes --rounds 3
LINES_SHOWN=6
part at-start 580 python3 -m pytest -q tests/gpu/test_servers_at_start.py
part programs 400 python3 -m pytest -q -s tests/gpu/test_swapped_programs.py
part groups 400 env REQUIRE_GPUS=2 python3 -m pytest -q -s tests/gpu/test_swapped_groups.py
