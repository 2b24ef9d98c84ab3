"""Texts and tokenizers that have another content than when finished runs of a plan were trained on them.

A run's id has the name of its text, and not its content, so that texts may lie anywhere. A finished run is not trained
again where the content changes, and further seeds of its row are trained on another one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from cope_sweep.config import Plan, RunSpec
from cope_sweep.errors import UserError
from cope_sweep.store import Store
from cope_sweep.tasks.base import NamedContent, Task


@dataclass(frozen=True)
class ChangedContent:
    """A text or a tokenizer that has changed under its name."""

    place: str
    """The file, the folder or the glob of this machine, or the dataset of the hub."""
    runs: int
    """Number of finished runs of the plan that were trained on an earlier content."""
    renamed: Mapping[str, str]
    """Field of the task → value with which the present content has another name, and so its runs have other ids."""
    is_of_all: bool
    """All runs of the plan read it, so that `--set` can rename it."""


def prepare_tasks(plan: Plan, store: Store) -> set[Task]:
    """Prepare and return the tasks of unfinished runs, and of runs that a search may suggest."""
    runs = [*plan.runs, *(run for row in plan.examples for run in row.runs if plan.open_samples)]
    statuses = store.index.statuses(run.run_id for run in runs)
    tasks = {run.task for run in runs if statuses.get(run.run_id) != "finished"}
    for task in tasks:
        task.prepare()
    return tasks


def changed_content(plan: Plan, store: Store, prepared: Collection[Task] = ()) -> list[ChangedContent]:
    """The texts and tokenizers that have changed since finished runs of a plan were trained on them.

    Reads texts, and tokenises one that is not in the cache. Left out are those that are gone, and downloads, unless
    their task is in `prepared`.
    """
    runs_by_task: dict[Task, list[RunSpec]] = {}
    for run in plan.runs:
        runs_by_task.setdefault(run.task, []).append(run)
    earlier_runs: Counter[tuple[str, str]] = Counter()
    contents: dict[tuple[str, str], NamedContent] = {}
    readers: Counter[tuple[str, str]] = Counter()
    for task, runs in runs_by_task.items():
        named = task.named_content()
        readers.update((fact, content.place) for fact, content in named.items())
        if not named or not (task in prepared or all(content.is_local for content in named.values())):
            continue
        # The data's digest depends on the tokenizer: where both have changed, it is the tokenizer.
        for fact in sorted(named, reverse=True):
            if number := _number_trained_on_other(task, fact, runs, store):
                key = fact, named[fact].place
                earlier_runs[key] += number
                contents.setdefault(key, named[fact])
                break
    return [
        ChangedContent(
            place, number, contents[fact, place].renamed, is_of_all=readers[fact, place] == len(runs_by_task)
        )
        for (fact, place), number in earlier_runs.items()
    ]


def _number_trained_on_other(task: Task, fact: str, runs: list[RunSpec], store: Store) -> int:
    """The number of finished runs whose result has another value of a fact; 0 if the present one cannot be known."""
    statuses = store.index.statuses(run.run_id for run in runs)
    finished = [run_id for run_id, status in statuses.items() if status == "finished"]
    recorded = [value for (value,) in store.index.facts(finished, [fact]).values() if value is not None]
    if not recorded:
        return 0
    try:
        present = task.fingerprint() if fact == "data" else task.tokenizer_name()
    except UserError:
        return 0
    return sum(value != present for value in recorded)
