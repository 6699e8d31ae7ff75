"""Measures how fast slices go to a file of FCDP_SPILL_DIR and come back, beside fio on the same disk, by io_uring with the
same depth (16) and block size (1 MiB), past the page cache, in turns. The slices are copied from and to the simulated
device, and each block is checked. The last line is for scripts:

    spill: write W of fio's, read R
"""

import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
BENCH = ROOT / "build" / "release" / "tests" / "tiering" / "bench_tiering_spill"


def arguments():
    parser = argparse.ArgumentParser(
        prog="tools/bench.sh spill", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "directory", nargs="?", default=tempfile.gettempdir(), help="on the disk (default: %(default)s)"
    )
    parser.add_argument("--slices", type=int, default=24, help="default: %(default)s")
    parser.add_argument("--size", type=int, default=32, help="of a slice, in MiB (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    return parser.parse_args()


def fio(file, way, bytes_):
    command = [
        "fio",
        "--name=spill",
        f"--filename={file}",
        f"--rw={way}",
        "--bs=1M",
        "--iodepth=16",
        f"--size={bytes_}",
    ]
    command += ["--ioengine=io_uring", "--direct=1", "--fixedbufs=1", "--output-format=json"]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(out[out.index("{") :])["jobs"][0][way]["bw_bytes"]


def main():
    args = arguments()
    if not shutil.which("fio"):
        sys.exit("tools/bench.sh spill: needs fio: install it (Debian, Ubuntu, Fedora, conda-forge: fio)")
    library = next((ROOT / "build" / "release").rglob("libfcdp_simgpu.so"))
    env = os.environ | {"FCDP_DRIVER": "sim", "FCDP_SIM_LIBRARY": str(library)}
    rounds = []
    print(f"{args.slices} slices of {args.size} MiB in {args.directory}, MB/s\n")
    print("round   write     fio       read      fio")
    with tempfile.TemporaryDirectory(prefix="fcdp-bench-", dir=args.directory) as folder:
        for n in range(args.rounds):
            command = [BENCH, folder, str(args.slices), str(args.size)]
            ours = json.loads(subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout)
            file = os.path.join(folder, "fio")
            theirs = {way: fio(file, way, args.slices * args.size << 20) for way in ("write", "read")}
            os.unlink(file)
            rounds.append({way: ours[way] / theirs[way] for way in theirs})
            cells = (f"{value / 1e6:<10.0f}" for way in theirs for value in (ours[way], theirs[way]))
            print(f"{n + 1:<8}" + "".join(cells), flush=True)
    share = {way: statistics.median(one[way] for one in rounds) for way in ("write", "read")}
    print(f"\nspill: write {share['write']:.2f} of fio's, read {share['read']:.2f}")


if __name__ == "__main__":
    main()
