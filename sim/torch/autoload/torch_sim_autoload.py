"""With this folder on PYTHONPATH, `import torch` brings the simulated device, as a vendor's package brings its own:
torch calls load() by the entry point beside this file (its group is "torch.backends")."""

import os
import sys


def load() -> None:
    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if folder not in sys.path:
        sys.path.append(folder)
    import torch_sim  # noqa: F401
