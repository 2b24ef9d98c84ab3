"""Pages of runs, with their filters and cursors, and all that is known of one run: its record, files and log."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, TypeVar, get_args

from cope_sweep.api.answers import Attempt, Failure, RunDetail, RunLog, RunPage, RunSummary
from cope_sweep.api.questions import RUN_PREFIX, ListRuns
from cope_sweep.config import Plan, RunSpec
from cope_sweep.errors import NotFoundError, UserError
from cope_sweep.read.queries.ablations import AblationFiles, Place, place_in
from cope_sweep.read.queries.unknown import no_run
from cope_sweep.store import Filter, QueryError, RunFolder, RunQuery, RunRecord, Store
from cope_sweep.store.artifacts import LOG_FILE, RUN_ID
from cope_sweep.store.errors import DamagedError
from cope_sweep.store.files import check_no_link, read_tail
from cope_sweep.store.index.filters import TAGS
from cope_sweep.store.index.model import RECORD_COLUMNS, Position, Value
from cope_sweep.store.reading import check_document
from cope_sweep.tracking.page import run_page as mlflow_page

T = TypeVar("T")

VALUE_COLUMNS = frozenset(RECORD_COLUMNS) - {"metrics", "facts"}
ALWAYS = ("run_id", "status")
"""Fields of a run that every answer has."""
SUMMARY_FIELDS = tuple(name for name in RunSummary.model_fields if name != "values")
CONDITION = re.compile(r"(?P<key>[^<>=!]+?)\s*(?P<operator><=|>=|!=|==|=|<|>)\s*(?P<value>.*)", re.DOTALL)
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
INVALID_CURSOR = (
    "cursor: not the cursor of a page of this query; take `next` of its last page, or begin without a cursor"
)
MAX_CURSOR = 2000
MAX_LOG_BYTES = 1 << 20
"""Bytes that are read of a log, from its end."""
MAX_ATTEMPTS = 100
MAX_EXAMPLE_TOKENS = 1024
ATTEMPT = re.compile(
    r"(?P<began>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)  (?P<text>attempt (?P<number>\d{1,9}) on (?P<worker_id>\S+) .*)"
)
"""Line that training writes at the start of an attempt."""


def page(store: Store, plan: Plan | None, question: ListRuns, query: RunQuery) -> RunPage:
    """A page of runs; `plan` is that of the question's ablation.

    Those of a query with only `run_ids` are in their order, with pending ones. Raises QueryError.
    """
    own_keys = {each.key for each in query.filters if not each.key.startswith(TAGS)} | {query.sort} - {"run_id"}
    chosen = {name for field in question.fields for name in map(str.strip, field.split(",")) if name}
    fields = {*SUMMARY_FIELDS} & chosen | {*ALWAYS} if chosen else {*SUMMARY_FIELDS}
    keys = chosen - {*SUMMARY_FIELDS, "values"} | own_keys  # a page shows what it is filtered and sorted by
    store.index.check_keys(sorted(keys - own_keys))
    place = "" if question.ablation is None else f"{question.ablation} {question.scale}"
    if question.cursor is not None:
        if query.offset:
            raise QueryError("a page has a cursor or an offset, not both; leave out the offset")
        query = replace(query, after=decode_cursor(question.cursor, query, place))
    needs_values = "metrics" in fields or not keys <= VALUE_COLUMNS
    total, records, position = _records(store, query, values=needs_values)
    following = None if position is None else encode_cursor(position, query, place)
    ids = [record.run_id for record in records]
    found = places(store, ids, plan) if fields & {"ablations", "row", "seed", "steps"} else {}
    specs = store.index.specs(ids) if keys else {}
    answers = []
    for record in records:
        all_fields = run_fields(record, found.get(record.run_id, []))
        shown = {name: value for name, value in all_fields.items() if name in fields}
        if (values := _values(record, specs.get(record.run_id, {}), keys)) or not chosen:
            shown["values"] = values
        answers.append(RunSummary(**shown))
    return RunPage(total=total, limit=query.limit, offset=query.offset, next=following, runs=answers)


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
        raise QueryError(INVALID_CURSOR)
    return next((i for i, run_id in enumerate(matching) if places[run_id] > last), len(matching))


def places(store: Store, run_ids: Sequence[str], plan: Plan | None = None) -> dict[str, list[Place]]:
    """Run id → where it is: in the plan first, then in sweeps, the newest first."""
    found: dict[str, list[Place]] = {}
    if plan is not None:
        planned = {run_id: place_in(plan, run_id) for run_id in run_ids}
        found = {run_id: [place] for run_id, place in planned.items() if place is not None}
    for run_id, in_sweeps in store.index.places(run_ids).items():
        found.setdefault(run_id, []).extend(Place(each.ablation, each.row) for each in reversed(in_sweeps))
    return found


def full_id(store: Store, text: str) -> str:
    """The id of the one run in the index that begins with these digits; else the text. Raises QueryError."""
    if not RUN_PREFIX.fullmatch(text):
        return text
    found = store.index.ids_that_begin(text, limit=3)
    if len(found) > 1:
        raise QueryError(f"{text}: the ids of several runs begin so, as {' and '.join(found)}; type more digits")
    return found[0] if found else text


def find(store: Store, files: AblationFiles | None, run_id: str) -> tuple[RunRecord, list[Place]]:
    """The record of a run and its places. A run that the index does not know is looked for in all ablation files.

    Raises NotFoundError.
    """
    if not RUN_ID.fullmatch(run_id):
        raise NotFoundError(f"{run_id[:40]!r} is no run id: a run id has 16 hexadecimal digits")
    found = places(store, [run_id]).get(run_id, [])
    record = store.index.records([run_id]).get(run_id)
    if record is None and files is not None:
        found = [*files.places(run_id), *found]
    if record is None and not found:
        raise NotFoundError(f"{no_run(store, run_id)}; `cope-sweep plan ABLATION` lists those of an ablation")
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
    spec = begun.get("spec") or (planned.model_dump(mode="json") if planned else None)
    return RunDetail(
        **run_fields(record, found),
        spec=spec,
        example=_example(json.dumps(spec)) if spec else None,
        state=state,
        facts=dict(record.facts),
        result=(readable(lambda: document("result")) or None) if record.status == "finished" else None,
        sweeps=[each.sweep_id for each in store.index.places([run_id]).get(run_id, [])],
        failure=failure,
        attempts=readable(lambda: attempts(folder)) or [],
        mlflow_url=mlflow_page(store, run_id),
        curve=(readable(folder.curve) or []) if with_curve else [],
    )


@lru_cache(maxsize=256)
def _example(spec: str) -> str | None:
    """The first test sequence of a run's task as labels; None if it reads a text, is too long, or is not installed."""
    try:
        task = RunSpec.model_validate_json(spec).task
        (split, *_) = task.TESTS
        if task.fingerprint() is not None or task.length(split) > MAX_EXAMPLE_TOKENS:
            return None
        (tokens_T,) = task.sequences(split, 0, 0, 1).whole()
    except (UserError, ValueError):
        return None
    return " ".join(task.token_label(token) for token in tokens_T.tolist())


