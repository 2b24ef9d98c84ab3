"""Ablations, tables, runs and curves: the service says what the files say."""

from __future__ import annotations

import csv
import io
from typing import Any

import httpx
import pytest
from house import House, serving

from cope_sweep.results import table

API = "/api/v1"


def get(client: httpx.Client, path: str, status: int = 200, **kwargs: Any) -> Any:
    response = client.get(API + path, **kwargs)
    assert response.status_code == status, response.text
    return response.json()


def test_health(client: httpx.Client) -> None:
    assert client.get("/health/live").json() == {"status": "live"}
    assert client.get("/health/ready").json() == {"status": "ready"}


def test_not_ready_where_the_ablations_are_gone(own_house: House) -> None:
    with serving(own_house.settings()) as client:
        for path in own_house.ablations.iterdir():
            path.unlink()
        own_house.ablations.rmdir()
        response = client.get("/health/ready")
        assert response.status_code == 503
        assert response.json()["error"]["type"] == "not_ready"


def test_a_store_that_is_not_there_yet_holds_no_runs(house: House) -> None:
    with serving(house.settings(store=house.store / "none")) as client:
        assert client.get("/health/ready").status_code == 200
        assert get(client, "/runs")["total"] == 0
        assert get(client, "/ablations/tiny")["counts"] == {"pending": 4}
        assert get(client, "/ablations/tiny/table")["complete"] is False


def test_a_malformed_file_shows_its_error_and_hides_no_other(client: httpx.Client) -> None:
    broken, tiny = get(client, "/ablations")
    assert (broken["name"], broken["runs"]) == ("broken", 0)
    assert "metricz" in broken["error"]
    assert (tiny["title"], tiny["rows"], tiny["runs"], tiny["error"]) == ("Selective copy, tiny", 2, 4, None)
    assert tiny["counts"] == {"finished": 2, "failed": 1, "pending": 1}
    assert get(client, "/ablations/broken")["text"].startswith("title: broken")
    for what in ("table", "curves", "runs"):
        assert get(client, f"/ablations/broken/{what}", 409)["error"]["type"] == "invalid_ablation"


def test_an_ablation_with_its_plan_and_text(client: httpx.Client, house: House) -> None:
    tiny = get(client, "/ablations/tiny")
    assert tiny["axes"] == {"model.position": "position"}
    assert [metric["title"] for metric in tiny["metrics"]] == ["In-dist. (%)", "OOD dense (%)"]
    assert tiny["text"] == (house.ablations / "tiny.yaml").read_text()
    cope, absolute = tiny["plan"]
    assert [run["status"] for run in cope["runs"]] == ["finished", "failed"]
    assert [run["status"] for run in absolute["runs"]] == ["finished", "pending"]
    assert cope["labels"] == {"model.position": "CoPE"}


def test_a_scale_is_another_plan(client: httpx.Client) -> None:
    assert get(client, "/ablations/tiny?scale=longer")["counts"] == {"pending": 4}
    assert get(client, "/ablations/tiny/table?scale=longer")["complete"] is False
    assert get(client, "/ablations/tiny/runs?scale=longer&status=pending")["total"] == 4
    assert "it has longer" in get(client, "/ablations/tiny?scale=none", 422)["error"]["message"]


def test_a_file_that_appears_or_changes_is_seen(own_house: House) -> None:
    with serving(own_house.settings()) as client:
        path = own_house.ablations / "broken.yaml"
        path.write_text((own_house.ablations / "tiny.yaml").read_text().replace("seeds: [0, 1]", "seeds: [7]"))
        (own_house.ablations / "more.yml").write_text((own_house.ablations / "tiny.yaml").read_text())
        assert [a["name"] for a in get(client, "/ablations")] == ["broken", "more", "tiny"]
        assert get(client, "/ablations/broken")["runs"] == 2
        path.unlink()
        get(client, "/ablations/broken", 404)


# -- tables ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "media", "method"),
    [
        ("csv", "text/csv", "to_csv"),
        ("markdown", "text/markdown", "to_markdown"),
        ("latex", "application/x-tex", "to_latex"),
        ("html", "text/html", "to_html"),
    ],
)
def test_a_table_by_name_and_by_accept(client: httpx.Client, house: House, form: str, media: str, method: str) -> None:
    wanted = getattr(table(house.plan, house.ledger), method)()
    named = client.get(f"{API}/ablations/tiny/table?format={form}")
    accepted = client.get(f"{API}/ablations/tiny/table", headers={"accept": f"{media};q=0.9, application/json;q=0.1"})
    for response in (named, accepted):
        assert response.text == wanted
        assert response.headers["content-type"].split(";")[0] == media


