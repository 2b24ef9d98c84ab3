"""Ablations, runs and curves over REST agree with the files."""

from __future__ import annotations

import asyncio
import csv
import hashlib
import io
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import httpx
import pandas as pd
import pytest
from cope_services.http import middleware, reading

from cope_sweep.api.figures import GetFigure
from cope_sweep.api.runs import ListRuns
from cope_sweep.config import expand, load_ablation
from cope_sweep.read.figures.available import available_figures
from cope_sweep.read.queries import Queries
from cope_sweep.read.reports.evidence import evidence, write_evidence
from cope_sweep.read.tables import read_results, table
from cope_sweep.store import Event, Lease, SweepRun
from cope_sweep.store.reading import read_run
from tests.helpers.finished_runs import begin
from tests.helpers.sample_store import API, CLAIM, SampleStore, serving
from tests.helpers.sweeps import end, sweep_record, write_sweep


def get(
    client: httpx.Client, path: str, expected: int = 200, *, headers: Any = None, params: Any = None, **more: Any
) -> Any:
    response = client.get(API + path, headers=headers, params=params or more or None)
    assert response.status_code == expected, response.text
    return response.json()


def test_an_invalid_file_has_its_error_and_other_files_stay_visible(client: httpx.Client) -> None:
    broken, tiny = get(client, "/ablations")
    assert (broken["name"], broken["runs"]) == ("broken", 0)
    assert "metricz" in broken["error"]
    assert (tiny["title"], tiny["rows"], tiny["runs"], tiny["error"]) == ("Selective copy, tiny", 2, 4, None)
    assert tiny["counts"] == {"finished": 2, "failed": 1, "pending": 1}
    assert get(client, "/ablations/broken")["text"].startswith("title: broken")
    for path in ("/ablations/broken/table", "/ablations/broken/curves", "/runs?ablation=broken"):
        assert get(client, path, 409)["data"]["place"].startswith("ablations/broken.yaml")


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
    assert get(client, "/runs?ablation=tiny&scale=longer&status=pending")["total"] == 4
    error = get(client, "/ablations/tiny?scale=none", 422)
    assert (error["code"], error["data"]["allowed"]) == ("unknown_scale", ["longer"])


def test_claims_have_the_verdicts_of_the_runs_or_of_the_committed_results(own_sample: SampleStore) -> None:
    with (own_sample.ablations / "tiny.yaml").open("a") as file:
        file.write(CLAIM)
    with serving(own_sample.settings()) as client:
        (claim,) = get(client, "/claims")
        assert get(client, "/claims?ablation=tiny") == [claim]
        assert (claim["source"], claim["scale"], claim["measure"]) == ("Table 2", None, "In-dist. (%)")
        assert (claim["verdict"], claim["pairs"]) == ("not testable", 1), "runs of six steps are stuck"
        assert claim["hypothesis"].startswith("not testable")
        assert claim["ours"].startswith("CoPE ")
        (longer,) = get(client, "/claims?ablation=tiny&scale=longer")
        assert "a rule that does not solve the task" in claim["meaning"]
        assert (longer["verdict"], longer["meaning"], longer["p"]) == ("not trained", "", None)
        assert get(client, "/claims?committed=true") == []
        plan = expand(load_ablation(own_sample.ablations / "tiny.yaml"))
        write_evidence(evidence(read_results(plan, own_sample.store)), own_sample.ablations / "results")
        assert get(client, "/claims?committed=true") == [claim]
        assert get(client, "/claims?scale=longer", 422)["code"] == "scale_of_no_ablation"


def test_new_and_changed_files_are_read(own_sample: SampleStore) -> None:
    with serving(own_sample.settings()) as client:
        path = own_sample.ablations / "broken.yaml"
        path.write_text((own_sample.ablations / "tiny.yaml").read_text().replace("seeds: [0, 1]", "seeds: [7]"))
        (own_sample.ablations / "more.yml").write_text((own_sample.ablations / "tiny.yaml").read_text())
        assert [a["name"] for a in get(client, "/ablations")] == ["broken", "more", "tiny"]
        assert get(client, "/ablations/broken")["runs"] == 2
        path.unlink()
        get(client, "/ablations/broken", 404)


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


