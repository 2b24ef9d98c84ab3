"""Resources of a sweep: what a file may say. They have one value for all rows."""

import pytest
from pydantic import ValidationError

from cope_sweep.config import Resources, SpecError, expand, with_overrides
from cope_sweep.config.loading import validate
from cope_sweep.config.source import parse_source
from tests.helpers.ablation_texts import located

TEXT = """title: Sizes
base:
  task: {kind: selective_copy, tokens: 4, blanks: 12}
  model: {heads: 2, position: [cope]}
grid:
  model.dim: [32, 64]
  train.lr: [1e-3, 1e-2]
seeds: [0, 1]
metrics: [{name: in_dist/token_error}]
resources: {cpus: 3, groups: 2}
"""


def plan_of(text, *assignments):
    return expand(with_overrides(validate(parse_source(text, "sizes.yaml"), "sizes"), assignments=assignments))


def test_resources_change_no_run():
    plan, other = plan_of(TEXT), plan_of(TEXT, "resources.workers=2")
    assert other.ablation.content.resources == Resources(cpus=3, groups=2, workers=2)
    assert [run.run_id for run in other.runs] == [run.run_id for run in plan.runs]


SPACE = "search: {kind: random, samples: 2, space: {resources.cpus: {choice: [1, 2]}}}\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (TEXT.replace("train.lr:", "resources.workers:"), ("resources_axis", "sizes.yaml:7", "grid.resources.workers")),
        (TEXT + "when:\n  - if: {model.dim: 64}\n    grid: {resources.cpus: [1, 2]}\n", ("resources_axis", "sizes.yaml:13", "when[0].grid.resources.cpus")),
        (TEXT + "when:\n  - if: {model.dim: 64}\n    set: {resources.workers: 2}\n", ("resources_axis", "sizes.yaml:13", "when[0].set.resources.workers")),
        (TEXT + SPACE, ("resources_axis", "sizes.yaml:11", "search.space.resources.cpus")),
    ],
)  # fmt: skip
def test_resources_of_some_rows_are_refused(text, expected):
    with pytest.raises(SpecError) as error:
        plan_of(text)
    assert located(error.value) == expected


@pytest.mark.parametrize(
    "bad",
    [
        {"groups": 0}, {"groups": "all"}, {"workers": 0}, {"cpus": 0}, {"cpus": 1.5}, {"gpus": -1}, {"device": "tpu"},
        {"precision": "fp16"}, {"attention": "flash"}, {"micro_batch": 0}, {"checkpoint_every_s": 0},
        {"max_failures": -1}, {"cpu": 1}, {"compile": "on"}, {"shard": "all"},
        {"gpus": 0.5, "workers": 2}, {"gpus": 1.5},
    ],
)  # fmt: skip
def test_impossible_resources_are_refused(bad):
    with pytest.raises(ValidationError):
        Resources.model_validate(bad)
