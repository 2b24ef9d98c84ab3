"""Real parts of a deployment, which the tests start and end. `make test-real` runs them where they are installed."""

import os
import shutil
from collections.abc import Iterator

import pytest

from tests.real.slurm import Slurm


@pytest.fixture(scope="session")
def slurm(tmp_path_factory) -> Iterator[Slurm]:
    """A Slurm cluster of two nodes."""
    missing = [name for name in ("munged", "slurmctld", "slurmd", "sbatch", "ip", "setpriv") if not shutil.which(name)]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}: on Debian, slurm-wlm, munge and iproute2")
    if os.geteuid() != 0:
        pytest.skip("needs root, which makes namespaces for the nodes")
    cluster = Slurm(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.end()
