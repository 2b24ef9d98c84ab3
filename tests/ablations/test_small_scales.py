"""Every kind of model of the small scales makes training steps and is evaluated, at its own size."""

import math
from pathlib import Path

import pytest

from cope_sweep.config import RunSpec, expand, load_ablation, with_overrides
from cope_sweep.train.runtime import Runtime
from cope_sweep.train.trainer import Trainer

ABLATIONS = Path(__file__).parents[2] / "ablations"
SOURCE = '''"""A module of many."""


def mean(values):
    # The sum, divided by the number.
    return sum(values) / len(values)
'''
TINY = {"sequences": 2, "final_sequences": 2, "contexts": (), "positions": None}


def configurations() -> dict[str, RunSpec]:
    """The first run of each combination of a task's kind, a family and a list of encodings, by the name of its row."""
    found: dict[tuple, tuple[str, RunSpec]] = {}
    for path in sorted(ABLATIONS.glob("*.yaml")):
        loaded = load_ablation(path)
        if "small" in loaded.content.scales:
            for row in expand(with_overrides(loaded, scale="small")).rows:
                run = row.runs[0]
                model = run.model
                key = run.task.kind, model.family, model.position, model.hard_attention
                found.setdefault(key, (f"{path.stem}: {row.name}", run))
    return dict(found.values())


CONFIGURATIONS = configurations()


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


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_step_and_an_evaluation(name, code):
    trainer = Trainer(shortened(CONFIGURATIONS[name], code), Runtime())
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    trainer.train_step()
    trainer.wait()
    after = list(trainer.model.parameters())
    assert all(parameter.isfinite().all() for parameter in after)
    assert any((old != new).any() for old, new in zip(before, after, strict=True))
    assert all(map(math.isfinite, trainer.evaluate(2).values()))