def test_a_table_is_json_unless_asked_otherwise(client: httpx.Client, house: House) -> None:
    wanted = table(house.plan, house.ledger).to_json()
    assert get(client, "/ablations/tiny/table") == wanted
    assert get(client, "/ablations/tiny/table?format=json", headers={"accept": "text/csv"}) == wanted
    assert wanted["rows"][0]["counts"]["failed"] == 1


def test_a_browser_gets_html(client: httpx.Client) -> None:
    accept = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
    assert client.get(f"{API}/ablations/tiny/table", headers={"accept": accept}).text.startswith("<table")


def test_every_run_as_csv(client: httpx.Client, house: House) -> None:
    text = client.get(f"{API}/ablations/tiny/table?format=csv&runs=true").text
    assert {row["run_id"] for row in csv.DictReader(io.StringIO(text))} == set(house.ids)


@pytest.mark.parametrize("accept", ["image/png", "text/csv;q=0", "nonsense", "text/html;q=0.0, image/*"])
def test_what_cannot_be_had_is_not_acceptable(client: httpx.Client, accept: str) -> None:
    error = get(client, "/ablations/tiny/table", 406, headers={"accept": accept})["error"]
    assert error["type"] == "not_acceptable"
    assert "text/markdown" in error["message"]


def test_unchanged_tables_cost_304_and_changed_ones_do_not(own_house: House) -> None:
    with serving(own_house.settings()) as client:
        path = f"{API}/ablations/tiny/table"
        etag = client.get(path).headers["etag"]
        for sent in (etag, f'W/{etag}, "other"', "*"):
            unchanged = client.get(path, headers={"if-none-match": sent})
            assert (unchanged.status_code, unchanged.content, unchanged.headers["etag"]) == (304, b"", etag)
        assert client.get(f"{path}?format=csv", headers={"if-none-match": etag}).status_code == 200

        pending = own_house.ledger.run(own_house.ids[3])
        with pending.lock():
            pending.begin(own_house.plan.runs[3], "local")
            running = client.get(path, headers={"if-none-match": etag})
            assert running.json()["rows"][1]["counts"]["running"] == 1
        interrupted = client.get(path, headers={"if-none-match": running.headers["etag"]})
        assert interrupted.json()["rows"][1]["counts"]["interrupted"] == 1
        pending.finish({"in_dist/token_error": 1.0}, {})
        finished = client.get(path, headers={"if-none-match": interrupted.headers["etag"]})
        assert finished.json()["rows"][1]["metrics"]["in_dist/token_error"]["n"] == 2
        ablation = own_house.ablations / "tiny.yaml"
        ablation.write_text(ablation.read_text().replace("tiny", "small"))
        renamed = client.get(path, headers={"if-none-match": finished.headers["etag"]})
        assert renamed.json()["title"] == "Selective copy, small"


# -- curves ------------------------------------------------------------------------------------------------------


def test_curves_of_an_ablation(client: httpx.Client, house: House) -> None:
    curves = get(client, "/ablations/tiny/curves")
    assert curves["metric"] == "in_dist/token_error"
    assert {"train/loss", "sparse/loss"} < set(curves["metrics"])
    cope = curves["rows"][0]["series"]
    assert [step for step, _ in cope[0]["points"]] == [5, 10, 12]
    assert (cope[1]["status"], cope[1]["points"]) == ("failed", [])
    loss = get(client, "/ablations/tiny/curves", params={"metric": "train/loss"})
    assert loss["rows"][0]["series"][1]["points"] == [[3, 9.0]]


def test_long_curves_are_thinned_to_common_steps(own_house: House) -> None:
    for run, steps in zip(own_house.plan.runs[2:], (1000, 401), strict=True):
        folder = own_house.ledger.run(run.run_id)
        with folder.lock():
            folder.begin(run, "local")
        lines = "".join(f'{{"step": {step}, "train/loss": 1.0}}\n' for step in range(1, steps + 1))
        (folder.path / "curve.jsonl").write_text(lines + '{"step": 2000, "trai')
    with serving(own_house.settings()) as client:
        rows = get(client, "/ablations/tiny/curves", params={"metric": "train/loss"})["rows"]
        long, short = ([step for step, _ in row["series"][1]["points"]] for row in rows)
        assert (len(long), long[-1], short[-1]) == (126, 1000, 401)
        assert set(short[:-1]) >= {step for step in long if step < 401}
        assert get(client, "/runs?ablation=tiny")["runs"][3]["step"] == 401


