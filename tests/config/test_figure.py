"""Figures as data: what a file may ask for, and what scales and `--set` leave of it."""

import pytest

from cope_sweep.config import expand, with_overrides
from cope_sweep.config.ablation import Curves, Maps, Values
from tests.config.ablations import TEXT, error_of, load

FIGURES = """\
figures:
  - {kind: curves, metrics: [in_dist/token_error, sparse/loss], source: Figure 5}
  - {kind: values, x: train.lr, metrics: [train/loss], log_x: true}
  - {kind: maps, show: gates, rows: {model.position: CoPE, train.lr: 1e-3}, mark: data, heads: [[0, 1]], seed: 1}
"""


def test_figures_are_typed():
    curves, values, maps = load(TEXT + FIGURES).content.figures
    assert curves == Curves(metrics=["in_dist/token_error", "sparse/loss"], source="Figure 5")
    assert values == Values(x="train.lr", metrics=["train/loss"], log_x=True)
    assert maps == Maps(
        show="gates", rows={"model.position": "CoPE", "train.lr": 1e-3}, mark="data", heads=[(0, 1)], seed=1
    )
    assert expand(load(TEXT + FIGURES)).rows


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("kind: curves", "kind: curve", "test.yaml:14: figures[0]: unknown kind 'curve'; did you mean 'curves'?"),
        ("sparse/loss", "sparse/los", "test.yaml:14: figures[0].metrics[1]: the task selective_copy has no metric 'sparse/los'"),
        ("x: train.lr", "x: train.lrs", "test.yaml:15: figures[1].x: no axis is called 'train.lrs'; did you mean 'train.lr'?"),
        ("train.lr: 1e-3}", "train.lr: 5e-3}", "test.yaml:16: figures[2].rows: 0 rows match, and this figure needs one row"),
        (", train.lr: 1e-3}", "}", "test.yaml:16: figures[2].rows: 2 rows match, and this figure needs one row"),
        ("train.lr: 1e-3}", "train.rl: 1e-3}", "test.yaml:16: figures[2].rows.train.rl: no axis is called 'train.rl'"),
        ("seed: 1}", "seed: 9}", "test.yaml:16: figures[2].seed: 9 is none of the seeds [0, 1]"),
        ("kind: curves, metrics: [in_dist/token_error, sparse/loss]", "kind: contexts, metric: in_dist/loss", "test.yaml:14: figures[0]: a figure of contexts needs evaluate.contexts"),
    ],
)  # fmt: skip
def test_errors(before, after, message):
    assert before in FIGURES
    assert message in error_of(TEXT + FIGURES.replace(before, after))


def test_what_is_fixed_leaves_the_figures():
    fixed = with_overrides(load(TEXT + FIGURES), assignments=["train.lr=1e-3", "seeds=[1]"])
    curves, maps = fixed.content.figures
    assert isinstance(curves, Curves)
    assert maps.rows == {"model.position": "CoPE"}
    assert expand(fixed).rows
