"""How much device memory a rank of job.py takes. All runs on CPUs, so this is memory of its process: what it holds above
what it held before the model was made, at the fullest point of all that every peer passes alike."""

import gc
import json
import os

import torch
import torch._dynamo  # an optimizer would import it, behind the baseline

MEMFD, DEVICE = "/memfd:fcdp-", "/memfd:fcdp-simgpu-device"


def taken_bytes():
    """Of memory that a device would give. FCDP's shared memory counts where it is the simulated device's, mapped or not;
    the rest of it is host memory, such as the node's copy. A process with FCDP has no other shared memory."""
    with open("/proc/self/status") as status:
        kib = {name: int(value.split()[0]) for name, value in (x.split(":", 1) for x in status) if name[:3] == "Rss"}
    own = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target, inode = os.readlink(f"/proc/self/fd/{name}"), os.fstat(int(name))
        except OSError:  # the descriptor of the listing itself
            continue
        if target.startswith(MEMFD):
            own[inode.st_ino] = inode.st_blocks * 512 if target.startswith(DEVICE) else 0
    return kib["RssAnon"] * 1024 + (sum(own.values()) if own else kib["RssShmem"] * 1024)


class Watch:
    """From the making of gpt.py's model on: where a block begins in forward and in backward, and before and behind each
    backward. The first optimizer step does not count, as the optimizer's state is made at its end."""

    def __init__(self, gpt):
        self.baseline = self.w = self.n_backwards = self.most = 0
        self.n_first = 0  # backwards that do not count
        self._watch_model(gpt)
        self._watch_block(gpt.Block)
        self._watch_backward()

    def _look(self):
        if self.n_backwards >= self.n_first:
            self.most = max(self.most, taken_bytes())

    def _watch_model(self, gpt):
        model_class = gpt.GPT

        def make(args):
            gc.collect()
            self.baseline, self.n_first = taken_bytes(), args.micro_batches
            model = model_class(args)
            self.w = sum(p.nbytes for p in model.parameters())
            return model

        gpt.GPT = make

    def _watch_block(self, block_class):
        forward = block_class.forward

        def watched(block, x):
            self._look()
            y = forward(block, x)
            y.register_hook(lambda _: self._look())
            return y

        block_class.forward = watched

    def _watch_backward(self):
        backward = torch.Tensor.backward

        def watched(tensor, *args, **kwargs):
            self._look()
            backward(tensor, *args, **kwargs)
            self._look()
            self.n_backwards += 1

        torch.Tensor.backward = watched

    def write(self, path):
        """Adds this rank's line."""
        with open(path, "a") as file:
            file.write(json.dumps({"W_bytes": self.w, "device_bytes": self.most - self.baseline}) + "\n")
