import pytest

from cope_sweep.store import Store


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store", create=True)
