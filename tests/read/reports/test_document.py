"""The document of all ablations: it is complete, escapes everything, and loads nothing."""

import json
import re

import pytest

from cope_sweep.api.questions import GetReport
from cope_sweep.config import expand, load_ablation, with_overrides
from cope_sweep.read.queries import AblationFiles, Queries
from cope_sweep.read.reports import evidence, write_evidence
from cope_sweep.read.reports.document import ablation_document, document, report_file
from cope_sweep.read.tables import read_results
from cope_sweep.store import Store
from tests.errors import raises
from tests.read.figures.files import Page
from tests.read.tables.ablations import CONTENT, fail, finish


@pytest.fixture
def files(tmp_path):
    folder = tmp_path / "ablations"
    folder.mkdir()
    hostile = CONTENT | {
        "title": "<script>alert(1)</script>", "hypothesis": "a & b <i>c</i>",
        "scales": {"small": {"set": {"train.steps": 3}}, "never": {"set": {"train.steps": 2}}},
    }  # fmt: skip
    (folder / "first.yaml").write_text(json.dumps(hostile))
    (folder / "second.yaml").write_text(json.dumps(CONTENT | {"title": "Second"}))
    (folder / "third.yaml").write_text(json.dumps(CONTENT | {"seeds": [7]}))
    (folder / "wrong.yaml").write_text("title: [")
    return AblationFiles(folder)


@pytest.fixture
def store(tmp_path, files):
    store = Store(tmp_path / "store", create=True)
    loaded = load_ablation(files.file("first"))
    for scale in (None, "small"):
        for run in expand(with_overrides(loaded, scale=scale)).runs[:5]:
            finish(store, run, {"in_dist/token_error": 12.5 + run.seed, "dense/loss": 0.5}, {"wall_s": 60})
    fail(store, expand(loaded).runs[5])
    return store


def test_the_document(files, store):
    text = document(files, store).to_html()
    assert text == document(files, Store(store.root)).to_html()
    found = Page(text)
    assert found.count("script") == 0
    assert "<i>" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    ids = found.values("id")
    assert len(ids) == len(set(ids))
    for link in found.values("src", "href"):
        assert link.startswith("data:image/svg+xml;base64,") or link.removeprefix("#") in ids
    assert found.count("img") == 3  # first at both scales; second shares its runs
    plain = " ".join(re.sub(r"<[^>]+>", " ", text).split())
    assert "10 finished runs, 10 min of training" in plain
    assert "first never not run: 6 runs" in plain
    assert "first base 1 of 6 runs: 1 failed" in plain
    assert "first small 1 of 6 runs: 1 pending" in plain
    assert "third base not run: 3 runs" in plain
    assert "wrong.yaml" in plain


def test_the_document_of_a_folder_of_reports(files, store, tmp_path):
    for scale in (None, "small"):
        write_evidence(evidence(Queries(store, files).results("first", scale)), tmp_path / "reports")
    found = document(files, tmp_path / "reports")
    own = document(files, store).chapters[0]
    assert found.chapters[0].reports[0].to_markdown({}) == own.reports[0].to_markdown({})
    assert [size.problem for size in found.chapters[0].scales] == ["", "", "no report"]
    path = files.file("first")
    path.write_text(path.read_text().replace('"seeds": [0, 1]', '"seeds": [0, 2]'))
    with raises("nothing_to_report", scale=None):
        document(AblationFiles(files.folder), tmp_path / "reports")


def test_one_scale(files, store):
    found = document(files, store, "small")
    assert [each.name for each in found.chapters] == ["first", "wrong"]
    assert [each.scale for each in found.chapters[0].scales] == ["small"]


def test_nothing_finished(files, tmp_path):
    empty = Store(tmp_path / "empty", create=True)
    with raises("nothing_to_report", folder=str(files.folder), scale=None):
        document(files, empty)
    with raises("nothing_to_report", folder=str(files.folder), scale="large"):
        document(files, empty, "large")


def test_the_document_of_one_ablation(files, tmp_path):
    store = Store(tmp_path / "store", create=True)
    name = next(iter(files.files()))
    question = GetReport(name=name)
    with raises("nothing_to_report", ablation=name):
        report_file(Queries(store, files).results(name), question, str)
    plan = files.load(name)
    finish(store, plan.runs[0], {metric.name: 1.0 for metric in plan.ablation.content.metrics})
    found = ablation_document(evidence(read_results(plan, store)))
    assert [(chapter.name, [size.scale for size in chapter.scales]) for chapter in found.chapters] == [(name, [None])]
    assert found.chapters[0].scales[0].finished == 1
    page = report_file(Queries(store, files).results(name), question, str).decode()
    assert page == found.to_html()
    assert "<script>alert" not in page
