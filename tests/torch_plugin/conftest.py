import importlib.util

import pytest

import launch
from configurations import CONFIGURATIONS, ON_SIM


def have_fcdp():
    return importlib.util.find_spec("fcdp") is not None


needs_fcdp = pytest.mark.skipif(not have_fcdp(), reason="fcdp is not installed in this interpreter")


class Launches:
    """One job for each (cases, configuration), started when a test first asks for it and kept for the session. A test
    that asks for fewer cases gets the job that had them too: the matrix, which has most, comes first."""

    def __init__(self, factory):
        self.factory, self.known = factory, {}

    def get(self, names, configuration, warm=True):
        """Results by case, and the jobs (launch.run_cases)."""
        for (known, its_configuration), found in self.known.items():
            if its_configuration == configuration and known.issuperset(names):
                return found
        tmp = self.factory.mktemp(configuration)
        found = launch.run_cases(names, tmp, {**CONFIGURATIONS, **ON_SIM}.get(configuration), warm=warm)
        self.known[frozenset(names), configuration] = found
        return found


@pytest.fixture(scope="session")
def sim_built():
    """Jobs load what this has built. The tests' own process must not: it would have the device for good."""
    launch.build_sim()


@pytest.fixture(scope="session")
def launches(tmp_path_factory):
    return Launches(tmp_path_factory)
