"""Pages of runs, and all that is known of one run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import select

from cope_sweep.api.answers import Failure, RunDetail, RunPage, RunSummary
from cope_sweep.api.questions import RUN_PREFIX, ListRuns, RunFilter
from cope_sweep.read.queries import cursors
from cope_sweep.read.queries.ablations import AblationFiles, Place
from cope_sweep.read.queries.errors import NotFoundError
from cope_sweep.read.queries.filters import parse_filter
from cope_sweep.read.queries.logs import attempts
from cope_sweep.read.queries.records import Chosen, chosen, readable, run_fields, summary
from cope_sweep.store import QueryError, RunQuery, RunRecord, Store
from cope_sweep.store.artifacts import RUN_ID
from cope_sweep.store.index import summaries
from cope_sweep.store.index.filters import TAGS
from cope_sweep.store.index.model import Position
from cope_sweep.store.index.tables import runs as run_table
from cope_sweep.store.reading import check_document
from cope_sweep.tracking.uri import run_page as mlflow_page


def run_query(question: RunFilter) -> RunQuery:
    """The query of the index for runs, without ablation and page. Raises QueryError."""
    return RunQuery(
        tuple(question.status),
        run_ids=None if question.run is None else tuple(question.run),
        sweep_id=question.sweep,
        filters=tuple(map(parse_filter, question.filter)),
        sort=question.sort,
        descending=question.descending,
    )


def page(store: Store, files: AblationFiles | None, question: ListRuns, query: RunQuery) -> RunPage:
    """A page of runs. Those of a query with only `run_ids` are in their order, with pending ones. Raises QueryError."""
    own_keys = _query_keys(query)
    wanted = chosen(question.fields, own_keys)
    store.index.check_keys(sorted(wanted.keys - own_keys))
    place = "" if question.ablation is None else f"{question.ablation} {question.scale}"
    if question.cursor is not None:
        if query.offset:
            raise QueryError("a page has a cursor or an offset, not both; leave out the offset")
        query = replace(query, after=cursors.decode(question.cursor, query, place))
    total, records, position = _records(store, query, values=wanted.values)
    following = None if position is None else cursors.encode(position, query, place)
    answers = _summaries(store, files, records, wanted)
    return RunPage(total=total, limit=query.limit, offset=query.offset, next=following, runs=answers)


def _query_keys(query: RunQuery) -> set[str]:
    """The keys by which a query filters and sorts: a page shows their values."""
    return {each.key for each in query.filters if not each.key.startswith(TAGS)} | {query.sort} - {"run_id"}


def _records(store: Store, query: RunQuery, *, values: bool) -> tuple[int, list[RunRecord], Position | None]:
    """The number of matching runs, a page of them, and the position of its last run if others follow."""
    given = RunQuery(query.statuses, query.run_ids, limit=query.limit, offset=query.offset, after=query.after)
    if query.run_ids is None or query != given:
        found = store.index.page(query, values=values)
        return found.total, found.runs, found.next
    ids: Sequence[str] = query.run_ids
    if query.statuses:
        statuses = store.index.statuses(ids)
        ids = [run_id for run_id in ids if statuses.get(run_id, "pending") in query.statuses]
    start = query.offset if query.after is None else _index_after(query.run_ids, ids, query.after)
    some = ids[start : start + query.limit]
    known = store.index.records(some, values=values)
    position = (some[-1],) if len(ids) > start + len(some) and some else None
    return len(ids), [known.get(run_id) or RunRecord(run_id) for run_id in some], position


def _index_after(every: Sequence[str], matching: Sequence[str], position: Position) -> int:
    """The index in `matching`, a part of `every`, of the first run after a position. Raises QueryError."""
    places = {run_id: index for index, run_id in enumerate(every)}
    last = places.get(str(position[-1]))
    if last is None or len(position) != 1:
        raise QueryError(cursors.INVALID)
    return next((i for i, run_id in enumerate(matching) if places[run_id] > last), len(matching))


def _summaries(
    store: Store, files: AblationFiles | None, records: Sequence[RunRecord], wanted: Chosen
) -> list[RunSummary]:
    ids = [record.run_id for record in records]
    found = places(store, files, ids) if wanted.places else {}
    specs = store.index.specs(ids) if wanted.keys else {}
    return [summary(each, found.get(each.run_id, []), specs.get(each.run_id, {}), wanted) for each in records]


def places(store: Store, files: AblationFiles | None, run_ids: Sequence[str]) -> dict[str, list[Place]]:
    """Run id → where it is: in the ablation files first, then in sweeps."""
    found = files.places(run_ids) if files else {}
    for run_id, in_sweeps in summaries.places(store.index, run_ids).items():
        found.setdefault(run_id, []).extend(Place(ablation, row) for _, ablation, row in in_sweeps)
    return found


def full_id(store: Store, text: str) -> str:
    """The id of the one run in the index that begins with these digits; else the text. Raises QueryError."""
    if not RUN_PREFIX.fullmatch(text):
        return text
    query = select(run_table.c.run_id).where(run_table.c.run_id.startswith(text)).order_by(run_table.c.run_id).limit(3)
    with store.index.database.reading() as connection:
        found: list[str] = list(connection.execute(query).scalars())
    if len(found) > 1:
        raise QueryError(f"{text}: the ids of several runs begin so, as {' and '.join(found)}; type more digits")
    return found[0] if found else text


def find(store: Store, files: AblationFiles | None, run_id: str) -> tuple[RunRecord, list[Place]]:
    """The record of a run and its places. Raises NotFoundError."""
    if not RUN_ID.fullmatch(run_id):
        raise NotFoundError(f"{run_id[:40]!r} is no run id: a run id has 16 hexadecimal digits")
    found = places(store, files, [run_id]).get(run_id, [])
    record = store.index.records([run_id]).get(run_id)
    if record is None and not found:
        raise NotFoundError(
            f"{summaries.no_run(store.index, run_id, store.location)}; `cope-sweep plan ABLATION` lists "
            "those of an ablation"
        )
    return record or RunRecord(run_id), found


def detail(store: Store, files: AblationFiles | None, run_id: str, *, with_curve: bool) -> RunDetail:
    """A run of the store or of a plan, with what is in its files. What cannot be read of them is left out."""
    record, found = find(store, files, run_id)
    folder = store.run(run_id)

    def document(name: str) -> dict[str, Any]:
        content: dict[str, Any] = getattr(folder, name) or {}
        check_document(content, folder.path / f"{name}.json")
        return content

    begun = readable(lambda: document("spec")) or {}
    planned = next((place.spec for place in found if place.spec), None)
    state = readable(lambda: document("state")) or {}
    failure = None
    if record.status == "failed":
        traceback = state.get("traceback")
        failure = Failure(message=record.message or "", traceback=traceback if isinstance(traceback, str) else "")
    return RunDetail(
        **run_fields(record, found),
        spec=begun.get("spec") or (planned.model_dump(mode="json") if planned else None),
        state=state,
        facts=dict(record.facts),
        result=(readable(lambda: document("result")) or None) if record.status == "finished" else None,
        sweeps=[sweep_id for sweep_id, *_ in summaries.places(store.index, [run_id]).get(run_id, [])],
        failure=failure,
        attempts=readable(lambda: attempts(folder)) or [],
        mlflow_url=mlflow_page(store, run_id),
        curve=(readable(folder.curve) or []) if with_curve else [],
    )
