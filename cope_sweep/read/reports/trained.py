"""What the runs of a report were trained on, and how, in a few lines: the text of a methods section."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from cope_sweep.config import Plan, RunSpec
from cope_sweep.read.numbers import significant

MOST_VALUES = 4
"""The most values of a field to list; of more numbers, the range."""


def trained_lines(plan: Plan) -> Iterator[tuple[str, str]]:
    """(name, text) of tasks, model, training, rows and seeds. Fields in which rows differ have all their values."""
    runs = [row.runs[0] for row in plan.rows if row.runs]
    if not runs:
        return

    def values(field: Callable[[RunSpec], object]) -> str:
        return _listed(field(run) for run in runs)

    def number(field: Callable[[RunSpec], object], noun: str) -> str:
        return f"{values(field)} {noun}{'' if values(field) == '1' else 's'}"

    for run in {run.task.kind: run for run in reversed(runs)}.values():
        of_kind = [each.task for each in runs if each.task.kind == run.task.kind]
        set_anywhere = dict.fromkeys(name for task in of_kind for name in task.model_dump(exclude_defaults=True))
        names = [name for name in set_anywhere if name != "kind"]
        fields = [f"{name} {_listed(task.model_dump()[name] for task in of_kind)}" for name in names]
        yield "Task", ", ".join([run.task.kind, *fields])
    yield (
        "Model",
        (
            f"{values(lambda run: run.model.family.kind)}, {number(lambda run: run.model.layers, 'layer')} of width "
            f"{values(lambda run: run.model.dim)}, {number(lambda run: run.model.heads, 'head')}"
        ),
    )
    yield (
        "Training",
        (
            f"{values(lambda run: run.train.steps)} steps of {values(lambda run: run.train.batch)} sequences, "
            f"learning rate {values(lambda run: run.train.lr)} ({values(lambda run: run.train.schedule.kind)}), "
            f"{values(lambda run: run.train.optimizer.kind)}, weight decay {values(lambda run: run.train.weight_decay)}"
        ),
    )
    seeds = plan.ablation.content.row_seeds
    yield "Rows", f"{len(plan.rows)}, which differ in {', '.join(plan.axes.values()) or 'nothing'}"
    yield "Seeds", f"{len(seeds)} a row: {', '.join(map(str, seeds))}"


def _listed(values: Iterable[object]) -> str:
    """`0.001`, `2 or 4`, `0.0002 to 0.01`."""
    found = list(dict.fromkeys(value if isinstance(value, (int, float)) else str(value) for value in values))
    numbers = [value for value in found if isinstance(value, (int, float))]
    if len(numbers) == len(found):
        numbers.sort()
        texts = [significant(value) if isinstance(value, float) else str(value) for value in numbers]
        return f"{texts[0]} to {texts[-1]}" if len(texts) > MOST_VALUES else " or ".join(texts)
    return " or ".join(map(str, found))
