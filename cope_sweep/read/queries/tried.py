"""What a store has of some values of a key, in all of its ablations."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from cope_sweep.api.runs import ListTried, Tried, TriedGroup, TriedValue
from cope_sweep.config.filters import Filter, parse_filter
from cope_sweep.config.keys import ENCODINGS_KEY, is_below, short_names, value_at
from cope_sweep.config.run import default_of_field
from cope_sweep.config.source import default_label
from cope_sweep.frozen import metric_value
from cope_sweep.read.numbers import MISSING, significant
from cope_sweep.read.tables.stats import finite, summarise
from cope_sweep.records import RunRecord
from cope_sweep.store import QueryError, RunQuery, Store
from cope_sweep.store.index.tables import SECTIONS

PAGE = 1000
"""Runs that are read at once."""
MAX_RUNS = 20_000
"""More runs take seconds, and make groups that nobody reads."""
SHOWN_IDS = 20
PREFERRED = ("token_error", "perplexity", "loss")
PREFERRED_SETS = ("in_dist", "validation", "test")
"""Which metric to show, of those that equally many runs have."""


def tried(store: Store, question: ListTried) -> Tried:
    """The answer. Raises QueryError for a key that no run has, an invalid condition, and too many runs."""
    key, wanted = _values(question.values)
    records = _matching(store, key, wanted, tuple(map(parse_filter, question.filter)))
    if key != "seed" and (key.partition(".")[0] not in SECTIONS or "/" in key):
        raise QueryError(
            f"{key!r} is not a setting of runs, whose values could be compared; write a key of their configuration, as "
            f"in model.position, and then {key!r} as a condition",
            code="not_a_setting",
            key=key,
        )
    specs = _completed(store.index.specs(records))
    metric, metrics = _metric(records.values(), question.metric)
    labels = _labels(key, specs)
    others = {
        run_id: {name: value for name, value in specs[run_id].items() if not _is_asked(name, key)} for run_id in records
    }
    different = set(_differing(others.values()))
    groups: dict[tuple[tuple[str, str], ...], dict[str, list[RunRecord]]] = {}
    for run_id, record in records.items():
        settings = tuple(
            (name, _text(others[run_id][name])) for name in sorted(different & others[run_id].keys(), key=_kinds_first)
        )
        groups.setdefault(settings, {}).setdefault(labels[run_id], []).append(record)
    same = {name: _text(value) for each in others.values() for name, value in each.items() if name not in different}
    ordered = sorted(
        groups.items(), key=lambda group: (-len(group[1]), -sum(map(len, group[1].values())), str(group[0]))
    )
    page = ordered[question.offset : question.offset + question.limit]
    end = question.offset + len(page)
    values = sorted(set(labels.values()), key=lambda value: _place(value, wanted))
    return Tried(
        key=key,
        metric=metric,
        metrics=metrics,
        runs=len(records),
        values=values,
        same=dict(sorted(same.items())),
        groups=[
            TriedGroup(
                settings=dict(settings),
                ablations=_ablations(store, by_value),
                values=[_value(value, by_value[value], metric) for value in values if value in by_value],
            )
            for settings, by_value in page
        ],
        total=len(ordered),
        next=end if end < len(ordered) else None,
    )


def _is_asked(name: str, key: str) -> bool:
    """The name is no setting: it is the key, or below it, or the seed."""
    return name in (key, "seed") or is_below(name, key)


def _kinds_first(name: str) -> tuple[bool, str]:
    return not name.endswith(".kind"), name


def _place(value: str, wanted: list[str]) -> tuple[int, float, str]:
    """The sort key of a value: as typed, then by size."""
    bare = value.partition(", ")[0]
    place = wanted.index(bare) if bare in wanted else len(wanted)
    try:
        return place, float(value), value
    except ValueError:
        return place, math.inf, value


def _values(text: str) -> tuple[str, list[str]]:
    """The key, and the values in the order in which they were typed."""
    key, equals, values = (part.strip() for part in text.partition("="))
    found = list(dict.fromkeys(filter(None, map(str.strip, values.split(",")))))
    if not key or (equals and not found):
        raise QueryError(
            f"{text!r} is not a key with values; write KEY=VALUE,VALUE, as in model.position=cope,rope",
            code="invalid_values",
            values=text,
        )
    # Encodings are asked for by their kinds, which people also write as tables do: CoPE.
    return key, [value.lower() for value in found] if key == ENCODINGS_KEY else found


def _matching(store: Store, key: str, wanted: Iterable[str], filters: tuple[Filter, ...]) -> dict[str, RunRecord]:
    """The runs that have started and meet the conditions."""
    conditions = [parse_filter(f"{key}={value}") for value in wanted]
    records: dict[str, RunRecord] = {}
    for own in [[condition] for condition in conditions] or [[]]:
        query = RunQuery(filters=(*own, *filters), limit=PAGE)
        while True:
            page = store.index.page(query)
            records |= {record.run_id: record for record in page.runs}
            if max(len(records), page.total) > MAX_RUNS:
                raise QueryError(
                    f"more than {MAX_RUNS:,} runs; narrow them, as with --filter task.kind=flip_flop",
                    code="too_many_runs",
                    limit=MAX_RUNS,
                )
            if page.next is None:
                break
            query = replace(query, offset=page.next)
    store.index.check_keys([key])
    return {run_id: record for run_id, record in records.items() if record.status != "pending"}


def _metric(records: Iterable[RunRecord], wanted: str | None) -> tuple[str | None, list[str]]:
    """The metric to show, and all that finished runs have."""
    counts = Counter(name for record in records if record.status == "finished" for name in record.metrics)
    if wanted is not None or not counts:
        return wanted, sorted(counts)

    def rank(name: str) -> tuple[int, int, int, str]:
        parts = name.split("/")
        return -counts[name], _index(PREFERRED, parts), _index(PREFERRED_SETS, parts), name

    return min(counts, key=rank), sorted(counts)


def _index(preferred: Sequence[str], parts: Sequence[str]) -> int:
    return next((index for index, each in enumerate(preferred) if each in parts), len(preferred))


def _completed(specs: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The specs with the defaults of fields that are younger than they: a new field at its default changes no run."""
    keys = {key for spec in specs.values() for key in spec}
    return {
        run_id: {key: default for key in keys - spec.keys() if (default := default_of_field(key, spec)) is not None}
        | {**spec}
        for run_id, spec in specs.items()
    }


