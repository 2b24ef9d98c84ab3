"""Pages of runs, with their filters, and all that is known of one run: its record, files and log."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

from cope_sweep.api.answers import Attempt, Failure, RunDetail, RunLog
from cope_sweep.api.questions import RUN_PREFIX, ListRuns
from cope_sweep.config import Plan, RunSpec
from cope_sweep.errors import NotFoundError, UserError
from cope_sweep.read.queries.ablations import AblationFiles, Place, place_in
from cope_sweep.read.queries.unknown import no_run
from cope_sweep.store import Filter, QueryError, RunFolder, RunPage, RunQuery, RunRecord, Store
from cope_sweep.store.artifacts import LOG_FILE, RUN_ID
from cope_sweep.store.errors import DamagedError
from cope_sweep.store.files import check_no_link, read_tail
from cope_sweep.store.index.filters import TAGS
from cope_sweep.store.index.model import RECORD_COLUMNS
from cope_sweep.store.reading import check_document
from cope_sweep.tracking.page import run_page as mlflow_page

T = TypeVar("T")

VALUE_COLUMNS = frozenset(RECORD_COLUMNS) - {"metrics", "facts"}
ALWAYS = {"run_id", "status"}
"""Fields of a run that every answer has."""
SHOWN = {name for name, field in RunRecord.model_fields.items() if not field.exclude and name != "values"}
"""Fields of a run that a page shows, unless some are chosen."""
CONDITION = re.compile(r"(?P<key>[^<>=!]+?)\s*(?P<operator><=|>=|!=|==|=|<|>)\s*(?P<value>.*)", re.DOTALL)
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
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
    fields = SHOWN & chosen | ALWAYS if chosen else SHOWN
    keys = chosen - SHOWN - {"values"} | own_keys  # a page shows what it is filtered and sorted by
    store.index.check_keys(sorted(keys - own_keys))
    found = store.index.page(query, values="metrics" in fields or not keys <= VALUE_COLUMNS)
    ids = [record.run_id for record in found.runs]
    known = places(store, ids, plan) if fields & {"ablations", "row", "seed", "steps"} else {}
    specs = store.index.specs(ids) if keys else {}
    runs = []
    for record in found.runs:
        values = _values(record, specs.get(record.run_id, {}), keys)
        run = place_run(record, known.get(record.run_id, []), values)
        if chosen:  # without the others, so that the answer has none of them
            run = RunRecord(**run.model_dump(include=fields | ({"values"} if values else set())))
        runs.append(run)
    return found.model_copy(update={"runs": runs})


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
    return full_ids(store, [text])[0]


def full_ids(store: Store, texts: Sequence[str]) -> list[str]:
    """`full_id` of each text, with one look at the index."""
    found: dict[str, list[str]] = {text: [] for text in texts if RUN_PREFIX.fullmatch(text)}
    lengths = set(map(len, found))
    for run_id in store.index.ids_with_prefixes(found) if found else ():
        for length in lengths:
            found.get(run_id[:length], []).append(run_id)
    for text, ids in found.items():
        if len(ids) > 1:
            raise QueryError(
                f"{text}: the ids of several runs begin so, as {' and '.join(ids[:3])}; type more digits",
                code="ambiguous_run_id",
                run_id=text,
                near=ids[:3],
            )
    return [next(iter(found.get(text, ())), text) for text in texts]


def find(store: Store, files: AblationFiles | None, run_id: str) -> tuple[RunRecord, list[Place]]:
    """The record of a run and its places. A run that the index does not know is looked for in all ablation files.

    Raises NotFoundError.
    """
    if not RUN_ID.fullmatch(run_id):
        raise NotFoundError(
            f"{run_id[:40]!r} is no run id: a run id has 16 hexadecimal digits",
            run_id=run_id[:40],
        )
    found = places(store, [run_id]).get(run_id, [])
    record = store.index.records([run_id]).get(run_id)
    if record is None and files is not None:
        found = [*files.places(run_id), *found]
    if record is None and not found:
        error = no_run(store, run_id)
        message = f"{error}; `cope-sweep plan ABLATION` lists those of an ablation"
        raise NotFoundError(message, code=error.code, **error.data)
    return record or RunRecord(run_id=run_id), found


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
        **dict(place_run(record, found)) | {"spec": spec},
        example=_example(json.dumps(spec)) if spec else None,
        state=state | {"status": record.status} if state else {},
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


def place_run(record: RunRecord, places: Sequence[Place], values: Mapping[str, Any] = {}) -> RunRecord:
    """The record with its ablations and `values`. A run that was never begun gets the seed and steps of its plan."""
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
        raise QueryError(
            f"{text!r} is no condition; write KEY, an operator and a value, as in model.layers>=4",
            code="invalid_condition",
            condition=text,
        )
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
