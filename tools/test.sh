#!/bin/bash
# tools/test.sh: see --help below.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

usage() {
    cat <<'END'
tools/test.sh [--quick | --gpu | --help] [-- PYTEST ARGUMENTS]

Sets everything up (once), then runs all tests and ends with one summary, which lists what was skipped and why:
the C tests with every internal check (FCDP_CHECK=3), under ASan+UBSan, under TSan and, where clang is, built by clang;
then pytest over tests/ with the installed wheel.

  --quick   the C tests with every check, and the Python tests that start no ranks
  --gpu     what needs a CUDA device: the C tests that run on any driver, on the real one, and the Python tests for it
  --help    this text

Exit status: 0 when nothing failed. Logs are in build/logs.
END
}

what=all
pytest_args=()
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) usage; exit 0 ;;
        --quick | --gpu) what=${1#--}; shift ;;
        --) shift; pytest_args=("$@"); break ;;
        *) usage >&2; exit 2 ;;
    esac
done

# Sanitizers need their shadow memory where address randomisation may have put something else.
calm=()
setarch "$(uname -m)" -R true 2>/dev/null && calm=(setarch "$(uname -m)" -R)

summary=()          # one line per stage
failed=0 ran=0
report() { summary+=("$(printf '%-38s %-8s %s' "$1" "$2" "$3")"); [ "$2" != FAILED ] || failed=1; [ "$2" = skipped ] || ran=1; }

build_tests() {     # PRESET
    # Once more without what another place or another cmake left there.
    { cmake --preset "$1" || { rm -rf "build/$1" && cmake --preset "$1"; }; } && cmake --build --preset "$1"
}

# Prints "name: why" for each test that a ctest report calls skipped; a test says why on its last line.
skipped_of_ctest() {
    "$PY" - "$1" <<'END'
import sys
import xml.etree.ElementTree as tree
for case in tree.parse(sys.argv[1]).iter("testcase"):
    if case.find("skipped") is not None:
        text = (case.findtext("system-out") or "").strip().splitlines()
        print(f"{case.get('name')}: {text[-1] if text else 'no reason given'}")
END
}

c_stage() {         # TITLE PRESET [CTEST OPTIONS]
    local title=$1 preset=$2 start=$SECONDS runner=() jobs line rc=0
    jobs=$(nproc)
    shift 2
    case $preset in
        asan | tsan) runner=("${calm[@]}") ;;
        gpu) jobs=1 ;;
    esac
    step "$title: build" "$preset-build" build_tests "$preset" || { report "$title" FAILED "build: build/logs/$preset-build.log"; return 0; }
    rm -f "build/$preset.xml"
    step "$title: run" "$preset-run" "${runner[@]}" ctest --preset "$preset" -j "$jobs" --no-tests=error \
        --output-junit "$ROOT/build/$preset.xml" "$@" || rc=1
    line=$(grep -E 'tests passed.* out of|No tests were found' "$LOGS/$preset-run.log" | tail -n 1) || true
    [ $rc = 0 ] || line="$line: build/logs/$preset-run.log"
    report "$title" "$([ $rc = 0 ] && echo passed || echo FAILED)" "$line ($((SECONDS - start)) s)"
    [ ! -f "build/$preset.xml" ] || while IFS= read -r line; do skips+=("$title: $line"); done < <(skipped_of_ctest "build/$preset.xml")
}

python_stage() {    # PYTEST OPTIONS
    local rc=0 start=$SECONDS line
    local name clean=()
    for name in $(compgen -e FCDP); do clean+=(-u "$name"); done
    echo "Python tests:"
    # Options of FCDP that the caller has set are not for the tests, which set their own.
    env "${clean[@]}" "$PY" -m pytest -rs --durations=5 "$@" "${pytest_args[@]}" </dev/null 2>&1 |
        tee "$LOGS/pytest.log" || rc=${PIPESTATUS[0]}
    line=$(tail -n 1 "$LOGS/pytest.log" | sed 's/^=* *//; s/ *=*$//')
    # 5: nothing selected
    if [ $rc = 5 ]; then report "Python tests" skipped "$line"
    else report "Python tests" "$([ $rc = 0 ] && echo passed || echo FAILED)" "$line ($((SECONDS - start)) s)"; fi
    while IFS= read -r line; do skips+=("Python: $line"); done < <(sed -n 's/^SKIPPED //p' "$LOGS/pytest.log")
}

skips=()
setup test
case $what in
    quick)
        c_stage "C, every check" dev
        python_stage -m "not slow and not gpu"
        ;;
    gpu)
        if cuda_device; then
            c_stage "C on the CUDA driver" gpu
            python_stage -m gpu
        else
            report "C on the CUDA driver" skipped "no CUDA device can be reached (torch.cuda.is_available() is false)"
            report "Python tests on CUDA" skipped "the same"
        fi
        ;;
    all)
        c_stage "C, every check" dev
        c_stage "C, ASan and UBSan" asan
        c_stage "C, TSan" tsan
        if command -v clang >/dev/null; then c_stage "C, built by clang" clang
        else report "C, built by clang" skipped "no clang on this machine"; fi
        python_stage
        ;;
esac

echo
if [ ${#skips[@]} -gt 0 ]; then
    echo "Skipped:"
    printf '  %s\n' "${skips[@]}"
fi
echo "Summary (tools/test.sh$([ $what = all ] || echo " --$what"), $SECONDS s in all):"
printf '  %s\n' "${summary[@]}"
if [ $failed = 1 ]; then echo "FAILED."; elif [ $ran = 0 ]; then echo "Nothing ran."; else echo "All that ran passed."; fi
exit $failed
