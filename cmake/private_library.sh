#!/bin/bash
# private_library.sh jemalloc|liburing: builds a private copy of the library once and prints the folder that holds it (include/,
# lib/lib*.a). Called by cmake/zig.sh and by CMake (cmake/FindJemallocPrivate.cmake, cmake/FindLiburing.cmake). stdout: that folder,
# nothing else.
# --target TRIPLE GLIBC: for another machine or C library, with the CC, AR and RANLIB of the environment (cmake/zig.sh).
#
# Why private ones: a distribution's jemalloc cannot be loaded into a running Python (initial-exec TLS), and linking its archive
# would capture our own malloc and free. This one has no initial-exec TLS, a prefix (je_) and a private namespace, so it lives
# beside whatever allocator the process uses. liburing is in the wheel, which must run on a machine that has none.
#
# FCDP_JEMALLOC, FCDP_LIBURING                  folders that already hold such a build: used as they are
# FCDP_JEMALLOC_TARBALL, FCDP_LIBURING_TARBALL  the source (SOURCE below), already downloaded
# FCDP_CACHE                                    where builds are kept (default ${XDG_CACHE_HOME:-~/.cache}/fcdp)
set -euo pipefail

name=${1:-}
shift || true
case $name in
    jemalloc)
        VERSION=5.3.0
        SHA256=2db82d1e7119df3e71b7640219b6dfe84789bc0537983c3b7ac4f7189aecfeaa
        SOURCE=jemalloc-$VERSION.tar.bz2
        URL=https://github.com/jemalloc/jemalloc/releases/download/$VERSION/$SOURCE
        HEADERS=(jemalloc/jemalloc.h)
        LIBRARY=libjemalloc_pic.a
        FLAGS=(--disable-initial-exec-tls --with-jemalloc-prefix=je_ --with-private-namespace=fcdp_ --disable-cxx
               --enable-static --disable-shared --disable-doc --disable-libdl)
        build() { ./configure "${FLAGS[@]}" CFLAGS="$CFLAGS" && make -j"$(nproc)" lib/$LIBRARY; }
        built=(include lib COPYING)
        ;;
    liburing)
        VERSION=2.3
        SHA256=2eac26f880125d83f75ba8641fde5d88226dd352d3cee95d45a9128758a8f1be
        SOURCE=liburing-$VERSION.tar.gz
        URL=https://brick.kernel.dk/snaps/$SOURCE
        HEADERS=(liburing.h liburing/barrier.h liburing/compat.h liburing/io_uring.h)
        LIBRARY=liburing.a
        FLAGS=()
        build() { ./configure --cc="${CC:-cc}" && make -C src $LIBRARY AR="${AR:-ar}" RANLIB="${RANLIB:-ranlib}" CFLAGS="$CFLAGS"; }
        built=(src/include src LICENSE)
        ;;
    *) echo "usage: private_library.sh jemalloc|liburing [--target TRIPLE GLIBC]" >&2; exit 2 ;;
esac
given=FCDP_${name^^} tarball_given=FCDP_${name^^}_TARBALL
target=''
while [ $# -gt 0 ]; do
    case $1 in
        --target) target="$2 $3"; shift 3 ;;
        *) echo "private_library.sh: unknown argument $1" >&2; exit 2 ;;
    esac
done
arch=${target%%-*} arch=${arch:-$(uname -m)}
if [ $name = jemalloc ]; then
    case $arch in aarch64) FLAGS+=(--with-lg-page=16) ;; esac   # kernels there have pages of 4, 16 or 64 KiB
    # configure asks the processor that it runs on, which is not the one that this is for. Beyond 48 bits nothing lies unasked.
    [ -z "$target" ] || FLAGS+=(--host="${target% *}" --with-lg-vaddr=48)
fi
CFLAGS="-O2 -fPIC -fvisibility=hidden"

say() { echo "$name: $*" >&2; }
complete() { [ -f "$1/include/${HEADERS[0]}" ] && [ -f "$1/lib/$LIBRARY" ]; }
genuine() { [ -f "$1" ] && echo "$SHA256  $1" | sha256sum --check --status; }

if [ -n "${!given:-}" ]; then
    complete "${!given}" || { say "$given=${!given} lacks include/${HEADERS[0]} or lib/$LIBRARY"; exit 1; }
    echo "${!given}"; exit 0
fi

