"""The client against the real service, and against servers that answer as a test says."""

from __future__ import annotations

import hashlib
import json
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from cope_sweep.api.runs import GetRun
from cope_sweep.client import (
    RECONNECT_S,
    Client,
    ConnectionFailed,
    Page,
    Picture,
    RetryPolicy,
    ServiceError,
    server_events,
)
from cope_sweep.read.queries import Queries
from cope_sweep.records import SWEEP_ID
from cope_sweep.store import SweepProgress
from tests.helpers.errors import raises
from tests.helpers.sample_store import SampleStore, build, serving
from tests.test_docs import code_blocks, read

ROOT = Path(__file__).parents[2]
SWEEP = "20260801-000000-aa"
*_, EXAMPLE = code_blocks(read("docs/how-to/notebooks.md"), "python")


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> SampleStore:
    return build(tmp_path_factory.mktemp("sample"))


@pytest.fixture(scope="module")
def client(sample: SampleStore) -> Iterator[Client]:
    with serving(sample.settings()) as served, Client(str(served.base_url)) as client:
        yield client


Answer = Callable[[httpx.Request], httpx.Response]


def scripted(answer: Answer, **options: object) -> tuple[Client, list[float]]:
    """A client whose requests `answer` answers, and the times that it waits."""
    waited: list[float] = []
    client = Client("http://service", transport=httpx.MockTransport(answer), sleep=waited.append, **options)
    return client, waited


def problem(status: int, code: str = "a_code", **headers: str) -> httpx.Response:
    body = {"type": "about:blank", "title": "", "status": status, "detail": "what is wrong with x", "code": code}
    body |= {"data": {"key": "x"}}
    return httpx.Response(status, json=body, headers=headers)


def test_a_faulty_request_is_refused_before_it_is_sent() -> None:
    client, _ = scripted(lambda _: httpx.Response(500))
    with raises("invalid_request"):
        client.submit(set=["seeds=[0]"])
    with raises("invalid_request", key="max_runs"):
        client.submit(ablation="quickstart", max_runs=0)
    with raises("invalid_request", key="max_run"):
        client.preview("quickstart", max_run=1)
    with raises("invalid_request"):
        client.perplexity(["0123456789abcdef"])
    with raises("invalid_request", key="compar") as caught:
        client.table("quickstart", compar="CoPE")
    assert "did you mean 'compare'" in str(caught.value)
    with raises("invalid_request", key="size"):
        client.figure("quickstart", "curves", size="large")


@pytest.mark.thorough
@pytest.mark.slow
def test_a_script_with_the_client_is_checked_strictly(tmp_path: Path) -> None:
    """The example of the documents, and calls with unknown keywords."""
    pytest.importorskip("mypy")
    assert (ROOT / "cope_sweep/py.typed").exists(), "type checkers ignore the installed package without it"
    wrong = ['client.submit(ablation="mine", sett=[])', 'client.ask(GetTable(name="mine", formt="csv"))']
    calls = ["from cope_sweep.api.tables import GetTable", *(f"{call}  # wrong" for call in wrong)]
    (tmp_path / "script.py").write_text("\n".join([EXAMPLE, *calls]))
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--config-file=",
        f"--cache-dir={tmp_path}",
        tmp_path / "script.py",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert re.findall(r'Unexpected keyword argument "(\w+)"', done.stdout) == ["sett", "formt"], done.stdout
    assert "Found 2 errors" in done.stdout


