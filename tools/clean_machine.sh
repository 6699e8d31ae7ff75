#!/bin/bash
# tools/clean_machine.sh: see --help below.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

usage() {
    cat <<'END'
tools/clean_machine.sh [OPTIONS]

Tries a built wheel on a machine with nothing but Python and torch: a minimal Debian in a chroot, without a compiler
or FCDP's sources, in namespaces of its own. It installs torch there, then, with no network left, the wheel. It runs
fcdp-doctor, and trains with FSDP2 on 4 CPU ranks (2 emulated nodes of 2), once plain and once with FCDP=1: the
second must be bitwise equal and gather less between nodes.
Needs root, debootstrap (Debian's package), Debian's mirror and the package index. Everything is removed at the end,
except --base.

  --wheel FILE     the wheel (default: the one in dist/ for this machine)
  --suite NAME     Debian's release: bullseye (glibc 2.31), bookworm (2.36), trixie (2.41) (default bookworm)
  --base DIR       keeps the minimal Debian there for the next time (default: a temporary one)
  --python PREFIX  a Python built on such a release or an older one (PREFIX/bin/python3), which is seen there at the
                   same path (default: the release's own)
  --torch VERSION  the torch to install (default: the newest that the package index has for that Python)
  --help           this text
  --version        the version of this checkout

A torch for CUDA takes about 7 GB of disk meanwhile. FSDP2 runs on CPUs from torch 2.8 on; for older versions the
training script adds what they lack (tests/torch_plugin/compat.py), in both runs alike.

Exit status: 0 when everything held; one line says what was tried.
END
}

WHEEL='' SUITE=bookworm BASE='' PREFIX='' TORCH=torch
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) usage; exit 0 ;;
        --version) setup_version; exit 0 ;;
        --wheel) WHEEL=$(realpath "$2"); shift 2 ;;
        --suite) SUITE=$2; shift 2 ;;
        --base) BASE=$(realpath -m "$2"); shift 2 ;;
        --python) PREFIX=$(realpath "$2"); shift 2 ;;
        --torch) TORCH=torch==$2; shift 2 ;;
        *) usage >&2; exit 2 ;;
    esac
done
if [ -z "$WHEEL" ]; then
    WHEEL=$(compgen -G "$ROOT/dist/fcdp-*_$(uname -m).whl") || fail "No wheel for $(uname -m) in dist/: tools/setup.sh builds it, or --wheel names one."
    [ "$(wc -l <<<"$WHEEL")" = 1 ] || fail "Several wheels in dist/; --wheel says which."
fi
[ -f "$WHEEL" ] || fail "$WHEEL is not there."
[ -z "$PREFIX" ] || [ -x "$PREFIX/bin/python3" ] || fail "$PREFIX/bin/python3 is not there."
[ "$(id -u)" = 0 ] || fail "Needs root, for chroot and mounts."
PATH=$PATH:/usr/sbin:/sbin
for tool in debootstrap unshare ip; do command -v $tool >/dev/null || fail "Needs $tool: apt-get install debootstrap util-linux iproute2"; done

TMP=$(mktemp -d "${TMPDIR:-/tmp}/fcdp-clean.XXXXXX")
trap 'end_running; rm -rf "$TMP"' EXIT     # nothing is mounted below it here: mounts are in the namespace alone
BASE=${BASE:-$TMP/base}
mkdir -p "$TMP/upper" "$TMP/work" "$TMP/root"

