#!/bin/bash
# Builds the overlap bench over the engine of commit 55b92e3, the last one before the engine on streams, and prints the program's path on its
# last line. The commit's sources come out of the repository's history, into build/before. Exit status 3, with a line that says why: the history
# is not here.
set -euo pipefail
COMMIT=55b92e3a8cc797acdd377c7f3de2e4c6d6a58c47
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../../.." && pwd)
SOURCE=$ROOT/build/before/source
BUILD=$ROOT/build/before/release

no_history() { echo "the engine before cannot be built: $*" >&2; exit 3; }

command -v git >/dev/null || no_history "its sources are in the repository's history alone, and git is not installed"
git -C "$ROOT" rev-parse --git-dir >/dev/null 2>&1 ||
    no_history "its sources are in the repository's history, and $ROOT is not a git repository (a tarball is none), or not one that git reads"
git -C "$ROOT" cat-file -e "$COMMIT^{tree}" 2>/dev/null ||
    no_history "commit ${COMMIT:0:7} is not in this clone's history; after a shallow clone: git fetch --unshallow"

if [ "$(cat "$SOURCE/commit" 2>/dev/null)" != "$COMMIT" ]; then
    rm -rf "$SOURCE"
    mkdir -p "$SOURCE"
    git -C "$ROOT" archive "$COMMIT" alloc tiering comm | tar -x -C "$SOURCE"
    ln -s "$ROOT/cmake" "$ROOT/tools" "$ROOT/tools/bench/overlap/before/CMakeLists.txt" "$SOURCE"
    echo "$COMMIT" >"$SOURCE/commit"
fi
zig=$ROOT/build/zig-$(uname -m)/jemalloc     # what the set-up has built, where nobody names another
[ -n "${FCDP_JEMALLOC:-}" ] || [ ! -e "$zig" ] || export FCDP_JEMALLOC=$zig
configure() { cmake -S "$SOURCE" -B "$BUILD" -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo; }
configure || { rm -rf "$BUILD" && configure; }
cmake --build "$BUILD" --target fcdp-overlap-before
echo "$BUILD/fcdp-overlap-before"
