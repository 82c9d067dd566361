#!/usr/bin/env bash
# What docs/reference/performance.md claims of a GPU, from a bare machine, in parts of up to ten minutes. With no PART: all of them,
# about two hours; the whole suite with all repeats: python -m benchmarks.suite --estimate
#
#     benchmarks/suite/evidence.sh [FOLDER [PART...]]    one log per part in FOLDER (default: evidence); PART: those alone
#
# REPEAT=4 WAYS=temporal before it: the shares so often, ours alone (10 min for one work); --merge puts several runs together.
# GPU=1 before it: the suite's parts and all nodes on that one; with a folder each, several GPUs can be at it side by side, once
# prepare.sh was sourced.
#
# The parts run one after the other, since a GPU has one GPU Server on a machine. FOLDER/all.tgz has everything, and is
# made anew after each part.
source "$(dirname "$0")/part.sh"

suite() { # NAME SECONDS OPTIONS…
    part "$1" "$2" python3 -m benchmarks.suite --gpu "${GPU:-0}" "${@:3}" --out "$out/$1"
}

suite pairs 200 --part pairs --works resnet50-train gemm4096 --splits 30/70 --seconds 20
part timeline 120 python3 -m benchmarks.experiments.timeline --gpu "${GPU:-0}" "$out/timeline"
for work in gemm4096 resnet50-train elementwise gemm2048 gemm16384 resnet50-infer1 resnet50-infer8 bert-infer graph long-kernel; do
    suite "shares-$work" $((300 * ${REPEAT:-1})) --part shares --works "$work" --repeat "${REPEAT:-1}" ${WAYS:+--ways $WAYS}
done
LINES_SHOWN=22
suite colocation 460 --part colocation --works resnet50-graph1 --seconds 10 --splits 30/70 20/80
suite colocation-host 460 --part colocation --works resnet50-infer1 --seconds 10 --splits 30/70 20/80
suite colocation-graph 380 --part colocation --works resnet50-graph1 --ways spatial --splits 30/70 --seconds 82    # 20,000 requests
suite colocation-eager 597 --part colocation --works resnet50-infer1 --ways spatial --splits 30/70 --seconds 205
suite packing 420 --part packing --works graph --seconds 5
suite mix 220 --part mix --seconds 6
suite percents 320 --part percents
suite sms 420 --part sms
suite launches 60 --part launch
suite pdl 60 --part pdl
suite handover 120 --part handover --seconds 30
suite native 120 --part native
suite gate 400 --part gate --seconds 120
LINES_SHOWN=12
part stopped 60 python3 -m pytest -q tests/gpu -k "gives_way and SIGSTOP"
LINES_SHOWN=4
part test-end-to-end 400 python3 -m pytest -q tests/gpu/test_end_to_end.py
part test-neighbours 100 python3 -m pytest -q tests/gpu/test_neighbours.py
part test-refill 150 python3 -m pytest -q -s tests/gpu/test_refill.py
part test-odd 400 python3 -m pytest -q tests/gpu/test_odd_arguments.py
part frameworks 400 python3 -m pytest -q tests/gpu/test_frameworks.py
part mps 120 python3 -m pytest -q tests/gpu/test_mps.py
part memory 240 python3 -m pytest -q -s tests/gpu/test_memory.py
part capacity 240 python3 -m pytest -q -s tests/gpu/test_capacity.py
part suspension 240 python3 -m pytest -q -s tests/gpu/test_suspension.py
part swapping 500 python3 -m benchmarks.experiments.swapping
part given-up 90 python3 -m pytest -q tests/gpu -k "gives_way and not SIGSTOP"
LINES_SHOWN=12
part siblings 120 python3 -m benchmarks.micro.siblings --gpu
part demo 60 python3 -m vgpu.ctl demo --duration 10s -o json
part verify 240 python3 -m vgpu.ctl verify --gpu "${GPU:-0}" --report "$out/verify.html" -o json
part kills 80 python3 -m benchmarks.micro.kills --gpu --gib 0 8 --rounds 4
part launch 40 python3 -m benchmarks.micro.launch --gpu
part trainer 60 python3 -m benchmarks.micro.trainer --gpu --repeat 2
part where 120 python3 -m benchmarks.experiments.launch_profile --gpu "${GPU:-0}"
part varying 180 python3 -m benchmarks.micro.varying --gpu
part gaps 120 python3 -m benchmarks.experiments.gaps --gpu "${GPU:-0}" --seconds 40
part asking 90 bash -c 'cc -O2 -pthread -o "$1" benchmarks/experiments/driver_call_cost.c -ldl && "$1"' asking "$(mktemp)"
part blocked 60 python3 -m benchmarks.experiments.blocking_calls
part taken 60 python3 -m benchmarks.experiments.allocation_granularity
