import importlib.util

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
COLD = "tau0-slice"  # its jobs are torchrun's, and each rank imports all by itself


def have_fcdp():
    return importlib.util.find_spec("fcdp") is not None


needs_fcdp = pytest.mark.skipif(not have_fcdp(), reason="fcdp is not installed in this interpreter")


class Launches:
    """One job for each (what to run, configuration), started when a test first asks for it and kept for the session."""

    def __init__(self, factory):
        self.factory, self.known = factory, {}

    def get(self, names, configuration):
        key = (tuple(names), configuration)
        if key not in self.known:
            tmp = self.factory.mktemp(configuration)
            self.known[key] = launch.run_cases(
                names, tmp, CONFIGURATIONS.get(configuration), warm=configuration != COLD
            )
        return self.known[key]


@pytest.fixture(scope="session")
def launches(tmp_path_factory):
    return Launches(tmp_path_factory)
