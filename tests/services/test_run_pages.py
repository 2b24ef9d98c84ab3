"""Pages of runs, curves, logs and details over REST."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from cope_sweep.api.questions import ListRuns
from cope_sweep.read.queries import Queries
from cope_sweep.store import SweepRecord, SweepRun
from cope_sweep.store.index.mirroring import Mirrored
from cope_sweep.tracking.uri import tracker_key
from tests.read.tables.ablations import begin, end
from tests.services.sample_store import API, SampleStore, serving


def get(client: httpx.Client, path: str, expected: int = 200, **params: Any) -> Any:
    response = client.get(API + path, params=params)
    assert response.status_code == expected, response.text
    return response.json()


def walk(client: httpx.Client, path: str, **params: Any) -> list[str]:
    """The run ids of all pages."""
    found: list[str] = []
    cursor: dict[str, str] = {}
    while True:
        page = get(client, path, **params, **cursor)
        found += [run["run_id"] for run in page["runs"]]
        if page["next"] is None:
            assert len(found) == page["total"]
            return found
        cursor = {"cursor": page["next"]}


@pytest.mark.parametrize("limit", [1, 2, 3])
@pytest.mark.parametrize("sort", ["run_id", "dense/loss", "seed", "status", "model.position"])
def test_cursors_lead_through_all_runs(client: httpx.Client, sample: SampleStore, sort: str, limit: int) -> None:
    expected = [run.run_id for run in Queries(sample.store).ask(ListRuns(sort=sort)).runs]
    assert walk(client, "/runs", sort=sort, limit=limit) == expected


def test_cursors_lead_through_a_plan(client: httpx.Client, sample: SampleStore) -> None:
    assert walk(client, "/ablations/tiny/runs", limit=3) == sample.ids
    assert walk(client, "/runs", ablation="tiny", limit=1, status="finished") == sample.ids[:2]
    by_seed = walk(client, "/runs", ablation="tiny", limit=1, sort="seed", descending=True)
    assert by_seed[0] == sample.ids[2]


def test_a_cursor_of_another_query_is_refused(client: httpx.Client) -> None:
    cursor = get(client, "/runs", limit=1)["next"]
    for params in (
        {"cursor": cursor, "sort": "seed"}, {"cursor": cursor, "filter": "seed=0"}, {"cursor": cursor, "ablation": "tiny"},
        {"cursor": "nonsense"}, {"cursor": "WzFd"}, {"cursor": "é"}, {"cursor": cursor[:-3]}, {"cursor": ""},
    ):  # fmt: skip
        assert "cursor" in get(client, "/runs", 422, **params)["detail"]
    assert "not both" in get(client, "/runs", 422, cursor=cursor, offset=1)["detail"]


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("limit=0", "limit"), ("limit=x", "limit"), ("offset=-1", "offset"), ("descending=up", "descending"),
        ("status=none", "status"), ("sort=nothing", "no run of this store has 'nothing'"), ("filter=seed", "no condition"),
        ("filter=seed%3Da", "seed is a number"), ("fields=nothing", "no run of this store has 'nothing'"),
    ],
)  # fmt: skip
def test_a_faulty_query_is_refused(client: httpx.Client, query: str, message: str) -> None:
    answer = client.get(f"{API}/runs?{query}")
    assert answer.status_code == 422
    assert message in answer.text


def test_an_unknown_parameter_is_ignored(client: httpx.Client) -> None:
    assert get(client, "/runs", unknown=1) == get(client, "/runs")


def test_chosen_fields(client: httpx.Client, sample: SampleStore) -> None:
    run = get(client, "/runs", fields="step,model.layers,dense/loss", filter="status=finished", limit=1)["runs"][0]
    assert set(run) == {"run_id", "status", "step", "values"}
    assert set(run["values"]) == {"model.layers", "dense/loss", "status"}
    assert run["values"]["model.layers"] == 1
    names = [("fields", "row"), ("fields", "metrics")]
    pending = client.get(f"{API}/ablations/tiny/runs", params=names).json()["runs"][3]
    assert pending == {"run_id": sample.ids[3], "status": "pending", "row": "Absolute", "metrics": {}}
    assert "near ones: dense/loss" in get(client, "/runs", 422, fields="dense/los")["detail"]


def test_tags_are_places_in_sweeps(own_sample: SampleStore) -> None:
    runs = own_sample.plan.runs
    record = SweepRecord(
        sweep_id="20260730-120000-abcd", ablation="tiny", title="t", hypothesis="h", executor="local", command=[],
        status="finished", started_ms=5, ended_ms=9, versions={}, machine={}, metrics=[], reused=[],
        runs=[SweepRun(run_id=run.run_id, row=own_sample.plan.row_name(run.run_id), seed=run.seed,
                       labels={"model.position": own_sample.plan.row_name(run.run_id), "depth": "2"}) for run in runs[:2]],
    )  # fmt: skip
    own_sample.store.write_sweep(record)
    with serving(own_sample.settings()) as client:

        def ids(*filters: str) -> set[str]:
            return {run["run_id"] for run in get(client, "/runs", filter=list(filters))["runs"]}

        assert ids("tags.row=CoPE") == {runs[0].run_id}
        assert ids("tags.model.position!=CoPE") == {runs[1].run_id}
        assert ids("tags.ablation=tiny", "tags.depth=2") == {runs[0].run_id, runs[1].run_id}
        assert ids(f"tags.sweep={record.sweep_id}", "tags.row=Absolute") == {runs[1].run_id}
        assert ids("tags.other=1") == set()
        assert "cannot be sorted by tags" in get(client, "/runs", 422, sort="tags.row")["detail"]


def test_a_scale_without_ablation_is_refused(client: httpx.Client) -> None:
    assert "name the ablation" in get(client, "/runs", 422, scale="longer")["detail"]


def test_an_unknown_metric_is_refused_with_the_known_ones(client: httpx.Client, sample: SampleStore) -> None:
    run = sample.ids[0]
    for path, params in (
        ("/ablations/tiny/curves", {"metric": "train/los"}),
        (f"/runs/{run}/curve", {"metric": "train/los"}),
        ("/curves", {"run": run, "metric": "train/los"}),
    ):
        error = get(client, path, 422, **params)
        assert error["code"] == "invalid_request"
        assert "did you mean 'train/loss'" in error["detail"]
        assert "in_dist/token_error" in error["detail"]


def test_curves_of_several_runs(own_sample: SampleStore) -> None:
    run = own_sample.plan.runs[3]
    folder = begin(own_sample.store, run)
    created_ms = (folder.spec or {})["created_ms"]
    rows = [
        f'{{"step": {step}, "time_ms": {created_ms + 10 * step}, "train/loss": {100.0 if step == 700 else 1.0}}}\n'
        for step in range(1, 1001)
    ]
    (folder.path / "curve.jsonl").write_text("".join(rows) + '{"step": 1001, "train/loss": NaN}\n')
    end(own_sample.store, folder)
    with serving(own_sample.settings()) as client:
        found = get(client, "/curves", run=[run.run_id, own_sample.ids[0]], metric="train/loss", points=20)
        assert [series["run_id"] for series in found["series"]] == [run.run_id, own_sample.ids[0]]
        points = found["series"][0]["points"]
        assert len(points) <= 20
        assert points[0] == [1, 0.01, 1.0]
        assert [700, 7.0, 100.0] in points, "the spike is kept"
        assert points[-1] == [1001, None, None], "no time, and no number"
        whole = get(client, "/curves", run=run.run_id, metric="train/loss")["series"][0]["points"]
        assert len(whole) == 1001
        rows_ = get(client, f"/runs/{run.run_id}/curve", metric="train/loss", points=20)
        assert {"step": 700, "train/loss": 100.0} in rows_
        assert len(rows_) <= 20
        assert get(client, f"/runs/{run.run_id}/curve")[-1] == {"step": 1001, "train/loss": None}
        get(client, "/curves", 404, run="0123456789abcdef", metric="train/loss")
        get(client, "/curves", 422, run=run.run_id, metric="train/loss", points=3)


def test_the_log_of_a_run(own_sample: SampleStore) -> None:
    run = own_sample.ids[0]
    folder = own_sample.store.run(run)
    with serving(own_sample.settings()) as client:
        log = get(client, f"/runs/{run}/logs")
        assert log["lines"] == folder.log_text().splitlines()
        assert log["truncated"] is False
        last = get(client, f"/runs/{run}/logs", tail=1)
        assert (last["lines"], last["truncated"]) == (log["lines"][-1:], True)
        assert get(client, f"/runs/{run}/logs", tail=0)["lines"] == []
        assert get(client, f"/runs/{own_sample.ids[3]}/logs")["lines"] == []
        with (folder.path / "log.txt").open("ab") as file:
            file.write(b"\xff\xfe damaged \x00\n" + b"x" * (2 << 20) + b"\nend")
        log = get(client, f"/runs/{run}/logs")
        assert (log["lines"], log["truncated"]) == (["end"], True), "a line that was cut is left out"
        (folder.path / "log.txt").write_bytes(b"\xff\xfe damaged\n")
        assert get(client, f"/runs/{run}/logs")["lines"] == ["�� damaged"]
        for bad in (-1, 10_001):
            get(client, f"/runs/{run}/logs", 422, tail=bad)


def test_a_run_has_its_attempts_and_its_failure(client: httpx.Client, sample: SampleStore) -> None:
    finished, failed = (get(client, f"/runs/{run_id}") for run_id in (sample.ids[0], sample.ids[2]))
    assert [(attempt["number"], attempt["worker_id"]) for attempt in finished["attempts"]] == [
        (1, finished["worker_id"])
    ]
    assert finished["attempts"][0]["text"].startswith("attempt 1 on ")
    assert finished["failure"] is None
    assert failed["failure"] == {"message": failed["message"], "traceback": "Traceback …"}
    assert finished["mlflow_url"] is None


def test_a_run_that_an_mlflow_server_has_leads_to_its_page(
    own_sample: SampleStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = "https://user:secret@mlflow.example.org"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    store, run = own_sample.store, own_sample.ids[0]
    Mirrored(store.index, tracker_key(store, uri)).mark(run, 1, "a1b2")
    with serving(own_sample.settings()) as client:
        assert get(client, f"/runs/{run}")["mlflow_url"] == "https://mlflow.example.org/#/runs/a1b2"
        assert get(client, f"/runs/{own_sample.ids[1]}")["mlflow_url"] is None


def test_the_newest_run_of_an_ablation(own_sample: SampleStore) -> None:
    with serving(own_sample.settings()) as client:
        listed = {each["name"]: each for each in get(client, "/ablations")}
        times = [run["updated_ms"] for run in get(client, "/runs")["runs"]]
        assert listed["tiny"]["newest_ms"] == max(times)
        assert listed["broken"]["newest_ms"] is None
        assert listed["tiny"]["at_scales"]["longer"]["counts"] == {"pending": 4}
