"""Resources of a sweep and of single rows: what a file may say, and that no run's id depends on it."""

import pytest
from pydantic import ValidationError

from cope_sweep.config import Plan, Resources, SpecError, expand
from cope_sweep.config.loading import validate, with_overrides
from cope_sweep.config.source import parse_source
from tests.config.ablations import located

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
WIDE = """when:
  - if: {model.dim: 64}
    set: {resources.workers: 2, resources.gpus: 1}
"""


def plan_of(text: str, *assignments: str) -> Plan:
    return expand(with_overrides(validate(parse_source(text, "sizes.yaml"), "sizes"), assignments=assignments))


def test_a_condition_gives_rows_resources_and_changes_nothing_else() -> None:
    plain, plan = plan_of(TEXT), plan_of(TEXT + WIDE)
    assert [run.run_id for run in plan.runs] == [run.run_id for run in plain.runs]
    assert [(row.name, row.labels) for row in plan.rows] == [(row.name, row.labels) for row in plain.rows]
    own = Resources(cpus=3, groups=2, workers=2, gpus=1)
    assert [row.resources for row in plan.rows] == [None, None, own, own]
    assert plan.own_resources == {run.run_id: own for row in plan.rows[2:] for run in row.runs}
    assert plan.resources_of(plan.rows[0]) == plan.ablation.content.resources
    assert plain.own_resources == {}


def test_an_included_row_has_resources_of_its_own() -> None:
    plan = plan_of(TEXT + "include:\n  - {model.dim: 128, resources.cpus: 8}\n")
    assert [row.resources and row.resources.cpus for row in plan.rows] == [None] * 4 + [8]
    assert plan.rows[-1].labels == {"model.dim": "128"}


def test_resources_equal_to_those_of_the_ablation_are_no_own_ones() -> None:
    assert (
        plan_of(TEXT + WIDE.replace("resources.workers: 2, resources.gpus: 1", "resources.cpus: 3")).own_resources == {}
    )


def test_an_assignment_is_for_all_rows() -> None:
    """On a machine that does not have what the file asks for."""
    plan = plan_of(TEXT + WIDE, "resources.workers=1", "resources.gpus=0")
    assert plan.own_resources == {}
    assert plan_of(TEXT + WIDE, "resources.gpus=0").rows[-1].resources == Resources(cpus=3, groups=2, workers=2, gpus=0)


def test_a_search_suggests_rows_with_resources() -> None:
    search = "search: {kind: optuna, samples: 2}\n"
    plan = plan_of(TEXT.replace("[0, 1]", "[0]") + WIDE + search)
    assert {row.labels["model.dim"]: row.resources and row.resources.workers for row in plan.examples} == {
        "32": None,
        "64": 2,
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (TEXT.replace("train.lr:", "resources.workers:"), ("resources_axis", "sizes.yaml:7", "grid.resources.workers")),
        (TEXT + "zip:\n  - {resources.cpus: [1, 2], train.steps: [1, 2]}\n", ("resources_axis", "sizes.yaml:12", "zip[0].resources.cpus")),
        (TEXT + "when:\n  - if: {model.dim: 64}\n    grid: {resources.cpus: [1, 2]}\n", ("resources_axis", "sizes.yaml:13", "when[0].grid.resources.cpus")),
        (TEXT + WIDE.replace("workers", "worker"), ("unknown_key", "sizes.yaml:13", "resources.worker")),
        (TEXT + WIDE.replace("workers: 2", "workers: 0"), ("invalid_value", "sizes.yaml:13", "resources.workers")),
        (TEXT + WIDE.replace("workers: 2", "groups: 2"), ("resource_of_the_sweep", "sizes.yaml:13", "when[0].set.resources.groups")),
        (TEXT + "include:\n  - {model.dim: 32, train.lr: 1e-3, resources.cpus: 8}\n", ("two_resources", "sizes.yaml", "")),
    ],
)  # fmt: skip
def test_errors_name_the_line_and_the_key(text: str, expected: tuple[str, str, str]) -> None:
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
