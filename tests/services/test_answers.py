"""Ablations, runs and curves over REST agree with the files."""

from __future__ import annotations

import csv
import io
from typing import Any

import httpx
import pytest

from cope_sweep.store import SweepRecord, SweepRun
from tests.read.tables.ablations import begin, end
from tests.services.sample_store import API, TINY, SampleStore, serving


def get(client: httpx.Client, path: str, status: int = 200, **kwargs: Any) -> Any:
    response = client.get(API + path, **kwargs)
    assert response.status_code == status, response.text
    return response.json()


def test_an_invalid_file_has_its_error_and_other_files_stay_visible(client: httpx.Client) -> None:
    broken, tiny = get(client, "/ablations")
    assert (broken["name"], broken["runs"]) == ("broken", 0)
    assert "metricz" in broken["error"]
    assert (tiny["title"], tiny["rows"], tiny["runs"], tiny["error"]) == ("Selective copy, tiny", 2, 4, None)
    assert tiny["counts"] == {"finished": 2, "failed": 1, "pending": 1}
    assert get(client, "/ablations/broken")["text"].startswith("title: broken")
    for what in ("table", "curves", "runs"):
        assert get(client, f"/ablations/broken/{what}", 409)["code"] == "invalid_ablation"


def test_an_ablation_has_its_plan_and_text(client: httpx.Client, sample: SampleStore) -> None:
    tiny = get(client, "/ablations/tiny")
    assert tiny["axes"] == {"model.position": "position"}
    assert [metric["title"] for metric in tiny["metrics"]] == ["In-dist. (%)", "OOD dense (%)"]
    assert tiny["text"] == (sample.ablations / "tiny.yaml").read_text()
    cope, absolute = tiny["plan"]
    assert [run["status"] for run in cope["runs"]] == ["finished", "failed"]
    assert [run["status"] for run in absolute["runs"]] == ["finished", "pending"]
    assert cope["labels"] == {"model.position": "CoPE"}


def test_a_scale_has_its_own_plan(client: httpx.Client) -> None:
    assert get(client, "/ablations/tiny?scale=longer")["counts"] == {"pending": 4}
    assert get(client, "/ablations/tiny/table?scale=longer")["complete"] is False
    assert get(client, "/ablations/tiny/runs?scale=longer&status=pending")["total"] == 4
    assert "its scales are: longer" in get(client, "/ablations/tiny?scale=none", 422)["detail"]


def test_new_and_changed_files_are_read(own_sample: SampleStore) -> None:
    with serving(own_sample.settings()) as client:
        path = own_sample.ablations / "broken.yaml"
        path.write_text((own_sample.ablations / "tiny.yaml").read_text().replace("seeds: [0, 1]", "seeds: [7]"))
        (own_sample.ablations / "more.yml").write_text((own_sample.ablations / "tiny.yaml").read_text())
        assert [a["name"] for a in get(client, "/ablations")] == ["broken", "more", "tiny"]
        assert get(client, "/ablations/broken")["runs"] == 2
        path.unlink()
        get(client, "/ablations/broken", 404)


def test_curves_of_an_ablation(client: httpx.Client, sample: SampleStore) -> None:
    curves = get(client, "/ablations/tiny/curves")
    assert curves["metric"] == "in_dist/token_error"
    assert {"train/loss", "sparse/loss"} < set(curves["metrics"])
    cope = curves["rows"][0]["series"]
    assert [step for step, _ in cope[0]["points"]] == [5, 10, 12]
    assert (cope[1]["status"], cope[1]["points"]) == ("failed", [])
    loss = get(client, "/ablations/tiny/curves", params={"metric": "train/loss"})
    assert loss["rows"][0]["series"][1]["points"] == [[3, 9.0]]


def test_long_curves_are_reduced_to_common_steps(own_sample: SampleStore) -> None:
    for run, steps in zip(own_sample.plan.runs[2:], (1000, 401), strict=True):
        folder = begin(own_sample.store, run)
        lines = "".join(f'{{"step": {step}, "train/loss": 1.0}}\n' for step in range(1, steps + 1))
        (folder.path / "curve.jsonl").write_text(lines + '{"step": 2000, "trai')
        end(own_sample.store, folder)
    with serving(own_sample.settings()) as client:
        rows = get(client, "/ablations/tiny/curves", params={"metric": "train/loss"})["rows"]
        long, short = ([step for step, _ in row["series"][1]["points"]] for row in rows)
        assert (len(long), long[-1], short[-1]) == (126, 1000, 401)
        assert set(short[:-1]) >= {step for step in long if step < 401}
        assert get(client, "/runs?ablation=tiny")["runs"][3]["step"] == 401


