"""`--rows`: a part of a plan."""

import pytest

from cope_sweep.config import expand
from cope_sweep.config.rows import only_rows
from tests.helpers.ablation_texts import load
from tests.helpers.errors import raises

TEXT = """\
title: T
base:
  task: {kind: selective_copy, tokens: 2, blanks: 2, dense_blanks: 1, sparse_blanks: 4}
  model: {heads: 2, layers: 1}
grid:
  model.position: {CoPE: [cope], CoPE + RoPE: [cope, rope], none: []}
  model.dim: {small: 8, large: 16}
seeds: [0, 1]
metrics: [{name: in_dist/token_error}]
"""


def rows(*texts, text=TEXT):
    return [row.name for row in only_rows(expand(load(text)), texts).rows]


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["CoPE + RoPE · small"], ["CoPE + RoPE · small"]),
        (["none · small", "CoPE · large"], ["CoPE · large", "none · small"]),
        (["model.position=CoPE"], ["CoPE · small", "CoPE · large"]),
        (["position = CoPE + RoPE"], ["CoPE + RoPE · small", "CoPE + RoPE · large"]),
        (["model.position=cope+rope"], ["CoPE + RoPE · small", "CoPE + RoPE · large"]),
        (["model.dim>=16"], ["CoPE · large", "CoPE + RoPE · large", "none · large"]),
        (["dim>=16", "model.position!=none"], ["CoPE · large", "CoPE + RoPE · large"]),
        (["model.dim=16", "none · large", "none · small"], ["none · large"]),
        (["model.dim=large", "model.position.cope.p_max=64"], ["CoPE · large", "CoPE + RoPE · large"]),
        (["model.position.rope.base>1", "model.tied=true"], ["CoPE + RoPE · small", "CoPE + RoPE · large"]),
    ],
)
def test_rows_are_chosen_by_name_label_and_value(texts, expected):
    assert rows(*texts) == expected


def test_a_label_may_look_like_a_number():
    text = TEXT.replace("none: []", '"0.10": []')
    for condition in ("model.position=0.10", 'position="0.10"'):
        assert rows(condition, text=text) == ["0.10 · small", "0.10 · large"]
    assert rows("model.position!=0.10", text=text) == rows(*["model.position!=none"], text=TEXT)


def test_a_part_has_the_same_runs():
    plan = expand(load(TEXT))
    part = only_rows(plan, ["model.dim=8"])
    assert part.rows == plan.rows[::2]
    assert {run.run_id for run in part.runs} < {run.run_id for run in plan.runs}
    assert only_rows(plan, []) is plan


@pytest.mark.parametrize(
    ("texts", "code", "data"),
    [
        (["COPE"], "unknown_row", {"row": "COPE"}),
        (["model.dimm>=8"], "unknown_key", {"key": "model.dimm", "near": ["model.dim", "model.tied", "model.heads"]}),
        (["model.position=Cope + Rope"], "no_row", {"allowed": ["CoPE", "cope", "CoPE + RoPE", "cope+rope", "none"]}),
        (["model.dim>=17"], "no_row", {"allowed": ["small", "8", "large", "16"]}),
        (["model.position=CoPE", "model.position=none"], "no_row", {"rows": ["model.position=CoPE", "model.position=none"]}),
        (["model.position>=3"], "not_comparable", {"key": "model.position"}),
        (["model.dim>=large"], "not_comparable", {"key": "model.dim"}),
        (["model.dim>="], "invalid_condition", {"condition": "model.dim>="}),
    ],
)  # fmt: skip
def test_a_choice_of_no_row_is_an_error(texts, code, data):
    with raises(code, **data):
        rows(*texts)


def test_rows_of_a_search_are_not_known_before():
    search = "search: {kind: optuna, samples: 2, space: {train.lr: {uniform: [0.1, 1]}}}\n"
    with raises("not_with_suggestions", key="rows"):
        rows("model.dim=8", text=TEXT.replace("[0, 1]", "[0]") + search)
