"""Conditions on names hold in every form of Unicode, on SQLite and on PostgreSQL: an `é` of one character, or of two."""

import unicodedata

import pytest

from cope_sweep.store.index import Filter, RunQuery
from tests.helpers.tiny import tiny_run
from tests.store.index.rows import members, row, summary

NFC, NFD = (unicodedata.normalize(form, "café") for form in ("NFC", "NFD"))
BOTH = pytest.mark.parametrize(("written", "typed"), [(NFC, NFD), (NFD, NFC), (NFD, NFD)])
RUNS = [tiny_run(seed=seed) for seed in range(2)]
IDS = [run.run_id for run in RUNS]


@pytest.fixture
def named(index, written):
    """A run in the row, and of the ablation, with a name, and another one."""
    index.write([row(RUNS[0], facts={"host": f"{written}-1"}), row(RUNS[1], facts={"host": "other"})])
    for sweep_id, run, name in (("a", RUNS[0], written), ("b", RUNS[1], "other")):
        member = {"run_id": run.run_id, "row": name, "seed": 0, "labels": {"model.position": name}, "reused": False}
        index.write_sweep(summary(sweep_id, ablation=name, runs=1), [member])
    return index


@BOTH
def test_tags(named, typed):
    for key in ("tags.ablation", "tags.row", "tags.model.position"):
        assert named.matching(RunQuery(filters=(Filter(key, "=", typed),))) == IDS[:1], key
        assert named.matching(RunQuery(filters=(Filter(key, "!=", typed),))) == IDS[1:], key


@BOTH
def test_texts_of_runs(named, typed):
    assert named.matching(RunQuery(filters=(Filter("facts.host", "=", f"{typed}-1"),))) == IDS[:1]
    assert named.matching(RunQuery(filters=(Filter("facts.host", "!=", f"{typed}-1"),))) == IDS[1:]


@BOTH
def test_words_of_a_search(named, typed):
    assert named.matching(RunQuery(search_words=(typed,))) == IDS[:1]


@BOTH
def test_sweeps_of_an_ablation(named, typed):
    assert [sweep.sweep_id for sweep in named.sweep_page(ablation=typed).sweeps] == ["a"]
    assert [run_id for run_id, _ in named.recorded_rows(typed)] == IDS[:1]


@BOTH
def test_variants_of_an_ablation(named, written, typed):
    changed = summary("c", ablation=written, runs=1).model_copy(update={"sets": ["train.steps=2"]})
    named.write_sweep(changed, members(RUNS[:1]))
    assert [variant.sets for variant in named.variants(typed)] == [("train.steps=2",)]
