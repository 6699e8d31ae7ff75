#!/bin/bash
# tools/demo.sh: see --help below.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

usage() {
    cat <<'END'
tools/demo.sh [LAB OPTIONS] [-- JOB ARGUMENTS]

Sets everything up (once), then trains a small GPT on 2 emulated nodes of 2 ranks with 1 Gbit/s between them: as FSDP2
alone and with FCDP=1. The script is plain FSDP2 and never mentions FCDP. Ends with a table of what each took, and
out/demo.svg. Under 5 minutes on 2 cores after the set-up.

  tools/demo.sh                                 the demo
  tools/demo.sh --peers                         the README's table: also hpZ, HSDP, reshard_after_forward=False, and
                                                FCDP with other options (about 6 minutes)
  tools/demo.sh --rate 10gbit --nodes 3         other nodes, links and modes: fcdp-lab's options (fcdp-lab --help)
  tools/demo.sh --device sim                    on simulated GPUs, on which the host runs ahead
  tools/demo.sh -- --steps 40 --lora 8          another job: options of tools/demo/gpt.py (its --help)

Needs root, or a kernel that lets users make namespaces. FCDP_PYTHON names the Python to build on. --version prints
the version of this checkout.
END
}

lab=() job=()
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) usage; exit 0 ;;
        --version) setup_version; exit 0 ;;
        --peers)
            lab+=(--mode 'fcdp-whole: FCDP=1 FCDP_CODEC=none' --mode 'fcdp-lean: FCDP=1 FCDP_PREFETCH=0'
                --mode 'fcdp-tau1: FCDP=1 FCDP_TAU=1'
                --mode 'hpz: -- --reshard-after-forward 2' --mode 'hsdp: -- --hsdp'
                --mode 'keep: -- --reshard-after-forward false')
            shift ;;
        --) shift; job=("$@"); break ;;
        *) lab+=("$1"); shift ;;
    esac
done
[ ${#job[@]} -gt 0 ] || job=(--steps 12)

setup demo
mkdir -p out
run fcdp-lab --nodes 2 --ranks 2 --rate 1gbit --modes fsdp,fcdp --svg out/demo.svg --json out/demo.json "${lab[@]}" -- \
    tools/demo/gpt.py "${job[@]}"
echo
echo "Picture: $ROOT/out/demo.svg    Figures: $ROOT/out/demo.json"
