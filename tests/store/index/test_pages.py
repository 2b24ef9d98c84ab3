"""Pages of runs: the order is exact with ties and missing keys."""

import random

import pytest

from cope_sweep.store import Filter, RunQuery, RunRecord

VALUES = (None, 0.0, 0.5, 0.5, 1e-300, -3.0, 7.25)
TEXTS = (None, "a", "b", "b", "ä")


def row(run_id, *, seed=0, model=None, **values):
    return RunRecord.of(run_id, "finished", {"seed": seed, "model": model or {}}, **values)


@pytest.fixture
def rows(index):
    """60 runs with equal and missing numbers and texts."""
    source = random.Random(1)
    made = []
    for number in range(60):
        metric, text = source.choice(VALUES), source.choice(TEXTS)
        made.append(
            row(
                f"{source.getrandbits(64):016x}",
                seed=number % 4,
                model={} if number % 5 == 0 else {"layers": number % 3},
                metrics={} if metric is None else {"m": metric},
                facts={} if text is None else {"t": text},
                created_ms=None if number % 7 == 0 else number // 5,
            )
        )
    index.write(made)
    return made


def pages(index, query, limit):
    """The run ids of all pages, one after the other."""
    found, offset = [], 0
    while offset is not None:
        page = index.page(RunQuery(**query, limit=limit, offset=offset))
        found += [each.run_id for each in page.runs]
        offset = page.next
        assert len(page.runs) == limit or offset is None
    return found


def reference(rows, key, descending):
    """Values in order, runs without one last; equal ones by run id."""
    known = sorted((each for each in rows if key(each) is not None), key=lambda each: each.run_id)
    known.sort(key=key, reverse=descending)
    if descending:  # a stable sort in reverse keeps the order of equal ones
        known.sort(key=key, reverse=True)
    return [each.run_id for each in (*known, *sorted((e for e in rows if key(e) is None), key=lambda e: e.run_id))]


KEYS = {
    "m": lambda each: each.metrics.get("m"),
    "model.layers": lambda each: each.spec["model"].get("layers"),
    "created_ms": lambda each: each.created_ms,
    "seed": lambda each: each.seed,
    "status": lambda each: each.status,
    "facts.t": lambda each: each.facts.get("t"),  # the last one, because the test deletes rows for it
}


def test_all_pages_together_are_the_whole_order(index, rows):
    for sort, key in KEYS.items():
        if sort == "facts.t" and not index.database.is_sqlite:
            rows = [each for each in rows if each.facts.get("t") != "ä"]  # its place depends on the collation
            index.delete({r.run_id for r in rows} ^ set(index.statuses()))
        for descending in (False, True):
            query = {"sort": sort, "descending": descending}
            expected = reference(rows, key, descending)
            for limit in (1, 59, 60, 61) if sort == "m" else (7,):
                assert pages(index, query, limit) == expected, (query, limit)


def test_the_total_is_of_all_pages(index, rows):
    query = RunQuery(filters=(Filter("m", ">", 0.0),), sort="m", limit=2)
    first = index.page(query)
    second = index.page(RunQuery(filters=query.filters, sort="m", limit=2, offset=first.next))
    beyond = index.page(RunQuery(filters=query.filters, sort="m", offset=1000))
    assert (beyond.runs, beyond.next) == ([], None)
    assert first.total == second.total == beyond.total == sum((each.metrics.get("m") or 0.0) > 0 for each in rows)
