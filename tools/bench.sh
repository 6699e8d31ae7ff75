#!/bin/bash
# tools/bench.sh: see --help below.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

usage() {
    cat <<'END'
tools/bench.sh [alloc | trace | --help | --version]
tools/bench.sh trace --steps [LAB OPTIONS]
tools/bench.sh overlap [OPTIONS OF fcdp-overlap]
tools/bench.sh agreement [OPTIONS OF fcdp-agreement]
tools/bench.sh codec [OPTIONS OF fcdp-codec]
tools/bench.sh pressure [--budgets N] [--steps N] [--picture X.svg [--pages N]] [-- OPTIONS OF tools/demo/gpt.py]
tools/bench.sh pressure --batches [--pages N] [--steps N] [-- OPTIONS OF tools/demo/gpt.py]
tools/bench.sh host [--layers N] [--steps N] [--rounds N] [--json FILE]
tools/bench.sh host-ahead [--pairs N] [--steps N] [--seconds S] [--only WORD]
tools/bench.sh policies
tools/bench.sh changed [--steps N] [--lr RATE ...] [--layers N] [--dim N] [--batch N]
tools/bench.sh spill [DIRECTORY] [--slices N] [--size MIB] [--rounds N]
tools/bench.sh frameworks [--write] [--rate RATE] [--repeat N] [NAME ...]
tools/bench.sh plan [--jobs A,B] [--rates A,B] [--modes A,B] [--rounds N] [--json FILE] [--again FILE ...]
tools/bench.sh peers [--memory] [--write] [--rate RATE] [--repeat N]
tools/bench.sh curves [--steps N] [--picture X.svg] [--write] [-- OPTIONS OF tools/demo/gpt.py]

Without arguments: sets everything up (once), then measures the allocator on the simulated device, and on the CUDA
device where one answers: recorded training runs, replayed into FCDP's allocator and into models of PyTorch's; what a
cache hit costs on one thread and on two; what mapping and unmapping pages costs; what moving a region costs beside
plain copies. On a CUDA device it also trains a GPT under each allocator. It ends with what could not be measured
here. About a minute after the set-up; ten more with a CUDA device.

alloc: replays the recorded runs alone, on the simulated device and without the set-up. For each run it prints the
smallest budget in which it ends, and driver calls. A few seconds after the build.

trace: measures what an event of the trace costs, in nanoseconds, on one thread and on two that write at once. It ends
with 1 where one thread takes more than 50. A few seconds after the build.
With --steps: the step time of a small GPT with the trace on over that with it off, as the median of 20 pairs of runs
(--repeat N: another number). It ends with 1 where that is above 1.01. About ten minutes after the set-up.

overlap: measures how much of its traffic the engine hides. It trains 16 groups as FSDP2 does, as 2 nodes x 2 ranks,
each rank a process, on the simulated device and network. Their rates are set so that a step is bound by compute, by
PCIe, or by the link between the nodes. For each bound it prints the step's time over the least that is possible (the
busiest resource, and the begin and end that nothing hides), and what the steady state costs in driver calls and
waits. Timelines and pictures are in build/overlap. Half a minute; no GPU is used.
  --mapping exact    maps and unmaps pages at each use
  --prefetch 0       gathers nothing ahead
  --transport nccl   uses NCCL's entry points, of a double
  --codec delta      sends exact differences (FCDP_CODEC=delta), and bounds count their bytes. It also prints a step that
                     compute binds over the same without the codec, for links of 1, 10 and 25 Gbit/s. It ends with 1
                     where a step takes more than 1.05 of its bound, or 1.02 of the one without. Seven minutes
  --budgets          instead: FCDP_POLICY=next-use with all groups on the device, and with less and less room for them,
                     where a step's moves over PCIe take as long as its compute; with prefetch and without. It ends with
                     1 where a step takes more than 1.05 of the first one at 50 % of W, or 1.15 with no room. A minute
  --plans            instead: in less and less device memory, the plan that fcdp-plan search finds, beside its predicted
                     step and the best fixed FCDP_TAU. It ends with 1 where a prediction is off by more than 5 %, or a
                     fixed setting is faster. Two minutes

