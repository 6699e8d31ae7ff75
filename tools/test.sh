#!/bin/bash
# tools/test.sh: see --help below.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

usage() {
    cat <<'END'
tools/test.sh [--quick | --matrix | --frameworks | --gpu | --help | --version] [-- PYTEST ARGUMENTS]

Sets everything up (once) and runs all tests, side by side: pytest over tests/ with the wheel, twice, for the training
cases and for the rest; format and lint (.pre-commit-config.yaml); and, as soon as a compiler is there, the C tests with
every internal check (FCDP_CHECK=3), under ASan+UBSan and under TSan. The first are built by clang where it is
installed, the others by the system's compiler. Ends with one summary, which lists what was skipped and why.

  --quick   runs the C tests with every check (of many like runs, each sixteenth), the Python tests that start no
            ranks, and format and lint
  --matrix  runs each training case in all four configurations, and each that bytes alone must tell of by both readers;
            without it, in two (both taus, both ways to restore) and by one; and all on the simulated device in both
            mappings, else a third of them, each in one mapping there and in one configuration on the CPU
  --frameworks
            runs all jobs of accelerate, transformers, PEFT, TRL, Lightning and torchtitan; without it, one of each runs
  --gpu     runs what needs a CUDA device: the C tests that run on any driver, and the Python tests for it
  --help    this text

  tools/test.sh -- -k readme        passes what follows -- to pytest: here, the Python tests whose name has "readme"

Exit status: 0 when nothing failed. Logs are in build/logs.
END
}

what=all
pytest_args=()
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) usage; exit 0 ;;
        --version) setup_version; exit 0 ;;
        --quick | --matrix | --frameworks | --gpu) what=${1#--}; shift ;;
        --) shift; pytest_args=("$@"); break ;;
        *) usage >&2; exit 2 ;;
    esac
done

# One line per stage, and one per skipped test: in files, as stages run side by side.
report() { printf '%-38s %-8s %s\n' "$1" "$2" "$3" >>"$LOGS/summary.$side"; }
skip() { printf '%s\n' "$1" >>"$LOGS/skips.$side"; }
side=2-python

build_tests() {     # PRESET
    # Once more without what another place or another cmake left there.
    { cmake --preset "$1" || { rm -rf "build/$1" && cmake --preset "$1"; }; } && cmake --build --preset "$1"
}

# Of a ctest report: "name: why" of each test that was skipped (it says why on its last line), or of each that failed its
# name and the end of what it said.
of_ctest() {        # skipped|failed REPORT
    "$PY" - "$@" <<'END'
import sys
import xml.etree.ElementTree as tree
for case in tree.parse(sys.argv[2]).iter("testcase"):
    text = (case.findtext("system-out") or "").strip().splitlines() or ["it said nothing"]
    if sys.argv[1] == "skipped" and case.find("skipped") is not None:
        print(f"{case.get('name')}: {text[-1]}")
    if sys.argv[1] == "failed" and case.find("failure") is not None:
        print(f"{case.get('name')} ({float(case.get('time')):.0f} s):", *text[-12:], sep="\n    ")
END
}

c_stage() {         # TITLE PRESET [CTEST OPTIONS]
    local title=$1 preset=$2 start=$SECONDS jobs line rc=0
    jobs=$(($(nproc) + 1)) # the longest of them wait: for peers that do not come, for one another
    shift 2
    [ "$preset" != gpu ] || jobs=1
    step "$title: build" "$preset-build" build_tests "$preset" || rc=1
    echo $rc >"$LOGS/built.$preset"
    [ $rc = 0 ] || { report "$title" FAILED "build: build/logs/$preset-build.log"; return 0; }
    rm -f "build/$preset.xml"
    step "$title: run" "$preset-run" ctest --preset "$preset" -j "$jobs" --no-tests=error \
        --output-junit "$ROOT/build/$preset.xml" "$@" || rc=1
    line=$(grep -E 'tests passed.* out of|No tests were found' "$LOGS/$preset-run.log" | tail -n 1) || true
    [ $rc = 0 ] || line="$line: build/logs/$preset-run.log"
    report "$title" "$([ $rc = 0 ] && echo passed || echo FAILED)" "$line ($((SECONDS - start)) s)"
    [ -f "build/$preset.xml" ] || return 0
    while IFS= read -r line; do skip "$title: $line"; done < <(of_ctest skipped "build/$preset.xml")
    of_ctest failed "build/$preset.xml" | sed "s/^[^ ]/$title: &/" >>"$LOGS/failures.$side"
}

lint_stage() {      # with the compile commands of the preset "dev", for clang-tidy
    local start=$SECONDS rc=0
    dev_built || { report "Format and lint" skipped "the C tests were not built"; return 0; }
    if ! git rev-parse --git-dir >/dev/null 2>&1; then report "Format and lint" skipped "not a git checkout"; return 0; fi
    if [ ! -e "$STAMPS/linters" ]; then report "Format and lint" skipped "they cannot be installed: build/logs/linters.log"; return 0; fi
    step "Format and lint" lint env PRE_COMMIT_HOME="$ROOT/build/pre-commit" "$PY" -m pre_commit run --all-files || rc=1
    report "Format and lint" "$([ $rc = 0 ] && echo passed || echo FAILED)" \
        "$([ $rc = 0 ] || echo "build/logs/lint.log ")($((SECONDS - start)) s)"
}