def test_a_curve_as_json_and_csv(client: httpx.Client, house: House) -> None:
    rows = get(client, f"/runs/{house.ids[0]}/curve")
    assert rows == house.ledger.run(house.ids[0]).curve()
    response = client.get(f"{API}/runs/{house.ids[0]}/curve?format=csv")
    read = list(csv.DictReader(io.StringIO(response.text)))
    assert [int(row["step"]) for row in read] == [row["step"] for row in rows]
    assert next(iter(read[0])) == "step"


# -- runs --------------------------------------------------------------------------------------------------------


def test_runs_are_paged_and_filtered(client: httpx.Client, house: House) -> None:
    everything = get(client, "/runs")
    assert everything["total"] == 3
    assert [run["run_id"] for run in everything["runs"]] == sorted(house.ids[:3])
    pages = [get(client, f"/runs?limit=2&offset={offset}") for offset in (0, 2, 4)]
    assert [run for page in pages for run in page["runs"]] == everything["runs"]
    assert {page["total"] for page in pages} == {3}
    assert [run["run_id"] for run in get(client, "/runs?status=failed")["runs"]] == [house.ids[2]]
    assert [run["run_id"] for run in get(client, "/runs?ablation=tiny")["runs"]] == house.ids
    assert get(client, "/ablations/tiny/runs") == get(client, "/runs?ablation=tiny")
    assert get(client, "/runs?ablation=tiny&status=pending")["total"] == 1
    get(client, "/runs?ablation=none", 404)
    for bad in ("limit=0", "limit=1001", "offset=-1", "limit=x", "status=done", "offset=99999999999999999999"):
        assert get(client, f"/runs?{bad}", 422)["error"]["type"] == "invalid_request"


def test_a_finished_run(client: httpx.Client, house: House) -> None:
    run = get(client, f"/runs/{house.ids[0]}")
    assert (run["status"], run["step"], run["steps"], run["seed"]) == ("finished", 12, 12, 0)
    assert (run["ablations"], run["row"]) == (["tiny"], "CoPE")
    assert run["spec"] == house.plan.runs[0].model_dump(mode="json")
    assert run["metrics"] == house.ledger.run(house.ids[0]).result["metrics"]
    assert run["facts"]["parameters"] > 0
    assert run["curve"] == house.ledger.run(house.ids[0]).curve()
    assert get(client, f"/runs/{house.ids[0]}?curve=false")["curve"] == []


def test_a_failed_run_says_why(client: httpx.Client, house: House) -> None:
    run = get(client, f"/runs/{house.ids[2]}")
    assert (run["status"], run["step"]) == ("failed", 3)
    assert "loss is nan" in run["message"]
    assert run["state"]["traceback"] == "Traceback …"


def test_a_pending_run_is_known_by_its_plan(client: httpx.Client, house: House) -> None:
    run = get(client, f"/runs/{house.ids[3]}")
    assert (run["status"], run["step"], run["metrics"]) == ("pending", 0, {})
    assert run["spec"] == house.plan.runs[3].model_dump(mode="json")
    assert get(client, f"/runs/{house.ids[3]}/curve") == []


def test_a_damaged_file_hides_no_other_run(own_house: House) -> None:
    folder = own_house.ledger.run(own_house.ids[0]).path
    (folder / "result.json").write_text("{")
    with serving(own_house.settings()) as client:
        runs = {run["run_id"]: run for run in get(client, "/runs")["runs"]}
        assert "not valid JSON" in runs[own_house.ids[0]]["message"]
        assert runs[own_house.ids[1]]["message"] is None
        assert get(client, f"/runs/{own_house.ids[0]}", 500)["error"]["type"] == "damaged_store"
        assert get(client, "/ablations/tiny/table", 500)["error"]["type"] == "damaged_store"
        assert get(client, "/ablations")[1]["runs"] == 4


def test_the_page_brings_all_it_needs(client: httpx.Client) -> None:
    page = client.get("/")
    assert "default-src 'self'" in page.headers["content-security-policy"]
    for name in ("style.css", "page.js", "plot.js"):
        assert f"/static/{name}" in page.text
        asset = client.get(f"/static/{name}")
        assert asset.status_code == 200
        assert "https://" not in asset.text
    assert client.get("/static/../app.py").status_code == 404
    assert client.get("/static/%2e%2e/app.py").status_code == 404


def test_the_api_documents_every_endpoint_and_its_problem(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    paths = document["paths"]
    assert len(paths) == 14
    for path, operations in paths.items():
        for operation in operations.values():
            if path.startswith(API):
                assert operation["responses"]["422"]["content"]["application/json"]["schema"]["$ref"].endswith(
                    "/Problem"
                )
    assert client.get("/docs").status_code == 200