agreement: measures how long a device idles for the agreements of a micro-batch, before which its ranks know nothing
of what is stale: for 8 G parameters on 2 and on 64 nodes of 8 ranks, on the simulated device's clock, beside what
gloo's ring of all ranks would cost. Half a minute; no GPU is used.
  --memory 3000      the device reads shards at so many GB/s
  --hop 50           microseconds between nodes

codec: measures the codec of exact differences between the weights of two steps, on modelled weights at four learning
rates: bits per weight, and how fast one core encodes and decodes, beside memcpy. Half a minute; no GPU is used.
  --size MIB         of each array (64)
  --rounds N         of which the fastest counts (5)
  --portable         the code for any processor, also where there is a faster one

pressure: trains a small GPT by FSDP2 as 2 nodes x 2 ranks on torch.device("sim"), where tensors and gathered parameters
share FCDP_DEVICE_BUDGET. It finds the least budget with which plain FSDP2 trains, and prints a table of FCDP=1
FCDP_TAU=1 from all that is needed down to that: whether memory was out, whether training was bitwise equal, gathers
avoided, bytes moved. It ends with 1 where memory was out or training differed. Three minutes after the set-up; needs
g++ or clang++.
  --picture X.svg    draws the job of a budget in the middle, as fcdp-memtrace plot does
  --pages N          with --picture: draws the job of N pages of 2 MiB, and trains no other
  --batches          instead: finds plain FSDP2's largest batch in N pages, alone and with random allocations beside the
                     training, and trains each policy there and at the next batch. It ends with 1 where memory was out at
                     plain's largest, where training differed, or where next-use still evicts once it knows the step

host: measures what the training loop's thread spends in an unshard and a reshard of a cached group of nine parameters,
beside what it spends in plain FSDP2's: CPU time, on torch.device("sim"), of runs that take turns. Two minutes after the
set-up; needs g++ or clang++.

host-ahead: measures whether the host runs ahead of the device under PyTorch. A GPT trains by FSDP2 as 2 nodes x 2 ranks
on torch.device("sim"), at a rate at which compute takes most of a step: plain, and with FCDP=1 in both mappings. It
prints the step over what a rank computes of it alone, of which the device waits for nothing; and every call of the
driver in which the host waited, by kind. It ends with 1 where a step takes more than 1.05 of its bound with slots or
1.10 with exact mapping, or where the host waits anywhere but in agreements (with exact mapping, and
for pages). About five minutes after the set-up, on an
otherwise idle machine; needs g++ or clang++.
  --pairs 15         that many pairs of blocks, of a step and its bound in turn (5)
  --only slots       FSDP2, slots or exact alone

policies: prints how many bytes a step moves between device and host with FCDP_POLICY=tau at its best, with next-use,
and at the least, for several jobs and budgets. The order of uses is recorded from these jobs, small ones by FSDP2 on
CPUs; the rest is computed. It ends with 1 where next-use is above 1.05 of the least, or above tau. About two minutes
after the set-up.

changed: measures how many bytes a step changes of the weights (fcdp.changed()) at three learning rates, and what asking
after each step takes; and rebuilds the weights in another process, which ends it with 1 where they differ. Up to ten
minutes after the set-up.

spill: measures how fast slices go to FCDP_SPILL_DIR and come back, beside fio on the same disk in the same run, with the
same depth and block size. Half a minute after the set-up; needs fio, and 1.6 GB in DIRECTORY (default: the temporary one).

frameworks: trains each script of examples/ on 2 emulated nodes of 2 ranks with 100 Mbit/s between them, as it is and
with FCDP=1, and then a small GPT with the settings that people use on slow links. It prints the tables of
docs/frameworks.md. It ends with 1 where training that must be bitwise equal was not. About twenty minutes after the set-up; needs
root, or a kernel that lets users make namespaces.
  --write            puts the tables into docs/frameworks.md
  --rate 1gbit       another link
  --repeat 3         runs all of a table so often, interleaved, and prints medians
  NAME ...           these rows alone, by the name of the example, or "full", "bf16" or "lora" for the settings