def test_a_finished_run(client: httpx.Client, sample: SampleStore) -> None:
    run = get(client, f"/runs/{sample.ids[0]}")
    assert (run["status"], run["step"], run["steps"], run["seed"]) == ("finished", 12, 12, 0)
    assert run["spec"] == sample.plan.runs[0].model_dump(mode="json")
    assert run["metrics"] == sample.store.run(sample.ids[0]).result["metrics"]
    assert run["facts"]["parameters"] > 0
    expected = {"model.position": "cope", "train.betas": "0.9,0.999", "facts.parameters": run["facts"]["parameters"]}
    assert run["values"] | expected == run["values"]
    found = get(client, "/runs", filter=[f"model.position={run['values']['model.position']}", "seed=0"])["runs"]
    assert [each["run_id"] for each in found] == [run["run_id"]]
    assert run["curve"] == sample.store.run(sample.ids[0]).curve()
    assert get(client, f"/runs/{sample.ids[0]}?curve=false")["curve"] == []
    [attempt] = run["attempts"]
    assert (attempt["number"], attempt["worker_id"]) == (1, run["worker_id"])
    assert attempt["text"].startswith("attempt 1 on ")
    assert (run["failure"], run["mlflow_url"]) == (None, None)
    failed = get(client, f"/runs/{sample.ids[2]}")
    assert (failed["status"], failed["step"]) == ("failed", 3)
    assert failed["failure"] == {"message": failed["message"], "traceback": "Traceback …"}


def test_a_run_is_in_the_ablations_of_its_sweeps(own_sample: SampleStore) -> None:
    run_id, *_, pending = own_sample.ids
    with serving(own_sample.settings()) as client:
        (own_sample.ablations / "copy.yaml").write_text((own_sample.ablations / "tiny.yaml").read_text())
        assert (get(client, f"/runs/{run_id}")["ablations"], get(client, f"/runs/{run_id}")["row"]) == ([], None)
        write_sweep(own_sample.store, own_sample.plan)
        for found in (get(client, f"/runs/{run_id}"), get(client, "/runs", run=run_id)["runs"][0]):
            assert (found["ablations"], found["row"]) == (["tiny"], "CoPE")
        planned = get(client, f"/runs/{pending}")
        assert (planned["status"], planned["ablations"], planned["seed"]) == ("pending", ["copy", "tiny"], 1)
        for ablation in ("tiny", "copy"):
            last = get(client, "/runs", ablation=ablation)["runs"][-1]
            assert (last["ablations"][0], last["row"], last["seed"], last["steps"]) == (ablation, "Absolute", 1, 12)


# -- tables over REST: their formats, ETags and caches -----------------------------------------------------------------


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


def test_files_may_hold_every_run(client: httpx.Client, sample: SampleStore) -> None:
    text = client.get(f"{API}/ablations/tiny/table?format=csv&runs=true").text
    assert {row["run_id"] for row in csv.DictReader(io.StringIO(text))} == set(sample.ids)


@pytest.mark.parametrize("accept", ["image/png", "text/csv;q=0", "nonsense", "text/html;q=0.0, image/*"])
def test_unknown_media_types_are_not_acceptable(client: httpx.Client, accept: str) -> None:
    assert get(client, "/ablations/tiny/table", 406, headers={"accept": accept})["code"] == "not_acceptable"


def changed(client: httpx.Client, path: str, etag: str) -> httpx.Response:
    """The next answer with another ETag. A machine that stalls for a second gives the old one once more."""
    for _ in range(5):
        response = client.get(path, headers={"if-none-match": etag})
        if response.status_code != 304:
            break
    return response


