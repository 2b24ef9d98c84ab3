"""Routes that are made from questions: each validates its parameters and asks the queries."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import MISSING
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Response
from pydantic import BaseModel, Field, create_model
from starlette.concurrency import run_in_threadpool

from cope_services.http.components import Accept, Components, ComponentsDep, IfNoneMatch
from cope_services.http.responses import json_response
from cope_services.http.schemas import Responses
from cope_sweep.api.questions import CompareCurves, GetDiff, GetSweep, ListRuns, ListSweeps, Parameter, Question

WITHOUT_PLANS = (GetDiff, CompareCurves, ListSweeps, GetSweep)
"""Questions about the store alone: they do not wait for plans of ablation files."""


Answerer = Callable[[Components, Any, str | None], Awaitable[Response]]
"""Answers a question; for a file, in the format that the question or else the Accept header names."""


def add_questions(router: APIRouter, *questions: type[Question[Any]]) -> None:
    """Add a GET route for each question that the queries answer."""
    for question in questions:
        add_question(router, question, _ask)


def add_question(
    router: APIRouter, question: type[Question[Any]], answer: Answerer, responses: Responses | None = None
) -> None:
    """Add a GET route for a question. The prefix of the router is the begin of its path."""
    model = question.answer_type()
    documented: dict[str, Any] = {"response_class": Response} if model is bytes else {"response_model": model}
    route = router.get(question.path.removeprefix(router.prefix), responses=responses, **documented)
    route(_endpoint(question, answer))


def _endpoint(question: type[Question[Any]], respond: Answerer) -> Any:
    """The function that answers a question; its signature tells FastAPI the parameters."""
    in_path = [each for each in question.parameters() if each.in_path]

    async def answer(
        components: Components, query: BaseModel, if_none_match: str | None, accept: str | None = None, **names: str
    ) -> Response:
        asked = question(**names, **dict(query))
        await _prepare(components, asked)
        return await respond(components, asked, accept)

    own = {
        "components": ComponentsDep,
        **{each.name: Annotated[each.kind, Path(description=each.description)] for each in in_path},
        "query": Annotated[_query_model(question), Query()],
        **({"accept": Accept} if question.answer_type() is bytes else {}),
        "if_none_match": IfNoneMatch,
    }
    parameters = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=kind,
            default=None if name in ("accept", "if_none_match") else inspect.Parameter.empty,
        )
        for name, kind in own.items()
    ]
    answer.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    answer.__name__, answer.__doc__ = _function_name(question), question.__doc__
    return answer


def _query_model(question: type[Question[Any]]) -> Any:
    """The parameters of a question's query.

    They are one model: FastAPI validates each parameter of a function on its own, which takes longer than the answer.
    """
    fields: dict[str, Any] = {each.name: _field(each) for each in question.parameters() if not each.in_path}
    return create_model(question.__name__, **fields)


def _field(parameter: Parameter) -> tuple[Any, Any]:
    default = ... if parameter.default is MISSING else parameter.default
    return Annotated[parameter.kind, Field(description=parameter.description)], default


def _function_name(question: type[Question[Any]]) -> str:
    """`list_runs` of `ListRuns`: the id of the operation begins with it."""
    return "".join(f"_{each.lower()}" if each.isupper() else each for each in question.__name__).lstrip("_")


async def _prepare(components: Components, question: Question[Any]) -> None:
    """Return when the plans are made that the question needs."""
    if isinstance(question, WITHOUT_PLANS):
        return
    name = getattr(question, "name", None) or getattr(question, "ablation", None)
    if name is None or isinstance(question, ListRuns):
        await components.plans.prepare_all()
    if name is not None:
        await components.plans.prepare(name, getattr(question, "scale", None))


async def _ask(components: Components, question: Question[Any], accept: str | None) -> Response:
    """The answer as JSON."""

    def answer() -> Response:
        chosen = isinstance(question, ListRuns) and bool(question.fields)
        return json_response(components.queries.ask(question), exclude_unset=chosen)

    return await run_in_threadpool(answer)