plan: profiles four small jobs (fcdp-plan profile --calibrate, on links that are not shaped), predicts their steps in five
modes at three rates, and trains them on 2 emulated nodes of 2 ranks (fcdp-lab), in three rounds. It prints predictions beside
measurements, the spread of both, the errors' median and worst, and whether the order of the modes was right. Two hours, on a
machine that does nothing else; needs root, or a kernel that lets users make namespaces.
  --jobs full,LoRA   these jobs alone; --rates and --modes likewise
  --rounds N         another number
  --json FILE        writes the figures of each run there, and the profiles
  --again FILE ...   runs nothing: predicts anew from such files, and prints one table of all

peers: trains the demo's GPT on 2 emulated nodes of 2 ranks with 100 Mbit/s between them, by FSDP2 and its settings, FCDP,
megatron-fsdp and DeepSpeed, with 1 and with 4 micro-batches per optimizer step. Then it measures the device memory of a
rank, in runs of a larger model with 4 micro-batches. It prints the table of docs/peers.md. Each library is installed from
PyPI into an environment of its own in build/peers, once; one that cannot be is left out, and a line says why. It ends
with 1 where training that must be bitwise equal was not. About twenty-five minutes after the set-up; needs root, or a
kernel that lets users make namespaces.
  --memory           measures device memory alone, and writes that column alone; five minutes
  --write            puts the table into docs/peers.md
  --rate 1gbit       another link
  --repeat 3         runs all of them so often, interleaved, and prints medians

curves: trains the demo's GPT on 2 emulated nodes of 2 ranks for 200 steps by FSDP2, FCDP, HSDP, and FCDP with each setting
that adds or rounds in another way. It prints how far the losses are apart. It ends with 1 where FCDP=1 alone has other
losses than FSDP2. About ten minutes after the set-up; needs root, or a kernel that lets users make namespaces.
  --picture X.svg    draws the losses, one over the other
  --write            draws docs/loss-curves.svg
  --steps 1000       another number of optimizer steps
END
}

what=${1:-all}
case $what in
    all | alloc | trace) shift $(($# > 0)) ;;
    overlap | agreement | codec | pressure | host | host-ahead | policies) shift ;;
    changed | spill | frameworks | plan | peers | curves) shift ;;
    -h | --help) usage; exit 0 ;;
    --version) setup_version; exit 0 ;;
    *) usage >&2; exit 2 ;;
esac

trace_steps() {     # OPTIONS OF fcdp-lab
    mkdir -p out
    run fcdp-lab --nodes 2 --ranks 2 --rate 1gbit --mode 'off: FCDP=1 FCDP_TRACE=0' --mode 'on: FCDP=1 FCDP_TRACE=1' \
        --modes off,on --repeat 20 --json out/trace.json "$@" -- tools/demo/gpt.py --dim 168 --layers 8 --steps 24
    "$PY" tools/bench/trace_overhead.py out/trace.json
}

targets=(fcdp_simgpu fcdp-replay bench_heap bench_vrange bench_tiering_moves)
build_benches() {
    { cmake --preset release || { rm -rf build/release && cmake --preset release; }; } && cmake --build --preset release --target "${targets[@]}"
}

replay() { run build/release/tools/replay/fcdp-replay "$@" tools/replay/traces/{,others/,jobs/}*.txt.gz; }

measure() {         # DRIVER
    export FCDP_DRIVER=$1
    echo
    echo "== Replays"
    replay || true
    echo
    echo "== Hits"
    run build/release/tests/alloc/bench_heap
    echo
    echo "== Pages"
    run build/release/tests/alloc/bench_vrange
    echo
    echo "== Regions"
    run build/release/tests/tiering/bench_tiering_moves
}