@pytest.mark.parametrize(
    ("figure", "code"),
    [
        ("summary?metric=in_dist/token_eror", "unknown_metric"),
        ("summary?row=CoPA", "unknown_row"),
        ("values?panels=model.positon", "unknown_axis"),
        ("values?x=model.dmi", "unknown_key"),
        ("curves?x=epoch", "unknown_key"),
        ("curves?metric=in_dist/token_eror", "unknown_metric"),
        ("curves?panels=model.position", "no_effect"),
    ],
)
def test_a_misspelt_option_of_a_figure_is_invalid(client: httpx.Client, figure: str, code: str) -> None:
    assert get(client, f"/ablations/tiny/figures/{figure}", 422)["code"] == code


def test_pictures_of_too_many_rows_are_not_drawn(own_sample: SampleStore, monkeypatch: pytest.MonkeyPatch) -> None:
    write_evidence(evidence(read_results(own_sample.plan, own_sample.store)), own_sample.ablations / "results")
    (own_sample.ablations / "results" / "tiny.summary.svg").write_text("<?xml kept")
    monkeypatch.setattr("cope_services.http.app.MAX_ROWS", 1)
    drawn = "/ablations/tiny/figures/summary"
    with serving(own_sample.settings()) as client:
        refused = get(client, drawn, 409, format="svg")
        assert (refused["code"], refused["data"]["limit"]) == ("too_many_rows", 1)
        assert client.get(f"{API}{drawn}?format=csv").status_code == 200
        assert client.get(f"{API}{drawn}?format=svg&row=CoPE").status_code == 200
        assert client.get(f"{API}{drawn}?committed=true&format=svg").text == "<?xml kept", "it is drawn already"


def test_results_that_are_kept_with_the_files_need_no_store(own_sample: SampleStore, tmp_path: Path) -> None:
    write_evidence(evidence(read_results(own_sample.plan, own_sample.store)), own_sample.ablations / "results")
    with serving(own_sample.settings(store=tmp_path / "empty")) as client:
        (tiny,) = [each for each in get(client, "/ablations") if each["name"] == "tiny"]
        assert (tiny["committed"], tiny["finished"]) == ([""], 0)
        assert get(client, "/ablations/tiny", scale="longer")["committed"] == [""]
        kept = get(client, "/ablations/tiny/table", committed=True)["rows"]
        assert all(
            row["metrics"]["in_dist/token_error"]["n"] == 0 for row in get(client, "/ablations/tiny/table")["rows"]
        )
        drawn = "/ablations/tiny/figures/summary"
        data = client.get(f"{API}{drawn}?committed=true&format=csv").text
        assert {row["mean"] for row in csv.DictReader(io.StringIO(data))} - {""}
        assert get(client, drawn, 409, format="svg")["code"] == "nothing_to_draw"  # of the store
        (own_sample.ablations / "results" / "tiny.summary.svg").write_text("<?xml kept")
        assert client.get(f"{API}{drawn}?committed=true&format=svg").text == "<?xml kept"
        assert client.get(f"{API}{drawn}?committed=true&format=svg&row=CoPE").text != "<?xml kept"
        (own_sample.ablations / "results" / "tiny.summary.svg").write_text('<svg width="288pt" kept')
        for size, is_kept in (("4", True), ("3.75", False), ("4x3", False)):  # redrawn for a narrower place
            svg = client.get(f"{API}{drawn}?committed=true&format=svg&size={size}").text
            assert svg.endswith("kept") == is_kept
        problem = get(client, "/ablations/tiny/figures/budget", 422)  # the ablation is valid, the question is not
        assert problem["code"] == "not_a_search"
        for name in ("..%2F..%2Ftiny", "%00", "😀" * 100):  # never a path
            get(client, f"/ablations/tiny/figures/{name}", 404, committed=True, format="svg")
        (same,) = [each for each in get(client, "/ablations", committed=True) if each["name"] == "tiny"]
        assert same["finished"] == sum(row["counts"]["finished"] for row in kept), "the same questions to that store"
        assert get(client, "/ablations/tiny/table", 422, committed="maybe")["code"] == "invalid_request"
        for path in ("/runs", "/ablations/tiny/plan", "/ablations/tiny/missing"):
            assert get(client, path, 422, committed=True)["code"] == "invalid_request"
        missing = get(client, "/ablations/tiny/table", 404, committed=True, scale="longer")
        assert (missing["code"], missing["data"]["scale"]) == ("not_found", "longer")
    own = read_results(own_sample.plan, own_sample.store)
    for row in kept:
        values = row["metrics"]["in_dist/token_error"]["values"]
        assert [{key: each[key] for key in ("run_id", "seed", "value")} for each in values] == [
            {"run_id": run_id, "seed": 0, "value": own.records[run_id].metrics["in_dist/token_error"]}
            for run_id in own_sample.ids[:2]
            if own_sample.plan.row_name(run_id) == row["row"]
        ]


