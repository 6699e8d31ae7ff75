"""The demo's training, and what it takes of the host: python host_job.py cpu|sim OUT. Each rank writes rankN.json: what FCDP
says of host memory after each step, the physical memory behind it, the CPUs of its threads, and its parameters, hashed."""

import hashlib
import json
import os
import pathlib
import runpy
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
RANK = int(os.environ["RANK"])
if os.environ.get("FCDP_SIM_ROOT"):  # each rank of a node has a device of its own, in another socket
    os.environ["FCDP_SIM_NUMA"] = str(RANK % 2)
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

WIDTH = ("--layers", "3", "--dim", "504", "--seq", "16", "--steps", "3")


def main(device, out):
    if device == "sim":
        sys.path.insert(0, str(ROOT / "sim" / "torch"))
        import torch_sim  # noqa: F401
    import fcdp

    seen = {"steps": [], "threads": torch.get_num_threads()}

    def physical_bytes():
        """The node's host memory is a memfd that its ranks share."""
        files = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
        return sum(
            os.stat(path).st_blocks * 512
            for path in files
            if os.path.exists(path) and "memfd:fcdp-host" in os.readlink(path)
        )

    def look(optimizer, *_):
        stats = fcdp.stats()
        seen["w"] = sum(group["bytes"] for group in stats["groups"])
        seen["steps"].append(stats["host"] | {"bytes": stats["host_bytes"]["peak"], "physical": physical_bytes()})
        values = [p.detach().to_local().cpu() for group in optimizer.param_groups for p in group["params"]]
        seen["parameters"] = hashlib.sha256(b"".join(v.numpy().tobytes() for v in values)).hexdigest()
        seen["cpus"] = sorted(
            {str(sorted(os.sched_getaffinity(int(thread)))) for thread in os.listdir("/proc/self/task")}
        )
        seen["threads_after"] = torch.get_num_threads()

    register_optimizer_step_post_hook(look)
    sys.argv = ["gpt.py", *WIDTH, "--device", "cpu" if device == "cpu" else "auto"]
    runpy.run_path(str(ROOT / "tools" / "demo" / "gpt.py"), run_name="__main__")
    pathlib.Path(out, f"rank{RANK}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