# The report's last line comes last, behind what is said of the pictures.
overlap() {         # OPTIONS OF fcdp-overlap
    local out=$ROOT/build/overlap rc=0 name rank ranks
    rm -rf "$out"
    mkdir -p "$out"
    if [[ " $* " =~ \ --(budgets|plans)\  ]]; then
        run build/release/tools/bench/overlap/fcdp-overlap "$@"
        return
    fi
    run build/release/tools/bench/overlap/fcdp-overlap --timelines "$out" "$@" >"$out/report.txt" || rc=$?
    [ $rc -ne 2 ] || exit 2
    sed '$d' "$out/report.txt"
    for name in compute pcie link; do
        [ -s "$out/$name.0.json" ] || exit 1
        ranks=()
        for rank in 0 1 2 3; do ranks+=("rank $rank=$out/$name.$rank.json"); done
        "$PY" sim/gpu/merge_timelines.py "$out/$name.json" "${ranks[@]}"
        "$PY" tools/bench/overlap/timelines.py "$out/$name.svg" "one step bound by $name, rank 0" "$out/$name.0.json"
        echo "build/overlap/$name.json (for Perfetto), build/overlap/$name.svg"
    done
    tail -n 1 "$out/report.txt"
    return $rc
}

if [ "$what" = trace ] && [ "${1:-}" = --steps ]; then
    shift
    setup demo
    trace_steps "$@"
    exit
fi
case $what in
    pressure) setup test; run "$PY" tools/bench/pressure/sweep.py "$@"; exit ;;
    host) setup test; run "$PY" tools/bench/host.py "$@"; exit ;;
    host-ahead) setup test; run "$PY" tools/bench/host_ahead.py "$@"; exit ;;
    changed) setup test; run "$PY" tools/bench/changed.py "$@"; exit ;;
    frameworks) setup all; run "$PY" tools/bench/frameworks.py "$@"; exit ;;
    plan) setup test; run "$PY" tools/bench/plan.py "$@"; exit ;;
    peers) setup demo; run "$PY" tools/bench/peers/compare.py "$@"; exit ;;
    curves) setup demo; run "$PY" tools/bench/curves.py "$@"; exit ;;
esac
case $what in
    alloc) targets=(fcdp_simgpu fcdp-replay) ;;
    trace) targets=(bench_trace) ;;
    agreement) targets=(fcdp_simgpu fcdp-agreement) ;;
    codec) targets=(fcdp-codec) ;;
    policies) setup test; targets=(fcdp-policies) ;;
    spill) setup test; targets=(fcdp_simgpu bench_tiering_spill) ;;
    *) setup test ;;
esac
if [ "$what" = overlap ]; then
    targets=(fcdp_simgpu fcdp-overlap)
    step "The bench: build" release-build build_benches
    echo
    overlap "$@"
    exit
fi
if [ "$what" = spill ]; then
    step "The bench: build" release-build build_benches
    run "$PY" tools/bench/spill.py "$@"
    exit
fi
if [ "$what" = policies ]; then
    step "The bench: build" release-build build_benches
    run "$PY" tools/bench/policies/table.py "$@"
    exit
fi
step "The benchmarks: build" release-build build_benches
if [ "$what" = codec ]; then
    run build/release/tools/bench/codec/fcdp-codec "$@"
    exit
fi
FCDP_SIM_LIBRARY=$(find "$ROOT/build/release/sim/gpu" -name 'libfcdp_simgpu.so' | head -n 1)
export FCDP_SIM_LIBRARY
if [ "$what" = agreement ]; then
    run build/release/tools/bench/agreement/fcdp-agreement "$@"
    exit
fi
if [ "$what" = trace ]; then
    run build/release/tests/alloc/bench_trace
    exit
fi
if [ "$what" = alloc ]; then
    FCDP_DRIVER=sim replay --budget 1.05 --calls 5
    exit
fi
echo
echo "On the simulated device:"
measure sim
echo
if cuda_device; then
    echo "On the CUDA device:"
    measure cuda
    echo
    echo "== Training"
    unset FCDP_DRIVER
    run "$PY" tools/bench/training.py
else
    echo "No CUDA device can be reached (torch.cuda.is_available() is false): nothing above is of a GPU."
fi