cache=${FCDP_CACHE:-${XDG_CACHE_HOME:-${HOME:?neither HOME nor FCDP_CACHE is set}/.cache}/fcdp}
key=$(echo "$VERSION $arch ${FLAGS[*]} $CFLAGS${target:+ $target}" | sha256sum | cut -c1-12)
dir=$cache/$name-$VERSION-$key
complete "$dir" && { echo "$dir"; exit 0; }

mkdir -p "$cache"
exec 9>"$cache/$name.lock"
flock 9                                   # a second build at the same time waits for the first and takes its result
complete "$dir" && { echo "$dir"; exit 0; }

compiler=${CC:-cc}
for tool in "${compiler%% *}" make bzip2 tar sha256sum; do
    command -v "$tool" >/dev/null || {
        say "needs '$tool': install build-essential and bzip2 (Debian, Ubuntu), gcc, make and bzip2 (Fedora), or c-compiler, make and bzip2 (conda-forge)"
        exit 1
    }
done
tmp=$(mktemp -d "$cache/build.XXXXXX")
trap 'rm -rf "$tmp"' EXIT
tarball=$tmp/$SOURCE

# The distribution's own source package, through apt with private lists: no root, and the system's lists stay as they are.
from_apt() {
    command -v apt-get >/dev/null || return 1
    local apt=$tmp/apt f
    mkdir -p "$apt/lists/partial" "$apt/parts" "$apt/archives/partial"
    for f in /etc/apt/sources.list.d/debian.sources /etc/apt/sources.list.d/ubuntu.sources; do
        [ -r "$f" ] && sed 's/^Types:.*/Types: deb-src/' "$f" >"$apt/parts/$(basename "$f")"
    done
    [ -r /etc/apt/sources.list ] && sed -n 's/^deb\(-src\)\?[[:space:]]/deb-src /p' /etc/apt/sources.list | sort -u >"$apt/parts/main.list"
    local opts=(-q -o Dir::Etc::sourcelist=/dev/null -o Dir::Etc::sourceparts="$apt/parts" -o Dir::State::Lists="$apt/lists"
                -o Dir::Cache="$apt" -o Dir::Cache::archives="$apt/archives" -o APT::Sandbox::User= -o Acquire::Languages=none
                -o Acquire::Retries=2 -o Acquire::http::Timeout=60)
    (cd "$apt" && apt-get "${opts[@]}" update && apt-get "${opts[@]}" source --download-only $name) >"$tmp/apt.log" 2>&1 || return 1
    for f in "$apt/${name}_"*.orig.tar.*; do
        genuine "$f" && mv "$f" "$tarball" && return 0
    done
    return 1
}

from_release() {
    if command -v curl >/dev/null; then curl -fsSL --retry 2 --connect-timeout 20 -o "$tarball" "$URL" 2>"$tmp/url.log"
    elif command -v wget >/dev/null; then wget -q -T 20 -t 2 -O "$tarball" "$URL" 2>"$tmp/url.log"
    else python3 -c 'import sys, urllib.request; urllib.request.urlretrieve(*sys.argv[1:])' "$URL" "$tarball" 2>"$tmp/url.log"
    fi && genuine "$tarball"
}

if [ -n "${!tarball_given:-}" ]; then
    genuine "${!tarball_given}" || { say "$tarball_given=${!tarball_given} is not $SOURCE (sha256 $SHA256)"; exit 1; }
    cp "${!tarball_given}" "$tarball"
else
    say "fetching the source of $VERSION (apt's source package, else the release tarball)"
    from_apt || from_release || {
        tail -n 3 "$tmp"/apt.log "$tmp"/url.log 2>/dev/null | sed 's/^/  /' >&2 || true
        say "no source: neither 'apt-get source $name' nor $URL gave version $VERSION."
        say "Download that file elsewhere and set $tarball_given=/path/to/$SOURCE"
        exit 1
    }
fi

say "building $VERSION, once, into $dir"
mkdir "$tmp/src"
tar -xf "$tarball" -C "$tmp/src" --strip-components=1
log=$cache/$name-build.log
(cd "$tmp/src" && unset CPPFLAGS LDFLAGS LIBS && build) >"$log" 2>&1 </dev/null || {
    tail -n 20 "$log" >&2
    say "build failed; the whole log is $log"
    exit 1
}
mkdir -p "$tmp/out/lib"
for header in "${HEADERS[@]}"; do install -D -m 644 "$tmp/src/${built[0]}/$header" "$tmp/out/include/$header"; done
cp "$tmp/src/${built[1]}/$LIBRARY" "$tmp/out/lib/"
cp "$tmp/src/${built[2]}" "$tmp/out/"
rm -rf "$dir"
mv "$tmp/out" "$dir"
echo "$dir"
