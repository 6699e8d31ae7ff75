"""What plain FSDP2 holds for gathered parameters, counted from its own schedule: the unsharded storages that it
allocates and frees, and the flat buffers its collectives gather into."""

import itertools
import weakref

import torch


class Ledger:
    def __init__(self):
        self.params = weakref.WeakSet()
        self.buffers, self.keys = {}, itertools.count()
        self.peak = 0

    def live(self):
        outputs = sum(
            t.untyped_storage().size()
            for p in self.params
            if "free_unsharded_param" not in p.__dict__  # else FCDP counts it
            for t in p.all_gather_outputs
        )
        return outputs + sum(self.buffers.values())

    def counted(self, result):
        """The same AllGatherResult. Its buffer counts for as long as FSDP2 holds the result: gloo's thread holds the
        tensor for a moment more, which would make the peak a matter of chance."""
        size, buffers = result.all_gather_output.untyped_storage().size(), self.buffers
        if not size:  # FCDP's result: it gathered into its own pages
            return result

        class Counted(type(result)):
            def __del__(self):
                buffers.pop(key, None)

        key = next(self.keys)
        buffers[key] = size
        return Counted(*result)

    def look(self):
        self.peak = max(self.peak, self.live())

    def reset(self):
        self.peak = self.live()


def open_ledger():
    from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group

    ledger = Ledger()
    gather, allocate = _fsdp_param_group.foreach_all_gather, _fsdp_param.FSDPParam.alloc_all_gather_outputs

    def foreach_all_gather(fsdp_params, *args, **kwargs):
        result = ledger.counted(gather(fsdp_params, *args, **kwargs))
        ledger.params.update(fsdp_params)
        ledger.look()
        return result

    def alloc_all_gather_outputs(param):
        allocate(param)
        ledger.look()

    _fsdp_param_group.foreach_all_gather = foreach_all_gather
    _fsdp_param.FSDPParam.alloc_all_gather_outputs = alloc_all_gather_outputs

    def close():
        _fsdp_param_group.foreach_all_gather = gather
        _fsdp_param.FSDPParam.alloc_all_gather_outputs = allocate

    ledger.close = close
    return ledger


def parameter_bytes(model):
    return sum(p.numel() * p.element_size() for p in model.parameters())


class Tower(torch.nn.Module):
    """Equal blocks of several MiB between two ends. `exact`: every group is a whole number of 2 MiB pages."""

    def __init__(self, n_blocks=3, exact=True):
        super().__init__()
        width = 1024
        self.first = torch.nn.Linear(512, width, bias=False)
        self.last = torch.nn.Linear(width, 512, bias=False)

        def block():
            if exact:
                return torch.nn.Sequential(
                    torch.nn.Linear(width, width, bias=False),
                    torch.nn.GELU(),
                    torch.nn.Linear(width, width, bias=False),
                )
            return torch.nn.Sequential(
                torch.nn.LayerNorm(width), torch.nn.Linear(width, 999), torch.nn.GELU(), torch.nn.Linear(999, width)
            )

        self.blocks = torch.nn.ModuleList(block() for _ in range(n_blocks))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)
