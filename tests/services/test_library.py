"""Ablations, runs and curves over REST agree with the files."""

from __future__ import annotations

import csv
import io
from typing import Any

import httpx

from tests.services.sample_store import API, SampleStore, serving


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
        assert get(client, f"/ablations/broken/{what}", 409)["error"]["type"] == "invalid_ablation"


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
    assert "its scales are: longer" in get(client, "/ablations/tiny?scale=none", 422)["error"]["message"]


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
        folder = own_sample.store.run(run.run_id)
        with folder.lock():
            folder.begin(run, "local")
        lines = "".join(f'{{"step": {step}, "train/loss": 1.0}}\n' for step in range(1, steps + 1))
        (folder.path / "curve.jsonl").write_text(lines + '{"step": 2000, "trai')
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
        assert get(client, f"/runs?{bad}", 422)["error"]["type"] == "invalid_request"


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


def test_a_damaged_file_does_not_hide_other_runs(own_sample: SampleStore) -> None:
    folder = own_sample.store.run(own_sample.ids[0]).path
    (folder / "result.json").write_text("{")
    with serving(own_sample.settings()) as client:
        runs = {run["run_id"]: run for run in get(client, "/runs")["runs"]}
        assert "not valid JSON" in runs[own_sample.ids[0]]["message"]
        assert runs[own_sample.ids[1]]["message"] is None
        assert get(client, f"/runs/{own_sample.ids[0]}", 500)["error"]["type"] == "damaged_store"
        assert get(client, "/ablations/tiny/table", 500)["error"]["type"] == "damaged_store"
        assert get(client, "/ablations")[1]["runs"] == 4
