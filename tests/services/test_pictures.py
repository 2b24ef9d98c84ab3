"""Figures and reports over REST."""

from __future__ import annotations

import csv
import io
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from cope_services.http import pictures

from cope_sweep.read.figures import available
from cope_sweep.read.figures.available import available_figures
from tests.services.sample_store import API, SampleStore, serving

FIGURES = f"{API}/ablations/tiny/figures"
BEGINNINGS = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF", "csv": b"row,metric"}


def test_the_list_leads_to_every_figure(client: httpx.Client, sample: SampleStore) -> None:
    listed = client.get(FIGURES).json()
    assert [each["name"] for each in listed] == [each.name for each in available_figures(sample.plan)]
    assert {"summary", "curves", "values"} < {each["kind"] for each in listed}
    for each in listed:
        assert each["formats"] == ["png", "svg", "pdf", "csv"]
        answer = client.get(each["url"], params={"format": "csv"})
        assert answer.status_code in (200, 409), answer.text
        if answer.status_code == 409:
            assert answer.json()["code"] == "conflict"


@pytest.mark.parametrize("output_format", BEGINNINGS)
def test_a_format_is_chosen_by_name_or_by_accept_header(client: httpx.Client, output_format: str) -> None:
    media = {name: media for media, name in pictures.MEDIA_TYPES.items()}[output_format]
    named = client.get(f"{FIGURES}/summary?format={output_format}")
    accepted = client.get(f"{FIGURES}/summary", headers={"accept": f"{media}, image/svg+xml;q=0.1"})
    for answer in (named, accepted):
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].partition(";")[0] == media
        assert answer.content.startswith(BEGINNINGS[output_format])
    assert named.content == accepted.content
    refused = client.get(f"{FIGURES}/summary", headers={"accept": "image/webp, image/svg+xml;q=0"})
    assert (refused.status_code, refused.json()["code"]) == (406, "not_acceptable")


def test_the_data_are_those_of_the_runs(client: httpx.Client, sample: SampleStore) -> None:
    rows = list(csv.DictReader(io.StringIO(client.get(f"{FIGURES}/summary?format=csv").text)))
    shown = {row["row"]: float(row["mean"]) for row in rows if row["metric"] == "in_dist/token_error"}
    records = sample.store.index.records(sample.ids)
    for run_id in sample.ids[:2]:  # one finished run of each row
        assert shown[sample.plan.row_name(run_id)] == pytest.approx(records[run_id].metrics["in_dist/token_error"])


def test_unknown_figures_are_not_found(client: httpx.Client) -> None:
    error = client.get(f"{FIGURES}/none").json()
    assert error["code"] == "not_found"
    assert "accepted: curves, convergence" in error["detail"]
    assert client.get(f"{API}/ablations/none/figures").status_code == 404
    assert client.get(f"{API}/ablations/broken/figures").json()["code"] == "invalid_ablation"
    assert client.get(f"{FIGURES}/summary?format=gif").status_code == 422


def test_pictures_of_too_many_rows_are_refused(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(available, "MAX_ROWS", 1)
    answer = client.get(f"{FIGURES}/convergence?format=png")
    assert (answer.status_code, answer.json()["code"]) == (409, "conflict")
    assert "at most 1" in answer.json()["detail"]


def test_too_many_pictures_at_a_time_are_refused(own_sample: SampleStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "MAX_WAITING", 1)
    begun, go_on = threading.Event(), threading.Event()

    def slow(*args: object, **kwargs: object) -> bytes:
        begun.set()
        assert go_on.wait(60)
        return b"<svg/>"

    monkeypatch.setattr(available, "draw_available", slow)
    with serving(own_sample.settings()) as client, ThreadPoolExecutor(1) as threads:
        try:
            first = threads.submit(httpx.get, f"{client.base_url}{FIGURES}/summary", timeout=60)
            assert begun.wait(60)
            refused = client.get(f"{FIGURES}/values")
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "5")
            assert client.get(f"{API}/ablations/tiny/table").status_code == 200
        finally:
            go_on.set()
        assert first.result().content == b"<svg/>"
        assert client.get(f"{FIGURES}/values").status_code == 200


def test_the_report(client: httpx.Client) -> None:
    page = client.get(f"{API}/ablations/tiny/report")
    assert page.headers["content-type"].startswith("text/html")
    assert "Selective copy, tiny" in page.text
    assert page.headers["content-security-policy"] == pictures.REPORT_POLICY
    assert "<script" not in page.text
    text = client.get(f"{API}/ablations/tiny/report", headers={"accept": "text/markdown"}).text
    assert text.startswith("# Selective copy, tiny")
    (link,) = {part.partition(")")[0] for part in text.split("](")[1:] if "/figures/" in part}
    assert client.get(link).content.startswith(BEGINNINGS["svg"])
    missing = client.get(f"{API}/ablations/tiny/report?scale=longer")
    assert (missing.status_code, missing.json()["code"]) == (409, "conflict")
    assert "cope-sweep run tiny --scale longer" in missing.json()["detail"]
    assert client.get(f"{API}/ablations/tiny/report?format=html&scale=none").status_code == 422
