#!/bin/bash
# tools/bench.sh: see --help below.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

usage() {
    cat <<'END'
tools/bench.sh [alloc | --help]

alloc: replays alone, on the simulated device, without the set-up: real allocation traces into FCDP's allocator and into models of PyTorch's.
For each the smallest budget in which it runs, and driver calls. A few seconds after the build.

Else sets everything up (once), then measures the allocator, on the simulated device and, where one answers, on the CUDA device:
real allocation traces replayed into FCDP's allocator and into models of PyTorch's, what a cache hit costs on one thread and on
two, what mapping and unmapping pages costs, and what moving a region costs beside plain copies. On a CUDA device also a GPT that is
trained under each allocator. Ends with what could not be measured here. About a minute after the set-up, ten more with a CUDA device.
END
}

what=${1:-all}
case $what in
    all | alloc) ;;
    -h | --help) usage; exit 0 ;;
    *) usage >&2; exit 2 ;;
esac

targets=(fcdp_simgpu fcdp-replay bench_heap bench_vrange bench_tiering_moves)
build_benches() {
    { cmake --preset release || { rm -rf build/release && cmake --preset release; }; } && cmake --build --preset release --target "${targets[@]}"
}

replay() { build/release/tools/replay/fcdp-replay "$@" tools/replay/traces/*.txt.gz tools/replay/traces/others/*.txt.gz; }

measure() {         # DRIVER
    export FCDP_DRIVER=$1
    echo
    echo "== Replays"
    replay || true
    echo
    echo "== Hits"
    build/release/tests/alloc/bench_heap
    echo
    echo "== Pages"
    build/release/tests/alloc/bench_vrange
    echo
    echo "== Regions"
    build/release/tests/tiering/bench_tiering_moves
}

if [ "$what" = alloc ]; then targets=(fcdp_simgpu fcdp-replay); else setup test; fi
must "The benchmarks: build" release-build build_benches
FCDP_SIM_LIBRARY=$(find "$ROOT/build/release/tools/simgpu" -name 'libfcdp_simgpu.so' | head -n 1)
export FCDP_SIM_LIBRARY
if [ "$what" = alloc ]; then
    FCDP_DRIVER=sim replay --budget 1.02 --calls 2
    exit
fi
echo
echo "On the simulated device:"
measure sim
echo
if cuda_device; then
    echo "On the CUDA device:"
    measure cuda
    echo
    echo "== Training"
    unset FCDP_DRIVER
    "$PY" tools/bench/training.py
else
    echo "No CUDA device can be reached (torch.cuda.is_available() is false): nothing above is of a GPU."
fi
