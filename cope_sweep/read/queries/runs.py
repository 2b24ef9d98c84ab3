"""Pages of runs with filters, and the details of one run: its record, files and log."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

from cope_sweep.api.runs import RUN_PREFIX, Attempt, Failure, ListRuns, RunDetail, RunLog
from cope_sweep.config import Plan, RunSpec
from cope_sweep.config.keys import flatten, value_at
from cope_sweep.errors import NotFoundError, UserError
from cope_sweep.read.queries.ablations import AblationFiles, Place, place_in
from cope_sweep.read.queries.unknown import no_run
from cope_sweep.store import QueryError, RunFolder, RunPage, RunQuery, RunRecord, Store
from cope_sweep.store.artifacts import LOG_FILE, RUN_ID
from cope_sweep.store.errors import DamagedError
from cope_sweep.store.files import check_no_link, read_tail
from cope_sweep.store.index.filters import TAGS
from cope_sweep.store.index.model import RECORD_COLUMNS
from cope_sweep.store.reading import check_document
from cope_sweep.tracking.page import mlflow_run_page

T = TypeVar("T")

VALUE_COLUMNS = frozenset(RECORD_COLUMNS) - {"metrics", "facts"}
ALWAYS = {"run_id", "status"}
"""Fields of a run in every answer."""
DEFAULT_FIELDS = {name for name, field in RunRecord.model_fields.items() if not field.exclude and name != "values"}
"""Fields of a run on a page, unless the question chooses fields."""
MAX_LOG_BYTES = 1 << 20
"""Maximum number of bytes to read from the end of a log."""
MAX_ATTEMPTS = 100
MAX_EXAMPLE_TOKENS = 1024
ATTEMPT = re.compile(
    r"(?P<began>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)  (?P<text>attempt (?P<number>\d{1,9}) on (?P<worker_id>\S+) .*)"
)
"""The line that training writes at the start of an attempt."""


def run_page(store: Store, plan: Plan | None, question: ListRuns, query: RunQuery) -> RunPage:
    """A page of runs; `plan` is the plan of the question's ablation.

    If the query has `run_ids` only, runs are in this order and include pending runs. Raises QueryError.
    """
    query_keys = {condition.key for condition in query.filters if not condition.key.startswith(TAGS)}
    query_keys |= {query.sort or "run_id"} - {"run_id"}
    chosen = {name for field in question.fields for name in map(str.strip, field.split(",")) if name}
    fields = DEFAULT_FIELDS & chosen | ALWAYS if chosen else DEFAULT_FIELDS
    keys = chosen - DEFAULT_FIELDS - {"values"} | query_keys  # a page shows the keys of its filters and order
    store.index.check_keys(sorted(keys - query_keys))
    page = store.index.page(query, values="metrics" in fields or not keys <= VALUE_COLUMNS)
    ids = [record.run_id for record in page.runs]
    places = run_places(store, ids, plan) if fields & {"ablations", "row", "seed", "steps"} else {}
    specs = store.index.specs(ids) if keys else {}
    runs = []
    for record in page.runs:
        values = _values(record, specs.get(record.run_id, {}), keys)
        run = place_run(record, places.get(record.run_id, []), values)
        if chosen:  # leave out the other fields
            run = RunRecord(**run.model_dump(include=fields | ({"values"} if values else set())))
        runs.append(run)
    return page.model_copy(update={"runs": runs})


def run_places(store: Store, run_ids: Sequence[str], plan: Plan | None = None) -> dict[str, list[Place]]:
    """Run id → its places: first the plan, then sweeps, newest first."""
    places: dict[str, list[Place]] = {}
    if plan is not None:
        planned = {run_id: place_in(plan, run_id) for run_id in run_ids}
        places = {run_id: [place] for run_id, place in planned.items() if place is not None}
    for run_id, in_sweeps in store.index.places(run_ids).items():
        places.setdefault(run_id, []).extend(Place(entry.ablation, entry.row) for entry in reversed(in_sweeps))
    return places


def full_ids(store: Store, texts: Sequence[str]) -> list[str]:
    """For each text the id of the only run in the index that starts with its digits, or the text. Raises QueryError."""
    matches: dict[str, list[str]] = {text: [] for text in texts if RUN_PREFIX.fullmatch(text)}
    lengths = set(map(len, matches))
    for run_id in store.index.ids_with_prefixes(matches) if matches else ():
        for length in lengths:
            matches.get(run_id[:length], []).append(run_id)
    for text, ids in matches.items():
        if len(ids) > 1:
            raise QueryError(
                f"{text}: several runs start with these digits ({', '.join(ids[:3])}); type more digits",
                code="ambiguous_run_id",
                run_id=text,
                near=ids[:3],
            )
    return [next(iter(matches.get(text, ())), text) for text in texts]


def find_run(store: Store, files: AblationFiles | None, run_id: str) -> tuple[RunRecord, list[Place]]:
    """The record of a run and its places. A run that is not in the index is searched for in all ablation files.

    Raises NotFoundError.
    """
    if not RUN_ID.fullmatch(run_id):
        raise NotFoundError(
            f"{run_id[:40]!r} is not a run id; a run id has 16 hexadecimal digits (`cope-sweep runs` lists them)",
            run_id=run_id[:40],
        )
    places = run_places(store, [run_id]).get(run_id, [])
    record = store.index.records([run_id]).get(run_id)
    if record is None and files is not None:
        places = [*files.places(run_id), *places]
    if record is None and not places:
        error = no_run(store, run_id)
        message = f"{error}; `cope-sweep plan ABLATION` lists the runs of an ablation"
        raise NotFoundError(message, code=error.code, **error.data)
    return (record or RunRecord(run_id=run_id)).as_counted(), places


def run_detail(store: Store, files: AblationFiles | None, run_id: str, *, with_curve: bool) -> RunDetail:
    """A run of the store or of a plan, with the content of its files. Unreadable files are left out."""
    record, places = find_run(store, files, run_id)
    folder = store.run(run_id)

    def document(name: str) -> dict[str, Any]:
        content: dict[str, Any] = getattr(folder, name) or {}
        check_document(content, folder.path / f"{name}.json")
        return content

    spec_file = readable(lambda: document("spec")) or {}
    planned = next((place.spec for place in places if place.spec), None)
    state = readable(lambda: document("state")) or {}
    failure = None
    if record.status == "failed":
        traceback = state.get("traceback")
        failure = Failure(message=record.message or "", traceback=traceback if isinstance(traceback, str) else "")
    spec = spec_file.get("spec")
    if not spec and planned is not None:
        spec = planned.model_dump(mode="json")
    values = dict(flatten((spec or {}) | {"facts": record.facts}))
    return RunDetail(
        **dict(place_run(record, places, values)) | {"spec": spec},
        example=_example(json.dumps(spec)) if spec else None,
        state=state | {"status": record.status} if state else {},
        result=(readable(lambda: document("result")) or None) if record.status == "finished" else None,
        sweeps=[entry.sweep_id for entry in store.index.places([run_id]).get(run_id, [])],
        failure=failure,
        attempts=readable(lambda: read_attempts(folder)) or [],
        mlflow_url=mlflow_run_page(store, run_id),
        curve=(readable(folder.curve) or []) if with_curve else [],
    )


@lru_cache(maxsize=256)
def _example(spec: str) -> str | None:
    """The first test sequence of a run's task, as labels.

    None for a task over text, for a long sequence, and for a task that is not installed.
    """
    try:
        task = RunSpec.model_validate_json(spec).task
        (split, *_) = task.TESTS
        if task.reads_text or task.length(split) > MAX_EXAMPLE_TOKENS:
            return None
        (tokens_T,) = task.sequences(split, 0, 0, 1).whole()
    except (UserError, ValueError):
        return None
    return " ".join(task.token_label(token) for token in tokens_T.tolist())


def place_run(record: RunRecord, places: Sequence[Place], values: Mapping[str, Any] = {}) -> RunRecord:
    """The record with its ablations and `values`. A run that has not started gets seed and steps from its plan."""
    changes: dict[str, Any] = {
        "values": values,
        "ablations": list(dict.fromkeys(place.ablation for place in places)),
        "row": places[0].row if places else None,
        "updated_ms": max((ms for ms in (record.updated_ms, record.ended_ms) if ms is not None), default=None),
    }
    planned = next((place.spec for place in places if place.spec), None)
    if record.revision == 0 and planned is not None:
        changes |= {"seed": planned.seed, "steps": planned.train.steps}
    return record.model_copy(update=changes)


def _values(record: RunRecord, spec: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """Key of a filter → value of the run. Values other than numbers and texts are left out."""
    values = {}
    for key in sorted(keys):
        value = getattr(record, key) if key in VALUE_COLUMNS else value_at(spec, key, record.value(key))
        if isinstance(value, (bool, int, float, str)):
            values[key] = value
    return values


def readable(read: Callable[[], T]) -> T | None:
    """The result of `read`; None for an unreadable file."""
    try:
        return read()
    except DamagedError:
        return None


def run_log(folder: RunFolder, tail: int) -> RunLog:
    """The last `tail` lines of a run's log, from at most MAX_LOG_BYTES. Invalid bytes are replaced by �.

    Raises DamagedError.
    """
    lines, cut = _lines(folder)
    return RunLog(run_id=folder.run_id, lines=lines[-tail:] if tail else [], truncated=cut or len(lines) > tail)


def read_attempts(folder: RunFolder) -> list[Attempt]:
    """The last attempts of a run, oldest first. Raises DamagedError."""
    matches = filter(None, map(ATTEMPT.fullmatch, _lines(folder)[0]))
    return [Attempt.model_validate(match.groupdict()) for match in list(matches)[-MAX_ATTEMPTS:]]


def _lines(folder: RunFolder) -> tuple[list[str], bool]:
    """The lines in the last MAX_LOG_BYTES of the log, and whether there are more before them. Raises DamagedError."""
    if folder.objects:
        content = folder.content(LOG_FILE) or b""
        content, cut = content[-MAX_LOG_BYTES:], len(content) > MAX_LOG_BYTES
    else:
        check_no_link(folder.path)
        content, cut = read_tail(folder.path / LOG_FILE, MAX_LOG_BYTES) or (b"", False)
    if cut:  # the first line is incomplete
        content = content.partition(b"\n")[2]
    text = content.decode(errors="replace")
    return text.removesuffix("\n").split("\n") if text else [], cut
