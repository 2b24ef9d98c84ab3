"""A store with what the page has to show, and a Chromium that shows it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from cope_services.http.settings import Settings

from cope_sweep.config import Plan, expand, load_ablation
from cope_sweep.store.reading import read_run
from tests.helpers.finished_runs import begin
from tests.helpers.processes import http_server
from tests.helpers.sample_store import CLAIM, SampleStore, serving
from tests.helpers.sweeps import end, end_sweep, write_sweep

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

CURVES = """\
title: Curves of few points
hypothesis: Zeros and single points are shown.
base:
  task: {kind: selective_copy, tokens: 2, blanks: 2, dense_blanks: 1, sparse_blanks: 4}
  model: {layers: 1, dim: 8, heads: 2}
  train: {steps: 40, batch: 4}
grid:
  model.position: {CoPE: [cope], Absolute: [absolute], RoPE: [rope]}
seeds: [0]
metrics: [{name: in_dist/token_error, label: In-dist., unit: "%"}]
"""
MANY = (
    CURVES.replace("Curves of few points", "Many runs")
    .replace("[0]", str(list(range(35))))
    .replace("steps: 40", "steps: 7")
)
VALUES = {"CoPE": [50.0, 10.0, 0.0, 0.0], "Absolute": [60.0, 55.0, 50.0, 45.0], "RoPE": [30.0]}
"""Row of `curves` → the errors that its run has logged, every 10 steps."""

SCREENS = ((1400, "light"), (390, "dark"))
"""Widths and colour schemes. Neither depends on the other."""


@dataclass(frozen=True)
class Site:
    """The sample store, with runs that have logged zeros and single points, 105 failed runs, and an ended sweep."""

    sample: SampleStore
    curves: Plan
    sweep_id: str


def build(original: SampleStore, root: Path) -> Site:
    """A copy of the sample store in a new folder, with more in it."""
    sample = original.copy_to(root)
    with (sample.ablations / "tiny.yaml").open("a") as file:
        file.write(CLAIM)
    plans = {}
    for name, text in {"curves": CURVES, "many": MANY}.items():
        (sample.ablations / f"{name}.yaml").write_text(text)
        plans[name] = expand(load_ablation(sample.ablations / f"{name}.yaml"))
    store = sample.store
    for row in plans["curves"].rows:
        folder = begin(store, row.runs[0])
        for i, value in enumerate(VALUES[row.name]):
            folder.log({"step": 10 * (i + 1), "in_dist/token_error": value, "train/loss": 0.1 + value / 100})
        folder.set_state("interrupted")
        end(store, folder)
    folders = [begin(store, run) for run in plans["many"].runs]
    for folder in folders:
        folder.fail("Diverged: the training loss is nan at step 3", "Traceback …")
    store.index.write([row for row in map(read_run, folders) if row is not None])  # at once: it is faster
    for plan in plans.values():
        end_sweep(store, write_sweep(store, plan), "interrupted")
    record = end_sweep(store, write_sweep(store, sample.plan), "failed")
    return Site(sample, plans["curves"], record.sweep_id)


def short_ids(*run_ids: str) -> str:
    """Run ids as the address of a view names them."""
    return ".".join(run_id[:10] for run_id in run_ids)


def chromium() -> str | None:
    """The path of an installed Chromium."""
    found = (shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome"))
    return os.environ.get("COPE_SWEEP_CHROMIUM") or next(filter(None, found), None)


IN_A_BROWSER = [
    pytest.mark.slow,
    *(
        pytest.mark.skipif(find_spec(name) is None, reason=f"{name} is not installed; the extra `test` has it")
        for name in ("playwright", "axe_playwright_python")
    ),
    pytest.mark.skipif(chromium() is None, reason="there is no Chromium; COPE_SWEEP_CHROMIUM names one"),
]
"""The marks of tests of the page."""


@contextmanager
def behind_proxy(service: httpx.Client, prefix: str) -> Iterator[str]:
    """The address of a reverse proxy that has the service below a prefix, and nothing else."""

    class Proxy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.removeprefix(prefix)
            if path == self.path or not path.startswith("/"):
                self.send_error(404)
                return
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            headers = [(name, value) for name, value in self.headers.items() if name.lower() != "connection"]
            with service.stream(self.command, path, headers=headers, content=body) as answer:
                self.send_response_only(answer.status_code)
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                for part in answer.iter_raw():
                    self.wfile.write(part)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with http_server(Proxy) as url:
        yield f"{url}{prefix}"


@contextmanager
def launched() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Visitor:
    """A tab, and what went wrong in it."""

    page: Page
    origin: str
    problems: list[str] = field(default_factory=list)
    """Messages of the console, errors of scripts, and requests to other servers."""
    requests: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, context: BrowserContext, origin: str) -> Visitor:
        page = context.new_page()
        page.set_default_timeout(60_000)
        visitor = cls(page, origin)
        page.on("console", lambda message: visitor._complain(message.type in ("error", "warning"), message.text))
        page.on("pageerror", lambda error: visitor._complain(True, str(error)))
        page.on("request", lambda request: visitor._request(request.url))
        return visitor

    def _complain(self, wrong: bool, text: str) -> None:
        if wrong:
            self.problems.append(text)

    def _request(self, url: str) -> None:
        self.requests.append(url)
        self._complain(not url.startswith((self.origin, "data:", "blob:", "about:")), f"a request to {url}")

    def open(self, address: str, ready: str) -> Page:
        """Load the view at an address, and wait for the selector `ready`."""
        self.page.goto("about:blank")
        self.page.goto(f"{self.origin}/#/{address}")
        self.page.wait_for_selector(ready)
        return self.page


@contextmanager
def visiting(context: BrowserContext, settings: Settings) -> Iterator[Visitor]:
    """A visitor of a service of its own."""
    with serving(settings) as client:
        visitor = Visitor.of(context, str(client.base_url).rstrip("/"))
        yield visitor
        visitor.page.close()  # else it would go on asking a service that has ended
        assert visitor.problems == []


def accessibility(page: Page, *rules: str) -> list[str]:
    """The serious and critical findings of axe-core: of these rules, or of all."""
    from axe_playwright_python.sync_playwright import Axe

    options = {"resultTypes": ["violations"]} | ({"runOnly": list(rules)} if rules else {})
    found: list[dict[str, Any]] = Axe().run(page, options=options).response["violations"]
    return [
        f"{each['id']}: {each['nodes'][0]['html'][:200]} {each['nodes'][0]['failureSummary'][:200]}"
        for each in found
        if each["impact"] in ("serious", "critical")
    ]
