"""Each operator gives the CPU's numbers, bit for bit, and so do its gradients."""

import pathlib
import re

import pytest

# The names are read, not imported: ops_job.py makes its process one with a simulated device.
SOURCE = pathlib.Path(__file__).with_name("ops_job.py").read_text()


@pytest.fixture(scope="module")
def results(run_job):
    return run_job("ops_job.py", "OUT")[0]


def test_every_operator_is_the_cpus_bit_for_bit(results):
    cases = results["cases"]
    assert len(cases) > 100
    assert set(re.findall(r'unary\("(\w+)"', SOURCE)) <= set(cases)
    wrong = {name: said for name, said in cases.items() if said != "equal"}
    assert not wrong


def test_the_host_waits_for_answers_alone(results):
    """A value, or a shape that depends on one. Anything else would hide an order that is missing."""
    waited = set(results["counts"]["waited_for"])
    assert waited == {"aten::_local_scalar_dense", "aten::nonzero", "aten::_unique2"}