base_make() {
    rm -rf "$BASE"
    # python3 also for what a Python from elsewhere links: libffi, libssl, zlib.
    debootstrap --variant=minbase --include=python3-venv,ca-certificates "$SUITE" "$BASE" &&
    rm -rf "$BASE"/var/cache/apt/archives/*.deb "$BASE"/var/lib/apt/lists/* &&
    touch "$BASE/fcdp-complete"
}
[ -f "$BASE/fcdp-complete" ] || step "Minimal $SUITE" clean-base base_make

# Inside, first with the network: arguments PYTHON TORCH.
cat >"$TMP/install" <<'END'
set -e
"$1" -m venv /venv
/venv/bin/python -m pip --disable-pip-version-check install -q --progress-bar off --no-compile "$2"
END
# Then without.
cat >"$TMP/check" <<'END'
set -e
if command -v cc gcc g++ clang make; then echo "this machine has a compiler, so it is not clean"; exit 1; fi
cd /tmp
/venv/bin/python -m pip --disable-pip-version-check install -q --no-index /wheel/*.whl
/venv/bin/fcdp-doctor
train() {
    mkdir "$1"
    env GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1 FCDP_LOCAL_SIZE=2 FCDP="$2" /venv/bin/torchrun --nproc-per-node 4 /job/clean_job.py "$1" >"$1/log" 2>&1 ||
        { cat "$1/log"; return 1; }
}
train plain 0
train fcdp 1
grep -h '^fcdp: saved' fcdp/log
/venv/bin/python - <<'PYTHON'
import json, platform, torch
plain, fcdp = ([json.load(open(f"{run}/result{rank}.json")) for rank in range(4)] for run in ("plain", "fcdp"))
assert not any(r["stats"] for r in plain), "FCDP was on in the plain run"
assert [r["digest"] for r in plain] == [r["digest"] for r in fcdp], "FCDP's training differs from plain FSDP2's"
gathers = fcdp[0]["stats"]["gathers"]
assert gathers["avoided"] > 0, f"every gather left the node: {gathers}"
print(f"passed: glibc {platform.libc_ver()[1]}, Python {platform.python_version()}, torch {torch.__version__}: installs, fcdp-doctor, 5 steps of "
      f"FSDP2 on 4 ranks bitwise equal, {gathers['avoided']} of {gathers['avoided'] + gathers['made']} gathers avoided")
PYTHON
END

# The namespaces end with the shell in them, and every process and mount with the namespaces.
cat >"$TMP/enter" <<'END'
set -e
trap 'exit 143' TERM        # which the kernel keeps from the first process of a namespace that has no trap for it
mount -t overlay overlay -o "lowerdir=$BASE,upperdir=$TMP/upper,workdir=$TMP/work" "$TMP/root"
cd "$TMP/root"
mkdir wheel job
cp "$WHEEL" wheel/
cp "$ROOT"/tests/torch_plugin/{clean_job,compat,models}.py job/
if [ -n "$PREFIX" ]; then mkdir -p ".$PREFIX" && mount --bind "$PREFIX" ".$PREFIX" && mount -o remount,ro,bind ".$PREFIX"; fi
mount -t proc proc proc
mount -t sysfs -o ro sysfs sys
mount --rbind /dev dev
mount -t tmpfs tmpfs tmp
cp -L /etc/resolv.conf /etc/hosts etc/
[ ! -f /etc/ssl/certs/ca-certificates.crt ] || cp -L /etc/ssl/certs/ca-certificates.crt etc/ssl/certs/
inside=(env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8)
for name in $(compgen -e | grep -E '^(PIP_(INDEX_URL|EXTRA_INDEX_URL|TRUSTED_HOST|CERT|PROXY|DEFAULT_TIMEOUT)$|https?_proxy|HTTPS?_PROXY|no_proxy|NO_PROXY)'); do settings+=("$name=${!name}"); done
"${inside[@]}" "${settings[@]}" chroot . bash -s - "${PREFIX:-/usr}/bin/python3" "$TORCH" <"$TMP/install"
unshare --net bash -c 'ip link set lo up && exec "$@"' - "${inside[@]}" chroot . bash -s <"$TMP/check"
END
export TMP BASE ROOT WHEEL PREFIX TORCH
step "$SUITE, ${PREFIX:-its Python}, $TORCH" clean unshare --mount --pid --fork --kill-child --propagation private bash "$TMP/enter"
sed -n '/^fcdp  /,$p' "$LOGS/clean.log"
