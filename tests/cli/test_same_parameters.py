"""The command, the route and the client's method of a question have the same parameters, defaults and limits."""

from __future__ import annotations

import inspect
import types
from enum import Enum
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import pytest
from cope_services.http.app import create_app
from cope_services.http.settings import Settings
from typer.main import get_command

from cope_sweep.cli.application import app
from cope_sweep.client import Client

COMMANDS = get_command(app).commands
OPENAPI = create_app(Settings()).openapi()
ROUTES, SCHEMAS = OPENAPI["paths"], OPENAPI["components"]["schemas"]
EMPTY = (None, "", [], ())


class Parameter(NamedTuple):
    """What has to be the same. Where nothing is given, a default is None: an empty list or text is that, too."""

    default: Any
    limits: tuple[Any, Any]
    choices: tuple[str, ...]


class Asked(NamedTuple):
    """One question: its route, and what asks it. `left_out` of the command or the method: name → why."""

    route: str
    command: str | None
    method: Any
    not_in_command: dict[str, str] = {}
    not_in_method: dict[str, str] = {}
    verb: Literal["get", "post", "put"] = "get"


IN_PAGES = {"limit": "all pages are read", "offset": "all pages are read"}
QUESTIONS = [
    Asked("/ablations", "list", Client.ablations),
    Asked("/ablations/{name}", None, Client.ablation),
    Asked("/ablations/{name}/mlflow", None, Client.mlflow_page),
    Asked("/claims", None, Client.claims),
    Asked("/ablations/{name}/plan", "plan", Client.plan),
    Asked("/ablations/{name}/plan", "status", Client.plan),
    Asked("/ablations/{name}/curves", None, Client.curves, {}, IN_PAGES),
    Asked("/ablations/{name}/table", "table", Client.table),
    Asked("/ablations/{name}/report", "report", Client.report),
    Asked("/ablations/{name}/figures", None, Client.figures),
    Asked(
        "/ablations/{name}/figures/{figure}", "figure", Client.figure,
        {"committed": "`report --from` shows them"},
    ),
    Asked(
        "/runs", "runs", None,
        {"run": "`status` shows one", "fields": "the table chooses"},
    ),
    Asked("/runs/export", "runs", Client.runs, {"run": "`status` shows one"}, {"format": "a DataFrame"}),
    Asked("/runs/{run_id}", None, Client.run),
    Asked("/runs/{run_id}/logs", "logs", Client.logs),
    Asked("/diff", "diff", Client.diff),
    Asked("/sweeps", None, Client.sweeps, {}, IN_PAGES),
    Asked("/sweeps/{sweep_id}", None, Client.sweep),
    Asked(
        "/sweeps/{sweep_id}", "submit", Client.submit,
        {
            "sweep_id": "a call is a sweep", "name": "a path names a file", "spec": "a path names a file", "only": "`retry`",
            "time_budget_s": "--time-budget 2h",
        },
        verb="put",
    ),
    Asked(
        "/sweeps/preview", None, Client.preview, {},
        {"time_budget_s": "costs nothing less", "max_failures": "costs nothing less"}, verb="post",
    ),
    Asked(
        "/perplexity", "perplexity", Client.perplexity,
        {
            "models": "an argument", "log_probabilities": "sums only", "token_labels": "sums only", "top": "sums only",
        },
        verb="post",
    ),
    Asked(
        "/runs/{run_id}/probe", "probe", Client.probe,
        {
            "layers": "--layer", "heads": "--head", "matrices": "files have all", "marks": "--mark",
            "format": "--html and --svg",
        },
        {"format": "numbers"}, verb="post",
    ),
]  # fmt: skip
OTHER_DEFAULTS = {
    ("table", "format"), ("report", "format"), ("figure", "format"), ("runs", "format"),  # what suits a terminal
    ("logs", "tail"),  # the command prints the whole log
    ("probe", "matrices"),  # None: all
}  # fmt: skip
OPEN_FORMATS = {("runs", "format")}
"""Commands that say themselves which formats there are."""