def test_a_curve_as_json_and_csv(client: httpx.Client, sample: SampleStore) -> None:
    rows = get(client, f"/runs/{sample.ids[0]}/curve")
    assert rows == sample.store.run(sample.ids[0]).curve()
    response = client.get(f"{API}/runs/{sample.ids[0]}/curve?format=csv")
    read = list(csv.DictReader(io.StringIO(response.text)))
    assert [int(row["step"]) for row in read] == [row["step"] for row in rows]
    assert next(iter(read[0])) == "step"


def test_runs_are_paged_and_filtered(client: httpx.Client, sample: SampleStore) -> None:
    everything = get(client, "/runs")
    assert everything["total"] == 3
    assert [run["run_id"] for run in everything["runs"]] == sorted(sample.ids[:3])
    pages = [get(client, f"/runs?limit=2&offset={offset}") for offset in (0, 2, 4)]
    assert [run for page in pages for run in page["runs"]] == everything["runs"]
    assert {page["total"] for page in pages} == {3}
    assert [run["run_id"] for run in get(client, "/runs?status=failed")["runs"]] == [sample.ids[2]]
    assert [run["run_id"] for run in get(client, "/runs?ablation=tiny")["runs"]] == sample.ids
    assert get(client, "/ablations/tiny/runs") == get(client, "/runs?ablation=tiny")
    assert get(client, "/runs?ablation=tiny&status=pending")["total"] == 1
    get(client, "/runs?ablation=none", 404)
    for bad in ("limit=0", "limit=1001", "offset=-1", "limit=x", "status=done", "offset=99999999999999999999"):
        assert get(client, f"/runs?{bad}", 422)["code"] == "invalid_request"


def test_a_finished_run(client: httpx.Client, sample: SampleStore) -> None:
    run = get(client, f"/runs/{sample.ids[0]}")
    assert (run["status"], run["step"], run["steps"], run["seed"]) == ("finished", 12, 12, 0)
    assert (run["ablations"], run["row"]) == (["tiny"], "CoPE")
    assert run["spec"] == sample.plan.runs[0].model_dump(mode="json")
    assert run["metrics"] == sample.store.run(sample.ids[0]).result["metrics"]
    assert run["facts"]["parameters"] > 0
    assert run["curve"] == sample.store.run(sample.ids[0]).curve()
    assert get(client, f"/runs/{sample.ids[0]}?curve=false")["curve"] == []


def test_a_failed_run_has_its_message_and_traceback(client: httpx.Client, sample: SampleStore) -> None:
    run = get(client, f"/runs/{sample.ids[2]}")
    assert (run["status"], run["step"]) == ("failed", 3)
    assert "loss is nan" in run["message"]
    assert run["state"]["traceback"] == "Traceback …"


def test_a_pending_run_has_the_configuration_of_its_plan(client: httpx.Client, sample: SampleStore) -> None:
    run = get(client, f"/runs/{sample.ids[3]}")
    assert (run["status"], run["step"], run["metrics"]) == ("pending", 0, {})
    assert run["spec"] == sample.plan.runs[3].model_dump(mode="json")
    assert get(client, f"/runs/{sample.ids[3]}/curve") == []
    get(client, "/runs/0123456789abcdef", 404)


