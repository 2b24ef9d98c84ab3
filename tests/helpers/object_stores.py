"""A store in an object store: a real S3-compatible server on loopback, and machines that see it."""

import pytest

from cope_sweep.store import Store
from tests.helpers import s3


@pytest.fixture(scope="module")
def object_server():
    server = s3.start_server()
    yield server
    server.stop()


@pytest.fixture
def bucket_url(object_server, monkeypatch):
    """The URL of an empty bucket's prefix."""
    s3.set_environment(monkeypatch, object_server)
    return f"s3://{s3.make_bucket()}/some/prefix"


@pytest.fixture
def on_machine(bucket_url, tmp_path, monkeypatch):
    """The store as a machine sees it; each has its own working folder, and all have one index."""

    def opened(name):
        monkeypatch.setenv("COPE_SWEEP_CACHE", str(tmp_path / name))
        return Store(bucket_url, index=f"sqlite:///{tmp_path / 'index.db'}", create=True)

    return opened
