"""Texts and tokenizers that have another content than when finished runs of a plan were trained on them."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from cope_sweep.config import Plan, RunSpec
from cope_sweep.store import Store
from cope_sweep.sweep.changed_content import changed_content
from cope_sweep.text import TOKENIZER_FILE, TextTokenizer
from tests.helpers.finished_runs import finish, plan_of
from tests.helpers.texts import prose, write_corpus
from tests.helpers.tiny import TINY

METRICS = {"validation/perplexity": 12.5}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("COPE_SWEEP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COPE_SWEEP_DATA", str(tmp_path / "data"))
    (tmp_path / "data").mkdir()
    return tmp_path


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store", create=True)


def plan_with(task: dict[str, Any], **changes: Any) -> Plan:
    base = {**TINY, "task": {"tokens": 8, "vocabulary": 300, **task}}
    metrics = [{"name": "validation/perplexity"}]
    return plan_of(**{"base": base, "grid": {}, "metrics": metrics} | changes)


def finish_all(store: Store, plan: Plan) -> None:
    for run in plan.runs:
        finish(store, run, METRICS, facts_of(run))


def facts_of(run: RunSpec) -> dict[str, Any]:
    """What training on the present content records."""
    return {"steps": 6, "data": run.task.fingerprint(), "tokenizer": run.task.tokenizer_name()}


def again(task: Any) -> Any:
    """The task as another process opens it."""
    from cope_sweep.tasks import language

    language._opened.cache_clear()
    return task


def text_file(folder: Path) -> tuple[dict[str, Any], Path, Path]:
    path = folder / "alice.txt"
    path.write_text(prose(2000))
    return {"kind": "text", "path": str(path)}, path, path


def text_folder(folder: Path) -> tuple[dict[str, Any], Path, Path]:
    path = folder / "data" / "alice"
    path.mkdir()
    (path / "a.txt").write_text(prose(2000))
    return {"kind": "text", "corpus": "alice"}, path, path / "a.txt"


def wikitext(folder: Path) -> tuple[dict[str, Any], Path, Path]:
    path = write_corpus(folder / "texts")
    return {"kind": "wikitext", "corpus": "alice", "folder": str(path)}, path, path / "wiki.train.tokens"


def code(folder: Path) -> tuple[dict[str, Any], Path, Path]:
    path = folder / "data" / "alice"
    path.mkdir()
    for number in range(60):
        (path / f"m{number}.py").write_text(prose(20, number))
    return {"kind": "code", "corpus": "alice"}, path, path / "m0.py"


def last_sentence(folder: Path) -> tuple[dict[str, Any], Path, Path]:
    path = folder / "alice.txt"
    path.write_text("The cat and the dog and the cow sat on a mat. " * 30 + "A fox saw a hen, a cat and a dog. " * 30)
    task = {"kind": "last_sentence", "corpus": "alice", "folder": str(path), "maximum": 1, "fewest_words": 1}
    return task, path, path


@pytest.mark.parametrize("make", [text_file, text_folder, wikitext, code])
def test_a_text_that_changed_under_its_name_is_named_with_what_helps(folder, store, make):
    task, place, file = make(folder)
    plan = plan_with(task)
    finish_all(store, plan)
    assert changed_content(plan, store) == []
    file.write_text(prose(1500, seed=9))
    again(task)
    (change,) = changed_content(plan, store)
    assert (change.place, change.runs) == (str(place), 2)
    assert change.renamed["corpus"] == "alice-2"
    renamed = plan_with(task | dict(change.renamed))
    assert not {run.run_id for run in renamed.runs} & {run.run_id for run in plan.runs}
    assert renamed.runs[0].task.fingerprint() == plan.runs[0].task.fingerprint()


def test_a_text_of_counted_words_that_changed_is_named(folder, store):
    task, place, file = last_sentence(folder)
    base = {**TINY, "task": task}
    plan = plan_of(base=base, grid={}, metrics=[{"name": "in_dist/token_error"}])
    for run in plan.runs:
        finish(store, run, {"in_dist/token_error": 1.0}, {"data": run.task.fingerprint()})
    assert changed_content(plan, store) == []
    file.write_text(file.read_text().replace("cow", "cat"))
    (change,) = changed_content(plan, store)
    assert (change.place, change.runs, change.renamed) == (str(place), 2, {"corpus": "alice-2"})


def test_a_name_with_a_number_gets_the_next_one(folder, store):
    _, path, _ = text_file(folder)
    plan = plan_with({"kind": "text", "path": str(path), "corpus": "alice-2"})
    finish_all(store, plan)
    path.write_text(prose(1500, seed=9))
    again(None)
    assert [change.renamed for change in changed_content(plan, store)] == [{"corpus": "alice-3"}]


def test_a_tokenizer_that_changed_under_its_name_is_named(folder, store):
    task, _, _ = text_file(folder)
    file = folder / "data" / "mine" / TOKENIZER_FILE
    file.parent.mkdir()
    TextTokenizer.train([prose(300)], 270).save(file)
    plan = plan_with(task | {"tokenizer": "mine"})
    finish_all(store, plan)
    TextTokenizer.train([prose(300)], 290).save(file)
    again(None)
    (change,) = changed_content(plan, store)
    assert (change.place, change.runs) == (str(file), 2)
    assert change.renamed == {"tokenizer": "mine-2", "tokenizer_file": str(file)}


def test_only_the_runs_of_the_earlier_content_count(folder, store):
    task, _, file = text_file(folder)
    plan = plan_with(task, seeds=[0, 1, 2])
    finish(store, plan.runs[0], METRICS, facts_of(plan.runs[0]))
    file.write_text(prose(1500, seed=9))
    again(None)
    finish(store, plan.runs[1], METRICS, facts_of(plan.runs[1]))
    assert [change.runs for change in changed_content(plan, store)] == [1]


def test_runs_need_no_text_that_is_gone(folder, store):
    task, _, file = text_file(folder)
    plan = plan_with(task)
    finish_all(store, plan)
    file.unlink()
    again(None)
    assert changed_content(plan, store) == []


def test_texts_with_names_of_their_own_are_named_one_by_one(folder, store):
    """No single `--set` renames one of two, so nothing is suggested that would replace the other."""
    paths = [folder / f"{name}.txt" for name in ("alice", "bob")]
    for seed, path in enumerate(paths):
        path.write_text(prose(1500, seed))
    shutil.copy(paths[0], folder / "same.txt")
    plan = plan_with({"kind": "text"}, grid={"task.path": {path.stem: str(path) for path in paths}}, seeds=[0])
    finish_all(store, plan)
    paths[0].write_text(prose(1600, 7))
    again(None)
    (change,) = changed_content(plan, store)
    assert (change.place, change.renamed) == (str(paths[0]), {"corpus": "alice-2"})
    assert not change.is_of_all