def run_fields(record: RunRecord, places: Sequence[Place]) -> dict[str, Any]:
    """The fields of a RunSummary. A run that was never begun has the seed and steps of its plan."""
    planned = next((place.spec for place in places if place.spec), None)
    begun = record.revision > 0
    same = {name: getattr(record, name) for name in SUMMARY_FIELDS if name in VALUE_COLUMNS}
    return same | {
        "ablations": list(dict.fromkeys(place.ablation for place in places)),
        "row": places[0].row if places else None,
        "seed": record.seed if begun else planned.seed if planned else None,
        "steps": record.steps if begun else planned.train.steps if planned else None,
        "updated_ms": max((ms for ms in (record.updated_ms, record.ended_ms) if ms is not None), default=None),
        "metrics": dict(record.metrics),
    }


def _values(record: RunRecord, spec: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """The values of a run by the keys of filters. Those that are no number or text are left out."""
    found = {}
    for key in sorted(keys):
        value = getattr(record, key) if key in VALUE_COLUMNS else spec.get(key, record.value(key))
        if isinstance(value, (bool, int, float, str)):
            found[key] = value
    return found


def readable(read: Callable[[], T]) -> T | None:
    """Call `read`; None for a file that cannot be read."""
    try:
        return read()
    except DamagedError:
        return None


def parse_filter(text: str) -> Filter:
    """The condition in a text.

    A value is a number or `true`/`false` if it reads like one, else a text; quotes make it a text in any case.

    Raises:
        QueryError: The text is no condition.
    """
    match = CONDITION.fullmatch(text.strip())
    if match is None or not match["value"]:
        raise QueryError(f"{text!r} is no condition; write KEY, an operator and a value, as in model.layers>=4")
    operator = "=" if match["operator"] == "==" else match["operator"]
    return Filter(match["key"].strip(), operator, _value(match["value"].strip()))  # type: ignore[arg-type]


def _value(text: str) -> bool | int | float | str:
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    if text in ("true", "false"):
        return text == "true"
    if NUMBER.fullmatch(text):
        return int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text)
    return text


