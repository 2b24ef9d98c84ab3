"""Links, pipes and devices in the folders of the service, and hostile requests: nothing outside is shown, nothing blocks."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import requests
import schemathesis
from cope_services.http.app import create_app
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import APIOperation, Case, GenerationMode
from schemathesis.specs.openapi import checks

from tests.helpers.sample_store import API, SampleStore, serving
from tests.helpers.sweeps import sweep_record

SECRET = "title: the-secret\n"
TIMEOUT_S = 60


def link(path: Path) -> None:
    """A link to a readable file outside of the service's folders."""
    path.symlink_to(path.parents[len(path.parts) - 3] / "etc" / "hostname")


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


KINDS: dict[str, Callable[[Path], object]] = {"link": link, "pipe": os.mkfifo, "device": device, "folder": Path.mkdir}
FILES = ("spec.json", "state.json", "result.json", "curve.jsonl", "log.txt", "checkpoint/model.safetensors")


def replace(path: Path, kind: str) -> None:
    path.unlink(missing_ok=True)
    KINDS[kind](path)


@pytest.mark.parametrize("kind", KINDS)
def test_files_of_runs(own_sample: SampleStore, kind: str) -> None:
    run_id = own_sample.ids[0]
    for name in FILES:
        replace(own_sample.store.run(run_id).path / name, kind)
    with serving(own_sample.settings()) as client:
        client.timeout = TIMEOUT_S
        listed = client.get(f"{API}/runs").json()
        assert listed["total"] == 3
        run = client.get(f"{API}/runs/{run_id}")
        assert (run.status_code, run.json()["curve"], run.json()["result"]) == (200, [], None)
        for file in ("logs", "curve"):
            answer = client.get(f"{API}/runs/{run_id}/{file}")
            assert (answer.status_code, answer.json()["code"]) == (409, "not_a_file")
        assert client.get(f"{API}/curves?run={run_id}&metric=train/loss").json()["series"][0]["points"] == []
        for path in ("checkpoint", "checkpoint/model.safetensors", "checkpoint/config.json"):
            answer = client.get(f"{API}/runs/{run_id}/{path}")
            assert (answer.status_code, answer.json()["code"]) == (409, "not_a_file")
        body = {"models": [run_id], "tokens": [[1, 15, 3]]}
        assert client.post(f"{API}/perplexity", json=body).status_code >= 400
        rows = client.get(f"{API}/ablations/tiny/curves").json()["rows"]
        assert (rows[0]["series"][0]["points"], len(rows[1]["series"][0]["points"])) == ([], 3)


@pytest.mark.parametrize("kind", KINDS)
def test_an_index_that_is_made_again(own_sample: SampleStore, kind: str) -> None:
    run_id = own_sample.ids[0]
    replace(own_sample.store.run(run_id).path / "spec.json", kind)
    (own_sample.store_folder / "index.db").unlink()
    with serving(own_sample.settings()) as client:
        client.timeout = TIMEOUT_S
        statuses = {run["run_id"]: run["status"] for run in client.get(f"{API}/runs").json()["runs"]}
    assert statuses == {own_sample.ids[0]: "interrupted", own_sample.ids[1]: "finished", own_sample.ids[2]: "failed"}


@pytest.mark.parametrize("what", ["run", "checkpoint"])
def test_a_folder_that_leads_elsewhere_is_not_served(own_sample: SampleStore, tmp_path: Path, what: str) -> None:
    run_id = own_sample.ids[0]
    folder = own_sample.store.run(run_id).path
    path = folder if what == "run" else folder / "checkpoint"
    elsewhere = tmp_path / "elsewhere"
    shutil.move(path, elsewhere)
    path.symlink_to(elsewhere)
    with serving(own_sample.settings()) as client:
        for name in ("checkpoint", "checkpoint/config.json", "checkpoint/model.safetensors"):
            answer = client.get(f"{API}/runs/{run_id}/{name}")
            assert (answer.status_code, answer.json()["code"]) == (409, "link")
        assert client.get(f"{API}/runs/{own_sample.ids[1]}/checkpoint").status_code == 200
        assert client.get(f"{API}/runs").json()["total"] == 3


