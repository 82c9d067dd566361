#!/usr/bin/env bash
# What docs/performance.md claims of a GPU, in one go, from a bare machine: about fifteen minutes. The whole suite, in
# parts: python -m benchmarks.gpu --estimate
#
#     benchmarks/gpu/evidence.sh [FOLDER [PART...]]    one log per part in FOLDER (default: evidence); PART: those alone
#
# Parts that measure run alone; tests that only look at what happens run side by side.
cd "$(dirname "$0")/../.." || exit
out=${1:-evidence}
wanted=" ${*:2} "
mkdir -p "$out"
source benchmarks/gpu/prepare.sh
export REQUIRE_GPU=1

part() { # NAME SECONDS COMMAND…
    local name=$1 seconds=$2 began=$SECONDS
    shift 2
    [[ $wanted =~ ^\ *$ || $wanted == *" $name "* ]] || return 0
    timeout -k 5 "$seconds" "$@" >"$out/$name.log" 2>&1
    local code=$?
    echo "=== $name: exit $code after $((SECONDS - began)) s"
    tail -n "${LINES_SHOWN:-12}" "$out/$name.log"
}

nvidia-smi --query-gpu=name,driver_version,power.limit --format=csv,noheader
part shares-resnet 200 python3 -m benchmarks.gpu --part shares pairs --works resnet50-train --splits 30 30/70 --out "$out/resnet"
part shares-gemm 200 python3 -m benchmarks.gpu --part shares pairs --works gemm4096 --splits 30 30/70 --out "$out/gemm"
part shares-elementwise 200 python3 -m benchmarks.gpu --part shares pairs --works elementwise --splits 30 30/70 --out "$out/elementwise"
part stopped 60 python3 -m pytest -q tests/gpu -k "gives_way and SIGSTOP"
LINES_SHOWN=4
for tests in native expandable cudaMallocAsync smi second_thread hook_thread spatial; do
    part "test-$tests" 100 python3 -m pytest -q tests/gpu -k "$tests" &
done
wait
LINES_SHOWN=12
part demo 60 python3 -m vgpu.ctl demo --duration 10s -o json
part kills 80 python3 -m benchmarks.kills --gpu --gib 0 8 --rounds 4
part launch 40 python3 -m benchmarks.launch --gpu
part trainer 60 python3 -m benchmarks.trainer --gpu --repeat 2
part blocked 60 python3 -m benchmarks.gpu.blocked
part given-up 90 python3 -m pytest -q tests/gpu -k "gives_way and not SIGSTOP"
