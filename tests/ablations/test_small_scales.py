"""Every kind of model of the small scales makes training steps and is evaluated, at its own size."""

import math
from functools import cache

import pytest

from cope_sweep.config import RunSpec
from cope_sweep.train.runtime import Runtime
from cope_sweep.train.trainer import Trainer
from tests.ablations.test_ablation_plans import NAMES, plan, scales

SOURCE = '''"""A module of many."""


def mean(values):
    # The sum, divided by the number.
    return sum(values) / len(values)
'''
TINY = {"sequences": 2, "final_sequences": 2, "contexts": (), "positions": None}


@cache
def configurations() -> dict[str, list[tuple[str, RunSpec]]]:
    """File → the runs that have another task, family, list of encodings or attention than all before, by row."""
    found: dict[str, list[tuple[str, RunSpec]]] = {}
    known = set()
    for name in NAMES:
        rows = plan(name, "small").rows if "small" in scales(name) else ()
        found[name] = []
        for row in rows:
            run = row.runs[0]
            key = run.task.kind, run.model.family, run.model.position, run.model.hard_attention
            if key not in known:
                known.add(key)
                found[name].append((row.name, run))
    return found


@cache
def few() -> dict[str, list[tuple[str, RunSpec]]]:
    """Those of them that have another task, another family, or other kinds of encodings than all before."""
    found: dict[str, list[tuple[str, RunSpec]]] = {}
    known = set()
    for name, runs in configurations().items():
        found[name] = []
        for row, run in runs:
            kinds = tuple(encoding.kind for encoding in run.model.position)
            keys = {(run.task.kind, run.model.family, run.model.hard_attention), kinds}
            if keys - known:
                known |= keys
                found[name].append((row, run))
    return found


@pytest.fixture(scope="module")
def code(tmp_path_factory):
    """A folder of source files, because reading the standard library takes seconds."""
    folder = tmp_path_factory.mktemp("code")
    for number in range(150):
        (folder / f"module_{number}.py").write_text(SOURCE.replace("mean", f"mean_{number}") * 8)
    return str(folder)


def shortened(run: RunSpec, code: str) -> RunSpec:
    """One step of two sequences, and a test set of two sequences."""
    task = run.task
    if task.kind == "code":
        task = task.model_copy(update={"corpus": "small-code", "folder": code, "vocabulary": 300})
    if task.kind == "text":
        task = task.model_copy(update={"path": f"{code}/*.py", "vocabulary": 300})
    return RunSpec.model_validate(
        {
            "task": task,
            "model": run.model,
            "train": run.train.model_copy(update={"steps": 1, "batch": 2, "warmup": 0}),
            "evaluate": run.evaluate.model_copy(update=TINY),
        }
    )


@pytest.mark.parametrize("chosen", [few, pytest.param(configurations, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", NAMES)
def test_a_step_and_an_evaluation(name, chosen, code):
    for row, run in chosen()[name]:
        print(row)  # noqa: T201 - a failure shows it
        trainer = Trainer(shortened(run, code), Runtime())
        before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
        trainer.train_step()
        trainer.wait()
        after = list(trainer.model.parameters())
        assert all(parameter.isfinite().all() for parameter in after)
        assert any((old != new).any() for old, new in zip(before, after, strict=True))
        assert all(map(math.isfinite, trainer.evaluate(2).values()))