def test_an_unchanged_table_is_304_and_a_changed_one_is_not(own_sample: SampleStore) -> None:
    with serving(own_sample.settings()) as client:
        path = f"{API}/ablations/tiny/table"
        etag = client.get(path).headers["etag"]
        for sent in (etag, etag.removeprefix("W/"), f'{etag}, "other"', "*"):
            unchanged = client.get(path, headers={"if-none-match": sent})
            assert (unchanged.status_code, unchanged.content, unchanged.headers["etag"]) == (304, b"", etag)
        assert client.get(f"{path}?format=csv", headers={"if-none-match": etag}).status_code == 200

        store = own_sample.store
        pending = begin(store, own_sample.plan.runs[3])
        assert isinstance(store.index.acquire(read_run(pending), "sweep", 60.0), Lease)
        store.index.renew("sweep", 60.0, [Event(run_id=pending.run_id, status="running", worker_id="here:1")])
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


def test_an_etag_stays_after_a_restart(own_sample: SampleStore) -> None:
    path = f"{API}/ablations/tiny/table"
    with serving(own_sample.settings()) as client:
        etag = client.get(path).headers["etag"]
    with serving(own_sample.settings()) as client:
        assert client.get(path, headers={"if-none-match": etag}).status_code == 304
        end(own_sample.store, begin(own_sample.store, own_sample.plan.runs[3]))
        assert client.get(path, headers={"if-none-match": etag}).status_code == 200


# -- figures and reports over REST -------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("output_format", BEGINNINGS)
def test_the_format_of_a_figure_is_chosen_by_name_or_by_accept_header(client: httpx.Client, output_format: str) -> None:
    media = GetFigure.MEDIA_TYPES[output_format]
    named = client.get(f"{FIGURES}/summary?format={output_format}")
    accepted = client.get(f"{FIGURES}/summary", headers={"accept": f"{media}, image/svg+xml;q=0.1"})
    for answer in (named, accepted):
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].partition(";")[0] == media
        assert answer.content.startswith(BEGINNINGS[output_format])
    assert named.content == accepted.content
    refused = client.get(f"{FIGURES}/summary", headers={"accept": "image/webp, image/svg+xml;q=0"})
    assert (refused.status_code, refused.json()["code"]) == (406, "not_acceptable")


def test_a_figure_has_the_size_that_is_asked_for_and_no_style_of_the_service(client: httpx.Client) -> None:
    drawn = client.get(f"{FIGURES}/summary", params={"size": "3.25x2.5"})
    assert b'width="234pt" height="180pt"' in drawn.content
    for refused in ({"size": "900x2"}, {"size": "6x"}, {"style": "/etc/passwd"}):
        assert client.get(f"{FIGURES}/summary", params=refused).status_code == 422, refused


