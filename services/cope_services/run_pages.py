"""Pages of runs: their parameters, and how they are answered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from fastapi import Query, Response
from pydantic import BaseModel, Field
from starlette.concurrency import run_in_threadpool

from cope_services.responses import json_response
from cope_sweep.queries import parse_filter
from cope_sweep.store import RunQuery, Status

if TYPE_CHECKING:
    from cope_services.dependencies import Components


class RunParameters(BaseModel):
    """Which runs a page has, in which order, and what it shows of them."""

    # One model for all parameters: FastAPI validates each parameter of a function on its own, which takes longer than
    # the answer.
    status: Annotated[Status | None, Field(description="Only runs with this status.")] = None
    filters: Annotated[
        list[str],
        Field(
            alias="filter",
            max_length=20,
            description="Conditions that have to hold: `model.layers>=4`, `model.position=cope`, `in_dist/loss<0.5`, "
            "`facts.device=cuda`, `tags.row=CoPE` (also `tags.sweep`, `tags.ablation`, and the label of an axis). A "
            "run that lacks the key does not match.",
        ),
    ] = []
    run: Annotated[
        list[str] | None,
        Field(max_length=1000, description="Only these runs, by their ids, in this order. May be repeated."),
    ] = None
    sweep: Annotated[str | None, Field(description="Only the runs of this sweep.", max_length=100)] = None
    sort: Annotated[str, Field(description="A key as in `filter`, or run_id, status, seed, step, created_ms.")] = (
        "run_id"
    )
    order: Annotated[Literal["asc", "desc"], Field(description="Runs without the key come last.")] = "asc"
    limit: Annotated[int, Field(ge=1, le=1000, description="Maximum number of runs.")] = 100
    offset: Annotated[int, Field(ge=0, le=2**31, description="Number of runs to skip.")] = 0
    cursor: Annotated[
        str | None,
        Field(description="`next` of the page before. Pages stay exact while runs arrive and end.", max_length=2000),
    ] = None
    fields: Annotated[
        list[str],
        Field(
            max_length=50,
            description="What is shown of each run, as names of its fields (`status,step,metrics`) and keys as in "
            "`filter` (`model.layers`), whose values are in `values`. May be repeated. Default: all fields.",
        ),
    ] = []
    scale: Annotated[str | None, Field(description="One of the ablation's scales.", max_length=100)] = None

    @property
    def query(self) -> RunQuery:
        """The query. Raises QueryError."""
        return RunQuery(
            (self.status,) if self.status else (),
            run_ids=None if self.run is None else tuple(self.run),
            sweep_id=self.sweep,
            filters=tuple(map(parse_filter, self.filters)),
            sort=self.sort,
            descending=self.order == "desc",
            limit=self.limit,
            offset=self.offset,
        )


class AllRunParameters(RunParameters):
    """`RunParameters` for all runs or for those of an ablation."""

    ablation: Annotated[
        str | None, Field(description="Only the runs of this ablation, in plan order.", max_length=200)
    ] = None


PlannedRuns = Annotated[RunParameters, Query()]
AllRuns = Annotated[AllRunParameters, Query()]


async def run_page(components: Components, parameters: RunParameters, ablation: str | None) -> Response:
    """The page of runs that the parameters ask for. Raises UserError."""
    query, cursor, fields, scale = parameters.query, parameters.cursor, parameters.fields, parameters.scale
    await components.plans.prepare_all()
    if ablation is not None:
        await components.plans.prepare(ablation, scale)

    def answer() -> Response:
        page = components.queries.runs(query, ablation=ablation, scale=scale, cursor=cursor, fields=fields)
        return json_response(page, exclude_unset=bool(fields))

    return await run_in_threadpool(answer)
