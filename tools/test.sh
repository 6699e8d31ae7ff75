#!/bin/bash
# tools/test.sh: see --help below.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

usage() {
    cat <<'TEXT'
tools/test.sh [--quick | --matrix | --frameworks | --faults | --gpu | --help | --version] [-- PYTEST ARGUMENTS]

Sets everything up (once) and runs all tests, side by side: the C tests with every internal check (FCDP_CHECK=3), under
ASan+UBSan, those of several threads under TSan too, and what measures time without a sanitizer; pytest over tests/ with
the wheel, twice, for the training cases and for the rest; format and lint (.pre-commit-config.yaml). The first C tests
are built by clang where it is installed, the others by the system's compiler. Ends with one summary, which lists what
was skipped and why. tools/Makefile has what each option runs.

  --quick   runs the C tests with every check (of many like runs, each 64th; not the longest tests), the Python tests
            that start no ranks, and format and lint but for clang-tidy: about a minute, once all is built
  --matrix  runs each training case in all configurations, and each that bytes alone must tell of by both readers; all
            on the simulated device in both mappings; and whole jobs of which another test shows most. Without it: every
            third case, and of those that are alike every eighth, each in one configuration; a third of those that bytes
            alone must tell of, by one reader; and on the simulated device some, each in one mapping
  --frameworks
            runs all jobs of accelerate, transformers, PEFT, TRL, Lightning and torchtitan; without it, one runs of FSDP1,
            of accelerate with PEFT, of transformers and of Lightning
  --faults  fails each driver call of a schedule in tiering, and each third of the engine's; without it, each eighth
            of tiering's, and of the engine's fewer. Runs all C tests under TSan
  --gpu     runs what needs a CUDA device: the C tests that run on any driver, and the Python tests for it
  --help    this text

  tools/test.sh -- -k readme        passes what follows -- to pytest: here, the Python tests whose name has "readme"

Exit status: 0 when nothing failed. Logs are in build/logs.
TEXT
}

what=tests
TEST_ARGUMENTS=
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) usage; exit 0 ;;
        --version) setup_version; exit 0 ;;
        --quick | --matrix | --frameworks | --faults | --gpu) what=${1#--}; shift ;;
        --) shift; [ $# = 0 ] || TEST_ARGUMENTS=${*@Q}; break ;;
        *) usage >&2; exit 2 ;;
    esac
done
export TEST_ARGUMENTS

case $what in
    quick) export TEST_COARSER=64 TEST_ROUNDS=1 SKIP=clang-tidy ;;
    matrix) export TEST_MATRIX=whole ;;
esac
export STEPS=$LOGS/steps
rm -f "$LOGS"/*.xml build/cases.trace
: >"$STEPS"
failed=0
if [ $what = gpu ]; then
    setup test
    cuda_device || { echo "Nothing ran: no CUDA device can be reached (torch.cuda.is_available() is false)."; exit 0; }
fi
make_targets all -k $what || failed=1
echo
"$PY" tools/summary.py "$STEPS" || failed=1
exit $failed