def test_the_report(client: httpx.Client) -> None:
    page = client.get(f"{API}/ablations/tiny/report")
    assert page.headers["content-type"].startswith("text/html")
    assert "Selective copy, tiny" in page.text
    policy = page.headers["content-security-policy"]
    assert policy == middleware.DOCUMENT_POLICY
    assert "script-src" not in policy
    assert "default-src 'none'; style-src 'unsafe-inline'" in policy
    assert policy.endswith("sandbox")
    assert "<script" not in page.text
    text = client.get(f"{API}/ablations/tiny/report", headers={"accept": "text/markdown"}).text
    assert text.startswith("# Selective copy, tiny")
    (link,) = {part.partition(")")[0] for part in text.split("](")[1:] if "figures/" in part}
    assert link == "figures/summary?format=svg", "relative: a proxy may add a prefix"
    assert client.get(urljoin(f"{API}/ablations/tiny/report", link)).content.startswith(BEGINNINGS["svg"])
    missing = client.get(f"{API}/ablations/tiny/report?scale=longer")
    assert (missing.status_code, missing.json()["code"]) == (409, "nothing_to_report")
    assert "cope-sweep run tiny --scale longer" in missing.json()["detail"]
    assert client.get(f"{API}/ablations/tiny/report?format=html&scale=none").status_code == 422


# -- checkpoint downloads: whole files, byte ranges, and no other files ------------------------------------------------


@pytest.fixture
def url(sample: SampleStore) -> str:
    return f"{API}/runs/{sample.ids[0]}/checkpoint"


def test_the_listing_agrees_with_the_files(client: httpx.Client, sample: SampleStore, url: str) -> None:
    listing = client.get(url).json()
    assert [file["name"] for file in listing["files"]] == ["config.json", "model.safetensors"]
    for file in listing["files"]:
        content = (sample.store.run(sample.ids[0]).checkpoint / file["name"]).read_bytes()
        assert file["size_bytes"] == len(content)
        assert file["sha256"] == hashlib.sha256(content).hexdigest()
        assert client.get(file["url"]).content == content


def test_an_interrupted_download_is_resumed(client: httpx.Client, sample: SampleStore, url: str) -> None:
    whole = (sample.store.run(sample.ids[0]).checkpoint / "model.safetensors").read_bytes()
    first = client.get(f"{url}/model.safetensors", headers={"range": "bytes=0-999"})
    assert (first.status_code, first.headers["content-range"]) == (206, f"bytes 0-999/{len(whole)}")
    rest = client.get(f"{url}/model.safetensors", headers={"range": "bytes=1000-", "if-range": first.headers["etag"]})
    assert rest.status_code == 206
    assert first.content + rest.content == whole
    changed = client.get(f"{url}/model.safetensors", headers={"range": "bytes=1000-", "if-range": '"another"'})
    assert (changed.status_code, changed.content) == (200, whole)
    tail = client.get(f"{url}/model.safetensors", headers={"range": "bytes=-5"})
    assert tail.content == whole[-5:]


def test_head_and_304(client: httpx.Client, url: str) -> None:
    head = client.head(f"{url}/model.safetensors")
    assert head.headers["accept-ranges"] == "bytes"
    assert int(head.headers["content-length"]) > 0
    assert head.content == b""
    same = client.get(f"{url}/model.safetensors", headers={"if-none-match": head.headers["etag"]})
    assert (same.status_code, same.content) == (304, b"")


def test_head_does_not_read_the_file(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(1000))
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await reading.Download(file)(scope, receive, send)

    asyncio.run(middleware.HeadAsGet(application)({"type": "http", "method": "HEAD", "headers": []}, None, send))
    assert (b"content-length", b"1000") in sent[0]["headers"]
    assert [message.get("body") for message in sent[1:]] == [b""]


def test_no_name_gives_another_file(own_sample: SampleStore) -> None:
    folder = own_sample.store.run(own_sample.ids[0]).checkpoint
    (folder / ".hidden").write_text("secret")
    (folder / "link").symlink_to("/etc/passwd")
    (folder / "folder").mkdir()
    names = ["..%2fresult.json", "%2e%2e%2fspec.json", "../spec.json", "%2fetc%2fpasswd", "..%5cspec.json", "%00"]
    names += ["model.safetensors%00", "~", "x" * 5000, "MODEL.safetensors", "model.safetensors%2f..", "%20"]
    names += [".hidden", "link", "folder", "..%2f..%2f..%2fconfig.json", "model.safetensors%0a"]
    with serving(own_sample.settings()) as client:
        for name in names:
            response = client.get(f"{API}/runs/{own_sample.ids[0]}/checkpoint/{name}")
            assert response.status_code == 404, name
            assert response.json()["code"] == "not_found"
            assert b"secret" not in response.content
            assert b"root:" not in response.content


