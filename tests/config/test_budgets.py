"""Budgets in tokens: the steps that they become, and which of two budgets holds."""

import pytest

from cope_sweep.config import RunSpec, expand, with_overrides
from cope_sweep.config.loading import validate
from cope_sweep.config.source import parse_source
from tests.helpers.errors import raises

TASK = {"kind": "selective_copy", "tokens": 4, "blanks": 4}  # 12 tokens a sequence
FILE = """
title: T
base:
  task: {kind: selective_copy, tokens: 4, blanks: 4}
  train: {steps: 7, batch: 10}
metrics: [{name: in_dist/token_error}]
scales:
  small: {set: {train.tokens: 1k}}
  both: {set: {train.tokens: 1k, train.steps: 3}}
"""


def run(**train):
    return RunSpec.model_validate({"task": TASK, "train": {"batch": 10} | train})


def steps(text=FILE, **options):
    plan = expand(with_overrides(validate(parse_source(text, "t.yaml"), "t"), **options))
    return [row.runs[0].train.steps for row in plan.rows]


@pytest.mark.parametrize(
    ("tokens", "expected"), [("12k", 100), ("12.1k", 101), (1, 1), (1200.0, 10), ("1.2M", 10_000), ("2B", 16_666_667)]
)
def test_tokens_become_steps_before_the_id(tokens, expected):
    assert run().task.length("train") == 12
    found = run(tokens=tokens)
    assert (found.train.steps, found.train.tokens) == (expected, None)
    assert found.run_id == run(steps=expected).run_id
    assert found.identity == run(steps=expected).identity
    assert found.training_tokens == expected * 120


@pytest.mark.parametrize(
    ("train", "code", "key"),
    [
        ({"tokens": "many"}, "value_error", "train.tokens"),
        ({"tokens": 0}, "greater_than_equal", "train.tokens"),
        ({"tokens": 10.5}, "int_type", "train.tokens"),
        ({"tokens": "999T"}, "less_than_equal", "train.steps"),
        ({"tokens": "1k", "steps": 5}, "two_budgets", "train.tokens"),
        ({"tokens": 130, "warmup": 3}, "invalid_value", "train.warmup"),
    ],
)
def test_impossible_budgets_are_errors(train, code, key):
    with raises(code, key=key):
        run(**train)


def test_what_is_closer_to_the_command_line_holds():
    assert steps() == [7]
    assert steps(scale="small") == [9]
    assert steps(assignments=["train.tokens=2.4k"]) == [20]
    assert steps(scale="small", assignments=["train.steps=3"]) == [3]
    grid = FILE + "grid: {train.tokens: [120, 1200]}\n"
    assert steps(grid) == [1, 10]
    assert steps(grid, assignments=["train.steps=3"]) == [3]
    assert steps(FILE + "when: [{if: {}, set: {train.tokens: 240}}]\n") == [2]


@pytest.mark.parametrize(
    ("text", "options"),
    [
        (FILE.replace("steps: 7", "steps: 7, tokens: 5"), {}),
        (FILE, {"scale": "both"}),
        (FILE, {"assignments": ["train.steps=3", "train.tokens=1k"]}),
        (FILE + "grid: {train.tokens: [1k], train.steps: [3]}\n", {}),
    ],
)
def test_two_budgets_in_one_place_are_an_error(text, options):
    with raises("two_budgets"):
        steps(text, **options)


def test_a_heir_s_budget_replaces_the_inherited_one(tmp_path):
    (tmp_path / "a.yaml").write_text(FILE)
    heir = "title: H\ninherit: a\nbase: {train: {tokens: 360}}\n"
    loaded = validate(parse_source(heir, "b.yaml"), "b", folder=tmp_path)
    assert [row.runs[0].train.steps for row in expand(loaded).rows] == [3]