# Builds with clang, if it is installed and build/dev is new. The sanitizers' builds use the system's compiler.
dev_stage() { CC=${CC:-$(command -v clang || true)} c_stage "C, every check" dev; }

# The C tests, while Python's packages are installed and then beside Python's tests: these wait much, for ranks that do not come
# and for one another, and those do not.
c_stages() {
    dev_stage
    c_stage "C, ASan and UBSan" asan
    c_stage "C, TSan" tsan
}

# beside NAME COMMAND...: starts it in a process group of its own, with its output in build/logs/NAME.log; `joined` waits for all.
BESIDE=()
beside() {
    local name=$1
    shift
    echo "Beside what follows: build/logs/$name.log"
    set -m
    (trap end_step EXIT; TICKER=; RUNNING=; side=$name; renice -n 5 $BASHPID >/dev/null 2>&1 || true; "$@") >"$LOGS/$name.log" 2>&1 </dev/null &
    BESIDE+=($!)
    set +m
}
joined() {
    local lane
    for lane in "${BESIDE[@]}"; do wait "$lane" || report "What runs beside" FAILED "build/logs/[13]-*.log"; done
    BESIDE=()
}
end_beside() {
    local lane
    for lane in "${BESIDE[@]}"; do kill -- "-$lane" 2>/dev/null || true; done
    for lane in "${BESIDE[@]}"; do wait "$lane" 2>/dev/null || true; done
}
c_stages_beside() { beside 1-c c_stages; }
quick_stages_beside() { beside 1-c dev_stage; }