@pytest.mark.parametrize(("index", "status"), [(2, "failed"), (3, "pending")])
def test_unfinished_runs_have_no_checkpoint(client: httpx.Client, sample: SampleStore, index: int, status: str) -> None:
    for path in ("checkpoint", "checkpoint/model.safetensors"):
        response = client.get(f"{API}/runs/{sample.ids[index]}/{path}")
        error = response.json()
        assert (response.status_code, error["code"], error["data"]["status"]) == (409, "not_finished", status)


def test_a_deleted_checkpoint_is_reported(own_sample: SampleStore) -> None:
    folder = own_sample.store.run(own_sample.ids[0]).checkpoint
    for path in folder.iterdir():
        path.unlink()
    with serving(own_sample.settings()) as client:
        for path in ("checkpoint", "checkpoint/config.json"):
            response = client.get(f"{API}/runs/{own_sample.ids[0]}/{path}")
            assert (response.status_code, response.json()["code"]) == (404, "deleted_checkpoint")


# -- pages of runs, curves, logs and details over REST -----------------------------------------------------------------


def walk(client: httpx.Client, path: str, **params: Any) -> list[str]:
    """The run ids of all pages."""
    found: list[str] = []
    offset = 0
    while True:
        page = get(client, path, **params, offset=offset)
        found += [run["run_id"] for run in page["runs"]]
        if page["next"] is None:
            assert len(found) == page["total"]
            return found
        offset = page["next"]


@pytest.mark.parametrize("limit", [1, 2])
@pytest.mark.parametrize("sort", ["run_id", "dense/loss", "seed", "status", "model.position"])
def test_pages_lead_through_all_runs(client: httpx.Client, sample: SampleStore, sort: str, limit: int) -> None:
    expected = [run.run_id for run in Queries(sample.store).ask(ListRuns(sort=sort)).runs]
    assert walk(client, "/runs", sort=sort, limit=limit) == expected


def test_pages_lead_through_a_plan(client: httpx.Client, sample: SampleStore) -> None:
    assert walk(client, "/runs", ablation="tiny", limit=3) == sample.ids
    assert walk(client, "/runs", ablation="tiny", limit=1, status="finished") == sample.ids[:2]
    by_seed = walk(client, "/runs", ablation="tiny", limit=1, sort="seed", descending=True)
    assert by_seed[0] == sample.ids[2]


@pytest.mark.parametrize(
    "query",
    [
        {"filter": f"seed={2**63}"}, {"filter": f"dense/loss>-{2**63}"}, {"filter": "dense/loss<1e999"},
        {"filter": "model.position=a\0"}, {"filter": "tags.row=\0"}, {"filter": "tags.modle=x"}, {"search": "\0"},
        {"filter": "model.\0=1"}, {"sort": "a\0"}, {"sort": "dense/los"}, {"cursor": "x"},
    ],
)  # fmt: skip
def test_a_query_that_no_database_can_answer_is_an_error_of_the_request(
    client: httpx.Client, query: dict[str, str]
) -> None:
    code = get(client, "/runs", 422, **query)["code"]
    assert code in ("invalid_value", "unknown_key", "invalid_request")


def test_chosen_fields(client: httpx.Client, sample: SampleStore) -> None:
    run = get(client, "/runs", fields="step,model.layers,dense/loss", filter="status=finished", limit=1)["runs"][0]
    assert set(run) == {"run_id", "status", "step", "values"}
    assert set(run["values"]) == {"model.layers", "dense/loss", "status"}
    assert run["values"]["model.layers"] == 1
    names = [("ablation", "tiny"), ("fields", "row"), ("fields", "metrics")]
    pending = client.get(f"{API}/runs", params=names).json()["runs"][3]
    assert pending == {"run_id": sample.ids[3], "status": "pending", "row": "Absolute", "metrics": {}}


