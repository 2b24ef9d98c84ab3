"""Tables over REST: their formats, ETags and caches."""

from __future__ import annotations

import csv
import html
import io
import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pandas as pd
import pytest

from cope_sweep.config import Plan, RunSpec
from cope_sweep.read import tables as results
from cope_sweep.read.queries.difference import store_difference
from cope_sweep.read.tables import table
from cope_sweep.store import Lease, Store
from cope_sweep.store.index import IndexUnavailable
from cope_sweep.store.reading import read_run
from tests.read.tables.ablations import begin, end
from tests.services.sample_store import API, SampleStore, serving


def get(client: httpx.Client, path: str, status: int = 200, **kwargs: Any) -> Any:
    response = client.get(API + path, **kwargs)
    assert response.status_code == status, response.text
    return response.json()


@pytest.mark.parametrize(
    ("output_format", "media", "method"),
    [
        ("csv", "text/csv", "to_csv"),
        ("markdown", "text/markdown", "to_markdown"),
        ("latex", "application/x-tex", "to_latex"),
    ],
)
def test_a_format_is_chosen_by_name_or_by_accept_header(
    client: httpx.Client, sample: SampleStore, output_format: str, media: str, method: str
) -> None:
    expected = getattr(table(sample.plan, sample.store), method)()
    named = client.get(f"{API}/ablations/tiny/table?format={output_format}")
    accepted = client.get(f"{API}/ablations/tiny/table", headers={"accept": f"{media};q=0.9, application/json;q=0.1"})
    for response in (named, accepted):
        assert response.text == expected
        assert response.headers["content-type"].split(";")[0] == media


def test_the_default_format_is_json(client: httpx.Client, sample: SampleStore) -> None:
    expected = table(sample.plan, sample.store).to_json()
    assert get(client, "/ablations/tiny/table") == expected
    assert get(client, "/ablations/tiny/table?format=json", headers={"accept": "text/csv"}) == expected
    assert expected["rows"][0]["counts"]["failed"] == 1


def test_a_browser_gets_html_whose_numbers_lead_to_their_runs(client: httpx.Client, sample: SampleStore) -> None:
    accept = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
    text = client.get(f"{API}/ablations/tiny/table", headers={"accept": accept}).text
    assert text == table(sample.plan, sample.store).to_html(runs_url=f"{API}/runs")
    links = [html.unescape(link) for link in re.findall(r'href="([^"]+)"', text)]
    numbers = [
        cell["values"] for row in get(client, "/ablations/tiny/table")["rows"] for cell in row["metrics"].values()
    ]
    expected = [[each["run_id"] for each in values] for values in numbers if values]
    assert [[run["run_id"] for run in client.get(link).json()["runs"]] for link in links] == expected


def test_parquet_holds_the_frame(client: httpx.Client, sample: SampleStore) -> None:
    response = client.get(f"{API}/ablations/tiny/table?format=parquet")
    assert response.headers["content-type"] == "application/vnd.apache.parquet"
    pd.testing.assert_frame_equal(pd.read_parquet(io.BytesIO(response.content)), table(sample.plan, sample.store).frame)
    runs = client.get(f"{API}/ablations/tiny/table?format=parquet&runs=true").content
    assert set(pd.read_parquet(io.BytesIO(runs))["run_id"]) == set(sample.ids)


def test_rows_are_compared(client: httpx.Client, sample: SampleStore) -> None:
    row = sample.plan.rows[0].name
    assert (
        get(client, "/ablations/tiny/table", params={"compare": row})
        == table(sample.plan, sample.store, compare=row).to_json()
    )
    assert get(client, "/ablations/tiny/table")["compared"] is None
    error = get(client, "/ablations/tiny/table?compare=nothing", 422)
    assert "no row 'nothing'" in error["detail"]


def test_csv_of_every_run(client: httpx.Client, sample: SampleStore) -> None:
    text = client.get(f"{API}/ablations/tiny/table?format=csv&runs=true").text
    assert {row["run_id"] for row in csv.DictReader(io.StringIO(text))} == set(sample.ids)


@pytest.mark.parametrize("accept", ["image/png", "text/csv;q=0", "nonsense", "text/html;q=0.0, image/*"])
def test_unknown_media_types_are_not_acceptable(client: httpx.Client, accept: str) -> None:
    error = get(client, "/ablations/tiny/table", 406, headers={"accept": accept})
    assert error["code"] == "not_acceptable"
    assert "text/markdown" in error["detail"]


def changed(client: httpx.Client, path: str, etag: str) -> httpx.Response:
    """The next answer with another ETag. A machine that stalls for a second gives the old one once more."""
    for _ in range(5):
        response = client.get(path, headers={"if-none-match": etag})
        if response.status_code != 304:
            break
    return response


