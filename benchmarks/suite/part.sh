# Sourced by the scripts evidence.sh, which were called with [FOLDER [PART...]]: `part`, for one measurement with a log in
# FOLDER. A relative FOLDER is one of the project's root, which is the current folder from here on.
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit
out=${1:-evidence}
wanted=" ${*:2} "
mkdir -p "$out"
[[ ${PREPARED:-} ]] || source benchmarks/suite/prepare.sh
export REQUIRE_GPU=1

part() { # NAME SECONDS COMMAND…
    local name=$1 seconds=$2 began=$SECONDS
    shift 2
    [[ $wanted =~ ^\ *$ || $wanted == *" $name "* ]] || return 0
    timeout -k 5 "$seconds" "$@" >"$out/$name.log" 2>&1
    local code=$?
    echo "=== $name: exit $code after $((SECONDS - began)) s"
    tail -n "${LINES_SHOWN:-12}" "$out/$name.log"
    tar -C "$out" --exclude all.tgz -czf "$out/all.tgz" .
}

nvidia-smi --query-gpu=name,driver_version,power.limit --format=csv,noheader
