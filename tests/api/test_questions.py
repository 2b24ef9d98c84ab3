"""Every question can be asked of a store, of a service and of a client, and the commands have its options."""

from __future__ import annotations

import inspect
from typing import Any, get_args
from urllib.parse import quote

import httpx
import pytest
from cope_services.http.app import create_app
from cope_services.http.settings import Settings
from pydantic import BaseModel
from typer.main import get_command

from cope_sweep.api import ablations, figures, runs, sweeps, tables
from cope_sweep.api.figures import GetFigure
from cope_sweep.api.question import API, Question
from cope_sweep.api.requests import PerplexityRequest, ProbeRequest, SweepRequest
from cope_sweep.api.runs import ExportRuns, ListRuns
from cope_sweep.api.tables import GetReport, GetTable
from cope_sweep.cli.application import app
from cope_sweep.client import Client, ServiceError
from cope_sweep.read.queries import Queries

QUESTIONS: list[type[Question[Any]]] = [
    *ablations.QUESTIONS, *tables.QUESTIONS, *figures.QUESTIONS, *runs.QUESTIONS, ListRuns, ExportRuns, *sweeps.QUESTIONS,
]  # fmt: skip
PATHS = create_app(Settings()).openapi()["paths"]
COMMANDS = get_command(app).commands


def test_every_question_has_an_answer() -> None:
    answered = vars(Queries)["_answer"].dispatcher.registry
    assert {*answered} == {object, *QUESTIONS}


@pytest.mark.parametrize("kind", [kind for kind in QUESTIONS if kind.MEDIA_TYPES])
def test_every_format_of_a_file_has_a_media_type(kind: type[Question[Any]]) -> None:
    formats, _ = get_args(kind.model_fields["format"].annotation)  # the second is None
    assert {*get_args(formats)} == kind.MEDIA_TYPES.keys()


@pytest.mark.parametrize("kind", QUESTIONS)
def test_every_question_has_a_route_with_its_fields(kind: type[Question[Any]]) -> None:
    parameters = PATHS[API + kind.PATH]["get"]["parameters"]
    places = {each["name"]: each["in"] for each in parameters if each["in"] != "header"}
    if kind.COMMITTED:
        assert places.pop("committed") == "query"  # which store is asked
    assert places == {name: "path" if name in kind.path_fields() else "query" for name in kind.model_fields}
    for each in parameters:
        assert each["description"] or each["in"] == "header"


def test_few_routes_are_no_question() -> None:
    reading = {path.removeprefix(API) for path, item in PATHS.items() if "get" in item and path.startswith(API)}
    assert reading - {kind.PATH for kind in QUESTIONS} == {
        "/version", "/runs/{run_id}/curve", "/runs/{run_id}/checkpoint",
        "/runs/{run_id}/checkpoint/{file}", "/sweeps/{sweep_id}/events",
    }  # fmt: skip


@pytest.mark.parametrize("kind", QUESTIONS)
def test_a_client_asks_it_at_this_route(kind: type[Question[Any]]) -> None:
    urls: list[httpx.URL] = []

    def refuse(request: httpx.Request) -> httpx.Response:
        urls.append(request.url)
        return httpx.Response(404, json={"code": "not_found", "detail": "none"})

    name = "a name/with ?"
    fields = {key: [name] if key == "run" else name for key, field in kind.model_fields.items() if field.is_required()}
    with pytest.raises(ServiceError):
        Client("http://service", transport=httpx.MockTransport(refuse)).ask(kind(**fields))
    (url,) = urls
    path = (API + kind.PATH).format(**dict.fromkeys(kind.path_fields(), quote(name, safe="")))
    assert url.raw_path.decode().partition("?")[0] == path
    assert dict(url.params) == dict.fromkeys(fields.keys() - kind.path_fields(), name)


def test_a_client_asks_the_committed_results() -> None:
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(str(request.url).removeprefix("http://service"))
        return httpx.Response(200, content=b"[]", headers={"content-type": "text/csv"})

    client = Client("http://service", transport=httpx.MockTransport(answer))
    client.table("tiny", format="csv", scale="small", committed=True)
    client.claims(committed=True)
    client.claims()
    path = f"{API}/ablations/tiny/table?scale=small&format=csv&committed=true"
    assert asked == [path, f"{API}/claims?committed=true", f"{API}/claims"]


@pytest.mark.parametrize(
    ("command", "kind", "without"),
    [
        ("table", GetTable, {"name"}),
        ("report", GetReport, {"name"}),
        ("figure", GetFigure, {"name", "figure"}),
        ("runs", ListRuns, {"run", "fields"}),  # `status` shows one run; the list chooses its columns
    ],
)
def test_a_command_has_the_options_of_its_question(command: str, kind: type[Question[Any]], without: set[str]) -> None:
    options = {
        flag.removeprefix("--"): parameter.default or None
        for parameter in COMMANDS[command].params
        for flag in parameter.opts
    }
    for name in kind.model_fields.keys() - without:
        assert options[name] == (kind.model_fields[name].get_default(call_default_factory=True) or None), name


@pytest.mark.parametrize(
    ("method", "kind", "more"),
    [
        (Client.submit, SweepRequest, {"sweep_id"}),
        (Client.perplexity, PerplexityRequest, set()),
        (Client.probe, ProbeRequest, {"run_id"}),
    ],
)
def test_a_method_has_the_fields_of_its_body(method: Any, kind: type[BaseModel], more: set[str]) -> None:
    assert inspect.signature(method).parameters.keys() == {"self", *kind.model_fields, *more}
