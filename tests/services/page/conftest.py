"""A site with what the page has to show, and a browser, for each file of tests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.helpers.sample_store import SampleStore, serving
from tests.services.page import page_site
from tests.services.page.page_site import Site, Visitor

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext


@pytest.fixture(scope="session")
def built_site(sample: SampleStore, tmp_path_factory: pytest.TempPathFactory) -> Site:
    return page_site.build(sample, tmp_path_factory.mktemp("site") / "copy")


@pytest.fixture(scope="module")
def site(built_site: Site, tmp_path_factory: pytest.TempPathFactory) -> Site:
    """A copy, because tests write sweeps and runs to it."""
    return replace(built_site, sample=built_site.sample.copy_to(tmp_path_factory.mktemp("site") / "copy"))


@pytest.fixture(scope="module")
def origin(site: Site) -> Iterator[str]:
    with serving(site.sample.settings()) as client:
        yield str(client.base_url).rstrip("/")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with page_site.launched() as browser:
        yield browser


@pytest.fixture(scope="module")
def context(browser: Browser) -> Iterator[BrowserContext]:
    with browser.new_context(viewport={"width": 1400, "height": 900}, color_scheme="light") as context:
        yield context


@pytest.fixture
def visitor(context: BrowserContext, origin: str) -> Iterator[Visitor]:
    visitor = Visitor.of(context, origin)
    yield visitor
    visitor.page.close()
    assert visitor.problems == []
