#!/bin/bash
# tools/gpu.sh: see --help below.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

usage() {
    cat <<'END_OF_USAGE'
tools/gpu.sh --bundle [--no-setup] [--bundle-dir DIR]        where things are built
tools/gpu.sh [OPTIONS]                                       where the GPU is

Makes one report of what only a GPU can show: the C tests on the real driver; what mapping, page-locked copies,
fingerprints and differences cost; NCCL, FCDP's and PyTorch's own with fcdp_alloc; FSDP2 plain and with FCDP=1 as
2 nodes x 2 ranks that share the device, compared bit for bit; the same with parameters that exceed the device
budget, of which a part stays on the device; LoRA with DPO; the allocator beside PyTorch's two.

--bundle builds what the report needs into a folder: the wheel, and C programs for glibc 2.28. Carry it, with this
checkout, to a machine with a GPU, its driver, Python 3.10 or later, and torch 2.8 or later with CUDA. No compiler,
network or package index is needed there, and nothing is installed outside of --out.

  --no-setup         uses the wheel in dist/ and the tools in .venv as they are
  --bundle-dir DIR   the bundle (default build/gpu-bundle)
  --out DIR          where report.txt, report.json and the sections' logs go (default build/gpu-report); it is
                     emptied first
  --minutes N        the time limit for everything (default 9); each section has its share, and what earlier ones left
  --only NAME,...    runs these sections alone
  --list             lists the sections, with their shares of the time
  --simulated        runs everything on the simulated device and CPUs, to see that it runs: no figure is of a GPU
  --help             this text
  --version          the version of this checkout

FCDP_PYTHON names the Python to use (default: python3).
Exit status: 0 every section succeeded; 1 one did not; 2 wrong usage; 3 there is no GPU (one line says so).
END_OF_USAGE
}

# What runs there: the C tests that take any driver, the benches, the simulated devices.
TARGETS=(test_alloc_pages test_alloc_pages_blocks test_alloc_vrange test_comm_fingerprint_device test_comm_codec_device bench_heap bench_tiering_moves bench_mapping bench_host_map bench_copies bench_sleep one_rank_nccl
         fcdp-replay fcdp_simgpu fcdp_simnccl)

programs_build() {  # DIR: stripped, as the debugging information is most of their size
    local cmocka
    PYTHON=$PY bash cmake/zig.sh x86_64 &&
    cp /usr/include/cmocka*.h build/zig-x86_64/include/ &&
    cmocka=$(find /usr/lib /usr/lib64 -name libcmocka.so 2>/dev/null | head -n 1) && [ -n "$cmocka" ] &&
    cmake -S . -B build/zig-x86_64/gpu -G Ninja --toolchain "$ROOT/build/zig-x86_64/toolchain.cmake" -DCMAKE_BUILD_TYPE=RelWithDebInfo \
        -DFCDP_TEST_DRIVER=cuda -DCMAKE_SKIP_RPATH=ON -DCMAKE_EXE_LINKER_FLAGS=-s -DCMOCKA_LIBRARY="$cmocka" &&
    cmake --build build/zig-x86_64/gpu --target "${TARGETS[@]}" &&
    mkdir -p "$1/bin" "$1/lib" && cp -L "${cmocka%/*}/libcmocka.so.0" "$1/lib/" || return 1
    local name
    for name in "${TARGETS[@]}"; do
        case $name in
            fcdp_sim*) find build/zig-x86_64/gpu -name "lib$name.so" -exec cp {} "$1/lib/" \; ;;
            *) find build/zig-x86_64/gpu -name "$name" -type f -perm -u+x -exec cp {} "$1/bin/" \; ;;
        esac
    done
    [ "$(find "$1/bin" "$1/lib" -type f | wc -l)" = $((${#TARGETS[@]} + 1)) ]
}

bundle() {          # DIR SETS-UP
    # shellcheck source=tools/setup.sh
    source "$ROOT/tools/setup.sh"
    [ "$(uname -m)" = x86_64 ] || fail "A bundle is built on x86_64, for x86_64."
    if [ "$2" = 1 ]; then setup test
    elif [ -x "$PY" ] && compgen -G 'dist/fcdp-*_x86_64.whl' >/dev/null; then PATH=$VENV/bin:$PATH
    else fail "No .venv or no wheel in dist/: tools/setup.sh makes them."
    fi
    rm -rf "$1"
    mkdir -p "$1"
    step "C programs for glibc 2.28" gpu-bundle programs_build "$1"
    cp dist/fcdp-*_x86_64.whl "$1/"
    git rev-parse HEAD >"$1/commit" 2>/dev/null || echo unknown >"$1/commit"
    echo "$1: $(du -sh "$1" | cut -f1)"
}

what=run sets_up=1 bundle_dir=$ROOT/build/gpu-bundle
options=()
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) usage; exit 0 ;;
        --version) source "$ROOT/tools/setup.sh"; setup_version; exit 0 ;;
        --bundle) what=bundle; shift ;;
        --no-setup) sets_up=0; shift ;;
        --bundle-dir) bundle_dir=$(realpath -m "${2:?--bundle-dir needs a folder}"); shift 2 ;;
        --out | --minutes | --only) [ $# -ge 2 ] || { usage >&2; exit 2; }; options+=("$1" "$2"); shift 2 ;;
        --list | --simulated) options+=("$1"); shift ;;
        *) usage >&2; exit 2 ;;
    esac
done
if [ $what = bundle ]; then
    [ ${#options[@]} -eq 0 ] || { usage >&2; exit 2; }
    bundle "$bundle_dir" $sets_up
    exit
fi
python=${FCDP_PYTHON:-python3}
command -v "$python" >/dev/null || { echo "tools/gpu.sh: no $python; FCDP_PYTHON names another Python" >&2; exit 2; }
exec "$python" "$ROOT/tools/gpu/main.py" --bundle-dir "$bundle_dir" "${options[@]}"