# Waits for the build "dev", since some of Python's tests use its libraries. False: it failed.
dev_built() {
    [ ${#BESIDE[@]} -gt 0 ] || return 0
    while [ ! -s "$LOGS/built.dev" ] && kill -0 "${BESIDE[0]}" 2>/dev/null; do sleep 0.2; done
    [ "$(cat "$LOGS/built.dev" 2>/dev/null)" = 0 ]
}

# A pytest too is in a process group of its own, which this shell ends when it is ended itself. By an interrupt: at that pytest ends what
# its tests have started, whose ranks are in sessions of their own. What has not ended half a minute later is killed.
PYTESTS=()
pytests_left() {
    local group
    for group in "${PYTESTS[@]}"; do group_lives "$group" && return 0; done
    return 1
}
end_pytests() {
    local group i
    for group in "${PYTESTS[@]}"; do kill -INT -- "-$group" 2>/dev/null || true; done
    for ((i = 0; i < 150; i++)); do
        pytests_left || return 0
        sleep 0.2
    done
    for group in "${PYTESTS[@]}"; do kill -KILL -- "-$group" 2>/dev/null || true; done
}
trap 'end_step; end_beside; end_pytests' EXIT

# NAME PYTEST OPTIONS: with its output in build/logs/NAME.log, too. RECORDED=FILE: with a trace of all its jobs in FILE.
pytest() {
    local name=$1 option clean=() recorder=()
    shift
    [ -z "${RECORDED:-}" ] || recorder=("$VENV/bin/fcdp-memtrace" record --quiet --force -o "$RECORDED" --)
    # Options of FCDP that the caller has set are not for the tests, which set their own.
    for option in $(compgen -e FCDP); do clean+=(-u "$option"); done
    env "${clean[@]}" "${recorder[@]}" "$PY" -m pytest -rfEs --durations=5 --junitxml "build/$name.xml" "$@" "${pytest_args[@]}" 2>&1 | tee -i "$LOGS/$name.log"
}

pytest_report() {   # TITLE NAME STATUS SECONDS
    local line
    # Its closing line: the recorder may say something behind it.
    line=$(grep -E '(passed|failed|skipped|deselected|errors?|no tests ran)[^[]* in [0-9.]+s' "$LOGS/$2.log" | tail -n 1 |
        sed 's/^=* *//; s/ *=*$//') || line="it did not end: build/logs/$2.log"
    # 5: nothing selected
    if [ "$3" = 5 ]; then report "$1" skipped "$line"
    else report "$1" "$([ "$3" = 0 ] && echo passed || echo "FAILED")" "$line ($4 s)"; fi
    while IFS= read -r line; do skip "$1: $line"; done < <(sed -n 's/^SKIPPED //p' "$LOGS/$2.log")
    sed -nE "s/^(FAILED|ERROR) /$1: /p" "$LOGS/$2.log" >>"$LOGS/failures.$side"
}

python_stage() {    # PYTEST OPTIONS
    local rc=0 start=$SECONDS
    dev_built || true
    echo "Python tests:"
    set -m
    (trap - EXIT; pytest pytest "$@") </dev/null &
    PYTESTS=($!)
    set +m
    wait "${PYTESTS[0]}" || rc=$?
    PYTESTS=()
    pytest_report "Python tests" pytest $rc $((SECONDS - start))
}

# Every state that a region was in, and every sum, in all training cases.
trace_report() {    # TITLE FILE
    local rc=0 start=$SECONDS
    step "$1" trace-check "$VENV/bin/fcdp-memtrace" check "$2" || rc=1
    ! grep -q ": 0 events" "$LOGS/trace-check.log" || rc=1  # nothing was recorded
    report "$1" "$([ $rc = 0 ] && echo passed || echo FAILED)" "$(grep -m 1 -E " events, |breaks the rule|^fcdp-memtrace: " "$LOGS/trace-check.log" | cut -c 1-120) ($((SECONDS - start)) s)"
}

ended() {           # NAME TITLE PID START: waits for a pytest beside, and shows its output where it failed
    local rc=0
    wait "$3" || rc=$?
    [ $rc = 0 ] || cat "$LOGS/$1.log"
    pytest_report "$2" "$1" $rc $((SECONDS - $4))
}

# started NAME PYTEST OPTIONS: a pytest beside, whose output is in its log alone. Its process is the last of PYTESTS.
started() {
    set -m
    (trap - EXIT; pytest "$@") >/dev/null </dev/null &
    set +m
    PYTESTS+=($!)
}

# The training cases keep the cores busy. The others wait much, for ranks that do not come, and for timeouts: TOOLS and JOBS
# start when the C tests or the cases have ended, so that all end at about the same time.
TOOLS=(tests/test_gpu_report.py tests/test_bench.py tests/test_clusters.py tests/test_install.py)
JOBS=(tests/lab tests/test_doctor.py tests/torch_plugin/test_kills.py)
python_stages() {
    local rc=0 start=$SECONDS begun others="not cases and not mutants and not next_torch and not frameworks"
    dev_built || true
    echo "Python tests; those but the training cases: build/logs/pytest-rest.log, pytest-tools.log and pytest-jobs.log there"
    started pytest-rest -m "$others" "${TOOLS[@]/#/--ignore=}" "${JOBS[@]/#/--ignore=}"
    set -m
    (trap - EXIT; RECORDED=build/cases.trace pytest pytest-cases -m "cases and not mutants and not frameworks") </dev/null &
    PYTESTS+=($!)
    set +m
    while kill -0 "${PYTESTS[1]}" 2>/dev/null && kill -0 "${BESIDE[0]}" 2>/dev/null; do sleep 1; done
    begun=$SECONDS
    started pytest-tools -m "$others" "${TOOLS[@]}"
    started pytest-jobs -m "$others" "${JOBS[@]}"
    wait "${PYTESTS[1]}" || rc=$?
    pytest_report "Python, training cases" pytest-cases $rc $((SECONDS - start))
    trace_report "Traces of the training cases" build/cases.trace
    ended pytest-tools "Python, tools" "${PYTESTS[2]}" "$begun"
    ended pytest-jobs "Python, jobs" "${PYTESTS[3]}" "$begun"
    ended pytest-rest "Python, the rest" "${PYTESTS[0]}" "$start"
    PYTESTS=()
}

rm -f "$LOGS"/{summary,skips,failures,built}.* build/cases.trace
case $what in
    quick)
        export TEST_COARSER=16 TEST_ROUNDS=2
        setup lint quick_stages_beside
        beside 3-lint lint_stage
        python_stage -m "not slow and not gpu" --ignore tests/torch_plugin --ignore tests/lab --ignore tests/frameworks   # slow, all of them; they import torch
        joined
        ;;
    frameworks)
        setup all
        python_stage -m "frameworks or not frameworks" tests/frameworks
        ;;
    matrix)
        export TEST_MATRIX=whole
        setup lint
        python_stage tests/torch_plugin/test_{matrix,on_sim,fingerprints,gathers}.py
        ;;
    gpu)
        setup lint
        if cuda_device; then
            c_stage "C on the CUDA driver" gpu
            python_stage -m gpu
        else
            report "C on the CUDA driver" skipped "no CUDA device can be reached (torch.cuda.is_available() is false)"
            report "Python tests on CUDA" skipped "the same"
        fi
        ;;
    all)
        setup all c_stages_beside
        beside 3-lint lint_stage
        if [ ${#pytest_args[@]} = 0 ]; then python_stages; else python_stage; fi
        joined
        ;;
esac

echo
if compgen -G "$LOGS/skips.*" >/dev/null; then
    echo "Skipped:"
    sed 's/^/  /' "$LOGS"/skips.*
fi
if [ -n "$(cat "$LOGS"/failures.* 2>/dev/null)" ]; then
    echo "Failed:"
    sed 's/^/  /' "$LOGS"/failures.*
fi
echo "Summary (tools/test.sh$([ $what = all ] || echo " --$what"), $SECONDS s in all):"
sed 's/^/  /' "$LOGS"/summary.*
if cut -c 40-47 "$LOGS"/summary.* | grep -q FAILED; then echo "FAILED."; exit 1; fi
if cut -c 40-47 "$LOGS"/summary.* | grep -qv skipped; then echo "All that ran passed."; else echo "Nothing ran."; fi
