"""A report as one HTML file: it says what the Markdown says, escapes everything, and loads nothing."""

import pytest

from cope_sweep.api.tables import GetReport
from cope_sweep.read.reports import evidence
from cope_sweep.read.reports.evidence import report_file
from cope_sweep.read.reports.html import html_page
from cope_sweep.read.tables import read_results
from cope_sweep.store import Store
from tests.helpers.errors import raises
from tests.helpers.figure_files import Page
from tests.helpers.finished_runs import finish, plan_of

HOSTILE = 'a <script>alert(1)</script> & "b" ![x](javascript:alert(2)) <img src=y>'


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    store = Store(tmp_path_factory.mktemp("hostile") / "store", create=True)
    plan = plan_of(title=HOSTILE, hypothesis=HOSTILE, grid={"model.position": {HOSTILE: ["cope"], "RoPE": ["rope"]}})
    for run in plan.runs:
        finish(store, run, {"in_dist/token_error": 12.5 + run.seed, "dense/loss": 0.5})
    return read_results(plan, store)


@pytest.fixture(scope="module")
def text(hostile):
    return evidence(hostile).to_html()


def test_the_page_escapes_everything_and_loads_nothing(text):
    page = Page(text)
    assert page.count("script") == 0
    assert page.count("img") == page.count("h1") == 1
    assert [link[:26] for link in page.values("src", "href")] == ["data:image/svg+xml;base64,"]
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "default-src 'none'" in text


def test_the_page_has_every_section_of_the_report(hostile, text):
    headings = [line.lstrip("# ") for line in evidence(hostile).to_markdown({}).splitlines() if line.startswith("##")]
    assert "Results" in headings
    for heading in headings:
        assert f">{heading}</h" in text


def test_an_image_that_is_no_figure_of_the_report_is_left_as_it_is():
    assert 'src="other.png"' in html_page("t", "![a](other.png)", {"one.svg": b"<svg/>"})


def test_a_report_in_each_format(hostile, text):
    markdown = report_file(hostile, GetReport(name="x", format="markdown"), str).decode()
    assert markdown.startswith("# a ")
    assert report_file(hostile, GetReport(name="x", format="html")).decode() == text, "drawn again"
    plan = plan_of(title="nothing trained", seeds=[99])
    with raises("nothing_to_report", ablation=plan.name):
        report_file(read_results(plan, hostile.store), GetReport(name="x"))
