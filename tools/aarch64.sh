#!/bin/bash
# tools/aarch64.sh: see --help below.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

usage() {
    cat <<'END'
tools/aarch64.sh [--wheel | --tests | --help | --version]

Builds dist/fcdp-*-manylinux_2_28_aarch64.whl (for Grace) on this machine, with zig (cmake/zig.sh). Then it tests the
same compiler's code under qemu-user: the C tests with every internal check (FCDP_CHECK=3), and Debian's Python for
arm64 with the wheel's extension on the simulated GPU. qemu-user and the arm64 libraries are Debian's (trixie),
unpacked into build/zig-aarch64; nothing is installed. 20 minutes on two cores.

  --wheel   builds the wheel alone
  --tests   runs the tests under qemu-user alone
  --help    this text

Emulation tests the code and its calls of the system and of the C library. It does not test pages of 64 KiB, which
many kernels on Grace have, because qemu-user has the host's. It hardly tests the order of memory accesses, because
x86's is stronger. Two tests skip: qemu-user makes up /proc/self/maps and ignores MADV_DONTFORK. alloc_replay is left
out: it takes minutes, and its result depends on no architecture. Three programs that start themselves again need
user namespaces with binary formats of their own (Linux 6.7), and are left out elsewhere.

Exit status: 0 when nothing failed. Logs are in build/logs.
END
}

what=all
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) usage; exit 0 ;;
        --version) setup_version; exit 0 ;;
        --wheel | --tests) what=${1#--}; shift ;;
        *) usage >&2; exit 2 ;;
    esac
done

DIR=$ROOT/build/zig-aarch64
SYSROOT=$DIR/sysroot
# Version 9 at least: older ones keep a record for every page of a reserved address range, gigabytes of them here.
QEMU=$DIR/qemu/usr/bin/qemu-aarch64
SUITE=trixie
KEYRING=/usr/share/keyrings/debian-archive-keyring.gpg

# debian_unpack ARCH FOLDER APT-COMMAND PACKAGE...: by apt with lists of its own. No root, and the system's lists stay as they are.
debian_unpack() {
    local arch=$1 folder=$2 tmp=$DIR/apt opts f
    rm -rf "$tmp" "$folder" "$folder.new"
    mkdir -p "$tmp/lists/partial" "$tmp/archives/partial" "$tmp/sources" "$folder.new"
    : >"$tmp/status"
    echo "deb [signed-by=$KEYRING] http://deb.debian.org/debian $SUITE main" >"$tmp/sources/debian.list"
    opts=(-q -o APT::Architecture="$arch" -o APT::Architectures::="$arch" -o Dir::Etc::sourcelist=/dev/null -o Dir::Etc::sourceparts="$tmp/sources"
          -o Dir::State::Lists="$tmp/lists" -o Dir::State::status="$tmp/status" -o Dir::Cache="$tmp" -o Dir::Cache::archives="$tmp/archives"
          -o Debug::NoLocking=1 -o APT::Sandbox::User= -o Acquire::Languages=none -o Acquire::Retries=2)
    (cd "$tmp/archives" && apt-get "${opts[@]}" update && apt-get "${opts[@]}" "${@:3}") || return 1
    ln -s usr/lib "$folder.new/lib"           # as Debian's base-files has it
    for f in "$tmp"/archives/*.deb; do dpkg-deb -x "$f" "$folder.new" || return 1; done
    rm -rf "$tmp"
    mv "$folder.new" "$folder"
}

emulator() {
    [ -x "$QEMU" ] || debian_unpack "$(dpkg --print-architecture)" "$DIR/qemu" download qemu-user || return 1
    # With all that these depend on.
    [ -d "$SYSROOT" ] || debian_unpack arm64 "$SYSROOT" install -y --no-install-recommends --download-only libcmocka-dev python3
}

tests_build() {
    cp "$SYSROOT"/usr/include/cmocka*.h "$DIR/include/" &&
    cmake -S . -B "$DIR/tests" -G Ninja --toolchain "$DIR/toolchain.cmake" -DCMAKE_BUILD_TYPE=RelWithDebInfo -DFCDP_TEST_SLOWER=10 \
        -DCMAKE_CROSSCOMPILING_EMULATOR="$QEMU" -DCMOCKA_LIBRARY="$SYSROOT/usr/lib/aarch64-linux-gnu/libcmocka.so" &&
    cmake --build "$DIR/tests"
}

# In namespaces of its own, where the kernel starts programs for arm64 by qemu: COMMAND...
with_binary_format() {
    local mask='\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff'
    local magic='\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00'
    # shellcheck disable=SC2016
    unshare --user --map-root-user --mount bash -c 'mount -t binfmt_misc none /proc/sys/fs/binfmt_misc && printf "%s" "$1" >/proc/sys/fs/binfmt_misc/register &&
        exec "${@:2}"' - ":qemu-aarch64:M::$magic:$mask:$QEMU:" "$@"
}

tests_run() {
    local again='simgpu_share|tiering_host$|tiering_host_ranks' rc=0       # these start themselves
    ctest --test-dir "$DIR/tests" --output-on-failure -j "$(nproc)" -E "$again|alloc_replay" || rc=1
    # Not all of them in there: root has no right to lock memory in such a namespace.
    if with_binary_format true; then with_binary_format ctest --test-dir "$DIR/tests" --output-on-failure -R "$again" || rc=1
    else echo "left out, as this kernel has no binary formats in user namespaces: $again"; fi
    return $rc
}

wheel_run() {
    rm -rf "$DIR/unpacked"
    "$PY" -m zipfile -e dist/fcdp-*_aarch64.whl "$DIR/unpacked" &&
    "$QEMU" -L "$SYSROOT" -E PYTHONHOME="$SYSROOT/usr" -E PYTHONPATH="$DIR/unpacked" "$SYSROOT/usr/bin/python3" - <<'END'
import os, platform
import fcdp
from fcdp import _fcdp

library = os.path.join(os.path.dirname(_fcdp.__file__), "libfcdp_simgpu.so")
engine = _fcdp.create_engine(_fcdp.options_load()["driver"], 0, library, False, True, True)
print(platform.machine(), "Python", platform.python_version(), "fcdp", fcdp.__version__, engine.stats())
engine.destroy()
END
}

for tool in apt-get dpkg-deb; do command -v $tool >/dev/null || fail "Needs $tool: Debian or Ubuntu"; done
[ -f "$KEYRING" ] || fail "Needs $KEYRING: apt-get install debian-archive-keyring"
unset FCDP
make_targets wheel "$([ $what = tests ] && echo toolchain-aarch64 || echo wheel-aarch64)"
if [ $what = wheel ]; then ls dist/fcdp-*_aarch64.whl; exit 0; fi
step "qemu-user and arm64 libraries" aarch64-emulator emulator
step "C tests: build" aarch64-build tests_build
export QEMU_LD_PREFIX=$SYSROOT FCDP_CHECK=3
failed=0
step "C tests under qemu-user" aarch64-run tests_run || failed=1
grep -E 'tests passed.* out of|left out' "$LOGS/aarch64-run.log" || true
step "The wheel under qemu-user" aarch64-python wheel_run || failed=1
tail -n 1 "$LOGS/aarch64-python.log"
exit $failed
