from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from cope_services.models import predictors

from tests.helpers.sample_store import SampleStore, build, serving
from tests.services import prose_store
from tests.services.prose_store import ProseStore


@pytest.fixture(scope="session", autouse=True)
def always_fresh() -> Iterator[None]:
    """A model is looked up for each request: a test sees at once what it has written."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(predictors, "FRESH_S", 0.0)
        yield


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> SampleStore:
    """A shared store, which tests only read."""
    return build(tmp_path_factory.mktemp("sample"))


@pytest.fixture
def own_sample(sample: SampleStore, tmp_path: Path) -> SampleStore:
    """A copy of the store, for a test that changes its files."""
    return sample.copy_to(tmp_path / "sample")


@pytest.fixture(scope="session")
def client(sample: SampleStore) -> Iterator[httpx.Client]:
    """A client of one server for all tests."""
    with serving(sample.settings(max_tokens=1000)) as client:
        yield client


@pytest.fixture(scope="session")
def prose(tmp_path_factory: pytest.TempPathFactory) -> ProseStore:
    """A shared store with models of text, which tests only read."""
    root = tmp_path_factory.mktemp("prose")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COPE_SWEEP_CACHE", str(root / "cache"))
        patch.delenv("COPE_SWEEP_DATA", raising=False)
        return prose_store.build(root)


@pytest.fixture(scope="session")
def prose_client(prose: ProseStore) -> Iterator[httpx.Client]:
    """A client of one server for the models of text."""
    with serving(prose.settings(max_tokens=400, max_request_tokens=4000)) as client:
        yield client