def encode_cursor(position: Position, query: RunQuery, place: str = "") -> str:
    """The cursor of a position in the order of a query; `place` is the ablation and scale that it was asked of."""
    text = json.dumps([_digest(query, place), *position], separators=(",", ":"))
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def decode_cursor(cursor: str, query: RunQuery, place: str = "") -> Position:
    """The position that a cursor holds. Raises QueryError for a text that is no cursor, or that of another query."""
    try:
        text = base64.b64decode(cursor[:MAX_CURSOR] + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        digest, *position = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        raise QueryError(INVALID_CURSOR) from None
    are_values = all(each is None or isinstance(each, get_args(Value)) for each in position)
    if digest != _digest(query, place) or not are_values or not position or not isinstance(position[-1], str):
        raise QueryError(INVALID_CURSOR)
    return tuple(position)


def _digest(query: RunQuery, place: str) -> str:
    """Digest of the order and the conditions of a query, without the page."""
    conditions = (query.statuses, query.sweep_id, query.filters, query.words, query.sort, query.descending, place)
    return hashlib.sha256(repr(conditions).encode()).hexdigest()[:12]


def run_log(folder: RunFolder, tail: int) -> RunLog:
    """The last `tail` lines of a run's log, of its last MAX_LOG_BYTES. Bytes that are no text are replaced by �.

    Raises DamagedError.
    """
    lines, cut = _lines(folder)
    return RunLog(run_id=folder.run_id, lines=lines[-tail:] if tail else [], truncated=cut or len(lines) > tail)


def attempts(folder: RunFolder) -> list[Attempt]:
    """The last attempts of a run, oldest first. Raises DamagedError."""
    found = [match for line in _lines(folder)[0] if (match := ATTEMPT.fullmatch(line))]
    return [Attempt.model_validate(match.groupdict()) for match in found[-MAX_ATTEMPTS:]]


def _lines(folder: RunFolder) -> tuple[list[str], bool]:
    """The lines in the last MAX_LOG_BYTES of the log, and whether there are more before them. Raises DamagedError."""
    if folder.objects:
        content = folder.content(LOG_FILE) or b""
        content, cut = content[-MAX_LOG_BYTES:], len(content) > MAX_LOG_BYTES
    else:
        check_no_link(folder.path)
        content, cut = read_tail(folder.path / LOG_FILE, MAX_LOG_BYTES) or (b"", False)
    if cut:  # the first line has lost its beginning
        content = content.partition(b"\n")[2]
    text = content.decode(errors="replace")
    return text.removesuffix("\n").split("\n") if text else [], cut
