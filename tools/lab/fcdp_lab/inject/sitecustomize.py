"""First on the PYTHONPATH of the ranks of a lab, fcdp-doctor and fcdp-plan profile: loads the probe, then whatever
sitecustomize would have been loaded."""

import importlib
import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def _is_here(entry):
    return os.path.abspath(entry or ".") == _HERE


def _load_probe():
    spec = importlib.util.spec_from_file_location("fcdp_lab_probe", os.path.join(os.path.dirname(_HERE), "probe.py"))
    probe = importlib.util.module_from_spec(spec)
    sys.modules["fcdp_lab_probe"] = probe
    spec.loader.exec_module(probe)
    probe.install()


def _load_next_sitecustomize():
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", [p for p in sys.path if not _is_here(p)])
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


try:
    if os.environ.get("LAB_PROBE_DIR") and os.environ.get("RANK"):
        _load_probe()
    if os.environ.get("DOCTOR_FOLDER") and os.environ.get("RANK"):
        importlib.import_module("fcdp_doctor.watch").install()
    if os.environ.get("PLAN_FOLDER") and os.environ.get("RANK"):
        importlib.import_module("fcdp_plan.watch").install()
except Exception as error:  # a lab without figures is better than a script that does not start
    print(f"fcdp-lab: the probe could not be loaded: {error!r}", file=sys.stderr)
sys.path[:] = [p for p in sys.path if not _is_here(p)]
_load_next_sitecustomize()
