"""The house of `house.py`, built once, and once for each test that changes it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from house import House, build, serving


@pytest.fixture(scope="session")
def house(tmp_path_factory: pytest.TempPathFactory) -> House:
    """Shared: tests only read it."""
    return build(tmp_path_factory.mktemp("house"))


@pytest.fixture
def own_house(tmp_path: Path) -> House:
    """For a test that changes files."""
    return build(tmp_path)


@pytest.fixture(scope="session")
def client(house: House) -> Iterator[httpx.Client]:
    with serving(house.settings(max_tokens=1000)) as client:
        yield client
