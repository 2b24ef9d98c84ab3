"""What a report says was trained, from the plan."""

from cope_sweep.config import expand, load_ablation
from cope_sweep.read.reports.trained import trained_lines

TWO_TASKS = """
title: Two tasks
base:
  model: {layers: 2, dim: 16, heads: 2}
  train: {steps: 30, batch: 4, weight_decay: 0.1}
grid:
  task:
    Copy: {kind: selective_copy, tokens: 2, blanks: 3, dense_blanks: 1, sparse_blanks: 4}
    Long: {kind: selective_copy, tokens: 5, blanks: 3, dense_blanks: 1, sparse_blanks: 4}
    Flip-Flop: {kind: flip_flop, pairs: 8}
    Flip-Flop, default: {kind: flip_flop}
  train.lr: {slow: 0.001, fast: 0.25}
seeds: [3, 4]
metrics: [{name: in_dist/token_error}]
"""


def test_fields_in_which_rows_differ_have_all_their_values(tmp_path):
    (tmp_path / "two.yaml").write_text(TWO_TASKS)
    lines = list(trained_lines(expand(load_ablation(tmp_path / "two.yaml"))))
    assert {text for name, text in lines if name == "Task"} == {
        "selective_copy, tokens 2 or 5, blanks 3, dense_blanks 1, sparse_blanks 4",
        "flip_flop, pairs 8 or 256",
    }
    assert dict(lines) | {"Task": ""} == {
        "Task": "",
        "Model": "gpt2, 2 layers of width 16, 2 heads",
        "Training": "30 steps of 4 sequences, learning rate 0.001 or 0.25 (constant), adamw, weight decay 0.1",
        "Rows": "8, which differ in task, lr",
        "Seeds": "2 a row: 3, 4",
    }