def test_ablation_files(own_sample: SampleStore, tmp_path: Path) -> None:
    (tmp_path / "outside.yaml").write_text(SECRET)
    (own_sample.ablations / "linked.yaml").symlink_to(tmp_path / "outside.yaml")
    (own_sample.ablations / "inside.yaml").symlink_to(own_sample.ablations / "tiny.yaml")
    (own_sample.ablations / "zero.yaml").symlink_to("/dev/zero")
    (own_sample.ablations / "loop.yaml").symlink_to(own_sample.ablations / "loop.yaml")
    os.mkfifo(own_sample.ablations / "pipe.yaml")
    (own_sample.ablations / "folder.yaml").mkdir()
    with serving(own_sample.settings()) as client:
        client.timeout = TIMEOUT_S
        assert [each["name"] for each in client.get(f"{API}/ablations").json()] == ["broken", "inside", "tiny"]
        for name in ("linked", "zero", "loop", "pipe", "folder"):
            answer = client.get(f"{API}/ablations/{name}")
            assert answer.status_code == 404
            assert "the-secret" not in answer.text


@pytest.mark.parametrize("kind", KINDS)
def test_records_of_sweeps(own_sample: SampleStore, kind: str) -> None:
    record = sweep_record()
    own_sample.store.write_sweep(record)
    replace(own_sample.store_folder / "sweeps" / f"{record.sweep_id}.json", kind)
    with serving(own_sample.settings()) as client:
        client.timeout = TIMEOUT_S
        assert client.get(f"{API}/sweeps").json()["total"] == 1
        sweep = client.get(f"{API}/sweeps/{record.sweep_id}").json()
        assert sweep["members"] == []
        assert f"{record.sweep_id}.json" in sweep["error"]


# -- the largest bodies, valid and not: none occupies the event loop -----------------------------------------------------


MAX_BYTES = 1 << 20
MOST = 4.0
"""CPU time of a request in the event loop, as a multiple of that which 500,000 numbers take to be parsed: 12 ms on an idle
machine. Most bodies take 2; many lists took 5, and with the collections of a server 40."""


def filled(begin: str, part: str, end: str) -> bytes:
    """A body of the largest size: `begin`, many times `part` with commas between, `end`."""
    parts = (MAX_BYTES - len(begin) - len(end)) // (len(part) + 1)
    return f"{begin}{','.join([part] * parts)}{end}".encode()


NUMBERS = filled("[", "1", "]")


def large_bodies(run_id: str) -> dict[str, bytes]:
    """Bodies by what they have much of."""
    bodies = {"keys": b"{" + b",".join(b'"k%d":1' % number for number in range(80_000)) + b"}"}
    for field in ("tokens", "prompt", "text", "spec", "layers"):
        begin = f'{{"models":["{run_id}"],"model":"{run_id}","name":"x","{field}":['
        if field in ("tokens", "prompt"):
            bodies |= {f"{field} {part}": filled(f"{begin}[", part, "]]}") for part in ("1", '"a"', "1.25e-300", "[]")}
        bodies |= {f"{field} {part}": filled(begin, part, "]}") for part in ("[1]", '{"a":1}', "[" * 900 + "]" * 900)}
    bodies["ids"] = filled('{"tokens":[', "1", "]}")
    bodies["digits"] = filled('{"tokens":[', "9" * 4000, "]}")
    bodies["characters"] = filled(f'{{"models":["{run_id}"],"text":["', "a b ", '"]}')
    return bodies


