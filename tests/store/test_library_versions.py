import importlib.metadata

import cope_sweep
from cope_sweep.store.sweeps import versions


def test_versions_are_those_of_the_libraries_that_are_installed(monkeypatch):
    original = importlib.metadata.version

    def version(name):
        if name in ("ray", "mlflow"):  # `run --local --no-mlflow` needs neither
            raise importlib.metadata.PackageNotFoundError(name)
        return original(name)

    assert versions()["numpy"] == original("numpy")
    monkeypatch.setattr(importlib.metadata, "version", version)
    assert versions().keys() == {"cope_sweep", "python", "torch", "numpy"}
    assert versions()["cope_sweep"] == cope_sweep.__version__