def test_the_example_of_the_documents(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a service without a cluster, so the sweep that it submits is made up."""
    made_up = SimpleNamespace(sweep_id=SWEEP, status="finished", counts={"finished": 1}, eta_s=None)
    monkeypatch.setattr(Client, "submit", lambda self, ablation, **values: made_up)
    monkeypatch.setattr(Client, "events", lambda self, sweep_id: [made_up])
    names: dict[str, object] = {}
    exec(EXAMPLE.replace("http://127.0.0.1:8000", client.server).replace("quickstart", "tiny"), names)
    assert names["table"].equals(client.table("tiny"))
    assert set(names["runs"]["run_id"]) <= set(client.runs()["run_id"])
    assert names["progress"] is made_up


@pytest.mark.slow
def test_answers_are_those_of_the_queries(client: Client, sample: SampleStore) -> None:
    queries, run = Queries(sample.store), sample.ids[0]
    assert client.run(run).metrics == queries.ask(GetRun(run_id=run)).metrics
    assert client.run(run).curve == queries.curve(run)
    assert client.run(run, curve=False).curve == []
    assert {each.name for each in client.ablations()} == {"broken", "tiny"}
    assert client.ablation("tiny", "longer").runs == 4
    assert client.plan("tiny").counts == {"finished": 2, "failed": 1, "pending": 1}
    assert client.plan("tiny", set=["seeds=[0]"]).counts == {"finished": 2}
    assert client.diff(run, sample.ids[1]).runs == (1, 1)
    assert client.logs(run, tail=1).truncated
    assert client.claims() == client.claims("tiny") == []
    assert client.sweeps() == []
    assert {each.name: each.declared for each in client.figures("tiny")}["summary"] is False


@pytest.mark.slow
def test_models_are_asked(client: Client, sample: SampleStore) -> None:
    run = sample.ids[0]
    (scored,) = client.perplexity([run], tokens=[[1, 15, 3]]).results
    assert (scored.total.tokens, scored.total.positions) == (1, 2)
    both = client.perplexity([run, {"ablation": "tiny", "row": "CoPE"}], tokens=[[1, 15, 3]])
    assert both.results[0] == scored
    probed = client.probe(run, tokens=[1, 2, 3], heads=[0], matrices=[])
    assert (probed.token_ids, probed.heads[0].attention) == ([1, 2, 3], None)


@pytest.mark.slow
def test_runs_and_curves_are_frames(client: Client, sample: SampleStore) -> None:
    run = sample.ids[0]
    found = client.runs(["model.position=cope"], sort="seed", descending=True)
    assert found["run_id"].tolist() == [sample.ids[2], run]
    assert found["model.dim"].notna().all()
    logged = client.runs(run=[run], curves=True)
    assert set(logged["metric"]) >= {"train/loss"}
    curve = client.curve(run)
    assert curve.index.name == "step"
    assert curve["train/loss"].dropna().tolist() == logged[logged["metric"] == "train/loss"]["value"].tolist()
    curves = client.curves("tiny", "train/loss")
    assert curves.columns.tolist() == ["row", "run_id", "seed", "step", "value"]
    assert run in curves["run_id"].tolist()
    of_seed = client.curves("tiny", "train/loss", set=["seeds=[0]"])
    assert set(of_seed["seed"]) == {0} < set(curves["seed"])


@pytest.mark.slow
def test_a_table_is_a_frame_that_prints_as_the_table(client: Client) -> None:
    printed = str(client.table("tiny", scale=None)).splitlines()
    drawn = client.table("tiny", format="terminal").decode()
    header, row = (next(line for line in drawn.splitlines() if word in line) for word in ("position", "CoPE"))
    assert [word for word in header.split() if word not in " ".join(printed)] == []
    assert [word for word in row.split() if word not in " ".join(printed)] == []
    assert client.table("tiny").index.name == "position"
    assert client.table("tiny", runs=True)["status"].tolist().count("finished") == 2
    assert client.table("tiny", format="csv", runs=True).decode().count("\n") == 5
    assert json.loads(client.table("tiny", format="json"))["rows"][0]["row"] == "CoPE"


def test_texts_of_a_table_are_those_of_its_markdown() -> None:
    markdown = (
        "| axis \\| a | n |\n| --- | --: |\n| x \\* y | **1** |\n\na note\n\n"
        "| row | verdict | p |\n| --- | --- | --: |\n| CoPE\\_1 | better | 0.1 |\n\nanother note\n"
    )
    file = {"content-type": "text/markdown; charset=utf-8"}
    for text in (markdown.partition("\n\n")[0], markdown):  # results of the repository are always compared
        client, _ = scripted(lambda _, text=text: httpx.Response(200, text=text, headers=file))
        table = client.table("mine")
        assert (table.index.name, table.index.tolist(), table["n"].tolist()) == ("axis | a", ["x * y"], ["1"])
    assert client.table("mine", compare="CoPE").loc[("CoPE_1", "better"), "p"] == "0.1"


def test_texts_of_runs_stay_texts() -> None:
    runs = "row,run_id,step,loss\nNone,0000000000001e10,1,0.5\nNA,0123456789012345,2,\n"
    client, _ = scripted(lambda _: httpx.Response(200, text=runs, headers={"content-type": "text/csv; charset=utf-8"}))
    frame = client.table("mine", runs=True)
    assert frame["row"].tolist() == ["None", "NA"]
    assert frame["run_id"].tolist() == ["0000000000001e10", "0123456789012345"]
    assert frame["loss"].isna().tolist() == [False, True]


@pytest.mark.slow
def test_notebooks_show_figures_and_reports(client: Client) -> None:
    figure = client.figure("tiny", "curves")
    assert isinstance(figure, Picture)
    assert "<svg" in figure._repr_svg_()
    report = client.report("tiny")
    assert isinstance(report, Page)
    assert "Selective copy, tiny" in report._repr_html_()
    assert client.report("tiny", format="markdown").startswith(b"# Selective copy, tiny")
    rows = client.figure("tiny", "curves", metric=["train/loss"], row=["CoPE"], format="csv").decode().splitlines()[1:]
    assert {tuple(line.split(",")[:2]) for line in rows} == {("CoPE", "train/loss")}


@pytest.mark.slow
def test_an_error_has_code_and_data_of_the_service(client: Client) -> None:
    with raises("not_found", name="none") as caught:
        client.ablation("none")
    assert isinstance(caught.value, ServiceError)
    assert (caught.value.status, "tiny" in caught.value.data["allowed"]) == (404, True)
    with raises("no_cluster"):
        client.submit(ablation="tiny")


def test_an_error_of_the_service_keeps_its_status_in_other_processes() -> None:
    client, _ = scripted(lambda _: problem(429, "too_many_requests", **{"retry-after": "99"}))
    with pytest.raises(ServiceError) as caught:
        client.ablations()
    same = pickle.loads(pickle.dumps(caught.value))
    assert (str(same), same.code, same.data) == (str(caught.value), "too_many_requests", {"key": "x"})
    assert (same.status, same.retry_after_s) == (429, 99)


@pytest.mark.slow
def test_a_checkpoint_is_downloaded_resumed_and_checked(client: Client, sample: SampleStore, tmp_path: Path) -> None:
    run = sample.ids[0]
    expected = (sample.store.run(run).checkpoint / "model.safetensors").read_bytes()
    (file,) = [each for each in client.checkpoint(run).files if each.name == "model.safetensors"]
    target, partial = tmp_path / "model.safetensors", tmp_path / f".model.safetensors.{file.sha256[:16]}.part"
    partial.write_bytes(expected[:1000])
    paths = client.download_checkpoint(run, tmp_path)
    assert target.read_bytes() == expected
    assert {path.name for path in paths} == {each.name for each in client.checkpoint(run).files}
    assert not list(tmp_path.glob(".*"))

    partial.write_bytes(b"x" * 1000)  # what was received before is damaged
    target.write_bytes(b"an older file")
    with raises("damaged_download", file=str(target), announced=file.sha256):
        client.download(file.url, target, file.sha256, file.size_bytes)
    assert target.read_bytes() == b"an older file"
    client.download(file.url, target, file.sha256, file.size_bytes)
    assert target.read_bytes() == expected


@pytest.mark.parametrize(("content", "code"), [(b"a" * 9, "incomplete_download"), (b"a" * 11, "damaged_download")])
def test_a_download_of_another_size_is_refused(content: bytes, code: str, tmp_path: Path) -> None:
    client, _ = scripted(lambda request: httpx.Response(200, content=content))
    with raises(code, file=str(tmp_path / "file")):
        client.download("/file", tmp_path / "file", hashlib.sha256(b"a" * 10).hexdigest(), 10)
    assert not (tmp_path / "file").exists()


def test_a_download_goes_on_where_the_connection_broke(tmp_path: Path) -> None:
    content = bytes(range(256)) * 40
    ranges: list[str | None] = []

    class Broken(httpx.SyncByteStream):
        def __init__(self, rest: bytes) -> None:
            self.rest = rest

        def __iter__(self) -> Iterator[bytes]:
            yield self.rest[:4000]
            if len(self.rest) > 4000:
                raise httpx.ReadError("broken")

    def answer(request: httpx.Request) -> httpx.Response:
        ranges.append(request.headers.get("range"))
        start = int((request.headers.get("range") or "bytes=0-")[6:-1])
        return httpx.Response(206 if start else 200, stream=Broken(content[start:]))

    client, waited = scripted(answer)
    path = client.download("/file", tmp_path / "file", hashlib.sha256(content).hexdigest(), len(content))
    assert path.read_bytes() == content
    assert ranges == [None, "bytes=4000-", "bytes=8000-"]
    assert len(waited) == 2


def test_the_key_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers.get("authorization"))
        return httpx.Response(200, json=[])

    monkeypatch.delenv("COPE_SWEEP_KEY", raising=False)
    scripted(answer)[0].ablations()
    monkeypatch.setenv("COPE_SWEEP_KEY", "of the environment")
    scripted(answer)[0].ablations()
    scripted(answer, key="of the argument")[0].ablations()
    scripted(answer, key="with a line break\n")[0].ablations()
    assert seen == [None, "Bearer of the environment", "Bearer of the argument", "Bearer with a line break"]


@pytest.mark.parametrize("key", ["cope_one\ncope_two", "cope_é"])
def test_a_key_that_cannot_be_sent_is_refused_without_it(key: str) -> None:
    with raises("invalid_key") as caught:
        Client("http://service", key=key)
    assert "cope_" not in f"{caught.value} {caught.value.data}"


def test_a_get_is_repeated_and_waits_as_long_as_the_service_says() -> None:
    answers = [problem(429, **{"retry-after": "7"}), problem(503, "not_ready"), httpx.Response(200, json=[])]
    client, waited = scripted(lambda request: answers.pop(0))
    assert client.ablations() == []
    assert waited[0] == 7
    assert 0.5 <= waited[1] <= 1.0


def test_connection_errors_are_repeated_with_growing_waits_and_then_raised() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    client, waited = scripted(answer, retry=RetryPolicy(3, 1.0))
    with raises("not_connected", server="http://service", reason="refused"):
        client.ablations()
    assert [0.5 * 2**n <= wait <= 2**n for n, wait in enumerate(waited)] == [True] * 3


@pytest.mark.parametrize(
    "answer",
    [
        *(problem(status) for status in (400, 401, 404, 409, 422, 500)),
        problem(503, "no_cluster"),
        problem(503, "not_ready", **{"retry-after": "3600"}),  # nobody waits for an hour
    ],
    ids=lambda answer: f"{answer.status_code} {answer.json()['code']}",
)
def test_other_errors_are_not_repeated(answer: httpx.Response) -> None:
    client, waited = scripted(lambda request: answer)
    with raises(answer.json()["code"], key="x"):
        client.ablations()
    assert waited == []


@pytest.mark.parametrize("body", [{"text": "<html>"}, *({"json": {"data": data}} for data in ("text", {"code": 1}))])
def test_what_is_no_problem_is_shown_too(body: dict[str, Any]) -> None:
    client, _ = scripted(lambda request: httpx.Response(502, **body))
    with raises("bad_gateway"):
        client.ablations()


def test_a_question_that_is_longer_than_an_address_may_be_is_refused() -> None:
    client, _ = scripted(lambda request: httpx.Response(200, json=[]))
    with raises("too_large"):
        client.table("mine", set=["x" * 9_000] * 9)


@pytest.mark.parametrize(
    "ask",
    [
        lambda client: client.ablations(),
        lambda client: client.table("mine"),
        lambda client: client.runs(),
        lambda client: client.curve("0" * 16),
        lambda client: client.stop(SWEEP),
        lambda client: next(client.events(SWEEP)),
    ],
    ids=["json", "markdown", "parquet", "curve", "post", "events"],
)
def test_an_answer_that_is_not_the_services_is_an_error(ask: Callable[[Client], object]) -> None:
    client, waited = scripted(lambda request: httpx.Response(200, html="<html>Log in"))
    with raises("unexpected_answer", server="http://service"):
        ask(client)
    assert waited == []


@pytest.mark.parametrize("action", ["submit", "stop", "retry"])
def test_what_changes_a_sweep_is_repeated_for_the_same_sweep(action: str) -> None:
    seen: list[tuple[str, str]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append((request.method, request.url.path))
        if len(seen) < 3:
            raise httpx.ReadError("lost")
        state = {"sweep_id": SWEEP, "ablation": "tiny", "status": "pending", "runs": 1, "url": "", "events": ""}
        return httpx.Response(202, json=state)

    client, waited = scripted(answer)
    state = client.submit(ablation="tiny") if action == "submit" else getattr(client, action)(SWEEP)
    assert (state.sweep_id, len(seen), len(waited)) == (SWEEP, 3, 2)
    ((method, asked),) = set(seen)
    if action == "submit":
        assert (method, bool(SWEEP_ID.fullmatch(asked.removeprefix("/api/v1/sweeps/")))) == ("PUT", True)
    else:  # to stop or retry twice is to do it once
        assert (method, asked) == ("POST", f"/api/v1/sweeps/{SWEEP}/{action}")


def test_a_question_to_a_model_is_not_repeated() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadError("lost")

    client, waited = scripted(answer)
    with pytest.raises(ConnectionFailed):
        client.perplexity(["0" * 16], tokens=[[1, 2]])
    assert waited == []


def progress(status: str, **counts: int) -> str:
    return SweepProgress.model_validate(
        {"sweep_id": SWEEP, "ablation": "tiny", "status": status, "runs": 2, "counts": counts}
    ).model_dump_json()


def test_events_go_on_after_the_last_one_when_the_connection_breaks() -> None:
    ids: list[str | None] = []
    parts = [
        f": ping\r\n\r\nid: 5\r\nevent: progress\r\ndata: {progress('running', running=2)}\r\n\r\nid: 6\r\nda",
        f"id: 7\nevent: progress\ndata: {progress('running', finished=1)}\n\n",
        f"id: end\nevent: end\ndata: {progress('finished', finished=2)}\n\nid: 9\ndata: never read\n\n",
    ]

    def answer(request: httpx.Request) -> httpx.Response:
        ids.append(request.headers.get("last-event-id"))
        if len(ids) == 2:
            return problem(503, "not_ready")
        return httpx.Response(200, text=parts.pop(0), headers={"content-type": "text/event-stream"})

    client, waited = scripted(answer)
    assert [each.counts for each in client.events(SWEEP)] == [{"running": 2}, {"finished": 1}, {"finished": 2}]
    assert ids == [None, "5", "5", "7"]
    assert (len(waited), waited[0], waited[2]) == (3, RECONNECT_S, RECONNECT_S)


def test_events_that_have_ended_are_no_more_asked_for() -> None:
    client, _ = scripted(lambda request: httpx.Response(204))
    assert list(client.events(SWEEP, last_id="end")) == []


def test_events_are_read_from_lines() -> None:
    lines = ["event: a", "data: {}", "id: 1", ": comment", "", ": ping", "", "data:[]", "unknown", "", "data: cut"]
    assert list(server_events(lines)) == [("a", "{}", "1"), ("message", "[]", None)]


def test_an_address_without_a_scheme_is_one_of_http() -> None:
    seen: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(str(request.url))
        return httpx.Response(200, json=[])

    Client("service:8000", transport=httpx.MockTransport(answer)).ablations()
    assert seen == ["http://service:8000/api/v1/ablations"]


@pytest.mark.parametrize("server", ["", "ftp://x", "http://"])
def test_what_is_no_address_is_refused(server: str) -> None:
    with raises("invalid_address", address=server):
        Client(server)