def test_an_unchanged_table_is_304_and_a_changed_one_is_not(own_sample: SampleStore) -> None:
    with serving(own_sample.settings()) as client:
        path = f"{API}/ablations/tiny/table"
        etag = client.get(path).headers["etag"].removeprefix("W/")  # that of a compressed body is weak
        for sent in (etag, f'W/{etag}, "other"', "*"):
            unchanged = client.get(path, headers={"if-none-match": sent})
            assert (unchanged.status_code, unchanged.content, unchanged.headers["etag"]) == (304, b"", etag)
        assert client.get(f"{path}?format=csv", headers={"if-none-match": etag}).status_code == 200

        store = own_sample.store
        pending = begin(store, own_sample.plan.runs[3])
        assert isinstance(store.index.acquire(read_run(pending), "sweep", 60.0), Lease)
        running = changed(client, path, etag)
        assert running.json()["rows"][1]["counts"]["running"] == 1
        store.index.renew("sweep", 0.0)  # the lease expires, as that of a sweep that died
        interrupted = changed(client, path, running.headers["etag"])
        assert interrupted.json()["rows"][1]["counts"]["interrupted"] == 1
        pending.finish({"in_dist/token_error": 1.0}, {})
        end(store, pending)
        finished = changed(client, path, interrupted.headers["etag"])
        assert finished.json()["rows"][1]["metrics"]["in_dist/token_error"]["n"] == 2
        ablation = own_sample.ablations / "tiny.yaml"
        ablation.write_text(ablation.read_text().replace("tiny", "small"))
        renamed = changed(client, path, finished.headers["etag"])
        assert renamed.json()["title"] == "Selective copy, small"


@pytest.fixture
def computed_tables(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the tables that are computed, in order. Each takes 50 ms longer than usual."""
    names: list[str] = []

    def counted(plan: Plan, store: Store, *, compare: str | None = None) -> results.Table:
        names.append(plan.name)
        time.sleep(0.05)
        return table(plan, store, compare=compare)

    monkeypatch.setattr(results, "table", counted)
    return names


def test_all_formats_share_one_table(sample: SampleStore, computed_tables: list[str]) -> None:
    with serving(sample.settings()) as client:
        for output_format in ("json", "csv", "json", "html"):
            assert client.get(f"{API}/ablations/tiny/table?format={output_format}").status_code == 200
    assert computed_tables == ["tiny"]


def test_simultaneous_requests_share_one_computation(sample: SampleStore, computed_tables: list[str]) -> None:
    with serving(sample.settings()) as client, ThreadPoolExecutor(8) as threads:
        bodies = set(threads.map(lambda _: client.get(f"{API}/ablations/tiny/table").text, range(8)))
    assert len(bodies) == 1
    assert computed_tables == ["tiny"]


def test_a_failed_computation_is_not_cached(sample: SampleStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as broken, serving(sample.settings()) as client:
        broken.setattr(results, "table", lambda plan, store, compare: fail("no answer"))
        for _ in range(2):
            assert get(client, "/ablations/tiny/table", 503)["code"] == "not_ready"
        broken.undo()
        assert get(client, "/ablations/tiny/table")["title"] == "Selective copy, tiny"


def fail(message: str) -> None:
    raise IndexUnavailable(message)


def test_an_etag_is_that_of_the_content(own_sample: SampleStore) -> None:
    """A restart, another index, and a change of other runs leave it; so clients go on to get 304."""
    with serving(own_sample.settings()) as client:
        etag = client.get(f"{API}/ablations/tiny/table").headers["etag"]
    (own_sample.store_folder / "index.db").unlink()
    with serving(own_sample.settings()) as client:
        path = f"{API}/ablations/tiny/table"
        assert client.get(path, headers={"if-none-match": etag}).status_code == 304
        other = RunSpec.model_validate(own_sample.plan.runs[0].model_dump() | {"seed": 99})
        end(own_sample.store, begin(own_sample.store, other))
        assert client.get(path, headers={"if-none-match": etag}).status_code == 304
        end(own_sample.store, begin(own_sample.store, own_sample.plan.runs[3]))
        assert client.get(path, headers={"if-none-match": etag}).status_code == 200


def test_two_runs_are_compared(client: httpx.Client, sample: SampleStore) -> None:
    first, second = sample.ids[:2]
    found = get(client, "/diff", params={"left": first, "right": second})
    assert (found["left"], found["right"]) == (first, second)
    assert [each["key"] for each in found["spec"]] == [
        each.key for each in store_difference(sample.store, first, second).spec
    ]


@pytest.mark.parametrize("unknown", ["x", "0123456789abcdef", "20200101-000000-abcd"])
def test_an_unknown_run_or_sweep_is_not_found(client: httpx.Client, sample: SampleStore, unknown: str) -> None:
    for sides in ((sample.ids[0], unknown), (unknown, sample.ids[0])):
        error = get(client, "/diff", 404, params=dict(zip(("left", "right"), sides, strict=True)))
        assert error["code"] == "not_found"
    misspelt = sample.ids[0][:-1] + ("0" if sample.ids[0][-1] != "0" else "1")
    near = get(client, "/diff", 404, params={"left": misspelt, "right": unknown})["detail"]
    assert f"did you mean {sample.ids[0]}" in near
    assert get(client, f"/sweeps/{unknown}", 404)["code"] == "not_found"
    assert get(client, "/runs", 404, params={"sweep": unknown})["code"] == "not_found"
