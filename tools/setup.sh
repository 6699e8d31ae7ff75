#!/bin/bash
# All set-up: see --help below. tools/demo.sh, tools/test.sh and others source this file and call `setup`. What is done when the
# system has what is needed is in tools/Makefile. A second run takes a second or two and needs no network.
#
# FCDP_CACHE    where private libraries and zig's C library are kept (cmake/private_library.sh, cmake/zig.sh)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/step"

cd "$ROOT"
VENV=$ROOT/.venv
PY=$VENV/bin/python
mkdir -p "$LOGS"

# The Python of an activated .venv cannot make that .venv itself.
PATH=:$PATH:
while [[ $PATH == *":$VENV/bin:"* ]]; do PATH=${PATH/":$VENV/bin:"/:}; done
PATH=${PATH#:}
PATH=${PATH%:}

# Compiled modules are kept, whatever the caller's environment says and even where torch's folder is read-only. Else
# every rank of every job that a test starts compiles torch's modules again: 10 s of a core each.
unset PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX=$ROOT/build/pycache

choose_python() {
    local name
    for name in ${FCDP_PYTHON:-python3 python3.14 python3.13 python3.12 python3.11 python3.10}; do
        BASE=$("$name" -c 'import sys; print(sys.executable if sys.version_info >= (3, 10) else "")' 2>/dev/null) || continue
        [ -z "$BASE" ] || return 0
    done
    return 1
}

includes() { printf '#include <%s>\n' "$@" | ${CC:-cc} -idirafter "${CONDA_PREFIX:-/usr}/include" -E -x c - >/dev/null 2>&1; }

# missing_packages WHAT: Debian's and Ubuntu's names of what is not there. It asks for the thing, not for the package,
# so that whatever else provides it will do.
missing_packages() {
    local dir
    { command -v "${CC:-cc}" && command -v make; } >/dev/null || echo build-essential
    if ! choose_python; then
        echo python3 python3-venv python3-dev
    elif [ ! -x "$PY" ] || ! "$PY" -c '' 2>/dev/null; then
        dir=python$("$BASE" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
        [ "$BASE" = /usr/bin/python3 ] && dir=python3
        "$BASE" -c 'import ensurepip' 2>/dev/null || echo "$dir-venv"
        "$BASE" -c 'import os, sysconfig as s; os.stat(s.get_path("include") + "/Python.h")' 2>/dev/null || echo "$dir-dev"
    fi
    command -v bzip2 >/dev/null || echo bzip2
    command -v flock >/dev/null || echo util-linux
    includes xxhash.h || echo libxxhash-dev
    [ "$1" != wheel ] || return 0
    { command -v ip && command -v tc; } >/dev/null || echo iproute2
    [ "$1" != demo ] || return 0
    command -v tmux >/dev/null || echo tmux
    includes stdarg.h stddef.h stdint.h setjmp.h cmocka.h || echo libcmocka-dev
}

apt_install() {
    local sudo=()
    [ "$(id -u)" = 0 ] || sudo=(sudo -n)
    "${sudo[@]}" apt-get -q update || echo "apt-get update failed; trying with the lists that are there"
    "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=120 install -y --no-install-recommends "$@"
}

system_packages() {
    local missing
    mapfile -t missing < <(missing_packages "$1" | tr ' ' '\n')
    [ ${#missing[@]} -gt 0 ] || return 0
    local ask="Missing on this machine; install with:  sudo apt-get update && sudo apt-get install -y ${missing[*]}"
    command -v apt-get >/dev/null || fail "Missing on this machine (by Debian's names): ${missing[*]}"
    [ "$(id -u)" = 0 ] || sudo -n true 2>/dev/null || fail "$ask"
    step "System packages: ${missing[*]}" apt apt_install "${missing[@]}" || fail "$ask"
    [ -z "$(missing_packages "$1")" ] || fail "Still missing after apt-get install: $(missing_packages "$1" | xargs)"
}

# Prints "VERSION DIR" of the torch >= 2.6 that the base Python has, else nothing. By its metadata: importing takes seconds.
base_torch() {
    "$BASE" - <<'END_OF_CODE' 2>/dev/null || true
import importlib.metadata as m
dist = m.distribution("torch")
if tuple(int(x) for x in dist.version.split("+")[0].split(".")[:2]) >= (2, 6):
    print(dist.version, dist.locate_file(""))
END_OF_CODE
}

make_venv() {
    rm -rf "$VENV"
    "$BASE" -m venv ${BASE_TORCH:+--system-site-packages} "$VENV" && mkdir "$VENV/fcdp-setup" || return
    # A base that is itself a virtual environment: "system" would be the Python under it.
    [ -z "$BASE_TORCH" ] || "$BASE" -c 'import sys; sys.exit(sys.prefix != sys.base_prefix)' ||
        echo "${BASE_TORCH#* }" >"$("$PY" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base-environment.pth"
}

virtual_environment() {
    local key made=$VENV/fcdp-setup/venv          # also the mark that this .venv is ours
    choose_python || fail "No Python 3.10 or later among ${FCDP_PYTHON:-python3, python3.10 to python3.14}; FCDP_PYTHON=/path/to/python names one"
    BASE_TORCH=$(base_torch)
    export BASE_TORCH
    key="$("$BASE" -c 'import sys; print(sys.executable, sys.version)') $BASE_TORCH"
    [ "$(cat "$made" 2>/dev/null)" != "$key" ] || return 0
    [ ! -d "$VENV" ] || [ -d "$VENV/fcdp-setup" ] || fail ".venv is there and was not made by this script; move it away"
    step "Virtual environment .venv${BASE_TORCH:+ over torch ${BASE_TORCH%% *}}" venv make_venv
    echo "$key" >"$made"
}

# make_targets WHAT OPTIONS TARGETS: of tools/Makefile, once the system has what WHAT needs. No Python of it runs under FCDP.
make_targets() {
    PATH=$PATH:/usr/sbin:/sbin
    system_packages "$1"
    virtual_environment
    PATH=$VENV/bin:$PATH
    run env -u FCDP make --silent -f tools/Makefile -j "$(($(nproc) + 2))" "${@:2}"
}

# setup wheel|demo|test|all: afterwards $PY runs Python with everything, and PATH begins with .venv/bin. "wheel" has what builds the
# wheel and nothing that runs it; "demo" FCDP as this machine's compiler builds it; "test" the wheel and what tests need, the
# formatters and linters too; "all" the frameworks as well.
setup() {
    local began=$SECONDS
    make_targets "$1" "$1" || exit 1
    echo "Set-up: $((SECONDS - began)) s"
}

cuda_device() { "$PY" -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else 1)' 2>/dev/null; }

# Of this checkout, from the file that the wheel has it from.
setup_version() { echo "tools/${0##*/} $(sed -n 's/^version = "\([^"]*\)".*/\1/p' "$ROOT/pyproject.toml")"; }

how_to_install() {
    local wheel
    wheel=$(printf '%q' "$(compgen -G "$ROOT/dist/fcdp-*_$(uname -m).whl")")
    echo "Install it into the Python of the job, which has torch 2.6 or later:"
    echo "  pip install $wheel"
    echo "Over an FCDP of the same version:"
    echo "  pip install --force-reinstall --no-deps $wheel"
}

setup_usage() {
    cat <<'END'
tools/setup.sh [wheel | --help | --version]

Sets everything up, for building and testing: missing system packages (with apt-get, as root or by sudo), .venv with
torch and all tools, a private jemalloc, and the wheel, which is built into dist/ and installed in .venv. Each part is
skipped when its inputs are those of the last time. Logs are in build/logs.

  wheel   builds the wheel alone, and prints the line that installs it: without torch, the tools of tests, linters and
          frameworks
  --help  this text

FCDP_PYTHON names the Python to build on (default: python3). Where it has torch 2.6 or later, that torch is used.
END
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
    case $* in
        '') setup all ;;
        wheel) setup wheel; how_to_install ;;
        -h | --help) setup_usage ;;
        --version) setup_version ;;
        *) setup_usage >&2; exit 2 ;;
    esac
fi
