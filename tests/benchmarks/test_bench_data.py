import json
from pathlib import Path

import pytest
from cope_benchmarks.data import PAPER, _made_per_s, _text, _used_per_s

from cope_sweep.spec import RunSpec, load_ablation
from cope_sweep.tasks import TASKS
from cope_sweep.train import Runtime
from tests.tiny import tiny_run

ABLATIONS = Path(__file__).parent.parent.parent / "ablations"


@pytest.mark.parametrize("kind", TASKS)
def test_what_is_measured_is_what_the_ablation_trains(kind):
    base = load_ablation(ABLATIONS / f"{kind}.yaml").content.base
    measured = RunSpec.model_validate({"task": TASKS[kind]()} | PAPER[kind])
    trained = RunSpec.model_validate_json(json.dumps(base))
    assert measured.model == trained.model
    assert measured.train.batch == trained.train.batch
    assert measured.task.length("train") == trained.task.length("train")


def test_a_measurement_is_of_real_work():
    run = tiny_run()
    assert _made_per_s(run.task, 4) > 0
    assert _used_per_s(run, Runtime(), 4) > 0


@pytest.mark.usefixtures("cache")
def test_where_there_is_no_wikitext_other_text_stands_in():
    with _text() as task:
        assert task.corpus == "stand-in"
        assert all(files.size_bytes > 100_000 for files in task.files().values())