def choices_of(annotation: Any) -> tuple[str, ...]:
    """The values of a Literal or an Enum, which may be in a list or beside None."""
    if get_origin(annotation) is Literal:
        return tuple(sorted(map(str, get_args(annotation))))
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return tuple(sorted(str(each.value) for each in annotation))
    is_nested = get_origin(annotation) in (Union, types.UnionType, list) or get_origin(annotation) is not None
    return next((found for part in get_args(annotation) if is_nested and (found := choices_of(part))), ())


def route_parameters(path: str, verb: str) -> dict[str, Parameter]:
    """The parameters of a route, and the fields of its body."""
    route = ROUTES[f"/api/v1{path}"][verb]
    headers = ("accept", "if-none-match", "last-event-id")  # every client of HTTP has them
    given = [each for each in route.get("parameters", []) if each["name"].lower() not in headers]
    schemas = {each["name"].lower().replace("-", "_"): each["schema"] for each in given}
    if "requestBody" in route:
        reference = route["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        schemas |= SCHEMAS[reference.rpartition("/")[2]]["properties"]
    return {name: parameter_of(schema) for name, schema in schemas.items()}


def parameter_of(schema: dict[str, Any]) -> Parameter:
    merged = {
        key: value for each in schema.get("anyOf", [schema]) for key, value in {**each, **each.get("items", {})}.items()
    }
    default = schema.get("default")
    return Parameter(
        None if default in EMPTY else default,
        (merged.get("minimum"), merged.get("maximum")),
        tuple(sorted(map(str, merged.get("enum", ())))),
    )


def command_parameters(name: str) -> dict[str, Parameter]:
    """The options and arguments of a command by their names."""
    found = {}
    for each in COMMANDS[name].params:
        default = None if each.default in EMPTY else each.default
        parameter = Parameter(default, (each.min, each.max), choices_of(each.type_descriptor.annotation))
        found |= {flag.removeprefix("--").replace("-", "_"): parameter for flag in each.opts}
    return found


def method_parameters(method: Any) -> dict[str, Parameter]:
    """The parameters of a client's method. The service knows their limits."""
    hints = get_type_hints(method)
    given = [each for each in inspect.signature(method).parameters.values() if each.name != "self"]
    defaults = {each.name: None if each.default is inspect.Parameter.empty else each.default for each in given}
    return {
        name: Parameter(None if default in EMPTY else default, (None, None), choices_of(hints[name]))
        for name, default in defaults.items()
    }


@pytest.mark.parametrize("asked", QUESTIONS, ids=lambda asked: f"{asked.route} {asked.command}")
def test_a_question_is_the_same_everywhere(asked: Asked) -> None:
    of_route = route_parameters(asked.route, asked.verb)
    in_path = {name for name in of_route if f"{{{name}}}" in asked.route}
    of_method = method_parameters(asked.method) if asked.method else {}
    if asked.method:
        assert set(of_method) == set(of_route) - set(asked.not_in_method)
    for name, parameter in of_method.items():
        expected = of_route[name]
        if (asked.method.__name__, name) not in OTHER_DEFAULTS:
            assert parameter.default == expected.default, name
        assert parameter.choices == expected.choices, name
    if asked.command is None:
        return
    of_command = command_parameters(asked.command)
    for name in set(of_route) - in_path - set(asked.not_in_command):
        parameter, expected = of_command[name], of_route[name]
        if (asked.command, name) not in OTHER_DEFAULTS:
            assert parameter.default == expected.default, name
        assert parameter.limits == expected.limits, name
        if (asked.command, name) not in OPEN_FORMATS:
            assert parameter.choices == expected.choices, name


def test_every_question_of_a_service_is_compared() -> None:
    asked = {each.route for each in QUESTIONS if each.verb == "get"}
    others = {
        path.removeprefix("/api/v1")
        for path, item in ROUTES.items()
        if "get" in item and path.startswith("/api/v1/") and path.removeprefix("/api/v1") not in asked
    }
    assert others == {
        "/version", "/curves", "/ablations/{ablation}/runs", "/runs/{run_id}/curve", "/runs/{run_id}/checkpoint",
        "/runs/{run_id}/checkpoint/{file}", "/sweeps/{sweep_id}/events",
    }  # fmt: skip