@pytest.mark.parametrize(
    "path",
    [
        "/api/v1/perplexity",
        "/openai/{run}/v1/completions",
        "/api/v1/sweeps/20261121-101500-3f2a",
        *(
            pytest.param(path, marks=pytest.mark.thorough)
            for path in (
                "/api/v1/runs/{run}/probe",
                "/openai/{run}/tokenize",
                "/openai/{run}/detokenize",
                "/api/v1/sweeps/preview",
            )
        ),
    ],
)
def test_no_body_occupies_the_event_loop(sample: SampleStore, path: str) -> None:
    run_id, took = sample.ids[0], {}

    async def ask() -> None:
        transport = httpx.ASGITransport(create_app(sample.settings()))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            await client.post(f"{API}/perplexity", json={"models": [run_id], "tokens": [[1, 15, 3]]})
            for name, content in large_bodies(run_id).items():
                for _ in range(3):  # other processes take parts of the time of one
                    began_s = time.thread_time()
                    json.loads(NUMBERS)
                    parsed_s = time.thread_time()
                    answer = await client.request(
                        "PUT" if "/sweeps/2026" in path else "POST", path.replace("{run}", run_id), content=content,
                        headers={"content-type": "application/json"},
                    )  # fmt: skip
                    took[name] = (time.thread_time() - parsed_s) / (parsed_s - began_s)
                    assert answer.status_code < 500 or answer.json()["code"] == "no_cluster", name
                    if took[name] < MOST:
                        break

    asyncio.run(ask())
    assert {name: multiple for name, multiple in took.items() if multiple >= MOST} == {}


# -- requests that are generated from the OpenAPI document -------------------------------------------------------------


EXAMPLES = int(os.environ.get("COPE_OPENAPI_EXAMPLES", "2"))
"""Requests for each operation and mode."""
CHECKS = [
    schemathesis.checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
]


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["valid", "invalid"])
def test_answers_are_as_documented(client: httpx.Client, sample: SampleStore, mode: GenerationMode) -> None:
    document = client.get("/openapi.json").json()
    schema = schemathesis.openapi.from_dict(document)
    statuses: Counter[int] = Counter()
    failures = []
    with requests.Session() as session:
        for found in schema.get_all_operations():
            operation = found.ok()
            url = str(client.base_url).rstrip("/")
            try:
                _ask(operation, mode, sample, statuses, base_url=url, session=session, timeout=120)
            except Unsatisfiable:
                assert mode == GenerationMode.NEGATIVE  # an operation without parameters has no invalid requests
            except (AssertionError, BaseExceptionGroup) as failure:
                failures.append(f"{operation.label}: {_text(failure)}")
    print(f"{mode.value}: {statuses.total()} requests: {dict(sorted(statuses.items()))}")  # noqa: T201
    assert not failures, "\n\n".join(failures)
    assert statuses.total() >= len(document["paths"])
    if mode == GenerationMode.POSITIVE:
        assert statuses[200] > 0  # the generated requests do reach the runs of the store


def _ask(
    operation: APIOperation, mode: GenerationMode, sample: SampleStore, statuses: Counter[int], **call: Any
) -> None:
    real = {
        "run_id": sample.ids,
        "model": sample.ids,
        "name": ["tiny", "broken"],
        "ablation": ["tiny"],
        "file": ["model.safetensors"],
    }

    @seed(1)
    @settings(
        max_examples=EXAMPLES,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(generation_mode=mode), st.integers(0, 3), st.data())
    def ask(case: Case, choice: int, data: st.DataObject) -> None:
        if choice:  # most random ids are of nothing
            for name in case.path_parameters or {}:
                if name in real:
                    case.path_parameters[name] = data.draw(st.sampled_from(real[name]))
        response = case.call(**call)
        statuses[response.status_code] += 1
        if response.status_code == 400 and response.content == b"Invalid HTTP request received.":
            return  # no HTTP: uvicorn answers, the service never sees it
        # The service has no Ray cluster, which it says with a 503.
        no_cluster = response.status_code == 503 and response.json()["code"] == "no_cluster"
        case.validate_response(response, checks=CHECKS[1:] if no_cluster else CHECKS)

    ask()


def _text(failure: BaseException) -> str:
    if isinstance(failure, BaseExceptionGroup):
        return "\n".join(map(_text, failure.exceptions))
    return f"{type(failure).__name__}: {failure}"
