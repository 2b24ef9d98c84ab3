import json
from pathlib import Path

import pytest
from cope_benchmarks.data import PAPER, generated_per_s, trained_per_s, wikitext_or_stand_in

from cope_sweep.config import RunSpec, load_ablation, with_overrides
from cope_sweep.tasks import TASKS
from cope_sweep.train import Runtime
from tests.tiny import tiny_run

ABLATIONS = Path(__file__).parent.parent.parent / "ablations"


@pytest.mark.parametrize("kind", TASKS)
def test_the_measured_model_is_that_of_the_ablation(kind):
    ablation = load_ablation(ABLATIONS / f"{kind}.yaml")
    paper = "paper" if "paper" in ablation.content.scales else None
    base = with_overrides(ablation, scale=paper).content.base
    measured = RunSpec.model_validate({"task": TASKS[kind]()} | PAPER[kind])
    trained = RunSpec.model_validate_json(json.dumps(base))
    assert measured.model == trained.model
    assert measured.train.batch == trained.train.batch
    assert measured.task.length("train") == trained.task.length("train")


@pytest.mark.slow
def test_sequences_are_generated_and_trained_on():
    run = tiny_run()
    assert generated_per_s(run.task, 4) > 0
    assert trained_per_s(run, Runtime(), 4) > 0


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
def test_without_wikitext_other_text_is_used():
    with wikitext_or_stand_in() as task:
        assert task.corpus == "stand-in"
        assert all(files.size_bytes > 100_000 for files in task.files().values())
