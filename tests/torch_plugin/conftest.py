import fcntl
import importlib.util
import os
import pickle

import pytest

import launch
from configurations import CONFIGURATIONS, ON_SIM, REDUCED


def have_fcdp():
    return importlib.util.find_spec("fcdp") is not None


needs_fcdp = pytest.mark.skipif(not have_fcdp(), reason="fcdp is not installed in this interpreter")


class Launches:
    """One job for each (cases, configuration), started when a test first asks for it and kept for the session: of all of
    pytest-xdist's processes, in `folder`. A test that asks for fewer cases gets the job that had them too: the matrix,
    which has most, comes first."""

    def __init__(self, folder):
        self.folder, self.known = folder, {}
        folder.mkdir(exist_ok=True)

    def get(self, names, configuration, warm=True):
        """Results by case, and the jobs (launch.run_cases)."""
        if not (found := self._found(names, configuration)):
            with open(self.folder / f"{configuration}.lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                self._read(configuration)
                if not (found := self._found(names, configuration)):
                    found = self.known[configuration, frozenset(names)] = self._run(names, configuration, warm)
        return found

    def _found(self, names, configuration):
        known = self.known.items()
        return next((found for (its, had), found in known if its == configuration and had.issuperset(names)), None)

    def _read(self, configuration):
        """What another process has run."""
        for path in self.folder.glob(f"{configuration}.*.results"):
            with open(path, "rb") as file:
                names, found = pickle.load(file)
            self.known[configuration, names] = found

    def _run(self, names, configuration, warm):
        n = len([*self.folder.glob(f"{configuration}.*.results")])
        env = {**CONFIGURATIONS, **ON_SIM, **REDUCED}.get(configuration)
        found = launch.run_cases(names, self.folder / f"{configuration}.{n}", env, warm=warm)
        with open(self.folder / f"{configuration}.{n}.results", "wb") as file:
            pickle.dump((frozenset(names), found), file)
        return found


@pytest.fixture(scope="session")
def sim_built():
    """Jobs load what this has built. The tests' own process must not: it would have the device for good."""
    launch.build_sim()


@pytest.fixture(scope="session")
def launches(tmp_path_factory):
    session = tmp_path_factory.getbasetemp()
    return Launches((session.parent if "PYTEST_XDIST_WORKER" in os.environ else session) / "launches")
