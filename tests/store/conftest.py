import pytest

from cope_sweep.store.index import Index
from tests.helpers.databases import index_url  # noqa: F401 - a fixture
from tests.helpers.object_stores import bucket_url, object_server, on_machine  # noqa: F401 - fixtures


@pytest.fixture
def index(index_url):  # noqa: F811
    index = Index(index_url)
    yield index
    index.close()
