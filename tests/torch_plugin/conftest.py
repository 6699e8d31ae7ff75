import importlib.util
import os
import zlib

import pytest

import launch

PLAIN = "plain"
CONFIGURATIONS = {
    f"tau{tau}-{restore}": {
        "FCDP": "1",
        "FCDP_LOCAL_SIZE": "2",
        "FCDP_TAU": str(tau),
        "FCDP_RESTORE": restore,
        "FCDP_TIMEOUT": "60",
        **others,
    }
    for tau, restore, others in (
        (0, "slice", {}),
        (0, "whole", {"FCDP_COALESCE": "0", "FCDP_MAPPING": "exact"}),
        (1, "slice", {"FCDP_COALESCE": "0", "FCDP_FINGERPRINT": "device"}),
        (1, "whole", {"FCDP_MAPPING": "exact"}),
    )
}
# Each has both taus, both ways to restore, and both mappings.
PAIRS = (("tau0-slice", "tau1-whole"), ("tau0-whole", "tau1-slice"))
IN_ALL = ("accumulate_with_sync",)  # cases by which tests see that a configuration is what it says
COLD = "tau0-slice"  # the matrix's job is torchrun's there, and each rank imports all by itself


def is_whole():
    """TEST_MATRIX=whole (tools/test.sh --matrix): what else is done in one of several ways is done in all."""
    return os.environ.get("TEST_MATRIX") == "whole"


def configurations_of(name):
    """In which a case of the matrix trains: one pair, by its name."""
    if name in IN_ALL or is_whole():
        return tuple(CONFIGURATIONS)
    return PAIRS[zlib.crc32(name.encode()) % 2]


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
        found = launch.run_cases(names, tmp, CONFIGURATIONS.get(configuration), warm=warm)
        self.known[frozenset(names), configuration] = found
        return found


@pytest.fixture(scope="session")
def launches(tmp_path_factory):
    return Launches(tmp_path_factory)
