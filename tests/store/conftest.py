import pytest

from cope_sweep.store import Store
from cope_sweep.store.index import Index
from tests.store.databases import index_url, postgres  # noqa: F401 - fixtures


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store", create=True)


@pytest.fixture
def index(index_url):  # noqa: F811
    index = Index(index_url)
    yield index
    index.close()
