"""What the examples need where there is no GPU; where there is one, this does nothing. Import it first.

- gloo cannot average: FSDP2 is told to sum, and to divide by itself.
- accelerate trains DDP on CPUs, even where FSDP is asked for, and with it transformers' Trainer and TRL. Here it
  trains FSDP.
- torchtitan takes CUDA where it finds no device, and asks it for its memory. Here it takes the CPU.
"""

import functools
import importlib.abc
import importlib.util
import os
import sys
import types

import torch
import torch.distributed.fsdp


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function with a module, once that has been imported."""

    def __init__(self, name, action):
        self.name, self.action = name, action

    def find_spec(self, name, path, target=None):
        if name != self.name or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            self.action(module)

        spec.loader.exec_module = exec_module
        return spec


def _sum_only(fully_shard):
    @functools.wraps(fully_shard)
    def sharded(module, *args, **kwargs):
        module = fully_shard(module, *args, **kwargs)
        for each in module if isinstance(module, list) else [module]:
            each.set_force_sum_reduction_for_comms(True)
        return module

    return sharded


def _shard_on_cpus(state):
    """accelerate.state: where several CPU processes are found and FSDP was asked for, FSDP it is."""
    begin = state.AcceleratorState.__init__

    def __init__(self, mixed_precision=None, *args, fsdp_plugin=None, **kwargs):
        begin(self, mixed_precision, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is None or self.distributed_type != state.DistributedType.MULTI_CPU:
            return
        if self._mixed_precision != "no":
            fsdp_plugin.set_mixed_precision(self._mixed_precision)
        self.fsdp_plugin = fsdp_plugin
        self.distributed_type = state.DistributedType.FSDP
        state.PartialState._shared_state["distributed_type"] = self.distributed_type

    state.AcceleratorState.__init__ = __init__


def _take_the_cpu(utils):
    """torchtitan.tools.utils: the device, and a module of what torch.cuda would say of it."""
    cpu = types.ModuleType("cpu")
    cpu.__dict__.update(torch.cpu.__dict__)
    cpu.current_device = lambda: 0
    cpu.get_device_name = lambda device=None: "CPU"
    cpu.get_device_properties = lambda device=None: types.SimpleNamespace(total_memory=1)
    cpu.memory_stats = lambda device=None: {}
    cpu.empty_cache = cpu.reset_peak_memory_stats = lambda: None
    utils.device_type, utils.device_module = "cpu", cpu


if not torch.cuda.is_available():
    torch.distributed.fsdp.fully_shard = _sum_only(torch.distributed.fsdp.fully_shard)
    os.environ |= {"ACCELERATE_USE_CPU": "true", "ACCELERATE_TORCH_DEVICE": "cpu"}  # FSDP1 takes no cpu:0
    sys.meta_path.insert(0, _AfterImport("accelerate.state", _shard_on_cpus))
    sys.meta_path.insert(0, _AfterImport("torchtitan.tools.utils", _take_the_cpu))