def test_tags_are_places_in_sweeps(own_sample: SampleStore) -> None:
    runs = own_sample.plan.runs
    placed = [(run, own_sample.plan.row_name(run.run_id)) for run in runs[:2]]
    members = [
        SweepRun(run_id=run.run_id, row=row, seed=run.seed, labels={"model.position": row, "depth": "2"})
        for run, row in placed
    ]
    record = sweep_record(runs=members, title="Selective copy")
    own_sample.store.write_sweep(record)
    with serving(own_sample.settings()) as client:

        def ids(*filters: str) -> set[str]:
            return {run["run_id"] for run in get(client, "/runs", filter=list(filters))["runs"]}

        assert ids("tags.row=CoPE") == {runs[0].run_id}
        assert ids("tags.model.position!=CoPE") == {runs[1].run_id}
        assert ids("tags.ablation=tiny", "tags.depth=2") == {runs[0].run_id, runs[1].run_id}
        assert ids(f"tags.sweep={record.sweep_id}", "tags.row=Absolute") == {runs[1].run_id}
        assert ids("tags.depth=3") == set()
        assert get(client, "/runs", 422, filter="tags.other=1")["code"] == "unknown_key"
        assert get(client, "/runs", 422, sort="tags.row")["code"] == "not_sortable"

        def found(words: str) -> set[str]:
            return {run["run_id"] for run in get(client, "/runs", search=words)["runs"]}

        assert found("cope") == {runs[0].run_id}
        assert found("tiny  SELECTIVE") == {runs[0].run_id, runs[1].run_id}  # the name and the title of the ablation
        assert found(runs[1].run_id[:5].upper()) == {runs[1].run_id}
        assert found("diverged") == {runs[2].run_id}  # the message of a run of no sweep
        assert found("%") == found("cope absolute") == set()


def test_an_unknown_metric_is_refused_with_the_known_ones(client: httpx.Client, sample: SampleStore) -> None:
    run = sample.ids[0]
    for path, params in (
        ("/ablations/tiny/curves", {"metric": "train/los"}),
        (f"/runs/{run}/curve", {"metric": "train/los"}),
        ("/curves", {"run": run, "metric": "train/los"}),
    ):
        error = get(client, path, 422, **params)
        assert (error["code"], error["data"]["metric"]) == ("unknown_metric", "train/los")
        assert {"train/loss", "in_dist/token_error"} <= {*error["data"]["allowed"]}


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


def test_the_newest_run_of_an_ablation(client: httpx.Client) -> None:
    listed = {each["name"]: each for each in get(client, "/ablations")}
    assert listed["tiny"]["newest_ms"] == max(run["updated_ms"] for run in get(client, "/runs")["runs"])
    assert listed["broken"]["newest_ms"] is None
    assert listed["tiny"]["at_scales"]["longer"]["counts"] == {"pending": 4}


def test_the_etag_of_committed_results_changes_with_their_files_only(own_sample: SampleStore) -> None:
    results = own_sample.ablations / "results"
    write_evidence(evidence(read_results(own_sample.plan, own_sample.store)), results)
    with serving(own_sample.settings()) as client:
        path = f"{API}/ablations/tiny/table?format=json&committed=true"
        first = client.get(path)
        own_sample.store.index.delete(own_sample.ids[:1])
        headers = {"if-none-match": first.headers["etag"]}
        assert client.get(path, headers=headers).status_code == 304, "the other store has changed"
        frame = pd.read_parquet(results / "tiny.parquet")
        frame.assign(**{"in_dist/token_error": 7.5}).to_parquet(results / "tiny.parquet")
        second = client.get(path, headers=headers)
        assert second.status_code == 200
        assert {row["metrics"]["in_dist/token_error"]["mean"] for row in second.json()["rows"]} <= {7.5, None}
        (results / "tiny.parquet").write_bytes(b"PAR1 damaged")
        damaged = client.get(path, headers={"if-none-match": second.headers["etag"]})
        assert (damaged.status_code, damaged.json()["code"]) == (409, "damaged_report")
        assert str(results) not in damaged.text, "no folder of the service"
