#!/bin/bash
# cmake/zig.sh ARCH: zig's C compiler (PyPI: ziglang) as a tool chain for glibc 2.28 on ARCH, x86_64 or aarch64. Prints the folder
# that holds it, build/zig-ARCH: toolchain.cmake for CMake; cc, ar and ranlib for the rest; jemalloc and liburing, links to ones built
# with them.
#
# Why zig: a program runs with the glibc that it was linked against and later ones, and a distribution has only its own. zig brings the
# symbols of every glibc and compiles for every architecture.
#
# PYTHON      a Python that has ziglang (default: python3)
# FCDP_CACHE  where zig keeps the parts of the C library that it has compiled (as cmake/private_library.sh)
set -euo pipefail

GLIBC=2.28                                # that of manylinux_2_28, torch's own tag
arch=${1:-}
case $arch in x86_64 | aarch64) ;; *) echo "cmake/zig.sh: a tool chain for '$arch'? usage: cmake/zig.sh x86_64|aarch64" >&2; exit 2 ;; esac
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
dir=$(dirname "$here")/build/zig-$arch
zig=$("${PYTHON:-python3}" -c 'import os, ziglang; print(os.path.join(os.path.dirname(ziglang.__file__), "zig"))')
cache=${FCDP_CACHE:-${XDG_CACHE_HOME:-${HOME:?neither HOME nor FCDP_CACHE is set}/.cache}/fcdp}

# Objects of another compiler are not to be mixed with this one's, and nothing else would notice.
version=$("$zig" version)
[ "$(cat "$dir/version" 2>/dev/null)" = "$version" ] || rm -rf "$dir"
mkdir -p "$dir/include" "$cache"
echo "$version" >"$dir/version"

tool() {                                  # NAME COMMAND: a program of its own, as CMake and configure want one
    printf '#!/bin/sh\nexport ZIG_GLOBAL_CACHE_DIR=%q ZIG_LOCAL_CACHE_DIR=%q\nexec %s "$@"\n' "$cache/zig" "$cache/zig" "$2" >"$dir/$1.new"
    chmod +x "$dir/$1.new"
    mv "$dir/$1.new" "$dir/$1"
}
# Without optimization zig would add UBSan's traps.
tool cc "$(printf '%q cc -target %s-linux-gnu.%s -fno-sanitize=undefined -isystem %q' "$zig" "$arch" "$GLIBC" "$dir/include")"
tool ar "$(printf '%q ar' "$zig")"
tool ranlib "$(printf '%q ranlib' "$zig")"

# For another C library the machine's /usr/include is out of bounds. Of what lies there these alone are wanted: a header that stands by
# itself, and Debian's pyconfig.h, which /usr/include/pythonX.Y/pyconfig.h includes by a name for each architecture (equal for the limited API).
xxhash=$(echo '#include <xxhash.h>' | ${CC:-cc} -idirafter "${CONDA_PREFIX:-/usr}/include" -E -x c - 2>/dev/null | sed -n 's/^# [0-9]* "\(.*xxhash\.h\)".*/\1/p' | head -n 1)
[ -n "$xxhash" ] || { echo "cmake/zig.sh: no xxhash.h: install libxxhash-dev (Debian, Ubuntu), xxhash-devel (Fedora) or xxhash (conda-forge)" >&2; exit 1; }
cmp -s "$xxhash" "$dir/include/xxhash.h" || cp "$xxhash" "$dir/include/"
for file in /usr/include/"$(uname -m)"-linux-gnu/python3*/pyconfig.h; do
    [ ! -f "$file" ] || install -D -p -m 644 "$file" "$dir/include/$arch-linux-gnu/$(basename "$(dirname "$file")")/pyconfig.h"
done

# What the linker is shown instead of the system's unwinder. zig would link one of its own, which does not know the frames of an exception
# that torch's libstdc++ throws through ours.
if [ ! -f "$dir/libgcc_s.so.1" ]; then
    echo 'void _Unwind_Resume(void) {} void __gcc_personality_v0(void) {}' >"$dir/unwinder.c"
    echo 'GCC_3.0 { _Unwind_Resume; }; GCC_3.3.1 { __gcc_personality_v0; };' >"$dir/unwinder.map"
    "$dir/cc" -shared -fPIC -nostdlib -Wl,-soname,libgcc_s.so.1 -Wl,--version-script="$dir/unwinder.map" -o "$dir/libgcc_s.so.1" "$dir/unwinder.c"
fi

cat >"$dir/toolchain.cmake.new" <<END
# Written by cmake/zig.sh.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR $arch)
set(CMAKE_C_COMPILER "$dir/cc")
set(CMAKE_AR "$dir/ar" CACHE FILEPATH "")
set(CMAKE_RANLIB "$dir/ranlib" CACHE FILEPATH "")
set(CMAKE_STRIP "$(command -v true)" CACHE FILEPATH "")     # the machine's knows its own architecture
set(CMAKE_MODULE_LINKER_FLAGS_INIT -s)
set(CMAKE_SHARED_LINKER_FLAGS_INIT -s)
set(Xxhash_INCLUDE_DIR "$dir/include" CACHE PATH "")
set(FCDP_JEMALLOC_DIR "$dir/jemalloc" CACHE PATH "")
set(FCDP_LIBURING_DIR "$dir/liburing" CACHE PATH "")
set(FCDP_UNWINDER "$dir/libgcc_s.so.1" CACHE FILEPATH "")
END
cmp -s "$dir/toolchain.cmake.new" "$dir/toolchain.cmake" || cp "$dir/toolchain.cmake.new" "$dir/toolchain.cmake"

[ "$arch" = "$(uname -m)" ] || unset FCDP_JEMALLOC FCDP_LIBURING      # which are this machine's
for library in jemalloc liburing; do
    folder=$(CC="$dir/cc" AR="$dir/ar" RANLIB="$dir/ranlib" bash "$here/private_library.sh" $library --target "$arch-linux-gnu" "$GLIBC")
    ln -sfn "$folder" "$dir/$library"
done
echo "$dir"
