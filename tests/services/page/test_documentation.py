"""`/docs` in a browser: under its Content-Security-Policy, and without a network."""

from __future__ import annotations

import os
import shutil

import httpx
import pytest

CHROMIUM = os.environ.get("COPE_SWEEP_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium; COPE_SWEEP_CHROMIUM names one"),
]


def test_the_documentation_shows_every_operation(client: httpx.Client) -> None:
    from playwright.sync_api import sync_playwright

    base, problems, addresses = str(client.base_url).rstrip("/"), [], []
    with (
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"]) as browser,
    ):
        page = browser.new_page()
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: addresses.append(request.url))
        page.goto(f"{base}/docs")
        page.wait_for_selector(".opblock", timeout=60_000)
        paths = client.get("/openapi.json").json()["paths"]
        assert page.locator(".opblock").count() == sum(map(len, paths.values()))
        assert page.locator(".errors-wrapper").count() == 0
        page.get_by_text("/api/v1/version", exact=True).click()
        page.get_by_text("Try it out").click()
        page.locator("button.execute").click()
        page.wait_for_selector(".live-responses-table", timeout=60_000)
        assert '"python"' in page.locator(".live-responses-table").inner_text()
    assert problems == []
    assert all(each.startswith((base, "data:", "blob:")) for each in addresses), addresses