def _labels(key: str, specs: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Run → its value of the key, with the values below it that differ: `cope, p_max=16`."""
    by_value: dict[str, list[str]] = {}
    for run_id, spec in specs.items():
        by_value.setdefault(_text(value_at(spec, key)), []).append(run_id)
    labels: dict[str, str] = {}
    for value, run_ids in by_value.items():
        below = {
            run_id: {
                name[len(key) + 1 :]: each
                for name, each in specs[run_id].items()
                if is_below(name, key) and name != f"{key}.kind"
            }
            for run_id in run_ids
        }
        # A value that is a mapping has no text but those of its fields: `span=16`.
        is_mapping = value == MISSING
        shown = {name for fields in below.values() for name in fields} if is_mapping else _differing(below.values())
        short = short_names(sorted(shown))  # `cope.p_max` is `p_max`
        for run_id in run_ids:
            fields = [f"{name}={_text(below[run_id].get(long))}" for long, name in short.items()]
            labels[run_id] = ", ".join(fields if is_mapping and fields else [value, *fields])
    return labels


def _differing(mappings: Iterable[Mapping[str, Any]]) -> list[str]:
    """The keys that have several values."""
    found = list(mappings)
    keys = {key for each in found for key in each}
    return sorted(key for key in keys if any(each.get(key) != found[0].get(key) for each in found))


def _text(value: Any) -> str:
    return MISSING if value is None else default_label(value)


def _ablations(store: Store, by_value: Mapping[str, list[RunRecord]]) -> list[str]:
    ids = [record.run_id for records in by_value.values() for record in records]
    return sorted({place.ablation for places in store.index.places(ids).values() for place in places})


def _value(value: str, records: list[RunRecord], metric: str | None) -> TriedValue:
    finished = [record for record in records if record.status == "finished"]
    numbers = [] if metric is None else [metric_value(record.metrics, metric) for record in finished]
    summary = summarise(number for number in numbers if number is not None)
    text = MISSING
    if summary.n:
        spread = f" ± {significant(summary.std, 2)}" if summary.n > 1 else ""
        text = f"{significant(summary.mean)}{spread} ({summary.n})"
    return TriedValue(
        value=value,
        n=summary.n,
        mean=finite(summary.mean),
        std=finite(summary.std),
        text=text,
        unfinished=len(records) - len(finished),
        run_ids=[record.run_id for record in records[:SHOWN_IDS]],
    )