def test_runs_are_filtered_and_sorted_by_their_values(client: httpx.Client, sample: SampleStore) -> None:
    def ids(**params: Any) -> list[str]:
        return [run["run_id"] for run in get(client, "/runs", params=params)["runs"]]

    cope, absolute, failed = sample.ids[:3]
    assert ids(filter="model.position=absolute") == [absolute]
    assert set(ids(filter="model.position=cope")) == {cope, failed}
    assert ids(filter=["model.position=cope", "status=finished"]) == [cope]
    assert ids(filter=["model.layers>=1", "facts.parameters>0"], sort="seed") == sorted([cope, absolute])
    errors = {run_id: sample.store.index.records([run_id])[run_id].metrics["dense/loss"] for run_id in (cope, absolute)}
    assert ids(sort="dense/loss", descending=True) == [*sorted(errors, key=lambda each: -errors[each]), failed]
    page = get(client, "/runs", params={"sort": "dense/loss", "limit": 1, "offset": 1})
    assert (page["total"], page["limit"], page["offset"], len(page["runs"])) == (3, 1, 1, 1)
    assert page["runs"][0]["values"]["dense/loss"] == max(errors.values())
    assert get(client, "/ablations/tiny/runs", params={"filter": "seed=1"})["total"] == 1


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"filter": "model.layer>=4"}, "near ones: model.layers"),
        ({"filter": "model.layers"}, "is no condition"),
        ({"filter": "seed=many"}, "seed is a number"),
        ({"sort": "in_dist/tokenerror"}, "near ones: in_dist/token_error"),
        ({"descending": "up"}, "descending"),
    ],
)
def test_a_faulty_filter_is_explained(client: httpx.Client, params: dict[str, str], message: str) -> None:
    error = get(client, "/runs", 422, params=params)
    assert error["code"] == "invalid_request"
    assert message in error["detail"]


def test_sweeps(own_sample: SampleStore) -> None:
    plan, store = own_sample.plan, own_sample.store
    record = SweepRecord(
        sweep_id="20260730-120000-abcd", ablation="tiny", title="t", hypothesis="h", file_text=TINY, executor="local",
        command=["run"], status="finished", started_ms=5, ended_ms=9, versions={}, machine={}, metrics=[],
        runs=[SweepRun(run_id=run.run_id, row="r", labels={}, seed=run.seed) for run in plan.runs],
        reused=[plan.runs[0].run_id],
    )  # fmt: skip
    store.write_sweep(record)
    with serving(own_sample.settings()) as client:
        page = get(client, "/sweeps")
        assert page["total"] == 1
        assert page["sweeps"][0]["counts"] == {"finished": 2, "failed": 1, "pending": 1}
        assert get(client, "/sweeps?ablation=other")["total"] == 0
        sweep = get(client, f"/sweeps/{record.sweep_id}")
        assert [run["status"] for run in sweep["members"]] == ["finished", "finished", "failed", "pending"]
        assert (sweep["file_text"], sweep["members"][0]["reused"]) == (TINY, True)
        assert get(client, f"/runs?sweep={record.sweep_id}")["total"] == 3
        assert get(client, "/runs/" + plan.runs[3].run_id)["sweeps"] == [record.sweep_id]
        get(client, "/sweeps/none", 404)


def test_a_damaged_run_does_not_hide_other_runs(own_sample: SampleStore) -> None:
    damaged, finished = (own_sample.store.run(run_id) for run_id in own_sample.ids[:2])
    (damaged.path / "result.json").write_text("{")
    end(own_sample.store, damaged)
    with serving(own_sample.settings()) as client:
        runs = {run["run_id"]: run for run in get(client, "/runs")["runs"]}
        assert runs[damaged.run_id]["status"] == "damaged"
        assert "not valid JSON" in runs[damaged.run_id]["message"]
        assert runs[finished.run_id]["message"] is None
        assert get(client, f"/runs/{damaged.run_id}")["result"] is None
        rows = get(client, "/ablations/tiny/table")["rows"]
        assert (rows[0]["counts"]["damaged"], rows[1]["counts"]["finished"]) == (1, 1)
        assert get(client, "/ablations")[1]["counts"]["damaged"] == 1
        assert get(client, f"/runs/{damaged.run_id}/checkpoint", 409)["code"] == "conflict"


def test_a_damaged_curve_hides_no_other_curve(own_sample: SampleStore) -> None:
    path = own_sample.store.run(own_sample.ids[0]).path / "curve.jsonl"
    path.unlink()
    path.mkdir()
    with serving(own_sample.settings()) as client:
        assert get(client, f"/runs/{own_sample.ids[0]}/curve", 500)["code"] == "damaged_store"
        rows = get(client, "/ablations/tiny/curves")["rows"]
        assert (rows[0]["series"][0]["points"], len(rows[1]["series"][0]["points"])) == ([], 3)
